"""Least recently used leaf first: no page is kept that can no longer be hit.

Theory of operation. A page is hit only if all before it are hit, so a page whose parent is gone is dead weight. Ranks are those
of `lru` (one tick a call, the deeper the older), kept by `Chains` such that a parent ranks above its child: the coldest chain
goes, tail first, however its pages were put. Where `lru` drops the head of a chain because its tail was put in a later call, this
does not. A put that follows its request within `SLACK_TICKS` calls counts as part of it. Bytes a page: 17, and 12 for each queued
one (1/32).

Source: SGLang's RadixCache and vLLM's free queue both evict leaf first; the figures of the Mooncake traces assume it.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbp.policies.base import EVICTION, Eligible, Inserted, Request, register
from umbp.policies.chains import Chains
from umbp.policies.lru import TICK, ranks_of_tick
from umbp.types import I32

SLACK_TICKS = 32  # small against the calls in which a pool turns over (thousands), many for the puts in flight at a time


@dataclass(frozen=True, slots=True)
class LeafLruStatistics:
    """``leaf_count`` of the ``live_count`` pages have no live child; ``tick_count`` calls seen."""

    live_count: int
    leaf_count: int
    tick_count: int


@register(EVICTION, "leaf_lru")
class LeafLru:
    """Least recently used first, children before parents."""

    __slots__ = ("_chains", "_tick")

    def __init__(self, capacity: int) -> None:
        self._chains = Chains(capacity)
        self._tick = 0

    def __repr__(self) -> str:
        return f"<LeafLru {self._chains.ranking.live_count} live, tick {self._tick}>"

    def on_inserted(self, event: Inserted) -> None:
        """One tick for all, and for their ancestors where those are older than `SLACK_TICKS`."""
        self._tick += 1
        ranks = ranks_of_tick(self._tick, len(event.ids))
        self._chains.insert(event.ids, event.parents, ranks, slack=SLACK_TICKS * TICK)

    def on_request(self, event: Request) -> None:
        """One tick for the chain; its links are learnt."""
        self._tick += 1
        self._chains.touch(event.ids, ranks_of_tick(self._tick, len(event.ids)))

    def victims(self, eligible: Eligible, count: int) -> I32:
        """Oldest leaf first, then what that makes a leaf; pages above an ineligible one last."""
        return self._chains.peek(eligible, count)

    def on_removed(self, ids: I32, *, evicted: bool) -> None:
        """Cuts their links."""
        self._chains.remove(ids)

    def statistics(self) -> LeafLruStatistics:
        """A snapshot."""
        return LeafLruStatistics(self._chains.ranking.live_count, self._chains.leaf_count, self._tick)

    def check(self) -> None:
        """The chains hold."""
        self._chains.check()
