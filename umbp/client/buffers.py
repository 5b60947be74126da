"""The caller's memory as rows: one matrix, or a list of buffers.

`as_rows` checks before anything is done; `Rows` then hands whole runs of a matrix to a copy function, and single buffers one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from umbp.errors import InvalidRequest
from umbp.store.ssd_system import aligned
from umbp.types import I64, U8

NAMES = re.compile(":[^:]*:")
"""Names of fields in a buffer's format."""

Copy = Callable[[slice, U8], None]
"""(which of the given items, their rows as (k, size) uint8): copies between those rows and wherever the caller of `fill` says."""


class Rows:
    """n rows of ``size`` bytes each."""

    __slots__ = ("_list", "_matrix", "_order")

    def __init__(self, matrix: U8 | None, buffers: Sequence[U8], order: I64 | None = None) -> None:
        self._matrix = matrix
        self._list = buffers
        self._order = order

    def __len__(self) -> int:
        if self._order is not None:
            return len(self._order)
        return len(self._matrix) if self._matrix is not None else len(self._list)

    def array(self, index: int) -> U8:
        """One row, (size,)."""
        at = index if self._order is None else int(self._order[index])
        return self._matrix[at] if self._matrix is not None else self._list[at]

    def row(self, index: int) -> memoryview:
        """One row's bytes."""
        return self.array(index).data

    def block(self, start: int, stop: int) -> U8 | None:
        """Rows from ``start`` to ``stop`` as one, ((stop - start) * size,), where they lie side by side."""
        if self._matrix is None or stop <= start:
            return None
        if self._order is None:
            return self._matrix[start:stop].reshape(-1)
        order = self._order[start:stop]
        return self._matrix[order[0] : order[-1] + 1].reshape(-1) if (order[1:] - order[:-1] == 1).all() else None

    def only(self, which: I64) -> Rows:
        """These rows, numbered from 0."""
        if self._matrix is not None and self._order is None and len(which) and (which[1:] - which[:-1] == 1).all():
            return Rows(self._matrix[which[0] : which[-1] + 1], ())
        return Rows(self._matrix, self._list, which if self._order is None else self._order[which])

    def fill(self, which: I64, copy: Copy) -> None:
        """Call ``copy`` for runs of these rows (ascending), together all of them."""
        rows = which if self._order is None else self._order[which]
        if self._matrix is None:
            for at, row in enumerate(rows.tolist()):
                copy(slice(at, at + 1), self._list[row].reshape(1, -1))
            return
        if self._order is None and len(rows) == len(self._matrix):  # all, since they ascend
            copy(slice(0, len(rows)), self._matrix)
            return
        cuts = [0, *(np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1).tolist(), len(rows)]
        for low, high in pairwise(cuts):
            if high > low:
                start = int(rows[low])
                copy(slice(low, high), self._matrix[start : start + high - low])

    read = fill


def empty_rows(count: int, size: int) -> U8:
    """(count, size) uint8, zeroed, on a page's boundary: rows that direct I/O takes as they are, if ``size`` is a multiple of 512.

    In a forked child they are zeros (from 2 MiB on): see `umbp.store.ssd_system.aligned`.
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
        raise InvalidRequest(f"{count!r} is not a number of pages", field="count", example="64")
    try:
        memory = aligned(int(count) * size)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(f"no memory for {count} pages of {size} bytes ({error})", field="count", example="64") from error
    return np.frombuffer(memory, np.uint8).reshape(count, size)


def as_rows(values: Any, size: int, field: str, *, writable: bool) -> Rows:
    """The caller's argument as rows of ``size`` bytes; InvalidRequest names the item at fault and shows what is right."""
    good = f"an (n, {size}) uint8 array, or a list of buffers of {size} bytes"
    if isinstance(values, np.ndarray):
        if values.ndim == 0 or not values.flags.c_contiguous:
            raise InvalidRequest("the array is not contiguous", field=field, example=good)
        if values.dtype.hasobject:
            raise InvalidRequest("an array of Python objects has no bytes", field=field, example=good)
        if not len(values):
            return Rows(np.empty((0, size), np.uint8), ())
        if values.nbytes != len(values) * size:
            raise InvalidRequest(
                f"{values.nbytes // len(values)} bytes an item, objects of this namespace have {size}", field=field, example=good
            )
        if writable and not values.flags.writeable:
            raise InvalidRequest("the array is read-only", field=field, example=good)
        return Rows(values.reshape(len(values), -1).view(np.uint8).reshape(len(values), -1), ())
    if not isinstance(values, list | tuple):
        raise InvalidRequest(f"{type(values).__name__} is neither an array nor a list", field=field, example=good)
    return Rows(None, [_one(value, size, f"{field}[{i}]", good, writable=writable) for i, value in enumerate(values)])


def _one(value: Any, size: int, field: str, good: str, *, writable: bool) -> U8:
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # ValueError: an array of a dtype that NumPy gives no buffer of, such as dates
        raise InvalidRequest(f"{type(value).__name__} is not a buffer", field=field, example=good) from None
    if "O" in NAMES.sub("", view.format):
        raise InvalidRequest("a buffer of Python objects has no bytes", field=field, example=good)
    if not view.c_contiguous:
        raise InvalidRequest("the buffer is not contiguous", field=field, example=good)
    if view.nbytes != size:
        raise InvalidRequest(f"{view.nbytes} bytes, objects of this namespace have {size}", field=field, example=good)
    if writable and view.readonly:
        raise InvalidRequest("the buffer is read-only", field=field, example=good)
    return np.frombuffer(view.cast("B") if view.nbytes else view, np.uint8)
