"""One round of a group load on the CPU: each rank stages its window for the others and pulls what it wants from theirs.

Theory of operation
-------------------
The exchange is a pull. An owner copies its window out of the segment, layer by layer, into the ring of its own area; a rank that wants
those pages copies them from there into its slots. Nobody ever writes into another rank's slots. So

*invariant 3* (nothing lands in a slot after `finish` returned) holds by construction: a rank's slots are written by its own load thread
alone, and `finish` waits for that thread. A push could not have it so cheaply: a peer that is stopped in the middle of a store into my
slots would have to be waited for, past any deadline. (On GPUs the kernels push, and pay for it with the protocol of `DESIGN.md`, 10.6.)

*Invariant 4* (every rank ends within its deadline, with the bytes or the exact pages missing) holds because nothing here waits for a peer
without a bound, and each wait that ends early has another way to the same bytes:

    an owner publishes nothing for its patience, has stopped, or is dead    the reader reads that owner's pages itself; the lease stands
    an owner overwrote a slot before or while it was read                   the reader reads that unit itself
    a reader does not copy for a patience                                   the owner stops waiting for it in this round, and goes on
    an owner believes other windows (it saw a rank that had moved on)       its digest differs: as if it had published nothing
    the deadline passes, or the load is cancelled                           this rank says that it stopped, and all its pages are missing

A *unit* is one layer of one chunk of a window: as many pages as fit a ring slot. A window of any size passes through a ring of any size,
and all ranks number the units alike from what the roster and the tables say. Pages that nobody but their owner wants are not staged.

One thread does all of it, a step of each kind in turn, so that no two ranks can wait for each other: a rank that waits for room in its
ring goes on pulling, and one that waits for a unit goes on staging.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import xxhash

from umbp.core.windows import Windows
from umbp.loader.area import RING_SLOTS, Area
from umbp.loader.copies import Copies, Taken
from umbp.loader.handles import Load
from umbp.loader.rows import Route
from umbp.types import I64, U8, Mask

IDLE_SECONDS = (50e-6, 500e-6)  # between two looks at the others' words: first, longest


@dataclass(frozen=True, slots=True)
class Window:
    """What passes through one owner's ring: indices of pages, ascending, so many a unit."""

    pages: I64
    unit_pages: int

    @property
    def chunks(self) -> int:
        """Units a layer."""
        return -(-len(self.pages) // self.unit_pages) if len(self.pages) else 0

    def chunk(self, number: int) -> slice:
        """Which of ``pages`` are in each unit of this number."""
        return slice(number * self.unit_pages, (number + 1) * self.unit_pages)


def shared_by(windows: Windows, owner: int) -> tuple[I64, I64]:
    """An owner's window as indices of pages: those that another rank wants, and those that only it wants."""
    mine = windows.of(owner)
    others = windows.position[:, mine] >= 0
    others[owner] = False
    shared = others.any(axis=0)
    return mine[shared], mine[~shared]


def digest(round_number: int, windows: Windows) -> int:
    """Of all that the units' numbers and contents follow from."""
    state = xxhash.xxh3_64(round_number.to_bytes(8, "little"))
    for part in (windows.pages, windows.owner, np.packbits(windows.position >= 0)):
        state.update(part.tobytes())
    return state.intdigest()


class Producer:
    """Stages this rank's window. ``readers``: area, and which chunks it wants, (chunks,) bool."""

    def __init__(self, area: Area, rank: int, round_number: int, window: Window, copies: Copies, patience: float) -> None:
        self.area = area
        self.rank = rank
        self.round = round_number
        self.window = window
        self.copies = copies
        self.patience = patience
        self.units = window.chunks * len(copies.planes)
        self.unit = 0
        self.readers: list[tuple[Area, Mask]] = []
        self._routes: list[list[Route]] = []
        self._own: list[tuple[I64, I64]] = []
        self._blocked_since = 0.0

    def plan(self, offsets: I64, wanted: I64, slots: I64) -> None:
        """``offsets``: of the window's pages in the segment. ``wanted``: of each, its index in this rank's ``slots``, or -1."""
        for number in range(self.window.chunks):
            part = self.window.chunk(number)
            self._routes.append(self.copies.route(offsets[part], np.arange(len(offsets[part]))))
            rows = np.flatnonzero(wanted[part] >= 0)
            self._own.append((rows, slots[wanted[part][rows]]))

    @property
    def layers_done(self) -> int:
        """Layers of which all that this rank wants of its own window is in its slots."""
        return self.unit // self.window.chunks if any(len(rows) for rows, _ in self._own) else len(self.copies.planes)

    def step(self, now: float, data: U8, taken: Taken) -> bool:
        """Stage one unit, if there is one and room for it."""
        if self.unit == self.units or not self._room(now):
            return False
        layer, chunk = divmod(self.unit, self.window.chunks)
        slot = self.area.slot(self.unit)
        self.area.begin(self.round, self.unit)
        taken.group += self.copies.stage(data, self._routes[chunk], layer, slot, self.window.unit_pages)
        self.area.publish(self.round, self.unit)
        rows, slots = self._own[chunk]
        if len(rows):
            self.copies.pull(slot, layer, self.window.unit_pages, rows, slots)
        self.unit += 1
        return True

    def _room(self, now: float) -> bool:
        """Whether all who want what is in the slot have it; a reader that takes too long is not asked again."""
        before = self.unit - RING_SLOTS
        if before < 0:
            return True
        chunk = before % self.window.chunks
        late = [reader for reader in self.readers if reader[1][chunk] and not reader[0].consumed(self.rank, self.round, before)]
        if not late:
            self._blocked_since = 0.0
            return True
        self._blocked_since = self._blocked_since or now
        if now - self._blocked_since < self.patience:
            return False
        areas = {id(area) for area, _ in late}
        self.readers = [reader for reader in self.readers if id(reader[0]) not in areas]
        self._blocked_since = 0.0
        return True


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank wants of one chunk: rows of the unit, slots, and the same pages in the segment."""

    chunk: int
    rows: I64
    slots: I64
    offsets: I64


class Source:
    """Pulls what one owner stages for this rank. ``lost`` once the owner is not waited for any more."""

    def __init__(self, area: Area, owner: int, round_number: int, window: Window, expected: int, patience: float) -> None:
        self.area = area
        self.owner = owner
        self.round = round_number
        self.window = window
        self.expected = expected
        self.patience = patience
        self.pieces: list[Piece] = []
        self.lost = ""
        self.layer = 0
        self._at = 0
        self._agreed = False
        self._newest = -1
        self._progress = 0.0
        self._routes: dict[int, list[Route]] = {}

    def plan(self, offsets: I64, wanted: I64, slots: I64) -> None:
        """As `Producer.plan`, with the owner's window."""
        for number in range(self.window.chunks):
            part = self.window.chunk(number)
            rows = np.flatnonzero(wanted[part] >= 0)
            if len(rows):
                self.pieces.append(Piece(number, rows, slots[wanted[part][rows]], offsets[part][rows]))

    def step(self, now: float, mine: Area, copies: Copies, data: U8, taken: Taken) -> bool:
        """Get one unit, if it can be had now."""
        if self.layer == len(copies.planes):
            return False
        piece = self.pieces[self._at]
        unit = self.layer * self.window.chunks + piece.chunk
        state = 1 if self.lost else self.area.state(self.round, unit)
        if state == 0 and not self._agrees():
            state = 1
        if state < 0 and not self._gave_up(now, unit):
            return False
        if state == 0:
            slot = self.area.slot(unit)
            taken.received += copies.pull(slot, self.layer, self.window.unit_pages, piece.rows, piece.slots)
            state = self.area.state(self.round, unit)
            self._progress = 0.0
        if state != 0:
            routes = self._routes.get(piece.chunk) or copies.route(piece.offsets, piece.slots)
            self._routes[piece.chunk] = routes
            taken.fallback += copies.load(data, routes, self.layer)
        mine.consume(self.owner, self.round, unit)
        self._at += 1
        if self._at == len(self.pieces):
            self._at, self.layer = 0, self.layer + 1
        return True

    def _agrees(self) -> bool:
        """Whether the owner takes the windows to be what this rank takes them to be; read after its first unit was seen."""
        if not self._agreed:
            self._agreed = self.area.digest == self.expected
            if not self._agreed:
                self.lost = "it believes other windows"
        return self._agreed

    def _gave_up(self, now: float, unit: int) -> bool:
        """Whether this owner's unit is not worth waiting for: it has stopped, or shows no progress for the patience."""
        if self.area.stopped(self.round):
            if self.area.state(self.round, unit) >= 0:  # it came between two looks, as the last one does
                return False
            self.lost = "it has stopped"
            return True
        newest = self.area.newest()
        if newest != self._newest or not self._progress:
            self._newest, self._progress = newest, now
        if now - self._progress < self.patience:
            return False
        self.lost = f"nothing came of it for {self.patience} s"
        return True


class Exchange:
    """One rank's part of one round, all planned."""

    def __init__(self, area: Area, producer: Producer, sources: list[Source], own: list[Route]) -> None:
        self.area = area
        self.producer = producer
        self.sources = sources
        self.own = own  # pages that only this rank wants
        self.own_layers = 0 if own else len(producer.copies.planes)

    def __repr__(self) -> str:
        return f"<Exchange of round {self.producer.round}: {self.producer.units} units to stage, {len(self.sources)} owners to pull from>"

    def run(self, load: Load, data: U8, taken: Taken) -> bool:
        """Until this rank has all its pages and has staged its window; False if it was cancelled or the deadline passed."""
        copies, layers = self.producer.copies, len(self.producer.copies.planes)
        idle = IDLE_SECONDS[0]
        if not load.claim():
            self.area.stop(self.producer.round)
            return False
        try:
            while load.layers_ready < layers or self.producer.unit < self.producer.units:
                now = time.monotonic()
                if load.cancelled or now > load.deadline:
                    return False
                worked = self.producer.step(now, data, taken)
                for source in self.sources:
                    worked |= source.step(now, self.area, copies, data, taken)
                if self.own_layers < layers:
                    taken.own += copies.load(data, self.own, self.own_layers)
                    self.own_layers += 1
                    worked = True
                load.read_bytes = taken.segment
                done = min([self.producer.layers_done, self.own_layers, *(source.layer for source in self.sources)])
                if done > load.layers_ready:
                    load.advance(done)
                idle = IDLE_SECONDS[0] if worked else min(idle * 2, IDLE_SECONDS[1])
                if not worked:
                    time.sleep(idle)
            return True
        finally:
            load.let_go()
            self.area.stop(self.producer.round)
