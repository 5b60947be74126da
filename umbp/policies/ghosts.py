"""Fingerprints remembered after their pages are gone: a bounded table that may forget, with room for a payload beside each.

Theory of operation. Buckets of eight slots; a slot holds 32 bits of the mixed fingerprint and the number of the addition that
wrote it. An entry is known for the next `limit` additions; a full bucket gives up its oldest. With a quarter more slots than
`limit` about one entry in fifteen is lost early. A false match needs equal 32 bits within one bucket: about one look-up in 500
million.

Bytes a remembered fingerprint: 10. Source: the ghost queue of S3-FIFO (SOSP'23, section 4.2) is such a table.
"""

from __future__ import annotations

import numpy as np

from umbp.types import I64, U32, U64

WAYS = 8
BUCKETS_MIN = 512
ABSENT = -1


class Ghosts:
    """Knows the last ``limit`` fingerprints added. A slot number, below ``slot_count``, is where a caller may keep a payload."""

    __slots__ = ("_added", "_buckets", "_clock", "_tag", "limit", "slot_count")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buckets = max(BUCKETS_MIN, -(-limit * 5 // (4 * WAYS)))
        self.slot_count = self._buckets * WAYS
        self._tag: U32 = np.zeros(self.slot_count, np.uint32)  # 0: empty
        self._added: U32 = np.zeros(self.slot_count, np.uint32)
        self._clock = 0

    def __repr__(self) -> str:
        return f"<Ghosts up to {self.limit}, {self._clock} added>"

    def find(self, fingerprints: U64, *, within: int | None = None) -> I64:
        """Slot of each, shape (n,), -1 where unknown or not among the last ``within`` additions (at most ``limit``)."""
        rows, tags = self._rows(fingerprints)
        age = self._age(rows)
        known = (self._tag[rows] == tags[:, None]) & (age <= min(self.limit, self.limit if within is None else within))
        slots: I64 = np.where(known.any(axis=1), rows[np.arange(len(rows)), known.argmax(axis=1)], ABSENT)
        return slots

    def add(self, fingerprints: U64) -> I64:
        """Remembers distinct fingerprints, in this order, those known anew; returns their slots."""
        rows, tags = self._rows(fingerprints)
        slots: I64 = np.full(len(rows), ABSENT, np.int64)
        clocks = (self._clock + 1 + np.arange(len(rows), dtype=np.int64)).astype(np.uint32)  # wraps after 4 G, as ages do
        self._clock = (self._clock + len(rows)) % (1 << 32)
        open_ = np.arange(len(rows))
        for _ in range(WAYS):  # two of one batch may choose the same slot: the one overwritten chooses again
            mine = rows[open_]
            tag = self._tag[mine]
            score = self._age(mine) + ((tag == 0).astype(np.int64) << 33) + ((tag == tags[open_, None]).astype(np.int64) << 34)
            slot = mine[np.arange(len(mine)), score.argmax(axis=1)]
            self._tag[slot], self._added[slot] = tags[open_], clocks[open_]
            slots[open_] = slot
            open_ = open_[self._tag[slot] != tags[open_]]
            if not len(open_):
                break
        return slots

    def drop(self, slots: I64) -> None:
        """Forgets these."""
        self._tag[slots] = 0

    def _age(self, rows: I64) -> I64:
        age: I64 = (np.uint32(self._clock) - self._added[rows]).astype(np.int64) + 1
        return age

    def _rows(self, fingerprints: U64) -> tuple[I64, U32]:
        mixed = (fingerprints ^ (fingerprints >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)  # so that weak fingerprints (counters) spread over buckets too
        first = (mixed % np.uint64(self._buckets)).astype(np.int64) * WAYS
        tags = (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        return first[:, None] + np.arange(WAYS, dtype=np.int64), tags
