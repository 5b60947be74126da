"""The shared index while it is read and written at once.

Two ways to look between the stores. One writer and one reader in this process, where a trace stops the one at each of its lines in turn
and lets the other run: every interleaving of that kind, always the same. And two reader processes over a file, with the writer in this one.
There the oracle needs nobody to ask: each row says by its offset which key and commit it is of, and its checksum must fit.
Faults that the design guards against are planted, to show that either oracle sees them.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
from store.tables import NUMBER, PLACE, SEED, crowded, show, words_of, writer_of

from umbp.store import index as index_module
from umbp.store.index import BUCKET_SLOTS, ENTRY_WORDS, W_OFFSET, W_SUM, W_VERSION, IndexReader, IndexWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the readers are forks, which use no threads


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


def reserve(table: IndexWriter, entry: int, key: int, offset: int) -> None:
    """As for a client that will fill the memory."""
    table.write_reserved(np.array([entry]), words_of([key]), PLACE, np.array([offset]), 1)
    assert table.enter(np.array([entry])).all()


class Scene:
    """A crowded table in which key ``goer`` may go and come back and one put moves slots of keys that stay; and every commit there was."""

    def __init__(self, kind: type[IndexWriter], group: int) -> None:
        crowd, self.keys = crowded()
        self.group = group  # how many keys are looked for in one call: small calls go another way
        self.table = writer_of((crowd.buckets, crowd.entries, np.zeros(2, np.uint64)), kind)
        self.table._counter[0] = 1000
        self.goer, self.comer = self.keys[0], self.keys[16]
        self.commits = {(int(row[W_VERSION]), int(row[W_OFFSET])) for row in crowd.entries[:16]}
        self.shown = {self.goer: True}

    def remove(self) -> None:
        self.shown[self.goer] = False
        self.table.unpublish(np.array([0]))

    def reserve_again(self) -> None:
        reserve(self.table, 0, self.goer, 7777)

    def commit_again(self) -> None:
        self.commits.add((int(self.table.entries[0, W_VERSION]) - 1, 7777))  # of the same pair as the reservation
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
        reserve(self.table, 0, self.comer, 8888)
        self.table.publish(np.array([0]), None)

    def move(self) -> None:
        """Insert the key for which others have to move."""
        reserve(self.table, 16, self.comer, 16 * 256)
        self.table.publish(np.array([16]), None)

    def look(self, *, may_miss: bool) -> None:
        """The oracle: who stays is found, and what is found was committed."""
        for start in range(0, min(16, 2 * self.group), self.group):
            found = self.table.find(words_of(self.keys[start : start + self.group]), NUMBER, PLACE)
            hit = found.hit if start else found.hit[1:]
            assert hit.all(), "a key that is always there was missed"
            assert start or found.hit[0] or may_miss or not self.shown[self.goer], "a commit that was answered is not seen"
            for row in found.rows[found.hit]:
                assert (int(row[W_VERSION]), int(row[W_OFFSET])) in self.commits, "a row that was never committed"


WRITES = ("remove", "reuse", "replace", "give_to_another", "move")


def interleave_reader(kind: type[IndexWriter], write: str, group: int) -> int:
    """At each line of a find, the whole of a write."""
    number = lines = 1
    while number <= lines:
        scene = Scene(kind, group)
        lines = at_line(number, lambda scene=scene: scene.look(may_miss=True), getattr(scene, write))
        scene.look(may_miss=False)
        number += 1
    return lines


def interleave_writer(kind: type[IndexWriter], write: str, group: int) -> int:
    """At each line of a write, the whole of a find."""
    number = lines = 1
    while number <= lines:
        scene = Scene(kind, group)
        lines = at_line(number, getattr(scene, write), lambda scene=scene: scene.look(may_miss=True))
        scene.look(may_miss=False)
        number += 1
    return lines


@pytest.mark.parametrize("group", [16, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_at_any_line_of_a_find_is_seen_whole_or_not_at_all(write: str, group: int) -> None:
    assert interleave_reader(IndexWriter, write, group) > 20


@pytest.mark.parametrize("group", [16, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_find_at_any_line_of_a_write_sees_it_whole_or_not_at_all(write: str, group: int) -> None:
    assert interleave_writer(IndexWriter, write, group) > 5


class MovesUncounted(IndexWriter):
    """Planted: moves slots without saying so."""

    def enter(self, ids):
        before = int(self.moves[0])
        shown = super().enter(ids)
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
    """Planted: takes the slots of two buckets away for a moment while it enters others."""

    def enter(self, ids):
        kept = self.buckets[:2].copy()
        self.buckets[:2] = 0
        wait()
        self.buckets[:2] = kept
        return super().enter(ids)


class FieldsLast(IndexWriter):
    """Planted: shows an entry and fills it in then."""

    def publish(self, ids, sums):
        offsets = self.entries[ids, W_OFFSET].copy()
        self.entries[ids, W_OFFSET] = 3
        super().publish(ids, sums)
        wait()
        self.entries[ids, W_OFFSET] = offsets


def wait() -> None:
    """A tenth of a millisecond, so that other processes cannot but see it."""
    end = time.perf_counter() + 1e-4
    while time.perf_counter() < end:
        pass


@pytest.mark.parametrize("group", [16, 2])
@pytest.mark.parametrize(
    ("interleave", "kind", "write", "what"),
    [
        (interleave_reader, MovesUncounted, "move", "always there was missed"),
        (interleave_reader, VersionKept, "reuse", "never committed"),
        (interleave_writer, OldSlotFirst, "move", "always there was missed"),
        (interleave_writer, FieldsLast, "replace", "never committed"),
    ],
)
def test_planted_faults_are_seen_between_lines(interleave, kind: type[IndexWriter], write: str, what: str, group: int) -> None:
    with pytest.raises(AssertionError, match=what):
        interleave(kind, write, group)


# -- readers in other processes ------------------------------------------------------------------------------------------------------------

STEADY = 300  # keys that are always there
CHURNED = 300  # keys that come and go
RACE_ENTRIES = 448  # three quarters of them used, in crowded buckets: the writer has to move slots
RACE_SECONDS = 2.5
PASSES_MIN, MOVES_MIN = 100, 100  # of each reader; of the writer: where a busy machine has not made them by then, it goes on
LONG_SECONDS = 60.0


FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)


def read_until_told(path: str, seconds: float, seed: int, answers: multiprocessing.Queue) -> None:
    """A reader process: find keys as fast as it can and note what must not be, until the last word of the file is set."""
    memory = np.memmap(path, np.uint64, "r")
    table = IndexReader(*split(memory)[:2], split(memory)[2][0:1], SEED)
    draw = random.Random(seed)
    all_words = words_of(range(1, STEADY + CHURNED + 1))
    newest = np.zeros(STEADY + CHURNED + 1, np.uint64)
    faults: list[str] = []
    passes = hits = 0
    end = time.monotonic() + seconds
    while not (memory[-1] and passes > PASSES_MIN) and time.monotonic() < end and len(faults) < 5:
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
        with np.errstate(over="ignore"):
            sums = offsets.view(np.uint64) * FACTOR
        shown = show(self.table, ids, keys, offsets, sums=sums)
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
    readers = [context.Process(target=read_until_told, args=(path, seconds + LONG_SECONDS, seed * 10 + i, answers)) for i in range(2)]
    for reader in readers:
        reader.start()
    try:
        end = time.monotonic() + seconds
        while (time.monotonic() < end or table.moves[0] <= MOVES_MIN) and any(reader.is_alive() for reader in readers):
            race.step()
        memory[-1] = 1
        told = [answers.get(timeout=2 * LONG_SECONDS) for _ in readers]
    finally:
        for reader in readers:
            reader.join(60)
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
    assert moves > MOVES_MIN, "no slot was moved under the readers: this proves nothing"
    assert passes > 2 * PASSES_MIN


@pytest.mark.parametrize(
    ("kind", "what"), [(OldSlotFirst, "a key that is always there was missed"), (FieldsLast, "a hit whose row is another key's")]
)
def test_planted_faults_are_seen_by_other_processes(kind: type[IndexWriter], what: str, tmp_path) -> None:
    faults, _, _ = race(tmp_path, kind, 1, LONG_SECONDS)  # ends as soon as both readers have seen enough
    assert what in faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_readers_in_other_processes_for_longer(seed: int, tmp_path) -> None:
    faults, _, _ = race(tmp_path, IndexWriter, seed, 20.0)
    assert faults == [], f"seed {seed}"
