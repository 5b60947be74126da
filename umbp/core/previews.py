"""Dry runs: what a policy of the master's kinds would choose now, of the pages and nodes that there are, without any effect.

Routing and placement can also be asked about given pages (``/v1/route``, ``/v1/place``); here each kind is shown what it would be shown by
itself: the hottest prefixes, the hottest pages, how full the nodes are, what they hold. A policy that fails or answers wrongly is an error
to who asks, and to nobody else.

Bounded: `ROWS_MAX` rows at a time, which the caller walks through; `SAMPLE_PAGES` pages of placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.core.advisor import HEAT_MIN
from umbp.core.master import Master
from umbp.policies.base import CLUSTER_EVICTION, PLACEMENT, REBALANCING, REPLICATION, ROUTING
from umbp.policies.cluster import GO, KEEP
from umbp.types import F64, I64

ROWS_MAX = 1 << 14
SAMPLE_PAGES = 1000
PAGE_BYTES = 1 << 20  # where no namespace says how large its pages are
VERDICTS = {KEEP: "keep", 0: "no_word", GO: "let_go"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that would be done: ``verb`` with so many pages, of or from ``node``, ``to`` another; ``row`` names a page, -1: none."""

    verb: str
    node: str = ""
    to: str = ""
    pages: int = 0
    size_bytes: int = 0
    row: int = -1


def routed(master: Master, now: float, name: str, end: int, requester: str) -> list[Choice]:
    """Who would serve the prefix that ends in this row to the requester, "" for one that has nothing."""
    directory = master.directory
    rows = np.array(directory.chain(end, ROWS_MAX), np.int64)
    space = int(directory.keys(rows[-1:])[1][0])
    columns = master.planner.columns(now, directory.locations(rows), len(rows), requester)
    size = max(1, directory.object_bytes[space])
    view = master.planner.view(now, columns, requester, size, np.zeros(1))
    plan = master.planner.plan(view, columns, master.choices.preview(ROUTING, name, view))
    pages: dict[str, int] = {}
    for run in plan.runs:
        pages[run.source.node] = pages.get(run.source.node, 0) + run.pages
    return [Choice("serve", node, requester, count, count * size, end) for node, count in pages.items()]


def placed(master: Master, now: float, name: str, requester: str, draws: F64) -> list[Choice]:
    """Where pages that do not exist yet would go, of the size of the largest ones there are."""
    size = max([size for size in master.directory.object_bytes if size] or [PAGE_BYTES])
    bits = (draws * 2.0**53).astype(np.uint64)
    words = np.stack([bits * np.uint64(odd) for odd in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB, 1)], axis=1)
    view, nodes = master.placement.view(now, words, size, requester, draws)
    chosen = master.choices.preview(PLACEMENT, name, view)
    counts = np.bincount(chosen[chosen >= 0], minlength=len(nodes)).tolist()
    found = [Choice("place", requester, member.node, count, count * size) for member, count in zip(nodes, counts, strict=True) if count]
    nowhere = int(np.count_nonzero(chosen < 0))
    return [*found, Choice("no_room", requester, "", nowhere, nowhere * size)] if nowhere else found


def copied(master: Master, now: float, name: str, rows: I64) -> list[Choice]:
    """Which of these rows would get further copies, and how many, the hottest first."""
    advisor = master.advisor
    nodes = advisor.nodes(now)
    holds = advisor.holding(rows, nodes)
    heat = master.directory.use(now, rows).heat
    which = np.flatnonzero((heat >= HEAT_MIN) & holds.any(1))
    if not len(which):
        return []
    view = advisor.hot_view(rows[which], holds[which].sum(1), heat[which], len(nodes))
    more = np.maximum(master.choices.preview(REPLICATION, name, view) - view.copies, 0)
    found = []
    for at in np.argsort(-view.heat, kind="stable").tolist():
        if count := int(more[at]):
            source = nodes[int(holds[which[at]].argmax())].node
            found.append(Choice("copy", source, "", count, count * int(view.page_bytes[at]), int(rows[which[at]])))
    return found


def moved(master: Master, now: float, name: str) -> list[Choice]:
    """Which nodes would give pages to which, at a time."""
    nodes = master.advisor.nodes(now)
    moves = master.choices.preview(REBALANCING, name, master.advisor.fill_view(nodes))
    return [Choice("move", nodes[giver].node, nodes[taker].node, 0, size) for giver, taker, size in moves]


def judged(master: Master, now: float, name: str, rows: I64) -> list[Choice]:
    """What the policy would say of these rows on each node that has them, if that node were nearly full: sums by node and verdict."""
    advisor = master.advisor
    nodes = advisor.nodes(now)
    holds = advisor.holding(rows, nodes)
    found = []
    for at, member in enumerate(nodes):
        mine = np.flatnonzero(holds[:, at])
        if not len(mine):
            continue
        view = advisor.evict_view(now, rows[mine], holds[mine].sum(1), len(nodes))
        verdict = master.choices.preview(CLUSTER_EVICTION, name, view)
        for value, verb in VERDICTS.items():
            which = verdict == value
            if which.any():
                found.append(Choice(verb, member.node, "", int(np.count_nonzero(which)), int(view.page_bytes[which].sum())))
    return found
