"""Who the clients are: sessions in the segment's table, the processes behind them, and when a process is gone.

The kernel tells of a closed connection at once: leases end with it. It also tells when the process is gone (pidfd): only then, or when the
client says so itself, is memory that it may still be writing given back. For a process that this one cannot see (another pid namespace) it
is the lock that the process holds on the segment's file by having it mapped: that can be asked for at any time, and is looked at every
tick while something waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from umbp.config import PoolConfig
from umbp.core.pool import Pool
from umbp.errors import InvalidRequest, LimitReached
from umbp.pool.errands import Errands
from umbp.pool.fetching import Fetching
from umbp.pool.handover import Handovers
from umbp.pool.meetings import Meetings
from umbp.pool.neighbours import Neighbours
from umbp.pool.references import References
from umbp.pool.ssd import SsdSide
from umbp.store.memory import fence
from umbp.store.segment import S_HOLDER, S_PID, S_RECALLED, S_SESSION, Segment, held, process_started
from umbp.types import I64, U64

log = logging.getLogger("umbp.pool.owners")


class Server(Protocol):
    """What a session needs of the pool process."""

    config: PoolConfig
    pool: Pool
    meetings: Meetings
    fetching: Fetching
    segment: Segment
    ssd: SsdSide | None
    handovers: Handovers
    references: References | None
    errands: Errands
    neighbours: Neighbours
    name: str

    def now(self) -> float: ...
    def status_document(self) -> dict[str, Any]: ...
    async def make_sums(self, ids: I64, versions: U64) -> U64: ...
    def observe(self, op: str, seconds: float) -> None: ...
    def wake(self) -> None: ...
    def noted(self) -> None: ...


@dataclass(slots=True)
class Owner:
    """A session in the segment's table, and the process behind it. ``pidfd`` is -1 where the process cannot be watched.

    ``holder`` is the client's number in `umbp.store.segment.held`: what tells of a process that this one cannot see.
    """

    session: int
    row: int
    pid: int
    started: int
    client: str
    opened: float
    holder: int = 0
    pidfd: int = -1
    connected: bool = True
    silent: Callable[[], bool] = lambda: False  # whether it has sent nothing that was not answered yet


class Owners:
    """All sessions, connected or still owning memory, and the watch over their processes."""

    def __init__(self, server: Server, sessions_max: int) -> None:
        self.server = server
        self.sessions_max = sessions_max
        self.by_session: dict[int, Owner] = {}
        self._free_rows = list(range(len(server.segment.sessions) - 1, -1, -1))

    def __repr__(self) -> str:
        return f"<Owners {len(self.by_session)} of {self.sessions_max}>"

    def open(self, pid: int, client: str, session: int, holder: int) -> Owner:
        """A new session of a process. LimitReached if there are too many."""
        if len(self.by_session) >= self.sessions_max or not self._free_rows:
            raise LimitReached(f"{len(self.by_session)} clients are connected, which is the limit", field="sessions_max")
        row = self._free_rows.pop()
        owner = Owner(session, row, pid, process_started(pid), client, self.server.now(), holder)
        words = self.server.segment.sessions[row]
        words[S_PID:] = 0
        words[S_PID : S_HOLDER + 1] = (pid, owner.started, holder)
        words[S_SESSION] = session  # last: who had the row before can tell that it is another's
        self._watch(owner)
        self.by_session[session] = owner
        return owner

    def adopt(self, sessions: dict[int, int]) -> None:
        """Sessions of a former boot that left unfinished writes. Rows of the others are freed."""
        table = self.server.segment.sessions
        for row in np.flatnonzero(table[:, 0]).tolist():
            session, pid, started, holder = (int(word) for word in table[row, :4])
            owner = Owner(session, row, pid, started, "before the restart", self.server.now(), holder, connected=False)
            alive = self._holds(owner) or self._seen(owner)
            if sessions.pop(session, 0) and alive:
                self.by_session[session] = owner
                self._free_rows.remove(row)
                self._watch(owner)
                if owner.pidfd < 0 and not self._holds(owner):
                    self._gone(owner)
            else:
                table[row, 0] = 0
                self.server.pool.writer_gone(session)
        for session in sessions:
            self.server.pool.writer_gone(session)

    def closed(self, owner: Owner, *, clean: bool) -> None:
        """The connection closed; ``clean``: the client said before that it has let go of everything."""
        owner.connected = False
        self.server.meetings.session_ended(owner.session)
        self.server.fetching.session_ended(owner.session)
        self.server.errands.session_ended(owner.session)
        self.server.handovers.session_ended(owner.session)
        if self.server.references:
            self.server.references.session_ended(owner.session)
        gone = clean or (owner.pidfd < 0 and not self._holds(owner))
        waiting = self.server.pool.connection_closed(owner.session, gone=gone)
        if not waiting:
            self._forget(owner)
        self.server.wake()

    def let_go(self, session: int, speaker: Owner) -> None:
        """A process says that it does not write for a former session any more. Known by its pid, or by its holder's number, a secret."""
        owner = self.by_session.get(session)
        if owner is None:
            return
        same = owner.pid == speaker.pid and owner.started == speaker.started if speaker.pid else owner.holder == speaker.holder > 0
        if same:
            if owner.connected:
                raise InvalidRequest(f"session {session} is still connected", field="session")
            self._gone(owner)

    def recall(self, session: int, number: int) -> bool:
        """`umbp.core.spares.Recall`: what a client sends after this it sends in the knowledge of it, and nothing else is on its way."""
        owner = self.by_session.get(session)
        if owner is None or not owner.connected:
            return False
        self.server.segment.sessions[owner.row, S_RECALLED] = number
        fence()
        return owner.silent()

    def sweep(self) -> None:
        """Look after the owners that cannot be watched: whose mapping is gone, or who have let go, get no more time."""
        for owner in [owner for owner in self.by_session.values() if owner.pidfd < 0 and not owner.connected]:
            if not self._holds(owner):
                self._gone(owner)

    def _seen(self, owner: Owner) -> bool:
        """Whether the process is there, and can be seen from here."""
        return owner.pid > 0 and process_started(owner.pid) == owner.started

    def _holds(self, owner: Owner) -> bool:
        return owner.holder > 0 and held(self.server.segment.path, owner.holder)

    def close(self) -> None:
        """Stop watching."""
        for owner in list(self.by_session.values()):
            self._unwatch(owner)

    def _watch(self, owner: Owner) -> None:
        if not self._seen(owner):
            return
        try:
            owner.pidfd = os.pidfd_open(owner.pid)
        except OSError as error:
            log.warning("process %d of session %d cannot be watched (%s)", owner.pid, owner.session, error)
            return
        asyncio.get_running_loop().add_reader(owner.pidfd, self._gone, owner)

    def _unwatch(self, owner: Owner) -> None:
        if owner.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(owner.pidfd)
            os.close(owner.pidfd)
            owner.pidfd = -1

    def _gone(self, owner: Owner) -> None:
        """The process is dead, or has let go."""
        self._unwatch(owner)
        if not owner.connected:
            self.server.pool.writer_gone(owner.session)
            self._forget(owner)
        self.server.wake()

    def _forget(self, owner: Owner) -> None:
        self._unwatch(owner)
        if self.by_session.pop(owner.session, None) is not None:
            self.server.segment.sessions[owner.row, 0] = 0
            self._free_rows.append(owner.row)
