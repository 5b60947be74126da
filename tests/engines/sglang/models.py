"""KV caches of the kinds that SGLang assembles, small, on the CPU: real pools and allocators, and which bytes belong to which page."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

COMMON: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
WIPED = 0xA5


def page_bytes(seed: int, pages: np.ndarray, buffer: int, nbytes: int) -> np.ndarray:
    """(pages, nbytes) uint8: what a forward pass leaves for these pages of a prompt in one buffer."""
    at = np.arange(nbytes, dtype=np.int64)
    each = seed * 1_000_003 + pages[:, None].astype(np.int64) * 7919 + buffer * 104_729
    return ((at * 31 + (at >> 8) * 17 + each) % 251).astype(np.uint8)


class Model:
    """Full attention only. Subclasses say which pool; `buffers` gives each buffer and its rows a page."""

    page = 4
    layers = 3
    components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    replicated = True

    window = 0  # pages

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.allocator: Any = None
        self.requests: Any = None

    def pool(self) -> Any:
        raise NotImplementedError

    def buffers(self, kvcache: Any) -> list[tuple[torch.Tensor, int]]:
        raise NotImplementedError

    def make_allocator(self, kvcache: Any) -> Any:
        return PagedTokenToKVPoolAllocator(self.pages * self.page, self.page, torch.bfloat16, "cpu", kvcache, need_sort=False)

    def make_requests(self) -> Any:
        return ReqToTokenPool(8, 256, "cpu", enable_memory_saver=False)

    def params(self, **more: Any) -> CacheInitParams:
        self.requests = self.make_requests()
        self.allocator = self.make_allocator(self.pool())
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            tree_components=self.components,
            **more,
        )

    def alloc(self, tokens: int) -> torch.Tensor:
        slots = self.allocator.alloc(tokens)
        assert slots is not None
        return slots

    def free(self, slots: torch.Tensor) -> None:
        self.allocator.free(slots)

    def insert_more(self, seed: int, pages: int) -> dict[str, Any]:
        """What else an insert needs; it is written here."""
        return {}

    def evict_more(self) -> dict[str, Any]:
        return {}

    def request_kv(self) -> Any:
        return None

    def read(self, kvcache: Any, layer: int) -> None:
        kvcache.get_key_buffer(layer)
        kvcache.get_value_buffer(layer)

    # -- bytes -------------------------------------------------------------------------------------------------------------------------

    def write(self, kvcache: Any, slots: torch.Tensor, seed: int, first_page: int) -> None:
        _write(self.buffers(kvcache), slots, self.page, seed, first_page)

    def holds(self, kvcache: Any, slots: torch.Tensor, seed: int, first_page: int) -> bool:
        return _holds(self.buffers(kvcache), slots, self.page, seed, first_page)

    def holds_end(self, kvcache: Any, slots: torch.Tensor, seed: int, pages: int, request: Any) -> bool:
        """Whether the window and the state at the end of a prefix of ``pages`` pages are there too."""
        return True

    def wipe(self, kvcache: Any) -> None:
        for view in _views(self.buffers(kvcache)):
            view[:] = WIPED


Buffers = list[tuple[torch.Tensor, int]]  # and the rows that a page has in it


def _views(buffers: Buffers) -> list[np.ndarray]:
    """Each buffer as (pages, bytes a page)."""
    views = []
    for buffer, rows in buffers:
        flat = buffer.view(torch.uint8).reshape(buffer.shape[0], -1)
        count = buffer.shape[0] // rows
        view = flat[: count * rows].reshape(count, -1)
        assert view.data_ptr() == buffer.data_ptr()
        views.append(view.numpy())
    return views


def _write(buffers: Buffers, slots: torch.Tensor, page: int, seed: int, first: int) -> None:
    places = slots[::page].numpy() // page
    for index, view in enumerate(_views(buffers)):
        view[places] = page_bytes(seed, np.arange(first, first + len(places)), index, view.shape[1])


def _holds(buffers: Buffers, slots: torch.Tensor, page: int, seed: int, first: int) -> bool:
    places = slots[::page].numpy() // page
    numbers = np.arange(first, first + len(places))
    views = enumerate(_views(buffers))
    return all(np.array_equal(view[places], page_bytes(seed, numbers, index, view.shape[1])) for index, view in views)


class Mla(Model):
    def pool(self) -> Any:
        return memory_pool.MLATokenToKVPool(
            size=self.pages * self.page, page_size=self.page, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=self.layers, **COMMON
        )

    def buffers(self, kvcache: Any) -> list[tuple[torch.Tensor, int]]:
        return [(buffer, self.page) for buffer in kvcache.kv_buffer]


class Mha(Model):
    replicated = False

    def pool(self) -> Any:
        return memory_pool.MHATokenToKVPool(
            size=self.pages * self.page, page_size=self.page, head_num=2, head_dim=8, v_head_dim=4, layer_num=self.layers, **COMMON
        )

    def buffers(self, kvcache: Any) -> list[tuple[torch.Tensor, int]]:
        return [(buffer, self.page) for buffer in (*kvcache.k_buffer, *kvcache.v_buffer)]


class Dsa(Model):
    page = 64  # DSA insists on it

    def pool(self) -> Any:
        return memory_pool.DSATokenToKVPool(
            size=self.pages * self.page,
            page_size=self.page,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            layer_num=self.layers,
            index_head_dim=128,
            kv_cache_dim=24,
            **COMMON,
        )

    def buffers(self, kvcache: Any) -> list[tuple[torch.Tensor, int]]:
        return [*((buffer, self.page) for buffer in kvcache.kv_buffer), *((buffer, 1) for buffer in kvcache.index_k_with_scale_buffer)]


class DsaShared(Dsa):
    """Layers 1 and 3 choose their tokens as the layer before does, and have no indexer of their own."""

    layers = 4

    def pool(self) -> Any:
        return memory_pool.DSATokenToKVPool(
            size=self.pages * self.page,
            page_size=self.page,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            layer_num=self.layers,
            index_head_dim=128,
            kv_cache_dim=24,
            skip_topk_layers=[False, True, False, True],
            **COMMON,
        )

    def buffers(self, kvcache: Any) -> Buffers:
        return [each for each in super().buffers(kvcache) if each[0].shape[0]]


class Swa(Model):
    """Every second layer attends to a window only."""

    components = (ComponentType.FULL, ComponentType.SWA)
    layers = 4
    window = 2
    replicated = False

    def pool(self) -> Any:
        return SWAKVPool(
            size=self.pages * self.page,
            size_swa=self.pages * self.page,
            page_size=self.page,
            head_num=2,
            head_dim=8,
            swa_attention_layer_ids=[1, 3],
            full_attention_layer_ids=[0, 2],
            **COMMON,
        )

    def make_allocator(self, kvcache: Any) -> Any:
        size = self.pages * self.page
        return SWATokenToKVPoolAllocator(size, size, self.page, torch.bfloat16, "cpu", kvcache, need_sort=False)

    def params(self, **more: Any) -> CacheInitParams:
        return super().params(sliding_window_size=self.window * self.page, **more)

    def alloc(self, tokens: int) -> torch.Tensor:
        slots = self.allocator.full_attn_allocator.alloc(tokens)
        window = self.allocator.swa_attn_allocator.alloc(tokens)
        self.allocator.set_full_to_swa_mapping(slots, window)
        return slots

    def buffers(self, kvcache: Any) -> Buffers:
        return [(buffer, self.page) for buffer in (*kvcache.full_kv_pool.k_buffer, *kvcache.full_kv_pool.v_buffer)]

    def window_buffers(self, kvcache: Any) -> Buffers:
        return [(buffer, self.page) for buffer in (*kvcache.swa_kv_pool.k_buffer, *kvcache.swa_kv_pool.v_buffer)]

    def write(self, kvcache: Any, slots: torch.Tensor, seed: int, first_page: int) -> None:
        super().write(kvcache, slots, seed, first_page)
        _write(self.window_buffers(kvcache), self.allocator.translate_loc_from_full_to_swa(slots), self.page, seed + 1, first_page)

    def holds_end(self, kvcache: Any, slots: torch.Tensor, seed: int, pages: int, request: Any) -> bool:
        count = min(self.window, len(slots) // self.page)
        there = self.allocator.translate_loc_from_full_to_swa(slots[-count * self.page :])
        return _holds(self.window_buffers(kvcache), there, self.page, seed + 1, pages - count)

    def wipe(self, kvcache: Any) -> None:
        super().wipe(kvcache)
        for view in _views(self.window_buffers(kvcache)):
            view[:] = WIPED

    def evict_more(self) -> dict[str, Any]:
        return {"swa_num_tokens": 1 << 20}

    def request_kv(self) -> Any:
        return ReqKvInfo()


class Mamba:
    """Linear states beside a full-attention pool."""

    state_layers: tuple[int, ...] = (1, 3)

    def make_requests(self) -> Any:
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=2, head_dim=8, state_size=8, conv_kernel=4
        )
        return HybridReqToTokenPool(
            size=8,
            mamba_size=16,
            mamba_spec_state_size=8,
            max_context_len=256,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=list(self.state_layers)),
            mamba_layer_ids=list(self.state_layers),
            enable_mamba_extra_buffer=True,
        )

    def states(self) -> Buffers:
        cache = self.requests.mamba_pool.mamba_cache  # type: ignore[attr-defined]
        return [(state[layer], 1) for state in (cache.temporal, *cache.conv) for layer in range(len(self.state_layers))]

    def insert_more(self, seed: int, pages: int) -> dict[str, Any]:
        slot = self.requests.mamba_allocator.alloc(1)  # type: ignore[attr-defined]
        _write(self.states(), slot, 1, seed + 2, pages)
        return {"mamba_value": slot}

    def state_is_there(self, seed: int, pages: int, request: Any) -> bool:
        return _holds(self.states(), request.kv.mamba_pool_idx.reshape(1), 1, seed + 2, pages)

    def wipe_states(self) -> None:
        for view in _views(self.states()):
            view[:] = WIPED


class Hybrid(Mamba, Model):
    """Full attention in every second layer, MLA or MHA, and states in the others."""

    components = (ComponentType.FULL, ComponentType.MAMBA)
    layers = 4
    use_mla = True

    def pool(self) -> Any:
        more: dict[str, Any] = {"use_mla": True, "kv_lora_rank": 16, "qk_rope_head_dim": 8} if self.use_mla else {}
        return memory_pool.HybridLinearKVPool(
            size=self.pages * self.page,
            page_size=self.page,
            head_num=2,
            head_dim=8,
            full_attention_layer_ids=[0, 2],
            mamba_pool=self.requests.mamba_pool,
            **COMMON,
            **more,
        )

    def params(self, **more: Any) -> CacheInitParams:
        return super().params(enable_mamba_extra_buffer=True, **more)

    def buffers(self, kvcache: Any) -> Buffers:
        full = kvcache.full_kv_pool
        return [(buffer, self.page) for buffer in (full.kv_buffer if self.use_mla else (*full.k_buffer, *full.v_buffer))]

    def holds_end(self, kvcache: Any, slots: torch.Tensor, seed: int, pages: int, request: Any) -> bool:
        return self.state_is_there(seed, pages, request)

    def wipe(self, kvcache: Any) -> None:
        super().wipe(kvcache)
        self.wipe_states()

    def evict_more(self) -> dict[str, Any]:
        return {"mamba_num": 1 << 10}

    def request_kv(self) -> Any:
        return ReqKvInfo()

    def read(self, kvcache: Any, layer: int) -> None:
        if layer in self.state_layers:
            self.requests.mamba2_layer_cache(layer)
        else:
            kvcache.get_key_buffer(layer)
            kvcache.get_value_buffer(layer)


class HybridMha(Hybrid):
    use_mla = False


class HybridDsa(Hybrid):
    """As `Hybrid`, with sparse attention and its indexer."""

    page = 64

    def pool(self) -> Any:
        return memory_pool.HybridLinearKVPool(
            size=self.pages * self.page,
            page_size=self.page,
            head_num=2,
            head_dim=8,
            full_attention_layer_ids=[0, 2],
            mamba_pool=self.requests.mamba_pool,
            use_mla=True,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            use_dsa=True,
            index_head_dim=128,
            kv_cache_dim=24,
            **COMMON,
        )

    def buffers(self, kvcache: Any) -> Buffers:
        indexer = kvcache.full_kv_pool.index_k_with_scale_buffer
        return [*super().buffers(kvcache), *((buffer, 1) for buffer in indexer)]


class SwaMamba(Mamba, Swa):
    """All three."""

    components = (ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA)
    layers = 6
    state_layers = (4, 5)

    def params(self, **more: Any) -> CacheInitParams:
        return super().params(enable_mamba_extra_buffer=True, **more)

    def holds_end(self, kvcache: Any, slots: torch.Tensor, seed: int, pages: int, request: Any) -> bool:
        return super().holds_end(kvcache, slots, seed, pages, request) and self.state_is_there(seed, pages, request)

    def wipe(self, kvcache: Any) -> None:
        super().wipe(kvcache)
        self.wipe_states()

    def evict_more(self) -> dict[str, Any]:
        return {**super().evict_more(), "mamba_num": 1 << 10}

    def read(self, kvcache: Any, layer: int) -> None:
        if layer in self.state_layers:
            self.requests.mamba2_layer_cache(layer)
        else:
            super().read(kvcache, layer)


class DeepSeekV4(Swa):
    """Compressed KV of two ratios, an indexer, window KV and the states of the compressors; 256-token pages, as the model has them."""

    page = 256
    layers = 4
    window = 1  # 128 tokens
    replicated = True
    ratios = (0, 4, 128, 4)

    def pool(self) -> Any:
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=4,
            swa_size=self.pages * self.page,
            c4_size=self.pages * self.page // 4,
            c128_size=self.pages * self.page // 128,
            c4_state_pool_size=self.pages * self.page // 128 * 8 * 2,
            c128_state_pool_size=8,
            page_size=self.page,
            swa_page_size=self.page,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=self.layers,
            compression_ratios=list(self.ratios),
            full_size=self.pages * self.page,
            start_layer=0,
            end_layer=self.layers,
            **{**COMMON, "dtype": torch.float8_e4m3fn},
        )

    def params(self, **more: Any) -> CacheInitParams:
        return Model.params(self, sliding_window_size=128, **more)

    def buffers(self, kvcache: Any) -> Buffers:
        indexer = kvcache.c4_indexer_kv_pool
        return [
            (buffer, 1)
            for buffer in (*kvcache.c4_kv_pool.kv_buffer, *kvcache.c128_kv_pool.kv_buffer, *indexer.contiguous_page_row_buffers())
        ]

    def window_buffers(self, kvcache: Any) -> Buffers:
        states = [
            pool for pool in (*kvcache.compress_state_pools, *kvcache.indexer_compress_state_pools) if pool is not None and pool.ratio == 4
        ]
        rings = [(pool.kv_score_buffer.kv_score, int(pool.ring_size)) for pool in states]
        return [*((buffer, 1) for buffer in kvcache.swa_kv_pool.kv_buffer), *rings]

    def read(self, kvcache: Any, layer: int) -> None:
        kvcache.wait_layer_transfer(layer)
