"""KV caches of the kinds that SGLang assembles, small, on the CPU: real pools and allocators, and which bytes belong to which page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
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

    def __init__(self, pages: int) -> None:
        self.pages = pages

    def pool(self) -> Any:
        raise NotImplementedError

    def buffers(self, kvcache: Any) -> list[tuple[torch.Tensor, int]]:
        raise NotImplementedError

    def params(self, **more: Any) -> CacheInitParams:
        kvcache = self.pool()
        allocator = PagedTokenToKVPoolAllocator(self.pages * self.page, self.page, torch.bfloat16, "cpu", kvcache, need_sort=False)
        requests = ReqToTokenPool(8, 256, "cpu", enable_memory_saver=False)
        return CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=allocator,
            page_size=self.page,
            tree_components=self.components,
            **more,
        )

    def alloc(self, allocator: Any, tokens: int) -> torch.Tensor:
        slots = allocator.alloc(tokens)
        assert slots is not None
        return slots

    def take_away(self, allocator: Any, pages: int) -> None:
        self.alloc(allocator, pages * self.page)

    def insert_more(self, params: Any, tokens: int) -> dict[str, Any]:
        return {}

    def evict_more(self) -> dict[str, Any]:
        return {}

    def request_kv(self) -> Any:
        return None

    def read(self, kvcache: Any, layer: int) -> None:
        kvcache.get_key_buffer(layer)
        kvcache.get_value_buffer(layer)

    # -- bytes -------------------------------------------------------------------------------------------------------------------------

    def views(self, kvcache: Any) -> list[np.ndarray]:
        """Each buffer as (pages, bytes a page)."""
        views = []
        for buffer, rows in self.buffers(kvcache):
            flat = buffer.view(torch.uint8).reshape(buffer.shape[0], -1)
            count = buffer.shape[0] // rows
            views.append(flat[: count * rows].reshape(count, -1).numpy())
        return views

    def write(self, kvcache: Any, slots: torch.Tensor, seed: int, first_page: int) -> None:
        places = slots[:: self.page].numpy() // self.page
        numbers = np.arange(first_page, first_page + len(places))
        for index, view in enumerate(self.views(kvcache)):
            view[places] = page_bytes(seed, numbers, index, view.shape[1])

    def holds(self, kvcache: Any, slots: torch.Tensor, seed: int, first_page: int) -> bool:
        places = slots[:: self.page].numpy() // self.page
        numbers = np.arange(first_page, first_page + len(places))
        views = enumerate(self.views(kvcache))
        return all(np.array_equal(view[places], page_bytes(seed, numbers, index, view.shape[1])) for index, view in views)

    def wipe(self, kvcache: Any) -> None:
        for view in self.views(kvcache):
            view[:] = WIPED


class Mla(Model):
    def pool(self) -> Any:
        return memory_pool.MLATokenToKVPool(
            size=self.pages * self.page, page_size=self.page, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=self.layers, **COMMON
        )

    def buffers(self, kvcache: Any) -> list[tuple[torch.Tensor, int]]:
        return [(buffer, self.page) for buffer in kvcache.kv_buffer]


class MlaDraft(Mla):
    """With the layers of a draft model that share the slots."""

    def params(self, **more: Any) -> CacheInitParams:
        self.draft = self.pool()
        self.draft.kv_buffer = self.draft.kv_buffer[:2]
        return super().params(mtp_draft_device_pools=(self.draft,), **more)

    def buffers(self, kvcache: Any) -> list[tuple[torch.Tensor, int]]:
        return [(buffer, self.page) for buffer in (*kvcache.kv_buffer, *self.draft.kv_buffer)]


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


MODELS: dict[str, Callable[[int], Model]] = {"mla": Mla, "mla+draft": MlaDraft, "mha": Mha, "dsa": Dsa}
