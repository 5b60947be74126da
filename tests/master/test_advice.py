"""Advice between a real master and real pools: copies of what is hot or leaving, and copies that are spare."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import umbp
from tests.master.test_cluster import IDENTITY, PAGE, put
from tests.masters import MasterProcess, call, until
from tests.pools import PoolProcess
from umbp.layout import Namespace

NAMESPACE = Namespace(**IDENTITY).digest().hex()


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    with MasterProcess("--advice-bandwidth", "64MiB") as process:
        yield process


def got(pool: PoolProcess, keys: np.ndarray) -> list[bytes]:
    """The bytes of these pages, which must be there without any fetch."""
    client = umbp.connect(pool.socket)
    try:
        space = client.namespace(**IDENTITY)
        assert space.lookup(keys).all()
        pages = [bytearray(PAGE) for _ in keys]
        assert space.get(keys, pages).all(umbp.ReadStatus.HIT)
        return [bytes(page) for page in pages]
    finally:
        client.close()


def test_a_hot_prefix_is_copied_to_another_node(master: MasterProcess) -> None:
    with master.pool() as a, master.pool() as b:
        master.synced(a, b)
        keys = put(a, 1, 2, 3)
        until(lambda: master.locations(bytes(keys[2])) == {(a.name, "dram")})
        master.post("/v1/policies/replication", {"name": "hot_prefixes"}, "PUT")
        try:
            body = {"namespace": NAMESPACE, "keys": [bytes(key).hex() for key in keys], "requester": "engine"}
            for _ in range(12):
                master.post("/v1/route", body)
            for key in keys:
                until(lambda key=bytes(key): master.locations(key) == {(a.name, "dram"), (b.name, "dram")})
            assert got(b, keys) == [bytes([number]) * PAGE for number in (1, 2, 3)]
            assert master.get("/v1/cluster")["advice"]["copy"] > 0
        finally:
            master.post("/v1/policies/replication", {"name": "none"}, "PUT")


def test_what_only_a_drained_node_has_is_copied_away(master: MasterProcess) -> None:
    with master.pool() as a, master.pool() as b:
        master.synced(a, b)
        keys = put(a, 11, 12)
        until(lambda: master.locations(bytes(keys[1])))
        master.post(f"/v1/nodes/{a.name}/drain")
        until(lambda: (b.name, "dram") in master.locations(bytes(keys[1])))
        a.kill()
        until(lambda: master.locations(bytes(keys[1])) == {(b.name, "dram")})
        assert got(b, keys) == [bytes([number]) * PAGE for number in (11, 12)]


def test_a_full_node_drops_what_another_one_promises_to_hold_and_nothing_else(master: MasterProcess) -> None:
    with master.pool(dram="4MiB") as full, master.pool(dram="64MiB") as roomy:
        master.synced(full, roomy)
        shared = put(full, *range(20, 36))
        put(roomy, *range(20, 36))
        alone = put(full, 50, 51)
        client = umbp.connect(full.socket)
        space, number = client.namespace(**IDENTITY), 0
        while call(full.http + "/v1/status")["allocated_bytes"] < 0.87 * call(full.http + "/v1/status")["capacity_bytes"]:
            number += 1
            fill = umbp.page_keys(np.full(16 * 16, 70_000 + number, np.uint32), page_tokens=16)
            space.put(fill, [bytes(PAGE)] * 16)
        client.close()
        until(lambda: all(master.locations(bytes(key)) == {(roomy.name, "dram")} for key in shared))
        assert master.locations(bytes(alone[0])) == {(full.name, "dram")}
        notes = [pin["note"] for pin in call(roomy.http + "/v1/pins")["pins"]]
        assert any(re.search("held while another node drops", note) for note in notes)
        assert got(roomy, shared)[0] == bytes([20]) * PAGE
