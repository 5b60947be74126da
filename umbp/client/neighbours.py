"""Pages of other pools of this machine, read where they lie: a `get` of what the own pool lacks asks nobody where a neighbour has it.

Theory of operation
-------------------
Two pools of one machine have their pages and their indexes in the same memory. So what a client does with its own pool's segment it does
with a neighbour's: look in the index, copy, read the versions again. A version that is still the same was there all the time, so the bytes
are those that were committed. No call is made, before or after; what changed meanwhile, or is not there, goes the way it would have gone
without neighbours.

Who they are the own pool says, at hello and, in the background, once a second at the most where something was missed: the pools of its
master whose place begins with the same kernel and the same file system of shared memory, eight at most. That is a hint, since a container
may have another file, or another pool, at the same path. So each one is

    told --connect, hello: the name and boot that were told; map: the boot in the segment--> open --the session breaks, or another boot-->
    told, tried again after half a second, then one, up to a minute; not in the pool's list any more --> over

and a neighbour that has restarted is another one, which the pool tells of in its turn. Each has a session, by a thread of its own, so that
one that is frozen keeps nobody waiting; reads never wait for that thread. The segment is mapped to be read only. A frozen neighbour's
memory is read on: it is what it was. A dead one's too, until its session is seen to break; whatever pool takes its memory over has another
boot, and other versions. The session keeps no state there: no lease, no memory, and no namespace, whose number is read from the table in
shared memory by its digest, so that nothing is opened, and no copies are made, in a pool that its own clients use for other things.

A page that was read in place stays where it is, whatever ``--fetch`` says, which is about pages that the own pool brings: memory of the
other socket costs less than a second copy's room, the replication policy `numa` makes copies of what is in use, and `prefetch` of what the
caller knows to be. That it was used is noted with the neighbour, as with the own pool, so that it is not the next to go. The own pool is
told how much was read where, and some of the keys, for its master, whose policies go by what is in use: a sample, and nobody waits for it.
``--neighbours off`` of a pool: its clients read nobody's memory, and it is not read.

Checksums are compared as ``verify`` says, with those in the index; a page that has none yet is left to the other ways rather than waited
for. One that does not match is reported by the thread.

What it costs: some 0.1 ms a neighbour for 128 keys that are not there, and what the copy takes; a thread and a session a neighbour.
"""

from __future__ import annotations

import logging
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from umbp import wire
from umbp.client.buffers import Rows
from umbp.client.connection import Connection
from umbp.client.link import Link, Look
from umbp.client.notes import NOTE_SECONDS
from umbp.client.opened import Opened
from umbp.client.operations import Operations
from umbp.client.steps import Call, Operation, Send, run
from umbp.client.waker import Waker
from umbp.errors import UmbpError, Unavailable
from umbp.types import I64, U8, U64, Mask, ReadStatus

log = logging.getLogger("umbp.client.neighbours")
NEIGHBOURS_MAX = 8
ASK_SECONDS = 1.0  # between two questions who they are
RETRY_SECONDS = (0.5, 60.0)  # between attempts to reach one: first, longest
SEND_SECONDS_MAX = 1.0  # one that does not read for so long is frozen: it is read on, but told no more
USED_MAX, USED_KEYS_MAX = 4, 256  # namespaces, and keys of each, of which the pool is told at a time: they may ride behind a request
CORRUPT_MAX = 16  # reports that wait
DIGEST = slice(8, 12)  # words of a row of the table of namespaces


def read(operations: Operations, keys: U8, rows: Rows, codes: U8, missing: I64, verify: str) -> Operation[I64]:
    """Copy what neighbours have of these pages (indices) into ``rows``, their codes with them; those that they do not have."""
    near = operations.link.neighbours
    if near is None or not len(missing):
        return missing
    for there in near.of(operations):
        look = there.look(keys[missing])
        if look is None or not look.found.hit.any():
            continue
        part, which = rows.only(missing), np.flatnonzero(look.found.hit)
        which = which[(yield from there.operations.copy_found(look, which, part))]
        if verify != "never":
            which = which[(yield from there.right(look, which, part, sampled=verify == "sampled"))]
        came = missing[which]
        codes[came] = ReadStatus.HIT.value
        near.has_read(operations, there, keys[came])
        missing = np.setdiff1d(missing, came)
        if not len(missing):
            return missing
    near.missed = True
    return missing


class Neighbours:
    """Those of one client. Any number of threads may read from them."""

    def __init__(self, link: Link) -> None:
        self._statistics = link.statistics
        self._client = link.client
        self._lock = threading.Lock()
        self._all: tuple[Neighbour, ...] = ()
        self._reads: dict[str, tuple[int, int]] = {}  # pages and bytes, that the pool has not been told of
        self._used: dict[int, tuple[Operations, U8]] = {}  # by row, the last pages that were read
        self.missed = False  # something, since the pool has said who they are
        self._asks = self._closed = False
        self._asked = float("-inf")
        self._living: list[Neighbour] = []  # the same, for when this goes without having been closed
        weakref.finalize(self, _end, self._living).atexit = False

    def __repr__(self) -> str:
        return f"<Neighbours {', '.join(map(repr, self._all)) or 'none'}>"

    def told(self, neighbours: list[wire.Neighbour] | None) -> None:
        """The pool says who they are now; None: there are never any."""
        with self._lock:
            self._asks, self._asked, self.missed = neighbours is not None, time.monotonic(), False
            wanted = [] if self._closed else list(dict.fromkeys(neighbours or []))[:NEIGHBOURS_MAX]
            _end([each for each in self._all if each.told not in wanted])
            kept = {each.told: each for each in self._all if each.told in wanted}
            self._all = tuple(kept.get(each) or Neighbour(each, self._client, self._changed) for each in wanted)
            self._living[:] = self._all
        self._changed()

    def due(self) -> bool:
        """Whether it is time to ask again who they are."""
        return self.missed and self._asks and time.monotonic() >= self._asked + ASK_SECONDS

    def ask(self) -> Operation[None]:
        """Ask the pool, if it is time: in the background, so that no read waits for it."""
        if self.due():
            reply, _ = yield Call(wire.GetNeighbours())
            self.told(reply.neighbours)

    def of(self, operations: Operations) -> list[There]:
        """The namespace at each neighbour that can be read from now."""
        found = []
        for neighbour in self._all:
            if neighbour.link.ready():
                known = neighbour.theirs.get(operations)
                if known is None:
                    known = neighbour.theirs[operations] = There.of(neighbour, operations)
                found.append(known)
        return found

    def hold(self, operations: Operations, keys: U8) -> Mask:
        """Which of these keys any of them has, (n,) bool. No call."""
        held = np.zeros(len(keys), bool)
        for there in self.of(operations):
            if (look := there.look(keys)) is not None:
                held |= look.found.hit
        self.missed |= not held.all()
        return held

    def has_read(self, operations: Operations, there: There, keys: U8) -> None:
        """These pages were read there."""
        if not len(keys):
            return
        name, size = there.neighbour.told.name, there.operations.object_bytes
        with self._lock:
            self._statistics.read_near += len(keys)
            pages, size_bytes = self._reads.get(name, (0, 0))
            if name in self._reads or len(self._reads) < NEIGHBOURS_MAX:
                self._reads[name] = pages + len(keys), size_bytes + len(keys) * size
            self._used[operations.opened.row] = operations, keys[:USED_KEYS_MAX]
            while len(self._used) > USED_MAX:
                del self._used[next(iter(self._used))]
        there.neighbour.note(there.operations.opened.row, keys)

    def take_reads(self) -> Iterator[Send]:
        """What was read since this was asked last, for the own pool: how much, and of each namespace the last pages."""
        if not self._reads:
            return
        with self._lock:
            reads, self._reads = self._reads, {}
            used, self._used = self._used, {}
        yield Send(wire.ReadNear([(name, pages, size_bytes) for name, (pages, size_bytes) in reads.items()]))
        for row, (operations, keys) in used.items():
            bond = operations.link.bond_or_none()
            if bond is not None and (number := operations.link.number_of(bond, operations.opened)):
                yield Send(wire.UsedNear(row, number, len(keys)), (keys,), bond)

    def close(self) -> None:
        """All sessions end; the threads do it."""
        self._closed = True
        self.told(None)

    def forked(self) -> None:
        """In the child of a fork, which has no such threads: what was the parent's is let go of."""
        self._lock = threading.Lock()
        for each in self._all:
            each.forked()
        self._all, self._reads, self._used = (), {}, {}
        self._living.clear()
        self._changed()

    def _changed(self) -> None:
        self._statistics.neighbours = sum(each.link.ready() for each in self._all)


class Neighbour:
    """One neighbour: the session, and the thread that keeps it."""

    def __init__(self, told: wire.Neighbour, client: str, changed: Callable[[], None]) -> None:
        self.told = told
        self.link = Link(told.socket, client, only=told)
        self.theirs: WeakKeyDictionary[Operations, There] = WeakKeyDictionary()  # by this client's
        self._changed = weakref.WeakMethod(changed)  # so that the thread keeps nobody who has forgotten to close
        self._corrupt: deque[tuple[I64, U64]] = deque(maxlen=CORRUPT_MAX)
        self._waker = Waker()
        self._stop = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="umbp-neighbour", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Neighbour {self.told.name} {'open' if self.link.ready() else 'not open'}>"

    def note(self, row: int, keys: U8) -> None:
        """These keys were asked for, and found."""
        self.link.notes.add(row, keys, 0)
        if self.link.notes.kept == 1 or self.link.notes.many:
            self._waker.wake()

    def report(self, ids: I64, versions: U64) -> None:
        """These objects do not match their checksums."""
        self._corrupt.append((ids, versions))
        self._waker.wake()

    def end(self) -> None:
        """The thread ends the session, and itself."""
        self._stop = True
        self._waker.wake()

    def forked(self) -> None:
        """In the child: the parent's session is not ours."""
        self._waker.forked()
        self.link.forked()
        if self._connection is not None:
            self._connection.close()

    # -- the thread --------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = RETRY_SECONDS[0]
        while not self._stop:
            try:
                self._open()
                pause = RETRY_SECONDS[0]
                self._serve()
            except Exception as error:
                if not isinstance(error, UmbpError | OSError):
                    log.exception("%r: an internal error; it is tried again", self)
                else:
                    log.info("%s cannot be read from: %s", self.told.name, error)
            self._down()
            if not self._stop:
                _wait(self._waker, pause)
                pause = min(pause * 2, RETRY_SECONDS[1])
        self.link.unmap()
        self._waker.close()

    def _open(self) -> None:
        connection = Connection(self.told.socket)
        try:
            connection.hurry(SEND_SECONDS_MAX)
            run(self.link.open_steps(), connection)
        except BaseException:
            connection.close()
            raise
        self.link.owed.clear()  # nothing is ever written there
        self._connection = connection
        self._say()

    def _down(self) -> None:
        self.link.up = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._say()

    def _say(self) -> None:
        if (changed := self._changed()) is not None:
            changed()

    def _serve(self) -> None:
        """Send notes, until the session breaks or is to end."""
        connection = self._connection
        assert connection is not None
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        poll.register(self._waker.read_fd, select.POLLIN)
        while not self._stop:
            poll.poll()
            if connection.broken or not self.link.ready():
                raise Unavailable("the session is over")
            self._waker.clear()
            time.sleep(NOTE_SECONDS)
            while self._corrupt:
                ids, versions = self._corrupt.popleft()
                run(_reported(self.link, ids, versions), connection)
            for note in self.link.notes.take():
                connection.send(note)


@dataclass(frozen=True, slots=True)
class There:
    """A namespace of this client at a neighbour. ``digest``: (4,) uint64."""

    neighbour: Neighbour
    operations: Operations
    digest: U64

    @classmethod
    def of(cls, neighbour: Neighbour, operations: Operations) -> There:
        """The same namespace, there."""
        identity = operations.opened.identity
        there = Operations(neighbour.link, Opened(identity), operations.object_bytes)
        return cls(neighbour, there, np.frombuffer(identity.digest(), np.uint64))

    def look(self, keys: U8) -> Look | None:
        """Probe the index. None if the neighbour has no such namespace, or cannot be read from."""
        link, opened = self.neighbour.link, self.operations.opened
        bond = link.bond_or_none()
        if bond is None:
            return None
        if not link.number_of(bond, opened):
            for row in np.flatnonzero((bond.namespaces[:, DIGEST] == self.digest).all(axis=1)).tolist():
                opened.row = row
                if link.number_of(bond, opened):
                    break
            else:
                return None
        return self.operations.look(keys)

    def right(self, look: Look, which: I64, rows: Rows, *, sampled: bool) -> Operation[Mask]:
        """Which of these items of a probe, which were copied, match their checksums or need not be compared, (n,) bool."""
        ids, versions, good = look.found.ids[which], look.found.versions[which], np.ones(len(which), bool)
        sums = look.bond.index.sums_of(ids, versions)
        good[sums == 0] = look.bond.checksum == "off"
        compared = np.flatnonzero(sums != 0)
        if sampled:
            compared = compared[self.operations.sample(len(compared))]
        made = yield from self.operations.summed(which[compared], rows.row)
        bad = compared[made != sums[compared]]
        if len(bad):
            good[bad] = False
            self.neighbour.link.statistics.corrupt += len(bad)
            self.neighbour.report(ids[bad], versions[bad])
        return good


def _reported(link: Link, ids: I64, versions: U64) -> Operation[None]:
    yield link.bond_now().call(wire.Corrupt(len(ids)), ids, versions)


def _wait(waker: Waker, seconds: float) -> None:
    """Until woken."""
    poll = select.poll()
    poll.register(waker.read_fd, select.POLLIN)
    poll.poll(seconds * 1000)


def _end(neighbours: list[Neighbour]) -> None:
    for each in neighbours:
        each.end()


__all__ = ["Neighbour", "Neighbours", "There", "read"]
