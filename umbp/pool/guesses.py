"""Which node a fetch's pages will be on: the one that had all pages of the last fetches of their namespace.

Theory of operation. A session's pages mostly lie together, so who served its last pages will have the next ones too, and the way to the
master and back is a fifth of what a small fetch takes. So where the last `STREAK_MIN` plans for a namespace named one node and tier for all
of their pages, that is taken to be the next plan as well, and the node is asked at once. The master is asked when the pages are there: it
counts the use, and says who is to be asked from now on. A guess is never older than the last plan but one, nor than `SECONDS_MAX`.

A guess is a hint like any plan: what the node does not hold is a miss there, and is then asked of the master, without that node. It costs
one small request, and the next fetches of the namespace go by plans again. Bounded: namespaces remembered; the oldest go.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from umbp.core.plans import Plan, Run, Source
from umbp.types import Tier

STREAK_MIN = 2
SECONDS_MAX = 2.0
NAMESPACES_MAX = 256


@dataclass(slots=True)
class _Last:
    """The last plan of a namespace: what each of its pages was to take, and how many plans in a row were the same."""

    source: Source
    tier: Tier
    page_seconds: float
    streak: int
    at: float


class Guesses:
    """Of one pool, by the digest of the namespace. Times are the caller's."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, _Last] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Guesses for {len(self._last)} namespaces>"

    def planned(self, now: float, namespace: str, pages: int, plan: Plan) -> None:
        """The master's plan for so many pages."""
        if len(plan.runs) != 1 or plan.pages != pages:
            self.wrong(namespace)
            return
        run, last = plan.runs[0], self._last.pop(namespace, None)
        same = last is not None and (last.source.node, last.source.boot, last.tier) == (run.source.node, run.source.boot, run.tier)
        streak = last.streak + 1 if last is not None and same else 1
        self._last[namespace] = _Last(run.source, run.tier, run.seconds / pages, streak, now)
        if len(self._last) > NAMESPACES_MAX:
            self._last.popitem(last=False)

    def wrong(self, namespace: str) -> None:
        """The last guess, or plan, did not hold."""
        self._last.pop(namespace, None)

    def run_or_none(self, now: float, namespace: str, pages: int) -> Run | None:
        """What the plan for so many pages will most likely be."""
        last = self._last.get(namespace)
        if last is None or last.streak < STREAK_MIN or now > last.at + SECONDS_MAX:
            return None
        return Run(0, pages, last.source, last.tier, last.page_seconds * pages)
