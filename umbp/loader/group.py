"""Groups of ranks that hold replicated KV: `Group` is what a user says, `Rank` is this process's place in one and how it loads there.

Theory of operation
-------------------
A load of a group goes: look up the pages; *post* this rank's table in its area; *join*, which the pool answers with one roster and one
lease for all who came; copy the tables of the roster's ranks; deal the pages (`umbp.core.windows`, the same on each rank, as it is
computed from the same tables); *exchange* (`umbp.loader.exchange`); *leave*. No rank needs to know before what another will ask for, or
whether it comes: who does not come is not in the roster, and who comes late is in another one.

How the exchange goes is the *party*'s: ranks on the CPU pull out of each other's staging (`umbp.loader.rings`), ranks on GPUs push into
each other's slots (`umbp.loader.pushes`). A party's ranks meet only their own kind.

Tables are posted before the join, so a roster never names one that is not there. A rank that has posted another meanwhile had left this
round: it counts as not helping and wanting nothing. Then two ranks may deal differently, which each sees by the other's digest.

*Invariant 1* in a group: pages come from the segment under the round's lease, or from an owner's area, which stays what it is while the
round lasts. `leave` is answered with whether the round lasted until then. If it did not (this process was stopped for too long, or the
pool went), what came through others' staging is read again from the segment, and each page counts only if its version is still the one
that was looked up: versions are read after the last copy, and never used twice.

Invariants 3 and 4: see the parties. The calls to the pool are bounded by the load's deadline as well.

What it costs: two round trips and 64 KiB of table at most per load and rank, the staging memory, and one copy in cache more per page.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from umbp.client import Namespace
from umbp.client.link import Bond, Look
from umbp.client.ranks import Membership, RosterView, enter, give_up, join, leave
from umbp.errors import InvalidRequest, LimitReached, UmbpError
from umbp.loader.area import AREA_BYTES_MIN
from umbp.loader.copies import Taken
from umbp.loader.handles import Load
from umbp.store.index import W_OFFSET
from umbp.types import I64, U8, Mask

log = logging.getLogger("umbp.loader.group")
RETRY_SECONDS = 5.0  # after the pool refused a place in the group
WORLD_MAX = 64


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's view of a group: the same ``name`` and ``world`` on all ranks, each with a ``rank`` of its own.

    ``helps``: whether this rank reads pages that only others want. ``staging_bytes``: memory for the exchange where it is staged: of the
    segment for ranks on the CPU, less if the pool gives less; of each GPU for ranks on GPUs. ``meet_seconds``: how long the first rank that
    comes waits for the others. ``patience_seconds``: how long a rank waits for a sign of another before it does without.
    """

    name: str
    rank: int
    world: int
    helps: bool = True
    staging_bytes: int = 64 << 20
    meet_seconds: float = 0.005
    patience_seconds: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 256:
            raise InvalidRequest("a group has a name of 1 to 256 characters", field="group.name", example="tp0")
        if not 1 <= self.world <= WORLD_MAX or not 0 <= self.rank < self.world:
            raise InvalidRequest(f"rank {self.rank} of {self.world}", field="group.rank", example=f"0 <= rank < world <= {WORLD_MAX}")
        if self.staging_bytes < AREA_BYTES_MIN:
            raise InvalidRequest(
                f"{self.staging_bytes} bytes", field="group.staging_bytes", example=f"{64 << 20}, {AREA_BYTES_MIN} at least"
            )
        if not 0 <= self.meet_seconds <= 1 or not 0 < self.patience_seconds <= 60:
            raise InvalidRequest("times out of range", field="group", example="meet_seconds=0.005, patience_seconds=0.02")


class Alone(Exception):
    """This load cannot be the group's: the text says why. Nothing was moved."""


@dataclass(slots=True)
class Round:
    """One round as this rank is in it. ``seat``: its index in the roster; ``slots``: of the pages that it posted."""

    load: Load
    bond: Bond
    roster: RosterView
    seat: int
    slots: I64
    taken: Taken

    @property
    def held(self) -> Mask:
        """Which of the posted pages exist."""
        return self.roster.seats[self.seat].held


@dataclass(frozen=True, slots=True)
class Exchanged:
    """``others``: which of the posted pages came through other ranks' memory; ``whole``: False if it was cancelled, or too late."""

    others: Mask
    whole: bool


class Party(Protocol):
    """How one kind of ranks exchange pages. Used by one thread."""

    kind: str
    lost_owners: int

    def area_bytes(self) -> tuple[int, int]:
        """Bytes of the segment for this rank: what it would like, and with how little it can do."""

    def enter(self, membership: Membership) -> None:
        """This rank is a member now, and its area is empty. Alone if it cannot take part."""

    def give_up(self) -> None:
        """It is none any more, and writes to the area no more."""

    def begin(self, load: Load, sequence: int) -> bool:
        """From now on others may write into the load's slots, if they do so at all. False if the load is over already."""

    def post(self, sequence: int, ids: I64, slots: I64, *, helps: bool, way: str) -> None:
        """Say what this rank wants."""

    def exchange(self, made: Round) -> Exchanged:
        """Move the pages."""

    def end(self, load: Load) -> None:
        """When this returns, nobody writes into the load's slots any more. After `begin`, always."""

    def again(self, load: Load, data: U8, offsets: I64, slots: I64, taken: Taken) -> bool:
        """After a round that did not last: make sure of what came through others. False if that cannot be done."""

    def close(self) -> None:
        """Give everything back."""


class Rank:
    """This process's place in its group. Used by one thread, the loader's."""

    def __init__(self, namespace: Namespace, group: Group, party: Party) -> None:
        self.group = group
        self.namespace = namespace
        self.party = party
        self.rounds = 0
        self._membership: Membership | None = None
        self._sequence = time.monotonic_ns()  # grows over restarts of this process too
        self._refused = ""
        self._retry_at = 0.0

    def __repr__(self) -> str:
        return f"<Rank {self.group.rank} of {self.group.name!r} ({self.group.world}), {self.rounds} rounds>"

    def enter(self) -> None:
        """Be a member now. Alone if the pool gives no place, or it is another pool than before and gives none."""
        bond = self.namespace.operations.link.bond_or_none()
        if bond is None:
            raise Alone("no pool answers")
        if self._membership is not None and self._membership.bond is bond:
            return
        if time.monotonic() < self._retry_at:
            raise Alone(self._refused)
        self._leave_group()
        try:
            self._membership = self._enter()
            self.party.enter(self._membership)
        except (UmbpError, Alone) as error:
            raise self._refuse(str(error)) from error

    def close(self) -> None:
        """Leave the group and give the staging back."""
        self._leave_group()
        self.party.close()

    def load(self, load: Load, keys: U8, slots: I64, taken: Taken, way: str) -> tuple[Mask, str]:
        """Load with the group: which pages are there, and why the others are not. Alone if it must be done without the group.

        ``way``: fused, or staged if others cannot push into this rank's slots.
        """
        self.enter()
        membership = self._membership
        assert membership is not None
        operations = self.namespace.operations
        look = operations.look(keys) if len(keys) else None
        if len(keys) and (look is None or look.bond is not membership.bond):
            raise Alone("the connection to the pool was lost")
        which = np.flatnonzero(look.found.hit) if look is not None else np.empty(0, np.int64)
        ids = look.found.ids[which] if look is not None else which
        if len(np.unique(ids)) != len(ids):
            raise Alone("a page is asked for twice")
        if len(keys) and not load.noted:
            operations.note_once(keys)
        held = np.zeros(len(keys), bool)
        with operations.link.filling(membership.bond):
            made, done = self._round(load, membership, look, which, slots[which], taken, way)
            intact = False
            try:
                if done is None or not done.whole:  # decided already: nobody waits for the pool to hear of it
                    load.end(held, "cancelled" if load.cancelled else "the deadline passed")
            finally:
                if made is not None:
                    intact = self.namespace.run(leave(membership, made.roster.round))
            if made is None or done is None or not done.whole:
                return held, ""
            held[which[made.held]] = True
            if not intact and look is not None:
                held &= self._judge(load, look, which, made.held, done.others, slots, taken)
        return held, "" if held.all() else f"{int(np.count_nonzero(~held))} pages are not stored any more"

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def _round(
        self, load: Load, membership: Membership, look: Look | None, which: I64, slots: I64, taken: Taken, way: str
    ) -> tuple[Round | None, Exchanged | None]:
        """Meet and exchange; nobody writes into the slots any more when this returns or raises. Nothing for a load that is over."""
        self._sequence += 1
        if not self.party.begin(load, self._sequence):
            return None, None
        made, done = None, None
        try:
            roster = self._meet(membership, look, which, slots, load, way)
            seat = next(index for index, seat in enumerate(roster.seats) if seat.rank == self.group.rank)
            made = Round(load, membership.bond, roster, seat, slots, taken)
            done = self.party.exchange(made)
        except BaseException:
            if made is not None:
                with contextlib.suppress(UmbpError):
                    self.namespace.run(leave(membership, made.roster.round))
            raise
        finally:
            self.party.end(load)
        return made, done

    def _leave_group(self) -> None:
        if self._membership is not None:
            membership, self._membership = self._membership, None
            self.party.give_up()
            self.namespace.run(give_up(membership))

    def _enter(self) -> Membership:
        """With as much staging as the pool gives, from what was asked for down to the least."""
        group, (size, smallest) = self.group, self.party.area_bytes()
        name = f"{group.name} {self.party.kind}".strip()
        while True:
            try:
                return self.namespace.run(enter(self.namespace.operations, name, world=group.world, rank=group.rank, size_bytes=size))
            except LimitReached:
                if size == smallest:
                    raise
                size = max(smallest, size // 2)

    def _refuse(self, reason: str) -> Alone:
        if reason != self._refused:  # what does not change is said once
            log.warning("rank %d of group %r loads alone for %g s: %s", self.group.rank, self.group.name, RETRY_SECONDS, reason)
        self._refused, self._retry_at = reason, time.monotonic() + RETRY_SECONDS
        self._leave_group()
        return Alone(reason)

    def _meet(self, membership: Membership, look: Look | None, which: I64, slots: I64, load: Load, way: str) -> RosterView:
        ids = look.found.ids[which] if look is not None else which
        versions = look.found.versions[which] if look is not None else which.view(np.uint64)
        self.party.post(self._sequence, ids, slots, helps=self.group.helps, way=way)
        seconds = max(0.001, load.deadline - time.monotonic())
        try:
            made = join(membership, ids, versions, sequence=self._sequence, seconds=seconds, wait=self.group.meet_seconds)
            roster = self.namespace.run(made)
        except LimitReached as error:  # too much is leased
            raise Alone(str(error)) from error
        except UmbpError as error:
            raise self._refuse(str(error)) from error
        self.rounds += 1
        return roster

    def _judge(self, load: Load, look: Look, which: I64, got: Mask, others: Mask, slots: I64, taken: Taken) -> Mask:
        """After a round that did not last: make sure of what came through others, and count what still is what was looked up."""
        again = which[got & others]
        if len(again) and self.party.again(load, look.bond.data, look.found.rows[again, W_OFFSET].view(np.int64), slots[again], taken):
            others = np.zeros(len(others), bool)
        operations = self.namespace.operations
        good: Mask = look.found.hit & (look.bond.index.versions_of(look.found.ids) == look.found.versions)
        if operations.link.number_of(look.bond, operations.opened) != look.number:
            good[:] = False
        good[which[others]] = False
        return good


def offsets_of(bond: Bond, pages: I64, object_bytes: int) -> I64:
    """Where these leased entries lie."""
    offsets: I64 = bond.index.entries[pages, W_OFFSET].view(np.int64)
    inside = (offsets >= 0) & (offsets + object_bytes <= len(bond.data))
    assert inside.all(), "a leased page lies outside of the segment"
    return offsets
