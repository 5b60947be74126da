"""Who is a member: every move of the table, wrong expiry, names taken twice, and a master that was away itself."""

from __future__ import annotations

import pytest

from umbp.core.membership import (
    ALIVE,
    DEAD,
    DRAINING,
    MOVES,
    NAMES_SHOWN_MAX,
    NEIGHBOURS_MAX,
    NODES_MAX,
    SUSPECT,
    Changed,
    Member,
    Membership,
    Timing,
)
from umbp.errors import Conflict, LimitReached, NotFound, UnknownNode

TIMING = Timing(heartbeat=1.0, suspect=3.0, dead=10.0, pause=1.0)


class World:
    """A membership and a clock that ticks as often as a shell would."""

    def __init__(self) -> None:
        self.now = 100.0
        self.membership = Membership(TIMING, self.now)
        self.said: list[Changed] = []

    def join(self, node: str = "a", boot: int = 1, place: str = "p", *, draining: bool = False) -> Member:
        self.membership.can_join(self.now, node, boot, place)
        holder = len(self.membership.by_holder) + boot * 1000
        return self.membership.join(self.now, node, boot, place, {"http": "127.0.0.1:1"}, holder, draining=draining)[0]

    def wait(self, seconds: float, *beating: Member) -> list[str]:
        """Time goes by; states that were entered."""
        found, end = [], self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.5)
            for member in beating:
                self.membership.beat(self.now, member)
            found += [changed.state for changed in self.membership.tick(self.now)]
        self.membership.check()
        return found


def test_a_node_that_beats_is_never_expired() -> None:
    world = World()
    a = world.join()
    assert world.wait(60.0, a) == []
    assert a.state == ALIVE


def test_neighbours_are_live_pools_of_the_same_kernel_and_shared_memory_that_want_to_be() -> None:
    world = World()

    def pool(node: str, place: str, boot: int = 1, **addresses: str) -> Member:
        return world.membership.join(world.now, node, boot, place, addresses, hash((node, boot)), draining=False)[0]

    a, b = pool("a", "k1:23:7:a", unix="/a"), pool("b", "k1:23:8:b", unix="/b")
    pool("another-shm", "k1:24:7:c", unix="/c")
    pool("another-kernel", "k2:23:7:d", unix="/d")
    off = pool("off", "k1:23:7:e")
    nowhere = [pool(name, "5e1f", unix="/f") for name in ("f", "g")]
    near = world.membership.neighbours
    assert (near(a), near(b), near(off), *map(near, nowhere)) == ([b], [a], [], [], [])
    again = pool("a", "k1:23:7:a", boot=2, unix="/a")
    assert near(b) == [again]
    world.membership.leave(again)
    assert near(b) == []
    many = [pool(f"m{number}", f"k1:23:7:m{number}", unix="/m") for number in range(NEIGHBOURS_MAX + 1)]
    assert near(b) == many[:NEIGHBOURS_MAX]
    world.membership.check()


def test_silence_is_suspected_and_then_dead() -> None:
    world = World()
    a = world.join()
    assert world.wait(3.5) == [SUSPECT]
    assert not a.usable(world.now)
    world.membership.beat(world.now, a)
    assert a.usable(world.now)
    assert world.wait(20.0) == [SUSPECT, DEAD]
    with pytest.raises(UnknownNode, match="join again"):
        world.membership.member("a", a.registration)
    assert world.join().registration != a.registration


def test_a_master_that_was_stopped_gives_everybody_the_time_it_was_away() -> None:
    world = World()
    a = world.join()
    world.wait(2.0)
    world.now += 60.0
    assert world.membership.tick(world.now) == []
    assert a.state == ALIVE
    assert world.wait(2.0) == [SUSPECT]


def test_a_second_node_of_the_name_is_refused_while_the_first_one_beats() -> None:
    world = World()
    a = world.join("a", 1, "here")
    world.wait(5.0, a)
    with pytest.raises(Conflict, match="alive"):
        world.join("a", 2, "there")
    world.wait(1.5)
    assert world.join("a", 2, "there").boot == 2


def test_a_new_boot_at_the_same_place_replaces_the_old_one_at_once() -> None:
    world = World()
    a = world.join("a", 1, "here")
    b = world.join("a", 2, "here")
    assert world.membership.members["a"] is b
    with pytest.raises(UnknownNode):
        world.membership.member("a", a.registration)


def test_a_failed_fetch_keeps_everybody_away_for_a_while_that_grows() -> None:
    world = World()
    a = world.join()
    for seconds in (1.0, 2.0, 4.0):
        changed = world.membership.failed(world.now, "a", "b", "refused")
        assert changed is not None
        assert changed.state == SUSPECT
        assert world.membership.failed(world.now, "a", "c", "refused") is None
        world.membership.beat(world.now, a)
        assert not a.usable(world.now)  # a heartbeat does not say that it can be reached
        assert world.wait(seconds + 0.5, a) in ([ALIVE], [])
        assert a.usable(world.now)
    world.wait(61.0, a)
    world.membership.failed(world.now, "a", "b", "refused")
    assert a.avoid_seconds == 1.0


def test_draining_outlives_restarts_and_ends_by_the_operator_only() -> None:
    world = World()
    world.join()
    assert world.membership.drain("a", on=True) is not None
    a = world.join("a", 2)
    assert a.state == DRAINING
    assert a.usable(world.now)
    world.membership.failed(world.now, "a", "b", "refused")
    assert not a.usable(world.now)
    world.wait(30.0)
    assert a.state == DEAD
    a = world.join("a", 3)
    assert a.state == DRAINING
    world.membership.drain("a", on=False)
    assert a.state == ALIVE
    assert world.join("b", 1, draining=True).state == DRAINING


def test_an_unknown_node_is_named() -> None:
    world = World()
    world.join("only")
    with pytest.raises(NotFound, match="no node 'other'; there are: only"):
        world.membership.find("other")
    for number in range(NAMES_SHOWN_MAX):
        world.join(f"n{number}")
    with pytest.raises(NotFound, match=r"^requester: .* only, n0, .* n6, \.\.\. \(for example: only\)$") as caught:
        world.membership.find("other", "requester")
    assert caught.value.field == "requester"


def test_the_longest_dead_makes_room_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.core.membership.NODES_MAX", 2)
    world = World()
    a, b = world.join("a"), world.join("b", 2)
    with pytest.raises(LimitReached, match="nodes"):
        world.join("c", 3)
    world.wait(15.0, b)
    world.join("c", 3)
    assert sorted(world.membership.members) == ["b", "c"]
    assert a.state == DEAD


def test_the_dead_are_forgotten_after_an_hour() -> None:
    world = World()
    world.join()
    world.wait(11.0)
    assert world.membership.members
    world.wait(3600.0)
    assert not world.membership.members


@pytest.mark.parametrize("state", [ALIVE, SUSPECT, DRAINING, DEAD])
def test_every_state_knows_every_event_that_can_reach_it(state: str) -> None:
    events = {event for _, event in MOVES}
    known = {event for before, event in MOVES if before == state}
    assert known == (events - {"beat"} if state == DEAD else events)
    assert NODES_MAX >= 1000


def test_nobody_is_taken_for_silent_for_a_time_of_which_nothing_was_heard() -> None:
    """What the node says to other masters has not been read since ``heard``."""
    world = World()
    a = world.join()
    heard = world.now
    for _ in range(40):
        world.now += 0.5
        assert not world.membership.tick(world.now, heard=heard)
    assert a.state == ALIVE
    assert [changed.state for changed in world.membership.tick(world.now + 0.5, heard=world.now)] == [DEAD]
