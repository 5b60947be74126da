"""Loads and offloads by the kernels, through the tests' runtime: bytes, guards, order of layers, and what is used where something fails."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child
from tests.kernels import processes
from tests.pools import PoolProcess
from umbp.types import WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.loader.caches import PAGES, Cache, keys_of, slots_for
from tests.loader.host_runtime import NUMA_NODE, HostRuntime, Passed
from umbp.loader import bounce


@pytest.fixture
def folder() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="umbp-device-", dir="/dev/shm")
    yield made
    shutil.rmtree(made)


def in_interpreter(work: Any, *arguments: Any) -> Any:
    """What ``work`` returns, in a process in which Triton is imported for its interpreter."""
    processes.need("triton")
    with Child(_interpreted, work, *arguments) as child:
        return child.hear(120.0)


def _interpreted(child: Child, work: Any, *arguments: Any) -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    child.say(work(*arguments))


def solo(socket: str, folder: str, tenant: str, failing: dict[str, str]) -> dict[str, Any]:
    """Offload, load elsewhere, load what is not there; what was seen."""
    runtime, numbers = HostRuntime(folder, failing), list(range(20))
    cache = Cache(make=runtime.tensor)
    with umbp.connect(socket) as pool:
        namespace = cache.namespace(pool, tenant=tenant)
        slots = slots_for(1, 20)
        with umbp.Loader(namespace, cache.tensors, runtime=runtime) as loader:
            cache.write(numbers, slots)
            status = loader.offload(keys_of(numbers), slots).result()
            cache.wipe()
            places = slots_for(2, 23)
            load = loader.load(keys_of([*numbers, 900, 901, 902]), places)
            layers = []
            for layer in range(cache.layers):
                assert load.wait(layer)
                layers.append(bool(cache.has(numbers, places[:20], layer).all()))
            done = load.finish()
            found = loader.statistics()
            registered = len(runtime.registered)
        return {
            "stored": bool(status.all(WriteStatus.STORED)),
            "layers": layers,
            "whole": bool(cache.has(numbers, places[:20]).all()),
            "clean": cache.untouched(places[:20]),
            "missing": done.missing.tolist(),
            "bytes": done.read_bytes // namespace.object_bytes,
            "ready": np.isfinite(done.ready_at).all().tolist(),
            "held": Passed.held,
            "registered": [registered, len(runtime.registered)],
            "calls": dict(runtime.calls),
            "way": [load.choice.mover, load.choice.cause] if load.choice else None,
            "machine": repr(loader._mover),
            "pages": found.pages,
            "near": pool._link.near,
        }


SOUND = {"stored": True, "layers": [True] * 4, "whole": True, "clean": True, "missing": [20, 21, 22], "bytes": 20, "ready": True}


def test_pages_go_and_come_back_by_the_kernels(server: PoolProcess, folder: str) -> None:
    seen = in_interpreter(solo, server.socket, folder, "device", {})
    assert {name: seen[name] for name in SOUND} == SOUND
    assert seen["near"] == NUMA_NODE, "what it stores is to be on the device's node, not on that of the process"
    assert seen["held"] > 0, "the caller's stream is held, not the host"
    assert seen["registered"] == [1, 0], "registered once, and released at the end"
    assert seen["calls"]["register"] == seen["calls"]["unregister"] == 1
    assert seen["way"] == ["solo", "no_group"]
    assert "DeviceMover" in seen["machine"]


def launches(socket: str, folder: str, tenant: str) -> list[int]:
    """Launches of loads of 1 and of 20 pages."""
    from umbp.kernels import launchers

    runtime, numbers, counted = HostRuntime(folder), list(range(20)), Counter[str]()
    cache = Cache(make=runtime.tensor)
    for name in ("page_load", "page_store"):
        launch = getattr(launchers, name)

        def counting(*arguments: Any, name: str = name, launch: Any = launch, **named: Any) -> Any:
            counted[name] += 1
            return launch(*arguments, **named)

        setattr(launchers, name, counting)
    found = []
    with umbp.connect(socket) as pool:
        namespace = cache.namespace(pool, tenant=tenant)
        with umbp.Loader(namespace, cache.tensors, runtime=runtime) as loader:
            counted.clear()  # the kernels were proven
            cache.write(numbers, slots_for(1, 20))
            assert loader.offload(keys_of(numbers), slots_for(1, 20)).result().all(WriteStatus.STORED)
            for count in (1, 20):
                counted["page_load"] = 0
                assert len(loader.load(keys_of(numbers[:count]), slots_for(2, count)).finish().missing) == 0
                found.append(counted["page_load"])
    return [*found, counted["page_store"]]


def test_more_pages_are_no_more_launches(server: PoolProcess, folder: str) -> None:
    assert in_interpreter(launches, server.socket, folder, "launches") == [1, 1, 1]


def test_memory_that_cannot_be_registered_is_gone_around(server: PoolProcess, folder: str) -> None:
    seen = in_interpreter(solo, server.socket, folder, "bounced", {"register": "no memory may be locked: raise ulimit -l"})
    assert {name: seen[name] for name in SOUND} == SOUND
    assert seen["calls"]["register"] == 1, "tried once"
    assert seen["calls"].get("unregister", 0) == 0


def test_without_triton_pages_go_through_a_buffer(server: PoolProcess, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "umbp.kernels.launchers", None)  # as if its import failed
    seen = solo(server.socket, folder, "without triton", {})
    assert {name: seen[name] for name in SOUND} == SOUND
    assert "Bounce" in seen["machine"]
    assert PAGES > 23


def test_loads_and_offloads_through_buffers_do_not_meet(pool: umbp.Pool, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "umbp.kernels.launchers", None)
    monkeypatch.setattr(bounce, "BUFFER_BYTES", 1 << 14)  # three rows: the buffers take turns
    runtime, numbers = HostRuntime(folder), list(range(20))
    cache, other = Cache(make=runtime.tensor), Cache(make=runtime.tensor)
    namespace = cache.namespace(pool, tenant="both ways")
    with (
        umbp.Loader(namespace, cache.tensors, runtime=runtime) as loader,
        umbp.Loader(namespace, other.tensors, runtime=runtime) as checker,
    ):
        cache.write(numbers, range(1, 21))
        assert loader.offload(keys_of(numbers), np.arange(1, 21)).result().all(WriteStatus.STORED)
        for turn in range(1, 8):
            more = [1000 * turn + number for number in range(20)]
            cache.write(more, range(1, 21))
            offload, load = loader.offload(keys_of(more), np.arange(1, 21)), loader.load(keys_of(numbers), np.arange(21, 41))
            assert len(load.finish().missing) == 0
            assert offload.result().all(WriteStatus.STORED)
            assert cache.has(numbers, range(21, 41)).all()
            assert len(checker.load(keys_of(more), np.arange(1, 21)).finish().missing) == 0
            assert other.has(more, range(1, 21)).all()
