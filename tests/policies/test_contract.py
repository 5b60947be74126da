"""What every eviction policy holds, against a set of live ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.calls import all_but, anything, ids_of, inserted, request
from umbp.policies import EVICTION, base

CAPACITY = 24
POLICIES = base.names(EVICTION)

pytestmark = pytest.mark.usefixtures("steps")

some_ids = st.lists(st.integers(0, CAPACITY - 1), max_size=8, unique=True)
calls = st.one_of(
    st.tuples(st.just("insert"), some_ids, st.lists(st.integers(-1, CAPACITY - 1), min_size=8, max_size=8), st.booleans()),
    st.tuples(st.just("request"), st.lists(st.integers(-1, CAPACITY - 1), max_size=12)),
    st.tuples(st.just("evict"), st.integers(0, CAPACITY + 2), some_ids, st.integers(0, CAPACITY)),
    st.tuples(st.just("remove"), some_ids, st.booleans()),
)


def peeked(policy: Any, live: set[int], kept: set[int], count: int) -> list[int]:
    """Victims, checked against the model: as many as there can be, each live and eligible, twice the same."""
    victims = policy.victims(all_but(kept), count)
    assert victims.dtype == np.int32
    again = policy.victims(all_but(kept), count)
    assert victims.tolist() == again.tolist()
    found: list[int] = victims.tolist()
    assert len(set(found)) == len(found)
    assert set(found) <= live - kept
    assert len(found) == min(count, len(live - kept))
    return found


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100, deadline=None)
@given(script=st.lists(calls, max_size=30))
def test_any_order_of_calls_keeps_the_live_set(name: str, script: list[Any]) -> None:
    policy = base.find(EVICTION, name)(CAPACITY)
    live: set[int] = set()
    for now, (verb, *arguments) in enumerate(script):
        if verb == "insert":
            ids, parents, chain = arguments
            policy.on_inserted(inserted(ids, parents=[-1, *ids[:-1]][: len(ids)] if chain else parents[: len(ids)], now=float(now)))
            live |= set(ids)
        elif verb == "request":
            policy.on_request(request(arguments[0], now=float(now)))
        elif verb == "evict":
            count, kept, taken = arguments
            victims = peeked(policy, live, set(kept), count)[:taken]
            policy.on_removed(ids_of(*victims), evicted=True)
            live -= set(victims)
        else:
            ids, evicted = arguments
            policy.on_removed(ids_of(*ids), evicted=evicted)
            live -= set(ids)
        policy.check()
    peeked(policy, live, set(), CAPACITY)
    assert repr(policy)
    assert policy.statistics() == policy.statistics()


@pytest.mark.parametrize("name", POLICIES)
def test_an_id_that_comes_back_is_a_new_page(name: str) -> None:
    policy = base.find(EVICTION, name)(CAPACITY)
    policy.on_inserted(inserted([0, 1, 2]))
    for _ in range(4):
        policy.on_request(request([0, 1, 2]))
    policy.on_removed(ids_of(0, 1, 2), evicted=False)
    policy.on_inserted(inserted([3], now=1.0))
    policy.on_inserted(inserted([0], fingerprints=[77], now=2.0))
    assert policy.victims(anything, 2).tolist() == [3, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_the_tail_of_a_chain_goes_before_its_head(name: str) -> None:
    policy = base.find(EVICTION, name)(CAPACITY)
    policy.on_inserted(inserted(list(range(9))))
    assert policy.victims(anything, 9).tolist() == list(range(8, -1, -1))


@pytest.mark.parametrize("name", POLICIES)
def test_a_put_is_never_refused_because_leases_are_deep_in_a_chain(name: str) -> None:
    policy = base.find(EVICTION, name)(CAPACITY)
    policy.on_inserted(inserted(list(range(9))))
    assert sorted(policy.victims(all_but([8]), 9).tolist()) == list(range(8))


@pytest.mark.parametrize("name", POLICIES)
def test_a_large_pool_takes_and_gives_batches(name: str) -> None:
    """Not a benchmark: with a pass over all pages for each eviction, or a loop over pages, this would be felt."""
    count, batch = 1 << 18, 1 << 10
    policy = base.find(EVICTION, name)(count)
    for start in range(0, count, batch):
        policy.on_inserted(inserted(range(start, start + batch), now=start / batch))
    gone = set()
    for _ in range(32):
        victims = policy.victims(anything, 64)
        policy.on_removed(victims, evicted=True)
        gone |= set(victims.tolist())
    assert len(gone) == 2048
    policy.check()
