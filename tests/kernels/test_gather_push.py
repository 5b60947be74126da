"""Staged pages: through the staging buffers into the slots, with signals both ways."""

from __future__ import annotations

import pytest

from tests.kernels import processes
from tests.kernels.cases import CASES, MOVERS


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("case", CASES)
def test_pages_come_through_the_staging_buffers_and_nothing_else_changes(case: str, mover: str) -> None:
    processes.check("gather_push", case, mover)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    processes.on_gpu("gather_push", case)
