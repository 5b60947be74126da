"""Who can hold keys, as small numbers: whether their cells count, and when a number may be used again.

    free --take--> counted --drop--> dropped --(a whole round of the sweep)--> free

A counted holder has an epoch of four bits. `begin` starts the next one; until `settle` cells of the old and the new epoch count (from the
one that was settled last on: what was void then stays void), after it only those of the new, and after a whole round of the sweep no
others are left and nothing needs to be compared. Sixteen epochs that were begun and never settled would wrap round: the caller drops the
holder before that (`begun_max`).
"""

from __future__ import annotations

import numpy as np

from umbp.errors import LimitReached
from umbp.types import I64, U8, U32, Mask

HOLDERS_MAX = 65_536
BEGUN_MAX = 12
_U32 = np.uint32


class Holders:
    """Numbers from 1 to `HOLDERS_MAX` - 1."""

    def __init__(self) -> None:
        self._live: Mask = np.zeros(HOLDERS_MAX, bool)
        self._strict: Mask = np.zeros(HOLDERS_MAX, bool)  # only the epochs from the settled one to the current one count
        self._settled: U8 = np.zeros(HOLDERS_MAX, np.uint8)
        self.epochs: U8 = np.zeros(HOLDERS_MAX, np.uint8)
        self._waits: Mask = np.zeros(HOLDERS_MAX, bool)  # for the sweep: only cells of these can be void
        self._begun: U8 = np.zeros(HOLDERS_MAX, np.uint8)  # epochs since the last round that cleaned this holder
        self._free: list[int] = []
        self._top = 1
        self._until: dict[int, tuple[int, int]] = {}  # holder -> (round, position) of the sweep at which all its void cells are gone
        self._round = 0
        self.position = 0  # where the sweep goes on: the row to look at next

    def __repr__(self) -> str:
        return f"<Holders {int(self._live.sum())} counted, {len(self._until)} to be swept>"

    def take(self) -> int:
        """A number whose cells count from now on. LimitReached if there is none."""
        if self._free:
            holder = self._free.pop()
        elif self._top < HOLDERS_MAX:
            holder, self._top = self._top, self._top + 1
        else:
            raise LimitReached(f"{HOLDERS_MAX} nodes and engine caches are the limit", field="node")
        self._live[holder], self._strict[holder], self.epochs[holder], self._begun[holder] = True, False, 0, 0
        return holder

    def drop(self, holder: int) -> None:
        """Its cells do not count any more; the number is free when the sweep has come round to where it is now."""
        assert self._live[holder], f"holder {holder} is not counted"
        self._live[holder] = False
        self._until[holder], self._waits[holder] = (self._round + 1, self.position), True

    def begin(self, holder: int) -> bool:
        """The next epoch; False if there were too many that were never settled and swept: drop it and take another."""
        if self._begun[holder] >= BEGUN_MAX:
            return False
        self.epochs[holder] = (int(self.epochs[holder]) + 1) & 15
        self._begun[holder] += 1
        return True

    def settle(self, holder: int) -> None:
        """Only the current epoch counts from now on, and those that are begun after it."""
        self._strict[holder], self._settled[holder] = True, self.epochs[holder]
        self._until[holder], self._waits[holder] = (self._round + 1, self.position), True

    def counts(self, cells: U32) -> Mask:
        """Which of these cells (none zero matters) count."""
        holder = (cells >> 8).astype(np.int64) & (HOLDERS_MAX - 1)
        good: Mask = self._live[holder]
        if self._until:  # otherwise no cell of an old epoch is left
            settled = self._settled[holder]
            age = ((cells >> _U32(4)).astype(np.uint8) - settled) & 15
            good &= ~self._strict[holder] | (age <= ((self.epochs[holder] - settled) & 15))
        return good

    def waits(self, cells: U32) -> Mask:
        """Which of these cells are of holders that wait for the sweep: no others can be void."""
        waits: Mask = self._waits.take(cells >> _U32(8))
        return waits

    def counts_one(self, cell: int) -> bool:
        """`counts` of a single cell."""
        holder = (cell >> 8) & (HOLDERS_MAX - 1)
        if not self._live[holder]:
            return False
        return not self._until or not self._strict[holder] or cell >> 4 & 15 == int(self.epochs[holder])

    @property
    def pending(self) -> int:
        """Holders that wait for the sweep."""
        return len(self._until)

    def swept(self, position: int) -> None:
        """The rows before this one are clean; 0 is the end of a round."""
        self.position = position
        self._round += position == 0
        for holder in [holder for holder, until in self._until.items() if until <= (self._round, position)]:
            del self._until[holder]
            self._waits[holder] = False
            if self._live[holder]:
                self._strict[holder], self._begun[holder] = False, 0
            else:
                self._free.append(holder)

    def live(self) -> I64:
        """Numbers that count."""
        return np.flatnonzero(self._live)
