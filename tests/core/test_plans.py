"""Plans say of themselves whether they hold together."""

from __future__ import annotations

import pytest

from umbp.core.plans import NOTHING, Plan, Run, Source
from umbp.types import Tier

A = Source("a", 1, {"http": "127.0.0.1:1"})


def run(start: int, stop: int) -> Run:
    return Run(start, stop, A, Tier.DRAM, 0.1)


def test_runs_cover_the_leading_pages_exactly() -> None:
    NOTHING.check()
    Plan((run(0, 2), run(2, 5)), 5, 7, 0.1).check()


@pytest.mark.parametrize(
    "plan",
    [
        Plan((run(0, 2), run(3, 5)), 5, 5, 0.1),
        Plan((run(0, 2), run(1, 5)), 5, 5, 0.1),
        Plan((run(0, 2),), 5, 5, 0.1),
        Plan((run(0, 5),), 5, 4, 0.1),
        Plan((run(0, 0),), 0, 0, 0.1),
    ],
    ids=["hole", "overlap", "short", "more than held", "empty run"],
)
def test_a_plan_that_does_not_cover_is_found(plan: Plan) -> None:
    with pytest.raises(AssertionError):
        plan.check()


def test_a_plan_knows_when_computing_is_faster() -> None:
    assert Plan((run(0, 2),), 2, 5, 0.1, recompute_seconds=0.2).recompute
    assert not Plan((run(0, 5),), 5, 5, 0.1).recompute
