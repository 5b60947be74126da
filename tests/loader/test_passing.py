"""Loads of pages that there is no room for in DRAM: each is moved to its slots as it passes through."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import umbp
from tests.field.people import all_leased, eventually
from tests.pools import PoolProcess
from umbp.client.arrivals import arrive
from umbp.core.passage import passage_bytes
from umbp.types import Tier, WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import torch

from tests.loader.caches import TOKENS, Cache, keys_of, slots_for

LAYERS, WIDTH = 4, 16 << 10
SIZE = LAYERS * TOKENS * WIDTH  # 512 KiB: a chunk a layer
COUNT = 12
DRAM = 16 << 20


def cache_of() -> Cache:
    return Cache({"kv": ((WIDTH,) * LAYERS, torch.uint8)})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    """Pages 0 to COUNT are on its SSD."""
    folder = tmp_path_factory.mktemp("ssd")
    with PoolProcess("--ssd", f"{folder}:64MiB", "--ssd-admission", "always", "--ssd-files", "off", dram="16MiB") as made:
        cache, slots = cache_of(), np.arange(1, COUNT + 1)
        with umbp.connect(made.socket) as pool, umbp.Loader(cache.namespace(pool), cache.tensors) as loader:
            cache.write(range(COUNT), slots)
            assert loader.offload(keys_of(range(COUNT)), slots).result().all(WriteStatus.STORED)
            eventually(lambda: pool.status()["ssd"]["keys"] == COUNT, "they are on SSD")
        yield made
        assert "Traceback" not in made.log(), made.log()


@pytest.mark.parametrize("staged", [False, True], ids=["whole", "first layers first"])
def test_a_load_of_more_than_passes_at_once(server: PoolProcess, monkeypatch: pytest.MonkeyPatch, staged: bool) -> None:
    """Of pages in DRAM, pages on SSD and one that nobody has."""
    assert 4 * passage_bytes(DRAM) < COUNT * SIZE
    if staged:  # as loads are of 32 MiB and more
        monkeypatch.setattr("umbp.loader.streams.AWAY_BYTES_MIN", 1 << 20)
        monkeypatch.setattr("umbp.core.stages.STAGE_BYTES_MIN", 1 << 19)
    cache, slots = cache_of(), slots_for(1, COUNT + 1)
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as pool:
        space, keys = cache.namespace(pool), keys_of([*range(COUNT), 999])
        out = np.empty((3, SIZE), np.uint8)
        space.get(keys[[3, 8, 9]], out)
        with space.lease(keys[[3, 8, 9]]), all_leased(holder, SIZE), umbp.Loader(space, cache.tensors) as loader:
            assert space.locate(keys[:COUNT]).tolist() == [Tier.DRAM if at in (3, 8, 9) else Tier.SSD for at in range(COUNT)]
            held = pool.status()["leases"]
            load = loader.load(keys, slots, deadline=60.0)
            for layer in range(LAYERS):
                assert load.wait(layer)
                assert cache.has(range(COUNT), slots[:COUNT], layer).all(), "a layer is ready before all of it is there"
            done = load.finish()
            assert done.missing.tolist() == [COUNT], done.reason
            assert load.choice is not None
            assert load.choice.cause == ("ssd" if staged else "no_room")
            assert cache.has(range(COUNT), slots[:COUNT]).all()
            assert cache.untouched(slots[:COUNT])
            eventually(lambda: pool.status()["leases"] == held, "nothing that passed through is held")


def test_a_load_of_what_passes_through_for_somebody_else(server: PoolProcess) -> None:
    """The index shows such pages, and no lease holds them."""
    cache, slots = cache_of(), slots_for(2, 2)
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as other, umbp.connect(server.socket) as pool:
        space, keys = cache.namespace(pool), keys_of([0, 1])
        with all_leased(holder, SIZE), umbp.Loader(space, cache.tensors) as loader:
            theirs = cache.namespace(other)
            arrivals = theirs.run(arrive(theirs.operations, keys, 60.0, ()))
            try:
                eventually(lambda: theirs.run(arrivals.look()) or len(arrivals.passing()), "one has come, and is not taken")
                passing = arrivals.passing()
                assert space.lookup(keys)[passing].all()
                with space.lease(keys) as lease:
                    assert not lease.held.any()
                done = loader.load(keys[passing], slots[passing], deadline=60.0).finish()
                assert done.missing.tolist() == [], done.reason
                assert cache.has(passing, slots[passing]).all()
            finally:
                theirs.run(arrivals.end())
