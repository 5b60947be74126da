"""What a pool tells its master, and what it does on its advice: registration, heartbeats, events, resync; three tasks and no lock.

Theory of operation
-------------------
`_beating` has the membership: it joins, beats, joins again when it is told that it is unknown, and goes on to the next master when one does
not answer. It does nothing else, so no data delays it. `_telling` has the contents: it sends what the core's outbox has, milliseconds after
the first change, in numbered bundles; or, after a join, a gap or an overflow, everything in pieces (`umbp.pool.sweeping`), with the bundles
of meanwhile after each of them, so that what is stored now is known now and not when all is told. One thing at a time is on its way, and
each is made right before it is sent, so the master hears things in the order they happened.

A bundle or piece without an answer is sent again as it was; the master knows its number. A piece that did not arrive right, or that the
master lacks, is where the sweep goes on. With no master at all the pool serves its own clients as ever, the outbox overflows at its bound,
and the next master is sent everything: after `RETRY_SECONDS` at the most once it is there, and where it is not the first one, after up to a
heartbeat more: the pools of a master that has restarted do not all begin at once. So it is after a network that lost what went between
them, in both directions or in one: no try outlasts a heartbeat (of contents `TELL_SECONDS_MAX`), and the next one has a connection of its
own, so nothing waits until TCP gives up the old one or tries it again.

What the master advises, and what it is asked before pages go (`_consulting`), is in `umbp.pool.heeding`.

Cost: an idle pool sends one heartbeat a second. A key that comes or goes costs 0.6 us here, off the path of the put,
with the embedded master; in batches of what came within `GATHER_SECONDS_MAX`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from umbp.core.outbox import Changes
from umbp.core.pool import Pool
from umbp.errors import Conflict, UmbpError, Unavailable, UnknownNode
from umbp.master import protocol as say
from umbp.master.service import Told
from umbp.pool.heeding import Heeding
from umbp.pool.masters import Port
from umbp.pool.sweeping import PIECE_KEYS, DramKeys, Keeps, Piece, Sweep
from umbp.types import I64, U64, Tier

log = logging.getLogger("umbp.pool.reporting")
# After the first change: until there was none for a moment, so that a writer has the pool for itself, and well below the promised 50 ms.
GATHER_SECONDS, GATHER_SECONDS_MAX = 0.005, 0.03
RETRY_SECONDS = 0.5
TELL_SECONDS_MAX = 3.0
MEASURED_MAX = 256
LEAVE_SECONDS_MAX = 1.0
COUNTED = ("bundles", "pieces", "resyncs", "resumed", "joins", "beats", "unanswered", "masters", "held", "dropped", "copied", "spared")


class Fetched(Protocol):
    """One fetch from another node; `umbp.pool.peers.Measured` is one."""

    @property
    def node(self) -> str: ...
    @property
    def tier(self) -> Tier: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


async def _at_once() -> None:
    """No turn is waited for."""


class Reporter:
    """Speaks for one pool. ``ports`` are the masters in the order they are tried; ``tiers()`` says how full each tier is."""

    def __init__(
        self, pool: Pool, name: str, boot: int, place: str, ports: Sequence[Port], tiers: Callable[[], list[say.Capacity]]
    ) -> None:
        self.pool, self.name, self.boot, self.place = pool, name, boot, place
        self.addresses: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.dram = DramKeys(pool)
        self.keeps: list[Keeps] = [self.dram]
        self.measure: Callable[[], Sequence[Fetched]] = tuple  # what fetches took since this was asked last
        self.turn: Callable[[], Awaitable[None]] = _at_once  # waited for before a bundle is made
        self.registration = 0  # 0: not a member
        self.draining = False
        self.warnings: list[str] = []
        self.neighbours: list[say.Neighbour] = []  # as the master said last
        self.heartbeat_seconds = 1.0
        self.counts = dict.fromkeys(COUNTED, 0)
        self.heeding = Heeding(pool, self.counts)
        self._ports, self._at = list(ports), 0
        self._tiers = tiers
        self._wake, self._join_now = asyncio.Event(), asyncio.Event()
        self._gathered_at = float("-inf")
        self._resync, self._in_turn = True, False  # everything is to be told; not all pools at once
        self._synced = asyncio.Event()
        self._named: set[bytes] = set()  # namespaces whose identity this registration has told
        self._number = self._sweep = self._master = 0
        self._judges = False  # whether the master spoken to knows what the cluster asks for
        self._said = ""

    def __repr__(self) -> str:
        return f"<Reporter of {self.name}, {f'registration {self.registration}' if self.registration else 'no member'}>"

    @property
    def port(self) -> Port:
        """The master that is spoken to."""
        return self._ports[self._at]

    # -- what others ask of it ---------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something may have changed."""
        if self.pool.objects.outbox.keys:
            self._wake.set()

    async def wait_synced(self) -> None:
        """Until a master has heard all that this pool holds."""
        await self._synced.wait()

    # -- life --------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for loop in (self._beating, self._telling, self._consulting):
                tasks.create_task(self._kept(loop))

    async def _kept(self, loop: Callable[[], Awaitable[None]]) -> None:
        """A fault of ours in here costs the cluster a while of what this pool has to say; its own clients are served all the same."""
        while True:
            try:
                await loop()
            except Exception:
                log.exception("%r: an internal error; it begins again", self)
                self._resync = True
                await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """A clean stop: say so, within a moment."""
        if self.registration:
            try:
                await self.port.leave(self.name, say.Leaving(registration=self.registration), LEAVE_SECONDS_MAX)
            except UmbpError as error:
                log.info("the master was not told of the stop: %s", error)
        for port in self._ports:
            await port.close()

    # -- membership --------------------------------------------------------------------------------------------------------------------

    async def _beating(self) -> None:
        while True:
            began = time.monotonic()
            wait = self.heartbeat_seconds
            try:
                if not self.registration:
                    await self._join()
                else:
                    await self._beat()
                self._say("")
            except UnknownNode:
                self._lost()
                wait = 0.0
            except Conflict as error:
                self._say(f"refused by the master: {error}")
            except UmbpError as error:
                self._say(str(error))
                self.counts["unanswered"] += 1
                self.counts["masters"] += len(self._ports) > 1
                self._at = (self._at + 1) % len(self._ports)
                pause = min(RETRY_SECONDS, self.heartbeat_seconds) * random.uniform(0.5, 1.0)
                wait = 0.0 if self._at else pause  # once round first
            self._join_now.clear()
            left = began + wait - time.monotonic()
            if left > 0:
                try:
                    async with asyncio.timeout(left):
                        await self._join_now.wait()
                except TimeoutError:
                    continue
            else:
                await asyncio.sleep(0)

    async def _join(self) -> None:
        body = say.Join(
            node=self.name,
            boot=self.boot,
            place=self.place,
            addresses=self.addresses,
            tiers=self._tiers(),
            draining=self.draining,
            tags=self.tags,
        )
        joined = await self.port.join(body, self._patience())
        self.registration, self._number, self._resync = joined.registration, 0, True
        self._in_turn = self._master not in (0, joined.master)
        self._master = joined.master
        self.neighbours = joined.neighbours
        self.heeding.begin()
        self.heartbeat_seconds = max(0.05, min(joined.heartbeat_seconds, 60.0))
        self.counts["joins"] += 1
        self._wake.set()
        if self.port.url:
            log.info("member of the cluster of %s, registration %d", self.port.url, self.registration)

    async def _beat(self) -> None:
        measured = [
            say.Measured(node=one.node, tier=int(one.tier), bytes=one.size_bytes, seconds=min(one.seconds, say.SECONDS_MAX))
            for one in self.measure()[:MEASURED_MAX]
        ]
        held, done = self.heeding.answers()
        self.counts["beats"] += 1
        body = say.Heartbeat(registration=self.registration, tiers=self._tiers(), measured=measured, held=held, done=done)
        beat = await self.port.beat(self.name, body, self._patience())
        self.heeding.answered(len(held), len(done))
        self._judges = beat.judges
        self.draining = beat.state == "draining"
        self.neighbours = beat.neighbours
        self.warnings = [f"the master says: {warning}" for warning in beat.warnings]
        if beat.resync:
            self._resync = self._in_turn = True
            self._wake.set()
        for advice in beat.advice:
            self.heeding.heed(advice)

    async def _consulting(self) -> None:
        """Before pages go, once a heartbeat. A master that does not answer changes nothing."""
        while True:
            await asyncio.sleep(self.heartbeat_seconds)
            if self.registration and self._judges:
                try:
                    await self.heeding.consult(self.port, self.name, self.registration, self._patience())
                except UmbpError as error:
                    log.debug("the master was not asked which pages to keep: %s", error)

    def _patience(self) -> float:
        """A master that does not answer within a heartbeat is as good as dead: the next one is asked."""
        return max(0.25, self.heartbeat_seconds)

    def _lost(self) -> None:
        """Not a member any more."""
        self._synced.clear()
        if self.registration:
            log.warning("the master does not know us any more; joining again")
        self.registration = 0
        self._join_now.set()

    def _say(self, what: str) -> None:
        """Once for each change."""
        if what != self._said:
            self._said = what
            if what:
                log.warning("%s", what)

    @property
    def trouble(self) -> str:
        """Why it is no member now, for ``/readyz``; "" where it is one."""
        return self._said

    # -- contents ----------------------------------------------------------------------------------------------------------------------

    async def _telling(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._gather()
            registration = self.registration
            if not registration:
                continue  # `_join` wakes us
            try:
                outbox = self.pool.objects.outbox
                if self._resync or outbox.overflow:
                    await self._wait_turn()
                    await self._tell_all(registration)
                while outbox.keys and not self._resync:
                    await self._tell_changes(registration)
                if self._resync or outbox.overflow:
                    self._wake.set()
            except UnknownNode:
                if registration == self.registration:
                    self._lost()
            except UmbpError as error:
                log.info("telling the master failed, all is told again: %s", error)
                self._resync = True
                await asyncio.sleep(min(RETRY_SECONDS, self.heartbeat_seconds))
                self._wake.set()

    async def _gather(self) -> None:
        began, before = time.monotonic(), -1
        if began < self._gathered_at + GATHER_SECONDS_MAX:  # a stream of changes: each bundle costs some 0.5 ms, however few are in it
            await asyncio.sleep(self._gathered_at + GATHER_SECONDS_MAX - began)
        else:
            while (keys := self.pool.objects.outbox.keys) != before and time.monotonic() - began < GATHER_SECONDS_MAX:
                before = keys
                await asyncio.sleep(GATHER_SECONDS)
        self._gathered_at = time.monotonic()

    async def _tell_changes(self, registration: int) -> None:
        """One bundle, or a few where there are very many namespaces."""
        await self.turn()
        outbox = self.pool.objects.outbox
        changes = outbox.take(PIECE_KEYS, self.dram.visible)
        for told in self._told(changes):
            number = self._number + 1

            async def send(seconds: float, number: int = number, told: Told = told) -> say.Applied:
                return await self.port.tell(self.name, registration, number, told, seconds)

            if (await self._until_told(registration, send)).gap:
                self._resync = True
                return
            self._number = number
            self.counts["bundles"] += 1

    async def _wait_turn(self) -> None:
        """All pools of a master that has restarted have everything to tell: they begin over the time of a heartbeat."""
        if self._in_turn:
            self._in_turn = False
            await asyncio.sleep(self.heartbeat_seconds * random.random())

    async def _tell_all(self, registration: int) -> None:
        """Everything, in pieces, with the changes of meanwhile in between."""
        outbox = self.pool.objects.outbox
        outbox.begin()
        self._resync = False
        self._named.clear()  # another master may be listening by now
        self._sweep += 1
        sweep, began = Sweep(self._sweep, self.keeps, self._rows_told), time.monotonic()
        over = False
        while not over:
            piece = sweep.take()
            applied = await self._until_told(registration, self._sending(registration, sweep.number, piece))
            self.counts["pieces"] += 1
            if applied.gap:
                self._named.clear()
                self._resync = self._resync or not sweep.back_to(applied.piece)
                self.counts["resumed"] += not self._resync
            over = piece.last and not applied.gap
            changes = 0 if piece.more else outbox.keys
            while changes and not self._resync:  # and a sweep goes on, however much comes
                await self._tell_changes(registration)
                changes = max(0, min(changes, outbox.keys) - PIECE_KEYS)
            if outbox.overflow or self._resync:
                self._resync = True
                return
        self.counts["resyncs"] += 1
        self._synced.set()
        log.info("told the master all: %d keys in %d pieces, %.2f s", sweep.keys, sweep.pieces, time.monotonic() - began)

    def _sending(self, registration: int, sweep: int, piece: Piece) -> Callable[[float], Awaitable[say.Applied]]:
        bundle = self._number

        async def send(seconds: float) -> say.Applied:
            return await self.port.tell_piece(
                self.name,
                registration,
                sweep,
                piece.index,
                piece.told,
                seconds,
                bundle=bundle,
                total=piece.total,
                last=piece.last,
            )

        return send

    async def _until_told(self, registration: int, send: Callable[[float], Awaitable[say.Applied]]) -> say.Applied:
        """Send until it is answered, to whichever master is spoken to. UnknownNode if the registration is over meanwhile."""
        while True:
            if registration != self.registration:
                raise UnknownNode("registered anew")
            try:
                return await send(TELL_SECONDS_MAX)
            except Unavailable:
                await asyncio.sleep(min(RETRY_SECONDS, self.heartbeat_seconds))

    def _told(self, changes: Changes) -> Iterator[Told]:
        """Changes as bundles: keys of one namespace together, otherwise in their order."""
        runs = list(self._runs(changes))
        for first in range(0, len(runs), say.SPACES_MAX):
            part = runs[first : first + say.SPACES_MAX]
            which = part[0][1] if len(part) == 1 else np.concatenate([items for _, items in part])
            group = [run for run, _ in part]
            new = {digest for digest, _, _ in group} - self._named
            self._named |= new
            states = [self.pool.by_digest[digest] for digest in new if digest in self.pool.by_digest]
            names = {state.digest: state.canonical for state in states}
            yield Told(changes.words[which], changes.tiers[which], changes.present[which], group, names)

    def _runs(self, changes: Changes) -> Iterator[tuple[tuple[bytes, int, int], I64]]:
        """Digest, object bytes and count of each namespace that is still open, and its items."""
        if not len(changes):  # all that came has gone again
            return
        order = np.arange(len(changes))
        kinds, starts = changes.numbers[:1], order[:1]
        if (changes.numbers != kinds).any():  # seldom: a sort for nothing costs more than all else here
            order = np.argsort(changes.numbers, kind="stable")
            kinds, starts = np.unique(changes.numbers[order], return_index=True)
        stops = np.append(starts[1:], len(order))
        for number, start, stop in zip(kinds.tolist(), starts.tolist(), stops.tolist(), strict=True):
            if (digest := self.pool.digests.get(number)) is not None:
                yield (digest, int(changes.sizes[order[start]]), stop - start), order[start:stop]

    def _rows_told(self, rows: U64, tier: Tier) -> Iterator[Told]:
        """Keys that are held, as bundles."""
        n = len(rows)
        numbers, sizes = (rows[:, 4] & np.uint64(0xFFFF_FFFF)).astype(np.uint32), (rows[:, 4] >> np.uint64(32)).astype(np.int64)
        words = np.ascontiguousarray(rows[:, :4])
        return self._told(Changes(words, numbers, sizes, np.full(n, tier, np.uint8), np.ones(n, np.uint8)))
