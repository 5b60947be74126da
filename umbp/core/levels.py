"""Levels of the DRAM: near memory above far, in one segment with one index, one eviction policy, one set of quotas.

Theory of operation. Regions of the segment (`core.allocator`) that name a level make a chain, first to last; each is of one level, and each
page lies in one region. Which, is nobody's business but the pool's: a page is found, leased, removed and flushed as ever.

    put       to the first level that has room; within it near its writer, else to the region that is filled least for its size and weight.
              What finds no room there is put into the next: nothing is refused or dropped that there is room for elsewhere
    offload   from a level above its high mark, or that was found full: what the eviction policy would let go first of it, down to the
              low mark, copied to the next level that has room
    promote   what a request asked for and lies below the first level is copied there, up to its high mark, if need be after an offload
    evict     only where all of it is full, and from the last level as long as something can go there

A move, a portion at a time, is a copy and one step of the state machine:

    planned --bytes copied, in a thread--> settled: where nothing has happened to it, a page is at its new place from one store to the next
                                           (`IndexWriter.relocate`); else it stays, and the copy is nothing

Its target is memory that the pool has reserved from itself, as any writer does: a crash leaves an orphan of nobody, which the next start
gives back, and the pages where they were. The source is not held meanwhile: what is leased, pinned, claimed, removed or evicted when the
copy is done stays what it is, so a move delays nobody and loses nothing. For a reader without a lease a moved page is one whose version has
changed under him: he takes it again, from where it is now. Who looked a page up and then asks for a lease, gets it with a version from
before the move too (`Objects.same`), and takes the place from the index once he has it. A checksum stays with its page.

What it costs: two passes over a page's bytes, at most ``move_rate`` a second, one entry id a page of the portion meanwhile, and eight bytes
an entry id. With one level all of this is nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from umbp.core.allocator import rounded
from umbp.core.objects import LIVE, RESERVED, Account, Objects
from umbp.core.room import Room
from umbp.policies.base import CHOSEN_MAX
from umbp.store.index import W_SUM, place_word
from umbp.types import F64, I64, U64, Mask

PORTION_BYTES = 4 << 20  # 1 ms of copying
PORTION_KEYS = 512
ASKED_MAX = 64  # requests whose pages may come up
FREE_IDS = 8  # of these one in so many may be used by a move


@dataclass(slots=True)
class Level:
    """Regions of one speed: ``regions`` (n,) which they are.

    ``starved``: bytes of an object that found no room here, or 0. ``stop``: the share at which the offload that goes on ends, or None.
    ``chosen``: pages that go down next, with version and time of last use when they were chosen.
    """

    regions: Mask
    starved: int = 0
    stop: float | None = None
    chosen: tuple[I64, U64, F64] | None = None
    offloaded_pages: int = 0
    offloaded_bytes: int = 0
    promoted_pages: int = 0  # that came up from here
    spilled_pages: int = 0  # put below for want of room here


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Pages of ``size`` bytes to copy from offsets ``sources`` to ``targets``, (n,) each, to level ``to``, and from which each.

    ``entries``: the reserved ones that the targets are of.
    """

    size: int
    to: int
    ids: I64
    versions: U64
    sources: I64
    entries: I64
    targets: I64
    levels: I64

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return self.size * len(self.ids)


@dataclass(slots=True)
class Levels:
    """Of one pool. ``high``, ``low``: shares of a level between which it is offloaded. ``promotes``: what is asked for comes up again."""

    objects: Objects
    room: Room
    limbo: Callable[[int], Account]
    unsummed: Callable[[I64], None]
    high: float = 0.9
    low: float = 0.8
    promotes: bool = True
    every: list[Level] = field(default_factory=list)
    open: list[Move] = field(default_factory=list)
    _of_region: I64 = field(init=False)
    _asked: deque[tuple[I64, U64]] = field(default_factory=lambda: deque(maxlen=ASKED_MAX))

    def __post_init__(self) -> None:
        self._of_region = np.array([region.level for region in self.objects.allocator.regions], np.int64)
        self.every = [Level(self._of_region == level) for level in range(int(self._of_region.max()) + 1)]
        if len(self.every) > 1:
            self.objects.born = np.zeros(self.objects.capacity, np.uint64)
            self.room.last, self.room.placed = self.every[-1].regions, self._placed
            self.objects.asked = self._note if self.promotes else None

    def __repr__(self) -> str:
        return "<Levels " + ", ".join(f"{self.used_bytes(at)} of {self.capacity_bytes(at)}" for at in range(len(self.every))) + ">"

    # -- what there is -----------------------------------------------------------------------------------------------------------------

    def capacity_bytes(self, level: int) -> int:
        """Bytes of this level."""
        return sum(size for size, mine in zip(self.objects.allocator.sizes, self.every[level].regions, strict=True) if mine)

    def used_bytes(self, level: int) -> int:
        """Bytes of it that are not free."""
        free = self.objects.allocator.free_by_region
        return self.capacity_bytes(level) - sum(size for size, mine in zip(free, self.every[level].regions, strict=True) if mine)

    def levels_of(self, ids: I64) -> I64:
        """The level that each of these objects lies in."""
        return self._levels_at(self.objects.offset[ids])

    @property
    def moving_keys(self) -> int:
        """Entries that are targets of moves."""
        return sum(len(move.ids) for move in self.open)

    @property
    def moving_bytes(self) -> int:
        """Their bytes."""
        return sum(move.size_bytes for move in self.open)

    # -- what moves --------------------------------------------------------------------------------------------------------------------

    def next(self, now: float) -> Move | None:
        """The next portion, to be copied and then settled; None: there is nothing to move, or no room for it now."""
        if len(self.every) == 1:
            return None
        for _ in range(2):  # what finds no room above may have something go down for it
            for level in range(len(self.every) - 1):
                if self._wants_offload(level) and (move := self._down(now, level)) is not None:
                    return move
            if (move := self._up()) is not None:
                return move
        return None

    def settle(self, move: Move, *, copied: bool) -> int:
        """Its bytes are there, or not (``copied``): list the pages there that are still what they were; how many."""
        objects = self.objects
        self.open.remove(move)
        good = self._bare(move.ids) & (objects.table.versions_of(move.ids) == move.versions)
        good &= copied
        objects.claims.refresh()
        if (claimed := objects.claims.among(move.ids)) is not None:
            good &= ~claimed
        ids = move.ids[good]
        objects.relocate(ids, move.entries[good])
        objects.abandon(move.entries[~good])
        self.unsummed(ids[objects.table.entries[ids, W_SUM] == 0])
        for level in np.unique(move.levels[good]).tolist():
            here, count = self.every[level], int(np.count_nonzero(good & (move.levels == level)))
            if level < move.to:
                here.offloaded_pages += count
                here.offloaded_bytes += count * move.size
            else:
                here.promoted_pages += count
        return len(ids)

    def check(self) -> None:
        """Targets are reserved memory where they are said to be."""
        for move in self.open:
            assert (self.objects.state[move.entries] == RESERVED).all(), "a target is no reserved entry"
            assert np.array_equal(self.objects.offset[move.entries], move.targets), "a target is elsewhere"
            assert (self._levels_at(move.targets) == move.to).all(), "a target is on another level"

    def _wants_offload(self, level: int) -> bool:
        here, capacity = self.every[level], max(1, self.capacity_bytes(level))
        fill = self.used_bytes(level) / capacity
        if fill > self.high:
            here.stop = self.low
        elif here.starved and not self.objects.allocator.has_room(here.starved, level):  # none in one piece: as much as between the marks
            here.stop = min(self.low, fill - (self.high - self.low))
        here.starved = 0
        if here.stop is not None and fill <= here.stop:
            here.stop = here.chosen = None
        return here.stop is not None

    def _down(self, now: float, level: int) -> Move | None:
        here, objects = self.every[level], self.objects
        if here.chosen is None:
            ids = self.room.among(now, CHOSEN_MAX, here.regions)
            here.chosen = ids, objects.table.versions_of(ids), objects.accessed_at[ids]
        ids, versions, times = here.chosen
        here.chosen = None
        good = self._bare(ids) & (objects.table.versions_of(ids) == versions) & (objects.accessed_at[ids] <= times)
        ids = ids[good]
        if not len(ids):
            return None
        size = int(objects.size[ids[0]])
        mine, move = ids[objects.size[ids] == size], None
        excess = self.used_bytes(level) - int((here.stop or 0.0) * self.capacity_bytes(level))
        for lower in range(level + 1, len(self.every)):
            if (move := self._begin(mine, lower, -(-excess // rounded(size)))) is not None:
                break
        rest = ids[~np.isin(ids, move.ids)] if move is not None else ids
        if len(rest):
            here.chosen = rest, objects.table.versions_of(rest), objects.accessed_at[rest]
        return move

    def _up(self) -> Move | None:
        """What was asked for last comes first. Where there is no room for it, the first level is offloaded."""
        objects, room = self.objects, int(self.high * self.capacity_bytes(0)) - self.used_bytes(0)
        while self._asked:
            ids, versions = self._asked.pop()
            ids = ids[self._bare(ids) & objects.same(ids, versions)]
            ids = ids[self.levels_of(ids) > 0]
            if not len(ids):
                continue
            size = int(objects.size[ids[0]])
            if room < rounded(size):
                self.every[0].stop = self.low
                self._asked.append((ids, objects.table.versions_of(ids)))
                return None
            move = self._begin(ids[objects.size[ids] == size], 0, room // rounded(size))
            if move is None:
                continue  # there is room, but not in one piece
            rest = ids[~np.isin(ids, move.ids)]
            if len(rest):
                self._asked.append((rest, objects.table.versions_of(rest)))
            return move
        return None

    def _begin(self, ids: I64, to: int, pages_max: int) -> Move | None:
        """Memory on that level for the first of these pages, of one size, so many at most; None if there is none."""
        objects, size = self.objects, int(self.objects.size[ids[0]])
        free = (objects.free_ids - objects.passage.ids) // FREE_IDS
        count = min(len(ids), pages_max, PORTION_KEYS, max(1, PORTION_BYTES // rounded(size)), free)
        if count <= 0:
            return None
        targets = objects.allocator.allocate(size, count, level=to)
        if not len(targets):
            return None
        ids, account = ids[: len(targets)], self.limbo(size)
        entries = objects.take(np.zeros((len(ids), 4), np.uint64), place_word(account.number, size), targets, 0)
        objects.reserve(account, entries, targets)
        sources = objects.offset[ids]
        move = Move(size, to, ids, objects.table.versions_of(ids), sources, entries, targets, self._levels_at(sources))
        self.open.append(move)
        return move

    # -- what it hears -----------------------------------------------------------------------------------------------------------------

    def _note(self, ids: I64) -> None:
        """A request asked for these objects."""
        low = np.unique(ids)
        low = low[(self.levels_of(low) > 0) & ~self.objects.passing(low)]
        if len(low):
            self._asked.append((low, self.objects.table.versions_of(low)))

    def _placed(self, offsets: I64, size: int) -> None:
        """New objects of this size were given this memory."""
        levels = self._levels_at(offsets)
        for at in range(int(levels.max(initial=0))):
            self.every[at].starved = size
            self.every[at].spilled_pages += int(np.count_nonzero(levels > at))

    def _levels_at(self, offsets: I64) -> I64:
        found: I64 = self._of_region[self.objects.allocator.regions_of(offsets)]
        return found

    def _bare(self, ids: I64) -> Mask:
        """Visible ones that nobody holds where they are."""
        objects = self.objects
        mask: Mask = (objects.state[ids] == LIVE) & (objects.leases[ids] == 0) & (objects.pins[ids] == 0) & (objects.row[ids] >= 0)
        return mask & ~objects.passing(ids)


__all__ = ["Level", "Levels", "Move"]
