"""The process that moves the bytes of one disk: it reads and writes what its pool tells it to, in the segment that both have mapped.

See `umbp.store.ssd_hands` for why, and for what holds when either of the two dies. It is forked before its pool has threads, knows nothing
but descriptors and places, decides nothing, and ends when the pool is gone: by the signal that the kernel sends it then, and by the end of
the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from umbp.process import end_with
from umbp.store.memory import Mapping
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
    decode_records,
    decode_runs,
    encode_written,
)
from umbp.store.ssd_reads import Run
from umbp.store.ssd_records import Record
from umbp.store.ssd_system import READERS, WRITERS, System, Workers

NICE = 10  # it yields to the pool's loop and its clients, and still gets a tenth of a processor that they leave no moment free
FDS_MAX = 2  # beside one order
PR_SET_NAME = 15


class Parts:
    """The parts of an answer, which threads bring in any order; the last one sends it."""

    def __init__(self, count: int, done: Callable[[list[Any]], None]) -> None:
        self._parts: list[Any] = [None] * count
        self._left, self._lock, self._done = count, threading.Lock(), done

    def bring(self, at: int, part: Any) -> None:
        """One of them."""
        self._parts[at] = part
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._done(self._parts)


class Server:
    """See above. One thread hears orders, two crews of threads carry them out and answer."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._system = System()
        self._files: dict[int, int] = {}  # by the pool's descriptors: ours
        self._held: list[int] = []  # the lock of the segment, for as long as this process lives
        self._mapping: Mapping | None = None
        self._view = memoryview(b"")
        self._readers = Workers(READERS, "hands-read", NICE)
        self._writers = Workers(WRITERS, "hands-write", NICE)

    def run(self) -> None:
        """Until the pool is gone."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES_MAX, FDS_MAX)
            if not data:
                return
            kind, count, number = HEAD.unpack_from(data)
            body = memoryview(data)[HEAD.size :]
            if kind == TAKE:
                self._take(body, fds)
            elif kind == KNOW:
                self._files[DESCRIPTOR.unpack(body)[0]] = fds[0]
            elif kind == FORGET:
                for (fd,) in DESCRIPTOR.iter_unpack(body):
                    os.close(self._files.pop(fd))
                self._answer(FORGET, count, number)
            elif kind == READ:
                self._read(count, number, body)
            elif kind == WRITE:
                self._write(count, number, body)

    def _take(self, body: memoryview, fds: list[int]) -> None:
        offset, size = AREA.unpack(body)
        self._mapping = Mapping(fds[0], size, offset, writable=True)
        self._view = memoryview(self._mapping.array.data)
        os.close(fds[0])
        self._held += fds[1:]

    def _answer(self, kind: int, count: int, number: int, *body: Any) -> None:
        self._channel.sendmsg([HEAD.pack(kind, count, number), *body])

    def _read(self, count: int, number: int, body: memoryview) -> None:
        parts = Parts(count, lambda codes: self._answer(READ, count, number, np.concatenate(codes).data))

        def one(at: int, run: Run) -> None:
            parts.bring(at, run.read(self._system))

        for at, run in enumerate(decode_runs(body, count, self._view, self._files)):
            self._readers.submit(_or_die, one, at, run)

    def _write(self, count: int, number: int, body: memoryview) -> None:
        parts = Parts(count, lambda made: self._answer(WRITE, count, number, *encode_written(made)))

        def one(at: int, record: Record) -> None:
            try:
                parts.bring(at, record.write(self._system))
            except OSError as error:
                parts.bring(at, error.errno or errno.EIO)

        for at, record in enumerate(decode_records(body, count, self._view, self._files)):
            self._writers.submit(_or_die, one, at, record)


def _or_die(call: Callable[..., None], *arguments: Any) -> None:
    """A fault of ours ends the process, and the pool does itself what was asked: an answer that never comes would look like a stalled disk.

    So does a pool that is gone, which nobody can answer.
    """
    try:
        call(*arguments)
    except BaseException as error:  # noqa: BLE001
        if not isinstance(error, BrokenPipeError | ConnectionResetError):
            traceback.print_exc()
        os._exit(1)


def serve(channel: socket.socket, parent: int) -> None:
    """The life of the forked process, whose pool is process ``parent``. Does not return."""
    _or_die(_prepare, channel, parent)
    _or_die(Server(channel).run)
    os._exit(0)


def _prepare(channel: socket.socket, parent: int) -> None:
    end_with(parent, signal.SIGKILL)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"umbp-hands")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # to all of a terminal, or a service: the pool stops, and ends us
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # who reads what the pool says must see it end with the pool
        os.dup2(nothing, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != channel.fileno():
            with contextlib.suppress(OSError):
                os.close(int(name))
    gc.freeze()  # what is shared with the pool stays shared
