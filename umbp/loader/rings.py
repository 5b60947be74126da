"""A party on the CPU: each rank stages its window in a ring in the segment, and pulls what it wants out of the others' rings.

The round itself, and why invariants 3 and 4 hold in it: `umbp.loader.exchange`. Here it is planned: tables are copied, pages dealt, rings
laid out, each rank alike.
"""

from __future__ import annotations

import logging

import numpy as np

from umbp.client.ranks import Membership, RosterView
from umbp.core.windows import Windows, windows
from umbp.loader.area import RING_AT, RING_SLOTS, Area
from umbp.loader.copies import Copies, Taken
from umbp.loader.exchange import Exchange, Producer, Source, Window, digest, shared_by
from umbp.loader.group import Exchanged, Group, Round, offsets_of
from umbp.loader.handles import Load
from umbp.types import I64, U8

log = logging.getLogger("umbp.loader.rings")


class RingParty:
    """One rank's rings. ``object_bytes``: of a page in the pool."""

    kind = ""
    unmapped = "tensors on the CPU are exchanged through staging memory"

    def __init__(self, group: Group, copies: Copies, object_bytes: int) -> None:
        self.group = group
        self.copies = copies
        self.object_bytes = object_bytes
        self.lost_owners = 0
        self.area: Area | None = None

    def __repr__(self) -> str:
        return f"<RingParty of rank {self.group.rank}>"

    def area_bytes(self) -> tuple[int, int]:
        """See `Party.area_bytes`: down to a page a slot."""
        smallest = RING_AT + RING_SLOTS * (-(-max(self.copies.layer_bytes) // 4096) * 4096 + 4096)
        return max(self.group.staging_bytes, smallest), smallest

    def enter(self, membership: Membership) -> None:
        """See `Party.enter`."""
        self.area = Area(membership.area)

    def give_up(self) -> None:
        """See `Party.give_up`."""
        self.area = None

    def begin(self, load: Load, sequence: int) -> bool:
        """See `Party.begin`: nobody else ever writes into a rank's slots."""
        return not load.over

    def post(self, sequence: int, ids: I64, slots: I64, *, helps: bool, way: str) -> None:
        """See `Party.post`."""
        assert self.area is not None
        self.area.post(sequence, ids, helps=helps)

    def end(self, load: Load) -> None:
        """See `Party.end`."""

    def close(self) -> None:
        """See `Party.close`."""

    def exchange(self, made: Round) -> Exchanged:
        """See `Party.exchange`."""
        areas, wanted, helps = self.tables(made.roster)
        me, held = made.seat, made.held
        dealt = windows(wanted, helps)
        others = np.zeros(len(held), bool)
        if not any(helps):
            dealt = Windows(dealt.pages, np.where(dealt.position[me] >= 0, me, -1).astype(np.int32), dealt.position)
        offsets = offsets_of(made.bond, dealt.pages, self.object_bytes)
        position, places = dealt.position[me], made.slots[held]
        others[np.flatnonzero(held)[position[(dealt.owner != me) & (position >= 0)]]] = True
        exchange = self.plan(made.roster, areas, me, dealt, helps, offsets, places)
        whole = exchange.run(made.load, made.bond.data, made.taken)
        for source in exchange.sources:
            if source.lost:
                self.lost_owners += 1
                text = "round %d: rank %d reads the pages of rank %d itself: %s"
                log.info(text, made.roster.round, self.group.rank, source.owner, source.lost)
        return Exchanged(others, whole)

    def again(self, load: Load, data: U8, offsets: I64, slots: I64, taken: Taken) -> bool:
        """See `Party.again`: what was in others' rings may have been overwritten, so it is read from the segment."""
        if load.cancelled or not load.claim():
            return False
        routes = self.copies.route(offsets, slots)
        for layer in range(len(self.copies.planes)):
            taken.fallback += self.copies.load(data, routes, layer)
        load.let_go()
        return True

    # -- planning ----------------------------------------------------------------------------------------------------------------------

    def tables(self, roster: RosterView) -> tuple[list[Area], list[I64], list[bool]]:
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

    def plan(
        self, roster: RosterView, areas: list[Area], me: int, dealt: Windows, helps: list[bool], offsets: I64, places: I64
    ) -> Exchange:
        """This rank's part of the exchange. ``offsets``: of all dealt pages; ``places``: slots of those that it wants."""
        copies, group, seats = self.copies, self.group, roster.seats
        agreed, position = digest(roster.round, dealt), dealt.position[me]
        mine, private = shared_by(dealt, me)
        if not any(helps):
            mine, private = mine[:0], np.flatnonzero(position >= 0)
        assert self.area is not None
        self.area.announce(agreed)
        window = Window(mine, max(1, copies.rows_in(self.area.slot_bytes)))
        producer = Producer(self.area, group.rank, roster.round, window, copies, group.patience_seconds)
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
        return Exchange(self.area, producer, sources, own)
