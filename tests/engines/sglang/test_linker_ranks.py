"""Ranks as processes with SGLang's own reductions between them (gloo), over one pool: one copy of replicated KV, and what accidents do."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

import umbp
from tests.engines.sglang.engine import Engine, configured, prompt
from tests.field.people import Child, eventually
from tests.pools import PoolProcess


def work(child: Child, socket: str, kind: str, rank: int, world: int, store: str, way: str, settings: dict[str, Any]) -> None:
    """A rank's life: an engine that does what it is told."""
    torch.set_num_threads(1)
    os.environ["UMBP_LOAD"] = way
    group = None
    if world > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
        group = torch.distributed.group.WORLD
    if settings.pop("context", False):  # the ranks are of one context-parallel group
        settings["tree"] = {"attn_cp_cache_group": group, "attn_cp_rank": rank, "attn_cp_size": world}
        group = None
    child.say("met")
    assert child.hear(60.0) == "go"
    with configured(), Engine(kind, socket, group=group, shift=rank * 3, **settings) as engine:
        child.say("here")
        while (told := child.hear(120.0))["do"] != "end":
            child.say(obey(engine, **told))
    child.say("gone")


def direct(engine: Engine, tokens: list[int], low: int, high: int, seed: int) -> Any:
    """Load these pages of a prompt by the linker's own methods."""
    if low == high:
        assert engine.linker.start_layer_wise_loading() == -1
        return {"landed": True, "good": True, "pages": 0}
    keys = [key.tobytes().hex() for key in umbp.page_keys(tokens, engine.page)]
    slots = engine.model.alloc((high - low) * engine.page)
    assert engine.linker.load("r", [PoolTransfer(name=PoolName.KV, keys=keys[low:high], device_indices=slots)])
    landed = engine.linker.finish_layer_wise_loading(engine.linker.start_layer_wise_loading())
    return {"landed": landed, "good": engine.has(slots, seed, low), "pages": len(slots) // engine.page}


def obey(engine: Engine, do: str, number: int = 1, pages: int = 8, seed: int = 7, low: int = 0, high: int = 0) -> Any:
    tokens = prompt(number, pages, engine.page)
    if do == "direct":
        return direct(engine, tokens, low, high, seed)
    if do == "compute":
        engine.compute(tokens, seed)
        return engine.offloaded_bytes()
    if do == "restore":
        engine.drop()
        restored = engine.restore(tokens, f"r{number}")
        good = engine.is_whole(restored, seed)
        if restored.failed:
            engine.allocator.free(restored.slots)
        return {
            "found": restored.found,
            "loaded": restored.loaded,
            "ended": restored.failed,
            "good": good,
            "first": int(restored.slots[0]) if len(restored.slots) else -1,
        }
    if do == "lose":  # this rank's pages of a prompt go between the match and the load
        engine.drop()
        found, request = engine.match(tokens, f"r{number}")
        engine.linker.shelves[0].namespace.remove(umbp.page_keys(tokens, engine.page)[2:3])
        return engine.admit(found, request)
    if do == "forget":
        return bool(engine.linker.shelves[0].namespace.remove(umbp.page_keys(tokens, engine.page)[2:3]).all())
    if do == "match":
        engine.drop()
        engine.waiting = engine.match(tokens, f"r{number}")
        return int(engine.waiting[0].host_hit_length) // engine.page
    if do == "admit":
        loaded = engine.admit(*engine.waiting)
        slots = engine.cache.linker.private_load_indices[f"r{number}"].clone()
        index = engine.cache.ready_to_load_host_cache()
        engine.cache.linker.layer_done_counter.set_consumer(index)
        engine.forward()
        ended = engine.cache.linker.finish_loads()
        return {"loaded": loaded, "ended": ended, "good": engine.has(slots, seed), "refused": engine.linker.statistics().refused_loads}
    if do == "finish":
        index = engine.cache.ready_to_load_host_cache()
        engine.cache.linker.layer_done_counter.set_consumer(index)
        engine.forward()
        return engine.cache.linker.finish_loads()
    if do == "group":
        made = engine.linker.shelves[0].loader.group
        return made.name, made.rank, made.world
    if do == "statistics":
        found = engine.linker.shelves[0].loader.statistics()
        return {"own": found.own_bytes, "group": found.group_bytes, "received": found.received_bytes, "staged": found.staged_loads}
    raise AssertionError(do)


# Nobody is given up on a machine that is busy with other things.
PATIENT = {"meet_seconds": 1.0, "patience_seconds": 20.0}


class Ranks:
    def __init__(self, socket: str, kind: str, world: int, way: str, settings: dict[str, Any], *, in_turn: bool) -> None:
        self.folder = tempfile.mkdtemp()
        arguments = [(socket, kind, rank, world, str(Path(self.folder) / "store"), way, settings) for rank in range(world)]
        self.children = [Child(work, *each) for each in arguments]
        for child in self.children:
            assert child.hear(60.0) == "met"
        for some in [[child] for child in self.children] if in_turn else [self.children]:
            for child in some:
                child.say("go")
            for child in some:
                assert child.hear(60.0) == "here"

    def ask(self, do: str, **what: Any) -> list[Any]:
        for child in self.children:
            child.say({"do": do, **what})
        return [child.hear(60.0) for child in self.children]

    def end(self) -> None:
        assert self.ask("end") == ["gone"] * len(self.children)

    def kill(self) -> None:
        for child in self.children:
            child.kill()


@contextmanager
def ranks(socket: str, kind: str, world: int, way: str = "staged", *, in_turn: bool = False, **settings: Any) -> Iterator[Ranks]:
    group = Ranks(socket, kind, world, way, {**PATIENT, **settings}, in_turn=in_turn)
    try:
        yield group
    finally:
        for child in group.children:
            child.__exit__(None, None, None)


@pytest.mark.parametrize(("kind", "world"), [("mla", 2), ("mla", 4), ("dsa", 2)])
def test_replicated_kv_is_one_copy_stored_and_read_once(server: PoolProcess, kind: str, world: int) -> None:
    in_turn = kind == "mla"  # each linker is whole before the next one's rank begins to make its own: nobody waits for another
    with ranks(server.socket, kind, world, in_turn=in_turn, tenant=f"one {kind} {world}") as group, umbp.connect(server.socket) as pool:
        before = pool.status()["keys"]
        taken = group.ask("compute", pages=16)
        assert pool.status()["keys"] == before + 16
        size = sum(taken) // 16
        assert sum(taken) == 16 * size, "each page was read from one rank"
        assert max(taken) < 16 * size, "and not all from the same"
        answers = group.ask("restore", pages=16)
        assert all((each["loaded"], each["ended"], each["good"]) == (16, [], True) for each in answers), answers
        assert len({each["first"] for each in answers}) == world, "slots differ"
        counts = group.ask("statistics")
        assert all(each["staged"] == 1 for each in counts)
        assert sum(each["own"] + each["group"] for each in counts) == 16 * size, counts
        group.end()


def test_ranks_load_different_pages_without_agreeing(server: PoolProcess) -> None:
    """Straight at the linker: SGLang's tree asks for the same on all ranks, other callers and later versions need not."""
    with ranks(server.socket, "mla", 4, tenant="needs") as group:
        group.ask("compute", pages=16)
        needs = {0: (0, 12), 1: (4, 16), 2: (6, 6), 3: (2, 3)}
        for rank, (low, high) in needs.items():
            group.children[rank].say({"do": "direct", "pages": 16, "low": low, "high": high})
        for rank, (low, high) in needs.items():
            answer = group.children[rank].hear(60.0)
            assert answer == {"landed": True, "good": True, "pages": high - low}, rank
        group.end()


def test_ranks_of_two_nodes_are_two_groups_also_where_they_share_a_pool(server: PoolProcess) -> None:
    with ranks(server.socket, "dsa", 4, tenant="nodes", nodes=2) as group, umbp.connect(server.socket) as pool:
        names, places, worlds = zip(*group.ask("group"), strict=True)
        assert (places, worlds) == ((0, 1, 0, 1), (2, 2, 2, 2))
        assert names[0] == names[1] != names[2] == names[3]
        before = pool.status()["keys"]
        group.ask("compute", pages=8)
        assert pool.status()["keys"] == before + 8, "one copy"
        answers = group.ask("restore", pages=8)
        assert all((each["loaded"], each["ended"], each["good"]) == (8, [], True) for each in answers), answers
        group.end()


@pytest.mark.parametrize(("kind", "world"), [("deepseek_v4", 4), ("mla+mamba", 2), ("swa", 4)])
def test_ranks_with_windows_and_states(server: PoolProcess, kind: str, world: int) -> None:
    with ranks(server.socket, kind, world, tenant=f"windows {kind}") as group:
        group.ask("compute", pages=8)
        answers = group.ask("restore", pages=8)
        assert all((each["loaded"], each["ended"], each["good"]) == (8, [], True) for each in answers), answers
        group.end()


def test_context_parallel_ranks_agree_and_have_their_own(server: PoolProcess) -> None:
    with ranks(server.socket, "mla", 2, tenant="context", context=True) as group, umbp.connect(server.socket) as pool:
        before = pool.status()["keys"]
        group.ask("compute", pages=8)
        assert pool.status()["keys"] == before + 16
        answers = group.ask("restore", pages=8)
        assert all((each["loaded"], each["ended"], each["good"]) == (8, [], True) for each in answers)
        group.children[0].say({"do": "forget", "pages": 8})
        assert group.children[0].hear(60.0)
        answers = group.ask("restore", pages=8)
        assert all((each["loaded"], each["ended"], each["good"]) == (2, [], True) for each in answers), "what both have"
        group.end()


def test_sharded_kv_is_each_ranks_own(server: PoolProcess) -> None:
    with ranks(server.socket, "mha", 4, tenant="sharded") as group, umbp.connect(server.socket) as pool:
        before = pool.status()["keys"]
        group.ask("compute", pages=8)
        assert pool.status()["keys"] == before + 32
        answers = group.ask("restore", pages=8)
        assert all((each["loaded"], each["ended"], each["good"]) == (8, [], True) for each in answers), answers
        group.end()


def test_pages_that_one_rank_loses_end_that_batch_on_all_ranks_and_no_other(server: PoolProcess) -> None:
    with ranks(server.socket, "mha", 2, tenant="lost") as group:
        group.ask("compute", number=1, pages=8)
        group.ask("compute", number=2, pages=8)
        first, second = group.children
        first.say({"do": "lose", "number": 1})
        second.say({"do": "restore", "number": 1})
        assert first.hear(60.0) == 8, "both ranks take the same branch"
        first.say({"do": "finish"})
        assert first.hear(60.0) == ["r1"]
        assert second.hear(60.0)["ended"] == ["r1"]
        answers = group.ask("restore", number=2, pages=8)
        assert all((each["loaded"], each["ended"], each["good"]) == (8, [], True) for each in answers), answers
        answers = group.ask("restore", number=1, pages=8)
        assert all((each["loaded"], each["ended"], each["good"]) == (2, [], True) for each in answers), "the rest is computed"
        group.end()


@pytest.mark.parametrize(
    ("kind", "protect", "world"), [("mla", "load", 4), ("mha", "load", 4), ("swa", "load", 2), ("mla", "lookup", 2), ("swa", "lookup", 2)]
)
def test_what_was_looked_up_is_there_at_load_whatever_is_evicted(kind: str, protect: str, world: int) -> None:
    options = {"tenant": "ahead", "protect": protect, "protect_seconds": 10.0, "hold_seconds": 60.0, "staging": "128KiB"}
    with PoolProcess("--eviction", "lru", dram="8MiB") as pool, ranks(pool.socket, kind, world, **options) as group:
        group.ask("compute", pages=8)
        group.ask("compute", number=2, pages=8)
        assert group.ask("match", pages=8) == [8] * world
        with umbp.connect(pool.socket) as client:
            leases = client.status()["leases"]
        assert (leases > 0) == (protect == "lookup"), "claims are no leases, and no call"
        with umbp.connect(pool.socket) as client:
            namespace = client.namespace(model="another", page_tokens=64, layout=umbp.Layout.opaque(16 << 10))
            for start in range(0, 2000, 100):
                namespace.put(np.random.default_rng(start).integers(0, 256, (100, 32), dtype=np.uint8), np.zeros((100, 16 << 10), np.uint8))
            assert client.status()["counters"]["evicted_keys"] > 1000
        answers = group.ask("admit", pages=8)
        assert all(answer == {"loaded": 8, "ended": [], "good": True, "refused": 0} for answer in answers), answers
        with umbp.connect(pool.socket) as client:
            eventually(lambda: client.status()["leases"] == 0, "no lease is left")
        assert group.ask("match", number=2, pages=8) == [0] * world, "what nobody looked up is gone"
        group.end()


def test_leases_ahead_of_loads_that_do_not_come_are_let_go(server: PoolProcess) -> None:
    options = {"tenant": "never", "protect": "lookup", "protect_seconds": 10.0, "hold_seconds": 0.05}
    with ranks(server.socket, "mla", 1, **options) as group, umbp.connect(server.socket) as client:
        group.ask("compute", pages=8)
        assert group.ask("match", pages=8) == [8]
        assert client.status()["leases"] >= 1
        eventually(lambda: [group.ask("match", number=9), client.status()["leases"]][1] == 0, "they are let go")
        (answer,) = group.ask("restore", pages=8)
        assert (answer["loaded"], answer["ended"], answer["good"]) == (8, [], True)
        group.end()


@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_an_engine_that_is_killed_finds_its_pages_again(server: PoolProcess, kind: str) -> None:
    for round_number in range(2):
        with ranks(server.socket, kind, 2, tenant=f"killed {kind}") as group:
            if round_number == 0:
                group.ask("compute", pages=16)
            answers = group.ask("restore", pages=16)
            assert all((each["loaded"], each["ended"], each["good"]) == (16, [], True) for each in answers), answers
            group.kill()


def test_a_pool_that_dies_costs_recomputation_and_nothing_else() -> None:
    with PoolProcess() as pool, ranks(pool.socket, "mla", 1, tenant="dies") as group:
        group.ask("compute", pages=16)
        pool.kill()
        (answer,) = group.ask("restore", pages=16)
        assert (answer["loaded"], answer["ended"]) == (0, [])
        group.ask("compute", number=2, pages=4)
        pool.restart()
        eventually(lambda: group.ask("restore", pages=16)[0]["loaded"] == 16, "the linker is connected again")
        (answer,) = group.ask("restore", pages=16)
        assert answer["good"]
        group.end()


def test_a_frozen_pool_has_nothing_for_ranks_with_peers() -> None:
    with PoolProcess() as pool, ranks(pool.socket, "mla", 2, tenant="frozen", staging="256KiB") as group:
        group.ask("compute", pages=8)
        assert group.ask("match", pages=8) == [8, 8]
        pool.signal(signal.SIGSTOP)
        try:
            eventually(lambda: group.ask("match", pages=8) == [0, 0], "its silence is seen, without a call")
            for _ in range(3):
                answers = group.ask("restore", pages=8)
                assert all((each["loaded"], each["ended"]) == (0, []) for each in answers), answers
        finally:
            pool.signal(signal.SIGCONT)
        eventually(lambda: group.ask("restore", pages=8)[0]["loaded"] == 8, "it beats again")
        group.end()


@pytest.mark.parametrize("protect", ["load", "lookup"])
def test_a_frozen_pool_does_not_hold_the_scheduler(protect: str) -> None:
    options = {"tenant": "frozen", "protect": protect, "protect_seconds": 0.05}
    with PoolProcess() as pool, ranks(pool.socket, "mla", 1, **options) as group:
        group.ask("compute", pages=16)
        pool.signal(signal.SIGSTOP)
        try:
            for number in range(5):
                (answer,) = group.ask("restore", pages=16 - number % 3)
                assert (answer["loaded"], answer["ended"]) == (0, [])
        finally:
            pool.signal(signal.SIGCONT)
        eventually(lambda: group.ask("restore", pages=16)[0]["loaded"] == 16, "it answers again")
        group.end()
