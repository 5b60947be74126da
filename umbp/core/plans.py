"""What the master answers to "who serves this prefix, and how soon": a plan of runs, frozen.

A plan is for one list of keys, root first, and one requester. Its runs are in order, do not overlap and together cover exactly
``[0, pages)``; what comes after is to be recomputed. A run names the process that *has* the pages; where that is the requester itself the
run is local. Runs of different nodes are meant to be fetched at the same time, those of one node one after the other.

A plan is a hint. The pools own the truth: a source refuses what it does not hold any more under exactly this namespace and key, and then
the page is a miss, never other bytes. ``boot`` tells a source that it is meant, and not another process that came by its address.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from umbp.types import Tier


@dataclass(frozen=True, slots=True)
class Source:
    """A pool that holds pages. ``addresses``: transport name -> address that peers reach it by, such as ``{"http": "10.0.0.7:7411"}``."""

    node: str
    boot: int
    addresses: dict[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """Pages ``[start, stop)`` of the list that was asked about, from this source and tier, within ``seconds`` as far as is known."""

    start: int
    stop: int
    source: Source
    tier: Tier
    seconds: float

    @property
    def pages(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """Where ``[0, pages)`` comes from. ``held``: leading pages that some node has, which may be more than is worth fetching.

    ``seconds``: until all runs are there. ``recompute_seconds``: what computing the leading ``held`` pages anew would take, infinite where
    no prefill rate was given; ``[pages, held)`` is faster computed than fetched.
    """

    runs: tuple[Run, ...]
    pages: int
    held: int
    seconds: float
    recompute_seconds: float = inf

    @property
    def recompute(self) -> bool:
        """Some of what is held is faster computed than fetched."""
        return self.pages < self.held

    def check(self) -> None:
        """The runs cover ``[0, pages)`` exactly."""
        at = 0
        for run in self.runs:
            assert run.start == at, (run, at)
            assert run.stop > run.start, run
            at = run.stop
        assert at == self.pages <= self.held, (at, self.pages, self.held)


NOTHING = Plan((), 0, 0, 0.0)
"""No page is anywhere."""
