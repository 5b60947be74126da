"""Clients as processes of their own: forked, told what to do, listened to, stopped, killed.

    with Child(work, pool.socket) as child:       # work(child, socket) runs in the other process
        child.hear()                              # what it said: any JSON
        child.signal(signal.SIGSTOP)

And one connection without a client behind it, for what no client would do: `Wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from umbp import Layout, ReadStatus, wire
from umbp.client.connection import Connection
from umbp.client.steps import Call
from umbp.layout import Namespace
from umbp.store import segment
from umbp.types import WriteStatus

# Only failures take these: a machine that others keep busy is a fifth as fast, and what hangs hangs for longer.
HEAR_SECONDS_MAX = 60.0
WAIT_SECONDS_MAX = 60.0
SLACK_SECONDS = 3.0  # on top of a bound that is to hold; less than a call takes that nothing bounds (5 s)
PRESSURE = [Path("/proc/pressure") / what for what in ("cpu", "io", "memory")]


def eventually(true: Callable[[], Any], what: str | Callable[[], Any], seconds: float = WAIT_SECONDS_MAX) -> Any:
    """Ask until the answer is yes; the answer. Fails with ``what`` did not come true. For asyncio there is `becomes`."""
    deadline = time.monotonic() + seconds
    while True:
        if answer := true():
            return answer
        assert time.monotonic() < deadline, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(0.005)


def stalled_seconds() -> float:
    """For how long so far somebody on this machine has waited for a processor, a disk or memory. Where the kernel does not say: always."""
    try:
        lines = [path.read_text().splitlines()[0] for path in PRESSURE]
    except OSError:
        return time.monotonic()
    return sum(int(line.rpartition("total=")[2]) for line in lines) / 1e6


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is done here ends in so many seconds, and `SLACK_SECONDS`, of those in which this machine has time for all who want some.

    Who waits for what others keep busy is late for no fault of what is tested, and how long that was is measured and not guessed.
    """
    began, stalled = time.monotonic(), stalled_seconds()
    yield
    took, stalled = time.monotonic() - began, stalled_seconds() - stalled
    assert took - stalled < seconds + SLACK_SECONDS, f"took {took:.1f} s and not {seconds:g}, in {stalled:.1f} s of which somebody waited"


async def becomes(true: Callable[[], Awaitable[Any]], what: str, seconds: float = WAIT_SECONDS_MAX) -> Any:
    """`eventually`, of what is awaited."""
    deadline = time.monotonic() + seconds
    while True:
        if answer := await true():
            return answer
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)


def keys_of(*numbers: int) -> np.ndarray:
    """(n, 32) keys, one for each number."""
    keys = np.zeros((len(numbers), 32), np.uint8)
    keys[:, :8] = np.array(numbers, np.uint64).view(np.uint8).reshape(-1, 8)
    keys[:, 8:16] = np.random.default_rng(7).integers(0, 256, 8, np.uint8)
    return keys


def bytes_of(number: int, size: int, *, writer: int = 0) -> np.ndarray:
    """What this writer stores under this number: no two numbers, writers or places have the same eight bytes."""
    words = np.arange(-(-size // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = (words + np.uint64(number << 20 | writer << 50)) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:size]


def values_of(numbers: Any, size: int, *, writer: int = 0) -> np.ndarray:
    """(n, size): `bytes_of` each."""
    return np.stack([bytes_of(number, size, writer=writer) for number in numbers]) if len(numbers) else np.empty((0, size), np.uint8)


IDENTITY = {"model": "m", "page_tokens": 64}


def read_back(space: Any, numbers: Any, deadline: float) -> Any:
    """Statuses of a get of these; what is a hit has the right bytes."""
    out = np.zeros((len(numbers), space.object_bytes), np.uint8)
    statuses = space.get(keys_of(*numbers), out, deadline=deadline)
    hits = np.flatnonzero(statuses.where(ReadStatus.HIT))
    assert (out[hits] == values_of([numbers[at] for at in hits], space.object_bytes)).all(), "wrong bytes"
    return statuses


def open_namespace(pool: Any, size: int, **identity: Any) -> Any:
    """A namespace of opaque objects of this size."""
    return pool.namespace(**{**IDENTITY, "layout": Layout.opaque(size), **identity})


@contextlib.contextmanager
def all_leased(client: Any, size: int) -> Iterator[list[int]]:
    """All of a pool's DRAM is leased: pages of this size, from 1000 on, of a namespace "leased" of their own."""
    space = open_namespace(client, size, tenant="leased")
    numbers: list[int] = []
    with contextlib.ExitStack() as leases:
        while True:
            some = range(1000 + len(numbers), 1016 + len(numbers))
            codes = space.put(keys_of(*some), values_of(some, size)).codes
            numbers += [number for number, code in zip(some, codes.tolist(), strict=True) if code == WriteStatus.STORED]
            lease = leases.enter_context(space.lease(keys_of(*some)))
            assert lease.held.sum() == np.count_nonzero(codes == WriteStatus.STORED)
            if len(numbers) < some.stop - 1000:
                break
        assert open_namespace(client, size, tenant="more").put(keys_of(1), values_of([1], size)).codes.tolist() == [WriteStatus.ALL_LEASED]
        yield numbers
    space.flush()


class Child:
    """A forked process that runs ``work(child, *arguments)``; both sides `say` and `hear` JSON values."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        here, there = _pipes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads: the child uses none of theirs
            self.pid = os.fork()
        if self.pid == 0:
            for fd in here:
                os.close(fd)
            self._read, self._write = there
            self._run(work, arguments)
        for fd in there:
            os.close(fd)
        self._read, self._write = here
        self._rest = b""
        self._status: int | None = None

    def _run(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """In the child: never returns to the test run."""
        self._rest = b""
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            work(self, *arguments)
            code = 0
        except BaseException:  # noqa: BLE001 - it is told to the parent
            self.say({"failed": traceback.format_exc()})
        finally:
            os._exit(code)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        for fd in (self._read, self._write):
            os.close(fd)

    def say(self, value: Any) -> None:
        """One JSON value to the other side."""
        os.write(self._write, json.dumps(value).encode() + b"\n")

    def hear(self, seconds: float = HEAR_SECONDS_MAX) -> Any:
        """The next value from the other side. A failure of the child is one here."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._read, 65536) if readable else b""
            assert part, "the other process is gone" if readable else f"the other process said nothing for {seconds} s"
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        value = json.loads(line)
        assert not (isinstance(value, dict) and "failed" in value), value["failed"]
        return value

    def said(self) -> bool:
        """Whether there is something to `hear`."""
        return b"\n" in self._rest or bool(select.select([self._read], [], [], 0)[0])

    def signal(self, number: int) -> None:
        """Such as SIGSTOP; waits until it has stopped."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            eventually(lambda: _state(self.pid) == "T", "the child has stopped")

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """Its exit status."""
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    (a_read, a_write), (b_read, b_write) = os.pipe(), os.pipe()
    return (a_read, b_write), (b_read, a_write)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rsplit(b")", 1)[1].split()[0].decode()


def rss_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: the shared segment does not count."""
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("RssAnon:")) << 10


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Wire:
    """A session driven by hand: it can stop between reserve and commit, which no call of a client does."""

    def __init__(self, socket: str, size: int, **identity: Any) -> None:
        self.connection = Connection(socket)
        self.welcome = self.ask(wire.Hello(wire.VERSION, "by hand"))[0]
        named = Namespace(**{**IDENTITY, "layout": Layout.opaque(size), **identity})
        self.row = self.ask(wire.OpenNamespace(named.to_dict()))[0].row

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.close()

    def ask(self, message: wire.Message, *arrays: Any) -> Any:
        """(reply, blob)."""
        return self.connection.call(Call(message, arrays))

    def namespace_number(self) -> int:
        """The namespace's number, as it stands in the segment."""
        found = segment.attach(self.welcome.segment, owner=False)
        number = int(found.namespaces[self.row, 0])
        found.close()
        return number

    def reserve(self, keys: np.ndarray, seconds: float = 0.0) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Number, status an item, entry ids and offsets."""
        reply, blob = self.ask(wire.Reserve(self.row, self.namespace_number(), len(keys), seconds), keys)
        status = blob.take(np.uint8, reply.n)
        blob.take(np.uint8, reply.n)
        return reply.number, status, blob.take(np.int64, reply.m), blob.take(np.int64, reply.m)

    def commit(self, number: int, count: int) -> np.ndarray:
        """Status an item."""
        reply, blob = self.ask(wire.Commit(number, count), np.ones(count, np.uint8))
        return blob.take(np.uint8, reply.n)


def half_a_put(child: Child, socket: str, size: int, numbers: list[int]) -> None:
    """Reserves, fills half of each page and waits: to be killed there."""
    session = Wire(socket, size)
    _, status, ids, offsets = session.reserve(keys_of(*numbers))
    data = segment.attach(session.welcome.segment, owner=False).data.array
    for offset in offsets.tolist():
        data[offset : offset + size // 2] = 0xEE
    child.say([status.tolist(), len(ids)])
    child.hear(60)
