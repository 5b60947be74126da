"""What a client knows of its pool: the mapped segment, the session, the namespaces it has open, and what it owes.

Theory of operation
-------------------
    down --connect, hello, map, namespaces--> up --the connection breaks, or the boot id in the segment changes--> down

While down every read answers at once that it could not be served and every write that it was refused; the faces (`sync`, `aio`) connect
again in the background. The segment stays mapped as long as it is the pool's; after a restart that made a new one the old mapping goes
when its last view does.

What a client owes after a break: to say when nothing of it writes any more into memory that the lost session had reserved (`let_go`). It
counts copies in flight by session for that.

Notes (which keys were asked for) are kept here until they are sent, bounded; the oldest are dropped first and counted.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from umbp import wire
from umbp.client.steps import Call, Operation, Send
from umbp.errors import SegmentError, Unavailable
from umbp.layout import Namespace
from umbp.store import memory, segment
from umbp.store.index import IndexReader
from umbp.store.segment import H_BOOT, Segment
from umbp.types import U8

if TYPE_CHECKING:
    from umbp.client.lease import Lease

NOTES_MAX = 4096
NOTE_BYTES_MAX = 4 << 20
RENEWALS_MAX = 1024


@dataclass(slots=True)
class Opened:
    """A namespace as this client has it open. ``number`` is the last one read from its row, 0 before the first look."""

    identity: Namespace
    row: int = -1
    number: int = 0


@dataclass(slots=True)
class ClientStatistics:
    """Counts of one client since it connected first."""

    connects: int = 0
    notes_sent: int = 0
    notes_dropped: int = 0
    leases_lost: int = 0
    corrupt: int = 0
    optimistic_lost: int = 0


class Link:
    """State of one client; every method is quick and never waits."""

    def __init__(self, address: str, client: str) -> None:
        self.address = address
        self.client = client
        self.up = False
        self.closed = False
        self.welcome: wire.Welcome | None = None
        self.segment: Segment | None = None
        self.index: IndexReader | None = None
        self.statistics = ClientStatistics()
        self.namespaces: list[Opened] = []
        self.leases: dict[int, Lease] = {}  # those of this session, by number
        self.owed: set[int] = set()
        self._boot = 0
        self._filling: Counter[int] = Counter()
        self._notes: deque[tuple[int, U8, int]] = deque()
        self._note_bytes = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Link {self.address} {'up' if self.up else 'down'}, session {self.session}>"

    @property
    def session(self) -> int:
        """Number of the current or last session; 0 before the first."""
        return self.welcome.session if self.welcome else 0

    def ready(self) -> bool:
        """Whether the pool behind the mapping is the one this session is with."""
        if self.up and self.segment is not None:
            if int(self.segment.words[H_BOOT]) == self._boot:
                return True
            self.up = False
        return False

    def open_steps(self) -> Operation[None]:
        """What to do on a fresh connection."""
        previous = self.session
        reply, _ = yield Call(wire.Hello(wire.VERSION, self.client, previous))
        assert isinstance(reply, wire.Welcome)
        if previous:
            self.owed.add(previous)
        self._map(reply)
        self.welcome = reply
        self._boot = reply.boot
        for opened in self.namespaces:
            yield from self.open_namespace(opened)
        for lease in self.leases.values():
            lease.lost = True
        self.leases.clear()
        self.statistics.connects += 1
        self.up = True

    def open_namespace(self, opened: Opened) -> Operation[None]:
        """Learn the row of a namespace, making it if it is new."""
        reply, _ = yield Call(wire.OpenNamespace(opened.identity.to_dict()))
        opened.row, opened.number = reply.row, 0

    def number_of(self, opened: Opened) -> int:
        """The namespace's number now; 0 if its row is not its own any more (it was given to another while we were away)."""
        assert self.segment is not None
        row = self.segment.namespaces[opened.row]
        number = int(row[0])
        if number != opened.number:
            if row[8:12].tobytes() != opened.identity.digest() or int(row[0]) != number:
                return 0
            opened.number = number
        return number

    # -- writes in flight --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def filling(self) -> Generator[None]:
        """Around a copy into reserved memory."""
        session = self.session
        with self._lock:
            self._filling[session] += 1
        try:
            yield
        finally:
            with self._lock:
                self._filling[session] -= 1

    def settled(self) -> list[int]:
        """Former sessions that nothing of this process writes for any more, and the pool does not know yet."""
        with self._lock:
            return [session for session in self.owed if self._filling[session] <= 0]

    def filling_sessions(self) -> list[int]:
        """Sessions whose reserved memory is being written right now."""
        with self._lock:
            return [session for session, count in self._filling.items() if count > 0]

    def forked(self) -> None:
        """In the child of a fork: the parent's session, writes, leases and notes are not ours."""
        self._lock = threading.Lock()
        self.up = False
        self.welcome = None
        self.owed.clear()
        self.leases.clear()
        self._filling.clear()
        self._notes.clear()
        self._note_bytes = 0

    # -- leases ------------------------------------------------------------------------------------------------------------------------

    def due_for_renewal(self, now: float) -> list[Lease]:
        """Leases at a third of their time or later, a bounded number."""
        due = [lease for lease in list(self.leases.values()) if lease.renew and now >= lease.renewed_at + lease.seconds / 3]
        return due[:RENEWALS_MAX]

    def renewed(self, leases: list[Lease], lost: list[int], asked: float) -> None:
        """The pool's answer: which it does not know any more."""
        for lease in leases:
            if lease.number in lost:
                lease.lost = True
                self.leases.pop(lease.number, None)
            else:
                lease.renewed_at = asked

    def seconds_to_renewal(self, now: float) -> float:
        """Time until the next lease wants renewal, at most 10 s."""
        waits = [lease.renewed_at + lease.seconds / 3 - now for lease in list(self.leases.values()) if lease.renew]
        return max(0.0, min([10.0, *waits]))

    # -- notes -------------------------------------------------------------------------------------------------------------------------

    def note(self, row: int, keys: U8, conversation: int) -> None:
        """Keep a request's key list for the pool."""
        with self._lock:
            self._notes.append((row, keys, conversation))
            self._note_bytes += keys.nbytes
            while len(self._notes) > NOTES_MAX or (self._note_bytes > NOTE_BYTES_MAX and len(self._notes) > 1):
                self._note_bytes -= self._notes.popleft()[1].nbytes
                self.statistics.notes_dropped += 1

    def notes_kept(self) -> int:
        """Notes that wait."""
        return len(self._notes)

    def notes_due(self) -> bool:
        """Whether there are enough to send them now."""
        return self._note_bytes > NOTE_BYTES_MAX // 8

    def covered(self, row: int, keys: U8) -> bool:
        """Whether the last note says this already: a `get` of what a `prefix` has just asked for is the same request."""
        with self._lock:
            if not self._notes:
                return False
            last_row, last, _ = self._notes[-1]
        n = len(keys)
        return row == last_row and n <= len(last) and bool((keys[0] == last[0]).all() and (keys[-1] == last[n - 1]).all())

    def take_notes(self) -> Send | None:
        """All notes as one message; None if there are none."""
        with self._lock:
            if not self._notes:
                return None
            notes, self._notes, self._note_bytes = list(self._notes), deque(), 0
        self.statistics.notes_sent += len(notes)
        heads = [(row, len(keys), conversation) for row, keys, conversation in notes]
        return Send(wire.Note(heads), (np.concatenate([keys for _, keys, _ in notes]),))

    # -- the mapping -------------------------------------------------------------------------------------------------------------------

    def _map(self, welcome: wire.Welcome) -> None:
        path = os.path.join(os.environ.get("UMBP_SHM_DIR", os.path.dirname(welcome.segment)), os.path.basename(welcome.segment))
        if self.segment is not None:
            if self.segment.is_at(path):
                return
            self.unmap()
        try:
            found = segment.attach(path, owner=False)
        except (OSError, SegmentError) as error:
            raise Unavailable(
                f"the pool's memory {path} cannot be mapped here ({error}): share its folder with this container, or name it by UMBP_SHM_DIR"
            ) from error
        self.segment = found
        self.index = found.reader()
        memory.populate(found.head, write=False, threads=1)
        # The first pass over pages that are not in this process's page tables costs twice a warm one, so they are entered ahead of use.
        threading.Thread(target=_populate, args=(found,), name="umbp-populate", daemon=True).start()

    def unmap(self) -> None:
        """Let the mapping go; views that are still held keep theirs."""
        if self.segment is not None:
            self.segment.close()
        self.segment = self.index = None


def _populate(found: Segment) -> None:
    mapping = found.data
    keep = mapping.array  # while this is held the memory stays mapped
    for start in range(0, found.geometry.data_bytes, memory.SLICE_BYTES):
        if mapping.array is not keep:  # closed meanwhile
            return
        mapping.advise(start, min(memory.SLICE_BYTES, found.geometry.data_bytes - start), memory.MADV_POPULATE_WRITE)
