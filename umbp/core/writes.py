"""Reservations: memory that clients are filling, and the keys that are on their way.

A reservation belongs to a session, has a time limit, and ends by one commit, which says what was filled; the rest is given back. At its
limit, or when its session's connection closes while the process lives, its objects become orphans: the keys are free for other writers at
once, the memory is not reused until the writer says that it has let go (by its late commit, or on its next connection) or is dead.

A *blank* reservation has no keys yet (`umbp.core.spares`); `name` makes it one like the others.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from umbp.core.objects import LIVE, ORPHAN, RESERVED, Account, Objects, Parents
from umbp.types import I64, U8, U64, Mask, WriteStatus

RESERVATIONS_PER_SESSION_MAX = 256
DEADLINES_SPARE = 1024


@dataclass(slots=True)
class Reservation:
    """One batch being written: entry ids with their keys, in the caller's order. ``expired`` once its time was over.

    ``blank``: it has no keys yet; ``given``: its session knows of it.
    """

    number: int
    session: int
    account: Account
    namespace: int  # the namespace's number when it was made: a flush changes it
    ids: I64
    keys: list[bytes]
    parents: Parents
    fingerprints: U64
    entered: Mask  # which found a slot in the index: at half load nearly always all
    expires: float
    expired: bool = False
    blank: bool = False
    given: bool = True

    @property
    def blank_bytes(self) -> int:
        """Bytes of memory that is for no keys yet."""
        return len(self.ids) * self.account.object_bytes if self.blank else 0


class Writes:
    """All reservations of one pool."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.open: dict[int, Reservation] = {}
        self.by_session: dict[int, set[int]] = {}
        self.in_flight: dict[int, set[bytes]] = {}  # by namespace number: the keys that are being filled
        self.expired = 0
        self.blank_bytes = self.blank_keys = 0
        self._next = 1
        self._deadlines: list[tuple[float, int]] = []

    def __repr__(self) -> str:
        return f"<Writes {len(self.open)} reservations, {sum(map(len, self.in_flight.values()))} keys in flight>"

    def next_number(self) -> int:
        """Number of the next reservation."""
        self._next += 1
        return self._next - 1

    def start(
        self,
        now: float,
        number: int,
        session: int,
        account: Account,
        ids: I64,
        keys: list[bytes],
        parents: Parents,
        fingerprints: U64,
        seconds: float,
    ) -> Reservation:
        """Enter a reservation, of a `next_number`, for entries that `Objects.take` took."""
        entered = self.objects.table.enter(ids, fingerprints)
        made = Reservation(number, session, account, account.number, ids, keys, parents, fingerprints, entered, now + seconds)
        self.in_flight.setdefault(account.number, set()).update(keys)
        self._enter(made)
        return made

    def start_blank(self, now: float, session: int, account: Account, ids: I64, seconds: float) -> Reservation:
        """Enter a reservation without keys, of which its session does not know yet, for entries that `Objects.reserve` knows."""
        made = self._without_keys(session, account, ids, now + seconds)
        made.blank, made.given = True, False
        self._count_blank(made, 1)
        self._enter(made)
        return made

    def name(self, made: Reservation, account: Account, ids: I64, keys: list[bytes], parents: Parents, fingerprints: U64) -> None:
        """Say what a blank reservation is for: its first entries for these keys, which the segment has been told; the rest goes back."""
        self._count_blank(made, -1)
        self.objects.abandon(made.ids[len(ids) :])
        self.objects.assign(ids, account)
        made.blank, made.account, made.namespace = False, account, account.number
        made.ids, made.keys, made.parents, made.fingerprints = ids, keys, parents, fingerprints
        made.entered = self.objects.table.enter(ids, fingerprints)
        self.in_flight.setdefault(account.number, set()).update(keys)

    def give_back(self, made: Reservation) -> None:
        """End a reservation of which nobody writes anything: its memory is free."""
        self._drop(made)
        self.objects.abandon(made.ids)

    def _enter(self, made: Reservation) -> None:
        self.open[made.number] = made
        self.by_session.setdefault(made.session, set()).add(made.number)
        if len(self._deadlines) > 2 * len(self.open) + DEADLINES_SPARE:  # most are of writes that ended long before their time
            self._deadlines = [(open_.expires, open_.number) for open_ in self.open.values() if not open_.expired]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (made.expires, made.number))

    def finish(self, now: float, session: int, number: int, filled: Mask, sums: U64 | None) -> U8:
        """Commit what was filled and give the rest back. One status per item: stored, or refused with the reason."""
        made = self.open.get(number)
        if made is None or made.session != session:
            return np.full(len(filled), WriteStatus.EXPIRED.value, np.uint8)
        assert len(filled) == len(made.ids)
        self._drop(made)
        status = np.full(len(filled), WriteStatus.STORED.value, np.uint8)
        if made.expired:
            status[:] = WriteStatus.EXPIRED.value
        elif made.account.number != made.namespace:
            status[:] = WriteStatus.FLUSHED.value
        status[~filled & (status == WriteStatus.STORED.value)] = WriteStatus.UNAVAILABLE.value
        status[~made.entered & (status == WriteStatus.STORED.value)] = WriteStatus.KEY_LIMIT.value
        good = status == WriteStatus.STORED.value
        if good.any():
            self.objects.table.publish(made.ids[good], None if sums is None else sums[good])
            self.objects.publish(now, made.ids[good], made.parents.only(good), made.fingerprints[good])
        self.objects.abandon(made.ids[~good])
        return status

    def show(self, session: int, number: int, filled: Mask, sums: U64 | None) -> Reservation | None:
        """What is nearly always so: all was filled, in time. It is visible now; `end` must follow. None: see `finish`."""
        made = self.open.get(number)
        if made is None or made.session != session or made.expired or made.account.number != made.namespace:
            return None
        if not filled.all() or not made.entered.all():
            return None
        self.objects.table.publish(made.ids, sums)
        return made

    def end(self, now: float, made: Reservation) -> None:
        """Account for what `show` has shown."""
        self._drop(made)
        self.objects.publish(now, made.ids, made.parents, made.fingerprints)

    def finish_some(self, now: float, session: int, number: int, chosen: Mask, sums: U64) -> bool:
        """Commit these of a reservation's items, all filled; it goes on with the others. False: nothing was done; see `finish` for why."""
        made = self.open.get(number)
        if made is None or made.session != session or made.expired or made.account.number != made.namespace:
            return False
        if not made.entered[chosen].all():
            return False
        ids, table = made.ids[chosen], self.objects.table
        table.publish(ids, sums)
        self.objects.publish(now, ids, made.parents.only(chosen), made.fingerprints[chosen])
        if chosen.all():
            self._drop(made)
            return True
        self.in_flight[made.namespace].difference_update(key for key, done in zip(made.keys, chosen.tolist(), strict=True) if done)
        left = ~chosen
        parents = made.parents.only(left)
        # Pages of this batch until now: from here on they may be evicted and their ids given to others.
        shown = (parents.ids >= 0) & (parents.versions == 0) & (self.objects.state[parents.ids] == LIVE)
        made.parents = Parents(parents.ids, np.where(shown, table.versions_of(np.where(shown, parents.ids, 0)), parents.versions))
        made.keys = [key for key, more in zip(made.keys, left.tolist(), strict=True) if more]
        made.ids, made.fingerprints, made.entered = made.ids[left], made.fingerprints[left], made.entered[left]
        return True

    def split(self, session: int, number: int, chosen: Mask) -> int:
        """Make these of a reservation's items, not all, a reservation of their own; its number, 0 where nothing was done (see `finish`)."""
        made = self.open.get(number)
        if made is None or made.session != session or made.expired or chosen.all():
            return 0
        parts = []
        for part in (chosen, ~chosen):
            keys = [key for key, mine in zip(made.keys, part.tolist(), strict=True) if mine]
            ids, parents = made.ids[part], made.parents.only(part)
            # The other's pages may have been evicted, and their ids given to others, when these are shown.
            known = (parents.versions != 0) | np.isin(parents.ids, ids)
            parents = Parents(np.where(known, parents.ids, -1), parents.versions)
            parts.append((ids, keys, parents, made.fingerprints[part], made.entered[part]))
        ids, keys, parents, prints, entered = parts[0]
        other = Reservation(self.next_number(), session, made.account, made.namespace, ids, keys, parents, prints, entered, made.expires)
        made.ids, made.keys, made.parents, made.fingerprints, made.entered = parts[1]
        self._enter(other)
        return other.number

    def adopt(self, now: float, session: int, account: Account, ids: I64) -> None:
        """Orphans that a session of a former boot left: they end with it."""
        made = self._without_keys(session, account, ids, now)
        made.expired = True
        self.open[made.number] = made
        self.by_session.setdefault(session, set()).add(made.number)

    def _without_keys(self, session: int, account: Account, ids: I64, expires: float) -> Reservation:
        none = np.empty(0, np.uint64)
        parents, entered = Parents(none.view(np.int64), none), np.zeros(len(ids), bool)
        return Reservation(self.next_number(), session, account, account.number, ids, [], parents, none, entered, expires)

    @property
    def count(self) -> int:
        """Reservations of writes, those that expired included: blank ones are none yet."""
        return sum(not made.blank for made in self.open.values())

    def may_start(self, session: int) -> bool:
        """Whether this session may open one more; those that expired count until their writer lets go, blank ones do not."""
        held = self.by_session.get(session, ())
        return len(held) < RESERVATIONS_PER_SESSION_MAX or sum(not self.open[n].blank for n in held) < RESERVATIONS_PER_SESSION_MAX

    def expire(self, now: float) -> int:
        """Orphan what is over its time; how many reservations."""
        count = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            made = self.open.get(number)
            if made is None or made.expired:
                continue
            if made.given:
                self._orphan(made)
                count += 1
            else:
                self.give_back(made)
        self.expired += count
        return count

    def orphan_session(self, session: int) -> None:
        """The session's connection is gone but its process may live: free the keys, keep the memory."""
        for number in self.by_session.get(session, ()):
            if not self.open[number].expired:
                self._orphan(self.open[number])

    def end_session(self, session: int) -> None:
        """The writer is dead or has let go: give everything back."""
        for number in list(self.by_session.get(session, ())):
            self.give_back(self.open[number])

    def check(self) -> None:
        """In-flight keys are those of open reservations that are not expired, and their entries are in the right state."""
        expected: dict[int, set[bytes]] = {}
        for made in self.open.values():
            if not made.expired:
                assert expected.setdefault(made.namespace, set()).isdisjoint(made.keys)
                expected[made.namespace].update(made.keys)
            assert (self.objects.state[made.ids] == (ORPHAN if made.expired else RESERVED)).all()
        assert {namespace: keys for namespace, keys in expected.items() if keys} == self.in_flight
        assert self.blank_bytes == sum(made.blank_bytes for made in self.open.values() if not made.expired)
        assert self.blank_keys == sum(len(made.ids) for made in self.open.values() if made.blank and not made.expired)

    def _orphan(self, made: Reservation) -> None:
        self._clear_keys(made)
        if made.blank:
            self._count_blank(made, -1)
        made.expired = True
        self.objects.orphan(made.ids)

    def _drop(self, made: Reservation) -> None:
        if not made.expired:
            self._clear_keys(made)
        if made.blank and not made.expired:
            self._count_blank(made, -1)
        del self.open[made.number]
        held = self.by_session[made.session]
        held.discard(made.number)
        if not held:
            del self.by_session[made.session]

    def _count_blank(self, made: Reservation, sign: int) -> None:
        self.blank_keys += sign * len(made.ids)
        self.blank_bytes += sign * made.blank_bytes

    def _clear_keys(self, made: Reservation) -> None:
        if not made.keys:
            return
        keys = self.in_flight[made.namespace]
        keys.difference_update(made.keys)
        if not keys:
            del self.in_flight[made.namespace]
