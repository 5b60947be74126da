"""Room: what goes so that new pages fit, and what never does."""

import random

import numpy as np
import pytest
from core.world import World, find, keys_of, open_namespace, put, stored

from umbp.core.allocator import granule, rounded
from umbp.core.objects import FREE, LIVE
from umbp.core.room import FEW, SLICE_KEYS, Room
from umbp.policies.lru import Lru
from umbp.types import WriteStatus

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
FULL = {"watermark_high": 1.0, "watermark_low": 1.0}  # no eviction ahead of need
LONG = {"lease_seconds_max": 1e9}


def lease(pool, row: int, *keys: int, now: float = 0.0) -> None:
    found = find(pool, row, *keys)
    assert found.hit.all()
    pool.lease(now, 9, found.ids, found.versions, 1e9)


def offset_of(pool, row: int, key: int) -> int:
    return int(find(pool, row, key).rows[0, 5])


def full_of_pages(pages: int, **options) -> tuple[World, int]:
    """Keys 0 .. pages - 1 of one page each, from the first byte on, put at time 0 one after the other; no byte is left."""
    world = World(pages * PAGE, 4 * pages, **FULL | LONG | options)
    row = open_namespace(world.pool, "pages", PAGE)
    for key in range(pages):
        assert put(world.pool, row, key) == ["stored"]
    assert [offset_of(world.pool, row, key) for key in range(pages)] == [key * PAGE for key in range(pages)]
    return world, row


class Counting(Lru):
    """LRU that counts the ids it had to ask about."""

    asked = 0

    def victims(self, eligible, count):
        def counted(ids):
            Counting.asked += len(ids)
            return eligible(ids)

        return super().victims(counted, count)


# -- ahead of need -------------------------------------------------------------------------------------------------------------------------


def test_eviction_ahead_of_need_goes_from_the_high_to_the_low_watermark_in_slices() -> None:
    world = World(4000 * 256, 8000, watermark_high=0.9, watermark_low=0.5)
    row = open_namespace(world.pool, "a", 256)
    put(world.pool, row, *range(3600))
    assert not world.pool.tick(10.0), "at the high watermark, not above it"
    put(world.pool, row, 3600, now=10.0)
    left = []
    while world.pool.tick(20.0):
        left.append(world.pool.objects.counts[LIVE])
        world.pool.check()
    assert left[-1] == 2000
    assert max(-np.diff([3601, *left])) <= SLICE_KEYS
    assert not world.pool.tick(20.0)


def test_keys_have_the_same_watermarks_as_bytes() -> None:
    world = World(MIB, 100, watermark_high=0.9, watermark_low=0.5)
    row = open_namespace(world.pool, "a", 256)
    put(world.pool, row, *range(91))
    while world.pool.tick(10.0):
        pass
    assert world.pool.objects.counts[LIVE] == 50


def test_nothing_just_put_goes_ahead_of_need() -> None:
    world = World(100 * PAGE, 400, watermark_high=0.9, watermark_low=0.5)
    row = open_namespace(world.pool, "a", PAGE)
    put(world.pool, row, *range(50))
    put(world.pool, row, *range(50, 100), now=9.5)
    while world.pool.tick(10.0):
        pass
    assert stored(world.pool, row, *range(100)) == [False] * 50 + [True] * 50


def test_leased_and_pinned_pages_stay_above_the_watermark_and_cost_no_search() -> None:
    world = World(100 * PAGE, 400, watermark_high=0.9, watermark_low=0.5, **LONG)
    world.pool.objects.policy = Counting(400)
    row = open_namespace(world.pool, "a", PAGE)
    put(world.pool, row, *range(100))
    lease(world.pool, row, *range(60))
    world.pool.pin(0.0, 0, row, keys_of(*range(50, 100)), 0.0, "")
    Counting.asked = 0
    assert not world.pool.tick(10.0)
    assert Counting.asked == 0
    assert world.pool.objects.counts[LIVE] == 100


# -- in need: order ------------------------------------------------------------------------------------------------------------------------


def test_what_was_just_put_goes_after_everything_else_whatever_the_policy_says() -> None:
    world, row = full_of_pages(8)
    for key in range(8, 12):
        put(world.pool, row, key, now=100.0)
    world.pool.note(100.1, row, keys_of(4, 5, 6, 7))  # the least recently used are now those just put
    for key in range(12, 16):
        put(world.pool, row, key, now=100.2)
    assert stored(world.pool, row, *range(4, 16)) == [False] * 4 + [True] * 8
    put(world.pool, row, 16, now=100.3)  # nothing else is left: the oldest of them
    assert stored(world.pool, row, *range(8, 17)) == [False] + [True] * 8


def test_exists_is_an_acknowledgement_too() -> None:
    world, row = full_of_pages(4)
    assert put(world.pool, row, 0, now=100.0) == ["exists"]
    assert put(world.pool, row, 4, 5, 6, now=100.1) == ["stored"] * 3
    assert stored(world.pool, row, *range(4)) == [True, False, False, False]


def test_leased_and_pinned_pages_never_go() -> None:
    world, row = full_of_pages(8)
    lease(world.pool, row, 0, 1)
    world.pool.pin(0.0, 0, row, keys_of(2, 3), 0.0, "")
    for key in range(8, 40):
        assert put(world.pool, row, key, now=float(key)) == ["stored"]
    assert stored(world.pool, row, 0, 1, 2, 3) == [True] * 4
    world.pool.check()


def test_all_leased_is_refused_at_once_with_its_own_code() -> None:
    world, row = full_of_pages(8)
    lease(world.pool, row, *range(8))
    assert put(world.pool, row, 8, now=100.0) == ["all_leased"]
    assert world.pool.objects.counts[LIVE] == 8


def test_what_is_being_written_leaves_no_room_either() -> None:
    world, row = full_of_pages(4)
    assert len(world.pool.reserve(10.0, 1, row, keys_of(*range(10, 14)), b"", 0.0).ids) == 4
    assert put(world.pool, row, 20, now=10.0) == ["all_leased"]


def test_of_a_batch_that_does_not_fit_the_first_are_stored() -> None:
    world, row = full_of_pages(8)
    lease(world.pool, row, *range(5))
    assert put(world.pool, row, *range(8, 13), now=100.0) == ["stored"] * 3 + ["all_leased"] * 2


def test_larger_than_the_pool_is_too_large_and_evicts_nothing() -> None:
    world, row = full_of_pages(8)
    assert put(world.pool, open_namespace(world.pool, "big", 8 * PAGE + 1), 1, now=100.0) == ["too_large"]
    assert put(world.pool, open_namespace(world.pool, "fits", 8 * PAGE), 1, now=100.0) == ["stored"]
    assert stored(world.pool, row, *range(8)) == [False] * 8


# -- in need: windows ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 37, 59, 60])
def test_the_one_window_that_leases_leave_is_found(first: int) -> None:
    world, row = full_of_pages(64)
    lease(world.pool, row, *(key for key in range(64) if not first <= key < first + 4))
    big = open_namespace(world.pool, "big", 4 * PAGE)
    assert put(world.pool, big, 1, now=100.0) == ["stored"]
    assert offset_of(world.pool, big, 1) == first * PAGE
    world.pool.check()


def test_no_window_is_fragmented_and_evicts_at_most_its_bytes_once() -> None:
    world, row = full_of_pages(64)
    lease(world.pool, row, *range(0, 64, 4))
    big = open_namespace(world.pool, "big", 4 * PAGE)
    for _ in range(5):
        assert put(world.pool, big, 1, now=100.0) == ["fragmented"]
    assert world.pool.objects.counts[LIVE] >= 60
    three = open_namespace(world.pool, "three", 3 * PAGE)
    assert put(world.pool, three, *range(16), now=100.0) == ["stored"] * 16


def test_free_gaps_count_for_a_window() -> None:
    """Every second page is free: a window of four costs two evictions."""
    world, row = full_of_pages(32)
    world.pool.remove(row, keys_of(*range(1, 32, 2)))
    big = open_namespace(world.pool, "big", 4 * PAGE)
    assert put(world.pool, big, 1, now=100.0) == ["stored"]
    assert world.pool.objects.evicted_keys == 2


def test_the_cheapest_window_is_taken() -> None:
    world, row = full_of_pages(32)
    world.pool.remove(row, keys_of(1, 20, 21, 22))
    big = open_namespace(world.pool, "big", 4 * PAGE)
    assert put(world.pool, big, 1, now=100.0) == ["stored"]
    assert world.pool.objects.evicted_keys == 1
    assert offset_of(world.pool, big, 1) in (19 * PAGE, 20 * PAGE)


def test_a_window_spares_what_was_just_put_while_another_will_do() -> None:
    world, row = full_of_pages(16)
    put(world.pool, row, 100, 101, 102, now=50.0)  # takes the place of old pages
    fresh = [offset_of(world.pool, row, key) for key in (100, 101, 102)]
    world.pool.remove(row, keys_of(*(key for key in range(16) if stored(world.pool, row, key)[0] and key % 4)))
    big = open_namespace(world.pool, "big", 5 * PAGE)
    assert put(world.pool, big, 1, now=50.5) == ["stored"]
    assert stored(world.pool, row, 100, 101, 102) == [True] * 3, fresh
    world.pool.check()


def test_pages_of_one_batch_take_a_window_each() -> None:
    world, row = full_of_pages(64)
    lease(world.pool, row, *range(0, 64, 5))  # twelve windows of four
    big = open_namespace(world.pool, "big", 4 * PAGE)
    assert put(world.pool, big, *range(14), now=100.0) == ["stored"] * 12 + ["all_leased"] * 2
    assert world.pool.objects.counts[LIVE] == 12 + 13  # the last three pages went, and are too few for a window
    world.pool.check()


def test_small_and_large_pages_of_all_alignments_find_windows() -> None:
    world = World(64 * PAGE, 4096, **FULL, **LONG)
    small, big = open_namespace(world.pool, "small", 300), open_namespace(world.pool, "big", 17_000)
    assert put(world.pool, small, *range(512)) == ["stored"] * 512
    assert set(put(world.pool, big, *range(12), now=100.0)) == {"stored"}
    world.pool.check()


# -- quotas and the number of keys ---------------------------------------------------------------------------------------------------------


def test_a_quota_evicts_within_the_namespace_only() -> None:
    world = World(64 * PAGE, 256, **FULL)
    mine, other = open_namespace(world.pool, "mine", PAGE), open_namespace(world.pool, "other", PAGE)
    put(world.pool, other, *range(8))
    world.pool.set_quota(mine, 4 * PAGE + 100)
    for key in range(10):
        assert put(world.pool, mine, key, now=10.0 + key) == ["stored"]
    assert stored(world.pool, mine, *range(10)) == [False] * 6 + [True] * 4
    assert stored(world.pool, other, *range(8)) == [True] * 8
    account = world.pool.namespaces[mine].account
    assert (account.evicted_for_quota_keys, account.evicted_keys, account.held_bytes) == (6, 6, 4 * PAGE)


def test_over_quota_is_refused_where_nothing_of_the_namespace_can_go() -> None:
    world = World(64 * PAGE, 256, **FULL, **LONG)
    mine, other = open_namespace(world.pool, "mine", PAGE), open_namespace(world.pool, "other", PAGE)
    put(world.pool, other, *range(8))
    world.pool.set_quota(mine, 4 * PAGE)
    put(world.pool, mine, 0, 1, 2)
    lease(world.pool, mine, 0, 1, 2)
    assert put(world.pool, mine, 3, 4, now=10.0) == ["stored", "over_quota"]
    assert stored(world.pool, other, *range(8)) == [True] * 8
    world.pool.set_quota(mine, PAGE - 1)
    assert put(world.pool, mine, 9, now=10.0) == ["too_large"]


def test_a_quota_set_below_what_is_held_is_reached_by_and_by() -> None:
    world = World(1000 * 256, 2000, **FULL)
    mine, other = open_namespace(world.pool, "mine", 256), open_namespace(world.pool, "other", 256)
    put(world.pool, mine, *range(600))
    put(world.pool, other, *range(300))
    world.pool.set_quota(mine, 10 * 256)
    ticks = 1
    while world.pool.tick(10.0):
        ticks += 1
        world.pool.check()
    assert ticks >= 600 // SLICE_KEYS
    assert world.pool.namespaces[mine].account.live_keys == 10
    assert world.pool.namespaces[other].account.live_keys == 300
    world.pool.set_quota(mine, 0)
    assert put(world.pool, mine, *range(1000, 1050), now=20.0) == ["stored"] * 50


def test_the_number_of_keys_is_bounded_like_bytes() -> None:
    world = World(MIB, 8, **FULL, **LONG)
    row = open_namespace(world.pool, "a", 256)
    for key in range(20):
        assert put(world.pool, row, key, now=float(key)) == ["stored"]
    assert stored(world.pool, row, *range(20)) == [False] * 12 + [True] * 8
    lease(world.pool, row, *range(12, 19))
    assert put(world.pool, row, 20, 21, now=30.0) == ["stored", "key_limit"]
    world.pool.check()


# -- searches that would find nothing ------------------------------------------------------------------------------------------------------


def test_a_policy_is_not_made_to_walk_where_nothing_can_go() -> None:
    world = World(2000 * 256, 4000, **FULL, **LONG)
    world.pool.objects.policy = Counting(4000)
    row, other = open_namespace(world.pool, "a", 256), open_namespace(world.pool, "b", 256)
    put(world.pool, row, *range(1990))
    lease(world.pool, row, *range(1990))
    put(world.pool, other, *range(10), now=100.0)
    Counting.asked = 0
    world.pool.set_quota(row, 256)
    assert FEW * 10 < 1990
    assert not world.pool.tick(100.5), "all of the one are leased, and the other is fresh"
    assert Counting.asked == 0
    assert put(world.pool, other, 20, now=100.5) == ["stored"], "the oldest of the fresh ones goes, since nothing else can"


# -- the whole -----------------------------------------------------------------------------------------------------------------------------


def must_fit(pool, size: int) -> bool:
    """Whether an aligned run for ``size`` exists that crosses nothing leased, pinned or being written: by looking at every place."""
    objects = pool.objects
    fixed = np.flatnonzero((objects.state != FREE) & ((objects.state != LIVE) | (objects.leases > 0) | (objects.pins > 0)))
    used = np.zeros(objects.allocator.capacity_bytes // 256 + 1, np.int64)
    for offset, length in zip(objects.offset[fixed].tolist(), objects.size[fixed].tolist(), strict=True):
        used[offset // 256 : (offset + rounded(length)) // 256] = 1
    total = np.r_[0, np.cumsum(used[:-1])]
    starts = np.arange(0, objects.allocator.capacity_bytes - rounded(size) + 1, granule(size)) // 256
    regions_of = objects.allocator.regions_of
    starts = starts[regions_of(starts * 256) == regions_of(starts * 256 + rounded(size) - 1)]
    return bool((total[starts + rounded(size) // 256] == total[starts]).any())


def random_mix(seed: int, eviction: str, steps: int, regions: int = 1) -> int:
    """Put, lease and release pages of 256 B to 12 MiB at random; every refusal is checked. How many there were."""
    draw = random.Random(seed)
    world = World(64 * MIB, 4096, namespaces=64, eviction=eviction, regions=regions, lease_seconds_max=1e9)
    pool = world.pool
    if regions > 1:
        pool.room.be_near(1, regions - 1)
    sizes = [int(256 * (12 * MIB / 256) ** (i / 39)) for i in range(40)]
    rows = [open_namespace(pool, f"{size}", size) for size in sizes]
    leases: list[int] = []
    recent: list[tuple[int, int]] = []
    refused, now, key = 0, 0.0, 0
    for step in range(steps):
        at = draw.randrange(len(sizes))
        count = draw.randrange(1, 9) if sizes[at] < MIB else 1
        keys = list(range(key, key + count))
        key += count
        made = pool.reserve(now, 1, rows[at], keys_of(*keys), b"", 0.0)
        if len(made.ids) < count:
            refused += 1
            codes = {WriteStatus(code).code for code in made.status[~made.mine].tolist()}
            assert codes <= {"all_leased", "fragmented"}, (seed, step, codes)
            assert not must_fit(pool, sizes[at]), f"seed {seed}, step {step}: {sizes[at]} bytes {codes}, though a run could be made"
        if len(made.ids):
            pool.commit(now, 1, made.number, np.ones(len(made.ids), bool), None)
            recent = [*recent[-50:], (rows[at], keys[0])]
        if draw.random() < 0.5 and recent:
            row, first = draw.choice(recent)
            found = find(pool, row, first)
            if found.hit[0]:
                leases.append(pool.lease(now, 1, found.ids, found.versions, 1e9)[0].number)
        while leases and draw.random() < (0.6 if pool.objects.leased_bytes > 50 * MIB else 0.05):
            pool.leases.release(1, leases.pop(draw.randrange(len(leases))))
        now += draw.choice((0.0, 0.01, 0.5))
        pool.tick(now)
        if step % 100 == 0:
            pool.check()
    assert pool.objects.evicted_keys > steps // 3
    return refused


@pytest.mark.parametrize(("seed", "eviction", "regions"), [(1, "lru", 1), (2, "leaf_lru", 1), (3, "s3fifo", 1), (4, "lru", 3)])
def test_a_random_mix_is_refused_only_where_leases_leave_no_room(seed: int, eviction: str, regions: int) -> None:
    assert random_mix(seed, eviction, 500, regions) > 5, "leases never left no room: this proves nothing"


@pytest.mark.parametrize("plant", ["no windows", "windows near the victim only"])
def test_the_check_of_refusals_fires(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if plant == "no windows":
        monkeypatch.setattr(Room, "_window", lambda *_: None)
    else:
        within = Room._window_within
        monkeypatch.setattr(Room, "_window_within", lambda self, size, low, *rest: within(self, size, low, *rest) if low else None)
    with pytest.raises(AssertionError, match="though a run could be made"):
        random_mix(1, "lru", 500)


@pytest.mark.parametrize("seed", [1, 2])
def test_without_leases_nothing_is_ever_refused(seed: int) -> None:
    draw = random.Random(seed)
    world = World(64 * MIB, 4096, namespaces=64)
    sizes = [int(256 * (12 * MIB / 256) ** (i / 39)) for i in range(40)]
    rows = [open_namespace(world.pool, f"{size}", size) for size in sizes]
    for key in range(800):
        at = draw.randrange(len(sizes))
        count = max(1, min(draw.randrange(1, 30), 16 * MIB // sizes[at]))
        status = put(world.pool, rows[at], *range(key * 100, key * 100 + count), now=key * draw.choice((0.001, 0.1)))
        assert set(status) == {"stored"}, (seed, key, sizes[at], count, status)
        if key % 5 == 0:
            world.pool.tick(key * 0.1)
    world.pool.check()
    assert world.pool.objects.evicted_keys > 500
