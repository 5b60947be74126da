"""Memory of the pool process beside the segment, by keys it holds: one JSON line a row.

    python scripts/bench/bench_memory.py [--keys 1000000]

What is counted is RssAnon, the process's own resident memory: the segment is a mapped file and is not in it. The growth is measured
from a pool with room for as many keys that holds none. The floor is that many keys of 32 bytes in a dict to an offset, measured alike.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

import harness

BYTES_A_KEY_MAX = 200


def steady(pid: int, seconds_max: float = 5.0) -> int:
    """RssAnon once it has stopped to change."""
    give_up, before = time.monotonic() + seconds_max, -1
    while (now := harness.anonymous_bytes(pid)) != before and time.monotonic() < give_up:
        before = now
        time.sleep(0.3)
    return now


def dict_bytes(count: int) -> int:
    """What a plain dict takes for so many keys, measured in a process of its own."""
    with harness.child(__file__, "--dict", str(count)) as process:
        assert process.stdout is not None
        return int(process.stdout.read())


def measure_dict(count: int) -> None:
    gc.collect()
    before = harness.anonymous_bytes(os.getpid())
    held = {number.to_bytes(32, "little"): number << 16 for number in range(count)}
    print(harness.anonymous_bytes(os.getpid()) - before)
    assert len(held) == count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys to hold (default 1 000 000)")
    parser.add_argument("--eviction", default="leaf_lru,lru,sieve,s3fifo", help="policies, a row each (default: %(default)s)")
    parser.add_argument("--dict", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dict is not None:
        measure_dict(arguments.dict)
        sys.exit()
    count, floor = arguments.keys, dict_bytes(arguments.keys)
    room = count + count // 8
    keys = harness.random_keys(count, 1)
    for policy in arguments.eviction.split(","):
        options = ("--keys-max", str(room), "--eviction", policy)
        with harness.pool(*options, dram=str(room * 256 + (1 << 20))) as (process, client):
            space = harness.namespace(client, 256)
            space.lookup(keys[:1])
            empty = steady(process.pid)
            harness.fill(space, keys)
            harness.settle(client)
            assert client.status()["keys"] == count
            full = steady(process.pid)
            each = (full - empty) / count
            harness.emit(
                bench="memory",
                eviction=policy,
                keys=count,
                rss_anon_empty_bytes=empty,
                rss_anon_full_bytes=full,
                bytes_a_key=round(each, 1),
                floor_bytes_a_key=round(floor / count, 1),
                ratio=round(each / (floor / count), 2),
                target=f"bytes_a_key <= {BYTES_A_KEY_MAX}",
                met=each <= BYTES_A_KEY_MAX,
            )


if __name__ == "__main__":
    main()
