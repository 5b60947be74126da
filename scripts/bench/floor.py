"""The floor: the least that pages in shared memory, kept by a process in Python, can cost. What a pool is compared with, not a pool.

A daemon with one dict, and a client that copies with one NumPy call a page: no eviction, leases, checksums, limits or versions, and
nothing survives. Keys are 16 bytes (half of a page key's). Every operation is one small binary message and its reply:

    alloc: size, n -> n offsets     commit: size, keys, offsets -> ""     locate: keys -> offsets (-1: absent)     exists: keys -> n bytes

    with Floor(1 << 30) as floor:
        floor.put(keys, rows, size)         # keys: bytes, 16 each; rows: a list of arrays of size bytes
        floor.get(keys, rows, size)         # False if one is absent
        floor.exists(keys)                  # a byte a key

Run by itself it prints a row for each operation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from types import TracebackType

import numpy as np

KEY_BYTES = 16
PREFIX = struct.Struct("<IBQ")  # bytes that follow, operation, object size
ALLOC, COMMIT, LOCATE, EXISTS, CLEAR = range(5)
SECONDS_MAX = 60.0


class Daemon(asyncio.Protocol):
    """The other side: one connection, which is the parent's; the process ends with it."""

    def __init__(self, capacity_bytes: int, over: asyncio.Event) -> None:
        self.capacity_bytes = capacity_bytes
        self.over = over
        self.index: dict[bytes, int] = {}
        self.top = 0
        self.buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer
        buffer += data
        while len(buffer) >= PREFIX.size:
            body, op, size = PREFIX.unpack_from(buffer)
            if len(buffer) < PREFIX.size + body:
                return
            reply = self.answer(op, size, bytes(buffer[PREFIX.size : PREFIX.size + body]))
            del buffer[: PREFIX.size + body]
            self.transport.write(PREFIX.pack(len(reply), op, 0) + reply)

    def answer(self, op: int, size: int, body: bytes) -> bytes:
        if op == ALLOC:
            (count,) = struct.unpack("<Q", body)
            count = min(count, (self.capacity_bytes - self.top) // size)
            offsets = range(self.top, self.top + count * size, size)
            self.top += count * size
            return struct.pack(f"<{count}q", *offsets)
        if op == COMMIT:
            count = len(body) // (KEY_BYTES + 8)
            keys, offsets = body[: count * KEY_BYTES], struct.unpack_from(f"<{count}q", body, count * KEY_BYTES)
            self.index.update(zip(split(keys), offsets, strict=True))
            return b""
        if op == LOCATE:
            get = self.index.get
            found = [get(key, -1) for key in split(body)]
            return struct.pack(f"<{len(found)}q", *found)
        if op == EXISTS:
            return bytes(map(self.index.__contains__, split(body)))
        self.index.clear()
        self.top = 0
        return b""


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class Floor:
    """The client, and the daemon's life: started by ``with``, its memory faulted in by both before the block begins."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes

    def __enter__(self) -> Floor:
        memory = os.memfd_create("floor")
        os.ftruncate(memory, self.capacity_bytes)
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--serve", str(theirs.fileno()), "--memory", str(memory), "--bytes", str(self.capacity_bytes)]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(), memory), start_new_session=True)
        theirs.close()
        self._socket = ours
        ours.settimeout(SECONDS_MAX)
        try:
            self.clear()  # answered once its pages are faulted in
            mapping = mmap.mmap(memory, self.capacity_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._data = np.frombuffer(mapping, np.uint8)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            os.close(memory)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, op: int, size: int, body: bytes) -> bytes:
        self._socket.sendall(PREFIX.pack(len(body), op, size) + body)
        got = self._socket.recv(1 << 20)
        while len(got) < PREFIX.size or len(got) < PREFIX.size + PREFIX.unpack_from(got)[0]:
            more = self._socket.recv(1 << 20)
            if not more:
                raise ConnectionError("the floor's daemon is gone")
            got += more
        return got[PREFIX.size :]

    def put(self, keys: bytes, rows: list[np.ndarray], size: int) -> None:
        count = len(keys) // KEY_BYTES
        packed = self.call(ALLOC, size, struct.pack("<Q", count))
        data, copy = self._data, np.copyto
        for at, offset in enumerate(struct.unpack(f"<{count}q", packed)):
            copy(data[offset : offset + size], rows[at])
        self.call(COMMIT, size, keys + packed)

    def enter(self, keys: bytes) -> None:
        """Make keys known, without bytes."""
        self.call(COMMIT, 0, keys + bytes(len(keys) // KEY_BYTES * 8))

    def get(self, keys: bytes, rows: list[np.ndarray], size: int) -> bool:
        count = len(keys) // KEY_BYTES
        data, copy, good = self._data, np.copyto, True
        for at, offset in enumerate(struct.unpack(f"<{count}q", self.call(LOCATE, size, keys))):
            if offset < 0:
                good = False
            else:
                copy(rows[at], data[offset : offset + size])
        return good

    def exists(self, keys: bytes) -> bytes:
        return self.call(EXISTS, 0, keys)

    def clear(self) -> None:
        self.call(CLEAR, 0, b"")


def serve(connection: int, memory: int, capacity_bytes: int) -> None:
    mapping = mmap.mmap(memory, capacity_bytes)
    np.frombuffer(mapping, np.uint8)[::4096] = 0

    async def main() -> None:
        over = asyncio.Event()
        sock = socket.socket(fileno=connection)
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: Daemon(capacity_bytes, over), sock=sock)
        await over.wait()

    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description="The floor by itself: one JSON line an operation.")
    parser.add_argument("--repeats", type=int, default=5, help="passes over 1 GiB for each size (default 5)")
    for name in ("--serve", "--memory", "--bytes"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.memory, arguments.bytes)
        return
    with Floor(1 << 30) as floor:
        for size, batch in ((64 << 10, 128), (1 << 20, 64), (4 << 20, 16)):
            count = (1 << 30) // size
            keys = np.random.default_rng(size).bytes(count * KEY_BYTES)
            rows = list(np.ones((batch, size), np.uint8))
            seconds: dict[str, list[float]] = {"put": [], "get": []}
            for _ in range(arguments.repeats):
                floor.clear()
                for name, function in (("put", floor.put), ("get", floor.get)):
                    for start in range(0, count, batch):
                        began = time.perf_counter()
                        function(keys[start * KEY_BYTES : (start + batch) * KEY_BYTES], rows, size)
                        seconds[name].append(time.perf_counter() - began)
            for name, times in seconds.items():
                middle = statistics.median(times)
                row = {"bench": "floor", "op": name, "size": size, "batch": batch}
                print(json.dumps(row | {"gbps": round(size * batch / middle / 1e9, 2), "p50_us": round(middle * 1e6, 1)}), flush=True)


if __name__ == "__main__":
    main()
