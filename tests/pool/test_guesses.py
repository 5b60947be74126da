"""Where the next pages are asked for before the master says so: where the last ones were, for as long as that holds."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from tests.field.people import keys_of
from umbp.core.plans import NOTHING, Plan, Run, Source
from umbp.errors import Unavailable
from umbp.pool import guesses
from umbp.pool.guesses import NAMESPACES_MAX, SECONDS_MAX, STREAK_MIN, Guesses
from umbp.pool.peers import PLACE, Peers
from umbp.pool.sources import Offer, Space
from umbp.transport.base import Came, Moved, Peer
from umbp.types import I64, U8, Mask, ReadStatus, Tier

ANNE, BERT = (Source(name, 7, {"http": "127.0.0.1:1"}) for name in ("anne", "bert"))


def plan_of(source: Source, pages: int, tier: Tier = Tier.DRAM) -> Plan:
    return Plan((Run(0, pages, source, tier, 0.01 * pages),), pages, pages, 0.01 * pages)


def told(*plans: Plan, pages: int = 10) -> Guesses:
    made = Guesses()
    for plan in plans:
        made.planned(0.0, "space", pages, plan)
    return made


def test_who_had_all_of_the_last_pages_is_guessed_to_have_the_next() -> None:
    assert told(*[plan_of(ANNE, 10)] * (STREAK_MIN - 1)).run_or_none(0.0, "space", 4) is None
    made = told(*[plan_of(ANNE, 10)] * STREAK_MIN)
    assert made.run_or_none(SECONDS_MAX, "space", 4) == Run(0, 4, ANNE, Tier.DRAM, 0.04)
    assert made.run_or_none(SECONDS_MAX + 0.1, "space", 4) is None
    assert made.run_or_none(0.0, "another", 4) is None


@pytest.mark.parametrize(
    "last",
    [
        plan_of(BERT, 10),
        plan_of(Source("anne", 8, ANNE.addresses), 10),
        plan_of(ANNE, 10, Tier.SSD),
        plan_of(ANNE, 9),
        Plan((Run(0, 5, ANNE, Tier.DRAM, 0.1), Run(5, 10, BERT, Tier.DRAM, 0.1)), 10, 10, 0.1),
        NOTHING,
    ],
    ids=["another node", "another boot", "another tier", "not all", "two nodes", "nobody"],
)
def test_a_plan_that_is_another_ends_the_guessing(last: Plan) -> None:
    assert told(*[plan_of(ANNE, 10)] * STREAK_MIN, last).run_or_none(0.0, "space", 4) is None


def test_a_guess_that_was_wrong_is_not_made_again() -> None:
    made = told(*[plan_of(ANNE, 10)] * STREAK_MIN)
    made.wrong("space")
    assert made.run_or_none(0.0, "space", 4) is None
    made.planned(0.0, "space", 10, plan_of(ANNE, 10))
    assert made.run_or_none(0.0, "space", 4) is None


def test_what_is_remembered_is_bounded() -> None:
    made = Guesses()
    for number in range(NAMESPACES_MAX + 1):
        for _ in range(STREAK_MIN):
            made.planned(0.0, str(number), 10, plan_of(ANNE, 10))
    assert made.run_or_none(0.0, "0", 1) is None
    assert made.run_or_none(0.0, "1", 1) is not None
    assert str(NAMESPACES_MAX) in repr(made)


class Slow:
    """A guide that answers each question when it is let."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[str], bool]] = []
        self.may = asyncio.Event()
        self.answer: Plan | Unavailable = plan_of(ANNE, 10)

    async def plan(self, namespace: str, keys: U8, exclude: list[str], deadline: float, *, count: bool, again: bool = False) -> Plan:
        self.asked.append((len(keys), exclude, count))
        await self.may.wait()
        if isinstance(self.answer, Unavailable):
            raise self.answer
        return self.answer

    async def held(self, namespace: str, keys: U8, deadline: float) -> Mask:
        return np.zeros(len(keys), bool)

    async def failed(self, node: str, why: str) -> None: ...

    async def close(self) -> None: ...


class Deaf:
    """A transport whose peers have nothing."""

    name = "http"
    ranged = False

    async def read(self, peer: Peer, namespace: str, size: int, keys: U8, data: U8, offsets: I64, deadline: float, came: Came) -> Moved:
        return Moved(np.full(len(keys), ReadStatus.MISS, np.uint8), np.zeros(len(keys), np.uint64), 0)

    async def close(self) -> None: ...


async def test_a_node_that_is_guessed_is_not_waited_for_the_master_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "SECONDS_MAX", 3600.0)
    guide = Slow()
    peers, space, keys = Peers("me", guide, {"http": Deaf()}), Space(bytes(32), 0, 1, 4096), keys_of(*range(10))
    until = time.monotonic() + 3600.0

    async def offers(*exclude: str, peek: bool = False) -> list[Offer]:
        return await peers.offers(space, keys, frozenset(exclude), until, peek=peek)

    async def read(offer: Offer) -> None:
        taken = await peers.read(space, offer, keys, np.zeros(0, np.uint8), np.zeros(10, np.int64), until, print)
        assert (taken.status == ReadStatus.MISS).all()
        await asyncio.sleep(0)  # what is told afterwards has begun

    async def learn() -> None:
        guide.may.set()
        for _ in range(STREAK_MIN):
            assert [offer.place for offer in await offers()] == [PLACE + "anne"]
        guide.may.clear()
        guide.asked.clear()

    await learn()
    (guess,) = await offers()  # though the master does not answer
    assert guess.place == PLACE + "anne"
    assert guide.asked == []
    await read(guess)
    await read(guess)  # its second part
    assert guide.asked == [(10, ["me"], True)]  # it is asked once, and counts the use
    await peers.close()

    await learn()
    guide.may.set()
    await offers(PLACE + "anne")  # anne did not have them: there is no second guess
    await offers(peek=True)  # nor one where somebody wants to know
    assert guide.asked == [(10, ["me", "anne"], True), (10, ["me"], False)]

    await learn()
    guide.answer = Unavailable("no master")
    guide.may.set()
    await read((await offers())[0])
    with pytest.raises(Unavailable):  # a master that does not answer is found out by the next
        await offers()
    await peers.close()


@pytest.mark.parametrize(
    ("tier", "transports", "ranged"),
    [(Tier.DRAM, (True,), True), (Tier.SSD, (True,), False), (Tier.DRAM, (False,), False), (Tier.DRAM, (False, True), False)],
    ids=["out of DRAM", "out of its SSD", "by a transport that knows no parts", "by the better of two"],
)
async def test_pages_of_others_come_in_parts_out_of_dram_by_a_transport_that_can(
    tier: Tier, transports: tuple[bool, ...], ranged: bool
) -> None:
    guide = Slow()
    guide.may.set()
    source = Source("anne", 7, {"nixl": "127.0.0.1:1", "http": "127.0.0.1:1"})
    guide.answer = plan_of(source, 10, tier)
    ways = [Deaf() for _ in transports]
    for way, can in zip(ways, transports, strict=True):
        way.ranged = can
    peers = Peers("me", guide, dict(zip(("nixl", "http"), ways, strict=False)))
    (offer,) = await peers.offers(Space(bytes(32), 0, 1, 4096), keys_of(*range(10)), frozenset(), time.monotonic() + 3600.0, peek=True)
    assert offer.ranged == ranged
    assert peers.ranged == transports[0]
    await peers.close()
