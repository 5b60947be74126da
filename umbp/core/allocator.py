"""Where an object goes in the segment: a free-run allocator with bins, coalescing at once.

Theory of operation. The free space is a set of runs [start, end), no two adjacent. Three dicts: by start, by end, and bins by size (four
per power of two), each bin an insertion-ordered dict of starts. Sizes are rounded to `granule` (256 bytes below 16 KiB, a page of 4 KiB
above: direct disk I/O needs page alignment, and 20 % is the most it wastes). There are no size classes that memory could be bound to.

What it costs: one or two dict operations a *run*, not an object: a batch of equal objects is cut from one run if there is one, and freed
objects are merged by sorting first. Pages that were put together lie together, are evicted together, and so keep runs long.

When bytes suffice but no run does, `core.room` evicts a window of neighbours; the allocator itself moves nothing.

A segment may be cut into *regions*, one a NUMA node, or several that make levels (`core.levels`). No run and no object crosses from one to
the next, each has bins of its own, and an allocation says from which it would rather be. It is served level by level from the first one:
from the region that is wanted, then from the others of the level, the one that is filled least for its size and weight first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise

import numpy as np

from umbp.errors import SegmentError
from umbp.types import I64

ANYWHERE = -1  # no region in particular
REGION_GRANULE = 2 << 20
SMALL_GRANULE = 256
PAGE_GRANULE = 4096
PAGE_FROM = 16384
BIN_SCAN_MAX = 16  # runs looked at in the bin of just this size before a larger bin is taken


def granule(size_bytes: int) -> int:
    """Alignment and rounding of an object of this size."""
    return SMALL_GRANULE if size_bytes < PAGE_FROM else PAGE_GRANULE


def rounded(size_bytes: int) -> int:
    """Bytes of the segment that an object of this size takes."""
    unit = granule(size_bytes)
    return -(-size_bytes // unit) * unit


def rounded_all(sizes: I64) -> I64:
    """`rounded` of each, (n,)."""
    units = np.where(sizes < PAGE_FROM, SMALL_GRANULE, PAGE_GRANULE)
    lengths: I64 = -(-sizes // units) * units
    return lengths


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the memory: its bytes, 0 for as many as each of the others has; the level it is of; its weight among those of the level."""

    size_bytes: int = 0
    level: int = 0
    weight: float = 1.0


WHOLE = (Region(),)


def region_starts(capacity_bytes: int, regions: Sequence[Region]) -> I64:
    """Where each region begins; the last one has what is left over. ValueError if a region would have no room for anything."""
    if len(regions) == 1:
        return np.zeros(1, np.int64)
    length = capacity_bytes // len(regions) // REGION_GRANULE * REGION_GRANULE
    starts = np.cumsum([0, *(region.size_bytes or length for region in regions[:-1])], dtype=np.int64)
    if not length or starts[-1] >= capacity_bytes:
        raise ValueError(f"{capacity_bytes} bytes are too few for {len(regions)} regions of {REGION_GRANULE} bytes")
    return starts


def _bin(size: int) -> int:
    units = size // SMALL_GRANULE
    shift = max(0, units.bit_length() - 3)
    return (shift + 1) << 2 | (units >> shift & 3) if shift else units


@dataclass(frozen=True, slots=True)
class AllocatorStatistics:
    """Sizes in bytes."""

    capacity_bytes: int
    free_bytes: int
    free_runs: int
    largest_run_bytes: int


class Allocator:
    """Free space of one segment. Offsets are multiples of 256 below ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int, regions: Sequence[Region] = WHOLE, all_bytes: int = 0) -> None:
        """``all_bytes``: of the memory that the regions are of, where the end of it is used for something else."""
        self.regions = tuple(regions)
        self.capacity_bytes = capacity_bytes // SMALL_GRANULE * SMALL_GRANULE
        self.free_bytes = 0
        self.starts = region_starts(all_bytes or self.capacity_bytes, regions)
        self.edges = self.starts[1:]  # that no run and no object crosses
        self._edges = frozenset(self.edges.tolist())
        self.sizes: list[int] = np.diff(np.r_[self.starts, self.capacity_bytes]).tolist()
        self.free_by_region = [0] * len(regions)
        self._begins: list[int] = self.starts.tolist()
        self._filling = [size * region.weight or 1.0 for size, region in zip(self.sizes, self.regions, strict=True)]
        self._ends: dict[int, int] = {}  # start -> end
        self._starts: dict[int, int] = {}  # end -> start
        count = _bin(max(*self.sizes, SMALL_GRANULE)) + 1
        self._bins: list[list[dict[int, None]]] = [[{} for _ in range(count)] for _ in regions]
        for start, size in zip(self.starts.tolist(), self.sizes, strict=True):
            if size:
                self._add(start, start + size)

    def __repr__(self) -> str:
        return f"<Allocator {self.free_bytes} of {self.capacity_bytes} bytes free in {len(self._ends)} runs>"

    def statistics(self) -> AllocatorStatistics:
        """A snapshot."""
        return AllocatorStatistics(self.capacity_bytes, self.free_bytes, len(self._ends), self.largest_run())

    def largest_run(self) -> int:
        """Length of the longest free run."""
        longest = 0
        for bins in self._bins:
            held = next((held for held in reversed(bins) if held), {})
            longest = max([longest, *(self._ends[start] - start for start in held)])
        return longest

    @property
    def object_bytes_max(self) -> int:
        """The largest object that there can ever be room for."""
        return max(self.sizes)

    def regions_of(self, offsets: I64) -> I64:
        """In which region each of these objects is; (n,)."""
        return np.searchsorted(self.edges, offsets, side="right")

    def allocate(self, size_bytes: int, count: int, region: int = ANYWHERE, *, level: int = ANYWHERE) -> I64:
        """Up to ``count`` offsets for objects of one size, adjacent where possible; fewer if no run fits any more.

        ``level``: from this one alone.
        """
        size, unit = rounded(size_bytes), granule(size_bytes)
        parts: list[I64] = []
        for bins in self._in_order(region, level):
            while count:
                start = self._fit(bins, size * count, unit)
                if start < 0:
                    start = self._fit(bins, size, unit) if count == 1 else self._longest(bins, size, unit)
                if start < 0:
                    break
                first = -(-start // unit) * unit
                fits = min(count, (self._ends[start] - first) // size)
                self._take(start, first, first + fits * size)
                parts.append(np.arange(first, first + fits * size, size, dtype=np.int64))
                count -= fits
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    def has_room(self, size_bytes: int, level: int = ANYWHERE) -> bool:
        """Whether an object of this size fits, in this level."""
        size, unit = rounded(size_bytes), granule(size_bytes)
        return any(self._fit(bins, size, unit) >= 0 for bins in self._in_order(ANYWHERE, level))

    def _in_order(self, region: int, level: int) -> list[list[dict[int, None]]]:
        """The bins of the regions: level by level, of the one that is wanted, then of those that are filled least."""
        if len(self._bins) == 1:
            return self._bins if level <= 0 else []
        fill = [(size - free) / whole for size, free, whole in zip(self.sizes, self.free_by_region, self._filling, strict=True)]
        order = sorted(range(len(fill)), key=lambda at: (self.regions[at].level, at != region, fill[at]))
        return [self._bins[at] for at in order if level in (ANYWHERE, self.regions[at].level)]

    def free(self, offsets: I64, sizes: I64) -> None:
        """Give objects back: ``sizes`` are their own sizes (rounded here), shape (n,)."""
        if not len(offsets):
            return
        order = np.argsort(offsets)
        starts = offsets[order]
        ends = starts + rounded_all(sizes)[order]
        assert (starts[1:] >= ends[:-1]).all(), "freed twice in one call"
        apart = starts[1:] != ends[:-1]
        if len(self.edges):
            apart |= np.isin(starts[1:], self.edges)
        breaks = np.flatnonzero(apart)
        for start, end in zip(starts[np.r_[0, breaks + 1]].tolist(), ends[np.r_[breaks, len(ends) - 1]].tolist(), strict=True):
            self._give(start, end)

    def occupy(self, offsets: I64, sizes: I64) -> None:
        """At re-attach: make just these objects used, in a fresh allocator. SegmentError if they overlap, lie outside, or cross an edge."""
        assert self.free_bytes == self.capacity_bytes, "occupy needs a fresh allocator"
        if not len(offsets):
            return
        order = np.argsort(offsets)
        starts = offsets[order]
        ends = starts + rounded_all(sizes)[order]
        if (
            starts[0] < 0
            or starts[-1] >= self.capacity_bytes
            or ends[-1] > self.capacity_bytes
            or (starts[1:] < ends[:-1]).any()
            or (starts % SMALL_GRANULE).any()
            or (self.regions_of(starts) != self.regions_of(ends - 1)).any()
        ):
            raise SegmentError("objects in the segment overlap, lie outside of it, or lie in two of its regions")
        for start in self.starts.tolist():
            self._remove(start)
        gap_starts = np.r_[0, ends]
        gap_ends = np.r_[starts, self.capacity_bytes]
        edges = self.edges.tolist()
        for start, end in zip(gap_starts.tolist(), gap_ends.tolist(), strict=True):
            for first, last in pairwise([start, *(edge for edge in edges if start < edge < end), end]):
                if last > first:
                    self._add(first, last)

    def runs(self) -> tuple[I64, I64]:
        """Starts and ends of all free runs, ascending."""
        starts = np.array(sorted(self._ends), np.int64)
        return starts, np.array([self._ends[start] for start in starts.tolist()], np.int64)

    def check(self) -> None:
        """Runs are disjoint, adjacent only at an edge, within a region, in the right bins, and sum up."""
        starts, ends = self.runs()
        assert (ends > starts).all(), "an empty run"
        assert (starts[1:] >= ends[:-1]).all(), "runs overlap"
        assert np.isin(starts[1:][starts[1:] == ends[:-1]], self.edges).all(), "runs touch"
        regions = self.regions_of(starts)
        assert np.array_equal(regions, self.regions_of(ends - 1)), "a run crosses an edge"
        assert int((ends - starts).sum()) == self.free_bytes, "free_bytes is wrong"
        assert np.bincount(regions, ends - starts, len(self.starts)).astype(np.int64).tolist() == self.free_by_region
        assert {end: start for start, end in self._ends.items()} == self._starts
        assert [sorted(start for held in bins for start in held) for bins in self._bins] == [
            starts[regions == region].tolist() for region in range(len(self._bins))
        ]
        numbered = [(number, start) for bins in self._bins for number, held in enumerate(bins) for start in held]
        assert all(_bin(self._ends[start] - start) == number for number, start in numbered)
        assert not len(ends) or (starts[0] >= 0 and ends[-1] <= self.capacity_bytes)

    def _fit(self, bins: list[dict[int, None]], size: int, unit: int) -> int:
        """Start of a run that can hold an aligned piece of ``size``; -1 if none. Near-best fit."""
        number = _bin(size)
        if number >= len(bins):
            return -1
        looks = chain(islice(bins[number], BIN_SCAN_MAX), *(islice(held, 2) for held in bins[number + 1 :] if held), bins[number])
        for start in looks:
            if self._ends[start] - (-(-start // unit) * unit) >= size:
                return start
        if unit > SMALL_GRANULE:  # the few bins above whose runs alignment may shorten below the size
            for held in bins[number + 1 : _bin(size + unit) + 1]:
                for start in held:
                    if self._ends[start] - (-(-start // unit) * unit) >= size:
                        return start
        return -1

    def _longest(self, bins: list[dict[int, None]], size: int, unit: int) -> int:
        """Start of a run from the highest bin, if it can hold one aligned piece of ``size``; else any that can."""
        for held in reversed(bins):
            if held:
                start = next(iter(held))
                if self._ends[start] - (-(-start // unit) * unit) >= size:
                    return start
                return self._fit(bins, size, unit)
        return -1

    def _region(self, start: int) -> int:
        return 0 if len(self._bins) == 1 else bisect_right(self._begins, start) - 1

    def _add(self, start: int, end: int) -> None:
        region = self._region(start)
        self._ends[start] = end
        self._starts[end] = start
        self._bins[region][_bin(end - start)][start] = None
        self.free_bytes += end - start
        self.free_by_region[region] += end - start

    def _remove(self, start: int) -> int:
        end, region = self._ends.pop(start), self._region(start)
        del self._starts[end]
        del self._bins[region][_bin(end - start)][start]
        self.free_bytes -= end - start
        self.free_by_region[region] -= end - start
        return end

    def _take(self, run: int, start: int, end: int) -> None:
        run_end = self._remove(run)
        if start > run:
            self._add(run, start)
        if end < run_end:
            self._add(end, run_end)

    def _give(self, start: int, end: int) -> None:
        before = self._starts.get(start) if start not in self._edges else None
        if before is not None:
            self._remove(before)
            start = before
        if end in self._ends and end not in self._edges:
            end = self._remove(end)
        self._add(start, end)
