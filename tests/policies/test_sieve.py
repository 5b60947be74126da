"""SIEVE against a list, a bit and a hand."""

from __future__ import annotations

import random

import pytest

from tests.policies.calls import all_but, anything, ids_of, inserted, request
from umbp.policies.sieve import Sieve

CAPACITY = 24

pytestmark = pytest.mark.usefixtures("steps")


class DumbSieve:
    """One page at a time, as in the paper. ``hand`` is a page, or None for the oldest."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def insert(self, page: int) -> None:
        self.remove(page)
        self.queue.append(page)

    def after(self, page: int) -> int | None:
        index = self.queue.index(page) + 1
        return self.queue[index] if index < len(self.queue) else None

    def remove(self, page: int) -> None:
        if page in self.queue:
            if self.hand == page:
                self.hand = self.after(page)
            self.queue.remove(page)
            self.visited.discard(page)

    def evict(self, kept: list[int]) -> int | None:
        if set(self.queue) <= set(kept):
            return None
        page = self.queue[0] if self.hand is None else self.hand
        while page in self.visited or page in kept:
            self.visited.discard(page)
            following = self.after(page)
            page = self.queue[0] if following is None else following
        self.hand = self.after(page)
        self.remove(page)
        return page


@pytest.mark.parametrize("seed", range(12))
def test_sieve_equals_the_paper_one_page_at_a_time(seed: int) -> None:
    """Long enough that the hand goes around and the log is compacted many times; steps of one and of many."""
    dice = random.Random(seed)
    policy, model = Sieve(CAPACITY), DumbSieve()
    for step in range(400):
        pages = dice.sample(range(CAPACITY), dice.randint(0, 6))
        verb = dice.choices(["insert", "request", "evict", "remove"], [4, 3, 4, 1])[0]
        if verb == "insert":
            policy.on_inserted(inserted(pages))
            for page in pages:
                model.remove(page)
            for page in reversed(pages):
                model.insert(page)
        elif verb == "request":
            policy.on_request(request(pages))
            model.visited |= set(pages) & set(model.queue)
        elif verb == "evict":
            kept, count = pages if dice.random() < 0.5 else [], dice.choice([1, 2, 3, CAPACITY // 2])
            victims = policy.victims(all_but(kept), count).tolist()
            policy.on_removed(ids_of(*victims), evicted=True)
            expected = [model.evict(kept) for _ in range(count)]
            assert victims == [page for page in expected if page is not None], f"seed {seed}, step {step}"
        else:
            policy.on_removed(ids_of(*pages), evicted=False)
            for page in pages:
                model.remove(page)
        policy.check()
        assert policy.statistics().visited_count == len(model.visited), f"seed {seed}, step {step}"


def test_a_peek_moves_no_hand_and_a_removal_neither() -> None:
    policy = Sieve(8)
    policy.on_inserted(inserted([2, 1, 0]))
    policy.on_request(request([0]))
    policy.victims(anything, 3)
    policy.on_removed(ids_of(1), evicted=False)
    assert policy.statistics().visited_count == 1
    assert policy.victims(anything, 3).tolist() == [2, 0]
