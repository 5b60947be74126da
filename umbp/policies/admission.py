"""Which new pages are worth storing: all of them, or those that were asked for before.

Theory of operation. A page that is never used again costs a copy and an eviction, and on SSD it costs wear. `second_touch` stores
a key once it was requested `TOUCHES_MIN` times, the request that leads to this put included, within the last `capacity` new keys;
while the pool is less than `FILL_FREE` full it stores everything. A page after one that was declined is declined too: it could
not be hit.

TinyLFU is not here: it weighs the newcomer against the victim, and an admission policy is not told the victim.

Bytes a key remembered: 11. Source: "bypass on first access" is the doorkeeper of TinyLFU (Einziger et al., ACM ToS 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.policies.base import ADMISSION, Request, register
from umbp.policies.ghosts import Ghosts
from umbp.types import U8, U64, Mask

TOUCHES_MIN = 2
FILL_FREE = 0.5


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """``request_count`` requests were seen."""

    request_count: int


@register(ADMISSION, "always")
class Always:
    """Stores everything."""

    __slots__ = ("_request_count",)

    def __init__(self, capacity: int) -> None:
        self._request_count = 0

    def __repr__(self) -> str:
        return "<Always>"

    def on_request(self, event: Request) -> None:
        """Counts it."""
        self._request_count += 1

    def admit(self, now: float, fingerprints: U64, *, fill: float) -> Mask:
        """All."""
        return np.ones(len(fingerprints), np.bool_)

    def statistics(self) -> AdmissionStatistics:
        """A snapshot."""
        return AdmissionStatistics(self._request_count)

    def check(self) -> None:
        """Nothing can be wrong."""


@register(ADMISSION, "second_touch")
class SecondTouch:
    """Stores what was requested before."""

    __slots__ = ("_request_count", "_seen", "_touches")

    def __init__(self, capacity: int) -> None:
        self._seen = Ghosts(capacity)
        self._touches: U8 = np.zeros(self._seen.slot_count, np.uint8)
        self._request_count = 0

    def __repr__(self) -> str:
        return f"<SecondTouch {self._request_count} requests, {self._seen!r}>"

    def on_request(self, event: Request) -> None:
        """One touch of every key that is not stored (of those stored nothing needs to be decided)."""
        self._request_count += 1
        fingerprints = np.unique(event.fingerprints[event.ids < 0])
        slots = self._seen.find(fingerprints)
        known = slots >= 0
        self._touches[slots[known]] = np.minimum(self._touches[slots[known]] + 1, TOUCHES_MIN)
        self._touches[self._seen.add(fingerprints[~known])] = 1

    def admit(self, now: float, fingerprints: U64, *, fill: float) -> Mask:
        """Those touched often enough, in chain order, up to the first that was not."""
        if fill < FILL_FREE:
            return np.ones(len(fingerprints), np.bool_)
        slots = self._seen.find(fingerprints)
        mask: Mask = np.logical_and.accumulate((slots >= 0) & (self._touches[slots] >= TOUCHES_MIN))
        return mask

    def statistics(self) -> AdmissionStatistics:
        """A snapshot."""
        return AdmissionStatistics(self._request_count)

    def check(self) -> None:
        """Counts are in range."""
        assert bool(np.all(self._touches <= TOUCHES_MIN))
