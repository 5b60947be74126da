"""How long other Python threads of an engine wait while one of them uses the pool: one JSON line a row.

    python scripts/bench/bench_gil.py [--seconds 10]

A thread wakes every 5 ms and notes the gap since it woke last. Meanwhile another thread does lookups of 10,000 keys of an index of
300,000 and gets of 100 MiB (25 x 4 MiB), as fast as it can. The floor is the same ticking beside a thread that copies with plain NumPy,
in turns with it; the idle row is ticking alone: what the machine itself does to a sleeping thread.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import harness
import numpy as np

TICK_SECONDS = 0.005
GAP_SECONDS_MAX = 0.050
LOOKUP_KEYS, INDEX_KEYS = 10_000, 300_000
PAGE_BYTES, PAGES = 4 << 20, 25


def gaps_beside(work: Callable[[], None] | None, seconds: float) -> list[float]:
    """Seconds between wake-ups of a ticking thread while ``work`` is repeated in another."""
    gaps: list[float] = []
    over = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(TICK_SECONDS)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            if work is None:
                time.sleep(0.05)
            else:
                work()
    finally:
        over.set()
        ticker.join()
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of ticking for each row (default 10)")
    arguments = parser.parse_args()
    room = INDEX_KEYS * 5 // 4
    dram = room * 256 + PAGES * PAGE_BYTES * 3 // 2
    with harness.pool("--keys-max", str(room), dram=str(dram)) as (process, client):
        small, large = harness.namespace(client, 256, "small"), harness.namespace(client, PAGE_BYTES, "large")
        keys, pages = harness.random_keys(INDEX_KEYS, 1), harness.random_keys(PAGES, 2)
        harness.fill(small, keys)
        harness.fill(large, pages, batch=PAGES)
        harness.settle(client)
        out, plain = np.zeros((PAGES, PAGE_BYTES), np.uint8), np.ones((PAGES, PAGE_BYTES), np.uint8)
        shuffled = np.random.default_rng(3).permutation(PAGES)
        starts = np.arange(0, INDEX_KEYS - LOOKUP_KEYS, LOOKUP_KEYS)
        round_ = [0]

        def use_the_pool() -> None:
            start = int(starts[round_[0] % len(starts)])
            round_[0] += 1
            assert small.lookup(keys[start : start + LOOKUP_KEYS]).all()
            assert (large.get(pages if round_[0] % 2 else pages[shuffled], out).codes == 1).all()

        def copy() -> None:
            for at in range(PAGES):
                np.copyto(out[at], plain[at])

        use_the_pool()
        harness.wait_until_quiet()
        machine = harness.Machine(process.pid)
        turns = 4
        gaps: dict[str, list[float]] = {"pool": [], "floor": [], "idle": []}
        for _ in range(turns):
            for name, work in (("pool", use_the_pool), ("floor", copy), ("idle", None)):
                gaps[name] += gaps_beside(work, arguments.seconds / turns)
        worst = {name: max(found) for name, found in gaps.items()}
        row = {f"{name}_gap_max_ms": round(seconds * 1e3, 1) for name, seconds in worst.items()}
        row |= {f"{name}_gap_p99_ms": round(sorted(found)[int(len(found) * 0.99)] * 1e3, 1) for name, found in gaps.items()}
        harness.emit(
            bench="gil",
            op="lookup 10,000 and get 100 MiB beside a tick of 5 ms",
            ticks=len(gaps["pool"]),
            **row,
            ratio=round(worst["pool"] / worst["floor"], 2),
            target=f"pool_gap_max_ms < {GAP_SECONDS_MAX * 1e3:.0f}",
            met=worst["pool"] < GAP_SECONDS_MAX,
            foreign_cpu=machine.foreign_cpu(),
        )


if __name__ == "__main__":
    main()
