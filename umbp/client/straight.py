"""Pages on this node's SSD read by this process, past the pool's memory, into the caller's: `read`.

Theory of operation. Used where DRAM need not keep what is read, or has no room for it (`umbp.client.fetches` decides). The pool refers to
the pages (`umbp.pool.references`: descriptors, blocks, checks) and holds their files meanwhile; then

    refer (a call) -> read runs of neighbours, each page verified by its check -> end (a call): which of them counted all the time

What is not there, cannot be read, does not match its check, or did not count to the end, is left to the caller of `read`, who asks the pool
to bring it: the pool then finds out for itself what is wrong with it. So a bad disk or a client of its own opinion costs a page nothing
that its own reads would not.

Reads go straight into the caller's rows where direct I/O takes these (on a boundary of 512 bytes: `Namespace.empty` makes such), else by
way of a buffer of a few megabytes and a copy. Threads of this process read; they are few, shared by all, and daemons.

*Deadlines.* What has not been begun when the time is over is not begun. A read that the kernel has, into a buffer, is left behind, and
while one is, no others are begun: a disk that hangs holds this module's threads and no caller. Into the caller's own rows it must be
waited for, since the kernel writes there: with a disk that hangs such a call returns when the disk does, or the kernel gives it up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from umbp import wire
from umbp.client.buffers import Rows
from umbp.client.files import File
from umbp.client.link import Bond
from umbp.client.operations import Operations
from umbp.client.steps import INLINE_BYTES_MAX, Operation, Work
from umbp.errors import UmbpError
from umbp.store.file_refs import FileRefs
from umbp.store.ssd_format import padded
from umbp.store.ssd_reads import GOOD, RUN_BYTES_MAX, UNREADABLE, Pages, read_run, runs, takes_direct
from umbp.store.ssd_system import System, Workers, aligned
from umbp.types import I64, U8, ReadStatus

LEFT = 3  # beside the codes of `umbp.store.ssd_reads`: a read that was left behind may still write there
WINDOW_BYTES = 256 << 20  # of one answer: read in a second by a slow disk
END_SECONDS = 0.25  # the pool has to say which of the pages counted; after the deadline that is waited for so long
READERS = 4  # where calls of 1 MiB reach a disk's bandwidth
Reader: TypeAlias = Callable[[FileRefs, I64], U8]
"""(references, the rows of the caller that they are for): read and verify; a code of `umbp.store.ssd_reads` each. Blocks."""


def able(bond: Bond) -> bool:
    """Whether this client may read from files at the moment."""
    return bond.files and bond.ssd is not None and not _stuck.count


def read(operations: Operations, keys: U8, codes: U8, which: I64, reader: Reader, until: float) -> Operation[None]:
    """Read those of these pages (``which``, of ``keys``) that are on SSD; `codes` of what came is HIT. Raises nothing of the pool's."""
    look = operations.look(keys[which])
    if look is None or not able(look.bond):
        return
    which = which[operations.on_ssd(look, keys[which])]
    bond, link = look.bond, operations.link
    if not len(which) or not (yield Work(lambda: link.handover.open(bond, link.address, bond.handover, until), INLINE_BYTES_MAX + 1)):
        return
    step = max(1, min(wire.BATCH_MAX, WINDOW_BYTES // operations.object_bytes))
    for start in range(0, len(which), step):
        seconds = until - time.monotonic()
        if seconds <= 0 or not able(bond):
            return
        try:
            yield from _window(operations, bond, look.number, keys, codes, which[start : start + step], reader, seconds)
        except UmbpError:  # the pool went: what was read and is not known to count does not
            return


def _window(
    operations: Operations, bond: Bond, number: int, keys: U8, codes: U8, which: I64, reader: Reader, seconds: float
) -> Operation[None]:
    files = operations.link.files
    known, began = np.array(files.known(bond)[: wire.FILES_MAX], np.uint64), time.monotonic()
    message = wire.ReadFiles(operations.opened.row, number, len(which), seconds, len(known))
    reply, blob = yield bond.call(message, keys[which], known, seconds=seconds, late=partial(_too_late, bond))
    if not reply.m:
        return
    good, mine = np.zeros(reply.m, np.uint8), which[:0]
    taken: list[File] | None = None
    try:
        status = blob.take(np.uint8, reply.n)
        index, block = blob.take(np.uint8, reply.m).astype(np.int64), blob.take(np.int64, reply.m)
        back, checks = blob.take(np.int64, reply.m), blob.take(np.uint64, reply.m)
        tokens, numbers = blob.take(np.uint64, reply.k).tolist(), blob.take(np.uint64, reply.k)
        direct = tuple(flag != 0 for flag in blob.take(np.uint8, reply.k).tolist())
        mine = which[status == ReadStatus.HIT.value]
        if (taken := files.take(bond, tokens)) is not None:  # else this client has let go of one since it asked
            pages = Pages(operations.object_bytes, index, block, checks)
            until = began + min(seconds, reply.seconds)
            refs = FileRefs(pages, back, tuple(file.fd for file in taken), direct, numbers, until)
            found = yield Work(lambda: reader(refs, mine), len(mine) * operations.object_bytes + INLINE_BYTES_MAX)
            good = (found == GOOD).astype(np.uint8)
    finally:
        if taken is not None:
            files.give_back(taken)
        end = bond.call(wire.EndFiles(reply.number, reply.m), good, seconds=began + seconds + END_SECONDS - time.monotonic())
        _, blob = yield from operations.link.late.ended(end)
    still = blob.take(np.uint8, reply.m)
    operations.link.statistics.read_straight += int(np.count_nonzero((good != 0) & (still != 0)))
    codes[mine[(good != 0) & (still != 0)]] = ReadStatus.HIT.value


def _too_late(bond: Bond, reply: Any, blob: wire.Blob) -> Operation[None]:
    """Nobody is there any more to read them."""
    if reply.m:
        yield bond.call(wire.EndFiles(reply.number, reply.m), np.zeros(reply.m, np.uint8))


# -- into memory of this process -----------------------------------------------------------------------------------------------------


def into(rows: Rows) -> Reader:
    """A reader that fills these rows."""

    def reader(refs: FileRefs, which: I64) -> U8:
        return read_refs(refs, [rows.array(at) for at in which.tolist()])

    return reader


def read_refs(refs: FileRefs, out: Sequence[U8], *, leave: bool = False) -> U8:
    """Read and verify pages into ``out``, one array of a page's bytes each, until ``refs.until``; a code each.

    When it returns nothing is written to ``out`` any more; with ``leave`` but for pages that are LEFT: then it is not to be used again.
    """
    codes = np.full(len(out), UNREADABLE, np.uint8)
    jobs: list[tuple[I64, _Job, Future[U8]]] = []
    for run in runs(refs.pages):
        job = _Job(refs, run, [out[at] for at in run.tolist()], leave)
        jobs.append((run, job, _readers().submit(job.run)))
    wait([future for _, _, future in jobs], max(0.0, refs.until - time.monotonic()))
    for run, job, future in jobs:
        if not future.done() and (future.cancel() or job.leave()):
            codes[run] = LEFT if leave and job.left else UNREADABLE
        elif future.exception() is None:
            codes[run] = future.result()
    return codes


@dataclass(slots=True)
class _Job:
    """A run of pages of one file. It is left behind, or writes to ``out``: never both."""

    refs: FileRefs
    which: I64
    out: list[U8]
    may_stay: bool  # also while it writes to ``out``
    left: bool = False
    ending: bool = False  # it writes to ``out``, or is about to
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> U8:
        """By a thread."""
        pages = self.refs.pages.only(self.which)
        file, size = int(pages.files[0]), pages.size
        direct = self.refs.direct[file]
        straight = not direct or all(takes_direct(row.ctypes.data, size) for row in self.out)
        if (fd := self._begin(self.refs.fds[file], ending=straight and not self.may_stay)) is None:
            return self._none()
        try:
            if straight:
                return read_run(_system, fd, direct, pages, [row.data for row in self.out], straight=True)
            length = padded(size)
            memory = _buffer(len(self.out) * length)
            bodies = [memory[at * length : (at + 1) * length] for at in range(len(self.out))]
            codes = read_run(_system, fd, direct, pages, bodies, straight=True)
        finally:
            os.close(fd)
            mine = self._end()
        if not mine:
            return self._none()
        for at in np.flatnonzero(codes == GOOD).tolist():
            self.out[at][:] = bodies[at][:size]
        return codes

    def leave(self) -> bool:
        """Nobody waits for it any more; False if it is to be waited for, as it writes to ``out``."""
        with self.lock:
            if not self.ending:
                self.left = True
                _stuck.add(1)
            return self.left

    def _begin(self, fd: int, *, ending: bool) -> int | None:
        """A descriptor of its own, since who left it gives the others back; None if that has happened already."""
        with self.lock:
            if self.left:
                _stuck.add(-1)
                return None
            self.ending = ending
            return os.dup(fd)

    def _end(self) -> bool:
        with self.lock:
            if self.left:
                _stuck.add(-1)
            self.ending = not self.left
            return self.ending

    def _none(self) -> U8:
        return np.full(len(self.out), UNREADABLE, np.uint8)


class _Stuck:
    """Reads that were left behind and have not come back."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        """So many more, or less."""
        with self._lock:
            self.count += more


_system = System()
_stuck = _Stuck()
_threads = threading.local()
_workers: Workers | None = None
_making = threading.Lock()


def _readers() -> Workers:
    global _workers
    with _making:
        if _workers is None:
            _workers = Workers(READERS, "umbp-read")
        return _workers


def _buffer(size: int) -> memoryview:
    """Memory of this thread's own that direct I/O takes; what was in it before is lost."""
    memory: memoryview | None = getattr(_threads, "memory", None)
    if memory is None or len(memory) < size:
        memory = _threads.memory = aligned(max(size, RUN_BYTES_MAX))
    return memory[:size]


def _after_fork() -> None:
    """In the child there are no threads, and nothing is left behind."""
    global _workers, _making, _stuck
    _workers, _making, _stuck = None, threading.Lock(), _Stuck()


os.register_at_fork(after_in_child=_after_fork)
