"""vLLM: the pool as the store of vLLM's own UMBPStoreConnector, alone or with all tensor-parallel ranks, layer by layer where asked.

    --kv-transfer-config '{"kv_connector": "UMBPStoreConnector", "kv_connector_module_path": "umbp.integrations.vllm", "kv_role": "kv_both",
                           "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"load_async": true}}'

Theory of operation
-------------------
vLLM ships the connector (prefix matching over hybrid cache groups, pins of blocks that are being stored, events) and no runtime for it.
This module hands it out with ours: a thin subclass that tells `umbp.integrations.vllm_runtime` what the connector itself has no word for
(which ranks hold the same bytes, the workers' layout in the scheduler, the access history).

*Why not a connector of our own.* What the connector lacks is loading by layers: it submits whole blocks and waits for all of them, in
`start_load_kv` (sync) or between steps (async). But its jobs are ours, and each layer's arrival is known to them. So two worker methods are
enough: a sync load is started and not waited for, and `wait_for_layer_load` waits for that layer alone. What matching, hybrid groups, pins
and failures mean stays vLLM's. Loads by a group of ranks need nothing: each worker gets the same plans, and ranks meet in the pool.

*Async* (vLLM's default): a request waits outside the batch until its blocks are there; layers do not matter. *Sync* (`"load_async": false`;
one cache group of plain attention): the forward pass starts with the first layer. The hooks are Python, so vLLM must not replay them away:
`requires_piecewise_for_cudagraph`. A pool that is silent holds up the batch for a tenth of a second, and then none for a second.

*Failures.* A block that vanished after the lookup, a pool that is down, a deadline: exactly those blocks are reported. vLLM recomputes them
if `kv_load_failure_policy` is "recompute"; its default, "fail", ends the request, so that is warned about. An async load that lost its
first block (of several groups: any) is looked up again by vLLM, and would be loaded again for ever while the lookup hits and the load
fails, as with a pool that is frozen. So it may load again only less than what failed, which is what is left when blocks vanished, and
`LOADS_MAX` times at most; else it is computed (`Loads`).

*Blocks that are not in DRAM* count where `"lookup_async": true` lets a lookup make a call outside of the scheduler's thread; a load then
brings them, within its deadline.

*Settings* of `kv_connector_extra_config`, beside vLLM's own: ``umbp_pool`` (socket; else UMBP_POOL, else the default), ``umbp_tenant``,
``umbp_deadline_seconds`` (10), ``umbp_group`` (true: ranks that hold the same bytes load together).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from umbp.errors import ConfigError
from umbp.integrations import versions
from umbp.integrations.weights import files_digest

KNOWN = ("0.33.0",)
NEEDED = ("_submit_loads", "_drain_load_jobs")  # of vLLM's worker half, for loads by layers
try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1 import umbp as upstream
    from vllm.distributed.kv_transfer.kv_connector.v1.umbp.data import UMBPHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.umbp.worker import UMBPStoreConnectorWorker

    from umbp.integrations.vllm_blocks import BlockGroup, Engine
    from umbp.integrations.vllm_runtime import Lookups, Runtime, Settings, Transfers
except ImportError as error:
    raise versions.does_not_fit("vllm", KNOWN, str(error)) from error
if unmet := [name for name in NEEDED if not hasattr(UMBPStoreConnectorWorker, name)]:
    raise versions.does_not_fit("vllm", KNOWN, f"its UMBPStoreConnectorWorker lacks {', '.join(unmet)}")

log = logging.getLogger("umbp.integrations.vllm")
OPTIONS = ("umbp_pool", "umbp_tenant", "umbp_deadline_seconds", "umbp_group")
MODE = "embedded"
LOADS_MAX = 3  # for a request that is not preempted; each may take the whole deadline
LEFT_OUT = ("dtype", "quantization", "hf_overrides", "code_revision")  # of the model's configuration; vLLM's own namespace has the rest

_settings: ContextVar[Settings | None] = ContextVar("umbp_vllm_settings", default=None)


def settings_of(vllm_config: Any, kv_cache_config: Any) -> Settings:
    """The engine's configuration as our settings. ConfigError names an option that is wrong."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    options: Mapping[str, Any] = transfer.kv_connector_extra_config
    for name in options:
        if name.startswith("umbp_") and name not in OPTIONS:
            raise ConfigError(f"unknown option, there is {', '.join(OPTIONS)}", field=name)
    deadline = options.get("umbp_deadline_seconds", 10.0)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= 3600:
        raise ConfigError(f"{deadline!r} is not a number of seconds above 0 and up to an hour", field="umbp_deadline_seconds", example="10")
    for name, kind, example in (("umbp_pool", str, "/run/umbp/default.sock"), ("umbp_tenant", str, "team-a"), ("umbp_group", bool, "true")):
        if options.get(name) is not None and not isinstance(options[name], kind):
            raise ConfigError(f"{options[name]!r} is no {kind.__name__}", field=name, example=example)
    events, model = vllm_config.kv_events_config, vllm_config.model_config
    left_out = {name: _text(getattr(model, name, None)) for name in LEFT_OUT}
    engine = Engine(
        model=str(model.model),
        tp_size=parallel.tensor_parallel_size,
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        copies=max(1, int(getattr(kv_cache_config, "kv_tp_replicas", 1))),
        tenant=options.get("umbp_tenant"),
        meaning=json.dumps({**left_out, "files": files_digest(str(model.model))}, sort_keys=True),
    )
    return Settings(
        engine=engine,
        engine_id=str(transfer.engine_id),
        address=options.get("umbp_pool"),
        deadline_seconds=float(deadline),
        by_group=options.get("umbp_group", True),
        events=bool(events and events.enable_kv_cache_events),
        elsewhere=bool(options.get("lookup_async", False)),
    )


def _text(value: Any) -> str:
    """The same in each process: a function by its name, not by its address."""
    return str(getattr(value, "__qualname__", type(value))) if callable(value) else str(value)


@contextmanager
def _building(settings: Settings) -> Iterator[None]:
    """vLLM's factory makes the runtime from text options; the rest reaches it this way, within one call of the constructor."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


def _runtime(config: Any) -> Runtime:
    settings = _settings.get()
    if settings is None:
        raise ConfigError(
            "this runtime is for the connector of the same module",
            field="kv_connector_module_path",
            example="umbp.integrations.vllm",
        )
    return Runtime(settings)


def register(factory: Any = upstream.UMBPRuntimeFactory) -> None:
    """Make ours the runtime of vLLM's connector: once a process, in which scheduler and worker may both be. ConfigError if another is."""
    try:
        factory.register(MODE, _runtime)
    except ValueError:
        there = getattr(factory, "_builders", {}).get(MODE)
        if (getattr(there, "__module__", None), getattr(there, "__qualname__", None)) != (_runtime.__module__, _runtime.__qualname__):
            raise ConfigError(
                f"vLLM has another UMBP runtime already ({there!r}): load one of the two", field="kv_connector_module_path"
            ) from None


@dataclass(frozen=True)
class Handshake(UMBPHandshakeMetadata):  # type: ignore[misc] # vLLM has no types here
    """What a worker tells the scheduler: vLLM's namespace, who the engine is, and its cache groups."""

    engine: Engine
    groups: tuple[BlockGroup, ...]


@dataclass(slots=True)
class Loads:
    """Of one request since it was preempted last: a request that asks again without that has lost its load.

    ``offered``: tokens that it has with what the last lookup found. ``below``: it loads where it will have fewer, 0: no more.
    """

    preemptions: int
    offered: int = 0
    below: float = math.inf
    count: int = 0

    def offer(self, tokens: int) -> bool:
        """Whether a load may be started that gives the request so many tokens. If not, none may from now on."""
        self.offered = tokens
        if tokens >= self.below:
            self.below = 0
        return tokens < self.below

    def started(self) -> None:
        """What was offered last is being loaded."""
        self.count += 1
        self.below = self.offered if self.count < LOADS_MAX else 0


class UMBPStoreConnector(upstream.UMBPStoreConnector):  # type: ignore[misc]
    """vLLM's connector with the pool behind it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        settings = settings_of(vllm_config, kv_cache_config)
        with _building(settings):
            super().__init__(vllm_config, role, kv_cache_config)
        self._asked: set[str] = set()
        self._loads: dict[str, Loads] = {}
        if role == KVConnectorRole.SCHEDULER and settings.engine.replicated and self._topology.dcp_size == 1:
            # vLLM would make a key for each rank and block, and look all of them up: with eight ranks that is most of a lookup.
            self.connector_scheduler.topology = replace(self._topology, tp_rank=0, tp_size=1)
        if role == KVConnectorRole.SCHEDULER and getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "") != "recompute":
            log.warning('a block lost on its way ends its request with an error: set "kv_load_failure_policy": "recompute"')

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Loads by layers wait in the layers' hooks, which a whole graph would skip."""
        return not extra_config.get("load_async", True)

    # -- the scheduler's half ----------------------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> Any:
        """A worker's layout; the scheduler's has lost what differs by layer."""
        told = super().get_handshake_metadata()
        if told is None or self.connector_worker is None:
            return told
        transfers: Transfers = self.connector_worker.runtime
        return Handshake(told.namespace, transfers.engine, tuple(transfers.groups.values()))

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """ConfigError if the workers' layouts differ."""
        super().set_xfer_handshake_metadata(metadata)
        told = {(each.engine, each.groups) for each in metadata.values() if isinstance(each, Handshake)}
        if len(told) > 1:
            raise ConfigError("workers with different models or layouts of their KV blocks", field="kv_cache_config")
        if self.connector_scheduler is not None and told:
            lookups: Lookups = self.connector_scheduler.runtime
            lookups.learn(*told.pop())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's; nothing for a request whose load has failed and would be the same again."""
        loads = self._loads.get(request.request_id)
        if loads is None or loads.preemptions != request.num_preemptions:
            loads = self._loads[request.request_id] = Loads(request.num_preemptions)
        if not loads.below:
            return 0, False
        found, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found and not loads.offer(num_computed_tokens + found):
            return 0, False
        return found, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is admitted: now its blocks are asked for, and not each time that it was looked at."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0 and (loads := self._loads.get(request.request_id)):
            loads.started()
        scheduler = self.connector_scheduler
        if request.request_id in self._asked or scheduler.runtime is None:
            return
        self._asked.add(request.request_id)
        steps = {group: size // scheduler.hash_block_size for group, size in scheduler.group_block_sizes.items()}
        scheduler.runtime.asked({group: request.block_hashes[step - 1 :: step] for group, step in steps.items()})

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        """Forget the request."""
        self._forget(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        """Forget the request."""
        self._forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def _forget(self, request_id: str) -> None:
        self._asked.discard(request_id)
        self._loads.pop(request_id, None)

    # -- the worker's half: sync loads, layer by layer ---------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads. The forward pass may begin: each layer waits for its own blocks."""
        metadata = self._get_connector_metadata()
        if metadata.async_load:
            super().start_load_kv(forward_context, **kwargs)
            return
        self.connector_worker.runtime.waited_for = True
        for request_id, plans in metadata.load_requests.items():
            if plans:
                self.connector_worker._submit_loads(request_id, plans)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Until the blocks of this layer are there; of an async load none is read in this step."""
        if not self._get_connector_metadata().async_load:
            self.connector_worker.runtime.wait_layer(layer_name)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The forward pass is over: what did not come is among the blocks with errors now."""
        if not self._get_connector_metadata().async_load:
            self.connector_worker._drain_load_jobs(wait=True)
        return super().get_transfer_results(finished_req_ids)


if remark := versions.remark("vllm", KNOWN):
    log.warning(remark)
register()
