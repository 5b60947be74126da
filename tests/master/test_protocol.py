"""Frames between pools and masters come back as they went, and what is no plan is refused."""

from __future__ import annotations

from math import inf

import pytest

from umbp.core.plans import NOTHING, Plan, Run, Source
from umbp.errors import ProtocolError
from umbp.master.protocol import RouteAnswer, decode_plan, encode_plan
from umbp.types import Tier
from umbp.wire import encode

A, B = Source("a", 1, {"http": "[::1]:7411"}), Source("b", 2, {"http": "10.0.0.1:7411", "nixl": "x"})
PLAN = Plan((Run(0, 3, A, Tier.SSD, 0.5), Run(3, 4, B, Tier.DRAM, 0.25), Run(4, 9, A, Tier.DRAM, 0.1)), 9, 12, 0.6, 1.5)


@pytest.mark.parametrize("plan", [PLAN, NOTHING])
def test_a_plan_comes_back_as_it_went(plan: Plan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


def test_an_unknown_prefill_rate_comes_back_as_unknown() -> None:
    assert decode_plan(encode_plan(Plan(PLAN.runs, 9, 9, 0.6))).recompute_seconds == inf


@pytest.mark.parametrize(
    "runs",
    [[(0, 3, 1, 2, 0.1)], [(1, 3, 0, 2, 0.1)], [(0, 3, 0, 9, 0.1)], [(0, 4, 0, 2, 0.1)]],
    ids=["no such source", "a hole", "no such tier", "too long"],
)
def test_a_frame_that_is_no_plan_is_refused(runs: list[tuple[int, int, int, int, float]]) -> None:
    frame = encode(RouteAnswer(sources=[("a", 1, {})], runs=runs, pages=3, held=3, seconds=0.1, recompute_seconds=-1.0))
    with pytest.raises(ProtocolError):
        decode_plan(frame)
