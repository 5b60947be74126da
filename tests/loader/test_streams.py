"""Loads from SSD begin with their first layers: while the disk still reads, and whatever happens before it has read the last."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.gate import Keeper
from tests.pools import PoolProcess
from tests.signpost import Signpost
from umbp.types import NOWHERE, ReadStatus, Tier, WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import torch

from tests.loader.caches import TOKENS, Cache, keys_of, slots_for

LAYERS, WIDTH = 8, 16 << 10
LAYER = TOKENS * WIDTH  # 128 KiB
SIZE = LAYERS * LAYER
COUNT = 40  # pages: 40 MiB
FIRST = COUNT * LAYER  # the bytes of the first layer of all


def status(pool: PoolProcess) -> Any:
    with urllib.request.urlopen(f"{pool.http}/v1/status", timeout=60) as answer:
        return json.load(answer)


def ssd_status(pool: PoolProcess) -> dict[str, int]:
    return dict(status(pool)["ssd"])


def merged(pool: PoolProcess) -> int:
    """Pages that were asked for while they were on their way already."""
    with urllib.request.urlopen(f"{pool.http}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("umbp_fetch_merged_pages_total ")).split()[1]))


def cache_of() -> Cache:
    return Cache({"kv": ((WIDTH,) * LAYERS, torch.uint8)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PoolProcess]:
    """With `COUNT` pages of namespace "t" on its SSD."""
    os.environ["SLOW_DISK"] = str(folder)
    options = ("--ssd", f"{folder / 'ssd'}:512MiB", "--ssd-admission", "always")
    with PoolProcess(*options, dram="128MiB", module="tests.slow_disk") as made:
        fill(made)
        yield made
        assert "Traceback" not in made.log(), made.log()


def fill(server: PoolProcess) -> None:
    """Pages 0 to COUNT on SSD."""
    cache = cache_of()
    with umbp.connect(server.socket) as pool:
        space = cache.namespace(pool, tenant="t")
        with umbp.Loader(space, cache.tensors) as loader:
            slots = np.arange(1, COUNT + 1)
            cache.write(range(COUNT), slots)
            assert loader.offload(keys_of(range(COUNT)), slots).result().all(WriteStatus.STORED)
        eventually(lambda: ssd_status(server)["keys"] == COUNT, "all are on SSD")


def evict_all(server: PoolProcess) -> None:
    """Nothing is in its DRAM. What has just been listed on SSD is held for a moment more by the batch that it was written with."""
    request = urllib.request.Request(f"{server.http}/v1/evict", b'{"bytes": "1GiB"}', {"Content-Type": "application/json"}, method="POST")

    def empty() -> bool:
        urllib.request.urlopen(request, timeout=60).close()
        return status(server)["keys"] == 0

    eventually(empty, "all has gone from DRAM")


@pytest.fixture
def disk(folder: Path) -> Iterator[Keeper]:
    made = Keeper(folder)
    yield made
    made.free()


@pytest.fixture
def pool(server: PoolProcess, disk: Keeper) -> Iterator[umbp.Pool]:
    """A client of a pool that has nothing in DRAM."""
    with umbp.connect(server.socket) as client:
        eventually(lambda: client.status()["being_written"] == 0, "nothing of the test before is on its way")
        evict_all(server)
        (disk.folder / "read").unlink(missing_ok=True)
        yield client
        disk.free()
        eventually(lambda: client.status()["leases"] == 0, "all leases are over")


def test_the_first_layer_is_there_before_the_last_is_read(pool: umbp.Pool, disk: Keeper) -> None:
    cache, slots = cache_of(), slots_for(1, COUNT)
    space = cache.namespace(pool, tenant="t")
    keys = keys_of(range(COUNT))
    assert (space.locate(keys) == Tier.SSD).all()
    stage = -(-(16 << 20) // FIRST) * FIRST  # at least 16 MiB: 4 of 8 layers
    disk.let(stage)
    with umbp.Loader(space, cache.tensors) as loader:
        assert loader.lookup(keys) == COUNT
        load = loader.load(keys, slots, deadline=30.0)
        for layer in range(4):
            assert load.wait(layer)
        early = {at: view.copy() for at, view in cache.views.items() if at[1] < 4}
        assert disk.read() == stage
        assert load.layers_ready == 4
        assert (space.locate(keys) == Tier.SSD).all(), "a page is listed before it is whole"
        assert space.prefix(keys) == 0
        disk.free()
        assert load.wait(LAYERS - 1)
        done = load.finish()
        assert load.choice is not None
        assert load.choice.cause == "ssd"
    assert done.missing.tolist() == [], done.reason
    assert done.read_bytes == COUNT * SIZE
    assert np.all(np.diff(done.ready_at) >= 0)
    assert cache.has(range(COUNT), slots).all()
    assert cache.untouched(slots)
    assert all((view[slots] == cache.views[at][slots]).all() for at, view in early.items()), "a layer was told before it was there"
    assert disk.read() == COUNT * SIZE, "a byte is read twice"
    assert (space.locate(keys) == Tier.DRAM).all()


def test_pages_in_dram_and_pages_that_nobody_has_are_part_of_the_same_load(pool: umbp.Pool, disk: Keeper) -> None:
    cache, slots = cache_of(), slots_for(2, 46)
    space = cache.namespace(pool, tenant="t")
    out = np.empty((3, SIZE), np.uint8)
    assert space.get(keys_of([0, 7, 39]), out).all(ReadStatus.HIT)
    numbers = [*range(COUNT), *range(900, 906)]
    with umbp.Loader(space, cache.tensors) as loader:
        done = loader.load(keys_of(numbers), slots, deadline=30.0).finish()
    assert done.missing.tolist() == list(range(40, 46))
    assert cache.has(range(COUNT), slots[:COUNT]).all()
    assert cache.untouched(slots[:COUNT])


def test_ranks_of_a_group_share_one_read_of_the_disk_and_each_moves_for_itself(server: PoolProcess, pool: umbp.Pool, disk: Keeper) -> None:
    caches, places = [cache_of(), cache_of()], [slots_for(8, COUNT), slots_for(9, COUNT)]
    disk.let(0)
    before = merged(server)
    with umbp.connect(server.socket) as other:
        loaders = [
            umbp.Loader(cache.namespace(client, tenant="t"), cache.tensors, umbp.Group("g", rank, 2))
            for rank, (cache, client) in enumerate(zip(caches, (pool, other), strict=True))
        ]
        loads = [loader.load(keys_of(range(COUNT)), slots, deadline=30.0) for loader, slots in zip(loaders, places, strict=True)]
        eventually(lambda: merged(server) == before + COUNT, "both wait for the same pages")
        disk.free()
        for load, cache, slots in zip(loads, caches, places, strict=True):
            done = load.finish()
            assert done.missing.tolist() == [], done.reason
            assert load.choice is not None
            assert (load.choice.mover, load.choice.cause) == ("solo", "ssd")
            assert cache.has(range(COUNT), slots).all()
            assert cache.untouched(slots)
        assert disk.read() == COUNT * SIZE
        for loader in loaders:
            loader.close()


def test_a_disk_that_hangs_costs_its_pages_and_no_more_time_than_the_deadline(pool: umbp.Pool, disk: Keeper) -> None:
    cache, slots = cache_of(), slots_for(3, COUNT)
    space = cache.namespace(pool, tenant="t")
    out = np.empty((3, SIZE), np.uint8)
    assert space.get(keys_of([0, 7, 39]), out).all(ReadStatus.HIT)
    stage = -(-(16 << 20) // (37 * LAYER)) * 37 * LAYER
    disk.let(stage)
    with umbp.Loader(space, cache.tensors) as loader:
        load = loader.load(keys_of(range(COUNT)), slots, deadline=3.0)
        assert load.wait(0)
        done = load.finish()
        missing = np.setdiff1d(np.arange(COUNT), [0, 7, 39])
        assert done.missing.tolist() == missing.tolist()
        assert cache.has([0, 7, 39], slots[[0, 7, 39]]).all()
        before = {at: view.copy() for at, view in cache.views.items()}
        disk.free()
        again = loader.load(keys_of(range(COUNT)), slots_for(4, COUNT), deadline=30.0).finish()
        assert again.missing.tolist() == []
        assert cache.has(range(COUNT), slots_for(4, COUNT)).all()
        others = np.setdiff1d(np.arange(cache.pages), slots_for(4, COUNT))
        assert all((view[others] == before[at][others]).all() for at, view in cache.views.items()), "written after finish"


def test_a_cancelled_load_stops_the_reading(pool: umbp.Pool, disk: Keeper) -> None:
    cache, slots = cache_of(), slots_for(5, COUNT)
    space = cache.namespace(pool, tenant="t")
    stage = -(-(16 << 20) // FIRST) * FIRST
    disk.let(stage)
    with umbp.Loader(space, cache.tensors) as loader:
        load = loader.load(keys_of(range(COUNT)), slots)
        assert load.wait(0)
        load.cancel()
        assert load.finish().missing.tolist() == list(range(COUNT))
        eventually(lambda: pool.status()["leases"] == 0, "it has let go")
        disk.free()
        done = loader.load(keys_of(range(COUNT)), slots, deadline=30.0).finish()
        assert done.missing.tolist() == [], done.reason
        assert cache.has(range(COUNT), slots).all()


def damage(folder: Path, bad: dict[int, int]) -> None:
    """On disk: of each of these pages a byte of this layer."""
    source = cache_of()
    files = {path: path.read_bytes() for path in (folder / "ssd").glob("segment-*")}
    for number, layer in bad.items():
        source.write([number], [1])
        body = b"".join(source.views["kv", each][1].tobytes() for each in range(LAYERS))
        ((path, at),) = [(path, data.index(body)) for path, data in files.items() if body in data]
        with path.open("r+b") as file:
            file.seek(at + layer * LAYER + 1000)
            file.write(b"\xff")


def test_pages_damaged_in_a_late_layer_are_exactly_those_that_are_missing(folder: Path, server: PoolProcess, pool: umbp.Pool) -> None:
    """And they are listed no more, and can be put again; the others of the load are whole."""
    cache, slots = cache_of(), slots_for(6, COUNT)
    space = cache.namespace(pool, tenant="t")
    source = cache_of()
    bad = {5: 7, 17: 6, 30: 0}  # page: its damaged layer
    damage(folder, bad)
    with umbp.Loader(space, cache.tensors) as loader:
        load = loader.load(keys_of(range(COUNT)), slots)
        assert load.wait(LAYERS - 1)
        done = load.finish()
    good = [number for number in range(COUNT) if number not in bad]
    assert done.missing.tolist() == sorted(bad)
    assert cache.has(good, slots[good]).all()
    assert (space.locate(keys_of(sorted(bad))) == NOWHERE).all()
    assert ssd_status(server)["damaged_keys"] == 3
    source.write(bad, range(1, 4))
    values = np.concatenate([source.views["kv", layer][1:4] for layer in range(LAYERS)], axis=1)
    assert space.put(keys_of(list(bad)), values).all(WriteStatus.STORED)
    eventually(lambda: ssd_status(server)["keys"] == COUNT, "they are on SSD again")


def test_a_pool_that_is_killed_in_the_middle_costs_the_pages_that_were_on_their_way(
    server: PoolProcess, pool: umbp.Pool, disk: Keeper
) -> None:
    cache, slots = cache_of(), slots_for(7, COUNT)
    space = cache.namespace(pool, tenant="t")
    disk.let(26 << 20)  # the first stage, also where pages that were put again lie elsewhere and are read whole
    with umbp.Loader(space, cache.tensors) as loader:
        load = loader.load(keys_of(range(COUNT)), slots, deadline=30.0)
        assert load.wait(0)
        assert 0 < load.layers_ready < LAYERS, "it is not in the middle"
        server.kill()
        assert load.finish().missing.tolist() == list(range(COUNT))
        disk.free()
        server.start()
        eventually(lambda: loader.lookup(keys_of(range(COUNT))) == COUNT, "all are found again")
        done = loader.load(keys_of(range(COUNT)), slots, deadline=30.0).finish()
        assert done.missing.tolist() == [], done.reason
        assert cache.has(range(COUNT), slots).all()


def test_a_page_that_fails_in_the_middle_is_taken_from_another_node_that_has_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never from one that has other bytes for it: its first layers may be in use."""
    monkeypatch.setenv("SLOW_DISK", str(tmp_path))
    ssd = ("--ssd", f"{tmp_path / 'ssd'}:512MiB", "--ssd-admission", "always")
    with (
        Signpost() as master,
        PoolProcess("--master", master.url, *ssd, dram="128MiB", module="tests.slow_disk") as here,
        PoolProcess("--master", master.url, dram="32MiB") as there,
        umbp.connect(here.socket) as pool,
        umbp.connect(there.socket) as other,
    ):
        fill(here)
        master.seconds = 1.0  # so that the disk is asked first
        disk, cache = Keeper(tmp_path), cache_of()
        space, replica = cache.namespace(pool, tenant="t"), cache.namespace(other, tenant="t")

        def taken(numbers: list[int], same: int, first: int, different: int, nowhere: int) -> bool:
            """Whether it went so: it does not where the signpost is not heard in time, on a busy machine."""
            damage(tmp_path, {same: 7, first: 0, different: 6, nowhere: 5})
            source, slots = cache_of(), slots_for(8, len(numbers))
            source.write([same, first, different], [1, 2, 3])
            source.views["kv", 0][3] ^= 1  # computed again, it came out a little different
            values = np.concatenate([source.views["kv", layer][1:4] for layer in range(LAYERS)], axis=1)
            assert replica.put(keys_of([same, first, different]), values).all(WriteStatus.STORED)
            master.add(there, replica, keys_of([same, first, different]))
            evict_all(here)
            cache.wipe()
            disk.let(-(-(16 << 20) // (len(numbers) * LAYER)) * len(numbers) * LAYER)
            with umbp.Loader(space, cache.tensors) as loader:
                load = loader.load(keys_of(numbers), slots, deadline=30.0)
                assert load.wait(0)
                at_once = cache.has([first], slots[[numbers.index(first)]], 0).all()  # whole, while the others come in parts
                disk.free()
                missing = [numbers[at] for at in load.finish().missing.tolist()]
            good = [number for number in numbers if number not in missing]
            assert cache.has(good, slots[[numbers.index(number) for number in good]]).all(), "wrong bytes"
            assert {different, nowhere} <= set(missing) <= {different, nowhere, same, first}
            return bool(at_once) and len(missing) == 2

        tries = [(5, 30, 17, 31), (6, 29, 18, 32)]
        assert taken([*range(COUNT)], *tries[0]) or taken([number for number in range(COUNT) if number not in tries[0]], *tries[1])
        eventually(lambda: pool.status()["leases"] == 0, "nothing is held")
        assert "Traceback" not in here.log(), here.log()
