"""The shared index against a dict, at its limits, and under readers in other processes.

Two ways to look between the stores. One writer and one reader in this process, where a trace stops the one at each of its lines in turn
and lets the other run: every interleaving of that kind, always the same. And two reader processes over a file, with the writer in this one.
There the oracle needs nobody to ask: each row says by its offset which key and commit it is of, and its checksum must fit.
Faults that the design guards against are planted, to show that either oracle sees them.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.store import index as index_module
from umbp.store.index import (
    BUCKET_SLOTS,
    ENTRY_WORDS,
    W_OFFSET,
    W_PLACE,
    W_SUM,
    W_VERSION,
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

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the readers are forks, which use no threads


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
    table.write_reserved(at, words_of(keys), place, at * 256, 1)
    shown = table.publish(at, None)
    table.forget(at[~shown])
    return shown.tolist()


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
    table.entries[0, W_VERSION] = 99  # reserved by the next
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
    table.publish(at, np.array([9], np.uint64))
    assert lookup(table, [5]) == [0]
    assert (table.reserved().tolist(), table.committed().tolist()) == ([], [0])
    assert table.entries[0, W_SUM] == 9
    table.unpublish(at)
    assert lookup(table, [5]) == [-1]
    assert (table.reserved().tolist(), table.committed().tolist()) == ([], [])
    assert not table.buckets.any()


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


# -- between any two lines -----------------------------------------------------------------------------------------------------------------


def at_line(number: int, function: Callable[[], object], meanwhile: Callable[[], object]) -> int:
    """Run ``function`` and, before its line ``number`` (of those in the index's file or this one), ``meanwhile``. How many lines it ran."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if frame.f_code.co_filename not in (index_module.__file__, __file__):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                sys.settrace(None)
                try:
                    meanwhile()
                finally:
                    sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


class Scene:
    """A crowded table in which key ``goer`` may go and come back and one put moves slots of keys that stay; and every commit there was."""

    def __init__(self, kind: type[IndexWriter]) -> None:
        crowd, self.keys = crowded()
        self.table = writer_of((crowd.buckets, crowd.entries, np.zeros(2, np.uint64)), kind)
        self.table._counter[0] = 1000
        self.goer, self.comer = self.keys[0], self.keys[16]
        self.commits = {(int(row[W_VERSION]), int(row[W_OFFSET])) for row in crowd.entries[:16]}
        self.shown = {self.goer: True}

    def remove(self) -> None:
        self.shown[self.goer] = False
        self.table.unpublish(np.array([0]))

    def reserve_again(self) -> None:
        self.table.write_reserved(np.array([0]), words_of([self.goer]), PLACE, np.array([7777]), 1)

    def commit_again(self) -> None:
        self.commits.add((2 * int(self.table._counter[0]) + 2, 7777))
        self.table.publish(np.array([0]), None)
        self.shown[self.goer] = True

    def reuse(self) -> None:
        self.remove()
        self.reserve_again()

    def replace(self) -> None:
        self.reuse()
        self.commit_again()

    def give_to_another(self) -> None:
        self.remove()
        self.table.write_reserved(np.array([0]), words_of([self.comer]), PLACE, np.array([8888]), 1)
        self.table.publish(np.array([0]), None)

    def move(self) -> None:
        """Insert the key for which others have to move."""
        self.table.write_reserved(np.array([16]), words_of([self.comer]), PLACE, np.array([16 * 256]), 1)
        self.table.publish(np.array([16]), None)

    def look(self, *, may_miss: bool) -> None:
        """The oracle: who stays is found, and what is found was committed."""
        found = self.table.find(words_of(self.keys[:16]), NUMBER, PLACE)
        assert found.hit[1:].all(), "a key that is always there was missed"
        assert found.hit[0] or may_miss or not self.shown[self.goer], "a commit that was answered is not seen"
        for row in found.rows[found.hit]:
            assert (int(row[W_VERSION]), int(row[W_OFFSET])) in self.commits, "a row that was never committed"


WRITES = ("remove", "reuse", "replace", "give_to_another", "move")


def interleave_reader(kind: type[IndexWriter], write: str) -> int:
    """At each line of a find, the whole of a write."""
    number = lines = 1
    while number <= lines:
        scene = Scene(kind)
        lines = at_line(number, lambda scene=scene: scene.look(may_miss=True), getattr(scene, write))
        scene.look(may_miss=False)
        number += 1
    return lines


def interleave_writer(kind: type[IndexWriter], write: str) -> int:
    """At each line of a write, the whole of a find."""
    number = lines = 1
    while number <= lines:
        scene = Scene(kind)
        lines = at_line(number, getattr(scene, write), lambda scene=scene: scene.look(may_miss=True))
        scene.look(may_miss=False)
        number += 1
    return lines


@pytest.mark.parametrize("write", WRITES)
def test_a_write_at_any_line_of_a_find_is_seen_whole_or_not_at_all(write: str) -> None:
    assert interleave_reader(IndexWriter, write) > 20


@pytest.mark.parametrize("write", WRITES)
def test_a_find_at_any_line_of_a_write_sees_it_whole_or_not_at_all(write: str) -> None:
    assert interleave_writer(IndexWriter, write) > 5


class MovesUncounted(IndexWriter):
    """Planted: moves slots without saying so."""

    def publish(self, ids, sums):
        before = int(self.moves[0])
        shown = super().publish(ids, sums)
        self.moves[0] = before
        return shown


class VersionKept(IndexWriter):
    """Planted: gives an entry away with the version that it had."""

    def unpublish(self, ids):
        kept = self.entries[ids, W_VERSION].copy()
        super().unpublish(ids)
        self.entries[ids, W_VERSION] = kept

    def write_reserved(self, ids, words, place, offsets, owner):
        kept = self.entries[ids, W_VERSION].copy()
        super().write_reserved(ids, words, place, offsets, owner)
        self.entries[ids, W_VERSION] = np.where(kept, kept, self.entries[ids, W_VERSION])


class OldSlotFirst(IndexWriter):
    """Planted: takes a bucket's slots away for a moment while it enters others."""

    def publish(self, ids, sums):
        kept = self.buckets[0].copy()
        self.buckets[0] = 0
        wait()
        self.buckets[0] = kept
        return super().publish(ids, sums)


class FieldsLast(IndexWriter):
    """Planted: shows an entry and fills it in then."""

    def publish(self, ids, sums):
        offsets = self.entries[ids, W_OFFSET].copy()
        self.entries[ids, W_OFFSET] = 3
        shown = super().publish(ids, sums)
        wait()
        self.entries[ids, W_OFFSET] = offsets
        return shown


def wait() -> None:
    """A tenth of a millisecond, so that other processes cannot but see it."""
    end = time.perf_counter() + 1e-4
    while time.perf_counter() < end:
        pass


@pytest.mark.parametrize(
    ("interleave", "kind", "write", "what"),
    [
        (interleave_reader, MovesUncounted, "move", "always there was missed"),
        (interleave_reader, VersionKept, "reuse", "never committed"),
        (interleave_writer, OldSlotFirst, "move", "always there was missed"),
        (interleave_writer, FieldsLast, "replace", "never committed"),
    ],
)
def test_planted_faults_are_seen_between_lines(interleave, kind: type[IndexWriter], write: str, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        interleave(kind, write)


# -- readers in other processes ------------------------------------------------------------------------------------------------------------

STEADY = 300  # keys that are always there
CHURNED = 300  # keys that come and go
RACE_ENTRIES = 448  # three quarters of them used, in crowded buckets: the writer has to move slots
RACE_SECONDS = 2.5


FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)


def read_until_told(path: str, seconds: float, seed: int, answers: multiprocessing.Queue) -> None:
    """A reader process: find keys as fast as it can and note what must not be."""
    memory = np.memmap(path, np.uint64, "r")
    table = IndexReader(*split(memory)[:2], split(memory)[2][0:1], SEED)
    draw = random.Random(seed)
    all_words = words_of(range(1, STEADY + CHURNED + 1))
    newest = np.zeros(STEADY + CHURNED + 1, np.uint64)
    faults: list[str] = []
    passes = hits = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(faults) < 5:
        keys = np.array(draw.sample(range(1, STEADY + CHURNED + 1), draw.choice((1, 7, 200))))
        found = table.find(all_words[keys - 1], NUMBER, PLACE)
        passes, hits = passes + 1, hits + int(np.count_nonzero(found.hit))
        got, rows = keys[found.hit], found.rows[found.hit]
        with np.errstate(over="ignore"):
            if (rows[:, W_SUM] != rows[:, W_OFFSET] * FACTOR).any():
                faults.append("a row of two commits")
        if (rows[:, W_OFFSET] >> np.uint64(32) != got.astype(np.uint64)).any():
            faults.append("a hit whose row is another key's")
        if (rows[:, W_VERSION] < newest[got]).any():
            faults.append("a version went back")
        newest[got] = rows[:, W_VERSION]
        if not found.hit[keys <= STEADY].all():
            faults.append("a key that is always there was missed")
    answers.put((passes, hits, faults))


def split(memory: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays in a file."""
    buckets = RACE_BUCKETS * BUCKET_SLOTS
    return (
        memory[:buckets].reshape(-1, BUCKET_SLOTS),
        memory[buckets : buckets + RACE_ENTRIES * ENTRY_WORDS].reshape(-1, ENTRY_WORDS),
        memory[buckets + RACE_ENTRIES * ENTRY_WORDS :],
    )


RACE_BUCKETS = 64  # 512 slots for 448 entries: far above the load that the pool allows


class Race:
    """The writer's side: steady keys stay, churned keys come and go in reused entries."""

    def __init__(self, table: IndexWriter, seed: int) -> None:
        self.table = table
        self.random = random.Random(seed)
        self.free = list(range(RACE_ENTRIES))
        self.held: dict[int, int] = {}
        self.commits = 0

    def insert(self, keys: list[int]) -> int:
        self.random.shuffle(self.free)
        ids = np.array([self.free.pop() for _ in keys], np.int64)
        self.commits += 1
        offsets = np.array(keys, np.int64) << 32 | self.commits
        self.table.write_reserved(ids, words_of(keys), PLACE, offsets, 1)
        with np.errstate(over="ignore"):
            sums = offsets.view(np.uint64) * FACTOR
        shown = self.table.publish(ids, sums)
        self.table.forget(ids[~shown])
        self.free += ids[~shown].tolist()
        self.held.update((key, entry) for key, entry, ok in zip(keys, ids.tolist(), shown.tolist(), strict=True) if ok)
        return int(np.count_nonzero(shown))

    def remove(self, keys: list[int]) -> None:
        ids = [self.held.pop(key) for key in keys]
        self.table.unpublish(np.array(ids, np.int64))
        self.free += ids

    def step(self) -> None:
        churned = [key for key in self.held if key > STEADY]
        if churned and (len(self.free) < 60 or self.random.random() < 0.5):
            self.remove(self.random.sample(churned, min(len(churned), self.random.choice((1, 5, 40)))))
        else:
            absent = [key for key in range(STEADY + 1, STEADY + CHURNED + 1) if key not in self.held]
            self.insert(self.random.sample(absent, min(len(absent), len(self.free), self.random.choice((1, 5, 40)))))


def race(tmp_path, kind: type[IndexWriter], seed: int, seconds: float) -> tuple[list[str], int, int]:
    """Faults that two reader processes noted, passes they made, slots that the writer moved."""
    path = str(tmp_path / "index")
    memory = np.memmap(path, np.uint64, "w+", shape=RACE_BUCKETS * BUCKET_SLOTS + RACE_ENTRIES * ENTRY_WORDS + 8)
    table = writer_of(split(memory), kind)
    race = Race(table, seed)
    assert race.insert(list(range(1, STEADY + 1))) == STEADY
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    readers = [context.Process(target=read_until_told, args=(path, seconds, seed * 10 + i, answers)) for i in range(2)]
    for reader in readers:
        reader.start()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(reader.is_alive() for reader in readers):
            race.step()
        told = [answers.get(timeout=30) for _ in readers]
    finally:
        for reader in readers:
            reader.join(10)
            if reader.is_alive():
                reader.kill()
                reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0]
    table.check()
    return [fault for _, _, faults in told for fault in faults], sum(passes for passes, _, _ in told), int(table.moves[0])


@pytest.mark.parametrize("seed", [1])
def test_readers_in_other_processes_are_never_told_wrong(seed: int, tmp_path) -> None:
    faults, passes, moves = race(tmp_path, IndexWriter, seed, RACE_SECONDS)
    assert faults == [], f"seed {seed}"
    assert moves > 100, "no slot was moved under the readers: this proves nothing"
    assert passes > 200


@pytest.mark.parametrize(
    ("kind", "what"), [(OldSlotFirst, "a key that is always there was missed"), (FieldsLast, "a hit whose row is another key's")]
)
def test_planted_faults_are_seen_by_other_processes(kind: type[IndexWriter], what: str, tmp_path) -> None:
    faults, _, _ = race(tmp_path, kind, 1, 5.0)  # ends as soon as both readers have seen enough
    assert what in faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_readers_in_other_processes_for_longer(seed: int, tmp_path) -> None:
    faults, _, _ = race(tmp_path, IndexWriter, seed, 20.0)
    assert faults == [], f"seed {seed}"
