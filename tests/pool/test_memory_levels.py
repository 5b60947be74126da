"""A pool whose memory has two levels: pages go down and come up while they are read, and no reader sees other bytes or a miss."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import umbp
from tests.field.people import eventually
from tests.masters import call, metric
from tests.pools import PoolProcess
from umbp.cli.views import status_view
from umbp.store import numa
from umbp.types import ReadStatus, WriteStatus

NODE = numa.numa_nodes()[0]
SIZE = 65_536
COUNT = 400  # pages: 26 MiB, of which near memory has 8, and all of it 64
BATCH = 40
MOVED_MIN = 1500  # pages that have gone up and down while they were read


def keys_of(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def pages_of(*numbers: int) -> np.ndarray:
    return np.stack([np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8) for number in numbers])


PAGES = pages_of(*range(COUNT))


def namespace(client: umbp.Pool) -> umbp.Namespace:
    return client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE), replicated=True)


def read(ns: umbp.Namespace, start: int) -> None:
    """One batch, in both ways: copied without a lease, and looked at in place with one."""
    numbers = range(start, start + BATCH)
    out = np.zeros((BATCH, SIZE), np.uint8)
    status = ns.get(keys_of(*numbers), out)
    assert status.all(ReadStatus.HIT), f"{[str(one) for one in status]}"
    assert np.array_equal(out, PAGES[start : start + BATCH])
    with ns.lease(keys_of(*numbers)) as lease:
        assert lease.held.all()
        assert all(np.array_equal(lease.view(at), PAGES[start + at]) for at in range(0, BATCH, 8))
        assert lease.check().all()


def levels(pool: PoolProcess) -> dict[str, dict[str, Any]]:
    return {level["name"]: level for level in call(pool.http + "/v1/status")["levels"]}


def moved(pool: PoolProcess) -> int:
    return sum(level["offloaded_keys"] + level["promoted_keys"] for level in levels(pool).values())


@pytest.fixture
def pool() -> Iterator[PoolProcess]:
    options = ("--numa", f"near={NODE}:8MiB", "--numa", f"far={NODE}:56MiB", "--numa-move-rate", "4GiB")
    with PoolProcess(*options, dram="64MiB") as made:
        yield made


def test_pages_are_whole_and_there_while_they_move_and_after_a_kill(pool: PoolProcess) -> None:
    over, wrong = threading.Event(), list[BaseException]()

    def reader(first: int) -> None:
        try:
            with umbp.connect(pool.socket) as client:
                ns, start = namespace(client), first
                while not over.is_set():
                    read(ns, start)
                    start = (start + BATCH) % COUNT
        except BaseException as error:  # noqa: BLE001 - the test raises it
            if not over.is_set():
                wrong.append(error)

    with umbp.connect(pool.socket) as client:
        ns = namespace(client)
        for start in range(0, COUNT, BATCH):
            assert ns.put(keys_of(*range(start, start + BATCH)), PAGES[start : start + BATCH]).all(WriteStatus.STORED)
        seen = levels(pool)
        assert list(seen) == ["near", "far"]
        assert seen["near"]["spilled_keys"] + seen["near"]["offloaded_keys"] >= COUNT - 8 * 16
        threads = [threading.Thread(target=reader, args=(first,)) for first in (0, 200)]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: wrong or moved(pool) >= MOVED_MIN, "pages go up and down")
        finally:
            over.set()
            pool.kill()  # in the middle of it
            for thread in threads:
                thread.join()
    assert not wrong
    pool.start()
    with umbp.connect(pool.socket) as client:
        ns = namespace(client)
        for start in range(0, COUNT, BATCH):
            read(ns, start)
        status = call(pool.http + "/v1/status")
        assert (status["keys"], status["counters"]["evicted_keys"]) == (COUNT, 0)
        assert ns.remove(keys_of(*range(COUNT))).all()
        eventually(lambda: call(pool.http + "/v1/status")["used_bytes"] == 0, "nothing of a move is left")


def test_levels_are_seen_in_status_metrics_and_by_people(pool: PoolProcess) -> None:
    status = call(pool.http + "/v1/status")
    assert [(region["numa_node"], region["level"], region["capacity_bytes"]) for region in status["regions"]] == [
        (NODE, "near", 8 << 20),
        (NODE, "far", 56 << 20),
    ]
    assert metric(pool, 'umbp_level_capacity_bytes{level="near"}') == 8 << 20
    assert metric(pool, 'umbp_level_pages_total{level="far",what="promoted"}') == 0
    assert metric(pool, "umbp_moving_bytes") == 0
    console = Console(width=200)
    with console.capture() as said:
        console.print(status_view(status))
    assert "level near" in said.get()
    assert f"numa node {NODE} far" in said.get()
