"""Pages of another node: a get over loopback TCP, beside a plain copy between two processes: one JSON line a row.

    python scripts/bench/bench_remote.py [--repeats N] [--venv FOLDER]

Two pools and whoever says who has what, all real processes; the client is of the second, the pages are on the first. Before each get the
second pool forgets them (not timed). The floor is what two processes can do at all: `sendfile` out of a file in shared memory, `recv_into`
shared memory, one connection, no checksums. ``ratio`` is ours over the floor in bytes a second.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import Machine, child, compared, emit, in_turns, namespace, settle, wait_until_quiet

import umbp
from tests.pools import PoolProcess
from tests.signpost import Signpost
from umbp import ReadStatus

SHAPES = ((1 << 20, 64, 0.85), (64 << 10, 128, 0.0), (4 << 20, 16, 0.0))
ROUNDS = 8  # gets of a repetition, each of other pages


# -- the floor -----------------------------------------------------------------------------------------------------------------------


def serve_floor(path: str) -> None:
    """The other process of the floor: sends the parts of a file that it is asked for."""
    file = os.open(path, os.O_RDONLY)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while len(order := connection.recv(16, socket.MSG_WAITALL)) == 16:
        offset, size = np.frombuffer(order, np.int64).tolist()
        while size:
            sent = os.sendfile(connection.fileno(), file, offset, size)
            offset, size = offset + sent, size - sent


class Floor:
    """This process of the floor, with memory of its own to receive into."""

    def __init__(self, size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="umbp-floor-", dir="/dev/shm")
        path = Path(self.folder.name, "pages")
        path.write_bytes(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes())
        target = Path(self.folder.name, "target")
        with target.open("w+b") as file:
            file.truncate(size)
            self.target = mmap.mmap(file.fileno(), size)
        np.frombuffer(self.target, np.uint8)[:] = 0  # faulted in
        self.process = child(__file__, "--floor", str(path))
        assert self.process.stdout is not None
        self.connection = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())))
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def copy(self, offset: int, size: int) -> None:
        self.connection.sendall(np.array([offset, size], np.int64).tobytes())
        view, at = memoryview(self.target), offset
        while at < offset + size:
            at += self.connection.recv_into(view[at : offset + size])

    def close(self) -> None:
        self.connection.close()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()
        self.folder.cleanup()


# -- the subject ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def two_pools(dram: str) -> Iterator[tuple[PoolProcess, PoolProcess, Signpost]]:
    """The one that has the pages, and the one that is asked for them."""
    with Signpost() as master, PoolProcess(dram=dram) as source, PoolProcess("--master", master.url, dram=dram) as target:
        yield source, target, master


def rows_of(size: int, batch: int, at_least: float, repeats: int, source: umbp.Pool, target: umbp.Pool, world: tuple) -> None:
    first, second, master = world
    total = size * batch * ROUNDS
    keys = np.random.default_rng(size).integers(0, 256, (batch * ROUNDS, 32), dtype=np.uint8)
    values = np.random.default_rng(2).integers(0, 256, (batch, size), dtype=np.uint8)
    here, there = namespace(target, size, f"remote {size}"), namespace(source, size, f"remote {size}")
    for start in range(0, len(keys), batch):
        assert not there.put(keys[start : start + batch], values).refused.any()
    settle(source)
    master.add(first, there, keys)
    out = np.zeros((batch, size), np.uint8)
    floor = Floor(total)

    def ours() -> list[float]:
        seconds = []
        for start in range(0, len(keys), batch):
            part = keys[start : start + batch]
            here.remove(part)
            began = time.perf_counter()
            statuses = here.get(part, out, deadline=10.0)
            seconds.append(time.perf_counter() - began)
            assert statuses.all(ReadStatus.HIT), statuses
        assert (out == values).all()
        return seconds

    def theirs() -> list[float]:
        seconds = []
        for start in range(0, total, size * batch):
            began = time.perf_counter()
            floor.copy(start, size * batch)
            seconds.append(time.perf_counter() - began)
        return seconds

    try:
        machine = Machine(first.pid, second.pid, floor.process.pid)
        wait_until_quiet()
        subject, plain = in_turns(repeats, ours, theirs, machine=machine)
        row = compared(subject, plain, bytes_a_call=size * batch, at_least=at_least)
        emit(bench="remote", op="get", size=size, batch=batch, **row, foreign_cpu=machine.kept)
    finally:
        floor.close()
        there.flush()
        here.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--floor", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.floor:
        serve_floor(arguments.floor)
        return
    with two_pools("1GiB") as world, umbp.connect(world[0].socket) as source, umbp.connect(world[1].socket) as target:
        for size, batch, at_least in SHAPES:
            rows_of(size, batch, at_least, arguments.repeats, source, target, world)


if __name__ == "__main__":
    main()
