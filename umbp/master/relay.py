"""Advice for nodes that speak to another master than the active one, which alone advises (`umbp.master.shared`).

The active master enters what it has for a node that does not beat here into the log. All masters keep it, and the one that the node beats
at next hands it on. A node that goes on to another one may hear it twice, which does no harm: copies and drops that are done are done. What
a node answers is in its heartbeats, which all masters hear. An advice says for how many seconds it is good: the time that it waits here is
taken off, and one that is over is not handed on.

Bounded: nodes, advice a node. An advice that is lost is given again, since the pages are still as they were.
"""

from __future__ import annotations

import msgspec

from umbp.core.advice import PER_NODE_MAX
from umbp.master import protocol as say

HERE_BEATS = 3.0  # heartbeats for which a node that spoke to this master is taken to go on doing so


class Relay:
    """Of one master."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._here_seconds = HERE_BEATS * heartbeat_seconds
        self._beats: dict[str, float] = {}  # node -> when it last beat at this master itself
        self._kept: dict[str, list[tuple[float, say.Advice]]] = {}

    def __repr__(self) -> str:
        return f"<Relay of {len(self._beats)} nodes, {sum(map(len, self._kept.values()))} advice>"

    def beat(self, now: float, node: str) -> list[say.Advice]:
        """The node beats here, or has just joined: what the active master has for it."""
        self._beats[node] = now
        aged = [(now - at, advice) for at, advice in self._kept.pop(node, [])]
        return [msgspec.structs.replace(advice, seconds=advice.seconds - age) for age, advice in aged if advice.seconds > age]

    def here(self, now: float, node: str) -> bool:
        """Whether the node beats at this master."""
        return now - self._beats.get(node, -self._here_seconds) < self._here_seconds

    def keep(self, now: float, node: str, advice: list[say.Advice]) -> None:
        """For a node's next heartbeat, if that comes here."""
        kept = self._kept.setdefault(node, [])
        kept += [(now, one) for one in advice]
        del kept[: max(0, len(kept) - PER_NODE_MAX)]

    def forget(self, live: set[str]) -> None:
        """Only these nodes are there."""
        for known in (self._beats, self._kept):
            for node in [node for node in known if node not in live]:
                known.pop(node, None)
