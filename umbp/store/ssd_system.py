"""The border between the SSD tier and the operating system: every call that touches a file system, and the threads that wait for it.

`System` is the real thing; tests put another in its place that forgets what was not synced, or fails, or stalls. Calls raise OSError and
nothing else. Threads are daemons: a disk that never answers must not keep a process from ending.

Why threads and no io_uring: runs of neighbours, as the tier reads and writes them, were 2 to 3 % faster in a ring of 64 than with four
threads, which were there anyway for the checksums; scattered calls of 1 MiB 6 to 13 %, and of 64 KiB from 0.8 to 1.3 times
(`scripts/bench/bench_uring.py`, twice, on a busy machine). That does not pay for a second way to do all of this, which containers often
forbid.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

import numpy as np

from umbp.store.memory import HUGE_BYTES

MADV_WIPEONFORK = 18  # of Linux
_T = TypeVar("_T")
Steps: TypeAlias = Generator[list[Future[Any]], None, _T]
"""An operation: yields what it waits for and goes on when all of it is done, well or not."""


def finish(steps: Steps[_T]) -> _T:
    """Run steps in this thread, waiting for what they wait for."""
    try:
        while True:
            wait(next(steps))
    except StopIteration as stop:
        result: _T = stop.value
        return result


class System:
    """Files and folders of the machine."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        """A descriptor to read and write. With ``direct`` past the page cache: EINVAL where the file system cannot."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o600)

    def open_again(self, fd: int, *, direct: bool) -> int:
        """Another descriptor of this very file, wherever it lies by now, to be read only."""
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def close(self, fd: int) -> None:
        """Let a descriptor go."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of the file."""
        return os.fstat(fd).st_size

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """preadv: bytes that came, less only at the file's end."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """pwritev: bytes that went."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """fdatasync: what was written before this call survives a power cut after it."""
        os.fdatasync(fd)

    def forget_cached(self, fd: int) -> None:
        """The page cache need not keep this file."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def allocate(self, fd: int, size: int) -> None:
        """Make sure that writes up to this size find room. EOPNOTSUPP where the file system cannot promise."""
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        """Set the file's size; a longer one has a hole."""
        os.ftruncate(fd, size)

    def list(self, folder: str) -> list[str]:
        """Names in a folder."""
        return sorted(os.listdir(folder))

    def make_folder(self, folder: str) -> None:
        """Make it, and those above it, if they are not there."""
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        """In one step, also over a file that is there."""
        os.rename(old, new)

    def sync_folder(self, folder: str) -> None:
        """Names made, removed and changed in this folder survive a power cut."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def identity(self, path: str) -> tuple[int, int]:
        """(device, inode) of a file or folder."""
        found = os.stat(path)
        return found.st_dev, found.st_ino

    def lock(self, path: str) -> int | None:
        """Descriptor that holds the lock of this file; None if another process has it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd


def aligned(size: int) -> memoryview:
    """Zeroed memory that begins on a page, as direct I/O wants it. From 2 MiB on in huge pages, where the kernel gives them.

    A disk was read 1.4 to 1.7 times as fast into these, and written 1.2 to 1.5, as the pieces of a call are fewer. The kernel gives them
    to private memory rather than to shared. Private memory is copied by the next write when the process has forked, and a direct read that
    is under way then may land in the copy that the child keeps; so the child gets zeros in place of it. Kernels before 4.14 cannot do that.
    """
    if size >= HUGE_BYTES:
        memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(MADV_WIPEONFORK)
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_BYTES
            return memoryview(memory)[start : start + size]
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def aligned_copy(data: bytes) -> memoryview:
    """These bytes in such memory."""
    memory = aligned(len(data))
    memory[:] = data
    return memory


def replace_file(system: System, folder: str, name: str, text: bytes) -> None:
    """Give a small file of this folder new contents, in one step and for good."""
    path = os.path.join(folder, name)
    fd = system.open(path + ".tmp", create=True)
    try:
        system.truncate(fd, 0)
        write_all(system, fd, [text], 0, len(text))
        system.sync(fd)
    finally:
        system.close(fd)
    system.rename(path + ".tmp", path)
    system.sync_folder(folder)


def read_file(system: System, fd: int) -> bytes:
    """All of a small file."""
    data = bytearray(system.size(fd))
    return bytes(data[: system.read(fd, [data], 0)]) if data else b""


def write_all(system: System, fd: int, buffers: Sequence[Any], offset: int, size: int) -> None:
    """Write these buffers, ``size`` bytes together."""
    if size and system.write(fd, buffers, offset) != size:
        raise OSError(errno.ENOSPC, "the file system took only a part of a write")


READERS = 4  # threads that read one disk: where 1 MiB reads reach its bandwidth; more only lengthen its queue
WRITERS = 4  # that write records: while some wait for the disk others make checksums
NICE = 5  # of the threads that serve disks: a third of the weight, where the processors are short


class Workers:
    """A fixed number of daemon threads that do what they are given, in order of arrival.

    Where all processors are busy they step back behind the pool's loop and its clients: a page from disk takes milliseconds anyway, a short
    call to DRAM does not.
    """

    def __init__(self, count: int, name: str, nice: int = NICE) -> None:
        self._asked: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self.count, self.nice = count, nice
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, call: Callable[..., _T], *args: Any) -> Future[_T]:
        """Do this when a thread is free."""
        future: Future[_T] = Future()
        self._asked.put((future, call, args))
        return future

    def submit_to(self, future: Future[_T], call: Callable[[], _T]) -> None:
        """As `submit`, for a future that somebody waits for already."""
        self._asked.put((future, call, ()))

    def close(self) -> None:
        """End the threads when they have done what they have; nobody waits for that."""
        for _ in range(self.count):
            self._asked.put(None)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self.nice)
        while (work := self._asked.get()) is not None:
            future, call, args = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call(*args)
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                future.set_exception(error)
            else:
                future.set_result(result)
            del work, future, call, args
