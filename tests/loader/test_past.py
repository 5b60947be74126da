"""Loads of pages on SSD that DRAM has no room for, read from the files by the loader's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import all_leased, eventually
from tests.pools import PoolProcess
from tests.store.disks import Fallible
from umbp.client import straight
from umbp.types import WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.loader.caches import keys_of, slots_for
from tests.loader.host_runtime import HostRuntime
from tests.loader.roomless import COUNT, LAYERS, SIZE, cache_of, loaded, served
from umbp.loader.bounce import Bounce
from umbp.loader.copies import Taken
from umbp.loader.handles import Load
from umbp.loader.past import Past
from umbp.loader.tensors import KvTensors


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    with served(tmp_path_factory.mktemp("ssd")) as made:
        yield made


def test_pages_without_room_are_read_past_dram_and_the_others_from_it(server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages in DRAM, pages on SSD and one that nobody has; in windows of a few."""
    monkeypatch.setattr("umbp.loader.past.WINDOW_BYTES", 2 * SIZE)
    with loaded(server) as (pool, _, _):
        assert pool.statistics().read_straight == COUNT - 3
        eventually(lambda: pool.status()["ssd"]["held_files"] == 0, "no file is held any more")


def test_after_a_load_that_found_no_room_in_its_middle_others_read_past_dram_at_once(server: PoolProcess, monkeypatch: Any) -> None:
    monkeypatch.setattr("umbp.loader.streams.AWAY_BYTES_MIN", 1 << 20)  # as loads are of 32 MiB and more
    monkeypatch.setattr("umbp.core.stages.STAGE_BYTES_MIN", 1 << 19)
    cache = cache_of()
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as pool, all_leased(holder, SIZE):
        space = cache.namespace(pool)
        with umbp.Loader(space, cache.tensors) as loader:
            for seed, cause, pages in ((6, "ssd", 0), (7, "no_room", COUNT)):
                slots = slots_for(seed, COUNT)
                load = loader.load(keys_of(range(COUNT)), slots, deadline=60.0)
                done = load.finish()
                assert done.missing.tolist() == [], done.reason
                assert cache.has(range(COUNT), slots).all()
                assert load.choice is not None
                assert (load.choice.cause, pool.statistics().read_straight) == (cause, pages)


def test_a_page_removed_meanwhile_is_missing(server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, slots = cache_of(), slots_for(2, COUNT)
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as pool, umbp.connect(server.socket) as other:
        space, theirs, keys, read = cache.namespace(pool), cache.namespace(other), keys_of(range(COUNT)), straight.read_refs

        def removing(*arguments: object, **more: bool) -> object:
            theirs.remove(keys[4:5])
            return read(*arguments, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(straight, "read_refs", removing)
        with all_leased(holder, SIZE), umbp.Loader(space, cache.tensors) as loader:
            done = loader.load(keys, slots, deadline=60.0).finish()
            assert done.missing.tolist() == [4], done.reason
            assert cache.has([at for at in range(COUNT) if at != 4], np.delete(slots, 4)).all()
            assert pool.statistics().read_straight == COUNT - 1
        cache.write([4], slots[4:5])
        with umbp.Loader(space, cache.tensors) as loader:  # for the next test
            assert loader.offload(keys[4:5], slots[4:5]).result().all(WriteStatus.STORED)
        eventually(lambda: pool.status()["ssd"]["keys"] >= COUNT, "it is on SSD again")
        eventually(lambda: pool.status()["leased_bytes"] == 0, "the pool does not hold it any more")


def test_a_read_that_hangs_does_not_keep_a_load_beyond_its_deadline(server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Fallible()
    stall = system.stalls["read"] = threading.Event()
    monkeypatch.setattr(straight, "_system", system)
    cache, slots = cache_of(), slots_for(3, COUNT)
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as pool, all_leased(holder, SIZE):
        space, keys = cache.namespace(pool), keys_of(range(COUNT))
        with umbp.Loader(space, cache.tensors) as loader:
            try:
                eventually(
                    lambda: len(loader.load(keys, slots, deadline=0.5).finish().missing) and straight._stuck.count, "a read is left behind"
                )
                before = {name: view.copy() for name, view in cache.views.items()}
                done = loader.load(keys, slots_for(4, COUNT), deadline=60.0).finish()
                assert done.missing.tolist() == [], done.reason  # by way of the pool
            finally:
                stall.set()
            eventually(lambda: not straight._stuck.count, "it is back")
            others = np.delete(np.arange(cache.pages), slots_for(4, COUNT))
            assert all((view[others] == before[name][others]).all() for name, view in cache.views.items()), "nothing came after the end"


def test_a_gpu_takes_such_pages_by_its_pinned_buffers(server: PoolProcess) -> None:
    """By the mover that a `DeviceMover` names for them, on the tests' runtime."""
    runtime = HostRuntime(str(server.shm_dir), {})
    cache = cache_of()
    tensors = KvTensors.of(cache.tensors, cache.layout)
    mover = Bounce(tensors, runtime)
    slots = slots_for(5, COUNT)
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as pool, all_leased(holder, SIZE):
        space = cache.namespace(pool)
        load = Load(COUNT, LAYERS, time.monotonic() + 60.0, None)
        there = Past(load, space, mover, Taken()).move(keys_of(range(COUNT)), slots, 60.0)
        assert there.all()
        assert cache.has(range(COUNT), slots).all()
        assert load.layers_ready == 0, "they make no layer ready"
