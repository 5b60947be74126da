"""What the SGLang linker costs its scheduler, beside SGLang's own linker in the same run: one JSON line a row.

    scripts/test_engines sglang   # once, for the environment; then, with that environment's Python:
    python scripts/bench/bench_linker.py [--pages 2200] [--load-pages 4096] [--repeats 7]

"lookup": all pages of a prompt are stored, KV and indexer (DSA), or KV, window and state; the linker's answer. "lookup_absent": none is.
"lookup_claimed": as a rank with peers looks it up, which claims what it finds.
The floor is the in-tree UMBP linker's lookup over a store that is one dict in this process: it makes no call either, so what it takes is
text keys. "plan": processor time of this thread to load and start a restore of 4,096 pages (256 K tokens) of two pools; the floor is the
in-tree linker's, whose thread then makes a range for each page and layer. No layer count enters ours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import harness

LOOKUP_SECONDS_MAX, PLAN_SECONDS_MAX = 0.6e-3, 3e-3
CALLS = 20


class Dict:
    """A store in this process with the face that the in-tree linker wants. It keeps no bytes: only lookups and plans are measured."""

    def __init__(self, mode: Any) -> None:
        self.mode, self.keys = mode, set()

    def get_deployment_mode(self) -> Any:
        return self.mode.Local

    def get_backend_mode(self) -> Any:
        return self.mode.Local

    def supports_ranged_io(self) -> bool:
        return True

    def register_memory(self, address: int, size: int) -> bool:
        return True

    def deregister_memory(self, address: int) -> bool:
        return True

    def batch_exists(self, keys: list[str]) -> list[bool]:
        return [key in self.keys for key in keys]

    def batch_put_ranges_from_ptr(self, keys: Any, sizes: Any, pointers: Any, lengths: Any, offsets: Any) -> list[bool]:
        self.keys.update(keys)
        return [True] * len(keys)

    def batch_get_ranges_into_ptr(self, keys: Any, pointers: Any, lengths: Any, offsets: Any) -> list[bool]:
        return [True] * len(keys)


def transfers(engine: Any, tokens: Any, slots: Any = None) -> list[Any]:
    """What SGLang's tree hands to a linker for a prompt."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    import umbp

    keys = [key.tobytes().hex() for key in umbp.page_keys(tokens, engine.page)]
    asked = [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)]
    for name, count in ((PoolName.SWA, engine.model.window), (PoolName.MAMBA, 1)):
        if name in engine.linker.pools:
            asked.append(PoolTransfer(name=name, keys=keys[-count:], hit_policy=PoolHitPolicy.TRAILING_PAGES))
    return asked


def lookups(engine: Any, asked: list[Any], expected: int) -> harness.Pass:
    def work() -> list[float]:
        found = engine.linker.lookup("r", asked)
        assert (found[-1] if found else 0) == expected, (len(found), expected)
        return harness.timed(engine.linker.lookup, [("r", asked)] * CALLS)

    return work


def with_peers(engine: Any) -> None:
    """From now on this worker looks up as one with tensor-parallel peers does."""
    from umbp.integrations.sglang_leases import Leases

    linker = engine.linker
    linker._leases.close()
    linker._leases = Leases([shelf.namespace for shelf in linker.shelves], wait_seconds=0.1, ahead_seconds=2.0, claims=True)
    linker._claims = True


def plans(engine: Any, asked: list[Any]) -> harness.Pass:
    """Load and start on this thread, in its processor time; the batch is ended outside of it."""

    def work() -> list[float]:
        seconds = []
        for _ in range(3):
            began = time.thread_time()
            assert engine.linker.load("r", asked)
            index = engine.linker.start_layer_wise_loading()
            seconds.append(time.thread_time() - began)
            assert engine.linker.finish_layer_wise_loading(index)
        return seconds

    return work


def row(op: str, machine: harness.Machine, subject: harness.Side, floor: harness.Side, seconds_max: float, **more: Any) -> None:
    found = harness.compared(subject, floor)
    middle = statistics.median(subject.medians)
    harness.emit(op=op, **more, **found, foreign_cpu=machine.kept, target=f"p50 <= {seconds_max * 1e6:.0f} us", met=middle <= seconds_max)


def measure(kind: str, pages: int, load_pages: int, repeats: int) -> None:
    """All rows of one kind of model; no plan where ``load_pages`` is 0."""
    from tests.engines.sglang import intree
    from tests.engines.sglang.engine import Engine, configured, prompt

    more, store = max(pages, load_pages), Dict(intree.Mode)
    with configured(), harness.pool(dram="1536MiB" if load_pages else "128MiB") as (process, _):
        machine = harness.Machine(process.pid)
        sizes: dict[str, Any] = {"pages": more + 1}
        with (
            Engine(kind, process.socket, protect_seconds=10.0, **sizes) as ours,
            Engine(kind, "", linker=intree.make(store), **sizes) as theirs,
        ):
            both, tokens = (ours, theirs), prompt(1, more, ours.page)
            slots = [engine.compute(tokens, seed=1) for engine in both]
            harness.wait_until_quiet()
            about = {"kind": kind, "pools": len(ours.linker.pools)}
            for op, asked, expected in (("lookup", tokens[: pages * ours.page], pages), ("lookup_absent", prompt(2, pages, ours.page), 0)):
                works = (lookups(engine, transfers(engine, asked), expected) for engine in both)
                subject, floor = harness.in_turns(repeats, *works, machine=machine)
                row(op, machine, subject, floor, LOOKUP_SECONDS_MAX, pages=pages, **about)
            if load_pages:
                plan(machine, both, tokens, slots, load_pages, repeats, about)
            with_peers(ours)
            asked = tokens[: pages * ours.page]
            works = (lookups(engine, transfers(engine, asked), pages) for engine in both)
            subject, floor = harness.in_turns(repeats, *works, machine=machine)
            row("lookup_claimed", machine, subject, floor, LOOKUP_SECONDS_MAX, pages=pages, **about)


def plan(machine: harness.Machine, both: Any, tokens: Any, slots: Any, load_pages: int, repeats: int, about: dict[str, Any]) -> None:
    """The row of a restore of this many pages."""
    works = (plans(engine, transfers(engine, tokens, each)) for engine, each in zip(both, slots, strict=True))
    subject, floor = harness.in_turns(repeats, *works, machine=machine)
    row("plan", machine, subject, floor, PLAN_SECONDS_MAX, pages=load_pages, **about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=2200)
    parser.add_argument("--load-pages", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("UMBP_ENGINE", "sglang")
    from tests.engines.sglang.boot import boot

    boot()
    measure("dsa", options.pages, options.load_pages, options.repeats)
    measure("swa+mamba", options.pages, 0, options.repeats)


if __name__ == "__main__":
    main()
