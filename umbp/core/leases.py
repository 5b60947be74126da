"""Leases and pins: what protects exact versions of objects, for whom, how long.

A lease belongs to a session and has a time limit and a share of the pool; a pin belongs to a session or to an operator and may have none.
Both end at their limit, by release, or with their session. A leased object that is removed stays in memory until the last lease ends; a
pin does not outlive the object's visibility, so it remembers versions and skips what is gone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from umbp.core.objects import LIVE, Objects
from umbp.errors import LimitReached, NotFound
from umbp.types import I64, U64, Mask

LEASES_PER_SESSION_MAX = 1024
PINS_MAX = 4096
DEADLINES_SPARE = 1024


@dataclass(slots=True)
class Lease:
    """One grant: distinct entry ids until a time."""

    number: int
    session: int
    ids: I64
    expires: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin: entry ids and the versions they had; ``session`` 0 is the operator's."""

    number: int
    session: int
    ids: I64
    versions: U64
    expires: float
    note: str


class Leases:
    """All leases and pins of one pool."""

    def __init__(self, objects: Objects, *, seconds_max: float, bytes_max: int) -> None:
        self.objects = objects
        self.seconds_max = seconds_max
        self.bytes_max = bytes_max
        self.leases: dict[int, Lease] = {}
        self.pins: dict[int, Pin] = {}
        self.by_session: dict[int, set[int]] = {}
        self.lost = 0  # leases ended by their time limit
        self._next = 1
        self._deadlines: list[tuple[float, int]] = []  # a heap; entries of renewed or ended leases are skipped when they come up

    def __repr__(self) -> str:
        return f"<Leases {len(self.leases)} leases of {len(self.by_session)} sessions, {len(self.pins)} pins>"

    def grant(self, now: float, session: int, ids: I64, versions: U64, seconds: float, *, passing: bool = False) -> tuple[Lease, Mask]:
        """Lease those of these objects that are still there; the mask says which. LimitReached changes nothing.

        One that has moved since is leased where it is now: who asks looks again where that is (`umbp.core.levels`).
        What only passes through (`umbp.core.passage`) is held for nobody, but for ``passing``: then it is all that is held.
        """
        objects = self.objects
        held: Mask = (objects.state[ids] == LIVE) & objects.same(ids, versions)
        held &= objects.row[ids] >= 0  # flushed objects are gone, though their removal is still under way
        held &= objects.passing(ids) == passing
        distinct = np.unique(ids[held])
        mine = self.by_session.get(session, set())
        if len(mine) >= LEASES_PER_SESSION_MAX:
            raise LimitReached(f"this session holds {len(mine)} leases, the limit is {LEASES_PER_SESSION_MAX}: release some", field="lease")
        added = 0 if passing else int(objects.size[distinct[objects.leases[distinct] == 0]].sum())  # what passes has a share of its own
        if objects.leased_bytes + added > self.bytes_max:
            raise LimitReached(
                f"{objects.leased_bytes} bytes are leased, {added} more would pass the limit of {self.bytes_max}",
                field="lease_share",
            )
        seconds = min(seconds, self.seconds_max)
        lease = Lease(self._number(), session, distinct, now + seconds, seconds)
        objects.lease(distinct)
        self.leases[lease.number] = lease
        self.by_session.setdefault(session, set()).add(lease.number)
        self._remember(lease)
        return lease, held

    def renew(self, now: float, session: int, numbers: list[int]) -> list[int]:
        """Start these leases' time again; the numbers that are no longer held by this session."""
        lost = []
        for number in numbers:
            lease = self.leases.get(number)
            if lease is None or lease.session != session:
                lost.append(number)
            else:
                lease.expires = now + lease.seconds
                self._remember(lease)
        return lost

    def release(self, session: int, number: int) -> bool:
        """End a lease; False if this session does not hold it (any more)."""
        lease = self.leases.get(number)
        if lease is None or lease.session != session:
            return False
        self._end(lease)
        return True

    def expire(self, now: float) -> int:
        """End what is over, leases and pins; how many leases were lost by it."""
        lost = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            lease = self.leases.get(number)
            if lease is not None and lease.expires <= now:
                self._end(lease)
                lost += 1
        for pin in [pin for pin in self.pins.values() if pin.expires <= now]:
            self.unpin(pin.number)
        self.lost += lost
        return lost

    def end_session(self, session: int) -> None:
        """Everything of a session that is gone."""
        for number in list(self.by_session.get(session, ())):
            self._end(self.leases[number])
        for pin in [pin for pin in self.pins.values() if pin.session == session]:
            self.unpin(pin.number)

    def pin(self, now: float, session: int, ids: I64, seconds: float, note: str) -> Pin:
        """Pin these objects (those that are live), until a time or, with 0 seconds, until taken back."""
        if len(self.pins) >= PINS_MAX:
            raise LimitReached(f"there are {len(self.pins)} pins, the limit is {PINS_MAX}: take some back", field="pins")
        distinct = np.unique(ids[(self.objects.state[ids] == LIVE) & ~self.objects.passing(ids)])
        expires = now + seconds if seconds else float("inf")
        pin = Pin(self._number(), session, distinct, self.objects.table.versions_of(distinct), expires, note)
        self.objects.pin(distinct)
        self.pins[pin.number] = pin
        return pin

    def restore(self, pin: Pin) -> bool:
        """A pin of a former boot, of those of its objects that are there still, at the version that they had; False if none is."""
        known = (pin.ids >= 0) & (pin.ids < self.objects.capacity)
        ids, versions = pin.ids[known], pin.versions[known]
        same = (self.objects.state[ids] == LIVE) & (self.objects.table.versions_of(ids) == versions)
        distinct = np.unique(ids[same])
        if not len(distinct):
            return False
        self.objects.pin(distinct)
        self.pins[pin.number] = replace(pin, ids=distinct, versions=self.objects.table.versions_of(distinct))
        self._next = max(self._next, pin.number + 1)
        return True

    def unpin(self, number: int) -> None:
        """Take a pin back."""
        pin = self.pins.pop(number, None)
        if pin is None:
            raise NotFound(f"no pin {number}", field="pin")
        self.objects.unpin(pin.ids[self.objects.table.versions_of(pin.ids) == pin.versions])

    def check(self) -> None:
        """Counts on objects are the sums over leases and pins."""
        expected = np.zeros(self.objects.capacity, np.int64)
        for lease in self.leases.values():
            expected[lease.ids] += 1
        assert np.array_equal(expected, self.objects.leases), "lease counts differ"
        expected[:] = 0
        for pin in self.pins.values():
            expected[pin.ids[self.objects.table.versions_of(pin.ids) == pin.versions]] += 1
        assert np.array_equal(expected, self.objects.pins), "pin counts differ"
        assert {n for held in self.by_session.values() for n in held} == set(self.leases)

    def _end(self, lease: Lease) -> None:
        del self.leases[lease.number]
        held = self.by_session[lease.session]
        held.discard(lease.number)
        if not held:
            del self.by_session[lease.session]
        self.objects.unlease(lease.ids)

    def _remember(self, lease: Lease) -> None:
        """Enter its deadline; who renews or releases often must not make the heap grow until the first deadline comes."""
        if len(self._deadlines) > 2 * len(self.leases) + DEADLINES_SPARE:
            self._deadlines = [(each.expires, each.number) for each in self.leases.values()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (lease.expires, lease.number))

    def _number(self) -> int:
        self._next += 1
        return self._next - 1
