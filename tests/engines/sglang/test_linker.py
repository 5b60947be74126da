"""The linker under the real radix tree, both cores, over a real pool process: what comes back, and what happens if it does not."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

import umbp
from tests.engines.sglang.engine import Engine, configured, prompt
from tests.pools import PoolProcess
from umbp.errors import InvalidRequest, Unavailable
from umbp.integrations import sglang_pools
from umbp.integrations.sglang_pools import keys_of
from umbp.layout import KEYS_PER_CALL_MAX
from umbp.loader.copies import Copies

KINDS = [
    *(
        "mla",
        "mla+draft",
        "dsa",
        "dsa+shared",
        "mha",
        "mha+draft",
        "swa",
        "swa+draft",
        "mla+mamba",
        "mla+mamba+draft",
        "mha+mamba",
        "dsa+mamba",
    ),
    *("swa+mamba", "swa+mamba+draft", "swa+mamba+sidecar", "deepseek_v4"),
]
CORES = ["python", "rust"]


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with configured():
        yield


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_evicted_comes_back_byte_for_byte(server: PoolProcess, kind: str, core: str) -> None:
    with Engine(kind, server.socket, core=core, tenant=f"back {kind} {core}") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        restored = engine.restore(tokens, "r1")
        assert (restored.on_device, restored.found, restored.loaded, restored.failed) == (0, 8, 8, [])
        assert engine.is_whole(restored, 7)
        nothing = engine.restore(prompt(2, 8, engine.page), "r2")
        assert (nothing.found, nothing.index) == (0, -1)


@pytest.mark.parametrize("core", CORES)
def test_only_the_tail_is_loaded_and_offered_again_without_a_copy(server: PoolProcess, core: str) -> None:
    with Engine("mla", server.socket, core=core, tenant=f"tail {core}") as engine:
        assert type(engine.cache.tree_core).__name__.lower().startswith("rust") == (core == "rust")
        tokens = prompt(1, 10, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        head = engine.compute(tokens[: 2 * engine.page], seed=7)
        restored = engine.restore(tokens, "r1")
        assert (restored.on_device, restored.found, restored.loaded, restored.failed) == (2, 8, 8, [])
        assert engine.has(restored.slots, 7, first_page=2)
        before, nodes = engine.offloaded_bytes(), engine.linker.statistics().offloaded_pages
        engine.insert(tokens, torch.cat([head, restored.slots]), seed=7)
        engine.settle()
        assert engine.linker.statistics().offloaded_pages == nodes + 8, "the tree offers the restored tail"
        assert engine.offloaded_bytes() == before, "and nothing of it was read"
        assert engine.restore(tokens, "r2").on_device == 10


@pytest.mark.parametrize("core", CORES)
def test_nodes_that_split_while_they_are_offloaded(server: PoolProcess, core: str) -> None:
    with Engine("mha", server.socket, core=core, tenant=f"split {core}") as engine:
        first = prompt(1, 8, engine.page)
        second = [*first[: 4 * engine.page], *prompt(2, 4, engine.page)]
        slots = engine.compute(first, seed=7, settle=False)
        tail = engine.model.alloc(4 * engine.page)
        engine.model.write(engine.kvcache, tail, 8, 4)
        engine.insert(second, torch.cat([slots[: 4 * engine.page], tail]), seed=8)
        engine.settle()
        engine.drop()
        restored = engine.restore(second, "r1")
        assert restored.loaded == 8
        assert engine.has(restored.slots[: 4 * engine.page], 7)
        assert engine.has(restored.slots[4 * engine.page :], 8, first_page=4)
        restored = engine.restore(first, "r2")
        assert restored.loaded == 8
        assert engine.has(restored.slots, 7)


def test_a_node_that_fails_half_way_is_offered_again(server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine("swa", server.socket, tenant="half") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.match(tokens, "r0")
        keys = umbp.page_keys(tokens, engine.page)
        assert engine.linker._before(keys[3]) == keys[2].tobytes()
        assert engine.linker._before(keys[0]) is None
        whole = Copies.store

        def broken(self: Copies, data: Any, routes: Any) -> None:
            if len(self.planes) == 4:  # the window's layers, 1 and 3, are the last ones
                raise OSError("injected")
            whole(self, data, routes)

        with monkeypatch.context() as patch:
            patch.setattr(Copies, "store", broken)
            engine.compute(tokens, seed=7)
        failed = engine.linker.statistics().failed_nodes
        assert failed >= 1
        assert engine.match(tokens, "r1")[0].device_prefix_len == len(tokens)
        other = engine.compute([*tokens, *prompt(2, 2, engine.page)][: 8 * engine.page], seed=7)
        assert len(other) == len(tokens)
        assert engine.linker.statistics().failed_nodes == failed
        engine.drop()
        restored = engine.restore(tokens, "r2")
        assert restored.loaded == 8
        assert engine.is_whole(restored, 7)


def test_requests_of_one_batch_share_pages(server: PoolProcess) -> None:
    with Engine("dsa", server.socket, tenant="batch") as engine:
        first = prompt(1, 6, engine.page)
        second = first[: 4 * engine.page]
        engine.compute(first, seed=7)
        engine.drop()
        found = [(rid, *engine.match(tokens, rid)) for rid, tokens in (("r1", first), ("r2", second))]
        assert [engine.admit(*each[1:]) for each in found] == [6, 4]
        slots = {rid: engine.cache.linker.private_load_indices[rid].clone() for rid in ("r1", "r2")}
        index = engine.cache.ready_to_load_host_cache()
        engine.cache.linker.layer_done_counter.set_consumer(index)
        engine.forward()
        assert engine.cache.linker.finish_loads() == []
        assert engine.has(slots["r1"], 7)
        assert engine.has(slots["r2"], 7)


@pytest.mark.parametrize("kind", ["mla", "mha", "dsa", "swa", "swa+draft", "mla+mamba", "swa+mamba", "deepseek_v4"])
def test_a_failure_at_any_layer_is_told_and_reaches_nobody_else(server: PoolProcess, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with Engine(kind, server.socket, tenant=f"fail {kind}", pages=96) as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        whole = Copies.move
        for layer in range(engine.model.layers):

            def broken(self: Copies, data: Any, at: int, route: Any, layer: int = layer) -> None:
                if at == layer:
                    raise OSError("injected")
                whole(self, data, at, route)

            with monkeypatch.context() as patch:
                patch.setattr(Copies, "move", broken)
                restored = engine.restore(tokens, f"r{layer}")
                assert (restored.loaded, restored.failed) == (8, [f"r{layer}"]), layer
            engine.allocator.free(restored.slots)  # as the scheduler does for a request that it ends
        engine.leases_are_over()
        again = engine.restore(tokens, "again")
        assert (again.on_device, again.loaded, again.failed) == (0, 8, [])
        assert engine.is_whole(again, 7)


@pytest.mark.parametrize("core", CORES)
def test_pages_that_go_before_their_load_are_computed(server: PoolProcess, core: str) -> None:
    with Engine("mla", server.socket, core=core, tenant=f"gone {core}") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        free = engine.allocator.available_size()
        found, request = engine.match(tokens, "r1")
        assert found.host_hit_length == len(tokens)
        namespace = engine.linker.shelves[0].namespace
        assert namespace.remove(umbp.page_keys(tokens, engine.page)[5:6]).all()
        assert engine.admit(found, request) == 0
        assert engine.cache.ready_to_load_host_cache() == -1
        assert engine.allocator.available_size() == free
        assert engine.linker.statistics().refused_loads == 1
        engine.leases_are_over()
        assert engine.restore(tokens, "r2").loaded == 5


def test_a_request_that_is_aborted_before_its_load_starts(server: PoolProcess) -> None:
    with Engine("mla", server.socket, tenant="abort") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        found, request = engine.match(tokens, "r1")
        assert engine.admit(found, request) == 8
        slots = engine.cache.linker.private_load_indices["r1"].clone()
        engine.cache.linker.release_request("r1")
        assert engine.cache.ready_to_load_host_cache() == -1
        engine.leases_are_over()
        assert not engine.has(slots, 7)


@pytest.mark.parametrize("core", CORES)
def test_reset_ends_all_that_is_on_its_way(server: PoolProcess, core: str) -> None:
    with Engine("mla", server.socket, core=core, tenant=f"reset {core}") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        found, request = engine.match(tokens, "r1")
        engine.admit(found, request)
        engine.cache.ready_to_load_host_cache()
        engine.match(tokens, "r2")
        engine.cache.reset()
        engine.allocator.clear()
        assert engine.linker.num_completed_offloads() == 0
        engine.leases_are_over()
        engine.model.wipe(engine.kvcache)
        restored = engine.restore(tokens, "r3")
        assert (restored.index, restored.loaded, restored.failed) == (0, 8, [])
        assert engine.has(restored.slots, 7)


def test_another_model_revision_or_tenant_finds_nothing(server: PoolProcess) -> None:
    tokens = prompt(1, 4, 4)
    with Engine("mla", server.socket, tenant="mine") as engine:
        engine.compute(tokens, seed=7)
    same: dict[str, Any] = {"tenant": "mine"}
    others = [{"tenant": "yours"}, {"model": "other", **same}, {"revision": "r2", **same}, {"salt": "x", **same}]
    for settings, pages in [(same, 4), *((other, 0) for other in others)]:
        with Engine("mla", server.socket, **settings) as engine:
            found, _ = engine.match(tokens, "r1")
            assert found.host_hit_length // 4 == pages, settings


def test_a_reset_can_flush_the_pages_of_old_weights(server: PoolProcess) -> None:
    tokens = prompt(1, 4, 4)
    for flush, pages in ((False, 4), (True, 0)):
        with Engine("swa", server.socket, tenant="live", flush_on_reset=flush) as engine:
            engine.compute(tokens, seed=7)
            engine.cache.reset()
            engine.allocator.clear()
            assert engine.match(tokens, "r1")[0].host_hit_length // 4 == pages
            engine.compute(tokens, seed=8)
    with Engine("swa", server.socket, tenant="live") as engine:
        assert engine.restore(tokens, "r2").loaded == 4, "the end of an engine flushes nothing"


def test_pages_that_a_reset_could_not_flush_are_not_found() -> None:
    with PoolProcess() as pool, Engine("mla", pool.socket, flush_on_reset=True) as engine:
        tokens = prompt(1, 4, engine.page)
        engine.compute(tokens, seed=7)
        namespace = engine.linker.shelves[0].namespace
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(namespace), "flush", lambda self: (_ for _ in ()).throw(Unavailable("injected")))
            engine.cache.reset()
        assert engine.match(tokens, "r1")[0].host_hit_length == 0
        assert namespace.lookup(umbp.page_keys(tokens, engine.page)).all(), "though they are there"
        engine.cache.reset()
        engine.allocator.clear()
        engine.compute(tokens, seed=8)
        engine.drop()
        assert engine.restore(tokens, "r2").loaded == 4


def test_a_prompt_longer_than_a_call(server: PoolProcess) -> None:
    with Engine("mla", server.socket, tenant="long") as engine:
        tokens = prompt(1, 4, engine.page)
        engine.compute(tokens, seed=7)
        keys = [key.tobytes().hex() for key in umbp.page_keys(tokens, engine.page)]
        keys += [f"{number:064x}" for number in range(KEYS_PER_CALL_MAX)]
        assert engine.linker.lookup("r1", [PoolTransfer(name=PoolName.KV, keys=keys)]) == [1, 2, 3, 4]
        slots = torch.arange(4 * len(keys))
        assert not engine.linker.load("r1", [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)]), "not all of it is there"
        held = engine.linker._leases.ask({0: keys_of(keys)})
        assert held.answered(20.0)
        assert np.flatnonzero(held.masks()[0]).tolist() == [0, 1, 2, 3]
        engine.linker._leases.release(held)
        engine.leases_are_over()


def test_a_linker_that_was_closed_says_no() -> None:
    with PoolProcess() as pool:
        engine = Engine("mla", pool.socket)
        engine.close()
        transfer = PoolTransfer(name=PoolName.KV, keys=["0" * 64], device_indices=torch.arange(4))
        assert engine.linker.load("r1", [transfer]) is False
        assert engine.linker.statistics().refused_loads == 1


def test_a_newer_engine_is_said_to_be_one(server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*, kvcache: object) -> None: ...

    monkeypatch.setattr(sglang_pools, "resolve_hybrid_device_pool_group", other)
    with pytest.raises(ImportError, match=r"was run with sglang 0\.5\.23; .*page_size"):
        Engine("dsa", server.socket)


def test_a_newer_engine_that_asks_for_more_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnifiedCacheLinker, "__abstractmethods__", UnifiedCacheLinker.__abstractmethods__ | {"warm_up"})
    with pytest.raises(ImportError, match=r"was run with sglang 0\.5\.23; installed here: .*its linkers also have warm_up"):
        runpy.run_module("umbp.integrations.sglang")


def test_what_cannot_be_served_is_refused_at_the_start(server: PoolProcess) -> None:
    with pytest.raises(InvalidRequest, match=r"pp_size.*pipeline stages.*HiCache|pipeline stages.*HiCache.*pp_size"):
        Engine("mla", server.socket, tree={"pp_size": 2, "pp_rank": 0})


def test_settings_are_checked(server: PoolProcess) -> None:
    for settings, field in (
        ({"pol": 1}, "linker_extra_config"),
        ({"copy_threads": "two"}, "copy_threads"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"flush_on_reset": "yes"}, "flush_on_reset"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            Engine("mla", server.socket, **settings)
    with pytest.raises(Unavailable, match=r"python -m umbp\.pool"):
        Engine("mla", "/nowhere/pool.sock")
