"""LRU against an OrderedDict."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.calls import all_but, ids_of, inserted, request
from umbp.policies.lru import Lru

CAPACITY = 32
some_ids = st.lists(st.integers(0, CAPACITY - 1), max_size=10, unique=True)


class DumbLru:
    """Oldest first. Of one call the deepest page is the oldest, so it is moved to the end first."""

    def __init__(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def use(self, ids: list[int]) -> None:
        for page in reversed(ids):
            self.order[page] = None
            self.order.move_to_end(page)

    def victims(self, kept: list[int], count: int) -> list[int]:
        return [page for page in self.order if page not in kept][:count]

    def remove(self, ids: list[int]) -> None:
        for page in ids:
            self.order.pop(page, None)


@settings(max_examples=100, deadline=None)
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
def test_lru_equals_an_ordered_dict(script: list[Any]) -> None:
    policy, model = Lru(CAPACITY), DumbLru()
    for verb, *arguments in script:
        if verb == "insert":
            policy.on_inserted(inserted(arguments[0]))
            model.use(arguments[0])
        elif verb == "request":
            policy.on_request(request(arguments[0]))
            model.use([page for page in arguments[0] if page in model.order])
        elif verb == "evict":
            count, kept = arguments
            victims = policy.victims(all_but(kept), count).tolist()
            assert victims == model.victims(kept, count)
            policy.on_removed(ids_of(*victims), evicted=True)
            model.remove(victims)
        else:
            policy.on_removed(ids_of(*arguments[0]), evicted=False)
            model.remove(arguments[0])
        policy.check()


def test_a_request_of_one_page_twice_counts_once_at_its_first_place() -> None:
    policy = Lru(4)
    policy.on_inserted(inserted([0, 1, 2]))
    policy.on_request(request([2, 1, 2, -1, 0]))
    assert policy.victims(all_but([]), 3).tolist() == [0, 1, 2]
