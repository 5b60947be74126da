"""What every policy of the master's kinds holds, whatever it is shown; and what each is there for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.policies import base
from umbp.policies.base import CLUSTER_EVICTION, PLACEMENT, REBALANCING, REPLICATION, ROUTING
from umbp.policies.cluster import GO, KEEP, EvictView, FillView, HotView, PlaceView, RouteView
from umbp.policies.routing import poured

seconds = st.floats(1e-6, 10.0)


@st.composite
def route_views(draw: st.DrawFn) -> RouteView:
    n, c = draw(st.integers(0, 40)), draw(st.integers(0, 6))
    bits = draw(st.lists(st.booleans(), min_size=n * c, max_size=n * c))
    per = {name: np.array(draw(st.lists(seconds, min_size=c, max_size=c)), np.float64) for name in ("latency", "page", "backlog")}
    nodes = draw(st.lists(st.integers(0, 3), min_size=c, max_size=c))
    return RouteView(
        np.array(bits, bool).reshape(n, c),
        np.array(nodes, np.int64),
        np.array(draw(st.lists(st.sampled_from([2, 3]), min_size=c, max_size=c)), np.uint8),
        np.array([node == 0 for node in nodes], bool),
        per["latency"],
        per["page"],
        per["backlog"],
        np.array(draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=n, max_size=n)), np.float64),
    )


def view(held: list[list[int]], **columns: Any) -> RouteView:
    """``held`` as pages of 0 and 1; columns are remote DRAM of 1 ms and 1 ms a page unless said otherwise."""
    mask = np.array(held, bool)
    c = mask.shape[1]
    fields = {
        "nodes": range(c),
        "tiers": [2] * c,
        "local": [False] * c,
        "latency_seconds": [1e-3] * c,
        "page_seconds": [1e-3] * c,
        "backlog_seconds": [0.0] * c,
        **columns,
    }
    kinds = {"nodes": np.int64, "tiers": np.uint8, "local": bool}
    return RouteView(
        mask, **{name: np.array(list(v), kinds.get(name, np.float64)) for name, v in fields.items()}, draws=np.zeros(len(held))
    )


# -- routing -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", base.names(ROUTING))
@settings(max_examples=100, deadline=None)
@given(shown=route_views())
def test_every_page_that_is_held_is_routed_to_a_holder(name: str, shown: RouteView) -> None:
    policy = base.build(ROUTING, name)
    choice = policy.choose(shown)
    assert choice.dtype == np.int64
    assert choice.shape == (len(shown.held),)
    assert np.array_equal(choice >= 0, shown.held.any(1))
    pages = np.flatnonzero(choice >= 0)
    assert shown.held[pages, choice[pages]].all()
    assert np.array_equal(choice, policy.choose(shown))
    assert repr(policy)


def test_fastest_splits_a_prefix_so_that_all_sources_end_together() -> None:
    shown = view([[1, 1]] * 90, page_seconds=[1e-3, 2e-3])
    assert np.bincount(base.build(ROUTING, "fastest").choose(shown)).tolist() == [60, 30]


def test_fastest_leaves_out_a_source_that_is_busy_for_longer_than_the_others_need() -> None:
    shown = view([[1, 1]] * 50, backlog_seconds=[1.0, 0.0])
    assert set(base.build(ROUTING, "fastest").choose(shown).tolist()) == {1}


def test_fastest_does_not_give_a_source_less_than_its_latency_is_worth() -> None:
    shown = view([[1, 1]] * 10, latency_seconds=[0.0, 8e-3])
    assert set(base.build(ROUTING, "fastest").choose(shown).tolist()) == {0}


def test_fastest_uses_one_column_of_a_node_that_has_two() -> None:
    shown = view([[1, 1]] * 20, nodes=[5, 5], tiers=[3, 2], page_seconds=[2e-3, 1e-3])
    assert set(base.build(ROUTING, "fastest").choose(shown).tolist()) == {1}


def test_fastest_gives_what_only_one_has_to_it_first() -> None:
    shown = view([[1, 1]] * 40 + [[1, 0]] * 40)
    choice = base.build(ROUTING, "fastest").choose(shown)
    assert set(choice[40:].tolist()) == {0}
    assert set(choice[:40].tolist()) == {1}


def test_local_first_goes_elsewhere_only_for_what_is_not_here() -> None:
    shown = view([[1, 1], [0, 1], [1, 0]], local=[True, False], page_seconds=[1.0, 1e-3])
    assert base.build(ROUTING, "local_first").choose(shown).tolist() == [0, 1, 0]


def test_tier_priority_prefers_the_tier_then_the_own_copy_then_the_idle() -> None:
    shown = view(
        [[1, 1, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]],
        tiers=[3, 2, 2, 2],
        local=[True, False, True, False],
        backlog_seconds=[0, 1, 1, 0],
    )
    assert base.build(ROUTING, "tier_priority").choose(shown).tolist() == [1, 3, 2, 2]


def test_random_takes_each_holder_by_its_share_of_the_draws() -> None:
    shown = view([[1, 0, 1]] * 4)
    drawn = RouteView(**{name: getattr(shown, name) for name in RouteView.__slots__} | {"draws": np.array([0.0, 0.4, 0.6, 0.99])})
    assert base.build(ROUTING, "random").choose(drawn).tolist() == [0, 0, 2, 2]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.lists(st.tuples(st.floats(0, 5), st.floats(1e-6, 1.0)), min_size=1, max_size=8))
def test_poured_pages_are_all_there_and_no_single_source_would_be_faster(pages: int, columns: list[tuple[float, float]]) -> None:
    start, page = np.array([c[0] for c in columns]), np.array([c[1] for c in columns])
    counts = poured(pages, start, page)
    assert counts.sum() == pages
    assert (counts >= 0).all()
    level = (start + counts * page)[counts > 0].max()
    assert level <= (start + pages * page).min() + page[counts > 0].max() + 1e-9


# -- placement ---------------------------------------------------------------------------------------------------------------------


@st.composite
def place_views(draw: st.DrawFn) -> PlaceView:
    m, k = draw(st.integers(0, 50)), draw(st.integers(0, 6))
    free = np.array(draw(st.lists(st.integers(-100, 5000), min_size=k, max_size=k)), np.int64)
    local = draw(st.integers(-1, k - 1)) if k else -1
    return PlaceView(
        draw(st.sampled_from([1, 100, 1000])),
        np.full(k, 5000, np.int64),
        free,
        np.array(draw(st.lists(st.floats(0.01, 1.0), min_size=k, max_size=k)), np.float64),
        np.arange(k) == local,
        np.arange(k, dtype=np.int64) * 7919 + 1,
        np.array(draw(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=m, max_size=m)), np.int64),
        np.array(draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=m, max_size=m)), np.float64),
    )


@pytest.mark.parametrize("name", base.names(PLACEMENT))
@settings(max_examples=100, deadline=None)
@given(shown=place_views())
def test_no_node_is_given_more_than_it_has_room_for_and_no_room_is_refused(name: str, shown: PlaceView) -> None:
    policy = base.build(PLACEMENT, name)
    chosen = policy.place(shown)
    assert chosen.dtype == np.int64
    assert chosen.shape == shown.key_hashes.shape
    rooms = np.maximum(shown.free_bytes, 0) // shown.page_bytes
    placed = np.bincount(chosen[chosen >= 0], minlength=len(rooms))
    assert (placed <= rooms).all()
    assert placed.sum() == min(len(chosen), rooms.sum())
    assert np.array_equal(chosen, policy.place(shown))
    assert repr(policy)


def places(free: list[int], m: int = 60, *, ramp: list[float] | None = None, local: int = -1) -> PlaceView:
    k = len(free)
    return PlaceView(
        1,
        np.full(k, 1000, np.int64),
        np.array(free, np.int64),
        np.array(ramp or [1.0] * k),
        np.arange(k) == local,
        np.arange(k, dtype=np.int64) * 7919 + 1,
        np.arange(m, dtype=np.int64) * 104_729,
        np.linspace(0, 1, m, endpoint=False),
    )


def counts(name: str, shown: PlaceView) -> list[int]:
    chosen = base.build(PLACEMENT, name).place(shown)
    return np.bincount(chosen[chosen >= 0], minlength=len(shown.free_bytes)).tolist()


def test_local_first_spills_to_the_others_by_their_room() -> None:
    assert counts("local_first", places([100, 200, 100], local=1)) == [0, 60, 0]
    assert counts("local_first", places([100, 20, 300], local=1)) == [10, 20, 30]


@pytest.mark.parametrize("name", ["most_available", "weighted_random"])
def test_room_draws_in_proportion_and_a_ramp_slows_a_newcomer(name: str) -> None:
    assert counts(name, places([100, 200, 300])) == [10, 20, 30]
    assert counts(name, places([100, 100, 400], ramp=[1.0, 1.0, 0.25])) == [20, 20, 20]


def test_same_node_keeps_a_batch_together() -> None:
    assert counts("same_node", places([100, 200, 59])) == [0, 60, 0]
    assert sum(counts("same_node", places([30, 20, 30]))) == 60


def test_rendezvous_moves_only_the_share_of_a_node_that_leaves() -> None:
    policy = base.build(PLACEMENT, "rendezvous")
    before, after = policy.place(places([900] * 4, 400)), policy.place(places([900, 900, 900, 0], 400))
    assert np.array_equal(before[before < 3], after[before < 3])
    assert min(np.bincount(before)) > 60


# -- replication and rebalancing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", base.names(REPLICATION))
@settings(max_examples=60, deadline=None)
@given(heat=st.lists(st.floats(0, 1e6), max_size=20), nodes=st.integers(1, 50))
def test_at_least_one_copy_is_wanted_and_no_more_than_there_are_nodes(name: str, heat: list[float], nodes: int) -> None:
    n = len(heat)
    shown = HotView(np.array(heat), np.ones(n, np.int64), np.full(n, 4096, np.int64), np.ones(n, np.int64), nodes)
    wanted = base.build(REPLICATION, name).copies(shown)
    assert wanted.shape == (n,)
    assert ((wanted >= 1) & (wanted <= nodes)).all()


def test_hot_prefixes_wants_a_copy_more_for_each_doubling() -> None:
    heat = np.array([1.0, 7.9, 8.0, 16.0, 33.0, 1e9])
    shown = HotView(heat, np.ones(6, np.int64), np.ones(6, np.int64), np.ones(6, np.int64), 6)
    assert base.build(REPLICATION, "hot_prefixes").copies(shown).tolist() == [1, 1, 2, 3, 4, 6]


@pytest.mark.parametrize("name", base.names(REBALANCING))
@settings(max_examples=60, deadline=None)
@given(used=st.lists(st.integers(0, 1000), max_size=8))
def test_nobody_gives_to_himself_or_to_one_who_is_fuller(name: str, used: list[int]) -> None:
    shown = FillView(np.full(len(used), 1000, np.int64), np.array(used, np.int64))
    for giver, taker, size in base.build(REBALANCING, name).moves(shown):
        assert used[giver] > used[taker]
        assert 0 < size <= 1000


def test_even_fill_moves_from_the_full_to_the_empty() -> None:
    shown = FillView(np.full(4, 1000, np.int64), np.array([950, 100, 800, 990], np.int64))
    assert base.build(REBALANCING, "even_fill").moves(shown) == [(3, 1, 20)]


# -- cluster eviction --------------------------------------------------------------------------------------------------------------


def evictions(heat: list[float], copies: list[int], wanted: list[int]) -> EvictView:
    ones = np.ones(len(heat), np.int64)
    return EvictView(np.array(heat, np.float64), np.zeros(len(heat)), np.array(copies, np.int64), np.array(wanted, np.int64), ones, ones)


pages = st.tuples(st.floats(0, 1e6), st.integers(1, 9), st.integers(1, 9))


@pytest.mark.parametrize("name", base.names(CLUSTER_EVICTION))
@settings(max_examples=100, deadline=None)
@given(shown=st.lists(pages, max_size=40))
def test_only_spare_copies_go_first_and_something_is_always_left_to_let_go(name: str, shown: list[tuple[float, int, int]]) -> None:
    view = evictions([page[0] for page in shown], [page[1] for page in shown], [page[2] for page in shown])
    policy = base.build(CLUSTER_EVICTION, name)
    verdict = policy.judge(view)
    assert verdict.dtype == np.int64
    assert verdict.shape == (len(shown),)
    assert (view.copies[verdict == GO] > view.wanted[verdict == GO]).all()
    assert np.count_nonzero(verdict == KEEP) <= len(shown) / 2
    assert np.array_equal(verdict, policy.judge(view))
    assert repr(policy)


def test_spare_and_cold_lets_spare_copies_go_and_keeps_the_hottest_of_the_rest() -> None:
    shown = evictions([9.0, 9.0, 0.5, 0.1, 3.0, 0.0], [1, 2, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1])
    assert base.build(CLUSTER_EVICTION, "spare_and_cold").judge(shown).tolist() == [KEEP, GO, KEEP, 0, KEEP, 0]
    assert base.build(CLUSTER_EVICTION, "spare").judge(shown).tolist() == [0, GO, 0, 0, 0, 0]
    assert base.build(CLUSTER_EVICTION, "none").judge(shown).tolist() == [0] * 6
