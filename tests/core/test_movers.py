"""How a load is done: what is asked for where it can be, else the next best, and always why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from umbp.core.movers import CAUSES, WAYS, Facts, choose

LARGE = Facts(100 << 20, 8 << 20)


@pytest.mark.parametrize(
    ("asked", "changed", "mover", "cause"),
    [
        ("auto", {}, "fused", "replicated"),
        ("auto", {"size_bytes": 1 << 20}, "solo", "small"),
        ("auto", {"size_bytes": 0}, "fused", "replicated"),
        ("auto", {"break_even_bytes": float("inf")}, "solo", "small"),
        ("auto", {"unmapped": "no handles"}, "staged", "unmapped"),
        ("auto", {"unmapped": "no handles", "unreachable": "no memory"}, "solo", "unreachable"),
        ("auto", {"alone": ("no_group", "no group")}, "solo", "no_group"),
        ("fused", {}, "fused", "asked"),
        ("fused", {"size_bytes": 1}, "fused", "asked"),
        ("fused", {"unmapped": "no handles"}, "staged", "unmapped"),
        ("fused", {"alone": ("verify", "checksums are compared")}, "solo", "verify"),
        ("staged", {}, "staged", "asked"),
        ("staged", {"unreachable": "no memory"}, "solo", "unreachable"),
        ("solo", {}, "solo", "asked"),
    ],
)
def test_the_wish_is_followed_as_far_as_it_can_be(asked: str, changed: dict[str, object], mover: str, cause: str) -> None:
    chosen = choose(asked, replace(LARGE, **changed))  # type: ignore[arg-type]
    assert (chosen.mover, chosen.cause) == (mover, cause)
    assert chosen.cause in CAUSES
    assert chosen.reason
    assert all(reason in chosen.reason for name, reason in changed.items() if name == cause and isinstance(reason, str))


def test_causes_are_few_as_they_are_labels_of_a_metric() -> None:
    assert len(CAUSES) <= 16
    assert len(set(CAUSES)) == len(CAUSES)
    assert "auto" in WAYS
