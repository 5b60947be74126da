"""Groups: golden scripts, and a seeded world in which ranks join, leave, are replaced, stop and die. All invariants after each event."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core.world import World, find, open_namespace, put

from umbp.core.groups import GROUPS_MAX, JOIN_PAGES_MAX, Groups, Meeting, Member, Roster
from umbp.errors import Conflict, InvalidRequest, LimitReached, NotFound

PAGE = 4096
STAGING = 64 << 10


class Hall:
    """A pool with 40 pages, and its groups."""

    def __init__(self, pages: int = 40, **limits) -> None:
        self.world = World(4 << 20, 256, **limits)
        self.counter = np.zeros(1, np.uint64)
        self.row = open_namespace(self.world.pool, "ns", PAGE)
        put(self.world.pool, self.row, *range(pages))
        self._make()

    def _make(self) -> None:
        pool = self.world.pool
        self.groups = Groups(pool.leases, pool.scratch, self.counter)

    def open(self, session: int, rank: int, *, world: int = 3, name: str = "tp", now: float = 0.0) -> Member:
        piece = self.world.pool.scratch.take(now, session, STAGING)
        return self.groups.open(session, self.row, name, world=world, rank=rank, scratch=piece.number)

    def look(self, *pages: int) -> tuple[np.ndarray, np.ndarray]:
        found = find(self.world.pool, self.row, *pages) if pages else None
        if found is None:
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        return found.ids, np.where(found.hit, found.versions, 0).astype(np.uint64)

    def join(self, now: float, member: Member, *pages: int, seconds: float = 5.0, wait: float = 0.005, looked=None) -> Meeting:
        ids, versions = looked if looked is not None else self.look(*pages)
        return self.groups.join(
            now, member.session, member.number, sequence=int(now * 1000), ids=ids, versions=versions, seconds=seconds, wait=wait
        )

    def die(self, now: float, session: int, *, gone: bool = True) -> list[Meeting]:
        self.world.pool.connection_closed(session, gone=gone)
        return self.groups.end_session(now, session)

    def check(self) -> None:
        self.world.pool.check()
        self.groups.check()

    def leases(self) -> int:
        return len(self.world.pool.leases.leases)

    def scratch(self) -> int:
        return len(self.world.pool.scratch.pieces)


def ranks(meeting: Meeting) -> list[int]:
    assert isinstance(meeting.outcome, Roster)
    return [seat.member.rank for seat in meeting.outcome.seats]


def test_a_meeting_closes_when_all_live_members_are_in() -> None:
    hall = Hall()
    a, b = hall.open(1, 0), hall.open(2, 2)  # rank 1 never came
    first = hall.join(1.0, a, 1, 2)
    assert first.outcome is None
    hall.check()
    second = hall.join(1.001, b, 2, 3)
    assert second is first
    assert ranks(first) == [0, 2]
    assert first.outcome.held.tolist() == [True] * 4
    assert hall.leases() == 1
    assert hall.world.pool.objects.leased_bytes == 3 * PAGE  # the union, once
    hall.check()
    assert hall.groups.leave(1, a.number, first.outcome.round)
    assert hall.leases() == 1
    assert hall.groups.leave(2, b.number, first.outcome.round)
    assert hall.leases() == 0
    assert not hall.groups.leave(2, b.number, first.outcome.round)
    hall.check()


def test_a_meeting_closes_after_its_time_and_who_is_late_opens_the_next() -> None:
    hall = Hall()
    a, b, c = (hall.open(rank + 1, rank) for rank in range(3))
    first = hall.join(1.0, a, 1)
    hall.join(1.004, b, 1)
    assert hall.groups.tick(1.0049) == []
    assert hall.groups.due_or_none() == pytest.approx(1.005)
    assert hall.groups.tick(1.005) == [first]
    assert ranks(first) == [0, 1]
    late = hall.join(1.006, c, 1)
    assert late is not first
    assert hall.groups.tick(1.02) == [late]
    assert ranks(late) == [2]
    assert late.outcome.round == first.outcome.round + 1
    hall.check()


def test_pages_that_changed_since_they_were_looked_up_are_not_held_and_all_are_told_so() -> None:
    hall = Hall()
    a, b = hall.open(1, 0), hall.open(2, 1)
    looked = hall.look(1, 2, 3)
    hall.world.pool.remove(hall.row, np.frombuffer((2).to_bytes(32, "big"), np.uint8).reshape(1, 32))
    hall.join(1.0, a, looked=looked)
    meeting = hall.join(1.0, b, 3, 99)
    assert meeting.outcome.held.tolist() == [True, False, True, True, False]
    hall.check()


def test_pages_of_a_round_are_not_evicted_until_all_have_left() -> None:
    hall = Hall()
    a, b = hall.open(1, 0), hall.open(2, 1)
    hall.join(1.0, a, *range(5))
    meeting = hall.join(1.0, b)
    pool = hall.world.pool
    pool.evict(100.0, 4 << 20, dry_run=False)
    assert sorted(pool.objects.live_ids()) == sorted(hall.look(*range(5))[0])
    hall.groups.leave(1, a.number, meeting.outcome.round)
    assert pool.objects.evictable == 0
    hall.groups.leave(2, b.number, meeting.outcome.round)
    assert pool.objects.evictable == 5
    hall.check()


def test_who_dies_while_it_waits_is_dropped_and_who_waits_only_for_the_dead_goes_on() -> None:
    hall = Hall()
    a, b, c = (hall.open(rank + 1, rank) for rank in range(3))
    meeting = hall.join(1.0, a, 1)
    hall.join(1.0, b, 2)
    assert hall.die(1.001, 1) == []
    hall.check()
    assert hall.die(1.002, 3) == [meeting]
    assert ranks(meeting) == [1]
    assert c.number not in hall.groups.members
    hall.check()


def test_a_meeting_whose_last_rank_dies_is_gone() -> None:
    hall = Hall()
    a, _ = hall.open(1, 0), hall.open(2, 1)
    hall.join(1.0, a, 1)
    assert hall.die(1.0, 1) == []
    assert not hall.groups.meetings
    assert hall.groups.due_or_none() is None
    hall.check()


def test_a_dead_ranks_staging_stays_until_the_others_have_left() -> None:
    hall = Hall()
    a, b = hall.open(1, 0), hall.open(2, 1)
    hall.join(1.0, a, 1)
    meeting = hall.join(1.0, b, 2)
    hall.die(1.1, 1)
    assert hall.scratch() == 2
    assert hall.leases() == 1
    hall.check()
    assert hall.groups.leave(2, b.number, meeting.outcome.round)
    assert hall.scratch() == 1
    assert hall.leases() == 0
    hall.check()


def test_staging_of_a_process_that_lives_stays_until_it_lets_go() -> None:
    hall = Hall()
    hall.open(1, 0)
    hall.die(1.0, 1, gone=False)
    assert hall.scratch() == 1
    hall.world.pool.writer_gone(1)
    assert hall.scratch() == 0
    hall.check()


def test_a_rank_that_never_leaves_loses_the_round_after_the_last_deadline() -> None:
    hall = Hall()
    a, b = hall.open(1, 0), hall.open(2, 1)
    hall.join(1.0, a, 1, seconds=2.0)
    meeting = hall.join(1.0, b, 2, seconds=1.0)
    hall.groups.leave(2, b.number, meeting.outcome.round)
    hall.groups.tick(3.4)
    assert hall.leases() == 1
    hall.groups.tick(3.6)
    assert hall.leases() == 0
    assert not hall.groups.leave(1, a.number, meeting.outcome.round)
    hall.check()


def test_joining_again_leaves_the_round_before() -> None:
    hall = Hall()
    a = hall.open(1, 0)
    first = hall.join(1.0, a, 1)
    second = hall.join(1.1, a, 2)
    assert hall.leases() == 1
    assert not hall.groups.leave(1, a.number, first.outcome.round)
    assert hall.groups.leave(1, a.number, second.outcome.round)
    hall.check()


def test_a_rank_that_opens_again_takes_the_place_of_its_former_self() -> None:
    hall = Hall()
    a, b = hall.open(1, 0), hall.open(2, 1)
    waiting = hall.join(1.0, a, 1)
    again = hall.open(3, 0)
    assert isinstance(waiting.outcome, NotFound)  # a is told, not left to wait
    with pytest.raises(NotFound):
        hall.join(1.0, a, 1)
    hall.join(1.0, b, 1)
    assert ranks(hall.join(1.0, again, 1)) == [0, 1]
    hall.check()


def test_rounds_are_numbered_on_over_restarts() -> None:
    hall = Hall()
    first = hall.join(1.0, hall.open(1, 0), 1).outcome.round
    assert hall.world.reboot(2.0) == {1: 1}  # the staging, whose owner may still write to it
    hall._make()
    assert hall.world.pool.objects.used_bytes == 40 * PAGE + STAGING
    second = hall.join(3.0, hall.open(2, 0), 1).outcome.round
    assert second == first + 1
    hall.world.pool.writer_gone(1)
    assert hall.world.pool.objects.used_bytes == 40 * PAGE + STAGING
    hall.check()


def test_a_lease_that_cannot_be_had_is_everybodys_answer() -> None:
    hall = Hall(lease_share=0.002)  # two pages of 4 MiB
    a, b = hall.open(1, 0), hall.open(2, 1)
    hall.join(1.0, a, 1, 2)
    meeting = hall.join(1.0, b, 3)
    assert isinstance(meeting.outcome, LimitReached)
    hall.check()


def test_limits_are_kept() -> None:
    hall = Hall()
    a = hall.open(1, 0)
    with pytest.raises(Conflict):
        hall.open(2, 0, world=4)
    with pytest.raises(InvalidRequest):
        hall.open(2, 3)
    with pytest.raises(NotFound):
        hall.groups.open(2, hall.row, "tp", world=3, rank=1, scratch=a.piece.number)  # another session's
    many = np.zeros(JOIN_PAGES_MAX + 1, np.int64)
    with pytest.raises(InvalidRequest):
        hall.join(1.0, a, looked=(many, many.view(np.uint64)))
    for number in range(GROUPS_MAX - 1):
        hall.groups.open(1, hall.row, f"g{number}", world=1, rank=0, scratch=a.piece.number)
    with pytest.raises(LimitReached):
        hall.groups.open(1, hall.row, "one too many", world=1, rank=0, scratch=a.piece.number)
    hall.die(1.0, 1)
    assert not hall.groups.groups
    hall.check()


def test_scratch_is_bounded_and_never_visible() -> None:
    hall = Hall()
    scratch = hall.world.pool.scratch
    with pytest.raises(InvalidRequest):
        scratch.take(0.0, 1, 100)
    with pytest.raises(LimitReached):
        scratch.take(0.0, 1, scratch.bytes_max // 2 + 1)
    piece = scratch.take(0.0, 1, scratch.bytes_max // 2)
    with pytest.raises(LimitReached):
        scratch.take(0.0, 1, STAGING)
    scratch.take(0.0, 2, scratch.bytes_max // 2)
    with pytest.raises(LimitReached):
        scratch.take(0.0, 3, STAGING)
    lease, held = hall.world.pool.lease(0.0, 1, np.array([piece.entry]), hall.world.pool.table.versions_of(np.array([piece.entry])), 1.0)
    assert not held.any()
    assert hall.world.pool.leases.release(1, lease.number)
    with pytest.raises(NotFound):
        scratch.give(2, piece.number)
    scratch.give(1, piece.number)
    hall.check()
    assert scratch.used_bytes == scratch.bytes_max // 2


class Run:
    """One seeded run against what each rank believes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hall = Hall()
        self.now = 10.0
        self.live: dict[int, Member] = {}  # session -> member
        self.waiting: dict[int, tuple[Meeting, float]] = {}  # session -> meeting, closes at the latest
        self.inside: dict[int, Roster] = {}
        self.rounds: set[int] = set()
        self.last_session = 0

    def step(self) -> None:
        choice = self.random.choices((self.open, self.join, self.leave, self.die, self.time, self.evict), (2, 8, 6, 1, 4, 1))[0]
        choice()
        for session, (meeting, latest) in list(self.waiting.items()):
            if meeting.outcome is not None:
                del self.waiting[session]
                if isinstance(meeting.outcome, Roster):
                    self.told(session, meeting.outcome)
            else:
                assert self.now < latest
        if self.random.random() < 0.3:  # most of a run's time
            self.hall.world.pool.check()
        self.hall.groups.check()

    def told(self, session: int, roster: Roster) -> None:
        seated = any(seat.member is self.live[session] for seat in roster.seats)
        if seated and roster.round in self.hall.groups.rounds:  # time may have jumped past all deadlines of the meeting
            self.inside[session] = roster
        assert len({seat.member.rank for seat in roster.seats}) == len(roster.seats)
        assert len(roster.held) == sum(len(seat.ids) for seat in roster.seats)
        self.rounds.add(roster.round)
        assert len(self.rounds) == max(self.rounds), "a number was left out, or used twice for different rounds"

    def some(self, sessions: list[int]) -> int | None:
        return self.random.choice(sessions) if sessions else None

    def open(self) -> None:
        self.last_session += 1
        rank, name = self.random.randrange(3), self.random.choice("xy")
        for session, member in list(self.live.items()):
            if (member.rank, member.group.name) == (rank, name):
                del self.live[session]
                self.waiting.pop(session, None)
                self.inside.pop(session, None)
                self.hall.die(self.now, session)
        try:
            self.live[self.last_session] = self.hall.open(self.last_session, rank, name=name, now=self.now)
        except LimitReached:
            self.hall.die(self.now, self.last_session)

    def join(self) -> None:
        session = self.some([session for session in self.live if session not in self.waiting])
        if session is None:
            return
        pages = self.random.sample(range(45), self.random.randrange(8))
        seconds, wait = self.random.uniform(0.1, 2.0), self.random.choice((0.005, 0.1))
        self.inside.pop(session, None)
        meeting = self.hall.join(self.now, self.live[session], *pages, seconds=seconds, wait=wait)
        self.waiting[session] = (meeting, self.now + 0.11)

    def leave(self) -> None:
        session = self.some(list(self.inside))
        if session is None:
            return
        roster = self.inside.pop(session)
        assert self.hall.groups.leave(session, self.live[session].number, roster.round)
        assert not self.hall.groups.leave(session, self.live[session].number, roster.round)

    def die(self) -> None:
        session = self.some(list(self.live))
        if session is None:
            return
        del self.live[session]
        self.waiting.pop(session, None)
        self.inside.pop(session, None)
        self.hall.die(self.now, session, gone=self.random.random() < 0.7)
        if self.random.random() < 0.5:
            self.hall.world.pool.writer_gone(session)

    def time(self) -> None:
        self.now += self.random.choice((0.001, 0.004, 0.05, 0.7))
        before = {session: roster.round for session, roster in self.inside.items()}
        self.hall.groups.tick(self.now)
        self.hall.world.pool.tick(self.now)
        for session, number in before.items():
            if number not in self.hall.groups.rounds:
                assert not self.hall.groups.leave(session, self.live[session].number, number)
                del self.inside[session]

    def evict(self) -> None:
        pool = self.hall.world.pool
        pool.evict(self.now, self.random.randrange(1, 40) * PAGE, dry_run=False)
        for session, roster in self.inside.items():
            flags = roster.held
            for seat in roster.seats:
                held, flags = flags[: len(seat.ids)], flags[len(seat.ids) :]
                assert (pool.table.versions_of(seat.ids)[held] == seat.versions[held]).all(), f"a page of session {session} went"
        put(pool, self.hall.row, *range(40), now=self.now)


@pytest.mark.parametrize("seed", range(8))
def test_in_a_world_of_joins_and_deaths_nothing_leaks_and_all_believe_the_same(seed: int) -> None:
    run = Run(seed)
    for step in range(300):
        try:
            run.step()
        except BaseException as error:
            raise AssertionError(f"seed {seed}, step {step}") from error
    assert len(run.rounds) > 10
    for session in range(1, run.last_session + 1):
        run.hall.die(run.now, session)
    run.hall.check()
    assert run.hall.leases() == 0
    assert run.hall.scratch() == 0
    assert run.hall.world.pool.objects.leased_bytes == 0
