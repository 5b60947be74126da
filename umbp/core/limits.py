"""What bounds a pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, shares of the pool 0 to 1."""

    lease_seconds: float = 10.0
    lease_seconds_max: float = 300.0
    lease_share: float = 1.0
    reservation_seconds: float = 30.0
    watermark_high: float = 0.95
    watermark_low: float = 0.90
    checksum: str = "lazy"
    passage_bytes: int = 0  # of the pool, for pages that only pass through (`umbp.core.passage`)
    level_high: float = 0.90  # shares of a level of the memory, where there are several (`umbp.core.levels`)
    level_low: float = 0.80
    promote: bool = True
