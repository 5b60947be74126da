"""Hit ratios on a real trace: a replayer that does not reproduce the published ones has a bug, and so has the policy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policies.replay import block_hit_ratio, conversation, traces_folder
from umbp.policies import EVICTION, find
from umbp.policies.base import Eligible, Inserted, Request
from umbp.types import I32

CAPACITY = 5_859  # blocks of 512 tokens: 3 M tokens
TRACE = traces_folder() / "conversation.jsonl.gz"

pytestmark = pytest.mark.skipif(not TRACE.is_file(), reason=f"no trace at {TRACE}; set UMBP_TRACES to a folder that has it")


class Fifo:
    """First in, first out, the deepest page of an insert the oldest."""

    def __init__(self, capacity: int) -> None:
        self.order: dict[int, None] = {}

    def on_inserted(self, event: Inserted) -> None:
        self.order.update(dict.fromkeys(event.ids[::-1].tolist()))

    def on_request(self, event: Request) -> None: ...

    def victims(self, eligible: Eligible, count: int) -> I32:
        ids = np.fromiter(self.order, np.int32)
        return ids[eligible(ids)][:count]

    def on_removed(self, ids: I32, *, evicted: bool) -> None:
        for page in ids.tolist():
            del self.order[page]


def percent(policy: object, *, full_blocks_only: bool = False) -> float:
    """Block hit ratio in %, to 0.1."""
    return round(100 * block_hit_ratio(policy, CAPACITY, conversation(TRACE), full_blocks_only=full_blocks_only), 1)


def test_lru_and_fifo_reproduce_the_published_figures() -> None:
    assert percent(find(EVICTION, "lru")(CAPACITY)) == 13.6
    assert percent(Fifo(CAPACITY)) == 12.5


@pytest.mark.parametrize(("name", "expected"), [("leaf_lru", 13.6), ("sieve", 9.7), ("s3fifo", 13.4)])
def test_the_others_stay_where_they_were(name: str, expected: float) -> None:
    assert percent(find(EVICTION, name)(CAPACITY)) == pytest.approx(expected, abs=0.11)


def test_lrfu_of_full_blocks_reproduces_the_study() -> None:
    assert percent(find(EVICTION, "lrfu")(CAPACITY), full_blocks_only=True) == pytest.approx(17.4, abs=0.11)
