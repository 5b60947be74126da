"""Blocks that have left the pool's DRAM for its SSD come back into vLLM's cache."""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.test_connector import lookups, transfers
from tests.engines.vllm.world import BLOCK, Options, World, prompt
from tests.pools import PoolProcess
from umbp.integrations.vllm_blocks import page_keys_of


def test_a_prompt_whose_blocks_are_on_the_ssd_is_restored(tmp_path: Path) -> None:
    with (
        PoolProcess("--ssd", f"{tmp_path}/ssd:64MiB", dram="1MiB") as pool,
        World(Options(pool.socket, blocks=64, extra={"lookup_async": True})) as world,
    ):
        for number in range(12):  # some 240 blocks; DRAM holds 90
            world.serve(f"{number}", prompt(number, 20))
            world.drop()
        (namespace,) = lookups(world)._open.values()
        keys = page_keys_of(world.requests["0"].block_hashes)
        assert not namespace.lookup(keys).all()
        assert world.serve("again", prompt(0, 20)) == (20 * BLOCK, 3)
        assert world.seen.failed_blocks == set()
        assert transfers(world)._loaders[0].statistics().missing_pages == 0
