"""Pages on SSD that a client reads from the files by itself: right bytes or none, whatever happens to it, the pool, the disk, the pages."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, all_leased, eventually, keys_of, open_namespace, read_back, values_of
from tests.pools import PoolProcess
from tests.store.disks import Fallible
from umbp import wire
from umbp.client import straight
from umbp.client.handover import Handover
from umbp.store.file_refs import FileRefs
from umbp.store.ssd_reads import GOOD
from umbp.types import I64, NOWHERE, U8, ReadStatus, Tier, WriteStatus

SIZE = 64 << 10
COUNT = 120  # pages on SSD, in several files
HIT, MISS, BUSY, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.BUSY, ReadStatus.FAILED
KEYS = keys_of(*range(COUNT))


@contextlib.contextmanager
def served(folder: Path, *options: str, size: str = "512MiB") -> Iterator[PoolProcess]:
    fixed = ("--ssd", f"{folder}:{size}", "--ssd-admission", "always", "--watermark-high", "1")
    with PoolProcess(*fixed, *options, dram="16MiB") as made:
        yield made
        assert "Traceback" not in made.log(), made.log()


def store(pool: PoolProcess, size: int = SIZE) -> None:
    """Have pages 0 to COUNT on its SSD: put again where the disk had no file free, as others were still being let go of."""
    with umbp.connect(pool.socket) as client:
        space = open_namespace(client, size)
        look = space.operations.look(KEYS)

        def written() -> bool:
            found, there = client.status(), bool(space.operations.on_ssd(look, KEYS).all())
            if not (there or found["ssd"]["waiting"] or found["leased_bytes"]):
                space.remove(KEYS)
                assert space.put(KEYS, values_of(range(COUNT), size)).all(WriteStatus.STORED)
            return there and not found["leased_bytes"]

        eventually(written, "they are on SSD, and not held any more to be written")


def without_dram(pool: PoolProcess, *options: str) -> None:
    """Start it anew, as after a reboot."""
    pool.kill()
    pool.segment.unlink()
    pool.restart(*options)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def one(disk: Path) -> Iterator[PoolProcess]:
    with served(disk) as made:
        yield made


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    """With a disk of few files, which are soon used again."""
    with served(tmp_path_factory.mktemp("few"), size="24MiB") as made:
        yield made


@pytest.fixture
def server(one: PoolProcess) -> PoolProcess:
    """Whatever was done to it before."""
    with umbp.connect(one.socket) as client:
        eventually(lambda: client.status()["ssd"]["disks"][0]["state"] == "up", "its disk is back")
    store(one)
    return one


@pytest.fixture
def full(server: PoolProcess) -> Iterator[PoolProcess]:
    """There is no room in its DRAM. What that takes is written to its disk too, which is large enough to keep all of it."""
    with umbp.connect(server.socket) as holder, all_leased(holder, SIZE):
        yield server


def nothing_is_held(client: umbp.Pool) -> None:
    eventually(lambda: client.status()["ssd"]["held_files"] == 0, "no file is held any more")


def read(client: umbp.Pool, space: Any, reader: straight.Reader, seconds: float = 30.0) -> U8:
    """The codes of a straight read of all pages by this reader."""
    codes = np.full(COUNT, MISS.value, np.uint8)
    client.run(straight.read(space.operations, KEYS, codes, np.arange(COUNT), reader, time.monotonic() + seconds))
    return codes


def reading_after(does: Callable[[], object], found: list[U8]) -> straight.Reader:
    """A reader that does something between the answer and its reads, and keeps the codes of these; what is good has the right bytes."""

    def reader(refs: FileRefs, which: I64) -> U8:
        does()
        out = [np.zeros(SIZE, np.uint8) for _ in which]
        late = FileRefs(refs.pages, refs.back, refs.fds, refs.direct, refs.numbers, time.monotonic() + 30.0)  # slower than it may be
        codes = straight.read_refs(late, out)
        for at in np.flatnonzero(codes == GOOD).tolist():
            assert np.array_equal(out[at], values_of([int(which[at])], SIZE)[0]), "another page's bytes"
        found.append(codes)
        return codes

    return reader


# -- where it is used ----------------------------------------------------------------------------------------------------------------


def test_a_get_reads_from_the_files_what_dram_has_no_room_for(full: PoolProcess) -> None:
    with umbp.connect(full.socket) as client:
        space = open_namespace(client, SIZE)
        before = client.status()["ssd"]["client_keys"]
        for number, out in enumerate((np.empty((COUNT, SIZE), np.uint8), space.empty(COUNT), [bytearray(SIZE) for _ in range(COUNT)]), 1):
            assert space.get(KEYS, out, deadline=30.0).all(HIT)
            assert (np.stack([np.frombuffer(row, np.uint8) for row in out]) == values_of(range(COUNT), SIZE)).all()
            assert client.statistics().read_straight == number * COUNT
        assert (space.locate(KEYS) == Tier.SSD).all()
        assert client.status()["ssd"]["client_keys"] == before + 3 * COUNT
        nothing_is_held(client)


def test_an_asyncio_client_does_so_too(full: PoolProcess) -> None:
    async def main() -> None:
        async with await umbp.connect_async(full.socket) as client:
            space = await client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE))
            out = space.empty(COUNT)
            parts = [space.get(KEYS[at : at + 40], out[at : at + 40], deadline=30.0) for at in range(0, COUNT, 40)]
            assert all(statuses.all(HIT) for statuses in await asyncio.gather(*parts))
            assert (out == values_of(range(COUNT), SIZE)).all()
            assert client.statistics().read_straight == COUNT

    asyncio.run(main())


def test_where_there_is_room_again_pages_are_promoted(server: PoolProcess) -> None:
    with umbp.connect(server.socket) as client:
        space = open_namespace(client, SIZE)
        with all_leased(client, SIZE):
            assert (space.locate(KEYS) == Tier.SSD).all()
        assert read_back(space, range(COUNT), 30.0).all(HIT)
        assert client.statistics().read_straight == 0
        assert (space.locate(KEYS) == Tier.DRAM).all()


def test_the_policy_of_keeping_and_the_operator_say_when(tmp_path: Path) -> None:
    """With pages of a size that direct I/O does not take as it is."""
    size = 50_000
    with served(tmp_path / "ssd") as pool:
        store(pool, size)
        for options, tier, straight_pages in (
            (("--fetch", "pass_through"), Tier.SSD, COUNT),
            (("--fetch", "copy", "--ssd-files", "off"), Tier.DRAM, 0),
        ):
            without_dram(pool, *options)
            with umbp.connect(pool.socket) as client:
                space = open_namespace(client, size)
                assert read_back(space, range(COUNT), 30.0).all(HIT)
                assert client.statistics().read_straight == straight_pages
                assert (space.locate(KEYS) == tier).all()
        with umbp.connect(pool.socket) as client:
            bond = client._link.bond_or_none()
            assert bond is not None
            row = open_namespace(client, size).operations.opened.row
            reply, _ = client.call(bond.call(wire.ReadFiles(row, 1, 1, 1.0), KEYS[:1], np.empty(0, np.uint64)))
            assert reply.m == 0


class Relay:
    """What passes a Unix socket's bytes on, and no descriptors: as between a container and its host."""

    def __init__(self, path: str, to: str) -> None:
        self._to, self._ends = to, list[socket.socket]()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, there = self._listening.accept()[0], socket.socket(socket.AF_UNIX)
                there.connect(self._to)
                self._ends += [here, there]
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_client_that_gets_no_descriptors_has_its_pages_all_the_same(full: PoolProcess, tmp_path: Path) -> None:
    path = str(full.folder / "relay.sock")
    with contextlib.closing(Relay(path, full.socket)), umbp.connect(path) as client:
        space = open_namespace(client, SIZE)
        for _ in range(2):
            assert read_back(space, range(COUNT), 30.0).all(HIT)
        assert client.statistics().read_straight == 0
        nothing_is_held(client)


# -- what may happen to pages meanwhile ----------------------------------------------------------------------------------------------


def test_pages_removed_meanwhile_do_not_count(server: PoolProcess) -> None:
    found: list[U8] = []
    with umbp.connect(server.socket) as client, umbp.connect(server.socket) as other:
        space, theirs = open_namespace(client, SIZE), open_namespace(other, SIZE)
        codes = read(client, space, reading_after(lambda: theirs.remove(KEYS[:5]), found))
        assert codes.tolist() == [MISS] * 5 + [HIT] * (COUNT - 5)
        codes = read(client, space, reading_after(theirs.flush, found))
        assert codes.tolist() == [MISS] * COUNT
        assert (found[0] == GOOD).all(), "their file was still there"
        nothing_is_held(client)


def slow(child: Child, path: str, stops: bool, seconds: float) -> None:
    """Reads when it is told to, or goes on; says what was good, and what counted."""
    found: list[U8] = []

    def meanwhile() -> None:
        child.say("referred")
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            assert child.hear() == "read"

    with umbp.connect(path) as client:
        codes = read(client, open_namespace(client, SIZE), reading_after(meanwhile, found), seconds)
        child.say([len(found[0]), int(np.count_nonzero(found[0] == GOOD)), int(np.count_nonzero(codes == HIT))])


def overwrite(client: umbp.Pool) -> None:
    """Nothing of before is left, and twice as many bytes as the disk holds are written."""
    open_namespace(client, SIZE).flush()
    other = open_namespace(client, SIZE, tenant="other")
    for start in range(0, 768, 64):
        other.put(keys_of(*range(start, start + 64)), values_of(range(start, start + 64), SIZE))
        eventually(lambda: client.status()["ssd"]["waiting"] == 0, "they are written")


@pytest.mark.parametrize("stops", [False, True], ids=["slow", "stopped"])
def test_who_reads_after_its_hold_is_over_gets_nothing(few: PoolProcess, stops: bool) -> None:
    store(few)
    with Child(slow, few.socket, stops, 0.5) as child, umbp.connect(few.socket) as client:
        assert child.hear() == "referred"
        nothing_is_held(client)  # its time is over
        overwrite(client)
        child.say("read")
        child.signal(signal.SIGCONT)
        referred, good, counted = child.hear()
        assert counted == 0
        assert good < referred // 2, "files that nobody held were not used again"


def test_a_file_that_is_held_is_not_used_again(few: PoolProcess) -> None:
    store(few)
    with Child(slow, few.socket, False, 3600.0) as child, umbp.connect(few.socket) as client:
        assert child.hear() == "referred"
        overwrite(client)
        held = client.status()["ssd"]["held_files"]
        child.say("read")
        referred, good, counted = child.hear()
        assert counted == 0, "they were flushed"
        if held:  # else this machine took longer for it than a hold lasts
            assert good == referred
        assert client.status()["ssd"]["held_files"] in (0, held)


def test_a_client_that_is_killed_holds_nothing_any_more(server: PoolProcess) -> None:
    with Child(slow, server.socket, False, 3600.0) as child, umbp.connect(server.socket) as client:
        assert child.hear() == "referred"
        child.kill()
        nothing_is_held(client)


def test_a_pool_that_dies_in_the_middle_is_busy(server: PoolProcess) -> None:
    found: list[U8] = []
    with umbp.connect(server.socket) as client:
        space = open_namespace(client, SIZE)
        assert not (read(client, space, reading_after(server.kill, found)) == HIT).any()
        assert (found[0] == GOOD).all()
        assert not read_back(space, range(COUNT), 1.0).where(HIT).any()
        server.start()
        eventually(lambda: client.connected, "it is back")
        assert (read(client, space, reading_after(lambda: None, found)) == HIT).all()


# -- what may happen to the disk -----------------------------------------------------------------------------------------------------


def bodies(client: umbp.Pool) -> list[tuple[str, int]]:
    """The file that holds each page, and where in it."""
    found: list[tuple[str, int]] = []

    def reader(refs: FileRefs, which: I64) -> U8:
        paths = [os.readlink(f"/proc/self/fd/{fd}") for fd in refs.fds]
        found.extend((paths[file], block * 4096) for file, block in zip(refs.pages.files.tolist(), refs.pages.block.tolist(), strict=True))
        return np.zeros(len(which), np.uint8)

    read(client, open_namespace(client, SIZE), reader)
    return found


def test_a_page_that_is_damaged_fails_and_is_listed_no_more(server: PoolProcess) -> None:
    with umbp.connect(server.socket) as client:
        path, at = bodies(client)[7]
    with open(path, "r+b") as file:
        file.seek(at + 30_000)
        file.write(b"\xff\x00\xff")
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as client, all_leased(holder, SIZE):
        space, before = open_namespace(client, SIZE), client.status()["ssd"]["damaged_keys"]
        codes = read_back(space, range(COUNT), 30.0).codes
        assert codes.tolist() == [FAILED if number == 7 else HIT for number in range(COUNT)]
        assert space.locate(KEYS[7:8]).tolist() == [NOWHERE]
        assert client.statistics().read_straight == COUNT - 1
        assert client.status()["ssd"]["damaged_keys"] == before + 1
        nothing_is_held(client)


def test_pages_of_a_file_that_was_cut_fail(server: PoolProcess) -> None:
    with umbp.connect(server.socket) as client:
        places = bodies(client)
    last = max(range(COUNT), key=lambda number: places[number][1])  # of many a disk is given up
    os.truncate(*places[last])
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as client, all_leased(holder, SIZE):
        space = open_namespace(client, SIZE)

        def unread() -> int:  # damaged: it may have been written on, behind a hole
            return sum(client.status()["ssd"][what] for what in ("unreadable_keys", "damaged_keys"))

        before = unread()
        codes = read_back(space, range(COUNT), 30.0).codes
        failed = np.flatnonzero(codes == FAILED)
        assert last in failed
        assert (codes[codes != FAILED] == HIT).all()
        assert client.statistics().read_straight == COUNT - len(failed)
        assert unread() == before + len(failed)
        assert (space.locate(KEYS[failed]) == NOWHERE).all()


def test_what_this_process_cannot_read_the_pool_reads(full: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Fallible()
    system.fail(errno.EIO, "read")
    monkeypatch.setattr(straight, "_system", system)
    with umbp.connect(full.socket) as client:
        space, before = open_namespace(client, SIZE), client.status()["ssd"]["unreadable_keys"]
        assert read_back(space, range(COUNT), 30.0).all(HIT)
        assert client.statistics().read_straight == 0
        assert system.calls["read"] >= COUNT
        assert client.status()["ssd"]["unreadable_keys"] == before, "what a client says drops nothing"
        system.heal()
        assert read_back(space, range(COUNT), 30.0).all(HIT)
        assert client.statistics().read_straight == COUNT


def test_a_read_that_does_not_come_back_is_left_behind(full: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Fallible()
    stall = system.stalls["read"] = threading.Event()
    monkeypatch.setattr(straight, "_system", system)
    with umbp.connect(full.socket) as client:
        space = open_namespace(client, SIZE)
        try:
            out = space.empty(COUNT + 1).reshape(-1)[64 : 64 + COUNT * SIZE].reshape(COUNT, SIZE)  # never as direct I/O wants it
            eventually(lambda: space.get(KEYS, out, deadline=0.5) and straight._stuck.count, "one is left behind")
            before = out.copy()
            nothing_is_held(client)
            assert read_back(space, range(COUNT), 30.0).all(HIT), "by way of the pool"
            assert client.statistics().read_straight == 0
        finally:
            stall.set()
        eventually(lambda: not straight._stuck.count, "they are back")
        assert (out == before).all(), "nobody writes to memory that was given back"
        assert read_back(space, range(COUNT), 30.0).all(HIT)
        assert client.statistics().read_straight == COUNT


def test_a_read_into_the_callers_own_memory_is_waited_for(full: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Fallible()
    stall = system.stalls["read"] = threading.Event()
    monkeypatch.setattr(straight, "_system", system)
    with umbp.connect(full.socket) as client:
        space, done = open_namespace(client, SIZE), threading.Event()

        def get() -> None:
            while not (system.waiting("read") or stall.is_set()):  # on a busy machine the time may be over before it reads
                space.get(KEYS[:8], space.empty(8), deadline=0.2)
            done.set()

        thread = threading.Thread(target=get)
        thread.start()
        try:
            eventually(lambda: system.waiting("read"), "it reads")
            nothing_is_held(client)  # its time is over
            assert not done.is_set()
        finally:
            stall.set()
            thread.join()


def test_a_folder_that_is_gone_costs_pages_only(server: PoolProcess, disk: Path) -> None:
    found: list[U8] = []
    with umbp.connect(server.socket) as client:
        space = open_namespace(client, SIZE)

        def gone() -> None:
            shutil.rmtree(disk)
            eventually(lambda: client.status()["ssd"]["keys"] == 0, "the pool has seen it")

        assert (read(client, space, reading_after(gone, found)) == MISS).all()
        assert (found[0] == GOOD).all(), "who has a file open can read it"
        assert not (read(client, space, reading_after(lambda: None, found)) == HIT).any()
        nothing_is_held(client)


# -- descriptors ---------------------------------------------------------------------------------------------------------------------


def open_files(folder: Path) -> list[int]:
    """Files in this folder, by number, that this process has open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.stat(link).st_ino for link in links if os.path.lexists(link) and str(folder) in os.readlink(link)]


def test_descriptors_are_to_read_only_and_closed_when_they_are_not_used(server: PoolProcess, disk: Path, monkeypatch: Any) -> None:
    found: list[U8] = []
    with umbp.connect(server.socket) as client:
        space, flags, files = open_namespace(client, SIZE), list[int](), set[int]()

        def reader(refs: FileRefs, which: I64) -> U8:
            flags.extend(fcntl.fcntl(fd, fcntl.F_GETFL) for fd in refs.fds)
            files.update(os.fstat(fd).st_ino for fd in refs.fds)  # the pool may have taken another one meanwhile
            assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in refs.fds)
            return reading_after(lambda: None, found)(refs, which)

        for _ in range(2):
            assert (read(client, space, reader) == HIT).all()
        assert {each & os.O_ACCMODE for each in flags} == {os.O_RDONLY}
        assert [open_files(disk).count(file) for file in files] == [1] * len(files), "and each is handed over once"
        monkeypatch.setattr("umbp.client.files.IDLE_SECONDS", -1.0)
        client._link.files.shed()
        assert not open_files(disk)
        assert (read(client, space, reader) == HIT).all()
    assert not open_files(disk)


def forked(child: Child, client: umbp.Pool, space: Any) -> None:
    child.say([read_back(space, range(COUNT), 30.0).all(HIT), client.statistics().read_straight])
    client.close()


def test_after_a_fork_both_read(full: PoolProcess) -> None:
    with umbp.connect(full.socket) as client:
        space = open_namespace(client, SIZE)
        assert read_back(space, range(COUNT), 30.0).all(HIT)
        with Child(forked, client, space) as child:
            assert child.hear() == [True, 2 * COUNT]
        assert read_back(space, range(COUNT), 30.0).all(HIT)
        assert client.statistics().read_straight == 2 * COUNT


def test_who_does_not_know_a_sessions_secret_is_handed_nothing(server: PoolProcess) -> None:
    with umbp.connect(server.socket) as client, contextlib.closing(Handover()) as handover:
        link = client._link
        assert link.bond is not None
        assert not handover.open(link.bond, server.socket, bytes(wire.HANDOVER_BYTES).hex())
        assert handover.open(object(), server.socket, link.bond.handover)
