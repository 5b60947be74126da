"""The pool behind vLLM's UMBPStoreConnector: what the connector asks of a runtime, in the scheduler and in each worker.

`Lookups` (scheduler) answers which blocks are stored, from the shared index and without a call; with vLLM's ``lookup_async``, in threads
of vLLM's, also which ones the pool can bring into its DRAM (SSD, other nodes), with one call where some are not there. It knows each
worker's layout from the workers' handshake: the scheduler's own configuration has flattened it. A lookup leaves no trace in the access
history, as the connector also asks for its own bookkeeping; the connector of `umbp.integrations.vllm` tells `asked` once per admitted
request.

`Transfers` (worker) moves blocks. A job of the connector is one load or offload of a `Loader` for each cache group in it, and is planned
from columns (keys, block ids): the byte ranges per block and layer that vLLM could make for it are never made. Stores are visible when
their pages are whole, without waiting for `publish`: a hit needs every rank's object anyway, and each one stands for itself.

*The forward pass waits for sync loads*, and with it every request of the batch. So a load that the pool has not begun to serve in
`BEGIN_SECONDS` (the lease of its pages: a pool that is well needs less than a hundredth of it) is given up, and for `SILENT_SECONDS` none
is started: a pool that is frozen costs a tenth of a second, and not each batch.

What a job answers is per block. A block that cannot be loaded is among the job's failed keys and nothing else is; vLLM recomputes it,
given `"kv_load_failure_policy": "recompute"`. Nothing here raises into the worker: an error fails the job's blocks, with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.umbp import TransferJobState, TransferJobStatus

from umbp.client import Namespace, connect
from umbp.errors import UmbpError, Unavailable
from umbp.integrations.vllm_blocks import BlockGroup, Engine, Place, Watch, block_rows, groups_of, hashes_of, page_keys_of, place_of, split
from umbp.layout import KEYS_PER_CALL_MAX
from umbp.loader import Group, Load, Loader, Offload
from umbp.types import NOWHERE, U8, Mask, WriteStatus

log = logging.getLogger("umbp.integrations.vllm")
BEGIN_SECONDS = 0.1
SILENT_SECONDS = 1.0
STORE_SECONDS = 0.05  # a store whose blocks are wanted back is waited for so long: a pool that is well needs less
TAILS_MAX = 4096  # requests whose last page is remembered, so that the next one is stored as its child
KEPT = (WriteStatus.STORED, WriteStatus.EXISTS)
OVER = (TransferJobStatus.COMPLETED, TransferJobStatus.FAILED, TransferJobStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the connector says of its engine and of the user's wishes. ``address`` is the pool's socket, None for the default."""

    engine: Engine
    engine_id: str
    address: str | None
    deadline_seconds: float
    by_group: bool
    events: bool
    elsewhere: bool = False  # lookups may make a call for what is not in DRAM


class Runtime:
    """Makes the handles (`IUMBPRuntime`)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def create_scheduler_handle(self, namespace: str, topology: Any, layout: Any) -> Lookups:
        """``layout`` is empty here: `Lookups.learn` gets it from the workers."""
        return Lookups(self._settings, namespace, topology)

    def create_worker_handle(self, namespace: str, topology: Any, layout: Any) -> Transfers:
        """For one rank."""
        return Transfers(self._settings, namespace, topology, groups_of(layout.regions))


# -- the scheduler -----------------------------------------------------------------------------------------------------------------


class Lookups:
    """The scheduler's view of the pool (`UMBPSchedulerHandle`). Used by several threads of vLLM's."""

    def __init__(self, settings: Settings, namespace: str, topology: Any) -> None:
        self._copies = 1
        self._elsewhere = settings.elsewhere
        self._namespace = namespace
        self._ranks = [(tp, pcp) for tp, pcp, _, _ in topology.all_namespaces()]
        self._pool = connect(settings.address, client=f"vllm scheduler {settings.engine_id}"[:64])
        self._open: dict[Place, Namespace] = {}
        self._places: dict[str, Place | None] = {}
        self._warned = False

    def __repr__(self) -> str:
        return f"<Lookups in {len(self._open)} namespaces>"

    def learn(self, engine: Engine, groups: Sequence[BlockGroup]) -> None:
        """The workers' identity and layout: open the namespaces of all ranks. Unavailable if the pool is not there."""
        self._copies = engine.copies
        for group in groups:
            for tp, pcp in self._ranks:
                fields = engine.fields(group, self._namespace, tp, pcp)
                self._open[Place(group.number, tp // engine.copies, pcp)] = self._pool.namespace(**fields)

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        """Which blocks are stored; no call. Keys of ranks that share a copy are looked up once."""
        if not self._open and not self._warned:
            self._warned = True
            log.warning("vLLM has not handed over its workers' layout: every block is a miss")
        found: Mask = np.zeros(len(keys), bool)
        known: dict[tuple[Place, bytes], Mask] = {}
        for prefix, indices, hashes in split(keys):
            place = self._place(prefix)
            namespace = self._open.get(place) if place is not None else None
            if place is None or namespace is None:
                continue
            same = (place, hashes.tobytes())
            if same not in known:
                known[same] = self._stored(namespace, hashes)
            found[indices] = known[same]
        answer: list[bool] = found.tolist()
        return answer

    def asked(self, hashes: Mapping[int, Sequence[bytes]]) -> None:
        """For the access history: a request was admitted that needs these blocks of each group, wherever it finds them."""
        for place, namespace in self._open.items():
            if wanted := hashes.get(place.group):
                namespace.operations.note(page_keys_of(wanted[:KEYS_PER_CALL_MAX]))
        self._pool.noted()

    def clear(self) -> bool:
        """The weights changed: nothing that was stored counts any more, for any engine of this namespace."""
        try:
            for namespace in self._open.values():
                namespace.flush()
        except Unavailable as error:
            log.warning("the pool was not cleared: %s", error)
            return False
        return True

    def close(self) -> None:
        """Let go of the pool."""
        self._pool.close()

    def _stored(self, namespace: Namespace, keys: U8) -> Mask:
        look = namespace.operations.look(keys)
        hit: Mask = look.found.hit if look is not None else np.zeros(len(keys), bool)
        if self._elsewhere and namespace.operations.may_fetch and not hit.all():
            with contextlib.suppress(UmbpError):  # the pool went: what is in DRAM is known all the same
                hit = namespace.locate(keys) != NOWHERE
        return hit

    def _place(self, prefix: str) -> Place | None:
        if prefix not in self._places:
            if len(self._places) > 4 * len(self._open) + 64:  # foreign names do not add up
                self._places.clear()
            self._places[prefix] = place_of(prefix, self._copies)
        return self._places[prefix]


# -- a worker ----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """What of a job one loader does: vLLM's keys of it, and the load or the offload; None where it could not even start."""

    keys: list[str]
    group: int
    handle: Load | Offload | None
    error: str = ""


@dataclass
class Job(TransferJobState):  # type: ignore[misc] # vLLM has no types here
    """vLLM's state of a job, and its parts."""

    parts: list[Part] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether `settle` would not wait."""
        return all(part.handle is None or (part.handle.over if isinstance(part.handle, Load) else part.handle.done) for part in self.parts)

    def settle(self) -> None:
        """Wait for all parts and say of each key what became of it; nothing is read or written for this job after that."""
        if self.status in OVER:
            return
        good: list[str] = []
        bad: list[str] = []
        reasons = []
        for part in self.parts:
            kept, reason = _outcome(part)
            good += [key for key, has in zip(part.keys, kept.tolist(), strict=True) if has]
            bad += [key for key, has in zip(part.keys, kept.tolist(), strict=True) if not has]
            reasons += [reason] if reason else []
        if good or not bad:
            self.complete(good)
        if bad:
            self.fail(bad, "; ".join(reasons))


def _outcome(part: Part) -> tuple[Mask, str]:
    kept: Mask = np.zeros(len(part.keys), bool)
    if part.handle is None:
        return kept, part.error
    if isinstance(part.handle, Load):
        done = part.handle.finish()
        kept[:] = True
        kept[done.missing] = False
        return kept, done.reason
    try:
        status = part.handle.result()
    except Exception as error:  # noqa: BLE001 - the offload's thread has logged it; vLLM is told
        return kept, str(error)
    kept = np.isin(status.codes, KEPT)
    return kept, "" if kept.all() else f"not kept: {status}"


class Transfers:
    """One worker's side (`UMBPWorkerHandle`). Used by one thread of vLLM's."""

    def __init__(self, settings: Settings, namespace: str, topology: Any, groups: tuple[BlockGroup, ...]) -> None:
        self._settings = settings
        self.engine = settings.engine
        self.groups = {group.number: group for group in groups}
        self._rank = int(topology.tp_rank)
        self._pool = connect(settings.address, client=f"vllm worker {topology.tp_rank} {settings.engine_id}"[:64])
        engine = settings.engine
        self._namespaces = {
            group.number: self._pool.namespace(**engine.fields(group, namespace, topology.tp_rank, topology.pcp_rank)) for group in groups
        }
        self._loaders: dict[int, Loader] = {}
        self._layers = {name: (group.number, layer) for group in groups for layer, name in enumerate(group.layers)}
        self._running: list[tuple[int, Load]] = []  # group and load
        self._tails: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._watch = Watch(self._hits)
        self._prefixes: dict[int, str] = {}
        self._silent_until = 0.0
        self.waited_for = False  # whether the forward pass waits for the loads of this step
        self._device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"<Transfers of rank {self._rank}, {len(self._loaders)} groups>"

    def register_buffers(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The engine's KV tensors, by layer. InvalidRequest names one that does not fit its layout."""
        engine = self._settings.engine
        for number, group in self.groups.items():
            planes = [block_rows(kv_caches[name], size, name) for name, size in zip(group.layers, group.sizes, strict=True)]
            ranks = None
            if engine.replicated and self._settings.by_group:
                ranks = Group(f"vllm {self._settings.engine_id} {number}", self._rank, engine.tp_size)
            self._loaders[number] = Loader(self._namespaces[number], {"kv": planes}, ranks)
            self._device = planes[0].device

    def load(self, plans: Sequence[Any]) -> Job:
        """Start to load blocks; as `load_blocks`, since the ranges that vLLM has made are not needed."""
        return self.load_blocks(plans)

    def load_blocks(self, plans: Sequence[Any]) -> Job:
        """Start to load blocks (keys, block ids, groups)."""
        job = self._job(plans)
        for group, which in _by_group(job.plans):
            self._add(job, group, which, store=False)
        self._running = [(group, load) for group, load in self._running if not load.over]
        self._running += [(part.group, part.handle) for part in job.parts if isinstance(part.handle, Load)]
        return job

    def store(self, plans: Sequence[Any]) -> Job:
        """Start to store blocks; as `store_blocks`."""
        return self.store_blocks(plans)

    def store_blocks(self, plans: Sequence[Any]) -> Job:
        """Start to store blocks, after all that was given to the device so far."""
        job = self._job(plans)
        for group, which in _by_group(job.plans):
            self._add(job, group, which, store=True)
        return job

    def wait(self, job: Job) -> Job:
        """The job in its final state: nothing touches its blocks any more."""
        job.settle()
        if any(isinstance(part.handle, Load) and part.handle.silent for part in job.parts):
            self._silent_until = time.monotonic() + SILENT_SECONDS
        return job

    def poll(self, job: Job) -> Job | None:
        """As `wait`, or None if it would have to wait."""
        return self.wait(job) if job.done else None

    def wait_layer(self, name: str) -> None:
        """Until this layer of all loads that are running has come, or will not come (which the jobs then say)."""
        place, layer = self._layers.get(name, (-1, 0))
        for group, load in self._running:
            if group == place:
                load.wait(layer)

    def publish(self, job: Job) -> None:
        """A store is complete: from now on its blocks' eviction is told."""
        if not self._settings.events or self._rank % self._settings.engine.copies:
            return
        for part in job.parts:
            kept = [key for key in part.keys if key in job.completed_keys]
            if kept:
                self._prefixes[part.group] = kept[0][: kept[0].rfind(":") + 1]
                self._watch.add(part.group, [bytes.fromhex(key[key.rfind(":") + 1 :]) for key in kept])

    def cancel(self, job: Job) -> Job:
        """Stop: a load after the layer that is being moved, a store after a moment and the batch that is being moved."""
        until = time.monotonic() + STORE_SECONDS
        for part in job.parts:
            if isinstance(part.handle, Offload):
                part.handle.wait(max(0.0, until - time.monotonic()))
            if part.handle is not None:
                part.handle.cancel()
        job.settle()
        return job

    def take_evicted_keys(self) -> list[str]:
        """Blocks that this worker stored and that are gone."""
        return [self._prefixes[group] + each.hex() for group, each in self._watch.gone(time.monotonic())]

    def _hits(self, group: int, keys: U8) -> Mask | None:
        look = self._namespaces[group].operations.look(keys)
        return look.found.hit if look is not None else None

    def close(self) -> None:
        """Wait for what is on its way, and let go of the pool."""
        for loader in self._loaders.values():
            loader.close()
        self._pool.close()

    def _job(self, plans: Any) -> Job:
        job = Job(plans if hasattr(plans, "block_ids") else tuple(plans))
        job.start()
        sizes = {number: group.block_bytes for number, group in self.groups.items()}
        job.plan_bytes = tuple(sizes.get(number, 0) for number in _numbers(job.plans))
        return job

    def _add(self, job: Job, group: int, which: list[int], *, store: bool) -> None:
        plans = job.plans
        columns = hasattr(plans, "block_ids")
        request = (plans.request_id if columns else plans[which[0]].request_id) or ""
        keys = [plans.keys[index] if columns else plans[index].key for index in which]
        try:
            blocks = np.array([plans.block_ids[index] if columns else plans[index].block_id for index in which], np.int64)
            loader, array = self._loaders[group], hashes_of(keys)
            handle: Load | Offload | None = None
            if store:
                handle = loader.offload(array, blocks, after=self._written(), parent=self._parent(plans, which[0], request, group))
            elif not self.waited_for or time.monotonic() >= self._silent_until:
                # The blocks may just have been given back by a request whose last kernels are still reading them. The scheduler has told
                # the access history of the request when it admitted it.
                deadline, begin = self._settings.deadline_seconds, BEGIN_SECONDS if self.waited_for else None
                handle = loader.load(array, blocks, deadline=deadline, after=self._written(), begin_within=begin, noted=True)
            self._remember(request, group, array)
            job.parts.append(Part(keys, group, handle, "" if handle else "the pool was silent just now"))
        except (UmbpError, ValueError, KeyError) as error:
            log.exception("a job could not be started")
            job.parts.append(Part(keys, group, None, str(error)))

    def _written(self) -> Any:
        """Something to wait for before blocks are touched: the device may be using them still. None on a CPU."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _parent(self, plans: Any, first: int, request: str, group: int) -> bytes | None:
        """The page before the first one, so that policies know the chain: as vLLM says it, or the last one of the same request."""
        parents = getattr(plans, "parent_block_hashes", None)
        parent = parents[first] if parents else getattr(plans[first], "parent_block_hash", None)
        return page_keys_of([parent]).tobytes() if parent is not None else self._tails.get((request, group))

    def _remember(self, request: str, group: int, keys: U8) -> None:
        if request and len(keys):
            self._tails[request, group] = keys[-1].tobytes()
            self._tails.move_to_end((request, group))
            if len(self._tails) > TAILS_MAX:
                self._tails.popitem(last=False)


def _numbers(plans: Any) -> list[int]:
    """The cache group of each plan."""
    return list(plans.group_ids) if hasattr(plans, "block_ids") else [plan.group_id or 0 for plan in plans]


def _by_group(plans: Any) -> Iterator[tuple[int, list[int]]]:
    """(group, indices of its plans), in pieces that one call takes."""
    numbers = _numbers(plans)
    for group in dict.fromkeys(numbers):
        which = [index for index, number in enumerate(numbers) if number == group]
        for start in range(0, len(which), KEYS_PER_CALL_MAX):
            yield group, which[start : start + KEYS_PER_CALL_MAX]


__all__ = ["Job", "Lookups", "Runtime", "Settings", "Transfers"]
