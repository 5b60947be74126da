"""SGLang's HiCache over the pool: a dynamic storage backend, for those who keep the host cache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "umbp", "module_path": "umbp.integrations.sglang_hicache",
                                             "class_name": "UMBPHiCache", "interface_v1": 1}'

Theory of operation
-------------------
A page of a host pool lies in a few pieces, each at a fixed distance from the same piece of the page before: what SGLang's own page meta
data says of three pages tells where all pages are (`pieces`). So a host pool is seen as a set of tensors whose rows are pages, in the
memory that it has, and the loader moves any number of pages between them and the segment in a few native calls. A pool that is laid out
otherwise, or gives no such meta data, is moved page by page as flat bytes.

Each host pool has a namespace of its own; its layout is part of the identity, as the order of the bytes in a page follows from it. So are
the model and its revision, which SGLang does not hand to a backend: they are read from the arguments of this process, as the linker's are
(`umbp.integrations.sglang_identity`), and where there are none the user has to name them. Keys are SGLang's hashes as they are. SGLang
calls from threads of its own; an error of the pool is a miss there, never an exception.

Without ``interface_v1`` SGLang hands over pages as flat tensors. These are a namespace of their own, which is the one that is asked then.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from umbp.client import Namespace, connect
from umbp.errors import InvalidRequest, UmbpError
from umbp.integrations import versions
from umbp.integrations.sglang_identity import revision_of
from umbp.integrations.windows import leading, windows_that_are_whole
from umbp.layout import KEYS_PER_CALL_MAX, Component, Layout
from umbp.types import I64, KEY_BYTES, U8, Mask, ReadStatus, WriteStatus

KNOWN = ("0.5.23",)
try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult
    from sglang.srt.runtime_context import get_server_args
except ImportError as error:
    raise versions.does_not_fit("sglang", KNOWN, str(error)) from error
else:  # what takes seconds: another SGLang is named before that, and where there is no torch too
    import torch

    from umbp.loader import Loader

log = logging.getLogger("umbp.integrations.sglang_hicache")
OWN = (  # SGLang's own keys of the extra configuration
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
FIELD = "hicache-storage-backend-extra-config"
DEADLINE_SECONDS = (0.01, 3600.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the extra configuration may hold beside SGLang's own keys, all of it optional; as the linker's of the same names."""

    pool: str | None = None
    model: str | None = None
    revision: str | None = None
    tenant: str | None = None
    salt: str | None = None
    deadline_seconds: float = 10.0

    @classmethod
    def of(cls, extra_config: Any) -> Settings:
        """Check it. InvalidRequest names the key."""
        if not isinstance(extra_config or {}, dict):
            raise InvalidRequest(f"{type(extra_config).__name__}, not a map of settings", field=FIELD, example='{"tenant": "team-a"}')
        values = {name: value for name, value in (extra_config or {}).items() if name not in OWN}
        known = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise InvalidRequest(f"unknown key {name!r}; there are {', '.join(known)}", field=FIELD, example='{"tenant": "team-a"}')
            if name == "deadline_seconds":
                low, high = DEADLINE_SECONDS
                if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                    raise InvalidRequest(f"{value!r} is no number in {low} .. {high}", field=f"{FIELD}.{name}", example="10.0")
            elif value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{value!r} is no text", field=f"{FIELD}.{name}", example='{"tenant": "team-a"}')
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Model:
    """Whose pages they are."""

    name: str
    revision: str

    @classmethod
    def of(cls, settings: Settings, storage_config: Any) -> Model:
        """From the user, or from SGLang's arguments in this process. InvalidRequest where neither says it."""
        try:
            arguments = get_server_args()
        except ValueError:  # SGLang's, where none were set
            arguments = None
        name = settings.model or getattr(arguments, "model_path", None) or storage_config.model_name
        if not isinstance(name, str) or not name:
            raise InvalidRequest("SGLang's arguments name no model", field=f"{FIELD}.model", example="deepseek-v4-pro")
        if settings.revision is not None:
            return cls(name[-256:], settings.revision)
        if arguments is None:
            raise InvalidRequest("SGLang's arguments are not known in this process", field=f"{FIELD}.revision", example="2026-11")
        return cls(name[-256:], revision_of(arguments))


def pieces(host: Any) -> list[U8] | None:
    """A host pool's pages as matrices (pages, bytes), one for each piece of a page, in place; None if it is not laid out so."""
    page = int(host.page_size)
    pages = int(host.size) // page
    if pages < 2:
        return None
    try:
        (first, sizes), (second, _), (last, _) = (
            host.get_page_buffer_meta(torch.arange(at * page, (at + 1) * page)) for at in (0, 1, pages - 1)
        )
    except (ValueError, NotImplementedError, AttributeError, RuntimeError):
        return None
    starts, steps = np.array(first, np.int64), np.array(second, np.int64) - np.array(first, np.int64)
    if not np.array_equal(steps, sizes) or not np.array_equal(np.array(last, np.int64), starts + steps * (pages - 1)):
        return None
    found = []
    for start, size in zip(first, sizes, strict=True):
        memory = (ctypes.c_uint8 * (int(size) * pages)).from_address(int(start))
        found.append(np.frombuffer(memoryview(memory).cast("B"), np.uint8).reshape(pages, int(size)))
    return found


class HostPool:
    """One host pool and its namespace."""

    def __init__(self, name: str, host: Any, backend: UMBPHiCache) -> None:
        self.host = host
        self.page = int(host.page_size)
        found = pieces(host)
        label = f"{name}.{getattr(host, 'layout', 'flat')}" + ("" if found is not None else ".flat")
        sizes = [piece.shape[1] for piece in found] if found is not None else [len(_bytes_of(host.get_data_page(0, flat=True)))]
        layout = Layout((Component(label, tuple(range(len(sizes))), tuple(sizes), dtype=_kind(host)),))
        self.namespace = backend.open(layout, self.page, name)
        self.loader: Loader | None = None
        if found is not None:
            self.loader = Loader(self.namespace, {label: [torch.from_numpy(piece) for piece in found]})
        self.deadline = backend.settings.deadline_seconds
        way = "in place" if found else "one by one"
        log.info("%s pages of %s: %d bytes in %d pieces, %s", name, type(host).__name__, sum(sizes), len(sizes), way)

    def slots(self, indices: Any, count: int) -> I64:
        """(count,) page numbers of these host indices."""
        flat = indices.detach().cpu().numpy().reshape(-1)
        if len(flat) != count * self.page:
            raise InvalidRequest(f"{len(flat)} host indices for {count} pages of {self.page}", field="host_indices")
        pages: I64 = flat[:: self.page].astype(np.int64) // self.page
        return pages

    def get(self, keys: U8, indices: Any) -> Mask:
        """Bring these pages; which of them are there now."""
        slots = self.slots(indices, len(keys))
        good: Mask = np.ones(len(keys), bool)
        if self.loader is not None:
            good[self.loader.load(keys, slots, deadline=self.deadline).finish().missing] = False
            return good
        out = np.empty((len(keys), self.namespace.object_bytes), np.uint8)
        good = self.namespace.get(keys, out).codes == ReadStatus.HIT
        for number in np.flatnonzero(good).tolist():
            like = self.host.get_dummy_flat_data_page()
            page = torch.from_numpy(out[number].copy()).view(like.dtype).reshape(like.shape)
            self.host.set_from_flat_data_page(int(slots[number]) * self.page, page)
        return good

    def set(self, keys: U8, indices: Any, parent: bytes | None) -> Mask:
        """Store these pages; which of them are there now."""
        slots = self.slots(indices, len(keys))
        if self.loader is not None:
            codes = self.loader.offload(keys, slots, parent=parent).result().codes
        else:
            pages = [_bytes_of(self.host.get_data_page(slot * self.page, flat=True)) for slot in slots.tolist()]
            codes = self.namespace.put(keys, np.stack(pages), parent=parent).codes if pages else np.empty(0, np.uint8)
        good: Mask = codes <= WriteStatus.EXISTS
        return good

    def close(self) -> None:
        """End the loader's threads."""
        if self.loader is not None:
            self.loader.close()


class UMBPHiCache(HiCacheStorage):  # type: ignore[misc]
    """The backend. SGLang makes one for each rank, and tells it of its host pools afterwards."""

    @versions.fitting("sglang", KNOWN)
    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        if remark := versions.remark("sglang", KNOWN):
            log.warning("%s", remark)
        if getattr(storage_config, "dcp_size", 1) > 1 or getattr(storage_config, "should_split_heads", False):
            raise InvalidRequest("KV that is sharded by DCP, or stored by heads, is not supported", field="storage_config")
        self.settings = Settings.of(storage_config.extra_config)
        self.model = Model.of(self.settings, storage_config)
        self.config = storage_config
        self._by_pages = bool((storage_config.extra_config or {}).get("interface_v1", 0))
        self._client = connect(self.settings.pool, client=f"sglang hicache tp{storage_config.tp_rank}")
        self._pools: dict[str, HostPool] = {}
        self._flat: dict[int, Namespace] = {}

    def __repr__(self) -> str:
        return f"<UMBPHiCache of {', '.join(self._pools) or 'no pool yet'} on {self._client}>"

    def open(self, layout: Layout, page_tokens: int, name: str) -> Namespace:
        """The namespace of pages of this layout. MLA's are one for all ranks; states are each rank's own."""
        config, settings = self.config, self.settings
        replicated = bool(config.is_mla_model) and name != PoolName.MAMBA
        ranks: dict[str, Any] = {} if replicated else {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
        return self._client.namespace(
            model=self.model.name,
            revision=self.model.revision,
            page_tokens=page_tokens,
            layout=layout,
            replicated=replicated,
            tenant=settings.tenant,
            salt=settings.salt,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            cp_rank=config.attn_cp_rank,
            cp_size=config.attn_cp_size,
            **ranks,
        )

    # -- pools -------------------------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The main pool. One without memory of its own only stands for the others."""
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is not None:
            self._add(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool by name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV or getattr(host_pool, "kv_buffer", None) is not None:
            self._add(host_pool_name, host_pool)

    @versions.fitting("sglang", KNOWN)
    def _add(self, name: Any, host: Any) -> None:
        known = self._pools.get(str(name))
        if known is None or known.host is not host:
            if known is not None:
                known.close()
            self._pools[str(name)] = HostPool(str(name), host, self)
        if name == PoolName.KV and not self._by_pages:
            self._of_size(len(_bytes_of(host.get_data_page(0, flat=True))))

    # -- pages by host indices (v1, v2) ------------------------------------------------------------------------------------------------

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Bring pages of the main pool; one answer a key."""
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the main pool; one answer a key."""
        return self._set(PoolName.KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Bring pages of several pools."""
        return {each.name: self._get(each.name, list(each.keys or ()), each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        return {each.name: self._set(each.name, list(each.keys or ()), each.host_indices, extra_info) for each in transfers}

    def _get(self, name: Any, keys: list[str], indices: Any) -> list[bool]:
        try:
            return self._pools[str(name)].get(keys_of(keys), indices).tolist() if keys else []
        except Exception:
            log.exception("%d %s pages could not be read", len(keys), name)
            return [False] * len(keys)

    def _set(self, name: Any, keys: list[str], indices: Any, extra_info: Any) -> list[bool]:
        before = getattr(extra_info, "prefix_keys", None)
        try:
            parent = keys_of(before[-1:])[0].tobytes() if before else None
            return self._pools[str(name)].set(keys_of(keys), indices, parent).tolist() if keys else []
        except Exception:
            log.exception("%d %s pages could not be stored", len(keys), name)
            return [False] * len(keys)

    # -- what is there -----------------------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading keys are stored, in the form in which SGLang will ask for them."""
        return leading(self._there(keys_of(keys)))

    def exists(self, key: str) -> bool:
        """Whether a key is stored, as a page or as a flat tensor."""
        keys = keys_of([key])
        return bool(self._stored(PoolName.KV, keys)[0]) or any(bool(self._found(each, keys)[0]) for each in self._flat.values())

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Every length at which all pools can be restored; see `umbp.integrations.sglang.UMBPLinker.lookup`.

        A pool in block groups is not looked up, which is no verdict on it: its keys are of groups, and they gate no page. A policy that is
        not known finds nothing.
        """
        try:
            return self._lengths(keys_of(keys), pool_transfers or [])
        except Exception:
            log.exception("a lookup of %d pages failed: nothing is found", len(keys))
            return PoolTransferResult(0, {}, [])

    def _lengths(self, array: U8, transfers: list[PoolTransfer]) -> PoolTransferResult:
        pages = leading(self._there(array)) if len(array) and str(PoolName.KV) in self._pools else len(array)
        found: dict[str, int] = {PoolName.KV: pages} if pages else {}
        ends = np.ones(pages, bool)
        for transfer in transfers:
            if not ends.any():
                break
            if transfer.hit_policy == getattr(PoolHitPolicy, "BLOCK_GROUPS", None):
                continue
            hit = self._stored(transfer.name, array[:pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                whole = np.logical_and.accumulate(hit)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                whole = windows_that_are_whole(hit, max(1, len(transfer.keys or ())))
            else:
                log.warning("hit policy %s of %s is not known: nothing is found", transfer.hit_policy, transfer.name)
                whole = np.zeros(pages, bool)
            if whole.any():
                found[transfer.name] = int(np.flatnonzero(whole)[-1]) + 1
            ends &= whole
        lengths = (np.flatnonzero(ends) + 1).tolist()
        return PoolTransferResult(lengths[-1] if lengths else 0, found, lengths)

    def _there(self, keys: U8) -> Mask:
        """Which pages of the main pool are stored, in place or, where SGLang hands over flat tensors, as those."""
        if self._by_pages or not self._flat:
            return self._stored(PoolName.KV, keys)
        found: Mask = np.logical_or.reduce([self._found(each, keys) for each in self._flat.values()])
        return found

    def _stored(self, name: Any, keys: U8) -> Mask:
        pool = self._pools.get(str(name))
        return np.zeros(len(keys), bool) if pool is None else self._found(pool.namespace, keys)

    def _found(self, namespace: Namespace, keys: U8) -> Mask:
        starts = range(0, max(1, len(keys)), KEYS_PER_CALL_MAX)
        try:
            return np.concatenate([namespace.lookup(keys[start : start + KEYS_PER_CALL_MAX]) for start in starts])
        except UmbpError as error:
            log.warning("a lookup failed: %s", error)
            return np.zeros(len(keys), bool)

    # -- flat tensors (without interface_v1) -------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """A page into a flat tensor on the CPU, which says its size; None if it is not there."""
        if target_location is None:
            return None
        out = _bytes_of(target_location)
        try:
            status = self._of_size(len(out)).get(keys_of([key]), out.reshape(1, -1))
        except UmbpError as error:
            log.warning("a page could not be read: %s", error)
            return None
        return target_location if status[0] == ReadStatus.HIT else None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """`get` for each."""
        return [self.get(key, target) for key, target in zip(keys, target_locations or [None] * len(keys), strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a tensor as bytes."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store tensors of one size; whether all are there now."""
        if not keys:
            return True
        try:
            pages = np.stack([_bytes_of(value.contiguous()) for value in values])
            codes = self._of_size(pages.shape[1]).put(keys_of(keys), pages).codes
        except (UmbpError, ValueError) as error:
            log.warning("%d pages could not be stored: %s", len(keys), error)
            return False
        return bool((codes <= WriteStatus.EXISTS).all())

    def _of_size(self, size_bytes: int) -> Namespace:
        if size_bytes not in self._flat:
            host = getattr(self, "mem_pool_host", None)
            label = f"flat.{getattr(host, 'layout', 'flat')}"
            layout = Layout((Component(label, (0,), (size_bytes,), dtype=_kind(host)),))
            self._flat[size_bytes] = self.open(layout, int(getattr(host, "page_size", 1)), "flat")
        return self._flat[size_bytes]

    # -- the end -----------------------------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Everything of these namespaces goes; False if the pool could not be reached."""
        try:
            for namespace in (*(pool.namespace for pool in self._pools.values()), *self._flat.values()):
                namespace.flush()
        except UmbpError as error:
            log.warning("the cache could not be cleared: %s", error)
            return False
        return True

    def close(self) -> None:
        """Let go of the pool."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._client.close()


def keys_of(texts: list[str]) -> U8:
    """(n, 32): SGLang's hashes as they are; any other text by its sha256."""
    digests = [bytes.fromhex(text) if _is_hash(text) else hashlib.sha256(text.encode()).digest() for text in texts]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, KEY_BYTES)


def _is_hash(text: str) -> bool:
    return len(text) == 2 * KEY_BYTES and not set(text) - set("0123456789abcdef")


def _kind(host: Any) -> str:
    """A host pool's type of numbers, as layouts name it."""
    return str(getattr(host, "dtype", None) or "uint8").removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> U8:
    found: U8 = tensor.view(torch.uint8).reshape(-1).numpy()
    return found


__all__ = ["UMBPHiCache"]
