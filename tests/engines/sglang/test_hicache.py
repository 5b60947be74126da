"""The HiCache backend over SGLang's real host pools: all layouts, pools beside the main one, flat tensors, and a pool that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

import umbp
from tests.engines.sglang.engine import configured
from tests.engines.sglang.kinds import MODELS
from tests.pools import PoolProcess
from umbp.errors import InvalidRequest
from umbp.integrations.sglang_hicache import Model, Settings, UMBPHiCache, pieces
from umbp.layout import KEYS_PER_CALL_MAX

OWN = {"backend_name": "umbp", "module_path": "umbp.integrations.sglang_hicache", "class_name": "UMBPHiCache", "interface_v1": 1}
LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
PAGES = 16


@pytest.fixture(autouse=True)
def _configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang keeps 10 GB of a machine free, which one that tests may not have."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    with configured():
        yield


def backend_of(socket: str, *, mla: bool = True, rank: int = 0, world: int = 1, **settings: Any) -> UMBPHiCache:
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=world,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="tests/tiny",
        extra_config={**OWN, "pool": socket, **settings},
    )
    return StorageBackendFactory.create_backend("dynamic", config, None)


def host_pool(kind: str, layout: str) -> Any:
    model = MODELS[kind](PAGES)
    device = model.pool()
    common: dict[str, Any] = {
        "device_capacity_tokens": PAGES * model.page,
        "start_layer": 0,
        "end_layer": model.layers,
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": model.page,
        "layout": layout,
        "pin_memory": False,
        "device": "cpu",
    }
    if kind == "mha":
        device.v_head_dim = device.head_dim
        return MHATokenToKVPoolHost(device._mha_buffer_info(), **common)
    return MLATokenToKVPoolHost(device._mla_buffer_info(), target_layer_num=model.layers, **common)


def flat(host: Any, index: int) -> torch.Tensor:
    return host.get_data_page(index, flat=True).clone().view(torch.uint8)


def keys(start: int, count: int) -> list[str]:
    return [key.tobytes().hex() for key in umbp.page_keys(np.arange(start * 1000, start * 1000 + count * 4), 4)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_pages_of_each_layout_come_back(server: PoolProcess, kind: str, layout: str) -> None:
    host, page = host_pool(kind, layout), 4
    assert pieces(host) is not None, "moved in place, not page by page"
    backend = backend_of(server.socket, mla=kind == "mla", tenant=f"hi {kind} {layout}")
    backend.register_mem_pool_host(host)
    backend.on_host_pools_registered()
    host.kv_buffer.view(torch.uint8).random_(0, 255)
    source, target = torch.arange(2 * page, 8 * page), torch.arange(9 * page, 15 * page)
    want = [flat(host, int(at)) for at in source[::page]]
    names = keys(1, 6)
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, source) == [True] * 6
    assert backend.batch_exists([*names, *keys(2, 1)]) == 6
    assert backend.batch_get_v1([*names[:5], *keys(2, 1)], target) == [True] * 5 + [False]
    assert all(torch.equal(flat(host, int(at)), each) for at, each in zip(target[::page][:5], want, strict=False))
    read = backend._pools["kv"].loader.statistics().offloaded_bytes  # type: ignore[union-attr]
    more = HiCacheStorageExtraInfo(prefix_keys=keys(3, 1))
    assert backend.batch_set_v1(names, source, more) == [True] * 6, "they are there"
    assert backend._pools["kv"].loader.statistics().offloaded_bytes == read, "and nothing is read for it"  # type: ignore[union-attr]
    assert backend.clear() is True
    assert backend.batch_exists(names) == 0
    backend.close()


def test_layouts_and_ranks_do_not_meet(server: PoolProcess) -> None:
    first = backend_of(server.socket, mla=False, rank=0, world=2, tenant="meet")
    first.register_mem_pool_host(host_pool("mha", "page_first"))
    assert first.batch_set_v1(keys(1, 2), torch.arange(8)) == [True, True]
    for rank, layout, found in ((0, "page_first", 2), (1, "page_first", 0), (0, "page_first_direct", 0)):
        other = backend_of(server.socket, mla=False, rank=rank, world=2, tenant="meet")
        other.register_mem_pool_host(host_pool("mha", layout))
        assert other.batch_exists(keys(1, 2)) == found
        other.close()
    first.close()


def test_pools_beside_the_main_one(server: PoolProcess) -> None:
    model = MODELS["dsa"](PAGES)
    device, page = model.pool(), model.page
    common: dict[str, Any] = {"pin_memory": False, "device": "cpu"}
    host = MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        device_capacity_tokens=PAGES * page,
        start_layer=0,
        end_layer=model.layers,
        target_layer_num=model.layers,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=page,
        layout="page_first_direct",
        **common,
    )
    indexer = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), host, **common)
    backend = backend_of(server.socket, tenant="beside")
    backend.register_mem_pool_host(host)
    backend.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    host.kv_buffer.view(torch.uint8).random_(0, 255)
    indexer.index_k_with_scale_buffer.view(torch.uint8).random_(0, 255)
    source, target = torch.arange(0, 4 * page), torch.arange(8 * page, 12 * page)
    want = indexer.index_k_with_scale_buffer.clone()
    names = keys(5, 4)
    beside = PoolTransfer(name=PoolName.INDEXER, keys=names, host_indices=source)
    assert backend.batch_set_v1(names, source) == [True] * 4
    assert backend.batch_exists_v2(names, [beside]).kv_hit_pages == 0, "the indexer's pages are missing"
    assert backend.batch_set_v2([beside]) == {PoolName.INDEXER: [True] * 4}
    found = backend.batch_exists_v2([*names, *keys(6, 1)], [beside])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    window = PoolTransfer(name=PoolName.INDEXER, keys=names[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    backend._pools["indexer"].namespace.remove([bytes.fromhex(names[1])])
    assert backend.batch_exists_v2(names, [window]).restorable_prefix_pages == [1, 4]
    assert backend.batch_exists_v2(names, [beside]).restorable_prefix_pages == [1]
    got = backend.batch_get_v2([PoolTransfer(name=PoolName.INDEXER, keys=names, host_indices=target)])
    assert got == {PoolName.INDEXER: [True, False, True, True]}
    (view,) = pieces(indexer)  # type: ignore[misc]
    before = want.view(torch.uint8).numpy().reshape(-1, view.shape[1])
    assert all(np.array_equal(view[8 + at], before[at]) for at in (0, 2, 3))
    backend.close()


def test_flat_tensors_without_the_page_interface(server: PoolProcess) -> None:
    backend = backend_of(server.socket, tenant="flat")
    pages = [torch.randint(0, 255, (96,), dtype=torch.uint8) for _ in range(3)]
    assert backend.batch_set(["a", "b", "c"], pages)
    assert [backend.exists(name) for name in ("a", "c", "d")] == [True, True, False]
    got = backend.batch_get(["a", "d", "c"], [torch.zeros(96, dtype=torch.uint8) for _ in range(3)])
    assert got[1] is None
    assert torch.equal(got[0], pages[0])  # type: ignore[arg-type]
    assert torch.equal(got[2], pages[2])  # type: ignore[arg-type]
    backend.close()


def test_a_pool_laid_out_otherwise_is_moved_page_by_page(server: PoolProcess) -> None:
    host = host_pool("mla", "layer_first")
    scattered = SimpleNamespace(
        page_size=4,
        size=host.size,
        layout="scattered",
        kv_buffer=host.kv_buffer,
        get_page_buffer_meta=lambda indices: (_ for _ in ()).throw(NotImplementedError()),
        get_data_page=host.get_data_page,
        get_dummy_flat_data_page=host.get_dummy_flat_data_page,
        set_from_flat_data_page=host.set_from_flat_data_page,
    )
    backend = backend_of(server.socket, tenant="scattered")
    backend.register_mem_pool_host(scattered)
    host.kv_buffer.view(torch.uint8).random_(0, 255)
    want = [flat(host, at) for at in (0, 4)]
    assert backend.batch_set_v1(keys(1, 2), torch.arange(8)) == [True, True]
    assert backend.batch_get_v1([*keys(1, 2), "f" * 64], torch.arange(20, 32)) == [True, True, False]
    assert all(torch.equal(flat(host, at), each) for at, each in zip((20, 24), want, strict=True))
    backend.close()


def test_a_pool_that_is_gone_is_a_miss() -> None:
    with PoolProcess() as pool:
        backend = backend_of(pool.socket, tenant="gone")
        backend.register_mem_pool_host(host_pool("mla", "page_first"))
        assert backend.batch_set_v1(keys(1, 2), torch.arange(8)) == [True, True]
        pool.kill()
        assert backend.batch_exists(keys(1, 2)) == 0
        assert backend.batch_get_v1(keys(1, 2), torch.arange(8)) == [False, False]
        assert backend.batch_set_v1(keys(2, 2), torch.arange(8)) == [False, False]
        assert backend.clear() is False
        backend.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_flat_pages_are_found_by_another_process(server: PoolProcess, layout: str) -> None:
    host = host_pool("mla", layout)
    host.kv_buffer.view(torch.uint8).random_(0, 255)
    pages = [host.get_data_page(at) for at in (0, 4)]
    settings = {"tenant": "slow", "interface_v1": 0}
    first, second = backend_of(server.socket, **settings), backend_of(server.socket, **settings)
    other = backend_of(server.socket, **settings)
    first.register_mem_pool_host(host)
    assert first.batch_set(keys(1, 2), pages)
    second.register_mem_pool_host(host_pool("mla", layout))
    assert second.batch_exists([*keys(1, 2), *keys(2, 1)]) == 2
    got = second.batch_get(keys(1, 2), [host.get_dummy_flat_data_page() for _ in pages])
    for page, each in zip(got, pages, strict=True):
        assert page is not None
        assert torch.equal(page.view(torch.uint8).reshape(-1), each.contiguous().view(torch.uint8).reshape(-1))
    other.register_mem_pool_host(host_pool("mla", "page_first_direct"))
    assert other.batch_exists(keys(1, 2)) == 0, "the same bytes in another order"
    for backend in (first, second, other):
        assert backend.clear()
        backend.close()


def digest_of(socket: str, **settings: Any) -> str:
    backend = backend_of(socket, tenant="who", **settings)
    backend.register_mem_pool_host(host_pool("mla", "page_first"))
    digest = backend._pools["kv"].namespace.identity.digest().hex()
    backend.close()
    return digest


def test_other_weights_are_other_pages(server: PoolProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales, model = tmp_path / "scales.json", tmp_path / "model"
    model.mkdir()

    def digest(settings: dict[str, Any] | None = None, *, weights: bytes = b"1234", scale: str = "1", **arguments: Any) -> str:
        (model / "w.safetensors").write_bytes(weights)
        scales.write_text(scale)
        monkeypatch.setattr(get_context(), "_server_args", ServerArgs(**{"model_path": str(model), **arguments}))
        return digest_of(server.socket, **settings or {})

    scaled = {"quantization_param_path": str(scales)}
    found = [
        digest(),
        digest(weights=b"12345"),
        digest(quantization="fp8"),
        digest(kv_cache_dtype="fp8_e4m3"),
        digest(revision="r2"),
        digest(model_path="some/model"),
        digest(**scaled),
        digest(**scaled, scale="2"),
        digest({"model": "m"}),
        digest({"model": "m"}, weights=b"12345"),
        digest({"revision": "r7"}),
    ]
    assert len(set(found)) == len(found)
    assert digest() == found[0]
    assert digest({"revision": "r7"}, weights=b"12345", quantization="fp8") == found[-1], "a revision of the user's stands for all of them"


def test_what_cannot_be_looked_up_is_a_miss(server: PoolProcess) -> None:
    backend = backend_of(server.socket, tenant="groups")
    backend.register_mem_pool_host(host_pool("mla", "page_first"))
    assert backend.batch_set_v1(keys(1, 2), torch.arange(8)) == [True, True]
    groups = PoolTransfer(name=PoolName.SWA, keys=keys(1, 1), hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    found = backend.batch_exists_v2(keys(1, 2), [groups])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {PoolName.KV: 2})
    unknown = PoolTransfer(name=PoolName.SWA, keys=keys(1, 1), hit_policy="newer")  # type: ignore[arg-type]
    assert backend.batch_exists_v2(keys(1, 2), [unknown]).restorable_prefix_pages == []
    many = [*keys(1, 2), *(f"{number:064x}" for number in range(KEYS_PER_CALL_MAX))]
    assert backend.batch_exists(many) == 2
    backend.close()


def test_settings_are_checked(server: PoolProcess) -> None:
    backend_of(server.socket, allocator="shm", prefetch_threshold=1).close()
    for settings, field in (
        ({"tennant": "x"}, "tennant"),
        ({"deadline_seconds": "10"}, "deadline_seconds"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"socket": 5}, r"extra-config\.pool"),
        ({"revision": 7}, r"extra-config\.revision"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            backend_of(**{"socket": server.socket, **settings})
    with pytest.raises(InvalidRequest, match="map of settings"):
        Settings.of([1])


def test_a_process_without_arguments_needs_a_revision(server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_context(), "_server_args", None)
    with pytest.raises(InvalidRequest, match=r"extra-config\.revision"):
        backend_of(server.socket)
    backend = backend_of(server.socket, revision="r1")
    assert backend.model == Model("tests/tiny", "r1")
    backend.close()


def test_a_newer_host_pool_is_said_to_be_one(server: PoolProcess) -> None:
    backend = backend_of(server.socket, tenant="newer")
    with pytest.raises(ImportError, match=r"was run with sglang 0\.5\.23.*page_size"):
        backend.register_mem_pool_host(SimpleNamespace(kv_buffer=torch.zeros(1)))
    backend.close()
