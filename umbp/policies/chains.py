"""Ranked pages with their parents: the lowest rank goes first, but no parent before its child.

Theory of operation. Invariant: a live parent's rank is above its live child's. Plain rank order is then leaf order, any number
deep, and needs no search for leaves. Three things keep it so:

* A request names the whole chain, root first, so it is the truth about the links of its pages: each one's parent becomes the page
  named before it (none, where that is not stored), and ranks are raised to fall strictly from root to tail.
* An insert hangs pages under a parent that may be older. Where the parent is less than `slack` older (the request that led to this
  insert touched it moments ago) the new pages rank just below it. Otherwise its ancestors are raised, by a walk up the chain: the
  only loop over pages here, and the pages walked are then recent, so the next insert of that chain does not walk.
* Removing a page that still has children cuts their links, by one pass over the parent array (about 3 ms at a million ids; leaf
  order makes it rare).

A page above an ineligible one is offered only after everything else, deepest first: a lease deep in a chain must not refuse a put.
Since ranks strictly fall along links there is no cycle, whatever order of calls comes in.

Bytes an id: 8 beyond `Ranking`'s 9.
"""

from __future__ import annotations

import numpy as np

from umbp.policies.base import Eligible
from umbp.policies.ranking import Ranking, first_of_each
from umbp.types import I32, I64, Mask

NO_PARENT = -1
ONE = np.int32(1)  # of the counts' own type: `ufunc.at` takes twenty times as long with a plain 1, which it has to convert


def falling(ranks: I64) -> I64:
    """The least ranks, each at least the given one, that fall strictly from first to last."""
    steps = np.arange(len(ranks), dtype=np.int64)
    return np.maximum.accumulate((ranks + steps)[::-1])[::-1] - steps


class Chains:
    """`Ranking` with links. ``parent`` (int32, -1 for none) and ``children_count`` (int32) are arrays by id."""

    __slots__ = ("children_count", "parent", "ranking")

    def __init__(self, capacity: int) -> None:
        self.ranking = Ranking(capacity)
        self.parent: I32 = np.full(capacity, NO_PARENT, np.int32)
        self.children_count: I32 = np.zeros(capacity, np.int32)

    def __repr__(self) -> str:
        return f"<Chains {self.ranking.live_count} live, {self.leaf_count} leaves>"

    @property
    def leaf_count(self) -> int:
        """Live pages without a live child."""
        return int(np.count_nonzero(self.ranking.live & (self.children_count == 0)))

    def insert(self, ids: I32, parents: I32, ranks: I64, *, slack: int) -> None:
        """Enters distinct new pages, root first, each under its parent (-1 or not live: none), at about these ranks."""
        known = self.ranking.live[ids]
        if known.any():
            self.remove(ids[known])
        outside = (parents >= 0) & self.ranking.live[parents]
        ranks = falling(ranks)
        if outside.any():
            lowest = int(self.ranking.rank[parents[outside]].min())
            if int(ranks[0]) - slack <= lowest <= int(ranks[0]):
                ranks = ranks - (int(ranks[0]) - lowest + 1)
        self.ranking.place(ids, ranks)
        # A parent within the batch must stand before its child; anything else is not a chain and gets no link.
        inside = (parents >= 0) & ~outside & self.ranking.live[parents] & (self.ranking.rank[parents] > ranks)
        self._link(ids, np.where(inside | outside, parents, NO_PARENT).astype(np.int32))
        low = outside & (self.ranking.rank[parents] <= ranks)
        for page, rank in zip(parents[low].tolist(), ranks[low].tolist(), strict=True):
            self._raise(page, rank)

    def touch(self, ids: I32, ranks: I64) -> None:
        """A request for the whole chain ``ids`` (-1 where not stored), which links them and raises them to at least these ranks."""
        known = (ids >= 0) & self.ranking.live[ids]
        before = np.full(len(ids), NO_PARENT, np.int32)
        before[1:] = np.where(known[:-1], ids[:-1], NO_PARENT)
        ids, before, ranks = ids[known], before[known], ranks[known]
        first = first_of_each(ids)
        if not first.all():
            ids, before, ranks = ids[first], before[first], ranks[first]
        self._link(ids, before)
        self.ranking.place(ids, falling(np.maximum(ranks, self.ranking.rank[ids])))

    def remove(self, ids: I32) -> I32:
        """Takes pages out, cutting their links both ways; returns those that were live, distinct."""
        ids = np.unique(ids)
        ids = ids[self.ranking.live[ids]]
        self._link(ids, np.full(len(ids), NO_PARENT, np.int32))
        self.ranking.discard(ids)
        widowed = ids[self.children_count[ids] > 0]
        if len(widowed):
            gone = np.zeros(len(self.parent), np.bool_)
            gone[widowed] = True
            self.parent[(self.parent >= 0) & gone[self.parent]] = NO_PARENT
            self.children_count[widowed] = 0
        return ids

    def peek(self, eligible: Eligible, count: int) -> I32:
        """Up to ``count`` eligible ids: lowest rank first, those above an ineligible page last."""
        found: list[I32] = []
        above: list[I32] = []
        blocked: Mask | None = None
        need = count
        for ids in self.ranking.walk(count) if need > 0 else ():
            can = eligible(ids)
            if blocked is None and not can.all():
                blocked = np.zeros(len(self.parent), np.bool_)
            if blocked is not None:
                self._mark_ancestors(ids[~can], blocked, eligible)  # they rank higher, so they are in this chunk or to come
                above.append(ids[can & blocked[ids]])
                can = can & ~blocked[ids]
            ids = ids[can][:need]
            found.append(ids)
            need -= len(ids)
            if need <= 0:
                break
        for ids in above:
            found.append(ids[: max(need, 0)])
            need -= len(found[-1])
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def check(self) -> None:
        """Links join live pages, ranks fall along them, and the counts are those of the links."""
        self.ranking.check()
        linked = np.flatnonzero(self.parent >= 0)
        parents = self.parent[linked]
        assert bool(self.ranking.live[linked].all()), "a page that is gone has a parent"
        assert bool(self.ranking.live[parents].all()), "a parent is gone"
        assert bool(np.all(self.ranking.rank[parents] > self.ranking.rank[linked])), "a child ranks above its parent"
        counted = np.bincount(parents, minlength=len(self.parent))
        assert bool(np.array_equal(counted, self.children_count)), "children are miscounted"

    def _link(self, ids: I32, parents: I32) -> None:
        before = self.parent[ids]
        changed = before != parents
        before, after = before[changed], parents[changed]
        np.subtract.at(self.children_count, before[before >= 0], ONE)
        np.add.at(self.children_count, after[after >= 0], ONE)
        self.parent[ids] = parents

    def _raise(self, page: int, rank: int) -> None:
        pages: list[int] = []
        parent, ranks = self.parent, self.ranking.rank
        while page >= 0 and int(ranks[page]) <= rank:
            rank += 1
            pages.append(page)
            page = int(parent[page])
        if pages:
            self.ranking.place(np.array(pages, np.int32), rank - np.arange(len(pages) - 1, -1, -1, dtype=np.int64))

    def _mark_ancestors(self, ids: I32, blocked: Mask, eligible: Eligible) -> None:
        """Marks eligible pages above these. Stops at one that is not: it marks those above it when the walk comes to it."""
        pages = self.parent[ids]
        while len(pages := pages[pages >= 0]):
            pages = pages[~blocked[pages]]
            pages = pages[eligible(pages)]
            blocked[pages] = True
            pages = self.parent[pages]
