"""Routing: who serves which page of a prefix. `fastest` splits it over sources so that all are done at the same time.

Theory of operation of `fastest`. Pages that the same columns hold are alike. For each kind of page, those with the fewest columns first,
the pages are poured like water: column c starts at s(c), when its node is done with what it has plus its latency, and rises by its seconds
a page; the level T at which all pages are taken solves sum over c of (T - s(c)) / page(c) = pages. A column that would get less than
`RUN_PAGES_MIN` is left out, since its latency buys nothing. With more than `KINDS_MAX` kinds of pages each page just takes its cheapest
column: the plan would be in shreds anyway. Source: the classic of divisible loads on parallel machines with release times.

Cost: tens of microseconds a kind of page, and a few passes over (pages, columns).
"""

from __future__ import annotations

import numpy as np

from umbp.policies.base import ROUTING, register
from umbp.policies.cluster import RouteView
from umbp.types import F64, I64, Mask

RUN_PAGES_MIN = 4
KINDS_MAX = 64


def _cheapest(view: RouteView, costs: F64) -> I64:
    """For each page the held column of the least cost, -1 for none."""
    if not view.held.shape[1]:
        return np.full(len(view.held), -1, np.int64)
    choice: I64 = np.where(view.held, costs, np.inf).argmin(1)
    choice[~view.held.any(1)] = -1
    return choice


@register(ROUTING, "fastest")
class Fastest:
    """The least time until all are there."""

    def __repr__(self) -> str:
        return "<Fastest>"

    def choose(self, view: RouteView) -> I64:
        """See the head of this file."""
        start = view.backlog_seconds + view.latency_seconds
        held = view.held
        if held.shape[1] < 2:
            return _cheapest(view, start)
        packed = np.packbits(held, axis=1)
        _, first, kind = np.unique(packed.view(np.dtype((np.void, packed.shape[1]))).reshape(-1), return_index=True, return_inverse=True)
        if len(first) > KINDS_MAX:
            return _cheapest(view, start + view.page_seconds * len(held))
        choice = np.full(len(held), -1, np.int64)
        taken = np.zeros(int(view.nodes.max()) + 1)  # seconds of work given to each node by this plan
        for number in np.argsort(held[first].sum(1), kind="stable").tolist():
            columns = np.flatnonzero(held[first[number]])
            if len(columns):
                pages = np.flatnonzero(kind == number)
                columns = self._one_a_node(view, columns, len(pages))
                begin = start[columns] + taken[view.nodes[columns]]
                counts = poured(len(pages), begin, view.page_seconds[columns])
                choice[pages] = np.repeat(columns, counts)
                taken[view.nodes[columns]] += counts * view.page_seconds[columns] + (counts > 0) * view.latency_seconds[columns]
        return choice

    @staticmethod
    def _one_a_node(view: RouteView, columns: I64, pages: int) -> I64:
        """Of columns of one node only the one that would be faster for all: it serves them one after the other."""
        alone = view.latency_seconds[columns] + pages * view.page_seconds[columns]
        order = columns[np.argsort(alone, kind="stable")]
        _, first = np.unique(view.nodes[order], return_index=True)
        return np.sort(order[first])


def poured(pages: int, start: F64, page: F64) -> I64:
    """How many of the pages each column takes so that all end together; (c,) int64 that sum up to ``pages``."""
    use: Mask = np.ones(len(start), bool)
    while True:
        at = np.flatnonzero(use)
        order = at[np.argsort(start[at], kind="stable")]
        rate = np.cumsum(1.0 / page[order])
        level = (pages + np.cumsum(start[order] / page[order])) / rate  # with the first 1, 2, ... columns
        last = int(np.flatnonzero(np.append(start[order][1:] >= level[:-1], True))[0])
        share = np.zeros(len(start))
        share[order[: last + 1]] = (level[last] - start[order[: last + 1]]) / page[order[: last + 1]]
        small = (share > 0) & (share < RUN_PAGES_MIN)
        if not small.any() or np.count_nonzero(share > 0) == 1:
            break
        use = share > 0
        use[np.flatnonzero(small)[share[small].argmin()]] = False
    counts = np.floor(share).astype(np.int64)
    rest = pages - int(counts.sum())
    counts[np.argsort(counts - share, kind="stable")[:rest]] += 1
    alone = start + pages * page  # whom the small shares were taken from may have been the wrong one
    if alone.min() < np.where(counts > 0, start + counts * page, 0.0).max():
        counts[:] = 0
        counts[alone.argmin()] = pages
    return counts


@register(ROUTING, "local_first")
class LocalFirst:
    """What the requester's own pool has, from there; the rest as `Fastest` says."""

    def __repr__(self) -> str:
        return "<LocalFirst>"

    def choose(self, view: RouteView) -> I64:
        """Two passes."""
        here = _cheapest(_only(view, view.local), view.page_seconds)
        return np.where(here >= 0, here, Fastest().choose(_only(view, ~view.local)))


def _only(view: RouteView, columns: Mask) -> RouteView:
    return RouteView(
        view.held & columns,
        view.nodes,
        view.tiers,
        view.local,
        view.latency_seconds,
        view.page_seconds,
        view.backlog_seconds,
        view.draws,
    )


@register(ROUTING, "tier_priority")
class TierPriority:
    """The fastest tier that has the page; there the requester's own copy first, then the least busy."""

    def __repr__(self) -> str:
        return "<TierPriority>"

    def choose(self, view: RouteView) -> I64:
        """Ranks of columns, compared as one number: the backlog only breaks ties."""
        backlog = view.backlog_seconds / (1.0 + view.backlog_seconds)
        return _cheapest(view, view.tiers * 4.0 + (~view.local) * 2.0 + backlog)


@register(ROUTING, "random")
class Random:
    """Any of those who have it, each page for itself: a baseline, and a way to measure all links."""

    def __repr__(self) -> str:
        return "<Random>"

    def choose(self, view: RouteView) -> I64:
        """The draw picks among the held columns."""
        have = view.held.sum(1)
        wanted = np.minimum((view.draws * have).astype(np.int64), np.maximum(have - 1, 0))
        rank = np.cumsum(view.held, axis=1) - 1
        picked = view.held & (rank == wanted[:, None])
        return np.where(have > 0, picked.argmax(1) if view.held.shape[1] else 0, -1)
