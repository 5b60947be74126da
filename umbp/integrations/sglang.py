"""SGLang's external linker: its device pools straight to the pool of this node, with no patch and no host tier in between.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "UMBPLinker", "linker_module_path": "umbp.integrations.sglang"}'

Theory of operation
-------------------
SGLang's radix tree calls a linker from its scheduler, one per worker process. Nothing here may raise into it or make it wait.

*Lookup* is one probe of the shared index for each bundle of pools (`umbp.integrations.sglang_pools`), in this process, without a call. KV
must be there from the first page on; windows and states only where a prefix ends. So the answer is a set of lengths: a length counts if all
of it can be restored. SGLang takes the longest that all ranks have. What is on the SSD or on another node is sent for when a request asks
first, without waiting, and is found when it asks again: SGLang looks waiting requests up in every step.

*Load* of an admitted request leases its pages in one call, before the engine relies on them. From then on none of them can be evicted. If
one is gone already, a worker alone says no, and the engine computes the prompt as if it had never been found. Ranks of a group cannot say
no one by one (they would disagree, and hang). So there a lookup *claims* what it finds, in shared memory and without a call: between the
lookup and the lease nothing of it is evicted, and what a rank could not claim it has not found (`umbp.integrations.sglang_leases`).

*Start* hands all requests of a batch to the loaders, one load a bundle, at most: a key that two requests want goes in a second load. The
forward waits layer by layer, where SGLang's pools ask for it (`umbp.integrations.sglang_loads`): for the bytes on a CPU, by its stream on a
GPU. In a group each page is read from the segment by one rank; ranks need not agree on anything first, and a batch without loads is no
event at all.

*Finish* waits until nothing writes to any slot of the batch, and says whether every page arrived. If not, SGLang ends the requests of that
batch with a 503, and nothing of them enters the tree: what can still get there is a pool that dies or stops, a deadline, and, for ranks
with peers, pages that somebody removes or flushes in just that moment.

*Offload*: see `umbp.integrations.sglang_offloads`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from umbp.client import Namespace, connect
from umbp.client.link import Look
from umbp.errors import InvalidRequest, UmbpError
from umbp.integrations import versions
from umbp.integrations.kv_events import Publisher, Residents
from umbp.integrations.windows import leading, windows_that_are_whole
from umbp.layout import KEYS_PER_CALL_MAX
from umbp.types import I64, U8, Mask
from umbp.wire import LARGE_BATCH_MAX

KNOWN = ("0.5.23",)
METHODS = frozenset(
    [
        "lookup",
        "load",
        "start_layer_wise_loading",
        "finish_layer_wise_loading",
        "cancel_queued_load",
        "offload",
        "num_completed_offloads",
        "pop_completed_offload",
        "reset",
        "close",
    ]
)
try:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
    from sglang.srt.utils import get_device_module

    # Then what needs torch, which takes seconds: another SGLang is named before that, and where there is no torch too.
    from umbp.integrations.sglang_leases import Held, Leases
    from umbp.integrations.sglang_loads import LayerLoads, distinct, never
    from umbp.integrations.sglang_offloads import Node, OffloadQueue, Part
    from umbp.integrations.sglang_place import Place, Settings, data_parallel_rank, open_namespace
    from umbp.integrations.sglang_pools import Bundle, bundles, device_group, keys_of
    from umbp.loader import Load, Loader
except ImportError as error:
    raise versions.does_not_fit("sglang", KNOWN, str(error)) from error
if unmet := UnifiedCacheLinker.__abstractmethods__ - METHODS:
    raise versions.does_not_fit("sglang", KNOWN, f"its linkers also have {', '.join(sorted(unmet))}")

log = logging.getLogger("umbp.integrations.sglang")
PROMPTS_REMEMBERED_MAX = 64  # whose pages' order is known to offloads: they follow within a few steps
REQUESTS_REMEMBERED_MAX = 4096  # that have asked before: SGLang looks a waiting request up again in every step
PREFETCHES_MAX = 64  # that wait to be sent


@dataclass(frozen=True, slots=True)
class Shelf:
    """A bundle with its namespace and loader."""

    bundle: Bundle
    namespace: Namespace
    loader: Loader


@dataclass(slots=True)
class Wanted:
    """An admitted request until its batch has ended. ``parts``: shelf -> keys (n, 32) and slots (n,); ``held`` protects them."""

    parts: dict[int, tuple[U8, I64]]
    held: Held = field(default_factory=lambda: Held({}))


@dataclass(frozen=True, slots=True)
class LinkerStatistics:
    """Counts of one worker. ``refused_loads`` were computed instead; ``failed_batches`` were reported to SGLang as failed."""

    lookups: int
    pages_asked: int
    pages_found: int
    loads: int
    refused_loads: int
    failed_batches: int
    offloaded_pages: int
    failed_nodes: int


class UMBPLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One worker's link to the pool. `Settings` says what ``linker_extra_config`` may hold."""

    @versions.fitting("sglang", KNOWN)
    def __init__(
        self, server_args: Any, params: Any, *, components: set[Any], extra_config: dict[str, Any] | None = None, forward_stream: Any = None
    ) -> None:
        if remark := versions.remark("sglang", KNOWN):
            log.warning("%s", remark)
        settings = Settings.of(extra_config)
        self.settings = settings
        self.forward_stream = forward_stream
        self.place = place = Place.of(params)
        if place.pp_size > 1:  # one stage would load what another computes
            raise InvalidRequest(
                "pipeline stages do not agree on what an external linker finds, those of HiCache do: use umbp.integrations.sglang_hicache",
                field="pp_size",
                example="1",
            )
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self.pool_group = device_group(kvcache, params.page_size, params, components)
        self.pools = self.pool_group.entry_map
        self.layer_done_counter = LayerLoads(self.pool_group.num_layers)
        self._pool = connect(settings.pool, client=f"sglang tp{place.tp_rank} pp{place.pp_rank} cp{place.cp_rank}")
        self.shelves: list[Shelf] = []
        try:
            name, near = place.neighbours(self._pool.boot, int(getattr(server_args, "nnodes", 1) or 1))
            for bundle in bundles(self.pool_group, params.page_size):
                namespace = open_namespace(self._pool, bundle, settings, place, server_args, params.page_size)
                small = bundle.source != PoolName.KV  # windows and states are a few pages: they are read alone
                staging = min(settings.staging_bytes, 8 << 20) if small else settings.staging_bytes
                group = place.group(name, near, settings, staging) if bundle.replicated and settings.group else None
                loader = Loader(
                    namespace, bundle.tensors, group, copy_threads=int(settings.copy_threads) if settings.copy_threads else None
                )
                self.shelves.append(Shelf(bundle, namespace, loader))
        except BaseException:
            self._close_shelves()
            raise
        self.windows = {number: shelf for number, shelf in enumerate(self.shelves) if shelf.bundle.source != PoolName.KV}
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, Wanted] = {}
        self._started: dict[int, list[Wanted]] = {}
        self._known: OrderedDict[str, None] = OrderedDict()
        namespaces = [shelf.namespace for shelf in self.shelves]
        self._claims = settings.protect == "load" and not place.alone
        self._leases = Leases(namespaces, wait_seconds=settings.protect_seconds, ahead_seconds=settings.hold_seconds, claims=self._claims)
        self._prefetches = ThreadPoolExecutor(1, thread_name_prefix="umbp-prefetch")
        self._sent_for = 0
        self._old_pages = False  # of weights before the last reset, which could not be flushed: nothing is found
        self._asked: deque[U8] = deque(maxlen=PROMPTS_REMEMBERED_MAX)
        loaders = [shelf.loader for shelf in self.shelves]
        self._offloads = OffloadQueue(loaders, self._was_stored, self._before, f"umbp-offload-tp{place.tp_rank}")
        self._residents = self._publish() if settings.events and place.first else None
        self._count = dict.fromkeys(("lookups", "pages_asked", "pages_found", "loads", "refused_loads", "failed_batches"), 0)
        for shelf in self.shelves:
            log.info("%s pages in namespace %s: %s", shelf.bundle.source, shelf.namespace.identity.digest().hex(), shelf.loader)
        log.info("UMBP on %s; rank %d of %d, %d of them on this pool", self._pool, place.tp_rank, place.tp_size, len(near))

    def __repr__(self) -> str:
        return f"<UMBPLinker tp{self.place.tp_rank} on {self._pool}, {len(self.shelves)} namespaces, {len(self._queued)} loads queued>"

    def statistics(self) -> LinkerStatistics:
        """A snapshot."""
        return LinkerStatistics(**self._count, offloaded_pages=self._offloads.pages, failed_nodes=self._offloads.failed_nodes)

    # -- lookup ------------------------------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every number of pages, from the first of the KV transfer's keys on, that can be restored with all that belongs to it."""
        try:
            return self._lengths(rid, {transfer.name: transfer for transfer in transfers})
        except Exception:
            log.exception("a lookup of %s failed: nothing is found", rid)
            return []

    def _lengths(self, rid: str, by_source: dict[PoolName, PoolTransfer]) -> list[int]:
        kv = by_source.get(PoolName.KV)
        if self._old_pages or kv is None or not kv.keys or not all(shelf.bundle.source in by_source for shelf in self.shelves):
            return []
        keys = keys_of(kv.keys)
        windows = {number: max(1, len(by_source[shelf.bundle.source].keys or ())) for number, shelf in self.windows.items()}
        first = rid not in self._known
        self._count["lookups"] += 1
        self._count["pages_asked"] += len(keys)
        ahead = self._leases.known(rid, keys) if self.settings.protect == "lookup" else None
        looks = self._looks(rid, keys, windows) if ahead is None else None
        hits = {number: look.found.hit for number, look in looks.items()} if looks is not None else ahead or {}
        found = self._ends(hits, windows) if hits else []
        if looks and found and self._claims:
            found = self._ends(self._leases.claim(rid, looks, found[-1]), windows)
        elif looks and found and self.settings.protect == "lookup":
            found = self._ends(self._leases.promise(rid, keys[: found[-1]], hits), windows)
        self._count["pages_found"] += found[-1] if found else 0
        if found and first and self._residents is not None:
            self._residents.there(keys[: found[-1]])
        return found

    def _ends(self, hits: dict[int, Mask], windows: dict[int, int]) -> list[int]:
        """The lengths at which KV is there from the first page on, and every window before the end."""
        pages = min(leading(hit) for number, hit in hits.items() if number not in windows)
        ends = [windows_that_are_whole(hits[number][:pages], window) for number, window in windows.items()] if pages else []
        return (np.flatnonzero(np.logical_and.reduce(ends)) + 1).tolist() if ends else list(range(1, pages + 1))

    def _looks(self, rid: str, keys: U8, windows: dict[int, int]) -> dict[int, Look]:
        """Shelf -> a probe of the index, for windows and states as far as KV is there. Nothing if there is no pool to ask."""
        looks: dict[int, Look] = {}
        pages = len(keys)
        first = rid not in self._known
        for number, shelf in enumerate(self.shelves):
            look = shelf.namespace.operations.look(keys[:pages])
            if look is None:
                return {}
            looks[number] = look
            if number not in self.windows:
                pages = min(pages, leading(look.found.hit))
        if first:
            self._hear_of(rid, keys, {number: look.found.hit for number, look in looks.items()}, windows)
        return looks

    def _hear_of(self, rid: str, keys: U8, hits: dict[int, Mask], windows: dict[int, int]) -> None:
        """The first time that a request asks: the order of its pages is remembered, and what is elsewhere is sent for."""
        self._known[rid] = None
        while len(self._known) > REQUESTS_REMEMBERED_MAX:
            self._known.popitem(last=False)
        self._asked.append(keys)
        for start in range(0, len(keys), KEYS_PER_CALL_MAX):  # once a request its keys go to the access history
            self.shelves[0].namespace.operations.note(keys[start : start + KEYS_PER_CALL_MAX])
        self._pool.noted()
        for number, shelf in enumerate(self.shelves):
            if self.settings.prefetch and shelf.namespace.operations.may_fetch:
                absent = np.ones(len(keys), bool)
                absent[: len(hits[number])] = ~hits[number]
                absent[: len(keys) - windows.get(number, len(keys))] = False  # of windows, the last one
                if absent.any():
                    self._send_for(shelf, keys[absent][:LARGE_BATCH_MAX])

    def _send_for(self, shelf: Shelf, keys: U8) -> None:
        """Have these pages brought from the SSD or another node, for a later lookup of a request that waits. Not where too many wait."""
        if self._sent_for < PREFETCHES_MAX:
            self._sent_for += 1
            self._prefetches.submit(self._prefetch, shelf, keys)

    def _prefetch(self, shelf: Shelf, keys: U8) -> None:
        try:
            shelf.namespace.prefetch(keys, hold=self.settings.hold_seconds)
        except UmbpError as error:
            log.debug("pages could not be sent for: %s", error)
        finally:
            self._sent_for -= 1

    # -- loads -------------------------------------------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue an admitted request's pages for the next start. False: none of it can be had, compute it."""
        try:
            wanted = self._wanted(transfers)
            if not wanted.parts or rid in self._queued:
                return False
            self._count["loads"] += 1
            if self._protect(rid, wanted):
                self._queued[rid] = wanted
                return True
            self._leases.release(wanted.held)
        except Exception:
            log.exception("the load of %s was refused", rid)
        self._count["refused_loads"] += 1
        return False

    def _wanted(self, transfers: list[PoolTransfer]) -> Wanted:
        by_source = {transfer.name: transfer for transfer in transfers if transfer.keys}
        parts = {}
        for number, shelf in enumerate(self.shelves):
            transfer = by_source.get(shelf.bundle.source)
            if transfer is not None:
                parts[number] = (keys_of(transfer.keys), shelf.bundle.slots(transfer))
        return Wanted(parts)

    def _protect(self, rid: str, wanted: Wanted) -> bool:
        """Lease all pages, if they are not already; whether all of them are held. A pool that does not answer in time counts as no.

        With peers, who could not be told of a no, it is asked for and not waited for.
        """
        keys = {number: part[0] for number, part in wanted.parts.items()}
        if (held := self._leases.take(rid, keys)) is not None:
            wanted.held = held
            return True
        wanted.held = self._leases.ask(keys)
        self._leases.keep_claim(rid, wanted.held)
        return not self.place.alone or (self._leases.answered(wanted.held) and wanted.held.whole())

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that was not started."""
        wanted = self._queued.pop(rid, None)
        if wanted is None:
            return False
        self._leases.release(wanted.held)
        return True

    def start_layer_wise_loading(self) -> int:
        """Start all queued loads; the batch's number, or -1 if there are none."""
        self._leases.sweep()
        self._leases.end_claims()
        if not self._queued:
            return -1
        batch, self._queued = list(self._queued.values()), {}
        after = get_device_module().Event()
        after.record()  # slots may still be read by what runs on the device now
        loads: list[Load] = []
        try:
            for number, shelf in enumerate(self.shelves):
                parts = [wanted.parts[number] for wanted in batch if number in wanted.parts]
                if parts:
                    loads += self._start(shelf, parts, after)
        except Exception:
            log.exception("a batch of %d loads could not be started", len(batch))
            for load in loads:
                load.cancel()
            loads.append(never("it could not be started"))
        index = self.layer_done_counter.begin(loads)
        self._started[index] = batch
        return index

    def _start(self, shelf: Shelf, wanted: list[tuple[U8, I64]], after: Any) -> list[Load]:
        keys, slots = np.concatenate([keys for keys, _ in wanted]), np.concatenate([slots for _, slots in wanted])
        parts = distinct(keys) if len(wanted) > 1 else [np.arange(len(keys))]  # one request's keys are all different
        loads = []
        for which in parts:
            for start in range(0, len(which), KEYS_PER_CALL_MAX):
                part = which[start : start + KEYS_PER_CALL_MAX]
                loads.append(shelf.loader.load(keys[part], slots[part], deadline=self.settings.deadline_seconds, after=after))
        return loads

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing of this batch is written to any slot; whether every page of it arrived."""
        done = [load.finish() for load in self.layer_done_counter.end(counter_index)]
        self._leases.release(*(wanted.held for wanted in self._started.pop(counter_index, ())))
        reasons = {each.reason or "?" for each in done if len(each.missing)}
        if reasons:
            self._count["failed_batches"] += 1
            log.error("%d pages did not arrive: %s", sum(len(each.missing) for each in done), "; ".join(sorted(reasons)))
        return not reasons

    # -- offloads ----------------------------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Accept a node. False only for one without KV keys, which is so on every rank."""
        by_source = {transfer.name: transfer for transfer in transfers if transfer.keys}
        if PoolName.KV not in by_source:
            return False
        parts: dict[int, Part] = {}
        try:
            for number, shelf in enumerate(self.shelves):
                transfer = by_source.get(shelf.bundle.source)
                if transfer is not None:
                    parts[number] = Part(keys_of(transfer.keys), partial(shelf.bundle.slots, transfer))
            events = self.record_offload_ready()
        except Exception:
            log.exception("an offload was refused")
            parts, events = {}, []
        self._offloads.put(Node(parts, events, session=session_id))
        return True

    def _before(self, key: U8) -> bytes | None:
        """The key before this one in a prompt that was asked for lately. SGLang tells of a node's pages only, not of what they follow."""
        for keys in list(self._asked):
            found = np.flatnonzero(keys.view(np.uint64)[1:, 0] == key.view(np.uint64)[0])
            if len(found):
                return bytes(keys[found[0]])
        return None

    def _was_stored(self, node: Node) -> None:
        """A node's pages are all in the pool."""
        if self._residents is not None and 0 in node.parts:
            keys = node.parts[0].keys
            self._residents.there(keys, self._before(keys[0]), node.session)

    def _publish(self) -> Residents:
        """Events of the pages of the first bundle, which is of KV."""
        namespace, page_tokens = self.shelves[0].namespace, self.pool_group.page_size

        def look(keys: U8) -> Mask | None:
            found = namespace.operations.look(keys)
            return None if found is None else found.found.hit

        settings = self.settings
        assert settings.events is not None
        publisher = Publisher(settings.events, rank=data_parallel_rank(), topic=settings.events_topic, replay=settings.events_replay)
        log.info("what the pool holds is published on %s", publisher.endpoint)
        self._publisher = publisher
        return Residents(publisher, look, namespace.operations.survey, page_tokens)

    def num_completed_offloads(self) -> int:
        """Results that can be popped now."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """The oldest accepted offload's result: whether all of it is stored."""
        return self._offloads.take()

    # -- the end -----------------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Nothing is read from or written to any slot after this, and no result is left. With ``flush_on_reset``, no page either.

        Pages that could not be flushed are not found again by this worker, until a later reset could.
        """
        self._stop_all()
        if self.settings.flush_on_reset:
            try:
                for shelf in self.shelves:
                    pages = shelf.namespace.flush()
                    log.info("%d %s pages were flushed by a reset", pages, shelf.bundle.source)
                self._old_pages = False
            except Exception:
                self._old_pages = True
                log.exception("a reset could not flush its pages: nothing is found until one can")

    def _stop_all(self) -> None:
        loads = self.layer_done_counter.reset()
        for load in loads:
            load.cancel()
        for load in loads:
            load.finish()
        every = [*self._queued.values(), *(wanted for batch in self._started.values() for wanted in batch)]
        self._leases.release(*(wanted.held for wanted in every))
        self._leases.clear()
        self._leases.end_claims()
        self._queued.clear()
        self._started.clear()
        self._offloads.reset()

    def close(self) -> None:
        """End all that is on its way, and let go of the pool. Its pages stay."""
        self._stop_all()
        self._offloads.close()
        self._prefetches.shutdown(wait=True, cancel_futures=True)
        self._leases.close()
        if self._residents is not None:
            self._residents.close()
            self._publisher.close()
        self._close_shelves()

    def _close_shelves(self) -> None:
        for shelf in self.shelves:
            shelf.loader.close()
        self._pool.close()


__all__ = ["LinkerStatistics", "UMBPLinker"]
