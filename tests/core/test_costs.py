"""What is learnt from fetches, and whom it is believed of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp.core import costs
from umbp.core.costs import LOCAL, REMOTE, Costs
from umbp.types import Tier

MIB = 1 << 20


def test_a_link_that_is_used_shows_its_latency_and_bandwidth() -> None:
    made = Costs()
    for number in range(60):
        size = (1 + number % 16) * MIB
        made.measured("a", Tier.DRAM, "b", size, 0.010 + size / 100e6)
    cost = made.cost("a", Tier.DRAM, "b")
    assert cost.latency_seconds == pytest.approx(0.010, rel=0.2)
    assert cost.bytes_per_second == pytest.approx(100e6, rel=0.1)


def test_a_change_shows_after_some_fetches() -> None:
    made = Costs()
    for _ in range(50):
        made.measured("a", Tier.DRAM, "b", 8 * MIB, 0.005)
    before = made.cost("a", Tier.DRAM, "b").seconds(8 * MIB)
    for _ in range(25):
        made.measured("a", Tier.DRAM, "b", 8 * MIB, 0.5)
    assert before == pytest.approx(0.005, rel=0.3)
    assert made.cost("a", Tier.DRAM, "b").seconds(8 * MIB) == pytest.approx(0.5, rel=0.15)


def test_a_requester_without_fetches_of_its_own_believes_the_others() -> None:
    made = Costs()
    for _ in range(30):
        made.measured("a", Tier.SSD, "b", 8 * MIB, 0.4)
    assert made.cost("a", Tier.SSD, "c").seconds(8 * MIB) == pytest.approx(0.4, rel=0.2)
    assert made.cost("a", Tier.DRAM, "c") == REMOTE[Tier.DRAM]
    assert made.cost("a", Tier.SSD, "a") == LOCAL[Tier.SSD]


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e5)), max_size=40))
def test_whatever_is_measured_a_cost_is_positive_and_finite(fetches: list[tuple[int, float]]) -> None:
    made = Costs()
    for size, seconds in fetches:
        made.measured("a", Tier.DRAM, "b", size, seconds)
    cost = made.cost("a", Tier.DRAM, "b")
    assert 0 < cost.latency_seconds < float("inf")
    assert 0 < cost.bytes_per_second < float("inf")


def test_a_backlog_drains_with_time() -> None:
    made = Costs()
    made.occupy(10.0, "a", 2.0)
    made.occupy(11.0, "a", 2.0)
    assert made.backlog(11.0, "a") == pytest.approx(3.0)
    assert made.backlog(20.0, "a") == 0.0
    assert made.backlog(11.0, "b") == 0.0


def test_links_are_bounded_and_the_longest_unused_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LINKS_MAX", 4)
    made = Costs()
    for requester in "abcd":
        made.measured("s", Tier.DRAM, requester, MIB, 1.0)
    assert len(made) == 4
    assert {link[2] for link in made.links()} == {"", "b", "c", "d"}
    made.forget("s")
    assert len(made) == 0
