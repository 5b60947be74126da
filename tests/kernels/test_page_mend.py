"""Mended pages: the parts whose owner is lost are in their slots, and no other byte has changed."""

from __future__ import annotations

import pytest

from tests.kernels import processes
from tests.kernels.cases import CASES, MOVERS


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("case", CASES)
def test_lost_parts_are_read_and_nothing_else_changes(case: str, mover: str) -> None:
    processes.check("page_mend", case, mover)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    processes.on_gpu("page_mend", case)
