"""The master's policies by kind: chosen by name, swapped while it runs, and held to what a policy may answer.

Ours pass the contract test. One of another package is checked at each answer: the first wrong one or exception is its last, the kind's
default takes its place, and `faults` says why, which is in the log and in ``/readyz`` (as `umbp.core.guard` does it for the pool's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from umbp.errors import InvalidRequest, NotFound
from umbp.policies.base import CLUSTER_EVICTION, CLUSTER_KINDS, PLACEMENT, REBALANCING, REPLICATION, ROUTING, build, find
from umbp.policies.cluster import GO, KEEP, EvictView, FillView, HotView, PlaceView, RouteView
from umbp.types import I64

DEFAULTS = {
    ROUTING: "fastest",
    PLACEMENT: "local_first",
    REPLICATION: "none",
    REBALANCING: "none",
    CLUSTER_EVICTION: "spare_and_cold",
}
_T = TypeVar("_T")


class Choices:
    """One policy of each kind."""

    def __init__(self, names: dict[str, str] | None = None) -> None:
        self.names = {**DEFAULTS, **(names or {})}
        self._policies: dict[str, Any] = {kind: build(kind, name) for kind, name in self.names.items()}
        self._faults: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Choices {', '.join(f'{kind} {name}' for kind, name in self.names.items())}>"

    @property
    def faults(self) -> list[str]:
        """What policies of other packages did wrong."""
        return list(self._faults.values())

    def has_failed(self, kind: str) -> bool:
        """Whether the policy of this kind was replaced because it was wrong."""
        return kind in self._faults

    def can_swap(self, kind: str, name: str) -> None:
        """NotFound for a name or kind that there is not."""
        self._known(kind)
        build(kind, name)

    def swap(self, kind: str, name: str) -> None:
        """Another policy from now on; see `can_swap`."""
        self._known(kind)
        self._policies[kind] = build(kind, name)
        self.names[kind] = name
        self._faults.pop(kind, None)

    def preview(self, kind: str, name: str, view: Any) -> Any:
        """What the policy of this name would choose; nothing is changed. NotFound if there is none; a wrong answer is an InvalidRequest."""
        self._known(kind)
        find(kind, name, "policy")
        try:
            return _CHECKED[kind](build(kind, name), view)
        except Exception as error:
            raise InvalidRequest(f"the {kind} policy {name!r} failed: {error!r}", field="policy") from error

    def route(self, view: RouteView) -> I64:
        """See `RoutingPolicy.choose`."""
        return self._asked(ROUTING, view, _route)

    def place(self, view: PlaceView) -> I64:
        """See `PlacementPolicy.place`."""
        return self._asked(PLACEMENT, view, _place)

    def copies(self, view: HotView) -> I64:
        """See `ReplicationPolicy.copies`."""
        return self._asked(REPLICATION, view, _copies)

    def moves(self, view: FillView) -> list[tuple[int, int, int]]:
        """See `RebalancingPolicy.moves`."""
        return self._asked(REBALANCING, view, _moves)

    def judge(self, view: EvictView) -> I64:
        """See `ClusterEvictionPolicy.judge`."""
        return self._asked(CLUSTER_EVICTION, view, _verdicts)

    def _known(self, kind: str) -> None:
        if kind not in CLUSTER_KINDS:
            raise NotFound(f"no policy kind {kind!r}, only {', '.join(CLUSTER_KINDS)}", field="kind", example=ROUTING)

    def _asked(self, kind: str, view: Any, checked: Callable[[Any, Any], _T]) -> _T:
        policy = self._policies[kind]
        if type(policy).__module__.startswith("umbp.policies."):
            return checked(policy, view)
        try:
            return checked(policy, view)
        except Exception as error:  # noqa: BLE001 - a foreign policy may raise anything
            self._faults[kind] = f"the {kind} policy {self.names[kind]} failed ({error!r}); {DEFAULTS[kind]} took its place"
            self.names[kind] = DEFAULTS[kind]
            self._policies[kind] = build(kind, DEFAULTS[kind])
            return checked(self._policies[kind], view)


def _indices(answer: Any, count: int, below: int) -> I64:
    array = np.asarray(answer)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise ValueError(f"{count} whole numbers are wanted, not {array.dtype} of shape {array.shape}")
    if count and not -1 <= int(array.min()) <= int(array.max()) < below:
        raise ValueError(f"numbers from {array.min()} to {array.max()}, there are {below}")
    return array.astype(np.int64)


def _route(policy: Any, view: RouteView) -> I64:
    choice = _indices(policy.choose(view), *view.held.shape)
    pages = np.flatnonzero(choice >= 0)
    if not np.array_equal(choice >= 0, view.held.any(1)) or not view.held[pages, choice[pages]].all():
        raise ValueError("a page goes to a column that does not hold it, or nowhere though one does")
    return choice


def _place(policy: Any, view: PlaceView) -> I64:
    chosen = _indices(policy.place(view), len(view.key_hashes), len(view.free_bytes))
    placed = np.bincount(chosen[chosen >= 0], minlength=len(view.free_bytes))
    if (placed * view.page_bytes > np.maximum(view.free_bytes, 0)).any():
        raise ValueError("a node is given more than it has room for")
    return chosen


def _copies(policy: Any, view: HotView) -> I64:
    return np.maximum(_indices(policy.copies(view), len(view.heat), view.nodes + 1), 1)


def _moves(policy: Any, view: FillView) -> list[tuple[int, int, int]]:
    moves = [(int(giver), int(taker), int(size)) for giver, taker, size in policy.moves(view)]
    nodes = range(len(view.capacity_bytes))
    if any(giver not in nodes or taker not in nodes or giver == taker or size < 0 for giver, taker, size in moves):
        raise ValueError(f"moves between nodes that there are not: {moves[:3]}")
    return moves


def _verdicts(policy: Any, view: EvictView) -> I64:
    verdicts = _indices(policy.judge(view), len(view.heat), KEEP + 1)
    if (view.copies[verdicts == GO] < 2).any():
        raise ValueError("a page of which there is one copy is to go first")
    return verdicts


_CHECKED: dict[str, Callable[[Any, Any], Any]] = {
    ROUTING: _route,
    PLACEMENT: _place,
    REPLICATION: _copies,
    REBALANCING: _moves,
    CLUSTER_EVICTION: _verdicts,
}
