"""The shared index against a dict, and at its limits: full buckets, colliding tags, what a crash leaves."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store.tables import (
    LOW,
    NUMBER,
    PLACE,
    SEED,
    arrays,
    crowded,
    homes,
    insert,
    keys_where,
    lookup,
    make,
    pair_of_buckets,
    words_of,
    writer_of,
)

from umbp.store import index as index_module
from umbp.store.index import (
    BUCKET_SLOTS,
    CHUNKS_MAX,
    FILLING,
    GRAIN_BYTES,
    W_SUM,
    W_VERSION,
    IndexWriter,
    chunk_bytes,
    chunks_of,
    hashes,
    place_word,
)

# -- against a dict ------------------------------------------------------------------------------------------------------------------------


class Model:
    """A table and a dict that are told the same."""

    def __init__(self, table: IndexWriter) -> None:
        self.table = table
        self.held: dict[int, int] = {}  # key -> entry id
        self.free = list(range(len(table.entries)))
        self.versions: set[int] = set()

    def insert(self, keys: list[int]) -> None:
        keys = [key for key in dict.fromkeys(keys) if key not in self.held][: len(self.free)]
        ids = [self.free.pop() for _ in keys]
        for key, entry, shown in zip(keys, ids, insert(self.table, ids, keys) if keys else [], strict=True):
            if shown:
                self.held[key] = entry
                version = int(self.table.entries[entry, W_VERSION])
                assert version not in self.versions, "a version was used twice"
                self.versions.add(version)
            else:
                self.free.append(entry)

    def remove(self, keys: list[int]) -> None:
        ids = [self.held.pop(key) for key in dict.fromkeys(keys) if key in self.held]
        self.table.unpublish(np.array(ids, np.int64))
        self.free += ids

    def check(self, keys: list[int]) -> None:
        self.table.check()
        assert lookup(self.table, keys) == [self.held.get(key, -1) for key in keys]
        assert self.table.committed().tolist() == sorted(self.held.values())


KEY_LISTS = st.lists(st.integers(1, 40), max_size=24)


@settings(max_examples=80, deadline=None)
@given(entries=st.integers(1, 40), steps=st.lists(st.tuples(st.sampled_from(("insert", "remove", "rebuild")), KEY_LISTS), max_size=20))
def test_any_order_agrees_with_a_dict(entries: int, steps: list[tuple[str, list[int]]]) -> None:
    model = Model(make(entries))
    for verb, keys in steps:
        if verb == "rebuild":
            assert model.table.rebuild(model.table.committed()).all()
        else:
            getattr(model, verb)(keys)
        model.check(list(range(1, 41)))


@pytest.mark.parametrize("seed", range(4))
def test_a_table_that_is_always_nearly_full_agrees_with_a_dict(seed: int) -> None:
    draw = random.Random(seed)
    model = Model(make(512))
    assert len(model.table.buckets) * BUCKET_SLOTS == 1024, "twice the entries"
    for _ in range(60):
        model.insert([draw.randrange(1, 3000) for _ in range(draw.choice((1, 10, 200, 600)))])
        assert len(model.held) <= 512
        model.check([draw.randrange(1, 3000) for _ in range(300)])
        model.remove(draw.sample(list(model.held), len(model.held) // draw.choice((1, 3, 50))))


def test_ten_seeds_of_a_table_filled_to_its_limit_place_every_key() -> None:
    for seed in range(10):
        model = Model(make(4096))
        model.insert(list(range(seed * 10_000 + 1, seed * 10_000 + 4097)))
        assert len(model.held) == 4096
        assert model.table.rebuild(model.table.committed()).all()


# -- overflow, displacement, collisions ----------------------------------------------------------------------------------------------------


def test_a_full_bucket_overflows_into_the_second() -> None:
    table = make(64)
    keys = keys_where(table, lambda first, second, tag: first == 3, 12)
    assert insert(table, list(range(12)), keys) == [True] * 12
    assert np.count_nonzero(table.buckets[3]) == BUCKET_SLOTS
    assert lookup(table, keys) == list(range(12))
    assert int(table.moves[0]) == 0
    table.check()


def test_a_key_whose_buckets_are_full_takes_the_place_of_one_that_can_move() -> None:
    table, keys = crowded()
    assert insert(table, [16], keys[16:]) == [True]
    assert int(table.moves[0]) >= 1
    assert lookup(table, keys) == list(range(17))
    table.check()


def test_two_full_buckets_whose_keys_have_nowhere_else_refuse_and_change_nothing() -> None:
    table = make(64)
    keys = keys_where(table, pair_of_buckets, 18)
    assert insert(table, list(range(16)), keys[:16]) == [True] * 16
    before = table.buckets.copy()
    assert insert(table, [16, 17], keys[16:]) == [False, False]
    assert np.array_equal(table.buckets, before)
    assert lookup(table, keys) == [*range(16), -1, -1]
    table.unpublish(np.array([3]))
    assert insert(table, [16], keys[16:17]) == [True]
    table.check()


def test_a_batch_wanting_one_bucket_is_placed_like_single_keys() -> None:
    table = make(64)
    keys = keys_where(table, pair_of_buckets, 16)
    assert insert(table, list(range(16)), keys) == [True] * 16
    assert lookup(table, keys) == list(range(16))


@pytest.fixture
def narrow_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes whose upper half has three values only: most keys of a bucket collide in their tags."""
    real = index_module.hashes

    def narrow(words: np.ndarray, number: np.uint64 | np.ndarray, seed: np.uint64) -> np.ndarray:
        h = real(words, number, seed)
        return (h & LOW) | (((h >> np.uint64(40)) % np.uint64(3)) << np.uint64(32))

    monkeypatch.setattr(index_module, "hashes", narrow)


@pytest.mark.usefixtures("narrow_tags")
@pytest.mark.parametrize("seed", range(3))
def test_keys_whose_tags_collide_are_told_apart(seed: int) -> None:
    """Tag zero, too, which looks like a free slot but for the entry id."""
    draw = random.Random(seed)
    model = Model(make(64))
    for _ in range(40):
        model.insert([draw.randrange(1, 300) for _ in range(draw.choice((1, 10, 64)))])
        model.check(list(range(1, 300)))
        model.remove(draw.sample(list(model.held), len(model.held) // 2))


@pytest.mark.usefixtures("narrow_tags")
def test_a_colliding_entry_that_is_reserved_or_gone_does_not_hide_the_right_one() -> None:
    table = make(64)
    h = index_module.hashes(words_of(range(1, 2000)), np.uint64(NUMBER), table.seed)
    same = (np.flatnonzero(h & np.uint64(0x7_0000_000F) == h[0] & np.uint64(0x7_0000_000F))[:3] + 1).tolist()
    assert insert(table, [0, 1, 2], same) == [True] * 3
    table.entries[0, W_VERSION] = 0  # as between the two stores of a removal
    assert lookup(table, same) == [-1, 1, 2]
    table.entries[0, W_VERSION] = 99  # reserved
    assert lookup(table, same) == [-1, 1, 2]


# -- what belongs to a key -----------------------------------------------------------------------------------------------------------------


def test_namespace_and_size_are_part_of_a_keys_identity() -> None:
    table = make(64)
    insert(table, [0], [5], place_word(1, 4096))
    insert(table, [1], [5], place_word(2, 4096))
    assert lookup(table, [5], 1, 4096) == [0]
    assert lookup(table, [5], 2, 4096) == [1]
    assert lookup(table, [5], 3, 4096) == [-1]
    assert lookup(table, [5], 1, 8192) == [-1]
    table.unpublish(np.array([0]))
    assert lookup(table, [5], 1, 4096) == [-1]
    assert lookup(table, [5], 2, 4096) == [1]


def test_the_place_word_holds_the_largest_size_and_number() -> None:
    word = place_word(2**32 - 1, 2**32 - 1)
    assert int(word) == 2**64 - 1
    with pytest.raises(OverflowError):
        place_word(1, 2**32)


def test_keys_that_differ_in_one_bit_are_different() -> None:
    table = make(1024)
    keys = [1 << bit for bit in range(256)]
    assert insert(table, list(range(256)), keys) == [True] * 256
    assert lookup(table, [*keys, 0, 3, (1 << 256) - 1]) == [*range(256), -1, -1, -1]


def test_the_seed_and_the_namespace_change_where_a_key_goes() -> None:
    words = words_of(range(1000))
    one = hashes(words, np.uint64(1), np.uint64(SEED))
    assert len(np.unique(one)) == 1000
    assert not (one == hashes(words, np.uint64(2), np.uint64(SEED))).any()
    assert not (one == hashes(words, np.uint64(1), np.uint64(SEED + 1))).any()


def test_a_repeated_key_is_found_each_time_and_no_keys_are_no_hits() -> None:
    table = make(64)
    insert(table, [0], [5])
    assert lookup(table, [5, 6, 5]) == [0, -1, 0]
    assert lookup(table, []) == []


# -- the life of an entry ------------------------------------------------------------------------------------------------------------------


def test_an_entry_is_visible_between_publish_and_unpublish_only() -> None:
    table = make(64)
    at = np.array([0])
    table.write_reserved(at, words_of([5]), PLACE, at, 77)
    assert lookup(table, [5]) == [-1]
    assert (table.reserved().tolist(), table.committed().tolist()) == ([0], [])
    assert table.entries[0, W_SUM] == 77
    assert table.enter(at).all()
    assert lookup(table, [5]) == [-1]
    table.check()
    table.withdraw(at)
    assert not table.buckets.any()
    assert table.enter(at).all()
    table.publish(at, np.array([9], np.uint64))
    assert lookup(table, [5]) == [0]
    assert (table.reserved().tolist(), table.committed().tolist()) == ([], [0])
    assert table.entries[0, W_SUM] == 9
    table.unpublish(at)
    assert lookup(table, [5]) == [-1]
    assert (table.reserved().tolist(), table.committed().tolist()) == ([], [])
    assert not table.buckets.any()


def test_what_the_pool_fills_is_seen_chunk_by_chunk_and_known_again_once_committed() -> None:
    table = make(64)
    ids, keys = np.array([3, 4, 5]), words_of([7, 8, 9])
    table.write_reserved(ids, keys, PLACE, ids * 256, 0)
    assert table.enter(ids).all()
    reading = lambda: table.filling(words_of([9, 7, 1, 8]), NUMBER, PLACE)  # noqa: E731
    assert not reading().hit.any(), "nothing of them is there yet"
    table.fill(ids[:2], 0b1)
    table.fill(ids[:1], 0b110)
    found = reading()
    assert found.hit.tolist() == [False, True, False, True]
    assert found.ids[[1, 3]].tolist() == [3, 4]
    assert [int(word) ^ FILLING for word in found.rows[[1, 3], W_SUM].tolist()] == [0b111, 0b1]
    assert lookup(table, [7, 8, 9]) == [-1, -1, -1]
    marks = found.versions[[1, 3]]
    table.publish(ids[:1], np.array([77], np.uint64))
    assert table.versions_of(ids[:2]).tolist() == [int(marks[0]) - 1, int(marks[1])]
    assert reading().hit.tolist() == [False, False, False, True]
    table.unpublish(ids[1:2])  # given back, and taken again for the same key: another pair
    table.write_reserved(ids[1:2], keys[1:2], PLACE, ids[1:2], 0)
    assert table.enter(ids[1:2]).all()
    table.publish(ids[1:2], None)
    assert int(table.versions_of(ids[1:2])[0]) != int(marks[1]) - 1
    with pytest.raises(AssertionError, match="not reserved"):
        table.fill(ids[:1], 1)
    other = table.filling(keys, NUMBER + 1, place_word(NUMBER + 1, 256))
    assert not other.hit.any()


def test_a_client_s_own_reservation_is_none_that_the_pool_fills() -> None:
    table = make(64)
    at = np.array([0])
    table.write_reserved(at, words_of([5]), PLACE, at, (1 << 62) + 5)
    table.enter(at)
    assert not table.filling(words_of([5]), NUMBER, PLACE).hit.any()


@pytest.mark.parametrize("size", [1, GRAIN_BYTES, GRAIN_BYTES + 1, 62 * GRAIN_BYTES, 62 * GRAIN_BYTES + 1, 1 << 30])
def test_chunks_are_few_whole_grains_and_cover_a_page(size: int) -> None:
    each = chunk_bytes(size)
    assert each % GRAIN_BYTES == 0
    assert (size - 1) // each < CHUNKS_MAX
    every = chunks_of(size, 0, size)
    assert every == (1 << -(-size // each)) - 1 < FILLING
    cut = size // 2
    assert chunks_of(size, 0, cut) | chunks_of(size, cut, size) == every
    assert chunks_of(size, cut, cut) == 0


def test_versions_are_used_once_and_known_again_after_a_restart() -> None:
    parts = arrays(64)
    seen = []
    for _ in range(3):
        table = writer_of(parts)
        for _ in range(3):
            insert(table, [0, 1], [5, 6])
            seen += table.versions_of(np.array([0, 1])).tolist()
            table.unpublish(np.array([0, 1]))
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen)


@pytest.mark.parametrize("damage", ["slots lost", "slots twice", "slots of the gone"])
def test_rebuild_repairs_what_a_crash_between_two_stores_left(damage: str) -> None:
    table = make(64)
    insert(table, list(range(40)), list(range(1, 41)))
    if damage == "slots lost":
        table.buckets[::2] = 0
    elif damage == "slots twice":
        _, second, tag = homes(table, range(1, 41))
        for entry in range(40):  # in its other bucket too, as between the stores of a move
            free = np.flatnonzero(table.buckets[int(second[entry])] == 0)
            if len(free):
                table.buckets[int(second[entry]), free[0]] = tag[entry] | np.uint64(entry + 1)
    else:
        table.entries[:10, W_VERSION] = 0
    with pytest.raises(AssertionError):
        table.check()
    live = table.committed()
    assert table.rebuild(live).all()
    table.check()
    assert [entry for entry in lookup(table, list(range(1, 41))) if entry >= 0] == live.tolist()


def test_one_key_is_found_alike_with_and_without_arrays() -> None:
    table = make(64)
    keys = list(range(1, 33))
    assert insert(table, list(range(32)), keys) == [True] * 32
    table.unpublish(np.array([3, 4]))
    table.write_reserved(np.array([3]), words_of([4]), PLACE, np.array([768]), 1)
    assert table.enter(np.array([3])).all()
    rows = words_of(range(1, 65)).view(np.uint8).reshape(-1, 32)
    assert [table.has(row, NUMBER, PLACE) for row in rows] == table.find(words_of(range(1, 65)), NUMBER, PLACE).hit.tolist()
    assert not table.has(rows[0], NUMBER + 1, PLACE)
