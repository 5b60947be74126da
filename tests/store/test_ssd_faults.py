"""Disks that are full, fail, hang, vanish or lack something: the tier says so, serves what it can, and comes back by itself."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from tests.store.disks import MIB, PLACE, SIZE, Fallible, Names, get, keys_of, make_tier, put
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_drive import AWAY, READING, RETRY_SECONDS_MAX, STALL_SECONDS, UP, Drive
from umbp.store.ssd_system import finish
from umbp.store.ssd_upkeep import watch_steps
from umbp.types import ReadStatus, WriteStatus

HIT, MISS, FAILED, BUSY = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.FAILED, ReadStatus.BUSY
STORED, UNAVAILABLE = WriteStatus.STORED, WriteStatus.UNAVAILABLE


def watch(tier: SsdTier, now: float) -> None:
    """Look after all disks, once all that was asked of them before has come back."""
    settle(*tier.drives, now=now)
    for drive in tier.drives:
        finish(watch_steps(tier, now, drive))


def settle(*drives: Drive, now: float) -> None:
    """Wait until nothing of these is out any more, but for what hangs."""
    for drive in drives:
        wait(drive.out(), 0.2 if getattr(drive.system, "stalls", None) else 30.0)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=lambda number: errno.errorcode[number])
def test_a_disk_that_cannot_be_written_is_read_and_tried_again(tmp_path: Path, fault: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "umbp.store.ssd")
    system = Fallible()
    tier = make_tier(tmp_path, system=system)
    drive = tier.drives[0]
    assert put(tier, 1, 2) == [STORED] * 2
    system.fail(fault, "write", "sync", "create", "allocate")
    assert put(tier, 3, now=1.0) == [UNAVAILABLE]
    assert drive.state == READING
    assert os.strerror(fault) in drive.fault
    assert get(tier, 1, 2, 3, now=1.0) == [HIT, HIT, MISS]
    writes = system.calls["write"]
    assert put(tier, 4, now=1.1) == [UNAVAILABLE]
    assert system.calls["write"] == writes, "it was asked again at once"
    assert put(tier, 5, now=10.0) == [UNAVAILABLE]
    system.heal()
    assert put(tier, 3, 4, now=100.0) == [STORED] * 2
    assert (drive.state, drive.fault) == (UP, "")
    assert get(tier, 1, 2, 3, 4, now=100.0) == [HIT] * 4
    said = [line for line in caplog.messages if "written" in line]
    assert said == [f"{tmp_path}: cannot be written: {os.strerror(fault)}; read only, and tried again", f"{tmp_path}: can be written again"]
    tier.check()
    tier.close()
    again = make_tier(tmp_path)
    assert get(again, 1, 2, 3, 4, 5) == [HIT] * 4 + [MISS]
    again.close()


def test_a_sync_that_fails_acknowledges_nothing(tmp_path: Path) -> None:
    system = Fallible()
    tier = make_tier(tmp_path, system=system)
    system.fail(errno.EIO, "sync")
    assert put(tier, 1) == [UNAVAILABLE]
    assert not tier.find(PLACE, keys_of(1)).any()
    tier.close()


def test_the_other_disk_takes_the_writes(tmp_path: Path) -> None:
    system = Fallible()
    tier = make_tier(tmp_path / "a", tmp_path / "b", system=system)
    tier.drives[0].failed_write(0.0, OSError(errno.EIO, "broken"))
    assert put(tier, *range(20), now=0.1) == [STORED] * 20
    assert not any(file.live_pages for file in tier.drives[0].folder.files.values())
    tier.close()


def test_pages_that_cannot_be_read_cost_themselves(tmp_path: Path) -> None:
    """Field report: a failed load was reported as a hit, with the bytes of the request before."""
    bad = set[int]()

    class Sectors(Fallible):
        def read(self, fd: int, buffers: object, offset: int) -> int:
            size = sum(len(each) for each in buffers)  # type: ignore[attr-defined]
            if any(offset <= sector < offset + size for sector in bad):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(fd, buffers, offset)

    tier = make_tier(tmp_path, system=Sectors(), segment_bytes=2 * MIB)
    put(tier, *range(10))
    first = int(tier.catalog.where_ids(tier.catalog.ids_of_number(1)).pages.block.min()) * 4096
    bad |= {first + key * SIZE + 100 for key in (2, 5, 7)}
    assert get(tier, *range(10)) == [FAILED if key in (2, 5, 7) else HIT for key in range(10)]
    assert get(tier, *range(10)) == [MISS if key in (2, 5, 7) else HIT for key in range(10)]
    assert (tier.counters.unreadable, tier.drives[0].state) == (3, UP)
    assert put(tier, 2, 5, 7) == [STORED] * 3
    assert get(tier, *range(10)) == [HIT] * 10
    tier.check()
    tier.close()


def test_a_disk_that_fails_every_read_is_given_up_and_opened_again(tmp_path: Path) -> None:
    system = Fallible()
    tier = make_tier(tmp_path, system=system)
    put(tier, *range(40))
    system.fail(errno.EIO, "read")
    assert HIT not in get(tier, *range(40))
    assert tier.drives[0].state == AWAY
    assert (tier.catalog.count, tier.used_bytes, tier.capacity_bytes) == (0, 0, 0)
    assert put(tier, 50, now=0.1) == [UNAVAILABLE]
    watch(tier, 0.2)
    assert tier.drives[0].state == AWAY
    system.heal()
    watch(tier, 60.0)
    assert tier.drives[0].state == UP
    tier.check()
    assert get(tier, 50, now=60.0) == [MISS]
    assert put(tier, 50, now=60.0) == [STORED]
    tier.close()


def test_a_disk_that_hangs_holds_nobody_else(tmp_path: Path) -> None:
    system, fine = Fallible(), Fallible()
    tier = make_tier(tmp_path / "a", tmp_path / "b", system=system)
    tier.drives[1].system = tier.drives[1].folder.system = tier.drives[1].crew.system = fine
    put(tier, *range(128))
    end = threading.Event()
    system.stalls["read"] = end
    out = [memoryview(bytearray(SIZE)) for _ in range(128)]
    reading = tier.read_steps(0.0, PLACE, keys_of(*range(128)), out, straight=False)
    waiting = next(reading)
    late = STALL_SECONDS + 1
    assert tier.drives[0].stalled(late)
    settle(tier.drives[1], now=late)
    status = get(tier, *range(128), now=late)
    assert status.count(HIT) == sum(file.live_pages for file in tier.drives[1].folder.files.values()) > 0
    assert status.count(BUSY) == 128 - status.count(HIT) > 0
    assert put(tier, *range(200, 210), now=late) == [STORED] * 10  # on the other one
    watch(tier, late)
    end.set()
    wait(waiting)
    assert (finish(reading) == HIT).all()
    assert not tier.drives[0].stalled(late)
    assert get(tier, *range(128), now=late) == [HIT] * 128
    tier.check()
    tier.close()


def test_a_folder_that_is_removed_is_noticed_and_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    tier = make_tier(folder)
    put(tier, 1, 2)
    shutil.rmtree(folder)
    watch(tier, 1.0)
    assert tier.drives[0].state == AWAY
    assert "gone" in tier.drives[0].fault
    assert get(tier, 1, 2, now=1.0) == [MISS] * 2
    watch(tier, 10.0)
    assert tier.drives[0].state == UP
    assert put(tier, 1, 2, now=10.0) == [STORED] * 2
    tier.check()
    tier.close()
    again = make_tier(folder)
    assert get(again, 1, 2) == [HIT] * 2
    again.close()


def test_another_folder_in_its_place_is_opened_as_it_is(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "a", names=Names())
    put(tier, 1)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    watch(tier, 1.0)
    watch(tier, 10.0)
    assert get(tier, 1, now=10.0) == [MISS]
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    watch(tier, 11.0)
    watch(tier, 11.0 + RETRY_SECONDS_MAX)
    assert get(tier, 1, now=50.0) == [HIT]
    tier.check()
    tier.close()


def test_a_disk_that_is_not_there_at_start_does_not_keep_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    system = Fallible()
    system.fail(errno.EIO, "identity")
    tier = make_tier(tmp_path, system=system, strict=False)
    assert tier.drives[0].state == AWAY
    watch(tier, 4.0)
    assert [str(tmp_path) in line and "until it is back" in line for line in caplog.messages] == [True], "said, once"
    assert put(tier, 1) == [UNAVAILABLE]
    system.heal()
    watch(tier, 40.0)
    assert put(tier, 1, now=40.0) == [STORED]
    tier.close()


def test_a_flush_while_a_disk_is_away_counts_when_it_is_back(tmp_path: Path) -> None:
    names, folder = Names(), tmp_path / "a"
    tier = make_tier(folder, tmp_path / "b", names=names)
    put(tier, *range(128))
    tier.ledger.lose(0.0, tier.drives[0], "pulled")
    digest, number = names.flush(1)
    finish(tier.flush_steps(0.0, digest, 1))
    watch(tier, 60.0)
    assert tier.drives[0].state == UP
    assert tier.catalog.count == 0
    tier.close()
    again = make_tier(folder, names=names)  # alone: it must know by itself now
    assert not again.find(place_word(number, SIZE), keys_of(*range(128))).any()
    again.close()


@pytest.mark.parametrize("lacking", ["direct", "allocate", "both"])
def test_a_file_system_without_direct_io_or_fallocate_works_and_it_is_said_once(tmp_path: Path, lacking: str) -> None:
    system = Fallible()
    system.no_direct, system.no_allocate = lacking != "allocate", lacking != "direct"
    tier = make_tier(tmp_path, system=system)
    assert put(tier, *range(40)) == [STORED] * 40
    assert get(tier, *range(40)) == [HIT] * 40
    said = tier.drives[0].folder.said
    assert len(said) == (2 if lacking == "both" else 1)
    assert sum("direct" in line for line in said) == (lacking != "allocate")
    tier.close()
    again = make_tier(tmp_path, system=system)
    assert get(again, *range(40)) == [HIT] * 40
    again.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_limit_within_the_file_system_is_never_passed(small_disk: Path) -> None:
    tier = make_tier(small_disk / "ssd", size=16 * MIB)
    for start in range(0, 1600, 40):
        assert put(tier, *range(start, start + 40), now=float(start)) == [STORED] * 40
        assert sum(path.stat().st_blocks * 512 for path in (small_disk / "ssd").iterdir()) <= 16 * MIB
    tier.check()
    tier.close()


def test_a_full_file_system_costs_room_and_nothing_else(small_disk: Path) -> None:
    """Field report: files grew until the file system was full; writes failed in odd places and half-written files stayed."""
    tier = make_tier(small_disk / "ssd", size=64 * MIB)
    for start in range(0, 1600, 40):
        put(tier, *range(start, start + 40), now=float(start))
        tier.check()
    assert len(tier.drives[0].folder.files) < 24
    assert tier.drives[0].folder.cramped
    assert get(tier, *range(1560, 1600)) == [HIT] * 40  # it goes on within the files that it could have
    others = [path.name for path in (small_disk / "ssd").iterdir() if path.suffix == ".tmp"]
    assert others == []
    tier.close()


def test_a_disk_that_others_have_filled_is_used_once_there_is_room(small_disk: Path) -> None:
    filler = small_disk / "others"
    with filler.open("wb") as file:
        file.write(bytes(23 * MIB + 900_000))
    tier = make_tier(small_disk / "ssd", size=64 * MIB, strict=False)
    assert put(tier, 1) == [UNAVAILABLE]
    assert tier.drives[0].write_errors + (tier.drives[0].state == AWAY) > 0
    filler.unlink()
    watch(tier, 100.0)
    assert put(tier, 1, now=100.0) == [STORED]
    assert get(tier, 1, now=100.0) == [HIT]
    tier.close()


def descriptors() -> list[str]:
    """What this process has open."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was of the listing, or of another thread
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_an_empty_mount_point_is_not_taken_for_the_disk(small_disk: Path) -> None:
    others = set(descriptors())  # of tests before, such as those of a disk that hangs
    tier = make_tier(small_disk, size=16 * MIB)
    put(tier, 1)
    subprocess.run(["umount", "-l", str(small_disk)], check=True)
    try:
        watch(tier, 1.0)
        assert tier.drives[0].state == AWAY
        watch(tier, 100.0)
        assert tier.drives[0].state == AWAY
        assert "not mounted" in tier.drives[0].fault
        held = set(descriptors()) - others
        assert not [link for link in held if "segment-" in link or "owner.lock" in link], "nobody can check it or mount it again"
        assert list(small_disk.iterdir()) == []
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small_disk)], check=True)
    tier.close()
