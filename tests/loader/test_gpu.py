"""The loader on a real GPU: the tests of `test_device` and `test_device_group`, with CUDA or HIP in place of the tests' runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umbp
from tests.kernels import processes
from tests.pools import PoolProcess
from umbp.types import WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import torch

from tests.loader.caches import Cache, keys_of, slots_for
from tests.loader.ranks import nothing_is_leased, ranks
from tests.loader.test_group import Accidents, load_all

pytestmark = pytest.mark.gpu
NUMBERS = list(range(40))
PATIENT = {"meet_seconds": 1.0, "patience_seconds": 20.0, "staging_bytes": 1 << 20, "device": {"gpu": True}}


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    processes.need("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where it is unset, and warnings are errors here


@pytest.fixture(scope="module")
def tenant(server: PoolProcess) -> str:
    """The namespace that has the pages."""
    cache = Cache()
    with umbp.connect(server.socket) as pool, umbp.Loader(cache.namespace(pool, tenant="gpus"), cache.tensors) as loader:
        cache.write(NUMBERS, range(1, len(NUMBERS) + 1))
        assert loader.offload(keys_of(NUMBERS), np.arange(1, len(NUMBERS) + 1)).result().all(WriteStatus.STORED)
    return "gpus"


def test_pages_go_and_come_back_in_order_of_streams(pool: umbp.Pool) -> None:
    cache, numbers = Cache(device="cuda"), range(20)
    namespace, slots, places = cache.namespace(pool, tenant="gpu solo"), slots_for(1, 20), slots_for(2, 22)
    with umbp.Loader(namespace, cache.tensors) as loader:
        assert "DeviceMover" in repr(loader._mover), loader._equipment.unreachable
        cache.write(numbers, slots)
        assert loader.offload(keys_of(numbers), slots).result().all(WriteStatus.STORED)
        cache.wipe()
        load = loader.load(keys_of([*numbers, 900, 901]), places)
        stream, seen = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):  # what a forward pass would read, without a word from the host
            for layer in range(cache.layers):
                assert load.wait(layer)
                seen.append(cache.tensors["latent"][layer].clone())
        done = load.finish()
        stream.synchronize()
        assert done.missing.tolist() == [20, 21]
        assert cache.has(numbers, places[:20]).all()
        assert cache.untouched(places[:20])
        for layer, copy in enumerate(seen):
            assert torch.equal(copy, cache.tensors["latent"][layer]), f"layer {layer} was read before it was there"
        assert load.choice is not None
        assert load.choice.mover == "solo"


def test_without_kernels_pages_go_through_a_buffer(pool: umbp.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "umbp.kernels.launchers", None)
    cache, numbers = Cache(device="cuda"), range(20)
    namespace, slots, places = cache.namespace(pool, tenant="gpu bounced"), slots_for(1, 20), slots_for(2, 20)
    with umbp.Loader(namespace, cache.tensors) as loader:
        assert "Bounce" in repr(loader._mover)
        cache.write(numbers, slots)
        assert loader.offload(keys_of(numbers), slots).result().all(WriteStatus.STORED)
        cache.wipe()
        assert loader.load(keys_of(numbers), places).finish().missing.tolist() == []
    assert cache.has(numbers, places).all()
    assert cache.untouched(places)


@pytest.mark.parametrize(("world", "way"), [(2, "fused"), (2, "staged"), (4, "fused"), (4, "staged")])
def test_each_page_leaves_the_segment_once(server: PoolProcess, tenant: str, world: int, way: str) -> None:
    object_bytes = Cache().layout.object_bytes
    with ranks(server.socket, tenant, world, way=way, **PATIENT) as group, umbp.connect(server.socket) as pool:
        for wanted in (dict.fromkeys(range(world), NUMBERS), {rank: NUMBERS[rank * 5 : rank * 5 + 20] for rank in range(world)}):
            answers: dict[int, Any] = load_all(group, wanted)
            assert all(answer["missing"] == [] for answer in answers.values()), answers
            union = len(set().union(*map(set, wanted.values())))
            assert sum(answer["bytes"] for answer in answers.values()) == union * object_bytes
            assert group.ask(0, "statistics")["way"] == way
        nothing_is_leased(pool)


@pytest.mark.parametrize(("way", "seed"), [("fused", 21), ("staged", 22)])
def test_whatever_happens_to_a_rank_the_other_has_its_bytes(server: PoolProcess, tenant: str, way: str, seed: int) -> None:
    options = {"meet_seconds": 0.1, "patience_seconds": 0.1, "staging_bytes": 1 << 20, "device": {"gpu": True}}
    with umbp.connect(server.socket) as pool, ranks(server.socket, tenant, 2, way=way, **options) as group:
        course = Accidents(group, pool, seed)
        for _ in range(3):
            course.run()
        nothing_is_leased(pool)
