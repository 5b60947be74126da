"""The real core at 1,000 nodes, without sockets: what a master needs for a billion keys, by samples, and where it ends; JSON lines.

    python scripts/bench/scale.py [--nodes 1000] [--keys 1000000000] [--sample 2000000] [--seconds 5]

A sample of the keys is entered for all nodes into a directory that has as many rows as the sample; costs are measured on it and scaled by
what they depend on: memory with keys; events and routes with cache misses, which is why two samples of different size say how they
grow. Everything that the master knows of nodes (members, links, advice) is at full size. ``limit`` says what ends first, and what lifts it.

Sharding by key is designed in the head of `umbp.core.master`: S masters hold S times the keys and take S times the events; a route costs
the slowest of their answers, and membership and costs, which are small, are at each.
"""

from __future__ import annotations

import argparse
import os
import time

import harness
import numpy as np

from umbp.core.master import SLICE, Master, Part
from umbp.core.membership import Member
from umbp.types import Tier

PROMPT = 2200
DIGEST = b"\xab" * 32
PAGE_BYTES = 2_600_000
EVENTS_A_NODE = 400  # keys that come or go at a node a second: 1 GB/s of pages
ROUTES_A_NODE = 4
MACHINE_BYTES = 512 << 30  # a large host for one master


def built(nodes: int, sample: int) -> tuple[Master, list[Member], np.ndarray, float, float]:
    """A master with all nodes and so many keys; bytes a key; seconds an event."""
    before = harness.anonymous_bytes(os.getpid())
    master = Master(0.0, boot=1, seed=5, keys_max=sample + sample // 50)
    members = [master.join(0.0, f"n{n}", n + 1, f"p{n}", {}, {int(Tier.DRAM): (1 << 40, 1 << 39)}) for n in range(nodes)]
    words = np.random.default_rng(1).integers(1, 1 << 63, (sample, 4), dtype=np.uint64)
    spent, events = 0.0, 0
    batch = 4 * SLICE
    for number, start in enumerate(range(0, sample, batch)):
        part = words[start : start + batch]
        spaces = master.spaces([(DIGEST, PAGE_BYTES, len(part))])
        tier, here = np.full(len(part), Tier.DRAM, np.uint8), np.ones(len(part), np.uint8)
        for copy in range(2 if number % 5 == 0 else 1):
            began = time.process_time()
            master.apply(0.0, Part(members[(number + copy * 7) % nodes], part, spaces, tier, here))
            spent += time.process_time() - began
            events += len(part)
    each = (harness.anonymous_bytes(os.getpid()) - before - words.nbytes) / sample
    return master, members, words, each, spent / events


def routed(master: Master, words: np.ndarray, seconds: float) -> np.ndarray:
    """Processor seconds of each route of a prompt, spread over the nodes as the keys are."""
    times, over, at = [], time.monotonic() + seconds, 0
    draws = np.zeros(PROMPT)
    while time.monotonic() < over:
        at = (at + 104_729) % (len(words) - PROMPT)
        began = time.process_time()
        plan = master.route(float(len(times)), DIGEST, words[at : at + PROMPT], "elsewhere", draws)
        times.append(time.process_time() - began)
        assert plan.held == PROMPT, plan.held
    return np.array(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=harness.at_least(1), default=1000)
    parser.add_argument("--keys", type=harness.at_least(1), default=1_000_000_000)
    parser.add_argument("--sample", type=harness.at_least(50_000), default=2_000_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    nodes, keys = arguments.nodes, arguments.keys
    rows = []
    for sample in (arguments.sample // 8, arguments.sample):
        master, members, words, each, event = built(nodes, sample)
        times = routed(master, words, arguments.seconds)
        ticks = []
        for now in np.arange(1.0, 3.0, 0.05).tolist():
            for member in members[:: max(1, nodes // 50)]:
                master.beat(now, member.node, member.registration, member.tiers)
            began = time.process_time()
            master.tick(now)
            ticks.append(time.process_time() - began)
        rows.append({"keys": sample, "bytes": each, "event": event, "route": float(np.median(times)), "tick": float(np.median(ticks))})
        harness.emit(
            bench="scale",
            case="sample",
            nodes=nodes,
            keys=sample,
            bytes_a_key=round(each, 1),
            event_us=round(event * 1e6, 2),
            route_p50_ms=round(float(np.median(times)) * 1e3, 2),
            route_p99_ms=round(float(np.percentile(times, 99)) * 1e3, 2),
            tick_p50_ms=round(float(np.median(ticks)) * 1e3, 2),
        )
        del master, members, words
    on_paper(nodes, keys, rows)


def on_paper(nodes: int, keys: int, rows: list[dict[str, float]]) -> None:
    """The sample scaled: costs grow by the step between the samples for each eightfold, as cache and TLB misses do."""
    small, large = rows
    steps = np.log(keys / large["keys"]) / np.log(8)
    event, route = (large[name] * max(1.0, large[name] / small[name]) ** steps for name in ("event", "route"))
    memory = keys * large["bytes"]
    load = nodes * (EVENTS_A_NODE * event + ROUTES_A_NODE * route)
    shards = max(1, int(np.ceil(max(load / 0.6, memory / MACHINE_BYTES))))
    ends = "processor" if load / 0.6 > memory / MACHINE_BYTES else "memory"
    harness.emit(
        bench="scale",
        case="on paper",
        nodes=nodes,
        keys=keys,
        memory_gib=round(memory / (1 << 30), 1),
        event_us=round(event * 1e6, 2),
        route_ms=round(route * 1e3, 2),
        events_per_s=nodes * EVENTS_A_NODE,
        routes_per_s=nodes * ROUTES_A_NODE,
        cores_of_work=round(load, 2),
        masters_by_key=shards,
        limit=f"{ends} first; {shards} masters by key hold it at 60 % of a core and {MACHINE_BYTES >> 30} GiB each",
    )


if __name__ == "__main__":
    main()
