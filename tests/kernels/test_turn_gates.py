"""Gates: their tags change by what is asked, and what was there is told."""

from __future__ import annotations

import pytest

from tests.kernels import processes
from tests.kernels.cases import MOVERS, WAIT_CASES


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("case", WAIT_CASES)
def test_gates_change_and_what_was_there_is_told(case: str, mover: str) -> None:
    processes.check("turn_gates", case, mover)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WAIT_CASES)
def test_on_a_gpu(case: str) -> None:
    processes.on_gpu("turn_gates", case)
