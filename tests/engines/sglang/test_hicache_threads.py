"""The HiCache backend in SGLang's own hands: its tree and the controller's threads that query, fetch and back up, over a pool process.

What SGLang has no code for on a CPU is left out: copies between device and host. So pages are written into the host pools here, handed to
the controller's backup thread, and fetched by another process's tree into host pools of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args

from tests.engines.sglang.engine import key_of, prompt
from tests.engines.sglang.kinds import MODELS
from tests.field.people import eventually
from tests.pools import PoolProcess
from umbp.integrations.sglang_hicache import pieces

SECONDS_MAX = 20.0
PAGES = 8
OWN = {"backend_name": "umbp", "module_path": "umbp.integrations.sglang_hicache", "class_name": "UMBPHiCache", "interface_v1": 1}
ALONE = {"tp": 1, "attn_tp": 1, "pp": 1, "attn_cp": 1, "attn_dcp": 1}


@contextmanager
def tree(kind: str, socket: str, tenant: str, core: str = "python") -> Iterator[Any]:
    """SGLang's radix tree with host pools and our backend, as its flags would make it. Nothing to register host memory with is here."""
    own = json.dumps({**OWN, "pool": socket, "tenant": tenant, "prefetch_threshold": 4})
    with (
        get_context().override_server_args(
            enable_hierarchical_cache=True,
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=own,
            hicache_storage_prefetch_policy="wait_complete",
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_ratio=2.0,
            hicache_size=0,
            model_path="tests/tiny",
        ),
        get_parallel().override(**{f"{name}_rank": 0 for name in ALONE}, **{f"{name}_size": size for name, size in ALONE.items()}),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
        patch.setattr(common, "_cuda_host_register", lambda *_, **__: None)
        get_server_args()._mamba_cache_chunk_size = 4
        params = MODELS[kind](64).params(tree_core_backend=core)
        cache = UnifiedRadixCache(params)
        cache.init_hicache(argparse.Namespace(file_storage_path=None), params)
        try:
            yield cache
        finally:
            cache.shutdown()


def beside(cache: Any) -> list[PoolTransfer]:
    """The pools that follow the slots of KV, as the tree asks for them."""
    return [PoolTransfer(name=each.pool_name, indices_from_pool=each.indices_from_pool) for each in cache.sidecar_pool_specs]


def hosts(cache: Any) -> dict[str, Any]:
    """The host pools that have memory of their own."""
    return {str(name): entry.host_pool for name, entry in cache.host_pool_group.entry_map.items() if pieces(entry.host_pool) is not None}


def pages_of(cache: Any, indices: torch.Tensor) -> dict[str, list[np.ndarray]]:
    """The bytes of these host pages, pool by pool and piece by piece."""
    pages = indices[:: cache.page_size].numpy() // cache.page_size
    return {name: [piece[pages].copy() for piece in pieces(host) or ()] for name, host in hosts(cache).items()}


def write(cache: Any, tokens: list[int], keys: list[str]) -> dict[str, list[np.ndarray]]:
    """Pages of random bytes, given to the controller's backup thread; what was written."""
    indices = cache.host_pool_group.alloc(len(tokens))
    for number, host in enumerate(hosts(cache).values()):
        for piece in pieces(host) or ():
            piece[:] = np.random.default_rng(number).integers(0, 256, piece.shape, dtype=np.uint8)
    controller = cache.cache_controller
    controller.write_storage(indices, tokens, hash_value=keys, extra_pools=beside(cache))
    done = controller.ack_backup_queue.get(timeout=SECONDS_MAX)
    assert done.completed_tokens == len(tokens)
    return pages_of(cache, indices)


def prefetch(cache: Any, tokens: list[int], rid: str) -> int:
    """What a waiting request has fetched, in tokens."""
    request = CacheRequestHandle(rid, 0)
    match = cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
    cache.prefetch_from_storage(request, match.last_host_node, array("q", tokens))
    deadline = time.monotonic() + SECONDS_MAX
    while not cache.check_prefetch_progress(request):
        cache.check_hicache_events()
        assert time.monotonic() < deadline, "the prefetch did not end"
        time.sleep(0.005)
    tokens_loaded: int = cache.pop_prefetch_loaded_span(request)[0]
    return tokens_loaded


@pytest.mark.parametrize("kind", ["mla", "mha", "dsa"])
def test_pages_go_through_the_backup_thread_and_come_back_through_the_prefetch_threads(server: PoolProcess, kind: str) -> None:
    with tree(kind, server.socket, f"threads {kind}") as cache:
        page = cache.page_size
        tokens = prompt(1, PAGES, page)
        keys = get_storage_hash_str(key_of(tokens), None, page_size=page)
        wanted = write(cache, tokens, keys)
        assert len(wanted) == (2 if kind == "dsa" else 1)
    for core in ("python", "rust"):
        with tree(kind, server.socket, f"threads {kind}", core=core) as cache:
            assert prefetch(cache, [*tokens, *prompt(2, 2, page)], "r1") == len(tokens), "it stops at what is stored"
            assert prefetch(cache, prompt(3, 4, page), "r2") == 0
            match = cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
            assert match.host_hit_length == len(tokens)
            if core == "python":
                node = cache.tree_core.node_by_id(match.best_match_node)
                got = pages_of(cache, node.component_data[ComponentType.FULL].host_value)
                for name, want in wanted.items():
                    assert all(np.array_equal(a, b) for a, b in zip(got[name], want, strict=True)), name


def test_a_pool_that_dies_is_a_miss_for_the_threads() -> None:
    with PoolProcess() as pool, tree("mla", pool.socket, "dies") as cache:
        tokens = prompt(1, PAGES, cache.page_size)
        write(cache, tokens, get_storage_hash_str(key_of(tokens), None, page_size=cache.page_size))
        pool.kill()
        assert prefetch(cache, tokens, "r1") == 0
        pool.restart()
        eventually(lambda: prefetch(cache, tokens, f"r{time.monotonic()}") == len(tokens), "it is connected again")
