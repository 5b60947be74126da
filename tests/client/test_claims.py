"""Claims over a real pool: what a client has claimed can be leased, whatever others store meanwhile, and without a call until then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.pools import PoolProcess
from umbp.client.claims import AREA_BYTES, Claims
from umbp.core.claims import RING_AT
from umbp.errors import LimitReached

SIZE = 16 << 10
LRU = ("--eviction", "lru")


def namespace_of(client: Any, tenant: str = "claims") -> umbp.Namespace:
    return client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE), tenant=tenant)


def random_keys(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, (count, 32), dtype=np.uint8)


@contextmanager
def storm(pool: PoolProcess) -> Iterator[threading.Event]:
    """Another client stores pages as fast as it can. The event is set whenever it has stored a batch."""
    over, stored = threading.Event(), threading.Event()

    def store() -> None:
        rng = np.random.default_rng(1)
        with umbp.connect(pool.socket) as client:
            namespace = namespace_of(client, "storm")
            while not over.is_set():
                namespace.put(random_keys(rng, 256), np.zeros((256, SIZE), np.uint8))
                stored.set()

    thread = threading.Thread(target=store)
    thread.start()
    try:
        yield stored
    finally:
        over.set()
        thread.join()


def claimed(namespace: umbp.Namespace, claims: Claims, keys: np.ndarray, name: str = "r") -> tuple[Any, np.ndarray]:
    look = namespace.operations.look(keys)
    assert look is not None
    which = np.flatnonzero(look.found.hit)
    return look.found.only(which), claims.claim(name, look.bond, look.found.ids[which], look.found.versions[which])


def test_what_was_claimed_can_be_leased_under_eviction() -> None:
    rng = np.random.default_rng(2)
    with PoolProcess(*LRU, dram="8MiB") as pool, umbp.connect(pool.socket) as client, storm(pool) as stored:
        namespace = namespace_of(client)
        claims = Claims(client._link)
        namespace.run(claims.enter())
        sure, gone, before = 0, 0, random_keys(rng, 1)[:0]
        for _ in range(200):  # a few where this thread runs as soon as it may
            keys = random_keys(rng, 48)
            namespace.put(keys, np.ones((48, SIZE), np.uint8))
            found, there = claimed(namespace, claims, keys)
            sure += int(np.count_nonzero(there))
            for _ in range(3):  # as many pages as the pool has: all that is not claimed goes
                stored.clear()
                assert stored.wait(60.0)
            with namespace.lease(keys) as lease:
                held = set(lease.look.found.ids[lease.held].tolist()) if lease.look is not None else set()
                assert set(found.ids[there].tolist()) <= held, "a claimed page could not be leased"
            gone += int(np.count_nonzero(~namespace.lookup(before)))
            before = keys
            if sure > 500 < gone:
                break
        assert sure > 500, "pages were there to claim"
        assert gone > 500, "and those of the round before went, which are claimed no more"
        assert client.status()["counters"]["evicted_keys"] > 1000
        assert claims.pages_max == AREA_BYTES[0] // 8 - RING_AT, "a small pool gives little"
        share = len(claims._link.bond_now().data) // 16  # of scratch, for one session
        for _ in range(share // AREA_BYTES[0] - 1):
            namespace.run(Claims(client._link).enter())
        with pytest.raises(LimitReached, match="scratch"):
            namespace.run(Claims(client._link).enter())


def claims_give_way(namespace: umbp.Namespace, claims: Claims) -> None:
    """The last claim counts, and what is needed."""
    keys, needed = random_keys(np.random.default_rng(5), 512), True
    namespace.put(keys, np.ones((512, SIZE), np.uint8))
    for number in range(2 * claims.pages_max // 512):
        assert claimed(namespace, claims, keys, f"s{number}")[1].all()
        assert claims._end - claims._first == 512
    claims.need(f"s{number}", lambda: needed)
    for number in range(2 * claims.pages_max // 512):
        got = claimed(namespace, claims, keys, f"r{number}")[1]
        if not got.any():
            break
    assert not got.any(), "what is needed is not given up for what comes after it"
    assert number == claims.pages_max // 512 - 1
    claims.let_go()
    assert claims._end - claims._first == claims.pages_max // 512 * 512
    needed = False
    claims.let_go()
    assert claims._end == claims._first
    assert claimed(namespace, claims, keys)[1].all()


def test_a_pool_that_restarts_is_entered_anew() -> None:
    keys = random_keys(np.random.default_rng(4), 8)
    with PoolProcess() as pool, umbp.connect(pool.socket) as client:
        namespace = namespace_of(client)
        claims = Claims(client._link)
        namespace.put(keys, np.ones((8, SIZE), np.uint8))
        assert claims.pages_max == 0
        assert not claimed(namespace, claims, keys)[1].any(), "there is no place for claims yet"
        namespace.run(claims.enter())
        assert claims.pages_max == (64 << 20) // 256 // 8 - RING_AT
        assert claimed(namespace, claims, keys)[1].all()
        claims_give_way(namespace, claims)
        pool.kill()
        pool.restart()
        eventually(lambda: client.connected, "it is back")
        assert not claims.ready
        assert not claimed(namespace, claims, keys)[1].any()
        namespace.run(claims.enter())
        assert claimed(namespace, claims, keys)[1].all()
