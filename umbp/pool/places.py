"""Places that pages come from, as this pool has seen them: how much is asked of each at a time, and which are not asked for a while.

A place is a disk, a node, or a source that says where pages are. One that failed is *suspect*: until a moment has passed nobody asks it, so
that pages which only it has are a quick miss for all instead of a wait for each. It is not asked either while memory that it was given may
still be written to, however long that takes: what must be kept aside for it does not become more and more.

A source that did not say where pages are within a short time is not suspect: who was in a hurry is no reason for others to go without.
For a moment it is only not asked by those who have hardly more time than that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("umbp.pool.places")
READS_PER_PLACE = 2  # one is on its way while the other is being committed
SUSPECT_SECONDS = 1.0
SUSPECT_FROM_SECONDS = 0.2  # who was given less time than this is not to blame for being late
HURRY = 2.0  # who has less than so many times the time that was too short waits for nothing
PLACES_MAX = 1024


@dataclass(slots=True)
class Place:
    """One place. ``turns``: the reads that it may be asked for at a time; ``passing``: of pages that only pass through, one."""

    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_PER_PLACE))
    passing: asyncio.Lock = field(default_factory=asyncio.Lock)
    suspect_until: float = float("-inf")
    late_until: float = float("-inf")
    late_seconds: float = 0.0  # what it was last given and was late for, until then

    @property
    def busy(self) -> bool:
        """Whether somebody waits for it."""
        return self.turns.locked() or self.passing.locked()


class Places:
    """All places of one pool, by name."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_name: dict[str, Place] = {}

    def __repr__(self) -> str:
        return f"<Places {len(self._by_name)}, suspect: {', '.join(self.suspects) or 'none'}>"

    def of(self, name: str) -> Place:
        """The place of this name, made if it is new."""
        if len(self._by_name) >= PLACES_MAX and name not in self._by_name:  # of nodes long gone
            now = self._now()
            self._by_name = {
                known: place for known, place in self._by_name.items() if place.busy or max(place.suspect_until, place.late_until) > now
            }
        return self._by_name.setdefault(name, Place())

    def is_suspect(self, name: str) -> bool:
        """Whether it is not to be asked now."""
        place = self._by_name.get(name)
        return place is not None and place.suspect_until > self._now()

    def is_too_late(self, name: str, seconds: float) -> bool:
        """Whether it is not to be asked now by who has so many seconds for its answer."""
        place = self._by_name.get(name)
        return place is not None and place.late_until > self._now() and seconds < HURRY * place.late_seconds

    def late(self, name: str, seconds: float, error: BaseException) -> None:
        """It did not answer within so many seconds."""
        if seconds >= SUSPECT_FROM_SECONDS:
            self.suspect(name, error)
            return
        place, now = self.of(name), self._now()
        place.late_seconds = max(seconds, place.late_seconds if place.late_until > now else 0.0)
        place.late_until = now + SUSPECT_SECONDS

    @property
    def suspects(self) -> frozenset[str]:
        """Those not to be asked now."""
        now = self._now()
        return frozenset(name for name, place in self._by_name.items() if place.suspect_until > now)

    def suspect(self, name: str, error: BaseException, lingers: asyncio.Future[None] | None = None) -> None:
        """It failed. ``lingers``: done when nothing writes any more to the memory that it was given."""
        place = self.of(name)

        def recover(_: object) -> None:
            place.suspect_until = self._now() + SUSPECT_SECONDS

        log.warning("%s failed, and is not asked for %g s: %s", name, SUSPECT_SECONDS, str(error) or type(error).__name__)
        recover(None)
        if lingers is not None:
            place.suspect_until = float("inf")
            lingers.add_done_callback(recover)
