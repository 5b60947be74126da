"""SIEVE against a list, a bit and a hand."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.calls import all_but, anything, ids_of, inserted, request
from umbp.policies.sieve import Sieve

CAPACITY = 24
some_ids = st.lists(st.integers(0, CAPACITY - 1), max_size=8, unique=True)


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


@settings(max_examples=400, deadline=None)
@given(
    script=st.lists(
        st.one_of(
            st.tuples(st.just("insert"), some_ids),
            st.tuples(st.just("request"), some_ids),
            st.tuples(st.just("evict"), st.integers(0, CAPACITY), some_ids),
            st.tuples(st.just("remove"), some_ids),
        ),
        max_size=40,
    )
)
def test_sieve_equals_the_paper_one_page_at_a_time(script: list[Any]) -> None:
    policy, model = Sieve(CAPACITY), DumbSieve()
    for verb, *arguments in script:
        if verb == "insert":
            policy.on_inserted(inserted(arguments[0]))
            for page in arguments[0]:
                model.remove(page)
            for page in reversed(arguments[0]):
                model.insert(page)
        elif verb == "request":
            policy.on_request(request(arguments[0]))
            model.visited |= set(arguments[0]) & set(model.queue)
        elif verb == "evict":
            count, kept = arguments
            victims = policy.victims(all_but(kept), count).tolist()
            policy.on_removed(ids_of(*victims), evicted=True)
            expected = [model.evict(kept) for _ in range(count)]
            assert victims == [page for page in expected if page is not None]
        else:
            policy.on_removed(ids_of(*arguments[0]), evicted=False)
            for page in arguments[0]:
                model.remove(page)
        policy.check()
        assert policy.statistics().visited_count == len(model.visited)


def test_a_peek_moves_no_hand_and_a_removal_neither() -> None:
    policy = Sieve(8)
    policy.on_inserted(inserted([2, 1, 0]))
    policy.on_request(request([0]))
    policy.victims(anything, 3)
    policy.on_removed(ids_of(1), evicted=False)
    assert policy.statistics().visited_count == 1
    assert policy.victims(anything, 3).tolist() == [2, 0]
