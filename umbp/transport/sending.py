"""Serving pages over HTTP: one POST an order, its pages by `sendfile` straight out of the segment.

    reader                                       this pool
    POST /v1/pages, frame Order + keys   ---->   lease
                                         <----   200, frame Granted + held, sums, offsets; then the pages, one after the other,
                                                 or the bytes of each that were asked for
    one byte: the receipt                ---->   versions once more, lease ends
                                         <----   a byte a page: 1 if it was the same all the time

The receipt is the last byte of the request's body, which HTTP allows to come after the answer has begun; so an order is one request and
connections are kept. The pages of a ``how`` other than "http" travel otherwise: then the answer has none, and the rest is the same.

A connection whose first line asks for pages is taken away from its asyncio transport, and is a task of the loop from then on:

    idle --order--> granted --head, and what fits of the pages--> (a thread: the rest) --receipt--> versions, lease ends --> idle

What is short is done in the loop, where the pool's state is: a thread would be woken twice for each order, and a batch of small pages would
wait for that as long as it takes to send. The head and the first `FIRST_BYTES` go from there too, as far as the kernel takes them at once;
that is what the reader has to do while a thread is woken for the rest. The thread makes plain blocking calls: `sendfile` waits in the
kernel, and what a slow reader holds up is a thread of its own, until its order's time is over.

A reader on this very host gets copies instead. There is no network card that takes pages by reference; to hand them on one by one, 4 KiB
each, and copy them at the other end one by one too, costs more than to copy runs of them into the kernel's large buffers: 39 ms of both
processors for 64 MiB, against 28 ms. Nor is there a link to be found out about: where the system's congestion control paces what it sends,
as BBR does, such a connection gets `LOCAL_CONGESTION` instead, if it may (8 MiB leave in 1.8 ms then, not in 2.8).

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
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import cast

import numpy as np

from umbp import wire
from umbp.admin.auth import check_token, is_our_host
from umbp.errors import InvalidRequest, ProtocolError, UmbpError, Unauthorized
from umbp.grammar import Address, quoted
from umbp.transport.base import FRAME_TYPE, GRANT_SECONDS_MAX, PAGES_PATH, RECEIPT, Grant, Granted, Order, Shelf, Window, decode_order
from umbp.transport.line import take
from umbp.types import U8
from umbp.waiting import ended

log = logging.getLogger("umbp.transport")
CONNECTIONS_MAX = 256
IDLE_SECONDS_MAX = 60.0
HEAD_SECONDS_MAX = 2.0
HEAD_BYTES_MAX = 16 << 10
ORDER_BYTES_MAX = 64 << 10  # 1,024 keys are half of that
FIRST_BYTES = 384 << 10  # 0.1 ms of the loop; what the reader of it does meanwhile takes as long as waking a thread
LOCAL_CONGESTION = b"reno"  # is in every kernel, and anybody may choose it
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
        self.threads = ThreadPoolExecutor(CONNECTIONS_MAX, thread_name_prefix="umbp-send")
        self._open: dict[Caller, asyncio.Task[None]] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<PageServer, {len(self._open)} connections, {self.sent_bytes} bytes sent>"

    def door(self) -> asyncio.Protocol:
        """For a connection whose first bytes are `FIRST_LINE`."""
        return Handover(self)

    def take(self, connection: socket.socket, start: bytes) -> None:
        """Serve this connection, of which these bytes were read already."""
        if self._closed or len(self._open) >= CONNECTIONS_MAX:
            connection.close()
            return
        caller = Caller(self, connection, start)
        self._open[caller] = asyncio.get_running_loop().create_task(self._run(caller))

    async def close(self) -> None:
        """Cut all connections and wait until nothing is sent any more."""
        self._closed = True
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for caller in self._open:  # of which the task had not begun
            caller.close()
        self.threads.shutdown()
        os.close(self.file)

    async def grant(self, order: Order, keys: U8, deadline: float) -> Grant:
        """See `Shelf.grant`. TimeoutError where that takes too long."""
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await self.shelf.grant(order, keys, deadline)

    def end(self, grant: Grant) -> U8:
        """The lease ends; a byte a page: 1 if it was the same until now."""
        same = self.shelf.unchanged(grant)
        self.shelf.give_back(grant)
        return same.astype(np.uint8)

    async def _run(self, caller: Caller) -> None:
        try:
            await caller.serve()
        except (OSError, TimeoutError) as error:
            log.debug("a reader's connection ended: %s", error)
        except Exception:  # our own fault: this reader is cut off, the others go on
            log.exception("an order could not be served")
        finally:
            caller.close()
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
    """A reader's connection, served by one task."""

    def __init__(self, server: PageServer, connection: socket.socket, start: bytes) -> None:
        self._server = server
        self._socket = connection
        self._rest = start
        self._accepted = b"", ""  # the last head that was good, and how long its body is
        self._loop = asyncio.get_running_loop()
        self._near = connection.getpeername()[0] == connection.getsockname()[0]  # on this host
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._near:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION)

    def __repr__(self) -> str:
        return f"<Caller on {'this' if self._near else 'another'} host>"

    async def serve(self) -> None:
        """Order after order, until the reader closes the connection or does not keep its times."""
        while True:
            try:
                order, keys, deadline = await self._order()
                window = self._window(order)
                grant = await self._server.grant(order, keys, deadline)
            except UmbpError as error:
                await self._refuse(error)
                return
            except ConnectionAbortedError:  # between two orders
                return
            try:
                async with self._shown(window):
                    await self._send(grant, order, window, deadline)
                    if await self._exactly(1, deadline) != RECEIPT:
                        raise ConnectionResetError("what follows the order is no receipt")
            except BaseException:
                self._server.end(grant)
                raise
            await self._all(self._server.end(grant).tobytes(), deadline)

    def close(self) -> None:
        """At once."""
        self._socket.close()

    # -- a request ---------------------------------------------------------------------------------------------------------------------

    async def _order(self) -> tuple[Order, U8, float]:
        """The next order, and until when it is to be carried out."""
        idle_until = time.monotonic() + IDLE_SECONDS_MAX
        if not self._rest:
            try:
                self._rest = await self._some(idle_until)
            except (OSError, TimeoutError):
                raise ConnectionAbortedError from None
        until = time.monotonic() + HEAD_SECONDS_MAX
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > HEAD_BYTES_MAX:
                raise ProtocolError("the head of the request has no end")
            self._rest += await self._some(until)
        head, self._rest = self._rest[:end], self._rest[end + 4 :]
        if head != self._accepted[0]:  # else it is as good as the one before
            self._accepted = head, self._checked(head)
        length = self._accepted[1]
        prefix = await self._exactly(wire.PREFIX.size, until)
        size = wire.frame_bytes(prefix)
        if size > ORDER_BYTES_MAX or length != str(size + 1):
            raise ProtocolError(f"an order of {size} bytes in a body of {length}: a receipt of one byte follows it")
        order, keys = decode_order(prefix + await self._exactly(size - len(prefix), until))
        return order, keys, time.monotonic() + min(order.seconds, GRANT_SECONDS_MAX)

    def _checked(self, head: bytes) -> str:
        """How long the body is that follows this head, if whoever sends it may ask."""
        line, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        if not line.startswith(FIRST_LINE.decode()):
            raise ProtocolError(f"this connection is for POST {PAGES_PATH} only")
        if self._server.token:
            check_token(fields.get("authorization", ""), self._server.token)
        elif not is_our_host(fields.get("host", ""), self._server.listening):
            raise Unauthorized(f"{quoted(fields.get('host', ''))} is not a name of this server", field="Host")
        if fields.get("content-type") != FRAME_TYPE:
            raise InvalidRequest(f"the body must be {FRAME_TYPE}", field="Content-Type", example=FRAME_TYPE)
        return fields.get("content-length", "")

    def _window(self, order: Order) -> Window | None:
        """How the pages travel; None: by this connection."""
        if order.how == "http":
            return None
        window = self._server.windows.get(order.how)
        if window is None:
            known = ", ".join(["http", *self._server.windows])
            raise InvalidRequest(f"pages do not travel by {quoted(order.how)} from here, only by {known}", field="how", example="http")
        return window

    @contextlib.asynccontextmanager
    async def _shown(self, window: Window | None) -> AsyncGenerator[None]:
        """Hold a window open, which may have to wait for others at both ends: a thread's matter."""
        if window is None:
            yield
            return
        read = threading.Event()

        def show() -> None:
            with window.open():
                read.wait()

        work = self._loop.run_in_executor(self._server.threads, show)
        try:
            yield
        finally:
            read.set()
            await _ended(work)

    async def _send(self, grant: Grant, order: Order, window: Window | None, deadline: float) -> None:
        versions = [grant.versions.astype("<u8")] if order.spans else []
        arrays = (grant.held.view(np.uint8), grant.sums.astype("<u8"), grant.offsets.astype("<i8"), *versions)
        agent, base = (window.agent, window.base) if window else ("", 0)
        frame = wire.encode(Granted(len(grant.held), len(grant.offsets), agent, base), *arrays)
        runs = [] if window else grant.runs(order.spans)
        pages_bytes = sum(size for _, size in runs)
        length = len(frame) + pages_bytes + len(grant.offsets)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {FRAME_TYPE}\r\nContent-Length: {length}\r\n\r\n".encode() + frame
        if not runs:
            await self._all(head, deadline)
        elif self._near:
            await self._copy(head, self._pieces(runs), deadline)
        else:
            await self._all(head, deadline, more=True)
            await self._in_thread(lambda: self._sendfiles(runs, deadline))
        self._server.sent_bytes += pages_bytes

    async def _refuse(self, error: UmbpError) -> None:
        """A problem document, and the connection is closed."""
        body = json.dumps({"status": error.http_status, "code": error.code, "detail": str(error), "field": error.field}).encode()
        head = f"HTTP/1.1 {error.http_status} Refused\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
        with contextlib.suppress(OSError, TimeoutError):
            await self._all(head.encode() + b"Connection: close\r\n\r\n" + body, time.monotonic() + HEAD_SECONDS_MAX)
            self._socket.shutdown(socket.SHUT_WR)

    # -- in the loop: what the kernel has or takes at once, else until the deadline ------------------------------------------------------

    async def _some(self, deadline: float) -> bytes:
        while True:
            try:
                data = self._socket.recv(ORDER_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._readable(deadline)
                continue
            if not data:
                raise ConnectionResetError("the reader closed the connection")
            return data

    async def _readable(self, deadline: float) -> None:
        ready = self._loop.create_future()
        self._loop.add_reader(self._socket.fileno(), _set, ready)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await ready
        finally:
            self._loop.remove_reader(self._socket.fileno())

    async def _exactly(self, count: int, deadline: float) -> bytes:
        while len(self._rest) < count:
            self._rest += await self._some(deadline)
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    async def _all(self, data: bytes, deadline: float, *, more: bool = False) -> None:
        flags = socket.MSG_MORE if more else 0
        views = deque([memoryview(data)])
        self._send_now(views, flags)
        if views:
            await self._in_thread(lambda: self._send_views(views, deadline, flags))

    async def _copy(self, head: bytes, pieces: Iterator[memoryview], deadline: float) -> None:
        """Head and pages: the first of them at once, the rest by a thread."""
        views, left = deque([memoryview(head)]), FIRST_BYTES
        for piece in pieces:
            views.append(piece[:left])
            if len(piece) > left or len(views) == RUNS_MAX:
                pieces = chain([piece[left:]], pieces)
                break
            left -= len(piece)
        self._send_now(views)

        def send_rest() -> None:
            ahead = sum(map(len, views))
            for piece in pieces:
                views.append(piece)
                ahead += len(piece)
                if ahead >= COPY_BYTES or len(views) == RUNS_MAX:
                    self._send_views(views, deadline)
                    ahead = 0
            self._send_views(views, deadline)

        await self._in_thread(send_rest)

    def _pieces(self, runs: list[tuple[int, int]]) -> Iterator[memoryview]:
        """The bytes of these runs of the segment, some at a time."""
        data = self._server.shelf.data.data
        for offset, size in runs:
            for at in range(offset, offset + size, COPY_BYTES):
                yield data[at : min(at + COPY_BYTES, offset + size)]

    def _send_now(self, views: deque[memoryview], flags: int = 0) -> None:
        """Send what the kernel takes of these without waiting, and forget it."""
        with contextlib.suppress(BlockingIOError):
            take(views, self._socket.sendmsg(views, [], flags | socket.MSG_DONTWAIT))

    async def _in_thread(self, function: Callable[[], None]) -> None:
        """Run it where it may wait. Who is cancelled meanwhile cuts the connection, on which it waits."""
        self._socket.setblocking(True)  # a loop that waits for a descriptor makes it one that never waits
        work = self._loop.run_in_executor(self._server.threads, function)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            await _ended(work)
            raise

    # -- in a thread: plain blocking calls that keep a deadline --------------------------------------------------------------------------

    def _sendfiles(self, runs: list[tuple[int, int]], deadline: float) -> None:
        for start, size in runs:
            offset = self._server.shelf.data_at + start
            end = offset + size
            while offset < end:
                self._limit(deadline)
                with _in_time():
                    sent = os.sendfile(self._socket.fileno(), self._server.file, offset, end - offset)
                if not sent:
                    raise ConnectionResetError("the segment's file is shorter than its pages")
                offset += sent

    def _send_views(self, views: deque[memoryview], deadline: float, flags: int = 0) -> None:
        while views:
            self._limit(deadline)
            with _in_time():
                sent = self._socket.sendmsg(views, [], flags)
            take(views, sent)

    def _limit(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the order's time is over")
        limit = struct.pack("@ll", *divmod(max(1, int(left * 1e6)), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _ended(work: asyncio.Future[None]) -> None:
    """Wait until it is over, however it ends. Who is cancelled meanwhile is when it is."""
    cancelled = await ended(work)
    work.exception()
    if cancelled is not None:
        raise cancelled


@contextlib.contextmanager
def _in_time() -> Generator[None]:
    try:
        yield
    except BlockingIOError:
        raise TimeoutError("the reader is too slow") from None
