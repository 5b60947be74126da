"""The shared index: a hash table in shared memory that one process writes and many read without a call.

Theory of operation
-------------------
Two arrays. An *entry* (64 bytes, one cache line) describes one object; its number is the entry id. A *bucket* (64 bytes) has eight slots
of 64 bits: the high half is a tag of the key's hash, the low half an entry id plus one; zero is free. A key lives in one of two buckets,
b and b ^ f(tag), so that a slot can be moved to its other bucket without reading the key. At most half of the slots are ever used.

    entry words   0-3 key    4 size << 32 | namespace number    5 offset    6 checksum (owner while reserved)    7 version

The version is 0 for a free entry, odd while reserved (a client is filling the memory), and the even number below once committed: each pair
is used once, so who saw an entry reserved knows whether what is committed there later is what came of that.

What the pool itself fills, from another tier, may be read before it is whole: word 6 of the reserved entry then says which *chunks* of the
page are there, verified (`FILLING` and a bit each). They count if the entry is committed as the same pair in the end, and stays so.

Who writes: the pool process alone. Order of its stores (kept by x86; a reader's loads too):
  reserve  fields, then an odd version, then the slot         -> a slot never leads to a half-written entry
  commit   checksum, then an even version: the key is there   -> one store shows it; its slot was found while its writer copied
  remove   version := 0, then the slot                        -> before the memory is given to anyone else
  move     new slot, then ``moves`` += 1, then the old slot   -> the key is always in at least one place
  relocate offset, then a new even version                    -> the bytes are at both places when either is stored
A reader of an entry takes the version, the row, and the version again; unequal means it was changed under the reader. A reader that finds a
key in neither bucket compares ``moves`` with its value before; if it grew it looks again. So an answer is right for some moment between
call and return, and every commit answered before the call is seen.

What it costs: 2,200 keys of an index of 1 M take about thirty NumPy passes and 0.2 ms, of which more than half are two cache misses a
key, which the processor overlaps; a single key takes 30 us. Memory: 64 bytes an entry and 128 bytes of buckets at the least (slots are
twice to four times the entries).

Weak spot: on a machine with a weaker memory order than x86-64 the loads need barriers that NumPy does not offer; the pool
says so at its start, and readers there should verify checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from umbp.types import I64, KEY_BYTES, U8, U64, Mask

KEY = struct.Struct("<4Q")
ENTRY_WORDS = 8
BUCKET_SLOTS = 8
W_PLACE, W_OFFSET, W_SUM, W_VERSION = 4, 5, 6, 7

_U = np.uint64
_LOW = _U(0xFFFF_FFFF)
_SHIFT = _U(32)
_ONE = _U(1)
# Odd constants of a multiply-xorshift hash (splitmix64's); any odd ones of high entropy would do.
_M1, _M2, _STEP = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB, 0x9E37_79B9_7F4A_7C15
_MIX = _U(_M1)
_ALL = (1 << 64) - 1
_SECOND_INT = 0x5BD1_E995_5BD1_E995
_SECOND = _U(_SECOND_INT)

_FOUR = np.uint32(0x0101_0101)  # four bools, all True, seen as one word

FEW = 3  # keys that are cheaper one by one (about 10 us each) than as arrays (40 us a call)
GRAIN_BYTES = 128 << 10  # chunks are multiples of it: tiers verify pieces of this size
CHUNKS_MAX = 62  # of a page
FILLING = 1 << 63  # in word 6 of a reserved entry: the pool fills it, and the other bits are the chunks that are there
RETRIES_MAX = 8  # of keys whose entries changed while they were read; each needs a commit or an eviction of that very key in between
MOVES_MAX = 64  # displacements before an insert gives up; at half load a handful is already rare


def buckets_for(entries: int) -> int:
    """Number of buckets, a power of two, so that at most half of the slots are used."""
    return 1 << max(1, (max(1, entries) * 2 + BUCKET_SLOTS - 1) // BUCKET_SLOTS - 1).bit_length()


def place_word(number: int, size_bytes: int) -> np.uint64:
    """Word 4 of an entry: one compare checks both the namespace and the size."""
    return _U(size_bytes << 32 | number)


def chunk_bytes(size: int) -> int:
    """Bytes of a chunk of pages of this size."""
    return -(-size // (CHUNKS_MAX * GRAIN_BYTES)) * GRAIN_BYTES


def chunks_of(size: int, start: int, stop: int) -> int:
    """The chunks, a bit each, in which bytes [start, stop) of a page of this size lie."""
    each = chunk_bytes(size)
    return (1 << -(-stop // each)) - (1 << start // each) if start < stop else 0


def key_words(keys: U8) -> U64:
    """(n, 32) uint8 keys seen as (n, 4) uint64. No copy when aligned."""
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_BYTES // 8)


@cache
def _multipliers(seed: int) -> tuple[U64, list[int]]:
    """Five odd numbers made from the seed (splitmix64), for a key's four words, as an array, and the namespace; and all as a list."""
    numbers = []
    for step in range(1, 6):
        h = seed + step * _STEP & _ALL
        h = (h ^ h >> 30) * _M1 & _ALL
        h = (h ^ h >> 27) * _M2 & _ALL
        numbers.append((h ^ h >> 31) | 1)
    return np.array(numbers[:4], np.uint64), numbers


def _hash_one(words: Sequence[int], number: int, seed: int) -> int:
    """What `hashes` gives, for one key: arrays of one cost ten times as much."""
    m0, m1, m2, m3, m4 = _multipliers(seed)[1]
    h = words[0] * m0 + words[1] * m1 + words[2] * m2 + words[3] * m3 + number * m4 & _ALL
    h = (h ^ h >> 32) * _M1 & _ALL
    return h ^ h >> 29


def hashes(words: U64, number: np.uint64 | U64, seed: np.uint64) -> U64:
    """64-bit hash of (namespace number, key) for (n, 4) key words; seeded, so that callers cannot choose collisions.

    A sum of products with odd multipliers made from the seed, whose high half is good, and a multiply-xorshift step that spreads it over
    all bits. Few calls: this is on the way of every lookup.
    """
    if len(words) <= FEW and not isinstance(number, np.ndarray):
        return np.array([_hash_one(key, int(number), int(seed)) for key in words.tolist()], np.uint64)
    for_words, odd = _multipliers(int(seed))
    h: U64 = words @ for_words
    h += number * _U(odd[4]) if isinstance(number, np.ndarray) else _U(int(number) * odd[4] & _ALL)
    h ^= h >> _SHIFT
    h *= _MIX
    h ^= h >> _U(29)
    return h


@dataclass(frozen=True, slots=True)
class Found:
    """Answer of a probe: ``hit`` (n,) bool; ``ids`` (n,) int64 and ``rows`` (n, 8) uint64, meaningless where ``hit`` is False."""

    hit: Mask
    ids: I64
    rows: U64

    @property
    def versions(self) -> U64:
        """(n,) uint64: what to compare with later."""
        versions: U64 = self.rows[:, W_VERSION]
        return versions

    def only(self, which: I64) -> Found:
        """The answer for these items."""
        return Found(self.hit[which], self.ids[which], self.rows[which])


class IndexReader:
    """Finds keys. Stateless; any number of threads and processes."""

    def __init__(self, buckets: U64, entries: U64, moves: U64, seed: int) -> None:
        self.buckets = buckets
        self.entries = entries
        self.moves = moves
        self.seed = _U(seed)
        self._flat = entries.reshape(-1)
        self._mask = _U(len(buckets) - 1)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.entries)} entries, {len(self.buckets)} buckets>"

    def find(self, words: U64, number: int, place: np.uint64, hashed: U64 | None = None) -> Found:
        """Probe for (n, 4) key words of one namespace. ``place`` is `place_word` of the number and the expected size.

        ``hashed``: their `hashes`, where the caller has them.
        """
        moves = int(self.moves[0])
        if hashed is None:
            hashed = hashes(words, _U(number), self.seed)
        hit, ids, rows = self._decided(words, place, hashed)
        for _ in range(RETRIES_MAX):
            now = int(self.moves[0])
            if now == moves or hit.all():
                break
            moves = now
            again = np.flatnonzero(~hit)
            hit[again], ids[again], rows[again] = self._decided(words[again], place, hashed[again])
        return Found(hit, ids, rows)

    def has(self, key: U8, number: int, place: np.uint64) -> bool:
        """Whether one key, (32,) uint8, is there; a quarter of the time of `find`. A hint: what moves meanwhile may be overlooked."""
        words = KEY.unpack(key.data)
        return self._find_one([*words, int(place)], _hash_one(words, number, int(self.seed)))[0] is not None

    def filling(self, words: U64, number: int, place: np.uint64) -> Found:
        """Probe for pages that the pool is filling, and of which chunks are there already. ``versions`` are those of the reservations."""
        hashed = hashes(words, _U(number), self.seed)
        hit, ids, rows = _nothing(len(words))
        tag = hashed & ~_LOW
        first = hashed & self._mask
        for bucket in (first, self.second_bucket(first, tag)):
            lanes = self.buckets.take(bucket.view(np.int64), axis=0, mode="clip") ^ tag[:, None]
            item, lane = np.nonzero((lanes <= _LOW) & (lanes > 0))
            found = lanes[item, lane].view(np.int64) - 1
            before = self.versions_of(found)
            seen = self.entries.take(found, axis=0, mode="clip")
            good = (before == self.versions_of(found)) & (before & _ONE == _ONE) & (seen[:, W_SUM] >= _U(FILLING))
            good &= (seen[:, :4] == words[item]).all(axis=1) & (seen[:, W_PLACE] == place)
            hit[item[good]], ids[item[good]], rows[item[good]] = True, found[good], seen[good]
        return Found(hit, ids, rows)

    def versions_of(self, ids: I64) -> U64:
        """Current versions of entries, (n,) uint64."""
        return self._flat.take(ids * ENTRY_WORDS + W_VERSION, mode="clip")

    def sums_of(self, ids: I64, versions: U64) -> U64:
        """Checksums of these versions, (n,) uint64; 0 for those that have none yet, and for what is another version by now."""
        sums: U64 = self.entries[ids, W_SUM].copy()
        sums[self.versions_of(ids) != versions] = 0
        return sums

    def second_bucket(self, bucket: Any, tag: Any) -> Any:
        """The other bucket of slots with these tags (its own inverse): uint64 arrays."""
        return bucket ^ (((tag >> _SHIFT) * _SECOND >> _U(17) | _ONE) & self._mask)

    def _decided(self, words: U64, place: np.uint64, hashed: U64) -> tuple[Mask, I64, U64]:
        if len(words) <= FEW:
            hit, ids, rows = _nothing(len(words))
            which = np.arange(len(words))
        else:
            hit, ids, rows, unsure = self._pass(words, place, hashed)
            which = unsure.nonzero()[0]
        if len(which):
            self._settle(words, place, hashed, hit, ids, rows, which)
        return hit, ids, rows

    def _pass(self, words: U64, place: np.uint64, hashed: U64) -> tuple[Mask, I64, U64, Mask]:
        first = hashed & self._mask
        tag = hashed & ~_LOW
        hit, ids, rows, unsure = self._probe(first, tag, words, place)
        rest = (~hit).nonzero()[0]
        if len(rest) <= FEW:
            unsure[rest] = True
        elif len(rest) == len(words):
            hit, ids, rows, more = self._probe(self.second_bucket(first, tag), tag, words, place)
            unsure |= more
            unsure &= ~hit
        else:
            second = self.second_bucket(first[rest], tag[rest])
            hit[rest], ids[rest], rows[rest], more = self._probe(second, tag[rest], words[rest], place)
            unsure[rest] |= more
            unsure &= ~hit
        return hit, ids, rows, unsure

    def _probe(self, bucket: U64, tag: U64, words: U64, place: np.uint64) -> tuple[Mask, I64, U64, Mask]:
        """One bucket a key. ``unsure``: a tag matched but the entry did not (a collision of tags, or a change under the reader)."""
        n = len(words)
        lanes = self.buckets.take(bucket.view(np.int64), axis=0, mode="clip")
        lanes ^= tag[:, None]  # a matching slot becomes its id plus one; others are 2^32 or more, but for a free one under tag zero
        match = (lanes <= _LOW).view(np.uint64).ravel()  # eight bools seen as one word: zero means none
        some = match.nonzero()[0]
        if not len(some):  # then no entry is looked at: what is absent costs half
            return *_nothing(n), np.zeros(n, bool)
        at = np.arange(0, lanes.size, BUCKET_SLOTS) + _first_lane(match)
        found = lanes.ravel().take(at, mode="clip").view(np.int64) - 1
        if len(some) == n:
            same, there, entries = self._read(found, words, place)
            return there, found, entries, ~same
        hit, ids, rows = _nothing(n)
        unsure = np.zeros(n, bool)
        ids[some] = found = found[some]
        same, there, rows[some] = self._read(found, words[some], place)
        hit[some], unsure[some] = there, ~same
        return hit, ids, rows, unsure

    def _read(self, ids: I64, words: U64, place: np.uint64) -> tuple[Mask, Mask, U64]:
        """Which of these entries are of these keys and were not changed meanwhile, which of them are committed, and their rows."""
        at = ids * ENTRY_WORDS + W_VERSION
        before = self._flat.take(at, mode="clip")
        rows = self.entries.take(ids, axis=0, mode="clip")
        after = self._flat.take(at, mode="clip")
        same = (rows[:, :4] == words).view(np.uint32).ravel() == _FOUR
        same &= rows[:, W_PLACE] == place
        same &= before == after  # versions are used once, so the row is of this version, whole
        same &= before != 0
        return same, same & (before & _ONE == 0), rows  # odd: reserved, and so not there yet

    def _settle(self, words: U64, place: np.uint64, hashed: U64, hit: Mask, ids: I64, rows: U64, which: I64) -> None:
        """Look at keys one by one: those that a pass could not decide, and those of a small call."""
        for item, key, h in zip(which.tolist(), words[which].tolist(), hashed[which].tolist(), strict=True):
            for _ in range(RETRIES_MAX):
                found, changed = self._find_one([*key, int(place)], h)
                if found is not None:
                    hit[item], ids[item], rows[item] = True, found[0], found[1]
                if found is not None or not changed:
                    break

    def _find_one(self, key: list[int], hashed: int) -> tuple[tuple[int, U64] | None, bool]:
        """(entry id and row, if it is there; whether something changed under the reader) of one key and its place word."""
        changed = False
        mask, tag = len(self.buckets) - 1, hashed >> 32
        first = hashed & mask
        for bucket in (first, first ^ ((tag * _SECOND_INT & _ALL) >> 17 | 1) & mask):  # as `second_bucket`, for one
            for slot in self.buckets[bucket].tolist():
                if slot >> 32 != tag or not slot:
                    continue
                entry = (slot & 0xFFFF_FFFF) - 1
                before = int(self.entries[entry, W_VERSION])
                row = self.entries[entry].copy()
                if before == 0 or before != int(self.entries[entry, W_VERSION]):
                    changed = True
                elif row[:5].tolist() == key:
                    return None if before & 1 else (entry, row), False  # odd: reserved, and so not there yet
        return None, changed


def nothing_found(n: int) -> Found:
    """The answer where `IndexWriter.none_of` says yes."""
    return Found(*_nothing(n))


def _nothing(n: int) -> tuple[Mask, I64, U64]:
    """Hits, ids and rows of n keys of which none is found."""
    return np.zeros(n, bool), np.zeros(n, np.int64), np.zeros((n, ENTRY_WORDS), np.uint64)


def _first_lane(mask: U64) -> U8:
    """Index of the first True of eight bools seen as one word; 8 if there is none."""
    lane: U8 = np.bitwise_count((mask & -mask) - _ONE) >> 3
    return lane


class IndexWriter(IndexReader):
    """The one writer. Knows nothing of memory or leases: the caller says which entries to fill, show and hide."""

    def __init__(self, buckets: U64, entries: U64, moves: U64, seed: int, counter: U64) -> None:
        super().__init__(buckets, entries, moves, seed)
        self._claim = np.zeros(len(buckets), np.int32)  # scratch of `enter`
        self._counter = counter  # one word in the segment: the last version given out, so that none is used twice over restarts

    def _versions(self, n: int) -> U64:
        start = int(self._counter[0])
        self._counter[0] = start + n
        return np.arange(start + 1, start + n + 1, dtype=np.uint64) << _ONE

    def none_of(self, hashed: U64) -> bool:
        """Whether none of the keys with these `hashes` is there: a quick sure yes, or a no that `find` has to look into.

        For the writer only: a slot that moves meanwhile could be overlooked.
        """
        tag = hashed & ~_LOW
        homes = np.empty((2, len(hashed)), np.uint64)
        np.bitwise_and(hashed, self._mask, out=homes[0])
        homes[1] = self.second_bucket(homes[0], tag)
        lanes = self.buckets.take(homes.view(np.int64), axis=0, mode="clip")
        lanes ^= tag[:, None]
        return not lanes.size or int(lanes.min()) > 0xFFFF_FFFF  # as in `_probe`

    def write_reserved(self, ids: I64, words: U64, place: np.uint64, offsets: I64, owner: int) -> None:
        """Fill free entries for a client that will write the memory. Not visible; found again by `reserved` after a crash."""
        rows = np.zeros((len(ids), ENTRY_WORDS), np.uint64)
        rows[:, :4] = words
        rows[:, W_PLACE] = place
        rows[:, W_OFFSET] = offsets.view(np.uint64)
        rows[:, W_SUM] = owner
        self.entries[ids] = rows  # two stores a row, not six: each is a pass over cold memory
        self.entries[ids, W_VERSION] = self._versions(len(ids)) | _ONE  # last: with it the entry is a reserved one

    def name_reserved(self, ids: I64, words: U64, place: np.uint64) -> None:
        """Give reserved entries, whose memory is being filled already, their keys. They stay reserved ones at every moment of it."""
        self.entries[ids, :W_OFFSET] = np.concatenate([words, np.full((len(ids), 1), place)], axis=1)

    def publish(self, ids: I64, sums: U64 | None) -> None:
        """Show reserved entries that were entered."""
        self.entries[ids, W_SUM] = 0 if sums is None else sums
        self.entries[ids, W_VERSION] &= ~_ONE

    def fill(self, ids: I64, chunks: int) -> None:
        """Say of reserved entries of the pool's own that these chunks of them are there too."""
        assert (self.entries[ids, W_VERSION] & _ONE).all(), "an entry is filled that is not reserved"
        self.entries[ids, W_SUM] |= _U(FILLING | chunks)

    def unpublish(self, ids: I64) -> None:
        """Free entries; their version becomes 0 before the slot goes."""
        self.entries[ids, W_VERSION] = 0
        self.withdraw(ids)

    def forget(self, ids: I64) -> None:
        """Free entries that are in no bucket."""
        self.entries[ids, W_VERSION] = 0

    def remember(self, ids: I64, versions: U64) -> None:
        """Show entries again that were forgotten a moment ago, and given to nobody since."""
        self.entries[ids, W_VERSION] = versions

    def relocate(self, ids: I64, offsets: I64) -> None:
        """Committed entries whose bytes are, whole, at another place too: from now on that is where they are, at a version of their own.

        Between the two stores a reader has the former version with either place, and both are whole. Whoever has the former version finds
        it gone when he compares, so the memory there may be given to others.
        """
        self.entries[ids, W_OFFSET] = offsets.view(np.uint64)
        self.entries[ids, W_VERSION] = self._versions(len(ids))

    def rebuild(self, ids: I64) -> Mask:
        """Empty all buckets and enter these committed entries again: at re-attach, so that a crash between two stores cannot matter."""
        self.buckets[:] = 0
        return self.enter(ids)

    def _homes(self, ids: I64) -> tuple[U64, U64]:
        rows = self.entries[ids]
        h = hashes(rows[:, :4], rows[:, W_PLACE] & _LOW, self.seed)
        return h & self._mask, h & ~_LOW

    def enter(self, ids: I64, hashed: U64 | None = None) -> Mask:
        """Slots for these entries. Returns which found one (at half load it takes an unlucky key to find none). Readers see committed ones.

        ``hashed``: `hashes` of their keys, where the caller has them.
        """
        first, tag = self._homes(ids) if hashed is None else (hashed & self._mask, hashed & ~_LOW)
        slots = tag | (ids + 1).view(np.uint64)
        done = np.zeros(len(ids), bool)
        for second in (False, True):
            todo = np.flatnonzero(~done)
            if not len(todo):
                break
            at = (self.second_bucket(first, tag) if second else first).view(np.int64)
            # Several keys of one batch may want one bucket: a round serves one of each, and drops those whose bucket is full.
            while len(todo):
                wanted = at[todo]
                self._claim[wanted] = todo  # of equal ones the last store stays
                free = self.buckets.take(wanted, axis=0) == 0
                lane = free.argmax(axis=1)
                room = free[np.arange(len(todo)), lane]
                served = room & (self._claim[wanted] == todo)
                if served.all():
                    self.buckets[wanted, lane] = slots[todo]
                    done[todo] = True
                    break
                self.buckets[wanted[served], lane[served]] = slots[todo[served]]
                done[todo[served]] = True
                todo = todo[room & ~served]
        for item in np.flatnonzero(~done).tolist():
            done[item] = self._displace(int(first[item]), int(slots[item]))
        return done

    def _displace(self, bucket: int, slot: int) -> bool:
        """Walk: put the slot in the place of another that can move on. Plans the whole way first, then moves from its end."""
        path: list[tuple[int, int]] = []
        seen: set[tuple[int, int]] = set()
        for step in range(MOVES_MAX):
            lane = (slot + step) % BUCKET_SLOTS
            if (bucket, lane) in seen:
                return False
            seen.add((bucket, lane))
            path.append((bucket, lane))
            other = int(self.second_bucket(np.array([bucket], np.uint64), self.buckets[bucket, lane : lane + 1] & ~_LOW)[0])
            free = np.flatnonzero(self.buckets[other] == 0)
            if len(free):
                path.append((other, int(free[0])))
                break
            bucket = other
        else:
            return False
        for (from_bucket, from_lane), (to_bucket, to_lane) in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
            self.buckets[to_bucket, to_lane] = self.buckets[from_bucket, from_lane]
            self.moves[0] += _ONE
            self.buckets[from_bucket, from_lane] = 0
        self.buckets[path[0]] = slot
        return True

    def withdraw(self, ids: I64) -> None:
        """Take the slots of these entries away; what they are, such as reserved, they stay."""
        first, tag = self._homes(ids)
        for bucket in (first, self.second_bucket(first, tag)):
            at = bucket.view(np.int64)
            mine = self.buckets[at] == (tag | (ids + 1).view(np.uint64))[:, None]
            row, lane = np.nonzero(mine)
            self.buckets[at[row], lane] = 0

    def committed(self) -> I64:
        """Ids of all committed entries, ascending."""
        version = self.entries[:, W_VERSION]
        return np.flatnonzero((version != 0) & (version & _ONE == 0))

    def reserved(self) -> I64:
        """Ids of all reserved entries, ascending."""
        return np.flatnonzero(self.entries[:, W_VERSION] & _ONE)

    def check(self) -> None:
        """Every committed entry is in exactly one slot of one of its two buckets, and no slot leads elsewhere but to reserved ones."""
        used = self.buckets[self.buckets != 0]
        ids = np.sort((used & _LOW).view(np.int64) - 1)
        reserved = self.entries[ids, W_VERSION] & _ONE != 0
        assert np.array_equal(ids[~reserved], self.committed()), "slots and committed entries differ"
        first, tag = self._homes(ids)
        slots = tag | (ids + 1).view(np.uint64)
        one = (self.buckets[first.view(np.int64)] == slots[:, None]).sum(axis=1)
        two = (self.buckets[self.second_bucket(first, tag).view(np.int64)] == slots[:, None]).sum(axis=1)
        same = first == self.second_bucket(first, tag)
        assert ((one + np.where(same, 0, two)) == 1).all(), "an entry is in no slot of its buckets, or in two"
