"""Serving pages over HTTP: one POST an order, its pages by `sendfile` straight out of the segment.

    reader                                       this pool
    POST /v1/pages, frame Order + keys   ---->   lease
                                         <----   200, frame Granted + held, sums, offsets; then the pages, one after the other,
                                                 or the bytes of each that were asked for
    one byte: the receipt                ---->   versions once more, lease ends
                                         <----   a byte a page: 1 if it was the same all the time

The receipt is the last byte of the request's body, which HTTP allows to come after the answer has begun; so an order is one request and
connections are kept. The pages of a ``how`` other than "http" travel otherwise: then the answer has none, and the rest is the same.

A connection whose first line asks for pages is taken out of the event loop and served by a thread of its own with plain blocking calls:
`sendfile` waits in the kernel, and what a slow reader holds up is its own thread, until its order's time is over. The pool's state is
touched in the loop alone, twice an order.

A reader on this very host gets copies instead. There is no network card that takes pages by reference; to hand them on one by one, 4 KiB
each, and copy them at the other end one by one too, costs more than to copy runs of them into the kernel's large buffers: 39 ms of both
processors for 64 MiB, against 28 ms.

Bounded: connections, seconds between and in requests, bytes of a head and an order. Who may ask: as everywhere (`umbp.admin.auth`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import cast

import numpy as np

from umbp import wire
from umbp.admin.auth import check_token, is_our_host
from umbp.errors import InvalidRequest, ProtocolError, UmbpError, Unauthorized
from umbp.grammar import Address, quoted
from umbp.transport.base import FRAME_TYPE, GRANT_SECONDS_MAX, PAGES_PATH, RECEIPT, Grant, Granted, Order, Shelf, Window, decode_order
from umbp.transport.line import take
from umbp.types import U8

log = logging.getLogger("umbp.transport")
CONNECTIONS_MAX = 256
IDLE_SECONDS_MAX = 60.0
HEAD_SECONDS_MAX = 2.0
HEAD_BYTES_MAX = 16 << 10
ORDER_BYTES_MAX = 64 << 10  # 1,024 keys are half of that
COPY_BYTES = 1 << 20  # at a time, for a reader on this host: between two looks at the order's time
RUNS_MAX = 512  # of one call
FIRST_LINE = f"POST {PAGES_PATH} ".encode()


class PageServer:
    """Answers orders. ``token`` and ``listening`` are the configured ones."""

    def __init__(self, shelf: Shelf, *, token: str, listening: Address, windows: Mapping[str, Window] | None = None) -> None:
        """``windows``: for orders of another ``how`` than "http", by its name."""
        self.shelf = shelf
        self.windows = dict(windows or {})
        self.token = token
        self.listening = listening
        self.sent_bytes = 0
        self.file = os.open(shelf.path, os.O_RDONLY | os.O_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._open: dict[Caller, threading.Thread] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<PageServer, {len(self._open)} connections, {self.sent_bytes} bytes sent>"

    def door(self) -> asyncio.Protocol:
        """For a connection whose first bytes are `FIRST_LINE`."""
        return Handover(self)

    def take(self, connection: socket.socket, start: bytes) -> None:
        """Serve this connection, of which these bytes were read already."""
        caller = Caller(self, connection, start)
        thread = threading.Thread(target=self._run, args=(caller,), name="umbp-send", daemon=True)
        with self._lock:
            if self._closed or len(self._open) >= CONNECTIONS_MAX:
                connection.close()
                return
            self._open[caller] = thread
        thread.start()

    async def close(self) -> None:
        """Cut all connections and wait for their threads."""
        with self._lock:
            self._closed = True
            threads = dict(self._open)
        for caller in threads:
            caller.cut()
        for thread in threads.values():
            await asyncio.to_thread(thread.join)
        os.close(self.file)

    # -- from the threads --------------------------------------------------------------------------------------------------------------

    def grant(self, order: Order, keys: U8, deadline: float) -> Grant:
        """See `Shelf.grant`; whoever is too late to take it has it given back."""
        future = asyncio.run_coroutine_threadsafe(self.shelf.grant(order, keys, deadline), self._loop)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if not future.cancel():  # it came just now
                with contextlib.suppress(Exception):
                    self.end(future.result())
            raise

    def end(self, grant: Grant) -> U8:
        """The lease ends; a byte a page: 1 if it was the same until now."""
        return asyncio.run_coroutine_threadsafe(self._end(grant), self._loop).result()

    async def _end(self, grant: Grant) -> U8:
        same = self.shelf.unchanged(grant)
        self.shelf.give_back(grant)
        return same.astype(np.uint8)

    def _run(self, caller: Caller) -> None:
        try:
            caller.serve()
        except (OSError, TimeoutError) as error:
            log.debug("a reader's connection ended: %s", error)
        except Exception:  # our own fault: this reader is cut off, the others go on
            log.exception("an order could not be served")
        finally:
            caller.close()
            with self._lock:
                del self._open[caller]


class Handover(asyncio.Protocol):
    """Takes a connection out of the event loop, with what was read of it."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing is read any more from here on."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """The start, once: the loop's descriptor goes, a copy of it stays."""
        transport, self._transport = self._transport, None
        if transport is not None:
            kept = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            transport.abort()
            kept.setblocking(True)
            self._server.take(kept, data)


class Caller:
    """A reader's connection, served by one thread."""

    def __init__(self, server: PageServer, connection: socket.socket, start: bytes) -> None:
        self._server = server
        self._socket = connection
        self._rest = start
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        """Order after order, until the reader closes the connection or does not keep its times."""
        while True:
            try:
                order, keys, deadline = self._order()
            except UmbpError as error:
                self._refuse(error)
                return
            except ConnectionAbortedError:  # between two orders
                return
            try:
                window = self._window(order)
                grant = self._server.grant(order, keys, deadline)
            except UmbpError as error:
                self._refuse(error)
                return
            try:
                with window.open() if window else contextlib.nullcontext():
                    self._send(grant, order, window, deadline)
                    if self._exactly(1, deadline) != RECEIPT:
                        raise ConnectionResetError("what follows the order is no receipt")
            except BaseException:
                self._server.end(grant)
                raise
            self._all(self._server.end(grant).tobytes(), deadline)

    def cut(self) -> None:
        """From another thread: what waits here ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """At once."""
        self._socket.close()

    # -- a request ---------------------------------------------------------------------------------------------------------------------

    def _order(self) -> tuple[Order, U8, float]:
        """The next order, and until when it is to be carried out."""
        idle_until = time.monotonic() + IDLE_SECONDS_MAX
        if not self._rest:
            try:
                self._rest = self._some(idle_until)
            except (OSError, TimeoutError):
                raise ConnectionAbortedError from None
        until = time.monotonic() + HEAD_SECONDS_MAX
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > HEAD_BYTES_MAX:
                raise ProtocolError("the head of the request has no end")
            self._rest += self._some(until)
        head, self._rest = self._rest[:end].decode("latin-1"), self._rest[end + 4 :]
        line, *lines = head.split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        if not line.startswith(FIRST_LINE.decode()):
            raise ProtocolError(f"this connection is for POST {PAGES_PATH} only")
        if self._server.token:
            check_token(fields.get("authorization", ""), self._server.token)
        elif not is_our_host(fields.get("host", ""), self._server.listening):
            raise Unauthorized(f"{quoted(fields.get('host', ''))} is not a name of this server", field="Host")
        if fields.get("content-type") != FRAME_TYPE:
            raise InvalidRequest(f"the body must be {FRAME_TYPE}", field="Content-Type", example=FRAME_TYPE)
        prefix = self._exactly(wire.PREFIX.size, until)
        size = wire.frame_bytes(prefix)
        if size > ORDER_BYTES_MAX or fields.get("content-length") != str(size + 1):
            raise ProtocolError(f"an order of {size} bytes in a body of {fields.get('content-length')}: a receipt of one byte follows it")
        order, keys = decode_order(prefix + self._exactly(size - len(prefix), until))
        return order, keys, time.monotonic() + min(order.seconds, GRANT_SECONDS_MAX)

    def _window(self, order: Order) -> Window | None:
        """How the pages travel; None: by this connection."""
        if order.how == "http":
            return None
        window = self._server.windows.get(order.how)
        if window is None:
            known = ", ".join(["http", *self._server.windows])
            raise InvalidRequest(f"pages do not travel by {quoted(order.how)} from here, only by {known}", field="how", example="http")
        return window

    def _send(self, grant: Grant, order: Order, window: Window | None, deadline: float) -> None:
        versions = [grant.versions.astype("<u8")] if order.spans else []
        arrays = (grant.held.view(np.uint8), grant.sums.astype("<u8"), grant.offsets.astype("<i8"), *versions)
        agent, base = (window.agent, window.base) if window else ("", 0)
        frame = wire.encode(Granted(len(grant.held), len(grant.offsets), agent, base), *arrays)
        runs = [] if window else grant.runs(order.spans)
        pages_bytes = sum(size for _, size in runs)
        length = len(frame) + pages_bytes + len(grant.offsets)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {FRAME_TYPE}\r\nContent-Length: {length}\r\n\r\n"
        self._all(head.encode() + frame, deadline, more=pages_bytes > 0)
        if pages_bytes:
            if self._socket.getpeername()[0] == self._socket.getsockname()[0]:  # on this host
                self._copy(runs, deadline)
            else:
                for offset, size in runs:
                    self._sendfile(self._server.shelf.data_at + offset, size, deadline)
            self._server.sent_bytes += pages_bytes

    def _refuse(self, error: UmbpError) -> None:
        """A problem document, and the connection is closed."""
        body = json.dumps({"status": error.http_status, "code": error.code, "detail": str(error), "field": error.field}).encode()
        head = f"HTTP/1.1 {error.http_status} Refused\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
        with contextlib.suppress(OSError, TimeoutError):
            self._all(head.encode() + b"Connection: close\r\n\r\n" + body, time.monotonic() + HEAD_SECONDS_MAX)
            self._socket.shutdown(socket.SHUT_WR)

    # -- plain blocking calls that keep a deadline -------------------------------------------------------------------------------------

    def _some(self, deadline: float) -> bytes:
        self._limit(socket.SO_RCVTIMEO, deadline)
        with _in_time():
            data = self._socket.recv(ORDER_BYTES_MAX)
        if not data:
            raise ConnectionResetError("the reader closed the connection")
        return data

    def _exactly(self, count: int, deadline: float) -> bytes:
        while len(self._rest) < count:
            self._rest += self._some(deadline)
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    def _all(self, data: bytes, deadline: float, *, more: bool = False) -> None:
        self._limit(socket.SO_SNDTIMEO, deadline)
        with _in_time():
            self._socket.sendall(data, socket.MSG_MORE if more else 0)

    def _sendfile(self, offset: int, size: int, deadline: float) -> None:
        end = offset + size
        while offset < end:
            self._limit(socket.SO_SNDTIMEO, deadline)
            with _in_time():
                sent = os.sendfile(self._socket.fileno(), self._server.file, offset, end - offset)
            if not sent:
                raise ConnectionResetError("the segment's file is shorter than its pages")
            offset += sent

    def _copy(self, runs: list[tuple[int, int]], deadline: float) -> None:
        data = self._server.shelf.data.data
        views: deque[memoryview] = deque()
        ahead = 0
        for offset, size in runs:
            for at in range(offset, offset + size, COPY_BYTES):
                views.append(data[at : min(at + COPY_BYTES, offset + size)])
                ahead += len(views[-1])
                if ahead >= COPY_BYTES or len(views) == RUNS_MAX:
                    self._send_views(views, deadline)
                    ahead = 0
        self._send_views(views, deadline)

    def _send_views(self, views: deque[memoryview], deadline: float) -> None:
        while views:
            self._limit(socket.SO_SNDTIMEO, deadline)
            with _in_time():
                sent = self._socket.sendmsg(views)
            take(views, sent)

    def _limit(self, option: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the order's time is over")
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(max(1, int(left * 1e6)), 1_000_000)))


@contextlib.contextmanager
def _in_time() -> Generator[None]:
    try:
        yield
    except BlockingIOError:
        raise TimeoutError("the reader is too slow") from None
