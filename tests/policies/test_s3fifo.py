"""S3-FIFO against two lists, counters and a list of ghosts."""

from __future__ import annotations

import random

import pytest

from tests.policies.calls import all_but, anything, ids_of, inserted, request
from umbp.policies.s3fifo import S3Fifo

CAPACITY = 24
KEYS = 40

pytestmark = pytest.mark.usefixtures("steps")


class DumbS3Fifo:
    """Algorithm 1 of the paper, one page at a time; ``size_min`` of the small queue is that at the start of a batch."""

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.counter: dict[int, int] = {}
        self.key: dict[int, int] = {}
        self.ghosts: list[int | None] = []

    def insert(self, page: int, key: int, *, remembered: bool) -> None:
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


@pytest.mark.parametrize("seed", range(16))
def test_s3fifo_equals_the_paper_one_page_at_a_time(seed: int) -> None:
    """Half of the scripts evict one page at a time, half whole batches; some keys come back, some pages are asked for often."""
    dice = random.Random(seed)
    policy, model = S3Fifo(CAPACITY), DumbS3Fifo()
    for step in range(400):
        live = model.small + model.main
        verb = dice.choices(["insert", "request", "evict", "remove"], [4, 6, 3, 1])[0]
        if verb == "insert":
            free = [page for page in range(CAPACITY) if page not in live]
            keys = dice.sample(
                [key for key in range(KEYS) if key not in [model.key[page] for page in live]], min(len(free), dice.randint(0, 6))
            )
            pages = free[: len(keys)]
            policy.on_inserted(inserted(pages, fingerprints=keys))
            recent = model.ghosts[len(model.ghosts) - int(0.9 * len(live)) :] if int(0.9 * len(live)) < len(model.ghosts) else model.ghosts
            remembered = [key for key in keys if key in recent]
            for page, key in reversed(list(zip(pages, keys, strict=True))):
                model.insert(page, key, remembered=key in remembered)
        elif verb == "request":
            pages = dice.sample(range(CAPACITY), dice.randint(0, 12))
            policy.on_request(request(pages))
            for page in set(pages) & set(live):
                model.counter[page] = min(3, model.counter[page] + 1)
        elif verb == "evict":
            kept = set(dice.sample(range(CAPACITY), dice.choice([0, 0, 4])))
            count = 1 if seed % 2 else dice.choice([1, 2, 4, 8])
            victims = policy.victims(all_but(kept), count).tolist()
            size_min = 0.1 * len(live)
            expected = [page for page in (model.evict(kept, size_min) for _ in range(count)) if page is not None]
            assert victims[: len(expected)] == expected, f"seed {seed}, step {step}"
            policy.on_removed(ids_of(*expected), evicted=True)
        else:
            pages = dice.sample(range(CAPACITY), 2)
            policy.on_removed(ids_of(*pages), evicted=False)
            for page in pages:
                model.remove(page)
        policy.check()
        statistics = policy.statistics()
        assert (statistics.small_count, statistics.main_count) == (len(model.small), len(model.main)), f"seed {seed}, step {step}"


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
