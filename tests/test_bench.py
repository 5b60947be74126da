"""The benchmarks run: each prints rows of JSON, says what was wanted, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "bench"
SCRIPTS = [FOLDER / f"{name}.py" for name in ("floor", "bench_pool", "bench_eviction", "bench_gil", "bench_memory", "bench_mooncake")]
SECONDS_MAX = 300


def rows(name: str, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(FOLDER / name), *arguments]
    environ = dict(os.environ, BENCH_QUIET_SECONDS="0", BENCH_ATTEMPTS="1")
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_benchmark_says_what_it_does(script: Path) -> None:
    if "\nimport torch\n" in script.read_text():
        pytest.importorskip("torch", reason="this benchmark needs torch")
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "JSON line" in done.stdout


def test_the_floor_gives_back_what_was_put() -> None:
    code = (
        "import numpy as np, floor\n"
        "rows = [np.full(4096, n, np.uint8) for n in range(4)]; keys = bytes(range(64))\n"
        "out = [np.zeros(4096, np.uint8) for _ in range(4)]\n"
        "with floor.Floor(1 << 20) as f:\n"
        "    f.put(keys, rows, 4096); assert f.get(keys, out, 4096); assert not f.get(bytes(16), out[:1], 4096)\n"
        "    assert all((a == b).all() for a, b in zip(out, rows)); assert f.exists(keys + bytes(16)) == bytes([1, 1, 1, 1, 0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_row_has_its_floor() -> None:
    found = rows("bench_pool.py", "--repeats", "1", "--working-set", str(64 << 20), "--keys", "20000")
    assert {row["op"] for row in found} == {"put", "get", "lookup", "lease", "release"}
    assert all(row["floor_p50_us"] > 0 and row["ratio"] > 0 for row in found)


@pytest.mark.slow
def test_memory_eviction_and_gaps_are_measured() -> None:
    assert rows("bench_memory.py", "--keys", "20000", "--eviction", "lru")[0]["bytes_a_key"] > 0
    assert rows("bench_eviction.py", "--keys", "20000", "--repeats", "1")[0]["evicted_keys"] > 0
    assert rows("bench_gil.py", "--seconds", "2")[0]["ticks"] > 0
