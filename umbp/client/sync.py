"""The client for plain callers: `connect`, `Pool`, `Namespace`.

Any number of threads may use one `Pool`: calls on its one connection take turns, lookups and copies do not wait for anyone. A background
thread renews leases, sends notes, notices a lost connection (the kernel wakes it) and connects again. After a fork the child starts with
a connection of its own at its first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

from umbp import wire
from umbp.client import fetches
from umbp.client.address import socket_path
from umbp.client.buffers import empty_rows
from umbp.client.connection import Connection
from umbp.client.fetches import PrefetchStatus
from umbp.client.lease import Lease
from umbp.client.link import SPARE_SECONDS, Link
from umbp.client.neighbours import Neighbours
from umbp.client.notes import NOTE_SECONDS
from umbp.client.opened import Opened
from umbp.client.operations import Fill, Operations, open_or_raise
from umbp.client.statistics import ClientStatistics
from umbp.client.steps import Call, LeftBehind, Operation, Send, T, run
from umbp.client.waker import Waker
from umbp.errors import DeadlineExceeded, ProtocolError, UmbpError, Unavailable
from umbp.layout import Namespace as Identity
from umbp.types import U8, Mask, Statuses, Tier

log = logging.getLogger("umbp.client")
RETRY_SECONDS = (0.05, 1.0)  # between attempts to connect again: first, longest
CLOSE_SECONDS_MAX = 2.0
WAITED_SECONDS = 0.001  # for other calls: that much of a caller's time is not counted


class Pool:
    """One client of a node's pool. Made by `connect`; `close` it, or use it in a ``with``."""

    def __init__(self, address: str, client: str) -> None:
        self._link = Link(address, client)
        self._link.neighbours = Neighbours(self._link)
        self._connection: Connection | None = None
        self._lock = threading.RLock()
        self._waker = Waker()
        self._stop = False
        self._sleeps_long = False  # the background thread, longer than memory for a next put may be kept
        self._thread: threading.Thread | None = None
        self._connect()
        self._start()
        _pools.add(self)

    def __repr__(self) -> str:
        return f"<Pool {self._link.address} {'connected' if self.connected else 'not connected'}>"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the pool can be asked now. While it cannot, reads answer BUSY, writes UNAVAILABLE, at once."""
        return self._link.ready()

    @property
    def boot(self) -> int:
        """Boot id of the pool that this client is, or was last, connected to."""
        return self._link.welcome.boot if self._link.welcome else 0

    def namespace(self, *, model: str, page_tokens: int, layout: Any, **identity: Any) -> Namespace:
        """A namespace of the pool, made if it is new: see `umbp.layout.Namespace` for the fields. Any field that differs is another."""
        self._start()
        with self._lock:
            opened = self._link.opened({"model": model, "page_tokens": page_tokens, "layout": layout, **identity})
            if opened not in self._link.namespaces:
                run(self._link.open_namespace(opened), self)
                self._link.namespaces.append(opened)
            opened.users += 1
        return Namespace(self, opened)

    def status(self) -> dict[str, Any]:
        """What the pool says of itself (``GET /v1/status``)."""
        reply, blob = self.call(Call(wire.GetStatus()))
        return blob.document(reply.size)

    def statistics(self) -> ClientStatistics:
        """Counts of this client."""
        return self._link.statistics

    def flush_notes(self) -> None:
        """Send the access history kept so far now, instead of within 50 ms."""
        with self._lock, contextlib.suppress(Unavailable):
            self._send_notes()

    def close(self) -> None:
        """Let go of everything; bounded in time, and does nothing the second time."""
        if self._link.closed:
            return
        self._link.closed = True
        self._stop = True
        self._waker.wake()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS_MAX)
        got = self._lock.acquire(timeout=CLOSE_SECONDS_MAX)
        try:
            if got and self._connection is not None and self._link.up:
                with contextlib.suppress(UmbpError, OSError):
                    self._connection.hurry(CLOSE_SECONDS_MAX)
                    self._send_notes()
                    until = time.monotonic() + CLOSE_SECONDS_MAX
                    while not (still := self._link.seal()) and time.monotonic() < until:
                        time.sleep(0.001)  # copies of other threads, which take milliseconds
                    if still:
                        self._connection.call(Call(wire.Bye()))
            self._down()
        finally:
            if got:
                self._lock.release()
        self._link.unmap()
        self._waker.close()
        _pools.discard(self)

    # -- for operations ----------------------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> tuple[Any, wire.Blob]:
        """One request of an operation. Unavailable while there is no connection, or if it is not the one that the request counts for."""
        self._start()
        began = time.monotonic()
        if not self._lock.acquire(timeout=call.seconds):
            if call.late is not None:
                self._link.late.calls += 1
                raise LeftBehind(call, sent=False)
            raise DeadlineExceeded(f"other calls took {call.seconds:.3g} s")
        try:
            connection = self._connected(call.bond)
            if call.late is not None and (waited := time.monotonic() - began) > WAITED_SECONDS:
                call = dataclasses.replace(call, seconds=call.seconds - waited)
            try:
                return connection.call(call, self._link.riding())
            except LeftBehind:
                self._waker.wake()  # to look for the answer
                raise
            except BaseException as error:
                # Refused: the reply was read. Anything else (a signal's exception too) leaves a reply on its way that is nobody's.
                if not isinstance(error, UmbpError) or isinstance(error, Unavailable | ProtocolError):
                    self._down()
                    self._waker.wake()
                raise
        finally:
            self._lock.release()

    def send(self, call: Send) -> None:
        """One message of an operation that has no reply."""
        with self._lock:
            connection = self._connected(call.bond)
            try:
                connection.send(call)
            except BaseException:
                self._down()
                self._waker.wake()
                raise

    def _connected(self, bond: object) -> Connection:
        if self._connection is None or self._link.closed:
            raise Unavailable("the pool is closed" if self._link.closed else f"no pool on {self._link.address} at the moment")
        if bond is not None and bond is not self._link.bond:
            raise Unavailable("the connection to the pool was lost")
        return self._connection

    def run(self, operation: Operation[T]) -> T:
        """Drive an operation; sends notes if there are many."""
        self._start()
        try:
            return run(operation, self)
        finally:
            self.noted()

    def noted(self) -> None:
        """There may be notes to send, or a copy has ended that the pool waits for."""
        link, near = self._link, self._link.neighbours
        asks = near is not None and near.due()
        if asks or link.owed or link.late or link.notes.kept == 1 or link.notes.many or (link.keeps_spares and self._sleeps_long):
            self._sleeps_long = False
            self._waker.wake()

    # -- the background ----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and not self._link.closed:
            with self._lock:
                if self._thread is None:
                    if not self._link.ready():  # after a fork: so that the first call finds a connection already
                        with contextlib.suppress(UmbpError, OSError):
                            self._connect()
                    self._thread = threading.Thread(target=_background, args=(weakref.ref(self),), name="umbp-client", daemon=True)
                    self._thread.start()

    def _connect(self) -> None:
        connection = Connection(self._link.address, self._link.late)
        try:
            run(self._link.open_steps(), connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _down(self) -> None:
        self._link.up = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send_notes(self) -> None:
        if self._connection is not None:
            for message in self._link.take_notes():
                self._connection.send(message)

    def _round(self, backoff: float, *, lost: bool) -> tuple[float, float]:
        """One look at what is to be done; seconds until the next, and the next back-off. ``lost``: perhaps the connection is over."""
        link, now, connection = self._link, time.monotonic(), self._connection
        well = connection is not None and not connection.left_behind and link.ready() and not link.closed
        if well and not lost and not link.due(now):
            return link.seconds_to_upkeep(now), RETRY_SECONDS[0]  # without the lock: whoever calls does not wait for this thread
        with self._lock:
            if link.closed:
                return 0.0, backoff
            try:
                if not link.ready() or self._connection is None or self._connection.broken:
                    self._down()
                    self._connect()
                assert self._connection is not None
                self._connection.take_late()
                run(link.upkeep(), self)
            except Exception as error:
                if not isinstance(error, UmbpError | OSError):
                    log.exception("the client's background failed; it goes on")
                self._down()
                return backoff, min(backoff * 2, RETRY_SECONDS[1])
        return link.seconds_to_upkeep(time.monotonic()), RETRY_SECONDS[0]

    def _after_fork(self) -> None:
        """In the child: the connection is the parent's, and only ours to close."""
        self._lock = threading.RLock()
        self._link.forked()
        self._thread = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._waker.forked()
        self._waker = Waker()


def _background(reference: weakref.ref[Pool]) -> None:
    """The background thread. Holds no reference between two rounds, so that a pool that nobody uses any more can go."""
    backoff, lost = RETRY_SECONDS[0], True
    while True:
        pool = reference()
        if pool is None or pool._stop:
            return
        wait, backoff = pool._round(backoff, lost=lost)
        pool._sleeps_long = wait > SPARE_SECONDS
        wait = min(wait, SPARE_SECONDS) if pool._link.keeps_spares else wait  # asked after that was said: a put looks the other way round
        waker, connection = pool._waker, pool._connection
        socket_fd = connection.fileno() if connection is not None else -1  # asked once: another thread may be closing it
        ends = select.POLLRDHUP | (select.POLLIN if connection is not None and connection.left_behind else 0)
        del pool, connection
        poll = select.poll()
        for fd, what in ((waker.read_fd, select.POLLIN), (socket_fd, ends)):
            if fd >= 0:
                poll.register(fd, what)
        events = poll.poll(max(1, int(min(wait, 10.0) * 1000)))
        lost = socket_fd < 0 or any(fd == socket_fd for fd, _ in events)
        if any(fd == waker.read_fd for fd, _ in events):
            waker.clear()
            time.sleep(NOTE_SECONDS)  # a note waits for others
        del waker


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Namespace:
    """One namespace of a pool: pages of one size, by key. ``keys`` is an (n, 32) uint8 array or a list of 32-byte strings."""

    def __init__(self, pool: Pool, opened: Opened) -> None:
        self._pool = pool
        self._opened = opened
        self._while_open: Operations | None = Operations(pool._link, opened, opened.identity.layout.object_bytes)

    def __repr__(self) -> str:
        return f"<Namespace {self.identity.model!r}, objects of {self.object_bytes} bytes{'' if self._while_open else ', closed'}>"

    @property
    def identity(self) -> Identity:
        """All fields."""
        return self._opened.identity

    @property
    def object_bytes(self) -> int:
        """Bytes of one page."""
        return self._opened.identity.layout.object_bytes

    @property
    def operations(self) -> Operations:
        """For those who write operations of their own, as the loader does; `run` drives them. InvalidRequest once it is closed."""
        return open_or_raise(self._while_open)

    _operations = operations

    def close(self) -> None:
        """Let go of it: what is called from now on is an InvalidRequest, what is under way ends as ever; leases and pins too.

        With the last open handle of a namespace this client gives back the memory that it has for its next pages, and the pool may give its
        place in the table to another. What is stored stays. It can be opened again. Does nothing the second time.
        """
        with self._pool._lock:
            if self._while_open is not None:
                self._while_open = None
                run(self._pool._link.close_namespace(self._opened), self._pool)

    def run(self, operation: Operation[T]) -> T:
        """Drive an operation to its end in this thread."""
        return self._pool.run(operation)

    def put(self, keys: Any, values: Any, *, parent: bytes | None = None) -> Statuses:
        """Store pages: one `WriteStatus` an item (stored, exists, or the reason why it was refused).

        ``values``: an (n, object_bytes) array, or a list of buffers. Keys of one call are taken as consecutive pages; ``parent`` is the
        key before the first, where there is one. Nothing is visible before it is whole. InvalidRequest changes nothing.
        """
        return self._pool.run(self._operations.put(keys, values, parent))

    def fill(self, keys: Any, fill: Fill, *, parent: bytes | None = None) -> Statuses:
        """As `put`, for a caller that writes the pages in place: ``fill(which, data, offsets)`` writes item ``which[i]`` at ``offsets[i]``.

        It is called for what is not stored yet, perhaps several times, and must have let go of the memory when it returns or raises.
        """
        return self._pool.run(self._operations.fill(keys, fill, parent))

    def get(self, keys: Any, out: Any, *, verify: str = "never", deadline: float | None = None) -> Statuses:
        """Copy pages into ``out``, an (n, object_bytes) array or a list of buffers: one `ReadStatus` an item, no exception for a miss.

        What is not a HIT leaves its row undefined. ``verify``: compare checksums of no, some or all pages ("never", "sampled", "always").
        ``deadline``: seconds (2 by default) for pages that must be brought from the SSD or another node, where the pool has such; what has
        not come by then is BUSY. 0: only what is in DRAM.
        """
        return self._pool.run(fetches.get(self._operations, keys, out, verify, deadline))

    def empty(self, count: int) -> U8:
        """Zeroed memory for the ``out`` of a `get`, (count, object_bytes) uint8: pages on SSD can be read into it without a copy."""
        return empty_rows(count, self.object_bytes)

    def locate(self, keys: Any) -> U8:
        """From where each page would come, (n,) uint8 of `Tier`, 255 where nobody has it; one call where not all are in DRAM."""
        return self._pool.run(fetches.locate(self._operations, keys))

    def prefetch(self, keys: Any, *, deadline: float | None = None, request_id: str = "", hold: float = 0.0) -> PrefetchStatus:
        """Have pages brought into DRAM that are wanted later, within ``deadline`` seconds (20 by default); returns at once.

        The same ``request_id`` with the same arguments is the same prefetch and gets the same answer, from any client of this pool; with
        others it is a Conflict. ``hold``: seconds for which the pages are kept from eviction once they are there.
        """
        return self._pool.run(fetches.prefetch(self._operations, keys, deadline, request_id, hold))

    def prefetch_status(self, request_id: str) -> PrefetchStatus:
        """What has become of a prefetch by now; it is known for a minute after its end. NotFound after that."""
        return self._pool.run(fetches.prefetch_status(self._operations, request_id))

    def lookup(self, keys: Any, *, session: str = "", tier: Tier = Tier.DRAM) -> Mask:
        """Which keys are stored, (n,) bool; no call. Protects nothing. ``session`` names the conversation, for the access history.

        ``tier``: in this node's DRAM, or with `Tier.SSD` in DRAM or on its SSD. In which of them, or elsewhere: `locate`.
        """
        self._pool._start()
        found = self._operations.lookup(keys, session, tier)
        self._pool.noted()
        return found

    def prefix(self, keys: Any, *, session: str = "", tier: Tier = Tier.DRAM) -> int:
        """How many leading keys are stored, as `lookup` says; no call."""
        self._pool._start()
        length = self._operations.prefix(keys, session, tier)
        self._pool.noted()
        return length

    @contextlib.contextmanager
    def lease(
        self, keys: Any, seconds: float | None = None, *, verify: str = "never", renew: bool = True, noted: bool = False
    ) -> Generator[Lease]:
        """Hold what is stored of these keys in place: ``with ns.lease(keys) as lease: lease.held, lease.view(i)``.

        ``seconds``: time without renewal until the pool takes it back (default: the pool's); it is renewed in the background unless
        ``renew`` is False. ``noted``: the access history has this request already, from another client of the same engine.
        LeaseLost at the end if it was lost and pages changed under it.
        """
        operations = self._operations
        lease = self._pool.run(operations.lease(keys, seconds, verify, renew=renew, noted=noted))
        try:
            yield lease
        except BaseException:
            self._pool.run(operations.release(lease))
            raise
        unchanged = lease.unchanged()
        self._pool.run(operations.release(lease))
        lease.raise_if_lost(unchanged)

    def remove(self, keys: Any) -> Mask:
        """Make keys invisible at once; which of them were stored, (n,) bool."""
        return self._pool.run(self._operations.remove(keys))

    def flush(self) -> int:
        """The weights changed: everything of this namespace is gone, writes on their way included. How many pages that was."""
        return self._pool.run(self._operations.flush())

    def pin(self, keys: Any, seconds: float = 0.0, note: str = "") -> int:
        """Keep what is stored of these keys from eviction, while this client lives; the number to `unpin`."""
        return self._pool.run(self._operations.pin(keys, seconds, note))

    def unpin(self, number: int) -> None:
        """Take a pin back."""
        self._pool.run(self._operations.unpin(number))


def connect(address: str | None = None, *, client: str = "") -> Pool:
    """A client of the node's pool: ``address`` is its Unix socket; without it ``UMBP_POOL``, else the default socket.

    Unavailable, with what to do, if no pool answers there. ``client`` is the name shown in the pool's list of sessions.
    """
    return Pool(socket_path(address), client or f"python {os.getpid()}")
