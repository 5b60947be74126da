"""Pages of a peer received by the process that wants them: from a connection on which somebody else has sent the order.

Theory of operation. A pool may speak for its clients, not lend them its token or choose what is read: so it sends the order, and hands the
connection over (`umbp.pool.errands`). From then on this end is the client's: the answer's head, the pages, the receipt. What is said on the
wire stands in `umbp.transport.sending`.

    head --granted--> pages, a window after the other --all received--> receipt --> over

A *window* is as much as stays in a processor's cache (`WINDOW_BYTES`): it is received into the segment, summed there, and copied on to the
caller, so that memory sees each page written twice and read never. A page that has no place in the segment is received where the caller
wants it. A page is right if its checksum is the one that came with the grant; where the peer has none, if the peer says to the receipt that
it was the same all the time.

`Incoming.step` receives for a limited time and keeps its place, so that whoever drives it can look up in between: nothing here waits longer
than that. A thread of its own is not needed, and one connection is as fast as two: on two processors the peer has the other one.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Protocol

import numpy as np
import xxhash

from umbp import wire
from umbp.transport.base import RECEIPT, Held, decode_granted
from umbp.transport.http import after_head
from umbp.transport.line import Line, pour
from umbp.types import I64, U8, ReadStatus

WINDOW_BYTES = 256 << 10  # of it a second-level cache holds the received bytes and those of the copy


class Target(Protocol):
    """The caller's memory for pages: `umbp.client.buffers.Rows`."""

    def array(self, index: int) -> U8:
        """That for one page, (size,)."""
        ...

    def block(self, start: int, stop: int) -> U8 | None:
        """That for these pages as one, where it lies side by side."""
        ...


class Incoming:
    """One order of ``len(offsets)`` pages of ``size`` bytes, on the connection ``fd``, which is closed with it.

    ``offsets``: where each goes in ``data``; -1: nowhere but to the caller. ``rows``: the caller's memory. ``skip``: bytes of the answer
    before this one, for which nobody has waited.
    ``status`` (n,) uint8 of `ReadStatus`, FAILED until it is known; ``sums`` (n,) uint64 of what came; ``owed``: bytes of the answer that
    are still to come when it is over, -1 before.
    """

    def __init__(self, fd: int, data: U8, offsets: I64, size: int, rows: Target, deadline: float, skip: int) -> None:
        self.status = np.full(len(offsets), ReadStatus.FAILED.value, np.uint8)
        self.sums = np.zeros(len(offsets), np.uint64)
        self.answered = self.over = False
        self.owed = -1
        self._line = Line.of(socket.socket(fileno=fd))
        self._data, self._offsets, self._size, self._rows, self._deadline = data, offsets, size, rows, deadline
        self._first = b""  # what came beside the head
        self._skip = skip
        self._granted: Held | None = None
        self._held: list[int] = []
        self._at = 0  # of the held pages, how many have been received before this window,
        self._part = 0  # and bytes of the page after them
        self._now: list[int] = []  # pages of the window,
        self._block: U8 | None = None  # and their bytes in the segment, where they lie side by side
        self._digest = xxhash.xxh3_64()  # of these bytes
        self._views: deque[memoryview] | None = None  # of the window that is being received
        self._answer: bytearray | None = None  # to the receipt, where it is waited for

    def __repr__(self) -> str:
        return f"<Incoming {self._at} of {len(self._held)} pages{', over' if self.over else ''}>"

    @property
    def sends(self) -> bool:
        """Whether the peer has sent a page, or something that waits here: if time is over then, it is slow or this end is, and not gone."""
        return bool((self.status == ReadStatus.HIT.value).any()) or self._line.has_some

    def step(self, seconds: float) -> bool:
        """Receive for about so long, or until it is `over`: that is returned. OSError, TimeoutError, or what the peer refused with."""
        until = time.monotonic() + seconds
        while not self.over:
            if (now := time.monotonic()) >= self._deadline:
                raise TimeoutError("the peer did not send all of it in time")
            if now >= until:
                break
            try:
                self._on(min(until, self._deadline))
            except TimeoutError:
                if time.monotonic() < until:
                    raise
        return self.over

    def close(self) -> None:
        """Let go of this end."""
        self._line.close()

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def _on(self, until: float) -> None:
        """One step further. TimeoutError if it has to be taken up again."""
        if self._granted is None:
            self._first += self._line.some(until)
            self._open()
        elif self._at < len(self._held):
            if self._views is None:
                self._views = self._window()
                if self._first:
                    self._first = pour(self._first, self._views)
            self._line.fill(self._views, until)
            self._views = None
            self._use()
        elif self._answer is None:
            self._receipt(until)
        else:
            assert self._views is not None
            self._line.fill(self._views, until)
            self._whole(self._answer)

    def _open(self) -> None:
        """The head and the grant, if all of them is there."""
        if len(self._first) < self._skip:
            return
        rest = after_head(self._first[self._skip :])
        if rest is None or len(rest) < wire.PREFIX.size or len(rest) < (size := wire.frame_bytes(rest[: wire.PREFIX.size])):
            return
        self._granted, self._first = decode_granted(rest[:size], len(self._offsets)), rest[size:]
        self.answered = True
        self.status[~self._granted.held] = ReadStatus.MISS.value
        self._held = np.flatnonzero(self._granted.held).tolist()

    def _window(self) -> deque[memoryview]:
        """Where the next bytes go: those of a page in parts, or of some pages. Side by side they are one."""
        if self._size > WINDOW_BYTES:
            page, low = self._held[self._at], self._part
            self._now, self._block = [page], None
            return deque([self._place(page)[low : low + WINDOW_BYTES].data])
        self._now = self._held[self._at : self._at + WINDOW_BYTES // self._size]
        first = int(self._offsets[self._now[0]])
        if first >= 0 and (self._offsets[self._now] == first + self._size * np.arange(len(self._now))).all():
            self._block = self._data[first : first + self._size * len(self._now)]
            return deque([self._block.data])
        self._block = None
        return deque(self._place(page).data for page in self._now)

    def _place(self, page: int) -> U8:
        """Where the bytes of a page are received."""
        offset = int(self._offsets[page])
        return self._rows.array(page) if offset < 0 else self._data[offset : offset + self._size]

    def _use(self) -> None:
        """Sum what came, and copy it on."""
        if self._size > WINDOW_BYTES:
            page, low = self._now[0], self._part
            part = self._place(page)[low : low + WINDOW_BYTES]
            self._digest.update(part.data)
            if self._offsets[page] >= 0:
                np.copyto(self._rows.array(page)[low : low + WINDOW_BYTES], part)
            self._part += len(part)
            if self._part == self._size:
                self._summed(page, self._digest.intdigest())
                self._part = 0
                self._digest.reset()
            return
        digest, size, block, now = xxhash.xxh3_64_intdigest, self._size, self._block, self._now
        if block is not None and now[-1] - now[0] == len(now) - 1 and (target := self._rows.block(now[0], now[-1] + 1)) is not None:
            np.copyto(target, block)  # one call for all: one a page would take a third as long again
            view = block.data
            for at, page in enumerate(now):
                self._summed(page, digest(view[at * size : (at + 1) * size]))
            return
        for page in now:
            place = self._place(page)
            self._summed(page, digest(place.data))
            if self._offsets[page] >= 0:
                np.copyto(self._rows.array(page), place)

    def _summed(self, page: int, made: int) -> None:
        assert self._granted is not None
        self.sums[page] = made = made or 1
        if int(self._granted.sums[self._at]) == made:
            self.status[page] = ReadStatus.HIT.value
        self._at += 1

    def _receipt(self, until: float) -> None:
        assert self._granted is not None
        self._line.send(RECEIPT, until)
        if (self.status[self._held] == ReadStatus.HIT.value).all():
            # These are the bytes that the peer has under these keys, whatever became of them there since: its answer can add nothing.
            self.owed, self.over = len(self._held), True
        else:
            self._answer = bytearray(len(self._held))
            self._views = deque([memoryview(self._answer)])

    def _whole(self, same: bytearray) -> None:
        """The peer's answer to the receipt."""
        assert self._granted is not None
        held = np.array(self._held, np.int64)
        self.status[held] = self._granted.codes(np.frombuffer(same, np.uint8) != 0, self.sums[held])
        self.owed, self.over = 0, True
