"""Pages that there is no room for in DRAM, brought all the same for clients who take them one after the other and let go of them.

Theory of operation. When all that could make room is leased, pinned or being written, a page that an SSD or another node has cannot stay in
DRAM. It can pass through: a small part of the segment (`umbp.core.passage`) is kept for nothing else. A few pages at a time are read into
it, committed and leased for who waits; the client copies each, or moves it to its slots, and says so; what everybody who waited has taken
goes, and the next ones come:

    no room --turn--> some of the passage --read, verified, committed--> leased for who waits --taken, or too late--> gone

Only for clients that say when they ask that they will take pages so. A prefetch, or another node's order, finds them BUSY or missing.

*Bounded*: a place (a disk, a node) has one read of this kind under way, of at most one in `WINDOWS` bytes of the passage, so that one that
hangs keeps no more of it than that. A page is held for its client for `HOLD_SECONDS` at most: who was stopped in between finds it gone, and
asks again or has a miss. *Fair*: who waits for memory stands in one queue, for one window at a time, and then at its end again; a session
that holds one in `SHARE` bytes of the passage does not stand there, so that one that is stopped keeps the others from no more than that.
*No deadlock*: who waits for memory holds none, and what is held is let go by time. Who is still waiting at its deadline is told BUSY.

A page larger than the passage cannot come this way. What it costs where there is room: nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from umbp.core.allocator import rounded
from umbp.core.fetches import Batch, Passed, Ticket
from umbp.errors import LimitReached
from umbp.pool.parts import Part
from umbp.pool.rooms import Rooms
from umbp.pool.sources import Space
from umbp.types import I64, U8, U64, ReadStatus, WriteStatus

if TYPE_CHECKING:
    from umbp.pool.fetching import Fetching

WINDOWS = 4
SHARE = 2
HOARD = 0.75
HOLD_SECONDS = 10.0  # a client on a busy machine may come late; one that is stopped keeps its share for as long
READ_SECONDS_MAX = 2.0
LOOK_SECONDS = 0.005  # between two looks whether memory was let go by time
FULL = frozenset({WriteStatus.ALL_LEASED, WriteStatus.FRAGMENTED, WriteStatus.KEY_LIMIT, WriteStatus.OVER_QUOTA})


class Passing:
    """All of it in one pool."""

    def __init__(self, fetching: Fetching) -> None:
        self.fetching = fetching
        self.passage = fetching.pool.objects.passage
        self.pages = 0  # that came this way, since the start
        self._held: dict[int, int] = {}  # bytes by session
        self._queue = asyncio.Lock()  # whose holder is the next to have memory; the others in their order
        self._freed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Passing {self.pages} pages by {self.passage!r}>"

    @property
    def begins(self) -> int:
        """Where in the data pages begin to only pass through; 0 if they do nowhere."""
        return self.passage.start if self.passage.size_bytes else 0

    def may(self, batch: Batch, space: Space, which: I64, status: U8) -> I64:
        """Which of these pages, refused with a `WriteStatus` each, may come this way."""
        size = rounded(space.object_bytes)
        if size > self.passage.size_bytes or self.fetching.now() >= batch.deadline:
            return which[:0]
        wanted = [any(ticket.passing for ticket, _ in batch.pages[at].waiters) for at in which.tolist()]
        may: I64 = which[np.isin(status, list(FULL)) & np.array(wanted, bool)]
        return may

    async def bring(self, batch: Batch, space: Space, parts: Sequence[Part], codes: U8) -> None:
        """These pages, for which there was no room; all of them land."""
        await asyncio.gather(*(self._bring(batch, space, part, codes) for part in parts))

    async def _bring(self, batch: Batch, space: Space, part: Part, codes: U8) -> None:
        fetching, left = self.fetching, part.which
        place = fetching.places.of(part.offer.place)
        count = max(1, min(self.passage.size_bytes // WINDOWS, part.source.read_bytes_max) // rounded(space.object_bytes))
        codes[left] = ReadStatus.BUSY
        try:
            while len(left) and not fetching.places.is_suspect(part.offer.place):
                async with asyncio.timeout(max(0.0, batch.deadline - fetching.now())):
                    while self._enough(batch, left[:count]):
                        await self._pause()
                # What is asked of a place that hangs is asked no more at the deadline; a read that has begun there ends when it does.
                async with contextlib.AsyncExitStack() as stack:
                    async with asyncio.timeout(max(0.0, batch.deadline - fetching.now())):
                        await stack.enter_async_context(place.passing)
                        if self._enough(batch, left[:count]):
                            continue
                        rooms, left = await self._room(batch, space, left, count, codes)
                    if len(rooms.which):
                        codes[rooms.which] = ReadStatus.FAILED
                        some, deadline = Part(part.source, part.offer, rooms.which), min(batch.deadline, fetching.now() + READ_SECONDS_MAX)
                        done = await fetching.read(batch, space, some, rooms, deadline, codes)
                        self.pages += int(np.count_nonzero(done))
                        fetching.land(batch, rooms.which[~done], codes)
        except TimeoutError:
            pass
        finally:
            fetching.land(batch, np.array([at for at in part.which.tolist() if batch.pages[at].running], np.int64), codes)

    async def _room(self, batch: Batch, space: Space, left: I64, count: int, codes: U8) -> tuple[Rooms, I64]:
        """Memory for the next of these pages, in their order, when it is their turn; and those that are left then."""
        fetching = self.fetching
        async with self._queue:
            while True:
                rooms = Rooms(fetching.pool, fetching.now, fetching.wake)
                try:
                    seconds = batch.deadline - fetching.now() + 1.0
                    status, mine = rooms.reserve(space.row, space.number, batch, left[:count], seconds, passing=True)
                except BaseException:
                    rooms.give_back()
                    raise
                there = left[:count][status == WriteStatus.EXISTS]
                codes[there] = ReadStatus.HIT
                fetching.land(batch, there, codes)
                others = left[:count][(status == WriteStatus.PENDING) & ~mine]  # a client is writing them: they land BUSY with the rest
                rest = left[~np.isin(left, np.concatenate([there, others, rooms.which]))]
                if len(rooms.which) or not len(rest):
                    return rooms, rest
                left = rest
                await self._pause()

    def _enough(self, batch: Batch, which: I64) -> bool:
        """Whether all sessions that wait for these have their share already, and are to take some of it first."""
        waiting = {ticket.session for at in which.tolist() for ticket, _ in batch.pages[at].waiters if ticket.passing}
        return bool(waiting) and all(self._held.get(session, 0) * SHARE >= self.passage.size_bytes for session in waiting)

    async def _pause(self) -> None:
        """Until something was let go of, or for a moment."""
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._freed.wait()

    # -- for who waits -----------------------------------------------------------------------------------------------------------------

    def hold(self, now: float, ticket: Ticket, keys: Sequence[bytes], ids: I64, versions: U64) -> None:
        """Lease these for a moment for who waits, unless it waits for somebody else's pages and takes none of them."""
        if ticket.passing and len(ids) and self._held.get(ticket.session, 0) < HOARD * self.passage.size_bytes:
            with contextlib.suppress(LimitReached):
                pool = self.fetching.pool
                lease, _ = pool.leases.grant(now, ticket.session, ids, versions, HOLD_SECONDS, passing=True)
                size = int(pool.objects.size[lease.ids].sum())
                ticket.passed[lease.number] = Passed(set(keys), size)
                self._count(ticket.session, size)

    def taken(self, ticket: Ticket, places: I64) -> None:
        """Its client has these pages (indices of its keys), and needs them no more."""
        keys = {ticket.keys[at] for at in places.tolist() if 0 <= at < len(ticket.keys)}
        for number, passed in list(ticket.passed.items()):
            passed.keys -= keys
            if not passed.keys:
                self._release(ticket, number)

    def end(self, ticket: Ticket) -> None:
        """Its client wants nothing any more."""
        for number in list(ticket.passed):
            self._release(ticket, number)

    def session_ended(self, session: int) -> None:
        """Its leases went with it."""
        if self._held.pop(session, 0):
            self._freed.set()

    def _release(self, ticket: Ticket, number: int) -> None:
        self._count(ticket.session, -ticket.passed.pop(number).size_bytes)
        self.fetching.pool.leases.release(ticket.session, number)
        self._freed.set()

    def _count(self, session: int, size_bytes: int) -> None:
        held = self._held.pop(session, 0) + size_bytes
        if held > 0:
            self._held[session] = held
