"""One SGLang worker without its model: the real pools, allocators and radix tree, with our linker, driven as the scheduler drives it.

What a forward pass would write into the pools is written here: bytes that name their prompt, page, buffer and layer, straight into SGLang's
buffers. So what comes back can be checked in any process, and no view of ours takes part in the check.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_server_args

from tests.engines.sglang.kinds import MODELS
from tests.engines.sglang.models import Model
from tests.field.people import eventually

WAIT_SECONDS_MAX = 60.0
CONFIG = {"linker": "UMBPLinker", "linker_module_path": "umbp.integrations.sglang"}


@dataclass
class Arguments:
    """The few of SGLang's arguments that the linker reads."""

    model_path: str = "tests/tiny"
    revision: str | None = "r1"
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    nnodes: int = 1


@dataclass
class Request:
    """What the tree reads and writes of a request."""

    rid: str
    kv: Any = None
    swa_branching_seqlen: int | None = None
    last_node: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None
    prefix_len: int = 0
    session_id: str | None = None
    session: Any = None


@dataclass
class Restored:
    """What came of a request: pages on the device before, pages found and loaded, its new slots, and the requests that failed."""

    on_device: int
    found: int
    loaded: int
    index: int
    slots: torch.Tensor
    request: Request
    failed: list[str] = field(default_factory=list)


@contextmanager
def configured(**more: Any) -> Iterator[None]:
    """SGLang's server-wide configuration, as the flags would make it."""
    with get_context().override_server_args(
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=CONFIG,
        **more,
    ):
        get_server_args()._mamba_cache_chunk_size = 4  # else it is asked of the model's configuration, which there is none of
        yield


def key_of(tokens: Sequence[int], extra_key: str | None = None) -> RadixKey:
    return RadixKey(array("q", tokens), extra_key)


def prompt(number: int, pages: int, page: int, start: int = 0) -> list[int]:
    """Tokens of a prompt of its own; two numbers share no page."""
    return [number * 100_000 + start + token for token in range(pages * page)]


class Engine:
    """A worker. ``shift``: slots taken away first, so that ranks have different ones."""

    def __init__(
        self,
        kind: str,
        socket: str,
        *,
        core: str = "python",
        group: Any = None,
        pages: int = 64,
        shift: int = 0,
        linker: Any = None,
        tree: dict[str, Any] | None = None,
        nodes: int = 1,
        **extra: Any,
    ) -> None:
        self.waiting: Any = None  # a request that was matched and is not admitted yet
        self.model: Model = MODELS[kind](pages)
        self.page = self.model.page
        self.params: CacheInitParams = self.model.params(tree_core_backend=core, tp_cache_group=group, **(tree or {}))
        self.allocator = self.params.token_to_kv_pool_allocator
        self.kvcache = self.allocator.get_kvcache()
        self.cache = UnifiedRadixCache(self.params)
        settings = {"pool": socket, "staging": "1MiB", **extra}
        make = linker or create_unified_cache_linker
        self.linker = make(
            Arguments(nnodes=nodes),
            self.params,
            backend="dynamic",
            config={**CONFIG, "linker_extra_config": settings},
            components=set(self.cache.components),
        )
        self.cache.init_cache_linker(self.linker)
        self.kvcache.register_layer_transfer_counter(self.cache.linker.layer_done_counter)
        if shift:
            self.model.alloc(shift * self.page)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.cache.release_host_resources()

    # -- what the scheduler does -------------------------------------------------------------------------------------------------------

    def compute(self, tokens: Sequence[int], seed: int, *, settle: bool = True) -> torch.Tensor:
        """A prompt is computed and enters the tree, which offloads it; its slots."""
        slots = self.model.alloc(len(tokens))
        self.model.write(self.kvcache, slots, seed, 0)
        self.insert(tokens, slots, seed)
        if settle:
            self.settle()
        return slots

    def insert(self, tokens: Sequence[int], slots: torch.Tensor, seed: int) -> None:
        more = self.model.insert_more(seed, len(tokens) // self.page)
        self.cache.insert(InsertParams(key=key_of(tokens), value=slots, **more))

    def settle(self) -> None:
        """Until all offloads have been answered, and the tree has taken the answers."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while self.cache.linker.pending_offloads:
            self.cache.check_hicache_events()
            assert time.monotonic() < deadline, "offloads were not answered"
            time.sleep(0.002)

    def drop(self, tokens: int = 1 << 20) -> None:
        """Everything leaves the device, and what was there is overwritten; so nothing may be on its way from there."""
        self.settle()
        self.cache.evict(EvictParams(num_tokens=tokens, **self.model.evict_more()))
        self.model.wipe(self.kvcache)

    def match_params(self, tokens: Sequence[int], request: Request | None = None) -> MatchPrefixParams:
        return MatchPrefixParams(key=key_of(tokens), req=request)

    def match(self, tokens: Sequence[int], rid: str) -> tuple[Any, Request]:
        request = Request(rid, kv=self.model.request_kv())
        found = self.cache.match_prefix(self.match_params(tokens, request))
        request.last_node = found.last_device_node
        return found, request

    def admit(self, found: Any, request: Request) -> int:
        """Pages whose load was queued."""
        loaded, _ = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request)
        )
        return int(loaded) // self.page

    def restore(self, tokens: Sequence[int], rid: str, *, forward: bool = True) -> Restored:
        """Match, load what is found, run the forward's waits, finish."""
        found, request = self.match(tokens, rid)
        loaded = self.admit(found, request) if found.host_hit_length else 0
        index = self.cache.ready_to_load_host_cache()
        slots = self.cache.linker.private_load_indices.get(rid, torch.empty(0, dtype=torch.int64)).clone()
        restored = Restored(found.device_prefix_len // self.page, found.host_hit_length // self.page, loaded, index, slots, request)
        self.cache.linker.layer_done_counter.set_consumer(index)
        if forward:
            self.forward()
        restored.failed = self.cache.linker.finish_loads()
        self.cache.linker.layer_done_counter.set_consumer(-1)
        return restored

    def forward(self) -> None:
        """What attention asks its pools for."""
        for layer in range(self.model.layers):
            self.model.read(self.kvcache, layer)

    # -- what came of it ---------------------------------------------------------------------------------------------------------------

    def offloaded_bytes(self) -> int:
        """Read from the device's pools so far."""
        return sum(shelf.loader.statistics().offloaded_bytes for shelf in self.linker.shelves)

    def leases_are_over(self) -> None:
        """The pool protects nothing for this engine any more."""
        eventually(lambda: self.linker._pool.status()["leases"] == 0, "no lease is left")

    # -- bytes -------------------------------------------------------------------------------------------------------------------------

    def has(self, slots: torch.Tensor, seed: int, first_page: int = 0) -> bool:
        """Whether these slots hold what `compute` wrote for this prompt, from this page on."""
        return self.model.holds(self.kvcache, slots, seed, first_page)

    def is_whole(self, restored: Restored, seed: int) -> bool:
        """Whether all that was restored is what `compute` wrote, with the window and the state at its end."""
        pages = restored.on_device + restored.loaded
        end = self.model.holds_end(self.kvcache, restored.slots, seed, pages, restored.request)
        return end and self.has(restored.slots, seed, restored.on_device)
