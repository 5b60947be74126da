"""The linker under the real radix tree, both cores, over a real pool process: what comes back, and what happens if it does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.sglang.engine import Engine, configured, prompt
from tests.pools import PoolProcess

KINDS = ["mla", "mla+draft", "dsa", "mha"]
CORES = ["python", "rust"]


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with configured():
        yield


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_evicted_comes_back_byte_for_byte(server: PoolProcess, kind: str, core: str) -> None:
    with Engine(kind, server.socket, core=core, tenant=f"back {kind} {core}") as engine:
        tokens = prompt(1, 8, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        restored = engine.restore(tokens, "r1")
        assert (restored.on_device, restored.found, restored.loaded, restored.failed) == (0, 8, 8, [])
        assert engine.has(restored.slots, 7)
        nothing = engine.restore(prompt(2, 8, engine.page), "r2")
        assert (nothing.found, nothing.index) == (0, -1)
