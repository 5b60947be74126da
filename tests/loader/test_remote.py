"""From end to end: a prefix that one engine stored on its node is found and loaded on another node, told of by a real master."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import within
from tests.masters import MasterProcess, until
from tests.pools import together
from umbp.types import WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.loader.caches import Cache, keys_of, slots_for


@pytest.fixture(scope="module")
def world() -> Any:
    """A master and two of its pools."""
    with together(master := MasterProcess(), a := master.pool(), b := master.pool()):
        master.synced(a, b)
        yield master, a, b


def engine(pool: Any, tenant: str) -> tuple[umbp.Pool, Cache, umbp.Namespace]:
    client = umbp.connect(pool.socket)
    cache = Cache()
    return client, cache, cache.namespace(client, tenant=tenant)


def stored(cache: Cache, space: umbp.Namespace, numbers: range) -> None:
    slots = np.arange(1, len(numbers) + 1)
    cache.write(numbers, slots)
    with umbp.Loader(space, cache.tensors) as loader:
        assert loader.offload(keys_of(numbers), slots).result().all(WriteStatus.STORED)


def test_a_prefix_of_another_node_is_found_and_loaded(world: Any) -> None:
    master, a, b = world
    first, second = engine(a, "prefix"), engine(b, "prefix")
    numbers, slots = range(100, 124), slots_for(3, 24)
    try:
        stored(first[1], first[2], numbers)
        until(lambda: master.locations(bytes(keys_of(numbers)[-1])) == {(a.name, "dram")})
        _, cache, space = second
        stored(cache, space, numbers[:4])  # some of it is here already
        cache.wipe()
        with umbp.Loader(space, cache.tensors) as loader:
            assert loader.lookup(keys_of([*numbers, 999])) == 24
            load = loader.load(keys_of(numbers), slots)
            for layer in range(cache.layers):
                assert load.wait(layer)
                assert cache.has(numbers, slots, layer).all()
            assert load.finish().missing.tolist() == []
        assert cache.untouched(slots)
        until(lambda: master.locations(bytes(keys_of(numbers)[-1])) == {(a.name, "dram"), (b.name, "dram")})
    finally:
        first[0].close()
        second[0].close()


def test_when_the_other_node_dies_its_pages_are_to_be_recomputed_and_the_rest_is_there(world: Any) -> None:
    master, _, b = world
    with master.pool() as c:
        master.synced(c)
        first, second = engine(c, "dies"), engine(b, "dies")
        numbers, slots = range(200, 224), slots_for(4, 24)
        try:
            stored(first[1], first[2], numbers)
            stored(second[1], second[2], numbers[:10])
            until(lambda: master.locations(bytes(keys_of(numbers)[-1])) == {(c.name, "dram")})
            c.kill()
            _, cache, space = second
            cache.wipe()
            with umbp.Loader(space, cache.tensors) as loader, within(2.0):
                done = loader.load(keys_of(numbers), slots, deadline=2.0).finish()
            assert done.missing.tolist() == list(range(10, 24))
            assert cache.has(numbers[:10], slots[:10]).all()
            assert cache.untouched(slots[:10])
        finally:
            first[0].close()
            second[0].close()
