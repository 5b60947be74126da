"""Which engine should take a prompt: the expected time for each, from what it has itself, what its pool can get, and what it would compute.

Theory of operation. A target is an engine that reports its caches, or a node without one. Of a prompt's pages the leading ones that the
engine has in HBM cost nothing, those it has in HBM or host memory a copy, those after them that some pool has what a plan for its node
says, and the rest is computed, where a prefill rate is given. The sums are compared; equal ones by name, so that the answer is the same
wherever it is asked.

Bounded: `TARGETS_MAX` targets are looked at closely, those with the most leading pages of their own. Cost: 0.3 ms each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from umbp.core.directory import Locations
from umbp.core.master import Master
from umbp.types import F64, U64, Mask, Tier

TARGETS_MAX = 16
HOST_BYTES_PER_SECOND = 25e9  # a copy from pinned host memory to the GPU, other copies going on


@dataclass(frozen=True, slots=True)
class Target:
    """One answer. Pages: ``hbm`` and ``host`` of the engine's own, ``pool`` on its node, ``remote`` from others, ``missing`` nowhere.

    ``fetch_seconds``: until all that is worth fetching is there; ``compute_seconds``: for the rest, infinite where the rate is not known;
    ``seconds`` is their sum as far as known.
    """

    engine: str
    node: str
    hbm: int
    host: int
    pool: int
    remote: int
    missing: int
    fetch_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        """What they are compared by."""
        return self.fetch_seconds + (self.compute_seconds if self.compute_seconds < inf else 0.0)


def targets(master: Master, now: float, digest: bytes, words: U64, draws: F64, *, prefill: float, page_tokens: int) -> list[Target]:
    """All targets, the best first. Without a prefill rate those that miss fewer pages come first."""
    space = master.directory.space_or_none(digest)
    pages = len(words)
    rows = master.directory.find(words, space) if space is not None else np.full(pages, -1, np.int64)
    places = master.directory.locations(rows)
    page_bytes = max(1, master.directory.object_bytes[space]) if space is not None else 1
    page_seconds = page_tokens / prefill if prefill > 0 else inf
    own = _own(master, places, pages)
    found = []
    for engine, node, hbm, host in sorted(own, key=lambda entry: (-max(entry[3], entry[2]), entry[0], entry[1]))[:TARGETS_MAX]:
        columns = master.planner.columns(now, places, pages, node)
        rest = type(columns)(columns.held[host:], columns.members, columns.tiers)
        view = master.planner.view(now, rest, node, page_bytes, draws)
        plan = master.planner.plan(view, rest, master.choices.route(view), page_seconds=page_seconds)
        local = sum(run.pages for run in plan.runs if run.source.node == node)
        missing = pages - host - plan.pages
        copies = (host - hbm) * page_bytes / HOST_BYTES_PER_SECOND
        compute = missing * page_seconds if missing else 0.0
        found.append(Target(engine, node, hbm, host - hbm, local, plan.pages - local, missing, copies + plan.seconds, compute))
    known = prefill > 0
    return sorted(found, key=lambda target: (0 if known else target.missing, target.seconds, target.engine, target.node))


def _own(master: Master, places: Locations, pages: int) -> list[tuple[str, str, int, int]]:
    """(engine, node, leading pages in HBM, leading pages in HBM or host memory) of each engine, and of each node without one."""
    held: dict[str, dict[Tier, Mask]] = {}
    for holder in np.unique(places.holder).tolist():
        of = master.engines.by_holder.get(holder)
        if of is not None:
            engine, tier = of
            mask = held.setdefault(engine.name, {}).setdefault(tier, np.zeros(pages, bool))
            mask[places.item[places.holder == holder]] = True
    found, nodes = [], set()
    nothing = np.zeros(pages, bool)
    for name, engine in master.engines.engines.items():
        if master.node_lives(engine.node):
            hbm = held.get(name, {}).get(Tier.HBM, nothing)
            either = hbm | held.get(name, {}).get(Tier.HOST, nothing)
            found.append((name, engine.node, _leading(hbm), _leading(either)))
            nodes.add(engine.node)
    return found + [("", node, 0, 0) for node in master.membership.members if node not in nodes and master.node_lives(node)]


def _leading(mask: Mask) -> int:
    return len(mask) if mask.all() else int(mask.argmin())
