"""Seeded traffic over a small device cache and a small pool: conversations that grow, blocks that are evicted, requests that are preempted.

The forward pass looks at every byte of every prefix in every step (`tests.engines.vllm.world`); what it cannot see is asserted here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.engines.vllm.engine import OFFLOADING, SPEC, loaders
from tests.engines.vllm.world import BLOCK, VOCABULARY, Options, World
from tests.pools import PoolProcess

REQUESTS = 110
POOL_BYTES = 1 << 20  # some 90 to 120 blocks
CASES = {
    "full async": {},
    "full sync": {"load_async": False},
    "hybrid async": {"kind": "hybrid"},
    "mla ranks sync": {"kind": "mla", "tp": 2, "load_async": False},
    "full ranks async": {"tp": 2, "interleaved": True},
    "offloading": {"connector": OFFLOADING, "extra": SPEC},
    "offloading hybrid stages": {"connector": OFFLOADING, "extra": SPEC, "kind": "hybrid", "pp": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_no_request_is_computed_on_wrong_bytes(case: str) -> None:
    random = np.random.default_rng(len(case))
    talks: list[list[int]] = [[] for _ in range(8)]
    with PoolProcess(dram=str(POOL_BYTES)) as pool, World(replace(Options(pool.socket, blocks=40, budget=64), **CASES[case])) as world:
        for number in range(REQUESTS):
            talk = talks[random.integers(len(talks))]
            if len(talk) > 12 * BLOCK:
                talk.clear()
            talk += random.integers(3, VOCABULARY, random.integers(1, 3 * BLOCK)).tolist()
            world.add(f"{number}", list(talk), int(random.integers(1, 2 * BLOCK)))
            if random.random() < 0.5:
                for _ in range(random.integers(1, 30)):
                    world.step()
            if random.random() < 0.2 and not world.scheduler.has_requests():
                world.drop()
        world.run(seconds=60)
        assert all(request.is_finished() and request.num_output_tokens == request.max_tokens for request in world.requests.values())
        counts = [loader.statistics() for worker in world.workers for loader in loaders(worker)]
        assert all(count.pages > 10 for count in counts)  # blocks that the device had not any more
        assert sum(count.offloaded_bytes for count in counts) > POOL_BYTES  # so some had to go
