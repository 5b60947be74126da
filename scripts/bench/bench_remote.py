"""Pages of another node: a get over loopback TCP, beside a plain copy between two processes and Mooncake Store: one JSON line a row.

    python scripts/bench/bench_remote.py [--repeats 7] [--mooncake FOLDER] [--fetch copy] [--only get|near|load]

A master and two pools, all real processes; the client is of the second pool, the pages are on the first. Before each get the second pool
forgets them (not timed); a get is from the call until the pages are in the caller's memory. The floor is what two processes can do at all:
`sendfile` out of a file in shared memory, `recv_into` shared memory, one connection, no checksums, no copy to a caller. ``ratio`` is ours
over the other's in bytes a second; ``fetch`` the second pool's policy, which is to keep what came unless --fetch says otherwise. With
--mooncake (an environment as `bench_mooncake.py` makes one) the same gets by Mooncake Store, its segment in another process, reached by
TCP; ``plain_copy_ratio`` is then what the floor of the row before made of Mooncake's rate: a target above it is out of reach of one
connection and no work at all.

Then the same gets between two pools that read each other's memory (``way`` is "memory of the machine", and not "network"): what a pool of
one machine gets of another, and no transport at all, beside the same copy and the same Mooncake Store, which go by TCP also there.

Then loads: a loader of the second pool's node restores pages of 8 layers that are on the first, into tensors; "whole pages" is the same
load where each page is waited for until it is whole. Seconds until the first layer can be used, and until all can.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_mooncake import Peer, environment
from harness import Machine, Side, child, compared, emit, in_turns, namespace, settle, timed, wait_until_quiet

import umbp
from tests.masters import MasterProcess, until
from tests.pools import PoolProcess
from umbp import ReadStatus, Tier

SHAPES = ((1 << 20, 64, 0.85, 1.0), (64 << 10, 128, 0.0, 2.0), (4 << 20, 16, 0.0, 1.0))
"""Bytes of a page, pages a get, and what is wanted of the floor and of Mooncake."""
NEAR_SHAPES = ((64 << 10, 128, 0.0, 2.0), (1 << 20, 64, 0.0, 1.0), (4 << 20, 16, 0.0, 1.0))
NETWORK, MEMORY = "network", "memory of the machine"
WORKING_SET = 512 << 20
LOAD_PAGES, LAYERS, LAYER_BYTES = 256, 8, 128 << 10


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


class Subject:
    """Two pools with the same pages on the first, and a client of the second, which gets them the ``way`` that it says."""

    def __init__(self, master: MasterProcess, pools: tuple[PoolProcess, PoolProcess], size: int, batch: int, way: str, fetch: str) -> None:
        self.size, self.batch = size, batch
        self.facts = {"size": size, "batch": batch, "way": way, **({"fetch": fetch} if way == NETWORK else {})}
        self.clients = [umbp.connect(pool.socket) for pool in pools]
        there, self.here = (namespace(client, size, f"remote {size}") for client in self.clients)
        self.keys = np.random.default_rng(size).integers(0, 256, (WORKING_SET // size, 32), dtype=np.uint8)
        self.values = np.random.default_rng(2).integers(0, 256, (batch, size), dtype=np.uint8)
        self.out = np.zeros((batch, size), np.uint8)
        for start in range(0, len(self.keys), batch):
            assert not there.put(self.keys[start : start + batch], self.values).refused.any()
        settle(self.clients[0])
        until(lambda: all(master.locations(bytes(key)) for key in self.keys[[0, -1]]))
        self.there = there
        if way == MEMORY:
            until(lambda: self.here.lookup(self.keys, tier=Tier.NEIGHBOUR).all())

    def get(self) -> list[float]:
        """All pages once, in batches; seconds of each."""
        seconds = []
        for start in range(0, len(self.keys), self.batch):
            part = self.keys[start : start + self.batch]
            self.here.remove(part)
            began = time.perf_counter()
            statuses = self.here.get(part, self.out, deadline=10.0)
            seconds.append(time.perf_counter() - began)
            assert statuses.all(ReadStatus.HIT), statuses
        assert (self.out == self.values).all()
        assert self.facts["way"] == NETWORK or not self.here.lookup(self.keys).any()
        return seconds

    def close(self) -> None:
        self.there.flush()
        self.here.flush()
        for client in self.clients:
            client.close()


def against_the_floor(subject: Subject, repeats: int, at_least: float, pids: list[int]) -> float:
    """Seconds of a plain copy."""
    floor = Floor(WORKING_SET)
    total = subject.size * subject.batch

    def copy() -> list[float]:
        return timed(floor.copy, [(start, total) for start in range(0, WORKING_SET, total)])

    try:
        machine = Machine(*pids, floor.process.pid)
        wait_until_quiet()
        sides = in_turns(repeats, subject.get, copy, machine=machine)
        row = compared(*sides, bytes_a_call=total, at_least=at_least)
        emit(bench="remote", beside="plain copy", **subject.facts, **row, foreign_cpu=machine.kept)
        return sides[1].percentile(0.5)
    finally:
        floor.close()


def against_mooncake(subject: Subject, peer: Peer, repeats: int, at_least: float, pids: list[int], plain: float) -> None:
    shape = {"size": subject.size, "batch": subject.batch}
    peer.ask(op="put", **shape)

    def get() -> list[float]:
        return peer.ask(op="get", scattered=False, **shape)

    machine = Machine(*pids, peer.process.pid, *peer.daemons)
    wait_until_quiet()
    sides = in_turns(repeats, subject.get, get, machine=machine)
    row = compared(*sides, bytes_a_call=subject.size * subject.batch, at_least=at_least)
    fields = {name.replace("floor_", "mooncake_"): value for name, value in row.items()}
    fields["plain_copy_ratio"] = round(sides[1].percentile(0.5) / plain, 3)
    emit(bench="remote", beside="Mooncake Store", **subject.facts, **fields, foreign_cpu=machine.kept)


def gets(master: MasterProcess, way: str, arguments: argparse.Namespace, pools: tuple[PoolProcess, PoolProcess]) -> None:
    """All shapes, one way."""
    pids = [master.pid, *(pool.pid for pool in pools)]
    for size, batch, of_floor, of_mooncake in SHAPES if way == NETWORK else NEAR_SHAPES:
        subject = Subject(master, pools, size, batch, way, arguments.fetch)
        plain = against_the_floor(subject, arguments.repeats, of_floor, pids)
        if arguments.mooncake:
            with Peer(environment(arguments.mooncake), "remote", WORKING_SET) as peer:
                against_mooncake(subject, peer, arguments.repeats, of_mooncake, pids, plain)
        subject.close()


# -- loads ---------------------------------------------------------------------------------------------------------------------------


def against_whole_pages(master: MasterProcess, pools: tuple[PoolProcess, PoolProcess], repeats: int, pids: list[int], fetch: str) -> None:
    import torch

    from umbp.loader import loader as module

    tensors = {"kv": [torch.zeros((LOAD_PAGES, LAYER_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]}
    for tensor in tensors["kv"]:
        tensor.random_(0, 256)
    layout = umbp.Layout.of(tensors, page_tokens=1)
    clients = [umbp.connect(pool.socket) for pool in pools]
    there, here = (client.namespace(model="load", page_tokens=1, layout=layout, replicated=True) for client in clients)
    keys, slots = np.random.default_rng(9).integers(0, 256, (LOAD_PAGES, 32), dtype=np.uint8), np.arange(LOAD_PAGES)
    with umbp.Loader(there, tensors) as loader:
        assert not loader.offload(keys, slots).result().refused.any()
    settle(clients[0])
    until(lambda: all(master.locations(bytes(key)) for key in keys[[0, -1]]))
    streaming = module.streaming_or_none
    with umbp.Loader(here, tensors) as loader:

        def load(layered: bool) -> list[float]:
            here.remove(keys)
            module.streaming_or_none = streaming if layered else lambda *_: None  # type: ignore[assignment]
            done = loader.load(keys, slots, deadline=60.0).finish()
            assert not len(done.missing), done.reason
            return [float(done.ready_at[0]), float(done.ready_at[-1])]

        machine = Machine(*pids)
        wait_until_quiet()
        layered, whole = in_turns(repeats, lambda: load(layered=True), lambda: load(layered=False), machine=machine)
        module.streaming_or_none = streaming
    for at, what in enumerate(("first layer", "all layers")):
        row = compared(*(Side([[each[at]] for each in side.passes]) for side in (layered, whole)))
        emit(
            bench="remote",
            beside="whole pages",
            load=what,
            bytes=here.object_bytes * LOAD_PAGES,
            fetch=fetch,
            **row,
            foreign_cpu=machine.kept,
        )
    for space, client in zip((there, here), clients, strict=True):
        space.flush()
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--mooncake", type=Path, help="the environment that has Mooncake")
    parser.add_argument("--fetch", default="copy", choices=("copy", "promote", "pass_through"), help="the policy of the pool that reads")
    parser.add_argument("--only", choices=("get", "near", "load"), help="not the others")
    parser.add_argument("--floor", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.floor:
        serve_floor(arguments.floor)
        return
    with MasterProcess() as master:
        if arguments.only != "near":
            with master.pool(dram="1GiB") as first, master.pool("--fetch", arguments.fetch, dram="1GiB") as second:
                master.synced(first, second)
                if arguments.only != "load":
                    gets(master, NETWORK, arguments, (first, second))
                if arguments.only != "get":
                    pids = [master.pid, first.pid, second.pid]
                    against_whole_pages(master, (first, second), arguments.repeats, pids, arguments.fetch)
        if arguments.only in (None, "near"):
            on = ("--neighbours", "read")  # what pools of this machine have unless told otherwise, as those above are
            with master.pool(*on, dram="1GiB") as first, master.pool(*on, dram="1GiB") as second:
                master.synced(first, second)
                gets(master, MEMORY, arguments, (first, second))


if __name__ == "__main__":
    main()
