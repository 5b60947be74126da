"""Striping policies: which disk a record goes to."""

from __future__ import annotations

import numpy as np
import pytest

from umbp.policies import STRIPING, find, names


@pytest.mark.parametrize("name", names(STRIPING))
def test_equal_disks_get_equal_shares(name: str) -> None:
    policy = find(STRIPING, name)()
    size, used, waiting = np.full(4, 100.0), np.zeros(4), np.zeros(4)
    for _ in range(40):
        waiting[policy.choose(size, used, waiting)] += 1
    assert waiting.tolist() == [10.0] * 4


def test_even_goes_by_what_is_waiting_and_fill_by_what_is_free() -> None:
    size, used, waiting = np.array([100.0, 100.0]), np.array([90.0, 10.0]), np.array([0.0, 20.0])
    assert find(STRIPING, "even")().choose(size, used, waiting) == 0
    assert find(STRIPING, "fill")().choose(size, used, waiting) == 1


@pytest.mark.parametrize("name", names(STRIPING))
def test_a_larger_disk_gets_more(name: str) -> None:
    policy = find(STRIPING, name)()
    size, used, waiting = np.array([100.0, 300.0]), np.zeros(2), np.zeros(2)
    for _ in range(40):
        waiting[policy.choose(size, used, waiting)] += 1
    assert waiting.tolist() == [10.0, 30.0]
