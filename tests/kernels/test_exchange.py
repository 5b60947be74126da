"""Four processes exchange pages over shared memory with the kernels alone: fused and staged, over several epochs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
    line, environment = processes.command("tests.kernels.exchange", str(path), interpret=True)
    group = subprocess.Popen(line, env=environment, cwd=processes.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, err = group.communicate(timeout=processes.SECONDS_MAX)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)  # its session: the ranks that it forked
    assert group.returncode == 0, err[-3000:]
    said = [json.loads(path.with_name(f"shared.{rank}").read_text()) for rank in range(exchange.RANKS)]
    assert [each["errors"] for each in said] == [[]] * exchange.RANKS
    assert len({each["base"] for each in said}) == exchange.RANKS, "addresses of one rank mean something else in another"


def test_the_plans_leave_pages_out_and_let_one_rank_own_nothing() -> None:
    owners, _, slots = exchange.plan(2)
    assert exchange.RANKS - 1 not in owners
    assert (slots == -1).any()
    assert (slots >= 0).any(axis=1).all()
