"""Copying pages between the segment and the caller's memory: few native calls a batch, on two processors where that helps.

A batch is an array of offsets and a matrix of rows. Adjacent pages become one copy; scattered small ones become one `take`, or one
assignment by index, over the segment seen as items of the largest size that divides all offsets and the page (a NumPy call a page costs
2 us, a third of the copy of a 64 KiB page). NumPy lets the interpreter lock go in all of these, which is why rows of bytes are assigned:
`put`, and assignment of items of a void type, hold it all the time.

Batches of `SPLIT_BYTES` and more are cut into pieces that the caller and other threads take in turns: one core does not use up the
memory's bandwidth (1.3 to 2 times more with two). Where a thread comes late, because its core is busy, the others do its share; the
caller waits for nothing but the pieces that others are in the middle of.
"""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np

from umbp.types import I64, U8

SPLIT_BYTES = 4 << 20  # below it the hand-over (50 us, and more if a processor sleeps) costs more than it gains
PIECE_BYTES_MIN = 2 << 20  # 200 us of copying beside 10 us of Python, in which threads wait for each other
PIECES_MAX = 16
ITEM_BYTES_MIN = 256  # smaller items make the one call slower than a call a page
PAGE_BYTES_ALONE = 256 << 10  # the copy of such a page takes 10 times as long as its call
RUNS_MAX = 4  # up to this many adjacent runs are copied one by one
THREADS_MAX = 4

_processors = len(os.sched_getaffinity(0))
_threads = max(1, min(THREADS_MAX, _processors))


class _Batch:
    """Pieces of one copy, done by whoever comes."""

    __slots__ = ("_claims", "_done", "_move", "_pieces")

    def __init__(self, move: Any, pieces: list[tuple[U8, I64, U8]]) -> None:
        self._move = move
        self._pieces = pieces
        self._claims: list[None] = []  # one before a helper takes a piece, and for each of them an answer in `_done`
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()

    def _take(self) -> tuple[U8, I64, U8] | None:
        try:
            return self._pieces.pop()  # one step of the interpreter: no piece is taken twice
        except IndexError:
            return None

    def help(self) -> None:
        """Do pieces until none is left: a helper's part."""
        answer: BaseException | None = None
        while self._pieces:
            self._claims.append(None)
            try:
                if (piece := self._take()) is not None:
                    self._move(*piece)
            except Exception as error:  # noqa: BLE001 - the caller raises it
                answer = error
            self._done.put(answer)

    def finish(self) -> None:
        """The caller's part. Nobody touches the memory any more when this returns or raises."""
        try:
            while (piece := self._take()) is not None:
                self._move(*piece)
        finally:
            self._pieces.clear()
            answers = [self._done.get() for _ in range(len(self._claims))]
        for error in answers:
            if error is not None:
                raise error


class _Helpers:
    """Threads that help with batches."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Batch] = SimpleQueue()
        for number in range(_threads - 1):
            threading.Thread(target=self._run, name=f"umbp-copy-{number}", daemon=True).start()

    def ask(self, batch: _Batch, helpers: int) -> None:
        """Whoever has time may help, so many at most; nobody has to."""
        for _ in range(helpers):
            self._asked.put(batch)

    def _run(self) -> None:
        while True:
            self._asked.get().help()


_helpers: _Helpers | None = None


def _forget_helpers() -> None:
    global _helpers
    _helpers = None


os.register_at_fork(after_in_child=_forget_helpers)


def gather(data: U8, offsets: I64, out: U8) -> None:
    """Copy objects from the segment: ``out[i] = data[offsets[i] : offsets[i] + size]``. ``out`` is (n, size), rows contiguous."""
    _split(_gather, data, offsets, out, _threads)


def scatter(data: U8, offsets: I64, values: U8, *, beside: bool = False) -> None:
    """Copy objects into the segment: ``data[offsets[i] : offsets[i] + size] = values[i]``. ``values`` is (n, size), rows contiguous.

    ``beside``: the pool works for this caller meanwhile, and needs a processor.
    """
    _split(_scatter, data, offsets, values, min(_threads, _processors - beside))


def _split(move: Any, data: U8, offsets: I64, rows: U8, threads: int) -> None:
    global _helpers
    n, size = rows.shape
    if n > 1 and rows.flags.c_contiguous and (offsets[1:] - offsets[:-1] == size).all():
        offsets, rows = offsets[:1], rows.reshape(1, -1)  # adjacent on both sides: one page n times as large
        n, size = rows.shape
    if rows.nbytes < SPLIT_BYTES or threads <= 1:
        move(data, offsets, rows)
        return
    parts = max(1, min(PIECES_MAX, rows.nbytes // PIECE_BYTES_MIN))
    if n >= parts:
        cuts = [n * part // parts for part in range(parts + 1)]
        pieces = [(data, offsets[low:high], rows[low:high]) for low, high in pairwise(cuts)]
    else:  # few large pages: each in parts
        parts = -(-parts // n)
        cuts = [size * part // parts // 4096 * 4096 for part in range(parts)] + [size]
        pieces = [(data, offsets[at : at + 1] + low, rows[at : at + 1, low:high]) for at in range(n) for low, high in pairwise(cuts)]
    batch = _Batch(move, pieces)
    if _helpers is None:
        _helpers = _Helpers()
    _helpers.ask(batch, threads - 1)
    batch.finish()


def _runs(offsets: I64, size: int) -> list[int]:
    """Index of the first object of each run of adjacent objects, and n at the end."""
    return [0, *(np.flatnonzero(offsets[1:] - offsets[:-1] != size) + 1).tolist(), len(offsets)]


def _gather(data: U8, offsets: I64, out: U8) -> None:
    n, size = out.shape
    if n == 1:
        start = int(offsets[0])
        np.copyto(out[0], data[start : start + size])
        return
    if n == 0:
        return
    cuts = _runs(offsets, size)
    if len(cuts) - 1 <= RUNS_MAX and out.flags.c_contiguous:
        for low, high in pairwise(cuts):
            start = int(offsets[low])
            np.copyto(out[low:high], data[start : start + (high - low) * size].reshape(high - low, size))
        return
    unit = _unit(offsets, size)
    if unit >= ITEM_BYTES_MIN and size < PAGE_BYTES_ALONE and out.flags.c_contiguous:
        items = data[: len(data) // unit * unit].view(f"V{unit}")
        np.take(items, _indices(offsets, size, unit), out=out.reshape(-1).view(f"V{unit}"), mode="clip")
        return
    for i, start in enumerate(offsets.tolist()):
        np.copyto(out[i], data[start : start + size])


def _scatter(data: U8, offsets: I64, values: U8) -> None:
    n, size = values.shape
    if n == 1:
        start = int(offsets[0])
        np.copyto(data[start : start + size], values[0])
        return
    if n == 0:
        return
    cuts = _runs(offsets, size)
    if len(cuts) - 1 <= RUNS_MAX:
        for low, high in pairwise(cuts):
            start = int(offsets[low])
            np.copyto(data[start : start + (high - low) * size].reshape(high - low, size), values[low:high])
        return
    unit = _unit(offsets, size)
    if unit >= ITEM_BYTES_MIN and size < PAGE_BYTES_ALONE and values.flags.c_contiguous:
        data[: len(data) // unit * unit].reshape(-1, unit)[_indices(offsets, size, unit)] = values.reshape(-1, unit)
        return
    for i, start in enumerate(offsets.tolist()):
        np.copyto(data[start : start + size], values[i])


def _unit(offsets: I64, size: int) -> int:
    return int(np.gcd(np.gcd.reduce(offsets), size))


def _indices(offsets: I64, size: int, unit: int) -> I64:
    first = offsets // unit
    if size == unit:
        return first
    indices: I64 = (first[:, None] + np.arange(size // unit)).reshape(-1)
    return indices
