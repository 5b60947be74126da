"""The segment's file: what is made is found again, what is damaged is refused by name, and one owner a name."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import re
import subprocess
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.field.people import eventually
from umbp.errors import Conflict, OutOfMemory, SegmentError
from umbp.store import locks, memory, segment
from umbp.store.index import BUCKET_SLOTS, ENTRY_WORDS, buckets_for, place_word
from umbp.store.memory import HUGE_BYTES, Mapping, populate
from umbp.store.segment import Geometry, OwnerLock, attach, create, file_stem, leftovers, reclaim

MIB = 1 << 20
GEOMETRY = Geometry(data_bytes=MIB, entries=1000, namespaces=4, sessions=8)
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def make(folder: str, name: str = "a", geometry: Geometry = GEOMETRY) -> str:
    """A finished segment; its path."""
    made = create(folder, name, geometry, boot=5, seed=77)
    made.words[segment.H_STATE] = segment.SERVING
    path = made.path
    made.close()
    return path


# -- geometry ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "geometry",
    [
        GEOMETRY,
        Geometry(1, 1, 1, 1),
        Geometry(4096, 1, 1, 1),
        Geometry(HUGE_BYTES, 4097, 3, 511),
        Geometry(5 * MIB + 4096, 65_536, 256, 1024),
    ],
)
def test_sections_are_aligned_apart_and_within_the_file(geometry: Geometry) -> None:
    sections = geometry.sections()
    assert list(sections) == ["header", "namespaces", "sessions", "buckets", "entries", "data"]
    ends = [offset + size for offset, size in sections.values()]
    assert all(offset % 4096 == 0 for offset, _ in sections.values())
    assert all(end <= start for end, (start, _) in zip(ends, list(sections.values())[1:], strict=False))
    assert sections["data"][0] % HUGE_BYTES == 0
    assert geometry.file_bytes % HUGE_BYTES == 0
    assert 0 <= geometry.file_bytes - ends[-1] < HUGE_BYTES
    assert sections["entries"][1] == geometry.entries * ENTRY_WORDS * 8
    assert buckets_for(geometry.entries) * BUCKET_SLOTS >= 2 * geometry.entries


def test_what_the_owner_writes_a_client_reads(folder: str) -> None:
    made = create(folder, "a", GEOMETRY, boot=5, seed=77)
    assert (made.boot, made.state) == (5, segment.BUILDING)
    found = attach(made.path, owner=False)
    assert found.geometry == GEOMETRY
    assert (found.boot, found.state) == (5, segment.BUILDING)
    assert found.is_at(made.path)
    table, reader = made.writer(), found.reader()
    ids, key = np.array([3]), np.arange(4, dtype=np.uint64).reshape(1, 4)
    table.write_reserved(ids, key, place_word(1, 100), np.array([256]), 1)
    assert table.enter(ids).all()
    table.publish(ids, None)
    made.data.array[256:356] = 7
    hit = reader.find(key, 1, place_word(1, 100))
    assert hit.hit.all()
    assert (found.data.array[256:356] == 7).all()
    made.words[segment.H_BOOT] = 6
    assert found.boot == 6
    made.close()
    found.close()


def test_a_client_cannot_write_the_head(folder: str) -> None:
    found = attach(make(folder), owner=False)
    for part in (found.words, found.buckets, found.entries, found.namespaces, found.sessions):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1
    found.data.array[0] = 1
    found.close()


def test_a_new_segment_replaces_the_file_and_old_mappings_live_on(folder: str) -> None:
    old = attach(make(folder), owner=False)
    path = make(folder, geometry=replace(GEOMETRY, data_bytes=2 * MIB))
    assert not old.is_at(path)
    assert old.data.array[0] == 0
    view = old.data.array[:10]
    old.close()
    assert view.tolist() == [0] * 10
    new = attach(path, owner=True)
    assert new.geometry.data_bytes == 2 * MIB
    new.close()
    os.unlink(path)
    assert not Path(path).exists()


def test_the_file_is_the_owners_alone_and_its_name_holds_nothing_of_the_callers(folder: str) -> None:
    path = make(folder, name="../../etc/passwd\n")
    assert Path(path).parent == Path(folder)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert file_stem("a") != file_stem("b")


# -- damage --------------------------------------------------------------------------------------------------------------------------------


def patch(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def header_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(segment.HEADER_BYTES)


def rewrite_text(path: str, text: bytes) -> None:
    """Another description, with a checksum that fits it."""
    words = np.frombuffer(header_of(path)[: segment.TEXT_AT], np.uint64).copy()
    words[segment.H_TEXT_BYTES], words[segment.H_TEXT_CRC] = len(text), zlib.crc32(text)
    patch(path, 0, words.tobytes() + text)


def assert_refused(path: str, match: str = "") -> None:
    before = len(os.listdir("/proc/self/fd"))
    for owner in (False, True):
        with pytest.raises(SegmentError, match=match or re.escape(path)):
            attach(path, owner=owner)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was leaked"


@pytest.mark.parametrize(
    ("word", "match"),
    [
        (segment.H_MAGIC, "not a UMBP segment"),
        (segment.H_FORMAT, "format"),
        (segment.H_TEXT_BYTES, "checksum"),
        (segment.H_TEXT_CRC, "checksum"),
    ],
)
@pytest.mark.parametrize("value", [0, 3, 1 << 40, (1 << 64) - 1])
def test_a_damaged_word_is_refused(folder: str, word: int, match: str, value: int) -> None:
    path = make(folder)
    patch(path, word * 8, value.to_bytes(8, "little"))
    assert_refused(path, match)


def test_every_byte_of_the_description_is_covered(folder: str) -> None:
    path = make(folder)
    header = header_of(path)
    length = int(np.frombuffer(header[: segment.TEXT_AT], np.uint64)[segment.H_TEXT_BYTES])
    for at in range(segment.TEXT_AT, segment.TEXT_AT + length):
        patch(path, at, bytes([header[at] ^ 0x01]))
        assert_refused(path)
        patch(path, at, header[at : at + 1])
    attach(path, owner=False).close()


@pytest.mark.parametrize("field", ["data_bytes", "entries", "namespaces", "sessions"])
@pytest.mark.parametrize("value", [0, -1, 1 << 62, 1.5, "1000", None, [1]])
def test_a_description_that_lies_is_refused_even_if_its_checksum_fits(folder: str, field: str, value: object) -> None:
    path = make(folder)
    described = json.loads(header_of(path)[segment.TEXT_AT :].rstrip(b"\0"))
    described["geometry"][field] = value
    rewrite_text(path, json.dumps(described).encode())
    assert_refused(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b"{}",
        b'{"geometry": {}, "sections": {}}',
        b'{"geometry": [], "sections": {}}',
        b'{"geometry": {"data_bytes": 1048576, "entries": 1000, "namespaces": 4, "sessions": 8, "more": 1}, "sections": {}}',
        b'{"geometry": {"data_bytes": 1048576, "entries": 1000, "namespaces": 4, "sessions": 8}, "sections": []}',
        b'{"geometry": {"data_bytes": 1048576, "entries": 1000, "namespaces": 4, "sessions": 8}, "sections": {"header": 1}}',
        b"[" * 3000,
    ],
)
def test_a_description_of_another_shape_is_refused(folder: str, text: bytes) -> None:
    path = make(folder)
    rewrite_text(path, text)
    assert_refused(path)


@pytest.mark.parametrize("size", [0, 1, 511, 4095, 4096, MIB, GEOMETRY.file_bytes - 1, GEOMETRY.file_bytes + 4096])
def test_a_file_of_another_size_is_refused(folder: str, size: int) -> None:
    path = make(folder)
    os.truncate(path, size)
    assert_refused(path)


def test_a_newer_format_is_refused_and_says_which(folder: str) -> None:
    path = make(folder)
    patch(path, segment.H_FORMAT * 8, (segment.FORMAT + 1).to_bytes(8, "little"))
    assert_refused(path, f"format {segment.FORMAT + 1}, this version reads {segment.FORMAT}")


def test_what_is_no_file_is_an_error_of_the_system(folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        attach(os.path.join(folder, "none"), owner=False)
    with pytest.raises(IsADirectoryError):
        attach(folder, owner=False)
    link = os.path.join(folder, "link")
    os.symlink(make(folder), link)
    with pytest.raises(OSError, match="symbolic links"):
        attach(link, owner=False)


# -- owners --------------------------------------------------------------------------------------------------------------------------------


def test_a_name_has_one_owner_and_the_refusal_says_who(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LIVING_SECONDS_MAX", 0.03)
    lock = OwnerLock(folder, "a")
    with pytest.raises(Conflict, match=f"a pool named 'a' is alive .process {os.getpid()}"):
        OwnerLock(folder, "a")
    OwnerLock(folder, "b").close()
    lock.close()
    again = OwnerLock(folder, "a")
    again.close(remove=True)
    assert not Path(again.path).exists()
    OwnerLock(folder, "a").close(remove=True)


def hold(folder: str, ready: str) -> None:
    OwnerLock(folder, "a")
    make(folder)
    Path(ready).touch()
    time.sleep(60)


def test_a_killed_owner_leaves_a_leftover_and_a_living_one_none(folder: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    owner = multiprocessing.get_context("fork").Process(target=hold, args=(folder, str(ready)))
    owner.start()
    try:
        eventually(ready.exists, "it owns the name")
        path = Path(folder, file_stem("a") + ".segment")
        assert leftovers(folder) == []
        assert reclaim(path) == 0
        assert path.exists()
    finally:
        owner.kill()
        owner.join()
    assert leftovers(folder) == [path]
    assert reclaim(path) > 0
    assert reclaim(path) == 0
    assert leftovers(folder) == []
    assert sorted(os.listdir(folder)) == ["ready"]


def test_a_lock_whose_owner_died_before_it_had_a_segment_is_a_leftover_too(folder: str) -> None:
    OwnerLock(folder, "a").close()  # as the kernel would, at the end of the process
    assert [path.name for path in leftovers(folder)] == [file_stem("a") + ".segment"]
    reclaim(leftovers(folder)[0])
    assert os.listdir(folder) == []


STARTERS = 4


def compete(folder: str, go: float, answers: multiprocessing.Queue) -> None:
    """Reclaim what is dead, as every starting pool does, then own the name, and say so while owning it: until all others were refused."""
    while time.monotonic() < go:
        pass
    for path in leftovers(folder):
        reclaim(path)
    try:
        lock = OwnerLock(folder, "a")
    except Conflict:
        Path(folder, f"refused-{os.getpid()}").touch()
        answers.put("conflict")
        return
    holder = os.open(os.path.join(folder, "holder"), os.O_CREAT | os.O_EXCL)  # fails if another owns the name too
    make(folder)
    eventually(lambda: len(list(Path(folder).glob("refused-*"))) == STARTERS - 1, "the others were refused")
    os.close(holder)
    os.unlink(os.path.join(folder, "holder"))
    answers.put("owner" if Path(lock.path).exists() else "owner of a lock that is gone")
    lock.close()


@pytest.mark.parametrize("round_number", range(3))
def test_of_pools_that_start_at_once_over_a_leftover_one_wins(folder: str, round_number: int) -> None:
    make(folder)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    starters = [context.Process(target=compete, args=(folder, time.monotonic() + 0.2, answers)) for _ in range(STARTERS)]
    for starter in starters:
        starter.start()
    told = sorted(answers.get(timeout=90) for _ in starters)
    for starter in starters:
        starter.join()
    assert told == ["conflict"] * 3 + ["owner"], round_number


# -- no room -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """A file system of 4 MiB in memory."""
    at = tmp_path / "small"
    at.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(at)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield str(at)
    subprocess.run(["umount", "-l", str(at)], timeout=60, check=True)


def test_too_large_a_segment_is_refused_before_anything_is_made_and_says_what_there_is(small: str) -> None:
    with pytest.raises(OutOfMemory, match=rf"8388608 bytes of pages need a file of \d+ bytes in {small}, which has 4194304 free") as caught:
        create(small, "a", replace(GEOMETRY, data_bytes=8 * MIB), boot=1, seed=1)
    assert "--dram 3MiB" in str(caught.value)
    assert os.listdir(small) == []


def test_memory_that_is_promised_twice_is_an_error_and_no_signal(small: str) -> None:
    """The file system had room when it was asked; by the time the pages are wanted another has it."""
    made = create(small, "a", GEOMETRY, boot=1, seed=1)
    Path(small, "other").write_bytes(bytes(7 * MIB // 2))
    with pytest.raises(OutOfMemory, match="the system gave 0 of 1048576 bytes, then"):
        populate(made.data, write=True, threads=2)
    made.close()


def test_a_file_system_that_filled_up_before_the_header_is_an_error_and_no_signal(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.ftruncate

    def fill_up(fd: int, length: int) -> None:
        real(fd, length)
        with open(os.path.join(small, "other"), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * MIB)

    monkeypatch.setattr(segment.os, "ftruncate", fill_up)
    with pytest.raises(OutOfMemory, match="header"):
        create(small, "a", GEOMETRY, boot=1, seed=1)
    assert os.listdir(small) == ["other"]


def test_a_full_file_system_takes_no_note_of_the_owner_and_still_locks(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = OwnerLock(folder, "a")
    monkeypatch.undo()
    monkeypatch.setattr(locks, "LIVING_SECONDS_MAX", 0.0)
    with pytest.raises(Conflict, match="process unknown"):
        OwnerLock(folder, "a")
    lock.close()


def test_a_segment_keeps_no_descriptor_that_outlives_its_mapping(folder: str) -> None:
    path = make(folder)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        found = attach(path, owner=False)
        assert found.is_at(path)
        assert not found.is_at(path + "x")
        del found
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pages_are_there_after_populate_and_progress_adds_up(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLICE_BYTES", 256 << 10)
    path = make(folder)
    with open(path, "r+b") as file:
        mapping = Mapping(file.fileno(), MIB, GEOMETRY.sections()["data"][0], writable=True)
    mapping.array[:] = 9
    seen: list[int] = []
    populate(mapping, write=True, threads=3, progress=seen.append)
    assert seen == [256 << 10, 512 << 10, 768 << 10, MIB]
    populate(mapping, write=False, threads=1)
    assert (mapping.array == 9).all(), "what was there stays"
    mapping.close()


def test_a_kernel_without_the_advice_touches_the_pages_and_changes_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mapping, "advise", lambda *_: 22)
    found = attach(make(folder), owner=True)
    found.data.array[:] = np.arange(MIB, dtype=np.uint8)
    populate(found.data, write=True, threads=2)
    populate(found.head, write=False, threads=2)
    assert np.array_equal(found.data.array, np.arange(MIB, dtype=np.uint8))
    found.close()


@pytest.mark.parametrize(("text", "expected"), [("always [never] advise", "never"), ("[always]", "always"), ("", "unknown")])
def test_the_kernels_setting_for_huge_pages(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "setting").write_text(text)
    assert memory.shmem_huge_pages(str(tmp_path / "setting")) == expected
    assert memory.shmem_huge_pages(str(tmp_path / "none")) == "unknown"
