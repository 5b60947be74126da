"""SGLang's own UMBP linker over our pool, as a check that shares no code with ours: the client that it wants, on `umbp.connect`."""

from __future__ import annotations

import ctypes
import enum
import hashlib
from typing import Any

import numpy as np
from sglang.srt.mem_cache.storage.umbp.umbp_direct_linker import UMBPDirectLinker
from sglang.srt.mem_cache.storage.umbp.umbp_store import UMBPStore

import umbp
from umbp.types import ReadStatus, WriteStatus


class Mode(enum.Enum):
    Local = 0
    StandaloneProcess = 1
    Distributed = 2


class Client:
    """Objects by text and in ranges, each size in a namespace of its own."""

    def __init__(self, socket: str, tenant: str) -> None:
        self.pool = umbp.connect(socket, client="in-tree")
        self.tenant = tenant
        self.spaces: dict[int, umbp.Namespace] = {}
        self.calls = {"exists": 0, "put": 0, "get": 0}

    def space(self, size: int) -> umbp.Namespace:
        if size not in self.spaces:
            layout = umbp.Layout.opaque(size)
            self.spaces[size] = self.pool.namespace(model="in-tree", page_tokens=64, layout=layout, tenant=self.tenant, replicated=True)
        return self.spaces[size]

    def get_deployment_mode(self) -> Mode:
        return Mode.Local

    def get_backend_mode(self) -> Mode:
        return Mode.Local

    def supports_ranged_io(self) -> bool:
        return True

    def register_memory(self, address: int, size: int) -> bool:
        return True

    def deregister_memory(self, address: int) -> bool:
        return True

    def batch_exists(self, keys: list[str]) -> list[bool]:
        self.calls["exists"] += 1
        found = np.zeros(len(keys), bool)
        for space in self.spaces.values():
            found |= space.lookup(digests(keys))
        return found.tolist()

    def batch_put_ranges_from_ptr(self, keys: Any, object_sizes: Any, pointers: Any, sizes: Any, offsets: Any) -> list[bool]:
        self.calls["put"] += 1
        done = []
        for key, total, addresses, lengths, starts in zip(keys, object_sizes, pointers, sizes, offsets, strict=True):
            assert sum(lengths) == total
            page = np.empty((1, total), np.uint8)
            for address, length, start in zip(addresses, lengths, starts, strict=True):
                ctypes.memmove(page.ctypes.data + start, address, length)
            done.append(self.space(total).put(digests([key]), page)[0] in (WriteStatus.STORED, WriteStatus.EXISTS))
        return done

    def batch_get_ranges_into_ptr(self, keys: Any, pointers: Any, sizes: Any, offsets: Any) -> list[bool]:
        self.calls["get"] += 1
        done = []
        for key, addresses, lengths, starts in zip(keys, pointers, sizes, offsets, strict=True):
            page = None
            for total, space in self.spaces.items():
                out = np.empty((1, total), np.uint8)
                if space.get(digests([key]), out)[0] == ReadStatus.HIT:
                    page = out
            done.append(page is not None)
            if page is not None:
                for address, length, start in zip(addresses, lengths, starts, strict=True):
                    ctypes.memmove(address, page.ctypes.data + start, length)
        return done


def digests(keys: list[str]) -> np.ndarray:
    return np.frombuffer(b"".join(hashlib.sha256(key.encode()).digest() for key in keys), np.uint8).reshape(-1, 32)


def make(client: Any) -> Any:
    """Stands where the factory of linkers does in `Engine`."""

    def linker(server_args: Any, params: Any, *, backend: str, config: Any, components: Any) -> Any:
        store = UMBPStore.__new__(UMBPStore)
        store.client, store._disable_zero_copy_register, store.is_mla_backend = client, False, True
        store.config_prefix, store.close = "", client_close(client)
        return UMBPDirectLinker(server_args, params, components=components, _storage=store)

    return linker


def client_close(client: Any) -> Any:
    return client.pool.close if hasattr(client, "pool") else lambda: None
