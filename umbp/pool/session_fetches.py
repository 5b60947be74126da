"""What a session asks of pages from elsewhere (`umbp.pool.fetching`): a handler a message."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from umbp import wire
from umbp.core.fetches import Ticket
from umbp.errors import InvalidRequest, NotFound
from umbp.types import U8, ReadStatus

if TYPE_CHECKING:
    from umbp.pool.sessions import Session


def fetch(session: Session, message: wire.Fetch, blob: wire.Blob, now: float) -> bytes:
    """Bring pages; answered at once."""
    keys, before = blob.keys(message.n), bytes.fromhex(message.before)
    blob.end()
    ticket = session.server.fetching.fetch(
        now, session.session, message.row, message.number, keys, before, message.seconds, stages=message.stages, passing=message.passing
    )
    if ticket is None:  # flushed: nothing of this number is anywhere
        return wire.encode(wire.Fetched(0, message.n, 0), np.full(message.n, ReadStatus.MISS, np.uint8))
    return _fetched(ticket)


def get_fetched(session: Session, message: wire.GetFetched, blob: wire.Blob, now: float) -> bytes:
    """What has come of a fetch."""
    blob.end()
    return _fetched(session.server.fetching.fetches.ticket(session.session, message.number))


def taken(session: Session, message: wire.Taken, blob: wire.Blob, now: float) -> bytes:
    """Pages that cannot stay have been copied."""
    places = blob.take(np.int64, message.n)
    blob.end()
    with contextlib.suppress(NotFound):
        session.server.fetching.taken(session.session, message.number, places)
    return b""


def end_fetch(session: Session, message: wire.EndFetch, blob: wire.Blob, now: float) -> bytes:
    """A client waits no more."""
    blob.end()
    with contextlib.suppress(NotFound):  # it was of a session before this one, or is forgotten
        session.server.fetching.end(session.session, message.number)
    return b""


def read_files(session: Session, message: wire.ReadFiles, blob: wire.Blob, now: float) -> bytes:
    """References to pages on SSD; answered when the descriptors are handed over."""
    keys, known = blob.keys(message.n), blob.take(np.uint64, message.k)
    blob.end()
    references, state = session.server.references, session.server.pool.find_namespace(message.row)
    if session.session not in state.sessions:
        raise InvalidRequest("this session has not opened that namespace", field="namespace")
    account = state.account
    if references is None or account.number != message.number:
        code = ReadStatus.BUSY if references is None else ReadStatus.MISS
        return wire.encode(wire.FileRefs(0, message.n, 0, 0, 0.0), np.full(message.n, code, np.uint8))
    return session.later(references.refer(session.session, account, keys, known, message.seconds))


def end_files(session: Session, message: wire.EndFiles, blob: wire.Blob, now: float) -> bytes:
    """What was read of them counts, or not."""
    read = blob.take(np.uint8, message.m)
    blob.end()
    references = session.server.references
    still = references.end(session.session, message.number, read) if references else np.zeros(message.m, np.uint8)
    return wire.encode(wire.Statuses(message.m), still)


def receive(session: Session, message: wire.Receive, blob: wire.Blob, now: float) -> bytes:
    """Hand over the connection that pages come by; at once, where it is known who has them."""
    keys = blob.keys(message.n)
    blob.end()
    answer = session.server.errands.give(now, session.session, message, keys)
    return answer if isinstance(answer, bytes) else session.later(answer)


def end_errand(session: Session, message: wire.EndErrand, blob: wire.Blob, now: float) -> bytes:
    """Commit what came by it."""
    status, sums = blob.take(np.uint8, message.n), blob.take(np.uint64, message.n)
    blob.end()
    done = session.server.errands.end(now, session.session, message, status, sums)
    session.server.wake()
    return wire.encode(wire.Statuses(len(done)), done)


def locate(session: Session, message: wire.Locate, blob: wire.Blob, now: float) -> bytes:
    """The tier of each page; answered when all sources were asked."""
    keys = blob.keys(message.n)
    blob.end()
    return session.later(_locate(session, message.row, message.number, keys))


async def _locate(session: Session, row: int, number: int, keys: U8) -> bytes:
    tiers = await session.server.fetching.locate(row, number, keys)
    return wire.encode(wire.Statuses(len(tiers)), tiers)


def prefetch(session: Session, message: wire.Prefetch, blob: wire.Blob, now: float) -> bytes:
    """Bring pages for later."""
    keys = blob.keys(message.n)
    blob.end()
    return _prefetched(
        session.server.fetching.prefetch(
            now, message.row, message.number, keys, request=message.request, seconds=message.seconds, hold=message.hold
        )
    )


def get_prefetched(session: Session, message: wire.GetPrefetched, blob: wire.Blob, now: float) -> bytes:
    """What has become of a prefetch."""
    blob.end()
    return _prefetched(session.server.fetching.fetches.prefetched(message.row, message.request))


def _fetched(ticket: Ticket) -> bytes:
    return wire.encode(wire.Fetched(ticket.number, len(ticket.keys), ticket.left), ticket.status)


def _prefetched(ticket: Ticket) -> bytes:
    return wire.encode(wire.Prefetched(ticket.request, ticket.state.name.lower(), len(ticket.keys), ticket.left), ticket.status)
