"""A party on GPUs: each rank reads its window out of the segment once, and pushes it into the slots of all ranks that want it.

Theory of operation
-------------------
Before its table is posted a rank opens its gates for this load's tag (`umbp.loader.pad`); from then on others may write into its slots.
With the roster each rank deals the pages (`umbp.loader.deals`), announces its deal, and queues everything ahead, layer group after layer
group, on two streams:

    pushes     fused_read_push of its window, which counts itself as arrived in the pads of those it wrote to
    arrivals   wait_signal for the owners that bring something, page_mend for owners that are lost, a mark

`Load.wait` makes the engine's stream wait for the mark. No rank waits for another but in `wait_signal`, which gives up after the patience
and remembers whom; what a lost owner has not brought is then read by `page_mend`, in front of the mark. So behind the mark the layers are
there in any case.

*Invariant 1.* A page counts as arrived only if its owner's announcement says that it deals as this rank does and reaches it: the host
looks at that once, between the first push and the first wait, bounded by the patience. Who has announced nothing by then, or another
deal, is lost from the start. What an owner pushes comes straight out of the segment under the round's lease, and only while the gate
shows this load's tag; any page that lands in a slot is the page that this rank wanted there, whoever sent it.

*Invariant 3.* `end` shuts the gates and waits until nobody is inside: see `umbp.loader.pad`. Then nothing lands in a slot any more, also
of a rank that is killed, or stopped between its decision to push and the launch. This rank's own launches are drained before.

*Invariant 4.* Waits on the device are bounded by the patience, once a load and owner; waits on the host by patience and deadline; what is
queued is bounded in bytes, so that a deadline is overrun by no more than that. A rank that is stopped itself finds its gates as it left
them, and its load late.

Pushes through staging (`umbp.loader.stages`) are for rounds in which somebody's tensors cannot be mapped by others.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from umbp.client import Namespace
from umbp.client.ranks import Membership
from umbp.kernels.tables import LayerGroup, Pads, Window
from umbp.loader.arrivals import Arrivals
from umbp.loader.board import BOARD_BYTES, Board
from umbp.loader.convoy import LOOK_SECONDS, Convoy
from umbp.loader.copies import Taken
from umbp.loader.deals import Deal, Parts, deal
from umbp.loader.device import DeviceMover
from umbp.loader.group import Alone, Exchanged, Group, Round, offsets_of
from umbp.loader.handles import Load
from umbp.loader.pad import Pad, tag_of
from umbp.loader.peers import Peers, Reach, make_card
from umbp.loader.runtime import Fault
from umbp.loader.stages import stage
from umbp.types import I64, U8

log = logging.getLogger("umbp.loader.pushes")
# Opening the handles of a rank takes 1 ms each, hundreds where each layer is an allocation: so ranks that meet for the first time are
# given longer to announce what they push. Who dies meanwhile is noticed.
MEETING_SECONDS = 2.0
TABLES_MAX = 1024  # of layers of all served ranks, some 10 KB each: a few groupings of a deep model


class PushParty:
    """One rank's memory for pushes, and its rounds. Fault if there is no memory for signals and staging."""

    def __init__(self, group: Group, mover: DeviceMover, namespace: Namespace) -> None:
        self.group = group
        self.mover = mover
        self.namespace = namespace
        self.kind = f"on {mover.runtime.name}"
        self.lost_owners = 0
        self.unmapped = ""
        self.pad = Pad(mover.runtime, mover.kernels, group.world)
        self.staging_bytes = group.staging_bytes // 16 * 16
        self.staging = mover.runtime.allocate(self.staging_bytes)
        self.peers: Peers | None = None
        self.arrived: I64 = np.zeros(2 * group.world, np.int64)  # in each channel when the gates were opened
        self.pushes = mover.runtime.stream()
        self._board: Board | None = None
        self._tables: dict[tuple[object, ...], LayerGroup] = {}
        self._open = False
        self._patience = group.patience_seconds  # with announcements of this round

    def __repr__(self) -> str:
        return f"<PushParty of rank {self.group.rank} on {self.mover.runtime.device}>"

    # -- see `Party` -------------------------------------------------------------------------------------------------------------------

    def area_bytes(self) -> tuple[int, int]:
        """See `Party.area_bytes`: no page passes through it."""
        return BOARD_BYTES, BOARD_BYTES

    def enter(self, membership: Membership) -> None:
        """See `Party.enter`."""
        link, mover = self.namespace.operations.link, self.mover
        assert link.segment is not None
        planes = mover.addresses.tolist()
        try:
            card = make_card(
                mover.runtime,
                holder=link.holder,
                blocks=mover.blocks,
                pad=self.pad.address,
                staging=self.staging,
                staging_bytes=self.staging_bytes,
                planes=planes,
                strides=mover.strides.tolist(),
            )
            board = Board(membership.area)
            board.put_card(card)
            mover.segment.alias(membership.bond.data)
        except Fault as fault:
            raise Alone(str(fault)) from fault
        self.peers = Peers(mover.runtime, card, mover.strides.tolist(), link.segment.path)
        self.unmapped = card.unmapped
        self._board = board

    def give_up(self) -> None:
        """See `Party.give_up`."""
        if self.peers is not None:
            self.peers.close()
        self.peers = self._board = None

    def begin(self, load: Load, sequence: int) -> bool:
        """See `Party.begin`: behind what the caller had queued, since others cannot wait for its stream."""
        pause = LOOK_SECONDS[0]
        while load.start is not None and not load.start.done():
            if load.cancelled or time.monotonic() > load.deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, LOOK_SECONDS[1])
        if not load.claim():
            return False
        try:
            self.arrived = self.pad.open(tag_of(sequence))
        except Fault as fault:
            load.let_go()
            raise Alone(str(fault)) from fault
        self._open = True
        return True

    def post(self, sequence: int, ids: I64, slots: I64, *, helps: bool, way: str) -> None:
        """See `Party.post`."""
        assert self._board is not None
        self._board.post(sequence, ids, slots, helps=helps, staged=way == "staged")

    def end(self, load: Load) -> None:
        """See `Party.end`."""
        peers = self.peers
        assert self._open
        try:
            self.pad.shut(peers.gone if peers is not None else lambda rank: False)
        finally:
            self._open = False
            load.let_go()

    def again(self, load: Load, data: U8, offsets: I64, slots: I64, taken: Taken) -> bool:
        """See `Party.again`: it came out of the segment, whoever read it, and its version is what tells."""
        return True

    def close(self) -> None:
        """See `Party.close`."""
        self.give_up()
        self.mover.runtime.free(self.staging)

    def exchange(self, made: Round) -> Exchanged:
        """See `Party.exchange`."""
        mover = self.mover
        assert self.peers is not None
        met = self.peers.met
        dealt = deal(made.roster, made.seat, self._reach, mover.layer_bytes)
        self._patience = MEETING_SECONDS if self.peers.met > met else self.group.patience_seconds
        self._see_who_is_unmapped(dealt)
        parts = Parts.of(dealt)
        offsets = offsets_of(made.bond, dealt.windows.pages, self.namespace.object_bytes)
        try:
            alias = mover.segment.alias(made.bond.data)
        except Fault as fault:
            raise Alone(str(fault)) from fault
        convoy = Convoy(made.load)
        try:
            with mover.runtime.use():
                lost: tuple[int, ...] = ()
                if dealt.readers == 0:
                    whole = self._alone(dealt, parts, offsets, alias, convoy, made.taken)
                elif dealt.staged:
                    whole, lost = stage(self, dealt, parts, offsets, alias, convoy, made.taken)
                else:
                    whole, lost = self._fused(dealt, parts, offsets, alias, convoy, made.taken)
        finally:
            convoy.drain()  # also after an error: our own launches are through before the gates shut
        made.load.read_bytes = made.taken.segment
        for owner in lost:
            self.lost_owners += 1
            text = "round %d: rank %d read pages of rank %d itself: it did not bring them in time"
            log.info(text, made.roster.round, self.group.rank, dealt.seats[owner].rank)
        others = np.zeros(len(made.held), bool)
        place = dealt.windows.position[dealt.me][parts.pages[parts.from_others(dealt.me)]]
        others[np.flatnonzero(made.held)[place]] = True
        return Exchanged(others, whole)

    # -- a round -----------------------------------------------------------------------------------------------------------------------

    def _reach(self, rank: int, board: Board) -> Reach | None:
        assert self.peers is not None
        card = board.card_or_none()
        return self.peers.reach(rank, card) if card is not None else None

    def _see_who_is_unmapped(self, dealt: Deal) -> None:
        """From the next load on this rank asks for staging where it cannot be reached, or reach another that could be through staging."""
        assert self.peers is not None
        known = [(seat.rank, seat.reach) for seat in dealt.seats if seat.reach is not None]
        others = [
            f"the tensors of rank {rank} cannot be reached: {reach.why}" for rank, reach in known if reach.planes is None and reach.staging
        ]
        self.unmapped = self.peers.own.unmapped or next(iter(others), "")

    def _alone(self, dealt: Deal, parts: Parts, offsets: I64, alias: int, convoy: Convoy, taken: Taken) -> bool:
        """Nobody reads for others: this rank reads what it wants."""
        mover = self.mover
        with mover.runtime.on(mover.stream):
            window = Window.of(alias, offsets[parts.pages], parts.slots[None, :], mover.runtime.device)
            queued = mover.queue(window, dealt.groups, convoy, taken)
        return queued and convoy.drain()

    def _fused(self, dealt: Deal, parts: Parts, offsets: I64, alias: int, convoy: Convoy, taken: Taken) -> tuple[bool, tuple[int, ...]]:
        """Push the own window, wait for the others'. Whether it is done, and the seats that were lost."""
        mover, kernels, runtime = self.mover, self.mover.kernels, self.mover.runtime
        mine = dealt.windows.of(dealt.me)
        serves = [seat for seat in range(len(dealt.seats)) if self.serves(dealt, seat, staged=False)]
        with runtime.on(self.pushes):
            window = Window.of(alias, offsets[mine], self.slots_for(dealt, mine, serves), runtime.device)
            pads = self.pads_of(dealt, serves)
            tables = [self._pushed_to(dealt, serves, first, last) for first, last in dealt.groups]
        with runtime.on(mover.stream):
            arrivals = self.arrivals(dealt, parts, len(dealt.groups))
            mend = Window.of(alias, offsets[parts.pages], parts.slots[None, :], runtime.device)
        self.announce(dealt, serves)
        for turn, (first, last) in enumerate(dealt.groups):
            size = sum(mover.layer_bytes[first:last])
            if not convoy.admit(size * len(mine)):
                return False, ()
            with runtime.on(self.pushes):
                if serves and size:
                    kernels.fused_read_push(window, tables[turn], pads, rank=self.group.rank, signal=self.group.rank, blocks=mover.blocks)
                    taken.group += size * len(mine)
                convoy.add(runtime.mark(), nbytes=size * len(mine))
            with runtime.on(mover.stream):
                if turn == 0:
                    arrivals.expect(self.announced(dealt, parts))
                if size:
                    arrivals.wait(turn)
                    kernels.page_mend(mend, mover.table(first, last), arrivals.starts, arrivals.status[turn], rank=0, blocks=mover.blocks)
                convoy.add(runtime.mark(), layers=last)
        whole = convoy.drain()
        with runtime.on(mover.stream):
            lost = arrivals.account([sum(mover.layer_bytes[first:last]) * parts.lengths() for first, last in dealt.groups], taken)
        return whole, lost

    def _pushed_to(self, dealt: Deal, serves: list[int], first: int, last: int) -> LayerGroup:
        """These layers' tensors of all ranks that are served, on the device; kept, as they are the same for every load."""
        served = [(dealt.seats[seat].rank, dealt.seats[seat].reach) for seat in serves]
        key = (first, last, *((rank, reach.card.token) for rank, reach in served if reach is not None))
        made = self._tables.get(key)
        if made is None:
            part = self.mover.planes(first, last)
            bases = np.zeros((self.group.world, len(part.which)), np.int64)
            for rank, reach in served:
                assert reach is not None
                assert reach.planes is not None
                bases[rank] = reach.planes[part.which]
            made = LayerGroup.of(part.object_offset, part.nbytes, part.stride, bases, device=self.mover.runtime.device)
            while len(self._tables) >= TABLES_MAX:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = made
        return made

    # -- what fused and staged rounds have in common -----------------------------------------------------------------------------------

    def serves(self, dealt: Deal, seat: int, *, staged: bool) -> bool:
        """Whether this rank pushes to another: it wants something of the window, and can be reached."""
        reach = dealt.seats[seat].reach
        if reach is None or not reach.pad or (reach.planes is None and not staged) or (staged and not reach.staging):
            return False
        return dealt.wants_from(seat, dealt.me)

    def slots_for(self, dealt: Deal, pages: I64, serves: list[int]) -> I64:
        """int64[world, n]: where each served rank wants these pages."""
        slots = np.full((self.group.world, len(pages)), -1, np.int64)
        for seat in serves:
            slots[dealt.seats[seat].rank] = dealt.slots_of(seat, pages)
        return slots

    def pads_of(self, dealt: Deal, seats: list[int]) -> Pads:
        """The pads of these seats with the tags of their loads, on the device."""
        addresses, tags = np.zeros(self.group.world, np.int64), np.zeros(self.group.world, np.int64)
        for seat in seats:
            reach = dealt.seats[seat].reach
            assert reach is not None
            addresses[dealt.seats[seat].rank], tags[dealt.seats[seat].rank] = reach.pad, tag_of(dealt.seats[seat].sequence)
        return Pads.of(addresses, self.mover.runtime.device, tags=tags)

    def arrivals(self, dealt: Deal, parts: Parts, turns: int) -> Arrivals:
        """What this rank waits for in a round of so many turns."""
        seats = [dealt.seats[owner] for owner in parts.owners]
        ranks = np.array([seat.rank for seat in seats], np.int64)
        blocks = np.array([1 if seat.reach is None else seat.reach.card.blocks for seat in seats], np.int64)
        wanted = self.arrived[ranks] + blocks * np.arange(1, turns + 1)[:, None]
        polls = self.pad.polls(self.group.patience_seconds)
        return Arrivals(self.mover.kernels, parts, dealt.me, self.pad.addresses(ranks), wanted, polls)

    def announce(self, dealt: Deal, serves: list[int]) -> None:
        """Before the first push."""
        assert self._board is not None
        self._board.announce(dealt.digest, sum(1 << dealt.seats[seat].rank for seat in serves))

    def announced(self, dealt: Deal, parts: Parts) -> list[bool]:
        """Of each part's owner, whether it deals as this rank does and pushes to it. Waits for those who have not said so yet."""
        assert self.peers is not None
        bit, until, pause = 1 << self.group.rank, time.monotonic() + self._patience, LOOK_SECONDS[0]
        while True:
            said = [dealt.seats[owner].board.announced(dealt.digest) for owner in parts.owners]
            silent = [owner for owner, serves in zip(parts.owners, said, strict=True) if serves is None]
            if time.monotonic() > until or not any(not self.peers.gone(dealt.seats[owner].rank) for owner in silent):
                return [serves is not None and bool(serves & bit) for serves in said]
            time.sleep(pause)
            pause = min(pause * 2, LOOK_SECONDS[1])
