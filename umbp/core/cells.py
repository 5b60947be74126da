"""Who holds each row of the directory: small cells of (holder, epoch, tiers), four in the row and more in a chain of blocks.

Theory of operation. A *cell* of 32 bits in a row says that a holder has its key:

    holder (24 bits) | epoch (4 bits) | tiers (4 bits: HBM, HOST, DRAM, SSD)

Four cells are in the row, more in a chain of blocks of eight, so that the system prompt that all nodes hold costs what it is worth. A
holder has one cell a row; a cell of 0 is free. A *base* is a cell without tiers.

`mark` and `unmark` take any number of (row, base, tier bit), also several of one row: of those that would write to one word at the same
time, one is picked by who is read back (`turns`), and the others go round again, when they see what it wrote. Nothing is sorted; without
such company one round does it. Only rows with a chain, or those that are about to get one, are looked at more closely.

Cost: 16 bytes of cells a row, a block of 32 bytes for `BLOCKS_SHARE` rows at the most. A cell set or cleared is 40 to 60 ns in batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from umbp.core.holders import Holders
from umbp.types import I64, U32, Mask

ROW_WORDS = 20
W_CELLS, W_MORE = 8, 13
INLINE, BLOCK = 4, 8
BLOCKS_SHARE = 16  # one block of further cells for so many rows

CHAINED, NOWHERE = -1, -2  # instead of a position: to be looked for in the chain; there is none

_U32 = np.uint32
_1, _8 = _U32(1), _U32(8)
TIERS, BASE = _U32(15), _U32(0xFFFF_FFF0)
_COLUMNS = np.arange(BLOCK)


class Cells:
    """The memory of ``rows_max`` rows, of which cells and the first block are this class's, and of the blocks."""

    def __init__(self, rows_max: int, holders: Holders) -> None:
        self.holders = holders
        self.blocks_max = rows_max // BLOCKS_SHARE + 64
        self._end = rows_max * ROW_WORDS
        self.flat: U32 = np.zeros(self._end + (self.blocks_max + 1) * BLOCK, np.uint32)
        self.rows: U32 = self.flat[: self._end].reshape(rows_max, ROW_WORDS)
        # The cells of a row in one load: to NumPy 16 bytes are a complex number, and one of these is what it loads fastest.
        self._inline = np.ndarray((rows_max,), np.complex128, self.flat, W_CELLS * 4, (ROW_WORDS * 4,))
        self._more: U32 = self.rows[:, W_MORE]
        self._next_block: U32 = np.zeros(self.blocks_max + 1, np.uint32)  # block 0 is none
        self._free_blocks: list[int] = []
        self._blocks_top = 1
        self.left_out = 0  # cells for which there was no block

    def __repr__(self) -> str:
        return f"<Cells of {len(self.rows)} rows, {self._blocks_top - 1 - len(self._free_blocks)} blocks>"

    # -- changes -----------------------------------------------------------------------------------------------------------------------

    def mark(self, rows: I64, bases: U32, bits: U32) -> int:
        """Set tier bits in the cells of these bases, another epoch's cell being replaced; how many were news. All (n,)."""
        news = 0
        while len(rows):
            position = self._find(rows, bases, room=True)
            chained = np.flatnonzero(position == CHAINED)
            if len(chained):  # one of a row at a time, so that a row is given no more blocks than it needs
                chained = chained[np.unique(rows[chained], return_index=True)[1]]
                position[chained] = self._room_in_chain(rows[chained], bases[chained] >> _8)
            mine, old = self._take_turns(position)
            base, bit = bases[mine], bits[mine]
            new = np.where(old & BASE == base, old | bit, base | bit)
            self.flat[position[mine]] = new
            news += int(np.count_nonzero(new != old))
            rows, bases, bits = _others(position, mine, rows, bases, bits)
        return news

    def unmark(self, rows: I64, bases: U32, bits: U32) -> int:
        """Clear tier bits in the cells of these holders, whatever the epoch; how many were set. All (n,)."""
        news = 0
        while len(rows):
            position = self._find(rows, bases, room=False)
            chained = np.flatnonzero(position == CHAINED)
            if len(chained):
                position[chained] = self._walk(rows[chained], bases[chained] >> _8)[0]
            mine, old = self._take_turns(position)
            rest = old & ~bits[mine]
            self.flat[position[mine]] = np.where(rest & TIERS != 0, rest, _U32(0))
            news += int(np.count_nonzero(rest != old))
            rows, bases, bits = _others(position, mine, rows, bases, bits)
        return news

    def turns(self, position: I64) -> Mask:
        """One of each of these words of ``flat``, the same or not; what was in them is lost."""
        number = np.arange(len(position), dtype=np.uint32)
        self.flat[position] = number
        mine: Mask = self.flat.take(position) == number
        return mine

    def void(self, start: int, stop: int, rows_max: int) -> tuple[I64, int]:
        """Free the cells in these rows that do not count, in ``rows_max`` rows at the most.

        The rows that had some or have a chain (where nothing is freed yet), and the first row that was not cleaned.
        """
        part = self._inline[start:stop].copy().view(np.uint32)
        doubtful = np.flatnonzero(self.holders.waits(part).view(np.uint32))
        cells = part.reshape(-1, INLINE).take(doubtful, 0)
        void = (cells != 0) & ~self.holders.counts(cells)
        cells[void] = 0
        changed = np.flatnonzero(void.view(np.uint32))
        rows = doubtful[changed]
        if len(rows) > rows_max:
            rows, stop = rows[:rows_max], start + int(rows[rows_max])
        self._inline[start + rows] = cells.take(changed[: len(rows)], 0).view(np.complex128).reshape(-1)
        return np.union1d(rows, np.flatnonzero(self._more[start:stop])) + start, stop

    def clean_chains(self, rows: I64) -> None:
        """Free what does not count in the chains of these rows, and blocks that are empty then."""
        for row in np.unique(rows[self._more[rows] != 0]).tolist():
            self._clean_chain(row)

    def held(self, rows: I64) -> Mask:
        """Which of these rows have a cell or a block, whether it counts or not."""
        cells = self._inline[rows].view(np.uint64).reshape(-1, 2)
        held: Mask = (cells[:, 0] | cells[:, 1] | self._more[rows]) != 0
        return held

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def levels(self, rows: I64) -> Iterator[tuple[I64, U32]]:
        """Cells of these rows: (which of the rows, their cells (n, 4 or 8)), the inline ones first, then block by block."""
        at = np.arange(len(rows))
        yield at, self._inline[rows].view(np.uint32).reshape(-1, INLINE)
        block = self._more[rows]
        while block.any():
            more = np.flatnonzero(block)
            at, block = at[more], block[more]
            yield at, self.flat[self._block_at(block)[:, None] + _COLUMNS]
            block = self._next_block[block]

    def check(self, rows: I64) -> None:
        """The invariants, given all rows that are in use: slow."""
        owned = sorted(block for row in rows.tolist() for block in self._chain_of(row))
        assert owned == sorted(set(range(1, self._blocks_top)) - set(self._free_blocks)), "blocks leak"

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _find(self, rows: I64, bases: U32, *, room: bool) -> I64:
        """The position of each holder's inline cell, or with ``room`` of a free one; `CHAINED` or `NOWHERE`."""
        cells = self._inline[rows].view(np.uint32)
        more = self._more[rows] != 0
        # Four bools of a row seen as one word; 4 is the number of the first one of a word without any.
        hit = (cells >> _8 == np.repeat(bases >> _8, INLINE)).view(np.uint32)
        known = hit != 0
        pick = np.where(known, hit, (cells == 0).view(np.uint32)) if room else hit
        lane = np.bitwise_count(pick ^ (pick - _1)) >> 3
        position: I64 = rows * ROW_WORDS + (lane + W_CELLS)
        if room:
            position[~known & more | (lane == INLINE)] = CHAINED
        else:
            position[~known] = NOWHERE
            position[~known & more] = CHAINED
        return position

    def _take_turns(self, position: I64) -> tuple[I64, U32]:
        """Which of these positions it is the turn of, no two of them equal, and what was there; the words are theirs to write now."""
        at = np.flatnonzero(position >= 0)
        if len(at) < len(position):
            position = position[at]
        old = self.flat.take(position)
        mine = self.turns(position)
        return (at, old) if mine.all() else (at[mine], old[mine])

    def _walk(self, rows: I64, holders: U32) -> tuple[I64, I64]:
        """For each row the position of the holder's cell in row and chain, and of a free one; `NOWHERE`."""
        found, free = np.full(len(rows), NOWHERE, np.int64), np.full(len(rows), NOWHERE, np.int64)
        at, start, width = np.arange(len(rows)), rows * ROW_WORDS + W_CELLS, INLINE
        block = self._more[rows]
        while len(at):
            cells = self.flat[start[:, None] + _COLUMNS[:width]]
            same, empty = cells >> _8 == holders[at][:, None], cells == 0
            hit = same.any(1)
            found[at[hit]] = (start + same.argmax(1))[hit]
            spare = empty.any(1) & (free[at] < 0)
            free[at[spare]] = (start + empty.argmax(1))[spare]
            on = ~hit & (block != 0)
            at, block = at[on], block[on]
            start, width = self._block_at(block), BLOCK
            block = self._next_block[block]
        return found, free

    def _room_in_chain(self, rows: I64, holders: U32) -> I64:
        """Of distinct rows the position of the holder's cell or of a free one, in a new block if need be; `NOWHERE` without blocks."""
        found, free = self._walk(rows, holders)
        for at in np.flatnonzero((found < 0) & (free < 0)).tolist():
            free[at] = self._new_block(int(rows[at]))
        return np.where(found >= 0, found, free)

    def _block_at(self, block: U32) -> I64:
        return self._end + block.astype(np.int64) * BLOCK

    def _new_block(self, row: int) -> int:
        """A further block of this row; the position of its first cell."""
        if self._free_blocks:
            block = self._free_blocks.pop()
        elif self._blocks_top <= self.blocks_max:
            block, self._blocks_top = self._blocks_top, self._blocks_top + 1
        else:
            self.left_out += 1
            return NOWHERE
        self._next_block[block] = self._more[row]
        self._more[row] = block
        return self._end + block * BLOCK

    def _chain_of(self, row: int) -> list[int]:
        chain, block = [], int(self._more[row])
        while block:
            chain.append(block)
            block = int(self._next_block[block])
        return chain

    def _clean_chain(self, row: int) -> None:
        kept = 0
        for block in reversed(self._chain_of(row)):
            start = self._end + block * BLOCK
            cells = self.flat[start : start + BLOCK]
            cells[(cells != 0) & ~self.holders.counts(cells)] = 0
            if cells.any():
                self._next_block[block], kept = kept, block
            else:
                self._free_blocks.append(block)
        self._more[row] = kept


def _others(position: I64, served: I64, rows: I64, bases: U32, bits: U32) -> tuple[I64, U32, U32]:
    """Those whose turn comes later."""
    if len(served) == len(rows):
        return rows[:0], bases[:0], bits[:0]
    position[served] = NOWHERE
    left = np.flatnonzero(position != NOWHERE)
    return rows[left], bases[left], bits[left]
