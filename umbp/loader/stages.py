"""A round on GPUs through staging: for ranks whose tensors others cannot map.

An owner pushes its window piece by piece into staging buffers, which can always be mapped; a reader scatters each piece into its own slots
and says that the places are free. A *unit* is one layer of one piece of every window. Each reader's buffer is cut into two halves for
alternating units, and each half into one region an owner, in bytes and the same in all of them, so all ranks know where every page lies
without a word. Per unit and rank, on one stream, and so in this order on all of them:

    wait_signal     that the readers have freed the half, from the third unit on; who has not is pushed to no more
    gather_push     the own piece into all readers' regions
    wait_signal     for the others' pieces; who is lost stays lost
    stage_scatter   what has arrived, into the own slots
    page_mend       what a lost owner should have brought, over what was scattered of it
    stage_free      to the owners

No unit waits for a later one of another rank, so ranks cannot wait for each other in a ring.

The host looks at who has freed before it launches the next push into a half, since that decides to whom: `Load.wait` may therefore block
the host for a layer that is some units away. That is the price of the detour; the fused way has no such look. Nothing but this rank's own
kernels writes into its slots; that late pushes do not land in a half that is in use again is the gates' doing, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from umbp.kernels.staging import ALIGN, Staging
from umbp.kernels.tables import Pads, Window
from umbp.loader.convoy import Convoy
from umbp.loader.copies import Taken
from umbp.loader.deals import Deal, Parts
from umbp.loader.group import Alone
from umbp.types import I64

if TYPE_CHECKING:
    from umbp.loader.pushes import PushParty

HALVES = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """The same pages of each layer: of the own window (indices into the windows' pages), and of what this rank wants (`Parts`)."""

    mine: I64
    parts: Parts
    place: I64  # of each of parts.pages: its number in its owner's piece


def regions(dealt: Deal, page_bytes: list[int]) -> tuple[int, int]:
    """(bytes of a region, pages of any layer that fit one), the same for all ranks of the round. Alone if no page fits.

    Pages lie at multiples of their own size, which differs from layer to layer; so a region may lose the part of one at its begin.
    """
    owners = max(1, dealt.readers)
    smallest = min(seat.reach.card.staging_bytes for seat in dealt.seats if seat.reach is not None)
    size = smallest // (HALVES * owners)
    pages = size // max(page_bytes) - 1
    if pages < 1:
        raise Alone(
            f"staging of {smallest} bytes does not hold two pages of {max(page_bytes)} bytes for each of {owners} ranks, twice: "
            "raise Group.staging_bytes"
        )
    return size, pages


def pieces(dealt: Deal, parts: Parts, pages: int) -> list[Piece]:
    """Every window in pieces of so many pages, numbered alike on all ranks."""
    windows = {seat: dealt.windows.of(seat) for seat in range(len(dealt.seats))}
    count = max(-(-len(window) // pages) for window in windows.values())
    found = []
    for number in range(count):
        first, last = number * pages, (number + 1) * pages
        chosen, starts, places = [], [0], []
        for word, owner in enumerate(parts.owners):
            wanted = parts.pages[parts.starts[word] : parts.starts[word + 1]]
            place = np.searchsorted(windows[owner], wanted)
            inside = (place >= first) & (place < last)
            chosen.append(wanted[inside])
            places.append(place[inside] - first)
            starts.append(starts[-1] + len(chosen[-1]))
        every = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        wants = Parts(parts.owners, np.array(starts, np.int64), every, dealt.slots_of(dealt.me, every))
        place = np.concatenate(places).astype(np.int64) if places else np.empty(0, np.int64)
        found.append(Piece(windows[dealt.me][first:last], wants, place))
    return found


class StagedRound:
    """One round of one rank, through staging."""

    def __init__(self, party: PushParty, dealt: Deal, parts: Parts, offsets: I64, alias: int) -> None:
        self.party, self.dealt, self.parts, self.offsets, self.alias = party, dealt, parts, offsets, alias
        self.mover, self.kernels, self.runtime = party.mover, party.mover.kernels, party.mover.runtime
        self.planes = [self.mover.planes(layer, layer + 1) for layer in range(len(party.mover.layer_bytes))]
        sizes = [int((-(-part.nbytes // ALIGN) * ALIGN).sum()) for part in self.planes]
        self.region_bytes, region = regions(dealt, sizes)
        self.pieces = pieces(dealt, parts, region)
        self.owner_number = {seat: number for number, seat in enumerate(s for s in range(len(dealt.seats)) if dealt.seats[s].helps)}
        self.serves = [seat for seat in range(len(dealt.seats)) if party.serves(dealt, seat, staged=True)]
        self._stagings: dict[int, Staging] = {}
        self._windows: dict[tuple[int, ...], Window] = {}

    def __repr__(self) -> str:
        return f"<StagedRound of {len(self.pieces)} pieces a layer, regions of {self.region_bytes} bytes>"

    def staging(self, layer: int) -> Staging:
        """The buffers of all ranks as places of this layer's pages."""
        if layer not in self._stagings:
            part, bases = self.planes[layer], np.zeros(self.party.group.world, np.int64)
            for seat in self.dealt.seats:
                if seat.reach is not None:
                    bases[seat.rank] = seat.reach.staging
            self._stagings[layer] = Staging.of(
                part.object_offset,
                part.nbytes,
                part.stride,
                part.base,
                staging_base=bases,
                staging_bytes=min(seat.reach.card.staging_bytes for seat in self.dealt.seats if seat.reach is not None),
                rank=self.party.group.rank,
                device=self.runtime.device,
            )
        return self._stagings[layer]

    def first_place(self, half: int, owner: int, page_bytes: int) -> int:
        """Where an owner's region of a half begins, in pages of so many bytes."""
        region = half * max(1, self.dealt.readers) + self.owner_number.get(owner, 0)
        return -(-region * self.region_bytes // page_bytes)

    def pushed(self, number: int, half: int, serves: tuple[int, ...], page_bytes: int) -> Window:
        """The own piece, into its region of those that are still served."""
        key = (0, number, half, page_bytes, *serves)
        if key not in self._windows:
            mine = self.pieces[number].mine
            slots = self.party.slots_for(self.dealt, mine, list(serves))
            places = np.where(slots >= 0, self.first_place(half, self.dealt.me, page_bytes) + np.arange(len(mine)), -1)
            self._windows[key] = Window.of(self.alias, self.offsets[mine], places, self.runtime.device)
        return self._windows[key]

    def scattered(self, number: int, half: int, staging: Staging) -> Window:
        """What this rank wants of a piece, out of its own buffer."""
        key = (1, number, half, staging.page_bytes)
        if key not in self._windows:
            piece = self.pieces[number]
            firsts = np.array([self.first_place(half, owner, staging.page_bytes) for owner in piece.parts.owners], np.int64)
            self._windows[key] = staging.window(np.repeat(firsts, piece.parts.lengths()) + piece.place, piece.parts.slots)
        return self._windows[key]

    def mended(self, number: int) -> tuple[Window, torch.Tensor]:
        """The same out of the segment, and where each owner's part begins."""
        piece, key = self.pieces[number], (2, number)
        if key not in self._windows:
            self._windows[key] = Window.of(self.alias, self.offsets[piece.parts.pages], piece.parts.slots[None, :], self.runtime.device)
        return self._windows[key], torch.from_numpy(piece.parts.starts).to(self.runtime.device)


class Freed:
    """Which readers have freed their halves, as the writer sees it."""

    def __init__(self, party: PushParty, dealt: Deal, serves: list[int]) -> None:
        self._kernels, self._polls = party.mover.kernels, party.pad.polls(party.group.patience_seconds)
        channels = np.array([party.group.world + dealt.seats[seat].rank for seat in serves], np.int64)
        self._base = party.arrived[channels]
        self._addresses = party.pad.addresses(channels)
        self._status = torch.zeros(len(serves), dtype=torch.int32, device=party.mover.runtime.device)
        self._serves = serves

    def still_served(self, units: int) -> tuple[int, ...]:
        """Who has freed so many units, or does within the patience."""
        wanted = torch.from_numpy(self._base + units).to(self._status.device)
        self._kernels.wait_signal(self._addresses, wanted, self._status, polls=self._polls)
        status = self._status.tolist()
        return tuple(seat for seat, late in zip(self._serves, status, strict=True) if not late)


def stage(
    party: PushParty, dealt: Deal, parts: Parts, offsets: I64, alias: int, convoy: Convoy, taken: Taken
) -> tuple[bool, tuple[int, ...]]:
    """One round, queued on the mover's stream. Whether it is done, and the seats that were lost. Alone if staging is too small."""
    made = StagedRound(party, dealt, parts, offsets, alias)
    mover, kernels, runtime, group = made.mover, made.kernels, made.runtime, party.group
    with runtime.on(mover.stream):
        arrivals = party.arrivals(dealt, parts, len(mover.layer_bytes) * len(made.pieces))
        freed = Freed(party, dealt, made.serves)
        owners: Pads = party.pads_of(dealt, [owner for owner in parts.owners if _reached(dealt, owner)])
        party.announce(dealt, made.serves)
        serves, turn = tuple(made.serves), 0
        sizes: list[I64] = []
        for layer, layer_bytes in enumerate(mover.layer_bytes):
            for number, piece in enumerate(made.pieces if layer_bytes else ()):
                if not convoy.admit(layer_bytes * len(piece.mine)):
                    return False, ()
                half = turn % HALVES
                if turn >= HALVES and serves:
                    serves = tuple(seat for seat in freed.still_served(turn - HALVES + 1) if seat in serves)
                staging = made.staging(layer)
                if serves:
                    pads, window = party.pads_of(dealt, list(serves)), made.pushed(number, half, serves, staging.page_bytes)
                    kernels.gather_push(window, staging, pads, rank=group.rank, signal=group.rank, blocks=mover.blocks)
                    taken.group += layer_bytes * len(piece.mine)
                if turn == 0:
                    arrivals.expect(party.announced(dealt, parts))
                arrivals.wait(turn)
                if len(piece.parts.pages):
                    kernels.stage_scatter(made.scattered(number, half, staging), staging, blocks=mover.blocks)
                    mend, starts = made.mended(number)
                    kernels.page_mend(mend, mover.table(layer, layer + 1), starts, arrivals.status[turn], rank=0, blocks=mover.blocks)
                kernels.stage_free(staging, owners, rank=group.rank, signal=group.world + group.rank)
                convoy.add(runtime.mark(), nbytes=layer_bytes * len(piece.mine))
                sizes.append(layer_bytes * piece.parts.lengths())
                turn += 1
            convoy.add(runtime.mark(), layers=layer + 1)
        whole = convoy.drain()
        lost = arrivals.account(sizes, taken)
    return whole, lost


def _reached(dealt: Deal, owner: int) -> bool:
    reach = dealt.seats[owner].reach
    return reach is not None and bool(reach.pad)
