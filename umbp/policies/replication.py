"""Replication and rebalancing: which pages deserve further copies, and which nodes should give to others. Off by default.

`hot_prefixes`: a page asked for often is worth a copy on more nodes, since each remote read of it costs the source's bandwidth and the
requester's time. A copy more for each doubling of the heat above `HEAT_OF_SECOND`. Because a key names its whole prefix, the pages of a hot
prefix are all at least as hot as its end, and are copied with it.

`numa`: every page gets a copy at the other pools of its machine, which are one a NUMA node (`umbp.per_node`): as soon as it has come, and
again while it is asked for. Which nodes those are is the master's to know; the policy's word is that two copies are not one too many.

`even_fill`: where one node is about to evict while another has room, pages are copied from the first to the second before they are lost.
How much a second all of this may move is the master's rule, not the policy's.
"""

from __future__ import annotations

import numpy as np

from umbp.policies.base import REBALANCING, REPLICATION, register
from umbp.policies.cluster import FillView, HotView
from umbp.types import I64

NUMA = "numa"  # copies go to pools of the same machine, and to no others
HEAT_OF_SECOND = 8.0
COPIES_MAX = 8
FULL_SHARE, ROOM_SHARE = 0.90, 0.70
MOVE_SHARE = 0.02  # of the giver's capacity, at a time


@register(REPLICATION, "none")
class NoReplication:
    """One copy, as the engines made it."""

    def __repr__(self) -> str:
        return "<NoReplication>"

    def copies(self, view: HotView) -> I64:
        """One of each."""
        return np.ones(len(view.heat), np.int64)


@register(REPLICATION, "hot_prefixes")
class HotPrefixes:
    """More copies of what is asked for often."""

    def __repr__(self) -> str:
        return "<HotPrefixes>"

    def copies(self, view: HotView) -> I64:
        """1 + the doublings above the threshold."""
        above = np.log2(np.maximum(view.heat, 1e-9) / HEAT_OF_SECOND)
        wanted = 1 + np.maximum(np.floor(above).astype(np.int64) + 1, 0)
        limit = min(COPIES_MAX, max(1, view.nodes))
        limited: I64 = np.minimum(wanted, limit)
        return limited


@register(REPLICATION, NUMA)
class NumaCopies:
    """Two copies of everything, where there are two nodes."""

    def __repr__(self) -> str:
        return "<NumaCopies>"

    def copies(self, view: HotView) -> I64:
        """Whatever the heat."""
        return np.full(len(view.heat), min(2, max(1, view.nodes)), np.int64)


@register(REBALANCING, "none")
class NoRebalancing:
    """Nodes keep what they have."""

    def __repr__(self) -> str:
        return "<NoRebalancing>"

    def moves(self, view: FillView) -> list[tuple[int, int, int]]:
        """None."""
        return []


@register(REBALANCING, "even_fill")
class EvenFill:
    """From the fullest to the emptiest, a little at a time."""

    def __repr__(self) -> str:
        return "<EvenFill>"

    def moves(self, view: FillView) -> list[tuple[int, int, int]]:
        """Pairs of a full node and one with room, the fullest first."""
        share = view.used_bytes / np.maximum(view.capacity_bytes, 1)
        full = [at for at in np.argsort(-share, kind="stable").tolist() if share[at] >= FULL_SHARE]
        roomy = [at for at in np.argsort(share, kind="stable").tolist() if share[at] <= ROOM_SHARE and view.capacity_bytes[at] > 0]
        return [(giver, taker, int(MOVE_SHARE * view.capacity_bytes[giver])) for giver, taker in zip(full, roomy, strict=False)]
