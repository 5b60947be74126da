"""Reservations of which a piece is shown, or ends, before the rest."""

import numpy as np
from core.test_writes import OPEN, told_parents, told_world
from core.world import World, find, keys_of, open_namespace, put, stored

from umbp.store.index import W_SUM
from umbp.types import WriteStatus


def some(world: World, number: int, *chosen: bool) -> bool:
    mask = np.array(chosen)
    return world.pool.commit_some(0.0, 1, number, mask, np.arange(1, 1 + mask.sum(), dtype=np.uint64))


def test_a_write_may_be_shown_piece_by_piece() -> None:
    world = World(1 << 20, 64)
    row = open_namespace(world.pool, "a", 4096)
    made = world.pool.reserve(0.0, 1, row, keys_of(1, 2, 3, 4), b"", 1.0)
    assert some(world, made.number, False, True, False, True)
    assert stored(world.pool, row, 1, 2, 3, 4) == [False, True, False, True]
    assert world.pool.table.entries[made.ids[[1, 3]], W_SUM].tolist() == [1, 2]
    again = world.pool.reserve(0.0, 2, row, keys_of(1, 2), b"", 1.0)  # 1 is still on its way, 2 is there
    assert again.status.tolist() == [WriteStatus.PENDING, WriteStatus.EXISTS]
    assert not again.mine.any()
    world.pool.check()
    assert world.pool.commit(0.0, 1, made.number, np.array([True, False]), None).tolist() == [WriteStatus.STORED, WriteStatus.UNAVAILABLE]
    assert stored(world.pool, row, 1, 2, 3, 4) == [True, True, False, True]
    world.pool.check()


def test_a_write_that_is_shown_to_the_last_piece_is_over() -> None:
    world = World(1 << 20, 64)
    row = open_namespace(world.pool, "a", 4096)
    made = world.pool.reserve(0.0, 1, row, keys_of(1, 2), b"", 1.0)
    assert some(world, made.number, True, False)
    assert some(world, made.number, True)
    assert not some(world, made.number)
    assert not world.pool.writes.open
    world.pool.check()


def test_a_piece_of_a_write_that_is_over_or_another_s_shows_nothing() -> None:
    world = World(1 << 20, 64)
    row = open_namespace(world.pool, "a", 4096)
    late, flushed = (world.pool.reserve(0.0, 1, row, keys_of(number), b"", 1.0) for number in (1, 2))
    assert not world.pool.commit_some(0.0, 2, late.number, np.ones(1, bool), np.ones(1, np.uint64))
    world.pool.writes.expire(2.0)
    assert not some(world, late.number, True)
    world.pool.flush(row)
    assert not some(world, flushed.number, True)
    assert stored(world.pool, row, 1, 2) == [False, False]
    world.pool.check()


def test_a_parent_that_was_shown_before_and_is_another_page_by_now_is_no_parent() -> None:
    script = told_world()
    script.run(OPEN)
    row = script.rows["a"]
    made = script.pool.reserve(0.0, 1, row, keys_of(1, 2, 3), b"", 0.0)
    assert script.pool.commit_some(0.0, 1, made.number, np.array([True, False, False]), np.ones(1, np.uint64))
    assert told_parents(script) == {1: 0}
    assert script.pool.remove(row, keys_of(1)).all()
    assert put(script.pool, row, 9) == ["stored"]
    assert find(script.pool, row, 9).ids[0] == made.ids[0]  # the id is used again
    script.pool.commit(0.0, 1, made.number, np.ones(2, bool), None)
    assert told_parents(script) == {2: 0, 3: 2}


def test_parts_of_a_write_end_each_for_itself() -> None:
    script = told_world()
    script.run(OPEN)
    pool, row = script.pool, script.rows["a"]
    made = pool.reserve(0.0, 1, row, keys_of(1, 2, 3, 4), b"", 5.0)
    assert pool.writes.split(2, made.number, np.array([True, False, False, False])) == 0  # another's
    assert pool.writes.split(1, made.number, np.ones(4, bool)) == 0  # nothing would be left
    other = pool.writes.split(1, made.number, np.array([False, True, False, True]))
    pool.check()
    assert not pool.reserve(0.0, 2, row, keys_of(2), b"", 1.0).mine.any()  # still on its way
    assert pool.commit(0.0, 1, made.number, np.ones(2, bool), None).tolist() == [WriteStatus.STORED] * 2
    assert stored(pool, row, 1, 2, 3, 4) == [True, False, True, False]
    assert told_parents(script) == {1: 0, 3: 0}  # 2 is of another write now: who knows what its id will be
    assert pool.commit(0.0, 1, other, np.array([True, False]), None).tolist() == [WriteStatus.STORED, WriteStatus.UNAVAILABLE]
    assert stored(pool, row, 1, 2, 3, 4) == [True, True, True, False]
    pool.check()
    late = pool.reserve(0.0, 1, row, keys_of(5, 6), b"", 1.0)
    part = pool.writes.split(1, late.number, np.array([True, False]))
    pool.writes.expire(2.0)
    assert pool.writes.split(1, late.number, np.array([True])) == 0
    assert pool.commit(2.0, 1, part, np.ones(1, bool), None).tolist() == [WriteStatus.EXPIRED]
    pool.check()
