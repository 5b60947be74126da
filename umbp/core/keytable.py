"""Rows by (namespace, key): a hash table over rows that lie elsewhere, for tens of millions of keys and thousands a call.

Theory of operation. A *bucket* has eight places. For each there is a tag, eight bits of the key's hash and never 0, and a row; a tag of 0
is a free place. The tags of a bucket are one 64-bit word, so that all eight are compared at once, in a handful of passes over as many words
as there are keys: a byte of (tags xor the wanted tag in each byte) that is zero is a candidate. A key may lie in two buckets; an insert
takes the emptier one and nothing is ever moved, so a removal is one store and leaves no tombstone. At 60 % load the fullest bucket of two
choices is practically never full (the second choice leaves lnln n keys above the mean of 4.8); an insert that finds both full is told so
and the key stays unknown, which a directory of hints may say.

A tag only leads to a candidate; the row's key and namespace decide. One key in 25 has a candidate that is not it, which costs a further
round of those few.

Rows that want the same free place at the same time all write their number there; the one that can be read back has it, the others look
again. So an insert sorts nothing, and equal keys of one batch meet, since they want the same place as long as none of them has it.

One process, no sharing, no readers beside the writer: unlike `umbp.store.index`, which this is not for that reason, and because its rows
are shared memory of 64 bytes with versions.

Cost: 8.3 bytes a key at the full load. 2,200 keys of 10 M take about 0.2 ms, nearly all of it cache misses: two words of tags, which are
few enough for a large cache, a row number and a row.
"""

from __future__ import annotations

import numpy as np

from umbp.store.index import hashes
from umbp.types import I64, U8, U32, U64, Mask

SLOTS = 8
LOAD = 0.6
FEW = 12  # keys that are cheaper one by one (3 us each) than as arrays (40 us a round)
ROUNDS_MAX = 64  # of inserts that want the same place: each round settles at least one of each bucket's contenders

_U = np.uint64
_1, _3, _32, _56 = _U(1), _U(3), _U(32), _U(56)
_LOW = _U(0xFFFF_FFFF)
_SECOND = _U(0x9E37_79B9_7F4A_7C15)
_EACH = _U(0x0101_0101_0101_0101)
_LOW_BITS = _U(0x7F7F_7F7F_7F7F_7F7F)


class KeyTable:
    """Finds rows. ``rows`` (n, words) uint32 are the caller's: the key first, its namespace at ``space_word``, written before `insert`."""

    def __init__(self, rows: U32, space_word: int, seed: int) -> None:
        self._rows, self._space_word = rows, space_word
        self._words = rows.shape[1]
        # A whole row in one load, as what has no meaning to NumPy: four times as fast as a row of words.
        self._whole = rows.reshape(-1).view(np.dtype((np.void, self._words * 4)))
        self.seed = _U(seed)
        self.buckets = max(2, int(len(rows) / (LOAD * SLOTS)) + 1)
        self._tags: U64 = np.zeros(self.buckets, np.uint64)
        self._tag: U8 = self._tags.view(np.uint8)
        self._row: U32 = np.zeros(self.buckets * SLOTS, np.uint32)
        self.count = 0

    def __repr__(self) -> str:
        return f"<KeyTable {self.count} keys in {self.buckets} buckets>"

    def hashes(self, words: U64, spaces: U32) -> U64:
        """Of (n, 4) key words in these namespaces."""
        return hashes(words, spaces.astype(np.uint64), self.seed)

    def find(self, words: U64, spaces: U32) -> I64:
        """Rows of (n, 4) key words, -1 where unknown."""
        return self.probe(words, spaces, self.hashes(words, spaces))[0]

    def probe(self, words: U64, spaces: U32, hashed: U64) -> tuple[I64, I64]:
        """Rows of (n, 4) key words, -1 where unknown, and the places (for `remove_at`) that lead to them."""
        count = len(words)
        rows, places = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
        first, second = self._first(hashed), self._second(hashed)
        wanted = _tags(hashed) * _EACH
        # Bit 7 of a byte: a candidate in the first bucket; bit 6: one in the second.
        marks = _zero_bytes(self._tags.take(first) ^ wanted) | (_zero_bytes(self._tags.take(second) ^ wanted) >> _1)
        left = np.flatnonzero(marks)
        while len(left) > FEW:
            every = len(left) == count
            mark = marks.take(left)
            bits = np.bitwise_count(mark ^ (mark - _1)).astype(np.int64)  # the lowest mark's, and all below
            place = np.where(bits & 1, second.take(left), first.take(left)) * SLOTS + ((bits - 1) >> 3)
            row = self._row.take(place).astype(np.int64)
            good = self._are(row, words if every else words.take(left, 0), spaces if every else spaces.take(left))
            hit = left[good]
            rows[hit], places[hit] = row[good], place[good]
            mark &= mark - _1
            again = np.flatnonzero(~good & (mark != 0))
            left = left.take(again)
            marks[left] = mark.take(again)
        for at in left.tolist():
            rows[at], places[at] = self._find_one(words[at].tobytes(), int(spaces[at]), int(hashed[at]))
        return rows, places

    def find_one(self, words: U64, space: int) -> int:
        """`find` of a single key, (1, 4) words."""
        return self._find_one(words.tobytes(), space, int(self.hashes(words, np.array([space], np.uint32))[0]))[0]

    def insert(self, rows: I64, hashed: U64) -> I64:
        """Enter distinct rows of new keys; what stands for each now: its own row, an equal key's of these, or -1 (no place)."""
        stands = np.full(len(rows), -1, np.int64)
        left = np.arange(len(rows))
        for round_number in range(ROUNDS_MAX):
            if round_number:  # somebody took the place: perhaps the same key
                found = self.probe(*self._keys_of(rows[left]), hashed[left])[0]
                stands[left] = found
                left = left[found < 0]
            place = self._free_place(hashed[left])
            if len(full := np.flatnonzero(place < 0)):
                left, place = np.delete(left, full), np.delete(place, full)
            self._row[place] = rows[left]
            won = self._row[place] == rows[left]
            winners = left[won]
            self._tag[place[won]] = _tags(hashed[winners])
            stands[winners] = rows[winners]
            self.count += len(winners)
            left = left[~won]
            if len(left) <= FEW:
                for at in left.tolist():
                    stands[at] = self._insert_one(int(rows[at]), int(hashed[at]))
                break
        return stands

    def remove_at(self, places: I64) -> None:
        """Take out what these distinct places lead to."""
        self._tag[places] = 0
        self.count -= len(places)

    def remove(self, rows: I64) -> None:
        """Take these distinct entered rows out; their keys must still be in place."""
        if not len(rows):
            return
        words, spaces = self._keys_of(rows)
        found, places = self.probe(words, spaces, self.hashes(words, spaces))
        assert np.array_equal(found, rows), "a row that was never entered"
        self.remove_at(places)

    def check(self) -> None:
        """Every place leads to a row whose key leads back to it: slow."""
        places = np.flatnonzero(self._tag)
        rows = self._row[places].astype(np.int64)
        assert len(rows) == self.count == len(np.unique(rows)), (len(rows), self.count)
        words, spaces = self._keys_of(rows)
        found, at = self.probe(words, spaces, self.hashes(words, spaces))
        assert np.array_equal(found, rows)
        assert np.array_equal(at, places)

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _first(self, hashed: U64) -> I64:
        return ((hashed & _LOW) * _U(self.buckets) >> _32).view(np.int64)

    def _second(self, hashed: U64) -> I64:
        return ((hashed * _SECOND >> _32) * _U(self.buckets) >> _32).view(np.int64)

    def _bucket_starts(self, hashed: int) -> list[int]:
        """The first place of each of the two buckets."""
        return [((half & 0xFFFF_FFFF) * self.buckets >> 32) * SLOTS for half in (hashed, hashed * int(_SECOND) >> 32)]

    def _find_one(self, key: bytes, space: int, hashed: int) -> tuple[int, int]:
        """Row and place, -1 if it is unknown."""
        for start in self._bucket_starts(hashed):
            tags = self._tag[start : start + SLOTS].tobytes()
            at = tags.find(max(1, hashed >> 56))
            while at >= 0:
                row = int(self._row[start + at])
                if self._rows[row, :8].tobytes() == key and self._rows[row, self._space_word] == space:
                    return row, start + at
                at = tags.find(max(1, hashed >> 56), at + 1)
        return -1, -1

    def _insert_one(self, row: int, hashed: int) -> int:
        """`insert` of a single row."""
        found, _ = self._find_one(self._rows[row, :8].tobytes(), int(self._rows[row, self._space_word]), hashed)
        if found >= 0:
            return found
        tags = [(start, self._tag[start : start + SLOTS].tobytes()) for start in self._bucket_starts(hashed)]
        start, best = max(tags, key=lambda one: one[1].count(0))
        at = best.find(0)
        if at < 0:
            return -1
        self._row[start + at], self._tag[start + at] = row, max(1, hashed >> 56)
        self.count += 1
        return row

    def _keys_of(self, rows: I64) -> tuple[U64, U32]:
        whole = self._whole.take(rows).view(np.uint32).reshape(-1, self._words)
        return np.ascontiguousarray(whole[:, :8]).view(np.uint64), whole[:, self._space_word]

    def _are(self, rows: I64, words: U64, spaces: U32) -> Mask:
        """Which rows are of these keys. By columns: inner loops of four words would cost more than the loads."""
        whole = self._whole.take(rows)
        have = whole.view(np.uint64).reshape(-1, self._words // 2)
        same: Mask = whole.view(np.uint32).reshape(-1, self._words)[:, self._space_word] == spaces
        for word in range(4):
            same &= have[:, word] == words[:, word]
        return same

    def _free_place(self, hashed: U64) -> I64:
        """A free place in the emptier bucket for each, -1 where there is none."""
        one, two = self._first(hashed), self._second(hashed)
        free_one, free_two = _zero_bytes(self._tags.take(one)), _zero_bytes(self._tags.take(two))
        other = np.bitwise_count(free_two) > np.bitwise_count(free_one)
        free = np.where(other, free_two, free_one)
        lane = (np.bitwise_count(free ^ (free - _1)).astype(np.int64) - 1) >> 3
        return np.where(free != 0, np.where(other, two, one) * SLOTS + lane, -1)


def _tags(hashed: U64) -> U64:
    """Eight bits, never 0. They are the ones that say least about the bucket."""
    tags: U64 = np.maximum(hashed >> _56, _1)
    return tags


def _zero_bytes(words: U64) -> U64:
    """Bit 7 of each byte that is zero, and no other bit: exact, since a candidate that is none could be a free place's row of before."""
    some = (words & _LOW_BITS) + _LOW_BITS
    some |= words
    some |= _LOW_BITS
    zero: U64 = ~some
    return zero
