"""LRFU-P: recency and frequency in one score, with a half-life that is learnt from the traffic.

Theory of operation. Each page has a use count `f` that halves every H seconds, and the time `last` of its last use. A use at time t
makes ``f = 1 + f * 2**(-(t - last) / H)`` and gives the score ``t + H * log2(f)``, by which pages go, leaf first (`Chains`; a score
is kept as microseconds, and falls by at least one from page to page). After an eviction `f` and `last` live on as a ghost, for 4 H
and in bounded number; a key that returns goes on from there. Without ghosts this is hardly better than LRU.

H is twice the geometric mean gap between two uses of a sequence's end: of each request that leads with m > 0 known pages (stored or
ghosts) the time since page m - 1 was last used counts, unless that page has `FORKS_MAX` children or more (a shared prompt: its gap
says nothing about sessions). There is one mean, started with 4 observations of 60 s; there are no constants per workload.

Two duties of the caller: a request is told before the insert of what it missed, and a partial last page is not stored (it costs
half a point). Bytes a page: 34 with 5 for ghosts on top, and 12 for each queued one (1/32).

Source: after LRFU (Lee et al., IEEE Transactions on Computers 2001), with a half-life fitted to sessions instead of a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbp.policies.base import EVICTION, Eligible, Inserted, Request, register
from umbp.policies.chains import Chains
from umbp.policies.ghosts import ABSENT, Ghosts
from umbp.types import F64, I32, I64, U8, U64

FORKS_MAX = 8
GAP_START_S = 60.0
GAP_START_COUNT = 4
GHOST_LIFE = 4  # half-lives
GHOST_SHARE = 0.25  # of the capacity: 250,000 at a million pages cover 4 half-lives of 4 minutes at 260 new pages a second ...
GHOST_COUNT_MIN = 65_536  # ... and a small pool needs as many for its traffic as a large one: 1.8 MB
US = 1e6
SLACK_US = 10 * int(US)  # a put this long after its request counts as part of it; half-lives are minutes

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LrfuStatistics:
    """``half_life_s`` as learnt from ``gap_count`` gaps; ``returned_count`` pages came back as ghosts."""

    live_count: int
    leaf_count: int
    half_life_s: float
    gap_count: int
    returned_count: int


class _Uses:
    """`f`, `last` and the number of children ever put under a page (it stops at `FORKS_MAX`); by id or by ghost slot.

    Times are seconds after the policy's first event: float32 then holds them to 0.1 s for a week and to 2 s for a year.
    """

    __slots__ = ("children_seen", "count", "last_s")

    def __init__(self, size: int) -> None:
        self.count: F32 = np.zeros(size, np.float32)
        self.last_s: F32 = np.zeros(size, np.float32)
        self.children_seen: U8 = np.zeros(size, np.uint8)

    def use(self, at: npt.NDArray[np.integer], now_s: float, half_life_s: float) -> None:
        """One more use of each (distinct) place, now."""
        self.count[at] = 1.0 + self.decayed(at, now_s, half_life_s)
        self.last_s[at] = now_s

    def decayed(self, at: npt.NDArray[np.integer], now_s: float, half_life_s: float) -> F64:
        """`f` as it is by now."""
        ages_s = np.maximum(now_s - self.last_s[at].astype(np.float64), 0.0)
        count: F64 = self.count[at] * np.exp2(-ages_s / half_life_s)
        return count


@register(EVICTION, "lrfu")
class Lrfu:
    """Lowest of ``last use + half-life * log2(uses, decayed)`` first, children before parents."""

    __slots__ = (
        "_chains",
        "_fingerprint",
        "_gap_count",
        "_gap_log_sum",
        "_ghost_uses",
        "_ghosts",
        "_returned_count",
        "_start_s",
        "_uses",
    )

    def __init__(self, capacity: int) -> None:
        self._chains = Chains(capacity)
        self._uses = _Uses(capacity)
        self._fingerprint: U64 = np.zeros(capacity, np.uint64)
        self._ghosts = Ghosts(max(GHOST_COUNT_MIN, int(GHOST_SHARE * capacity)))
        self._ghost_uses = _Uses(self._ghosts.slot_count)
        self._gap_count = GAP_START_COUNT
        self._gap_log_sum = GAP_START_COUNT * math.log(GAP_START_S)
        self._returned_count = 0
        self._start_s: float | None = None

    def __repr__(self) -> str:
        return f"<Lrfu {self._chains.ranking.live_count} live, half-life {self.half_life_s:.0f} s>"

    @property
    def half_life_s(self) -> float:
        """Twice the geometric mean of the gaps seen."""
        return 2 * math.exp(self._gap_log_sum / self._gap_count)

    def on_inserted(self, event: Inserted) -> None:
        """Goes on from the ghost where there is one. The use was counted by the request before: an insert is none of its own."""
        ids, uses, ghost_uses = event.ids, self._uses, self._ghost_uses
        now_s, half_life_s = self._seconds(event.now), self.half_life_s
        slots = self._remembered(event.fingerprints, now_s)
        known = slots >= 0
        self._fingerprint[ids] = event.fingerprints
        uses.count[ids] = 1.0
        uses.count[ids[known]] = np.maximum(ghost_uses.decayed(slots[known], now_s, half_life_s), 1.0)
        uses.last_s[ids] = now_s
        uses.children_seen[ids] = 0
        uses.children_seen[ids[known]] = ghost_uses.children_seen[slots[known]]
        self._ghosts.drop(slots[known])
        self._returned_count += int(np.count_nonzero(known))
        self._chains.insert(ids, event.parents, self._scores_us(ids, now_s, half_life_s), slack=SLACK_US)
        parents = self._chains.parent[ids[~known]]
        parents = parents[parents >= 0]
        uses.children_seen[parents] = np.minimum(uses.children_seen[parents] + 1, FORKS_MAX)

    def on_request(self, event: Request) -> None:
        """One use of every key that is live or remembered; the gap at the end of the known ones goes into the mean."""
        now_s = self._seconds(event.now)
        live = (event.ids >= 0) & self._chains.ranking.live[event.ids]
        slots = np.full(len(live), ABSENT, np.int64)
        slots[~live] = self._remembered(event.fingerprints[~live], now_s)
        known = live | (slots >= 0)
        end = (len(known) if known.all() else int(known.argmin())) - 1
        if end >= 0 and live[end]:
            self._learn(self._uses, int(event.ids[end]), now_s)
        elif end >= 0:
            self._learn(self._ghost_uses, int(slots[end]), now_s)
        half_life_s = self.half_life_s
        self._uses.use(event.ids[live], now_s, half_life_s)
        self._ghost_uses.use(slots[slots >= 0], now_s, half_life_s)
        scores_us = np.zeros(len(live), np.int64)
        scores_us[live] = self._scores_us(event.ids[live], now_s, half_life_s)
        self._chains.touch(event.ids, scores_us)

    def victims(self, eligible: Eligible, count: int) -> I32:
        """Lowest score first; pages above an ineligible one last."""
        return self._chains.peek(eligible, count)

    def on_removed(self, ids: I32, *, evicted: bool) -> None:
        """Cuts their links; those evicted are remembered."""
        ids = self._chains.remove(ids)
        if evicted and len(ids):
            slots = self._ghosts.add(self._fingerprint[ids])
            self._ghost_uses.count[slots] = self._uses.count[ids]
            self._ghost_uses.last_s[slots] = self._uses.last_s[ids]
            self._ghost_uses.children_seen[slots] = self._uses.children_seen[ids]

    def statistics(self) -> LrfuStatistics:
        """A snapshot."""
        live_count, leaf_count = self._chains.ranking.live_count, self._chains.leaf_count
        return LrfuStatistics(live_count, leaf_count, self.half_life_s, self._gap_count - GAP_START_COUNT, self._returned_count)

    def check(self) -> None:
        """The chains hold, and what is live has been used."""
        self._chains.check()
        assert bool(np.all(self._uses.count[self._chains.ranking.live] >= 1))

    def _seconds(self, now: float) -> float:
        if self._start_s is None:
            self._start_s = now
        return now - self._start_s

    def _remembered(self, fingerprints: U64, now_s: float) -> I64:
        slots = self._ghosts.find(fingerprints)
        slots[self._ghost_uses.last_s[slots] < now_s - GHOST_LIFE * self.half_life_s] = ABSENT
        return slots

    def _learn(self, uses: _Uses, at: int, now_s: float) -> None:
        if uses.children_seen[at] < FORKS_MAX:
            self._gap_count += 1
            self._gap_log_sum += math.log(max(0.0, now_s - float(uses.last_s[at])) + 0.1)

    def _scores_us(self, ids: I32, now_s: float, half_life_s: float) -> I64:
        scores: F64 = (now_s + half_life_s * np.log2(self._uses.count[ids].astype(np.float64))) * US
        return scores.astype(np.int64)
