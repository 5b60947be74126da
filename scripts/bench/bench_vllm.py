"""What the runtime behind vLLM's UMBPStoreConnector costs vLLM's threads, in the same run beside what it does without: one JSON line a row.

    scripts/test_engines vllm   # once, for the environment; then, with that environment's Python:
    python scripts/bench/bench_vllm.py [--blocks 2200] [--repeats 7]

"lookup": all blocks of a prompt are stored, for one rank and for two that have KV of their own (a key for each). "lookup_absent": none is.
The floor is a dict in this process that has the text keys. "plan": to start a load of as many blocks in this thread; the floor is what vLLM
does for a runtime that wants byte ranges, a range for each block and layer (12 layers here).
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import harness
import numpy as np

LOOKUP_SECONDS_MAX, PLAN_SECONDS_MAX = 0.6e-3, 3e-3
CALLS = 10


def timed(call: Any, *arguments: Any) -> harness.Pass:
    return lambda: harness.timed(call, [arguments] * CALLS)


def row(op: str, machine: harness.Machine, subject: harness.Side, floor: harness.Side, seconds_max: float, **more: Any) -> None:
    middle = statistics.median(subject.medians)
    wanted = f"p50 <= {seconds_max * 1e6:.0f} us"
    harness.emit(op=op, **more, **harness.compared(subject, floor), foreign_cpu=machine.kept, target=wanted, met=middle <= seconds_max)


def measure(kind: str, tp: int, blocks: int, repeats: int) -> None:
    """All rows of one kind of engine."""
    from vllm.distributed.kv_transfer.kv_connector.v1.umbp.data import BlockLoadBatch

    from tests.engines.vllm.world import Options, World

    with harness.pool(dram="256MiB") as (process, _), World(Options(process.socket, kind, tp=tp, blocks=blocks + 1)) as world:
        machine = harness.Machine(process.pid)
        lookups = world.scheduler.connector.connector_scheduler.runtime
        half = world.workers[0].connector.connector_worker
        hashes = [np.random.default_rng(seed).bytes(32).hex() for seed in range(2 * blocks)]
        text = [[f"umbp:vllm:v1:n:tp{rank}:pcp0:dcp0:pp0:g0:{each}" for rank in range(tp)] for each in hashes]
        keys, absent = ([key for rank_keys in part for key in rank_keys] for part in (text[:blocks], text[blocks:]))
        pages = np.frombuffer(bytes.fromhex("".join(hashes[:blocks])), np.uint8).reshape(-1, 32)
        for namespace in lookups._open.values():
            assert not namespace.put(pages, np.zeros((blocks, namespace.object_bytes), np.uint8)).refused.any()
        there = set(keys)
        harness.wait_until_quiet()
        about = {"kind": kind, "ranks": tp, "blocks": blocks}
        for op, asked, hit in (("lookup", keys, True), ("lookup_absent", absent, False)):
            assert set(lookups.lookup(asked)) == {hit}
            floor_work = timed(lambda asked: [key in there for key in asked], asked)
            subject, floor = harness.in_turns(repeats, timed(lookups.lookup, asked), floor_work, machine=machine)
            row(op, machine, subject, floor, LOOKUP_SECONDS_MAX, **about)
        batch = BlockLoadBatch([part[0] for part in text[:blocks]], list(range(1, blocks + 1)), [0] * blocks, "r")
        for loader in half.runtime._loaders.values():
            loader._loads.submit = lambda *arguments: None  # the plan alone: nothing is moved
        works = timed(half.runtime.load_blocks, batch), timed(lambda: half._materialize_plans(list(batch)))
        subject, floor = harness.in_turns(repeats, *works, machine=machine)
        row("plan", machine, subject, floor, PLAN_SECONDS_MAX, **about)
        for loader in half.runtime._loaders.values():
            del loader._loads.submit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2200)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    measure("full", 1, options.blocks, options.repeats)
    measure("full", 2, options.blocks, options.repeats)


if __name__ == "__main__":
    main()
