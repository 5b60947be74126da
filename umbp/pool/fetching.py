"""Fetches: the hands around `umbp.core.fetches`. Asks the sources, reads into reserved pages of the segment, commits, tells who waits.

Theory of operation
-------------------
A batch of pages (`Fetches.next_batch_or_none`) is one task. It asks all sources for offers, gives each page to the cheapest offer that has
it, and reads each offer in parts, in order, so that the first pages are there early:

    offers -> cheapest -> (a part: reserve -> read -> compare checksums -> commit -> land) ... -> what failed: once more, elsewhere

Parts of which a load sees the first layers early are read stage by stage (`umbp.pool.staged`), and what fails of them is tried elsewhere at
once (`umbp.pool.elsewhere`). Pages for which there is no room pass through a part of the segment of its own, one after the other
(`umbp.pool.passing`).

A source that knows of pages to be right before the read has ended says so, and these are committed and land at once. A reservation is the
pool's own (session 0), and what is left of it is committed or given back when its read has ended, whatever happened; nothing is visible
before it is whole. Of what landed each ticket gets a lease until its client ends the ticket, so that no page goes between its arrival and
its use; and its client is woken by the segment's bell. A page that somebody stored meanwhile counts; one that a client is writing at the
moment is waited for.

Nothing waits behind a slow place (`umbp.pool.places`): it has two reads under way at most and holds only their memory, each read has a time
limit, and a place that failed is not asked by anybody for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from umbp.core.fetches import Batch, Fetches, Ticket
from umbp.core.objects import Account
from umbp.core.pool import Pool
from umbp.errors import DeadlineExceeded, LimitReached, UmbpError
from umbp.pool.elsewhere import Same
from umbp.pool.keeping import Keeping
from umbp.pool.parts import Left, Part, SourceCounts, names
from umbp.pool.passing import Passing
from umbp.pool.places import SUSPECT_FROM_SECONDS, Places
from umbp.pool.rooms import Rooms
from umbp.pool.sources import Offer, Source, Space, Taken
from umbp.pool.staged import Staged, checked_stages
from umbp.pool.turns import Turns
from umbp.store.bell import Bell
from umbp.store.checksums import checksums
from umbp.transport.base import Lingering
from umbp.types import I64, NOWHERE, U8, U64, Mask, ReadStatus, Tier, WriteStatus

log = logging.getLogger("umbp.pool.fetching")
BATCHES_MAX = 64
READS_MAX = 16  # at a time, over all places
PART_SHARE = 16  # a part takes at most one in this many bytes of the pool
ATTEMPTS = 2
READ_SECONDS_MAX = 2.0  # what takes longer is of no use to a prefill
FIRST_SHARE = 0.6  # of the time that is left, for the first attempt
OFFERS_SECONDS = 0.25  # pages wait this long for a source that does not say what it has,
OFFERS_SHARE = 1 / 16  # or for this share of a caller's time, if that is longer
LOCATE_SECONDS_MAX = 0.1
WRITER_SECONDS = (0.001, 0.02)  # between two looks whether another writer is done: first, longest
PEERS = -1  # of all peers' orders together


class Fetching:
    """All fetches of one pool process."""

    def __init__(
        self,
        pool: Pool,
        data: U8,
        bell: Bell,
        now: Callable[[], float],
        wake: Callable[[], None],
        sources: Sequence[Source],
        policy: str = "copy",
        turns: Turns | None = None,
    ) -> None:
        """``bell``: the segment's; rung for clients whose pages have come, or are not coming. ``policy``: see `umbp.pool.keeping`."""
        self.pool = pool
        self.data = data
        self.bell = bell
        self.now = now
        self.wake = wake
        self.sources = list(sources)
        self.turns = turns or Turns()
        self.fetches = Fetches()
        self.counts = {source.name: SourceCounts() for source in self.sources}
        self.places = Places(now)
        self.staged, self.passing = Staged(self), Passing(self)
        self.keeping = Keeping(pool, policy, self.passing)
        self._more = asyncio.Event()
        self.reads = asyncio.Semaphore(READS_MAX)
        self._batches = 0
        self._over: dict[int, asyncio.Event] = {}  # of tickets that a task of this process waits for

    def __repr__(self) -> str:
        return f"<Fetching from {', '.join(source.name for source in self.sources) or 'nowhere'}: {self.fetches!r}>"

    # -- for sessions ------------------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        now: float,
        session: int,
        row: int,
        number: int,
        keys: U8,
        before: bytes,
        seconds: float,
        *,
        stages: Sequence[Any] = (),
        passing: bool = False,
    ) -> Ticket | None:
        """A ticket for these pages; None if the namespace has another number by now. What is in DRAM already is leased at once.

        ``stages``: byte ranges of a page, in the order in which they are wanted, where the caller looks at pages before they are whole.
        ``passing``: the caller takes pages that cannot stay (`umbp.pool.passing`), and says so.
        """
        account = self.pool.find_namespace(row).account
        if number != account.number:
            return None
        found, order = self.pool.find_keys(account, keys), checked_stages(stages, account.object_bytes)
        there = found.hit if self.sources else np.ones(len(keys), bool)
        ticket = self.fetches.ask(
            now,
            names(keys),
            there,
            session=session,
            row=row,
            namespace=number,
            deadline=now + seconds,
            before=before,
            stages=order,
            passing=passing,
        )
        if not self.sources:
            ticket.status[~found.hit] = ReadStatus.MISS
        self.keeping.protect(now, ticket, names(keys[found.hit]), found.ids[found.hit], found.versions[found.hit])
        self._more.set()
        return ticket

    def taken(self, session: int, number: int, places: I64) -> None:
        """The client has these pages, indices of its keys, and those that cannot stay may go."""
        self.passing.taken(self.fetches.ticket(session, number), places)
        self.keeping.let_pass()

    def end(self, session: int, number: int) -> None:
        """The client has what it wanted, or does not want it any more."""
        ticket = self.fetches.ticket(session, number)
        self.fetches.leave(ticket)
        for lease in ticket.leases:
            self.pool.leases.release(session, lease)
        if ticket.passed:
            self.passing.end(ticket)
            self.keeping.let_pass()

    def prefetch(self, now: float, row: int, number: int, keys: U8, *, request: str, seconds: float, hold: float) -> Ticket:
        """The prefetch of this name. Conflict if it was asked for with something else."""
        account = self.pool.find_namespace(row).account
        found = self.pool.find_keys(account, keys)
        there = found.hit if self.sources and number == account.number else np.ones(len(keys), bool)
        payload = sha256(b"%f %f " % (seconds, hold) + keys.tobytes()).digest()
        ticket, fresh = self.fetches.prefetch(
            now, names(keys), there, row=row, namespace=number, request=request, payload=payload, deadline=now + seconds, hold=hold
        )
        if fresh:
            ticket.status[there & ~found.hit] = ReadStatus.MISS
            self.keeping.protect(now, ticket, names(keys[found.hit]), found.ids[found.hit], found.versions[found.hit])
            self._more.set()
        return ticket

    async def locate(self, row: int, number: int, keys: U8) -> U8:
        """The tier that each page would come from, (n,) uint8 of `Tier`; NOWHERE. What no source answers in time is nowhere."""
        account = self.pool.find_namespace(row).account
        tiers = np.full(len(keys), NOWHERE, np.uint8)
        if number != account.number:
            return tiers
        tiers[self.pool.find_keys(account, keys).hit] = Tier.DRAM
        absent = np.flatnonzero(tiers == NOWHERE)
        if len(absent) and self.sources:
            offers = await self.offers(self._space(account), keys[absent], frozenset(), self.now() + LOCATE_SECONDS_MAX, peek=True)
            for _, offer in reversed(offers):  # the cheapest last, so that it counts
                tiers[absent[offer.which]] = offer.tier
        return tiers

    async def bring(self, account: Account, keys: U8, deadline: float) -> None:
        """For a peer's order: have these pages in DRAM by then, if a source of this node has them."""
        if not any(source.local for source in self.sources) or not len(keys):
            return
        now = self.now()
        none = np.zeros(len(keys), bool)
        with contextlib.suppress(LimitReached):
            ticket = self.fetches.ask(
                now, names(keys), none, session=PEERS, row=account.row, namespace=account.number, deadline=deadline, far=False
            )
            over = self._over[ticket.number] = asyncio.Event()
            self._more.set()
            try:
                async with asyncio.timeout(max(0.0, deadline - now)):
                    await over.wait()
            except TimeoutError:
                pass
            finally:
                del self._over[ticket.number]
                self.end(PEERS, ticket.number)

    def session_ended(self, session: int) -> None:
        """Its waits end; leases go with the session."""
        self.passing.session_ended(session)
        self.fetches.end_session(session)

    # -- life --------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._more.wait()
                self._more.clear()
                while self._batches < BATCHES_MAX and (batch := self.fetches.next_batch_or_none()) is not None:
                    self._batches += 1
                    tasks.create_task(self._run(batch))

    def tick(self, now: float) -> None:
        """Let time pass: tickets end, and pages that were only passing through go."""
        self.fetches.expire(now)
        self.keeping.let_pass()

    async def close(self) -> None:
        """After `run` has ended."""
        for source in self.sources:
            await source.close()

    # -- a batch -----------------------------------------------------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        """One batch, to its end: every page lands."""
        codes = np.full(len(batch.pages), ReadStatus.FAILED, np.uint8)  # what each page that does not come ends with
        try:
            await self._fetch(batch, codes)
        except Exception:  # our own fault: these pages fail, the pool goes on
            log.exception("a batch of %d pages could not be fetched", len(batch.pages))
        finally:
            self.land(batch, np.flatnonzero([page.running for page in batch.pages]), codes)
            self._batches -= 1
            self._more.set()

    async def _fetch(self, batch: Batch, codes: U8) -> None:
        keys, excluded = batch.keys, self.places.suspects
        left = np.arange(len(keys))
        for attempt in range(ATTEMPTS):
            account = self._account_or_none(batch)
            if account is None:
                codes[left] = ReadStatus.MISS
                return
            space = self._space(account)
            if batch.deadline <= self.now():
                codes[left] = ReadStatus.BUSY
                return
            share = FIRST_SHARE if attempt == 0 else 1.0
            until = self.offers_until(batch, share)
            offers = await self.offers(space, keys[left], excluded, until, far=batch.far)
            parts, nobody = self._deal(batch, space, offers, left)
            if attempt == 0:
                codes[left[nobody]] = ReadStatus.MISS
            self.land(batch, left[nobody], codes)
            over = await asyncio.gather(*(self._take(batch, space, part, share, codes) for part in parts))
            full = [replace(part, which=each.refused) for part, each in zip(parts, over, strict=True) if len(each.refused)]
            await self.passing.bring(batch, space, full, codes)
            excluded |= {part.offer.place for part, each in zip(parts, over, strict=True) if len(each.failed)}
            left = np.sort(np.concatenate([np.empty(0, np.int64), *(each.failed for each in over)]))
            if not len(left):
                return

    def offers_until(self, batch: Batch, share: float = 1.0) -> float:
        """How long sources may take to say what they have, of this share of the time that is left."""
        now = self.now()
        left = max(0.0, batch.deadline - now)
        return now + min(share * left, max(OFFERS_SECONDS, OFFERS_SHARE * left))

    async def offers(
        self, space: Space, keys: U8, exclude: frozenset[str], deadline: float, *, peek: bool = False, far: bool = True
    ) -> list[tuple[Source, Offer]]:
        """Of all sources, the cheapest a page first. A source that fails or is late offers nothing."""

        async def ask(source: Source) -> list[tuple[Source, Offer]]:
            seconds = max(0.0, deadline - self.now())
            if self.places.is_suspect(source.name) or self.places.is_too_late(source.name, seconds):
                return []
            try:
                async with asyncio.timeout(seconds):
                    offers = await source.offers(space, keys, exclude, deadline, peek=peek)
            except (TimeoutError, DeadlineExceeded) as error:
                self.places.late(source.name, seconds, error)
                return []
            except (UmbpError, OSError) as error:
                self.places.suspect(source.name, error)
                return []
            return [(source, offer) for offer in offers if len(offer.which) and offer.place not in exclude]

        made = await asyncio.gather(*(ask(source) for source in self.sources if far or source.local))
        return sorted((pair for pairs in made for pair in pairs), key=lambda pair: pair[1].seconds / len(pair[1].which))

    def _deal(self, batch: Batch, space: Space, offers: list[tuple[Source, Offer]], left: I64) -> tuple[list[Part], Mask]:
        """Each page to the cheapest offer that has it, in parts; and the pages that nobody has, (len(left),) bool."""
        nobody = np.ones(len(left), bool)
        parts: list[Part] = []
        in_stages = 0
        room = self.pool.objects.allocator.capacity_bytes // PART_SHARE
        for source, offer in offers:
            mine = offer.which[nobody[offer.which]]
            nobody[mine] = False
            if batch.stages and offer.ranged:
                staged = self.staged.pages_max(len(mine), space, in_stages)
                in_stages += staged
                parts += [Part(source, offer, left[mine[:staged]], staged=True)] if staged else []
                mine = mine[staged:]
            step = max(1, min(source.read_bytes_max, room) // space.object_bytes)
            parts += [Part(source, offer, left[mine[start : start + step]]) for start in range(0, len(mine), step)]
        parts.sort(key=lambda part: int(part.which[0]))
        return parts, nobody

    # -- a part ------------------------------------------------------------------------------------------------------------------------

    async def _take(self, batch: Batch, space: Space, part: Part, share: float, codes: U8) -> Left:
        """Read one part; what is there lands. The pages (indices of the batch) that did not."""
        if part.staged:
            return await self.staged.take(batch, space, part, codes)
        place = self.places.of(part.offer.place)
        async with place.turns, self.reads:
            await self.turns.wait()
            now = self.now()
            if self.places.is_suspect(part.offer.place):  # it failed while this part waited for its turn
                return Left(part.which, part.which[:0])
            deadline = now + share * min(batch.deadline - now, READ_SECONDS_MAX / FIRST_SHARE)
            if deadline <= now:
                codes[part.which] = ReadStatus.BUSY
                self.land(batch, part.which, codes)
                return Left(part.which[:0], part.which[:0])
            waiting, refused, rooms = self.reserve(batch, space, part, deadline, codes)
            failed = part.which[:0]
            if len(rooms.which):
                failed = rooms.which[~await self.read(batch, space, part, rooms, deadline, codes)]
        # Without a turn, as it may take long: pages that a client is writing itself.
        return Left(np.concatenate([failed, await self.await_writers(batch, waiting, codes)]), refused)

    def reserve(self, batch: Batch, space: Space, part: Part, deadline: float, codes: U8) -> tuple[I64, I64, Rooms]:
        """Room for the pages of a part; before it those that another writer has under way, and those that can only pass through.

        What is there by now, or has no room at all, lands.
        """
        rooms = Rooms(self.pool, self.now, self.wake)
        try:
            status, mine = rooms.reserve(space.row, space.number, batch, part.which, deadline - self.now() + 1.0)
            there, full = part.which[status == WriteStatus.EXISTS], status >= WriteStatus.ALL_LEASED
            passing = self.passing.may(batch, space, part.which[full], status[full])
            refused = np.setdiff1d(part.which[full], passing)
            self.counts[part.source.name].refused += len(refused)
            codes[there], codes[refused] = ReadStatus.HIT, ReadStatus.BUSY
            self.land(batch, np.concatenate([there, refused]), codes)
        except BaseException:  # nobody else gives back what the pool itself has reserved
            rooms.give_back()
            raise
        return part.which[(status == WriteStatus.PENDING) & ~mine], passing, rooms

    async def read_over(self, batch: Batch, space: Space, part: Part, rooms: Rooms, same: Same | None, codes: U8) -> None:
        """`read` of pages of which parts may be in use, when it is the place's turn, within the time of who waits."""
        try:
            async with asyncio.timeout(max(0.0, batch.deadline - self.now())), self.places.of(part.offer.place).turns, self.reads:
                deadline = min(batch.deadline, self.now() + READ_SECONDS_MAX)
                if same is not None:
                    await same.note()
                await self.read(batch, space, part, rooms, deadline, codes, same)
        except TimeoutError:
            pass
        finally:
            rooms.give_back()

    async def read(
        self, batch: Batch, space: Space, part: Part, rooms: Rooms, deadline: float, codes: U8, same: Same | None = None
    ) -> Mask:
        """Fill these reservations and end them; which pages are stored, (len(rooms.which),) bool. ``same``: what counts of them."""
        which, counts = rooms.which, self.counts[part.source.name]
        good, sums = np.zeros(len(which), bool), np.zeros(len(which), np.uint64)
        landed = np.zeros(len(which), bool)

        def store(places: I64, made: U64) -> None:
            if same is not None:  # that takes a thread, when all is there
                return
            shown = rooms.store(places, made)
            landed[shown] = True
            codes[which[shown]] = ReadStatus.HIT
            self.land(batch, which[shown], codes, ours=rooms.ids[shown])

        began, lingers = self.now(), None
        try:
            async with asyncio.timeout(deadline - began + 0.5):  # a source bounds itself; this is for one that does not
                await self.turns.wait()
                taken = await part.source.read(space, part.offer, batch.keys[which], self.data, rooms.offsets, deadline, store)
            whole, sums = await self._whole(taken, rooms.offsets, space.object_bytes)
            good = whole if same is None else whole & await same.again()
            codes[which[taken.status == ReadStatus.MISS]] = ReadStatus.MISS
        except (UmbpError, OSError, TimeoutError) as error:
            lingers = error.settled if isinstance(error, Lingering) else None
            late = isinstance(error, TimeoutError) and (landed.any() or deadline - began < SUSPECT_FROM_SECONDS)
            if lingers or not late:
                self.places.suspect(part.offer.place, error, lingers)
        finally:
            stored = rooms.end(good, sums, lingers)
        counts.pages += int(np.count_nonzero(stored))
        counts.size_bytes += int(np.count_nonzero(stored)) * space.object_bytes
        missed = ~stored & (codes[which] == ReadStatus.MISS)
        counts.missed += int(np.count_nonzero(missed))
        counts.failed += int(np.count_nonzero(~stored & ~missed))
        codes[which[stored]] = ReadStatus.HIT
        rest = stored & ~landed
        self.land(batch, which[rest], codes, ours=rooms.ids[rest])
        return stored

    async def _whole(self, taken: Taken, offsets: I64, size: int) -> tuple[Mask, U64]:
        """Which pages match their checksums, and the sums; bytes that no source vouches for are believed."""
        good: Mask = taken.status == ReadStatus.HIT
        if taken.verified or not good.any():
            return good, taken.sums
        part = offsets[good]
        made = await asyncio.to_thread(checksums, self.data, part, np.full(len(part), size))
        wrong = (taken.sums[good] != 0) & (taken.sums[good] != made)
        sums = np.zeros(len(good), np.uint64)
        sums[good] = made
        if wrong.any():
            log.error("%d pages came with bytes that do not match their checksum", int(np.count_nonzero(wrong)))
            good[np.flatnonzero(good)[wrong]] = False
        return good, sums

    async def await_writers(self, batch: Batch, which: I64, codes: U8) -> I64:
        """Pages that a client is writing: they land when they are stored; those that it gave up failed."""
        pause, gone = WRITER_SECONDS[0], [which[:0]]
        while len(which):
            if (account := self._account_or_none(batch)) is None:
                gone.append(which)
                break
            stored = self.pool.find_keys(account, batch.keys[which]).hit
            flying = self.pool.writes.in_flight.get(batch.namespace, set())
            busy = np.fromiter((batch.pages[at].key in flying for at in which.tolist()), bool, len(which))
            codes[which[stored]] = ReadStatus.HIT
            self.land(batch, which[stored], codes)
            gone.append(which[~stored & ~busy])
            which = which[~stored & busy]
            if len(which) and self.now() >= batch.deadline:
                codes[which] = ReadStatus.BUSY
                self.land(batch, which, codes)
                break
            if len(which):
                await asyncio.sleep(pause)
                pause = min(2 * pause, WRITER_SECONDS[1])
        return np.concatenate(gone)

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def land(self, batch: Batch, which: I64, codes: U8, *, ours: I64 | None = None) -> None:
        """These pages have come to their end. In one go with the commit, so that nobody evicts what is waited for.

        ``ours``: their entries, where all of them were stored by this fetch just now; then it is for the policies to say whether they stay.
        """
        if not len(which):
            return
        now = self.now()
        waited = self.fetches.land(now, batch, which.tolist(), codes[which])
        # First who sleeps in another process: that he comes before the pages are leased for him is no matter, as nothing goes meanwhile.
        self.bell.ring((ticket.session for ticket in waited if ticket.session > 0), lacking=bool((codes[which] != ReadStatus.HIT).any()))
        for ticket in waited:
            if ticket.over and ticket.number in self._over:
                self._over[ticket.number].set()
        if (account := self._account_or_none(batch)) is not None:
            self.keeping.keep(now, account, batch, which, codes, waited, ours)
        if self.fetches.queued:
            self._more.set()  # what was not to be had near by is queued again

    def _account_or_none(self, batch: Batch) -> Account | None:
        """The account of the batch's pages; None after a flush: then nobody has pages of that number."""
        state = self.pool.namespaces.get(batch.row)
        return state.account if state is not None and state.account.number == batch.namespace else None

    def _space(self, account: Account) -> Space:
        return Space(self.pool.namespaces[account.row].digest, account.row, account.number, account.object_bytes)
