"""The client for asyncio: the same operations, awaited. `connect_async`, `AsyncPool`, `AsyncNamespace`.

One connection, used by any number of tasks in turn; copies above 256 KiB run in the loop's thread pool. A background task renews leases,
sends notes, notices a lost connection and connects again. A task that is cancelled in the middle of a put gives its memory back first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from umbp import wire
from umbp.client import fetches
from umbp.client.address import socket_path
from umbp.client.buffers import empty_rows
from umbp.client.connection import CONNECT_SECONDS_MAX
from umbp.client.fetches import PrefetchStatus
from umbp.client.late import Late
from umbp.client.lease import Lease
from umbp.client.link import Link
from umbp.client.neighbours import Neighbours
from umbp.client.notes import NOTE_SECONDS
from umbp.client.opened import Opened
from umbp.client.operations import Fill, Operations, open_or_raise
from umbp.client.statistics import ClientStatistics
from umbp.client.steps import CALL_SECONDS_MAX, Call, LeftBehind, Operation, Send, T, drive
from umbp.client.sync import CLOSE_SECONDS_MAX, RETRY_SECONDS
from umbp.errors import DeadlineExceeded, ProtocolError, UmbpError, Unavailable, from_wire
from umbp.layout import Namespace as Identity
from umbp.types import U8, Mask, Statuses, Tier
from umbp.waiting import ended

log = logging.getLogger("umbp.client")


class AsyncConnection:
    """One session's socket. ``late``: who sees to answers that come late."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late: Late) -> None:
        self._late = late
        self._left: set[asyncio.Task[tuple[Any, wire.Blob]]] = set()  # calls that nobody waits for
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        writer.transport.set_write_buffer_limits(high=0)  # what is drained is with the kernel: see `send`

    @classmethod
    async def open(cls, path: str, late: Late) -> AsyncConnection:
        """Connect and upgrade."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                reader, writer = await asyncio.open_unix_connection(path, limit=wire.FRAME_BYTES_MAX)
                writer.write(wire.UPGRADE_REQUEST)
                answer = await reader.readexactly(len(wire.UPGRADE_REPLY))
        except TimeoutError as error:
            if writer is not None:
                writer.close()
            raise Unavailable(f"the pool on {path} does not answer within {CONNECT_SECONDS_MAX:g} s: it may still be starting") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            if writer is not None:
                writer.close()
            raise Unavailable(f"no pool answers on {path} ({error}): start one with `python -m umbp.pool`") from error
        if answer != wire.UPGRADE_REPLY:
            writer.close()
            raise Unavailable(f"{path} is not a pool, or it is not ready yet: {answer[:40]!r}")
        return cls(reader, writer, late)

    @property
    def broken(self) -> bool:
        """Whether the other end is gone."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def call(self, call: Call) -> tuple[Any, wire.Blob]:
        """Send and receive. A call that was sent is finished even if its task is cancelled: the answer belongs to it.

        LeftBehind where a late answer will do: then it is finished all the same.
        """
        until = time.monotonic() + call.seconds
        if call.late is not None:
            try:
                async with asyncio.timeout(call.seconds):
                    await self._turn.acquire()
            except TimeoutError:
                self._late.calls += 1
                raise LeftBehind(call, sent=False) from None
        else:
            await self._turn.acquire()
        task = asyncio.ensure_future(self._call(call))
        task.add_done_callback(lambda _: self._turn.release())
        try:
            await asyncio.wait([task], timeout=None if call.late is None else max(0.0, until - time.monotonic()))
        except asyncio.CancelledError:
            with contextlib.suppress(UmbpError, asyncio.CancelledError):
                await task
            raise
        if task.done():
            return task.result()
        self._late.calls += 1
        self._left.add(task)
        task.add_done_callback(functools.partial(self._came, call))
        raise LeftBehind(call, sent=True)

    def _came(self, call: Call, task: asyncio.Task[tuple[Any, wire.Blob]]) -> None:
        """The answer to a call that was left behind, or none."""
        self._left.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._late.came(call, *task.result())
        elif not isinstance(error, UmbpError) or isinstance(error, Unavailable | ProtocolError):
            self.close()

    async def _call(self, call: Call) -> tuple[Any, wire.Blob]:
        seconds = call.seconds if call.late is None else CALL_SECONDS_MAX
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(wire.encode(call.message, *call.arrays))
                await self._writer.drain()
                prefix = await self._reader.readexactly(wire.PREFIX.size)
                frame = prefix + await self._reader.readexactly(wire.frame_bytes(prefix) - len(prefix))
        except TimeoutError:
            raise DeadlineExceeded(f"the pool did not answer within {seconds:.3g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"the connection to the pool broke ({error})") from error
        reply, blob = wire.decode_reply(frame)
        if isinstance(reply, wire.Failed):
            raise from_wire(reply.code, reply.message, reply.field)
        return reply, blob

    async def send(self, call: Send) -> None:
        """Send only; when it returns the pool has it, read or unread."""
        async with self._turn:
            try:
                async with asyncio.timeout(CALL_SECONDS_MAX):
                    self._writer.write(wire.encode(call.message, *call.arrays))
                    await self._writer.drain()
            except TimeoutError:
                raise DeadlineExceeded(f"the pool did not read within {CALL_SECONDS_MAX:.3g} s") from None
            except OSError as error:
                raise Unavailable(f"the connection to the pool broke ({error})") from error

    def close(self) -> None:
        """At once."""
        self._writer.close()


class AsyncPool:
    """One client of a node's pool. Made by `connect_async`; ``await close()``, or use it in an ``async with``."""

    def __init__(self, address: str, client: str) -> None:
        self._link = Link(address, client)
        self._link.neighbours = Neighbours(self._link)
        self._connection: AsyncConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._opening = asyncio.Lock()  # one namespace is opened or closed at a time

    def __repr__(self) -> str:
        return f"<AsyncPool {self._link.address} {'connected' if self.connected else 'not connected'}>"

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """Whether the pool can be asked now."""
        return self._link.ready()

    @property
    def boot(self) -> int:
        """Boot id of the pool that this client is, or was last, connected to."""
        return self._link.welcome.boot if self._link.welcome else 0

    async def flush_notes(self) -> None:
        """Send the access history kept so far now, instead of within 50 ms."""
        if (connection := self._connection) is not None:
            with contextlib.suppress(Unavailable):
                for message in self._link.take_notes():
                    await connection.send(message)

    async def namespace(self, *, model: str, page_tokens: int, layout: Any, **identity: Any) -> AsyncNamespace:
        """As `umbp.client.sync.Pool.namespace`."""
        async with self._opening:
            opened = self._link.opened({"model": model, "page_tokens": page_tokens, "layout": layout, **identity})
            if opened not in self._link.namespaces:
                await drive(self._link.open_namespace(opened), self, lambda _: self._link.let_go_of(opened))
                self._link.namespaces.append(opened)
            opened.users += 1
        return AsyncNamespace(self, opened)

    async def status(self) -> dict[str, Any]:
        """What the pool says of itself (``GET /v1/status``)."""
        reply, blob = await self.call(Call(wire.GetStatus()))
        return blob.document(reply.size)

    def statistics(self) -> ClientStatistics:
        """Counts of this client."""
        return self._link.statistics

    async def close(self) -> None:
        """Let go of everything; bounded in time."""
        if self._link.closed:
            return
        self._link.closed = True
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS_MAX)
        if self._connection is not None and self._link.up:
            with contextlib.suppress(UmbpError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS_MAX):
                    for message in self._link.take_notes():
                        await self._connection.send(message)
                    while not self._link.seal():  # noqa: ASYNC110 - copies in threads, which take milliseconds
                        await asyncio.sleep(0.001)
                    await self._connection.call(Call(wire.Bye()))
        self._down()
        self._link.unmap()

    async def call(self, call: Call) -> tuple[Any, wire.Blob]:
        """One request of an operation. Unavailable while there is no connection."""
        connection = self._connection
        if connection is None or (self._link.closed and not isinstance(call.message, wire.Bye)):
            raise Unavailable("the pool is closed" if self._link.closed else f"no pool on {self._link.address} at the moment")
        if call.bond is not None and call.bond is not self._link.bond:
            raise Unavailable("the connection to the pool was lost")
        try:
            return await connection.call(call)
        except LeftBehind:
            raise
        except (Unavailable, ProtocolError):
            if connection is self._connection:
                self._down()
            self._wake.set()
            raise

    async def send(self, call: Send) -> None:
        """One message of an operation that has no reply."""
        if self._connection is None:
            raise Unavailable(f"no pool on {self._link.address} at the moment")
        if call.bond is not None and call.bond is not self._link.bond:
            raise Unavailable("the connection to the pool was lost")
        connection = self._connection
        try:
            await connection.send(call)
        except Unavailable:
            if connection is self._connection:
                self._down()
            self._wake.set()
            raise

    async def run(self, operation: Operation[T], undo: Callable[[T], Operation[None]] | None = None) -> T:
        """Drive an operation; ``undo`` as in `drive`."""
        try:
            return await drive(operation, self, undo)
        finally:
            self.noted()

    def noted(self) -> None:
        """There may be notes to send, or a copy has ended that the pool waits for."""
        if self._link.owed or self._link.notes.kept:
            self._wake.set()

    async def _connect(self) -> None:
        connection = await AsyncConnection.open(self._link.address, self._link.late)
        try:
            await drive(self._link.open_steps(), connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _down(self) -> None:
        self._link.up = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _background(self) -> None:
        backoff = RETRY_SECONDS[0]
        while True:
            link = self._link
            wait = NOTE_SECONDS
            try:
                if not link.ready() or self._connection is None or self._connection.broken:
                    self._down()
                    await self._connect()
                await drive(link.upkeep(), self)
                backoff = RETRY_SECONDS[0]
            except Exception as error:
                if not isinstance(error, UmbpError | OSError):
                    log.exception("the client's background failed; it goes on")
                self._down()
                wait, backoff = backoff, min(backoff * 2, RETRY_SECONDS[1])
            await asyncio.sleep(wait)


class AsyncNamespace:
    """One namespace of a pool, for asyncio: every method as in `umbp.client.sync.Namespace`."""

    def __init__(self, pool: AsyncPool, opened: Opened) -> None:
        self._pool = pool
        self._opened = opened
        self._while_open: Operations | None = Operations(pool._link, opened, opened.identity.layout.object_bytes)

    def __repr__(self) -> str:
        return f"<AsyncNamespace {self.identity.model!r}, objects of {self.object_bytes} bytes{'' if self._while_open else ', closed'}>"

    @property
    def identity(self) -> Identity:
        """All fields."""
        return self._opened.identity

    @property
    def object_bytes(self) -> int:
        """Bytes of one page."""
        return self._opened.identity.layout.object_bytes

    @property
    def _operations(self) -> Operations:
        return open_or_raise(self._while_open)

    async def close(self) -> None:
        """Let go of it, as `umbp.client.sync.Namespace.close`. Goes on to its end even if its task is cancelled."""
        if self._while_open is not None:
            self._while_open = None
            closing = asyncio.ensure_future(self._close())
            if (cancelled := await ended(closing)) is not None:
                raise cancelled
            closing.result()

    async def _close(self) -> None:
        async with self._pool._opening:
            await drive(self._pool._link.close_namespace(self._opened), self._pool)

    async def put(self, keys: Any, values: Any, *, parent: bytes | None = None) -> Statuses:
        """Store pages: one `WriteStatus` an item."""
        return await self._pool.run(self._operations.put(keys, values, parent))

    async def fill(self, keys: Any, fill: Fill, *, parent: bytes | None = None) -> Statuses:
        """As `put`, for a caller that writes the pages in place; ``fill`` runs in a thread where there is much to write."""
        return await self._pool.run(self._operations.fill(keys, fill, parent))

    async def get(self, keys: Any, out: Any, *, verify: str = "never", deadline: float | None = None) -> Statuses:
        """Copy pages into ``out``: one `ReadStatus` an item."""
        return await self._pool.run(fetches.get(self._operations, keys, out, verify, deadline))

    def empty(self, count: int) -> U8:
        """Memory for the ``out`` of a `get`, as `umbp.client.sync.Namespace.empty`."""
        return empty_rows(count, self.object_bytes)

    async def locate(self, keys: Any) -> U8:
        """From where each page would come, (n,) uint8 of `Tier`, 255 where nobody has it."""
        return await self._pool.run(fetches.locate(self._operations, keys))

    async def prefetch(self, keys: Any, *, deadline: float | None = None, request_id: str = "", hold: float = 0.0) -> PrefetchStatus:
        """Have pages brought into DRAM that are wanted later; returns at once."""
        return await self._pool.run(fetches.prefetch(self._operations, keys, deadline, request_id, hold))

    async def prefetch_status(self, request_id: str) -> PrefetchStatus:
        """What has become of a prefetch by now."""
        return await self._pool.run(fetches.prefetch_status(self._operations, request_id))

    async def lookup(self, keys: Any, *, session: str = "", tier: Tier = Tier.DRAM) -> Mask:
        """Which keys are stored, (n,) bool, in DRAM or, with `Tier.SSD`, on this node's SSD too; no call."""
        found = self._operations.lookup(keys, session, tier)
        self._pool.noted()
        return found

    async def prefix(self, keys: Any, *, session: str = "", tier: Tier = Tier.DRAM) -> int:
        """How many leading keys are stored; no call."""
        length = self._operations.prefix(keys, session, tier)
        self._pool.noted()
        return length

    @contextlib.asynccontextmanager
    async def lease(
        self, keys: Any, seconds: float | None = None, *, verify: str = "never", renew: bool = True, noted: bool = False
    ) -> AsyncGenerator[Lease]:
        """Hold what is stored of these keys in place, in an ``async with``."""
        operations = self._operations
        lease = await self._pool.run(operations.lease(keys, seconds, verify, renew=renew, noted=noted), operations.release)
        try:
            yield lease
        except BaseException:
            await self._pool.run(operations.release(lease))
            raise
        unchanged = lease.unchanged()
        await self._pool.run(operations.release(lease))
        lease.raise_if_lost(unchanged)

    async def remove(self, keys: Any) -> Mask:
        """Make keys invisible at once; which of them were stored."""
        return await self._pool.run(self._operations.remove(keys))

    async def flush(self) -> int:
        """Everything of this namespace is gone; how many pages that was."""
        return await self._pool.run(self._operations.flush())

    async def pin(self, keys: Any, seconds: float = 0.0, note: str = "") -> int:
        """Keep what is stored of these keys from eviction, while this client lives; the number to `unpin`."""
        return await self._pool.run(self._operations.pin(keys, seconds, note), self._operations.unpin)

    async def unpin(self, number: int) -> None:
        """Take a pin back."""
        await self._pool.run(self._operations.unpin(number))


async def connect_async(address: str | None = None, *, client: str = "") -> AsyncPool:
    """A client of the node's pool for asyncio: as `umbp.connect`."""
    pool = AsyncPool(socket_path(address), client or f"python {os.getpid()}")
    await pool._connect()
    pool._task = asyncio.get_running_loop().create_task(pool._background(), name="umbp-client")
    return pool
