"""What a client knows of its pool: the mapped segment, the session, the namespaces it has open, and what it owes.

Theory of operation
-------------------
    down --connect, hello, map, namespaces--> up --the connection breaks, or the boot id in the segment changes--> down

While down every read answers at once that it could not be served and every write that it was refused; the faces (`sync`, `aio`) connect
again in the background. The segment stays mapped as long as it is the pool's; after a restart that made a new one the old mapping goes
when its last view does.

Rows, entry ids, versions, offsets and numbers of reservations and leases mean something under one session and one mapping only: the next
boot gives the same small numbers to others. So an operation takes the `Bond` of the moment once, reads through it alone, and its calls
are refused here if the bond is another by the time they would be sent.

What a client owes after a break: to say when nothing of it writes any more into memory that the lost session had reserved (`let_go`). It
counts copies in flight by bond for that, and no copy starts under a bond that is over.

Notes (which keys were asked for) are kept here until they are sent, bounded; the oldest are dropped first and counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from umbp import wire
from umbp.client import mapping
from umbp.client.files import IDLE_SECONDS, Files
from umbp.client.handover import Handover
from umbp.client.late import Late
from umbp.client.notes import Notes
from umbp.client.opened import Opened, Spare
from umbp.client.statistics import ClientStatistics
from umbp.client.steps import CALL_SECONDS_MAX, Call, Operation, Send
from umbp.errors import InvalidRequest, Unavailable
from umbp.layout import Namespace
from umbp.store import numa
from umbp.store.bell import Bell
from umbp.store.index import Found, IndexReader
from umbp.store.segment import H_BOOT, S_SESSION, Segment
from umbp.types import U8, U64

if TYPE_CHECKING:
    from umbp.client.lease import Lease
    from umbp.client.neighbours import Neighbours

RENEWALS_MAX = 1024
FLUSHES_MAX = 8  # in a row under the eyes of one reader of a row
SPARE_SECONDS = 1.0  # memory for the next put is given back after this long without one


@dataclass(frozen=True, slots=True, eq=False)
class Bond:
    """One session with one mapped segment. The arrays keep the mapping alive, also after the client has let go of it."""

    session: int
    boot: int
    checksum: str
    index: IndexReader
    words: U64
    namespaces: U64
    data: U8
    row: U64  # of this session in the segment's table
    bell: Bell  # rings for fetches
    fetches: bool = False  # pages that are not in DRAM may be had from elsewhere
    ssd: IndexReader | None = None  # the index of this node's SSD tier
    far: bool = False  # and from other nodes
    ranged: bool = False  # these in stages
    passage: int = 0  # from here on in ``data`` pages only pass through; 0: nowhere
    handover: str = ""  # what to say to be handed descriptors
    files: bool = False  # pages on SSD may be read from its files,
    through: bool = False  # and need not be kept in DRAM

    def call(self, message: wire.Message, *arrays: Any, seconds: float = CALL_SECONDS_MAX, late: Any = None) -> Call:
        """A request that counts under this bond only."""
        return Call(message, arrays, self, min(max(seconds, 0.001), CALL_SECONDS_MAX), late)


@dataclass(frozen=True, slots=True)
class Look:
    """A probe of the index, with the bond and the namespace number under which its ids, versions and offsets mean something."""

    bond: Bond
    number: int
    found: Found


class Filling:
    """See `Link.filling`. A class, since a generator costs every put ten times as much."""

    __slots__ = ("_bond", "_link")

    def __init__(self, link: Link, bond: Bond) -> None:
        self._link, self._bond = link, bond

    def __enter__(self) -> None:
        self._link._begin_filling(self._bond)

    def __exit__(self, *exc: object) -> None:
        self._link._end_filling(self._bond)


class Link:
    """State of one client; every method is quick and never waits."""

    def __init__(self, address: str, client: str, *, only: wire.Neighbour | None = None) -> None:
        """``only``: the pool that it is to be, which is then read from and not written to."""
        self.address = address
        self.client = client
        self._only = only
        self.neighbours: Neighbours | None = None  # who else may be read from
        self._holder = _new_holder()
        self.handover = Handover()
        self.files = Files(self.handover)
        self.late = Late()
        self.up = False
        self.near = numa.node_of_process()
        self.closed = False
        self.welcome: wire.Welcome | None = None
        self.segment: Segment | None = None
        self.bond: Bond | None = None  # the current one, or the last
        self.statistics = ClientStatistics()
        self.namespaces: list[Opened] = []
        self.leases: dict[int, Lease] = {}  # those of this session, by number
        self.owed: set[Bond] = set()
        self.keeps_spares = False  # there may be some, to be given back if nobody uses them
        self._filling: Counter[Bond] = Counter()
        self.notes = Notes(self.statistics)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Link {self.address} {'up' if self.up else 'down'}, session {self.session}>"

    @property
    def holder(self) -> int:
        """The number of this client's lock on the segment's file (`umbp.store.segment.held`)."""
        return self._holder

    @property
    def session(self) -> int:
        """Number of the current or last session; 0 before the first."""
        return self.bond.session if self.bond else 0

    @property
    def spare_seconds(self) -> float:
        """How long memory ahead may be begun with, so that there is as long again for the copy before the pool takes it for abandoned."""
        return self.welcome.reservation_seconds / 2 if self.welcome else 0.0

    def bond_or_none(self) -> Bond | None:
        """The bond to work under; None while there is no connection, or the pool behind the mapping is not the one of this session."""
        bond = self.bond
        return bond if self.up and bond is not None and int(bond.words[H_BOOT]) == bond.boot else None

    def bond_now(self) -> Bond:
        """As `bond_or_none`, or Unavailable."""
        bond = self.bond_or_none()
        if bond is None:
            raise Unavailable("the pool is closed" if self.closed else f"no pool on {self.address} at the moment")
        return bond

    def ready(self) -> bool:
        """Whether the pool behind the mapping is the one this session is with."""
        return self.bond_or_none() is not None

    def open_steps(self) -> Operation[None]:
        """What to do on a fresh connection."""
        reply, _ = yield Call(wire.Hello(wire.VERSION, self.client, self.session, self._holder))
        assert isinstance(reply, wire.Welcome)
        if self._only is not None and (reply.name, reply.boot) != (self._only.name, self._only.boot):
            raise Unavailable(f"{reply.name} of boot {reply.boot} answers on {self.address}, not {self._only.name} of {self._only.boot}")
        if self._map(reply):  # other memory: none of it was ever reserved by us, and its rows are not those of our notes
            self.owed.clear()
            self.notes.forget()
        elif self.bond is not None:
            self.owed.add(self.bond)
        for opened in list(self.namespaces):
            if opened.users:  # else it was closed in between
                yield from self.open_namespace(opened)
        self.statistics.connects += 1
        self.welcome = reply
        assert self.segment is not None
        found = self.segment
        with self._lock:  # last: whoever sees the new bond sees the new rows
            rows = found.sessions[:, S_SESSION]
            row = found.sessions[int(np.flatnonzero(rows == reply.session)[0])]
            views = (found.reader(), found.words, found.namespaces, found.data.array, row, found.bell())
            for lease in self.leases.values():
                lease.lost = True
            self.leases.clear()
            elsewhere = (reply.fetches, mapping.ssd_index(reply.ssd if self._only is None else ""), reply.far, reply.ranged, reply.passage)
            past = (reply.handover, reply.files, reply.through)
            self.bond = Bond(reply.session, reply.boot, reply.checksum, *views, *elsewhere, *past)
        self.up = True
        if self.neighbours is not None:
            self.neighbours.told(reply.neighbours)
        if self.near is not None:
            yield from self.be_near(self.near)

    def be_near(self, node: int) -> Operation[None]:
        """What this client writes is to be in memory of this NUMA node, where the pool has some there."""
        self.near = node
        if self.welcome is not None and node in self.welcome.numa:
            yield Send(wire.Near(node))

    def open_namespace(self, opened: Opened) -> Operation[None]:
        """Learn the row of a namespace, making it if it is new."""
        reply, _ = yield Call(wire.OpenNamespace(opened.identity.to_dict()))
        opened.row = reply.row

    def close_namespace(self, opened: Opened) -> Operation[None]:
        """A handle of it is closed; with the last one it is let go of, with what is kept for its next pages."""
        opened.users -= 1
        if opened.users or opened not in self.namespaces:
            return
        self.namespaces.remove(opened)
        yield from self.let_go_of(opened)

    def let_go_of(self, opened: Opened) -> Operation[None]:
        """Nobody here has it open: tell the pool."""
        with contextlib.suppress(Unavailable):  # then the pool has forgotten it with the session
            yield from self.take_notes()  # before its row may be another's
            while opened.spares:
                yield opened.spares.popleft().returned()
            yield Call(wire.OpenNamespace(opened.identity.to_dict(), close=True))

    def opened(self, fields: dict[str, Any]) -> Opened:
        """The entry of the namespace with these fields, so that opening one again and again adds none. InvalidRequest names a wrong one."""
        try:
            identity = Namespace(**fields)
        except TypeError as error:
            known = ", ".join(field.name for field in dataclasses.fields(Namespace))
            raise InvalidRequest(f"{error}; the fields are {known}", field="namespace") from None
        return next((opened for opened in self.namespaces if opened.identity == identity), Opened(identity))

    def number_of(self, bond: Bond, opened: Opened) -> int:
        """The namespace's number now; 0 if its row is not its own (any more)."""
        place = opened.row
        if not 0 <= place < len(bond.namespaces):
            return 0
        row = bond.namespaces[place]
        checked = opened.checked
        for _ in range(FLUSHES_MAX):
            number = int(row[0])
            if checked is not None and checked[0] is bond and checked[1:] == (place, number):
                return number
            own = row[8:12].tobytes() == opened.identity.digest()
            if int(row[0]) == number:  # else it was flushed between the two reads, or is made another's
                if own:
                    opened.checked = (bond, place, number)
                return number if own else 0
        return 0

    # -- writes in flight --------------------------------------------------------------------------------------------------------------

    def filling(self, bond: Bond) -> Filling:
        """``with`` it around a copy into memory that was reserved under this bond. Unavailable, and no copy, if it is over."""
        return Filling(self, bond)

    def _begin_filling(self, bond: Bond) -> None:
        with self._lock:
            if self.bond is not bond:
                raise Unavailable("the connection to the pool was lost")
            self._filling[bond] += 1

    def _end_filling(self, bond: Bond) -> None:
        with self._lock:
            self._filling[bond] -= 1
            if not self._filling[bond]:
                del self._filling[bond]

    def settled(self) -> list[Bond]:
        """Former bonds that nothing of this process writes for any more, and the pool does not know yet."""
        with self._lock:
            return [bond for bond in self.owed if bond not in self._filling]

    def seal(self) -> bool:
        """No copy into reserved memory starts any more: a goodbye gives it back. Whether none is under way either."""
        with self._lock:
            self.bond = None
            return not self._filling

    def forked(self) -> None:
        """In the child of a fork: the parent's session, writes, leases and notes are not ours."""
        self._lock = threading.Lock()
        self._holder = _new_holder()
        self.handover.forked()
        self.files.forked()
        self.segment = None  # mapped anew: the lock of the old mapping is the parent's
        self.up = False
        self.welcome = self.bond = None
        self.owed.clear()
        self.leases.clear()
        self._filling.clear()
        for opened in self.namespaces:
            opened.spares.clear()
        self.notes = Notes(self.statistics)
        if self.neighbours is not None:
            self.neighbours.forked()

    # -- leases ------------------------------------------------------------------------------------------------------------------------

    def keep(self, lease: Lease, bond: Bond) -> None:
        """A lease that the pool has granted under this bond, to be renewed; lost, where that is over by now."""
        with self._lock:
            if self.bond is bond:
                self.leases[lease.number] = lease
            else:
                lease.lost = True

    def drop(self, lease: Lease) -> None:
        """It is over. One of a later session may have its number by now, and stays."""
        with self._lock:
            if self.leases.get(lease.number) is lease:
                del self.leases[lease.number]

    def due_for_renewal(self, now: float) -> list[Lease]:
        """Leases at a third of their time or later, a bounded number."""
        due = [lease for lease in list(self.leases.values()) if lease.renew and now >= lease.renewed_at + lease.seconds / 3]
        return due[:RENEWALS_MAX]

    def renewed(self, leases: list[Lease], lost: list[int], asked: float) -> None:
        """The pool's answer: which it does not know any more."""
        for lease in leases:
            if lease.number in lost:
                lease.lost = True
                self.drop(lease)
            else:
                lease.renewed_at = asked

    def due(self, now: float) -> bool:
        """Whether `upkeep` has anything to do."""
        idle = (spare for opened in list(self.namespaces) for spare in list(opened.spares) if spare.asked <= now - SPARE_SECONDS)
        asks = self.neighbours is not None and self.neighbours.due()
        owes = asks or self.notes.seconds_left(now) <= 0 or bool(self.late or self.settled() or self.due_for_renewal(now))
        return owes or next(idle, None) is not None or self.files.idle(now)

    def take_notes(self) -> Iterator[Send]:
        """All notes, and what was read of neighbours, as few messages; what is not sent is lost."""
        if self.neighbours is not None:
            yield from self.neighbours.take_reads()
        yield from self.notes.take()

    def riding(self) -> bytes:
        """The same as bytes that go behind a request, if it is time and there are few."""
        if not self.notes.may_ride(time.monotonic()):
            return b""
        return b"".join(wire.encode(send.message, *send.arrays) for send in self.take_notes())

    def upkeep(self) -> Operation[None]:
        """What a connected client owes its pool from time to time: of calls and writes that ended, of unused memory, renewals, notes."""
        yield from self.late.steps(self.bond)
        for bond in self.settled():
            yield Call(wire.LetGo(bond.session))
            self.owed.discard(bond)
        yield from self.return_spares(SPARE_SECONDS)
        self.files.shed()
        if self.neighbours is not None:
            yield from self.neighbours.ask()
        if due := self.due_for_renewal(time.monotonic()):
            asked = time.monotonic()
            reply, _ = yield Call(wire.Renew([lease.number for lease in due]))
            self.renewed(due, reply.numbers, asked)
        yield from self.take_notes()

    def return_spares(self, idle_seconds: float) -> Operation[None]:
        """Give back the memory for next puts that has not been used for so long."""
        for opened, spare in self._idle_spares(time.monotonic() - idle_seconds):
            try:
                yield spare.returned()
            except BaseException:  # not sent, or the connection is over: nobody else would give it back
                opened.spares.append(spare)
                raise

    def _idle_spares(self, before: float) -> Iterator[tuple[Opened, Spare]]:
        """Memory that was asked for before this time, taken off the queues."""
        self.keeps_spares = False
        for opened in self.namespaces:
            for _ in range(len(opened.spares)):
                try:
                    spare = opened.spares.popleft()
                except IndexError:  # a put took it
                    break
                if spare.bond is not self.bond:
                    continue
                if spare.asked > before:
                    opened.spares.append(spare)
                    self.keeps_spares = True
                else:
                    yield opened, spare

    def seconds_to_upkeep(self, now: float) -> float:
        """Time until it may be `due`, at most 10 s."""
        waits = [lease.renewed_at + lease.seconds / 3 - now for lease in list(self.leases.values()) if lease.renew]
        waits += [SPARE_SECONDS for opened in self.namespaces if opened.spares]
        waits += [IDLE_SECONDS] if self.files.any else []
        waits += [self.notes.seconds_left(now)]
        return max(0.0, min([10.0, *waits]))

    # -- the mapping -------------------------------------------------------------------------------------------------------------------

    def _map(self, welcome: wire.Welcome) -> bool:
        """Map the pool's segment; False if it is the one that is mapped already."""
        path = mapping.here(welcome.segment)
        if self.segment is not None:
            if self.segment.is_at(path):
                return False
            self.segment.close()
            self.segment = None
        self.segment = mapping.mapped(path, welcome.boot, self._holder, writes=self._only is None)
        return True

    def unmap(self) -> None:
        """Let the mapping go; views that are still held keep theirs."""
        if self.segment is not None:
            self.segment.close()
        self.segment = self.bond = None
        self.files.close()
        self.handover.close()
        if self.neighbours is not None:
            self.neighbours.close()


def _new_holder() -> int:
    return secrets.randbits(60) + 1
