"""The DRAM segment: one file in shared memory that holds a pool's pages, its index, and a header that describes both.

Theory of operation
-------------------
    header | namespaces | sessions | buckets | entries | (padding to 2 MiB) | data

Fixed words at the start (magic, format, boot id, counters), then a JSON text that names each section with offset and size, so that a
reader needs no constant of the writer's version but the format number; a format it does not know is refused, never guessed at.

Who writes: the pool process everything but data; the clients data, each only where the pool reserved memory for it. One live pool a name:
it holds a lock (flock) on a file beside the segment for as long as it lives, so the kernel says when it is dead. File names are made of a
digest of the pool's name.

States: building -> serving -> (any end of the process) -> attached by the next boot -> serving. A segment that is not `serving` or
`stopped` at attach was not finished and is made anew. Boot ids only grow.

What fails: no room (said before anything is touched, with what was found and what to change; again when pages are faulted in), a foreign
or damaged header (made anew, with a warning), a version that is newer (refused).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from umbp.errors import Conflict, OutOfMemory, SegmentError
from umbp.store.bell import WORDS, Bell
from umbp.store.index import BUCKET_SLOTS, ENTRY_WORDS, IndexReader, IndexWriter, buckets_for
from umbp.store.locks import lock_patiently, signer, stat_fields
from umbp.store.memory import HUGE_BYTES, Mapping
from umbp.types import U64

MAGIC = int.from_bytes(b"UMBPSEG1", "little")
FORMAT = 2
HEADER_BYTES = 4096
TEXT_AT = 512
HOLDERS_AT = 1 << 62  # where the locks of holders begin, in a file that is never so long
NAMESPACE_WORDS = 256  # 2 KiB: 8 words of numbers, 4 of digest, the rest text
SESSION_WORDS = 8
# Words of a session's row. RECALLED: up to which number its memory ahead is recalled (`umbp.core.spares`).
S_SESSION, S_PID, S_STARTED, S_HOLDER, S_RECALLED = range(5)

# Header words.
H_MAGIC, H_FORMAT, H_BOOT, H_MOVES, H_STATE, H_SEED, H_VERSIONS, H_NUMBERS, H_SESSIONS, H_TEXT_BYTES, H_TEXT_CRC, H_ROUNDS = range(12)
H_BELL = 12  # and one more: see `umbp.store.bell`; in a segment of an older version they are 0
BUILDING, SERVING, STOPPED = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a segment is made for. Equal geometry is what a restart needs to attach."""

    data_bytes: int
    entries: int
    namespaces: int
    sessions: int
    regions: int = 1  # of the data, which no object crosses: `umbp.core.allocator`
    edges: tuple[int, ...] = ()  # between them, where they are not of one size

    def described(self) -> dict[str, Any]:
        """As the header's text has it: what is as it was before there were regions says nothing of them."""
        return {name: value for name, value in asdict(self).items() if (name, value) not in (("regions", 1), ("edges", ()))}

    def sections(self) -> dict[str, tuple[int, int]]:
        """Section name -> (offset, bytes)."""
        sizes = {
            "header": HEADER_BYTES,
            "namespaces": self.namespaces * NAMESPACE_WORDS * 8,
            "sessions": self.sessions * SESSION_WORDS * 8,
            "buckets": buckets_for(self.entries) * BUCKET_SLOTS * 8,
            "entries": self.entries * ENTRY_WORDS * 8,
        }
        found: dict[str, tuple[int, int]] = {}
        at = 0
        for name, size in sizes.items():
            found[name] = (at, size)
            at += -(-size // 4096) * 4096
        found["data"] = (-(-at // HUGE_BYTES) * HUGE_BYTES, self.data_bytes)
        return found

    @property
    def file_bytes(self) -> int:
        """Size of the file, a multiple of 2 MiB (so that it may lie on hugetlbfs)."""
        offset, size = self.sections()["data"]
        return -(-(offset + size) // HUGE_BYTES) * HUGE_BYTES


def file_stem(name: str) -> str:
    """File name without suffix for a pool's name."""
    return "umbp." + hashlib.sha256(name.encode()).hexdigest()[:16]


class OwnerLock:
    """The lock that says that a pool of this name lives."""

    def __init__(self, directory: str, name: str) -> None:
        self.path = os.path.join(directory, file_stem(name) + ".lock")
        fd = lock_patiently(lambda: _lock_or_none(self.path), self.path)
        if fd is None:
            owner = signer(self.path) or "unknown"
            raise Conflict(f"a pool named {name!r} is alive (process {owner})", field="name", example="--name second")
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor that holds it; a duplicate of it holds it too."""
        return self._fd

    def close(self, *, remove: bool = False) -> None:
        """Let go; with ``remove`` the file goes too."""
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        else:
            os.utime(self._fd)  # since when nobody lives here
        os.close(self._fd)


def _lock_or_none(path: str) -> int | None:
    """Descriptor that holds the lock of the file that is at this path *now*; None if somebody else has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        os.close(fd)  # its file was removed between open and lock: this lock means nothing


def leftovers(directory: str) -> list[Path]:
    """Segments of pools that are dead: no process holds their lock. Of one that died early there may be the lock only."""
    found = []
    for path in sorted({path.with_suffix(".segment") for kind in ("segment", "lock") for path in Path(directory).glob(f"umbp.*.{kind}")}):
        with contextlib.suppress(OSError):
            fd = _lock_or_none(str(path.with_suffix(".lock")))
            if fd is not None:
                os.close(fd)
                found.append(path)
    return found


def was_kept(path: Path) -> bool:
    """Whether the pool of this leftover stopped in order, and so meant to find it again."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        words = np.frombuffer(file.read(TEXT_AT).ljust(TEXT_AT, b"\0"), np.uint64)
        return int(words[H_MAGIC]) == MAGIC and int(words[H_STATE]) == STOPPED
    return False


def reclaim(path: Path) -> int:
    """Remove a leftover; bytes given back. Its lock is held meanwhile, so that its owner cannot start in between."""
    lock = path.with_suffix(".lock")
    fd = _lock_or_none(str(lock))
    if fd is None:
        return 0
    size = 0
    try:
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_blocks * 512
            path.unlink()
        remove_beside(path)
        lock.unlink()
    finally:
        os.close(fd)
    return size


def room_bytes(directory: str, without: list[Path]) -> int:
    """What a file system has free, these files taken for removed."""
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    for path in without:
        with contextlib.suppress(FileNotFoundError):
            free += path.stat().st_blocks * 512
    return free


def remove_beside(path: Path) -> None:
    """Remove what belongs to a segment that is gone: the index of the SSD tier, operators' pins."""
    for suffix in (".ssd", ".pins", ".pins-new"):
        path.with_suffix(suffix).unlink(missing_ok=True)


class Segment:
    """A mapped segment. ``head`` is everything before data, ``data`` the pages."""

    def __init__(self, path: str, fd: int, geometry: Geometry, head: Mapping, data: Mapping) -> None:
        self.path = path
        self.geometry = geometry
        self.head = head
        self.data = data
        self._identity = _identity(os.fstat(fd))  # the mapping keeps the file, and with it these numbers
        self.words: U64 = head.array[:TEXT_AT].view(np.uint64)
        self.namespaces = self._section("namespaces").reshape(-1, NAMESPACE_WORDS)
        self.sessions = self._section("sessions").reshape(-1, SESSION_WORDS)
        self.buckets = self._section("buckets").reshape(-1, BUCKET_SLOTS)
        self.entries = self._section("entries").reshape(-1, ENTRY_WORDS)

    def __repr__(self) -> str:
        return f"<Segment {self.path} boot {self.boot}, {self.geometry.data_bytes} bytes of data>"

    def _section(self, name: str) -> U64:
        offset, size = self.geometry.sections()[name]
        return self.head.array[offset : offset + size].view(np.uint64)

    @property
    def boot(self) -> int:
        """The number that changes at each start of the pool."""
        return int(self.words[H_BOOT])

    @property
    def state(self) -> int:
        """BUILDING, SERVING or STOPPED."""
        return int(self.words[H_STATE])

    def is_at(self, path: str) -> bool:
        """Whether this is the file that is at ``path`` now."""
        try:
            return _identity(os.stat(path)) == self._identity
        except FileNotFoundError:
            return False

    def words_at(self, offset: int, size_bytes: int) -> U64:
        """A part of the pages as words."""
        return self.data.array[offset : offset + size_bytes // 8 * 8].view(np.uint64)

    def reader(self) -> IndexReader:
        """The index, to read."""
        return IndexReader(self.buckets, self.entries, self.words[H_MOVES : H_MOVES + 1], int(self.words[H_SEED]))

    def writer(self) -> IndexWriter:
        """The index, to write: the pool process only."""
        moves, counter = self.words[H_MOVES : H_MOVES + 1], self.words[H_VERSIONS : H_VERSIONS + 1]
        return IndexWriter(self.buckets, self.entries, moves, int(self.words[H_SEED]), counter)

    def bell(self) -> Bell:
        """What rings when pages have come that clients wait for."""
        return Bell(self.words[H_BELL : H_BELL + WORDS])

    def close(self) -> None:
        """Unmap; views handed out keep their part alive."""
        for name in ("words", "namespaces", "sessions", "buckets", "entries"):
            delattr(self, name)
        self.head.close()
        self.data.close()


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _map(path: str, fd: int, geometry: Geometry, *, owner: bool, writes: bool) -> Segment:
    data_at, data_bytes = geometry.sections()["data"]
    head = Mapping(fd, data_at, writable=owner)
    data = Mapping(fd, data_bytes, data_at, writable=writes)
    return Segment(path, fd, geometry, head, data)


def create(directory: str, name: str, geometry: Geometry, *, boot: int, seed: int) -> Segment:
    """Make a new segment in state BUILDING, replacing any file of that name. Pages are not faulted in yet.

    OutOfMemory if the directory's file system has less room than the file needs, the replaced one taken for gone; it is left then.
    """
    path = os.path.join(directory, file_stem(name) + ".segment")
    free = room_bytes(directory, [Path(path)])
    if geometry.file_bytes > free:
        room = os.statvfs(directory)
        raise OutOfMemory(
            f"{geometry.data_bytes} bytes of pages need a file of {geometry.file_bytes} bytes in {directory}, which has {free} free "
            f"of {room.f_blocks * room.f_frsize}: ask for less, or make it larger (docker: --shm-size; mount -o remount,size=)",
            field="dram",
            example=f"--dram {max(free * 8 // 10 >> 20, 1)}MiB",
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, geometry.file_bytes)
        _have_header(fd, directory)
        segment = _map(path, fd, geometry, owner=True, writes=True)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    text = json.dumps({"format": FORMAT, "name": name, "geometry": geometry.described(), "sections": geometry.sections()}).encode()
    words = segment.words
    words[H_STATE], words[H_BOOT], words[H_SEED] = BUILDING, boot, seed
    # Counters start somewhere else in each segment, so that a number that a client kept from a former one is not taken for one of this.
    words[H_NUMBERS], words[H_SESSIONS] = seed & 0x3FFF_FFFF, seed >> 32
    words[H_TEXT_BYTES], words[H_TEXT_CRC] = len(text), zlib.crc32(text)
    segment.head.array[TEXT_AT : TEXT_AT + len(text)] = np.frombuffer(text, np.uint8)
    words[H_FORMAT], words[H_MAGIC] = FORMAT, MAGIC
    return segment


def _have_header(fd: int, directory: str) -> None:
    """Make sure of the page that is written next: without room for it the write would end the process with SIGBUS."""
    try:
        os.posix_fallocate(fd, 0, HEADER_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            return  # a file system that cannot promise: `populate` finds out
        raise OutOfMemory(
            f"{directory} has no room for the header any more ({error.strerror}), though it had for the whole a moment ago", field="dram"
        ) from error


def _flock(kind: int, holder: int) -> bytes:
    """A `struct flock` for one byte, whose place is a number far beyond the file's end."""
    return struct.pack("hh4xqqi4x", kind, os.SEEK_SET, HOLDERS_AT + holder, 1, 0)


def process_started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if there is none. With the pid it names a process for good."""
    try:
        return int(stat_fields(pid)[19])
    except (IndexError, ValueError):
        return 0


def held(path: str, holder: int) -> bool:
    """Whether a process that mapped the segment with this holder's number may still write to it.

    The lock belongs to the open file that the mapping refers to, so the kernel keeps it as long as any thread or child has the mapping, and
    it can be seen from every pid namespace.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, holder))
        return int(struct.unpack("hh4xqqi4x", answer)[0]) != fcntl.F_UNLCK
    finally:
        os.close(fd)


def attach(path: str, *, owner: bool, holder: int = 0, writes: bool = True) -> Segment:
    """Map an existing segment: its pool (``owner``) with the head writable, a client with the head read-only.

    ``holder``: a number of the client's, by which `held` tells whether its mapping is still there. ``writes``: whether it may write pages.

    FileNotFoundError if there is none, SegmentError if it is not one or not of this format.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        raw = os.pread(fd, HEADER_BYTES, 0)
        if len(raw) < HEADER_BYTES:
            raise SegmentError(f"{path}: {len(raw)} bytes is too short for a header")
        words = np.frombuffer(raw[:TEXT_AT], np.uint64)
        if int(words[H_MAGIC]) != MAGIC:
            raise SegmentError(f"{path}: not a UMBP segment (magic {int(words[H_MAGIC]):#x})")
        if int(words[H_FORMAT]) != FORMAT:
            raise SegmentError(f"{path}: format {int(words[H_FORMAT])}, this version reads {FORMAT}")
        text = raw[TEXT_AT : TEXT_AT + min(int(words[H_TEXT_BYTES]), HEADER_BYTES - TEXT_AT)]
        if zlib.crc32(text) != int(words[H_TEXT_CRC]):
            raise SegmentError(f"{path}: the header's text does not match its checksum")
        if holder:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, holder))
        return _map(path, fd, _described(path, text, size), owner=owner, writes=writes)
    finally:
        os.close(fd)


def _described(path: str, text: bytes, size: int) -> Geometry:
    """The geometry that the header's text states, if it states one and file and sections fit it."""
    try:
        described = json.loads(text)
        numbers = dict(described["geometry"])
        geometry = Geometry(edges=tuple(numbers.pop("edges", ())), **numbers)
        edges = geometry.edges
        if not all(type(value) is int and value > 0 for value in (*numbers.values(), *edges)) or list(edges) != sorted(set(edges)):
            raise ValueError(f"{geometry} is none")
        sections = {key: tuple(value) for key, value in described["sections"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SegmentError(f"{path}: the header's text does not describe a segment: {error!r}") from error
    if geometry.sections() != sections or geometry.file_bytes != size:
        raise SegmentError(f"{path}: {size} bytes and sections {sections} do not fit its geometry {geometry}")
    return geometry
