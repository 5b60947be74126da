"""The queue under the ranked policies, at sizes where it holds only a part of the ids."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policies.calls import anything, ids_of
from umbp.policies.ranking import QUEUE_IDS_MIN, Ranking

COUNT = 5 * QUEUE_IDS_MIN


def ranked(ranks: np.ndarray) -> Ranking:
    """Ids 0, 1, ... at these ranks."""
    ranking = Ranking(COUNT)
    ranking.place(np.arange(len(ranks), dtype=np.int32), ranks.astype(np.int64))
    return ranking


@pytest.mark.parametrize("distinct", [1, 2, 100, COUNT])
def test_a_walk_meets_every_id_once_in_order_of_rank_then_id(distinct: int) -> None:
    ranks = np.random.default_rng(distinct).integers(0, distinct, COUNT)
    ranking = ranked(ranks)
    met = np.concatenate(list(ranking.walk(7)))
    assert np.array_equal(met, np.lexsort([np.arange(COUNT), ranks]))
    ranking.check()


def test_a_small_peek_sorts_a_small_part() -> None:
    ranking = ranked(np.arange(COUNT)[::-1])
    assert ranking.peek(anything, 3).tolist() == [COUNT - 1, COUNT - 2, COUNT - 3]
    assert QUEUE_IDS_MIN // 2 < ranking.queued_count < QUEUE_IDS_MIN * 2


def test_ids_that_arrive_below_the_queue_are_not_lost() -> None:
    ranking = ranked(np.arange(COUNT) + 10)
    ranking.peek(anything, 1)
    ranking.place(ids_of(COUNT - 1, COUNT - 2), np.array([500, 5]))
    ranking.check()
    met = np.concatenate(list(ranking.walk(64)))
    assert met[0] == COUNT - 2
    assert met.tolist().index(COUNT - 1) in (491, 492)
    assert len(np.unique(met)) == len(met) == COUNT


def test_an_id_that_comes_back_at_its_old_rank_is_queued_once() -> None:
    ranking = ranked(np.arange(COUNT))
    ranking.peek(anything, 1)
    ranking.place(ids_of(0), np.array([COUNT + 1]))
    ranking.place(ids_of(0), np.array([0]))
    assert ranking.peek(anything, 2).tolist() == [0, 1]
    ranking.check()
