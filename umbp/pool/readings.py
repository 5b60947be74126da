"""The pool's metrics: what each is called and where it is read.

The labels ``row`` and ``namespace`` are a namespace's row and the first digits of its digest, which `/v1/namespaces` explains: never a
model's or tenant's name. Both, since whoever chooses the text of namespaces can find two of which the first digits are equal.
Namespaces in the first rows of the table have series of their own; the pool-wide ones count all.
"""

from __future__ import annotations

from collections.abc import Iterator

from umbp.core.objects import LIVE, ORPHAN, ZOMBIE
from umbp.core.pool import Pool
from umbp.errors import Unavailable
from umbp.master.readings import node_info
from umbp.metrics import Definition, Reading
from umbp.pool.documents import SsdDocument, memory_level_documents, region_documents, short, ssd_document
from umbp.pool.node import Node

NAMESPACE_ROWS_MAX = 256  # about 10 series each
BY_NAMESPACE = ("row", "namespace")


def _gauge(name: str, about: str, *labels: str) -> Definition:
    return Definition("gauge", name, about, labels)


def _counter(name: str, about: str, *labels: str) -> Definition:
    return Definition("counter", name, about, labels)


READY = _gauge("umbp_ready", "1 while requests are served, else 0.")
INFO = _gauge("umbp_pool_info", "Always 1; the labels say what runs.", "name", "boot", "eviction", "admission")
MEMBER = _gauge("umbp_member", "1 while a master knows this pool, its own embedded one included.")
REPORTED = _counter(
    "umbp_reported_total",
    "Bundles, resyncs, joins and beats; beats unanswered, masters given up; keys of advice.",
    "what",
)
UPTIME = _gauge("umbp_uptime_seconds", "Since this process started.")
CAPACITY = _gauge("umbp_capacity_bytes", "Bytes of the tier that objects can take.", "tier")
USED = _gauge("umbp_used_bytes", "Bytes of objects, those being written included.", "tier")
ALLOCATED = _gauge("umbp_allocated_bytes", "Bytes that objects take with rounding.", "tier")
REGION = _gauge("umbp_region_capacity_bytes", "Bytes of the memory on a NUMA node, where it is cut by nodes.", "numa_node", "level")
REGION_FREE = _gauge("umbp_region_free_bytes", "Of those, free ones.", "numa_node", "level")
NEAR = _counter(
    "umbp_written_near_pages_total", "Pages given memory, by the node their writer is near, on it or not.", "numa_node", "level", "near"
)
MEMORY_LEVEL = _gauge("umbp_level_capacity_bytes", "Bytes of a level of the memory, where there are several.", "level")
MEMORY_LEVEL_USED = _gauge("umbp_level_used_bytes", "Bytes of it that are not free.", "level")
MEMORY_LEVEL_MOVED = _counter("umbp_level_pages_total", "Pages of a level that went down, came up, or were put below.", "level", "what")
MOVING = _gauge("umbp_moving_bytes", "Bytes of memory that pages are just being copied to from another level.")
LARGEST = _gauge("umbp_largest_free_run_bytes", "Longest free run of the tier.", "tier")
LEASED = _gauge("umbp_leased_bytes", "Bytes of distinct leased objects.")
FLUSHED = _gauge("umbp_flushed_bytes", "Bytes of objects that belong to no namespace any more and are about to go.")
SPARE = _gauge("umbp_spare_bytes", "Bytes that writers have ahead of their next put.")
SCRATCH = _gauge("umbp_scratch_bytes", "Bytes that clients have for their own use, such as the staging of group loads.")
KEYS = _gauge("umbp_keys", "Keys that can be found.")
KEYS_MAX = _gauge("umbp_keys_max", "Keys that the index holds at most.")
HIDDEN = _gauge("umbp_hidden_objects", "Objects that have memory but cannot be found.", "why")
SESSIONS = _gauge("umbp_sessions", "Client sessions.")
LEASES = _gauge("umbp_leases", "Leases.")
PINS = _gauge("umbp_pins", "Pins.")
RESERVATIONS = _gauge("umbp_reservations", "Batches being written.")
NAMESPACES = _gauge("umbp_namespaces", "Namespaces.")
UNSUMMED = _gauge("umbp_unsummed_batches", "Batches that wait for checksums.")

STORED = _counter("umbp_stored_keys_total", "Keys that were committed.")
EVICTED = _counter("umbp_evicted_keys_total", "Keys that were evicted.")
EVICTED_BYTES = _counter("umbp_evicted_bytes_total", "Bytes that were evicted.")
REMOVED = _counter("umbp_removed_keys_total", "Keys that clients or operators removed.")
CORRUPT = _counter("umbp_corrupt_keys_total", "Objects dropped because their bytes did not match their checksum.")
FLUSHES = _counter("umbp_flushes_total", "Flushes of a namespace.")
REQUESTS = _counter("umbp_requests_noted_total", "Requests whose key lists clients sent.")
UNHEEDED = _counter("umbp_requests_dropped_total", "Requests whose key lists came faster than they could be entered in the history.")
LOOKUPS = _counter("umbp_lookups_total", "Keys of those requests.")
HITS = _counter("umbp_hits_total", "Keys of those requests that were stored.")
SUMS = _counter("umbp_checksums_total", "Checksums made by the pool.")
CLAIMED = _counter("umbp_claimed_victims_total", "Pages that were to be evicted and were kept, as a client was about to lease them.")
LOST = _counter("umbp_leases_lost_total", "Leases that ended by their time limit.")
EXPIRED = _counter("umbp_reservations_expired_total", "Reservations that ended by their time limit.")

FETCHING = _gauge("umbp_fetching_pages", "Pages on their way into DRAM from elsewhere.")
FETCHED = _counter("umbp_fetched_pages_total", "Pages brought into DRAM.", "source")
FETCHED_BYTES = _counter("umbp_fetched_bytes_total", "Bytes brought into DRAM.", "source")
FETCH_FAILED = _counter("umbp_fetch_failed_pages_total", "Pages that a source offered and did not bring.", "source", "why")
FETCH_MERGED = _counter("umbp_fetch_merged_pages_total", "Pages that were asked for while they were on their way already.")
ERRANDS = _counter("umbp_errands_total", "Orders whose pages a client of this pool received by itself.")
NEAR_PAGES = _counter("umbp_neighbour_pages_total", "Pages that clients of this pool read in another pool's memory.", "neighbour")
NEAR_BYTES = _counter("umbp_neighbour_bytes_total", "Bytes of them.", "neighbour")
GRANTED = _counter("umbp_granted_pages_total", "Pages that other nodes were given to read.")
STALE = _counter("umbp_granted_stale_pages_total", "Pages refused after they were read, as they might have changed meanwhile.")

DISK_STATE = _gauge("umbp_ssd_state", "1 for the state that a disk is in.", "path", "state")
DISK_USED = _gauge("umbp_ssd_used_bytes", "Bytes of pages on a disk.", "path")
DISK_FILES = _gauge("umbp_ssd_file_bytes", "Bytes of files on a disk.", "path")
DISK_READ = _counter("umbp_ssd_read_bytes_total", "Bytes of pages read from a disk.", "path")
DISK_WRITTEN = _counter("umbp_ssd_written_bytes_total", "Bytes written to a disk.", "path")
DISK_ERRORS = _counter("umbp_ssd_errors_total", "Reads of pages and writes that failed.", "path", "op")
LEVEL = _gauge("umbp_ssd_level_capacity_bytes", "Most bytes of pages of a level of the SSD tier, where there are several.", "level")
LEVEL_USED = _gauge("umbp_ssd_level_used_bytes", "Bytes of pages on a level.", "level")
LEVEL_MOVED = _counter("umbp_ssd_level_pages_total", "Pages of a level that went down, came up, or were written below.", "level", "what")
SSD_KEYS = _gauge("umbp_ssd_keys", "Keys on SSD.")
SSD_WAITING = _gauge("umbp_ssd_waiting_pages", "Pages that wait to be written to SSD.")
SSD_TODAY = _gauge("umbp_ssd_written_today_bytes", "Bytes written to SSD on this day (UTC).")
SSD_PAGES = _counter(
    "umbp_ssd_pages_total", "Pages, by what became of them on SSD; overtaken: were gone from DRAM before they were written.", "what"
)
SSD_HELD = _gauge("umbp_ssd_held_files", "Files that clients read from at the moment.")
SSD_CLEANED = _counter("umbp_ssd_cleaned_bytes_total", "Bytes written once more by cleaning.")

NS_SSD = _gauge("umbp_namespace_ssd_bytes", "Bytes of a namespace's pages on SSD.", *BY_NAMESPACE)
NS_HELD = _gauge("umbp_namespace_held_bytes", "Bytes of a namespace's objects.", *BY_NAMESPACE)
NS_KEYS = _gauge("umbp_namespace_keys", "Keys of a namespace.", *BY_NAMESPACE)
NS_QUOTA = _gauge("umbp_namespace_quota_bytes", "Quota; absent where there is none.", *BY_NAMESPACE)
NS_STORED = _counter("umbp_namespace_stored_keys_total", "Keys committed.", *BY_NAMESPACE)
NS_EVICTED = _counter("umbp_namespace_evicted_keys_total", "Keys evicted.", *BY_NAMESPACE)
NS_EVICTED_QUOTA = _counter("umbp_namespace_evicted_for_quota_keys_total", "Keys evicted for the quota.", *BY_NAMESPACE)
NS_REFUSED = _counter("umbp_namespace_refused_keys_total", "Keys not stored, by status code.", *BY_NAMESPACE, "code")


def readings(node: Node) -> Iterator[Reading]:
    """All readings at this moment; before the pool is there only whether it is."""
    yield Reading(READY, float(node.state == "ready" and not node.unhealthy))
    yield Reading(UPTIME, max(0.0, node.now() - node.started))
    try:
        pool = node.pool
    except Unavailable:
        return
    yield Reading(INFO, 1, (node.name, str(node.boot), pool.eviction, pool.admission_name))
    reporter = node.cluster.reporter
    if node.config.master:  # else the master in this process says it, of all its nodes
        yield from node_info({node.name: reporter.tags})
    yield Reading(MEMBER, float(reporter.registration > 0))
    for what, count in reporter.counts.items():
        yield Reading(REPORTED, count, (what,))
    yield Reading(SESSIONS, len(node.sessions()))
    yield from _gauges(pool)
    yield from _regions(node)
    yield from _counters(pool)
    yield from _fetches(node)
    yield from _namespaces(pool)
    if node.ssd:
        yield from _ssd(ssd_document(node.ssd))


def _gauges(pool: Pool) -> Iterator[Reading]:
    objects, allocator = pool.objects, pool.objects.allocator
    tier = ("dram",)
    yield Reading(CAPACITY, allocator.capacity_bytes, tier)
    yield Reading(USED, objects.used_bytes, tier)
    yield Reading(ALLOCATED, objects.allocated_bytes(), tier)
    yield Reading(LARGEST, allocator.largest_run(), tier)
    yield Reading(LEASED, objects.leased_bytes)
    flushed_keys, flushed_bytes = objects.in_limbo()
    yield Reading(FLUSHED, flushed_bytes - pool.scratch.used_bytes - pool.writes.blank_bytes - pool.levels.moving_bytes)
    yield Reading(MOVING, pool.levels.moving_bytes)
    yield Reading(SCRATCH, pool.scratch.used_bytes)
    yield Reading(SPARE, pool.writes.blank_bytes)
    yield Reading(KEYS, objects.counts[LIVE] - flushed_keys)
    yield Reading(KEYS_MAX, objects.capacity)
    yield Reading(HIDDEN, pool.being_written, ("being_written",))
    yield Reading(HIDDEN, objects.counts[ZOMBIE], ("removed_but_leased",))
    yield Reading(HIDDEN, objects.counts[ORPHAN], ("abandoned",))
    yield Reading(LEASES, len(pool.leases.leases))
    yield Reading(PINS, len(pool.leases.pins))
    yield Reading(RESERVATIONS, pool.writes.count)
    yield Reading(NAMESPACES, len(pool.namespaces))
    yield Reading(UNSUMMED, pool.unsummed_batches)


def _regions(node: Node) -> Iterator[Reading]:
    for region in region_documents(node):
        place = (str(region.numa_node), region.level)
        yield Reading(REGION, region.capacity_bytes, place)
        yield Reading(REGION_FREE, region.free_bytes, place)
        yield Reading(NEAR, region.near_pages, (*place, "yes"))
        yield Reading(NEAR, region.far_pages, (*place, "no"))
    for level in memory_level_documents(node):
        yield Reading(MEMORY_LEVEL, level.capacity_bytes, (level.name,))
        yield Reading(MEMORY_LEVEL_USED, level.used_bytes, (level.name,))
        for what in ("offloaded", "promoted", "spilled"):
            yield Reading(MEMORY_LEVEL_MOVED, getattr(level, f"{what}_keys"), (level.name, what))


def _counters(pool: Pool) -> Iterator[Reading]:
    counters = pool.counters
    yield Reading(STORED, pool.objects.stored_keys)
    yield Reading(EVICTED, pool.objects.evicted_keys)
    yield Reading(EVICTED_BYTES, pool.objects.evicted_bytes)
    yield Reading(REMOVED, counters.removed)
    yield Reading(CORRUPT, counters.corrupt)
    yield Reading(FLUSHES, counters.flushes)
    yield Reading(REQUESTS, counters.notes)
    yield Reading(UNHEEDED, counters.notes_dropped)
    yield Reading(LOOKUPS, counters.lookups)
    yield Reading(HITS, counters.hits)
    yield Reading(SUMS, counters.sums)
    yield Reading(LOST, pool.leases.lost)
    yield Reading(CLAIMED, pool.objects.claims.kept)
    yield Reading(EXPIRED, pool.writes.expired)


def _fetches(node: Node) -> Iterator[Reading]:
    fetching, shelf = node.fetching, node.shelf
    statistics = fetching.fetches.statistics()
    yield Reading(FETCHING, statistics.pages)
    yield Reading(FETCH_MERGED, statistics.merged)
    yield Reading(ERRANDS, node.errands.given)
    for name, (pages, size_bytes) in node.cluster.neighbours.reads_by_name.items():
        yield Reading(NEAR_PAGES, pages, (name,))
        yield Reading(NEAR_BYTES, size_bytes, (name,))
    yield Reading(GRANTED, shelf.granted_pages)
    yield Reading(STALE, shelf.stale_pages)
    for source, counts in fetching.counts.items():
        yield Reading(FETCHED, counts.pages, (source,))
        yield Reading(FETCHED_BYTES, counts.size_bytes, (source,))
        yield Reading(FETCH_FAILED, counts.missed, (source, "gone"))
        yield Reading(FETCH_FAILED, counts.failed, (source, "failed"))
        yield Reading(FETCH_FAILED, counts.refused, (source, "no_room"))


def _ssd(ssd: SsdDocument) -> Iterator[Reading]:
    yield Reading(CAPACITY, ssd.capacity_bytes, ("ssd",))
    yield Reading(USED, ssd.used_bytes, ("ssd",))
    yield Reading(SSD_KEYS, ssd.keys)
    yield Reading(SSD_WAITING, ssd.waiting)
    yield Reading(SSD_TODAY, ssd.written_today_bytes)
    yield Reading(SSD_CLEANED, ssd.cleaned_bytes)
    for what in ("stored", "evicted", "removed", "damaged", "unreadable", "not_admitted", "capped", "unwritten", "overtaken", "dropped"):
        yield Reading(SSD_PAGES, getattr(ssd, f"{what}_keys"), (what,))
    yield Reading(SSD_PAGES, ssd.hits, ("read",))
    yield Reading(SSD_PAGES, ssd.client_keys, ("read_by_client",))
    yield Reading(SSD_HELD, ssd.held_files)
    for level in ssd.levels:
        yield Reading(LEVEL, level.capacity_bytes, (level.name,))
        yield Reading(LEVEL_USED, level.used_bytes, (level.name,))
        for what in ("offloaded", "promoted", "spilled"):
            yield Reading(LEVEL_MOVED, getattr(level, f"{what}_keys"), (level.name, what))
    for disk in ssd.disks:
        path = (disk.path,)
        states = {state: disk.state == state for state in ("up", "reading", "away")}
        for state, holds in (states | {"stalled": disk.stalled, "full": disk.full}).items():
            yield Reading(DISK_STATE, float(holds), (disk.path, state))
        yield Reading(DISK_USED, disk.used_bytes, path)
        yield Reading(DISK_FILES, disk.file_bytes, path)
        yield Reading(DISK_READ, disk.read_bytes, path)
        yield Reading(DISK_WRITTEN, disk.written_bytes, path)
        yield Reading(DISK_ERRORS, disk.read_errors, (disk.path, "read"))
        yield Reading(DISK_ERRORS, disk.write_errors, (disk.path, "write"))


def _namespaces(pool: Pool) -> Iterator[Reading]:
    for row, state in pool.namespaces.items():
        if row >= NAMESPACE_ROWS_MAX:
            continue
        account, label = state.account, (str(row), short(state))
        yield Reading(NS_HELD, account.held_bytes, label)
        yield Reading(NS_KEYS, account.live_keys, label)
        yield Reading(NS_SSD, account.ssd_bytes, label)
        if account.quota_bytes:
            yield Reading(NS_QUOTA, account.quota_bytes, label)
        yield Reading(NS_STORED, account.stored_keys, label)
        yield Reading(NS_EVICTED, account.evicted_keys, label)
        yield Reading(NS_EVICTED_QUOTA, account.evicted_for_quota_keys, label)
        for code, count in account.refused.items():
            yield Reading(NS_REFUSED, count, (*label, code))
