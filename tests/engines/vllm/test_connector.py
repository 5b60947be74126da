"""vLLM's scheduler and UMBPStoreConnector over a real pool: stored, dropped, restored; lost on the way; preempted; killed."""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.umbp.data import BlockLoadBatch, BlockStoreBatch

from tests.engines.vllm.engine import EngineProcess, stored_bytes
from tests.engines.vllm.world import BLOCK, LAYERS, Options, World, prompt
from tests.field.people import bytes_of, eventually, keys_of
from tests.pools import PoolProcess
from umbp.client import link
from umbp.integrations import vllm, vllm_runtime
from umbp.integrations.vllm_blocks import page_keys_of
from umbp.integrations.vllm_runtime import Lookups, Transfers
from umbp.loader import Group
from umbp.loader.copies import Copies

ASYNC = pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])


def lookups(world: World) -> Lookups:
    found: Lookups = world.scheduler.connector.connector_scheduler.runtime
    return found


def transfers(world: World, rank: int = 0) -> Transfers:
    found: Transfers = world.workers[rank].connector.connector_worker.runtime
    return found


def forget(world: World, name: str, *blocks: int, tp: int | None = None) -> None:
    """These blocks of a request are evicted, in all groups and ranks or in one rank."""
    hashes = world.requests[name].block_hashes
    for place, namespace in lookups(world)._open.items():
        if tp in (None, place.tp_rank):
            namespace.remove(page_keys_of([hashes[block] for block in blocks]))


@pytest.fixture
def options(server: PoolProcess, request: pytest.FixtureRequest) -> Options:
    return Options(server.socket, extra={"umbp_tenant": request.node.name[:200]})


@ASYNC
@pytest.mark.parametrize(("kind", "interleaved"), [("full", False), ("full", True), ("mla", False), ("hybrid", False)])
def test_stored_blocks_come_back(options: Options, kind: str, interleaved: bool, load_async: bool) -> None:
    with World(replace(options, kind=kind, interleaved=interleaved, load_async=load_async)) as world:
        assert world.serve("a", prompt(1, 5)) == (0, 5 * BLOCK + 3)
        size = stored_bytes(world)
        world.drop()
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        assert world.serve("longer", prompt(1, 5, 0) + prompt(2, 2)) == (5 * BLOCK, 2 * BLOCK + 3)
        assert stored_bytes(world) == size * 7 // 5 if kind != "hybrid" else size < stored_bytes(world) < 2 * size
    assert world.seen.failed_blocks == set()


def test_wrong_bytes_would_be_noticed(options: Options) -> None:
    with World(options) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        (namespace,) = lookups(world)._open.values()
        keys = page_keys_of(world.requests["a"].block_hashes)
        namespace.remove(keys[3:4])
        namespace.put(keys[3:4], np.zeros((1, namespace.object_bytes), np.uint8))
        with pytest.raises(AssertionError, match="hold something else"):
            world.serve("b", prompt(1, 5))


@ASYNC
def test_what_vanishes_between_lookup_and_load_is_recomputed(options: Options, load_async: bool) -> None:
    with World(replace(options, load_async=load_async)) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        runtime = transfers(world)
        load_blocks, lost = runtime.load_blocks, []

        def evicted_first(plans: Any) -> Any:
            forget(world, "a", 1, 3)
            lost.extend([plans.block_ids[1], plans.block_ids[3]])
            return load_blocks(plans)

        runtime.load_blocks = evicted_first
        world.add("b", prompt(1, 5))
        world.run()
        runtime.load_blocks = load_blocks
        assert world.seen.failed_blocks == set(lost)
        assert len(lost) == 2
        assert BLOCK in [computed for computed, _ in world.seen.first["b"]]  # rewound to the first lost block
        assert world.requests["b"].is_finished()
        world.drop()
        assert world.serve("c", prompt(1, 5)) == (5 * BLOCK, 3)  # what was recomputed is stored again


def test_a_request_of_several_groups_that_lost_a_block_is_looked_up_again(options: Options) -> None:
    with World(replace(options, kind="hybrid")) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        runtime = transfers(world)
        load_blocks = runtime.load_blocks
        runtime.load_blocks = lambda plans: (forget(world, "a", 4), load_blocks(plans))[1]
        assert world.serve("b", prompt(1, 5)) == (4 * BLOCK, BLOCK + 3)
        assert world.seen.failed_requests == {"b"}


def counted(world: World) -> list[Any]:
    """The loads that are started from now on."""
    runtime, loads = transfers(world), []
    load_blocks = runtime.load_blocks
    runtime.load_blocks = lambda plans: (job := load_blocks(plans), loads.append(job))[0]
    return loads


def hurry(world: World, seconds: float) -> None:
    """Loads have so long from now on."""
    for rank in range(len(world.workers)):
        transfers(world, rank)._settings = replace(transfers(world, rank)._settings, deadline_seconds=seconds)


@ASYNC
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_load_that_fails_though_the_blocks_are_there_is_not_started_again(options: Options, kind: str, load_async: bool) -> None:
    with World(replace(options, kind=kind, load_async=load_async)) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        loads = counted(world)
        hurry(world, 1e-9)
        world.serve("b", prompt(1, 5))
        assert (0, 5 * BLOCK + 3) in world.seen.first["b"]
        assert len(loads) == 1
        hurry(world, 60.0)
        world.drop()
        assert world.serve("c", prompt(1, 5)) == (5 * BLOCK, 3)
        assert world.scheduler.connector._loads == {}


def test_a_request_that_loses_a_block_each_time_is_computed(options: Options) -> None:
    with World(replace(options, kind="hybrid")) as world:
        world.serve("a", prompt(1, 7))
        world.drop()
        runtime = transfers(world)
        load_blocks, left = runtime.load_blocks, list(range(7))
        runtime.load_blocks = lambda plans: (forget(world, "a", left.pop()), load_blocks(plans))[1]
        assert world.serve("b", prompt(1, 7)) == (0, 7 * BLOCK + 3)
        assert len(left) == 7 - vllm.LOADS_MAX


def test_a_preempted_request_may_load_again() -> None:
    loads = vllm.Loads(preemptions=0)
    assert loads.offer(80)
    loads.started()
    assert not loads.offer(80)  # the same that failed
    assert not loads.offer(16)  # it is being computed
    assert vllm.Loads(preemptions=1).offer(80)


@ASYNC
def test_requests_are_computed_over_a_frozen_pool(options: Options, load_async: bool) -> None:
    with PoolProcess() as pool, World(replace(options, pool=pool.socket, load_async=load_async)) as world:
        world.serve("a", prompt(1, 5))
        world.serve("another", prompt(2, 5))
        world.drop()
        loads = counted(world)
        hurry(world, 0.5)
        pool.signal(signal.SIGSTOP)
        try:
            world.add("b", prompt(1, 5))
            world.add("c", prompt(2, 5))
            world.run()
        finally:
            pool.signal(signal.SIGCONT)
        for name in ("b", "c"):
            assert world.requests[name].is_finished()
            assert (0, 5 * BLOCK + 3) in world.seen.first[name]
        assert len(loads) == 2
        hurry(world, 60.0)
        _wait_connected(world)
        world.drop()
        assert world.serve("d", prompt(1, 5)) == (5 * BLOCK, 3)


def test_a_frozen_pool_holds_up_the_forward_pass_once_and_shortly(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_runtime, "SILENT_SECONDS", 3600.0)
    patience = vllm_runtime.BEGIN_SECONDS
    monkeypatch.setattr(vllm_runtime, "BEGIN_SECONDS", 0.1)
    with PoolProcess() as pool, World(replace(options, pool=pool.socket, load_async=False)) as world:
        for number in range(3):
            world.serve(f"stored {number}", prompt(number, 5))
        world.drop()
        loads = counted(world)
        hurry(world, 3600.0)  # which no run would wait for
        pool.signal(signal.SIGSTOP)
        try:
            for number in range(3):
                world.serve(f"again {number}", prompt(number, 5))
                assert (0, 5 * BLOCK + 3) in world.seen.first[f"again {number}"]
        finally:
            pool.signal(signal.SIGCONT)
        parts = [job.parts[0] for job in loads]
        assert [part.handle.silent if part.handle else part.error for part in parts] == [True, *["the pool was silent just now"] * 2]
        transfers(world)._silent_until = 0.0  # an hour later
        monkeypatch.setattr(vllm_runtime, "BEGIN_SECONDS", patience)
        _wait_connected(world)
        world.drop()
        assert world.serve("at last", prompt(1, 5)) == (5 * BLOCK, 3)


def test_without_recompute_one_is_warned(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "umbp.integrations.vllm"), World(replace(options, policy="fail")):
        assert 'set "kv_load_failure_policy": "recompute"' in caplog.text


def test_a_sync_load_waits_for_one_layer_at_a_time(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, move = threading.Event(), Copies.move

    def gated(copies: Copies, data: Any, layer: int, route: Any) -> None:
        assert layer == 0 or gate.wait(60)
        move(copies, data, layer, route)

    with World(replace(options, load_async=False)) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        monkeypatch.setattr(Copies, "move", gated)
        connector, waits = world.workers[0].connector, []
        wait = connector.wait_for_layer_load

        def noted(name: str) -> None:
            wait(name)
            waits.append((name, [load.layers_ready for _, load in transfers(world)._running]))
            gate.set()

        connector.wait_for_layer_load = noted
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        assert waits[0] == ("model.layers.0.attn", [1])  # the first layer was computed on while all others were still out
        assert [name for name, _ in waits[:LAYERS]] == [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
        assert type(connector).requires_piecewise_for_cudagraph({"load_async": False})
        assert not type(connector).requires_piecewise_for_cudagraph({})


@ASYNC
def test_preempted_requests_end_well(options: Options, load_async: bool) -> None:
    with World(replace(options, blocks=14, load_async=load_async, budget=48)) as world:
        for round_number in range(2):
            for number in range(3):
                world.add(f"{round_number} {number}", prompt(number, 4, 0), answers=3 * BLOCK)
            world.run()
            world.drop()
        assert world.seen.preempted
        assert all(request.is_finished() and request.num_output_tokens == 3 * BLOCK for request in world.requests.values())


def test_a_cancelled_load_lets_go_of_its_blocks(options: Options) -> None:
    with World(replace(options, blocks=256, budget=4096)) as world:
        world.serve("a", prompt(1, 200))
        world.drop()
        keys = [f"x:tp0:pcp0:dcp0:pp0:g0:{each.hex()}" for each in world.requests["a"].block_hashes[:200]]
        runtime = transfers(world)
        plans = BlockLoadBatch(keys, list(range(20, 220)), [0] * 200, "r")
        job = runtime.cancel(runtime.load_blocks(plans))
        after = world.workers[0].memory.clone()
        assert job.status.value in ("failed", "completed")
        assert runtime.poll(job) is job
        assert runtime.take_evicted_keys() == []
        assert (world.workers[0].memory == after).all()


def test_a_preemption_does_not_wait_for_a_frozen_pool_to_store(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector cancels the store of a request that is preempted; what is computed after that in its blocks is not stored."""
    monkeypatch.setattr(link, "CALL_SECONDS_MAX", 3600.0)
    monkeypatch.setattr(link.Bond.call, "__kwdefaults__", {"seconds": 3600.0, "late": None})  # which no run would wait for
    with PoolProcess() as pool, World(replace(options, pool=pool.socket)) as world:
        runtime = transfers(world)
        runtime._pool._connection.hurry(3600.0)
        keys = [f"x:tp0:pcp0:dcp0:pp0:g0:{number:064x}" for number in range(8)]
        pool.signal(signal.SIGSTOP)
        try:
            none: list[Any] = [None] * 8
            plans = BlockStoreBatch(keys, list(range(8)), [0] * 8, [b""] * 8, none, [()] * 8, [BLOCK] * 8, "r")
            jobs = [runtime.store_blocks(plans) for _ in range(2)]
            for job in jobs:
                assert runtime.poll(job) is None
                assert runtime.cancel(job).failed_keys == set(keys)
        finally:
            pool.signal(signal.SIGCONT)
        loader = runtime._loaders[0]
        loader.close()
        assert loader.statistics().offloaded_bytes == 0
        assert not runtime._namespaces[0].lookup(vllm_runtime.hashes_of(keys)).any()


def test_prefill_in_pieces_is_one_chain(options: Options) -> None:
    with World(replace(options, budget=48)) as world:
        runtime, parents = transfers(world), []
        offload = runtime._loaders[0].offload

        def noted(keys: Any, slots: Any, **more: Any) -> Any:
            parents.append(more["parent"])
            return offload(keys, slots, **more)

        runtime._loaders[0].offload = noted
        world.serve("a", prompt(1, 7))
        hashes = world.requests["a"].block_hashes
        assert parents == [None, hashes[2], hashes[5]]


def test_lookups_in_a_thread_of_their_own_find_the_same(options: Options) -> None:
    with World(replace(options, kind="hybrid", extra={**options.extra, "lookup_async": True})) as world:
        assert world.serve("a", prompt(1, 5)) == (0, 5 * BLOCK + 3)
        world.drop()
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)


@pytest.mark.parametrize(("kind", "groups"), [("full", 1), ("hybrid", 2)])
def test_a_request_is_noted_once_however_often_it_is_looked_at(options: Options, kind: str, groups: int, tmp_path: Path) -> None:
    with World(replace(options, kind=kind, blocks=14, events=f"ipc://{tmp_path}/events")) as world:
        link = lookups(world)._pool._link
        for number in range(4):  # too many at once: some wait, and are looked at in every step
            world.add(f"{number}", prompt(number, 5))
        world.run()
        assert link.notes.made == 4 * groups
        assert link.statistics.notes_dropped == 0


@pytest.mark.parametrize(("kind", "groups"), [("full", 1), ("hybrid", 2)])
def test_what_is_restored_is_noted_once(options: Options, kind: str, groups: int) -> None:
    with World(replace(options, kind=kind)) as world:
        world.serve("a", prompt(1, 5))
        world.drop()
        lookups(world)._pool.flush_notes()  # a list of keys that waits to be sent is not noted again
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        links = [client._link for client in (lookups(world)._pool, transfers(world)._pool)]
        assert [link.notes.made for link in links] == [2 * groups, 0]  # of the loads themselves nothing


def test_new_weights_leave_nothing(options: Options) -> None:
    with World(options) as world:
        world.serve("a", prompt(1, 5))
        assert world.scheduler.reset_prefix_cache(reset_connector=True)
        assert world.serve("b", prompt(1, 5)) == (0, 5 * BLOCK + 3)


def test_blocks_that_are_not_in_dram_count_where_lookups_may_take_their_time(options: Options) -> None:
    there, nowhere = keys_of(1001, 5001), keys_of(404)
    keys = [f"x:tp0:pcp0:dcp0:pp0:g0:{key.tobytes().hex()}" for key in [*there, *nowhere]]
    with PoolProcess(module="tests.sourced") as pool:  # it has sources beside its DRAM
        with World(replace(options, pool=pool.socket)) as world:
            assert lookups(world).lookup(keys) == [False] * 3
        with World(replace(options, pool=pool.socket, extra={**options.extra, "lookup_async": True})) as world:
            assert lookups(world).lookup(keys) == [True, True, False]
            runtime = transfers(world)
            job = runtime.wait(runtime.load_blocks(BlockLoadBatch(keys, [5, 6, 7], [0] * 3, "r")))
            assert job.failed_keys == set(keys[2:])
            planes = [world.workers[0].caches[name] for name in runtime.groups[0].layers]
            for number, block in ((1001, 5), (5001, 6)):
                assert (np.concatenate([plane[block].numpy() for plane in planes]) == bytes_of(number, runtime.groups[0].block_bytes)).all()


# -- ranks -------------------------------------------------------------------------------------------------------------------------


@ASYNC
def test_ranks_with_kv_of_their_own_need_each_others_blocks(options: Options, load_async: bool) -> None:
    with World(replace(options, tp=2, load_async=load_async)) as world:
        world.serve("a", prompt(1, 5))
        assert stored_bytes(world) == 2 * 5 * LAYERS * world.workers[0].caches["model.layers.0.attn"].shape[1]
        world.drop()
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        world.drop()
        forget(world, "a", 2, tp=1)
        assert world.serve("c", prompt(1, 5)) == (2 * BLOCK, 3 * BLOCK + 3)


@ASYNC
def test_ranks_with_the_same_kv_store_one_copy_and_read_it_once(
    options: Options, load_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBP_LOAD", "staged")
    monkeypatch.setattr(vllm_runtime, "Group", partial(Group, meet_seconds=1.0, patience_seconds=30.0))  # however busy the machine is
    with PoolProcess(dram="512MiB") as pool, World(replace(options, pool=pool.socket, kind="mla", tp=2, load_async=load_async)) as world:
        world.serve("a", prompt(1, 20))
        one = 20 * LAYERS * world.workers[0].caches["model.layers.0.attn"].shape[1]
        assert stored_bytes(world) == one
        assert len(lookups(world)._open) == 1
        world.drop()
        handle, asked = lookups(world), []
        lookup = handle.lookup
        handle.lookup = lambda keys: (asked.append(len(keys)), lookup(keys))[1]
        assert world.serve("b", prompt(1, 20)) == (20 * BLOCK, 3)
        assert max(asked) == 20  # a key a block, not one for each rank
        counts = [transfers(world, rank)._loaders[0].statistics() for rank in range(2)]
        assert [each.staged_loads for each in counts] == [1, 1]
        assert sum(each.group_bytes + each.own_bytes for each in counts) == one
        assert [each.fallback_bytes for each in counts] == [0, 0]
        assert sum(each.received_bytes for each in counts) == one  # each rank got the other's half


def test_ranks_that_share_some_kv_store_a_copy_for_each_share(options: Options) -> None:
    with World(replace(options, tp=4, copies=2)) as world:  # as grouped-query attention with two heads on four ranks
        world.serve("a", prompt(1, 5))
        assert stored_bytes(world) == 2 * 5 * transfers(world).groups[0].block_bytes
        assert len(lookups(world)._open) == 2
        world.drop()
        assert world.serve("b", prompt(1, 5)) == (5 * BLOCK, 3)
        world.drop()
        forget(world, "a", 2, tp=1)
        assert world.serve("c", prompt(1, 5)) == (2 * BLOCK, 3 * BLOCK + 3)


# -- processes that die ------------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_finds_its_blocks_again(server: PoolProcess) -> None:
    with EngineProcess(server.socket, "killed") as engine:
        there, computed, stored = engine.serve("a", 1)
        assert (there, computed) == (0, 5 * BLOCK + 3)
        assert stored > 0
    with EngineProcess(server.socket, "killed") as engine:  # the first was killed
        assert engine.serve("a", 1) == [5 * BLOCK, 3, 0]  # the bytes too: the forward pass has looked. And nothing was stored again
        assert engine.serve("b", 2) == [0, 5 * BLOCK + 3, stored]


@ASYNC
def test_an_engine_outlives_its_pool(options: Options, load_async: bool) -> None:
    with PoolProcess() as pool, World(replace(options, pool=pool.socket, load_async=load_async)) as world:
        world.serve("a", prompt(1, 5))
        pool.kill()
        world.drop()
        world.serve("b", prompt(1, 5))  # it may have been promised blocks, just before
        assert (0, 5 * BLOCK + 3) in world.seen.first["b"]
        pool.restart()
        world.drop()
        _wait_connected(world)
        assert world.serve("c", prompt(1, 5)) == (5 * BLOCK, 3)


def _wait_connected(world: World) -> None:
    for client in (lookups(world)._pool, transfers(world)._pool):
        eventually(lambda client=client: client.connected, "the client connects again")
