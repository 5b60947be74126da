"""What REST answers about the pool as a whole, its node and its namespaces: one Struct each, and how it is filled from the state."""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from umbp.admin.api import Document
from umbp.admin.openapi import release
from umbp.core.guard import IN_ITS_PLACE, failed
from umbp.core.objects import LIVE, ORPHAN, ZOMBIE
from umbp.core.pool import NamespaceState, Pool
from umbp.master.documents import PolicyDocument
from umbp.policies.base import EVICTION, SSD_KINDS, names
from umbp.pool.neighbours import NeighbourDocument
from umbp.pool.node import Node, State
from umbp.pool.ssd import SsdSide
from umbp.store.ssd_drive import Drive

STATUS_NAMESPACES_MAX = 100  # the largest ones; /v1/namespaces has them all
SHORT_DIGEST_CHARS = 12


# -- health ------------------------------------------------------------------------------------------------------------------------


class Health(Document, frozen=True):
    """Whether this process should be left alone or replaced."""

    healthy: bool
    reasons: list[str]


class Readiness(Document, frozen=True):
    """Whether requests should be sent here, and what is not as it was asked for."""

    state: State
    ready: bool
    reasons: list[str]
    warnings: list[str]


class Identity(Document, frozen=True):
    """Which pool this is, and which life of it: what a master asks by the address that a node advertises."""

    name: str
    boot: int


class Links(Document, frozen=True):
    """Where to go from here."""

    name: str
    links: dict[str, str]


# -- namespaces --------------------------------------------------------------------------------------------------------------------


class NamespaceDocument(Document, frozen=True):
    """A namespace. ``row`` and any 8 or more digits of ``digest`` name it in paths; ``id`` is its label in metrics.

    ``held_bytes`` are the bytes of its objects in DRAM, those being written and those still leased after their removal included;
    ``ssd_bytes`` those on SSD. The quota holds for each of both.
    """

    row: int
    id: str
    digest: str
    identity: dict[str, Any]
    object_bytes: int
    quota_bytes: int
    held_bytes: int
    keys: int
    stored_keys: int
    evicted_keys: int
    evicted_for_quota_keys: int
    refused: dict[str, int]
    sessions: int
    ssd_bytes: int


class Namespaces(Document, frozen=True):
    """A part of all namespaces, by row."""

    total: int
    namespaces: list[NamespaceDocument]


class Flushed(Document, frozen=True):
    """``keys`` cannot be found any more; their memory comes back within a moment."""

    row: int
    keys: int


def short(state: NamespaceState) -> str:
    """First digits of the digest: short, the same over restarts, and no caller's text."""
    return state.digest.hex()[:SHORT_DIGEST_CHARS]


def namespace_document(state: NamespaceState) -> NamespaceDocument:
    account = state.account
    identity: dict[str, Any] = msgspec.json.decode(state.canonical)
    if identity.get("salt") is not None:
        identity["salt"] = "(set)"  # who knows the salt can ask for the tenant's pages
    return NamespaceDocument(
        row=account.row,
        id=short(state),
        digest=state.digest.hex(),
        identity=identity,
        object_bytes=account.object_bytes,
        quota_bytes=account.quota_bytes,
        held_bytes=account.held_bytes,
        keys=account.live_keys,
        stored_keys=account.stored_keys,
        evicted_keys=account.evicted_keys,
        evicted_for_quota_keys=account.evicted_for_quota_keys,
        refused=dict(account.refused),
        sessions=len(state.sessions),
        ssd_bytes=account.ssd_bytes,
    )


# -- the whole ---------------------------------------------------------------------------------------------------------------------


class Policies(Document, frozen=True):
    """All kinds of policies."""

    policies: list[PolicyDocument]


class Bounds(Document, frozen=True):
    """What the pool is limited to."""

    keys: int
    sessions: int
    namespaces: int
    leased_bytes: int
    lease_seconds: float
    lease_seconds_max: float
    reservation_seconds: float
    watermark_low: float
    watermark_high: float
    checksum: str


class Counts(Document, frozen=True):
    """Since this boot. ``hits`` of ``lookups`` are keys of the requests that clients noted."""

    stored_keys: int
    evicted_keys: int
    evicted_bytes: int
    removed_keys: int
    corrupt_keys: int
    flushes: int
    noted_requests: int
    lookups: int
    hits: int
    checksums: int
    leases_lost: int
    reservations_expired: int


class DiskDocument(Document, frozen=True):
    """One folder of the SSD tier. ``state``: up, reading (it cannot be written now), away; ``stalled``: it does not answer; ``full``: its
    file system has no room for all that it may take."""

    path: str
    level: str
    state: str
    stalled: bool
    full: bool
    fault: str
    limit_bytes: int
    file_bytes: int
    used_bytes: int
    keys: int
    direct: bool
    read_bytes: int
    written_bytes: int
    read_errors: int
    write_errors: int


class LevelDocument(Document, frozen=True):
    """A level of the SSD tier: pages ``offloaded`` to lower ones, ``promoted`` to the first one, ``spilled`` below for want of a file."""

    name: str
    capacity_bytes: int
    used_bytes: int
    keys: int
    offloading: bool
    offloaded_keys: int
    offloaded_bytes: int
    promoted_keys: int
    spilled_keys: int


class SsdDocument(Document, frozen=True):
    """The SSD tier. ``written_today_bytes`` of ``write_max_bytes`` (0: no cap); pages ``waiting`` to be written; counts since this boot.

    ``client_keys``, of the ``hits``, were read by clients themselves; ``held_files`` are those that they read from at the moment.
    """

    policy: str
    admission: str
    eviction: str
    capacity_bytes: int
    used_bytes: int
    keys: int
    keys_max: int
    written_today_bytes: int
    write_max_bytes: int
    waiting: int
    hits: int
    client_keys: int
    held_files: int
    stored_keys: int
    evicted_keys: int
    removed_keys: int
    damaged_keys: int
    unreadable_keys: int
    not_admitted_keys: int
    capped_keys: int
    unwritten_keys: int
    overtaken_keys: int
    dropped_keys: int
    cleaned_bytes: int
    found_keys: int
    orphans: int
    torn: int
    disks: list[DiskDocument]
    levels: list[LevelDocument]


def ssd_document(side: SsdSide) -> SsdDocument:
    tier, counters = side.tier, side.tier.counters
    return SsdDocument(
        policy=side.policy,
        admission=side.policies.names["ssd_admission"],
        eviction=side.policies.names["ssd_eviction"],
        capacity_bytes=tier.capacity_bytes,
        used_bytes=tier.used_bytes,
        keys=tier.catalog.count,
        keys_max=len(tier.catalog.table.entries),
        written_today_bytes=tier.ledger.today(),
        write_max_bytes=tier.ledger.day_bytes_max,
        waiting=side.queue.count,
        hits=counters.hits,
        client_keys=counters.by_clients,
        held_files=len(side.held),
        stored_keys=counters.stored,
        evicted_keys=counters.evicted,
        removed_keys=counters.removed,
        damaged_keys=counters.damaged,
        unreadable_keys=counters.unreadable,
        not_admitted_keys=side.not_admitted,
        capped_keys=counters.capped,
        unwritten_keys=side.queue.dropped,
        overtaken_keys=side.queue.overtaken,
        dropped_keys=counters.dropped,
        cleaned_bytes=counters.cleaned_bytes,
        found_keys=counters.found_pages,
        orphans=counters.orphans,
        torn=counters.torn,
        disks=[_disk_document(drive, side.now(), side.config.ssd_levels[drive.level]) for drive in tier.drives],
        levels=[
            LevelDocument(
                name=name,
                capacity_bytes=level.capacity_bytes,
                used_bytes=level.used_bytes,
                keys=level.keys,
                offloading=level.stop is not None,
                offloaded_keys=level.offloaded_pages,
                offloaded_bytes=level.offloaded_bytes,
                promoted_keys=level.promoted_pages,
                spilled_keys=level.spilled_pages,
            )
            for name, level in side.moving.named()
        ],
    )


def _disk_document(drive: Drive, now: float, level: str) -> DiskDocument:
    return DiskDocument(
        path=drive.path,
        level=level,
        state=drive.state,
        stalled=drive.stalled(now),
        full=drive.folder.cramped,
        fault=drive.fault,
        limit_bytes=drive.size_bytes,
        file_bytes=len(drive.folder.files) * drive.folder.segment_bytes,
        used_bytes=drive.folder.live_bytes,
        keys=drive.folder.live_pages,
        direct=drive.folder.direct,
        read_bytes=drive.read_bytes,
        written_bytes=drive.written_bytes,
        read_errors=drive.read_errors,
        write_errors=drive.write_errors,
    )


class RegionDocument(Document, frozen=True):
    """A part of the memory on one NUMA node. ``sessions`` are near it; of the pages they wrote ``near_pages`` are there, the others not."""

    numa_node: int
    level: str
    capacity_bytes: int
    free_bytes: int
    sessions: int
    near_pages: int
    far_pages: int


class MemoryLevelDocument(Document, frozen=True):
    """A level of the memory: pages ``offloaded`` to lower ones, ``promoted`` to the first one, ``spilled`` below for want of room."""

    name: str
    capacity_bytes: int
    used_bytes: int
    offloading: bool
    offloaded_keys: int
    offloaded_bytes: int
    promoted_keys: int
    spilled_keys: int


class Status(Document, frozen=True):
    """All about this pool at one moment. Objects ``removed_but_leased`` and ``abandoned`` keep their memory though nobody finds them."""

    name: str
    version: str
    boot: int
    state: State
    uptime_seconds: float
    socket: str
    http: str
    unhealthy: list[str]
    warnings: list[str]
    dram_bytes: int
    capacity_bytes: int
    used_bytes: int
    allocated_bytes: int
    free_bytes: int
    free_runs: int
    largest_free_run_bytes: int
    leased_bytes: int
    keys: int
    evictable_keys: int
    being_written: int
    removed_but_leased: int
    abandoned: int
    unsummed_batches: int
    sessions: int
    leases: int
    reservations: int
    pins: int
    limits: Bounds
    counters: Counts
    eviction: str
    admission: str
    namespaces_total: int
    namespaces: list[NamespaceDocument]
    ssd: SsdDocument | None
    regions: list[RegionDocument]
    levels: list[MemoryLevelDocument]
    neighbours: list[NeighbourDocument]


def status_document(node: Node) -> Status:
    """What ``/v1/status`` says, also for a session that asks."""
    pool = node.pool
    objects, space = pool.objects, pool.objects.allocator.statistics()
    largest = heapq.nlargest(STATUS_NAMESPACES_MAX, pool.namespaces.values(), key=lambda state: state.account.held_bytes)
    return Status(
        name=node.name,
        version=release(),
        boot=node.boot,
        state=node.state,
        uptime_seconds=max(0.0, node.now() - node.started),
        socket=node.socket,
        http=str(node.http),
        unhealthy=list(node.unhealthy),
        warnings=list(node.warnings),
        dram_bytes=node.dram_bytes,
        capacity_bytes=space.capacity_bytes,
        used_bytes=objects.used_bytes,
        allocated_bytes=objects.allocated_bytes(),
        free_bytes=space.free_bytes,
        free_runs=space.free_runs,
        largest_free_run_bytes=space.largest_run_bytes,
        leased_bytes=objects.leased_bytes,
        keys=objects.counts[LIVE] - objects.in_limbo()[0],
        evictable_keys=objects.evictable,
        being_written=pool.being_written,
        removed_but_leased=objects.counts[ZOMBIE],
        abandoned=objects.counts[ORPHAN],
        unsummed_batches=pool.unsummed_batches,
        sessions=len(node.sessions()),
        leases=len(pool.leases.leases),
        reservations=pool.writes.count,
        pins=len(pool.leases.pins),
        limits=_bounds(node),
        counters=_counts(pool),
        eviction=pool.eviction,
        admission=pool.admission_name,
        namespaces_total=len(pool.namespaces),
        namespaces=[namespace_document(state) for state in largest],
        ssd=ssd_document(node.ssd) if node.ssd else None,
        regions=region_documents(node),
        levels=memory_level_documents(node),
        neighbours=node.cluster.neighbours.documents(),
    )


def region_documents(node: Node) -> list[RegionDocument]:
    """The parts of the memory that lie on a NUMA node each; none where they were not asked for."""
    allocator, room = node.pool.objects.allocator, node.pool.room
    near = list(room.near.values())
    return [
        RegionDocument(
            numa_node=part.node,
            level=part.level,
            capacity_bytes=allocator.sizes[at],
            free_bytes=allocator.free_by_region[at],
            sessions=near.count(at),
            near_pages=room.near_pages[at],
            far_pages=room.far_pages[at],
        )
        for at, part in enumerate(node.config.numa.parts)
    ]


def memory_level_documents(node: Node) -> list[MemoryLevelDocument]:
    """The levels of the memory, first to last; none where there is but one."""
    return [
        MemoryLevelDocument(
            name=name,
            capacity_bytes=node.moving.levels.capacity_bytes(at),
            used_bytes=node.moving.levels.used_bytes(at),
            offloading=level.stop is not None,
            offloaded_keys=level.offloaded_pages,
            offloaded_bytes=level.offloaded_bytes,
            promoted_keys=level.promoted_pages,
            spilled_keys=level.spilled_pages,
        )
        for name, at, level in node.moving.named()
    ]


def _bounds(node: Node) -> Bounds:
    pool, limits = node.pool, node.pool.limits
    return Bounds(
        keys=pool.objects.capacity,
        sessions=node.config.sessions_max,
        namespaces=len(pool.rows),
        leased_bytes=pool.leases.bytes_max,
        lease_seconds=limits.lease_seconds,
        lease_seconds_max=limits.lease_seconds_max,
        reservation_seconds=limits.reservation_seconds,
        watermark_low=limits.watermark_low,
        watermark_high=limits.watermark_high,
        checksum=limits.checksum,
    )


def _counts(pool: Pool) -> Counts:
    counters = pool.counters
    return Counts(
        stored_keys=pool.objects.stored_keys,
        evicted_keys=pool.objects.evicted_keys,
        evicted_bytes=pool.objects.evicted_bytes,
        removed_keys=counters.removed,
        corrupt_keys=counters.corrupt,
        flushes=counters.flushes,
        noted_requests=counters.notes,
        lookups=counters.lookups,
        hits=counters.hits,
        checksums=counters.sums,
        leases_lost=pool.leases.lost,
        reservations_expired=pool.writes.expired,
    )


def policy_document(pool: Pool, ssd: SsdSide | None, kind: str) -> PolicyDocument:
    policy: object  # or what took its place
    if ssd and kind in SSD_KINDS:
        current, kind_of = ssd.policies.names[kind], SSD_KINDS[kind]
        policy = getattr(ssd.policies, kind_of)
    elif kind == EVICTION:
        current, kind_of, policy = pool.eviction, kind, pool.objects.policy
    else:
        current, kind_of, policy = pool.admission_name, kind, pool.admission
    return PolicyDocument(kind=kind, current=IN_ITS_PLACE[kind_of] if failed(policy) else current, available=names(kind_of))
