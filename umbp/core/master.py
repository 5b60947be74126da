"""The master's state machine: every message of a pool, every question, and the passing of time, as one synchronous call each.

Theory of operation
-------------------
The master knows, it does not own: pools say what they hold (`directory`), that they live (`membership`) and what fetching cost (`costs`),
and all of that can be lost and said again. It answers who serves a prefix (`planner`), where new pages go (`placement`), and advises
(`advisor`). The shell (`umbp.master`, or a pool that has no other master) calls one method per message with the time; nothing waits here.

What a node holds comes in numbered bundles. `expects` says what to do with one: apply it, acknowledge it again (a retry of what was
applied), or ask for a resync (one is missing). A bundle is applied in slices, between which the shell lets questions in, and slices of
several nodes at once; a node sends one thing at a time, so no two bundles of one node are interleaved. A resync comes in pieces between
the bundles, and the directory is believed for old and new meanwhile: routing is never worse than before, and never waits.

A dead node: its keys stop counting at once, with one store, and are swept a slice a tick. A node that was wrongly taken for dead is told so
(`UnknownNode`) by the next thing it says, registers again and sends all. Recovery takes one heartbeat and the resync.

What it costs: a route of 2,200 keys 1 ms, an event 0.3 us, a tick below 2 ms whatever happens.

Beyond one master. Keys are digests, so the top bits of a key's first word say which of S masters has it. Pools split bundles and resyncs by
them, each part with a numbering of its own; everybody joins and beats at every master, which is little; a question goes to the masters of
its keys, and whoever was asked joins what they answer and plans. The seam is `directory.locations`: all that is asked of the directory
before a plan is the places of each key, all below `Planner.columns` takes those and no directory, and uses are counted where the key is.
The test of it is `test_a_directory_cut_by_key_answers_as_a_whole_one`; `scripts/bench/scale.py` says when it is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from umbp.core.advice import Ledger
from umbp.core.advisor import Advisor
from umbp.core.choices import Choices
from umbp.core.costs import Costs
from umbp.core.directory import Directory
from umbp.core.engines import Engines
from umbp.core.membership import DEAD, Changed, Member, Membership, Timing
from umbp.core.placement import Placement
from umbp.core.planner import Columns, Planner
from umbp.core.plans import NOTHING, Plan
from umbp.core.sweeps import Sweep, Verdict
from umbp.core.uses import Uses
from umbp.errors import NotFound
from umbp.policies.base import ROUTING
from umbp.policies.cluster import RouteView
from umbp.types import F64, I64, U8, U32, U64, Tier

SLICE = 1024  # keys of an engine's report applied in one go: about 0.5 ms
SWEEP_ROWS = 8192  # looked at in a tick, while there is something to sweep: about 1 ms at the worst
HAPPENINGS_MAX = 1024
_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that an operator may want to know. ``number`` counts up from 1."""

    number: int
    at: float
    kind: str
    node: str
    text: str


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of a bundle: keys that a node has in these tiers from now on, or not any more. ``fresh``: it is no part of a resync.

    ``words`` (n, 4); ``spaces``, ``tiers``, ``present`` (n,).
    """

    member: Member
    words: U64
    spaces: U32
    tiers: U8
    present: U8
    fresh: bool = True

    def sliced(self, start: int, stop: int) -> Part:
        """Some of it."""
        which = slice(start, stop)
        return Part(self.member, self.words[which], self.spaces[which], self.tiers[which], self.present[which], self.fresh)


@dataclass(frozen=True, slots=True)
class Placed:
    """The node for each of m pages, "" where none has room; ``exists``: it is there already."""

    nodes: list[str]
    exists: list[bool]


@dataclass(slots=True)
class Counts:
    """Since this boot."""

    events: int = 0
    bundles: int = 0
    gaps: int = 0
    pieces: int = 0
    torn: int = 0
    resyncs: int = 0
    routes: int = 0
    routed_pages: int = 0
    asked_pages: int = 0
    placed_pages: int = 0
    judged_pages: int = 0
    joins: int = 0
    deaths: int = 0


class Master:
    """One master. ``boot`` tells this life from the one before; ``seed`` keeps strangers from choosing collisions."""

    def __init__(
        self,
        now: float,
        *,
        boot: int,
        seed: int,
        keys_max: int,
        timing: Timing | None = None,
        policies: Mapping[str, str] | None = None,
        advice_bytes_per_second: float = 0.0,
    ) -> None:
        self.boot = boot
        self.started = now
        self.timing = timing or Timing()
        self.directory = Directory(keys_max, seed, now)
        self.membership = Membership(self.timing, now)
        self.engines = Engines(self.directory)
        self.costs = Costs()
        self.choices = Choices(dict(policies or {}))
        self.planner = Planner(self.membership, self.costs, self.choices)
        self.placement = Placement(self.membership, self.choices, now)
        ledger = Ledger(advice_bytes_per_second, boot)
        self.advisor = Advisor(self.directory, self.membership, self.choices, self.placement, ledger)
        self.uses: Uses | None = None  # where other masters want to know
        self.happenings: deque[Happening] = deque(maxlen=HAPPENINGS_MAX)
        self.counts = Counts()
        self._happened = 0

    def __repr__(self) -> str:
        return f"<Master {self.membership!r}, {self.directory!r}>"

    # -- members -----------------------------------------------------------------------------------------------------------------------

    def join(
        self,
        now: float,
        node: str,
        boot: int,
        place: str,
        addresses: dict[str, str],
        tiers: dict[int, tuple[int, int]],
        *,
        draining: bool = False,
        registration: int = 0,
        tags: Mapping[str, str] | None = None,
    ) -> Member:
        """A pool registers. Conflict if another live one has its name.

        ``registration``: the number that masters with a shared store have given it, who have asked `can_join` before.
        """
        if not registration:
            self.membership.can_join(now, node, boot, place)
        holder = self.directory.holders.take()
        member, before = self.membership.join(now, node, boot, place, addresses, holder, draining=draining, registration=registration)
        member.tiers, member.tags = dict(tiers), dict(tags or {})
        if before is not None and before.state != DEAD:
            self.directory.drop(before.holder)
            if before.boot != boot:
                self._forget(node)
        self.counts.joins += 1
        self._happens(now, "joined", node, f"boot {boot}" + (", draining" if member.draining else ""))
        return member

    def beat(
        self,
        now: float,
        node: str,
        registration: int,
        tiers: dict[int, tuple[int, int]],
        held: list[int] | None = None,
        done: list[int] | None = None,
    ) -> Member:
        """A pool lives. ``held``, ``done``: numbers of advice. UnknownNode: it must register again."""
        member = self.membership.member(node, registration)
        self.placement.beat(member)
        self._changed(now, self.membership.beat(now, member))
        member.tiers = dict(tiers)
        ledger = self.advisor.ledger
        for number in held or ():
            ledger.held(now, node, number)
        for number in done or ():
            ledger.done(node, number)
        return member

    def leave(self, now: float, node: str, registration: int) -> None:
        """A pool stops; its keys are gone."""
        self._changed(now, self.membership.leave(self.membership.member(node, registration)))

    def drain(self, now: float, node: str, *, on: bool) -> Member:
        """An operator wants nothing new there, or does again."""
        self._changed(now, self.membership.drain(node, on=on))
        return self.membership.find(node)

    def failed(self, now: float, node: str, by: str, why: str) -> Member:
        """A fetch from the node did not work for ``by``."""
        self._changed(now, self.membership.failed(now, node, by, why))
        return self.membership.find(node)

    def reached(self, now: float, member: Member, why: str) -> None:
        """This master looked whether the node answers by its address as the node that it is; ``why`` is "" where it does."""
        if member.unreachable != why:
            member.unreachable = why
            self._happens(now, "unreachable" if why else "reachable", member.node, why or "it answers by its address")

    # -- what they hold ----------------------------------------------------------------------------------------------------------------

    def spaces(self, spaces: list[tuple[bytes, int, int]]) -> U32:
        """Namespace numbers of keys that come as (digest, object bytes, how many) runs; (n,) uint32."""
        numbers = [self.directory.space(digest, object_bytes) for digest, object_bytes, _ in spaces]
        return np.repeat(np.array(numbers, np.uint32), [count for _, _, count in spaces])

    def expects(self, now: float, node: str, registration: int, number: int) -> tuple[Member, Verdict]:
        """What to do with a bundle of this number. Who sends one lives."""
        member = self.membership.member(node, registration)
        member.last_seen = now
        if number <= member.acknowledged:
            return member, "again"
        if number != member.acknowledged + 1:
            member.wants_resync = True
            self.counts.gaps += 1
            return member, "gap"
        return member, "apply"

    def apply(self, now: float, *parts: Part) -> None:
        """Slices of bundles, of as many nodes as there are."""
        words, spaces = np.concatenate([part.words for part in parts]), np.concatenate([part.spaces for part in parts])
        holders = np.repeat(np.array([part.member.holder for part in parts], np.uint32), [len(part.words) for part in parts])
        tiers, present = np.concatenate([part.tiers for part in parts]), np.concatenate([part.present for part in parts]) != 0
        self.directory.change(now, words, spaces, holders, tiers, present)
        if self.advisor.places_arrivals:
            for part in parts:
                if part.fresh:
                    came = (part.present != 0) & (part.tiers == Tier.DRAM)
                    self.advisor.arrived(part.member.node, self.directory.table.find(part.words[came], part.spaces[came]))
        self.counts.events += len(words)

    def applied(self, member: Member, number: int) -> None:
        """All of the bundle is applied."""
        assert number == member.acknowledged + 1, (number, member.acknowledged)
        member.acknowledged = number
        self.counts.bundles += 1

    def expects_piece(
        self, now: float, node: str, registration: int, sweep: int, index: int, bundle: int, total: int, content: int
    ) -> tuple[Member, Verdict]:
        """What to do with a piece of a resync (`umbp.core.sweeps`); the first one begins it.

        ``bundle`` is the last one told before this piece; ``total`` the sum that the pool says; ``content`` that of what came.
        """
        member = self.membership.member(node, registration)
        member.last_seen = now
        if member.sweep.begins(sweep, index):
            if not self.directory.begin(member.holder):
                self._new_holder(member)
            member.sweep, member.wants_resync = Sweep(sweep, over=False), False
            member.acknowledged = bundle
            self._happens(now, "resync", node, "it sends all that it holds")
        verdict = member.sweep.expects(sweep, index, total, content)
        if verdict != "again" and bundle != member.acknowledged:
            verdict = "lost"
        if verdict == "lost":
            member.wants_resync = True
        self.counts.torn += verdict == "torn"
        return member, verdict

    def piece_applied(self, now: float, member: Member, total: int, *, last: bool) -> None:
        """All of the piece is applied; after the last one only what was said since the first one counts."""
        member.sweep.applied(total, last=last)
        self.counts.pieces += 1
        if last:
            self.directory.settle(member.holder)
            member.synced = True
            self.counts.resyncs += 1
            self._happens(now, "synced", member.node, f"{member.sweep.pieces} pieces")

    def external(
        self, now: float, engine: str, node: str, digest: bytes, tier: Tier, words: U64, *, present: bool, object_bytes: int = 0
    ) -> int:
        """An engine on this node has these keys in a cache of its own, or not any more; how many were news."""
        member = self.membership.find(node)
        if member.state == DEAD:
            raise NotFound(f"the node {node!r} is dead", field="node")
        spaces = np.full(len(words), self.directory.space(digest, object_bytes), np.uint32)
        return self.engines.report(now, engine, node, tier, words, spaces, present=present)

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def judge(self, node: str, registration: int, now: float, words: U64, spaces: U32) -> I64:
        """The cluster's word on what a nearly full pool is about to let go: `umbp.policies.cluster.KEEP`, `GO` or 0 for each key."""
        self.membership.member(node, registration)
        self.counts.judged_pages += len(words)
        return self.advisor.judge(now, self.directory.table.find(words, spaces))

    def route(
        self,
        now: float,
        digest: bytes,
        words: U64,
        requester: str,
        draws: F64,
        *,
        prefill: float = 0.0,
        page_tokens: int = 64,
        count: bool = True,
        again: bool = False,
        moves: bool = True,
        exclude: frozenset[str] = frozenset(),
        policy: str = "",
    ) -> Plan:
        """Who serves these keys, root first, to this node. ``policy`` asks another one what it would choose, without any effect.

        ``count``: a load follows; ``again``: the use was counted with the question before; ``moves``: pages will be on their way.
        """
        asked = self._columns(now, digest, words, requester, exclude)
        if asked is None:
            return NOTHING
        rows, columns, page_bytes = asked
        view = self.planner.view(now, columns, requester, page_bytes, draws)
        choice = self.choices.preview(ROUTING, policy, view) if policy else self.choices.route(view)
        plan = self.planner.plan(view, columns, choice, page_seconds=page_tokens / prefill if prefill > 0 else inf)
        if count and not policy:
            if not again:
                self._count_use(now, digest, words, np.where(columns.held.any(1), rows, -1), requester, float(draws[0]))
            if moves:
                self.planner.occupy(now, plan, requester, page_bytes)
            self.counts.routes += 1
            self.counts.asked_pages += len(words)
            self.counts.routed_pages += plan.pages
        return plan

    def _count_use(self, now: float, digest: bytes, words: U64, asked_for: I64, requester: str, draw: float) -> None:
        """``asked_for``: rows, -1 for what nobody can serve now, which is not used; nor is what the requester was advised to copy."""
        ledger = self.advisor.ledger
        if requester in ledger.by_node:
            asked_for[ledger.brings(requester, asked_for)] = -1
        self.directory.touch(now, asked_for)
        if self.uses is not None and draw < self.uses.share:
            self.uses.asked(digest, np.where(asked_for[:, None] < 0, np.uint64(0), words), draw)

    def used(self, now: float, digest: bytes, words: U64, weight: float) -> None:
        """Another master was asked for these keys, root first, so many times."""
        if (space := self.directory.space_or_none(digest)) is not None:
            self.directory.touch(now, self.directory.find(words, space), weight)

    def locate(self, now: float, digest: bytes, words: U64) -> tuple[U8, U8]:
        """How many live nodes and engines hold each key (255 at most), and in which tiers (bit t). No side effects."""
        copies, tiers = np.zeros(len(words), np.uint8), np.zeros(len(words), np.uint8)
        space = self.directory.space_or_none(digest)
        if space is None:
            return copies, tiers
        places = self.directory.locations(self.directory.find(words, space))
        holders = np.bincount(places.holder) > 0
        for holder in np.flatnonzero(holders).tolist():
            holders[holder] = self.usable(now, holder)
        good = np.flatnonzero(holders[places.holder])
        item, bits = places.item[good], places.tiers[good]
        for tier in Tier:
            tiers[item[bits >> tier & 1 == 1]] |= 1 << tier
        return np.minimum(np.bincount(item, minlength=len(words)), 255).astype(np.uint8), tiers

    def usable(self, now: float, holder: int) -> bool:
        """Whether what it holds can be had now: of a pool that is well, or of an engine on a node that is not dead."""
        member = self.membership.by_holder.get(holder)
        if member is not None:
            return member.usable(now)
        engine = self.engines.by_holder.get(holder)
        return engine is not None and self.node_lives(engine[0].node)

    def node_lives(self, node: str) -> bool:
        """Whether this node is a member that is not dead."""
        member = self.membership.members.get(node)
        return member is not None and member.state != DEAD

    def place(self, now: float, digest: bytes, words: U64, requester: str, page_bytes: int, draws: F64, *, policy: str = "") -> Placed:
        """The node for each page. ``policy`` asks another one, without any effect. What is there already needs no place, and no bytes."""
        space = self.directory.space_or_none(digest)
        size = page_bytes or (self.directory.object_bytes[space] if space is not None else 0)
        nodes = self._who_has(now, space, words, requester)
        new = np.array([at for at, node in enumerate(nodes) if not node], np.int64)
        exists = [bool(node) for node in nodes]
        if policy:
            chosen = self.placement.preview(policy, now, words[new], size, requester, draws[new])
        else:
            self.counts.placed_pages += len(new)
            chosen = self.placement.place(now, words[new], size, requester, draws[new])
        for at, node in zip(new.tolist(), chosen, strict=True):
            nodes[at] = node
        return Placed(nodes, exists)

    def _who_has(self, now: float, space: int | None, words: U64, requester: str) -> list[str]:
        """For each key a node that has it now, the requester's own first, "" where none does."""
        nodes = [""] * len(words)
        if space is not None:
            places = self.directory.locations(self.directory.find(words, space))
            for item, holder in zip(places.item.tolist(), places.holder.tolist(), strict=True):
                member = self.membership.by_holder.get(holder)
                if member is not None and member.usable(now) and (not nodes[item] or member.node == requester):
                    nodes[item] = member.node
        return nodes

    def view_for(self, now: float, digest: bytes, words: U64, requester: str, draws: F64) -> tuple[I64, Columns, RouteView, int] | None:
        """Rows, columns and view of one question, for those who compare requesters; None where nobody holds the first page."""
        asked = self._columns(now, digest, words, requester, frozenset())
        if asked is None:
            return None
        rows, columns, page_bytes = asked
        return rows, columns, self.planner.view(now, columns, requester, page_bytes, draws), page_bytes

    # -- time --------------------------------------------------------------------------------------------------------------------------

    def gone(self, now: float, node: str, registration: int) -> None:
        """Another master has found it dead."""
        self._changed(now, self.membership.gone(node, registration))

    def tick(self, now: float, *, active: bool = True, heard: float | None = None) -> bool:
        """Let time pass: silent nodes are suspected, then dead; a slice of the sweep, a slice of advice. True if there is more to sweep.

        Of several masters one is ``active``; the others neither declare anybody dead nor advise. ``heard``: see `Membership.tick`.
        """
        for changed in self.membership.tick(now, judge=active, heard=heard):
            self._changed(now, changed)
        for engine in self.engines.expire(now):
            self._happens(now, "engine silent", engine, "its keys are forgotten")
        if active:
            self.advisor.tick(now)
        return self.directory.sweep(SWEEP_ROWS)

    def check(self) -> None:
        """The invariants: slow."""
        self.directory.check()
        self.membership.check()
        self.advisor.ledger.check()
        live = set(self.directory.holders.live().tolist())
        pools = {member.holder for member in self.membership.members.values() if member.state != DEAD}
        assert live == pools | set(self.engines.by_holder), "a holder that nobody is"

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _columns(self, now: float, digest: bytes, words: U64, requester: str, exclude: frozenset[str]) -> tuple[I64, Columns, int] | None:
        space = self.directory.space_or_none(digest)
        if space is None or not len(words):
            return None
        rows = self.directory.find(words, space)
        columns = self.planner.columns(now, self.directory.locations(rows), len(words), requester, exclude)
        return rows, columns, max(1, self.directory.object_bytes[space])

    def _changed(self, now: float, changed: Changed | None) -> None:
        if changed is None:
            return
        self._happens(now, changed.state, changed.node, changed.why)
        if changed.state == DEAD:
            member = self.membership.members[changed.node]
            self.directory.drop(member.holder)
            self.membership.by_holder.pop(member.holder, None)
            self._forget(changed.node)
            self.counts.deaths += 1

    def _forget(self, node: str) -> None:
        """A life of this node is over."""
        self.engines.clear_node(node)
        self.costs.forget(node)
        self.placement.forget(node)
        self.advisor.ledger.forget(node)

    def _new_holder(self, member: Member) -> None:
        """After many resyncs that were never finished."""
        self.directory.drop(member.holder)
        self.membership.by_holder.pop(member.holder, None)
        member.holder = self.directory.holders.take()
        self.membership.by_holder[member.holder] = member

    def _happens(self, now: float, kind: str, node: str, text: str) -> None:
        self._happened += 1
        self.happenings.append(Happening(self._happened, now, kind, node, text))
