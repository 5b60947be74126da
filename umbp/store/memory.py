"""Memory of the operating system: mapping, faulting in (in parallel, with progress), huge pages.

The only place that calls madvise and mmap. `mmap.madvise` holds the interpreter lock while the kernel clears pages, so the calls go
through ctypes, which lets it go; that is what makes faulting in parallel. Faulting in with MADV_POPULATE_WRITE returns an error where a
plain touch would end the process with SIGBUS (no room left in the file system).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from umbp.errors import OutOfMemory
from umbp.types import U8

MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 14, 22, 23
SLICE_BYTES = 64 << 20  # one progress step; about 30 ms of page clearing
HUGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """A shared mapping of a part of a file. ``array`` is the bytes; views of it keep the mapping alive."""

    def __init__(self, fd: int, length: int, offset: int = 0, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=protection, offset=offset)
        self.array: U8 = np.frombuffer(self._map, np.uint8)
        self.address = self.array.ctypes.data

    def __len__(self) -> int:
        return len(self.array)

    def advise(self, start: int, length: int, advice: int) -> int:
        """madvise on a part; 0 or the errno."""
        if _libc.madvise(self.address + start, length, advice) == 0:
            return 0
        return ctypes.get_errno()

    def close(self) -> None:
        """Unmap now if no view is left; else when the last view goes."""
        self.array = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def fence() -> None:
    """A full fence: what this thread stored before is seen by others before anything that it loads afterwards was read.

    x86 keeps all orders but this one. A fresh lock is taken by one locked instruction, which is such a fence there, and waits for nobody.
    On a machine with a weaker order it is less than that: who relies on it must find out later, as a lease does by versions.
    """
    threading.Lock().acquire(blocking=False)


@dataclass(frozen=True, slots=True)
class Near:
    """A part of a mapping, ``[start, stop)``, and the CPUs that are near the memory it is placed in: they fault it in. None: any."""

    start: int
    stop: int
    cpus: frozenset[int] = frozenset()


def populate(
    mapping: Mapping, *, write: bool, threads: int, progress: Callable[[int], None] | None = None, parts: Sequence[Near] = ()
) -> None:
    """Fault in the whole mapping. OutOfMemory if the file system has no room; kernels before 5.14 touch page by page.

    ``parts``: all of it, in parts that are faulted in side by side.
    """
    advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
    sliced = [[(part, start) for start in range(part.start, part.stop, SLICE_BYTES)] for part in parts or [Near(0, len(mapping))]]

    done = 0

    def one(piece: tuple[Near, int]) -> int:
        part, start = piece
        if part.cpus:
            with contextlib.suppress(OSError):  # none of them is ours to run on: then from where we are
                os.sched_setaffinity(0, part.cpus)
        length = min(SLICE_BYTES, part.stop - start)
        error = mapping.advise(start, length, advice)
        while error in (errno.EAGAIN, errno.EINTR):
            error = mapping.advise(start, length, advice)
        if error == errno.EINVAL:  # no such advice: touch, which keeps what is there
            pages = mapping.array[start : start + length : mmap.PAGESIZE]
            if write:
                pages |= 0
            else:
                int(pages.sum())
        elif error:
            raise OutOfMemory(
                f"the system gave {done} of {len(mapping)} bytes, then {errno.errorcode.get(error, error)}: the file system of the "
                "shared memory, or the memory limit of this container, is too small",
                field="dram",
                example="--dram 2GiB, or a larger /dev/shm (docker: --shm-size)",
            )
        return length

    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="populate")
    try:
        for length in pool.map(one, [piece for round_ in zip_longest(*sliced) for piece in round_ if piece]):
            done += length
            if progress:
                progress(done)
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, or when `progress` raises to stop it: only what is being done now


def shmem_huge_pages(path: str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled") -> str:
    """The kernel's setting for huge pages in shared memory: always, within_size, advise, never, deny, or "unknown"."""
    try:
        text = Path(path).read_text()
    except OSError:
        return "unknown"
    return text[text.index("[") + 1 : text.index("]")] if "[" in text else "unknown"
