"""A client's claims: what it has looked up stays where it is until it is leased, without a call (`umbp.core.claims`).

A ring of entry ids in a piece of scratch, written by one thread. What was claimed last counts: a new claim lets go of all before it, but
for those that are marked as needed (`need`) and what came after them.

States: out -> in (`enter`, a call) -> out (the connection is another). While it is out, or the pool has not beaten for `SILENT_SECONDS`,
nothing can be claimed; whoever relies on claims then finds nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from umbp import wire
from umbp.client.link import Bond, Link
from umbp.client.steps import Operation
from umbp.core.claims import RING_AT, W_BEAT, W_END, W_FIRST
from umbp.errors import LimitReached, Unavailable
from umbp.store.index import W_OFFSET
from umbp.store.memory import fence
from umbp.types import I64, U64, Mask

AREA_BYTES = (64 << 10, 1 << 20)  # the least and the most: 8,184 and 131,064 pages
SILENT_SECONDS = 2.0  # forty beats of a pool that is well
AREA_SHARE = 256  # in between, one in this many bytes of the pool


@dataclass(slots=True)
class Claim:
    """What was claimed for ``name``: the numbers before ``end``. ``needed``: whether it may not go yet."""

    name: str
    end: int
    needed: Callable[[], bool] | None = None


class Claims:
    """The claims of one client. `enter` may be run by any thread, all else by one."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._place: tuple[Bond, U64] | None = None
        self._clocks = 0.0  # of this process, less the pool's: 0 but where clocks are kept apart, as in a container's time namespace
        self._first = self._end = 0
        self._claims: deque[Claim] = deque()

    def __repr__(self) -> str:
        return f"<Claims {self._end - self._first} pages, {'in' if self.ready else 'out'}>"

    @property
    def ready(self) -> bool:
        """Whether pages can be claimed now."""
        place = self._place
        return place is not None and place[0] is self._link.bond_or_none()

    def enter(self) -> Operation[None]:
        """Take a ring, under the bond of the moment. Unavailable or LimitReached if there is none to be had."""
        bond, (least, most) = self._link.bond_now(), AREA_BYTES
        size = max(least, min(most, len(bond.data) // AREA_SHARE // 8 * 8))
        try:
            taken, _ = yield bond.call(wire.TakeScratch(size, claims=True))
        except LimitReached:
            size = least
            taken, _ = yield bond.call(wire.TakeScratch(size, claims=True))
        words = bond.data[taken.offset : taken.offset + size].view(np.uint64)
        self._clocks = time.monotonic() - int(words[W_BEAT]) * 1e-6
        self._place = bond, words

    @property
    def pages_max(self) -> int:
        """The most that can be claimed at a time; 0 while nothing can."""
        place = self._place
        return len(place[1]) - RING_AT if place is not None and self.ready and not self._is_silent(place[1]) else 0

    def claim(self, name: str, bond: Bond, ids: I64, versions: U64) -> Mask:
        """Claim these entries; which of them still are of these versions, and stay. None of them, while nothing can be claimed.

        It holds until the next claim or `let_go`, unless it is needed; for `umbp.core.claims.CLAIM_SECONDS` where nothing happens here.
        """
        nothing = np.zeros(len(ids), bool)
        place = self._place
        if place is None or place[0] is not bond or self._is_silent(place[1]):
            return nothing
        words = place[1]
        ring = words[RING_AT:]
        if int(words[W_END]) != self._end:  # entered anew
            self._first = self._end = 0
            self._claims.clear()
        self._drop()
        if self._end + len(ids) - self._first > len(ring):
            return nothing
        try:
            with self._link.filling(bond):
                words[W_FIRST] = self._first  # the pool reads these two first, so what is overwritten now is claimed no more
                ring[np.arange(self._end, self._end + len(ids)) % len(ring)] = ids.view(np.uint64)
                self._end += len(ids)
                words[W_END] = self._end
                fence()
                # What passes through is held by no lease.
                stays = bond.index.entries[ids, W_OFFSET] < bond.passage if bond.passage else ~nothing
                there: Mask = (bond.index.versions_of(ids) == versions) & stays
        except Unavailable:
            return nothing
        self._claims.append(Claim(name, self._end))
        return there

    def need(self, name: str, needed: Callable[[], bool]) -> None:
        """The last claim of this name may not go as long as this says so."""
        for claim in reversed(self._claims):
            if claim.name == name:
                claim.needed = needed
                return

    def let_go(self) -> None:
        """No claim counts any more but those that are needed."""
        place = self._place
        if place is not None and self.ready and int(place[1][W_END]) == self._end:
            self._drop()
            with contextlib.suppress(Unavailable), self._link.filling(place[0]):
                place[1][W_FIRST] = self._first

    def _is_silent(self, words: U64) -> bool:
        return time.monotonic() - self._clocks - int(words[W_BEAT]) * 1e-6 > SILENT_SECONDS

    def _drop(self) -> None:
        while self._claims and ((needed := self._claims[0].needed) is None or not needed()):
            self._first = self._claims.popleft().end


__all__ = ["Claim", "Claims"]
