"""What the master's policies are, of all five kinds. Frozen arrays in, a choice out; no state, clock or I/O.

Each is built without arguments and has one method. A method is a peek: asked twice with one view it answers the same, so every choice can
be previewed. Randomness comes in as numbers drawn by the shell. What a policy of another package answers is checked (`umbp.core.choices`).

A *column* is one way to get pages: a node's DRAM or SSD. Costs are as this requester would see them now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from umbp.types import F64, I64, U8, Mask


@dataclass(frozen=True, slots=True)
class RouteView:
    """n pages, root first, and c columns.

    ``held`` (n, c): the column has the page. Of each column, (c,): ``nodes`` (equal numbers are one node, which serves one thing after the
    other), ``tiers``, ``local`` (the requester's own), ``latency_seconds`` of a fetch, ``page_seconds`` for each page of it,
    ``backlog_seconds`` before it can start. ``draws`` (n,) are uniform in [0, 1).
    """

    held: Mask
    nodes: I64
    tiers: U8
    local: Mask
    latency_seconds: F64
    page_seconds: F64
    backlog_seconds: F64
    draws: F64


class RoutingPolicy(Protocol):
    """Chooses who serves which page."""

    def choose(self, view: RouteView) -> I64:
        """(n,) int64: the column for each page, one that holds it; -1 exactly where none does."""


@dataclass(frozen=True, slots=True)
class PlaceView:
    """m new pages of ``page_bytes`` each and k nodes.

    Of each node, (k,): ``capacity_bytes``, ``free_bytes`` (what is on its way there is not free), ``ramp`` (1, or less for a node that has
    just come: the share of a node's usual load that it should take), ``local`` (the requester's own). ``name_hashes`` (k,) and
    ``key_hashes`` (m,) are uint64 as int64, the same on every master. ``draws`` (m,) are uniform in [0, 1).
    """

    page_bytes: int
    capacity_bytes: I64
    free_bytes: I64
    ramp: F64
    local: Mask
    name_hashes: I64
    key_hashes: I64
    draws: F64


class PlacementPolicy(Protocol):
    """Chooses where new pages go."""

    def place(self, view: PlaceView) -> I64:
        """(m,) int64: the node for each page, with room for all that is given to it; -1 where no node has room."""


@dataclass(frozen=True, slots=True)
class HotView:
    """p pages; each (p,): ``heat`` (accesses, decayed), ``copies`` in pools, ``page_bytes``, ``depth`` in their prefix.

    ``nodes``: how many there are.
    """

    heat: F64
    copies: I64
    page_bytes: I64
    depth: I64
    nodes: int


class ReplicationPolicy(Protocol):
    """Chooses how many copies of which pages there should be."""

    def copies(self, view: HotView) -> I64:
        """(p,) int64 copies wanted; less than there are is no wish to remove any."""


@dataclass(frozen=True, slots=True)
class FillView:
    """k nodes: ``capacity_bytes`` and ``used_bytes``, each (k,)."""

    capacity_bytes: I64
    used_bytes: I64


class RebalancingPolicy(Protocol):
    """Chooses who should give pages to whom."""

    def moves(self, view: FillView) -> list[tuple[int, int, int]]:
        """(from node, to node, bytes) each, distinct nodes."""


GO, KEEP = -1, 1  # and 0: no word


@dataclass(frozen=True, slots=True)
class EvictView:
    """p pages that one nearly full node has, (p,) each.

    ``heat`` (accesses by routes of the whole cluster, decayed), ``idle_seconds`` since the last one (infinite: none), ``copies`` in pools
    that can be used now, this one's included, ``wanted`` copies by the replication policy, ``page_bytes``, ``depth`` in their prefix.
    """

    heat: F64
    idle_seconds: F64
    copies: I64
    wanted: I64
    page_bytes: I64
    depth: I64


class ClusterEvictionPolicy(Protocol):
    """Chooses what a nearly full node should keep, and let go first."""

    def judge(self, view: EvictView) -> I64:
        """(p,) int64: `KEEP`: not while anything else can go; 0: no word; `GO`: first, once another node has promised to hold it.

        `GO` is only for a page of which there are two copies or more.
        """
