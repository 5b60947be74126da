"""Sessions: the connection of a client process, its messages, and what happens when it ends.

Theory of operation. A session begins with the upgrade request, which `umbp.pool.door` has read. It answers one message after the other,
nearly all in one go without waiting, so a session's life is: HELLO expected -> open -> closed. Anything that breaks the protocol gets an
error frame if that is possible and closes this connection only.

Bounded: sessions, frames, bytes of an unfinished frame, seconds until HELLO, bytes of unread replies (a client that does not read is not
read from either).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Callable, Coroutine
from itertools import groupby
from typing import Any, cast

import msgspec
import numpy as np

from umbp import wire
from umbp.errors import NotFound, ProtocolError, UmbpError
from umbp.layout import Namespace
from umbp.pool import session_fetches
from umbp.pool.owners import Owner, Owners, Server
from umbp.store.memory import fence
from umbp.types import I64, U64, Mask

log = logging.getLogger("umbp.pool.sessions")
FEW_REQUESTS = 4  # of a note, entered before anything else is answered: 0.2 ms
HELLO_SECONDS_MAX = 10.0
AHEAD_BYTES_MAX = 64 << 10


class Session(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: Server, owners: Owners, next_session: Callable[[], int], *, on_closed: Callable[[Session], None]) -> None:
        self.server = server
        self.owners = owners
        self.owner: Owner | None = None
        self._next_session = next_session
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._answered = 0  # bytes of it that are answered, or just being answered
        self._transport: asyncio.Transport | None = None
        self._clean = False
        self._hello: asyncio.TimerHandle | None = None
        self._slow: asyncio.Task[None] | None = None  # the one answer that takes time; later messages wait for it
        self._unread = False
        self._reading = True

    def __repr__(self) -> str:
        return f"<Session {self.owner.session if self.owner else 'without hello'}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The upgrade was asked for; agree to it."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are transports without saying so
        self._transport.set_write_buffer_limits(high=0)  # uvloop then sends at once, before `settle`, and not at the end of its round
        self._transport.write(wire.UPGRADE_REPLY)
        self._hello = asyncio.get_running_loop().call_later(HELLO_SECONDS_MAX, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """However it ended."""
        if self._hello:
            self._hello.cancel()
        if self._slow:
            self._slow.cancel()
        if self.owner is not None:
            self.owners.closed(self.owner, clean=self._clean)
            self.owner = None
        self._transport = None
        self._on_closed(self)

    def close(self) -> None:
        """Cut the connection, and answer nothing more: the pool is stopping."""
        transport, self._transport = self._transport, None
        if transport and self._unread:  # nobody waits until it is read
            transport.abort()
        elif transport:
            transport.close()

    def pause_writing(self) -> None:
        """The client does not read its replies: do not read its requests."""
        self._unread = True
        self._read_or_wait()

    def resume_writing(self) -> None:
        """It reads again."""
        self._unread = False
        asyncio.get_running_loop().call_soon(self.data_received, b"")  # what was left when it stopped; not from within a write

    def _read_or_wait(self) -> None:
        """What a client sends too far ahead of its answers is left in the kernel's buffer, which is bounded.

        Reading goes on as long as it can: only who reads hears that the other end is gone.
        """
        reading = not self._unread and (self._slow is None or len(self._buffer) <= AHEAD_BYTES_MAX)
        if self._transport and reading != self._reading:
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Answer every whole frame that is there."""
        buffer = self._buffer
        buffer += data
        at = self._answered = 0
        try:
            while len(buffer) - at >= wire.PREFIX.size and self._transport and not self._slow and not self._unread:
                end = at + wire.frame_bytes(buffer[at : at + wire.PREFIX.size])
                if len(buffer) < end:
                    break
                frame = bytes(buffer[at:end])
                at = self._answered = end
                self._answer(frame)
        except ProtocolError as error:
            self._refuse(error)
            return
        except Exception:  # our own fault: this client is cut off, the others go on
            log.exception("%r: a message could not be handled", self)
            self._refuse(UmbpError("internal error; see the pool's log"))
            return
        if at:
            del buffer[:at]
        self._answered = 0
        self._read_or_wait()

    def _answer(self, frame: bytes) -> None:
        message, blob = wire.decode_request(frame)
        started = self.server.now()
        op = type(message).__struct_config__.tag
        if self.owner is None and not isinstance(message, wire.Hello):
            raise ProtocolError(f"{op} before hello")
        if type(message) in AFTER_NOTES and self.server.pool.history.waits(self.session):
            self.later(self._after_notes(frame))
            return
        try:
            reply = HANDLERS[type(message)](self, message, blob, started)
        except ProtocolError:
            raise
        except UmbpError as error:
            reply = wire.encode(wire.Failed(error.code, str(error), error.field))
        if reply and self._transport:
            self._transport.write(reply)
        self.server.pool.settle()
        if self._clean and self._transport:
            self._transport.close()
        self.server.observe(str(op), self.server.now() - started)

    def _silent(self) -> bool:
        """Whether all that the client has sent is answered: neither here nor in the kernel is more of it."""
        if self._transport is None or len(self._buffer) != self._answered:
            return False
        return not any(fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4)))  # a number of bytes

    def _refuse(self, error: UmbpError) -> None:
        self._buffer.clear()
        if self._transport:
            log.warning("%r closed: %s", self, error)
            self._transport.write(wire.encode(wire.Failed(error.code, str(error), error.field)))
            self._transport.close()
            self._transport = None

    def _too_late(self) -> None:
        if self.owner is None:
            self._refuse(ProtocolError(f"no hello within {HELLO_SECONDS_MAX} s"))

    def peer_pid(self) -> int:
        """Process at the other end as the kernel knows it; 0 if it is in another pid namespace."""
        assert self._transport is not None
        return int(struct.unpack("3i", self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    # -- one handler a message -----------------------------------------------------------------------------------------------------

    def hello(self, message: wire.Hello, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        if self.owner is not None:
            raise ProtocolError("hello twice")
        if message.version != wire.VERSION:
            raise ProtocolError(f"this pool speaks version {wire.VERSION} of the session protocol, the client {message.version}")
        self.owner = self.owners.open(self.peer_pid(), message.client, self._next_session(), message.holder)
        self.owner.silent = self._silent
        if self._hello:
            self._hello.cancel()
        limits, segment, files = self.server.pool.limits, self.server.segment, self.server.references is not None
        return wire.encode(
            wire.Welcome(
                session=self.owner.session,
                boot=segment.boot,
                name=self.server.name,
                segment=segment.path,
                lease_seconds=limits.lease_seconds,
                lease_seconds_max=limits.lease_seconds_max,
                reservation_seconds=limits.reservation_seconds,
                checksum=limits.checksum,
                fetches=bool(self.server.fetching.sources),
                ssd=self.server.ssd.table.path if self.server.ssd else "",
                far=any(not source.local for source in self.server.fetching.sources),
                ranged=any(source.ranged and not source.local for source in self.server.fetching.sources),
                numa=self.server.config.numa_nodes,
                passage=self.server.fetching.passing.begins,
                handover=self.server.handovers.promise(self.session).hex() if files or self.server.errands.possible else "",
                files=files,
                through=self.server.config.fetch == "pass_through",
                neighbours=self.server.neighbours.told() if self.server.neighbours.reads else None,
            )
        )

    def near(self, message: wire.Near, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        nodes = self.server.config.numa_nodes
        if message.node in nodes:
            self.server.pool.room.be_near(self.session, nodes.index(message.node))
        return b""

    def namespace(self, message: wire.OpenNamespace, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        identity = Namespace.from_dict(message.identity)
        pool, digest = self.server.pool, identity.digest()
        account = pool.open_namespace(self.session, digest, identity.canonical(), identity.layout.object_bytes)
        if message.close:
            pool.close_namespace(self.session, account.row)
        return wire.encode(wire.NamespaceOpened(account.row, account.object_bytes))

    def reserve(self, message: wire.Reserve, blob: wire.Blob, now: float) -> bytes:
        keys, parent = blob.keys(message.n), bytes.fromhex(message.parent)
        blob.end()
        made = self.server.pool.begin_reserve(now, self.session, message.row, keys, parent, message.seconds, number=message.number)
        self.server.wake()
        header = wire.Reserved(made.number, message.n, len(made.ids))
        return wire.encode(header, made.status, made.mine.view(np.uint8), made.ids, made.offsets)

    def commit(self, message: wire.Commit, blob: wire.Blob, now: float) -> bytes:
        filled = blob.take(np.uint8, message.m) != 0
        sums = blob.take(np.uint64, message.m) if message.sums else None
        blob.end()
        pool = self.server.pool
        made = pool.writes.open.get(message.number)
        if made is not None and made.session != self.session:
            made = None
        unused = made is not None and made.blank
        status = pool.begin_commit(now, self.session, message.number, filled, sums)
        spare = pool.give_spare(now, self.session, made.account, message.spare) if made and not unused else None
        self.server.wake()
        if spare is None:
            return wire.encode(wire.Committed(len(status), unused), status)
        return wire.encode(wire.Committed(len(status), unused, spare.number, len(spare.ids)), status, pool.objects.offset[spare.ids])

    def use_spare(self, message: wire.UseSpare, blob: wire.Blob, now: float) -> bytes:
        keys, parent = blob.keys(message.n), bytes.fromhex(message.parent)
        blob.end()
        self.server.pool.use_spare(now, self.session, message.row, message.spare, keys, parent, message.number)
        return b""

    def lease(self, message: wire.TakeLease, blob: wire.Blob, now: float) -> bytes:
        ids, versions = blob.take(np.int64, message.n), blob.take(np.uint64, message.n)
        blob.end()
        lease, held = self.server.pool.lease(now, self.session, ids, versions, message.seconds)
        return wire.encode(wire.Leased(lease.number, message.n, lease.seconds), held.view(np.uint8))

    def renew(self, message: wire.Renew, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        return wire.encode(wire.Numbers(self.server.pool.leases.renew(now, self.session, message.numbers)))

    def release(self, message: wire.Release, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        return wire.encode(wire.Numbers([] if self.server.pool.leases.release(self.session, message.number) else [message.number]))

    def remove(self, message: wire.Remove, blob: wire.Blob, now: float) -> bytes:
        keys = blob.keys(message.n)
        blob.end()
        rest = self.server.ssd.remove(message.row, keys, message.number) if self.server.ssd else None
        gone = self.server.pool.remove(message.row, keys, number=message.number)
        return wire.encode(wire.Statuses(message.n), gone.view(np.uint8)) if rest is None else self.later(self._removed(gone, rest))

    async def _removed(self, gone: Mask, rest: Coroutine[Any, Any, Mask]) -> bytes:
        return wire.encode(wire.Statuses(len(gone)), (gone | await rest).view(np.uint8))

    def flush(self, message: wire.Flush, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        state = self.server.pool.find_namespace(message.row)
        before = state.account.number
        count = self.server.pool.flush(message.row, number=message.number)
        self.server.wake()
        rest = self.server.ssd.flush(state.digest, before) if self.server.ssd and state.account.number != before else None
        return wire.encode(wire.Numbers([count])) if rest is None else self.later(self._flushed(count, rest))

    async def _flushed(self, count: int, rest: Coroutine[Any, Any, int]) -> bytes:
        return wire.encode(wire.Numbers([max(count, await rest)]))

    def note(self, message: wire.Note, blob: wire.Blob, now: float) -> bytes:
        history = self.server.pool.history
        first = not history.waits(self.session)
        for row, some in groupby(message.requests, key=lambda request: request[0]):
            requests = [(count, conversation) for _, count, conversation in some]
            keys = blob.keys(sum(count for count, _ in requests))
            history.add(self.session, row, keys, requests)
            if self.server.ssd:
                self.server.ssd.noted(row, keys, requests)
        blob.end()
        if not first or len(message.requests) > FEW_REQUESTS or history.heed(now, self.session):  # what is small is done with this
            self.server.noted()
        return b""

    async def _after_notes(self, frame: bytes) -> bytes:
        """Take up this message again when all that this client has asked for before is in the history."""
        while self.server.pool.history.heed(self.server.now(), self.session):  # noqa: ASYNC110 - it is work, not waiting
            await asyncio.sleep(0)  # others come in between
        self._buffer[:0] = frame
        return b""

    def corrupt(self, message: wire.Corrupt, blob: wire.Blob, now: float) -> bytes:
        ids, versions = blob.take(np.int64, message.n), blob.take(np.uint64, message.n)
        blob.end()
        return wire.encode(wire.Numbers([self.server.pool.drop_corrupt(ids, versions)]))

    def sums(self, message: wire.MakeSums, blob: wire.Blob, now: float) -> bytes:
        ids, versions = blob.take(np.int64, message.n), blob.take(np.uint64, message.n)
        blob.end()
        return self.later(self._make_sums(ids, versions))

    async def _make_sums(self, ids: I64, versions: U64) -> bytes:
        sums = await self.server.make_sums(ids, versions)
        return wire.encode(wire.Sums(len(sums)), sums)

    def later(self, answer: Coroutine[Any, Any, bytes]) -> bytes:
        """Answer when this is done; until then nothing more of this client is read."""
        self._slow = asyncio.get_running_loop().create_task(self._answer_with(answer))
        return b""

    async def _answer_with(self, answer: Coroutine[Any, Any, bytes]) -> None:
        try:
            reply = await answer
        except UmbpError as error:
            reply = wire.encode(wire.Failed(error.code, str(error), error.field))
        except Exception:  # as in `data_received`
            log.exception("%r: an answer could not be made", self)
            self._refuse(UmbpError("internal error; see the pool's log"))
            return
        self._slow = None
        self._read_or_wait()
        if self._transport:
            if reply:
                self._transport.write(reply)
            self.data_received(b"")

    def let_go(self, message: wire.LetGo, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        assert self.owner is not None
        self.owners.let_go(message.session, self.owner)
        return wire.encode(wire.Numbers([]))

    def pin(self, message: wire.Pin, blob: wire.Blob, now: float) -> bytes:
        keys = blob.keys(message.n)
        blob.end()
        pin = self.server.pool.pin(now, self.session, message.row, keys, message.seconds, message.note, number=message.number)
        return wire.encode(wire.Numbers([pin.number, len(pin.ids)]))

    def unpin(self, message: wire.Unpin, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        leases = self.server.pool.leases
        pin = leases.pins.get(message.number)
        if pin is None or pin.session != self.session:  # an operator's, or another client's
            raise NotFound(f"this session has no pin {message.number}", field="pin")
        leases.unpin(message.number)
        return wire.encode(wire.Numbers([]))

    def scratch(self, message: wire.TakeScratch, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        piece = self.server.pool.scratch.take(now, self.session, message.size_bytes)
        if message.claims:
            words = self.server.segment.words_at(piece.offset, piece.size_bytes)
            self.server.pool.objects.claims.open(now, self.session, piece.number, words, fence)
        return wire.encode(wire.ScratchTaken(piece.number, piece.offset))

    def give_scratch(self, message: wire.GiveScratch, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        self.server.meetings.scratch_given(self.session, message.number)
        self.server.pool.scratch.give(self.session, message.number)
        return wire.encode(wire.Numbers([]))

    def group(self, message: wire.OpenGroup, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        self.server.pool.find_namespace(message.row)
        groups, (world, rank, scratch) = self.server.meetings.groups, (message.world, message.rank, message.scratch)
        opened = groups.open(self.session, message.row, message.name, world=world, rank=rank, scratch=scratch)
        self.server.meetings.settle()
        return wire.encode(wire.Numbers([opened.number]))

    def join(self, message: wire.Join, blob: wire.Blob, now: float) -> bytes:
        ids, versions = blob.take(np.int64, message.n), blob.take(np.uint64, message.n)
        blob.end()
        return self.later(self.server.meetings.join(now, self.session, message, ids, versions))

    def leave(self, message: wire.Leave, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        return wire.encode(wire.Numbers([int(self.server.meetings.groups.leave(self.session, message.member, message.round))]))

    def get_neighbours(self, message: wire.GetNeighbours, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        return wire.encode(wire.Neighbours(self.server.neighbours.told()))

    def read_near(self, message: wire.ReadNear, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        self.server.neighbours.read(message.reads)
        return b""

    def used_near(self, message: wire.UsedNear, blob: wire.Blob, now: float) -> bytes:
        keys = blob.keys(message.n)
        blob.end()
        state = self.server.pool.namespaces.get(message.row)
        if state is not None and state.account.number == message.number:
            self.server.neighbours.used(state.digest.hex(), keys)
        return b""

    def status(self, message: wire.GetStatus, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        text = np.frombuffer(msgspec.json.encode(self.server.status_document()), np.uint8)
        return wire.encode(wire.Document(len(text)), text)

    def bye(self, message: wire.Bye, blob: wire.Blob, now: float) -> bytes:
        blob.end()
        self._clean = True
        return wire.encode(wire.Numbers([]))

    @property
    def session(self) -> int:
        """Number of this session."""
        assert self.owner is not None
        return self.owner.session


AFTER_NOTES = frozenset((wire.Reserve, wire.UseSpare, wire.Remove, wire.Flush, wire.GetStatus))
"""What must not come before a request that this client has told of first: what it then missed was not there when it asked."""
HANDLERS: dict[type[Any], Callable[[Session, Any, wire.Blob, float], bytes]] = {
    wire.Hello: Session.hello,
    wire.Near: Session.near,
    wire.OpenNamespace: Session.namespace,
    wire.Reserve: Session.reserve,
    wire.Commit: Session.commit,
    wire.TakeLease: Session.lease,
    wire.Renew: Session.renew,
    wire.Release: Session.release,
    wire.Remove: Session.remove,
    wire.Flush: Session.flush,
    wire.Note: Session.note,
    wire.Corrupt: Session.corrupt,
    wire.MakeSums: Session.sums,
    wire.LetGo: Session.let_go,
    wire.Pin: Session.pin,
    wire.Unpin: Session.unpin,
    wire.UseSpare: Session.use_spare,
    wire.TakeScratch: Session.scratch,
    wire.GiveScratch: Session.give_scratch,
    wire.OpenGroup: Session.group,
    wire.Join: Session.join,
    wire.Leave: Session.leave,
    wire.Fetch: session_fetches.fetch,
    wire.GetFetched: session_fetches.get_fetched,
    wire.Taken: session_fetches.taken,
    wire.EndFetch: session_fetches.end_fetch,
    wire.ReadFiles: session_fetches.read_files,
    wire.EndFiles: session_fetches.end_files,
    wire.Receive: session_fetches.receive,
    wire.EndErrand: session_fetches.end_errand,
    wire.Locate: session_fetches.locate,
    wire.Prefetch: session_fetches.prefetch,
    wire.GetPrefetched: session_fetches.get_prefetched,
    wire.GetNeighbours: Session.get_neighbours,
    wire.ReadNear: Session.read_near,
    wire.UsedNear: Session.used_near,
    wire.GetStatus: Session.status,
    wire.Bye: Session.bye,
}
