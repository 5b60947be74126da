"""Advice between a real master and real pools: copies of what is hot or leaving, and copies that are spare."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import numpy as np
import pytest

import umbp
from tests.master.test_cluster import IDENTITY, PAGE, keys_of, put
from tests.masters import MasterProcess, call, metric, metrics, reported, until
from tests.pools import PoolProcess, together
from umbp.layout import Namespace

NAMESPACE = Namespace(**IDENTITY).digest().hex()


RATE = 512 << 10


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    with MasterProcess("--advice-bandwidth", "512KiB") as process:
        yield process


@pytest.fixture(scope="module")
def pair(master: MasterProcess) -> Iterator[tuple[PoolProcess, PoolProcess]]:
    with together(a := master.pool(), b := master.pool()):
        master.synced(a, b)
        yield a, b


@pytest.fixture(scope="module")
def tight(master: MasterProcess) -> Iterator[tuple[PoolProcess, PoolProcess]]:
    """A small pool that is soon full, and a large one."""
    with together(full := master.pool(dram="4MiB"), roomy := master.pool(dram="64MiB")):
        master.synced(full, roomy)
        yield full, roomy


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


def flood(space: umbp.Namespace, number: int, base: int = 70_000, pages: int = 16) -> int:
    """Put more pages of a prompt of their own; the number of the next."""
    keys = umbp.page_keys(np.full(16 * pages, base + number, np.uint32), page_tokens=16)
    assert not space.put(keys, [bytes([number % 256]) * PAGE] * pages).refused.any()
    return number + 1


def fill(space: umbp.Namespace, pool: PoolProcess, share: float, base: int = 70_000) -> int:
    """Flood until this share of the pool is used; how many prompts that took."""
    number, status = 0, call(pool.http + "/v1/status")
    while status["allocated_bytes"] < share * status["capacity_bytes"]:
        number, status = flood(space, number, base), call(pool.http + "/v1/status")
    return number


def test_a_hot_prefix_is_copied_to_another_node(master: MasterProcess, pair: tuple[PoolProcess, PoolProcess]) -> None:
    a, b = pair
    keys = put(a, 1, 2, 3)
    until(lambda: master.locations(bytes(keys[2])) == {(a.name, "dram")})
    master.post("/v1/policies/replication", {"name": "hot_prefixes"}, "PUT")
    try:
        body = {"namespace": NAMESPACE, "keys": [bytes(key).hex() for key in keys], "requester": ""}
        for _ in range(12):
            master.post("/v1/route", body)
        for key in keys:
            until(lambda key=bytes(key): master.locations(key) == {(a.name, "dram"), (b.name, "dram")})
        assert got(b, keys) == [bytes([number]) * PAGE for number in (1, 2, 3)]
        assert master.get("/v1/cluster")["advice"]["copy"] > 0
    finally:
        master.post("/v1/policies/replication", {"name": "none"}, "PUT")


def test_new_pages_go_where_the_placement_policy_has_them(master: MasterProcess, pair: tuple[PoolProcess, PoolProcess]) -> None:
    a, b = pair
    copied = reported(b, "copied")
    master.post("/v1/policies/placement", {"name": "rendezvous"}, "PUT")
    try:
        keys = keys_of(*range(100, 140))
        body = {"namespace": NAMESPACE, "keys": [bytes(key).hex() for key in keys], "requester": a.name, "dry_run": True}
        placed = master.post("/v1/place", body)["nodes"]
        put(a, *range(100, 140))
        assert {a.name, b.name} == set(placed)
        for key, node in zip(keys, placed, strict=True):
            until(lambda key=bytes(key), node=node: (node, "dram") in master.locations(key))
        there = np.array([node == b.name for node in placed])
        assert got(b, keys[there]) == [bytes([number]) * PAGE for number, yes in zip(range(100, 140), there, strict=True) if yes]
        until(lambda: reported(b, "copied") - copied == there.sum())
    finally:
        master.post("/v1/policies/placement", {"name": "local_first"}, "PUT")


def test_what_only_a_drained_node_has_is_copied_away(master: MasterProcess, pair: tuple[PoolProcess, PoolProcess]) -> None:
    a, b = pair
    keys = put(a, 11, 12)
    until(lambda: master.locations(bytes(keys[1])))
    master.post(f"/v1/nodes/{a.name}/drain")
    until(lambda: (b.name, "dram") in master.locations(bytes(keys[1])))
    a.kill()
    until(lambda: master.locations(bytes(keys[1])) == {(b.name, "dram")})
    assert got(b, keys) == [bytes([number]) * PAGE for number in (11, 12)]
    b.stop()  # so that the others have only one another


def test_a_full_node_drops_what_another_one_promises_to_hold_and_nothing_else(
    master: MasterProcess, tight: tuple[PoolProcess, PoolProcess]
) -> None:
    full, roomy = tight
    shared = put(full, *range(20, 36))
    put(roomy, *range(20, 36))
    alone = put(full, 50, 51)
    client = umbp.connect(full.socket)
    fill(client.namespace(**IDENTITY), full, 0.87)
    client.close()
    until(lambda: all(master.locations(bytes(key)) == {(roomy.name, "dram")} for key in shared))
    assert master.locations(bytes(alone[0])) == {(full.name, "dram")}
    notes = [pin["note"] for pin in call(roomy.http + "/v1/pins")["pins"]]
    assert any(re.search("held while another node drops", note) for note in notes)
    assert got(roomy, shared)[0] == bytes([20]) * PAGE


def test_what_the_cluster_asks_for_outlives_what_only_was_put(master: MasterProcess) -> None:
    """Engines answer these prompts out of their own caches: the pool hears nothing of them, the master does, from a router."""
    with master.pool(dram="4MiB") as a:
        master.synced(a)
        client = umbp.connect(a.socket)
        space = client.namespace(**IDENTITY)
        prompts = [umbp.page_keys(np.full(16, 90_000 + number, np.uint32), page_tokens=16) for number in range(40)]
        for keys in prompts:
            space.put(keys, [bytes([7]) * PAGE])
        wanted, others = prompts[::2], prompts[1::2]
        until(lambda: all(master.locations(bytes(keys[0])) for keys in prompts))
        for keys in wanted:
            master.post("/v1/route", {"namespace": NAMESPACE, "keys": [bytes(keys[0]).hex()], "requester": a.name})
        base = 80_000  # pages that no other node has
        number = fill(space, a, 0.87, base)
        until(lambda: reported(a, "spared") >= len(wanted))
        assert metric(master, "umbp_master_judged_pages_total") > 0
        time.sleep(1.1)  # what was put within the last second is not taken while anything else can go
        for _ in range(30):  # half of what fits
            number = flood(space, number, base)
        assert space.lookup(np.concatenate(wanted)).all()
        assert not space.lookup(np.concatenate(others)).any()
        client.close()


def test_pages_move_from_a_full_node_to_a_roomy_one_at_the_rate_that_is_allowed_and_none_is_lost(
    master: MasterProcess, tight: tuple[PoolProcess, PoolProcess]
) -> None:
    full, roomy = tight
    client = umbp.connect(full.socket)
    space = client.namespace(**IDENTITY)
    stored = range(fill(space, full, 0.92))
    came, gone, dropped = 'umbp_fetched_bytes_total{source="peers"}', "umbp_evicted_keys_total", 'umbp_reported_total{what="dropped"}'
    before, had = metric(roomy, came), metrics(full)
    began = time.monotonic()
    master.post("/v1/policies/rebalancing", {"name": "even_fill"}, "PUT")
    share = lambda: call(full.http + "/v1/status")["allocated_bytes"] / call(full.http + "/v1/status")["capacity_bytes"]  # noqa: E731
    while share() >= 0.90:  # from there on no node is full
        moved = metric(roomy, came) - before
        assert moved <= RATE * (time.monotonic() - began + 2.0)  # a second's worth at once, and a second for what was measured late
        assert time.monotonic() - began < 60.0
        time.sleep(0.05)
    master.post("/v1/policies/rebalancing", {"name": "none"}, "PUT")
    assert metric(roomy, came) > before
    has = metrics(full)
    assert has[gone] - had[gone] == has[dropped] - had[dropped] > 0  # nothing went but what the other one holds
    other = umbp.connect(roomy.socket)
    there = other.namespace(**IDENTITY)
    lost = wrong = 0
    for number in stored:
        keys = umbp.page_keys(np.full(16 * 16, 70_000 + number, np.uint32), page_tokens=16)
        here, pages = space.lookup(keys), [bytearray(PAGE) for _ in keys]
        held = there.lookup(keys)
        lost += int(np.count_nonzero(~(here | held)))
        got = there.get(keys[held], [page for page, has in zip(pages, held, strict=True) if has]) if held.any() else None
        assert got is None or got.all(umbp.ReadStatus.HIT)
        wrong += sum(bytes(page) != bytes([number % 256]) * PAGE for page, has in zip(pages, held, strict=True) if has)
    assert (lost, wrong) == (0, 0)
    for each in (client, other):
        each.close()


def test_a_full_node_with_a_full_neighbour_serves_on_and_what_both_had_is_kept_by_one(
    master: MasterProcess, tight: tuple[PoolProcess, PoolProcess]
) -> None:
    full, _ = tight
    with master.pool(dram="4MiB") as other:
        master.synced(full, other)
        clients = [umbp.connect(pool.socket) for pool in (full, other)]
        spaces = [client.namespace(**IDENTITY) for client in clients]
        shared = put(full, *range(200, 216))
        put(other, *range(200, 216))
        numbers = [fill(space, pool, 0.88, base) for space, pool, base in zip(spaces, (full, other), (100_000, 110_000), strict=True)]
        until(lambda: (sum(space.lookup(shared).astype(int) for space in spaces) == 1).all())  # one of them has dropped it
        for _ in range(8):  # more than both have room for, while the one that has promised to keeps what the other one dropped
            numbers = [flood(space, number, base, 160) for space, number, base in zip(spaces, numbers, (100_000, 110_000), strict=True)]
        assert all(int(call(pool.http + "/v1/status")["counters"]["evicted_keys"]) > 500 for pool in (full, other))
        for at, key in enumerate(shared):
            (holder,) = [space for space in spaces if space.lookup(key[None]).all()]
            page = bytearray(PAGE)
            assert holder.get(key[None], [page]).all(umbp.ReadStatus.HIT)
            assert bytes(page) == bytes([200 + at]) * PAGE
        for client in clients:
            client.close()
