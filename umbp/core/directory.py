"""Every key of every node and tier: who has it, and how it was used.

Theory of operation
-------------------
A *row* of 80 bytes stands for one key of one namespace while anybody holds it. A *holder* is a number for who can hold keys: one for a
registration of a pool, one for each (engine, tier) that reports its own cache. In a row, a *cell* says that a holder has it, in which
tiers, and of which epoch the news is (`umbp.core.cells`).

    row words   0-7 key   8-11 cells   12 namespace   13 further cells   14 heat   15 last access
                16 accesses   17 depth   18 known since   19 parent

A cell counts only while its holder does: `drop` makes all cells of a holder invisible with one store, however many there are, and the rows
are cleaned in slices by `sweep` afterwards. The *epoch* does the same for a part. A holder that sends all it has again (`begin`, then `add`
with the new epoch, then `settle`) is believed for old and new until `settle`; from then on only what was named since `begin` counts. So a
resync of any size never blocks a lookup and never shows less than before. A holder's number is used again only when a whole round of the
sweep has passed since it was dropped.

Nothing in here is the truth: pools refuse what they do not have. So no versions are kept (they would only be old), and a key for which
there is no room (`keys_max`, or a full bucket) is counted and left out.

Use of a key: accesses, the last one, and *heat*, the accesses decayed with `HALF_LIFE_SECONDS` (LRFU's combined recency and frequency). The
parent and depth are those of the last request that had the key in its list, after another one; they lead from a hot page to its prefix.

Changes come in batches of any mixture of holders, tiers, comings and goings (`change`): one probe for all, then what goes, then what comes
to known rows, then new rows, each written whole with its first cell. Nothing is sorted, and nothing needs to be distinct.

Cost: 80 bytes a row, 8 of the key table, nothing for rows never used (the memory is touched as it fills). A change is some eighty NumPy
passes a batch: 0.2 to 0.3 us a key in batches of a thousand, most of it cache misses. Sizes are by namespace: all its objects have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from umbp.core.cells import ROW_WORDS, TIERS, W_CELLS, Cells
from umbp.core.holders import Holders
from umbp.core.keytable import KeyTable
from umbp.errors import LimitReached
from umbp.types import F64, I64, U8, U32, U64, Mask

W_SPACE, W_HEAT, W_ACCESSED, W_COUNT, W_DEPTH, W_SINCE, W_PARENT = 12, 14, 15, 16, 17, 18, 19
HALF_LIFE_SECONDS = 600.0
SPACES_MAX = 65_535
CLEANED_MAX = 2048  # rows of one call of the sweep: about 0.7 ms where all of them go; to look at one costs a tenth

_U32 = np.uint32


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
        self.holders = Holders()
        self.cells = Cells(keys_max, self.holders)
        self._rows: U32 = self.cells.rows
        self._whole = self._rows.reshape(-1).view(np.dtype((np.void, ROW_WORDS * 4)))  # a row in one store
        self._reals: npt.NDArray[np.float32] = self._rows.view(np.float32)
        self._used = self._rows.view(np.uint64)[:, W_COUNT // 2]  # accesses and depth
        # Columns by themselves: an index of rows and a word costs NumPy three times as much.
        self._heats, self._accessed = self._reals[:, W_HEAT], self._reals[:, W_ACCESSED]
        self._counts, self._depths, self._parents = self._rows[:, W_COUNT], self._rows[:, W_DEPTH], self._rows[:, W_PARENT]
        self.table = KeyTable(self._rows, W_SPACE, seed)
        self._freed: U32 = np.empty(keys_max, np.uint32)  # a stack; what was never freed is never touched
        self._freed_count = 0
        self._top = 0  # rows from here on were never used
        self._start = now
        self.digests: list[bytes] = []
        self.object_bytes: list[int] = []
        self.identities: dict[bytes, bytes] = {}  # digest -> canonical text, as far as pools have told
        self._space_of: dict[bytes, int] = {}
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<Directory {self.table.count} of {self.keys_max} keys, {len(self.digests)} namespaces, {self.holders!r}>"

    def __len__(self) -> int:
        return self.table.count

    @property
    def left_out(self) -> int:
        """Keys, and holders of a key, for which there was no room."""
        return self._left_out + self.cells.left_out

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
        used = set(np.unique(self._rows[self._live_rows(), W_SPACE]).tolist())
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
        n = len(words)
        return self.change(now, words, spaces, np.full(n, holder, np.uint32), np.full(n, tier, np.uint8), np.ones(n, bool))

    def remove(self, words: U64, spaces: U32, holder: int, tier: int) -> int:
        """The holder does not have these keys in this tier any more; how many it was known to have. Unknown keys are no error."""
        n = len(words)
        return self.change(0.0, words, spaces, np.full(n, holder, np.uint32), np.full(n, tier, np.uint8), np.zeros(n, bool))

    def change(self, now: float, words: U64, spaces: U32, holders: U32, tiers: U8, present: Mask) -> int:
        """Each holder has its key in its tier from now on, or not any more; how many were news. What goes, goes before anything comes.

        ``words`` (n, 4), all others (n,). What goes and was not known is no error.
        """
        hashed = self.table.hashes(words, spaces)
        rows, places = self.table.probe(words, spaces, hashed)
        bases = holders << _U32(8) | self.holders.epochs[holders].astype(np.uint32) << _U32(4)
        bits = _U32(1) << tiers.astype(np.uint32)
        known = rows >= 0
        news = 0
        gone, come, new = np.flatnonzero(known & ~present), np.flatnonzero(known & present), np.flatnonzero(present & ~known)
        if len(gone):
            news += self.cells.unmark(rows[gone], bases[gone], bits[gone])
        if len(come):
            news += self.cells.mark(rows[come], bases[come], bits[come])
        if len(gone):
            self._forget_empty(rows[gone], places[gone])
        if len(new):
            news += self._enter(now, words.take(new, 0), spaces[new], hashed[new], bases[new], bits[new])
        return news

    def drop(self, holder: int) -> None:
        """Nothing that this holder was said to have counts from now on; the rows are cleaned by and by."""
        self.holders.drop(holder)

    def begin(self, holder: int) -> bool:
        """The holder is about to send all that it has; what is added from now on is of the new epoch. False: see `Holders.begin`."""
        return self.holders.begin(holder)

    def settle(self, holder: int) -> None:
        """All was sent: what was not added since `begin` does not count any more."""
        self.holders.settle(holder)

    def sweep(self, rows_max: int, cleaned_max: int = CLEANED_MAX) -> bool:
        """Look at that many rows, and clean so many of them at the most of cells that do not count; True while there are more."""
        if not self.holders.pending:
            return False
        start = min(self.holders.position, self._top)
        rows, stop = self.cells.void(start, min(self._top, start + rows_max), cleaned_max)
        self._forget_empty(rows)
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
        for at, part in self.cells.levels(rows[known]):
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
        return Locations(item, (cell >> 8).astype(np.int64), (cell & TIERS).astype(np.uint8))

    def touch(self, now: float, rows: I64, weight: float = 1.0) -> None:
        """One request asked for these rows, root first; -1 is left out. ``weight``: it stands for so many."""
        depth = np.arange(1, len(rows) + 1, dtype=np.uint32)
        parents = np.concatenate([[0], rows[:-1] + 1]).astype(np.uint32)  # row + 1, 0 is none
        if len(rows) and rows[0] >= 0 and self._parents[rows[0]]:  # the rest of a prompt whose first pages nobody had to ask for
            parents[0] = self._parents[rows[0]]
            depth += self._depths[rows[0]] - _U32(1)
        known = np.flatnonzero(rows >= 0)
        rows = rows[known]
        self._heats[rows] = weight + self._heat(now, rows)
        self._accessed[rows] = now - self._start
        self._counts[rows] += _U32(round(weight))
        self._parents[rows], self._depths[rows] = parents[known], depth[known]

    def row_words(self, row: int) -> list[int]:
        """The words of one row."""
        words: list[int] = self._rows[row].tolist()
        return words

    def touch_one(self, now: float, row: int) -> None:
        """`touch` of a single page."""
        words, reals = self._rows[row], self._reals[row]
        age = max(0.0, now - self._start - float(reals[W_ACCESSED]))
        reals[W_HEAT] = 1.0 + float(reals[W_HEAT]) * 2.0 ** (-age / HALF_LIFE_SECONDS)
        reals[W_ACCESSED] = now - self._start
        words[W_COUNT] += _U32(1)
        if not words[W_PARENT]:
            words[W_DEPTH] = 1

    def use(self, now: float, rows: I64) -> Use:
        """How these rows (none -1) were used."""
        count = self._counts[rows].astype(np.int64)
        idle = now - self._start - self._accessed[rows].astype(np.float64)
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
        asked = self._counts[rows] > 0
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
        return self._depths[rows].astype(np.int64), self._parents[rows].astype(np.int64) - 1

    def check(self) -> None:
        """The invariants: slow."""
        self.table.check()
        live = self._live_rows()
        assert len(live) == self.table.count, (len(live), self.table.count)
        assert self._top - self._freed_count == self.table.count, "rows leak"
        self.cells.check(live)

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _heat(self, now: float, rows: I64) -> F64:
        age = np.maximum(now - self._start - self._accessed[rows].astype(np.float64), 0.0)
        heat: F64 = self._heats[rows].astype(np.float64) * np.exp2(-age / HALF_LIFE_SECONDS)
        return heat

    def _live_rows(self) -> I64:
        """All rows that stand for a key: slow."""
        return np.flatnonzero(self.cells.held(np.arange(self._top)))

    def _enter(self, now: float, words: U64, spaces: U32, hashed: U64, bases: U32, bits: U32) -> int:
        """Rows for keys that have none, with their first cell; how many that were."""
        taken = self._take_rows(len(words))
        if len(taken) < len(words):
            self._left_out += len(words) - len(taken)
            fit = slice(len(taken))
            words, spaces, hashed, bases, bits = words[fit], spaces[fit], hashed[fit], bases[fit], bits[fit]
        block = np.zeros((len(taken), ROW_WORDS), np.uint32)
        block.view(np.uint64)[:, :4] = words
        block[:, W_CELLS], block[:, W_SPACE] = bases | bits, spaces
        block.view(np.float32)[:, W_SINCE] = now - self._start
        self._whole[taken] = block.reshape(-1).view(self._whole.dtype)
        stands = self.table.insert(taken, hashed)
        lost = np.flatnonzero(stands != taken)
        if not len(lost):
            return len(taken)
        self._rows[taken[lost]] = 0
        self._give_rows(taken[lost])
        again = lost[stands[lost] >= 0]  # an equal key was before it
        self._left_out += len(lost) - len(again)
        return len(taken) - len(lost) + self.cells.mark(stands[again], bases[again], bits[again])

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

    def _forget_empty(self, rows: I64, places: I64 | None = None) -> None:
        """Rows that nobody holds any more go. ``places`` of the table that lead to them; without, they are looked for."""
        self.cells.clean_chains(rows)
        empty = np.flatnonzero(~self.cells.held(rows))
        empty = empty[self.cells.turns(rows[empty] * ROW_WORDS + W_COUNT)]  # each once
        rows = rows[empty]
        if places is None:
            self.table.remove(rows)
        else:
            self.table.remove_at(places[empty])
        self._used[rows] = 0
        self._give_rows(rows)


__all__ = ["Directory", "Locations", "Use"]
