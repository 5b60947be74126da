"""SGLang's in-tree linker and ours under the same tree: both bring the same pages back, ours from its own objects and in its own way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.sglang.engine import Engine, configured, prompt
from tests.engines.sglang.intree import Client, make
from tests.pools import PoolProcess


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with configured():
        yield


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("kind", ["dsa", "deepseek_v4", "mla+mamba"])
def test_the_in_tree_linker_runs_over_our_pool(server: PoolProcess, kind: str, core: str) -> None:
    client = Client(server.socket, f"{kind} {core}")
    with Engine(kind, server.socket, core=core, linker=make(client)) as engine:
        tokens = prompt(1, 4, engine.page)
        engine.compute(tokens, seed=7)
        engine.drop()
        restored = engine.restore(tokens, "r1")
        assert (restored.loaded, restored.failed) == (4, [])
        assert engine.is_whole(restored, 7)
        assert client.calls["put"] > 0
        assert client.calls["get"] > 0


@pytest.mark.parametrize("kind", ["dsa", "deepseek_v4"])
def test_both_find_the_same_lengths(server: PoolProcess, kind: str) -> None:
    found = []
    for make_linker in (None, make(Client(server.socket, f"lengths {kind}"))):
        with Engine(kind, server.socket, linker=make_linker, tenant=f"lengths {kind}") as engine:
            engine.compute(prompt(1, 6, engine.page), seed=7)
            engine.compute(prompt(1, 3, engine.page) + prompt(2, 2, engine.page), seed=8)
            engine.drop()
            asked = [prompt(1, 6, engine.page), prompt(1, 3, engine.page) + prompt(2, 4, engine.page), prompt(3, 2, engine.page)]
            found.append([engine.match(tokens, f"r{number}")[0].host_hit_length // engine.page for number, tokens in enumerate(asked)])
    assert found[0] == found[1]
    assert found[0][0] == 6
