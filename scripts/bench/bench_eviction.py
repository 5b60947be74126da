"""Lookups while the pool evicts as fast as it is written to, against the same lookups of an idle pool: one JSON line a row.

    python scripts/bench/bench_eviction.py [--keys 1000000] [--repeats 7]

A million objects of 256 bytes at the watermark (high and low close together, so that eviction never rests). A writer process puts new
keys, 256 a call, without a pause, so the pool evicts as many. The reader looks up 2,200 keys, other ones each call; idle and under
eviction take turns. The floor is the idle pool; the row "busy" is the reader beside a process that only computes, which is what two
processors give anybody. The ratio is of the 99th percentiles.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import harness
import numpy as np

import umbp

PROMPT_KEYS, CALLS, WRITE_KEYS = 2200, 450, 256
RATIO_MAX = 5.0


def write(socket: str) -> None:
    """The writer's process: puts until it is stopped, and says so in the beginning."""
    with umbp.connect(socket, client="writer") as client:
        space = harness.namespace(client, 256)
        random = np.random.default_rng(int(time.time_ns()) & 0xFFFF)
        values = np.zeros((WRITE_KEYS, 256), np.uint8)
        space.put(random.integers(0, 256, (WRITE_KEYS, 32), dtype=np.uint8), values)
        print("writing", flush=True)
        while True:
            space.put(random.integers(0, 256, (WRITE_KEYS, 32), dtype=np.uint8), values)


def compute() -> None:
    """A process that keeps a processor busy."""
    print("computing", flush=True)
    while True:
        sum(range(1000))


class Beside:
    """Another process that runs only inside the ``with``, stopped in between."""

    def __init__(self, *arguments: str, script: str = __file__) -> None:
        self._process: subprocess.Popen[str] = harness.child(script, *arguments)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        time.sleep(0.05)

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stdin):
            if stream is not None:
                stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000, help="objects in the pool (default 1 000 000)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each (default 7)")
    parser.add_argument("--eviction", default="leaf_lru", help="the pool's policy (default leaf_lru)")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--compute", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write)
    if arguments.compute:
        compute()
    room = arguments.keys * 10 // 9  # as many as fit below the low watermark
    watermarks = ("--watermark-high", "0.902", "--watermark-low", "0.9")  # close to each other: eviction never rests
    options = ("--keys-max", str(room), "--eviction", arguments.eviction, *watermarks)
    with harness.pool(*options, dram=str(room * 256 * 2)) as (process, client):
        space = harness.namespace(client, 256)
        keys = harness.random_keys(room, 1)
        harness.fill(space, keys)
        harness.settle(client)
        others: list[Beside] = []
        try:
            writer, busy = Beside("--write", process.socket), Beside("--compute")
            others += [writer, busy]
            order = np.random.default_rng(2).permutation(room)
            prompts = [(keys[order[at : at + PROMPT_KEYS]],) for at in range(0, room - PROMPT_KEYS, PROMPT_KEYS)]

            def lookups() -> list[float]:
                start = int(np.random.default_rng().integers(0, max(1, len(prompts) - CALLS)))
                return harness.timed(space.lookup, prompts[start : start + CALLS])

            def beside(other: Beside) -> Callable[[], list[float]]:
                def work() -> list[float]:
                    with other:
                        return lookups()

                return work

            harness.wait_until_quiet()
            machine = harness.Machine(process.pid, writer.pid, busy.pid)
            evicted = client.status()["counters"]["evicted_keys"]
            evicting, beside_busy, idle = harness.in_turns(arguments.repeats, beside(writer), beside(busy), lookups, machine=machine)
            counters = client.status()["counters"]
            for op, side in (("lookup under eviction", evicting), ("lookup beside a busy process", beside_busy)):
                ratio = side.percentile(0.99) / idle.percentile(0.99)
                row = side.row("", 0) | idle.row("floor_", 0) | {"ratio": round(ratio, 2)}
                if side is evicting:
                    row |= {"target": f"ratio <= {RATIO_MAX:.0f} (of p99)", "met": ratio <= RATIO_MAX}
                    row |= {"evicted_keys": counters["evicted_keys"] - evicted}
                row |= {"foreign_cpu": machine.kept}
                harness.emit(bench="eviction", op=op, keys=PROMPT_KEYS, index=arguments.keys, eviction=arguments.eviction, **row)
        finally:
            for other in others:
                other.end()


if __name__ == "__main__":
    main()
    sys.exit()
