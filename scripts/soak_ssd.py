"""A soak of the SSD tier: `scripts/soak_ssd [--seconds 600] [--folder DIR] [--data 2GiB] [--kill-every 60]`.

Clients write and read pages at full speed, ten times as many as DRAM holds, so that nearly all reads come from SSD, files are cleaned and
used again, and pages are evicted on both tiers. What a page's bytes are follows from its number, and every byte that a read gives is
compared. Another client loads runs of larger pages into tensors, layer by layer as they are read, and offloads what is missing. In the
first half the pool is killed and started again every minute; in the second, after a warm-up, its descriptors and memory must stay what
they are. No page may have other bytes, and the pool must have written nothing but warnings of its own kills. Ends with 1 where any of it
is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import umbp
from tests.pools import PoolProcess
from umbp.errors import Unavailable
from umbp.grammar import format_size, parse_size
from umbp.types import ReadStatus, WriteStatus

SIZE, BATCH = 256 << 10, 16
LAYERS, LAYER_BYTES, RUN = 8, 128 << 10, 48  # of the pages that are loaded, 48 MiB at a time
GROWTH_MAX = 1.25  # of the pool's own memory after the warm-up
LOOK_SECONDS = 5.0
STEADY_FROM = 0.6  # of the time: a tenth of it after the last kill


@dataclass
class Tally:
    """What one client saw."""

    hits: int = 0
    misses: int = 0
    busy: int = 0
    stored: int = 0
    refused: int = 0
    wrong: int = 0
    streamed: int = 0  # loads that began before their pages were whole


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


def keys_of(numbers: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"".join(map(key, numbers.tolist())), np.uint8).reshape(-1, 32)


def pages(numbers: np.ndarray, size: int = SIZE) -> np.ndarray:
    """(n, size) uint8: each page is its own, down to the last bytes."""
    words = np.arange(size // 8, dtype=np.uint64)[None, :] + (numbers.astype(np.uint64) << np.uint64(24))[:, None]
    return (words * np.uint64(0x9E37_79B9_7F4A_7C15)).view(np.uint8)


def client(told: Connection, socket: str, count: int, seed: int, seconds: float) -> None:
    """Read, and write what was missing, until the time is over."""
    random, tally, out = np.random.default_rng(seed), Tally(), np.empty((BATCH, SIZE), np.uint8)
    give_up = time.monotonic() + seconds
    with umbp.connect(socket, client=f"soak {seed}") as pool:
        space = pool.namespace(model="soak", page_tokens=64, layout=umbp.Layout.opaque(SIZE), replicated=True)
        while time.monotonic() < give_up:
            first = int(random.integers(0, count // BATCH)) * BATCH
            numbers = np.arange(first, first + BATCH)
            keys = keys_of(numbers)
            codes = space.get(keys, out, deadline=5.0).codes
            wanted = pages(numbers)
            hit = codes == ReadStatus.HIT
            tally.wrong += int(np.count_nonzero((out[hit] != wanted[hit]).any(axis=1)))
            tally.hits += int(np.count_nonzero(hit))
            tally.misses += int(np.count_nonzero(codes == ReadStatus.MISS))
            tally.busy += int(np.count_nonzero(codes > ReadStatus.HIT))
            if (codes == ReadStatus.BUSY).all():
                time.sleep(0.05)
            elif not hit.all():
                stored = space.put(keys[~hit], wanted[~hit]).codes
                tally.stored += int(np.count_nonzero(stored == WriteStatus.STORED))
                tally.refused += int(np.count_nonzero(stored >= WriteStatus.ALL_LEASED))
            if random.random() < 0.01:
                with contextlib.suppress(Unavailable):  # the pool is being started again
                    space.remove(keys[:2])
    told.send(tally)


def loads(told: Connection, socket: str, count: int, seed: int, seconds: float) -> None:
    """Load runs of pages into tensors, check each layer when it is told to be there, and offload what was missing."""
    import torch

    random, tally, size = np.random.default_rng(seed), Tally(), LAYERS * LAYER_BYTES
    tensors = {"kv": [torch.zeros((RUN, LAYER_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]}
    rows, slots = [tensor.numpy() for tensor in tensors["kv"]], np.arange(RUN)
    give_up = time.monotonic() + seconds
    with umbp.connect(socket, client=f"soak loads {seed}") as pool:
        layout = umbp.Layout.of(tensors, page_tokens=1)
        space = pool.namespace(model="soak loads", page_tokens=1, layout=layout, replicated=True)
        with umbp.Loader(space, tensors) as loader:
            while time.monotonic() < give_up:
                first = int(random.integers(0, max(1, count - RUN)))
                numbers = np.arange(first, first + RUN)
                wanted = pages(numbers, size).reshape(RUN, LAYERS, LAYER_BYTES)
                load = loader.load(keys_of(numbers), slots, deadline=5.0)
                for layer in range(LAYERS):
                    load.wait(layer)
                missing = load.finish().missing
                good = np.setdiff1d(slots, missing)
                tally.wrong += int(np.count_nonzero([(row[good] != wanted[good, at]).any() for at, row in enumerate(rows)]))
                tally.hits += len(good) * size // SIZE
                tally.misses += len(missing) * size // SIZE
                if load.choice is not None and load.choice.cause == "ssd":
                    tally.streamed += 1
                if len(missing):
                    for at, row in enumerate(rows):
                        row[missing] = wanted[missing, at]
                    with contextlib.suppress(Unavailable):
                        stored = loader.offload(keys_of(numbers[missing]), missing).result().codes
                        tally.stored += int(np.count_nonzero(stored == WriteStatus.STORED)) * size // SIZE
    told.send(tally)


def footprint(pid: int, folder: Path) -> tuple[int, int]:
    """Descriptors, but for the one that it has for each file of the tier, and bytes of memory of its own, of the pool."""
    text, files = Path(f"/proc/{pid}/status").read_text(), len(list(folder.rglob("segment-*")))
    return len(os.listdir(f"/proc/{pid}/fd")) - files, int(text.split("RssAnon:")[1].split()[0]) << 10


def soak(arguments: argparse.Namespace, folder: Path) -> bool:
    data = parse_size(arguments.data, "data")
    count = data * 3 // 4 // SIZE // BATCH * BATCH
    large = data // 4 // (LAYERS * LAYER_BYTES)
    limit = data * 5 // 4
    options = (
        "--ssd",
        f"{folder / 'a'}:{limit // 2}",
        "--ssd",
        f"{folder / 'b'}:{limit // 2}",
        "--ssd-admission",
        "always",
        "--eviction",
        "lru",
    )
    good = True
    with PoolProcess(*options, dram=str(data // 10)) as pool:
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        kinds = [(client, count)] * arguments.clients + [(loads, large)] * (importlib.util.find_spec("torch") is not None)
        for seed, (work, pages_count) in enumerate(kinds):
            here, there = context.Pipe(duplex=False)
            processes.append(context.Process(target=work, args=(there, pool.socket, pages_count, seed, arguments.seconds), daemon=True))
            pipes.append(here)
            processes[-1].start()
        began, killed, steady = time.monotonic(), time.monotonic(), (0, 0)
        while time.monotonic() < began + arguments.seconds:
            time.sleep(LOOK_SECONDS)
            passed = time.monotonic() - began
            mark = footprint(pool.pid, folder)
            files = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
            print(f"{passed:6.0f} s  {mark[0]} descriptors, {format_size(mark[1])} of memory, {format_size(files)} of files", flush=True)
            if files > limit:
                print(f"files pass the limit of {format_size(limit)}")
                good = False
            if passed > STEADY_FROM * arguments.seconds and not steady[0]:
                steady = mark
            if arguments.kill_every and passed < arguments.seconds / 2 and time.monotonic() > killed + arguments.kill_every:
                killed = time.monotonic()
                pool.kill()
                pool.start()
        print(status_line(pool))
        mark = footprint(pool.pid, folder)
        tallies: list[Any] = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join(30.0)
        log = pool.log()
    total = Tally(*(sum(getattr(tally, name) for tally in tallies) for name in Tally.__dataclass_fields__))
    read = total.hits * SIZE
    print(f"{total}; {format_size(read)} read and compared, {read / arguments.seconds / 1e9:.2f} GB/s")
    grown = mark[0] > steady[0] + 8 or (mark[1] > GROWTH_MAX * steady[1] and mark[1] - steady[1] > 32 << 20)
    for what, bad in (
        ("other bytes", total.wrong),
        ("growth", grown),
        ("a traceback in the log", "Traceback" in log),
        ("no hit", not total.hits),
        ("no load from SSD", len(kinds) > arguments.clients and not total.streamed),
    ):
        if bad:
            print(f"FAILED: {what}")
            good = False
    if "Traceback" in log:
        print(log[-4000:])
    return good


def status_line(pool: PoolProcess) -> str:
    """What the pool says of its tier at the end."""
    with umbp.connect(pool.socket) as client:
        ssd = client.status()["ssd"]
    keep = (
        "keys",
        "hits",
        "stored_keys",
        "evicted_keys",
        "damaged_keys",
        "unreadable_keys",
        "unwritten_keys",
        "dropped_keys",
        "cleaned_bytes",
        "torn",
    )
    return "since the last start: " + ", ".join(f"{name} {ssd[name]:,}" for name in keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to use")
    parser.add_argument("--data", default="2GiB", help="bytes of all pages; DRAM is a tenth")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds between two kills in the first half; 0: never")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-ssd-", dir=arguments.folder))
    try:
        good = soak(arguments, folder)
    finally:
        shutil.rmtree(folder)
    print("all is well" if good else "NOT well")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
