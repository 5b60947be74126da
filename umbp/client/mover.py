"""Copying pages between the segment and the caller's memory: one native call for a whole batch.

A batch is an array of offsets and a matrix of rows. Adjacent pages become one copy; scattered ones become one `take` or `put` over the
segment seen as items of the largest size that divides all offsets and the page (a NumPy call a page costs 2 us, a third of the copy of a
64 KiB page). NumPy lets the interpreter lock go in all of these. Batches of `SPLIT_BYTES` and more are split over threads: one core does
not use up the memory's bandwidth (1.3 to 2 times more with two).
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from umbp.types import I64, U8

SPLIT_BYTES = 1 << 20  # below it the hand-over (50 us) costs more than it gains
ITEM_BYTES_MIN = 256  # smaller items make the one call slower than a call a page
RUNS_MAX = 4  # up to this many adjacent runs are copied one by one
THREADS_MAX = 4

_threads = max(1, min(THREADS_MAX, len(os.sched_getaffinity(0))))
_pool: ThreadPoolExecutor | None = None


def _executor() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(_threads - 1, thread_name_prefix="umbp-copy")
    return _pool


def _forget_executor() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_executor)


def gather(data: U8, offsets: I64, out: U8) -> None:
    """Copy objects from the segment: ``out[i] = data[offsets[i] : offsets[i] + size]``. ``out`` is (n, size), rows contiguous."""
    _split(_gather, data, offsets, out)


def scatter(data: U8, offsets: I64, values: U8) -> None:
    """Copy objects into the segment: ``data[offsets[i] : offsets[i] + size] = values[i]``. ``values`` is (n, size), rows contiguous."""
    _split(_scatter, data, offsets, values)


def _split(move: Any, data: U8, offsets: I64, rows: U8) -> None:
    total = rows.nbytes
    if total < SPLIT_BYTES or _threads == 1:
        move(data, offsets, rows)
        return
    if len(offsets) >= _threads:
        cuts = [len(offsets) * part // _threads for part in range(_threads + 1)]
        jobs: list[tuple[Any, Any]] = [(offsets[low:high], rows[low:high]) for low, high in pairwise(cuts)]
    elif len(offsets) == 1:
        size = rows.shape[1]
        cuts = [size * part // _threads // 4096 * 4096 for part in range(_threads)] + [size]
        jobs = [(offsets + low, rows[:, low:high]) for low, high in pairwise(cuts)]
    else:
        move(data, offsets, rows)
        return
    futures: list[Future[None]] = [_executor().submit(move, data, *job) for job in jobs[1:]]
    try:
        move(data, *jobs[0])
    finally:
        for future in futures:  # also after an error: nobody may be writing when this returns
            future.result()


def _runs(offsets: I64, size: int) -> I64:
    """Index of the first object of each run of adjacent objects, and n at the end."""
    runs: I64 = np.r_[0, np.flatnonzero(np.diff(offsets) != size) + 1, len(offsets)]
    return runs


def _gather(data: U8, offsets: I64, out: U8) -> None:
    n, size = out.shape
    if n == 0:
        return
    cuts = _runs(offsets, size)
    if len(cuts) - 1 <= RUNS_MAX and (out.flags.c_contiguous or n == 1):
        for low, high in pairwise(cuts.tolist()):
            start = int(offsets[low])
            np.copyto(out[low:high], data[start : start + (high - low) * size].reshape(high - low, size))
        return
    unit = _unit(offsets, size)
    if unit >= ITEM_BYTES_MIN and out.flags.c_contiguous:
        np.take(_items(data, unit), _indices(offsets, size, unit), out=out.reshape(-1).view(f"V{unit}"), mode="clip")
        return
    for i, start in enumerate(offsets.tolist()):
        np.copyto(out[i], data[start : start + size])


def _scatter(data: U8, offsets: I64, values: U8) -> None:
    n, size = values.shape
    if n == 0:
        return
    cuts = _runs(offsets, size)
    if len(cuts) - 1 <= RUNS_MAX:
        for low, high in pairwise(cuts.tolist()):
            start = int(offsets[low])
            np.copyto(data[start : start + (high - low) * size].reshape(high - low, size), values[low:high])
        return
    unit = _unit(offsets, size)
    if unit >= ITEM_BYTES_MIN and values.flags.c_contiguous:
        np.put(_items(data, unit), _indices(offsets, size, unit), values.reshape(-1).view(f"V{unit}"), mode="clip")
        return
    for i, start in enumerate(offsets.tolist()):
        np.copyto(data[start : start + size], values[i])


def _unit(offsets: I64, size: int) -> int:
    return int(np.gcd(np.gcd.reduce(offsets), size))


def _items(data: U8, unit: int) -> Any:
    return data[: len(data) // unit * unit].view(f"V{unit}")


def _indices(offsets: I64, size: int, unit: int) -> I64:
    first = offsets // unit
    if size == unit:
        return first
    indices: I64 = (first[:, None] + np.arange(size // unit)).reshape(-1)
    return indices
