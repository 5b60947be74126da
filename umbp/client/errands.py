"""Pages of another node that this client receives by itself, into the segment and into the caller's memory in one pass.

Theory of operation. See `umbp.pool.errands` for what the pool does. Here an errand is a write whose bytes come from a connection: under one
bond, counted as a copy into reserved memory for as long as it writes there (`umbp.client.link.Filling`), ended by one call that says what
came, whatever happened. It is received in short steps, so that who is cancelled, or has lost the pool, stops soon.

What an errand does not bring, because the peer has it no more, failed or was late, is fetched as ever (`umbp.client.fetches`), within the
caller's time. So is all where the pool has no errand to give: nobody knows of the pages, they are on their way already, or on this node's
own SSD.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial

import numpy as np

from umbp import wire
from umbp.client.buffers import Rows
from umbp.client.link import Bond
from umbp.client.operations import Operations
from umbp.client.steps import Operation, Work
from umbp.errors import UmbpError, Unavailable
from umbp.transport.incoming import Incoming
from umbp.types import I64, U8, Mask, ReadStatus

STEP_SECONDS = 0.05  # of receiving, between two looks whether somebody still wants it
END_SECONDS = 0.25  # the pool has to hear of the end of an errand; after the deadline its answer is waited for so long
BUSY_BYTES = 1 << 30  # a step takes as long as copying that many: never in an event loop


def receive(operations: Operations, keys: U8, rows: Rows, codes: U8, missing: I64, seconds: float) -> Operation[I64]:
    """Receive what another node has of these pages (indices), their codes with them; those that did not come so."""
    until = time.monotonic() + seconds
    bond, number = operations.current()
    link = operations.link
    blind = link.welcome is None or (link.welcome.ssd and bond.ssd is None)  # to what this node's own SSD has
    ready = link.handover.is_open(bond) if bond.far and bond.handover and not blind else False
    if ready is None:
        ready = yield Work(lambda: link.handover.open(bond, link.address, bond.handover, until), BUSY_BYTES)
    if not ready:
        return missing
    left, rest = missing, []
    if bond.ssd is not None and len(left) and (look := operations.look(keys[left])) is not None:
        near = operations.on_ssd(look, keys[left])
        left, rest = left[~near], [left[near]]
    row, again = operations.opened.row, False
    while len(left) and (more := until - time.monotonic()) > 0:
        part, left = left[: wire.BATCH_MAX], left[wire.BATCH_MAX :]
        before = keys[part[0] - 1].tobytes().hex() if part[0] else ""
        asked = time.monotonic()
        message = wire.Receive(row, number, len(part), more, before, again)
        reply, blob = yield bond.call(message, keys[part], seconds=more, late=partial(_too_late, bond))
        offsets = blob.take(np.int64, reply.n)
        part = part[offsets != wire.NOBODY]  # they are misses, as they were
        offsets = offsets[offsets != wire.NOBODY]
        ordered = offsets >= wire.ALONE
        if not ordered.any():
            rest.append(part)
            continue
        chosen = part[ordered]
        came = yield from _run(operations, bond, reply, offsets[ordered], rows.only(chosen), asked + reply.seconds)
        codes[chosen[came]] = ReadStatus.HIT.value
        rest.append(chosen[~came])
        if not came.all():  # somebody is slow, or knows better by now
            rest.append(part[~ordered])
            break
        left, again = np.concatenate([part[~ordered], left]), True
    absent: I64 = np.sort(np.concatenate([left, *rest]))
    return absent


def _run(operations: Operations, bond: Bond, reply: wire.Errand, offsets: I64, rows: Rows, deadline: float) -> Operation[Mask]:
    """One errand, to its end: which of its pages came, (n,) bool."""
    link, why, answered, owed, receipt = operations.link, "", False, -1, False
    status, sums = np.full(len(offsets), ReadStatus.FAILED.value, np.uint8), np.zeros(len(offsets), np.uint64)
    incoming: Incoming | None = None
    try:
        if (fd := link.handover.take(bond, wire.PEER_LINE, reply.number)) is not None:
            incoming = Incoming(fd, bond.data, offsets, operations.object_bytes, rows, deadline, reply.skip)

            def step() -> bool:
                with link.filling(bond):
                    return incoming.step(STEP_SECONDS)

            while not (yield Work(step, BUSY_BYTES)):
                pass
    except Unavailable as error:
        if link.bond is not bond:
            raise
        why = _reason(error)
    except (UmbpError, OSError) as error:
        if not (isinstance(error, TimeoutError) and incoming is not None and incoming.sends):
            why = _reason(error)
    finally:
        if incoming is not None:
            status, sums, answered, owed, receipt = incoming.status, incoming.sums, incoming.answered, incoming.owed, incoming.receipt
            incoming.close()
        said = wire.EndErrand(reply.number, reply.reservation, len(status), owed, answered, receipt, why)
        with contextlib.suppress(Unavailable):  # then the reservation is over, and the connection cut; or it is said later
            yield from link.late.ended(bond.call(said, status, sums, seconds=deadline + END_SECONDS - time.monotonic()))
    came: Mask = status == ReadStatus.HIT.value
    return came


def _too_late(bond: Bond, reply: wire.Errand, blob: wire.Blob) -> Operation[None]:
    """Nobody is there any more to receive what was ordered."""
    if count := int(np.count_nonzero(blob.take(np.int64, reply.n) >= wire.ALONE)):
        status, sums = np.full(count, ReadStatus.FAILED.value, np.uint8), np.zeros(count, np.uint64)
        yield bond.call(wire.EndErrand(reply.number, reply.reservation, count, -1, answered=False), status, sums)


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"[: wire.TEXT_CHARS_MAX]
    return text if text.isprintable() else type(error).__name__
