"""The part of the segment for pages that only pass through: nobody else has it, and nothing else has its pages' rights."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from core.world import World, find, keys_of, open_namespace, put, stored

from umbp.core.passage import BYTES_MAX, BYTES_MIN, SHARE, SHARE_MAX, passage_bytes
from umbp.core.puts import PASS
from umbp.types import WriteStatus

PAGE = 4096
PAGES = 16  # of the pool, two of them for the passage


@pytest.fixture
def world() -> World:
    return World(PAGES * PAGE, 128, passage_bytes=2 * PAGE, watermark_high=1.0, watermark_low=1.0)


def pass_through(world: World, row: int, *numbers: int) -> list[str]:
    made = world.pool.reserve(0.0, 0, row, keys_of(*numbers), b"", 5.0, kind=PASS)
    status = made.status.copy()
    if len(made.ids):
        status[made.mine] = world.pool.commit(0.0, 0, made.number, np.ones(len(made.ids), bool), None)
    world.pool.check()
    return [WriteStatus(code).code for code in status.tolist()]


def test_it_is_a_small_part_of_the_pool() -> None:
    for size in (64 << 20, 1 << 30, 64 << 30, 2 << 40):
        assert passage_bytes(size) <= size // SHARE_MAX
        assert passage_bytes(size) <= BYTES_MAX
        assert passage_bytes(size) >= min(BYTES_MIN, size // SHARE_MAX)
    assert passage_bytes(32 << 30) == (32 << 30) // SHARE


def test_puts_have_none_of_it_and_it_is_there_when_all_else_is_leased(world: World) -> None:
    pool, row = world.pool, open_namespace(world.pool, "a", PAGE)
    assert put(pool, row, *range(1, 15)) == ["stored"] * 14
    found = find(pool, row, *range(1, 15))
    _, held = pool.lease(0.0, 1, found.ids, found.versions, 60.0)
    assert held.all()
    assert put(pool, row, 99) == ["all_leased"]
    assert pass_through(world, row, 20, 21) == ["stored", "stored"]
    assert put(pool, row, 99)[0] in ("all_leased", "fragmented")  # what passes through makes no room for others
    assert stored(pool, row, 20, 21) == [True, True]
    assert pass_through(world, row, 22) == ["stored"]  # the others went for it: nobody held them
    assert stored(pool, row, 20, 21, 22) == [False, False, True]
    assert stored(pool, row, *range(1, 15)) == [True] * 14


def test_who_waits_holds_what_passes_and_nobody_else_does(world: World) -> None:
    pool, row = world.pool, open_namespace(world.pool, "a", PAGE)
    pool.objects.fresh = deque()
    assert pass_through(world, row, 1, 2) == ["stored", "stored"]
    assert not any(map(len, pool.objects.fresh)), "no disk is to keep it"
    found = find(pool, row, 1, 2)
    assert not pool.lease(0.0, 1, found.ids, found.versions, 60.0)[1].any()
    assert len(pool.pin(0.0, 1, row, keys_of(1, 2), 0.0, "").ids) == 0
    waiting, held = pool.leases.grant(0.0, 1, found.ids, found.versions, 60.0, passing=True)
    assert held.all()
    assert pool.objects.leased_bytes == 0, "it is not part of what may be leased"
    assert pass_through(world, row, 3) == ["all_leased"]
    assert stored(pool, row, 1, 2) == [True, True]
    assert pool.leases.release(1, waiting.number)
    assert pass_through(world, row, 3) == ["stored"]
    assert put(pool, row, 4) == ["stored"]
    here = find(pool, row, 4)
    assert not pool.leases.grant(0.0, 1, here.ids, here.versions, 60.0, passing=True)[1].any()


def test_a_key_is_kept_for_it_when_all_others_are_in_use() -> None:
    world = World(64 * PAGE, 80, passage_bytes=2 * PAGE, watermark_high=1.0, watermark_low=1.0)
    pool, row = world.pool, open_namespace(world.pool, "a", PAGE)
    codes = put(pool, row, *range(1, 40))
    found = find(pool, row, *range(1, 40))
    pool.lease(0.0, 1, found.ids[found.hit], found.versions[found.hit], 60.0)
    assert codes.count("stored") == 80 - 64
    assert set(codes[16:]) == {"key_limit"}
    assert pass_through(world, row, 50, 51) == ["stored", "stored"]


def test_after_a_restart_what_lies_there_goes_and_what_lies_across_keeps_its_place(world: World) -> None:
    pool, row = world.pool, open_namespace(world.pool, "a", PAGE)
    assert pass_through(world, row, 1) == ["stored"]
    assert put(pool, row, 2) == ["stored"]
    world.reboot(0.0)
    world.pool.check()
    assert stored(world.pool, row, 1, 2) == [False, True]
    assert world.pool.objects.passage.size_bytes == 2 * PAGE

    former = World(PAGES * PAGE, 128, watermark_high=1.0, watermark_low=1.0)  # without a passage, and with larger pages
    large = open_namespace(former.pool, "b", 3 * PAGE)
    assert put(former.pool, large, *range(1, 6)) == ["stored"] * 5  # the last one from page 12 to 15
    former.limits = world.limits
    former.reboot(0.0)
    former.pool.check()
    assert stored(former.pool, large, *range(1, 6)) == [True] * 5
    assert former.pool.objects.passage.size_bytes == PAGE
    small = open_namespace(former.pool, "a", PAGE)
    assert pass_through(former, small, 1) == ["stored"]
    former.limits = world.limits
    assert former.pool.remove(large, keys_of(5)).all()
    former.pool.check()


def test_it_is_the_end_of_the_last_region_and_the_others_are_as_without_it() -> None:
    size = 12 << 20
    without, world = (World(size, 64, regions=3, passage_bytes=bytes_) for bytes_ in (0, passage_bytes(size, size // 3)))
    assert world.pool.objects.allocator.starts.tolist() == without.pool.objects.allocator.starts.tolist()
    assert 0 < world.pool.objects.passage.size_bytes < size // 3
    row = open_namespace(world.pool, "a", PAGE)
    assert pass_through(world, row, 1) == ["stored"]
    world.reboot(0.0)
    world.pool.check()
