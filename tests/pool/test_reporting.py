"""What a pool tells its master, with the master that every pool has: `umbp.pool.reporting` over a real process."""

from __future__ import annotations

import umbp
from tests.field.people import keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import WriteStatus

SIZE = 4096


def test_what_came_and_went_before_it_was_told_is_no_news() -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        for number in range(60):
            assert space.put(keys_of(number), values_of([number], SIZE)).all(WriteStatus.STORED)
            assert space.remove(keys_of(number)).all()
            if number % 10 == 9:
                assert space.put(keys_of(1000 + number), values_of([number], SIZE)).all(WriteStatus.STORED)
        assert pool.status()["keys"] == 6
        assert pool.statistics().connects == 1
        assert "internal error" not in server.log()
