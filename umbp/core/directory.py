"""Every key of every node and tier: who has it, and how it was used.

Theory of operation
-------------------
A *row* of 80 bytes stands for one key of one namespace while anybody holds it. A *holder* is a number for who can hold keys: one for a
registration of a pool, one for each (engine, tier) that reports its own cache. In a row, a *cell* of 32 bits says that a holder has it:

    holder (24 bits) | epoch (4 bits) | tiers (4 bits: HBM, HOST, DRAM, SSD)

Four cells are in the row, more in a chain of blocks of eight, so that the system prompt that all nodes hold costs what it is worth.

    row words   0-7 key   8 namespace   9-12 cells   13 first block
                14 heat   15 last access   16 known since   17 accesses   18 parent   19 depth

A cell counts only while its holder does: `drop` makes all cells of a holder invisible with one store, however many there are, and the rows
are cleaned in slices by `sweep` afterwards. The *epoch* does the same for a part. A holder that sends all it has again (`begin`, then `add`
with the new epoch, then `settle`) is believed for old and new until `settle`; from then on only what was named since `begin` counts. So a
resync of any size never blocks a lookup and never shows less than before. A holder's number is used again only when a whole round of the
sweep has passed since it was dropped.

Nothing in here is the truth: pools refuse what they do not have. So no versions are kept (they would only be old), and a key for which
there is no room (`keys_max`, or a full bucket) is counted and left out.

Use of a key: accesses, the last one, and *heat*, the accesses decayed with `HALF_LIFE_SECONDS` (LRFU's combined recency and frequency). The
parent and depth are those of the last request that had the key in its list; they lead from a hot page to its prefix.

Cost: 80 bytes a row, 13 of the key table, nothing for rows never used (the memory is touched as it fills). An add or removal is
some forty NumPy passes a batch: about 1 us a key in batches of a thousand. Sizes are by namespace: all its objects have one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from umbp.core.holders import Holders
from umbp.core.keytable import KeyTable
from umbp.errors import LimitReached
from umbp.types import F64, I64, U8, U32, U64, Mask

ROW_WORDS = 20
W_SPACE, W_CELLS, W_MORE, W_HEAT, W_ACCESSED, W_SINCE, W_COUNT, W_PARENT, W_DEPTH = 8, 9, 13, 14, 15, 16, 17, 18, 19
INLINE, BLOCK = 4, 8
HALF_LIFE_SECONDS = 600.0
SPACES_MAX = 65_535
BLOCKS_SHARE = 16  # one block of further cells for so many rows

_U32 = np.uint32
_COLUMNS = np.arange(BLOCK)


@dataclass(frozen=True, slots=True)
class Locations:
    """Who holds what, flat: item of the question, holder and tier bits of each place; ascending by item."""

    item: I64
    holder: I64
    tiers: U8


@dataclass(frozen=True, slots=True)
class Use:
    """How keys were used: arrays of one length. Ages in seconds, ``inf`` idle where never asked for; heat as of now."""

    accesses: I64
    heat: F64
    idle_seconds: F64
    age_seconds: F64


class Directory:
    """At most ``keys_max`` keys. ``seed`` keeps strangers from choosing collisions. Times are seconds that only grow."""

    def __init__(self, keys_max: int, seed: int, now: float = 0.0) -> None:
        self.keys_max = keys_max
        self.blocks_max = keys_max // BLOCKS_SHARE + 64
        self._cells_end = keys_max * ROW_WORDS
        self._flat: U32 = np.zeros(self._cells_end + (self.blocks_max + 1) * BLOCK, np.uint32)
        self._rows: U32 = self._flat[: self._cells_end].reshape(keys_max, ROW_WORDS)
        self._reals: npt.NDArray[np.float32] = self._rows.view(np.float32)
        self.table = KeyTable(self._rows.view(np.uint64)[:, :4], self._rows[:, W_SPACE], seed)
        self._next_block: U32 = np.zeros(self.blocks_max + 1, np.uint32)  # block 0 is none
        self._free_blocks: list[int] = []
        self._blocks_top = 1
        self._freed: U32 = np.empty(keys_max, np.uint32)  # a stack; what was never freed is never touched
        self._freed_count = 0
        self._top = 0  # rows from here on were never used
        self._start = now
        self.holders = Holders()
        self.digests: list[bytes] = []
        self.object_bytes: list[int] = []
        self.identities: dict[bytes, bytes] = {}  # digest -> canonical text, as far as pools have told
        self._space_of: dict[bytes, int] = {}
        self.left_out = 0  # keys for which there was no room

    def __repr__(self) -> str:
        return f"<Directory {self.table.count} of {self.keys_max} keys, {len(self.digests)} namespaces, {self.holders!r}>"

    def __len__(self) -> int:
        return self.table.count

    # -- namespaces --------------------------------------------------------------------------------------------------------------------

    def space(self, digest: bytes, object_bytes: int = 0) -> int:
        """The number of a namespace, made if it is new. LimitReached at `SPACES_MAX`."""
        number = self._space_of.get(digest)
        if number is None:
            number = self._new_space()
            self.digests[number], self._space_of[digest] = digest, number
        if object_bytes:
            self.object_bytes[number] = object_bytes
        return number

    def identify(self, digest: bytes, canonical: bytes) -> None:
        """What a namespace is called in full. A text that is not the digest's is not taken."""
        if digest in self._space_of and digest not in self.identities and sha256(canonical).digest() == digest:
            self.identities[digest] = canonical

    def _new_space(self) -> int:
        if len(self.digests) < SPACES_MAX:
            self.digests.append(b"")
            self.object_bytes.append(0)
            return len(self.digests) - 1
        # Nearly never, so one pass over all rows is no matter: those of namespaces that nobody holds anything of any more.
        used = set(np.unique(self._rows[: self._top, W_SPACE]).tolist())
        free = [number for number in range(SPACES_MAX) if number not in used]
        if not free:
            raise LimitReached(f"the directory knows {SPACES_MAX} namespaces, which is the limit", field="namespace")
        self._space_of.pop(self.digests[free[0]], None)
        self.identities.pop(self.digests[free[0]], None)
        self.object_bytes[free[0]] = 0
        return free[0]

    def space_or_none(self, digest: bytes) -> int | None:
        """The number of a namespace that somebody has reported."""
        return self._space_of.get(digest)

    # -- changes -----------------------------------------------------------------------------------------------------------------------

    def add(self, now: float, words: U64, spaces: U32, holder: int, tier: int) -> int:
        """The holder has these keys in this tier; how many it was not known to have. ``words`` (n, 4), ``spaces`` (n,)."""
        rows = np.unique(self._rows_for(now, words, spaces))
        rows = rows[rows >= 0]
        found, free = self._cell(rows, holder)
        chained = np.flatnonzero((found < 0) & (free < 0))
        for at in chained.tolist():
            free[at] = self._new_block(int(rows[at]))
        base, bit = _U32(holder << 8 | int(self.holders.epochs[holder]) << 4), _U32(1 << tier)
        position = np.where(found >= 0, found, free)
        position = position[position >= 0]  # no block was left for the others
        cells = self._flat[position]
        same = (cells & _U32(0xFFFF_FFF0)) == base
        fresh = ~same | (cells & bit == 0)
        self._flat[position] = np.where(same, cells | bit, base | bit)
        return int(np.count_nonzero(fresh))

    def remove(self, words: U64, spaces: U32, holder: int, tier: int) -> int:
        """The holder does not have these keys in this tier any more; how many it was known to have. Unknown keys are no error."""
        rows = np.unique(self.table.find(words, spaces))
        rows = rows[rows >= 0]
        found, _ = self._cell(rows, holder)
        rows, position = rows[found >= 0], found[found >= 0]
        bit = _U32(1 << tier)
        cells = self._flat[position]
        had = cells & bit != 0
        rest = cells & ~bit
        self._flat[position] = np.where(rest & _U32(15), rest, _U32(0))
        self._forget_empty(rows)
        return int(np.count_nonzero(had))

    def drop(self, holder: int) -> None:
        """Nothing that this holder was said to have counts from now on; the rows are cleaned by and by."""
        self.holders.drop(holder)

    def begin(self, holder: int) -> bool:
        """The holder is about to send all that it has; what is added from now on is of the new epoch. False: see `Holders.begin`."""
        return self.holders.begin(holder)

    def settle(self, holder: int) -> None:
        """All was sent: what was not added since `begin` does not count any more."""
        self.holders.settle(holder)

    def sweep(self, rows_max: int) -> bool:
        """Clean that many rows of cells that do not count; True while there are more to look at."""
        if not self.holders.pending:
            return False
        start = min(self.holders.position, self._top)
        stop = min(self._top, start + rows_max)
        part = self._rows[start:stop, W_CELLS : W_CELLS + INLINE]
        void = (part != 0) & ~self.holders.counts(part)
        part[void] = 0
        chained = np.flatnonzero(self._rows[start:stop, W_MORE])
        self._forget_empty(np.union1d(np.flatnonzero(void.any(1)), chained) + start)
        self.holders.swept(0 if stop == self._top else stop)
        return self.holders.pending > 0

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def find(self, words: U64, space: int) -> I64:
        """Rows of (n, 4) key words of one namespace, -1 where nobody was ever said to hold the key."""
        return self.table.find(words, np.full(len(words), space, np.uint32))

    def locations(self, rows: I64) -> Locations:
        """Who holds these rows now; -1 is held by nobody."""
        known = np.flatnonzero(rows >= 0)
        items, cells = [], []
        for at, part in self._levels(rows[known]):
            good = (part != 0) & self.holders.counts(part)
            where = np.nonzero(good)
            items.append(known[at[where[0]]])
            cells.append(part[where])
        if not items:
            return Locations(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))
        item, cell = np.concatenate(items), np.concatenate(cells)
        if len(items) > 1:
            order = np.argsort(item, kind="stable")
            item, cell = item[order], cell[order]
        return Locations(item, (cell >> 8).astype(np.int64), (cell & _U32(15)).astype(np.uint8))

    def touch(self, now: float, rows: I64) -> None:
        """One request asked for these rows, root first; -1 is left out."""
        depth = np.arange(1, len(rows) + 1, dtype=np.uint32)
        parents = np.concatenate([[0], rows[:-1] + 1]).astype(np.uint32)  # row + 1, 0 is none
        known = np.flatnonzero(rows >= 0)
        rows = rows[known]
        self._reals[rows, W_HEAT] = 1.0 + self._heat(now, rows)
        self._reals[rows, W_ACCESSED] = now - self._start
        self._rows[rows, W_COUNT] += _U32(1)
        self._rows[rows, W_PARENT], self._rows[rows, W_DEPTH] = parents[known], depth[known]

    def row_words(self, row: int) -> list[int]:
        """The words of one row."""
        words: list[int] = self._rows[row].tolist()
        return words

    def touch_one(self, now: float, row: int) -> None:
        """`touch` of a single root page."""
        words, reals = self._rows[row], self._reals[row]
        age = max(0.0, now - self._start - float(reals[W_ACCESSED]))
        reals[W_HEAT] = 1.0 + float(reals[W_HEAT]) * 2.0 ** (-age / HALF_LIFE_SECONDS)
        reals[W_ACCESSED] = now - self._start
        words[W_COUNT] += _U32(1)
        words[W_PARENT], words[W_DEPTH] = 0, 1

    def use(self, now: float, rows: I64) -> Use:
        """How these rows (none -1) were used."""
        count = self._rows[rows, W_COUNT].astype(np.int64)
        idle = now - self._start - self._reals[rows, W_ACCESSED].astype(np.float64)
        age = now - self._start - self._reals[rows, W_SINCE].astype(np.float64)
        return Use(count, self._heat(now, rows), np.where(count > 0, np.maximum(idle, 0.0), np.inf), np.maximum(age, 0.0))

    def keys(self, rows: I64) -> tuple[U8, I64]:
        """Keys (n, 32) and namespace numbers (n,) of rows."""
        words = np.ascontiguousarray(self._rows[rows, :8])
        return words.view(np.uint8).reshape(-1, 32), self._rows[rows, W_SPACE].astype(np.int64)

    def held(self, rows: I64) -> Mask:
        """Which of these rows somebody holds now."""
        held = np.zeros(len(rows), bool)
        held[self.locations(rows).item] = True
        return held

    @property
    def rows_end(self) -> int:
        """No row is at or above this."""
        return self._top

    def hottest(self, now: float, start: int, stop: int, n: int, space: int | None = None) -> tuple[I64, F64]:
        """The up to n hottest rows of ``[start, stop)`` that somebody holds, and their heat; the hottest first."""
        rows = np.arange(start, min(stop, self._top))
        asked = self._rows[rows, W_COUNT] > 0
        if space is not None:
            asked &= self._rows[rows, W_SPACE] == space
        rows = rows[asked]
        heat = self._heat(now, rows)
        if len(rows) > 4 * n:  # dead cells are rare: four times as many leave enough
            best = np.argpartition(-heat, 4 * n)[: 4 * n]
            rows, heat = rows[best], heat[best]
        alive = self.held(rows)
        rows, heat = rows[alive], heat[alive]
        order = np.lexsort((rows, -heat))[:n]
        return rows[order], heat[order]

    def chain(self, row: int, pages_max: int) -> list[int]:
        """The pages before this one in the last request that had it, itself last, root first as far as they are still known."""
        found = [row]
        while len(found) < pages_max:
            parent, depth = int(self._rows[found[-1], W_PARENT]) - 1, int(self._rows[found[-1], W_DEPTH])
            if parent < 0 or int(self._rows[parent, W_DEPTH]) != depth - 1:  # the row may be another key's by now
                break
            found.append(parent)
        return found[::-1]

    def depth_and_parent(self, rows: I64) -> tuple[I64, I64]:
        """Depth of rows in the last request that had them (1 for a root), and the row before, -1 for none."""
        return self._rows[rows, W_DEPTH].astype(np.int64), self._rows[rows, W_PARENT].astype(np.int64) - 1

    def check(self) -> None:
        """The invariants: slow."""
        self.table.check()
        live = np.flatnonzero(self._rows[: self._top, W_CELLS : W_CELLS + INLINE].any(1) | (self._rows[: self._top, W_MORE] > 0))
        assert len(live) == self.table.count, (len(live), self.table.count)
        assert self._top - self._freed_count == self.table.count, "rows leak"
        owned = sorted(block for row in live.tolist() for block in self._chain_of(row))
        assert owned == sorted(set(range(1, self._blocks_top)) - set(self._free_blocks)), "blocks leak"

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _heat(self, now: float, rows: I64) -> F64:
        age = np.maximum(now - self._start - self._reals[rows, W_ACCESSED].astype(np.float64), 0.0)
        heat: F64 = self._reals[rows, W_HEAT] * np.exp2(-age / HALF_LIFE_SECONDS)
        return heat

    def _rows_for(self, now: float, words: U64, spaces: U32) -> I64:
        """Rows of these keys, made where there are none; -1 where there is no room."""
        hashed = self.table.hashes(words, spaces)
        rows = self.table.find(words, spaces, hashed)
        new = np.flatnonzero(rows < 0)
        if not len(new):
            return rows
        taken = self._take_rows(len(new))
        self.left_out += len(new) - len(taken)
        new = new[: len(taken)]
        self._rows[taken] = 0
        self.table.keys[taken] = words[new]
        self._rows[taken, W_SPACE] = spaces[new]
        self._reals[taken, W_SINCE] = now - self._start
        rows[new] = self.table.insert(taken, hashed[new])
        unused = taken[rows[new] != taken]
        self.left_out += int(np.count_nonzero(rows[new] < 0))
        self._rows[unused] = 0
        self._give_rows(unused)
        return rows

    def _take_rows(self, count: int) -> I64:
        used = min(count, self._freed_count)
        again = self._freed[self._freed_count - used : self._freed_count].astype(np.int64)
        self._freed_count -= used
        fresh = min(count - used, self.keys_max - self._top)
        rows = np.concatenate([again, np.arange(self._top, self._top + fresh)])
        self._top += fresh
        return rows

    def _give_rows(self, rows: I64) -> None:
        self._freed[self._freed_count : self._freed_count + len(rows)] = rows
        self._freed_count += len(rows)

    def _levels(self, rows: I64) -> Iterator[tuple[I64, U32]]:
        """Cells of these rows: (which of the rows, their cells), the inline ones first, then block by block."""
        at = np.arange(len(rows))
        yield at, self._rows[rows, W_CELLS : W_CELLS + INLINE]
        block = self._rows[rows, W_MORE]
        while True:
            more = block != 0
            at, block = at[more], block[more]
            if not len(at):
                return
            yield at, self._flat[self._block_at(block)[:, None] + _COLUMNS]
            block = self._next_block[block]

    def _block_at(self, block: U32) -> I64:
        return self._cells_end + block.astype(np.int64) * BLOCK

    def _cell(self, rows: I64, holder: int) -> tuple[I64, I64]:
        """For each row the position of the holder's cell, and of a free one; -1 for none."""
        found, free = np.full(len(rows), -1, np.int64), np.full(len(rows), -1, np.int64)
        at, start, width = np.arange(len(rows)), rows * ROW_WORDS + W_CELLS, INLINE
        block = self._rows[rows, W_MORE]
        while len(at):
            cells = self._flat[start[:, None] + _COLUMNS[:width]]
            same, empty = cells >> 8 == holder, cells == 0
            hit = same.any(1)
            found[at[hit]] = (start + same.argmax(1))[hit]
            spare = empty.any(1) & (free[at] < 0)
            free[at[spare]] = (start + empty.argmax(1))[spare]
            on = ~hit & (block != 0)
            at, block = at[on], block[on]
            start, width = self._block_at(block), BLOCK
            block = self._next_block[block]
        return found, free

    def _new_block(self, row: int) -> int:
        """A further block of this row; the position of its first cell, or -1 where there are no more."""
        if self._free_blocks:
            block = self._free_blocks.pop()
        elif self._blocks_top <= self.blocks_max:
            block, self._blocks_top = self._blocks_top, self._blocks_top + 1
        else:
            self.left_out += 1
            return -1
        self._next_block[block] = self._rows[row, W_MORE]
        self._rows[row, W_MORE] = block
        return self._cells_end + block * BLOCK

    def _chain_of(self, row: int) -> list[int]:
        chain, block = [], int(self._rows[row, W_MORE])
        while block:
            chain.append(block)
            block = int(self._next_block[block])
        return chain

    def _clean_chain(self, row: int) -> None:
        """Cells that do not count go, and blocks that are empty then."""
        kept = 0
        for block in reversed(self._chain_of(row)):
            start = self._cells_end + block * BLOCK
            cells = self._flat[start : start + BLOCK]
            cells[(cells != 0) & ~self.holders.counts(cells)] = 0
            if cells.any():
                self._next_block[block], kept = kept, block
            else:
                self._free_blocks.append(block)
        self._rows[row, W_MORE] = kept

    def _forget_empty(self, rows: I64) -> None:
        """Rows (distinct) that nobody holds any more go."""
        for row in rows[self._rows[rows, W_MORE] != 0].tolist():
            self._clean_chain(row)
        empty = rows[~self._rows[rows, W_CELLS : W_CELLS + INLINE].any(1) & (self._rows[rows, W_MORE] == 0)]
        self.table.remove(empty)
        self._rows[empty] = 0
        self._give_rows(empty)


__all__ = ["Directory", "Locations", "Use"]
