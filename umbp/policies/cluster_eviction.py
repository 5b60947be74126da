"""Cluster eviction: what a nearly full node should keep, and let go first, as the master sees it.

The node evicts for itself, without asking; but its own policy sees only requests that reach its pool. It does not see those that an engine
answered out of its own caches, nor those that other nodes serve: so it lets go a prompt that the whole cluster asks for, and keeps a copy
that three others have as well.

`spare_and_cold`, the default: copies beyond those that replication wants go first, and what is cold in the cluster goes before what was
asked for lately. It never wants more than half of what it is shown kept, the hottest: a node must let go of something, and where all of
it is hot its own policy knows best. `spare`: the copies alone. `none`: no word.
"""

from __future__ import annotations

import numpy as np

from umbp.policies.base import CLUSTER_EVICTION, register
from umbp.policies.cluster import GO, KEEP, EvictView
from umbp.types import I64

HEAT_MIN = 0.25  # what was asked for once is that warm for two half-lives
KEEP_SHARE_MAX = 0.5


@register(CLUSTER_EVICTION, "none")
class NoWord:
    """Nodes go by their own policies alone."""

    def __repr__(self) -> str:
        return "<NoWord>"

    def judge(self, view: EvictView) -> I64:
        """No word about any page."""
        return np.zeros(len(view.heat), np.int64)


@register(CLUSTER_EVICTION, "spare")
class Spare:
    """What has more copies than are wanted goes first."""

    def __repr__(self) -> str:
        return "<Spare>"

    def judge(self, view: EvictView) -> I64:
        """`GO` for spare copies."""
        return np.where(view.copies > np.maximum(view.wanted, 1), GO, 0).astype(np.int64)


@register(CLUSTER_EVICTION, "spare_and_cold")
class SpareAndCold:
    """Spare copies, then what is cold in the cluster."""

    def __repr__(self) -> str:
        return "<SpareAndCold>"

    def judge(self, view: EvictView) -> I64:
        """`GO` for spare copies; `KEEP` for the hottest of the others."""
        verdict = Spare().judge(view)
        warm = np.flatnonzero((verdict == 0) & (view.heat >= HEAT_MIN))
        warm = warm[np.argsort(-view.heat[warm], kind="stable")]
        verdict[warm[: int(KEEP_SHARE_MAX * len(verdict))]] = KEEP
        return verdict
