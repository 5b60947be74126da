"""Levels of the SSD tier: where pages are written, what goes down and comes up, and that a page is once, and whole, whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.disks import MIB, PLACE, SIZE, Fallible, Names, body, held, keys_of, make_tier, put
from umbp.store.ssd import SsdTier
from umbp.store.ssd_cleaning import clean_steps, wanted
from umbp.store.ssd_ledger import Ledger
from umbp.store.ssd_moving import move, offload_steps, promote_steps
from umbp.store.ssd_records import Batch
from umbp.store.ssd_system import finish
from umbp.types import ReadStatus, WriteStatus

STORED, HIT = WriteStatus.STORED, ReadStatus.HIT
FITS = 187  # pages on a folder of 16 MiB: 13 files of 1 MiB are for pages, and 0.9 of each
RECORD = 15  # pages that fill a file, so that none of it is lost


def on(tier: SsdTier, level: int, *keys: int) -> list[int]:
    """Which of these keys are on this level."""
    found = tier.catalog.find(PLACE, keys_of(*keys))
    levels = tier.levels.levels_of(tier.catalog, tier.ledger, found.ids[found.hit])
    return [key for key, at in zip(np.array(keys)[found.hit].tolist(), levels.tolist(), strict=True) if at == level]


def chain(folder: Path, **options: Any) -> SsdTier:
    """Two folders, one above the other."""
    return make_tier(folder / "fast", folder / "slow", levels=(0, 1), **options)


def offload(tier: SsdTier, now: float = 0.0) -> int:
    """All that is to go down; portions."""
    for count in range(1000):
        if not finish(offload_steps(tier, now, 0)):
            return count
    raise AssertionError("it never ends")


def clean(tier: SsdTier, now: float) -> None:
    for drive in tier.drives:
        for _ in range(4):
            if wanted(tier, now, drive):
                finish(clean_steps(tier, now, drive))


def promote(tier: SsdTier, *keys: int, now: float = 0.0) -> int:
    bodies = [body(key).data for key in keys]
    return finish(promote_steps(tier, now, Batch(PLACE, keys_of(*keys), bodies, np.zeros(len(keys), np.uint64), straight=False)))


def test_pages_are_written_to_the_first_level_while_it_has_room_and_then_below(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    assert tier.drives[0].folder.record_pages(SIZE) == RECORD
    for first in range(0, 20 * RECORD, RECORD):
        assert put(tier, *range(first, first + RECORD)) == [STORED] * RECORD
    assert on(tier, 0, *range(20 * RECORD)) == list(range(FITS // RECORD * RECORD))
    assert held(tier, *range(20 * RECORD)) == list(range(20 * RECORD))
    assert (tier.counters.evicted, tier.counters.dropped) == (0, 0)
    tier.check()
    tier.close()


def test_what_is_wanted_least_goes_down_from_the_high_mark_to_the_low_one_and_is_as_old_as_before(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    for at in range(10):
        put(tier, *range(at * RECORD, (at + 1) * RECORD), now=at / 10)
    assert offload(tier, 2.0) == 0, "at 0.75 nothing is to go"
    for at in range(10, 12):
        put(tier, *range(at * RECORD, (at + 1) * RECORD), now=at / 10)
    assert held(tier, *range(RECORD), now=2.1) == list(range(RECORD))
    assert offload(tier, 2.2) > 0
    down = on(tier, 1, *range(12 * RECORD))
    assert set(down) <= set(range(RECORD, 5 * RECORD)), "the longest unused ones"
    assert FITS * 0.8 - RECORD < 12 * RECORD - len(down) <= FITS * 0.8
    assert tier.levels.every[0].offloaded_pages == len(down)
    assert offload(tier, 2.3) == 0
    assert held(tier, *down, now=2.4) == down
    tier.check()
    tier.close()


def test_evicted_is_what_is_wanted_least_though_it_was_copied_last(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    tier.levels.high, tier.levels.low = 0.2, 0.1
    for key in range(60):
        put(tier, key, now=key / 100)
    offload(tier, 0.7)
    down = on(tier, 1, *range(60))
    assert len(down) > 35
    tier.evict(0.8, 30 * SIZE)
    assert on(tier, 1, *range(60)) == [key for key in down if key >= 30]
    tier.close()


def test_a_page_is_found_once_after_any_stop_also_where_the_note_on_its_old_place_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = chain(tmp_path)
    tier.levels.high, tier.levels.low = 0.2, 0.1
    put(tier, *range(80))
    with monkeypatch.context() as lost:
        lost.setattr(Ledger, "_note", lambda *_, **__: [])
        offload(tier)
    down = on(tier, 1, *range(80))
    assert down
    tier.close()
    again = chain(tmp_path)
    again.check()
    assert on(again, 1, *range(80)) == down
    assert held(again, *range(80)) == list(range(80))
    assert again.remove(PLACE, keys_of(*range(80))).all()
    again.close()
    last = chain(tmp_path)
    assert held(last, *range(80)) == [], "no copy comes back"
    last.close()


def test_of_two_that_move_a_page_at_a_time_the_later_copy_stays_whoever_ends_first(tmp_path: Path) -> None:
    for order in ((0, 1), (1, 0)):
        folder = tmp_path / str(order[0])
        tier = chain(folder)
        put(tier, *range(10))
        ids = tier.catalog.find(PLACE, keys_of(*range(10))).ids
        where, bodies = tier.catalog.where_ids(ids), [body(key).data for key in range(10)]
        every = np.arange(10)
        movers = [move(tier, 0.0, drive, PLACE, where, every, bodies, straight=False, spare=1) for drive in tier.drives]
        for mover in movers:  # both have written before either has listed
            next(mover)[0].result(60.0)
        moved = [finish(movers[which]).pages for which in order]
        assert moved == ([10, 10] if order == (0, 1) else [10, 0])
        assert on(tier, 1, *range(10)) == list(range(10))
        tier.check()
        tier.close()
        again = chain(folder)
        assert held(again, *range(10)) == list(range(10))
        again.close()


def test_levels_may_change_places_between_two_starts(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    put(tier, *range(40))
    tier.close()
    other = make_tier(tmp_path / "fast", tmp_path / "slow", levels=(1, 0))
    assert on(other, 1, *range(40)) == list(range(40))
    put(other, 40)
    assert on(other, 0, 40) == [40]
    assert held(other, *range(41)) == list(range(41))
    other.close()


def test_what_is_read_from_below_comes_up_while_there_is_room(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    for at in range(12):
        put(tier, *range(at * RECORD, (at + 1) * RECORD))
    put(tier, *range(300, 320))
    assert on(tier, 1, *range(300, 320)) == list(range(300, 320))
    assert promote(tier, *range(300, 310)) == 0, "the first level is full"
    tier.remove(PLACE, keys_of(*range(3 * RECORD)))
    assert promote(tier, 999, 300, 300, *range(301, 310), 50) == 10
    assert on(tier, 0, *range(300, 320)) == list(range(300, 310))
    there = [*range(3 * RECORD, 12 * RECORD), *range(300, 320)]
    assert held(tier, *there) == there
    assert tier.levels.every[1].promoted_pages == 10
    tier.check()
    tier.close()


def test_where_all_levels_are_full_the_least_wanted_go_and_nothing_is_refused(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    for first in range(0, 800, 20):
        now = first / 1000  # notes are on their way for as long as a busy machine takes: in these seconds no disk seems to hang
        assert put(tier, *range(first, first + 20), now=now) == [STORED] * 20
        offload(tier, now)
        clean(tier, now)
        assert tier.used_bytes <= tier.capacity_bytes
    assert tier.counters.evicted > 300
    there = held(tier, *range(800), now=0.9)
    assert there[-20:] == list(range(780, 800))
    assert sum(there) / len(there) > 550, "what is left are the last ones"
    assert len(on(tier, 0, *range(800))) > 0.7 * FITS
    tier.check()
    tier.close()


@pytest.mark.parametrize("gone", ["removed", "flushed"])
def test_a_page_that_goes_while_it_is_moved_does_not_come_back(tmp_path: Path, gone: str) -> None:
    names = Names()
    tier = chain(tmp_path, names=names)
    tier.levels.high, tier.levels.low = 0.1, 0.01
    put(tier, *range(30))
    steps = offload_steps(tier, 0.0, 0)
    for future in next(steps):  # they have been read, and are about to be written
        future.result(60.0)
    if gone == "removed":
        assert tier.remove(PLACE, keys_of(*range(30))).all()
    else:
        digest, _ = names.flush(1)
        finish(tier.flush_steps(0.0, digest, 1))
    finish(steps)
    assert not tier.find(PLACE, keys_of(*range(30))).any()
    tier.check()
    tier.close()
    again = chain(tmp_path, names=names)
    assert again.counters.found_pages == 0
    again.close()


def test_two_disks_of_a_level_share_by_size_times_weight(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "a", tmp_path / "b", tmp_path / "slow", levels=(0, 0, 1), weights=(3.0, 1.0, 1.0))
    for key in range(160):
        put(tier, key)
    sizes = [sum(file.live_pages for file in drive.folder.files.values()) for drive in tier.drives]
    assert sizes == [120, 40, 0]
    tier.close()


def test_a_level_whose_disk_is_away_is_left_out_and_nothing_goes_down_to_it(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    tier.levels.high, tier.levels.low = 0.2, 0.1
    put(tier, *range(80))
    tier.ledger.lose(0.0, tier.drives[1], "pulled")
    assert offload(tier) == 0
    assert held(tier, *range(80)) == list(range(80))
    tier.ledger.lose(0.0, tier.drives[0], "pulled")
    assert put(tier, 100) == [WriteStatus.UNAVAILABLE]
    tier.close()


def test_a_level_that_cannot_be_written_hands_on_to_the_next(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    tier.drives[0].failed_write(0.0, OSError(5, "Input/output error"))
    assert put(tier, *range(5)) == [STORED] * 5
    assert on(tier, 1, *range(5)) == list(range(5))
    tier.close()


def test_a_page_that_cannot_be_read_on_its_way_down_costs_itself(tmp_path: Path) -> None:
    tier = chain(tmp_path, system=Fallible())
    tier.levels.high, tier.levels.low = 0.1, 0.01
    put(tier, *range(30))
    where = tier.catalog.where(PLACE, tier.catalog.find(PLACE, keys_of(0)), np.zeros(1, np.int64))
    file = tier.catalog.files[int(where.pages.files[0])]
    path = next(path for path in (tmp_path / "fast").glob("segment-*") if path.name == f"segment-{file.slot:05}.umbp")
    with open(path, "r+b") as damaged:
        damaged.seek(int(where.pages.block[0]) * 4096)
        damaged.write(b"\xff" * 64)
    offload(tier)
    assert held(tier, *range(30)) == list(range(1, 30))
    assert tier.counters.damaged == 1
    tier.check()
    tier.close()


def test_a_cap_of_the_day_holds_for_what_moves_too(tmp_path: Path) -> None:
    tier = chain(tmp_path, day_bytes_max=4 * MIB)
    tier.levels.high, tier.levels.low = 0.1, 0.01
    put(tier, *range(40))
    assert offload(tier) <= 1
    assert promote(tier, *range(40)) <= 20
    assert tier.ledger.today() <= 4 * MIB
    tier.close()


def test_a_burst_for_which_a_disk_has_no_file_goes_below_and_drops_nothing(tmp_path: Path) -> None:
    tier = chain(tmp_path)
    put(tier, *range(180))
    for first in range(0, 180, 3):  # a third of every file is dead: room in bytes, and no file to begin
        tier.remove(PLACE, keys_of(first))
    kept = [key for key in range(180) if key % 3]
    put(tier, *range(200, 255))
    assert tier.levels.every[0].spilled_pages > 0
    assert offload(tier) > 0, "and what is there goes down until there is a file again"
    assert held(tier, *kept, *range(200, 255)) == [*kept, *range(200, 255)]
    assert (tier.counters.dropped, tier.counters.evicted) == (0, 0)
    tier.check()
    tier.close()
