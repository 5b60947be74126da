"""Cleaning policies: the order in which segment files are cleaned."""

from __future__ import annotations

import numpy as np
import pytest

from umbp.policies import CLEANING, find, names


@pytest.mark.parametrize("name", names(CLEANING))
def test_an_order_has_every_file_once_and_the_emptiest_of_one_age_first(name: str) -> None:
    live = np.random.default_rng(1).random(50)
    order = find(CLEANING, name)().order(live, np.full(50, 10.0))
    assert sorted(order.tolist()) == list(range(50))
    assert order.tolist() == np.argsort(live).tolist()


@pytest.mark.parametrize("name", names(CLEANING))
def test_of_equal_files_the_oldest_goes_first(name: str) -> None:
    assert find(CLEANING, name)().order(np.full(3, 0.5), np.array([1.0, 3.0, 2.0])).tolist() == [1, 2, 0]


def test_age_makes_up_for_what_is_still_live_with_cost_benefit() -> None:
    live, age = np.array([0.2, 0.5]), np.array([1.0, 1000.0])
    assert find(CLEANING, "cost_benefit")().order(live, age).tolist() == [1, 0]
    assert find(CLEANING, "greedy")().order(live, age).tolist() == [0, 1]
