"""What a pool has to tell a master: which keys came and went, per tier, in order, until somebody takes it away.

Theory of operation. The pool's state machine drops one entry per batch in here when objects become visible or invisible: nothing is looked
up, so a put pays for one append. `take` makes the entries into one change per (namespace, key, tier), the last word of each. Keys that came
are read from the index then: an entry that has gone meanwhile, or is another key's by now, has its own later word in here, so what is read
is either still true or corrected by the same or the next `take`. Keys that went are copied when they go, since their entry is used again.

Bounded: `KEYS_MAX` keys. Beyond that all is forgotten and ``overflow`` is set: whoever tells the master must then send everything again. So
is it after a flush of a large namespace, where that is cheaper than a million removals.

Cost: 1 us a batch when it is put, a few passes over the keys when it is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from umbp.types import I64, U8, U32, U64, Mask, Tier

KEYS_MAX = 1 << 18
FLUSH_KEYS_MAX = 1 << 15  # removals of one flush; more is an overflow


@dataclass(frozen=True, slots=True)
class Changes:
    """One change a key and tier: ``words`` (n, 4), ``numbers`` (n,) of namespaces, ``sizes`` (n,) bytes, ``tiers``, ``present`` (n,)."""

    words: U64
    numbers: U32
    sizes: I64
    tiers: U8
    present: U8

    def __len__(self) -> int:
        return len(self.words)

    def part(self, start: int, stop: int) -> Changes:
        """Some of them."""
        which = slice(start, stop)
        return Changes(self.words[which], self.numbers[which], self.sizes[which], self.tiers[which], self.present[which])


class Outbox:
    """``entries`` is the index: words 0 to 3 the key, word 4 size << 32 | namespace number."""

    def __init__(self, entries: U64) -> None:
        self._entries = entries
        self._batches: deque[tuple[I64 | U64, int, bool]] = deque()  # ids that came, or rows (n, 5) that went or came elsewhere; tier
        self.keys = 0
        self.overflow = True  # nobody has been told anything

    def __repr__(self) -> str:
        return f"<Outbox {self.keys} keys in {len(self._batches)} batches{', overflow' if self.overflow else ''}>"

    def came(self, ids: I64) -> None:
        """These entries of DRAM are visible."""
        if not self.overflow and self._room(len(ids)):
            self._batches.append((ids, Tier.DRAM, True))

    def went(self, ids: I64) -> None:
        """These entries of DRAM are about to be invisible."""
        if not self.overflow and self._room(len(ids)):
            self._batches.append((self._entries[ids, :5], Tier.DRAM, False))

    def told(self, rows: U64, tier: Tier, *, present: bool) -> None:
        """Keys came or went in another tier: (n, 5) words, the key and size << 32 | namespace number."""
        if not self.overflow and self._room(len(rows)):
            self._batches.append((rows, tier, present))

    def flushed(self, ids: I64) -> None:
        """All of a namespace is about to go: its keys may come again before these entries are cleaned up."""
        if len(ids) > FLUSH_KEYS_MAX:
            self.forget()
        else:
            self.went(ids)

    def forget(self) -> None:
        """Everything has to be told again."""
        self._batches.clear()
        self.keys, self.overflow = 0, True

    def begin(self) -> None:
        """Somebody tells everything from now on; what changes after this is in here."""
        self._batches.clear()
        self.keys, self.overflow = 0, False

    def take(self, keys_max: int, live: Callable[[I64], Mask]) -> Changes:
        """The oldest changes, about ``keys_max`` at most, as one each. ``live``: which of these ids are visible now."""
        rows: list[U64] = []
        tiers, present, count, came_only = [], [], 0, True
        while self._batches and (not count or count + len(self._batches[0][0]) <= keys_max):
            what, tier, here = self._batches.popleft()
            self.keys -= len(what)
            if what.ndim == 1:
                ids = what.astype(np.int64)
                what = self._entries[ids[live(ids)], :5]
            else:
                came_only = False
            rows.append(what.astype(np.uint64))
            count += len(what)
            tiers.append(np.full(len(what), tier, np.uint8))
            present.append(np.full(len(what), here, np.uint8))
        if not rows:
            none = np.empty(0, np.uint8)
            return Changes(np.empty((0, 4), np.uint64), np.empty(0, np.uint32), np.empty(0, np.int64), none, none)
        if came_only:  # as long as nothing has gone, nothing has come twice: the sort is saved
            return _changes(np.concatenate(rows), np.concatenate(tiers), np.concatenate(present))
        return _last_words(np.concatenate(rows), np.concatenate(tiers), np.concatenate(present))

    def _room(self, count: int) -> bool:
        if self.keys + count > KEYS_MAX:
            self.forget()
            return False
        self.keys += count
        return count > 0


def _last_words(rows: U64, tiers: U8, present: U8) -> Changes:
    """One change a (key, namespace, tier), the last of each, in the order of these."""
    whole = np.concatenate([rows, tiers.astype(np.uint64)[:, None]], axis=1)
    names = np.ascontiguousarray(whole[::-1]).view(np.dtype((np.void, whole.shape[1] * 8))).reshape(-1)
    _, last = np.unique(names, return_index=True)
    keep = np.sort(len(rows) - 1 - last)
    return _changes(rows[keep], tiers[keep], present[keep])


def _changes(rows: U64, tiers: U8, present: U8) -> Changes:
    place = rows[:, 4]
    numbers, sizes = (place & np.uint64(0xFFFF_FFFF)).astype(np.uint32), (place >> np.uint64(32)).astype(np.int64)
    return Changes(np.ascontiguousarray(rows[:, :4]), numbers, sizes, tiers, present)
