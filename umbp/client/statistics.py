"""Counts of one client, for who wants to know how it fares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ClientStatistics:
    """Counts of one client since it connected first."""

    connects: int = 0
    notes_sent: int = 0
    notes_dropped: int = 0
    leases_lost: int = 0
    corrupt: int = 0
    optimistic_lost: int = 0
    puts_ahead: int = 0  # into memory that was there already
    read_straight: int = 0  # pages, from files of the SSD tier
    read_near: int = 0  # pages, in the memory of neighbours
    neighbours: int = 0  # that can be read from now
