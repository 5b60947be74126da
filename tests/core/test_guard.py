"""Policies of other packages: whatever they do, no memory is lost and the pool goes on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.world import World, keys_of, open_namespace, put, stored
from umbp.core.guard import GuardedCleaning, GuardedStriping, guarded_cleaning, guarded_striping
from umbp.errors import InvalidRequest
from umbp.policies import base
from umbp.policies.cleaning import CostBenefit, Greedy
from umbp.policies.striping import Even


class Foreign:
    """Behaves until told otherwise."""

    wrong = ""

    def __init__(self, capacity: int) -> None:
        self.live = np.zeros(capacity, bool)

    def on_inserted(self, event) -> None:
        if self.wrong == "on_inserted":
            raise RuntimeError("oops")
        self.live[event.ids] = True

    def on_request(self, event) -> None:
        if self.wrong == "on_request":
            raise RuntimeError("oops")

    def on_removed(self, ids, *, evicted: bool) -> None:
        if self.wrong == "on_removed":
            raise RuntimeError("oops")
        self.live[ids] = False

    def victims(self, eligible, count: int):
        ids = np.flatnonzero(self.live).astype(np.int32)
        ids = ids[eligible(ids)][:count]
        match self.wrong:
            case "raises":
                raise RuntimeError("oops")
            case "twice":
                return np.repeat(ids, 2)
            case "not live":
                return np.flatnonzero(~self.live)[:count].astype(np.int32)
            case "outside":
                return ids + 10_000
            case "not ids":
                return "everything"
        return ids


class Picky:
    """An admission policy that answers nonsense."""

    def __init__(self, capacity: int) -> None:
        pass

    def on_request(self, event) -> None:
        raise RuntimeError("oops")

    def admit(self, now, fingerprints, *, fill):
        return [1, 2, 3]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by name, for these tests only."""
    monkeypatch.setitem(base._registry["eviction"], "foreign", Foreign)
    monkeypatch.setitem(base._registry["admission"], "picky", Picky)


@pytest.mark.parametrize("wrong", ["raises", "twice", "not live", "outside", "not ids", "on_inserted", "on_request", "on_removed"])
def test_a_foreign_policy_that_fails_is_replaced_and_nothing_is_lost(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(64 * 1024, 64, eviction="foreign")
    row = open_namespace(world.pool, "a", 4096)
    assert put(world.pool, row, *range(16)) == ["stored"] * 16
    assert world.pool.faults() == []
    monkeypatch.setattr(Foreign, "wrong", wrong)
    for n in range(16, 60):
        world.pool.note(float(n), row, keys_of(n - 1))
        assert put(world.pool, row, n, now=float(n)) == ["stored"]
        assert stored(world.pool, row, n) == [True]
        world.pool.tick(float(n))
        world.pool.check()
    (fault,) = world.pool.faults()
    assert "Foreign" in fault
    assert "lru took its place" in fault


@pytest.mark.parametrize("wrong", ["raises", "on_inserted"])
def test_a_preview_of_one_that_fails_says_so_and_a_swap_to_it_changes_nothing(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(64 * 1024, 64)
    row = open_namespace(world.pool, "a", 4096)
    put(world.pool, row, *range(8))
    monkeypatch.setattr(Foreign, "wrong", wrong)
    with pytest.raises(InvalidRequest, match="the eviction policy Foreign failed") as caught:
        world.pool.preview_eviction(1.0, 4096, "foreign")
    assert caught.value.field == "policy"
    assert "took its place" not in str(caught.value)
    if wrong == "on_inserted":
        with pytest.raises(InvalidRequest, match="on_inserted"):
            world.pool.swap_eviction(1.0, "foreign")
    assert world.pool.faults() == []
    assert world.pool.eviction != "foreign"


def test_a_foreign_policy_that_behaves_stays() -> None:
    world = World(64 * 1024, 64, eviction="foreign")
    row = open_namespace(world.pool, "a", 4096)
    for n in range(60):
        assert put(world.pool, row, n, now=float(n)) == ["stored"]
    assert world.pool.faults() == []
    world.pool.check()


def test_an_admission_policy_that_fails_admits_everything() -> None:
    world = World(64 * 1024, 64, admission="picky")
    row = open_namespace(world.pool, "a", 4096)
    assert put(world.pool, row, 1, 2) == ["stored"] * 2
    assert "everything is admitted" in world.pool.faults()[0]


class Says:
    """A cleaning and striping policy that answers what it is told to."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def order(self, live, age):
        return self.answer()

    def choose(self, size, used, waiting):
        return self.answer()


LIVE, AGE = np.array([0.9, 0.1, 0.5]), np.ones(3)


@pytest.mark.parametrize(
    "wrong",
    [lambda: [0, 1], lambda: [0, 1, 1], lambda: [0, 1, 3], lambda: [0, 1, -1], lambda: [0.0, 1.0, 2.0], lambda: "abc", lambda: 1 // 0],
)
def test_an_order_of_files_that_is_none_is_replaced(wrong) -> None:
    policy = guarded_cleaning(Says(wrong))
    assert policy.order(LIVE, AGE).tolist() == CostBenefit().order(LIVE, AGE).tolist()
    assert isinstance(policy, GuardedCleaning)
    assert "cost_benefit took its place" in policy.fault
    assert policy.order(LIVE, AGE).tolist() == [1, 2, 0]


@pytest.mark.parametrize("wrong", [lambda: 3, lambda: -1, lambda: 0.0, lambda: None, lambda: 1 // 0])
def test_a_disk_that_there_is_not_is_replaced(wrong) -> None:
    policy = guarded_striping(Says(wrong))
    size, used, waiting = np.full(3, 100.0), np.array([5.0, 1.0, 9.0]), np.zeros(3)
    assert policy.choose(size, used, waiting) == Even().choose(size, used, waiting)
    assert isinstance(policy, GuardedStriping)
    assert "even took its place" in policy.fault


def test_right_answers_of_foreign_policies_are_taken_and_ours_are_not_checked() -> None:
    policy = guarded_cleaning(Says(lambda: [2, 0, 1]))
    assert policy.order(LIVE, AGE).tolist() == [2, 0, 1]
    striping = guarded_striping(Says(lambda: np.int64(2)))
    assert striping.choose(LIVE, LIVE, LIVE) == 2
    assert not policy.fault
    assert not striping.fault
    ours = Greedy()
    assert guarded_cleaning(ours) is ours
