"""Waits: the status says what has arrived, and a peer that never signals costs a bounded number of looks."""

from __future__ import annotations

import pytest

from tests.kernels import processes
from tests.kernels.cases import MOVERS, WAIT_CASES


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("case", WAIT_CASES)
def test_a_wait_on_a_dead_peer_ends_with_status_1_and_the_others_with_0(case: str, mover: str) -> None:
    processes.check("wait_signal", case, mover)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WAIT_CASES)
def test_on_a_gpu(case: str) -> None:
    processes.on_gpu("wait_signal", case)
