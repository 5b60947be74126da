"""Pages on their way into this node's DRAM: who waits for which, which come next, and what became of each.

Theory of operation
-------------------
A request for pages that are not in DRAM is a *ticket*: a list of keys of one namespace, a deadline, one status a key. All tickets that want
the same page of the same namespace share one entry in `Fetches.pages`, so a page is fetched once, whoever asks:

    (asked for) -> QUEUED --next_batch--> RUNNING --land--> (gone; its waiters have its status)
                   QUEUED --the last waiter leaves--> (gone)

A page that is RUNNING ends by `land` alone: who leaves cancels its own wait, not the fetch. Pages that somebody waits for (urgent) go
before those of prefetches; a page of a prefetch that somebody comes to wait for moves up.

A load that wants its first layers first says in which stages its pages are to be read (`umbp.core.stages`); pages of one batch have the
same.

A ticket that is not *far* is for what this node has itself (a peer's order): its pages are fetched from local sources only. A page that
both kinds want is fetched as a far one; who comes with a far ticket while it is being looked for near by has it queued again if that fails.
So has who came with more time than those for whom it was begun: a read is given the time that they have, and fails with it.

A ticket is over when none of its keys is PENDING, or at its deadline: then what is not there is BUSY, what is there counts. It stays until
its session ends it, dies, or its time to fetch the answer is over.

Prefetches are tickets without a session, named by their caller (``request``): the same name with the same keys is the same prefetch and
gets the same answer, with other keys it is refused. They are kept for `KEEP_SECONDS` after their end, so that who asks late still hears.

Bounded: pages on their way, tickets a session, prefetches. Cost: about 1 us a key and step, in dicts; what is fetched costs far more.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from umbp.core.stages import Ranges
from umbp.errors import Conflict, LimitReached, NotFound
from umbp.types import PENDING, U8, Mask, PrefetchState, ReadStatus

PAGES_MAX = 1 << 16  # on their way at a time
TICKETS_PER_SESSION_MAX = 64
PREFETCHES_MAX = 4096
KEEP_SECONDS = 60.0
SWEEP_SECONDS = 1.0
DEADLINES_SPARE = 1024
BATCH_PAGES_MAX = 1024

Name: TypeAlias = tuple[int, bytes]  # number of the namespace, key


@dataclass(slots=True)
class Page:
    """One page on its way. ``before``: the key before it in the list of who asked first, or b"": the policies' hint.

    ``stages``: the order of who asked first for one.
    """

    key: bytes
    before: bytes
    urgent: bool
    far: bool
    stages: tuple[Ranges, ...] = ()
    running: bool = False
    waiters: list[tuple[Ticket, int]] = field(default_factory=list)


@dataclass(slots=True)
class Passed:
    """Pages that cannot stay and are leased for a ticket: those that its client has not taken, and bytes of all of them."""

    keys: set[bytes]
    size_bytes: int


@dataclass(slots=True, eq=False)
class Ticket:
    """One request. ``status`` (n,) uint8: a `ReadStatus` a key, or PENDING; ``left`` how many are. ``session`` 0: a prefetch."""

    number: int
    session: int
    row: int
    namespace: int
    keys: list[bytes]
    status: U8
    left: int
    deadline: float
    request: str = ""
    payload: bytes = b""
    hold: float = 0.0  # seconds that a prefetch keeps its pages from eviction
    far: bool = True  # other nodes may be asked
    stages: tuple[Ranges, ...] = ()
    started: bool = False
    expired: bool = False
    over_at: float = float("inf")
    leases: list[int] = field(default_factory=list)  # the shell's: what protects the pages that are there
    passing: bool = False  # its client takes pages that cannot stay, and says so
    passed: dict[int, Passed] = field(default_factory=dict)  # the shell's, by lease: such pages that it has not taken

    @property
    def over(self) -> bool:
        """Whether no status will change any more."""
        return self.left == 0

    @property
    def state(self) -> PrefetchState:
        """As a prefetch."""
        if self.expired:
            return PrefetchState.EXPIRED
        if self.left:
            return PrefetchState.RUNNING if self.started else PrefetchState.QUEUED
        hits = int(np.count_nonzero(self.status == ReadStatus.HIT))
        return PrefetchState.READY if hits == len(self.keys) else PrefetchState.PARTIAL if hits else PrefetchState.FAILED


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pages of one namespace that are fetched together, in the order they were asked for."""

    row: int
    namespace: int
    pages: tuple[Page, ...]
    keys: U8  # (n, 32)
    far: bool
    until: float  # the deadline when it began
    stages: tuple[Ranges, ...] = ()

    @property
    def deadline(self) -> float:
        """The last of those who wait for one of them *now*; minus infinity if nobody does."""
        return _deadline(self.pages)


@dataclass(frozen=True, slots=True)
class FetchStatistics:
    """Counts since the start, and what is on its way."""

    pages: int
    queued: int
    tickets: int
    prefetches: int
    asked: int
    merged: int
    landed: int
    missed: int
    failed: int
    expired: int


class Fetches:
    """All fetches of one pool."""

    def __init__(self) -> None:
        self.pages: dict[Name, Page] = {}
        self.tickets: dict[int, Ticket] = {}
        self.by_session: dict[int, dict[int, Ticket]] = {}
        self.prefetches: OrderedDict[tuple[int, str], Ticket] = OrderedDict()  # by row and request; the oldest first
        self._urgent: OrderedDict[Name, int] = OrderedDict()  # queued pages and their row
        self._idle: OrderedDict[Name, int] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []
        self._next = 1
        self._swept = float("-inf")
        self._count = {"asked": 0, "merged": 0, "landed": 0, "missed": 0, "failed": 0, "expired": 0}

    def __repr__(self) -> str:
        return f"<Fetches {len(self.pages)} pages on their way, {len(self.tickets)} tickets>"

    # -- asking ------------------------------------------------------------------------------------------------------------------------

    def ask(
        self,
        now: float,
        keys: list[bytes],
        there: Mask,
        *,
        session: int,
        row: int,
        namespace: int,
        deadline: float,
        before: bytes = b"",
        hold: float = 0.0,
        far: bool = True,
        stages: tuple[Ranges, ...] = (),
        passing: bool = False,
    ) -> Ticket:
        """A ticket for these keys. ``there``: which are in DRAM already. ``before``: the key before the first, or b"".

        ``row`` and ``namespace``: the namespace's row and the number that it has now.

        LimitReached changes nothing.
        """
        mine = self.by_session.get(session, {})
        if session and len(mine) >= TICKETS_PER_SESSION_MAX:
            raise LimitReached(f"this session waits for {len(mine)} fetches, which is the limit", field="fetch")
        status = np.where(there, ReadStatus.HIT, PENDING).astype(np.uint8)
        ticket = Ticket(self._next, session, row, namespace, keys, status, int(np.count_nonzero(~there)), deadline, hold=hold, far=far)
        ticket.stages, ticket.passing = stages, passing
        self._next += 1
        self.tickets[ticket.number] = ticket
        if session:
            self.by_session.setdefault(session, {})[ticket.number] = ticket
        if len(self._deadlines) > 2 * len(self.tickets) + DEADLINES_SPARE:  # most are of tickets that ended long before their time
            self._deadlines = [(each.deadline, each.number) for each in self.tickets.values() if not each.over]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (deadline, ticket.number))
        for at in np.flatnonzero(~there).tolist():
            self._want(ticket, at, keys[at - 1] if at else before)
        if ticket.over:
            ticket.over_at = now
        return ticket

    def prefetch(
        self,
        now: float,
        keys: list[bytes],
        there: Mask,
        *,
        row: int,
        namespace: int,
        request: str,
        payload: bytes,
        deadline: float,
        hold: float,
    ) -> tuple[Ticket, bool]:
        """The prefetch of this name, and whether it is new. Conflict if it was asked for with another ``payload``, a digest of it."""
        known = self.prefetches.get((row, request))
        if known is not None:
            if known.payload != payload:
                raise Conflict(f"the prefetch {request!r} was asked for with other keys or another deadline", field="request_id")
            return known, False
        if len(self.prefetches) >= PREFETCHES_MAX:  # else `expire` does it, once for many
            self._forget_prefetches(now)
        if len(self.prefetches) >= PREFETCHES_MAX:
            raise LimitReached(f"{len(self.prefetches)} prefetches are under way, which is the limit", field="prefetch")
        ticket = self.ask(now, keys, there, session=0, row=row, namespace=namespace, deadline=deadline, hold=hold)
        ticket.request, ticket.payload = request, payload
        self.prefetches[row, request] = ticket
        return ticket, True

    def prefetched(self, row: int, request: str) -> Ticket:
        """The prefetch of this name. NotFound if there is none (any more)."""
        ticket = self.prefetches.get((row, request))
        if ticket is None:
            raise NotFound(f"no prefetch {request!r}, or it ended more than {KEEP_SECONDS:g} s ago", field="request_id")
        return ticket

    def ticket(self, session: int, number: int) -> Ticket:
        """A ticket of this session. NotFound if it has none of this number (any more)."""
        ticket = self.by_session.get(session, {}).get(number)
        if ticket is None:
            raise NotFound(f"this session waits for no fetch {number}", field="fetch")
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Its caller is not interested any more: only its own wait ends."""
        self._drop_waits(ticket)
        del self.tickets[ticket.number]
        mine = self.by_session[ticket.session]
        del mine[ticket.number]
        if not mine:
            del self.by_session[ticket.session]

    def end_session(self, session: int) -> None:
        """The session is gone; its prefetches go on."""
        for ticket in list(self.by_session.get(session, {}).values()):
            self.leave(ticket)

    # -- fetching ----------------------------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Pages that wait for their turn."""
        return len(self._urgent) + len(self._idle)

    def next_batch_or_none(self, pages_max: int = BATCH_PAGES_MAX) -> Batch | None:
        """The pages to fetch next, of one namespace; they are RUNNING from now on, and each must `land`."""
        queue = self._urgent or self._idle
        if not queue:
            return None
        (namespace, key), row = next(iter(queue.items()))
        far, stages = self.pages[namespace, key].far, self.pages[namespace, key].stages
        pages: list[Page] = []
        while queue and len(pages) < pages_max:
            name = next(iter(queue))
            page = self.pages[name]
            if name[0] != namespace or page.far != far or page.stages != stages:
                break
            del queue[name]
            page.running = True
            pages.append(page)
            for ticket, _ in page.waiters:
                ticket.started = True
        every = np.frombuffer(b"".join([page.key for page in pages]), np.uint8).reshape(-1, 32)
        return Batch(row, namespace, tuple(pages), every, far, _deadline(pages), stages)

    def land(self, now: float, batch: Batch, which: list[int], status: U8) -> dict[Ticket, list[int]]:
        """These pages of the batch (indices) have come to an end with this status each. Who waited, and for which of them (indices)."""
        waited: dict[Ticket, list[int]] = {}
        counts = self._count
        for at, code in zip(which, status.tolist(), strict=True):
            page = batch.pages[at]
            assert page.running, "a page lands twice, or was never fetched"
            page.running = False
            del self.pages[batch.namespace, page.key]
            counts["landed" if code == ReadStatus.HIT else "missed" if code == ReadStatus.MISS else "failed"] += 1
            waiters, page.waiters = page.waiters, []
            if code != ReadStatus.HIT and not batch.far:
                waiters = self._again(batch, page, waiters, lambda ticket: ticket.far)
            elif code == ReadStatus.FAILED:
                waiters = self._again(batch, page, waiters, lambda ticket: ticket.deadline > batch.until)
            for ticket, place in waiters:
                ticket.status[place] = code
                ticket.left -= 1
                waited.setdefault(ticket, []).append(at)
                if ticket.over:
                    ticket.over_at = now
        return waited

    def expire(self, now: float) -> None:
        """Tickets whose deadline has come are over; those that ended long ago, and nobody asked for, are forgotten."""
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self.tickets.get(heapq.heappop(self._deadlines)[1])
            if ticket is not None and not ticket.over:
                self._count["expired"] += ticket.left
                self._drop_waits(ticket)
                ticket.expired = True
                ticket.over_at = now
        if now >= self._swept + SWEEP_SECONDS:
            self._swept = now
            self._forget_prefetches(now)
            for ticket in [each for mine in self.by_session.values() for each in mine.values() if each.over_at <= now - KEEP_SECONDS]:
                self.leave(ticket)

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def statistics(self) -> FetchStatistics:
        """A snapshot."""
        return FetchStatistics(len(self.pages), self.queued, len(self.tickets), len(self.prefetches), **self._count)

    def check(self) -> None:
        """Each page is queued or running, and its waiters are exactly the tickets that have it PENDING."""
        expected: dict[Name, list[tuple[int, int]]] = {}
        for ticket in self.tickets.values():
            pending = np.flatnonzero(ticket.status == PENDING)
            assert len(pending) == ticket.left
            for at in pending.tolist():
                expected.setdefault((ticket.namespace, ticket.keys[at]), []).append((ticket.number, at))
        for name, page in self.pages.items():
            waiters = sorted((ticket.number, at) for ticket, at in page.waiters)
            assert waiters == sorted(expected.pop(name, [])), name
            assert page.running or page.waiters, "a page is queued that nobody wants"
            assert page.running != (name in self._urgent or name in self._idle), "a page is in two states"
        assert not expected, "a ticket waits for a page that is not on its way"
        assert not self._urgent.keys() & self._idle.keys()
        assert len(self.pages) <= PAGES_MAX
        for number, ticket in self.tickets.items():
            assert ticket.number == number
            assert ticket.session == 0 or self.by_session[ticket.session][number] is ticket

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def _want(self, ticket: Ticket, at: int, before: bytes) -> None:
        name = (ticket.namespace, ticket.keys[at])
        page = self.pages.get(name)
        urgent = ticket.session != 0
        self._count["asked"] += 1
        if page is None:
            if len(self.pages) >= PAGES_MAX:
                ticket.status[at] = ReadStatus.BUSY
                ticket.left -= 1
                return
            page = self.pages[name] = Page(name[1], before, urgent, ticket.far, ticket.stages)
            (self._urgent if urgent else self._idle)[name] = ticket.row
        else:
            self._count["merged"] += 1
            ticket.started |= page.running
            page.far |= ticket.far and not page.running
            page.stages = page.stages or (() if page.running else ticket.stages)
            if urgent and not page.urgent:
                page.urgent = True
                if not page.running:
                    self._urgent[name] = self._idle.pop(name)
        page.waiters.append((ticket, at))

    def _again(
        self, batch: Batch, page: Page, waiters: list[tuple[Ticket, int]], may: Callable[[Ticket], bool]
    ) -> list[tuple[Ticket, int]]:
        """A page that was not to be had is queued again, to come from anywhere, for those who ``may`` have more luck; the others."""
        more = [(ticket, place) for ticket, place in waiters if may(ticket)]
        if more:
            name = (batch.namespace, page.key)
            urgent = any(ticket.session for ticket, _ in more)
            self.pages[name] = Page(page.key, page.before, urgent, True, waiters=more)
            (self._urgent if urgent else self._idle)[name] = batch.row
        return [(ticket, place) for ticket, place in waiters if not may(ticket)]

    def _drop_waits(self, ticket: Ticket) -> None:
        """Take it off the pages that it waits for; what nobody wants then and has not begun goes."""
        for at in np.flatnonzero(ticket.status == PENDING).tolist():
            name = (ticket.namespace, ticket.keys[at])
            page = self.pages[name]
            page.waiters.remove((ticket, at))
            if not page.waiters and not page.running:
                del self.pages[name]
                (self._urgent if name in self._urgent else self._idle).pop(name)
            ticket.status[at] = ReadStatus.BUSY
        ticket.left = 0

    def _forget_prefetches(self, now: float) -> None:
        """The oldest ones that ended long ago; where there is no room for more, those that ended at all."""
        late = now - (KEEP_SECONDS if len(self.prefetches) < PREFETCHES_MAX else 0.0)
        gone = [name for name, ticket in self.prefetches.items() if ticket.over_at <= late]
        for name in gone:
            del self.tickets[self.prefetches.pop(name).number]


def _deadline(pages: Sequence[Page]) -> float:
    return max((ticket.deadline for page in pages for ticket, _ in page.waiters), default=float("-inf"))
