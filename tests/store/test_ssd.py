"""The SSD tier: what it keeps over restarts, its limits, its files, and reads of parts."""

from __future__ import annotations

import random
import threading
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from tests.store.disks import MIB, PLACE, SIZE, Fallible, Names, body, held, keys_of, make_tier, put
from umbp.errors import Conflict, SegmentError
from umbp.store import ssd_format
from umbp.store.index import place_word
from umbp.store.ssd_cleaning import clean_steps, wanted
from umbp.store.ssd_folder import OTHER_BYTES
from umbp.store.ssd_records import Batch
from umbp.store.ssd_system import finish
from umbp.store.ssd_upkeep import open_steps
from umbp.types import ReadStatus, WriteStatus

HIT, MISS, STORED = ReadStatus.HIT, ReadStatus.MISS, WriteStatus.STORED


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    assert put(tier, *range(40)) == [STORED] * 40
    tier.remove(PLACE, keys_of(3, 4))
    tier.close()
    again = make_tier(tmp_path)
    again.check()
    assert held(again, *range(40)) == [key for key in range(40) if key not in (3, 4)]
    assert again.counters.found_pages == 38
    again.close()


def test_a_start_after_a_stop_in_order_reads_summaries_and_no_page(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, size=64 * MIB)
    put(tier, *range(300))
    tier.stop(0.0)
    tier.close()
    system = Fallible()
    again = make_tier(tmp_path, size=64 * MIB, system=system)
    assert again.counters.found_pages == 300
    files = len(list(tmp_path.glob("segment-*")))
    assert system.read_bytes < 300 * 200 + files * 6 * ssd_format.BLOCK  # of 19 MiB of pages
    again.close()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    with pytest.raises(Conflict, match="in use by another pool"):
        make_tier(tmp_path)
    tier.close()
    make_tier(tmp_path).close()


def test_a_folder_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_format, "FORMAT", 2)
    tier = make_tier(tmp_path)
    put(tier, 1)
    tier.close()
    monkeypatch.undo()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SegmentError, match="format 2, this version reads 1"):
        make_tier(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_its_files_never_pass_the_limit_and_the_oldest_pages_go(tmp_path: Path) -> None:
    limit = 12 * MIB
    tier = make_tier(tmp_path, size=limit)
    for start in range(0, 800, 20):
        assert put(tier, *range(start, start + 20), now=float(start)) == [STORED] * 20
        assert bytes_in(tmp_path) <= limit
        assert tier.used_bytes <= tier.capacity_bytes <= limit
    tier.check()
    assert held(tier, *range(780, 800)) == list(range(780, 800))
    assert held(tier, *range(20)) == []
    tier.close()
    again = make_tier(tmp_path, size=limit)
    assert bytes_in(tmp_path) <= limit
    assert again.used_bytes <= again.capacity_bytes
    assert put(again, *range(1000, 1100)) == [STORED] * 100
    assert bytes_in(tmp_path) <= limit
    again.check()
    again.close()


def test_a_lower_limit_at_the_next_start_is_kept(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, size=20 * MIB)
    put(tier, *range(200))
    tier.close()
    again = make_tier(tmp_path, size=8 * MIB)
    again.check()
    assert bytes_in(tmp_path) <= 8 * MIB
    assert again.used_bytes <= again.capacity_bytes
    assert set(held(again, *range(200))) < set(range(100, 200))  # the newest are the ones kept
    again.close()


def test_the_number_of_keys_is_a_limit_too(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, entries=32)
    for start in range(0, 100, 10):
        assert put(tier, *range(start, start + 10), now=float(start)) == [STORED] * 10
    assert tier.catalog.count <= 32
    assert held(tier, *range(90, 100)) == list(range(90, 100))
    tier.check()
    tier.close()
    again = make_tier(tmp_path, entries=8)
    assert again.catalog.count == 8
    again.close()


def test_what_is_too_large_for_a_file_is_said_to_be(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, size=16 * MIB, segment_bytes=MIB)
    assert put(tier, 1, place=place_word(2, MIB)) == [WriteStatus.TOO_LARGE]
    for size in (1, 511, 512, 4095, 4096, 4097, SIZE - 1, SIZE + 1, MIB // 2 - 1, MIB // 2, MIB * 9 // 10):
        assert put(tier, size, place=place_word(3, size)) == [STORED], size
        assert held(tier, size, place=place_word(3, size)) == [size]
    tier.close()
    again = make_tier(tmp_path, size=16 * MIB, segment_bytes=MIB)
    assert held(again, 4097, place=place_word(3, 4097)) == [4097]
    again.close()


def test_a_quota_holds_on_this_tier_and_takes_only_its_own(tmp_path: Path) -> None:
    names = Names()
    names.quotas[1] = 4 * SIZE
    other = place_word(2, SIZE)
    tier = make_tier(tmp_path, names=names)
    put(tier, *range(10), place=other)
    for key in range(12):
        assert put(tier, key, now=float(key)) == [STORED]
    assert held(tier, *range(12)) == [8, 9, 10, 11]
    assert held(tier, *range(10), place=other) == list(range(10))
    assert put(tier, *range(20, 30)).count(WriteStatus.OVER_QUOTA) == 6
    under_way = tier.write_steps(
        20.0, Batch(PLACE, keys_of(40, 41), [body(40).data, body(41).data], np.zeros(2, np.uint64), straight=False)
    )
    waiting = next(under_way)
    assert put(tier, 50, 51, 52, now=21.0) == [STORED, STORED, WriteStatus.OVER_QUOTA]  # what is on its way counts
    wait(waiting)
    finish(under_way)
    assert held(tier, *range(20, 60)) == [40, 41, 50, 51]
    tier.check()
    tier.close()


def test_the_cap_of_a_day_is_kept_over_a_restart_and_ends_with_the_day(tmp_path: Path) -> None:
    day, cap = 100 * 86_400.0, 20 * (SIZE + 4096)
    tier = make_tier(tmp_path, day=day, day_bytes_max=cap)
    assert put(tier, *range(30)).count(STORED) == 20
    assert tier.counters.capped == 10
    tier.close()
    again = make_tier(tmp_path, day=day + 3600, day_bytes_max=cap)
    assert SIZE * 20 < again.ledger.today() <= cap
    put(again, *range(40, 50))
    assert again.ledger.today() <= cap
    assert again.counters.capped >= 9
    again.close()
    tomorrow = make_tier(tmp_path, day=day + 86_400, day_bytes_max=cap)
    assert put(tomorrow, *range(50, 60)) == [STORED] * 10
    tomorrow.close()


def test_what_was_written_today_is_each_folders_own_and_counted_once(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    tier = make_tier(*folders)
    for start in range(0, 40, 10):
        put(tier, *range(start, start + 10))
    today = tier.ledger.today()
    assert today > 40 * SIZE
    drive = tier.drives[0]
    assert 0 < drive.written_bytes < today
    tier.ledger.lose(1.0, drive, "unplugged")
    finish(open_steps(tier, 40.0, drive))
    assert tier.ledger.today() == today, "it is back"
    tier.close()
    again = make_tier(*folders)
    assert again.ledger.today() == today
    again.close()


def test_several_folders_share_a_batch_and_each_finds_its_own_again(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    tier = make_tier(*folders, size=64 * MIB, segment_bytes=8 * MIB)
    put(tier, *range(300))
    parts = [sum(file.live_pages for file in drive.folder.files.values()) for drive in tier.drives]
    assert sum(parts) == 300
    assert min(parts) >= 64
    tier.close()
    again = make_tier(*reversed(folders), size=64 * MIB, segment_bytes=8 * MIB)
    assert held(again, *range(300)) == list(range(300))
    again.close()
    one = make_tier(folders[0], size=64 * MIB, segment_bytes=8 * MIB)
    assert len(held(one, *range(300))) == parts[0]
    one.close()


def test_neighbours_are_read_by_one_call(tmp_path: Path) -> None:
    system = Fallible()
    tier = make_tier(tmp_path, size=64 * MIB, segment_bytes=8 * MIB, system=system)
    put(tier, *range(64))
    before = system.calls["read"]
    assert held(tier, *range(64)) == list(range(64))
    assert system.calls["read"] - before <= 2  # 4 MiB in runs of 4 MiB; one record may end in the middle
    tier.close()


@pytest.mark.parametrize("direct", [True, False])
def test_parts_of_pages_are_read_and_verified(tmp_path: Path, direct: bool) -> None:
    system = Fallible()
    system.no_direct = not direct
    size = 300_000  # no multiple of anything
    place = place_word(1, size)
    tier = make_tier(tmp_path, segment_bytes=2 * MIB, size=24 * MIB, system=system)
    put(tier, 1, 2, 3, place=place)
    draw = random.Random(1)
    for _ in range(30):
        start = draw.randrange(size)
        stop = draw.randrange(start + 1, size + 1)
        out = [memoryview(bytearray(stop - start)) for _ in range(3)]
        status = finish(tier.read_part_steps(0.0, place, keys_of(3, 9, 1), start, stop, out))
        assert status.tolist() == [HIT, MISS, HIT]
        assert bytes(out[0]) == body(3, size)[start:stop].tobytes()
        assert bytes(out[2]) == body(1, size)[start:stop].tobytes()
    before = system.read_bytes
    finish(tier.read_part_steps(0.0, place, keys_of(1), 0, 1000, [memoryview(bytearray(1000))]))
    assert system.read_bytes - before <= ssd_format.PIECE_BYTES + 2 * 4096  # a piece and the head, not the page
    tier.close()


def test_a_flush_is_for_good_and_spares_what_comes_after(tmp_path: Path) -> None:
    names = Names()
    tier = make_tier(tmp_path, names=names)
    put(tier, 1, 2)
    put(tier, 1, place=place_word(2, SIZE))
    digest, number = names.flush(1)
    assert finish(tier.flush_steps(0.0, digest, 1)) == 2
    fresh = place_word(number, SIZE)
    assert held(tier, 1, 2, place=fresh) == []
    put(tier, 2, place=fresh)
    tier.check()
    tier.close()
    again = make_tier(tmp_path, names=names)
    assert held(again, 1, 2, place=fresh) == [2]
    assert held(again, 1, place=place_word(2, SIZE)) == [1]
    again.close()


def test_pages_of_a_namespace_that_nobody_knows_are_left_alone(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    put(tier, 1, 2)
    tier.close()
    names = Names()
    names.unknown.add((1).to_bytes(32, "big"))
    other = make_tier(tmp_path, names=names)
    assert other.catalog.count == 0
    other.close()
    again = make_tier(tmp_path)
    assert held(again, 1, 2) == [1, 2]
    again.close()


def test_cleaning_brings_space_back_and_loses_nothing_that_is_wanted(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, size=12 * MIB)
    drive = tier.drives[0]
    put(tier, *range(120))
    kept = [key for key in range(120) if key % 3 == 0]
    tier.remove(PLACE, keys_of(*[key for key in range(120) if key % 3]))
    before = drive.folder.room_files
    portions = 0
    while wanted(tier, float(portions), drive) and portions < 100:
        portions += 1
        finish(clean_steps(tier, float(portions), drive))
        tier.check()
    assert drive.folder.room_files > before
    assert held(tier, *range(120)) == kept
    assert tier.counters.dropped == 0
    tier.close()
    again = make_tier(tmp_path, size=12 * MIB)
    assert held(again, *range(120)) == kept
    again.close()


def test_cleaning_keeps_to_the_cap_of_the_day(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, size=12 * MIB, day_bytes_max=10 * MIB)
    put(tier, *range(120))
    tier.remove(PLACE, keys_of(*range(1, 120, 2)))
    tier.ledger.day_bytes = 10 * MIB
    for portion in range(20):
        finish(clean_steps(tier, float(portion), tier.drives[0]))
    assert tier.counters.cleaned_bytes == 0
    tier.close()


def test_a_reader_keeps_its_file_from_being_used_again(tmp_path: Path) -> None:
    system = Fallible()
    tier = make_tier(tmp_path, size=8 * MIB, system=system)
    put(tier, *range(14))
    end = system.stalls["read"] = threading.Event()
    out = [memoryview(bytearray(SIZE)) for _ in range(14)]
    reading = tier.read_steps(0.0, PLACE, keys_of(*range(14)), out, straight=False)
    waiting = next(reading)  # its files are held from here on
    for start in range(100, 400, 20):  # four times what the folder holds
        put(tier, *range(start, start + 20), now=start / 1000)
    assert not tier.find(PLACE, keys_of(*range(14))).any()
    end.set()
    wait(waiting)
    assert (finish(reading) == HIT).all()
    assert all(bytes(out[key]) == body(key).tobytes() for key in range(14))
    tier.check()
    tier.close()


def test_a_page_removed_while_it_is_written_does_not_come_back(tmp_path: Path) -> None:
    system = Fallible()
    tier = make_tier(tmp_path, system=system)
    batch = np.stack([body(1), body(2)])
    writing = tier.write_steps(0.0, Batch(PLACE, keys_of(1, 2), [row.data for row in batch], np.zeros(2, np.uint64), False))
    written = next(writing)
    removing = tier.remove_steps(0.0, PLACE, keys_of(1))
    waited = next(removing)
    assert not all(future.done() for future in waited)
    wait(written)
    assert finish(writing).tolist() == [WriteStatus.FLUSHED, STORED]
    assert all(future.done() for future in waited)
    tier.check()
    tier.close()
    again = make_tier(tmp_path)
    assert held(again, 1, 2) == [2]
    again.close()


def test_notes_of_removals_do_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.store.ssd_removals.SPARE", 50)
    tier = make_tier(tmp_path, size=8 * MIB)
    for start in range(0, 2000, 20):
        put(tier, *range(start, start + 20), now=float(start))
    finish(tier.remove_steps(0.0, PLACE, keys_of(1)))
    assert (tmp_path / "removed.log").stat().st_size < 16 << 10  # 2,000 notes would be 64 KiB
    tier.close()


def test_nothing_that_a_caller_says_is_part_of_a_path(tmp_path: Path) -> None:
    """Field report: model names with '/' and '..' in paths."""
    inside = tmp_path / "ssd"
    names = Names()
    names.digests[1] = b"../../../etc/passwd\0\xff/absolute..."[:32].ljust(32, b"/")
    tier = make_tier(inside, names=names)
    keys = np.frombuffer(b"../" * 10 + b"\0\xff" + b"/etc/../../..".ljust(32, b"\0"), np.uint8).reshape(-1, 32)
    assert tier.write(0.0, PLACE, keys, np.stack([body(1), body(2)])).tolist() == [STORED] * 2
    tier.close()
    assert {path.name for path in tmp_path.iterdir()} == {"ssd"}
    assert all(path.name in ("owner.lock", "folder.meta", "removed.log") or path.name.startswith("segment-0") for path in inside.iterdir())
    assert sum(path.stat().st_size for path in inside.iterdir() if not path.name.startswith("segment-")) < OTHER_BYTES


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    folder = tmp_path / "ssd"
    folder.mkdir()
    (folder / "segment-00000.umbp").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        make_tier(folder)
    assert outside.read_bytes() == b"mine"
