"""Rows by (namespace, key): a hash table over rows that lie elsewhere, for tens of millions of keys and thousands a call.

Theory of operation. A *bucket* has eight slots of 64 bits, one cache line: the high half is a tag of the key's hash, the low half a row
plus one, zero is free. A key may lie in two buckets; an insert takes the emptier one and nothing is ever moved, so a removal is one store
and leaves no tombstone. At 60 % load the fullest bucket of two choices is practically never full (the second choice leaves lnln n keys
above the mean of 4.8); an insert that finds both full is told so and the key stays unknown, which a directory of hints may say.

A tag only leads to a candidate; the row's key and namespace decide. Of two rows with equal tags in one bucket (one in four billion pairs)
each is looked at.

One process, no sharing, no readers beside the writer: unlike `umbp.store.index`, which this is not for that reason, and because its rows
are shared memory of 64 bytes with versions.

Cost: 13 bytes a key at the full load. 2,200 keys of 10 M take about 0.4 ms, nearly all of it cache misses.
"""

from __future__ import annotations

import numpy as np

from umbp.store.index import hashes
from umbp.types import I64, U32, U64

SLOTS = 8
LOAD = 0.6
ROUNDS_MAX = 64  # of inserts that want the same slot: each round settles at least one of each bucket's contenders

_U = np.uint64
_LOW = _U(0xFFFF_FFFF)
_32 = _U(32)
_SECOND = _U(0x9E37_79B9_7F4A_7C15)


class KeyTable:
    """Finds rows. ``keys`` (rows, 4) uint64 and ``spaces`` (rows,) uint32 are the caller's, who writes them before `insert`."""

    def __init__(self, keys: U64, spaces: U32, seed: int) -> None:
        self.keys, self.spaces = keys, spaces
        self.seed = _U(seed)
        self.buckets = max(2, int(len(keys) / (LOAD * SLOTS)) + 1)
        self._slots: U64 = np.zeros((self.buckets, SLOTS), np.uint64)
        self._flat = self._slots.reshape(-1)
        self.count = 0

    def __repr__(self) -> str:
        return f"<KeyTable {self.count} keys in {self.buckets} buckets>"

    def hashes(self, words: U64, spaces: U32) -> U64:
        """Of (n, 4) key words in these namespaces."""
        return hashes(words, spaces.astype(np.uint64), self.seed)

    def find(self, words: U64, spaces: U32, hashed: U64 | None = None) -> I64:
        """Rows of (n, 4) key words, -1 where unknown."""
        if hashed is None:
            hashed = self.hashes(words, spaces)
        rows = np.full(len(words), -1, np.int64)
        self._look(rows, np.arange(len(words)), words, spaces, hashed, self._first(hashed))
        left = np.flatnonzero(rows < 0)
        if len(left):
            self._look(rows, left, words, spaces, hashed, self._second(hashed[left]))
        return rows

    def find_one(self, words: U64, space: int) -> int:
        """`find` of a single key, (1, 4) words."""
        key = words[0].tolist()
        hashed = int(self.hashes(words, np.array([space], np.uint32))[0])
        tag = hashed >> 32
        for half in (hashed, hashed * int(_SECOND) >> 32):
            slots: list[int] = self._slots[(half & 0xFFFF_FFFF) * self.buckets >> 32].tolist()
            for slot in slots:
                if slot and slot >> 32 == tag:
                    row = (slot & 0xFFFF_FFFF) - 1
                    if self.keys[row].tolist() == key and self.spaces[row] == space:
                        return row
        return -1

    def insert(self, rows: I64, hashed: U64) -> I64:
        """Enter rows of keys that are in none; the row that stands for each now: its own, an equal key's of this batch, or -1 (no slot)."""
        stands = np.full(len(rows), -1, np.int64)
        left = np.arange(len(rows))
        values = (hashed >> _32 << _32) | (rows + 1).astype(np.uint64)
        for round_number in range(ROUNDS_MAX):
            if round_number:  # somebody took the slot: perhaps the same key
                found = self.find(self.keys[rows[left]], self.spaces[rows[left]], hashed[left])
                stands[left] = found
                left = left[found < 0]
            if not len(left):
                break
            position, full = self._free_slot(hashed[left])
            left, position = left[~full], position[~full]
            self._flat[position] = values[left]
            won = self._flat[position] == values[left]
            stands[left[won]] = rows[left[won]]
            self.count += int(np.count_nonzero(won))
            left = left[~won]
        return stands

    def remove(self, rows: I64) -> None:
        """Take these distinct entered rows out; their keys must still be in place."""
        if not len(rows):
            return
        hashed = self.hashes(self.keys[rows], self.spaces[rows])
        values = (hashed >> _32 << _32) | (rows + 1).astype(np.uint64)
        gone = np.zeros(len(rows), bool)
        for buckets in (self._first(hashed), self._second(hashed)):
            same = (self._slots[buckets] == values[:, None]) & ~gone[:, None]
            hit = same.any(1)
            self._slots[buckets[hit], same.argmax(1)[hit]] = 0
            gone |= hit
        assert gone.all(), "a row that was never entered"
        self.count -= len(rows)

    def check(self) -> None:
        """Every slot leads to a row whose key leads back to it: slow."""
        held = self._flat[self._flat != 0]
        rows = ((held & _LOW) - _U(1)).astype(np.int64)
        assert len(rows) == self.count == len(np.unique(rows)), (len(rows), self.count)
        assert np.array_equal(self.find(self.keys[rows], self.spaces[rows]), rows)

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _first(self, hashed: U64) -> I64:
        return ((hashed & _LOW) * _U(self.buckets) >> _32).astype(np.int64)

    def _second(self, hashed: U64) -> I64:
        return ((hashed * _SECOND >> _32) * _U(self.buckets) >> _32).astype(np.int64)

    def _look(self, rows: I64, which: I64, words: U64, spaces: U32, hashed: U64, buckets: I64) -> None:
        """Fill in ``rows[which]`` what these buckets hold."""
        slots = self._slots[buckets]
        same = (slots >> _32 == (hashed[which] >> _32)[:, None]) & (slots != 0)
        at = np.flatnonzero(same.any(1))
        while len(at):
            column = same[at].argmax(1)
            found = ((slots[at, column] & _LOW) - _U(1)).astype(np.int64)
            item = which[at]
            good = (self.keys[found] == words[item]).all(1) & (self.spaces[found] == spaces[item])
            rows[item[good]] = found[good]
            at, column = at[~good], column[~good]
            same[at, column] = False
            at = at[same[at].any(1)]

    def _free_slot(self, hashed: U64) -> tuple[I64, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """A free position of the emptier bucket for each, and where there is none."""
        one, two = self._first(hashed), self._second(hashed)
        free_one, free_two = self._slots[one] == 0, self._slots[two] == 0
        second = free_two.sum(1) > free_one.sum(1)
        free = np.where(second[:, None], free_two, free_one)
        return np.where(second, two, one) * SLOTS + free.argmax(1), ~free.any(1)
