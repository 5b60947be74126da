"""Groups of ranks that hold replicated KV: `Group` is what a user says, `Rank` is this process's place in one and how it loads there.

Theory of operation
-------------------
A load of a group goes: look up the pages; *post* this rank's table in its area; *join*, which the pool answers with one roster and one
lease for all who came; copy the tables of the roster's ranks; deal the pages (`umbp.core.windows`, the same on each rank, as it is
computed from the same tables); *exchange* (`umbp.loader.exchange`); *leave*. No rank needs to know before what another will ask for, or
whether it comes: who does not come is not in the roster, and who comes late is in another one.

Tables are posted before the join, so a roster never names one that is not there. A rank that has posted another meanwhile had left this
round: it counts as not helping and wanting nothing. Then two ranks may deal differently, which each sees by the other's digest.

*Invariant 1* in a group: pages come from the segment under the round's lease, or from an owner's area, which stays what it is while the
round lasts. `leave` is answered with whether the round lasted until then. If it did not (this process was stopped for too long, or the
pool went), what came from others is read again from the segment, and each page counts only if its version is still the one that was
looked up: versions are read after the last copy, and never used twice.

Invariants 3 and 4: see `umbp.loader.exchange`. The calls to the pool are bounded by the load's deadline as well.

What it costs: two round trips and 64 KiB of table at most per load and rank, the staging memory, and one copy in cache more per page.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from umbp.client import Namespace
from umbp.client.link import Bond, Look
from umbp.client.ranks import Membership, RosterView, enter, give_up, join, leave
from umbp.core.windows import Windows, windows
from umbp.errors import InvalidRequest, LimitReached, UmbpError
from umbp.loader.area import AREA_BYTES_MIN, RING_AT, RING_SLOTS, Area
from umbp.loader.copies import Copies, Taken
from umbp.loader.exchange import Exchange, Producer, Source, Window, digest, shared_by
from umbp.loader.handles import Load
from umbp.store.index import W_OFFSET
from umbp.types import I64, U8, Mask

log = logging.getLogger("umbp.loader.group")
RETRY_SECONDS = 5.0  # after the pool refused a place in the group
WORLD_MAX = 64


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's view of a group: the same ``name`` and ``world`` on all ranks, each with a ``rank`` of its own.

    ``helps``: whether this rank reads pages that only others want. ``staging_bytes``: segment memory for the exchange, less if the pool
    gives less. ``meet_seconds``: how long the first rank that comes waits for the others. ``patience_seconds``: how long a rank waits
    for a sign of another before it does without.
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


class Rank:
    """This process's place in its group. Used by one thread, the loader's."""

    def __init__(self, namespace: Namespace, group: Group, copies: Copies) -> None:
        self.group = group
        self.copies = copies
        self.namespace = namespace
        self.rounds = 0
        self.lost_owners = 0
        self._membership: Membership | None = None
        self._area: Area | None = None
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
        self._membership = None
        try:
            self._membership = self._enter()
            self._area = Area(self._membership.area)
        except UmbpError as error:
            raise self._refuse(str(error)) from error

    def close(self) -> None:
        """Leave the group and give the staging back."""
        if self._membership is not None:
            self.namespace.run(give_up(self._membership))
            self._membership = None

    def load(self, load: Load, keys: U8, slots: I64, taken: Taken) -> tuple[Mask, str]:
        """Load with the group: which pages are there, and why the others are not. Alone if it must be done without the group."""
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
        if len(keys):
            operations.note_once(keys)
        held = np.zeros(len(keys), bool)
        with operations.link.filling(membership.bond):
            roster = self._meet(membership, look, which, load)
            mine = next(seat for seat in roster.seats if seat.rank == self.group.rank)
            try:
                got, others, whole = self._exchange(load, membership, roster, ids, slots[which], taken)
                if not whole:  # decided already: nobody waits for the pool to hear of it
                    load.end(held, "cancelled" if load.cancelled else "the deadline passed")
            finally:
                intact = self.namespace.run(leave(membership, roster.round))
            if not whole:
                return held, ""
            held[which[mine.held]] = True
            if not intact and look is not None:
                held &= self._judge(load, look, which, got, others, slots, taken)
        return held, "" if held.all() else f"{int(np.count_nonzero(~held))} pages are not stored any more"

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def _enter(self) -> Membership:
        """With as much staging as the pool gives, from what was asked for down to a page a slot."""
        group = self.group
        smallest = RING_AT + RING_SLOTS * (-(-max(self.copies.layer_bytes) // 4096) * 4096 + 4096)
        size = max(group.staging_bytes, smallest)
        while True:
            try:
                return self.namespace.run(enter(self.namespace.operations, group.name, world=group.world, rank=group.rank, size_bytes=size))
            except LimitReached:
                if size == smallest:
                    raise
                size = max(smallest, size // 2)

    def _refuse(self, reason: str) -> Alone:
        log.warning("rank %d of group %r loads alone for %g s: %s", self.group.rank, self.group.name, RETRY_SECONDS, reason)
        self._refused, self._retry_at = reason, time.monotonic() + RETRY_SECONDS
        self.close()
        return Alone(reason)

    def _meet(self, membership: Membership, look: Look | None, which: I64, load: Load) -> RosterView:
        assert self._area is not None
        ids = look.found.ids[which] if look is not None else which
        versions = look.found.versions[which] if look is not None else which.view(np.uint64)
        self._sequence += 1
        self._area.post(self._sequence, ids, helps=self.group.helps)
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

    def _tables(self, roster: RosterView) -> tuple[list[Area], list[I64], list[bool]]:
        """Each rank's area, the pages that it wants and that exist, and whether it reads for others."""
        areas, wanted, helps = [], [], []
        known = np.empty(0, np.int64)
        for seat in roster.seats:
            area = Area(seat.area)
            table = area.table_or_none(seat.sequence, seat.pages)
            ids = table[0][seat.held] if table is not None else np.empty(0, np.int64)
            good = table is not None and (np.array_equal(ids, known) or len(np.unique(ids)) == len(ids))
            known = ids if good else known  # mostly all ask for the same
            areas.append(area)
            wanted.append(ids if good else ids[:0])
            helps.append(good and table is not None and table[1] and self.copies.rows_in(area.slot_bytes) > 0)
        return areas, wanted, helps

    def _exchange(
        self, load: Load, membership: Membership, roster: RosterView, ids: I64, slots: I64, taken: Taken
    ) -> tuple[Mask, Mask, bool]:
        """Move the pages. Of this rank's wanted pages: which exist, and which of them came through others; and whether it is done."""
        areas, wanted, helps = self._tables(roster)
        me = next(index for index, seat in enumerate(roster.seats) if seat.rank == self.group.rank)
        dealt = windows(wanted, helps)
        held = roster.seats[me].held
        others = np.zeros(len(ids), bool)
        if not any(helps):
            dealt = Windows(dealt.pages, np.where(dealt.position[me] >= 0, me, -1).astype(np.int32), dealt.position)
        offsets = self._offsets(membership.bond, dealt.pages)
        position, places = dealt.position[me], slots[held]
        others[np.flatnonzero(held)[position[(dealt.owner != me) & (position >= 0)]]] = True
        exchange = self._plan(roster, areas, me, dealt, helps, offsets, places)
        whole = exchange.run(load, membership.bond.data, taken)
        for source in exchange.sources:
            if source.lost:
                self.lost_owners += 1
                log.info(
                    "round %d: rank %d reads the pages of rank %d itself: %s", roster.round, self.group.rank, source.owner, source.lost
                )
        return held, others, whole

    def _plan(
        self, roster: RosterView, areas: list[Area], me: int, dealt: Windows, helps: list[bool], offsets: I64, places: I64
    ) -> Exchange:
        copies, group, seats = self.copies, self.group, roster.seats
        agreed, position = digest(roster.round, dealt), dealt.position[me]
        mine, private = shared_by(dealt, me)
        if not any(helps):
            mine, private = mine[:0], np.flatnonzero(position >= 0)
        assert self._area is not None
        self._area.announce(agreed)
        window = Window(mine, max(1, copies.rows_in(self._area.slot_bytes)))
        producer = Producer(self._area, group.rank, roster.round, window, copies, group.patience_seconds)
        producer.plan(offsets[mine], position[mine], places)
        sources = []
        for step in range(1, len(seats)):  # beginning with the next rank, so that not all pull from the same one at first
            other = (me + step) % len(seats)
            wants = dealt.position[other][mine] >= 0
            if wants.any():
                flags = np.array([wants[window.chunk(number)].any() for number in range(window.chunks)])
                producer.readers.append((areas[other], flags))
            if not helps[other]:
                continue
            theirs = Window(shared_by(dealt, other)[0], max(1, copies.rows_in(areas[other].slot_bytes)))
            source = Source(areas[other], seats[other].rank, roster.round, theirs, agreed, group.patience_seconds)
            source.plan(offsets[theirs.pages], position[theirs.pages], places)
            if source.pieces:
                sources.append(source)
        own = copies.route(offsets[private], places[position[private]]) if len(private) else []
        return Exchange(self._area, producer, sources, own)

    def _offsets(self, bond: Bond, pages: I64) -> I64:
        """Where these leased entries lie."""
        entries = bond.index.entries
        offsets: I64 = entries[pages, W_OFFSET].view(np.int64)
        inside = (offsets >= 0) & (offsets + self.namespace.object_bytes <= len(bond.data))
        assert inside.all(), "a leased page lies outside of the segment"
        return offsets

    def _judge(self, load: Load, look: Look, which: I64, got: Mask, others: Mask, slots: I64, taken: Taken) -> Mask:
        """After a round that did not last: read again what came through others, and count what still is what was looked up."""
        again = which[got & others]
        if len(again) and not load.cancelled and load.claim():
            routes = self.copies.route(look.found.rows[again, W_OFFSET].view(np.int64), slots[again])
            for layer in range(len(self.copies.planes)):
                taken.fallback += self.copies.load(look.bond.data, routes, layer)
            load.let_go()
            others = np.zeros(len(others), bool)
        operations = self.namespace.operations
        good: Mask = look.found.hit & (look.bond.index.versions_of(look.found.ids) == look.found.versions)
        if operations.link.number_of(look.bond, operations.opened) != look.number:
            good[:] = False
        good[which[others]] = False
        return good
