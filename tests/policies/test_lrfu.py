"""LRFU-P: what counts as a use, as a gap, and what a ghost is good for."""

from __future__ import annotations

import math

import pytest

from tests.policies.calls import anything, ids_of, inserted, request
from umbp.policies.lrfu import FORKS_MAX, GAP_START_COUNT, GAP_START_S, GHOST_LIFE, Lrfu


def half_life_after(*gaps_s: float) -> float:
    """By the formula: twice the geometric mean, of the gaps and the four observations that it starts from."""
    logs = [math.log(GAP_START_S)] * GAP_START_COUNT + [math.log(gap + 0.1) for gap in gaps_s]
    return 2 * math.exp(sum(logs) / len(logs))


def test_often_used_outlives_recently_used_until_half_lives_pass() -> None:
    policy = Lrfu(8)
    policy.on_inserted(inserted([0], now=0.0))
    for _ in range(7):
        policy.on_request(request([0], now=0.0))
    policy.on_inserted(inserted([1], now=10.0))
    assert policy.victims(anything, 1).tolist() == [1]
    policy.on_inserted(inserted([2], now=3 * 120.0 + 10.0))
    assert policy.victims(anything, 2).tolist() == [1, 0]


def test_the_half_life_follows_the_gap_at_the_end_of_the_known_prefix() -> None:
    policy = Lrfu(8)
    policy.on_inserted(inserted([0, 1], now=100.0))
    policy.on_request(request([0, 1, -1], now=107.0))
    policy.on_request(request([0, -1], now=110.0))
    policy.on_request(request([-1, -1], now=115.0))
    assert policy.half_life_s == pytest.approx(half_life_after(7.0, 3.0))
    assert policy.statistics().gap_count == 2


def test_a_shared_prompt_teaches_no_gap() -> None:
    policy = Lrfu(32)
    policy.on_inserted(inserted([0]))
    for page in range(1, FORKS_MAX + 1):
        assert policy.statistics().gap_count == page - 1
        policy.on_request(request([0, -1]))
        policy.on_inserted(inserted([page], parents=[0]))
    policy.on_request(request([0, -1]))
    assert policy.statistics().gap_count == FORKS_MAX


def test_a_ghost_goes_on_from_where_it_was_and_dies_of_age() -> None:
    policy = Lrfu(8)
    policy.on_inserted(inserted([0, 1], fingerprints=[70, 71]))
    for _ in range(3):
        policy.on_request(request([0, 1], fingerprints=[70, 71]))
    policy.on_removed(ids_of(0, 1), evicted=True)
    policy.on_request(request([-1], fingerprints=[70], now=1.0))
    policy.on_inserted(inserted([4], fingerprints=[70], now=1.0))
    policy.on_inserted(inserted([5], fingerprints=[72], now=2.0))
    assert policy.statistics().returned_count == 1
    assert policy.victims(anything, 2).tolist() == [5, 4]
    late = 1.0 + GHOST_LIFE * policy.half_life_s
    policy.on_inserted(inserted([6], fingerprints=[71], now=late))
    assert policy.statistics().returned_count == 1


def test_a_request_uses_a_ghost_as_it_uses_a_page() -> None:
    policy = Lrfu(8)
    policy.on_inserted(inserted([0], fingerprints=[70]))
    policy.on_removed(ids_of(0), evicted=True)
    for _ in range(7):
        policy.on_request(request([-1], fingerprints=[70]))
    policy.on_inserted(inserted([0], fingerprints=[70]))
    policy.on_inserted(inserted([1], now=2.9 * policy.half_life_s))
    policy.on_inserted(inserted([2], now=3.1 * policy.half_life_s))
    assert policy.victims(anything, 3).tolist() == [1, 0, 2]


def test_only_evictions_leave_ghosts() -> None:
    policy = Lrfu(8)
    policy.on_inserted(inserted([0], fingerprints=[70]))
    policy.on_removed(ids_of(0), evicted=False)
    policy.on_inserted(inserted([0], fingerprints=[70]))
    assert policy.statistics().returned_count == 0


def test_times_are_relative_to_the_first_event() -> None:
    policy = Lrfu(8)
    policy.on_inserted(inserted([0], now=2e9))
    policy.on_request(request([0], now=2e9 + 7.0))
    assert policy.half_life_s == pytest.approx(half_life_after(7.0), rel=1e-6)
