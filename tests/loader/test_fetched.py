"""Loads of pages that are not in DRAM: found by the lookup, brought, moved; what does not come in time is missing, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import umbp
from tests.field.people import bytes_of, eventually, keys_of, values_of, within
from tests.pools import PoolProcess

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import torch

from tests.loader.caches import TOKENS, Cache

LAYERS, WIDTH = 3, 64
SIZE = LAYERS * TOKENS * WIDTH


@pytest.fixture(scope="module")
def server() -> Iterator[PoolProcess]:
    with PoolProcess(module="tests.sourced", dram="16MiB") as running:
        yield running


@pytest.fixture
def pool(server: PoolProcess) -> Iterator[umbp.Pool]:
    with umbp.connect(server.socket) as client:
        yield client
        eventually(lambda: client.status()["leases"] == 0, "nothing is held any more")


def cache_of() -> Cache:
    return Cache({"kv": ((WIDTH,) * LAYERS, torch.uint8)})


def holds(cache: Cache, number: int, slot: int) -> bool:
    """Whether this page of `tests.sourced` is in this slot, in all layers."""
    page = bytes_of(number, SIZE).reshape(LAYERS, -1)
    return all(bool((cache.views["kv", layer][slot] == page[layer]).all()) for layer in range(LAYERS))


@pytest.mark.parametrize("group", [False, True])
def test_a_load_brings_what_is_elsewhere(pool: umbp.Pool, group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBP_LOAD", "staged" if group else "auto")
    cache = cache_of()
    space = cache.namespace(pool, tenant=f"group {group}")
    space.put(keys_of(1, 2), values_of([1, 2], SIZE))
    numbers = (1, 1001, 5001, 2, 404)
    with umbp.Loader(space, cache.tensors, umbp.Group("g", 0, 1) if group else None) as loader:
        assert loader.lookup(keys_of(*numbers)) == 4
        assert loader.lookup(keys_of(1, 2)) == 2
        done = loader.load(keys_of(*numbers), np.arange(1, 6)).finish()
        assert loader.statistics().way == ("staged" if group else "solo")
    assert done.missing.tolist() == [4]
    assert all(holds(cache, number, slot) for slot, number in enumerate(numbers[:4], start=1))
    assert cache.untouched([1, 2, 3, 4])


def test_what_does_not_come_in_time_is_missing_and_the_rest_is_there(pool: umbp.Pool) -> None:
    cache = cache_of()
    space = cache.namespace(pool, tenant="in time")
    space.put(keys_of(1), values_of([1], SIZE))
    with umbp.Loader(space, cache.tensors) as loader, within(3.0):
        done = loader.load(keys_of(1, 8001, 1001), [1, 2, 3], deadline=3.0).finish()
    assert done.missing.tolist() == [1]
    assert holds(cache, 1, 1)
    assert holds(cache, 1001, 3)
    assert cache.untouched([1, 3])


def test_a_cancelled_load_does_not_wait_for_what_is_on_its_way(pool: umbp.Pool) -> None:
    cache = cache_of()
    with umbp.Loader(cache.namespace(pool, tenant="cancel"), cache.tensors) as loader:
        load = loader.load(keys_of(7001), [1])
        load.cancel()
        assert load.finish().missing.tolist() == [0]
    assert cache.untouched([])
