"""SGLang's device pools as objects of UMBP: which tensors make up one page, and where a transfer's pages lie in them.

SGLang describes a model's KV cache as physical pools (KV, indexer, window, states ...). Each follows the slots of one of three *sources*:
KV (a page for every page of the prompt), SWA (the pages of a trailing window) and MAMBA (one state for the end of a prefix). Pools of one
source share their slots and their keys, so all of them together are one object a page here: what SGLang calls a lookup of many pools is one
probe for each source, and a page is there with all its parts or not at all. Such a set of pools is a *bundle*: one namespace, one loader.

The groups are assembled by SGLang itself where it can (DeepSeek-V4, DSA, MLA + Mamba, SWA + Mamba), and by `plain_group` where it refuses
what there is no reason to refuse: plain MLA, plain MHA, SWA without Mamba, MHA or DSA + Mamba, DSA whose layers share indexers, and drafts
beside windows and states, which it refuses or leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _stage_local_layer_mapping, _swa_layer_mappings
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    _mamba_device_pool_entry,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from umbp.errors import InvalidRequest
from umbp.layout import Layout
from umbp.types import I64, U8

REPLICATED = (MLATokenToKVPool, DSATokenToKVPool)  # every rank of the attention group has the same
PAGE_MAJOR = ("hnd", "vectorized_5d")  # layouts of MHA buffers whose first dimension counts pages


@dataclass(frozen=True, slots=True)
class Bundle:
    """All pools of one source, as one object a page.

    ``tensors``: component -> one tensor a logical layer, None where it has none; ``layout`` describes them. ``slot_tokens``: device indices
    that a transfer gives for each key. ``replicated``: every rank of the attention group holds the same bytes.
    """

    source: PoolName
    replicated: bool
    slot_tokens: int
    tensors: dict[str, list[torch.Tensor | None]]
    layout: Layout
    mapper: Callable[[torch.Tensor], torch.Tensor] | None

    def slots(self, transfer: PoolTransfer) -> I64:
        """(keys,) int64: the page index of each key in all tensors. InvalidRequest unless each key has an aligned page of its own."""
        indices = transfer.device_indices
        if indices is None:
            raise InvalidRequest(f"the {transfer.name} transfer has no slots", field="transfers")
        if self.mapper is not None:
            indices = self.mapper(indices)
        flat = indices.detach().to(device="cpu", dtype=torch.int64).numpy().reshape(-1)
        count, size = len(transfer.keys or ()), self.slot_tokens
        if len(flat) != count * size:
            raise InvalidRequest(f"{len(flat)} slots for {count} keys of {size} each", field=f"transfers[{transfer.name}]")
        pages = flat.reshape(count, size)
        starts = pages[:, 0]
        if (starts % size).any() or not (pages == starts[:, None] + np.arange(size)).all():
            raise InvalidRequest("slots are not whole pages", field=f"transfers[{transfer.name}]")
        places: I64 = starts // size
        return places


def keys_of(texts: Any) -> U8:
    """(n, 32) uint8 of SGLang's hashes, 64 hexadecimal digits each."""
    return np.frombuffer(bytes.fromhex("".join(texts)), np.uint8).reshape(len(texts), -1)


# -- from SGLang's groups ----------------------------------------------------------------------------------------------------------


def device_group(kvcache: Any, page_size: int, params: Any, components: set[Any]) -> DevicePoolGroup:
    """SGLang's own group of device pools, or ours where it has none, or leaves a draft out. ValueError says why neither can be had."""
    try:
        if type(kvcache) is SWAKVPool and (_drafts(params) or params.mtp_draft_mamba_pools):
            raise ValueError("SGLang's assembler leaves the draft's pools out")
        group = resolve_hybrid_device_pool_group(kvcache=kvcache, page_size=page_size, params=params, components=components)
    except (ValueError, AssertionError, ZeroDivisionError) as error:
        ours = plain_group(kvcache, page_size, params, components)
        if ours is None:
            raise ValueError(f"UMBP cannot hold the KV of {type(kvcache).__name__} yet: {error}") from error
        group = ours
    if ComponentType.MAMBA in components and PoolName.MAMBA not in group.entry_map:
        raise ValueError(f"UMBP cannot hold the KV of {type(kvcache).__name__} yet: its states would be left out")
    return group


def bundles(group: DevicePoolGroup, page_tokens: int) -> list[Bundle]:
    """The group's pools by source, KV first. Pools that are replicated and pools that are not never share an object."""
    sets: dict[tuple[Any, ...], list[DevicePoolEntry]] = {}
    for entry in group.entries:
        replicated = group.rank_replicated or type(entry.device_pool) in REPLICATED
        sets.setdefault((entry.indices_from_pool, replicated, entry.page_size, entry._index_mapper), []).append(entry)
    found = [_bundle(entries, *key, layers=group.num_layers, page_tokens=page_tokens) for key, entries in sets.items()]
    return sorted(found, key=lambda bundle: (bundle.source != PoolName.KV, str(bundle.source), not bundle.replicated))


def _bundle(
    entries: list[DevicePoolEntry], source: PoolName, replicated: bool, slot_tokens: int, mapper: Any, *, layers: int, page_tokens: int
) -> Bundle:
    tensors: dict[str, list[torch.Tensor | None]] = {}
    rows: dict[str, str] = {}
    for entry in entries:
        for number, buffers in enumerate(entry.components):
            for layer, mapped in entry.layer_mapping.items():
                for place, index in enumerate((mapped,) if isinstance(mapped, int) else mapped):
                    kind = str(buffers[index].dtype).removeprefix("torch.")
                    name = f"{entry.name}.{number}.{place}.{kind}"
                    tensors.setdefault(name, [None] * layers)[layer] = buffers[index]
                    rows[name] = "page" if entry._row_span == 1 else "token"
    layout = Layout.of(tensors, page_tokens=page_tokens, rows=rows)
    return Bundle(source, replicated, slot_tokens, tensors, layout, mapper)


# -- our own groups ----------------------------------------------------------------------------------------------------------------


def plain_group(kvcache: Any, page_size: int, params: Any, components: set[Any]) -> DevicePoolGroup | None:
    """A group for what SGLang's assembler leaves out; None if there is a reason to (a kind of pool that is not known here)."""
    if type(kvcache) is SWAKVPool:
        parts = _window_entries(kvcache, page_size, params)
    elif type(kvcache) is HybridLinearKVPool:
        full = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        drafts = tuple(getattr(pool, "full_kv_pool", pool) for pool in _drafts(params))
        parts = _entries(PoolName.KV, kvcache.full_kv_pool, full, page_size, drafts)
    else:
        parts = _entries(PoolName.KV, kvcache, {layer: layer for layer in range(kvcache.layer_num)}, page_size, _drafts(params))
    if parts is None:
        return None
    if ComponentType.MAMBA in components:
        parts += [_mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer), *_draft_states(params)]
    for pool in params.sidecar_draft_device_pools:
        draft = _entries(PoolName.DRAFT, pool, {layer: layer for layer in range(pool.layer_num)}, page_size, ())
        if draft is None or pool.page_size != page_size:
            return None
        for entry in draft:
            entry.indices_from_pool = PoolName.KV
        parts += draft
    layers = 1 + max(layer for entry in parts for layer in entry.layer_mapping)
    replicated = all(type(entry.device_pool) in REPLICATED for entry in parts)
    return DevicePoolGroup(parts, layers, page_size, rank_replicated=replicated)


def _drafts(params: Any) -> tuple[Any, ...]:
    return tuple(params.mtp_draft_device_pools)


def _entries(name: PoolName, pool: Any, layers: dict[int, int], page_size: int, drafts: tuple[Any, ...]) -> list[DevicePoolEntry] | None:
    """The entries of a plain pool; the draft pools' layer N rides with the target's layer N."""
    if any(type(draft) is not type(pool) for draft in drafts):
        return None
    together = (pool, *drafts)
    if type(pool) is MLATokenToKVPool:
        return _packed(name, pool, layers, page_size, [[list(each.kv_buffer)] for each in together], by_page=False)
    if type(pool) is DSATokenToKVPool and not pool.kpool_use_compress:
        latent = _packed(name, pool, layers, page_size, [[list(each.kv_buffer)] for each in together], by_page=False)
        beside = PoolName.INDEXER if name == PoolName.KV else PoolName.DRAFT_INDEXER
        indexer = _packed(beside, pool, layers, page_size, [[list(each.index_k_with_scale_buffer)] for each in together], by_page=True)
        for entry in indexer or ():
            entry.indices_from_pool = name
        return None if latent is None or indexer is None else latent + indexer
    if type(pool) is MHATokenToKVPool and pool.k_scale_buffer is None and pool.native_k_scale_buffer is None:
        by_page = getattr(pool, "kv_cache_layout", "") in PAGE_MAJOR
        return _packed(name, pool, layers, page_size, [[list(each.k_buffer), list(each.v_buffer)] for each in together], by_page=by_page)
    return None


def _packed(
    name: PoolName, pool: Any, layers: dict[int, int], page_size: int, pools: list[list[list[torch.Tensor]]], *, by_page: bool
) -> list[DevicePoolEntry] | None:
    """One entry of the target's and the drafts' buffers: ``pools`` has for each pool its kinds (K and V, say), each one buffer a layer.

    Buffers without rows, which stand for layers that share another's, are left out. None if there are more draft layers than the target's.
    """
    buffers: list[torch.Tensor] = []
    mapping: dict[int, tuple[int, ...]] = dict.fromkeys(sorted(layers), ())
    drafts = [(kinds, index) for kinds in pools[1:] for index in range(len(kinds[0]))]
    if len(drafts) > len(mapping):
        return None
    rides = [(layer, pools[0], layers[layer]) for layer in mapping]
    rides += [(layer, kinds, index) for layer, (kinds, index) in zip(mapping, drafts, strict=False)]
    for layer, kinds, index in rides:
        live = [kind[index] for kind in kinds if kind[index].shape[0]]
        mapping[layer] += tuple(range(len(buffers), len(buffers) + len(live)))
        buffers += live
    return [
        DevicePoolEntry(
            name=name,
            indices_from_pool=name,
            device_pool=pool,
            components=[buffers],
            layer_mapping={layer: where for layer, where in mapping.items() if where},
            page_size=page_size,
            rows_are_pages=by_page,
        )
    ]


def _window_entries(kvcache: Any, page_size: int, params: Any) -> list[DevicePoolEntry] | None:
    """Full attention and sliding windows side by side. A draft has layers of either kind; windows may follow the slots of KV there."""
    full, window = _swa_layer_mappings(kvcache)
    drafts = _drafts(params)
    if any(type(pool) is not SWAKVPool for pool in drafts):
        return None
    with_full = tuple(pool.full_kv_pool for pool in drafts if pool.full_kv_pool.layer_num)
    with_window = tuple(pool.swa_kv_pool for pool in drafts if pool.swa_kv_pool.layer_num and not pool.swa_uses_full_indices)
    by_full = [pool.swa_kv_pool for pool in drafts if pool.swa_kv_pool.layer_num and pool.swa_uses_full_indices]
    found = [
        _entries(PoolName.KV, kvcache.full_kv_pool, full, page_size, with_full),
        _entries(PoolName.SWA, kvcache.swa_kv_pool, window, page_size, with_window),
    ]
    if len(by_full) > 1:
        return None
    for pool in by_full:
        draft = _entries(PoolName.DRAFT_SWA, pool, {layer: layer for layer in range(pool.layer_num)}, page_size, ())
        for entry in draft or ():
            entry.indices_from_pool = PoolName.KV
        found.append(draft)
    return None if any(each is None for each in found) else [entry for each in found for entry in each or ()]


def _draft_states(params: Any) -> list[DevicePoolEntry]:
    """A draft's own states, which follow the target's slots."""
    parts = []
    for number, pool in enumerate(params.mtp_draft_mamba_pools):
        layers = range(pool.num_mamba_layers)
        states = [state for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if state.numel() > 0]
        parts.append(
            DevicePoolEntry(
                name=f"draft{number}_mamba",
                indices_from_pool=PoolName.MAMBA,
                device_pool=pool,
                components=[[state[layer] for layer in layers] for state in states],
                layer_mapping={layer: layer for layer in layers},
                page_size=1,
                rows_are_pages=True,
            )
        )
    return parts
