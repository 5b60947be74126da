"""Levels of the SSD tier: fast disks above slow ones, in one tier with one index, one eviction policy, one set of quotas and caps.

Theory of operation. Folders that name a level make a chain, in the order in which the levels are first named. A page is on one level at a
time, and which is nobody's business but the tier's: it is found, removed, flushed and counted as ever.

    write     to the first level that has room for the batch; within it by the striping policy, to which a disk of twice the weight is twice
              as large. A disk with no file left to begin hands on to the level below: a write drops nothing there is room for elsewhere
    offload   from a level above its high mark, or out of files: what the eviction policy would let go first of it, down to the low mark,
              copied to the next level that has room (`umbp.store.ssd_moving`)
    promote   what was read from a lower level, and is in DRAM still, is copied to the first one, while that has room
    evict     only where the last level is full too, by the policy, whatever the level

A copy gets a newer sequence number than what it is a copy of, and is listed when it is on disk for good; the old one is noted as dead after
that. So a crash leaves one of the two, or both, of which the newer counts. Nothing on disk says what level it is on: a folder may be moved
to another one between two starts.

With one level all of this is nothing: `for_write` gives back what it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from umbp.policies.base import CHOSEN_MAX, EvictionPolicy
from umbp.store.index import W_PLACE
from umbp.store.ssd_catalog import Catalog
from umbp.store.ssd_drive import AWAY, Drive
from umbp.store.ssd_format import BLOCK, padded
from umbp.store.ssd_ledger import Ledger, pages_bytes
from umbp.types import F64, I32, I64, U64, Mask


@dataclass(slots=True)
class Level:
    """Disks of one speed.

    ``starved``: a disk had no file to begin, though there was room in bytes. ``stop``: the share at which the offload that goes on ends, or
    None. ``chosen``: pages that go down next, with version and time of last use when they were chosen.
    """

    drives: list[Drive]
    starved: bool = False
    stop: float | None = None
    chosen: deque[tuple[int, int, float]] = field(default_factory=deque)
    offloaded_pages: int = 0
    offloaded_bytes: int = 0
    promoted_pages: int = 0  # that came up from here
    spilled_pages: int = 0  # written below for want of a file here

    @property
    def capacity_bytes(self) -> int:
        """Of pages as they lie on disk, over the disks that are there."""
        return sum(pages_bytes(drive.folder) for drive in self.drives if drive.state != AWAY)

    @property
    def used_bytes(self) -> int:
        """Of pages that are listed, and of what is on its way."""
        return sum(drive.folder.live_bytes + drive.waiting_bytes for drive in self.drives)

    @property
    def room_bytes(self) -> int:
        """What more may be written."""
        return self.capacity_bytes - self.used_bytes

    @property
    def keys(self) -> int:
        """Pages that are listed."""
        return sum(drive.folder.live_pages for drive in self.drives)


class Levels:
    """Of one tier. ``high``, ``low``: shares of a level between which it is offloaded. ``promotes``: what is read comes up again."""

    def __init__(self, drives: Sequence[Drive]) -> None:
        self.every = [Level([drive for drive in drives if drive.level == at]) for at in sorted({drive.level for drive in drives})]
        self.high, self.low = 0.9, 0.8
        self.promotes = False

    def __repr__(self) -> str:
        return "<Levels " + ", ".join(f"{level.used_bytes} of {level.capacity_bytes}" for level in self.every) + ">"

    def __len__(self) -> int:
        return len(self.every)

    # -- where to ----------------------------------------------------------------------------------------------------------------------

    def for_write(self, able: list[Drive], size_bytes: int) -> list[Drive]:
        """Those of these disks to write so many bytes to: the ones of the first level that has room for them."""
        if len(self.every) == 1:
            return able
        there = [(level, mine) for level in self.every if (mine := [drive for drive in able if drive in level.drives])]
        for level, mine in there:
            if level.room_bytes >= size_bytes:
                return mine
        return max(there, key=lambda pair: pair[0].room_bytes)[1]

    def below(self, now: float, level: int, size: int) -> list[tuple[Level, list[Drive]]]:
        """The levels under this one that can take pages of this size, and their disks that can, from above."""
        found = []
        for lower in self.every[level + 1 :]:
            able = [drive for drive in lower.drives if can_take(drive, now, size)]
            if able:
                found.append((lower, able))
        return found

    def spill(self, now: float, drive: Drive, size: int, todo: dict[Drive, list[tuple[Any, list[int]]]]) -> Drive | None:
        """A disk has no file for its records: they are another's from now on, of a level below, if there is one with room.

        Not where a file can be had for nothing: one in which no page is alive.
        """
        if len(self.every) == 1 or drive.folder.spent_or_none() is not None:
            return None
        waiting = sum(draft.blocks * BLOCK for draft, _ in todo[drive])
        longest = max(len(draft.bodies) for draft, _ in todo[drive])
        for lower, every in self.below(now, drive.level, size):
            able = [each for each in every if each.folder.record_pages(size) >= longest]
            if able and lower.room_bytes >= waiting:
                target = min(able, key=lambda each: each.waiting_bytes / (each.size_bytes * each.weight))
                moved, todo[drive] = todo[drive], []
                todo[target] = [*todo.get(target, ()), *moved]
                drive.waiting_bytes -= waiting
                target.waiting_bytes += waiting
                self.every[drive.level].starved = True
                self.every[drive.level].spilled_pages += sum(len(items) for _, items in moved)
                return target
        return None

    # -- what goes down ----------------------------------------------------------------------------------------------------------------

    def wants_offload(self, level: int) -> bool:
        """Whether pages of this level are to go down now."""
        if level + 1 >= len(self.every):
            return False
        here = self.every[level]
        fill = here.used_bytes / max(1, here.capacity_bytes)
        if fill > self.high:
            here.stop = self.low
        elif here.starved:  # its files are used up: as much is to go as between the marks
            here.stop = min(self.low, fill - (self.high - self.low))
        here.starved = False
        if here.stop is not None and (fill <= here.stop or not here.keys):
            here.stop = None
            here.chosen.clear()
        return here.stop is not None

    def next_down(self, catalog: Catalog, ledger: Ledger, level: int) -> I64:
        """Pages of one namespace and size that go down next, first to go first; none if there are none."""
        here = self.every[level]
        if not here.chosen:
            self.put_back(catalog, level, self._coldest(catalog, ledger, level, CHOSEN_MAX))
        if not here.chosen:
            return np.empty(0, np.int64)
        ids = np.array([each[0] for each in here.chosen], np.int64)
        versions: U64 = np.array([each[1] for each in here.chosen], np.uint64)
        times: F64 = np.array([each[2] for each in here.chosen])
        good = catalog.same(ids, versions) & (catalog.accessed_at[ids] <= times)
        good[good] = self._on(catalog, ledger, level, ids[good])
        ids = ids[good]
        places = catalog.table.entries[ids, W_PLACE]
        mine: Mask = places == places[:1]
        rest = set(ids[~mine].tolist())
        here.chosen = deque(each for each in here.chosen if each[0] in rest)
        chosen: I64 = ids[mine]
        return chosen

    def put_back(self, catalog: Catalog, level: int, ids: I64) -> None:
        """These go down next."""
        versions, times = catalog.table.versions_of(ids), catalog.accessed_at[ids]
        self.every[level].chosen.extendleft(reversed(list(zip(ids.tolist(), versions.tolist(), times.tolist(), strict=True))))

    def levels_of(self, catalog: Catalog, ledger: Ledger, ids: I64 | I32) -> I64:
        """The level that each of these listed pages is on."""
        found: I64 = _levels_of_files(catalog, ledger)[catalog.file_numbers(ids)]
        return found

    def _on(self, catalog: Catalog, ledger: Ledger, level: int, ids: I64) -> Mask:
        mask: Mask = self.levels_of(catalog, ledger, ids) == level
        return mask

    def _coldest(self, catalog: Catalog, ledger: Ledger, level: int, count: int) -> I64:
        """What the eviction policy would let go first of this level."""
        here = _levels_of_files(catalog, ledger) == level
        policy: EvictionPolicy = catalog.policy

        def eligible(ids: I32) -> Mask:
            mask: Mask = here[catalog.file_numbers(ids)]
            return mask

        return policy.victims(eligible, count).astype(np.int64)


def _levels_of_files(catalog: Catalog, ledger: Ledger) -> I64:
    """The level of each file, by its number."""
    levels = np.zeros(max(catalog.files, default=0) + 1, np.int64)
    for number, file in catalog.files.items():
        levels[number] = ledger.drive_of[id(file)].level
    return levels


def shares(disks: list[Drive]) -> tuple[F64, F64]:
    """What a striping policy is shown of disks: how large each is, by its weight too, and the bytes of pages that it holds; (n,) each."""
    sizes, used = [drive.size_bytes * drive.weight for drive in disks], [drive.folder.live_bytes for drive in disks]
    return np.array(sizes, np.float64), np.array(used, np.float64)


def can_take(drive: Drive, now: float, size: int) -> bool:
    """Whether a disk can be given pages of this size now."""
    return drive.may_write(now) and bool(drive.folder.record_pages(size)) and padded(size) <= pages_bytes(drive.folder)
