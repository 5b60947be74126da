"""The serving loop of the README: the same tokens with the pool and without, across a restart, and when pages are lost on the way."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.pools import PoolProcess

torch = pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "serve_tiny.py"
SAID = " pages loaded; the same without: "


def parsed(line: str) -> tuple[int, bool, list[int]]:
    """Pages from the pool, whether computing everything gives the same, tokens."""
    pages, _, rest = line.partition(SAID)
    same, *tokens = rest.split()
    assert same in ("True", "False"), line
    return int(pages), same == "True", [int(token) for token in tokens]


def run(pool: str) -> tuple[int, bool, list[int]]:
    """The script as a process of its own."""
    environ = {**os.environ, "UMBP_POOL": pool, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return parsed(done.stdout)


def test_tokens_are_the_same_with_and_without_the_pool_across_a_restart_of_both() -> None:
    with PoolProcess() as pool:
        pages, same, tokens = run(pool.socket)
        assert (pages, same, len(tokens)) == (0, True, 40)
        assert len(set(tokens)) > 20  # a loop that says one word for ever would not notice wrong KV
        pool.restart()  # killed: and the engine is a new process anyway
        assert run(pool.socket) == (12, True, tokens)


@pytest.fixture
def _as_in_a_process_of_its_own() -> Iterator[None]:
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(default)
    torch.set_num_threads(threads)


class Losing(umbp.Loader):
    """Other traffic evicts a page right after it was found."""

    def lookup(self, keys: Any, *, session: str = "") -> int:
        found = super().lookup(keys, session=session)
        self.namespace.remove(keys[2:3])
        return found


@pytest.mark.usefixtures("_as_in_a_process_of_its_own")
def test_pages_lost_on_the_way_are_recomputed_and_wrong_bytes_would_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with PoolProcess() as server:
        monkeypatch.setenv("UMBP_POOL", server.socket)

        def here() -> tuple[int, bool, list[int]]:
            made = runpy.run_path(str(SCRIPT))
            made["loader"].close()
            namespaces.append(made["loader"].namespace)
            hashes.append(made["hashes"])
            return parsed(capsys.readouterr().out)

        namespaces: list[umbp.Namespace] = []
        hashes: list[np.ndarray] = []
        alone = here()[2]
        monkeypatch.setattr(umbp, "Loader", Losing)
        assert here() == (11, True, alone)
        monkeypatch.undo()
        monkeypatch.setenv("UMBP_POOL", server.socket)
        namespaces[0].flush()
        noise = np.random.default_rng(0).standard_normal((12, namespaces[0].object_bytes // 8))
        namespaces[0].put(hashes[0], noise)
        pages, same, tokens = here()
        assert (pages, same) == (12, False)
        assert tokens != alone


def test_the_readme_shows_the_script_and_it_is_forty_lines() -> None:
    assert f"```python\n{SCRIPT.read_text()}```\n" in (ROOT / "README.md").read_text()
    assert SCRIPT.read_text().count("\n") <= 40
