"""Leaf LRU: no child is left without its parent, and no put is refused for it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.calls import all_but, anything, ids_of, inserted, request
from umbp.policies.leaf_lru import SLACK_TICKS, LeafLru
from umbp.policies.lrfu import Lrfu

CAPACITY = 64
LEAF_FIRST = pytest.mark.parametrize("kind", [LeafLru, Lrfu])


def dumb_leaf_order(stamp: dict[int, int], parent: dict[int, int], count: int) -> list[int]:
    """Least stamp among the leaves, one at a time."""
    left, order = dict(stamp), []
    while left and len(order) < count:
        parents = {parent[page] for page in left}
        page = min((page for page in left if page not in parents), key=left.__getitem__)
        order.append(page)
        del left[page]
    return order


@LEAF_FIRST
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, CAPACITY))
def test_no_child_is_left_without_its_parent(kind: type[LeafLru] | type[Lrfu], seed: int, count: int) -> None:
    """Random trees, grown from random pages whether or not these were asked for before, with evictions in between."""
    dice = random.Random(seed)
    policy = kind(CAPACITY)
    parent: dict[int, int] = {}
    for now in range(40):
        free = [page for page in range(CAPACITY) if page not in parent]
        pages = free[: dice.randint(0, 6)]
        start = dice.choice([-1, *parent])
        chain = [start]
        while chain[0] >= 0:
            chain.insert(0, parent[chain[0]])
        if dice.random() < 0.5:
            policy.on_request(request(chain[1:] + [-1] * len(pages), now=float(now)))
        policy.on_inserted(inserted(pages, parents=[start, *pages[:-1]][: len(pages)], now=float(now)))
        parent.update(zip(pages, [start, *pages], strict=False))
        if dice.random() < 0.4:
            victims = policy.victims(anything, dice.randint(1, 10)).tolist()
            policy.on_removed(ids_of(*victims), evicted=True)
            for page in victims:
                del parent[page]
            assert {above for above in parent.values() if above >= 0} <= parent.keys(), f"seed {seed}, step {now}"
        policy.check()
    for page in policy.victims(anything, count).tolist():
        assert page not in parent.values(), f"seed {seed}: {page} goes before its child"
        del parent[page]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_with_whole_chains_requested_it_equals_a_dumb_heap_of_leaves(seed: int) -> None:
    dice = random.Random(seed)
    policy = LeafLru(CAPACITY)
    parent: dict[int, int] = {}
    stamp: dict[int, int] = {}
    tick = 0
    for _ in range(30):
        start = dice.choice([-1, *parent])
        chain = [start]
        while chain[0] >= 0:
            chain.insert(0, parent[chain[0]])
        chain = chain[1:]
        pages = [page for page in range(CAPACITY) if page not in parent][: dice.randint(1, 5)]
        policy.on_request(request(chain + [-1] * len(pages)))
        policy.on_inserted(inserted(pages, parents=[start, *pages[:-1]][: len(pages)]))
        parent.update(zip(pages, [start, *pages], strict=False))
        for page in reversed(chain + pages):
            tick += 1
            stamp[page] = tick
        victims = policy.victims(anything, 7).tolist()
        assert victims == dumb_leaf_order(stamp, parent, 7)
        for page in victims if dice.random() < 0.6 else []:
            policy.on_removed(ids_of(page), evicted=True)
            del stamp[page], parent[page]


def test_a_page_above_a_leased_one_is_offered_last() -> None:
    policy = LeafLru(8)
    policy.on_inserted(inserted([0, 1, 2]))
    policy.on_inserted(inserted([3, 4]))
    assert policy.victims(all_but([2]), 8).tolist() == [4, 3, 1, 0]


def test_an_insert_without_requests_keeps_its_whole_chain_recent() -> None:
    policy = LeafLru(128)
    policy.on_inserted(inserted([0, 1]))
    for page in range(10, 10 + SLACK_TICKS + 1):
        policy.on_inserted(inserted([page]))
    policy.on_inserted(inserted([2], parents=[1]))
    policy.check()
    assert policy.victims(anything, 100).tolist()[-3:] == [2, 1, 0]


def test_a_put_just_after_its_request_counts_as_part_of_it() -> None:
    policy = LeafLru(8)
    policy.on_inserted(inserted([0]))
    policy.on_request(request([0, -1]))
    policy.on_request(request([-1]))
    policy.on_inserted(inserted([5]))
    policy.on_inserted(inserted([1], parents=[0]))
    assert policy.victims(anything, 3).tolist() == [1, 0, 5]


def test_a_request_teaches_links_that_the_insert_did_not_know() -> None:
    policy = LeafLru(8)
    policy.on_inserted(inserted([1], parents=[-1]))
    policy.on_inserted(inserted([0], parents=[-1]))
    policy.on_request(request([0, 1]))
    assert policy.victims(all_but([1]), 1).tolist() == [0]
    assert policy.statistics().leaf_count == 1


def test_links_die_with_the_parent() -> None:
    policy = LeafLru(8)
    policy.on_inserted(inserted([0, 1]))
    policy.on_removed(ids_of(0), evicted=False)
    policy.on_inserted(inserted([0], fingerprints=[9]))
    policy.check()
    assert policy.statistics().leaf_count == 2
    assert policy.victims(all_but([1]), 8).tolist() == [0]


@LEAF_FIRST
def test_one_long_chain_goes_from_its_end(kind: type[LeafLru] | type[Lrfu]) -> None:
    policy = kind(5000)
    for start in range(0, 5000, 500):
        pages = np.arange(start, start + 500)
        policy.on_inserted(inserted(pages.tolist(), parents=(pages - 1).tolist(), now=start / 100))
    assert policy.victims(anything, 3000).tolist() == list(range(4999, 1999, -1))
