"""Reserve and commit, each in two halves: what its client waits for, and the rest.

Theory of operation. A writer waits for two answers, and each answer needs some hundred NumPy calls, most of them for the accounts. So
`begin_reserve` and `begin_commit` do what the answer needs (find, take memory, enter it in the segment; show what was filled), and
`settle` does the rest when the answer is on its way: states, accounts, the keys in flight, slots in the index, parents. The shell calls it
before it looks at anything else, so nobody sees the two halves apart; a crash between them leaves what one before both would: memory that
is reserved in the segment, or objects that are committed there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from umbp.core.objects import Account, Objects, Parents
from umbp.core.room import Room
from umbp.core.writes import Reservation, Writes
from umbp.errors import InvalidRequest
from umbp.policies.base import AdmissionPolicy
from umbp.store.index import Found, IndexWriter, hashes, key_words, nothing_found, place_word
from umbp.types import I64, U8, U64, Mask, WriteStatus


class Kind(Enum):
    """Of a write: what is put, if the admission policy lets it; what is fetched; what is fetched and only passes through its passage."""

    PUT = 1
    FETCH = 2
    PASS = 3


PUT, FETCH, PASS = Kind


@dataclass(frozen=True, slots=True)
class Absent:
    """What is to be written of some keys: a status an item (PENDING or EXISTS), ``mine`` those to write, as words, names and hashes too."""

    status: U8
    mine: Mask
    found: Found
    words: U64
    names: list[bytes]
    prints: U64
    place: np.uint64

    def only(self, chosen: I64) -> tuple[U64, list[bytes], U64]:
        """Words, names and hashes of these items."""
        if len(chosen) == len(self.names):
            return self.words, self.names, self.prints
        return self.words[chosen], [self.names[i] for i in chosen.tolist()], self.prints[chosen]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to `reserve`: a status an item; for the PENDING-to-be-filled ones (``mine``) entry id and offset, in order."""

    number: int
    status: U8
    mine: Mask
    ids: I64
    offsets: I64


def flushed(count: int) -> Reserved:
    """The answer to a writer whose namespace was flushed."""
    none = np.empty(0, np.int64)
    return Reserved(0, np.full(count, WriteStatus.FLUSHED.value, np.uint8), np.zeros(count, bool), none, none)


class Puts:
    """Writes of one pool. ``stored`` is told the ids of what was committed without a checksum."""

    def __init__(self, table: IndexWriter, objects: Objects, room: Room, reservation_seconds: float, stored: Callable[[I64], None]) -> None:
        self.table = table
        self.objects = objects
        self.room = room
        self.writes = Writes(objects)
        self.admission: AdmissionPolicy | None = None  # None: everything is stored
        self._reservation_seconds = reservation_seconds
        self._stored = stored
        self._rest: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Puts {self.writes!r}>"

    def begin_reserve(self, now: float, session: int, account: Account, keys: U8, parent: bytes, seconds: float, kind: Kind) -> Reserved:
        """Room for what is absent of these keys, as far as the client waits for it. `settle` must follow."""
        absent = self._absent(account, keys)
        status, mine, found = absent.status, absent.mine, absent.found
        if kind is PUT and self.admission is not None and mine.any():
            admitted = self.admission.admit(now, absent.prints[mine], fill=self._fill())
            if not admitted.all():
                declined = np.flatnonzero(mine)[~admitted]
                status[declined] = WriteStatus.NOT_ADMITTED.value
                mine[declined] = False
        if not self.writes.may_start(session):
            status[mine] = WriteStatus.TOO_MANY_RESERVATIONS.value
            mine[:] = False
        offsets = self._make_room(now, session, account, found, status, mine, passing=kind is PASS)
        if not len(offsets):
            return Reserved(0, status, mine, np.empty(0, np.int64), offsets)
        chosen = np.flatnonzero(mine)
        words, names, prints = absent.only(chosen)
        ids = self.objects.take(words, absent.place, offsets, session)
        reserved = Reserved(self.writes.next_number(), status, mine, ids, offsets)

        def rest() -> None:
            self.objects.reserve(account, ids, offsets)
            parents = self._parents(account, found, chosen, ids, parent, absent.place)
            limit = min(seconds or self._reservation_seconds, self._reservation_seconds)
            self.writes.start(now, reserved.number, session, account, ids, names, parents, prints, limit)

        self._rest = rest
        return reserved

    def use_spare(self, session: int, account: Account, number: int, keys: U8, parent: bytes) -> bool:
        """The client fills these keys into its spare memory; False if it cannot be used for them, and the commit will say so.

        It is for batches that are new as a whole. Pages that are stored, or that others are writing, are being filled in all the same:
        their memory could not be given to anyone before the commit.
        """
        made = self.writes.open.get(number)
        if made is None or made.session != session or not made.blank or not made.given or made.expired:
            return False
        if account.quota_bytes or self.admission is not None or account.object_bytes != made.account.object_bytes:
            return False
        if not 0 < len(keys) <= len(made.ids):
            return False
        absent = self._absent(account, keys)
        if not absent.mine.all():
            return False
        ids = made.ids[: len(keys)]
        self.table.name_reserved(ids, absent.words, absent.place)
        parents = self._parents(account, absent.found, np.arange(len(keys)), ids, parent, absent.place)
        self.writes.name(made, account, ids, absent.names, parents, absent.prints)
        return True

    def _absent(self, account: Account, keys: U8) -> Absent:
        words, place = key_words(keys), place_word(account.number, account.object_bytes)
        prints = hashes(words, np.uint64(account.number), self.table.seed)
        status = np.full(len(keys), WriteStatus.PENDING.value, np.uint8)
        if self.table.none_of(prints):  # nearly always
            found = nothing_found(len(keys))
        else:
            found = self.table.find(words, account.number, place, prints)
            status[found.hit] = WriteStatus.EXISTS.value
        names: list[bytes] = words.view("V32").reshape(-1).tolist()
        return Absent(status, self._first_of_absent(account, found.hit, names), found, words, names, prints, place)

    def _make_room(self, now: float, session: int, account: Account, found: Found, status: U8, mine: Mask, *, passing: bool) -> I64:
        """Memory for what is ``mine``; what there is none for is not mine any more, and its ``status`` says why."""
        stored, count = found.ids[found.hit], int(np.count_nonzero(mine))
        if passing:
            offsets, reason = self.room.make_passage(account, count)
        elif len(stored):
            self.objects.acknowledged_at[stored] = now
            with self.objects.held(stored):  # what is answered EXISTS must not be what makes room for the rest
                offsets, reason = self.room.make_room(now, account, count, session)
        else:
            offsets, reason = self.room.make_room(now, account, count, session)
        if len(offsets) < count:
            over = np.flatnonzero(mine)[len(offsets) :]
            status[over], mine[over] = reason, False
        if len(offsets) < len(mine):
            self._count_refused(account, status)
        return offsets

    def begin_commit(self, now: float, session: int, number: int, filled: Mask, sums: U64 | None) -> U8:
        """End a reservation, as far as its client waits for it; a status an item. `settle` must follow."""
        made = self.writes.open.get(number)
        if made is not None and made.session == session and made.blank:  # it was not used, or could not be
            self.writes.give_back(made)
            return np.full(len(filled), WriteStatus.EXPIRED.value, np.uint8)
        if made is not None and len(filled) != len(made.ids):
            raise InvalidRequest(f"{len(filled)} items, the reservation has {len(made.ids)}", field="filled")
        if made is not None and self.writes.show(session, number, filled, sums):
            self._rest = lambda: self._committed(now, made, sums)
            return np.full(len(filled), WriteStatus.STORED.value, np.uint8)
        status = self.writes.finish(now, session, number, filled, sums)
        if made is not None:
            self._count_refused(made.account, status)
            if sums is None:
                self._stored(made.ids[status == WriteStatus.STORED.value])
        return status

    def _committed(self, now: float, made: Reservation, sums: U64 | None) -> None:
        self.writes.end(now, made)
        if sums is None:
            self._stored(made.ids)

    def settle(self) -> None:
        """Account for what the last `begin_...` has answered: its client need not wait for it, everyone else must."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()

    def _first_of_absent(self, account: Account, hit: Mask, names: list[bytes]) -> Mask:
        """Keys to write: not stored, not in flight, and the first of their kind in the batch."""
        mine = ~hit
        absent = [names[i] for i in np.flatnonzero(mine).tolist()] if hit.any() else names
        busy = self.writes.in_flight.get(account.number, set())
        if len(set(absent)) == len(absent) and busy.isdisjoint(absent):  # nearly always
            return mine
        seen = set(busy)
        for i in np.flatnonzero(mine).tolist():
            mine[i] = names[i] not in seen
            seen.add(names[i])
        return mine

    def _parents(self, account: Account, found: Found, chosen: I64, ids: I64, parent: bytes, place: np.uint64) -> Parents:
        """The page before each written one. ``found`` is what was stored before room was made for these."""
        entry, version = np.full(len(found.hit) + 1, -1), np.zeros(len(found.hit) + 1, np.uint64)
        entry[1:][found.hit], version[1:][found.hit] = found.ids[found.hit], found.versions[found.hit]
        entry[1:][chosen], version[1:][chosen] = ids, 0
        if parent:
            first = self.table.find(key_words(np.frombuffer(parent, np.uint8)), account.number, place)
            entry[0], version[0] = (first.ids[0], first.versions[0]) if first.hit[0] else (-1, 0)
        return Parents(entry[:-1][chosen], version[:-1][chosen])

    def _fill(self) -> float:
        return self.objects.allocated_bytes() / max(1, self.objects.allocator.capacity_bytes)

    def _count_refused(self, account: Account, status: U8) -> None:
        if (refused := status[status >= 16]).size:
            for value, count in zip(*np.unique(refused, return_counts=True), strict=True):
                code = WriteStatus(int(value)).code
                account.refused[code] = account.refused.get(code, 0) + int(count)
