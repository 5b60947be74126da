"""Groups: how ranks that hold replicated KV meet for a load, and what all of them may rely on then.

Theory of operation
-------------------
    member --join--> meeting --all live members are in, or its time is over--> round --every rank has left, or its time is over--> gone

A *member* is one rank of a group: a session with a piece of scratch that the others can read. A rank that opens again replaces what was
there; a member goes with its session.

The first `join` opens a meeting, later ones enter it. It closes when every rank that is a member at that moment is in it, or after a short
time that the first one names; whoever joins later opens the next. Who dies while it waits is dropped from it.

At the close three things happen in one step. The round gets a number that is never used again, over restarts neither. The arbiter leases
the union of the wanted pages for the group. And all who are in get the same `Roster`: who is in, where each one's scratch is, which of
each one's pages exist. A roster is a value made once, so no two ranks can believe different ones, and a page that one rank sees as
existing exists for all and is not evicted under any.

Until the round is over the lease stands and the scratch of each of its ranks stays what it is, also that of a rank that dies. It is over
when each rank has left (said so, joined again, been replaced, or lost its session), at the latest some time after the last deadline. So
`leave` answers whether all of that was so until now: a rank that was stopped for too long learns it before it counts any byte.

Bounded: groups, ranks, pages a join, time of a meeting, time of a round, one round and one meeting a member.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from umbp.core.leases import Lease, Leases
from umbp.core.scratch import Piece, Scratch
from umbp.errors import Conflict, InvalidRequest, LimitReached, NotFound, UmbpError
from umbp.types import I64, U64, Mask

GROUPS_MAX = 1024
WORLD_MAX = 64
JOIN_PAGES_MAX = 8192  # half a million tokens; 64 ranks of it are leased in about 20 ms
MEETING_SECONDS_MAX = 1.0
ROUND_MARGIN_SECONDS = 0.5  # a rank that ends at its deadline has this long to say so
REPLACED = "this rank is no member any more: another process has taken its place"


@dataclass(slots=True)
class Member:
    """One rank of a group. ``round``: the one it is in, 0 if in none."""

    number: int
    session: int
    group: Group
    rank: int
    piece: Piece
    round: int = 0


@dataclass(slots=True)
class Group:
    """Members by rank, and the meeting that is open, if one is."""

    number: int
    row: int
    name: str
    world: int
    members: dict[int, Member] = field(default_factory=dict)
    meeting: Meeting | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank in a meeting. ``sequence`` says which table it has posted."""

    member: Member
    sequence: int
    ids: I64
    versions: U64
    until: float


@dataclass(frozen=True, slots=True)
class Roster:
    """What all ranks of a round are told: seats by rank, and one flag a wanted page, in that order."""

    round: int
    seats: tuple[Seat, ...]
    held: Mask


@dataclass(slots=True)
class Meeting:
    """Ranks that wait. ``outcome`` once it is closed."""

    number: int
    group: Group
    closes: float
    seats: dict[int, Seat] = field(default_factory=dict)
    outcome: Roster | UmbpError | None = None


@dataclass(slots=True)
class Round:
    """Who is still in it, by member number, and what it protects."""

    number: int
    group: Group
    inside: dict[int, Member]
    pieces: list[Piece]
    lease: Lease | None
    until: float


class Groups:
    """All groups of one pool. ``counter``: the segment's word for the last round number."""

    def __init__(self, leases: Leases, scratch: Scratch, counter: U64) -> None:
        self.leases = leases
        self.scratch = scratch
        self.groups: dict[tuple[int, str], Group] = {}
        self.members: dict[int, Member] = {}
        self.rounds: dict[int, Round] = {}
        self.meetings: dict[int, Meeting] = {}  # open ones
        self._counter = counter
        self._next = 1

    def __repr__(self) -> str:
        return f"<Groups {len(self.groups)} groups, {len(self.members)} ranks, {len(self.meetings)} meetings, {len(self.rounds)} rounds>"

    def open(self, session: int, row: int, name: str, *, world: int, rank: int, scratch: int) -> Member:
        """Become a rank of a group, which is made if it is new. Replaces the rank's former member."""
        if not 1 <= world <= WORLD_MAX or not 0 <= rank < world:
            raise InvalidRequest(f"rank {rank} of {world}", field="group", example=f"0 <= rank < world <= {WORLD_MAX}")
        piece = self.scratch.find(session, scratch)
        group = self.groups.get((row, name))
        if group is None:
            if len(self.groups) >= GROUPS_MAX:
                raise LimitReached(f"there are {GROUPS_MAX} groups, which is the limit", field="group")
            group = self.groups[row, name] = Group(self._number(), row, name, world)
        elif group.world != world:
            raise Conflict(f"group {name!r} has {group.world} ranks, not {world}", field="world", example="another name")
        if (former := group.members.get(rank)) is not None:
            self._remove(former)
            self.groups[row, name] = group  # it may have been the last
        member = Member(self._number(), session, group, rank, piece)
        group.members[rank] = self.members[member.number] = member
        return member

    def join(
        self, now: float, session: int, number: int, *, sequence: int, ids: I64, versions: U64, seconds: float, wait: float
    ) -> Meeting:
        """Enter the group's meeting, which may be closed by it.

        ``seconds``: to this rank's deadline. ``wait``: how long a meeting that is opened by this waits for others.
        """
        member = self._member(session, number)
        if len(ids) > JOIN_PAGES_MAX:
            raise InvalidRequest(f"{len(ids)} pages, a rank may join with {JOIN_PAGES_MAX}", field="pages")
        self._leave_round(member)
        group = member.group
        meeting = group.meeting
        if meeting is None:
            meeting = group.meeting = Meeting(self._number(), group, now + min(wait, MEETING_SECONDS_MAX))
            self.meetings[meeting.number] = meeting
        meeting.seats[member.rank] = Seat(member, sequence, ids, versions, now + min(seconds, self.leases.seconds_max))
        if len(meeting.seats) == len(group.members):
            self._close(now, meeting)
        return meeting

    def leave(self, session: int, number: int, round_number: int) -> bool:
        """This rank reads nothing of this round any more. True if all that it protects was protected until now."""
        member = self._member(session, number)
        found = self.rounds.get(round_number)
        intact = found is not None and number in found.inside and (found.lease is None or found.lease.number in self.leases.leases)
        if member.round == round_number:
            self._leave_round(member)
        return intact

    def end_session(self, now: float, session: int) -> list[Meeting]:
        """Everything of a session that is gone; meetings that closed because only it was still missing."""
        return self._remove_all(now, [member for member in self.members.values() if member.session == session])

    def end_piece(self, now: float, session: int, scratch: int) -> list[Meeting]:
        """As `end_session`, for the members that use this scratch."""
        return self._remove_all(now, [m for m in self.members.values() if m.session == session and m.piece.number == scratch])

    def tick(self, now: float) -> list[Meeting]:
        """Let time pass: the meetings that closed by it."""
        closed = [meeting for meeting in self.meetings.values() if meeting.closes <= now]
        for meeting in closed:
            self._close(now, meeting)
        for over in [found for found in self.rounds.values() if found.until <= now]:
            for member in list(over.inside.values()):
                self._leave_round(member)
        return closed

    def due_or_none(self) -> float | None:
        """When `tick` has something to do."""
        times = [meeting.closes for meeting in self.meetings.values()] + [found.until for found in self.rounds.values()]
        return min(times) if times else None

    def check(self) -> None:
        """Who is where, and that nothing is protected that no round needs."""
        assert {m.number for group in self.groups.values() for m in group.members.values()} == set(self.members)
        assert all(group.members for group in self.groups.values()), "a group without members"
        assert {m.number for m in (group.meeting for group in self.groups.values()) if m} == set(self.meetings)
        for meeting in self.meetings.values():
            assert meeting.outcome is None
            assert 0 < len(meeting.seats) < len(meeting.group.members), "a meeting that should be closed or gone"
            assert all(self.members.get(seat.member.number) is seat.member for seat in meeting.seats.values())
        holds: dict[int, int] = {}
        for found in self.rounds.values():
            assert found.inside, "a round that nobody is in"
            assert all(member.round == found.number for member in found.inside.values())
            for piece in found.pieces:
                holds[piece.number] = holds.get(piece.number, 0) + 1
        assert {m.number for m in self.members.values() if m.round} == {n for found in self.rounds.values() for n in found.inside}
        assert {piece.number: piece.holds for piece in self.scratch.pieces.values() if piece.holds} == holds
        leased = {found.lease.number for found in self.rounds.values() if found.lease}
        assert {lease.number for lease in self.leases.leases.values() if lease.session < 0} <= leased, "a lease outlives its round"

    def _member(self, session: int, number: int) -> Member:
        member = self.members.get(number)
        if member is None or member.session != session:
            raise NotFound(REPLACED, field="group")
        return member

    def _close(self, now: float, meeting: Meeting) -> None:
        """The roster, or why there is none."""
        del self.meetings[meeting.number]
        group = meeting.group
        group.meeting = None
        seats = tuple(meeting.seats[rank] for rank in sorted(meeting.seats))
        ids, versions = np.concatenate([seat.ids for seat in seats]), np.concatenate([seat.versions for seat in seats])
        until = max(seat.until for seat in seats) + ROUND_MARGIN_SECONDS
        lease, held = None, np.zeros(0, bool)
        if len(ids):
            good = (ids >= 0) & (ids < self.leases.objects.capacity)
            try:
                lease, held = self.leases.grant(now, -group.number, np.where(good, ids, 0), np.where(good, versions, 0), until - now)
            except LimitReached as error:
                meeting.outcome = error
                return
            until = lease.expires
        self._counter[0] += np.uint64(1)
        number = int(self._counter[0])
        inside = {seat.member.number: seat.member for seat in seats}
        made = self.rounds[number] = Round(number, group, inside, [seat.member.piece for seat in seats], lease, until)
        for seat in seats:
            seat.member.round = number
            self.scratch.hold(seat.member.piece)
        meeting.outcome = Roster(made.number, seats, held)

    def _remove_all(self, now: float, members: list[Member]) -> list[Meeting]:
        closed = []
        for member in members:
            meeting = member.group.meeting
            self._remove(member)
            if meeting is not None and meeting.number in self.meetings and len(meeting.seats) == len(member.group.members):
                self._close(now, meeting)
                closed.append(meeting)
        return closed

    def _remove(self, member: Member) -> None:
        """It is no member any more. A meeting that only waited for it is left to the caller."""
        group = member.group
        del self.members[member.number], group.members[member.rank]
        self._leave_round(member)
        meeting = group.meeting
        if meeting is not None and (seat := meeting.seats.get(member.rank)) is not None and seat.member is member:
            del meeting.seats[member.rank]
            if not meeting.seats:
                del self.meetings[meeting.number]
                group.meeting = None
                meeting.outcome = NotFound(REPLACED, field="group")  # for a client that still waits, though its place was taken
        if not group.members:
            del self.groups[group.row, group.name]

    def _leave_round(self, member: Member) -> None:
        found = self.rounds.get(member.round)
        member.round = 0
        if found is None:
            return
        del found.inside[member.number]
        if not found.inside:
            del self.rounds[found.number]
            if found.lease is not None:
                self.leases.release(-found.group.number, found.lease.number)
            for piece in found.pieces:
                self.scratch.unhold(piece)

    def _number(self) -> int:
        self._next += 1
        return self._next - 1
