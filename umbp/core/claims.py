"""Claims: pages that a client has looked up and is about to lease, said in shared memory, so that a lookup can protect without a call.

Theory of operation
-------------------
A lookup reads the shared index and asks nobody; the lease that follows it is a call. Between the two a page can be evicted. Callers that
can go back then compute it. Callers that cannot (ranks of an engine that have agreed on a length by now) *claim* what they found. A claim
is an entry id in a ring of the client's own, a piece of scratch that the pool was told of once:

    client   ids into the ring, full fence, versions read again: what is unchanged is claimed, and stays
    pool     versions of the victims := 0, full fence, rings read: what is claimed gets its version back, and stays

Each stores before it loads, so at least one of them sees the other: a page is never both evicted and taken for claimed. What both see is
kept by the pool and a miss for the client, which costs a hit and no byte. A version that came back is right for who remembered it: the
memory was given to nobody.

    words of an area    0 first    1 end    2 beat    8.. ring, entry number i in word 8 + i % ring

The claims are those from ``first`` to ``end``, numbers that only grow; ``end`` is stored after the entries. Only its client writes
these. The pool writes *beat*, its clock in microseconds, at every tick: a client whose pool was not heard of lately claims nothing, as the
lease would not be granted in time.

A claim is a promise for moments, not a lease: an area whose two numbers have not changed for `CLAIM_SECONDS` counts no more, until they do.
It ends with its session, and it does not hold what is removed, flushed or found damaged. What an area says is checked: ids out of range are
none, and there are never more than the ring has.

What it costs: nothing where no client claims; else two words a client and eviction, and one pass over the claims that changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from umbp.errors import InvalidRequest
from umbp.types import I32, I64, U64, Mask

W_FIRST, W_END, W_BEAT, RING_AT = 0, 1, 2, 8
CLAIM_SECONDS = 10.0  # as long as a lease that is not renewed
NOTHING = (0, 0)
NONE = ((-1, -1), np.empty(0, np.int64))


@dataclass(slots=True)
class Area:
    """One client's claims. ``seen`` at ``since`` for the first time; ``over``: what has stood for too long."""

    session: int
    piece: int
    words: U64
    seen: tuple[int, int] = (0, 0)
    since: float = 0.0
    over: tuple[int, int] | None = None

    def span(self) -> tuple[int, int]:
        """First and end as they are now."""
        return int(self.words[W_FIRST]), int(self.words[W_END])

    def ids(self, span: tuple[int, int]) -> I64:
        """The entry ids between these numbers."""
        ring = self.words[RING_AT:]
        count = min(max(0, span[1] - span[0]), len(ring))
        start = (span[1] - count) % len(ring)
        found: I64 = ring.take(np.arange(start, start + count) % len(ring)).view(np.int64)
        return found


class Claims:
    """All claims of one pool of ``capacity`` entries."""

    def __init__(self, capacity: int) -> None:
        self.areas: dict[tuple[int, int], Area] = {}  # by session and piece
        self.kept = 0  # victims that were claimed at the last moment
        self._capacity = capacity
        self._fences: list[Callable[[], None]] = []
        self._flags: Mask = np.zeros(0, bool)
        self._marked: dict[tuple[int, int], tuple[tuple[int, int], I64]] = {}  # which spans the flags are of, and their ids

    def __repr__(self) -> str:
        return f"<Claims of {len(self.areas)} clients>"

    def open(self, now: float, session: int, piece: int, words: U64, fence: Callable[[], None]) -> None:
        """From now on these words, a piece of scratch of this session, are its claims. ``fence``: a full memory fence of the processor."""
        if len(words) <= RING_AT:
            raise InvalidRequest(f"{len(words)} words have no room for claims", field="scratch", example=str(64 << 10))
        words[:RING_AT] = 0  # what a former owner left
        words[W_BEAT] = int(now * 1e6)
        self.end_session(session)
        if not len(self._flags):
            self._flags = np.zeros(self._capacity, bool)
        self._fences = [fence]
        self.areas[session, piece] = Area(session, piece, words, since=now)

    def end_session(self, session: int) -> None:
        """The session's claims are over."""
        for place in [place for place in self.areas if place[0] == session]:
            del self.areas[place]

    def end_piece(self, session: int, piece: int) -> None:
        """This piece is no area any more."""
        self.areas.pop((session, piece), None)

    def expire(self, now: float) -> None:
        """Claims that stand for too long count no more: their client has stopped. And clients see that the pool has not."""
        for area in self.areas.values():
            area.words[W_BEAT] = int(now * 1e6)
            span = area.span()
            if span != area.seen:
                area.seen, area.since = span, now
            elif now - area.since > CLAIM_SECONDS:
                area.over = span

    def refresh(self) -> None:
        """Read what the areas say now, as far as it is not what they said before."""
        current = {place: span if (span := area.span()) != area.over else NOTHING for place, area in self.areas.items()}
        if len(current) == len(self._marked) and all(span == self._marked.get(place, NONE)[0] for place, span in current.items()):
            return
        for _, ids in self._marked.values():
            self._flags[ids] = False
        self._marked = {}
        for place, span in current.items():
            ids = self.areas[place].ids(span)
            ids = ids[(ids >= 0) & (ids < self._capacity)]
            self._flags[ids] = True
            self._marked[place] = (span, ids)

    def among(self, ids: I32 | I64 | slice) -> Mask | None:
        """Which of these entries were claimed at the last `refresh`; None: no entry is."""
        return self._flags[ids] if self._marked else None

    def among_hidden(self, ids: I64) -> Mask | None:
        """As `among` now, for entries whose versions were just set to 0: who claims another of them from here on sees that it is gone."""
        for fence in self._fences:
            fence()
        self.refresh()
        found = self.among(ids)
        if found is not None:
            self.kept += int(np.count_nonzero(found))
        return found

    def check(self) -> None:
        """The flags are those of the spans that were read."""
        expected = np.zeros(len(self._flags), bool)
        for _, ids in self._marked.values():
            expected[ids] = True
        assert np.array_equal(expected, self._flags), "flags and claims differ"
