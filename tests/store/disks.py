"""SSD tiers for tests, and file systems that lose, fail and stall."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from umbp.policies import CLEANING, EVICTION, STRIPING
from umbp.policies.base import build
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_catalog import private_table
from umbp.store.ssd_drive import Drive
from umbp.store.ssd_format import BLOCK, NamespaceNote
from umbp.store.ssd_system import System, finish
from umbp.store.ssd_upkeep import open_steps
from umbp.types import U8, ReadStatus

MIB = 1 << 20
SIZE = 64 << 10
PLACE = place_word(1, SIZE)


class Names:
    """Namespaces as a pool has them: the digest of number n is n in 32 bytes, until it is flushed and gets another number."""

    def __init__(self) -> None:
        self.digests: dict[int, bytes] = {}
        self.quotas: dict[int, int] = {}
        self.unknown: set[bytes] = set()
        self._next = 1 << 20

    def digest_of(self, number: int) -> bytes | None:
        return self.digests.setdefault(number, number.to_bytes(32, "big")) if number < 1 << 20 else self.digests.get(number)

    def number_of(self, digest: bytes) -> int | None:
        if digest in self.unknown:
            return None
        for number, known in self.digests.items():
            if known == digest:
                return number
        number = int.from_bytes(digest, "big")
        self.digests[number] = digest
        return number

    def note_of(self, digest: bytes) -> NamespaceNote:
        return NamespaceNote(canonical="test", object_bytes=1)

    def quota_of(self, number: int) -> int:
        return self.quotas.get(number, 0)

    def flush(self, number: int) -> tuple[bytes, int]:
        """Give a namespace another number; its digest and the new number."""
        digest = self.digest_of(number)
        assert digest is not None
        self.digests[number] = b""
        self._next += 1
        self.digests[self._next] = digest
        return digest, self._next


def make_tier(
    *folders: Path | str,
    size: int = 16 * MIB,
    segment_bytes: int = MIB,
    system: System | None = None,
    names: Names | None = None,
    entries: int = 4096,
    eviction: str = "lru",
    now: float = 0.0,
    day: float = 20_000 * 86_400.0,
    day_bytes_max: int = 0,
    strict: bool = True,
    levels: Sequence[int] = (),
    weights: Sequence[float] = (),
) -> SsdTier:
    """A tier over these folders, opened. With ``strict`` what keeps one from being opened is raised. ``levels``: of each folder."""
    used = system or System()
    each = zip(folders, levels or [0] * len(folders), weights or [1.0] * len(folders), strict=True)
    drives = [Drive(str(path), size, used, segment_bytes=segment_bytes, level=level, weight=weight) for path, level, weight in each]
    tier = SsdTier(
        drives,
        private_table(entries, 7),
        names or Names(),
        lambda: day,
        eviction=build(EVICTION, eviction, entries),
        cleaning=build(CLEANING, "cost_benefit"),
        striping=build(STRIPING, "even"),
        day_bytes_max=day_bytes_max,
    )
    try:
        finish(open_steps(tier, now, *drives))
        for drive in drives if strict else ():
            if drive.error is not None:
                raise drive.error
    except BaseException:
        tier.close()
        raise
    return tier


def keys_of(*numbers: int) -> U8:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def body(key: int, size: int = SIZE) -> U8:
    """What the tests store under this key."""
    return np.random.default_rng(key).integers(0, 256, size, dtype=np.uint8)


def put(tier: SsdTier, *keys: int, place: np.uint64 = PLACE, now: float = 0.0) -> list[int]:
    return tier.write(now, place, keys_of(*keys), np.stack([body(key, int(place) >> 32) for key in keys])).tolist()


def get(tier: SsdTier, *keys: int, place: np.uint64 = PLACE, now: float = 0.0) -> list[int]:
    """The status of each; the bytes of what is a hit are compared."""
    out = np.zeros((len(keys), int(place) >> 32), np.uint8)
    status = tier.read(now, place, keys_of(*keys), out)
    for key, row, code in zip(keys, out, status.tolist(), strict=True):
        assert code != ReadStatus.HIT or np.array_equal(row, body(key, int(place) >> 32)), key
    return status.tolist()


def held(tier: SsdTier, *keys: int, place: np.uint64 = PLACE, now: float = 0.0) -> list[int]:
    """Which of these keys are read back."""
    return [key for key, code in zip(keys, get(tier, *keys, place=place, now=now), strict=True) if code == ReadStatus.HIT]


class PowerCut(Exception):
    """The machine is off: nothing more reaches the disk."""


class Fallible(System):
    """A real file system with faults on order.

    ``faults``: what is raised by which call, such as ``{"write": OSError(EIO, ...)}``, for paths that ``only`` accepts. ``stall``: calls of
    that name wait until the event is set. ``no_direct``, ``no_allocate``: the file system cannot.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Callable[[], BaseException]] = {}
        self.stalls: dict[str, threading.Event] = {}
        self.calls: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self.no_direct = self.no_allocate = False
        self.read_bytes = 0
        self._lock = threading.Lock()

    def fail(self, number: int, *calls: str) -> None:
        for call in calls:
            self.faults[call] = lambda: OSError(number, os.strerror(number))

    def heal(self) -> None:
        self.faults.clear()

    def waiting(self, call: str) -> bool:
        """Whether such a call has been made and waits until its stall is over."""
        stall = self.stalls.get(call)
        with self._lock:
            return stall is not None and not stall.is_set() and self._waiting.get(call, 0) > 0

    def _before(self, call: str) -> None:
        with self._lock:
            self.calls[call] = self.calls.get(call, 0) + 1
            self._waiting[call] = self._waiting.get(call, 0) + 1
        if (stall := self.stalls.get(call)) is not None:
            assert stall.wait(120.0), "nobody ended the stall"
        with self._lock:
            self._waiting[call] -= 1
        if call in self.faults:
            raise self.faults[call]()

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        self._before("create" if create else "open")
        if direct and self.no_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, create=create, direct=direct)

    def read(self, fd: int, buffers: Any, offset: int) -> int:
        self._before("read")
        came = super().read(fd, buffers, offset)
        with self._lock:
            self.read_bytes += came
        return came

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        self._before("write")
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._before("sync")
        super().sync(fd)

    def allocate(self, fd: int, size: int) -> None:
        self._before("allocate")
        if self.no_allocate:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        super().allocate(fd, size)

    def identity(self, path: str) -> tuple[int, int]:
        self._before("identity")
        return super().identity(path)


class Forgetful(System):
    """A file system that stops at its n-th change, and then keeps of what was not synced what chance decides, block by block.

    Names follow their folder's sync, bytes their file's. (After the fault-injecting environment of leveldb's tests.)
    """

    def __init__(self, changes_max: int = 1 << 60) -> None:
        self.changes_max = changes_max
        self.changes = 0
        self._paths: dict[int, str] = {}
        self._undo: list[tuple[str, int, bytes]] = []  # file, offset, what was there before: in order, of unsynced writes
        self._names: list[tuple[str, Callable[[], None]]] = []  # folder, how to undo
        self._lock = threading.RLock()

    def _change(self) -> None:
        self.changes += 1
        if self.changes > self.changes_max:
            raise PowerCut

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        with self._lock:
            new = create and not os.path.lexists(path)
            if new:
                self._change()
            fd = super().open(path, create=create, direct=False)
            self._paths[fd] = path
            if new:
                self._names.append((os.path.dirname(path), lambda: Path(path).unlink(missing_ok=True)))
            return fd

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        with self._lock:
            self._change()
            size = sum(len(each) for each in buffers)
            before = os.pread(fd, size, offset)
            self._undo.append((self._paths[fd], offset, before.ljust(size, b"\0")))
            return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        with self._lock:
            self._change()
            path = self._paths[fd]
            self._undo = [each for each in self._undo if each[0] != path]

    def allocate(self, fd: int, size: int) -> None:
        with self._lock:
            self._change()
            os.ftruncate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._change()
            super().truncate(fd, size)

    def remove(self, path: str) -> None:
        with self._lock:
            self._change()
            super().remove(path)

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._change()
            before = Path(new).read_bytes() if os.path.exists(new) else None
            moved = Path(old).read_bytes()
            super().rename(old, new)
            self._undo = [(new if path == old else path, *rest) for path, *rest in self._undo if path != new]
            self._paths = {fd: new if path == old else path for fd, path in self._paths.items()}

            def undo() -> None:
                Path(old).write_bytes(moved)
                if before is None:
                    os.unlink(new)
                else:
                    Path(new).write_bytes(before)

            self._names.append((os.path.dirname(new), undo))

    def sync_folder(self, folder: str) -> None:
        with self._lock:
            self._change()
            self._names = [each for each in self._names if each[0] != folder]

    def power_cut(self, draw: random.Random, *, keep: float) -> None:
        """Off. Of unsynced bytes each block of 4 KiB is kept with this chance; of unsynced names the later ones go first."""
        with self._lock:
            self.changes_max = 0
            for path, offset, before in reversed(self._undo):
                if not os.path.exists(path):
                    continue
                with open(path, "r+b", buffering=0) as file:
                    for start in range(0, len(before), BLOCK):
                        if draw.random() >= keep:
                            os.pwrite(file.fileno(), before[start : start + BLOCK], offset + start)
            kept = len(self._names) if keep == 1.0 else draw.randrange(len(self._names) + 1) if keep else 0
            for _, undo in reversed(self._names[kept:]):
                undo()
