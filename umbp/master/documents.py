"""What the master's REST answers: one Struct each, and how it is filled from the state."""

from __future__ import annotations

from math import inf

import numpy as np

from umbp.admin.api import Document
from umbp.core.engines import Engine
from umbp.core.master import Happening, Master
from umbp.core.membership import ALIVE, DEAD, DRAINING, SUSPECT, Member
from umbp.core.plans import Plan
from umbp.core.targets import Target
from umbp.policies.base import CLUSTER_KINDS, names
from umbp.types import F64, I64, Tier

PREFIX_DROP = 0.5  # a prefix ends where its continuation is asked for less than half as often

# -- nodes -------------------------------------------------------------------------------------------------------------------------


class TierDocument(Document, frozen=True):
    """One tier of a node, as it last said."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    keys: int


class NodeDocument(Document, frozen=True):
    """A node. ``source``: others fetch from it now; where not, ``why`` says so. ``synced``: all it holds is known."""

    id: str
    state: str
    boot: int
    draining: bool
    addresses: dict[str, str]
    tiers: list[TierDocument]
    joined_seconds: float
    silent_seconds: float
    synced: bool
    source: bool
    why: str
    engines: list[str]
    tags: dict[str, str]


class Nodes(Document, frozen=True):
    """A part of all nodes, by name."""

    total: int
    nodes: list[NodeDocument]


class Cluster(Document, frozen=True):
    """Sums over the nodes that live, and the master itself. ``keys`` are distinct ones, ``left_out`` did not fit into its directory."""

    master: int
    masters: list[str]
    uptime_seconds: float
    nodes: int
    alive: int
    suspect: int
    draining: int
    dead: int
    engines: int
    tiers: list[TierDocument]
    keys: int
    keys_max: int
    left_out: int
    namespaces: int
    policies: dict[str, str]
    counters: dict[str, int]
    advice: dict[str, int]


def node_document(master: Master, member: Member, now: float) -> NodeDocument:
    usable = member.usable(now)
    why = member.state if member.state == DEAD else member.unreachable
    if not usable and not why:
        why = f"avoided: {member.failed_by} could not fetch from it" if now < member.avoid_until else member.state
    return NodeDocument(
        id=member.node,
        state=member.state,
        boot=member.boot,
        draining=member.draining,
        addresses=member.addresses,
        tiers=_tiers([member]),
        joined_seconds=max(0.0, now - member.joined_at),
        silent_seconds=max(0.0, now - member.last_seen),
        synced=member.synced,
        source=usable,
        why="" if usable else why,
        engines=[engine.name for engine in master.engines.engines.values() if engine.node == member.node],
        tags=member.tags,
    )


def _tiers(members: list[Member]) -> list[TierDocument]:
    sums: dict[int, list[int]] = {}
    for member in members:
        for tier, (capacity, used) in member.tiers.items():
            total = sums.setdefault(tier, [0, 0, 0])
            for at, value in enumerate((capacity, used, member.keys.get(tier, 0))):
                total[at] += value
    return [
        TierDocument(tier=Tier(tier).name.lower(), capacity_bytes=total[0], used_bytes=total[1], keys=total[2])
        for tier, total in sorted(sums.items())
    ]


def cluster_document(master: Master, now: float, masters: list[str]) -> Cluster:
    members = list(master.membership.members.values())
    states = [member.state for member in members]
    counts = master.counts
    return Cluster(
        master=master.boot,
        masters=masters,
        uptime_seconds=max(0.0, now - master.started),
        nodes=len(members),
        alive=states.count(ALIVE),
        suspect=states.count(SUSPECT),
        draining=states.count(DRAINING),
        dead=states.count(DEAD),
        engines=len(master.engines.engines),
        tiers=_tiers([member for member in members if member.state != DEAD]),
        keys=len(master.directory),
        keys_max=master.directory.keys_max,
        left_out=master.directory.left_out,
        namespaces=len(master.directory.digests),
        policies=dict(master.choices.names),
        counters={name: getattr(counts, name) for name in type(counts).__slots__},
        advice=dict(master.advisor.ledger.counts),
    )


# -- keys --------------------------------------------------------------------------------------------------------------------------


class Location(Document, frozen=True):
    """One copy: of a pool, or of an engine's own cache."""

    node: str
    engine: str
    tier: str
    state: str


class KeyDocument(Document, frozen=True):
    """A key as the cluster knows it. ``heat``: accesses, decayed; ``idle_seconds`` null: never asked for by a route."""

    namespace: str
    key: str
    bytes: int
    locations: list[Location]
    accesses: int
    heat: float
    idle_seconds: float | None
    age_seconds: float


class Keys(Document, frozen=True):
    """Several keys, or one in several namespaces."""

    keys: list[KeyDocument]


class PrefixDocument(Document, frozen=True):
    """A prefix that is asked for as a whole: its last page, how many pages it has, and how hot it is."""

    namespace: str
    key: str
    pages: int
    bytes: int
    heat: float


class Hot(Document, frozen=True):
    """What is asked for most."""

    keys: list[KeyDocument]
    prefixes: list[PrefixDocument]


def key_documents(master: Master, rows: I64, now: float) -> list[KeyDocument]:
    """About rows of the directory, in this order; those that nobody holds are left out."""
    directory = master.directory
    if not len(rows):
        return []
    keys, spaces = directory.keys(rows)
    use = directory.use(now, rows)
    places = directory.locations(rows)
    by_item: dict[int, list[Location]] = {}
    for item, holder, bits in zip(places.item.tolist(), places.holder.tolist(), places.tiers.tolist(), strict=True):
        by_item.setdefault(item, []).extend(_locations(master, holder, bits))
    return [
        KeyDocument(
            namespace=directory.digests[spaces[at]].hex(),
            key=bytes(keys[at]).hex(),
            bytes=directory.object_bytes[spaces[at]],
            locations=sorted(by_item[at], key=lambda place: (place.node, place.engine, place.tier)),
            accesses=int(use.accesses[at]),
            heat=float(use.heat[at]),
            idle_seconds=float(use.idle_seconds[at]) if use.idle_seconds[at] < inf else None,
            age_seconds=float(use.age_seconds[at]),
        )
        for at in range(len(rows))
        if by_item.get(at)
    ]


def _locations(master: Master, holder: int, bits: int) -> list[Location]:
    member = master.membership.by_holder.get(holder)
    if member is not None:
        tiers = [tier for tier in Tier if bits >> tier & 1]
        return [Location(node=member.node, engine="", tier=tier.name.lower(), state=member.state) for tier in tiers]
    of = master.engines.by_holder.get(holder)
    if of is None:
        return []
    engine, tier = of
    state = master.membership.members[engine.node].state if engine.node in master.membership.members else DEAD
    return [Location(node=engine.node, engine=engine.name, tier=tier.name.lower(), state=state)]


def prefix_documents(master: Master, rows: I64, heat: F64, n: int) -> list[PrefixDocument]:
    """The ends of hot prefixes among these rows, which are the hottest of all, the hottest first."""
    directory = master.directory
    if not len(rows):
        return []
    heat_of = dict(zip(rows.tolist(), heat.tolist(), strict=True))
    ends = np.array(prefix_ends(master, rows, heat, n), np.int64)
    keys, spaces = directory.keys(ends)
    depth, _ = directory.depth_and_parent(ends)
    found = []
    for at, row in enumerate(ends.tolist()):
        size = directory.object_bytes[spaces[at]]
        pages = int(depth[at])
        found.append(
            PrefixDocument(
                namespace=directory.digests[spaces[at]].hex(),
                key=bytes(keys[at]).hex(),
                pages=pages,
                bytes=pages * size,
                heat=heat_of[row],
            )
        )
    return found


def prefix_ends(master: Master, rows: I64, heat: F64, n: int) -> list[int]:
    """Those of these rows, which are the hottest of all, whose continuation is asked for less than half as often; n at most."""
    depth, parent = master.directory.depth_and_parent(rows)
    child_heat: dict[int, float] = {}
    for above, value in zip(parent.tolist(), heat.tolist(), strict=True):
        child_heat[above] = max(child_heat.get(above, 0.0), value)
    every = zip(rows.tolist(), depth.tolist(), heat.tolist(), strict=True)
    return [row for row, deep, value in every if deep > 0 and child_heat.get(row, 0.0) < PREFIX_DROP * value][:n]


# -- routes ------------------------------------------------------------------------------------------------------------------------


class RunDocument(Document, frozen=True):
    """Pages ``[start, stop)`` from a node's tier, there after ``seconds``."""

    start: int
    stop: int
    node: str
    tier: str
    seconds: float


class TargetDocument(Document, frozen=True):
    """What sending the prompt to this engine (or node without one) would mean. Pages by where they come from; times in seconds.

    ``compute_seconds`` and ``seconds`` are null where no prefill rate was given and something is to be computed.
    """

    engine: str
    node: str
    hbm_pages: int
    host_pages: int
    pool_pages: int
    remote_pages: int
    missing_pages: int
    fetch_seconds: float
    compute_seconds: float | None
    seconds: float | None


class RouteDocument(Document, frozen=True):
    """Where the leading ``pages`` of ``asked`` come from for the requester; ``recompute`` where computing some that are held is faster.

    ``targets``: who should take the prompt, the best first.
    """

    asked: int
    held: int
    pages: int
    seconds: float
    recompute_seconds: float | None
    recompute: bool
    runs: list[RunDocument]
    targets: list[TargetDocument]


class PlaceDocument(Document, frozen=True):
    """The node for each page, in order; "" where none has room. ``exists``: that node has it already, and nothing needs to be put."""

    nodes: list[str]
    exists: list[bool]


def route_document(plan: Plan, asked: int, found: list[Target]) -> RouteDocument:
    return RouteDocument(
        asked=asked,
        held=plan.held,
        pages=plan.pages,
        seconds=plan.seconds,
        recompute_seconds=plan.recompute_seconds if plan.recompute_seconds < inf else None,
        recompute=plan.recompute,
        runs=[
            RunDocument(start=run.start, stop=run.stop, node=run.source.node, tier=run.tier.name.lower(), seconds=run.seconds)
            for run in plan.runs
        ],
        targets=[_target(target) for target in found],
    )


def _target(target: Target) -> TargetDocument:
    known = target.compute_seconds < inf
    return TargetDocument(
        engine=target.engine,
        node=target.node,
        hbm_pages=target.hbm,
        host_pages=target.host,
        pool_pages=target.pool,
        remote_pages=target.remote,
        missing_pages=target.missing,
        fetch_seconds=target.fetch_seconds,
        compute_seconds=target.compute_seconds if known else None,
        seconds=target.seconds if known else None,
    )


# -- engines, policies, events -----------------------------------------------------------------------------------------------------


class EngineDocument(Document, frozen=True):
    """An engine that reports its own caches."""

    engine: str
    node: str
    hbm_keys: int
    host_keys: int
    reported_seconds: float


class Engines(Document, frozen=True):
    """A part of all engines, by name."""

    total: int
    engines: list[EngineDocument]


class Reported(Document, frozen=True):
    """How many of the keys were news; with ``cleared`` how many keys went."""

    keys: int


class PolicyDocument(Document, frozen=True):
    """The policy of one kind, and which could be chosen."""

    kind: str
    current: str
    available: list[str]


class Policies(Document, frozen=True):
    """All kinds of the master's policies."""

    policies: list[PolicyDocument]


class EventDocument(Document, frozen=True):
    """Something that happened, ``age_seconds`` ago."""

    number: int
    age_seconds: float
    kind: str
    node: str
    text: str


class LinkDocument(Document, frozen=True):
    """What fetches from a source's tier cost a requester ("" for all of them), and after how many fetches that is known."""

    source: str
    tier: str
    requester: str
    latency_seconds: float
    bytes_per_second: float
    fetches: int


class Links(Document, frozen=True):
    """A part of all measured links."""

    total: int
    links: list[LinkDocument]


def engine_document(engine: Engine, now: float) -> EngineDocument:
    return EngineDocument(
        engine=engine.name,
        node=engine.node,
        hbm_keys=engine.keys.get(Tier.HBM, 0),
        host_keys=engine.keys.get(Tier.HOST, 0),
        reported_seconds=max(0.0, now - engine.reported_at),
    )


def policy_document(master: Master, kind: str) -> PolicyDocument:
    return PolicyDocument(kind=kind, current=master.choices.names[kind], available=names(kind))


def policies_document(master: Master) -> Policies:
    return Policies(policies=[policy_document(master, kind) for kind in CLUSTER_KINDS])


def event_document(happening: Happening, now: float) -> EventDocument:
    age = max(0.0, now - happening.at)
    return EventDocument(number=happening.number, age_seconds=age, kind=happening.kind, node=happening.node, text=happening.text)


def links_document(master: Master, offset: int, limit: int) -> Links:
    every = master.costs.links()
    return Links(
        total=len(every),
        links=[
            LinkDocument(
                source=source,
                tier=Tier(tier).name.lower(),
                requester=who,
                latency_seconds=cost.latency_seconds,
                bytes_per_second=cost.bytes_per_second,
                fetches=fetches,
            )
            for source, tier, who, cost, fetches in every[offset : offset + limit]
        ],
    )
