"""Windows and states: a prefix counts where all that belongs to its end is there, so what can be restored is a set of lengths."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

import umbp
from tests.engines.sglang.engine import Engine, configured, prompt
from tests.field.people import eventually, keys_of, values_of
from tests.pools import PoolProcess
from umbp.integrations import sglang_leases
from umbp.integrations.sglang_leases import Held
from umbp.integrations.sglang_loads import distinct
from umbp.integrations.windows import windows_that_are_whole


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with configured():
        yield


def lengths(engine: Engine, tokens: list[int], **window: int) -> list[int]:
    """What the linker says of a prompt of which nothing is on the device."""
    keys = [key.tobytes().hex() for key in umbp.page_keys(tokens, engine.page)]
    asked = [PoolTransfer(name=PoolName.KV, keys=keys)]
    for name, pages in window.items():
        asked.append(PoolTransfer(name=PoolName(name), keys=keys[-pages:], hit_policy=PoolHitPolicy.TRAILING_PAGES))
    return engine.linker.lookup("r", asked)


def test_lengths_whose_window_has_a_hole_are_left_out(server: PoolProcess) -> None:
    with Engine("swa", server.socket, tenant="hole") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        assert lengths(engine, tokens, swa=2) == [1, 2, 3, 4, 5, 6, 7, 8]
        (window,) = [shelf for shelf in engine.linker.shelves if shelf.bundle.source == PoolName.SWA]
        assert window.namespace.remove(umbp.page_keys(tokens, engine.page)[3:4]).all()
        assert lengths(engine, tokens, swa=2) == [1, 2, 3, 6, 7, 8]
        (whole,) = [shelf for shelf in engine.linker.shelves if shelf.bundle.source == PoolName.KV]
        assert whole.namespace.remove(umbp.page_keys(tokens, engine.page)[6:7]).all()
        assert lengths(engine, tokens, swa=2) == [1, 2, 3, 6]
        engine.drop()
        restored = engine.restore(tokens, "r1")
        assert (restored.found, restored.loaded) == (6, 6)
        assert engine.is_whole(restored, 7)


@pytest.mark.parametrize("kind", ["mla+mamba", "swa+mamba"])
def test_states_are_there_where_nodes_end(server: PoolProcess, kind: str) -> None:
    with Engine(kind, server.socket, tenant=f"ends {kind}") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        short = engine.restore([*tokens[: 5 * engine.page], *prompt(2, 3, engine.page)], "r1")
        assert short.found == 0, "all KV of five pages, and no state after the fifth"
        restored = engine.restore([*tokens, *prompt(2, 3, engine.page)], "r2")
        assert (restored.found, restored.loaded, restored.failed) == (8, 8, [])
        assert engine.is_whole(restored, 7)


def test_a_transfer_without_its_window_finds_nothing(server: PoolProcess) -> None:
    with Engine("swa", server.socket, tenant="without") as engine:
        tokens = prompt(1, 4, engine.page)
        engine.compute(tokens, seed=7)
        assert lengths(engine, tokens) == []
        assert engine.linker.lookup("r", []) == []
        assert engine.linker.lookup("r", [PoolTransfer(name=PoolName.KV, keys=["no hash"])]) == []


def test_windows_that_are_whole_is_what_a_loop_says() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        hit = rng.random(int(rng.integers(1, 40))) < 0.8
        window = int(rng.integers(1, 12))
        by_hand = [bool(hit[max(0, end - window) : end].all()) for end in range(1, len(hit) + 1)]
        assert windows_that_are_whole(hit, window).tolist() == by_hand


def test_distinct_parts_have_each_key_once() -> None:
    rng = np.random.default_rng(4)
    for _ in range(100):
        numbers = rng.integers(0, 6, int(rng.integers(0, 20)))
        keys = np.zeros((len(numbers), 32), np.uint8)
        keys[:, 0] = numbers
        parts = distinct(keys)
        assert sorted(np.concatenate([*parts, np.empty(0, np.int64)]).tolist()) == list(range(len(numbers)))
        assert all(len(set(numbers[part].tolist())) == len(part) for part in parts)
        assert len(parts) == (np.bincount(numbers).max() if len(numbers) else 0)


def test_pages_that_are_elsewhere_are_sent_for_and_found_when_asked_again() -> None:
    numbers = range(5000, 5006)  # what `tests.sourced` has, as an SSD or another node would
    asked = [PoolTransfer(name=PoolName.KV, keys=[key.tobytes().hex() for key in keys_of(*numbers)])]
    with PoolProcess(module="tests.sourced", dram="32MiB") as pool:
        with Engine("mla", pool.socket, tenant="elsewhere") as engine:
            engine.linker.lookup("r1", asked)
            eventually(lambda: engine.linker.lookup("r1", asked) == [1, 2, 3, 4, 5, 6], "they have come")
            slots = engine.model.alloc(6 * engine.page)
            assert engine.linker.load("r1", [PoolTransfer(name=PoolName.KV, keys=asked[0].keys, device_indices=slots)])
            assert engine.linker.finish_layer_wise_loading(engine.linker.start_layer_wise_loading())
            size = engine.linker.shelves[0].namespace.object_bytes
            there = np.concatenate([buffer[slots].view(torch.uint8).reshape(6, -1).numpy() for buffer in engine.kvcache.kv_buffer], axis=1)
            assert np.array_equal(there, values_of(numbers, size))
        with Engine("mla", pool.socket, tenant="elsewhere too", prefetch=False) as engine:
            for _ in range(5):
                assert engine.linker.lookup("r1", asked) == []


@pytest.mark.parametrize("protect", ["load", "lookup"])
def test_a_silent_pool_is_waited_for_once(protect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    answered = Held.answered

    def counted(self: Held, seconds: float) -> bool:
        waits.extend([seconds] if seconds else [])
        return answered(self, seconds)

    monkeypatch.setattr(Held, "answered", counted)
    monkeypatch.setattr(sglang_leases, "SILENT_SECONDS", 1000.0)
    with PoolProcess() as pool, Engine("mla", pool.socket, tenant="silent", protect=protect, protect_seconds=0.05) as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        pool.signal(signal.SIGSTOP)
        for number in range(10):
            assert engine.restore(tokens, f"r{number}").loaded == 0
        pool.signal(signal.SIGCONT)
        assert waits == [0.05]
