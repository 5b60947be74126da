"""What a process's loaders show to Prometheus, in the registry that engines serve: how loads went and why, and where their bytes came from.

Made when the first loader is, so that a process that only imports umbp shows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from prometheus_client import Counter

from umbp.core.movers import Choice
from umbp.loader.copies import Taken


@dataclass(frozen=True, slots=True)
class Counters:
    """All counters of a process."""

    loads: Counter
    pages: Counter
    read: Counter
    lost: Counter

    def load(self, choice: Choice | None, taken: Taken, *, pages: int, missing: int) -> None:
        """One load is over."""
        if choice is not None:
            self.loads.labels(choice.mover, choice.cause).inc()
        self.pages.labels("restored").inc(pages - missing)
        self.pages.labels("missing").inc(missing)
        for source, nbytes in (("own", taken.own), ("group", taken.group), ("fallback", taken.fallback), ("received", taken.received)):
            self.read.labels(source).inc(nbytes)


@cache
def counters() -> Counters:
    """The process's."""
    return Counters(
        Counter("umbp_loads", "Loads, by how they were done and why so.", ["mover", "cause"]),
        Counter("umbp_load_pages", "Pages asked for in loads, by what became of them.", ["outcome"]),
        Counter("umbp_load_bytes", "Bytes of loads: out of the segment (own, group, fallback) or from other ranks (received).", ["source"]),
        Counter("umbp_load_lost_owners", "Ranks that a group load did without after it had begun."),
    )
