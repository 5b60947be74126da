"""The SSD tier against the same disk without it, and what a saturated disk does to DRAM: one JSON line a row.

    python scripts/bench/bench_ssd.py [--folder DIR] [--repeats 5] [--only tier,start,get,pool,load]

``tier``: batches of 64 x 1 MiB, 16 x 4 MiB and 1,024 x 64 KiB (stored together) are read and written by `SsdTier`, checksums verified and
made, every write synced. The floor is a raw loop in the same run, taking turns, that reads and writes the same bytes of the same files from
and to the same memory: where these lie matters, most of all in how many pieces the memory does. It moves them with O_DIRECT from four
threads in blocks of 4 MiB, the best that this loop does on most disks, with one fdatasync a batch for writes; ``same_gbps`` is that loop
with blocks of the object's size.
``start``: a million pages (4 KiB each) are listed again by a start, in seconds; also after a kill.
``get``: 32 pages of 1 MiB that are on SSD alone, got by a client: read by itself from the files (``straight``, into memory that direct I/O
takes, and into an array that it does not) or by way of the pool's DRAM (``promoted``), against the raw loop in the same files, in turns.
``pool``: short calls to DRAM (a `get` of one page, which the client answers out of shared memory, and a lease, two calls of the pool)
while the disk is saturated, against the same pool idle: the ratio is of the 99th percentiles. Another client asks for pages that are on SSD
alone, by `prefetch`, three batches of 32 MiB ahead, and stores 8 MiB new ones with each, which the pool writes: so the disk never waits for
that client, and of two processors it takes little itself (it copies nothing that it reads; one that does is a load of its own, whatever
the pages come from). "Idle" begins when all of what it had asked for is read and written. Both have the pool's own work in them: the
history of the calls that are measured is entered meanwhile, in the idle pool too. The pool holds 2 GiB, so that it is filled anew every two
seconds.
``load``: `Loader.load` of pages of 8 layers that are on SSD alone, layer by layer as they are read, against a load that waits for whole
pages first, in turns: until the first layer is in its slots, and until all are. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import harness
import numpy as np

import umbp
from umbp.policies import CLEANING, EVICTION, STRIPING
from umbp.policies.base import build
from umbp.pool.__main__ import SWITCH_SECONDS
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_catalog import private_table
from umbp.store.ssd_drive import Drive
from umbp.store.ssd_format import NamespaceNote
from umbp.store.ssd_records import Batch
from umbp.store.ssd_system import Steps, System, aligned, finish
from umbp.store.ssd_upkeep import open_steps
from umbp.types import U8, ReadStatus, Tier, WriteStatus

THREADS, BLOCK_BYTES = 4, 4 << 20
BATCH_BYTES = 64 << 20
SHAPES = ((1 << 20, 0.9), (4 << 20, 0.9), (64 << 10, 0.8))
BATCHES = 8
SEGMENT_BYTES = 256 << 20  # as of a tier of 8 GiB and more
PAGES = 3072  # of 1 MiB on SSD, in turn: half as much again as the pool has DRAM
PREFETCH, AHEAD = 32, 3  # of them are asked for at a time, and so many times as much are under way
START_PAGES, START_SECONDS = 1_000_000, 5.0


class Names:
    """One namespace a number."""

    def digest_of(self, number: int) -> bytes:
        return number.to_bytes(32, "big")

    def number_of(self, digest: bytes) -> int:
        return int.from_bytes(digest, "big")

    def note_of(self, digest: bytes) -> NamespaceNote:
        return NamespaceNote("bench", 1)

    def quota_of(self, number: int) -> int:
        return 0


def open_tier(folder: Path, size: int, entries: int, segment_bytes: int = 0) -> SsdTier:
    """A tier on this folder."""
    drive = Drive(str(folder), size, System(), segment_bytes=segment_bytes)
    policies = {"cleaning": build(CLEANING, "cost_benefit"), "striping": build(STRIPING, "even")}
    tier = SsdTier([drive], private_table(entries, 7), Names(), time.time, eviction=build(EVICTION, "lru", entries), **policies)
    finish(open_steps(tier, 0.0, drive))
    assert drive.error is None, drive.error
    return tier


# -- the tier ----------------------------------------------------------------------------------------------------------------------


Extent = tuple[int, int, int, int]
"""Descriptor, offset in the file, offset in memory, bytes."""


class Raw:
    """The raw loop: batches of extents of files that are open for direct I/O are read into this memory, or written from it, by threads."""

    def __init__(self, memory: Any) -> None:
        self.threads = ThreadPoolExecutor(THREADS)
        self.memory = memoryview(memory)

    def read(self, batches: list[list[Extent]], block: int = BLOCK_BYTES) -> list[float]:
        """Seconds of each."""
        return harness.timed(self._move, [(os.preadv, batch, block) for batch in batches])

    def write(self, batches: list[list[Extent]], block: int = BLOCK_BYTES) -> list[float]:
        """Seconds of each, synced."""
        return harness.timed(self._write, [(batch, block) for batch in batches])

    def _write(self, batch: list[Extent], block: int) -> None:
        self._move(os.pwritev, batch, block)
        for fd in {fd: None for fd, *_ in batch}:
            os.fdatasync(fd)

    def _move(self, call: Callable[..., int], batch: list[Extent], block: int) -> None:
        def one(part: Extent) -> None:
            fd, offset, memory, size = part
            assert call(fd, [self.memory[memory : memory + size]], offset) == size

        list(self.threads.map(one, cut(batch, block)))


def cut(batch: list[Extent], block: int) -> list[Extent]:
    """In parts of at most this size."""
    return [(fd, offset + at, memory + at, min(block, size - at)) for fd, offset, memory, size in batch for at in range(0, size, block)]


def lying(tier: SsdTier, place: np.uint64, keys: np.ndarray, page: int) -> list[Extent]:
    """Where the tier has written these pages, which follow one another in memory; those that do so in a file too as one."""
    pages = tier.catalog.where(place, tier.catalog.find(place, keys), np.arange(len(keys))).pages
    found: list[Extent] = []
    for at, (number, block) in enumerate(zip(pages.files.tolist(), pages.block.tolist(), strict=True)):
        fd, offset, memory = tier.catalog.files[number].fd, block * 4096, at * page
        if found and found[-1][0] == fd and found[-1][1] + found[-1][3] == offset:
            found[-1] = (*found[-1][:3], found[-1][3] + page)
        else:
            found.append((fd, offset, memory, page))
    return found


def tier_rows(folder: Path, repeats: int) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    size = 4 * BATCHES * BATCH_BYTES
    tier = open_tier(folder / "tier", size, 1 << 17, SEGMENT_BYTES)
    memory = np.frombuffer(mmap.mmap(-1, BATCH_BYTES), np.uint8)  # shared, as a pool's pages
    raw = Raw(memory)
    memory[:] = np.random.default_rng(1).integers(0, 256, BATCH_BYTES, dtype=np.uint8)
    for at in range(size // BATCH_BYTES):  # so that all its files have been in use
        keys = harness.random_keys(BATCH_BYTES >> 20, at)
        assert (tier.write(0.0, place_word(9, 1 << 20), keys, memory.reshape(-1, 1 << 20)) == WriteStatus.STORED).all()
    for number, (page, target) in enumerate(SHAPES, start=1):
        count, place = BATCH_BYTES // page, place_word(number, page)
        rows = memory.reshape(count, page)
        fresh = [harness.random_keys(count, number * 1000 + at) for at in range(BATCHES * (harness.ATTEMPTS * repeats + 3))]
        written: list[np.ndarray] = []

        def write(keys: np.ndarray, place: np.uint64 = place, rows: np.ndarray = rows) -> Steps[U8]:
            none = np.zeros(len(keys), np.uint64)
            return tier.write_steps(time.monotonic(), Batch(place, keys, [row.data for row in rows], none, straight=True))

        def writes(fresh: list[np.ndarray] = fresh, written: list[np.ndarray] = written) -> list[float]:
            """As a pool does it: while one batch is on its way the next one is made ready."""
            written[:] = part = [fresh.pop() for _ in range(BATCHES)]
            began, under_way = time.perf_counter(), deque[tuple[Steps[U8], list[Any]]]()
            for keys in part:
                steps = write(keys)
                under_way.append((steps, next(steps)))
                if len(under_way) == 2:
                    done(*under_way.popleft())
            done(*under_way.popleft())
            return [(time.perf_counter() - began) / BATCHES]

        def where(place: np.uint64 = place, written: list[np.ndarray] = written, page: int = page) -> list[list[Extent]]:
            return [lying(tier, place, keys, page) for keys in written]

        def done(steps: Steps[U8], waiting: list[Any]) -> None:
            wait(waiting)
            assert (finish(steps) == WriteStatus.STORED).all()

        def read(keys: np.ndarray, place: np.uint64 = place, rows: np.ndarray = rows) -> None:
            assert not tier.read(time.monotonic(), place, keys, rows).max() > 1

        def reads(written: list[np.ndarray] = written) -> list[float]:
            return [sum(harness.timed(read, [(keys,) for keys in written])) / BATCHES]

        for op, subject, floor in (("write", writes, raw.write), ("read", reads, raw.read)):
            harness.wait_until_quiet()
            machine = harness.Machine()

            def best(floor: Any = floor, where: Any = where, block: int = BLOCK_BYTES) -> list[float]:
                return [sum(floor(where(), block)) / BATCHES]

            def same(best: Callable[..., list[float]] = best, page: int = page) -> list[float]:
                return best(block=page)

            writes()  # so that there is something for the raw loop, whose turn is first
            ours, theirs, alike = harness.in_turns(repeats, subject, best, same, machine=machine)
            row = harness.compared(ours, theirs, bytes_a_call=BATCH_BYTES, at_least=target)
            row |= {"same_gbps": alike.row("", BATCH_BYTES)["gbps"], "foreign_cpu": machine.kept}
            harness.emit(bench="ssd", op=f"batch {op}", pages=count, page_bytes=page, **row)
    tier.close()


# -- the start ---------------------------------------------------------------------------------------------------------------------


def start_rows(folder: Path) -> None:
    entries, place, page = START_PAGES * 5 // 4, place_word(1, 4096), 4096
    size = START_PAGES * 4096 * 3 // 2
    tier = open_tier(folder / "many", size, entries)
    memory = np.frombuffer(aligned(8192 * page), np.uint8).reshape(-1, page)
    random = np.random.default_rng(3)
    for start in range(0, START_PAGES, 8192):
        count = min(8192, START_PAGES - start)
        keys = random.integers(0, 256, (count, 32), dtype=np.uint8)
        assert (tier.write(0.0, place, keys, memory[:count]) == WriteStatus.STORED).all()
    for op in ("start after a kill", "start after a stop"):
        if op.endswith("stop"):
            tier.stop(0.0)
        tier.close()
        began, cpu = time.monotonic(), time.process_time()
        tier = open_tier(folder / "many", size, entries)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        assert tier.catalog.count == START_PAGES
        row = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}
        harness.emit(bench="ssd", op=op, pages=START_PAGES, **row, target=f"< {START_SECONDS:.0f} s", met=seconds < START_SECONDS)
    tier.close()


# -- a get -------------------------------------------------------------------------------------------------------------------------


def get_rows(folder: Path, repeats: int) -> None:
    size, batch, batches = 1 << 20, 32, 16
    keys, values = harness.random_keys(batches * batch, 77), np.random.default_rng(1).integers(0, 256, (batch, size), dtype=np.uint8)
    parts = [keys[at : at + batch] for at in range(0, len(keys), batch)]
    options = ("--ssd-admission", "always", "--eviction", "lru", "--ssd")
    through = harness.pool("--fetch", "pass_through", *options, f"{folder / 'through'}:4GiB", dram="256MiB")
    with through as (process, client), harness.pool(*options, f"{folder / 'copy'}:4GiB", dram="256MiB") as (other, promoting):
        spaces = [harness.namespace(each, size) for each in (client, promoting)]
        for space, each in zip(spaces, (client, promoting), strict=True):
            for part in parts:
                assert space.put(part, values).all(WriteStatus.STORED)
                wait_written(each)
        evict_all(process.http)

        def gets(space: umbp.Namespace, out: np.ndarray) -> Callable[[], list[float]]:
            def run() -> list[float]:
                seconds: list[float] = []
                for part in parts:  # of which DRAM has room for half: the ones got last have gone when it is their turn again
                    assert (space.locate(part) == Tier.SSD).all()
                    began = time.perf_counter()
                    statuses = space.get(part, out, deadline=10.0)
                    seconds.append(time.perf_counter() - began)
                    assert statuses.all(ReadStatus.HIT)
                return seconds

            return run

        plain = np.empty((batch, size), np.uint8)
        works = [gets(spaces[0], spaces[0].empty(batch)), gets(spaces[0], plain), gets(spaces[1], plain)]
        for name, out in (("through", spaces[0].empty(batch).data.cast("B")), ("copy", mmap.mmap(-1, batch * size))):
            raw = Raw(out)
            paths = sorted((folder / name).glob("segment-*"))  # in the order in which they were begun, all but the last one full
            fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
            where = [[(fd, at, 0, batch * size)] for fd in fds for at in range(0, os.fstat(fd).st_size, batch * size)][:batches]
            works.append(lambda raw=raw, where=where: raw.read(where))
        harness.wait_until_quiet()
        machine = harness.Machine(process.pid, other.pid)
        sides = harness.in_turns(repeats, *works, machine=machine)
        assert client.statistics().read_straight >= 2 * repeats * len(keys)
        for name, side, floor in zip(("straight", "straight, by a buffer", "promoted"), sides, (3, 3, 4), strict=False):
            row = harness.compared(side, sides[floor], bytes_a_call=batch * size)
            harness.emit(bench="ssd", op=f"get of 32 x 1 MiB from SSD by a client, {name}", **row, foreign_cpu=machine.kept)


# -- the pool ----------------------------------------------------------------------------------------------------------------------


def saturate(socket: str) -> None:
    """The other client: pages from SSD into the pool's DRAM, `AHEAD` batches asked for at any time, and new ones, for ever."""
    size = 1 << 20
    with umbp.connect(socket, client="saturate") as client:
        space = harness.namespace(client, size)
        keys, values = harness.random_keys(PAGES, 77), np.random.default_rng(3).integers(0, 256, (8, size), dtype=np.uint8)
        fresh = harness.random_keys(1 << 16, int(time.time_ns()) & 0xFFFF)
        print("reading", flush=True)
        at, asked = 0, deque[str]()
        while True:
            while len(asked) < AHEAD:
                asked.append(space.prefetch(keys[(np.arange(PREFETCH) + at) % len(keys)], deadline=10.0).request_id)
                space.put(fresh[at % len(fresh) :][: len(values)], values)
                at += PREFETCH
            if space.prefetch_status(asked[0]).over:
                asked.popleft()
            else:
                time.sleep(0.005)


def pool_rows(folder: Path, repeats: int) -> None:
    from bench_eviction import Beside  # the same child, stopped between the turns

    size, other = 1 << 20, 64 << 10
    options = ("--ssd", f"{folder / 'pool'}:8GiB", "--ssd-admission", "always", "--eviction", "lru")
    with harness.pool(*options, dram="2GiB") as (process, client):
        space, small = harness.namespace(client, size), harness.namespace(client, other, "small")
        keys = harness.random_keys(PAGES, 77)
        values = np.random.default_rng(1).integers(0, 256, (32, size), dtype=np.uint8)
        for start in range(0, len(keys), 32):
            space.put(keys[start : start + 32], values)
            wait_written(client)
        hot = harness.random_keys(256, 5)
        small.put(hot, np.zeros((256, other), np.uint8))
        wait_written(client)
        pin = small.pin(hot)
        saturating = Beside("--saturate", process.socket, script=__file__)
        try:
            out = np.empty((1, other), np.uint8)

            def gets() -> list[float]:
                return harness.timed(lambda at: small.get(hot[at : at + 1], out), [(at % 256,) for at in range(2000)])

            def calls() -> list[float]:
                def one(at: int) -> None:
                    with small.lease(hot[at : at + 8]):
                        pass

                return harness.timed(one, [(at % 240,) for at in range(500)])

            def idle(work: Callable[[], list[float]]) -> Callable[[], list[float]]:
                def run() -> list[float]:
                    wait_still(client)
                    return work()

                return run

            def beside(work: Callable[[], list[float]]) -> Callable[[], list[float]]:
                def run() -> list[float]:
                    with saturating:
                        return work()

                return run

            for op, work in (("get of a 64 KiB page in DRAM", gets), ("lease of 8 pages in DRAM (two calls of the pool)", calls)):
                harness.wait_until_quiet()
                machine = harness.Machine(process.pid, saturating.pid)
                before = client.status()["ssd"]["disks"][0]["read_bytes"]
                busy, alone = harness.in_turns(repeats, beside(work), idle(work), machine=machine)
                moved = client.status()["ssd"]["disks"][0]["read_bytes"] - before
                ratio = busy.percentile(0.99) / alone.percentile(0.99)
                row = (
                    busy.row("", 0)
                    | alone.row("idle_", 0)
                    | {"ratio": round(ratio, 2), "target": "ratio <= 2 (of p99)", "met": ratio <= 2.0}
                )
                harness.emit(bench="ssd", op=f"{op}, disk saturated", read_bytes_meanwhile=moved, **row, foreign_cpu=machine.kept)
        finally:
            saturating.end()
            small.unpin(pin)


def load_rows(folder: Path, repeats: int) -> None:
    import torch

    from umbp.loader import loader as module

    layers, layer_bytes, count = 8, 128 << 10, 256
    size = count * layers * layer_bytes
    tensors = {"kv": [torch.zeros((count, layer_bytes), dtype=torch.uint8) for _ in range(layers)]}
    with harness.pool("--ssd", f"{folder / 'load'}:4GiB", "--ssd-admission", "always", dram="768MiB") as (process, client):
        layout = umbp.Layout.of(tensors, page_tokens=1)
        space = client.namespace(model="load", page_tokens=1, layout=layout, replicated=True)
        keys, slots = harness.random_keys(count, 9), np.arange(count)
        for tensor in tensors["kv"]:
            tensor.random_(0, 256)
        with umbp.Loader(space, tensors) as loader:
            for start in range(0, count, 32):
                assert loader.offload(keys[start : start + 32], slots[start : start + 32]).result().all(WriteStatus.STORED)
                wait_written(client)
            streaming = module.streaming_or_none

            def load(layered: bool) -> list[float]:
                give_up = time.monotonic() + 20.0
                while not (space.locate(keys) == Tier.SSD).all():  # the last load lets go of its pages by and by
                    assert time.monotonic() < give_up, "pages are not on SSD alone"
                    evict_all(process.http)
                module.streaming_or_none = streaming if layered else lambda *_: None  # type: ignore[assignment]
                done = loader.load(keys, slots, deadline=60.0).finish()
                assert not len(done.missing), done.reason
                return [float(done.ready_at[0]), float(done.ready_at[-1])]

            harness.wait_until_quiet()
            machine = harness.Machine(process.pid)
            layered, whole = harness.in_turns(repeats, lambda: load(layered=True), lambda: load(layered=False), machine=machine)
            module.streaming_or_none = streaming
        for at, until in enumerate(("the first layer", "all layers")):
            ours, theirs = (harness.Side([[each[at]] for each in side.passes]) for side in (layered, whole))
            row = harness.compared(ours, theirs)
            harness.emit(bench="ssd", op=f"load of {size >> 20} MiB from SSD until {until} can be used", **row, foreign_cpu=machine.kept)


def evict_all(http: str) -> None:
    body, headers = json.dumps({"bytes": "1TiB"}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{http}/v1/evict", body, headers, method="POST"), timeout=30).close()


def wait_written(client: umbp.Pool, seconds_max: float = 60.0) -> None:
    give_up = time.monotonic() + seconds_max
    while client.status()["ssd"]["waiting"] and time.monotonic() < give_up:
        time.sleep(0.01)


def wait_still(client: umbp.Pool, seconds_max: float = 30.0) -> None:
    """Until the disk has been left alone for a moment."""
    give_up, before = time.monotonic() + seconds_max, None
    while time.monotonic() < give_up:
        ssd = client.status()["ssd"]
        now = (ssd["waiting"], *(disk[key] for disk in ssd["disks"] for key in ("read_bytes", "written_bytes")))
        if now == before and not ssd["waiting"]:
            return
        before = now
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure; 8 GiB are used for a while")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--only", default="tier,start,get,pool,load", help="which rows")
    parser.add_argument("--saturate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.saturate:
        saturate(arguments.saturate)
    folder = Path(tempfile.mkdtemp(prefix="bench-ssd-", dir=arguments.folder))
    try:
        for name, rows in (
            ("tier", lambda: tier_rows(folder, arguments.repeats)),
            ("start", lambda: start_rows(folder)),
            ("get", lambda: get_rows(folder, arguments.repeats)),
            ("pool", lambda: pool_rows(folder, arguments.repeats)),
            ("load", lambda: load_rows(folder, arguments.repeats)),
        ):
            if name in arguments.only.split(","):
                rows()
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
    sys.exit()
