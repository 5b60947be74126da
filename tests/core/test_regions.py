"""Memory in regions: what a writer stores is near it while there is room, elsewhere before anything goes, and never in two."""

from __future__ import annotations

import numpy as np
import pytest
from core.world import World, find, open_namespace, put, stored

from umbp.errors import InvalidRequest

MIB = 1 << 20
PAGE = 256 << 10
REGION_PAGES = 8  # of 2 MiB
NEAR, FAR, NOWHERE = 1, 2, 3  # sessions
FULL = {"watermark_high": 1.0, "watermark_low": 1.0}


def three_regions(**options: object) -> tuple[World, int]:
    """A session near the second region, one near the third, and one that said nothing."""
    world = World(6 * MIB, 256, regions=3, **{**FULL, **options})
    world.pool.room.be_near(NEAR, 1)
    world.pool.room.be_near(FAR, 2)
    return world, open_namespace(world.pool, "a", PAGE)


def regions(world: World, row: int, *keys: int) -> list[int]:
    found = find(world.pool, row, *keys)
    assert found.hit.all()
    return world.pool.objects.allocator.regions_of(found.rows[:, 5].view(np.int64)).tolist()


def test_a_writer_s_pages_are_near_it_then_in_the_emptiest_region_and_only_then_does_anything_go() -> None:
    world, row = three_regions()
    put(world.pool, row, 100, 101, session=FAR)
    assert put(world.pool, row, *range(10), session=NEAR) == ["stored"] * 10
    assert regions(world, row, 100, 101) == [2, 2]
    assert regions(world, row, *range(10)) == [1] * 8 + [0] * 2
    assert (world.pool.room.near_pages, world.pool.room.far_pages) == ([0, 8, 2], [0, 2, 0])
    put(world.pool, row, *range(10, 22), session=NEAR)
    assert all(stored(world.pool, row, 100, 101, *range(22))), "the segment is just full"
    put(world.pool, row, 50, session=NEAR, now=10.0)
    assert stored(world.pool, row, 100, 101) == [True, False], "the least recently used one goes, wherever it is"
    assert regions(world, row, 50) == [2], "and what is free is used, wherever it is"
    world.pool.check()


def test_memory_ahead_and_scratch_are_near_their_session_too() -> None:
    world, _ = three_regions()
    spare = world.pool.spares.give(0.0, NEAR, PAGE // 8, 4)
    assert spare is not None
    offsets = world.pool.objects.offset[spare.ids]
    piece = world.pool.scratch.take(0.0, FAR, 64 << 10)
    assert world.pool.objects.allocator.regions_of(np.r_[offsets, piece.offset]).tolist() == [1, 1, 1, 1, 2]


def test_a_session_that_ended_is_near_nothing() -> None:
    world, row = three_regions()
    world.pool.connection_closed(NEAR, gone=True)
    put(world.pool, row, *range(3), session=NEAR)
    put(world.pool, row, 3, session=NOWHERE)
    assert sorted(regions(world, row, 0, 1, 2, 3)) == [0, 0, 0, 1]
    assert world.pool.room.near_pages == [0, 0, 0]


def test_a_region_that_is_not_there_is_refused() -> None:
    world, _ = three_regions()
    with pytest.raises(InvalidRequest, match="no region 3"):
        world.pool.room.be_near(NEAR, 3)


def test_what_is_larger_than_a_region_is_too_large_and_what_is_as_large_finds_room_among_neighbours() -> None:
    world, row = three_regions(lease_seconds_max=1e9)
    large, whole = open_namespace(world.pool, "large", 2 * MIB + 4096), open_namespace(world.pool, "whole", 2 * MIB)
    assert put(world.pool, large, 1) == ["too_large"]
    put(world.pool, row, *range(24))
    found = find(world.pool, row, 3, 12)  # each in the middle of a region, so that a run across an edge would cost less than any within one
    world.pool.lease(0.0, 9, found.ids, found.versions, 1e9)
    assert put(world.pool, whole, 1, session=NEAR, now=10.0) == ["stored"]
    held = set(regions(world, row, 3, 12))
    assert len(held) == 2
    assert set(regions(world, whole, 1)) == {0, 1, 2} - held
    world.pool.check()


def test_after_a_restart_all_is_where_it_was() -> None:
    world, row = three_regions()
    put(world.pool, row, *range(12), session=NEAR)
    before = regions(world, row, *range(12))
    world.reboot(1.0)
    assert regions(world, row, *range(12)) == before
    world.pool.check()
