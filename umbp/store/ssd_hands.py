"""Hands: a process beside the pool that moves one disk's bytes, so that nothing of it competes for the pool's interpreter.

Theory of operation
-------------------
A disk at its full speed has the threads that serve it take the interpreter lock thousands of times a second: for each call, for each sum
of a piece. Where one is preempted while it has the lock, the pool's loop, and with it every client's short call, waits for milliseconds. So
the calls that are many (reads of runs into the segment's pages, writes of records out of them, with all their sums) are made by a process
of their own, one a disk, with the same segment mapped and the same files open. The pool sends it an order for a whole batch and gets one
answer (`ssd_orders`). Everything else (opening, syncing, sealing, notes, recovery, memory that is not the segment's) stays with the pool's
threads (`ssd_crew`), and with it the order in which a power cut finds things: a record is answered, then the pool syncs its file, and then
the record is listed.

    start       forked by `start` before the pool has threads: a few milliseconds, nothing is imported anew
    TAKE        the segment, and a duplicate of the descriptor that holds its lock
    KNOW        a file, or a folder's lock, as the pool opens it; FORGET before the pool closes it
    READ, WRITE runs of pages, records: of files that it knows only
    gone        killed, out of memory, our own fault: the socket ends, everything that was asked and not answered is done over by the
                pool's threads, as is all that follows; it is said in ``/readyz`` and in the log

Nothing of it outlives what it may touch:

1.  The pool dies, in whatever way, in the middle of reads and writes. The kernel kills the hands with it (PR_SET_PDEATHSIG; the end of the
    socket where that is not to be had), but perhaps not at once: a call to a disk is over when the disk has answered. A lock (`flock`)
    belongs to the open file, not to the process, and the hands have duplicates of the descriptors, sent over the socket, of the segment's
    lock and the folder's. The kernel closes a process's descriptors when the last of its threads has left its last call. So as long as
    anything of the hands may write to a page or a file, both locks are held, and a new pool of that name or folder does not start to use
    either; it waits for them (`umbp.store.locks`) as it sees that who has signed them is dead.
2.  The hands die. For the same reason the end of the socket is the proof that no call of theirs is under way any more: what they were asked
    can be done over, to the same pages and places in the file, and pages and files that are given back are nobody's.
3.  The hands hang, stopped or waiting for their disk: a stalled disk, as ever (`ssd_drive`). What they were asked stays asked, its pages
    reserved and its files held, and nothing more is asked.

Who calls: orders come from any thread of the pool, answers are taken by one, `receive`, which the event loop calls when the socket is
readable, and at the stop, when the loop itself waits for what is still under way, a thread (`attended`). Futures are done there. Sending
never waits: where the socket is full the pool's threads do it.

Cost: an order and its answer are some 0.1 ms of the loop each, for 32 MiB in runs of 4. A process has 2 MB of page tables for each GiB of
pages that it has touched. Its threads are at nice 10; 19, SCHED_BATCH and other slices of the scheduler were tried and made no difference
to short calls beside it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from umbp.store.segment import OwnerLock, Segment
from umbp.store.ssd_hands_process import serve
from umbp.store.ssd_orders import (
    AREA,
    DESCRIPTOR,
    FORGET,
    HEAD,
    KNOW,
    MESSAGE_BYTES_MAX,
    READ,
    TAKE,
    WRITE,
    Told,
    decode_codes,
    decode_written,
    encode_records,
    encode_runs,
    portions,
    record_bytes,
    run_bytes,
)
from umbp.store.ssd_reads import Run
from umbp.store.ssd_records import Record
from umbp.store.ssd_system import Workers
from umbp.types import U8

log = logging.getLogger("umbp.store.ssd")
ANSWERS_MAX = 8  # taken at a time; then others have their turn
END_SECONDS_MAX = 2.0
ATTEND_SECONDS = 0.02  # between two looks whether they are still to be attended
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked and is not answered: a future a part, and how to do each part here."""

    futures: list[Future[Any]]
    here: list[Callable[[], Any]]
    workers: Workers
    told: Told

    def do_here(self) -> None:
        """Nobody answers it."""
        for future, call in zip(self.futures, self.here, strict=True):
            self.workers.submit_to(future, call)


class Hands:
    """The pool's end; see above."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.pid = pid
        self.alive = True
        self._channel = channel
        self._pidfd = os.pidfd_open(pid)
        self._numbers = itertools.count(1)
        self._orders: dict[int, Order] = {}
        self._known: set[int] = set()
        self._has_memory = self._closed = False
        self._room = memoryview(bytearray(MESSAGE_BYTES_MAX))

    def __repr__(self) -> str:
        return f"<Hands {self.pid} {'alive' if self.alive else 'gone'}, {len(self._orders)} orders>"

    def fileno(self) -> int:
        """Of the socket: when it is readable, `receive`."""
        return self._channel.fileno()

    # -- what they have ----------------------------------------------------------------------------------------------------------------

    def take(self, segment: Segment, lock: OwnerLock) -> None:
        """Map the pages of this segment, and hold the lock of its owner with him."""
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            area = AREA.pack(*segment.geometry.sections()["data"])
            self._has_memory = self._send(TAKE, 1, 0, [area], (fd, lock.fileno()))
        finally:
            os.close(fd)

    def know(self, fd: int) -> None:
        """A file, or the lock of a folder, that was opened. One that they do not hear of is served by the pool's threads."""
        if self._send(KNOW, 1, 0, [DESCRIPTOR.pack(fd)], (fd,)):
            self._known.add(fd)

    def forget(self, fds: Sequence[int], workers: Workers) -> Future[None]:
        """Before these are closed: done when the hands have closed theirs, so that the file system, and a lock, is let go of."""
        mine, future = [fd for fd in fds if fd in self._known], Future[None]()
        self._known.difference_update(mine)
        if not mine or not self.alive:
            future.set_result(None)
        else:
            order = Order([future], [self._until_gone], workers, _none)
            if not self._ask(FORGET, len(mine), [DESCRIPTOR.pack(fd) for fd in mine], order):
                self.kill()  # it has not taken anything for long, and must not keep them
                order.do_here()
        return future

    def can(self, fd: int) -> bool:
        """Whether an order about this file makes sense."""
        return self.alive and self._has_memory and fd in self._known

    # -- orders ------------------------------------------------------------------------------------------------------------------------

    def read(self, runs: Sequence[Run], here: Callable[[Run], U8], workers: Workers) -> list[Future[U8]]:
        """Read these, of files that they `can`; the codes of each. ``here``: how the pool reads one."""
        futures: list[Future[U8]] = []
        for some in portions([run_bytes(run) for run in runs]):
            mine = runs[some]
            order = Order(_futures(mine), [_bound(here, run) for run in mine], workers, _codes_of([len(run.out) for run in mine]))
            self._ask_or_do(READ, len(mine), encode_runs(mine), order)
            futures += order.futures
        return futures

    def write(self, records: Sequence[Record], here: Callable[[Record], Any], workers: Workers) -> list[Future[Any]]:
        """Write these, to files that they `can`; (n,) of `PAGE` each, or OSError. ``here``: how the pool writes one."""
        futures: list[Future[Any]] = []
        for some in portions([record_bytes(record) for record in records]):
            mine = records[some]
            order = Order(_futures(mine), [_bound(here, record) for record in mine], workers, decode_written)
            self._ask_or_do(WRITE, len(mine), encode_records(mine), order)
            futures += order.futures
        return futures

    def _ask_or_do(self, kind: int, count: int, body: list[Any], order: Order) -> None:
        if not self._ask(kind, count, body, order):
            order.do_here()

    def _ask(self, kind: int, count: int, body: list[Any], order: Order) -> bool:
        """False if it was not sent, and `_ended` has not seen to it either."""
        number = next(self._numbers)
        self._orders[number] = order  # first: another thread takes the answer
        return self._send(kind, count, number, body) or self._orders.pop(number, None) is None

    def _send(self, kind: int, count: int, number: int, body: list[Any], fds: Sequence[int] = ()) -> bool:
        try:
            socket.send_fds(self._channel, [HEAD.pack(kind, count, number), *body], fds)
        except OSError:  # full, or gone, which `receive` finds out
            return False
        return True

    # -- answers -----------------------------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take answers that have come; never waits."""
        for _ in range(ANSWERS_MAX):
            try:
                size = self._channel.recv_into(self._room)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:
                self._ended()
                return
            _, count, number = HEAD.unpack_from(self._room)
            order = self._orders.pop(number)
            for future, result in zip(order.futures, order.told(self._room[HEAD.size : size], count), strict=True):
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _ended(self) -> None:
        if self.alive:
            self.alive = False
            log.error("process %d, which served a disk, is gone; the pool serves it by itself until it is started anew", self.pid)
        orders, self._orders = self._orders, {}
        for order in orders.values():
            order.do_here()

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """Meanwhile a thread takes the answers: for an event loop that is about to wait for one and takes none itself any more."""
        over = threading.Event()

        def attend() -> None:
            while self.alive and not over.is_set():
                if _readable(self._channel.fileno(), ATTEND_SECONDS):
                    self.receive()

        thread = threading.Thread(target=attend, name="hands-answers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # -- their end ---------------------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End them as they are."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _until_gone(self) -> None:
        """Nothing that it had open is open any more."""
        if not _readable(self._pidfd, END_SECONDS_MAX):
            raise OSError(errno.EBUSY, f"process {self.pid}, which served it, does not end")

    def close(self) -> None:
        """End them, and wait until they are gone: at most `END_SECONDS_MAX`, if a disk does not let go of them."""
        if self._closed:
            return
        self._closed, self.alive = True, False
        self.kill()
        with contextlib.suppress(OSError):
            self._until_gone()
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._channel.close()


def start(count: int) -> list[Hands]:
    """Fork so many. Before the process has threads, and after it has read its configuration."""
    made: list[Hands] = []
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            serve(theirs, parent)
        theirs.close()
        ours.setblocking(False)
        made.append(Hands(ours, pid))
    return made


def share(hands: Sequence[Hands], segment: Segment, lock: OwnerLock) -> None:
    """All of them `take` it."""
    for each in hands:
        each.take(segment, lock)


def _readable(fd: int, seconds_max: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds_max * 1000))


def _futures(things: Sequence[Any]) -> list[Future[Any]]:
    return [Future() for _ in things]


def _bound(call: Callable[[_T], Any], thing: _T) -> Callable[[], Any]:
    return lambda: call(thing)


def _codes_of(counts: list[int]) -> Told:
    return lambda body, _: list(decode_codes(body, counts))


def _none(body: memoryview, count: int) -> list[Any]:
    return [None]
