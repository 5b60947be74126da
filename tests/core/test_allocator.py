"""The allocator against a bitmap: the dumbest model of memory there is, one bool for each 256 bytes."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.core.allocator import ANYWHERE, PAGE_FROM, PAGE_GRANULE, SMALL_GRANULE, Allocator, Region, granule, rounded
from umbp.errors import SegmentError

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 256, 257, 1000, 4096, 5000, 16383, 16384, 20_000, 65_536, 300_000)


class Bitmap:
    """Which units are used, and what for."""

    def __init__(self, capacity_bytes: int, cuts: np.ndarray | None = None) -> None:
        self.cuts = np.empty(0, np.int64) if cuts is None else cuts // SMALL_GRANULE
        self.used = np.zeros(capacity_bytes // SMALL_GRANULE, bool)
        self.objects: list[tuple[int, int]] = []  # (offset, size)

    @property
    def free_bytes(self) -> int:
        return int(np.count_nonzero(~self.used)) * SMALL_GRANULE

    def units(self, offset: int, size: int) -> slice:
        return slice(offset // SMALL_GRANULE, (offset + rounded(size)) // SMALL_GRANULE)

    def runs(self) -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff(np.r_[1, self.used, 1].astype(np.int8)))
        found = []
        for a, b in edges.reshape(-1, 2).tolist():
            cut = [a, *(edge for edge in self.cuts.tolist() if a < edge < b), b]
            found += [(first * SMALL_GRANULE, last * SMALL_GRANULE) for first, last in pairwise(cut)]
        return found

    def region(self, offset: int) -> int:
        return int(np.count_nonzero(self.cuts * SMALL_GRANULE <= offset))

    def fits(self, size: int, region: int = ANYWHERE) -> bool:
        """Whether some run, of a region if one is named, has room for one aligned object."""
        unit = granule(size)
        runs = [run for run in self.runs() if region in (ANYWHERE, self.region(run[0]))]
        return any(-(-start // unit) * unit + rounded(size) <= end for start, end in runs)

    def allocated(self, offsets: np.ndarray, size: int) -> None:
        for offset in offsets.tolist():
            assert offset % granule(size) == 0, "not aligned"
            assert 0 <= offset <= len(self.used) * SMALL_GRANULE - rounded(size), "outside"
            assert not self.used[self.units(offset, size)].any(), "overlaps"
            assert self.region(offset) == self.region(offset + rounded(size) - 1), "in two regions"
            self.used[self.units(offset, size)] = True
            self.objects.append((offset, size))

    def freed(self, objects: list[tuple[int, int]]) -> None:
        for offset, size in objects:
            self.used[self.units(offset, size)] = False


class Pair:
    """The allocator and its model, told the same."""

    def __init__(self, capacity_bytes: int, regions: int = 1) -> None:
        self.real = Allocator(capacity_bytes, (Region(),) * regions)
        self.model = Bitmap(capacity_bytes, self.real.edges)

    def allocate(self, size: int, count: int, region: int = ANYWHERE) -> int:
        offsets = self.real.allocate(size, count, region)
        assert len(offsets) <= count
        self.model.allocated(offsets, size)
        assert len(offsets) == count or not self.model.fits(size), f"{len(offsets)} of {count} x {size}, though a run is left"
        if region != ANYWHERE and (self.real.regions_of(offsets) != region).any():
            assert not self.model.fits(size, region), "it went elsewhere, though there is room where it was wanted"
        return len(offsets)

    def free(self, objects: list[tuple[int, int]]) -> None:
        pairs = np.array(objects, np.int64).reshape(-1, 2)
        self.real.free(pairs[:, 0], pairs[:, 1])
        self.model.freed(objects)
        gone = set(objects)
        self.model.objects = [each for each in self.model.objects if each not in gone]

    def check(self) -> None:
        self.real.check()
        assert self.real.free_bytes == self.model.free_bytes
        starts, ends = self.real.runs()
        assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == self.model.runs(), "neighbours were not merged"
        assert self.real.largest_run() == max((end - start for start, end in self.model.runs()), default=0)


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(0, 800_000),
    steps=st.lists(st.tuples(st.sampled_from(SIZES), st.integers(1, 40), st.integers(0, 2**32 - 1)), max_size=30),
)
def test_any_order_agrees_with_a_bitmap(capacity: int, steps: list[tuple[int, int, int]]) -> None:
    pair = Pair(capacity)
    for size, count, draw in steps:
        pair.allocate(size, count)
        order = random.Random(draw)
        pair.free(order.sample(pair.model.objects, order.randrange(len(pair.model.objects) + 1)))
        pair.check()


@pytest.mark.parametrize("seed", range(6))
def test_a_full_and_scattered_pool_agrees_with_a_bitmap(seed: int) -> None:
    order = random.Random(seed)
    pair = Pair(2 * MIB)
    for step in range(150):
        pair.allocate(order.choice(SIZES), order.choice((1, 1, 3, 30, 200)))
        if order.random() < 0.6:  # single objects go, so that the free space is in pieces
            pair.free(order.sample(pair.model.objects, len(pair.model.objects) // order.choice((2, 5, 20))))
        try:
            pair.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {error}") from error


@pytest.mark.parametrize("seed", range(3))
def test_regions_agree_with_a_bitmap_and_are_what_was_wanted_while_there_is_room(seed: int) -> None:
    order = random.Random(seed)
    pair = Pair(7 * MIB, 3)
    assert pair.real.edges.tolist() == [2 * MIB, 4 * MIB]
    for step in range(80):
        pair.allocate(order.choice(SIZES), order.choice((1, 3, 30)), order.choice((ANYWHERE, 0, 1, 2)))
        if order.random() < 0.6:
            pair.free(order.sample(pair.model.objects, len(pair.model.objects) // order.choice((1, 2, 5))))
        try:
            pair.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {error}") from error
    after = Pair(7 * MIB, 3)
    pairs = np.array(pair.model.objects, np.int64).reshape(-1, 2)
    after.real.occupy(pairs[:, 0], pairs[:, 1])
    for offset, size in pair.model.objects:
        after.model.allocated(np.array([offset]), size)
    after.check()


def test_without_a_wish_the_emptiest_region_is_taken() -> None:
    space = Allocator(6 * MIB, (Region(),) * 3)
    space.allocate(MIB, 1, 0)
    assert space.regions_of(space.allocate(KIB, 2)).tolist() == [1, 1]
    assert space.regions_of(space.allocate(MIB, 3)).tolist() == [2, 2, 1]
    assert (space.object_bytes_max, space.largest_run()) == (2 * MIB, MIB)


def test_a_segment_too_small_for_its_regions_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for 3"):
        Allocator(5 * MIB, (Region(),) * 3)


def test_occupy_refuses_an_object_in_two_regions() -> None:
    with pytest.raises(SegmentError, match="two of its regions"):
        Allocator(4 * MIB, (Region(),) * 2).occupy(np.array([2 * MIB - 256]), np.array([512]))


def test_a_page_sized_object_is_found_among_runs_that_alignment_spoils() -> None:
    """Runs of exactly the size, none of them aligned, before the one that is."""
    space = Allocator(64 * 40_960)
    offsets = space.allocate(SMALL_GRANULE, 64 * 160)
    keep = np.zeros(len(offsets), bool)
    for hole in range(63):  # 20 KiB holes that start 256 bytes after a page
        keep[hole * 160 + 1 : hole * 160 + 81] = True
    keep[63 * 160 : 63 * 160 + 80] = True  # 20 KiB at a page
    space.free(offsets[keep], np.full(np.count_nonzero(keep), SMALL_GRANULE))
    assert space.allocate(20_480, 1).tolist() == [63 * 40_960]
    assert space.allocate(20_480, 1).tolist() == []
    assert len(space.allocate(16_384, 99)) == 63
    space.check()


def test_a_batch_lies_together_where_there_is_a_run_for_it() -> None:
    space = Allocator(MIB)
    assert space.allocate(5000, 20).tolist() == [i * rounded(5000) for i in range(20)]
    assert np.diff(space.allocate(20_000, 10)).tolist() == [rounded(20_000)] * 9


@pytest.mark.parametrize("seed", [None, 1])
def test_pages_freed_in_any_order_make_room_for_large_objects(seed: int | None) -> None:
    space = Allocator(256 * MIB)
    pages = space.allocate(4 * KIB, 1 << 20)
    assert len(pages) == 65_536
    if seed is not None:
        pages = np.random.default_rng(seed).permutation(pages)
    for part in np.array_split(pages, 97):
        space.free(part, np.full(len(part), 4 * KIB))
    assert space.statistics().free_runs == 1
    assert len(space.allocate(4 * MIB, 100)) * 4 * MIB >= 0.9 * 256 * MIB
    space.check()


@pytest.mark.parametrize(("size", "expected"), [(1, 256), (256, 256), (257, 512), (16_383, 16_384), (16_384, 16_384), (16_385, 20_480)])
def test_rounding(size: int, expected: int) -> None:
    assert rounded(size) == expected
    assert granule(size) == (PAGE_GRANULE if size >= PAGE_FROM else SMALL_GRANULE)


def test_nothing_fits_in_nothing() -> None:
    assert Allocator(255).allocate(1, 3).tolist() == []
    assert Allocator(0).largest_run() == 0


def test_occupy_makes_just_these_used() -> None:
    before = Pair(MIB)
    for size in SIZES:
        before.allocate(size, 3)
    before.free(before.model.objects[::2])
    after = Pair(MIB)
    pairs = np.array(before.model.objects[::-1], np.int64)
    after.real.occupy(pairs[:, 0], pairs[:, 1])
    for offset, size in before.model.objects:
        after.model.allocated(np.array([offset]), size)
    after.check()


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ([0, 256], [257, 256]),
        ([-256], [256]),
        ([MIB - 256], [512]),
        ([MIB], [256]),
        ([100], [256]),
        ([0, (1 << 63) - 256], [256, 20_000]),  # its end is negative in 64 bits
    ],
)
def test_occupy_refuses_what_cannot_be(offsets: list[int], sizes: list[int]) -> None:
    with np.errstate(over="ignore"), pytest.raises(SegmentError):
        Allocator(MIB).occupy(np.array(offsets, np.int64), np.array(sizes, np.int64))


def test_an_object_freed_twice_in_one_call_is_our_fault() -> None:
    space = Allocator(MIB)
    offset = space.allocate(1000, 1)
    with pytest.raises(AssertionError, match="freed twice"):
        space.free(np.r_[offset, offset], np.array([1000, 1000]))
