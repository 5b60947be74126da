"""Spares: memory that a writer has before it says what for, so that a put need not wait for memory.

Theory of operation. A put of new pages costs two answers: where to write, and that it is stored. For who puts batch after batch the first
one is given ahead: a commit that asks for it is answered with *spare* memory, as large as the batch. The next put is then

    client   says which keys it fills into the spare (no answer) ----> fills ----------------> commit ----> statuses, and the next spare
    pool     finds, takes the keys, makes the next spare ready, while the client copies

so that of a put's work only the commit is waited for. A spare is a reservation without keys, under a limbo account:

    ready --given with a commit's answer--> given --its keys are named--> an ordinary reservation
                                            given --committed without, or given back--> free

It is a reservation in all that follows: given back when its session's process is gone or lets go, an orphan at its time limit (one that was
never given is free then), an orphan after a restart of the pool. It is a favour: there is none where a quota or an admission policy has a
say in each put, none that would cost an eviction (room above the high watermark is not touched), at most `BYTES_MAX` a session, and one in
`SHARE` bytes and keys of the pool. Before anyone is refused for want of room what is ready goes back, and then what was given is
*recalled*:

    client   says which keys it fills into the spare (a message), full fence, reads up to which number its session is recalled
    pool     stores that number for the session, full fence, looks whether the session has sent anything that was not read yet

Each stores before it loads, so at least one of them sees the other: a spare is never both taken back and filled. Where the pool finds
something unread it takes nothing back, as it may be that message. Where the client finds its spare recalled it fills nothing, gives it
back, in case the pool has kept it, and reserves.

A put without one reserves first. Whoever cannot use its spare, since it is over, some of the pages are stored or on their way already, or
the namespace has a quota by now, is told so at the commit, and reserves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from umbp.core.objects import Account, Objects
from umbp.core.room import Room
from umbp.core.writes import RESERVATIONS_PER_SESSION_MAX, Reservation, Writes
from umbp.store.index import place_word

BYTES_MAX = 16 << 20  # of one session: larger batches copy so long that the wait for memory is little beside it
SHARE = 32
Recall = Callable[[int, int], bool]
"""(session, number): its spares up to this number are recalled; whether it cannot have begun to fill any of them."""


class Spares:
    """The spare memory of one pool. ``limbo`` gives the account for objects of a size that belong to no namespace."""

    def __init__(self, objects: Objects, room: Room, writes: Writes, limbo: Callable[[int], Account], seconds: float) -> None:
        self.objects = objects
        self.room = room
        self.writes = writes
        self.limbo = limbo
        self.seconds = seconds
        self.bytes_max, self.keys_max = objects.allocator.capacity_bytes // SHARE, objects.capacity // SHARE
        self.recall: Recall = lambda session, number: False
        self._ready: dict[int, int] = {}  # by session, the reservation that is ready and not given
        room.reclaim = self.take_back

    def __repr__(self) -> str:
        return f"<Spares {self.writes.blank_bytes} of {self.bytes_max} bytes, {len(self._ready)} ready>"

    def prepare(self, now: float, session: int, size: int, count: int) -> Reservation | None:
        """Have ``count`` pages of ``size`` bytes ready for this session; None if there is no room to spare."""
        made = self.writes.open.get(self._ready.get(session, 0))
        if made is not None and not made.expired:
            if made.account.object_bytes == size and len(made.ids) == count:
                return made
            self.writes.give_back(made)
        self._ready.pop(session, None)
        held = sum(self.writes.open[number].blank_bytes for number in self.writes.by_session.get(session, ()))
        wanted = size * count
        if (
            not count
            or held + wanted > BYTES_MAX
            or self.writes.blank_bytes + wanted > self.bytes_max
            or self.writes.blank_keys + count > self.keys_max
            or len(self.writes.by_session.get(session, ())) >= RESERVATIONS_PER_SESSION_MAX
        ):
            return None
        offsets = self.room.take_free(size, count, session)
        if not len(offsets):
            return None
        account = self.limbo(size)
        ids = self.objects.take(np.zeros((count, 4), np.uint64), place_word(account.number, size), offsets, session)
        self.objects.reserve(account, ids, offsets)
        made = self.writes.start_blank(now, session, account, ids, self.seconds)
        self._ready[session] = made.number
        return made

    def give(self, now: float, session: int, size: int, count: int) -> Reservation | None:
        """Spare memory that is the session's from now on; None if there is none."""
        made = self.prepare(now, session, size, count)
        if made is not None:
            del self._ready[session]
            made.given = True
        return made

    def take_back(self) -> bool:
        """Somebody has no room: free all that is ready and not given, or else all that was given and can be recalled. False: nothing."""
        held = self.writes.blank_keys
        for session in list(self._ready):
            self.end_session(session)
        if self.writes.blank_keys == held > 0:
            self._recall_given()
        return self.writes.blank_keys < held

    def _recall_given(self) -> None:
        given: dict[int, list[Reservation]] = {}
        for made in self.writes.open.values():
            if made.blank and not made.expired:
                given.setdefault(made.session, []).append(made)
        for session, blank in given.items():
            if self.recall(session, max(made.number for made in blank)):
                for made in blank:
                    self.writes.give_back(made)

    def end_session(self, session: int) -> None:
        """The session's connection is closed: it is given none any more."""
        made = self.writes.open.get(self._ready.pop(session, 0))
        if made is not None:
            self.writes.give_back(made)

    def check(self) -> None:
        """What is ready is blank and not given, and all of it within bounds."""
        for session, number in self._ready.items():
            made = self.writes.open.get(number)
            assert made is None or (made.session == session and made.blank and not made.given and not made.expired)
        assert self.writes.blank_bytes <= self.bytes_max
        assert self.writes.blank_keys <= self.keys_max
