"""Pushed pages: every rank that wants one has it, the counters have grown by the blocks, and no other byte has changed."""

from __future__ import annotations

import pytest

from tests.kernels import processes
from tests.kernels.cases import CASES, MOVERS


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("case", CASES)
def test_every_wanted_page_reaches_every_reader_and_nothing_else(case: str, mover: str) -> None:
    processes.check("fused_read_push", case, mover)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    processes.on_gpu("fused_read_push", case)
