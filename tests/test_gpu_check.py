"""`scripts/gpu_check` where there is no GPU: it says so and how to go on, and each of its steps works on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/gpu_check.py", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "UMBP_LOAD"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def test_without_a_gpu_it_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: run scripts/gpu_check")
    done = run()
    assert done.returncode == 3
    assert "sees no GPU" in done.stderr
    assert "--rehearse" in done.stderr
    document = json.loads(done.stdout)
    assert document["machine"]["gpus"] == []
    assert document["steps"] == {}


def step(name: str) -> dict[str, Any]:
    done = run("step", name, "rehearse")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ranks_that_load_alone_and_together_are_compared() -> None:
    found = step("group_2")
    assert found["ok"], found
    assert found["host_bytes_of_solo"] == 0.5
    assert found["solo"]["ways"] == ["solo"]
    assert found["staged"]["ways"] == ["staged"]
    assert found["staged"]["host_bytes"] == found["bytes"]


def test_a_load_is_compared_with_the_same_load_under_work() -> None:
    found = step("overlap")
    assert found["ok"], found
    assert found["layer_by_layer_ms"] > 0


@pytest.mark.slow
def test_the_whole_rehearsal_is_well() -> None:
    done = run("--rehearse", seconds=600.0)
    assert done.returncode == 0, done.stderr
    assert all(found["ok"] for found in json.loads(done.stdout)["steps"].values())
