r"""Pages of a peer received by the process that wants them: from a connection on which somebody else has sent the order.

Theory of operation. A pool may speak for its clients, not lend them its token or choose what is read: so it sends the order, and hands the
connection over (`umbp.pool.errands`). From then on this end is the client's: the answer's head, the pages, the receipt. What is said on the
wire stands in `umbp.transport.sending`.

    head --granted--> pages, a window after the other --all received, all right--> over: the pool sends the receipt, and waits for nothing
                                                      \--some are not--> receipt --what the peer says to it--> over

A *window* is as much as stays in a processor's cache (`WINDOW_BYTES`): it is received into the segment, summed there, and copied on to the
caller, so that memory sees each page written twice and read never. A page that has no place in the segment is received where the caller
wants it. A page is right if its checksum is the one that came with the grant; where the peer has none, if the peer says to the receipt that
it was the same all the time. The windows are laid out once, when the grant is there; between two of them there is no more to do than to
receive, to copy and to sum, as the peer is faster than that.

`Incoming.step` receives for a limited time and keeps its place, so that whoever drives it can look up in between: nothing here waits longer
than that. A thread of its own is not needed, and one connection is as fast as two: on two processors the peer has the other one.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from umbp import wire
from umbp.transport.base import RECEIPT, Held, decode_granted
from umbp.transport.http import after_head
from umbp.transport.line import Line, pour
from umbp.types import I64, U8, U64, ReadStatus

WINDOW_BYTES = 256 << 10  # of it a second-level cache holds the received bytes and those of the copy


class Target(Protocol):
    """The caller's memory for pages: `umbp.client.buffers.Rows`."""

    def array(self, index: int) -> U8:
        """That for one page, (size,)."""
        ...

    def block(self, start: int, stop: int) -> U8 | None:
        """That for these pages as one, where it lies side by side."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Pages that are received together; ``block``: their bytes in the segment, where they lie side by side. Large pages come alone."""

    pages: list[int]
    block: U8 | None


class Incoming:
    """One order of ``len(offsets)`` pages of ``size`` bytes, on the connection ``fd``, which is closed with it.

    ``offsets``: where each goes in ``data``; -1: nowhere but to the caller. ``rows``: the caller's memory. ``skip``: bytes of the answer
    before this one, for which nobody has waited.
    ``owed``: bytes of the answer that are still to come when it is over, -1 before; ``receipt``: whether the receipt is still to be sent.
    """

    def __init__(self, fd: int, data: U8, offsets: I64, size: int, rows: Target, deadline: float, skip: int) -> None:
        self.answered = self.over = self.receipt = False
        self.owed = -1
        self._line = Line.of(socket.socket(fileno=fd))
        self._data, self._offsets, self._size, self._rows, self._deadline = data, offsets, size, rows, deadline
        self._first = b""  # what came beside the head
        self._skip = skip
        self._granted: Held | None = None
        self._held: list[int] = []
        self._made: list[int] = []  # checksums of the first of them, as they came
        self._windows: deque[Window] = deque()  # that are still to come
        self._part = 0  # bytes of the first of them that are there, where it is a page in parts
        self._digest = xxhash.xxh3_64()  # of these bytes
        self._views: deque[memoryview] | None = None  # of the window that is being received
        self._answer: bytearray | None = None  # to the receipt, where it is waited for
        self._codes: U8 | None = None  # what that says of the held pages

    def __repr__(self) -> str:
        return f"<Incoming {len(self._made)} of {len(self._held)} pages{', over' if self.over else ''}>"

    @property
    def sums(self) -> U64:
        """Of what came, (n,); 0 elsewhere."""
        sums = np.zeros(len(self._offsets), np.uint64)
        sums[self._held[: len(self._made)]] = self._made
        return sums

    @property
    def status(self) -> U8:
        """`ReadStatus` of each page by now, (n,): FAILED until it is known."""
        status = np.full(len(self._offsets), ReadStatus.FAILED.value, np.uint8)
        if self._granted is not None:
            status[~self._granted.held] = ReadStatus.MISS.value
            came = len(self._made)
            right = self._granted.sums[:came] == np.array(self._made, np.uint64)
            codes = np.where(right, ReadStatus.HIT.value, ReadStatus.FAILED.value)
            status[self._held[:came]] = codes if self._codes is None else self._codes
        return status

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
        elif self._windows:
            window = self._windows[0]
            if self._views is None:
                self._views = self._targets(window)
                if self._first:
                    self._first = pour(self._first, self._views)
            self._line.fill(self._views, until)
            self._views = None
            self._use(window)
        elif self._answer is None:
            self._end(until)
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
        held = np.flatnonzero(self._granted.held)
        self._held, offsets = held.tolist(), self._offsets[held]
        if self._size > WINDOW_BYTES:
            self._windows.extend(Window([page], None) for page in self._held)
            return
        count = WINDOW_BYTES // self._size
        apart = np.cumsum(np.diff(offsets, prepend=offsets[:1]) != self._size).tolist()  # grows where a page is not beside the one before
        for start in range(0, len(held), count):
            pages, first = self._held[start : start + count], int(offsets[start])
            side_by_side = first >= 0 and apart[start + len(pages) - 1] == apart[start]
            self._windows.append(Window(pages, self._data[first : first + self._size * len(pages)] if side_by_side else None))

    def _targets(self, window: Window) -> deque[memoryview]:
        """Where the next bytes go: those of a page in parts, or of some pages. Side by side they are one."""
        if self._size > WINDOW_BYTES:
            return deque([self._place(window.pages[0])[self._part : self._part + WINDOW_BYTES].data])
        return deque([window.block.data] if window.block is not None else [self._place(page).data for page in window.pages])

    def _place(self, page: int) -> U8:
        """Where the bytes of a page are received."""
        offset = int(self._offsets[page])
        return self._rows.array(page) if offset < 0 else self._data[offset : offset + self._size]

    def _use(self, window: Window) -> None:
        """Sum what came, and copy it on."""
        if self._size > WINDOW_BYTES:
            self._use_part(window.pages[0])
            return
        self._windows.popleft()
        digest, size, pages, block = xxhash.xxh3_64_intdigest, self._size, window.pages, window.block
        if (
            block is not None
            and pages[-1] - pages[0] == len(pages) - 1
            and (target := self._rows.block(pages[0], pages[-1] + 1)) is not None
        ):
            np.copyto(target, block)  # one call for all: one a page would take a third as long again
            view = block.data
            self._made += [digest(view[at : at + size]) or 1 for at in range(0, len(view), size)]
            return
        for page in pages:
            place = self._place(page)
            self._made.append(digest(place.data) or 1)
            if self._offsets[page] >= 0:
                np.copyto(self._rows.array(page), place)

    def _use_part(self, page: int) -> None:
        low = self._part
        part = self._place(page)[low : low + WINDOW_BYTES]
        self._digest.update(part.data)
        if self._offsets[page] >= 0:
            np.copyto(self._rows.array(page)[low : low + WINDOW_BYTES], part)
        self._part += len(part)
        if self._part == self._size:
            self._windows.popleft()
            self._made.append(self._digest.intdigest() or 1)
            self._part = 0
            self._digest.reset()

    def _end(self, until: float) -> None:
        assert self._granted is not None
        if np.array_equal(self._granted.sums, np.array(self._made, np.uint64)):
            # These are the bytes that the peer has under these keys, whatever became of them there since: its answer can add nothing.
            self.owed, self.over, self.receipt = len(self._held), True, True
        else:
            self._line.send(RECEIPT, until)
            self._answer = bytearray(len(self._held))
            self._views = deque([memoryview(self._answer)])

    def _whole(self, same: bytearray) -> None:
        """The peer's answer to the receipt."""
        assert self._granted is not None
        self._codes = self._granted.codes(np.frombuffer(same, np.uint8) != 0, np.array(self._made, np.uint64))
        self.owed, self.over = 0, True
