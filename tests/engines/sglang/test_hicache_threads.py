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
from datetime import timedelta
from pathlib import Path
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

import umbp
from tests.engines.sglang.engine import key_of, prompt
from tests.engines.sglang.kinds import MODELS
from tests.field.people import Child, eventually
from tests.pools import PoolProcess
from umbp.integrations.sglang_hicache import pieces

SECONDS_MAX = 60.0
PAGES = 8
OWN = {"backend_name": "umbp", "module_path": "umbp.integrations.sglang_hicache", "class_name": "UMBPHiCache", "interface_v1": 1}
ALONE = ("pp", "attn_cp", "attn_dcp")


@contextmanager
def tree(kind: str, socket: str, tenant: str, core: str = "python", *, rank: int = 0, group: Any = None) -> Iterator[Any]:
    """SGLang's radix tree with host pools and our backend, as its flags would make it. Nothing to register host memory with is here."""
    world = torch.distributed.get_world_size(group) if group is not None else 1
    place = {f"{name}_rank": 0 for name in ALONE} | {f"{name}_size": 1 for name in ALONE}
    place |= {"tp_rank": rank, "attn_tp_rank": rank, "tp_size": world, "attn_tp_size": world, "moe_tp_size": world}
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
        get_parallel().override(**place),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
        patch.setattr(common, "_cuda_host_register", lambda *_, **__: None)
        get_server_args()._mamba_cache_chunk_size = 4
        params = MODELS[kind](64).params(tree_core_backend=core, tp_cache_group=group)
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


def write(cache: Any, tokens: list[int], seed: int = 0, stored: bool = True) -> dict[str, list[np.ndarray]]:
    """Pages of random bytes, given to the controller's backup thread; what was written. ``stored``: whether this rank is to store it."""
    keys = get_storage_hash_str(key_of(tokens), None, page_size=cache.page_size)
    indices = cache.host_pool_group.alloc(len(tokens))
    for number, host in enumerate(hosts(cache).values()):
        for piece in pieces(host) or ():
            piece[:] = np.random.default_rng(seed + number).integers(0, 256, piece.shape, dtype=np.uint8)
    controller = cache.cache_controller
    controller.write_storage(indices, tokens, hash_value=keys, extra_pools=beside(cache))
    done = controller.ack_backup_queue.get(timeout=SECONDS_MAX)
    assert done.completed_tokens == (len(tokens) if stored else 0)
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


def has(cache: Any, tokens: list[int], wanted: dict[str, list[np.ndarray]]) -> bool:
    """Whether the tree's host pages of this prompt are these bytes. Of the tree in Python."""
    match = cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
    got = pages_of(cache, cache.tree_core.node_by_id(match.best_match_node).component_data[ComponentType.FULL].host_value)
    return all(np.array_equal(a, b) for name, want in wanted.items() for a, b in zip(got[name], want, strict=True))


def rank(child: Child, socket: str, kind: str, number: int, store: str) -> None:
    """One of two ranks: it writes, and when both have it fetches."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2, timeout=timedelta(seconds=120))
    with tree(kind, socket, f"ranks {kind}", rank=number, group=torch.distributed.group.WORLD) as cache:
        tokens, shared = prompt(1, PAGES, cache.page_size), kind == "mla"
        wanted = write(cache, tokens, seed=0 if shared else number * 10, stored=number == 0 or not shared)
        child.say("written")
        assert child.hear(60.0) == "go"
        assert prefetch(cache, tokens, "r1") == len(tokens)
        assert has(cache, tokens, wanted)
        child.say("good")


@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_ranks_fetch_one_copy_of_mla_and_each_its_own_of_mha(server: PoolProcess, kind: str, tmp_path: Path) -> None:
    with umbp.connect(server.socket) as pool:
        before = pool.status()["keys"]
        children = [Child(rank, server.socket, kind, number, str(tmp_path / "store")) for number in range(2)]
        try:
            assert [child.hear(60.0) for child in children] == ["written"] * 2
            assert pool.status()["keys"] == before + PAGES * (1 if kind == "mla" else 2)
            for child in children:
                child.say("go")
            assert [child.hear(60.0) for child in children] == ["good"] * 2
        finally:
            for child in children:
                child.__exit__(None, None, None)


@pytest.mark.parametrize("kind", ["mla", "mha", "dsa"])
def test_pages_go_through_the_backup_thread_and_come_back_through_the_prefetch_threads(server: PoolProcess, kind: str) -> None:
    with tree(kind, server.socket, f"threads {kind}") as cache:
        page = cache.page_size
        tokens = prompt(1, PAGES, page)
        wanted = write(cache, tokens)
        assert len(wanted) == (2 if kind == "dsa" else 1)
    for core in ("python", "rust"):
        with tree(kind, server.socket, f"threads {kind}", core=core) as cache:
            assert prefetch(cache, [*tokens, *prompt(2, 2, page)], "r1") == len(tokens), "it stops at what is stored"
            assert prefetch(cache, prompt(3, 4, page), "r2") == 0
            match = cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
            assert match.host_hit_length == len(tokens)
            if core == "python":
                assert has(cache, tokens, wanted)


def test_a_pool_that_dies_is_a_miss_for_the_threads() -> None:
    with PoolProcess() as pool, tree("mla", pool.socket, "dies") as cache:
        tokens = prompt(1, PAGES, cache.page_size)
        write(cache, tokens)
        pool.kill()
        assert prefetch(cache, tokens, "r1") == 0
        pool.restart()
        eventually(lambda: prefetch(cache, tokens, f"r{time.monotonic()}") == len(tokens), "it is connected again")
