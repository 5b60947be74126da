"""S3-FIFO against two lists, counters and a list of ghosts."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.calls import all_but, anything, ids_of, inserted, request
from umbp.policies.s3fifo import S3Fifo

CAPACITY = 24
KEYS = 40


class DumbS3Fifo:
    """Algorithm 1 of the paper, one page at a time; ``size_min`` of the small queue is that at the start of a batch."""

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.counter: dict[int, int] = {}
        self.key: dict[int, int] = {}
        self.ghosts: list[int | None] = []

    def insert(self, page: int, key: int, ghost_limit: int) -> None:
        remembered = key in self.ghosts[-ghost_limit:] if ghost_limit else False
        (self.main if remembered else self.small).append(page)
        if remembered:
            self.ghosts = [None if ghost == key else ghost for ghost in self.ghosts]
        self.counter[page], self.key[page] = 0, key

    def remove(self, page: int) -> None:
        for queue in (self.small, self.main):
            if page in queue:
                queue.remove(page)

    def evict(self, kept: set[int], size_min: float) -> int | None:
        if len(self.small) >= size_min:
            page = self.evict_small(kept)
            if page is not None:
                return page
        page = self.evict_main(kept)
        return self.evict_small(kept) if page is None else page

    def evict_small(self, kept: set[int]) -> int | None:
        out = next((page for page in self.small if self.counter[page] <= 1 and page not in kept), None)
        if out is None:
            return None
        for page in self.small[: self.small.index(out)]:
            if self.counter[page] > 1:
                self.small.remove(page)
                self.main.append(page)
                self.counter[page] = 0
        self.small.remove(out)
        self.ghosts.append(self.key[out])
        return out

    def evict_main(self, kept: set[int]) -> int | None:
        if set(self.main) <= kept:
            return None
        for _ in range(5):
            for page in list(self.main):
                if self.counter[page] > 0:
                    self.counter[page] -= 1
                    self.main.remove(page)
                    self.main.append(page)
                elif page not in kept:
                    self.main.remove(page)
                    return page
        raise AssertionError("four laps find a page")


@settings(max_examples=600, deadline=None)
@given(
    script=st.lists(
        st.one_of(
            st.tuples(st.just("insert"), st.lists(st.integers(0, KEYS - 1), max_size=6, unique=True)),
            st.tuples(st.just("request"), st.lists(st.integers(0, CAPACITY - 1), max_size=12, unique=True)),
            st.tuples(st.just("evict"), st.integers(0, 10), st.sets(st.integers(0, CAPACITY - 1), max_size=5)),
            st.tuples(st.just("remove"), st.lists(st.integers(0, CAPACITY - 1), max_size=3, unique=True)),
        ),
        max_size=60,
    )
)
def test_s3fifo_equals_the_paper_one_page_at_a_time(script: list[Any]) -> None:
    policy, model = S3Fifo(CAPACITY), DumbS3Fifo()
    for verb, *arguments in script:
        live = model.small + model.main
        if verb == "insert":
            free = [page for page in range(CAPACITY) if page not in live]
            keys = [key for key in arguments[0] if key not in [model.key[page] for page in live]][: len(free)]
            pages = free[: len(keys)]
            policy.on_inserted(inserted(pages, fingerprints=keys))
            remembered = [key for key in keys if key in model.ghosts[-int(0.9 * len(live)) :]] if int(0.9 * len(live)) else []
            for page, key in reversed(list(zip(pages, keys, strict=True))):
                model.insert(page, key, len(model.ghosts) if key in remembered else 0)
        elif verb == "request":
            policy.on_request(request(arguments[0]))
            for page in set(arguments[0]) & set(live):
                model.counter[page] = min(3, model.counter[page] + 1)
        elif verb == "evict":
            count, kept = arguments
            victims = policy.victims(all_but(kept), count).tolist()
            expected = []
            size_min = 0.1 * len(live)
            for _ in range(count):
                page = model.evict(kept, size_min)
                if page is None:
                    break
                expected.append(page)
            assert victims[: len(expected)] == expected
            policy.on_removed(ids_of(*expected), evicted=True)
        else:
            policy.on_removed(ids_of(*arguments[0]), evicted=False)
            for page in arguments[0]:
                model.remove(page)
        policy.check()
        statistics = policy.statistics()
        assert (statistics.small_count, statistics.main_count) == (len(model.small), len(model.main))


def test_a_page_used_once_leaves_before_one_that_came_back() -> None:
    policy = S3Fifo(16)
    policy.on_inserted(inserted([0], fingerprints=[70]))
    policy.on_inserted(inserted([1, 2, 3, 4, 5, 6, 7]))
    policy.on_removed(policy.victims(anything, 1), evicted=True)
    policy.on_inserted(inserted([0], fingerprints=[70]))
    assert policy.statistics().returned_count == 1
    assert policy.victims(anything, 8).tolist()[:6] == [7, 6, 5, 4, 3, 2]


def test_a_page_requested_twice_on_trial_is_promoted() -> None:
    policy = S3Fifo(16)
    policy.on_inserted(inserted([0]))
    policy.on_inserted(inserted([1, 2, 3]))
    policy.on_request(request([0]))
    policy.on_request(request([0]))
    victims = policy.victims(anything, 2)
    assert victims.tolist() == [3, 2]
    assert policy.statistics().promoted_count == 0
    policy.on_removed(victims, evicted=True)
    assert policy.statistics().promoted_count == 1
