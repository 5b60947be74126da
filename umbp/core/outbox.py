"""What a pool has to tell a master: which keys came and went, per tier, until somebody takes it away.

Theory of operation. The pool's state machine drops one entry per batch in here when objects become visible or invisible: nothing is looked
up, so a put pays for one append. `take` gives a lot of them, first what went and then what came; a key that stands in both is held. So
nothing of DRAM needs to be compared or sorted. Keys that came are read from the index when they are taken, and only where something is
visible then: what is read is true at that moment, whatever else has happened to the entry. Keys that went are copied when they go, since
their entry is used again; one that has come again since is told so after it, in the same `take` or the next. What other tiers tell (`told`)
is copied either way, and of a key that is there with both words the last one is looked for.

Bounded: `KEYS_MAX` keys. Beyond that all is forgotten and ``overflow`` is set: whoever tells the master must then send everything again. So
is it after a flush of a large namespace, where that is cheaper than a million removals.

Cost: 1 us a batch and 30 ns a key that goes when it is put; 50 ns a key when it is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from umbp.store.index import W_PLACE
from umbp.types import I64, KEY_BYTES, U8, U32, U64, Mask, Tier

KEYS_MAX = 1 << 18
FLUSH_KEYS_MAX = 1 << 15  # removals of one flush; more is an overflow


@dataclass(frozen=True, slots=True)
class Changes:
    """What went, then what came: ``words`` (n, 4), ``numbers`` (n,) of namespaces, ``sizes`` (n,) bytes, ``tiers``, ``present`` (n,)."""

    words: U64
    numbers: U32
    sizes: I64
    tiers: U8
    present: U8

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Copied: ``words`` (n, 4), and ``places`` (n,) size << 32 | namespace number."""

    words: U64
    places: U64

    def __len__(self) -> int:
        return len(self.words)


class Outbox:
    """``entries`` is the index: words 0 to 3 the key, word 4 size << 32 | namespace number."""

    def __init__(self, entries: U64) -> None:
        # A key in one load, as what has no meaning to NumPy: twice as fast as a row of words.
        self._words = np.ndarray((len(entries),), np.dtype((np.void, KEY_BYTES)), entries, 0, entries.strides[:1])
        self._places: U64 = entries[:, W_PLACE]
        self._batches: deque[tuple[I64 | _Keys, Tier, bool]] = deque()  # ids that came, or keys; tier; whether they came
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
            self._batches.append((self._keys(ids), Tier.DRAM, False))

    def told(self, rows: U64, tier: Tier, *, present: bool) -> None:
        """Keys came or went in another tier: (n, 5) words, the key and size << 32 | namespace number."""
        if not self.overflow and self._room(len(rows)):
            self._batches.append((_Keys(np.ascontiguousarray(rows[:, :4]), rows[:, 4].copy()), tier, present))

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
        """The oldest changes, about ``keys_max`` at most. ``live``: which of these ids are visible now."""
        came: list[I64] = []
        copied: dict[Tier, list[tuple[_Keys, bool]]] = {}
        count = 0
        while self._batches and (not count or count + len(self._batches[0][0]) <= keys_max):
            what, tier, here = self._batches.popleft()
            count += len(what)
            if isinstance(what, _Keys):
                copied.setdefault(tier, []).append((what, here))
            else:
                came.append(what)
        self.keys -= count
        lots = [(keys, tier, here) for tier, words in copied.items() for keys, here in _last_words(words)]
        if came:
            ids = np.concatenate(came).astype(np.int64)
            lots.append((self._keys(ids[live(ids)]), Tier.DRAM, True))
        return _changes(sorted(lots, key=lambda lot: lot[2]))

    def _keys(self, ids: I64) -> _Keys:
        return _Keys(self._words[ids].view(np.uint64).reshape(-1, 4), self._places[ids])

    def _room(self, count: int) -> bool:
        if self.keys + count > KEYS_MAX:
            self.forget()
            return False
        self.keys += count
        return count > 0


def _last_words(lots: list[tuple[_Keys, bool]]) -> list[tuple[_Keys, bool]]:
    """What is left of the words of one tier, in their order, if only the last one of each key counts."""
    if len({here for _, here in lots}) < 2:
        return lots
    words = np.concatenate([keys.words for keys, _ in lots])
    places = np.concatenate([keys.places for keys, _ in lots])
    present = np.concatenate([np.full(len(keys), here) for keys, here in lots])
    whole = np.concatenate([words, places[:, None]], axis=1)
    _, last = np.unique(whole[::-1].copy().view(np.dtype((np.void, whole.shape[1] * 8))).reshape(-1), return_index=True)
    keep = np.sort(len(whole) - 1 - last)
    kinds = [(keep[present[keep] == here], here) for here in (False, True)]
    return [(_Keys(words[which], places[which]), here) for which, here in kinds]


def _changes(lots: list[tuple[_Keys, Tier, bool]]) -> Changes:
    if not lots:
        none = np.empty(0, np.uint8)
        return Changes(np.empty((0, 4), np.uint64), np.empty(0, np.uint32), np.empty(0, np.int64), none, none)
    places = np.concatenate([keys.places for keys, _, _ in lots])
    counts = [len(keys) for keys, _, _ in lots]
    return Changes(
        np.concatenate([keys.words for keys, _, _ in lots]),
        (places & np.uint64(0xFFFF_FFFF)).astype(np.uint32),
        (places >> np.uint64(32)).astype(np.int64),
        np.repeat(np.array([tier for _, tier, _ in lots], np.uint8), counts),
        np.repeat(np.array([here for _, _, here in lots], np.uint8), counts),
    )
