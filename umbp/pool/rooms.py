"""Memory for one read: reservations of the pool's own, of which what has come is shown while the rest is still on its way.

Pages that follow one another in their request are reserved in one call, which takes its keys for consecutive pages. Every reservation ends:
what was not shown when the read is over is given back, at once, or when nothing writes to it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from umbp.core.fetches import Batch
from umbp.core.pool import Pool
from umbp.core.puts import FETCH, PASS
from umbp.types import I64, U8, U64, Mask, WriteStatus

SESSION = 0  # the pool's own
RUNS_MAX = 8  # reservations of one read: where pages are more scattered than that, the policies do without the hint


@dataclass(slots=True)
class Room:
    """One reservation: ``at`` (k,) are the places, among all of the read, of the pages that it has not shown yet."""

    number: int
    at: I64


class Rooms:
    """The reservations of one read. ``which``, ``ids`` and ``offsets`` (m,): pages of the batch, their entries, where they are to be."""

    def __init__(self, pool: Pool, now: Callable[[], float], wake: Callable[[], None]) -> None:
        self.which = self.ids = self.offsets = np.empty(0, np.int64)
        self.stored = np.zeros(0, bool)
        self._pool, self._now, self._wake = pool, now, wake
        self._open: list[Room] = []

    def __repr__(self) -> str:
        return f"<Rooms for {len(self.which)} pages, {int(np.count_nonzero(self.stored))} stored>"

    def reserve(self, row: int, namespace: int, batch: Batch, which: I64, seconds: float, *, passing: bool = False) -> tuple[U8, Mask]:
        """Room for these pages of the batch, as far as there is: a `WriteStatus` each, and which are ours to fill.

        ``passing``: where pages only pass through (`umbp.core.passage`).
        """
        status, ours = np.zeros(len(which), np.uint8), np.zeros(len(which), bool)
        mine: list[tuple[I64, I64, I64]] = []
        at = 0
        for run in _runs(batch, which):
            made = self._pool.reserve(
                self._now(),
                SESSION,
                row,
                batch.keys[run],
                batch.pages[run[0]].before,
                seconds,
                number=namespace,
                kind=PASS if passing else FETCH,
            )
            status[at : at + len(run)], ours[at : at + len(run)] = made.status, made.mine
            at += len(run)
            if len(made.ids):
                start = sum(len(ids) for _, ids, _ in mine)
                self._open.append(Room(made.number, np.arange(start, start + len(made.ids))))
                mine.append((run[made.mine], made.ids, made.offsets))
        if mine:
            self.which, self.ids, self.offsets = (np.concatenate(each) for each in zip(*mine, strict=True))
            self.stored = np.zeros(len(self.ids), bool)
        return status, ours

    def store(self, places: I64, sums: U64) -> I64:
        """These pages (of ``which``, ascending) are whole: show them. Those that are shown now; what is left ends with the rest."""
        shown: list[I64] = []
        whole, made = np.zeros(len(self.which), bool), np.zeros(len(self.which), np.uint64)
        whole[places], made[places] = True, sums
        for room in self._open:
            chosen = whole[room.at]
            if chosen.any():
                done = room.at[chosen]
                if self._pool.commit_some(self._now(), SESSION, room.number, chosen, made[done]):
                    room.at = room.at[~chosen]
                    shown.append(done)
        self._open = [room for room in self._open if len(room.at)]
        now: I64 = np.concatenate([places[:0], *shown])
        self.stored[now] = True
        if shown:
            self._wake()
        return now

    def split(self, places: I64) -> Rooms:
        """Those for these pages (of ``which``, ascending), which end when they will; the others know nothing of them any more.

        Pages whose reservation is over are not among them.
        """
        other, wanted = Rooms(self._pool, self._now, self._wake), np.zeros(len(self.which), bool)
        wanted[places] = True
        taken: list[I64] = []
        for room in self._open:
            mine = wanted[room.at]
            if not mine.any():
                continue
            number = room.number if mine.all() else self._pool.writes.split(SESSION, room.number, mine)
            if number:
                start = sum(map(len, taken))
                taken.append(room.at[mine])
                other._open.append(Room(number, np.arange(start, start + len(taken[-1]))))
                room.at = room.at[~mine]
        self._open = [room for room in self._open if len(room.at)]
        moved: I64 = np.concatenate([places[:0], *taken])
        other.which, other.ids, other.offsets = self.which[moved], self.ids[moved], self.offsets[moved]
        other.stored = np.zeros(len(moved), bool)
        return other

    def end(self, good: Mask, sums: U64, lingers: asyncio.Future[None] | None) -> Mask:
        """The read is over: show what is ``good``, (m,), give the rest back; all that is stored by now.

        ``lingers``: what may still be written to is kept until that is done, and nothing of it is shown.
        """
        rooms, self._open = self._open, []
        if lingers is not None:
            good = np.zeros(len(good), bool)

        def finish(_: object) -> None:
            for room in rooms:
                status = self._pool.commit(self._now(), SESSION, room.number, good[room.at], sums[room.at])
                self.stored[room.at] = status == WriteStatus.STORED
            self._wake()

        if lingers is None:
            finish(None)
        else:
            lingers.add_done_callback(finish)
        return self.stored.copy()

    def give_back(self) -> None:
        """Nothing was begun: all of it goes back."""
        rooms, self._open = self._open, []
        for room in rooms:
            self._pool.commit(self._now(), SESSION, room.number, np.zeros(len(room.at), bool), None)


def _runs(batch: Batch, which: I64) -> list[I64]:
    """Pages that follow one another in their request."""
    breaks = [at for at in range(1, len(which)) if batch.pages[which[at]].before != batch.pages[which[at - 1]].key]
    return np.split(which, breaks) if len(breaks) < RUNS_MAX else [which]
