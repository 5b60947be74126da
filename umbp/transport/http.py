"""Pages of peers over HTTP: received straight into the segment, several connections a peer, each page's checksum made while it is in cache.

Theory of operation. What is said on the wire stands in `umbp.transport.sending`. An order is carried out by one thread on one connection
with plain blocking calls: the kernel copies from the connection into the segment's pages (`recvmsg_into`, side by side pages as one, about
`WINDOW_BYTES` a call), the interpreter lock is not held meanwhile, and nothing is copied again. Connections are kept and used again. Pages
whose bytes match the checksum that came with the grant are said to be there while others are still on their way, a few megabytes at a time,
so that they can be used meanwhile.

A read is one order, or where it is large two at the same time, its *lanes*, which get the pages in turns, so that the first pages still
come first. One connection keeps its two ends busy in turns rather than together: two give a read more than half of what its processors
could do. Where one lane fails the read has failed: the other is cut, and what either said to be there stands.

Of an order of spans (`umbp.transport.base`) only these bytes are received, each to where it belongs. They cannot be compared with anything
here; so the receipt's answer is waited for, and the rest is the reader's.

Every wait has the order's deadline. Who is cancelled cuts the connections, which ends the threads' waits, and returns when they have.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from umbp import wire
from umbp.core.stages import Ranges, runs
from umbp.errors import DeadlineExceeded, ProtocolError, Unavailable, from_wire
from umbp.grammar import Address
from umbp.transport.base import (
    FRAME_TYPE,
    GRANT_SECONDS_MAX,
    PAGES_PATH,
    RECEIPT,
    Came,
    Held,
    Moved,
    Order,
    PartCame,
    Parted,
    Peer,
    decode_granted,
)
from umbp.transport.line import Line, pour
from umbp.types import I64, U8, U64, Mask, ReadStatus

THREADS_MAX = 32
LANES_MAX = 2
LANE_BYTES_MIN = 8 << 20  # of each: the second order costs 1.6 ms of processors, and the stream is there some 0.1 ms a MiB earlier
LANE_STEP_BYTES = 2 << 20  # pages that a lane gets in one turn
IDLE_MAX = 4  # connections kept for one peer
IDLE_PEERS_MAX = 256
WINDOW_BYTES = 1 << 20  # received, then summed while it is in cache
# Said to be there: each time half of what a lane still has to bring, but so much at least and at most. Each piece costs the pool and who
# waits for it 0.5 ms of a processor; the last one is what is still to be copied when all is there.
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 4 << 20, 16 << 20
HEAD_BYTES_MAX = 16 << 10  # of an answer's HTTP head


class HttpTransport:
    """Reads pages of peers over HTTP."""

    name = "http"
    ranged = True
    lanes_max = LANES_MAX

    def __init__(self, token: str = "", *, moves: bool = False) -> None:
        """``token``: sent with each order, where peers want one. ``moves``: see `umbp.transport.base.Order`."""
        self.token = token
        self.moves = moves
        self.received_bytes = 0
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="umbp-receive")
        self._idle: dict[Address, list[Line]] = {}

    def __repr__(self) -> str:
        return f"<HttpTransport, {sum(map(len, self._idle.values()))} idle connections, {self.received_bytes} bytes received>"

    async def read(self, peer: Peer, namespace: str, size: int, keys: U8, data: U8, offsets: I64, deadline: float, came: Came) -> Moved:
        """See `umbp.transport.base.Transport`."""
        seconds = max(0.0, min(deadline - time.monotonic(), GRANT_SECONDS_MAX))
        loop = asyncio.get_running_loop()

        def teller(pages: I64) -> Callable[[I64, U64], None]:  # from a lane's thread; the loop hears of it before it hears of the end
            def tell(which: I64, sums: U64) -> None:
                loop.call_soon_threadsafe(came, pages[which], sums)

            return tell

        lanes = _lanes(len(keys), size, self.lanes_max)
        tasks = []
        for pages in lanes:
            order = Order(peer.node, peer.boot, namespace, size, len(pages), seconds, self.name, self.moves)
            line, tell = self._line_or_none(peer.address), teller(pages)
            tasks.append(self._receive(line, peer.address, self.token, order, keys[pages], data, offsets[pages], deadline, tell))
        moved = await _carried_out(tasks, [loop.run_in_executor(self._threads, task.run) for task in tasks])
        status, sums = np.zeros(len(keys), np.uint8), np.zeros(len(keys), np.uint64)
        for pages, task, part in zip(lanes, tasks, moved, strict=True):
            status[pages], sums[pages] = part.status, part.sums
            self._keep(peer.address, task.line)
        size_bytes = sum(part.size_bytes for part in moved)
        self.received_bytes += size_bytes
        return Moved(status, sums, size_bytes)

    async def read_spans(
        self,
        peer: Peer,
        namespace: str,
        size: int,
        keys: U8,
        data: U8,
        offsets: I64,
        spans: Ranges,
        deadline: float,
        came: PartCame,
        *,
        again: bool,
    ) -> Parted:
        """See `umbp.transport.base.Transport`. One connection: who reads in parts has several reads under way."""
        seconds = max(0.0, min(deadline - time.monotonic(), GRANT_SECONDS_MAX))
        order = Order(peer.node, peer.boot, namespace, size, len(keys), seconds, "http", self.moves or again, spans)
        line = self._line_or_none(peer.address)
        task = ReceiveSpans(came, line, peer.address, self.token, order, keys, data, offsets, deadline, lambda which, sums: None)
        (moved,) = await _carried_out([task], [asyncio.get_running_loop().run_in_executor(self._threads, task.run)])
        self._keep(peer.address, task.line)
        self.received_bytes += moved.size_bytes
        versions = np.zeros(len(keys), np.uint64)
        assert task.granted is not None
        versions[task.granted.held] = task.granted.versions
        return Parted(moved.status, moved.sums, versions)

    def order_or_none(self, peer: Peer, namespace: str, size: int, keys: U8, deadline: float) -> Line | None:
        """Send an order for somebody else to receive its answer (`umbp.transport.incoming`); None where that cannot be done at once."""
        if (line := self._line_or_none(peer.address)) is None:
            return None
        seconds = max(0.0, min(deadline - time.monotonic(), GRANT_SECONDS_MAX))
        order = Order(peer.node, peer.boot, namespace, size, len(keys), seconds, self.name, self.moves)
        if line.post(_request(peer.address, self.token, order, keys)):
            return line
        line.close()
        return None

    def has_line(self, peer: Peer) -> bool:
        """Whether there is a connection for `order_or_none`."""
        return bool(self._idle.get(peer.address))

    async def connect(self, peer: Peer, deadline: float) -> None:
        """Have a connection for the next order."""
        loop = asyncio.get_running_loop()

        def dial() -> None:  # whoever asked may be gone when it is there
            loop.call_soon_threadsafe(self._keep, peer.address, Line(peer.address, deadline))

        await loop.run_in_executor(self._threads, dial)

    def took_back(self, peer: Peer, line: Line, owed: int, size_bytes: int, *, receipt: bool) -> None:
        """Who received from this connection is through, but for so many bytes; negative: it is of no more use.

        ``receipt``: it is to be sent first.
        """
        self.received_bytes += size_bytes
        line.owed = owed
        if owed >= 0 and (not receipt or line.post(RECEIPT)):
            line.forget_limits()
            self._keep(peer.address, line)
        else:
            line.cut()
            line.close()

    async def close(self) -> None:
        """Cut all connections."""
        for lines in self._idle.values():
            for line in lines:
                line.close()
        self._idle.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _receive(self, *arguments: Any) -> Receive:
        """One order, to be carried out."""
        return Receive(*arguments)

    def _line_or_none(self, address: Address) -> Line | None:
        lines = self._idle.get(address, [])
        while lines:
            if not (line := lines.pop()).broken:
                return line
            line.close()
        return None

    def _keep(self, address: Address, line: Line | None) -> None:
        if line is None:
            return
        lines = self._idle.setdefault(address, [])
        if len(lines) < IDLE_MAX:
            lines.append(line)
        else:
            line.close()
        while len(self._idle) > IDLE_PEERS_MAX:  # the peer that was first heard of goes
            for line in self._idle.pop(next(iter(self._idle))):
                line.close()


class Receive:
    """One order, carried out by a thread; `cut` ends it from another. ``line``: the connection, if it may be used again."""

    compared = True  # the checksums that `receive` answers are made of what came

    def __init__(
        self,
        line: Line | None,
        address: Address,
        token: str,
        order: Order,
        keys: U8,
        data: U8,
        offsets: I64,
        deadline: float,
        tell: Callable[[I64, U64], None],
    ) -> None:
        self.line = line
        self._address = address
        self._token = token
        self.order = order
        self._keys = keys
        self.data = data
        self._offsets = offsets
        self.deadline = deadline
        self._tell = tell
        self._lock = threading.Lock()
        self._over = False
        self._answered = False

    def run(self) -> Moved:
        """The whole of it. A kept connection that proves broken before it answered is replaced once."""
        try:
            if self.line is not None:
                try:
                    return self._order_and_receive()
                except ConnectionError:
                    if self._answered:  # pages of it may be in use already: nothing may be written there once more
                        raise
                self.drop()
            with self._lock:
                if self._over:
                    raise ConnectionAbortedError("cancelled")
            line = Line(self._address, self.deadline)
            with self._lock:
                self.line = line
                if self._over:
                    raise ConnectionAbortedError("cancelled")
            return self._order_and_receive()
        except BaseException:
            self.drop()
            raise

    def cut(self) -> None:
        """End it as soon as can be."""
        with self._lock:
            self._over = True
            if self.line is not None:
                self.line.cut()

    def drop(self) -> None:
        """Close the connection, if there is one."""
        with self._lock:
            if self.line is not None:
                self.line.close()
                self.line = None

    def _order_and_receive(self) -> Moved:
        line = self.line
        assert line is not None
        line.rest(self.deadline)
        line.send(_request(self._address, self._token, self.order, self._keys), self.deadline)
        rest = self._answer(line)
        self._answered = True
        granted, rest = self._granted(line, rest)
        offsets = self._offsets[granted.held]
        sums = self.receive(line, rest, granted, offsets)
        line.send(RECEIPT, self.deadline)
        line.owed = len(offsets)
        if self.compared and granted.sums.all() and (sums == granted.sums).all():
            # These are the bytes that the peer has under these keys, whatever became of them there since: what it says to the receipt
            # can add nothing, and is read before the connection is used again.
            whole = np.ones(len(offsets), bool)
        else:
            whole = np.frombuffer(line.rest(self.deadline), np.uint8) != 0
        return self._moved(granted, whole, sums)

    def _moved(self, granted: Held, whole: Mask, sums: U64) -> Moved:
        held = granted.held
        status, made = np.full(len(held), ReadStatus.MISS, np.uint8), np.zeros(len(held), np.uint64)
        status[held] = granted.codes(whole, sums)
        made[held] = sums
        each = sum(stop - start for start, stop in self.order.spans) or self.order.object_bytes
        return Moved(status, made, len(sums) * each)

    def _answer(self, line: Line) -> bytes:
        """What came after the HTTP head of the answer. Raises what the peer refused with."""
        data = b""
        while (rest := after_head(data)) is None:
            data += line.some(self.deadline)
        return rest

    def _granted(self, line: Line, rest: bytes) -> tuple[Held, bytes]:
        """What the peer holds, and what came of the pages with it."""
        while len(rest) < wire.PREFIX.size:
            rest += line.some(self.deadline)
        size = wire.frame_bytes(rest[: wire.PREFIX.size])
        while len(rest) < size:
            rest += line.some(self.deadline)
        return decode_granted(rest[:size], self.order.n, spans=bool(self.order.spans)), rest[size:]

    def receive(self, line: Line, first: bytes, granted: Held, offsets: I64) -> U64:
        """The pages, each to its place; their checksums. ``first``: what has come of them already."""
        size, data, digest = self.order.object_bytes, self.data.data, xxhash.xxh3_64_intdigest
        sums, told, held = np.zeros(len(offsets), np.uint64), 0, np.flatnonzero(granted.held)
        step = max(1, WINDOW_BYTES // size)
        for start in range(0, len(offsets), step):
            part = offsets[start : start + step].tolist()
            views: deque[memoryview] = deque()
            at = end = -1
            for offset in part:  # pages that lie side by side are one view
                if offset == end:
                    views.pop()
                else:
                    at = offset
                end = offset + size
                views.append(data[at:end])
            if first:
                first = pour(first, views)
            line.fill(views, self.deadline)
            for place, offset in enumerate(part, start):
                sums[place] = digest(data[offset : offset + size]) or 1
            done = start + len(part)
            half = (len(offsets) - told) * size // 2
            if (done - told) * size >= min(max(half, PIECE_BYTES_MIN), PIECE_BYTES_MAX) or done == len(offsets):
                right = told + np.flatnonzero(sums[told:done] == granted.sums[told:done])
                self._tell(held[right], sums[right])
                told = done
        return sums


class ReceiveSpans(Receive):
    """One order of spans. ``came`` is told of them; ``granted``: what the peer said, when it is over."""

    compared = False

    def __init__(self, came: PartCame, *order: Any) -> None:
        super().__init__(*order)
        self.granted: Held | None = None
        self._came = came

    def receive(self, line: Line, first: bytes, granted: Held, offsets: I64) -> U64:
        """The spans, each to its place; the checksums that the peer has."""
        spans, data, held = self.order.spans, self.data.data, np.flatnonzero(granted.held).tolist()
        step = max(1, WINDOW_BYTES // sum(stop - start for start, stop in spans))
        for start in range(0, len(offsets), step):
            starts, lengths = runs(offsets[start : start + step], spans)
            views = deque(data[at : at + length] for at, length in zip(starts.tolist(), lengths.tolist(), strict=True))
            if first:
                first = pour(first, views)
            line.fill(views, self.deadline)
            for page in held[start : start + step]:
                for span in spans:
                    self._came(page, *span)
        self.granted = granted
        return granted.sums


def after_head(data: bytes) -> bytes | None:
    """What came of an answer after its HTTP head; None if more of it is to come first. Raises what the peer refused with."""
    if (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > HEAD_BYTES_MAX:
            raise ProtocolError("the head of the answer has no end")
        return None
    lines = data[:end].decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ProtocolError("the peer does not speak HTTP")
    fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines[1:])}
    rest = data[end + 4 :]
    if words[1] == "200" and fields.get("content-type") == FRAME_TYPE:
        return rest
    length = fields.get("content-length", "0")
    size = min(int(length) if length.isdigit() else 0, HEAD_BYTES_MAX)
    if len(rest) < size:
        return None
    raise _refusal(words[1], rest[:size])


def _request(address: Address, token: str, order: Order, keys: U8) -> bytes:
    """An order as it is sent, but for the receipt."""
    frame = wire.encode(order, keys)
    head = [f"POST {PAGES_PATH} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: {FRAME_TYPE}\r\nContent-Length: {len(frame) + 1}"]
    if token:
        head.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*head, "", ""]).encode() + frame


def _lanes(pages: int, size: int, lanes_max: int) -> list[I64]:
    """Which pages of a read go by which connection, (m,) each, ascending: they are dealt in turns of some `LANE_STEP_BYTES`."""
    lanes = max(1, min(lanes_max, pages * size // LANE_BYTES_MIN))
    turn = np.arange(pages) // max(1, LANE_STEP_BYTES // size)
    return [np.flatnonzero(turn % lanes == lane) for lane in range(lanes)] if turn[-1:].any() else [np.arange(pages)]


async def _carried_out(tasks: list[Receive], works: list[asyncio.Future[Moved]]) -> list[Moved]:
    """What came of each lane, when all have ended. Where one fails, or this is cancelled, the others are cut and no connection is kept."""
    left: set[asyncio.Future[Moved]] = set(works)
    cause: BaseException | None = None
    while left:
        try:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for work in done if (error := _error_or_none(work)) is not None]
            cause = cause or next(iter(errors), None)
        except asyncio.CancelledError as error:
            cause = error
        if cause is not None:
            for task in tasks:
                task.cut()
    if cause is not None:
        for task in tasks:  # one may have ended well just before
            task.drop()
        raise cause
    return [work.result() for work in works]


def _error_or_none(work: asyncio.Future[Moved]) -> BaseException | None:
    return ConnectionAbortedError("this transport is being closed") if work.cancelled() else work.exception()


def _refusal(status: str, body: bytes) -> Exception:
    try:
        said = json.loads(body)
        return from_wire(str(said["code"]), str(said["detail"]))
    except (ValueError, KeyError, TypeError):
        if status == "504":
            return DeadlineExceeded("the peer was too slow")
        return Unavailable(f"the peer answered {status}")
