"""What a pool tells its master, with the master that every pool has: `umbp.pool.reporting` over a real process."""

from __future__ import annotations

import numpy as np

import umbp
from tests.field.people import keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import WriteStatus

SIZE = 4096


def test_what_came_and_was_flushed_before_it_was_told_is_no_news() -> None:
    with PoolProcess(dram="32MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        for _ in range(4):
            for start in range(0, 8192, 1024):
                numbers = list(range(start, start + 1024))
                assert space.put(keys_of(*numbers), np.zeros((1024, SIZE), np.uint8)).all(WriteStatus.STORED)
            space.flush()
        assert space.put(keys_of(1), values_of([1], SIZE)).all(WriteStatus.STORED)
        assert server.alive
        assert pool.statistics().connects == 1
        assert "internal error" not in server.log()
