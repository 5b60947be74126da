"""The end of the process and the loss of power, at every change of a seeded run: what was promised holds at the next start."""

from __future__ import annotations

import random
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.disks import Forgetful, Names, keys_of, make_tier
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_cleaning import clean_steps
from umbp.store.ssd_records import Batch
from umbp.store.ssd_system import Steps, finish
from umbp.types import U8, ReadStatus, WriteStatus

SIZES = {1: 4096, 2: 10_000}
SEGMENT = 128 << 10
STEPS = 9


def body(number: int, key: int) -> np.ndarray:
    """The bytes of a page: they follow from its name, as those of a page of tokens do."""
    return np.random.default_rng([number, key]).integers(0, 256, SIZES[number], dtype=np.uint8)


class Run:
    """A seeded run over two folders, and what it was promised."""

    def __init__(self, folder: Path, seed: int, system: Forgetful) -> None:
        self.folders = [folder / "a", folder / "b"]
        self.system = system
        self.names = Names()
        self.now = {1: 1, 2: 2}  # the number that each namespace has
        self.draw = random.Random(seed)
        self.stored: set[tuple[int, int]] = set()
        self.gone: set[tuple[int, int]] = set()  # answered as removed, and not written since
        self.unsure: set[tuple[int, int]] = set()  # in the call that the end came into
        self.tier: SsdTier | None = None

    def open(self) -> SsdTier:
        self.tier = make_tier(*self.folders, size=3 << 20, segment_bytes=SEGMENT, system=self.system, names=self.names)
        return self.tier

    def place(self, number: int) -> np.uint64:
        return place_word(self.now[number], SIZES[number])

    def play(self) -> None:
        """Until all is done or the power is gone."""
        tier = self.open()
        for _ in range(STEPS):
            verb = self.draw.choice(("write", "write", "write", "remove", "remove", "clean", "flush", "reopen"))
            number = self.draw.choice((1, 2))
            keys = self.draw.sample(range(40), self.draw.randrange(2, 14))
            names = {(number, key) for key in keys}
            self.unsure = names
            if verb == "write":
                status = self.write(tier, number, keys)
                for key, code in zip(keys, status.tolist(), strict=True):
                    if code in (WriteStatus.STORED, WriteStatus.EXISTS):
                        self.stored.add((number, key))
                        self.gone.discard((number, key))
            elif verb == "remove":
                self.stored -= names
                tier.remove(self.place(number), keys_of(*keys))
                self.gone |= names
            elif verb == "clean":
                self.unsure = set()
                for drive in tier.drives:
                    finish(clean_steps(tier, 0.0, drive))
            elif verb == "flush":
                mine = {name for name in self.stored if name[0] == number}
                self.unsure = mine
                self.stored -= mine
                digest, self.now[number] = self.names.flush(self.now[number])
                finish(tier.flush_steps(0.0, digest, int(self.place(number)) & 0xFFFF_FFFF))
                self.gone |= {(number, key) for key in range(40)}
            else:
                tier.check()
                tier.close()
                tier = self.open()
            if self.system.changes >= self.system.changes_max:
                return
            self.unsure = set()
            assert tier.counters.dropped == tier.counters.evicted == 0

    def write(self, tier: SsdTier, number: int, keys: list[int]) -> U8:
        """In two batches, both of which are on their way before the first one is answered."""
        asked: list[tuple[Steps[U8], list[Any] | U8]] = []
        for part in filter(None, (keys[:3], keys[3:])):
            bodies = [memoryview(body(number, key)) for key in part]
            steps = tier.write_steps(0.0, Batch(self.place(number), keys_of(*part), bodies, np.zeros(len(part), np.uint64), straight=False))
            asked.append((steps, advance(steps)))
        statuses = []
        for steps, at in asked:
            while isinstance(at, list):
                wait(at)
                at = advance(steps)
            statuses.append(at)
        return np.concatenate(statuses)

    def check(self) -> None:
        """The promises."""
        tier = self.open()
        tier.check()
        for number, size in SIZES.items():
            out = np.zeros((40, size), np.uint8)
            listed = tier.find(self.place(number), keys_of(*range(40)))
            status = tier.read(0.0, self.place(number), keys_of(*range(40)), out)
            assert np.array_equal(listed, status == ReadStatus.HIT), "listed, and cannot be read"
            for key in range(40):
                name = (number, key)
                if listed[key]:
                    assert np.array_equal(out[key], body(number, key)), f"{name} has other bytes"
                if name not in self.unsure:
                    assert listed[key] or name not in self.stored, f"{name} was acknowledged and is lost"
                    assert not listed[key] or name not in self.gone, f"{name} was removed and is back"
            status = tier.write(0.0, self.place(number), keys_of(90), body(number, 90)[None])
            assert status.tolist() == [WriteStatus.STORED]
        assert tier.counters.damaged == tier.counters.unreadable == 0
        tier.check()
        tier.close()


def advance(steps: Steps[U8]) -> list[Any] | U8:
    """What it waits for next, or its result."""
    try:
        return next(steps)
    except StopIteration as stop:
        return np.asarray(stop.value)


def changes_of(folder: Path, seed: int) -> int:
    system = Forgetful()
    run = Run(folder, seed, system)
    run.play()
    changes = system.changes
    run.tier.close()
    run.check()
    return changes


@pytest.mark.parametrize(("seed", "keep"), [(1, 1.0), (2, 0.0), (3, 0.5), (4, 0.9)], ids=["kill", "drop all", "drop half", "drop few"])
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])  # every second change, and all of them
def test_every_promise_holds_whatever_change_was_the_last(tmp_path: Path, seed: int, keep: float, step: int) -> None:
    changes = changes_of(tmp_path / "whole", seed)
    assert changes > 40
    for last in range(seed % step, changes, step):
        system = Forgetful(last)
        run = Run(tmp_path / str(last), seed, system)
        try:
            run.play()
        except Exception:  # noqa: BLE001 - the power is gone: whatever comes of it
            assert system.changes > system.changes_max
        if run.tier is not None:
            run.tier.close()
        system.power_cut(random.Random(last), keep=keep)
        run.system = Forgetful()
        try:
            run.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, keep {keep}, after change {last}: {error}") from error
