"""The SSD tier beside a dumb model: any order of calls, restarts, cleaning and faults in between."""

from __future__ import annotations

import errno
import random
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from tests.store.disks import Fallible, Names, keys_of, make_tier
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_cleaning import clean_steps
from umbp.store.ssd_moving import offload_steps, promote_steps
from umbp.store.ssd_records import Batch
from umbp.store.ssd_system import finish
from umbp.store.ssd_upkeep import watch_steps
from umbp.types import ReadStatus, WriteStatus

SIZES = (300, 4096, 20_000, 65_536)
KEYS = 60
STEPS = 150
VERBS = ("write", "write", "write", "read", "read", "part", "remove", "flush", "evict", "clean", "restart", "fault")
OF_LEVELS = ("offload", "offload", "offload", "promote", "promote")


class Model:
    """What may be read: the edition under each name that was written last; and whether it must be there."""

    def __init__(self) -> None:
        self.edition: dict[tuple[int, int], int] = {}
        self.certain: set[tuple[int, int]] = set()


def body(number: int, key: int, edition: int) -> np.ndarray:
    return np.random.default_rng([number, key, edition]).integers(0, 256, SIZES[number], dtype=np.uint8)


class Play:
    def __init__(self, folder: Path, seed: int, levels: tuple[int, int] = (0, 0)) -> None:
        self.folder, self.levels = folder, levels
        self.verbs = VERBS + (OF_LEVELS if levels[1] else ())
        self.draw = random.Random(seed)
        self.system = Fallible()
        self.names = Names()
        self.now = 0.0
        self.numbers = list(range(len(SIZES)))  # of each namespace, which changes when it is flushed
        self.model = Model()
        self.tier = self.open()

    def open(self) -> SsdTier:
        folders = [self.folder / "a", self.folder / "b"]
        tier = make_tier(
            *folders,
            size=5 << 20,
            segment_bytes=512 << 10,
            system=self.system,
            names=self.names,
            entries=90,
            now=self.now,
            levels=self.levels,
        )
        tier.levels.high, tier.levels.low = 0.1, 0.02
        return tier

    def place(self, which: int) -> np.uint64:
        return place_word(self.numbers[which] + 1, SIZES[which])

    def step(self) -> None:
        verb = self.draw.choice(self.verbs)
        which = self.draw.randrange(len(SIZES))
        keys = self.draw.sample(range(KEYS), self.draw.randrange(1, 12))
        if verb != "restart":  # that may come upon notes on their way; else a second passes here however long a busy machine takes
            wait([future for drive in self.tier.drives for future in drive.out()], 60.0)
        self.now += 1.0
        getattr(self, verb)(which, keys)
        for drive in self.tier.drives:
            finish(watch_steps(self.tier, self.now, drive))
        assert self.tier.used_bytes <= self.tier.capacity_bytes
        assert self.tier.catalog.count <= 90

    def write(self, which: int, keys: list[int]) -> None:
        edition, model = int(self.now), self.model
        there = self.tier.find(self.place(which), keys_of(*keys))
        status = self.tier.write(self.now, self.place(which), keys_of(*keys), np.stack([body(which, key, edition) for key in keys]))
        for key, code, was in zip(keys, status.tolist(), there.tolist(), strict=True):
            assert (code == WriteStatus.EXISTS) == was
            if code == WriteStatus.STORED:
                model.edition[which, key] = edition

    def read(self, which: int, keys: list[int]) -> None:
        out = np.zeros((len(keys), SIZES[which]), np.uint8)
        listed = self.tier.find(self.place(which), keys_of(*keys))
        status = self.tier.read(self.now, self.place(which), keys_of(*keys), out)
        assert np.array_equal(status == ReadStatus.HIT, listed)
        for key, row, hit in zip(keys, out, listed.tolist(), strict=True):
            if hit:
                assert np.array_equal(row, body(which, key, self.model.edition[which, key])), f"page {which, key}"

    def part(self, which: int, keys: list[int]) -> None:
        start = self.draw.randrange(SIZES[which])
        stop = self.draw.randrange(start + 1, SIZES[which] + 1)
        out = [memoryview(bytearray(stop - start)) for _ in keys]
        status = finish(self.tier.read_part_steps(self.now, self.place(which), keys_of(*keys), start, stop, out))
        for key, row, code in zip(keys, out, status.tolist(), strict=True):
            assert code in (ReadStatus.HIT, ReadStatus.MISS)
            if code == ReadStatus.HIT:
                assert bytes(row) == body(which, key, self.model.edition[which, key])[start:stop].tobytes()

    def remove(self, which: int, keys: list[int]) -> None:
        there = self.tier.find(self.place(which), keys_of(*keys))
        assert np.array_equal(self.tier.remove(self.place(which), keys_of(*keys)), there)
        for key in keys:
            self.model.edition.pop((which, key), None)
        assert not self.tier.find(self.place(which), keys_of(*keys)).any()

    def flush(self, which: int, keys: list[int]) -> None:
        if self.draw.random() < 0.7:
            return
        digest, number = self.names.flush(self.numbers[which] + 1)
        finish(self.tier.flush_steps(self.now, digest, self.numbers[which] + 1))
        self.numbers[which] = number - 1
        for name in [name for name in self.model.edition if name[0] == which]:
            del self.model.edition[name]

    def evict(self, which: int, keys: list[int]) -> None:
        self.tier.evict(self.now, self.draw.randrange(1 << 20))

    def clean(self, which: int, keys: list[int]) -> None:
        for drive in self.tier.drives:
            finish(clean_steps(self.tier, self.now, drive))

    def offload(self, which: int, keys: list[int]) -> None:
        held = [self.tier.find(self.place(at), keys_of(*range(KEYS))) for at in range(len(SIZES))]
        gone = self.tier.counters.evicted + self.tier.counters.dropped  # where all below is full, or has no file left
        finish(offload_steps(self.tier, self.now, 0))
        if self.tier.counters.evicted + self.tier.counters.dropped == gone:
            for at, before in enumerate(held):
                assert np.array_equal(self.tier.find(self.place(at), keys_of(*range(KEYS))), before), "what goes down is no less there"

    def promote(self, which: int, keys: list[int]) -> None:
        keys = [key for key in keys if (which, key) in self.model.edition]
        bodies = [body(which, key, self.model.edition[which, key]).data for key in keys]
        batch = Batch(self.place(which), keys_of(*keys), bodies, np.zeros(len(keys), np.uint64), straight=False)
        before = self.tier.find(batch.place, batch.keys)
        finish(promote_steps(self.tier, self.now, batch))
        assert np.array_equal(self.tier.find(batch.place, batch.keys), before)

    def restart(self, which: int, keys: list[int]) -> None:
        held = [self.tier.find(self.place(at), keys_of(*range(KEYS))) for at in range(len(SIZES))]
        self.tier.check()
        orderly = self.draw.random() < 0.5
        if orderly:
            self.tier.stop(self.now)
        self.tier.close()
        self.tier = self.open()
        self.tier.check()
        for at, before in enumerate(held):
            after = self.tier.find(self.place(at), keys_of(*range(KEYS)))
            assert after[before].all(), f"pages of {at} are lost"
            back = np.flatnonzero(after & ~before).tolist()  # evicted, and the disk had not taken the note
            assert not (orderly and back), f"pages of {at} are back"
            assert all((at, key) in self.model.edition for key in back), f"removed pages of {at} are back"

    def fault(self, which: int, keys: list[int]) -> None:
        """A write that fails: nothing of it is listed, and the disks are well again a minute later."""
        self.system.fail(self.draw.choice((errno.EIO, errno.ENOSPC)), "write")
        status = self.tier.write(self.now, self.place(which), keys_of(*keys), np.stack([body(which, key, 0) for key in keys]))
        assert WriteStatus.STORED not in status.tolist()
        self.system.heal()
        wait([future for drive in self.tier.drives for future in drive.out()], 60.0)
        self.now += 60.0


# Of 109: a file that was freed and used again got the number of its last life, and so was given the trailer of that life.
@pytest.mark.parametrize(
    ("seed", "steps", "levels"),
    [(0, STEPS, (0, 0)), (1, STEPS, (0, 0)), (2, STEPS, (0, 0)), (109, 177, (0, 0)), (3, STEPS, (0, 1)), (4, STEPS, (0, 1))],
)
def test_any_order_of_calls_is_as_the_model_has_it(tmp_path: Path, seed: int, steps: int, levels: tuple[int, int]) -> None:
    play = Play(tmp_path, seed, levels)
    for step in range(steps):
        try:
            play.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {error}") from error
    play.tier.check()
    play.tier.close()
