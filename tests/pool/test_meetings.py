"""Meetings over real sessions: who waits delays nobody, who goes leaves nothing, and what is out of bounds is refused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Wire, eventually
from tests.pools import PoolProcess
from umbp import wire
from umbp.errors import Conflict, InvalidRequest, LimitReached, NotFound, ProtocolError, UmbpError

SIZE, STAGING = 4096, 256 << 10
NONE = np.empty(0, np.int64)


@pytest.fixture(scope="module")
def server() -> Iterator[PoolProcess]:
    with PoolProcess(dram="16MiB") as running:
        yield running
        assert "Traceback" not in running.log()


class RankByHand(Wire):
    """A session that is a rank."""

    def enter(self, rank: int, *, world: int = 2, name: str = "g") -> int:
        self.piece = self.ask(wire.TakeScratch(STAGING))[0]
        self.member = self.ask(wire.OpenGroup(self.row, name, world, rank, self.piece.number))[0].numbers[0]
        return int(self.member)

    def join(self, wait: float, ids: np.ndarray = NONE, versions: np.ndarray = NONE) -> Any:
        return self.ask(wire.Join(self.member, 1, len(ids), 5.0, wait), ids, versions.astype(np.uint64))[0]

    def leave(self, number: int) -> bool:
        return bool(self.ask(wire.Leave(self.member, number))[0].numbers[0])


@pytest.fixture
def hand(server: PoolProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[RankByHand] = []

    def make() -> RankByHand:
        made.append(RankByHand(server.socket, SIZE, tenant=request.node.name))
        return made[-1]

    yield make
    for each in made:
        with contextlib.suppress(UmbpError, OSError):
            each.ask(wire.Bye())
        each.connection.close()


def apart(hand: Any) -> tuple[RankByHand, RankByHand]:
    """Two ranks of a group of two."""
    one, two = hand(), hand()
    one.enter(0)
    two.enter(1)
    return one, two


def later(work: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_who_waits_in_a_meeting_delays_nobody_else(server: PoolProcess, hand: Any) -> None:
    (one, two), three = apart(hand), hand()

    def served_meanwhile() -> bool:
        """Whether all that others asked was answered before the meeting's time was over, a second: not on a machine that had no time."""
        waiting, found = later(lambda: one.join(1.0))
        time.sleep(0.05)  # most likely it waits by now; the rest holds in any case
        for _ in range(20):
            three.ask(wire.GetStatus())
        with umbp.connect(server.socket) as pool:
            assert pool.connected
        meanwhile = waiting.is_alive()
        waiting.join(60.0)
        assert [seat[0] for seat in found[0].seats] == [0]
        assert one.leave(found[0].round)
        return meanwhile

    eventually(served_meanwhile, "others are answered while one waits")
    waiting, found = later(lambda: one.join(1.0))
    two.ask(wire.Bye())
    waiting.join(60.0)
    assert [seat[0] for seat in found[0].seats] == [0]
    assert one.leave(found[0].round)


def test_a_meeting_to_which_not_all_come_ends_with_its_time(hand: Any) -> None:
    one, two = apart(hand)
    started = time.monotonic()
    roster = one.join(0.2)
    assert time.monotonic() - started >= 0.2
    assert [seat[0] for seat in roster.seats] == [0]
    assert two.join(0.0).seats[0][0] == 1  # who comes later is alone


def test_all_who_join_get_the_same_roster(hand: Any) -> None:
    one, two = apart(hand)

    def met() -> Any:
        """The roster, where both were there within a second."""
        waiting, found = later(lambda: one.join(1.0))
        time.sleep(0.02)
        mine = two.join(1.0)
        waiting.join(60.0)
        if len(mine.seats) == 1:
            assert found[0].round != mine.round
            return None
        assert found[0] == mine
        return mine

    mine = eventually(met, "two that join at about the same time meet")
    assert [seat[0] for seat in mine.seats] == [0, 1]
    assert [(seat[2], seat[3]) for seat in mine.seats] == [(each.piece.offset, STAGING) for each in (one, two)]


def test_a_rank_that_goes_while_others_wait_frees_them_and_leaves_nothing(server: PoolProcess, hand: Any) -> None:
    with umbp.connect(server.socket) as pool:
        eventually(lambda: pool.status()["used_bytes"] == 0, "the test before has left nothing")
        one, two = apart(hand)
        waiting, found = later(lambda: one.join(1.0))
        time.sleep(0.05)
        two.ask(wire.Bye())
        waiting.join(60.0)
        assert [seat[0] for seat in found[0].seats] == [0]
        again, _ = later(lambda: one.join(1.0))
        again.join()
        one.ask(wire.Bye())
        eventually(lambda: pool.status()["used_bytes"] == 0, "all scratch is given back")
        assert pool.status()["leases"] == 0


def test_scratch_of_a_connection_that_broke_is_kept_until_its_process_lets_go(server: PoolProcess, hand: Any) -> None:
    with umbp.connect(server.socket) as pool:
        eventually(lambda: pool.status()["used_bytes"] == 0, "the test before has left nothing")
        one, two = hand(), hand()
        one.ask(wire.TakeScratch(STAGING))
        session, sessions = one.welcome.session, pool.status()["sessions"]
        one.connection.close()
        time.sleep(0.05)
        assert pool.status()["used_bytes"] == STAGING
        two.ask(wire.LetGo(session))
        eventually(lambda: pool.status()["used_bytes"] == 0, "it is given back")
        assert pool.status()["sessions"] == sessions - 1


def test_scratch_that_is_given_back_ends_the_membership(hand: Any) -> None:
    one = hand()
    one.enter(0, world=1)
    assert len(one.join(0.0).seats) == 1
    one.ask(wire.GiveScratch(one.piece.number))
    with pytest.raises(NotFound):
        one.join(0.0)
    with pytest.raises(NotFound):
        one.ask(wire.GiveScratch(one.piece.number))


def test_who_is_replaced_while_it_waits_is_told(hand: Any) -> None:
    (one, _), again = apart(hand), hand()
    again.piece = again.ask(wire.TakeScratch(STAGING))[0]

    def join() -> Any:
        try:
            return one.join(1.0)
        except NotFound as error:
            return error

    def replaced() -> bool:
        """Whether it was, within the second that it waits."""
        one.enter(0)
        waiting, found = later(join)
        time.sleep(0.05)
        again.ask(wire.OpenGroup(again.row, "g", 2, 0, again.piece.number))
        waiting.join(60.0)
        return isinstance(found[0], NotFound)

    eventually(replaced, "who is replaced while it waits is told")


def test_what_is_out_of_bounds_is_refused(hand: Any) -> None:
    one = hand()
    with pytest.raises(InvalidRequest):
        one.ask(wire.TakeScratch(1))
    with pytest.raises(LimitReached):
        one.ask(wire.TakeScratch(16 << 20))
    one.enter(0)
    with pytest.raises(InvalidRequest):
        one.ask(wire.OpenGroup(one.row, "g", 2, 2, one.piece.number))
    with pytest.raises(NotFound):
        one.ask(wire.OpenGroup(999, "g", 2, 1, one.piece.number))
    two = hand()
    two.piece = two.ask(wire.TakeScratch(STAGING))[0]
    with pytest.raises(Conflict):
        two.ask(wire.OpenGroup(two.row, "g", 3, 1, two.piece.number))
    with pytest.raises(NotFound):
        two.ask(wire.Join(one.member, 1, 0, 1.0, 0.0), NONE, NONE)
    with pytest.raises(ProtocolError):
        one.ask(wire.Join(one.member, 1, 9000, 1.0, 0.0), np.zeros(9000, np.int64), np.zeros(9000, np.uint64))
