"""Places that pages come from: who is late for somebody in a hurry is asked by others."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from umbp.errors import DeadlineExceeded, Unavailable
from umbp.pool.fetching import LOCATE_SECONDS_MAX, Fetching
from umbp.pool.places import HURRY, SUSPECT_FROM_SECONDS, SUSPECT_SECONDS, Places


class Source:
    """It answers each time with what is in ``answers``, or raises it."""

    name = "peers"
    local = False

    def __init__(self) -> None:
        self.answers: list[Any] = []

    async def offers(self, *asked: Any, peek: bool) -> list[Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return [answer]


class Asked:
    """Just as much of a pool as asks its sources, on a clock of the test's own that only the test moves on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.source = Source()
        self.places = Places(lambda: self.now)

    async def ask(self, seconds: float, answer: Any) -> str:
        """What who has so many seconds gets: pages or nothing, and whether the source was asked for it."""
        self.source.answers = [answer]
        self_: Any = SimpleNamespace(places=self.places, sources=[self.source], now=lambda: self.now)
        found = await Fetching.offers(self_, None, None, frozenset(), self.now + seconds)  # type: ignore[arg-type]
        return "not asked" if self.source.answers else "pages" if found else "nothing"


PAGES = SimpleNamespace(which=np.arange(2), place="node b", seconds=0.001)


@pytest.mark.parametrize("late", [TimeoutError(), DeadlineExceeded("no time is left")])
async def test_a_source_that_is_late_for_one_in_a_hurry_is_asked_by_others(late: Exception) -> None:
    asked = Asked()
    assert await asked.ask(LOCATE_SECONDS_MAX, late) == "nothing"
    assert await asked.ask(LOCATE_SECONDS_MAX, PAGES) == "not asked", "those in the same hurry do not wait one after the other"
    assert await asked.ask(HURRY * LOCATE_SECONDS_MAX, PAGES) == "pages"
    asked.now += SUSPECT_SECONDS
    assert await asked.ask(LOCATE_SECONDS_MAX, PAGES) == "pages"


@pytest.mark.parametrize("error", [TimeoutError(), Unavailable("gone")])
async def test_a_source_that_had_its_time_or_fails_is_asked_by_nobody_for_a_moment(error: Exception) -> None:
    asked = Asked()
    assert await asked.ask(60.0, error) == "nothing"
    assert await asked.ask(60.0, PAGES) == "not asked"
    asked.now += SUSPECT_SECONDS
    assert await asked.ask(60.0, PAGES) == "pages"


async def test_the_longest_time_that_was_too_short_counts() -> None:
    asked = Asked()
    for seconds in (SUSPECT_FROM_SECONDS / 2, SUSPECT_FROM_SECONDS / 1000):
        asked.places.late("peers", seconds, TimeoutError())
    assert await asked.ask(SUSPECT_FROM_SECONDS / 2, PAGES) == "not asked"
    assert not asked.places.suspects
