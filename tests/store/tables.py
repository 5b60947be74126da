"""Small tables of the shared index for its tests, and keys chosen by where they go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np

from umbp.store.index import (
    BUCKET_SLOTS,
    ENTRY_WORDS,
    W_OFFSET,
    W_PLACE,
    IndexReader,
    IndexWriter,
    buckets_for,
    hashes,
    key_words,
    place_word,
)

SEED = 12345
NUMBER, SIZE = 7, 4096
PLACE = place_word(NUMBER, SIZE)
LOW = np.uint64(0xFFFF_FFFF)


def words_of(keys: Iterable[int]) -> np.ndarray:
    """(n, 4) words of keys made from integers."""
    return key_words(np.frombuffer(b"".join(key.to_bytes(32, "big") for key in keys), np.uint8))


def arrays(entries: int, buckets: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Buckets, entries, and the two words ``moves`` and the last version."""
    return (
        np.zeros((buckets or buckets_for(entries), BUCKET_SLOTS), np.uint64),
        np.zeros((entries, ENTRY_WORDS), np.uint64),
        np.zeros(2, np.uint64),
    )


def writer_of(parts: tuple[np.ndarray, np.ndarray, np.ndarray], kind: type[IndexWriter] = IndexWriter) -> IndexWriter:
    buckets, entries, words = parts
    return kind(buckets, entries, words[0:1], SEED, words[1:2])


def make(entries: int, buckets: int | None = None) -> IndexWriter:
    return writer_of(arrays(entries, buckets))


def insert(table: IndexWriter, ids: list[int], keys: list[int], place: np.uint64 = PLACE) -> list[bool]:
    """Reserve and publish; which found a slot."""
    at = np.array(ids, np.int64)
    return show(table, at, keys, at * 256, place).tolist()


def show(
    table: IndexWriter, at: np.ndarray, keys: list[int], offsets: np.ndarray, place: np.uint64 = PLACE, sums: np.ndarray | None = None
) -> np.ndarray:
    """Reserve, enter and publish these entries; which found a slot. The others are free again."""
    table.write_reserved(at, words_of(keys), place, offsets, 1)
    shown = table.enter(at)
    table.publish(at[shown], None if sums is None else sums[shown])
    table.forget(at[~shown])
    return shown


def lookup(table: IndexReader, keys: list[int], number: int = NUMBER, size: int = SIZE) -> list[int]:
    """Entry id of each key, -1 where it is not found."""
    found = table.find(words_of(keys), number, place_word(number, size))
    for i in np.flatnonzero(found.hit).tolist():
        assert found.rows[i, :4].tobytes() == keys[i].to_bytes(32, "big"), "a row of another key"
        assert found.rows[i, W_PLACE] == place_word(number, size)
        assert found.rows[i, W_OFFSET] == found.ids[i] * 256
        assert found.versions[i] > 0
        assert found.versions[i] % 2 == 0
    return np.where(found.hit, found.ids, -1).tolist()


def homes(table: IndexReader, keys: Iterable[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First bucket, second bucket and tag of these keys."""
    h = hashes(words_of(keys), np.uint64(NUMBER), table.seed)
    first, tag = h & np.uint64(len(table.buckets) - 1), h & ~LOW
    return first, table.second_bucket(first, tag), tag


def keys_where(table: IndexReader, wanted: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], count: int) -> list[int]:
    """Keys whose (first bucket, second bucket, tag) are as wanted."""
    found: list[int] = []
    start = 1
    while len(found) < count:
        candidates = np.arange(start, start + 20_000)
        start += 20_000
        found += candidates[wanted(*homes(table, candidates.tolist()))].tolist()
    return found[:count]


def pair_of_buckets(first: np.ndarray, second: np.ndarray, tag: np.ndarray) -> np.ndarray:
    return ((first == 0) & (second == 1)) | ((first == 1) & (second == 0))


@functools.cache
def crowd() -> tuple[list[int], list[int]]:
    """Keys whose second bucket is 1 and whose first is neither 0 nor 1; keys of buckets 0 and 1."""
    table = make(64)
    return keys_where(table, lambda first, second, tag: (first > 1) & (second == 1), 8), keys_where(table, pair_of_buckets, 9)


def crowded() -> tuple[IndexWriter, list[int]]:
    """A table whose buckets 0 and 1 are full, of which the keys of bucket 1 could move on; and, last, a key that needs a place there."""
    table = make(64)
    movable, narrow = crowd()
    assert insert(table, list(range(8)), movable) == [True] * 8
    for lane, bucket in enumerate(homes(table, movable)[0].tolist()):  # into their second bucket, as if the first had been full
        at = int(np.flatnonzero(table.buckets[bucket] & LOW == lane + 1)[0])
        table.buckets[1, lane], table.buckets[bucket, at] = table.buckets[bucket, at], 0
    assert insert(table, list(range(8, 16)), narrow[:8]) == [True] * 8
    assert np.count_nonzero(table.buckets[:2], axis=1).tolist() == [8, 8]
    table.check()
    return table, [*movable, *narrow]
