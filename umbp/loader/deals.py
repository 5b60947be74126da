"""A round of ranks on GPUs, dealt: who reads which page, where it belongs in each rank, and what this rank waits for.

Every rank makes its deal from the same roster and tables. What two ranks could see differently (a table that was overwritten, a card that
could not be read) goes into the digest, by which a reader knows whether a writer means what it means. A writer also says whom it serves:
it may be unable to reach a rank that others reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from umbp.client.ranks import RosterView
from umbp.core.layer_groups import layer_groups
from umbp.core.windows import Windows, windows
from umbp.loader.board import Board, Table
from umbp.loader.peers import Reach
from umbp.types import I64, Mask


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank of the round. ``wanted``: ids that it wants and that exist; ``slots``: where it wants each; ``helps``: whether it reads."""

    rank: int
    sequence: int
    board: Board
    reach: Reach | None
    table: Table | None
    wanted: I64
    slots: I64
    helps: bool


@dataclass(frozen=True, slots=True)
class Deal:
    """``me``: this rank's index among ``seats``. ``staged``: the round goes through staging, since one of its ranks must."""

    seats: tuple[Seat, ...]
    me: int
    windows: Windows
    staged: bool
    groups: tuple[tuple[int, int], ...]
    digest: int

    @property
    def readers(self) -> int:
        """How many ranks read pages."""
        return sum(seat.helps for seat in self.seats)

    def slots_of(self, seat: int, pages: I64) -> I64:
        """Where a rank wants these pages (indices into the windows' pages), -1 for those that it does not want."""
        position = self.windows.position[seat][pages]
        slots = self.seats[seat].slots
        return np.where(position >= 0, slots[position], -1) if len(slots) else np.full(len(pages), -1, np.int64)

    def wants_from(self, reader: int, owner: int) -> bool:
        """Whether a rank wants any page of an owner."""
        return bool(((self.windows.owner == owner) & (self.windows.position[reader] >= 0)).any())


def deal(roster: RosterView, me: int, reach: Callable[[int, Board], Reach | None], layer_bytes: list[int]) -> Deal:
    """``reach``: of a rank's number and board, its memory as seen from here, None if its card cannot be read."""
    seats, known = [], np.empty(0, np.int64)
    for seat in roster.seats:
        board = Board(seat.area)
        table, there = board.table_or_none(seat.sequence, seat.pages), reach(seat.rank, board)
        ids = table.ids[seat.held] if table is not None else known[:0]
        good = table is not None and there is not None and (np.array_equal(ids, known) or len(np.unique(ids)) == len(ids))
        known = ids if good else known  # mostly all ask for the same
        wanted, slots = (ids, table.slots[seat.held]) if good and table is not None else (known[:0], known[:0])
        helps = good and table is not None and table.helps
        seats.append(Seat(seat.rank, seat.sequence, board, there, table if good else None, wanted, slots, helps))
    dealt = windows([seat.wanted for seat in seats], [seat.helps for seat in seats])
    staged = any(seat.table.staged for seat in seats if seat.table is not None)
    readers = max(1, sum(seat.helps for seat in seats))
    groups = tuple(layer_groups(layer_bytes, pages=len(dealt.pages), readers=readers))
    if staged:  # a staging place holds one layer of a page
        groups = tuple((layer, layer + 1) for layer in range(len(layer_bytes)))
    state = xxhash.xxh3_64(np.array([roster.round, staged, len(groups), *(seat.sequence for seat in seats)], np.int64).tobytes())
    for part in (dealt.pages, dealt.owner, np.packbits(dealt.position >= 0)):
        state.update(part.tobytes())
    return Deal(tuple(seats), me, dealt, staged, groups, state.intdigest() | 1)


@dataclass(frozen=True, slots=True)
class Parts:
    """What this rank wants, owner after owner: part w is ``pages[starts[w] : starts[w + 1]]``, of seat ``owners[w]``.

    ``pages``: indices into the windows' pages; ``slots``: where they belong.
    """

    owners: tuple[int, ...]
    starts: I64
    pages: I64
    slots: I64

    @classmethod
    def of(cls, made: Deal) -> Parts:
        """The owners that bring something, in an order that begins behind this rank."""
        ranks = len(made.seats)
        order = [(made.me + 1 + step) % ranks for step in range(ranks)]
        pages = [made.windows.from_owner(made.me, owner) for owner in order]
        used = [(owner, mine) for owner, mine in zip(order, pages, strict=True) if len(mine)]
        every = np.concatenate([mine for _, mine in used]) if used else np.empty(0, np.int64)
        starts = np.cumsum([0, *(len(mine) for _, mine in used)]).astype(np.int64)
        return cls(tuple(owner for owner, _ in used), starts, every, made.slots_of(made.me, every))

    def lengths(self) -> I64:
        """Pages a part."""
        return np.diff(self.starts)

    def from_others(self, me: int) -> Mask:
        """Which of ``pages`` another rank brings."""
        owners = np.repeat(np.array(self.owners, np.int64), self.lengths())
        mine: Mask = owners != me
        return mine
