"""SIEVE: one queue, one bit a page, one moving hand.

Theory of operation. Pages stand in order of arrival. The hand walks from the oldest to the newest and around: a page with its bit
set loses the bit and stays where it is, a page without it goes. Requests only set bits. In batches: `victims` looks ahead, first
at the pages without the bit from the hand around the queue, then (what the second lap would find) at those with it, and changes
nothing. `on_removed` moves the hand to just past the furthest page that was evicted and clears the bits it passed. Pages that are
not eligible are passed in place. Of one insert the deepest page stands oldest, as a chain is of use only from its root. Bytes a
page: 10.

On chat traffic SIEVE loses to LRU at some sizes (a page waits a whole lap even when its session is over); it is here because it is
the cheapest policy there is, and good where shared prompts dominate.

Source: Zhang et al., "SIEVE is Simpler than LRU", NSDI'24.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.policies.base import EVICTION, Eligible, Inserted, Request, register
from umbp.policies.fifo import Fifo
from umbp.types import I32, Mask


@dataclass(frozen=True, slots=True)
class SieveStatistics:
    """``visited_count`` of the ``live_count`` pages would survive the hand; ``lap_count`` times it went around."""

    live_count: int
    visited_count: int
    lap_count: int


@register(EVICTION, "sieve")
class Sieve:
    """First in, first out, but what was requested since the hand last passed stays."""

    __slots__ = ("_lap_count", "_queue", "_visited")

    def __init__(self, capacity: int) -> None:
        self._queue = Fifo(capacity)
        self._visited: Mask = np.zeros(capacity, np.bool_)
        self._lap_count = 0

    def __repr__(self) -> str:
        return f"<Sieve {self._queue.count} live, lap {self._lap_count}>"

    def on_inserted(self, event: Inserted) -> None:
        """Newest, not visited."""
        self.on_removed(event.ids, evicted=False)
        self._queue.append(event.ids[::-1])
        self._visited[event.ids] = False

    def on_request(self, event: Request) -> None:
        """Sets the bits."""
        self._visited[event.ids[self._queue.holds(event.ids)]] = True

    def victims(self, eligible: Eligible, count: int) -> I32:
        """In the order in which the hand would come to them."""
        queue = self._queue
        found: list[I32] = []
        need = count
        for visited in (False, True):
            for start, end in ((queue.hand, queue.end), (queue.start, queue.hand)):
                for ids in queue.walk(start, end, count) if need > 0 else ():
                    ids = ids[self._visited[ids] == visited]
                    ids = ids[eligible(ids)][:need]
                    found.append(ids)
                    need -= len(ids)
                    if need <= 0:
                        break
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def on_removed(self, ids: I32, *, evicted: bool) -> None:
        """Takes them out; an eviction moves the hand."""
        ids = np.unique(ids[self._queue.holds(ids)])
        if evicted and len(ids):
            self._move_hand(ids)
        self._queue.discard(ids)

    def statistics(self) -> SieveStatistics:
        """A snapshot."""
        live = self._queue.between(self._queue.start, self._queue.end)
        return SieveStatistics(self._queue.count, int(np.count_nonzero(self._visited[live])), self._lap_count)

    def check(self) -> None:
        """The queue holds."""
        self._queue.check()

    def _move_hand(self, ids: I32) -> None:
        queue = self._queue
        visited = self._visited[ids]
        if visited.any():  # found in the second lap: the first one cleared every bit
            self._visited[:] = False
            self._lap_count += 1
            ids = ids[visited]
        positions = queue.position[ids]
        behind = positions[positions < queue.hand]
        if len(behind):
            self._visited[queue.between(queue.hand, queue.end)] = False
            self._lap_count += 1
            start, furthest = queue.start, int(behind.max())
        else:
            start, furthest = queue.hand, int(positions.max())
        self._visited[queue.between(start, furthest + 1)] = False
        queue.hand = furthest + 1
