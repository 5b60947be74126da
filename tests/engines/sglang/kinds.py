"""Models with drafts (MTP layers packed beside the target's, and pools beside), and all kinds of models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from tests.engines.sglang.models import (
    COMMON,
    Buffers,
    DeepSeekV4,
    Dsa,
    DsaShared,
    Hybrid,
    HybridDsa,
    HybridMha,
    Mha,
    Mla,
    Model,
    Swa,
    SwaMamba,
)


class MlaDraft(Mla):
    """With the layers of a draft model that share the slots."""

    def params(self, **more: Any) -> CacheInitParams:
        self.draft = self.pool()
        self.draft.kv_buffer = self.draft.kv_buffer[:2]
        return super().params(mtp_draft_device_pools=(self.draft,), **more)

    def buffers(self, kvcache: Any) -> Buffers:
        return [(buffer, self.page) for buffer in (*kvcache.kv_buffer, *self.draft.kv_buffer)]


class MhaDraft(Mha):
    """With a draft pool that shares the slots, stored beside."""

    def params(self, **more: Any) -> CacheInitParams:
        self.draft = self.pool()
        return super().params(sidecar_draft_device_pools=(self.draft,), **more)

    def buffers(self, kvcache: Any) -> Buffers:
        return [*super().buffers(kvcache), *super().buffers(self.draft)]


class HybridDraft(Hybrid):
    """With a draft's full-attention layer, and its own states in the target's slots."""

    def params(self, **more: Any) -> CacheInitParams:
        self.requests = self.make_requests()
        self.draft, self.draft_requests = self.pool(), self.make_requests()
        self.draft.full_kv_pool.kv_buffer = self.draft.full_kv_pool.kv_buffer[:1]
        return super().params(mtp_draft_device_pools=(self.draft,), mtp_draft_mamba_pools=(self.draft_requests.mamba_pool,), **more)

    def buffers(self, kvcache: Any) -> Buffers:
        return [*super().buffers(kvcache), *super().buffers(self.draft)]

    def states(self) -> Buffers:
        cache = self.draft_requests.mamba_pool.mamba_cache
        more = [(state[layer], 1) for state in (cache.temporal, *cache.conv) for layer in range(len(self.state_layers))]
        return [*super().states(), *more]


class SwaDraft(Swa):
    """With a draft of three depths: one attends to all, one to a window, and one to a window in the slots of all."""

    def params(self, **more: Any) -> CacheInitParams:
        self.drafts = tuple(self.draft(full, window) for full, window in (([0], []), ([], [0]), ([], [0])))
        self.drafts[2].swa_uses_full_indices = True
        return super().params(mtp_draft_device_pools=self.drafts, **more)

    def draft(self, full: list[int], window: list[int]) -> Any:
        return SWAKVPool(
            size=self.pages * self.page,
            size_swa=self.pages * self.page,
            page_size=self.page,
            head_num=2,
            head_dim=8,
            swa_attention_layer_ids=window,
            full_attention_layer_ids=full,
            **COMMON,
        )

    def buffers(self, kvcache: Any) -> Buffers:
        pools = (self.drafts[0].full_kv_pool, self.drafts[2].swa_kv_pool)
        more = [(buffer, self.page) for pool in pools for buffer in (*pool.k_buffer, *pool.v_buffer)]
        return [*super().buffers(kvcache), *more]

    def window_buffers(self, kvcache: Any) -> Buffers:
        pool = self.drafts[1].swa_kv_pool
        return [*super().window_buffers(kvcache), *((buffer, self.page) for buffer in (*pool.k_buffer, *pool.v_buffer))]


class SwaMambaDraft(SwaMamba, SwaDraft):
    """All of it."""


class SwaMambaSidecar(SwaMamba):
    """With a draft pool beside that shares the slots."""

    def params(self, **more: Any) -> CacheInitParams:
        self.beside = Mha(self.pages).pool()
        return super().params(sidecar_draft_device_pools=(self.beside,), **more)

    def buffers(self, kvcache: Any) -> Buffers:
        return [*super().buffers(kvcache), *((buffer, self.page) for buffer in (*self.beside.k_buffer, *self.beside.v_buffer))]


MODELS: dict[str, Callable[[int], Model]] = {
    "mla": Mla,
    "mla+draft": MlaDraft,
    "mha": Mha,
    "dsa": Dsa,
    "dsa+shared": DsaShared,
    "mha+draft": MhaDraft,
    "swa": Swa,
    "mla+mamba": Hybrid,
    "mha+mamba": HybridMha,
    "swa+mamba": SwaMamba,
    "dsa+mamba": HybridDsa,
    "mla+mamba+draft": HybridDraft,
    "swa+draft": SwaDraft,
    "swa+mamba+draft": SwaMambaDraft,
    "swa+mamba+sidecar": SwaMambaSidecar,
    "deepseek_v4": DeepSeekV4,
}
