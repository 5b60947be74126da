"""vLLM's scheduler and OffloadingConnector over a real pool, by way of our OffloadingSpec."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import ModelConfig
from vllm.v1.kv_offload.base import make_offload_key

from tests.engines.vllm.engine import OFFLOADING, SPEC, EngineProcess, stored_bytes
from tests.engines.vllm.world import BLOCK, LAYERS, Options, World, prompt
from tests.field.people import eventually
from tests.pools import PoolProcess
from umbp.client import link
from umbp.errors import ConfigError
from umbp.integrations import vllm_mover, vllm_offloading
from umbp.integrations.vllm_blocks import page_keys_of
from umbp.integrations.vllm_mover import LoadFailed, Mover
from umbp.integrations.vllm_offloading import Catalog, Held, Notes
from umbp.loader import Group


@pytest.fixture
def options(server: PoolProcess, request: pytest.FixtureRequest) -> Options:
    return Options(server.socket, connector=OFFLOADING, extra={**SPEC, "umbp_tenant": request.node.name[:200]})


def catalog(world: World) -> Catalog:
    found: Catalog = world.scheduler.connector.connector_scheduler.manager
    return found


def mover(world: World, rank: int = 0) -> Mover:
    found: Mover = world.workers[rank].connector.connector_worker.worker
    return found


def forget(world: World, name: str, *blocks: int, rank: int | None = None) -> None:
    hashes = world.requests[name].block_hashes
    for namespaces in catalog(world)._open.values():
        for namespace in namespaces if rank is None else [namespaces[rank]]:
            namespace.remove(page_keys_of([hashes[block] for block in blocks]))


@pytest.mark.parametrize(("kind", "interleaved"), [("full", False), ("full", True), ("mla", False), ("hybrid", False)])
def test_stored_blocks_come_back(options: Options, kind: str, interleaved: bool) -> None:
    with World(replace(options, kind=kind, interleaved=interleaved)) as world:
        assert world.serve("a", prompt(1, 5)) == (0, 5 * BLOCK + 3)
        size = stored_bytes(world)
        assert size > 0
        world.drop()
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        assert stored_bytes(world) == size
        assert world.serve("longer", prompt(1, 5, 0) + prompt(2, 2)) == (5 * BLOCK, 2 * BLOCK + 3)
        assert stored_bytes(world) > size
        assert catalog(world)._held == {}


def test_wrong_bytes_would_be_noticed(options: Options) -> None:
    with World(options) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        ((namespace,),) = catalog(world)._open.values()
        keys = page_keys_of(world.requests["a"].block_hashes)
        namespace.remove(keys[3:4])
        namespace.put(keys[3:4], np.zeros((1, namespace.object_bytes), np.uint8))
        with pytest.raises(AssertionError, match="hold something else"):
            world.serve("b", prompt(1, 5))


def test_what_was_promised_is_held_until_it_is_loaded(options: Options) -> None:
    with World(options) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        prepare, seen = catalog(world).prepare_load, []

        def evicted_first(keys: Any, context: Any) -> Any:
            ((namespace,),) = catalog(world)._open.values()
            seen.append([lease.held.all() for _, lease in context.get_state(Held).leases])
            namespace.put(page_keys_of([b"filler %d" % n for n in range(4096)]), np.zeros((4096, namespace.object_bytes), np.uint8))
            return prepare(keys, context)

        catalog(world).prepare_load = evicted_first
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        assert seen == [[True]]


def test_a_missing_block_ends_the_prefix(options: Options) -> None:
    with World(options) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        forget(world, "a", 3)
        assert world.serve("b", prompt(1, 5)) == (3 * BLOCK, 2 * BLOCK + 3)
        world.drop()
        assert world.serve("c", prompt(1, 5)) == (5 * BLOCK, 3)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_and_stages_need_each_others_blocks(options: Options, tp: int, pp: int) -> None:
    with World(replace(options, tp=tp, pp=pp)) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        world.drop()
        forget(world, "a", 2, rank=1)
        assert world.serve("c", prompt(1, 5)) == (2 * BLOCK, 3 * BLOCK + 3)


def test_ranks_with_the_same_kv_store_one_copy(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "use_mla", True)  # the model here is none; vLLM asks it
    monkeypatch.setenv("UMBP_LOAD", "staged")
    monkeypatch.setattr(vllm_mover, "Group", partial(Group, meet_seconds=1.0, patience_seconds=30.0))  # however busy the machine is
    with PoolProcess(dram="512MiB") as pool, World(replace(options, pool=pool.socket, kind="mla", tp=2)) as world:
        world.serve("a", prompt(1, 20))
        assert stored_bytes(world) == 20 * sum(cache.shape[1] for cache in world.workers[0].caches.values())
        assert [len(namespaces) for namespaces in catalog(world)._open.values()] == [1]
        world.drop()
        assert world.serve("b", prompt(1, 20)) == (20 * BLOCK, 3)
        assert [mover(world, rank)._loaders[0].statistics().staged_loads for rank in range(2)] == [1, 1]


def test_preempted_requests_end_well(options: Options) -> None:
    with World(replace(options, blocks=14, budget=48)) as world:
        for round_number in range(2):
            for number in range(3):
                world.add(f"{round_number} {number}", prompt(number, 4, 0), answers=3 * BLOCK)
            world.run()
            world.drop()
        assert world.seen.preempted
        assert all(request.is_finished() and request.num_output_tokens == 3 * BLOCK for request in world.requests.values())


def test_new_weights_leave_nothing(options: Options) -> None:
    with World(options) as world:
        world.serve("a", prompt(1, 5))
        assert world.scheduler.reset_prefix_cache(reset_connector=True)
        assert world.serve("b", prompt(1, 5)) == (0, 5 * BLOCK + 3)


def test_stored_and_evicted_blocks_are_told(options: Options) -> None:
    with World(replace(options, events="inproc://unused")) as world:
        published: list[Any] = []
        world.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
        world.serve("a", prompt(1, 5))
        cpu = [event for event in published if getattr(event, "medium", None) == "CPU"]
        assert sum(len(event.block_hashes) for event in cpu) == 5
        forget(world, "a", 4)
        deadline = time.monotonic() + 60
        while not any(type(event).__name__ == "BlockRemoved" and event.medium == "CPU" for event in published):
            assert time.monotonic() < deadline
            world.step()


def test_a_layout_that_was_noted_for_another_configuration_is_none(options: Options) -> None:
    with World(options) as world:
        facts, pool = catalog(world)._facts, catalog(world)._pool
        (group,) = Notes(pool, facts).read_or_none(0) or []
        assert group.sizes == tuple(world.workers[0].caches[f"model.layers.{layer}.attn"].shape[1] for layer in range(LAYERS))
        assert Notes(pool, facts).read_or_none(99) is None
        assert Notes(pool, replace(facts, namespace="{}")).read_or_none(0) is None
        assert Notes(pool, replace(facts, engine_id="another")).read_or_none(0) is None


@pytest.fixture
def own(options: Options) -> Iterator[tuple[PoolProcess, World]]:
    with PoolProcess() as pool, World(replace(options, pool=pool.socket)) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        yield pool, world


def killed_at_load(pool: PoolProcess, world: World) -> None:
    submit = mover(world).submit_load

    def submit_load(*arguments: Any, **more: Any) -> bool:
        if pool.alive:
            pool.kill()
        return submit(*arguments, **more)

    mover(world).submit_load = submit_load


def test_a_load_waits_for_a_pool_that_starts_again(own: tuple[PoolProcess, World]) -> None:
    pool, world = own
    killed_at_load(pool, world)
    world.add("b", prompt(1, 5))
    while pool.alive:
        world.step()
    for _ in range(20):
        world.step()
    assert "b" not in world.seen.first
    pool.restart()
    world.run()
    assert world.seen.first["b"][0] == (5 * BLOCK, 3)


def test_a_load_that_cannot_be_had_stops_the_engine_rather_than_lie(
    own: tuple[PoolProcess, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, world = own
    killed_at_load(pool, world)
    monkeypatch.setattr(vllm_mover, "RETRY_SECONDS", 0.2)
    world.add("b", prompt(1, 5))
    with pytest.raises(LoadFailed, match="5 blocks"):
        world.run()
    mover(world)._jobs.clear()


def test_without_a_pool_all_is_computed(own: tuple[PoolProcess, World]) -> None:
    pool, world = own
    pool.kill()
    eventually(lambda: not catalog(world)._pool.connected, "the client notices")
    assert world.serve("b", prompt(1, 5)) == (0, 5 * BLOCK + 3)


def test_the_scheduler_does_not_wait_for_a_frozen_pool(own: tuple[PoolProcess, World], monkeypatch: pytest.MonkeyPatch) -> None:
    pool, world = own
    world.serve("another", prompt(2, 5))
    world.drop()
    monkeypatch.setattr(vllm_offloading, "LEASE_SECONDS", 0.05)
    manager, late, submitted = catalog(world), [], []
    lookup, submit = manager.lookup, manager._thread.submit

    def noted(*arguments: Any) -> Any:
        answer = lookup(*arguments)
        late.append(manager._late is not None and not manager._late.done())
        return answer

    def counted(work: Any, *arguments: Any) -> Any:
        submitted.append(work.__name__)
        return submit(work, *arguments)

    manager.lookup = noted
    monkeypatch.setattr(manager._thread, "submit", counted)
    pool.signal(signal.SIGSTOP)
    try:
        world.add("b", prompt(1, 5))
        world.add("c", prompt(2, 5))
        world.step()
    finally:
        pool.signal(signal.SIGCONT)
    assert all(late)  # the call was still out at the end of each question
    assert submitted.count("take") == 1  # one request has waited for it
    world.run()
    assert [world.seen.first[name][0] for name in ("b", "c")] == [(0, 5 * BLOCK + 3)] * 2

    def found_again() -> bool:
        world.drop()
        return world.serve(f"later {len(world.requests)}", prompt(1, 5)) == (5 * BLOCK, 3)

    eventually(found_again, "leases are asked for again")
    assert manager._held == {}


def test_a_flush_does_not_wait_for_a_frozen_pool_to_store(own: tuple[PoolProcess, World], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM waits for the stores of a request that is preempted before it gives its blocks to another."""
    pool, world = own
    monkeypatch.setattr(link, "CALL_SECONDS_MAX", 3600.0)
    monkeypatch.setattr(link.Bond.call, "__kwdefaults__", {"seconds": 3600.0, "late": None})  # which no run would wait for
    worker = mover(world)
    worker._pool._connection.hurry(3600.0)
    before = stored_bytes(world)
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(8)]
    pool.signal(signal.SIGSTOP)
    try:
        for job in (1001, 1002):
            worker.submit_store(job, SimpleNamespace(block_ids=np.arange(8)), vllm_mover.Blocks(keys))
        worker.wait({1001, 1002})
        assert {each.job_id for each in worker.get_finished()} == {1001, 1002}
    finally:
        pool.signal(signal.SIGCONT)
    world.run()
    assert stored_bytes(world) == before


@pytest.mark.parametrize(
    ("extra", "field"),
    [({"umbp_pol": "x"}, "umbp_pol"), ({"umbp_revision": 1}, "umbp_revision"), ({"blocks_per_chunk": 4}, "blocks_per_chunk")],
)
def test_an_option_that_is_wrong_stops_the_start(options: Options, extra: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        World(replace(options, extra={**options.extra, **extra}))


def test_an_engine_that_is_killed_finds_its_blocks_again(server: PoolProcess) -> None:
    with EngineProcess(server.socket, "killed", "offloading") as engine:
        there, computed, stored = engine.serve("a", 1)
        assert (there, computed) == (0, 5 * BLOCK + 3)
        assert stored > 0
    with EngineProcess(server.socket, "killed", "offloading") as engine:
        assert engine.serve("a", 1) == [5 * BLOCK, 3, 0]
        assert engine.serve("b", 2) == [0, 5 * BLOCK + 3, stored]
