"""Rows of the namespace table: whose they are, and when they may be another's."""

import pytest
from core.world import World, open_namespace, put

from umbp.errors import LimitReached


def test_a_row_is_another_namespaces_once_all_have_closed_it_and_it_is_empty() -> None:
    world = World(1 << 20, 256, namespaces=1)
    row = open_namespace(world.pool, "a", 256, session=1)
    assert open_namespace(world.pool, "a", 256, session=2) == row
    assert put(world.pool, row, 1) == ["stored"]
    for session in (1, 2):
        with pytest.raises(LimitReached):
            open_namespace(world.pool, "b", 256)
        world.pool.close_namespace(session, row)
        world.pool.close_namespace(session, row)  # it has not got it open any more
    with pytest.raises(LimitReached):
        open_namespace(world.pool, "b", 256)  # there is a page in it
    world.pool.flush(row)
    world.pool.tick(1.0)
    assert open_namespace(world.pool, "b", 256) == row
    world.pool.check()
