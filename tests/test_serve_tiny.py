"""The serving loop of the README: the same tokens with the pool and without, across a restart, and when pages are lost on the way."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import umbp
from tests.pools import PoolProcess

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "serve_tiny.py"
PROMPT = list(range(3, 103))  # six full pages, and four tokens


def run(*options: str, pool: str = "") -> tuple[int, list[int]]:
    """The script as a process of its own: pages from the pool, tokens."""
    environ = {**os.environ, "UMBP_POOL": pool, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages, tokens = done.stdout.splitlines()
    return int(pages.removeprefix("pages from the pool: ")), [int(token) for token in tokens.removeprefix("tokens: ").split()]


def test_tokens_are_the_same_with_and_without_the_pool_across_restarts() -> None:
    with PoolProcess() as pool:
        pages, tokens = run(pool=pool.socket)
        assert pages == 0
        assert len(set(tokens)) > 30  # a loop that says one word for ever would not notice wrong KV
        pool.restart()  # killed: and the engine is a new process anyway
        assert run(pool=pool.socket) == (31, tokens)
    assert run("--alone") == (0, tokens)


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    import torch

    spec = importlib.util.spec_from_file_location("serve_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    default = torch.get_default_dtype()
    spec.loader.exec_module(module)
    torch.set_default_dtype(default)
    return module


class Losing(umbp.Loader):
    """Other traffic evicts some pages right after they were found."""

    def lookup(self, keys: Any, *, session: str = "") -> int:
        found = super().lookup(keys, session=session)
        self.namespace.remove(keys[2:3])
        return found


def test_pages_lost_on_the_way_are_recomputed_and_wrong_bytes_would_show(tiny: ModuleType) -> None:
    layout = umbp.Layout.of(tiny.kv, page_tokens=tiny.TOKENS)
    with PoolProcess() as server, umbp.connect(server.socket) as pool:
        namespace = pool.namespace(model="tiny", page_tokens=tiny.TOKENS, layout=layout)
        with umbp.Loader(namespace, tiny.kv) as loader:
            alone, _ = tiny.serve(PROMPT, 20, None)
            assert tiny.serve(PROMPT, 20, loader) == (alone, 0)
            assert tiny.serve(PROMPT, 20, loader) == (alone, 6)
        with Losing(namespace, tiny.kv) as loader:
            assert tiny.serve(PROMPT, 20, loader) == (alone, 5)
        with umbp.Loader(namespace, tiny.kv) as loader:
            namespace.flush()
            noise = np.random.default_rng(0).standard_normal((6, namespace.object_bytes // 8))
            namespace.put(umbp.page_keys(PROMPT, page_tokens=tiny.TOKENS), noise)
            other, pages = tiny.serve(PROMPT, 20, loader)
        assert pages == 6
        assert other != alone


def test_the_readme_shows_the_script() -> None:
    assert f"```python\n{SCRIPT.read_text()}```\n" in (ROOT / "README.md").read_text()
