"""Loads from other nodes begin with their first layers, and end with the right bytes or a miss, whatever happens in between."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually, within
from tests.gate import Keeper
from tests.pools import PoolProcess
from tests.signpost import Signpost
from umbp.client.arrivals import COMING, LOST, WHOLE, Arrivals, arrive
from umbp.core.stages import stages
from umbp.types import ReadStatus, Tier, WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import torch

from tests.loader.caches import TOKENS, Cache, keys_of, slots_for

LAYERS, WIDTH = 8, 16 << 10
LAYER = TOKENS * WIDTH  # 128 KiB
SIZE = LAYERS * LAYER
COUNT = 40  # pages: 40 MiB
FIRST = 4 * LAYER  # of each page: what the first stage is, as it has 16 MiB at least
EVERY = range(COUNT)
DEADLINE = 300.0  # of loads that are to succeed


class Node:
    """A pool, and a client of it with a cache."""

    def __init__(self, pool: PoolProcess, tenant: str) -> None:
        self.pool, self.client, self.cache = pool, umbp.connect(pool.socket), Cache({"kv": ((WIDTH,) * LAYERS, torch.uint8)})
        self.space = self.cache.namespace(self.client, tenant=tenant)

    def rows(self, numbers: Any, flip: int | None = None) -> np.ndarray:
        """The pages as they are stored, (n, SIZE); ``flip``: a layer that came out a little different."""
        slots = np.arange(1, len(list(numbers)) + 1)
        self.cache.write(numbers, slots)
        if flip is not None:
            self.cache.views["kv", flip][slots, 1000] ^= 1
        return np.concatenate([self.cache.views["kv", layer][slots] for layer in range(LAYERS)], axis=1)

    def store(self, numbers: Any, flip: int | None = None) -> None:
        assert self.space.put(keys_of(numbers), self.rows(numbers, flip)).all(WriteStatus.STORED)

    def damage(self, number: int, layer: int) -> None:
        """A byte of its memory, after its checksum was made."""
        eventually(lambda: self.client.status()["unsummed_batches"] == 0, "all have checksums")
        (row,) = self.rows([number])
        with self.pool.segment.open("r+b") as file:
            at = file.read().index(row.tobytes())
            file.seek(at + layer * LAYER + 1000)
            file.write(bytes([row[layer * LAYER + 1000] ^ 1]))

    def evict_all(self) -> None:
        post = urllib.request.Request(
            f"{self.pool.http}/v1/evict", b'{"bytes": "1GiB"}', {"Content-Type": "application/json"}, method="POST"
        )
        urllib.request.urlopen(post, timeout=60).close()


class World:
    """Three nodes: ``here`` lacks what ``there``, behind a gate, and ``replica`` have."""

    def __init__(self, tenant: str, master: Signpost, gate: Keeper, here: Node, there: Node, replica: Node) -> None:
        self.tenant, self.master, self.gate, self.here, self.there, self.replica = tenant, master, gate, here, there, replica
        self.slots = slots_for(sum(here.space.identity.digest()), COUNT)

    def give(self, node: Node, numbers: Any, flip: int | None = None) -> None:
        node.store(numbers, flip)
        self.master.add(node.pool, node.space, keys_of(numbers))

    def load(self, loader: umbp.Loader, numbers: Any = EVERY, *, deadline: float = DEADLINE) -> umbp.Load:
        """Until the gate has let the first stage through, and its layers are in their slots."""
        self.here.cache.wipe()
        load = loader.load(keys_of(numbers), self.slots[: len(numbers)], deadline=deadline)
        for layer in range(4):
            assert load.wait(layer), load.finish().reason
        assert load.layers_ready == 4
        return load

    def ends(self, load: umbp.Load, missing: list[int], numbers: Any = EVERY) -> None:
        """With exactly these pages missing, and the others right."""
        done = load.finish()
        assert [numbers[at] for at in done.missing.tolist()] == missing, done.reason
        good = [at for at, number in enumerate(numbers) if number not in missing]
        assert self.here.cache.has([numbers[at] for at in good], self.slots[good]).all(), "wrong bytes"
        assert self.here.cache.untouched(self.slots[: len(numbers)])


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Signpost, Keeper, Any]]:
    """Makes pools that follow the signpost; those called "there" have the gate before them."""
    gate = Keeper(tmp_path_factory.mktemp("gate"))
    open_folder = tmp_path_factory.mktemp("open")
    with Signpost() as master, ExitStack() as stack:

        def make(*options: str, gated: bool = False, dram: str = "128MiB") -> PoolProcess:
            os.environ["SLOW_PEER"] = str(gate.folder if gated else open_folder)
            return stack.enter_context(PoolProcess("--master", master.url, *options, dram=dram, module="tests.slow_peer"))

        yield master, gate, make


@pytest.fixture(scope="module")
def unhurt(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[PoolProcess, PoolProcess, PoolProcess]:
    """Those of tests that harm none of them."""
    _, _, make = pools
    return make("--ssd", f"{tmp_path_factory.mktemp('ssd')}:512MiB", "--ssd-admission", "always"), make(gated=True), make()


@pytest.fixture
def world(pools: Any, unhurt: Any, request: pytest.FixtureRequest) -> Iterator[World]:
    master, gate, make = pools
    here, there, replica = unhurt
    if "killed" in request.node.name:
        there = make(gated=True)
    (gate.folder / "read").unlink(missing_ok=True)
    nodes = [Node(pool, request.node.name) for pool in (here, there, replica)]
    gate.let(COUNT * FIRST)
    yield World(request.node.name, master, gate, *nodes)
    gate.free()
    for node in nodes:
        if node.pool.alive:
            eventually(lambda node=node: node.client.status()["leases"] == 0, "nothing is held")
            node.space.flush()
        node.client.close()
        assert "Traceback" not in node.pool.log(), node.pool.log()


def test_the_first_layers_are_there_before_the_last_are_sent(world: World) -> None:
    here = world.here
    world.give(world.there, EVERY)
    with umbp.Loader(here.space, here.cache.tensors) as loader:
        assert loader.lookup(keys_of(EVERY)) == COUNT
        load = world.load(loader)
        early = {at: view.copy() for at, view in here.cache.views.items() if at[1] < 4}
        assert world.gate.read() == COUNT * FIRST
        assert (here.space.locate(keys_of(EVERY)) == Tier.REMOTE).all(), "a page is listed before it is whole"
        world.gate.free()
        world.ends(load, [])
    assert load.choice is not None
    assert (load.choice.mover, load.choice.cause) == ("solo", "remote")
    assert all((view[world.slots] == here.cache.views[at][world.slots]).all() for at, view in early.items()), "told before it was there"
    assert world.gate.read() == COUNT * SIZE, "a byte is sent twice"
    assert (here.space.locate(keys_of(EVERY)) == Tier.DRAM).all()


def test_a_load_of_pages_in_dram_on_ssd_and_on_another_node_has_the_first_layers_of_all_first(world: World) -> None:
    here, disk, near, far = world.here, range(4), range(4, 8), range(8, COUNT)
    here.store(disk)
    operations = here.space.operations
    eventually(lambda: operations.on_ssd(operations.look(keys_of(disk)), keys_of(disk)).all(), "they are on SSD")
    eventually(lambda: here.evict_all() or (here.space.locate(keys_of(disk)) == Tier.SSD).all(), "they are there alone")
    here.store(near)
    world.give(world.there, far)
    tiers = [Tier.SSD] * 4 + [Tier.DRAM] * 4 + [Tier.REMOTE] * len(far)
    assert here.space.locate(keys_of(EVERY)).tolist() == tiers
    world.gate.let(len(far) * FIRST)
    with umbp.Loader(here.space, here.cache.tensors) as loader:
        load = world.load(loader)
        assert world.gate.read() == len(far) * FIRST
        world.gate.free()
        world.ends(load, [])
    assert world.gate.read() == len(far) * SIZE


def test_a_node_that_is_killed_between_stages_costs_what_no_other_has(world: World) -> None:
    here, there, replica = world.here, world.there, world.replica
    world.give(there, EVERY)
    world.give(replica, range(3, COUNT - 1))
    world.give(replica, [0], flip=1)  # of the shown layers: not the page that was begun
    world.give(replica, [1], flip=7)
    with umbp.Loader(here.space, here.cache.tensors) as loader:
        load = world.load(loader)
        there.pool.kill()
        done = load.finish()
    assert done.missing.tolist() == [0, 2, COUNT - 1], done.reason
    good = [number for number in EVERY if number not in (0, 1, 2, COUNT - 1)]
    assert here.cache.has(good, world.slots[good]).all()
    here.cache.views["kv", 7][world.slots[1], 1000] ^= 1  # the replica's, all of it
    assert here.cache.has([1], world.slots[[1]]).all()


def test_a_page_whose_bytes_are_not_what_was_summed_is_missing_or_another_nodes(world: World) -> None:
    """Also where the wrong byte was among those that were moved early, and another node has the right page."""
    world.give(world.there, EVERY)
    world.give(world.replica, [5, 6])
    for number, layer in ((5, 0), (6, 7), (7, 0), (8, 7)):
        world.there.damage(number, layer)
    with umbp.Loader(world.here.space, world.here.cache.tensors) as loader:
        load = world.load(loader)
        world.gate.free()
        world.ends(load, [5, 7, 8])
        assert world.here.space.locate(keys_of([5, 6, 7, 8])).tolist() == [Tier.REMOTE, Tier.DRAM, Tier.REMOTE, Tier.REMOTE]


def test_pages_that_go_or_change_between_stages_are_missing(world: World) -> None:
    world.give(world.there, EVERY)
    with umbp.Loader(world.here.space, world.here.cache.tensors) as loader:
        load = world.load(loader)
        world.there.space.remove(keys_of([3, 4, 5]))
        world.there.store([4])
        world.there.store([5], flip=7)
        world.gate.free()
        world.ends(load, [3, 4, 5])
        again = loader.load(keys_of([4]), [1], deadline=DEADLINE).finish()
        assert again.missing.tolist() == []


def test_nothing_more_is_ordered_for_a_load_that_was_cancelled(world: World) -> None:
    here = world.here
    world.give(world.there, EVERY)
    world.gate.let(COUNT * FIRST - 1)  # one of the two orders of the first stage waits
    with umbp.Loader(here.space, here.cache.tensors) as loader:
        load = loader.load(keys_of(EVERY), world.slots, deadline=DEADLINE)
        eventually(world.gate.read, "one has passed")
        load.cancel()
        assert load.finish().missing.tolist() == list(EVERY)
    here.client.status()  # so the pool has heard of it
    world.gate.free()
    eventually(lambda: here.client.status()["being_written"] == 0, "what was reserved is given back")
    assert world.gate.read() == COUNT * FIRST
    assert (here.space.locate(keys_of(EVERY)) == Tier.REMOTE).all()


def test_a_node_that_does_not_answer_costs_its_pages_and_no_more_time_than_the_deadline(world: World) -> None:
    here, near = world.here, [0, 7, 39]
    world.give(world.there, EVERY)
    here.store(near)
    world.gate.let(0)
    with umbp.Loader(here.space, here.cache.tensors) as loader, within(2.0):
        here.cache.wipe()
        late = loader.load(keys_of(EVERY), world.slots, deadline=2.0)
        world.ends(late, [number for number in EVERY if number not in near])
    world.gate.free()
    out = np.empty((COUNT, SIZE), np.uint8)
    eventually(lambda: here.space.get(keys_of(EVERY), out, deadline=60.0).all(ReadStatus.HIT), "all can be had again")
    assert (out == world.there.rows(EVERY)).all()


def test_a_page_that_was_given_up_does_not_count_though_it_comes_a_moment_later(world: World) -> None:
    """It has been moved no more since. Another who waits for it longer has it."""
    world.give(world.there, EVERY)
    layout = world.here.space.identity.layout
    order, keys = stages(layout.offsets, layout.sizes, SIZE, COUNT).ranges, keys_of(EVERY)
    with umbp.connect(world.here.pool.socket) as other:
        spaces = [world.here.space, world.here.cache.namespace(other, tenant=world.tenant)]
        patient, hasty = (
            space.run(arrive(space.operations, keys, seconds, order)) for space, seconds in zip(spaces, (DEADLINE, 0.05), strict=True)
        )

        def all_are(arrivals: Arrivals, space: umbp.Namespace, state: int) -> bool:
            space.run(arrivals.look())
            return bool((arrivals.state == state).all())

        eventually(lambda: all_are(patient, spaces[0], COMING), "all have begun to come")
        eventually(lambda: all_are(hasty, spaces[1], LOST), "its time is over")
        world.gate.free()
        eventually(lambda: all_are(patient, spaces[0], WHOLE), "all have come")
        assert patient.held().all()
        assert not hasty.held().any()
        for arrivals, space in ((patient, spaces[0]), (hasty, spaces[1])):
            space.run(arrivals.end())
