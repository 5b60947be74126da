"""All that a pool holds, a bounded piece at a time, for a master that has to hear it again; it can go on where it was interrupted.

Theory of operation. A sweep walks through the tiers, each a run of positions (entries of DRAM, rows of the SSD table); a piece is what
stands at the next few when it is made, so what is sent is never older than a moment. Whoever sends it tells the changes of meanwhile
between two pieces, so a key that moves to where the sweep has been is told as a change. For each piece the position and the sum before it
are kept: a master that lacks some says from which one on, and the sweep goes `back_to` there. The numbers of the pieces go on as the master
counts; what they say then is what the pool holds by then.

A piece of more than `SPACES_MAX` namespaces is several that belong together (``more``): nothing newer may be told between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from umbp.core.objects import LIVE
from umbp.core.pool import Pool
from umbp.core.sweeps import chained
from umbp.master import protocol as say
from umbp.master.service import Told
from umbp.types import I64, U64, Mask, Tier

PIECE_KEYS = say.KEYS_MAX // 2  # 4,096: batches of a put are not cut
WINDOW, WINDOWS_MAX = 1 << 13, 8  # positions looked at in one go, and so often for one piece: about 0.3 ms
RESUMES_MAX = 8  # of one sweep: a peer that asks for more is not heard right, and is sent all anew


class Keeps(Protocol):
    """A tier of this pool, as a sweep sees it: positions ``[0, end)``."""

    tier: Tier

    @property
    def end(self) -> int: ...

    def held(self, start: int, stop: int) -> tuple[I64, U64]:
        """What is there now in ``[start, stop)``: positions (n,), and rows (n, 5), the key and size << 32 | namespace number."""
        ...


class DramKeys:
    """The pages of the segment."""

    tier = Tier.DRAM

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def end(self) -> int:
        """See `Keeps`."""
        return self._pool.objects.capacity

    def held(self, start: int, stop: int) -> tuple[I64, U64]:
        """See `Keeps`."""
        ids: I64 = np.flatnonzero(self.visible(slice(start, stop))) + start
        return ids, self._pool.table.entries[ids, :5]

    def visible(self, ids: I64 | slice) -> Mask:
        """Which of these entries clients can find now."""
        objects = self._pool.objects
        visible: Mask = (objects.state[ids] == LIVE) & (objects.row[ids] >= 0)
        return visible


@dataclass(frozen=True, slots=True)
class Piece:
    """What to send next. ``total`` is the sum with it; ``more``: the next one belongs to it."""

    index: int
    told: Told
    total: int
    last: bool
    more: bool


class Sweep:
    """One. ``told`` makes bundles, of one namespace after the other, of rows of a tier."""

    def __init__(self, number: int, keeps: Sequence[Keeps], told: Callable[[U64, Tier], Iterable[Told]]) -> None:
        self.number = number
        self.keys = self.resumes = 0
        self._keeps, self._told = list(keeps), told
        self._at = self._group = (0, 0)  # tier and position that come next; those where the pieces that are ready begin
        self._total = 0
        self._ready: deque[Told] = deque()
        self._before: list[tuple[tuple[int, int], int]] = []  # position and sum before each piece

    def __repr__(self) -> str:
        return f"<Sweep {self.number}, {len(self._before)} pieces, {self.keys} keys>"

    @property
    def pieces(self) -> int:
        """So many were made."""
        return len(self._before)

    def take(self) -> Piece:
        """The next piece, which is empty where nothing stands; the last one always is."""
        last = False
        if not self._ready:
            self._group, last = self._at, self._at[0] == len(self._keeps)
            if not last:
                self._ready.extend(self._told(*self._rows()))
        told = self._ready.popleft() if self._ready else _NOTHING
        self._before.append((self._group, self._total))
        self._total = chained(self._total, say.content_sum(told.words, told.tiers, told.spaces))
        self.keys += len(told.words)
        return Piece(len(self._before) - 1, told, self._total, last=last, more=bool(self._ready))

    def back_to(self, index: int) -> bool:
        """Make that piece and what follows again, of what there is now; False where that cannot be, or was too often."""
        if not 0 <= index < len(self._before) or self.resumes >= RESUMES_MAX:
            return False
        self._at, self._total = self._before[index]
        del self._before[index:]
        self._ready.clear()
        self.resumes += 1
        return True

    def _rows(self) -> tuple[U64, Tier]:
        """Those of the next positions, `PIECE_KEYS` at the most, all of one tier."""
        number, start = self._at
        keeper, parts, count = self._keeps[number], list[U64](), 0
        for _ in range(WINDOWS_MAX):
            stop = min(start + WINDOW, keeper.end)
            positions, rows = keeper.held(start, stop)
            room = PIECE_KEYS - count
            start = int(positions[room]) if len(positions) > room else stop
            parts.append(rows[:room])
            count += len(parts[-1])
            if count == PIECE_KEYS or start >= keeper.end:
                break
        self._at = (number, start) if start < keeper.end else (number + 1, 0)
        return np.concatenate(parts), keeper.tier


_NOTHING = Told(np.empty((0, 4), np.uint64), np.empty(0, np.uint8), np.empty(0, np.uint8), [])
