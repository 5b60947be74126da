"""From "who has it" to a plan: columns and their costs, the routing policy's choice, runs with times, and whether to compute instead.

Theory of operation. The rows of a key list give the places that hold them; of those, the pools that can be used now make columns (a node's
DRAM or SSD). Only the leading pages that some column holds matter, because a key names its whole prefix. The policy says which column
serves which page; equal neighbours become a run. Runs of one node follow each other, nodes work at the same time: a run is there when its
node's backlog, the runs before it on that node, its latency and its bytes are done, and the plan when the last run is.

Given a prefill rate, every run's end is a place to stop fetching and start computing: total(m) = until [0, m) is there + computing
[m, held). The smallest total wins; between breakpoints it is linear, so the best is always at one of them or at zero.

Cost for 2,200 keys on a few nodes: about 1 ms, half of it the directory's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from umbp.core.choices import Choices
from umbp.core.costs import Costs
from umbp.core.directory import Locations
from umbp.core.membership import Member, Membership
from umbp.core.plans import NOTHING, Plan, Run, Source
from umbp.policies.cluster import RouteView
from umbp.types import F64, I64, Mask, Tier

COLUMNS_MAX = 64  # that a plan looks at: beyond this the ones that hold the most pages
RUNS_MAX = 4096
FETCHED_TIERS = (Tier.DRAM, Tier.SSD)  # what pools serve; engines' own caches are for engines


@dataclass(frozen=True, slots=True)
class Columns:
    """Ways to get the pages of one question: ``held`` (n, c), and of each column its member and tier."""

    held: Mask
    members: list[Member]
    tiers: list[Tier]

    def leading(self) -> int:
        """Leading pages that some column holds."""
        any_: Mask = np.logical_or.reduce(self.held, axis=1)
        return len(any_) if any_.all() else int(any_.argmin())


class Planner:
    """Makes plans out of the master's state; changes nothing but the expected backlog, and that only when told to."""

    def __init__(self, membership: Membership, costs: Costs, choices: Choices) -> None:
        self.membership, self.costs, self.choices = membership, costs, choices

    def columns(self, now: float, places: Locations, pages: int, requester: str, exclude: frozenset[str] = frozenset()) -> Columns:
        """Who of the usable nodes can serve these pages. The requester's own node counts whatever others think of it."""
        found: list[tuple[int, Member, Tier, I64]] = []
        for holder in np.flatnonzero(np.bincount(places.holder)).tolist():
            member = self.membership.by_holder.get(holder)
            if member is None or member.node in exclude or not (member.node == requester or member.usable(now)):
                continue
            mine = places.holder == holder
            items, bits = places.item[mine], places.tiers[mine]
            for tier in FETCHED_TIERS:
                if len(having := items[bits >> tier & 1 == 1]):
                    found.append((len(having) + (pages if member.node == requester else 0), member, tier, having))
        found.sort(key=lambda entry: (-entry[0], entry[1].node, entry[2]))
        del found[COLUMNS_MAX:]
        held = np.zeros((pages, len(found)), bool)
        for column, (_, _, _, items) in enumerate(found):
            held[items, column] = True
        return Columns(held, [entry[1] for entry in found], [entry[2] for entry in found])

    def view(self, now: float, columns: Columns, requester: str, page_bytes: int, draws: F64) -> RouteView:
        """What a routing policy is shown of the leading pages."""
        costs = [self.costs.cost(m.node, t, requester) for m, t in zip(columns.members, columns.tiers, strict=True)]
        numbers = {node: at for at, node in enumerate(dict.fromkeys(member.node for member in columns.members))}
        held = columns.leading()
        return RouteView(
            columns.held[:held],
            np.array([numbers[member.node] for member in columns.members], np.int64),
            np.array(columns.tiers, np.uint8),
            np.array([member.node == requester for member in columns.members], bool),
            np.array([cost.latency_seconds for cost in costs], np.float64),
            np.array([page_bytes / cost.bytes_per_second for cost in costs], np.float64),
            np.array([0.0 if m.node == requester else self.costs.backlog(now, m.node) for m in columns.members], np.float64),
            draws[:held] if len(draws) >= held else np.resize(draws, held) if len(draws) else np.zeros(held),
        )

    def plan(self, view: RouteView, columns: Columns, choice: I64, *, page_seconds: float = inf) -> Plan:
        """The plan of a choice. ``page_seconds``: computing one page, infinite where that is not known."""
        held = len(choice)
        if not held:
            return NOTHING
        starts = np.flatnonzero(np.concatenate([[True], choice[1:] != choice[:-1]]))
        stops = np.append(starts[1:], held)
        sources = {member.node: Source(member.node, member.boot, member.addresses) for member in columns.members}
        done: dict[int, float] = {}
        runs: list[Run] = []
        ends: list[float] = []  # until [0, stop) is there
        for start, stop in zip(starts[:RUNS_MAX].tolist(), stops[:RUNS_MAX].tolist(), strict=True):
            column = int(choice[start])
            node = int(view.nodes[column])
            begin = done.get(node, float(view.backlog_seconds[column]))
            end = begin + float(view.latency_seconds[column]) + (stop - start) * float(view.page_seconds[column])
            done[node] = end
            runs.append(Run(start, stop, sources[columns.members[column].node], columns.tiers[column], end))
            ends.append(max(end, ends[-1] if ends else 0.0))
        keep = len(runs)
        if page_seconds < inf:
            totals = [held * page_seconds] + [end + (held - run.stop) * page_seconds for end, run in zip(ends, runs, strict=True)]
            keep = len(totals) - 1 - int(np.argmin(totals[::-1]))  # of equal ones the one that fetches more
        pages = runs[keep - 1].stop if keep else 0
        return Plan(tuple(runs[:keep]), pages, held, ends[keep - 1] if keep else 0.0, held * page_seconds)

    def occupy(self, now: float, plan: Plan, requester: str, page_bytes: int) -> None:
        """The plan is going to be carried out: its sources are busy with it."""
        for run in plan.runs:
            if run.source.node != requester:
                cost = self.costs.cost(run.source.node, run.tier, requester)
                self.costs.occupy(now, run.source.node, run.pages * page_bytes / cost.bytes_per_second)
