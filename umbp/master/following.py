"""What a master does with changes that others have entered in the shared log, and with the table of members (`umbp.master.shared`)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec

from umbp.core.membership import DEAD
from umbp.core.uses import Uses
from umbp.errors import NotFound, UmbpError, Unavailable
from umbp.master import protocol as say
from umbp.master.service import MasterService, decode_external
from umbp.master.shared import ACTIVE_SECONDS, RECONCILE_SECONDS, Entry, MemberRecord, SharedLog, decode_uses, encode_uses
from umbp.types import Tier

log = logging.getLogger("umbp.master.following")
BLOCK_MS = 500
SHARE_SECONDS = 1.0
RETRY_SECONDS = 0.5
ASK_AGAIN_SECONDS = 3.0


class Follower:
    """Keeps one master in step with the others."""

    def __init__(self, service: MasterService, store: SharedLog) -> None:
        self.service, self.store = service, store
        self._asked: dict[str, float] = {}  # node -> when it was asked for a resync
        self._refused: set[tuple[str, str]] = set()  # decisions that cannot be followed here
        self._said = ""
        service.core.uses = Uses()

    def __repr__(self) -> str:
        return f"<Follower of {self.store!r}>"

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._attending())
            tasks.create_task(self._following())
            tasks.create_task(self._sharing())

    async def _attending(self) -> None:
        """Be there, and be active if nobody else is."""
        while True:
            try:
                if await self.store.attend():
                    self.service.core.membership.give_time(self.service.now())
                    log.info("this master is the active one now")
                self._say("")
            except Unavailable as error:
                self._say(str(error))
            await asyncio.sleep(ACTIVE_SECONDS / 4)

    async def _following(self) -> None:
        """Read the log; begin anew after an outage, and compare with the table of members now and then."""
        reconciled = 0.0
        begun = False
        while True:
            try:
                if not begun or self.store.behind:
                    if begun:
                        self._doubt_all()
                    await self._reconcile(await self.store.begin())
                    begun, reconciled = True, self.service.now()
                await self.store.read(self.apply, block_ms=BLOCK_MS)
                if self.service.now() - reconciled > RECONCILE_SECONDS:
                    reconciled = self.service.now()
                    await self._reconcile(await self.store.members())
            except Unavailable as error:
                self._say(str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _sharing(self) -> None:
        """Tell the other masters what this one was asked."""
        uses = self.service.core.uses
        assert uses is not None
        while True:
            await asyncio.sleep(SHARE_SECONDS)
            weight, lots = uses.take()
            if lots and len(self.store.masters) > 1:
                with suppress(Unavailable):  # then they do not know of this second
                    await self.store.enter("uses", "", encode_uses(weight, lots))

    def _doubt_all(self) -> None:
        """Part of the log is gone: whatever a node said was in it, also of one that speaks to this master by now."""
        log.warning("what other masters heard was not all read: all nodes are asked for what they hold")
        for member in self.service.core.membership.members.values():
            member.wants_resync |= member.state != DEAD

    async def _reconcile(self, members: dict[str, MemberRecord]) -> None:
        """Make our members those of the table, and follow what operators decided."""
        core = self.service.core
        for node, record in members.items():
            self._joined(node, record)
            await self._ask_if_wanted(node)
        for node, member in list(core.membership.members.items()):
            if member.state != DEAD and node not in members:
                core.gone(self.service.now(), node, member.registration)
        before = self.service.decided
        decisions = await self.store.decisions()
        if self.service.decided != before:
            return  # what was read may be what was decided before; the next comparison sees to the rest
        for (kind, name), value in decisions.items():
            try:
                self._decided(kind, name, value)
            except UmbpError as error:
                if (name, value) not in self._refused:
                    self._refused.add((name, value))
                    log.error("%s %s: %s", kind, name, error)

    def _decided(self, kind: str, name: str, value: str) -> None:
        """A decision of the table, if it is news here."""
        core = self.service.core
        if kind == "swap" and core.choices.names.get(name) != value and not core.choices.has_failed(name):
            core.choices.swap(name, value)
        elif kind == "drain" and (member := core.membership.members.get(name)) and member.draining != (value == "1"):
            core.drain(self.service.now(), name, on=value == "1")

    async def apply(self, entry: Entry) -> None:
        """One change that another master has entered. What cannot be applied is said, and mended by a resync or the next comparison."""
        try:
            await self._apply(entry)
        except NotFound:
            log.debug("a change of %s that is no member here", entry.node)
        except (UmbpError, msgspec.MsgspecError, ValueError) as error:
            log.error("a change of kind %s about %s could not be applied: %s", entry.kind, entry.node, error)

    async def _apply(self, entry: Entry) -> None:
        service, core, now = self.service, self.service.core, self.service.now()
        node, payload = entry.node, entry.payload
        if entry.kind == "events":
            await service.events(node, payload, heard=True)
            await self._ask_if_wanted(node)
        elif entry.kind == "piece":
            await service.piece(node, payload, heard=True)
            await self._ask_if_wanted(node)
        elif entry.kind == "beat":
            service.lives(node, msgspec.json.decode(payload, type=say.Heartbeat))
        elif entry.kind == "join":
            self._joined(node, msgspec.json.decode(payload, type=MemberRecord))
        elif entry.kind == "dead":
            core.gone(now, node, int(payload))
        elif entry.kind == "resync":
            core.membership.find(node).wants_resync = True
        elif entry.kind == "failed":
            service.has_failed(node, msgspec.json.decode(payload, type=say.Failed))
        elif entry.kind == "drain":
            core.drain(now, node, on=payload == b"1")
        elif entry.kind == "swap":
            core.choices.swap(node, payload.decode())
        elif entry.kind == "external":
            said, words = decode_external(payload)
            await service.external(
                said.engine,
                node,
                said.digest,
                Tier(said.tier),
                words,
                present=said.present,
                object_bytes=said.object_bytes,
                heard=True,
            )
        elif entry.kind == "uses":
            weight, lots = decode_uses(payload)
            for lot in lots:
                core.used(now, lot.digest, lot.words, weight)
                await asyncio.sleep(0)
        elif entry.kind == "advice":
            service.relay.keep(now, node, msgspec.json.decode(payload, type=list[say.Advice]))
        elif entry.kind == "clear":
            core.engines.clear(node, Tier(int(payload)) if payload else None)
        else:
            log.error("a change of the unknown kind %r", entry.kind)

    def _joined(self, node: str, record: MemberRecord) -> None:
        member = self.service.core.membership.members.get(node)
        if member is None or member.registration < record.registration:
            self.service.joined(msgspec.json.decode(record.join, type=say.Join), record.registration)

    async def _ask_if_wanted(self, node: str) -> None:
        """Have the node send all again, by the master that it speaks to."""
        now = self.service.now()
        member = self.service.core.membership.members.get(node)
        if member is None or member.state == DEAD or not member.wants_resync:
            return
        if now - self._asked.get(node, -ASK_AGAIN_SECONDS) >= ASK_AGAIN_SECONDS:
            await self.store.enter("resync", node, b"")
            self._asked[node] = now  # not where it could not be entered: the store may be there a moment later
            self._asked = {name: at for name, at in self._asked.items() if now - at < ASK_AGAIN_SECONDS}

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            (log.warning if what else log.info)("%s", what or "the store is there again")
