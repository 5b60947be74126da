"""Moving rows between the segment and planes on a CPU: `Route` finds once per batch what every layer can then use.

A page's bytes of one layer are one row on either side: in the segment at ``offset[i] + object_offset``, in the plane at row ``slot[i]``.
Pages are taken in the order of their offsets and cut into runs of even distance (pages that were put together are one run): the run's rows
are then one strided array, and one indexed store moves them to any slots, or one indexed load from them. What is in no run moves row by
row if rows are large, else through an index of small items. NumPy lets the interpreter lock go in all of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from umbp.types import I64, U8

RUN_PAGES_MIN = 3  # shorter runs are left to the scattered path
ROW_BYTES_LARGE = 4096  # from here on a call a row (2 us) costs less than the second copy of the path by items
CHUNK_BYTES = 256 << 10  # of the path by items: what it takes and then stores stays in the L2 cache
ITEM_BYTES_MIN = 4


class Route:
    """Offsets and slots of one batch, both (n,) int64 and each distinct; ``load`` and ``store`` are byte-exact for rows of any size."""

    __slots__ = ("_runs", "_scattered", "offsets", "slots")

    def __init__(self, offsets: I64, slots: I64) -> None:
        order = np.argsort(offsets, kind="stable")
        self.offsets = offsets[order]
        self.slots = slots[order]
        self._runs: list[tuple[int, int, int]] = []  # (first, last + 1, distance of two objects)
        n = len(offsets)
        step = np.diff(self.offsets)
        cuts = [0, *(np.flatnonzero(step[1:] != step[:-1]) + 1).tolist(), n - 1] if n > 1 else []
        scattered = np.ones(n, bool)
        last = 0
        for low, high in pairwise(cuts):  # pages low .. high have one distance; a page between two runs belongs to the first
            low = max(low, last)
            if high + 1 - low >= RUN_PAGES_MIN:
                self._runs.append((low, high + 1, int(step[low])))
                scattered[low : high + 1] = False
                last = high + 1
        self._scattered = np.flatnonzero(scattered)

    def __repr__(self) -> str:
        return f"<Route of {len(self.offsets)} pages: {len(self._runs)} runs, {len(self._scattered)} scattered>"

    def __len__(self) -> int:
        return len(self.offsets)

    def split(self, parts: int) -> list[Route]:
        """This route in up to ``parts`` pieces of about equal length, each for a thread of its own."""
        cuts = [len(self) * part // parts for part in range(parts + 1)]
        return [Route(self.offsets[low:high], self.slots[low:high]) for low, high in pairwise(cuts) if high > low]

    def load(self, data: U8, object_offset: int, plane: U8) -> None:
        """``plane[slots[i]] = data[offsets[i] + object_offset :][:nbytes]`` for all i; ``plane`` is (pages, nbytes)."""
        nbytes = plane.shape[1]
        rows = plane.view(f"V{nbytes}").reshape(-1)
        for low, high, step in self._runs:
            rows[self.slots[low:high]] = self._run(data, low, high, step, object_offset, nbytes)
        if nbytes >= ROW_BYTES_LARGE:
            for start, slot in self._pairs(object_offset):
                np.copyto(plane[slot], data[start : start + nbytes])
            return
        for part in self._chunks(nbytes):
            starts = self.offsets[part] + object_offset
            unit = _unit(starts, nbytes)
            if unit >= ITEM_BYTES_MIN:
                taken = np.take(_items(data, unit), (starts // unit)[:, None] + np.arange(nbytes // unit), mode="clip")
                rows[self.slots[part]] = taken.view(f"V{nbytes}").reshape(-1)
            else:
                for start, slot in zip(starts.tolist(), self.slots[part].tolist(), strict=True):
                    plane[slot] = data[start : start + nbytes]

    def store(self, data: U8, object_offset: int, plane: U8) -> None:
        """``data[offsets[i] + object_offset :][:nbytes] = plane[slots[i]]`` for all i."""
        nbytes = plane.shape[1]
        rows = plane.view(f"V{nbytes}").reshape(-1)
        page = max(1, CHUNK_BYTES // nbytes)
        for low, high, step in self._runs:
            target = self._run(data, low, high, step, object_offset, nbytes)
            for at in range(0, high - low, page):  # an indexed load makes a copy: a small one
                part = slice(at, min(at + page, high - low))
                target[part] = rows[self.slots[low:high][part]]
        if nbytes >= ROW_BYTES_LARGE:
            for start, slot in self._pairs(object_offset):
                np.copyto(data[start : start + nbytes], plane[slot])
            return
        for part_ids in self._chunks(nbytes):
            starts = self.offsets[part_ids] + object_offset
            unit = _unit(starts, nbytes)
            if unit >= ITEM_BYTES_MIN:
                index = (starts // unit)[:, None] + np.arange(nbytes // unit)
                np.put(_items(data, unit), index, rows[self.slots[part_ids]].view(f"V{unit}"), mode="clip")
            else:
                for start, slot in zip(starts.tolist(), self.slots[part_ids].tolist(), strict=True):
                    data[start : start + nbytes] = plane[slot]

    def _run(self, data: U8, low: int, high: int, step: int, object_offset: int, nbytes: int) -> Any:
        """The run's rows in the segment as one array of items of ``nbytes``, ``step`` bytes apart."""
        start = int(self.offsets[low]) + object_offset
        assert 0 <= start <= len(data) - ((high - low - 1) * step + nbytes), "a page reaches past the segment"
        return np.ndarray((high - low,), f"V{nbytes}", data.data, offset=start, strides=(step,))

    def _pairs(self, object_offset: int) -> list[tuple[int, int]]:
        which = self._scattered
        return list(zip((self.offsets[which] + object_offset).tolist(), self.slots[which].tolist(), strict=True))

    def _chunks(self, nbytes: int) -> list[I64]:
        step = max(1, CHUNK_BYTES // nbytes)
        return [self._scattered[at : at + step] for at in range(0, len(self._scattered), step)]


def _unit(starts: I64, nbytes: int) -> int:
    """The largest item size that divides all starts and the row."""
    return int(np.gcd(np.gcd.reduce(starts), nbytes))


def _items(data: U8, unit: int) -> Any:
    return data[: len(data) // unit * unit].view(f"V{unit}")
