"""Put, get, lookup and lease of a pool against the floor, in turns, over a warm working set of 1 GiB: one JSON line a row.

    python scripts/bench/bench_pool.py [--only put,get,lookup,lease] [--repeats 9] [--keys 1000000] [--processors 0,1]

Put and get: batches of 128 x 64 KiB, 64 x 1 MiB, 16 x 4 MiB, and one object a call, from and into one matrix. ``order`` in_order: keys as
they were put, so pages lie side by side; scattered: the same pages in random order. Rows with ``checksum`` put and ``verify`` always say
what those cost. Lookup and lease: 2,200 keys (a prompt of 142,000 tokens), other ones each call, of an index of a million and of 10,000.
The lease also beside another client that looks up 2,200 keys all the time, whose access history the pool has to enter; the floor of that
row is the same lease without it.

Short calls (one object, a lease) take half as long again where the kernel runs client and pool on one processor, as it may where there are
two: ``--processors 0,1`` puts the client on the first and the pool (and the floor's process) on the second, ``0,0`` both on one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import harness
import numpy as np
from bench_eviction import Beside
from floor import KEY_BYTES, Floor

import umbp
from umbp.types import ReadStatus, WriteStatus

SHAPES = ((64 << 10, 128), (1 << 20, 64), (4 << 20, 16))
PROMPT_KEYS = 2200
LOOKUP_SECONDS_MAX = 0.3e-3
SMALL_BYTES = 256


class Pages:
    """One working set: keys, the caller's memory, and the same for the floor."""

    def __init__(self, size: int, batch: int, working_set: int, seed: int) -> None:
        self.size, self.batch, self.count = size, batch, working_set // size
        self.keys = harness.random_keys(self.count, seed)
        self.floor_keys = np.ascontiguousarray(self.keys[:, :KEY_BYTES])
        self.source = np.random.default_rng(seed).integers(0, 256, (batch, size), dtype=np.uint8)
        self.target = np.zeros((batch, size), np.uint8)
        self.source_rows, self.target_rows = list(self.source), list(self.target)
        self.shuffled = np.random.default_rng(seed + 1).permutation(self.count)

    def batches(self, batch: int, *, scattered: bool, calls: int = 1 << 30) -> Iterator[tuple[np.ndarray, bytes]]:
        """Keys of each call: the pool's, the floor's."""
        order = self.shuffled if scattered else np.arange(self.count)
        for start in range(0, min(self.count, batch * calls), batch):
            part = order[start : start + batch]
            yield self.keys[part], self.floor_keys[part].tobytes()


class Bench:
    """A pool and the floor, and what is measured on both."""

    def __init__(
        self, socket: str, client: umbp.Pool, floor: Floor, machine: harness.Machine, repeats: int, working_set: int, said: dict[str, Any]
    ) -> None:
        self.socket, self.client, self.floor, self.machine = socket, client, floor, machine
        self.repeats, self.working_set, self.said = repeats, working_set, said

    def emit(self, **row: Any) -> None:
        harness.emit(bench="pool", **row, **self.said, foreign_cpu=self.machine.kept)

    def works(self, pages: Pages, space: umbp.Namespace, batch: int, verify: str) -> dict[str, Callable[[bool, bool], list[float]]]:
        """A pass over the working set by the pool and by the floor: (scattered, the floor?) -> seconds of each call."""
        source, target = pages.source[:batch], pages.target[:batch]
        calls = 1 << 30 if batch > 1 else min(pages.count, 512)

        def put(scattered: bool, by_floor: bool) -> list[float]:
            batches = list(pages.batches(batch, scattered=scattered, calls=calls))
            if by_floor:
                self.floor.clear()
                return harness.timed(self.floor.put, [(keys, pages.source_rows, pages.size) for _, keys in batches])
            space.remove(pages.keys)
            seconds = harness.timed(space.put, [(keys, source[: len(keys)]) for keys, _ in batches])
            assert space.lookup(batches[-1][0]).all()
            harness.settle(self.client)
            return seconds

        def get(scattered: bool, by_floor: bool) -> list[float]:
            batches = list(pages.batches(batch, scattered=scattered, calls=calls))
            if by_floor:
                return harness.timed(self.floor.get, [(keys, pages.target_rows, pages.size) for _, keys in batches])
            return harness.timed(
                lambda keys, rows: space.get(keys, rows, verify=verify), [(keys, target[: len(keys)]) for keys, _ in batches]
            )

        return {"put": put, "get": get}

    def data(self, only: set[str], *, verify: str = "never", singles: bool = True) -> None:
        """Rows of put and get."""
        for size, batch in SHAPES:
            pages, space = Pages(size, batch, self.working_set, size), harness.namespace(self.client, size)
            for count in (batch, 1) if singles else (batch,):
                harness.wait_until_quiet()
                works = self.works(pages, space, count, verify)
                for op in ("put", "get"):
                    for scattered in (False, True) if op == "get" and count > 1 else (False,):
                        if op in only:
                            self.compare(op, pages, space, works[op], count, scattered=scattered, verify=verify)
            space.remove(pages.keys)

    def compare(
        self,
        op: str,
        pages: Pages,
        space: umbp.Namespace,
        work: Callable[[bool, bool], list[float]],
        count: int,
        *,
        scattered: bool,
        verify: str,
    ) -> None:
        """One row."""
        if op == "get":
            self.stock(pages, space)
        subject, floor = harness.in_turns(self.repeats, lambda: work(scattered, False), lambda: work(scattered, True), machine=self.machine)
        target = {"at_least": {"put": 0.9, "get": 1.0}[op]} if count > 1 and not self.said and verify == "never" else {}
        row = harness.compared(subject, floor, bytes_a_call=pages.size * count, **target)
        self.emit(op=op, size=pages.size, batch=count, order="scattered" if scattered else "in_order", verify=verify, **row)

    def stock(self, pages: Pages, space: umbp.Namespace) -> None:
        """Everything is stored on both sides, and what comes back is what was put."""
        self.floor.clear()
        space.remove(pages.keys)
        for keys, floor_keys in pages.batches(pages.batch, scattered=False):
            statuses = space.put(keys, pages.source[: len(keys)])
            assert not (statuses.codes >= WriteStatus.ALL_LEASED).any(), statuses
            self.floor.put(floor_keys, pages.source_rows, pages.size)
        harness.settle(self.client)
        pages.target[:] = 0
        assert (space.get(pages.keys[: pages.batch], pages.target).codes == ReadStatus.HIT).all()
        assert np.array_equal(pages.target, pages.source)

    def index(self, only: set[str], entries: int) -> None:
        """Rows of lookup and lease."""
        space = harness.namespace(self.client, SMALL_BYTES, "index")
        keys = harness.random_keys(entries, 1)
        harness.fill(space, keys)
        harness.settle(self.client)
        self.floor.clear()
        for start in range(0, entries, 8192):
            part = np.ascontiguousarray(keys[start : start + 8192, :KEY_BYTES])
            self.floor.enter(part.tobytes())
        present = Prompts(keys, PROMPT_KEYS)
        absent = Prompts(harness.random_keys(100_000, 2), PROMPT_KEYS)
        calls = 100
        harness.wait_until_quiet()
        if "lookup" in only:
            for which, prompts in (("present", present), ("absent", absent)):
                assert (space.lookup(prompts.next()[0]) == (which == "present")).all()
                self.lookup(space, prompts, which, entries, calls)
            long = Prompts(keys, 10_000)
            self.lookup(space, long, "present", entries, calls // 4)
        if "lease" in only:
            self.lease(space, present, entries, calls)
            self.beside(space, present, entries, calls)
        space.remove(keys[: 1 << 16])

    def lookup(self, space: umbp.Namespace, prompts: Prompts, which: str, entries: int, calls: int) -> None:
        subject, floor = harness.in_turns(
            self.repeats,
            lambda: harness.timed(space.lookup, [(prompts.next()[0],) for _ in range(calls)]),
            lambda: harness.timed(self.floor.exists, [(prompts.next()[1],) for _ in range(calls)]),
            machine=self.machine,
        )
        row = harness.compared(subject, floor)
        if prompts.size == PROMPT_KEYS:
            row |= {"target": f"p50_us < {LOOKUP_SECONDS_MAX * 1e6:.0f}", "met": subject.percentile(0.5) < LOOKUP_SECONDS_MAX}
        self.emit(op="lookup", keys=prompts.size, which=which, index=entries, **row)

    def lease(self, space: umbp.Namespace, prompts: Prompts, entries: int, calls: int) -> None:
        held: list[Any] = []

        def lease() -> list[float]:
            for _ in range(calls):
                held.append(space.lease(prompts.next()[0]))
            return [second for one in held for second in harness.timed(one.__enter__, [()])]

        def release() -> list[float]:
            seconds = [second for one in held for second in harness.timed(one.__exit__, [(None, None, None)])]
            held.clear()
            return seconds

        both, floor = harness.in_turns(
            self.repeats,
            lambda: lease() + release(),
            lambda: harness.timed(self.floor.exists, [(prompts.next()[1],) for _ in range(calls)]),
            machine=self.machine,
        )
        for op, part in (("lease", slice(0, calls)), ("release", slice(calls, None))):
            side = harness.Side([seconds[part] for seconds in both.passes])
            self.emit(op=op, keys=prompts.size, which="present", index=entries, **harness.compared(side, floor, at_most=3.0))

    def beside(self, space: umbp.Namespace, prompts: Prompts, entries: int, calls: int) -> None:
        """The row of leases beside lookups."""

        def leases() -> list[float]:
            seconds = []
            for _ in range(calls):
                lease = space.lease(prompts.next()[0], noted=True)
                seconds += harness.timed(lease.__enter__, [()])
                lease.__exit__(None, None, None)
            return seconds

        other = Beside("--look", self.socket, "--keys", str(entries), script=__file__)

        def disturbed() -> list[float]:
            with other:
                return leases()

        try:
            self.machine.pids = (*self.machine.pids, other.pid)
            busy, alone = harness.in_turns(self.repeats, disturbed, leases, machine=self.machine)
        finally:
            other.end()
        self.emit(op="lease beside lookups", keys=prompts.size, which="present", index=entries, **harness.compared(busy, alone))


class Prompts:
    """Key lists, one after the other, each of other keys until all were used."""

    def __init__(self, keys: np.ndarray, size: int) -> None:
        self.size = size
        order = np.random.default_rng(7).permutation(len(keys))
        starts = range(0, len(keys) - size + 1, size)
        self.lists = [
            (keys[part], np.ascontiguousarray(keys[part, :KEY_BYTES]).tobytes()) for part in (order[at : at + size] for at in starts)
        ]
        self.at = 0

    def next(self) -> tuple[np.ndarray, bytes]:
        self.at = (self.at + 1) % len(self.lists)
        return self.lists[self.at]


def look(socket: str, entries: int) -> None:
    """The process beside which leases are taken: looks up until it is stopped."""
    with umbp.connect(socket, client="looker") as client:
        space, prompts = harness.namespace(client, SMALL_BYTES, "index"), Prompts(harness.random_keys(entries, 1), PROMPT_KEYS)
        assert space.lookup(prompts.next()[0]).all()
        print("looking", flush=True)
        while True:
            space.lookup(prompts.next()[0])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="put,get,lookup,lease,checksum", help="rows to measure, with commas (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each row, floor and pool in turns (default 9)")
    parser.add_argument("--working-set", type=int, default=1 << 30, metavar="BYTES", help="bytes of pages (default 1 GiB)")
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys of the large index (default 1 000 000)")
    parser.add_argument("--options", default="", help="more flags for the pool, such as '--eviction lru'")
    parser.add_argument("--processors", type=_processors, default=(), metavar="CLIENT,POOL", help="processors to run on (default: any)")
    parser.add_argument("--look", help=argparse.SUPPRESS)
    return parser.parse_args()


def _processors(text: str) -> tuple[int, ...]:
    client, pool = map(int, text.split(","))
    return client, pool


def main() -> None:
    arguments = parse()
    if arguments.look:
        look(arguments.look, arguments.keys)
    only, options = set(arguments.only.split(",")), arguments.options.split()
    working_set, repeats = arguments.working_set, arguments.repeats
    dram = str(working_set * 3 // 2)

    def measure(*more: str, floor_bytes: int, dram: str, said: dict[str, Any]) -> Any:
        said = said | ({"processors": "{},{}".format(*arguments.processors)} if arguments.processors else {})
        return _Both((*options, *more), floor_bytes, dram, repeats, working_set, said, arguments.processors)

    if only & {"put", "get"}:
        with measure(floor_bytes=working_set, dram=dram, said={}) as bench:
            bench.data(only)
            if "checksum" in only and "get" in only:
                bench.data({"get"}, verify="always", singles=False)
    if {"checksum", "put"} <= only:
        with measure("--checksum", "put", floor_bytes=working_set, dram=dram, said={"checksum": "put"}) as bench:
            bench.data({"put"}, singles=False)
    for entries in (arguments.keys, 10_000):
        if only & {"lookup", "lease"}:
            room = entries + entries // 4
            with measure("--keys-max", str(room), floor_bytes=1 << 20, dram=str(room * SMALL_BYTES + (1 << 20)), said={}) as bench:
                bench.index(only, entries)


class _Both:
    """A pool and a floor for the time of a ``with``."""

    def __init__(
        self,
        options: tuple[str, ...],
        floor_bytes: int,
        dram: str,
        repeats: int,
        working_set: int,
        said: dict[str, Any],
        processors: tuple[int, ...],
    ) -> None:
        self._pool = harness.pool(*options, dram=dram)
        self._floor = Floor(floor_bytes)
        self._rest = repeats, working_set, said
        self._processors = processors

    def __enter__(self) -> Bench:
        process, client = self._pool.__enter__()
        floor = self._floor.__enter__()
        if self._processors:
            for pid, processor in zip((os.getpid(), process.pid, self._floor.pid), (*self._processors, self._processors[1]), strict=True):
                harness.pin(pid, processor)
        return Bench(process.socket, client, floor, harness.Machine(process.pid, self._floor.pid), *self._rest)

    def __exit__(self, *exc: Any) -> None:
        self._floor.__exit__(None, None, None)
        self._pool.__exit__(*exc)


if __name__ == "__main__":
    main()
