"""Appends that follow one another: the next one's records are on their way before the first are answered, and nothing is promised early."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.disks import Fallible, keys_of, make_tier
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_cleaning import clean_steps
from umbp.store.ssd_drive import UP
from umbp.store.ssd_reads import takes_direct
from umbp.store.ssd_records import Batch
from umbp.store.ssd_system import Steps, finish
from umbp.types import U8, ReadStatus, WriteStatus

SIZE = 64 << 10  # of a page: up to 14 of them in a file of 1 MiB
PLACE = place_word(1, SIZE)
HIT, MISS = ReadStatus.HIT, ReadStatus.MISS
STORED, UNAVAILABLE = WriteStatus.STORED, WriteStatus.UNAVAILABLE
SECONDS_MAX = 30.0


def bodies(*keys: int) -> U8:
    return np.stack([np.random.default_rng(key).integers(0, 256, SIZE, dtype=np.uint8) for key in keys])


def begin(tier: SsdTier, *keys: int) -> tuple[Steps[U8], list[Any]]:
    """A write that has been asked for, and what it waits for."""
    values = bodies(*keys)
    straight = takes_direct(values.ctypes.data, SIZE)
    steps = tier.write_steps(0.0, Batch(PLACE, keys_of(*keys), [row.data for row in values], np.zeros(len(keys), np.uint64), straight))
    return steps, next(steps)


def get(tier: SsdTier, *keys: int) -> list[int]:
    out = np.zeros((len(keys), SIZE), np.uint8)
    status = tier.read(0.0, PLACE, keys_of(*keys), out)
    for row, body, code in zip(out, bodies(*keys), status.tolist(), strict=True):
        assert code != HIT or np.array_equal(row, body)
    return status.tolist()


class Ordered(Fallible):
    """The first record's write does not return before the second one's has begun, and then fails if ``number`` is an errno."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.began = [threading.Event(), threading.Event()]
        self._records = 0

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        if sum(len(each) for each in buffers) < SIZE:
            return super().write(fd, buffers, offset)
        with self._lock:
            at, self._records = self._records, self._records + 1
        if at < 2:
            self.began[at].set()
        if at == 0:
            assert self.began[1].wait(SECONDS_MAX), "the second record waits for the first one's sync"
            if self.number:
                raise OSError(self.number, os.strerror(self.number))
        return super().write(fd, buffers, offset)


def two_writes(tier: SsdTier, system: Fallible) -> tuple[list[int], list[int]]:
    """What came of two writes that were asked for before the first of them could begin."""
    held = system.stalls["write"] = threading.Event()  # the header of the file
    first, second = begin(tier, 1, 2), begin(tier, 3, 4)
    del system.stalls["write"]
    held.set()
    wait([*first[1], *second[1]], SECONDS_MAX)
    return finish(first[0]).tolist(), finish(second[0]).tolist()


def test_the_next_append_is_on_its_way_before_the_first_is_synced(tmp_path: Path) -> None:
    system = Ordered()
    tier = make_tier(tmp_path, system=system)
    assert two_writes(tier, system) == ([STORED] * 2, [STORED] * 2)
    assert system.began[1].is_set()
    assert get(tier, 1, 2, 3, 4) == [HIT] * 4
    tier.check()
    tier.close()
    again = make_tier(tmp_path)
    assert get(again, 1, 2, 3, 4) == [HIT] * 4
    again.close()


def test_what_flew_behind_records_that_failed_is_written_elsewhere(tmp_path: Path) -> None:
    system = Ordered(errno.EIO)
    tier = make_tier(tmp_path, system=system)
    assert two_writes(tier, system) == ([UNAVAILABLE] * 2, [STORED] * 2)
    assert tier.drives[0].state == UP
    assert get(tier, 1, 2, 3, 4) == [MISS] * 2 + [HIT] * 2
    written = {number: file.live_pages for number, file in tier.catalog.files.items()}
    assert list(written.values()) == [2], "they are listed in the file that was given up"
    tier.check()
    tier.close()
    again = make_tier(tmp_path)
    assert get(again, 1, 2, 3, 4) == [MISS] * 2 + [HIT] * 2
    again.close()


def test_a_sync_that_fails_answers_neither_its_records_nor_those_behind(tmp_path: Path) -> None:
    system = Ordered()
    tier = make_tier(tmp_path, system=system)
    system.fail(errno.EIO, "sync")
    assert two_writes(tier, system) == ([UNAVAILABLE] * 2, [UNAVAILABLE] * 2)
    assert get(tier, 1, 2, 3, 4) == [MISS] * 4
    tier.check()
    tier.close()


@pytest.mark.parametrize("count", [3, 14])
def test_appends_over_the_end_of_a_file_are_all_there_after_a_start(tmp_path: Path, count: int) -> None:
    tier = make_tier(tmp_path, size=32 << 20)
    keys = range(6 * count)
    asked = [begin(tier, *keys[start : start + count]) for start in range(0, len(keys), count)]
    for steps, waiting in asked:
        wait(waiting, SECONDS_MAX)
        assert finish(steps).tolist() == [STORED] * count
    assert get(tier, *keys) == [HIT] * (6 * count)
    tier.check()
    tier.stop(0.0)
    tier.close()
    again = make_tier(tmp_path, size=32 << 20)
    assert get(again, *keys) == [HIT] * (6 * count)
    again.check()
    again.close()


def test_a_file_whose_pages_are_not_listed_yet_is_not_freed(tmp_path: Path) -> None:
    """On disk, sealed since the next write filled another file, and of no live page as far as the index knows."""
    tier = make_tier(tmp_path)
    first = begin(tier, *range(10))
    wait(first[1], SECONDS_MAX)
    assert tier.write(0.0, PLACE, keys_of(*range(20, 30)), bodies(*range(20, 30))).tolist() == [STORED] * 10
    assert finish(clean_steps(tier, 0.0, tier.drives[0])) == 0
    assert finish(first[0]).tolist() == [STORED] * 10
    assert get(tier, *range(10)) == [HIT] * 10
    tier.check()
    tier.close()
    again = make_tier(tmp_path)
    assert get(again, *range(10), *range(20, 30)) == [HIT] * 20
    again.close()


def test_a_file_with_nothing_in_it_is_given_back_beside_a_write(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, size=6 << 20)  # five files
    drive = tier.drives[0]
    for start in range(0, 40, 10):
        assert tier.write(0.0, PLACE, keys_of(*range(start, start + 10)), bodies(*range(start, start + 10))).tolist() == [STORED] * 10
    assert drive.folder.room_files == 1, "the next file to be begun is the spare one"
    assert tier.remove(PLACE, keys_of(*range(10))).all()
    steps, waiting = begin(tier, 50)
    assert len(waiting) == 2
    wait(waiting, SECONDS_MAX)
    assert finish(steps).tolist() == [STORED]
    assert (drive.freed_files, tier.counters.dropped) == (1, 0)
    assert get(tier, 50, *range(10, 40)) == [HIT] * 31
    tier.check()
    tier.close()
