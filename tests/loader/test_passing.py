"""Loads of pages that there is no room for in DRAM: each is moved to its slots as it passes through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import umbp
from tests.field.people import all_leased, eventually
from tests.pools import PoolProcess
from umbp.client.arrivals import arrive
from umbp.core.passage import passage_bytes

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.loader.caches import keys_of, slots_for
from tests.loader.roomless import COUNT, DRAM, SIZE, cache_of, loaded, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    with served(tmp_path_factory.mktemp("ssd"), "--ssd-files", "off") as made:
        yield made


@pytest.mark.parametrize("staged", [False, True], ids=["whole", "first layers first"])
def test_a_load_of_more_than_passes_at_once(server: PoolProcess, monkeypatch: pytest.MonkeyPatch, staged: bool) -> None:
    assert 4 * passage_bytes(DRAM) < COUNT * SIZE
    if staged:  # as loads are of 32 MiB and more
        monkeypatch.setattr("umbp.loader.streams.AWAY_BYTES_MIN", 1 << 20)
        monkeypatch.setattr("umbp.core.stages.STAGE_BYTES_MIN", 1 << 19)
    with loaded(server) as (pool, held, load):
        assert load.choice is not None
        assert load.choice.cause == ("ssd" if staged else "no_room")
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
