"""What one rank of a group asks of the pool, as steps: a piece of scratch and a place in the group, a meeting, and to leave its round."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

import numpy as np

from umbp import wire
from umbp.client.link import Bond, Link
from umbp.client.operations import Operations
from umbp.client.steps import Operation, Work
from umbp.errors import UmbpError, Unavailable
from umbp.types import I64, U8, U64, Mask

# An answer that does not come in time costs the connection, and with it this rank's place: no less than a busy machine needs.
ANSWER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Membership:
    """A place in a group, under one bond. ``area`` is this rank's scratch, (size,) uint8."""

    bond: Bond
    number: int
    rank: int
    scratch: int
    area: U8


@dataclass(frozen=True, slots=True)
class SeatView:
    """One rank of a roster: which table it has posted (``sequence``), its scratch, and which of its ``pages`` exist (``held``)."""

    rank: int
    sequence: int
    area: U8
    pages: int
    held: Mask


@dataclass(frozen=True, slots=True)
class RosterView:
    """The ranks of one round, ascending."""

    round: int
    seats: tuple[SeatView, ...]


def enter(operations: Operations, name: str, *, world: int, rank: int, size_bytes: int) -> Operation[Membership]:
    """Take scratch, empty it (nobody may read in it what a former owner left) and become a rank of the group."""
    link, bond = operations.link, operations.link.bond_now()
    taken, _ = yield bond.call(wire.TakeScratch(size_bytes))
    try:
        area = bond.data[taken.offset : taken.offset + size_bytes]
        yield Work(partial(_clear, link, bond, area), size_bytes)
        opened, _ = yield bond.call(wire.OpenGroup(operations.opened.row, name, world, rank, taken.number))
    except BaseException:
        with contextlib.suppress(Unavailable):
            yield bond.call(wire.GiveScratch(taken.number))
        raise
    return Membership(bond, opened.numbers[0], rank, taken.number, area)


def give_up(membership: Membership) -> Operation[None]:
    """Be no rank any more. Only when nothing of this process writes to the area."""
    with contextlib.suppress(UmbpError):
        yield membership.bond.call(wire.GiveScratch(membership.scratch))


def join(membership: Membership, ids: I64, versions: U64, *, sequence: int, seconds: float, wait: float) -> Operation[RosterView]:
    """Meet the other ranks. Unavailable without an answer in time; NotFound if another process has taken this rank."""
    bond = membership.bond
    message = wire.Join(membership.number, sequence, len(ids), seconds, wait)
    reply, blob = yield bond.call(message, ids, versions, seconds=wait + ANSWER_SECONDS)
    seats = []
    for rank, posted, offset, size_bytes, pages in reply.seats:
        held = blob.take(np.uint8, pages).astype(bool)
        seats.append(SeatView(rank, posted, bond.data[offset : offset + size_bytes], pages, held))
    return RosterView(reply.round, tuple(seats))


def leave(membership: Membership, round_number: int) -> Operation[bool]:
    """Leave the round; True if all of its pages and staging stayed what they were until now."""
    try:
        reply, _ = yield membership.bond.call(wire.Leave(membership.number, round_number), seconds=ANSWER_SECONDS)
    except UmbpError:
        return False
    return bool(reply.numbers[0])


def _clear(link: Link, bond: Bond, area: U8) -> None:
    with link.filling(bond):
        area[:] = 0
