"""Four processes exchange pages over shared memory with the kernels alone: fused and staged, over several epochs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

from tests.kernels import exchange, processes


def test_four_processes_exchange_pages_over_several_epochs(tmp_path: Path) -> None:
    processes.need("torch", "triton")
    path = tmp_path / "shared"
    content = np.random.default_rng(0).integers(0, 256, exchange.FILE_BYTES, dtype=np.uint8)
    for rank in range(exchange.RANKS):
        start = exchange.FILE_BYTES - (exchange.RANKS - rank) * exchange.RANK_BYTES
        content[start : start + exchange.PAD_BYTES] = 0
    content.tofile(path)
    ranks = []
    try:
        for rank in range(exchange.RANKS):
            line, environment = processes.command("tests.kernels.exchange", str(path), str(rank), interpret=True)
            ranks.append(
                subprocess.Popen(line, env=environment, cwd=processes.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=processes.SECONDS_MAX)
            assert process.returncode == 0, f"rank {rank}: {err[-3000:]}"
            assert json.loads(out)["errors"] == [], f"rank {rank}"
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_the_plans_leave_pages_out_and_let_one_rank_own_nothing() -> None:
    owners, _, slots = exchange.plan(2)
    assert exchange.RANKS - 1 not in owners
    assert (slots == -1).any()
    assert (slots >= 0).any(axis=1).all()
