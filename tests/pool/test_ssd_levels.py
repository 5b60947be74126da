"""A pool whose SSD tier has two levels: what is stored goes down, comes up when it is asked for, and is there after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.masters import call, metric
from tests.pools import PoolProcess
from umbp.types import ReadStatus, WriteStatus

SIZE = 65_536
COUNT = 400  # pages: 26 MiB, where DRAM has 16 and the first level 18


def keys_of(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def pages_of(*numbers: int) -> np.ndarray:
    return np.stack([np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8) for number in numbers])


def namespace(client: umbp.Pool) -> umbp.Namespace:
    return client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE), replicated=True)


def read_all(ns: umbp.Namespace) -> None:
    """All are there, every byte; so many at a time that DRAM has room for them."""
    for start in range(0, COUNT, 80):
        numbers = range(start, start + 80)
        out = np.zeros((80, SIZE), np.uint8)
        assert ns.get(keys_of(*numbers), out, deadline=60.0).all(ReadStatus.HIT)
        assert np.array_equal(out, pages_of(*numbers))


def ssd(pool: PoolProcess) -> dict[str, Any]:
    found: dict[str, Any] = call(pool.http + "/v1/status")["ssd"]
    return found | {level["name"]: level for level in found["levels"]}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolProcess]:
    options = ("--ssd", f"fast={tmp_path}/fast:24MiB", "--ssd", f"slow={tmp_path}/slow:128MiB", "--ssd-admission", "always")
    with PoolProcess(*options, dram="16MiB") as made:
        yield made


def test_pages_go_down_come_up_and_are_all_there_after_a_kill(pool: PoolProcess) -> None:
    with umbp.connect(pool.socket) as client:
        ns = namespace(client)
        for start in range(0, COUNT, 40):
            assert ns.put(keys_of(*range(start, start + 40)), pages_of(*range(start, start + 40))).all(WriteStatus.STORED)
            eventually(lambda: ssd(pool)["waiting"] == 0, "the queue is empty")
        eventually(lambda: ssd(pool)["keys"] == COUNT and not ssd(pool)["fast"]["offloading"], "all are on SSD, and at rest")
        seen = ssd(pool)
        assert [level["name"] for level in seen["levels"]] == ["fast", "slow"]
        assert [disk["level"] for disk in seen["disks"]] == ["fast", "slow"]
        assert seen["fast"]["keys"] + seen["slow"]["keys"] == COUNT
        assert seen["slow"]["keys"] > 90
        assert seen["fast"]["offloaded_keys"] + seen["fast"]["spilled_keys"] > 0
        assert (seen["evicted_keys"], seen["dropped_keys"]) == (0, 0)
        read_all(ns)  # the first ones are in no memory, and on the lower level
        eventually(lambda: ssd(pool)["slow"]["promoted_keys"] > 0, "what was read comes up")
        assert metric(pool, 'umbp_ssd_level_pages_total{level="slow",what="promoted"}') > 0
        assert metric(pool, 'umbp_ssd_level_capacity_bytes{level="fast"}') == seen["fast"]["capacity_bytes"]
    pool.kill()
    pool.segment.unlink()  # a reboot: the SSD alone has them
    pool.start()
    assert ssd(pool)["keys"] == COUNT
    with umbp.connect(pool.socket) as client:
        ns = namespace(client)
        read_all(ns)
        assert ns.remove(keys_of(*range(COUNT))).all()
        eventually(lambda: ssd(pool)["keys"] == 0, "and gone on both levels")
