"""The hands around `core.master`: gives it messages, time and randomness, and keeps questions from waiting behind changes.

Theory of operation. All of it runs in one event loop, that of `python -m umbp.master` or of a pool with an embedded master; pools reach it
by HTTP or, in the same process, by these methods. Bundles and pieces are applied in slices, and the loop serves others between two of
them (`umbp.master.intake`); things of one node are in order, by a lock a node. Time passes in `run`: twenty ticks a second, more while
there is something to sweep, with a tenth of the processor.

Every `PROBE_SECONDS`, and when a fetch from it failed, each node is asked by the address that it advertises who it is. One that does not
answer as itself is not named as a source: it may beat and yet have told a wrong address. A fetch that worked says more than the question.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from umbp.core.advice import Advice
from umbp.core.master import SLICE, Happening, Master, Part
from umbp.core.membership import DEAD, Member
from umbp.core.single import route_one
from umbp.errors import Conflict, InvalidRequest, UmbpError, Unavailable
from umbp.grammar import tags_fault
from umbp.master import protocol as say
from umbp.master.intake import Intake
from umbp.master.relay import Relay
from umbp.master.store import Alone, Store
from umbp.policies.base import CLUSTER_EVICTION
from umbp.store.index import key_words
from umbp.types import F64, U8, U64, Tier
from umbp.wire import Blob, decode, encode

log = logging.getLogger("umbp.master")
TICK_SECONDS = 0.05
SWEEP_SHARE = 0.1  # of the processor, at the most: nobody waits for it, and everybody would wait behind it
PROBE_SECONDS = 10.0
PROBES_AT_A_TIME = 8
TRUST_FETCH_SECONDS = 30.0
CATCH_UP_SECONDS = 0.5
BEAT_PARTS = 4  # of a heartbeat: the store has that long to take it, since its pool waits for the answer for a heartbeat
NO_SPACE = 0xFFFF_FFFF  # a namespace that nobody has reported

_EVENTS: msgspec.json.Decoder[say.Events] = msgspec.json.Decoder(say.Events)
_PIECE: msgspec.json.Decoder[say.Piece] = msgspec.json.Decoder(say.Piece)
_VICTIMS: msgspec.json.Decoder[say.Victims] = msgspec.json.Decoder(say.Victims)
_ROUTE: msgspec.json.Decoder[say.RouteRequest] = msgspec.json.Decoder(say.RouteRequest)
_LOCATE: msgspec.json.Decoder[say.LocateRequest] = msgspec.json.Decoder(say.LocateRequest)

Probe = Callable[[Member], Awaitable[str]]
"""Asks a node by its address who it is; "" where it is the member, else what is wrong."""


@dataclass(frozen=True, slots=True)
class Told:
    """Changes that a node tells: ``words`` (n, 4), ``tiers``, ``present`` (n,); ``spaces``: digest, object bytes, count of each run."""

    words: U64
    tiers: U8
    present: U8
    spaces: list[tuple[bytes, int, int]]
    identities: dict[bytes, bytes] = field(default_factory=dict)


class MasterService:
    """One master's behaviour, without a listener. ``masters`` are the URLs of all masters, this one included."""

    def __init__(
        self, core: Master, *, probe: Probe | None = None, masters: Callable[[], list[str]] = list, store: Store | None = None
    ) -> None:
        self.core = core
        self.store: Store = store or Alone()
        self.masters = masters
        self.relay = Relay(core.timing.heartbeat)
        self.intake = Intake(core)
        self._probe = probe
        self._random = np.random.default_rng()
        self._locks: dict[str, asyncio.Lock] = {}
        self._fetched_at: dict[str, float] = {}  # node -> when a fetch from it worked
        self._probe_now: dict[str, None] = {}
        self._news = asyncio.Event()
        self.decided = 0  # moves when an operator decides something here, before and after it is entered

    def __repr__(self) -> str:
        return f"<MasterService of {self.core!r}>"

    def now(self) -> float:
        """Seconds on a clock that only grows."""
        return time.monotonic()

    def draws(self, count: int) -> F64:
        """Uniform numbers in [0, 1)."""
        return self._random.random(count)

    # -- members -----------------------------------------------------------------------------------------------------------------------

    async def join(self, body: say.Join) -> say.Joined:
        """A pool registers."""
        core = self.core
        if fault := tags_fault(body.tags):
            raise InvalidRequest(fault, field="tags", example='{"rack": "r12"}')
        core.membership.can_join(self.now(), body.node, body.boot, body.place)
        registration = await self.store.register(body.node, msgspec.json.encode(body), draining=body.draining)
        before = core.membership.members.get(body.node)
        if before is not None and registration and before.registration > registration:
            raise Conflict("another process of this name registered at the same moment", field="node")
        member = self.joined(body, registration)
        self.relay.beat(self.now(), body.node)
        log.info("%s joined from %s, registration %d", body.node, body.addresses, member.registration)
        timing = core.timing
        return say.Joined(
            registration=member.registration,
            master=core.boot,
            heartbeat_seconds=timing.heartbeat,
            dead_seconds=timing.dead,
            masters=self.masters(),
            neighbours=say.neighbours(core.membership.neighbours(member)),
        )

    def joined(self, body: say.Join, registration: int) -> Member:
        """A pool has registered, here or with another master."""
        self._probe_now[body.node] = None
        return self.core.join(
            self.now(),
            body.node,
            body.boot,
            body.place,
            dict(body.addresses),
            capacities(body.tiers),
            draining=body.draining,
            registration=registration,
            tags=body.tags,
        )

    async def beat(self, node: str, body: say.Heartbeat) -> say.Beat:
        """A pool lives."""
        now = self.now()
        member = self.lives(node, body)
        if self.store.shared:
            with suppress(Unavailable):  # that it lives is not lost by that: it says so again
                await self.store.enter("beat", node, msgspec.json.encode(body), seconds=self.core.timing.heartbeat / BEAT_PARTS)
        advice = [*self.relay.beat(now, node), *(_advice(self.core, one, now) for one in self.core.advisor.ledger.take(node))]
        warnings = [f"not used as a source: {member.unreachable}"] if member.unreachable else []
        return say.Beat(
            state=member.state,
            resync=member.wants_resync,
            acknowledged=member.acknowledged,
            warnings=warnings,
            advice=advice,
            masters=self.masters(),
            judges=self.core.counts.routes > 0 and self.core.choices.names[CLUSTER_EVICTION] != "none",
            neighbours=say.neighbours(self.core.membership.neighbours(member)),
        )

    def lives(self, node: str, body: say.Heartbeat) -> Member:
        """A pool has said so, here or to another master."""
        now = self.now()
        member = self.core.beat(now, node, body.registration, capacities(body.tiers), body.held, body.done)
        member.keys = {one.tier: one.keys for one in body.tiers}
        for fetch in body.measured:
            self.core.costs.measured(fetch.node, fetch.tier, node, fetch.bytes, fetch.seconds)
            if fetch.node in self.core.membership.members and fetch.node != node:
                self._fetched_at[fetch.node] = now
        return member

    async def leave(self, node: str, body: say.Leaving) -> say.Left:
        """A pool stops."""
        self.core.membership.member(node, body.registration)
        await self.store.gone(node, body.registration)
        self.core.leave(self.now(), node, body.registration)
        log.info("%s left", node)
        return say.Left(state=DEAD)

    async def failed(self, node: str, body: say.Failed) -> say.Left:
        """A fetch from a node failed."""
        self.core.membership.find(node)
        with suppress(Unavailable):
            await self.store.enter("failed", node, msgspec.json.encode(body))
        return say.Left(state=self.has_failed(node, body).state)

    def has_failed(self, node: str, body: say.Failed) -> Member:
        """A fetch from a node failed, as was said here or to another master."""
        member = self.core.failed(self.now(), node, body.by, body.why)
        self._fetched_at.pop(node, None)
        self._probe_now[node] = None
        return member

    async def drain(self, node: str, *, on: bool) -> Member:
        """An operator wants nothing new there, or does again."""
        self.core.membership.find(node)
        await self._decide("drain", node, b"1" if on else b"0")
        return self.core.drain(self.now(), node, on=on)

    async def swap(self, kind: str, name: str) -> None:
        """Another policy from now on."""
        self.core.choices.can_swap(kind, name)  # so that one that cannot be had is told to nobody
        await self._decide("swap", kind, name.encode())
        self.core.choices.swap(kind, name)

    async def _decide(self, kind: str, name: str, value: bytes) -> None:
        self.decided += 1
        await self.store.decide(kind, name, value)
        self.decided += 1

    # -- what they hold ----------------------------------------------------------------------------------------------------------------

    async def events(self, node: str, frame: bytes, *, heard: bool = False) -> say.Applied:
        """A bundle, as a frame."""
        header, blob = decode(frame, _EVENTS)
        keys, tiers, present = blob.keys(header.n), blob.take(np.uint8, header.n), blob.take(np.uint8, header.n)
        _end(blob, tiers)
        told = Told(key_words(keys), tiers, present, _spaces(header), _identities(header))
        return await self.tell(node, header.registration, header.number, told, frame, heard=heard)

    async def piece(self, node: str, frame: bytes, *, heard: bool = False) -> say.Applied:
        """A part of a resync, as a frame."""
        header, blob = decode(frame, _PIECE)
        keys, tiers = blob.keys(header.n), blob.take(np.uint8, header.n)
        _end(blob, tiers)
        told = Told(key_words(keys), tiers, np.ones(header.n, np.uint8), _spaces(header), _identities(header))
        return await self.tell_piece(
            node,
            header.registration,
            header.sweep,
            header.index,
            told,
            frame,
            bundle=header.bundle,
            total=header.total,
            last=header.last,
            heard=heard,
        )

    async def tell(self, node: str, registration: int, number: int, told: Told, frame: bytes = b"", *, heard: bool = False) -> say.Applied:
        """A bundle. ``frame``: as it came; ``heard``: from another master, who has entered it."""
        async with self._lock(node):
            member, verdict = self.core.expects(self.now(), node, registration, number)
            if verdict == "gap" and self.store.shared and not heard:  # what it said to another master may be on its way
                await self.store.catch_up(CATCH_UP_SECONDS)
                member, verdict = self.core.expects(self.now(), node, registration, number)
            if verdict == "apply":
                if not heard:
                    await self.store.enter("events", node, frame)
                await self._apply(member, told, fresh=True)
                self.core.applied(member, number)
            return say.Applied(acknowledged=member.acknowledged, gap=verdict == "gap")

    async def tell_piece(
        self,
        node: str,
        registration: int,
        sweep: int,
        index: int,
        told: Told,
        frame: bytes = b"",
        *,
        bundle: int,
        total: int,
        last: bool,
        heard: bool = False,
    ) -> say.Applied:
        """A part of a resync."""
        content = say.content_sum(told.words, told.tiers, told.spaces)
        async with self._lock(node):
            member, verdict = self.core.expects_piece(self.now(), node, registration, sweep, index, bundle, total, content)
            if verdict in ("gap", "lost") and self.store.shared and not heard:
                await self.store.catch_up(CATCH_UP_SECONDS)
                member, verdict = self.core.expects_piece(self.now(), node, registration, sweep, index, bundle, total, content)
            if verdict == "apply":
                if not heard:
                    await self.store.enter("piece", node, frame)
                await self._apply(member, told, fresh=False)
                self.core.piece_applied(self.now(), member, total, last=last)
            gap = verdict not in ("apply", "again")
            if gap and heard:  # its pool speaks to another master, which may have it all: this one asks by the log
                member.wants_resync = True
            wanted = member.sweep.wanted(sweep) if gap and verdict != "lost" else -1
            return say.Applied(acknowledged=member.acknowledged, gap=gap, piece=wanted)

    async def _apply(self, member: Member, told: Told, *, fresh: bool) -> None:
        spaces = self.core.spaces(told.spaces)
        for digest, canonical in told.identities.items():
            self.core.directory.identify(digest, canonical)
        await self.intake.apply(Part(member, told.words, spaces, told.tiers, told.present, fresh))

    def _lock(self, node: str) -> asyncio.Lock:
        lock = self._locks.get(node)
        if lock is None:
            self.core.membership.find(node)  # no locks for names that nobody has
            lock = self._locks[node] = asyncio.Lock()
        return lock

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def plan(self, frame: bytes) -> bytes:
        """A `RouteRequest` frame, answered by a plan frame."""
        header, blob = decode(frame, _ROUTE)
        keys = blob.keys(header.n)
        blob.end()
        if header.n == 1 and header.count and not header.again and header.moves and not header.prefill and not header.exclude:
            single = route_one(self.core, self.now(), bytes.fromhex(header.namespace), key_words(keys), header.requester, self.draws(1))
            if single is not None:
                return say.encode_plan(single)
        plan = self.core.route(
            self.now(),
            bytes.fromhex(header.namespace),
            key_words(keys),
            header.requester,
            self.draws(header.n),
            prefill=header.prefill,
            page_tokens=header.page_tokens,
            count=header.count,
            again=header.again,
            moves=header.moves,
            exclude=frozenset(header.exclude),
        )
        return say.encode_plan(plan)

    def locate(self, frame: bytes) -> bytes:
        """A `LocateRequest` frame."""
        header, blob = decode(frame, _LOCATE)
        keys = blob.keys(header.n)
        blob.end()
        copies, tiers = self.core.locate(self.now(), bytes.fromhex(header.namespace), key_words(keys))
        return encode(say.LocateAnswer(n=header.n), copies, tiers)

    def victims(self, node: str, frame: bytes) -> bytes:
        """A `Victims` frame, answered by a `Verdicts` frame."""
        header, blob = decode(frame, _VICTIMS)
        keys = blob.keys(header.n)
        blob.end()
        if sum(count for _, count in header.spaces) != header.n:
            raise InvalidRequest(f"the namespaces' counts do not add up to {header.n}", field="spaces")
        found = [self.core.directory.space_or_none(bytes.fromhex(digest)) for digest, _ in header.spaces]
        numbers = np.array([NO_SPACE if number is None else number for number in found], np.uint32)
        spaces = np.repeat(numbers, [count for _, count in header.spaces])
        verdict = self.core.judge(node, header.registration, self.now(), key_words(keys), spaces)
        return encode(say.Verdicts(n=header.n), verdict.astype(np.int8))

    async def external(
        self, engine: str, node: str, digest: bytes, tier: Tier, words: U64, *, present: bool, object_bytes: int, heard: bool = False
    ) -> int:
        """Keys of an engine's own cache."""
        if not heard:
            self.core.membership.find(node)
            said = _External(engine, digest, int(tier), present, object_bytes)
            await self.store.enter("external", node, msgspec.msgpack.encode((said, words.tobytes())))
        news = 0
        for start in range(0, max(1, len(words)), SLICE):  # also without keys: it says that the engine lives
            part = words[start : start + SLICE]
            news += self.core.external(self.now(), engine, node, digest, tier, part, present=present, object_bytes=object_bytes)
            await asyncio.sleep(0)
        return news

    async def clear(self, engine: str, tier: Tier | None) -> int:
        """An engine has nothing in this tier, or at all, any more."""
        await self.store.enter("clear", engine, b"" if tier is None else str(int(tier)).encode())
        return self.core.engines.clear(engine, tier)

    # -- time --------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let time pass until cancelled."""
        said: list[str] = []
        told = 0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._probing())
            while True:
                if self.store.trouble:  # what is said to other masters does not get here: silence means nothing
                    self.core.membership.give_time(self.now())
                began = time.thread_time()
                busy = self.core.tick(self.now(), active=self.store.active, heard=self.store.heard)
                spent = time.thread_time() - began
                if (faults := self.core.choices.faults) != said:
                    said = faults
                    log.error("%s", "; ".join(faults) or "policies are well again")
                for happening in [one for one in self.core.happenings if one.number > told]:
                    told = happening.number
                    if happening.kind == DEAD and self.store.active:
                        await self._enter_death(happening.node)
                    log.info("%s %s: %r", happening.node, happening.kind, happening.text)
                    self._news.set()
                if self.store.shared and self.store.active:
                    await self._hand_on()
                await asyncio.sleep(min(TICK_SECONDS, max(0.002, spent / SWEEP_SHARE)) if busy else TICK_SECONDS)

    async def _hand_on(self) -> None:
        """Advice for nodes that speak to other masters."""
        now, ledger = self.now(), self.core.advisor.ledger
        for node in [node for node in ledger.by_node if not self.relay.here(now, node)]:
            if advice := [_advice(self.core, one, now) for one in ledger.take(node)]:
                self.relay.keep(now, node, advice)  # it may only have been late
                with suppress(Unavailable):  # then it is over after a while, and given again
                    await self.store.enter("advice", node, msgspec.json.encode(advice))

    async def _enter_death(self, node: str) -> None:
        member = self.core.membership.members.get(node)
        if member is not None and member.state == DEAD:
            with suppress(Unavailable):  # the next reconciliation does it
                await self.store.gone(node, member.registration)

    async def happened(self, after: int) -> list[Happening]:
        """What has happened since this number; waits until there is something."""
        while True:
            found = [one for one in self.core.happenings if one.number > after]
            if found:
                return found
            self._news = asyncio.Event() if self._news.is_set() else self._news
            await self._news.wait()

    async def _probing(self) -> None:
        """Ask nodes by their addresses who they are."""
        if self._probe is None:
            return
        asked: dict[str, float] = {}
        while True:
            now = self.now()
            members = [member for member in self.core.membership.members.values() if member.state != DEAD]
            due = [m for m in members if m.node in self._probe_now or now - asked.get(m.node, -PROBE_SECONDS) >= PROBE_SECONDS]
            for start in range(0, len(due), PROBES_AT_A_TIME):
                await asyncio.gather(*(self._ask(member) for member in due[start : start + PROBES_AT_A_TIME]))
            for member in due:
                asked[member.node] = now
                self._probe_now.pop(member.node, None)
            live = {member.node for member in members}
            self.relay.forget(live)
            for known in (asked, self._locks, self._fetched_at):
                for node in [node for node in known if node not in live]:
                    known.pop(node, None)
            await asyncio.sleep(TICK_SECONDS)

    async def _ask(self, member: Member) -> None:
        assert self._probe is not None
        why = await self._probe(member)
        if why and self.now() - self._fetched_at.get(member.node, -TRUST_FETCH_SECONDS) < TRUST_FETCH_SECONDS:
            return
        try:
            self.core.membership.member(member.node, member.registration)
        except UmbpError:
            return  # it is another one by now
        self.core.reached(self.now(), member, why)


def capacities(tiers: list[say.Capacity]) -> dict[int, tuple[int, int]]:
    """Tier -> (capacity, used) bytes."""
    return {one.tier: (one.capacity_bytes, one.used_bytes) for one in tiers}


def _advice(core: Master, advice: Advice, now: float) -> say.Advice:
    space = core.directory.space_or_none(advice.digest)
    return say.Advice(
        number=advice.number,
        verb=advice.verb,
        namespace=advice.digest.hex(),
        identity=core.directory.identities.get(advice.digest, b"").decode(),
        page_bytes=0 if space is None else core.directory.object_bytes[space],
        keys=[bytes(key).hex() for key in advice.keys],
        seconds=advice.seconds(now),
        source=advice.source,
    )


def _spaces(header: say.Events | say.Piece) -> list[tuple[bytes, int, int]]:
    if sum(count for _, _, count in header.spaces) != header.n:
        raise InvalidRequest(f"the namespaces' counts do not add up to {header.n}", field="spaces")
    return [(bytes.fromhex(digest), size, count) for digest, size, count in header.spaces]


def _identities(header: say.Events | say.Piece) -> dict[bytes, bytes]:
    return {bytes.fromhex(digest): text.encode() for digest, text in header.identities.items()}


def _end(blob: Blob, tiers: Any) -> None:
    blob.end()
    if len(tiers) and int(tiers.max()) > Tier.SSD:
        raise InvalidRequest(f"{int(tiers.max())} is no tier", field="tier", example=str(int(Tier.DRAM)))


class _External(msgspec.Struct, frozen=True, array_like=True):
    """An engine's report as it stands in the log."""

    engine: str
    digest: bytes
    tier: int
    present: bool
    object_bytes: int


def decode_external(payload: bytes) -> tuple[_External, U64]:
    """A report of the log, and its key words."""
    said, words = msgspec.msgpack.decode(payload, type=tuple[_External, bytes])
    return said, np.frombuffer(words, np.uint64).reshape(-1, 4)
