"""vLLM's KV blocks as pages: which namespace a block belongs to, which key it has, and where its bytes are in vLLM's tensors.

This file knows vLLM's terms and not its code. A *block* of a *cache group* (the layers that share a block table) is a page; its object is
the group's layers one after the other, in the order of the model, so that a load by layers brings first what the forward pass needs first.

*Identity.* vLLM's connector names objects ``...:{namespace}:tp{t}:pcp{c}:dcp{d}:pp{p}:g{group}:{hash}``. The last part is the page key: a
sha256 chain over tokens, adapter, multi-modal inputs and salt (other hashes of vLLM's are stretched by one more sha256). All before it is
the namespace; what vLLM put into its own namespace digest (model, revision, block size, cache specs, parallel sizes, drafter) goes into
ours as ``salt``, with what it left out (`Engine.meaning`: quantization, overrides, a local model's files) and the group's number.

*Copies.* Where ``copies`` consecutive TP ranks hold the same bytes (MLA: all; grouped-query attention with fewer heads than ranks: some),
they have one namespace: rank t is aliased to t // copies. One object is stored, and each rank finds what any of them stored.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from umbp.errors import InvalidRequest
from umbp.layout import Component, Layout
from umbp.types import I64, KEY_BYTES, U8, Mask

_PLACE = re.compile(r":tp(\d+):pcp(\d+):dcp(\d+):pp(\d+):g(\d+)$")
MODEL_CHARS_MAX = 160
WATCHED_MAX = 65_536  # as many as vLLM's connector follows
WATCH_SECONDS = 1.0
WATCH_BLOCKS = 8192  # looked at a time: about 1 ms


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """One cache group: its number, its layers in the order of the model, and the bytes of a block in each of them."""

    number: int
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one object."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Engine:
    """What of an engine's configuration is part of its pages' identity; ``copies`` consecutive TP ranks hold the same bytes."""

    model: str
    tp_size: int
    pcp_size: int
    copies: int
    tenant: str | None = None
    pp_size: int = 1
    revision: str = ""
    meaning: str = ""  # what else changes the bytes, as text

    def __post_init__(self) -> None:
        if self.copies < 1 or self.tp_size % self.copies:
            raise InvalidRequest(f"{self.copies} copies among {self.tp_size} ranks", field="copies", example=f"{self.tp_size}")

    @property
    def replicated(self) -> bool:
        """Whether all TP ranks hold the same bytes."""
        return self.copies == self.tp_size > 1

    def fields(self, group: BlockGroup, namespace: str, tp_rank: int, pcp_rank: int, pp_rank: int = 0) -> dict[str, Any]:
        """The fields of `umbp.layout.Namespace` for a group's blocks in one rank."""
        kv = Component("kv", tuple(range(len(group.sizes))), group.sizes)
        return {
            "model": self.model[-MODEL_CHARS_MAX:],
            "revision": self.revision,
            "page_tokens": group.block_tokens,
            "layout": Layout((kv,)),
            "replicated": self.replicated,
            "tp_rank": tp_rank // self.copies,
            "tp_size": self.tp_size // self.copies,
            "cp_rank": pcp_rank,
            "cp_size": self.pcp_size,
            "pp_rank": pp_rank,
            "pp_size": self.pp_size,
            "tenant": self.tenant,
            "salt": f"vllm {hashlib.sha256(f'{namespace} {self.meaning}'.encode()).hexdigest()[:32]} group {group.number}",
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Where the objects of one prefix of vLLM's keys belong. Places that are equal have one namespace."""

    group: int
    tp_rank: int
    pcp_rank: int


def place_of(prefix: str, copies: int) -> Place | None:
    """The place that a key's part before its hash names; None if it is none of vLLM's."""
    found = _PLACE.search(prefix)
    if found is None:
        return None
    tp_rank, pcp_rank, _, _, group = map(int, found.groups())
    return Place(group, tp_rank // copies, pcp_rank)


def split(keys: Sequence[str]) -> list[tuple[str, I64, U8]]:
    """vLLM's keys by what stands before their hashes: (that prefix, indices (n,), page keys (n, 32)) each.

    A few native passes where the hashes have 32 bytes: 2,200 keys of one rank in 0.3 ms. ValueError if a hash is none.
    """
    if not keys:
        return []
    length, cut = len(keys[0]), keys[0].rfind(":") + 1
    text = "".join(keys)
    if length - cut != 2 * KEY_BYTES or set(map(len, keys)) != {length} or not text.isascii():
        return _split_any(keys)
    rows = np.frombuffer(text.encode(), np.uint8).reshape(-1, length)
    hashes = np.frombuffer(bytes.fromhex(rows[:, cut:].tobytes().decode()), np.uint8).reshape(-1, KEY_BYTES)
    differ = rows[:, np.flatnonzero((rows[:, :cut] != rows[0, :cut]).any(axis=0))]  # the columns in which prefixes differ: few
    parts, left = [], np.arange(len(keys))
    while len(left):  # once for each rank and group
        first = int(left[0])
        same = (differ[left] == differ[first]).all(axis=1)
        indices, left = left[same], left[~same]
        parts.append((keys[first][: cut - 1], indices, hashes if len(indices) == len(keys) else hashes[indices]))
    return parts


def _split_any(keys: Sequence[str]) -> list[tuple[str, I64, U8]]:
    parts: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        parts.setdefault(key[: key.rfind(":")], []).append(index)
    return [
        (prefix, np.array(indices, np.int64), page_keys_of([keys[index][len(prefix) + 1 :] for index in indices]))
        for prefix, indices in parts.items()
    ]


def hashes_of(keys: Sequence[str]) -> U8:
    """(n, 32): the page keys of vLLM's keys, all of one prefix."""
    parts = split(keys)
    if len(parts) > 1:
        raise ValueError(f"keys of {len(parts)} places in one job")
    return parts[0][2] if parts else np.empty((0, KEY_BYTES), np.uint8)


def page_keys_of(hashes: Sequence[str] | Sequence[bytes]) -> U8:
    """(n, 32): page keys of block hashes, as bytes or in hexadecimal. ValueError if one is neither."""
    raw = [bytes.fromhex(item) if isinstance(item, str) else bytes(item) for item in hashes]
    if set(map(len, raw)) != {KEY_BYTES}:
        raw = [item if len(item) == KEY_BYTES else hashlib.sha256(b"vllm block hash" + item).digest() for item in raw]
    return np.frombuffer(b"".join(raw), np.uint8).reshape(-1, KEY_BYTES)


def groups_of(regions: Iterable[Any]) -> tuple[BlockGroup, ...]:
    """Cache groups from the regions of vLLM's layout (``layer_name``, ``group_id``, ``block_bytes``, ``block_size`` each)."""
    found: dict[int, list[Any]] = {}
    for region in regions:
        found.setdefault(int(region.group_id), []).append(region)
    groups = []
    for number, parts in sorted(found.items()):
        parts.sort(key=lambda region: in_order(region.layer_name))
        names, sizes = tuple(str(part.layer_name) for part in parts), tuple(int(part.block_bytes) for part in parts)
        groups.append(BlockGroup(number, names, sizes, int(parts[0].block_size)))
    return tuple(groups)


def in_order(name: str) -> list[tuple[int, str]]:
    """Sorts ``model.layers.10.attn`` behind ``model.layers.9.attn``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


class Watch:
    """Blocks that were told of as stored, whose eviction is to be told as well: some thousands are looked at once a second, without a call.

    ``look(group, hashes)`` gives (n,) bool, or None while there is no pool to ask: then nothing is known to be gone.
    """

    def __init__(self, look: Callable[[int, U8], Mask | None]) -> None:
        self._look = look
        self._blocks: deque[tuple[int, bytes]] = deque(maxlen=WATCHED_MAX)
        self._looked_at = -WATCH_SECONDS

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, group: int, hashes: Iterable[bytes]) -> None:
        """These are stored; the oldest are forgotten where there are too many."""
        self._blocks.extend((group, each) for each in hashes)

    def gone(self, now: float) -> list[tuple[int, bytes]]:
        """(group, hash) of those that are not stored any more."""
        if not self._blocks or now < self._looked_at + WATCH_SECONDS:
            return []
        self._looked_at = now
        some = [self._blocks.popleft() for _ in range(min(WATCH_BLOCKS, len(self._blocks)))]
        gone = []
        for number in sorted({group for group, _ in some}):
            hashes = [each for group, each in some if group == number]
            hit = self._look(number, page_keys_of(hashes))
            here = [True] * len(hashes) if hit is None else hit.tolist()
            gone += [(number, each) for each, stays in zip(hashes, here, strict=True) if not stays]
            self._blocks.extend((number, each) for each, stays in zip(hashes, here, strict=True) if stays)
        return gone


def block_rows(cache: torch.Tensor, block_bytes: int, where: str) -> torch.Tensor:
    """A layer's KV cache as (blocks, block_bytes) uint8 over the same memory; rows may lie further apart than they are long.

    vLLM's first dimension counts blocks, or parts of blocks where its kernels use smaller ones: then a block is several of them in a row.
    Padding of a block, and other layers that are interleaved with this one, lie between the rows.
    """
    if cache.ndim == 0 or not cache.shape[0]:
        raise InvalidRequest("no tensor of blocks", field=where, example="(num_blocks, ...)")
    step, count = cache.stride(0) * cache.element_size(), int(cache.shape[0])
    if block_bytes > step:
        if block_bytes % step:
            raise InvalidRequest(f"blocks of {block_bytes} bytes, parts of {step}", field=where)
        count, step = count * step // block_bytes, block_bytes
    start = cache.storage_offset() * cache.element_size()
    count = min(count, (cache.untyped_storage().nbytes() - start - block_bytes) // step + 1)
    rows = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return rows.set_(cache.untyped_storage(), start, (count, block_bytes), (step, 1))
