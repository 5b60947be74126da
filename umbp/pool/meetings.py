"""The clock and the sessions around `umbp.core.groups`: ranks that wait for their meeting, and the timer that closes it.

A join is answered later than it was asked. Its session reads nothing more meanwhile; all others go on. Whatever may close a meeting (a
join, the timer, a session that ends) is followed by `settle`, which wakes those whose meeting has an outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from umbp import wire
from umbp.core.groups import REPLACED, Groups, Meeting, Roster
from umbp.errors import NotFound, UmbpError
from umbp.types import I64, U64


class Meetings:
    """All meetings of one pool, with their waiters."""

    def __init__(self, groups: Groups, now: Callable[[], float]) -> None:
        self.groups = groups
        self._now = now
        self._waiting: dict[int, tuple[Meeting, asyncio.Event]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Meetings {len(self._waiting)} waiting, {self.groups!r}>"

    async def join(self, now: float, session: int, message: wire.Join, ids: I64, versions: U64) -> bytes:
        """The roster as a frame, when the meeting is closed. NotFound if this rank was replaced meanwhile."""
        meeting = self.groups.join(
            now,
            session,
            message.member,
            sequence=message.sequence,
            ids=ids,
            versions=versions,
            seconds=message.seconds,
            wait=message.wait,
        )
        self.settle()
        if meeting.outcome is None:
            _, event = self._waiting.setdefault(meeting.number, (meeting, asyncio.Event()))
            await event.wait()
        return _frame(meeting, message.member)

    def session_ended(self, session: int) -> None:
        """Its ranks are no members any more."""
        self.groups.end_session(self._now(), session)
        self.settle()

    def scratch_given(self, session: int, number: int) -> None:
        """As `session_ended`, for the ranks that use this piece."""
        self.groups.end_piece(self._now(), session, number)
        self.settle()

    def settle(self) -> None:
        """Wake who need not wait any longer, and set the timer for the others."""
        for number, (meeting, event) in list(self._waiting.items()):
            if meeting.outcome is not None:
                del self._waiting[number]
                event.set()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        due = self.groups.due_or_none()
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self._tick)

    def close(self) -> None:
        """No timer is left."""
        if self._timer:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = None
        self.groups.tick(self._now())
        self.settle()


def _frame(meeting: Meeting, member: int) -> bytes:
    outcome = meeting.outcome
    if isinstance(outcome, UmbpError):
        raise outcome
    assert isinstance(outcome, Roster)
    if all(seat.member.number != member for seat in outcome.seats):
        raise NotFound(REPLACED, field="group")
    seats = [
        (seat.member.rank, seat.sequence, seat.member.piece.offset, seat.member.piece.size_bytes, len(seat.ids)) for seat in outcome.seats
    ]
    return wire.encode(wire.Roster(outcome.round, seats), outcome.held.view(np.uint8))
