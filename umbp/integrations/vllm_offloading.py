"""vLLM: the pool behind its OffloadingConnector, for engines that the UMBPStoreConnector does not serve (pipeline parallelism).

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
                           {"spec_name": "UMBPOffloadingSpec", "spec_module_path": "umbp.integrations.vllm_offloading"}}'

Theory of operation
-------------------
vLLM's offloading connector asks a *manager* in the scheduler which blocks are stored, one at a time, and has a *worker* in each rank move
them. Three things of its contract shape this file:

*A load must not fail.* Its worker asserts success; there is no way to say "recompute this block". So a block counts as a hit only when it
is leased: the first question about a request probes all its blocks in one pass and leases what is there, one call a rank; further questions
of the step are answered from that. A lease ends with the load, with the request, or is renewed with the next step's question. What fails
all the same (the pool was killed in between) is tried again for `RETRY_SECONDS`, while a pool starts again with what it held; then the
engine is stopped, since the only other way out would be to compute on wrong bytes.

*The scheduler waits for the pool a bounded time.* Calls are made by a thread, in their order; a lease that is not there in `LEASE_SECONDS`
is a miss, and is given back when it comes. No other is asked for until then, nor within `SILENT_SECONDS`: a hundred requests must not each
wait for a pool that is frozen.

*A store may fail* without harm: nothing but the pool is ever asked whether a block is stored. It is told as done, and no event is published
for what was not kept.

*The scheduler is not told the workers' layout*, and the connector has no handshake. Each worker leaves a note of it in the pool, pinned
while it lives, under the engine's id; until all notes are there everything is a miss. A note says for which configuration it was written.

`OffloadingConfig` does not name the model's revision nor its quantization: give ``umbp_revision`` where one name is served in several. A
local model's files count by themselves. Options beside vLLM's:
``umbp_pool``, ``umbp_tenant``, ``umbp_revision``. An object is one block: ``blocks_per_chunk`` other than 1 is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from umbp.client import Lease, Namespace, Pool, connect
from umbp.errors import ConfigError, LimitReached, OutOfMemory, UmbpError, Unavailable
from umbp.integrations import versions
from umbp.integrations.weights import files_digest
from umbp.layout import KEYS_PER_CALL_MAX, Layout
from umbp.types import U8, Mask, ReadStatus

KNOWN = ("0.33.0",)
try:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        PrepareStoreOutput,
        RequestOffloadingContext,
        get_offload_block_hash,
        get_offload_group_idx,
        make_offload_key,
    )

    from umbp.integrations.vllm_blocks import BlockGroup, Engine, Watch, page_keys_of
    from umbp.integrations.vllm_mover import Blocks, Mover
except ImportError as error:
    raise versions.does_not_fit("vllm", KNOWN, str(error)) from error

log = logging.getLogger("umbp.integrations.vllm")
T = TypeVar("T")
OPTIONS = ("umbp_pool", "umbp_tenant", "umbp_revision")
NOTE_BYTES = 65_536
LEARN_SECONDS = 0.5  # between two looks for the workers' notes
FRESH_SECONDS = 0.05  # a request that waits is probed again after this
LEASE_SECONDS = 0.1  # what the scheduler waits for leases: a pool that is well needs less than a hundredth of it
SILENT_SECONDS = 1.0  # after that was not enough
LEARN_SECONDS_MAX = 1.0  # what it waits for the notes and the namespaces of all ranks, until it has them once


# -- which engine this is ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """What both sides know of the engine: its identity, and what its blocks depend on as text."""

    engine: Engine
    engine_id: str
    namespace: str
    world: int
    address: str | None

    @classmethod
    def of(cls, config: Any) -> Facts:
        """ConfigError names an option that is wrong, or what cannot be served."""
        options: Mapping[str, Any] = config.extra_config
        for name in options:
            if name.startswith("umbp_") and name not in OPTIONS:
                raise ConfigError(f"unknown option, there is {', '.join(OPTIONS)}", field=name)
        for name in OPTIONS:
            if options.get(name) is not None and not isinstance(options[name], str):
                raise ConfigError(f"{options[name]!r} is no text", field=name)
        if config.cache.blocks_per_chunk != 1:
            raise ConfigError("an object is one block", field="blocks_per_chunk", example="1")
        if getattr(config, "canonical_layout", False):
            raise ConfigError("blocks are stored as the engine has them", field="canonical_layout", example="false")
        parallel = config.parallel
        engine = Engine(
            model=config.model.name,
            tp_size=parallel.tp_size,
            pcp_size=parallel.pcp_size,
            copies=parallel.tp_size if config.replicated_layout else 1,
            tenant=options.get("umbp_tenant"),
            pp_size=parallel.pp_size,
            revision=options.get("umbp_revision") or "",
        )
        facts = {
            "dtype": config.model.dtype,
            "layout": config.kv_cache_layout,
            "hash": config.cache.tokens_per_hash,
            "bytes": config.worker_kv_bytes_per_block,
            "groups": [(group.group_id, group.tokens_per_block) for group in config.groups],
            "dcp": parallel.dcp_size,
            "files": files_digest(config.model.name),
        }
        return cls(engine, str(config.engine_id), json.dumps(facts, sort_keys=True), parallel.world_size, options.get("umbp_pool"))

    def place(self, rank: int) -> tuple[int, int, int]:
        """TP, PCP and PP rank of a worker: vLLM lays them out as [PP, PCP, TP]."""
        tp, pcp = self.engine.tp_size, self.engine.pcp_size
        return rank % tp, rank // tp % pcp, rank // (tp * pcp)

    def open(self, pool: Pool, group: BlockGroup, rank: int) -> Namespace:
        """The namespace of a group's blocks in one rank."""
        return pool.namespace(**self.engine.fields(group, self.namespace, *self.place(rank)))


class Notes:
    """What each worker leaves of its layout for the scheduler."""

    def __init__(self, pool: Pool, facts: Facts) -> None:
        self._facts = facts
        name = hashlib.sha256(facts.engine_id.encode()).hexdigest()
        self._namespace = pool.namespace(model="vllm layouts", page_tokens=1, layout=Layout.opaque(NOTE_BYTES), salt=name)

    def write(self, rank: int, groups: Iterable[BlockGroup]) -> None:
        """For as long as this client lives. An older note of the same engine id is replaced."""
        sizes = [(group.number, group.sizes, group.block_tokens) for group in groups]
        text = json.dumps({"facts": self._facts.namespace, "groups": sizes}).encode()
        if len(text) > NOTE_BYTES:
            raise ConfigError(f"a layout of {len(text)} bytes, at most {NOTE_BYTES}", field="kv_caches")
        self._namespace.remove(self._key(rank))
        if (status := self._namespace.put(self._key(rank), [text.ljust(NOTE_BYTES)])).refused.any():
            raise OutOfMemory(f"the pool has no room for a note of {NOTE_BYTES} bytes: {status}")
        self._namespace.pin(self._key(rank), note="vllm layout")

    def read_or_none(self, rank: int) -> list[BlockGroup] | None:
        """What this rank's worker wrote, for this configuration."""
        page = np.empty((1, NOTE_BYTES), np.uint8)
        if self._namespace.get(self._key(rank), page) != [ReadStatus.HIT]:
            return None
        note = json.loads(page.tobytes())
        if note["facts"] != self._facts.namespace:
            return None
        return [BlockGroup(number, (), tuple(sizes), tokens) for number, sizes, tokens in note["groups"]]

    def _key(self, rank: int) -> U8:
        return page_keys_of([b"rank %d" % rank])


# -- the scheduler -----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Held:
    """What is leased for one request. ``known``: keys that were looked for, and whether each is a hit."""

    step: int
    at: float
    known: dict[bytes, bool] = field(default_factory=dict)
    leases: list[tuple[Namespace, Lease]] = field(default_factory=list)
    promised: bool = False  # a load of it is on its way: kept until that is over
    asked: bool = False

    @property
    def lost(self) -> bool:
        """Whether something in it does not count any more."""
        return any(lease.expired for _, lease in self.leases)


class Catalog(OffloadingManager):  # type: ignore[misc] # vLLM has no types here
    """What the scheduler asks: which blocks are stored, held so that a load of them cannot miss."""

    def __init__(self, facts: Facts, windows: Collection[int], *, events: bool) -> None:
        self._facts = facts
        self._windows = frozenset(windows)  # groups that are asked for from the end of a prefix backwards
        self._pool = connect(facts.address, client=f"vllm scheduler {facts.engine_id}"[:64])
        self._notes = Notes(self._pool, facts)
        self._open: dict[int, list[Namespace]] = {}  # by group: that of each rank, those that are one only once
        self._learn_at = 0.0
        self._step = 0
        self._held: dict[int, Held] = {}  # by identity, so that all leases can be let go
        self._events = events
        self._told: list[Any] = []
        self._watch = Watch(self._hits)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbp-lease")  # one, so that a release comes after what it releases
        self._late: Future[Any] | None = None  # a call that was not waited for to its end
        self._silent_until = 0.0

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT for a block that is stored by all ranks, and held for this request from now on."""
        held = req_context.get_state(Held)
        if held is not None and not held.promised and held.step != self._step:
            held.step = self._step
            if held.lost or time.monotonic() > held.at + FRESH_SECONDS:
                self._let_go(held, req_context)
                held = None
        if held is None:
            held = Held(self._step, time.monotonic())
            req_context.set_state(held)
            self._held[id(held)] = held
        if key not in held.known:
            self._probe(key, req_context, held)
        return LookupResult.HIT if held.known.get(key) else LookupResult.MISS

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Blocks:
        """The blocks are held until `complete_load`."""
        held = req_context.get_state(Held)
        if held is not None:
            held.promised = True
        return Blocks(list(keys))

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Let go of what was loaded."""
        self._let_go(req_context.get_state(Held), req_context)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """What is not stored yet by all ranks, with the block before the first of each group."""
        wanted = [key for number, part in _by_group(keys) for key, hit in zip(part, self._all_have(number, part), strict=True) if not hit]
        positions = _positions(req_context)
        parents = {}
        for number, part in _by_group(wanted):
            chain = [key for key in positions if get_offload_group_idx(key) == number]
            at = chain.index(part[0]) if part[0] in positions else 0
            if at:
                parents[number] = get_offload_block_hash(chain[at - 1])
        return PrepareStoreOutput(keys_to_store=wanted, store_spec=Blocks(wanted, parents), evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Tell of those blocks that are stored: some may have been refused."""
        if not self._events:
            return
        for number, part in _by_group(keys):
            kept = [key for key, hit in zip(part, self._all_have(number, part), strict=True) if hit]
            if kept:
                self._told.append(OffloadingEvent(keys=kept, medium=Medium.CPU, removed=False, locality=Locality.LOCAL))
                self._watch.add(number, [get_offload_block_hash(key) for key in kept])

    def on_new_request(self, req_context: Any) -> Any:
        """As vLLM does it: what is new is offloaded as it comes."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Let go, unless a load is still on its way."""
        held = req_context.get_state(Held)
        if held is not None and not held.promised:
            self._let_go(held, req_context)

    def on_schedule_end(self, context: Any) -> None:
        """The next question is of another step."""
        self._step += 1

    def take_events(self) -> Iterator[Any]:
        """Blocks stored and evicted since the last call."""
        for number, gone in self._watch.gone(time.monotonic()):
            self._told.append(
                OffloadingEvent(keys=[make_offload_key(gone, number)], medium=Medium.CPU, removed=True, locality=Locality.LOCAL)
            )
        told, self._told = self._told, []
        yield from told

    def reset_cache(self) -> None:
        """The weights changed: nothing that was stored counts any more, for any engine of these namespaces."""
        self._let_all_go()
        try:
            self._thread.submit(self._flush).result()
        except Unavailable as error:
            log.warning("the pool was not cleared: %s", error)

    def _flush(self) -> None:
        for namespaces in self._open.values():
            for namespace in namespaces:
                namespace.flush()

    def shutdown(self) -> None:
        """Let go of the pool."""
        self._let_all_go()
        self._thread.shutdown(cancel_futures=True)  # leases that it had no time for end with the client
        self._pool.close()

    # -- probes and leases -------------------------------------------------------------------------------------------------------------

    def _probe(self, key: bytes, req_context: Any, held: Held) -> None:
        """Look for this key and those of its group that will be asked for next; lease what all ranks have."""
        number, positions = get_offload_group_idx(key), _positions(req_context)
        held.known[key] = False
        if not self._learned():
            return
        keys = [each for each in positions if get_offload_group_idx(each) == number] or [key]
        if key not in positions:
            keys = [key]
        elif not held.asked:
            hashes = _hashes(keys)
            for namespace in self._open.get(number, []):
                namespace.operations.note(hashes)
            self._pool.noted()
            held.asked = True
        if key in positions and number not in self._windows:
            keys = keys[keys.index(key) :]
        keys = [each for each in keys if each == key or each not in held.known][:KEYS_PER_CALL_MAX]
        hits = self._all_have(number, keys)
        stored = [each for each, hit in zip(keys, hits, strict=True) if hit]
        leases = self._leases(number, _hashes(stored)) if stored else []
        held.leases += leases
        leased: Mask = np.ones(len(stored), bool)
        for _, lease in leases:
            leased &= lease.held
        leased &= len(leases) == len(self._open.get(number, []))
        held.known.update(dict.fromkeys(keys, False))
        held.known.update(zip(stored, leased.tolist(), strict=True))

    def _leases(self, number: int, hashes: U8) -> list[tuple[Namespace, Lease]]:
        """A lease of each rank; fewer if there is no room for more, none if the pool does not answer in time."""

        def take() -> list[tuple[Namespace, Lease]]:
            taken: list[tuple[Namespace, Lease]] = []
            with contextlib.suppress(LimitReached):
                for namespace in self._open[number]:
                    taken.append((namespace, namespace.run(namespace.operations.lease(hashes, None, "never", noted=True))))
            return taken

        asked = self._ask(take, LEASE_SECONDS)
        if asked is None:
            return []
        if asked.done():
            return asked.result()
        self._thread.submit(lambda: _release(asked.result()))
        return []

    def _ask(self, work: Callable[[], T], seconds: float) -> Future[T] | None:
        """Have the thread do this, and wait so long for it; None if it is not asked, since the pool was silent just now."""
        if time.monotonic() < self._silent_until or (self._late is not None and not self._late.done()):
            return None
        self._late = asked = self._thread.submit(work)
        try:
            asked.exception(seconds)
        except NotInTime:
            self._silent_until = time.monotonic() + SILENT_SECONDS
        return asked

    def _let_go(self, held: Held | None, req_context: Any) -> None:
        if held is not None:
            self._release(held)
            req_context._state.pop(Held, None)

    def _release(self, held: Held) -> None:
        self._held.pop(id(held), None)
        if held.leases:
            self._thread.submit(_release, held.leases)
        held.leases = []
        held.known.clear()

    def _let_all_go(self) -> None:
        for held in list(self._held.values()):
            self._release(held)

    def _all_have(self, number: int, keys: list[bytes]) -> list[bool]:
        """Which of these all ranks have stored; no call."""
        hit: Mask = np.zeros(len(keys), bool)
        if keys and self._learned():
            found = self._hits(number, _hashes(keys))
            hit = hit if found is None else found
        answer: list[bool] = hit.tolist()
        return answer

    def _hits(self, number: int, hashes: U8) -> Mask | None:
        hit: Mask = np.ones(len(hashes), bool)
        for namespace in self._open.get(number, []):
            look = namespace.operations.look(hashes)
            if look is None:
                return None
            hit &= look.found.hit
        return hit if number in self._open else None

    def _learned(self) -> bool:
        """Whether the workers' layouts are known; looks for their notes from time to time."""
        now = time.monotonic()
        if self._open or now < self._learn_at:
            return bool(self._open)
        self._learn_at = now + LEARN_SECONDS
        if (asked := self._ask(self._learn, LEARN_SECONDS_MAX)) is not None and asked.done():
            asked.result()
        return bool(self._open)

    def _learn(self) -> None:
        """In the thread: the notes of all ranks, and the namespaces that they tell of."""
        found: dict[int, dict[bytes, Namespace]] = {}
        with contextlib.suppress(Unavailable):
            for rank in range(self._facts.world):
                groups = self._notes.read_or_none(rank)
                if groups is None:
                    return
                for group in groups:
                    namespace = self._facts.open(self._pool, group, rank)
                    found.setdefault(group.number, {})[namespace.identity.digest()] = namespace
            self._open = {number: list(namespaces.values()) for number, namespaces in found.items()}


def _release(leases: Iterable[tuple[Namespace, Lease]]) -> None:
    for namespace, lease in leases:
        try:
            namespace.run(namespace.operations.release(lease))
        except UmbpError:  # the thread's result is not looked at; the lease ends by its time
            log.exception("a lease was not released")


def _by_group(keys: Iterable[bytes]) -> list[tuple[int, list[bytes]]]:
    parts: dict[int, list[bytes]] = {}
    for key in keys:
        parts.setdefault(get_offload_group_idx(key), []).append(key)
    return list(parts.items())


def _hashes(keys: Iterable[bytes]) -> U8:
    return page_keys_of([get_offload_block_hash(key) for key in keys])


def _positions(req_context: Any) -> Mapping[bytes, int]:
    """The request's keys in the order of their prefix, as far as vLLM says it; with none, blocks are looked for one by one."""
    positions: Mapping[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return positions


# -- what vLLM loads ---------------------------------------------------------------------------------------------------------------


class UMBPOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """The pool as a medium of vLLM's offloading."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._facts = Facts.of(config)

    def get_manager(self) -> Catalog:
        """For the scheduler."""
        windows = [group.group_id for group in self.config.groups if group.sliding_window_size_in_chunks is not None]
        return Catalog(self._facts, windows, events=self.kv_events_config.enable_kv_cache_events)

    def get_worker(self, kv_caches: Any) -> Mover:
        """For a rank, with its KV tensors."""
        facts, rank = self._facts, int(self.config.parallel.rank)
        pool = connect(facts.address, client=f"vllm worker {rank} {facts.engine_id}"[:64])
        mover = Mover(pool, kv_caches, self.config.groups)
        mover.open({group.number: facts.open(pool, group, rank) for group in mover.groups}, facts.engine, facts.engine_id, rank)
        Notes(pool, facts).write(rank, mover.groups)
        return mover


for asked, ours in ((OffloadingManager, Catalog), (OffloadingWorker, Mover), (OffloadingSpec, UMBPOffloadingSpec)):
    if unmet := getattr(ours, "__abstractmethods__", ()):
        raise versions.does_not_fit("vllm", KNOWN, f"its {asked.__name__} also has {', '.join(sorted(unmet))}")
if remark := versions.remark("vllm", KNOWN):
    log.warning(remark)
