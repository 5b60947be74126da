"""Exact least recently used, over pages; within one request the deepest page goes first.

Theory of operation. Every request and every insert is one tick. A page's rank is ``tick * 2**24 - position``: a later tick is
always higher, and of one call the deeper page is the older, because a chain that loses its tail can still be hit and one that
loses its head cannot. `Ranking` keeps the ranks and finds the lowest. Bytes a page: 9, and 12 for each queued one (1/32).

Source: the classic; the tail-first order is that of the replay of Mooncake's traces (FAST'25).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.policies.base import EVICTION, Eligible, Inserted, Request, register
from umbp.policies.ranking import Ranking, first_of_each
from umbp.types import I32, I64

TICK = 1 << 24  # ranks between two ticks: 16 M pages a request, and 2**39 ticks


def ranks_of_tick(tick: int, count: int) -> I64:
    """Ranks of one call's ``count`` pages, root first."""
    return tick * TICK - np.arange(count, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LruStatistics:
    """``tick_count`` calls seen; ``live_count`` pages, ``queued_count`` of them (or dead entries) sorted for eviction."""

    live_count: int
    tick_count: int
    queued_count: int


@register(EVICTION, "lru")
class Lru:
    """Least recently requested or inserted first."""

    __slots__ = ("_ranking", "_tick")

    def __init__(self, capacity: int) -> None:
        self._ranking = Ranking(capacity)
        self._tick = 0

    def __repr__(self) -> str:
        return f"<Lru {self._ranking.live_count} live, tick {self._tick}>"

    def on_inserted(self, event: Inserted) -> None:
        """One tick for all."""
        self._tick += 1
        self._ranking.place(event.ids, ranks_of_tick(self._tick, len(event.ids)))

    def on_request(self, event: Request) -> None:
        """One tick for those that are live."""
        self._tick += 1
        known = (event.ids >= 0) & self._ranking.live[event.ids]
        ids, ranks = event.ids[known], ranks_of_tick(self._tick, len(event.ids))[known]
        first = first_of_each(ids)
        self._ranking.place(ids[first], ranks[first])

    def victims(self, eligible: Eligible, count: int) -> I32:
        """Oldest first."""
        return self._ranking.peek(eligible, count)

    def on_removed(self, ids: I32, *, evicted: bool) -> None:
        """Forgets them."""
        ids = np.unique(ids)
        self._ranking.discard(ids[self._ranking.live[ids]])

    def statistics(self) -> LruStatistics:
        """A snapshot."""
        return LruStatistics(self._ranking.live_count, self._tick, self._ranking.queued_count)

    def check(self) -> None:
        """No rank is of a tick to come; the ranking holds."""
        self._ranking.check()
        live = self._ranking.live
        assert bool(np.all(self._ranking.rank[live] <= self._tick * TICK))
