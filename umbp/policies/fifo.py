"""Ids in order of arrival, as a log with holes: the queue under SIEVE and S3-FIFO.

Theory of operation. `log` is written at its end; `position[id]` says where an id stands, and an entry counts while the two agree,
so leaving the middle is one store. When the end is reached the log is compacted, once per quarter of `capacity` arrivals, hence a
few copies an arrival. `hand` is a place in the log that survives compaction: an index, or the start when nothing stands after it.

Bytes an id: 4 position, 5 log.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from umbp.types import I32, I64, Mask

CHUNK_IDS_MIN = 64
CHUNK_IDS_MAX = 65_536
ABSENT = -1


class Fifo:
    """A queue of distinct ids below ``capacity``, oldest at ``start``, newest before ``end``."""

    __slots__ = ("_log", "count", "end", "hand", "position", "start")

    def __init__(self, capacity: int) -> None:
        self._log: I32 = np.empty(capacity + capacity // 4 + CHUNK_IDS_MIN, np.int32)
        self.position: I32 = np.full(capacity, ABSENT, np.int32)
        self.count = 0
        self.start = self.end = self.hand = 0

    def __repr__(self) -> str:
        return f"<Fifo {self.count} ids, hand {self.hand} in {self.start}..{self.end}>"

    def holds(self, ids: I32) -> Mask:
        """Which are in the queue; an id of -1 is not."""
        mask: Mask = (ids >= 0) & (self.position[ids] >= 0)
        return mask

    def append(self, ids: I32) -> None:
        """Distinct ids that are not in the queue arrive, in this order."""
        if self.end + len(ids) > len(self._log):
            self._compact()
        end = self.end + len(ids)
        self._log[self.end : end] = ids
        self.position[ids] = np.arange(self.end, end, dtype=np.int32)
        self.end = end
        self.count += len(ids)

    def discard(self, ids: I32) -> None:
        """Distinct ids that are in the queue leave it."""
        if not len(ids):
            return
        self.position[ids] = ABSENT
        self.count -= len(ids)
        self._trim()

    def between(self, start: int, end: int) -> I32:
        """Ids that stand at ``start <= index < end``, in order."""
        ids = self._log[start:end]
        standing: I32 = ids[self.position[ids] == np.arange(start, start + len(ids))]
        return standing

    def walk(self, start: int, end: int, chunk_ids: int) -> Iterator[I32]:
        """`between`, in growing chunks."""
        size = min(max(chunk_ids, CHUNK_IDS_MIN), CHUNK_IDS_MAX)
        while start < end:
            yield self.between(start, min(start + size, end))
            start += size
            size = min(size * 2, CHUNK_IDS_MAX)

    def check(self) -> None:
        """Log and positions agree, and the hand is inside."""
        assert self.count == len(self.between(self.start, self.end)) == int(np.count_nonzero(self.position >= 0))
        assert self.start <= self.hand <= self.end
        assert self.hand == self.start or len(self.between(self.hand, self.end)), "the hand stands past the newest"

    def _trim(self) -> None:
        size = CHUNK_IDS_MIN
        while self.end > self.start:
            low = max(self.start, self.end - size)
            standing = self._standing(low, self.end)
            self.end = int(standing[-1]) + 1 if len(standing) else low
            if len(standing):
                break
            size = min(size * 2, CHUNK_IDS_MAX)
        size = CHUNK_IDS_MIN
        while self.start < self.end:
            high = min(self.end, self.start + size)
            standing = self._standing(self.start, high)
            self.start = int(standing[0]) if len(standing) else high
            if len(standing):
                break
            size = min(size * 2, CHUNK_IDS_MAX)
        if not self.start <= self.hand < self.end:
            self.hand = self.start

    def _standing(self, start: int, end: int) -> I64:
        return np.flatnonzero(self.position[self._log[start:end]] == np.arange(start, end)) + start

    def _compact(self) -> None:
        ids = self.between(self.start, self.end)
        hand = len(self.between(self.start, self.hand))
        self._log[: len(ids)] = ids
        self.position[ids] = np.arange(len(ids), dtype=np.int32)
        self.start, self.end, self.hand = 0, len(ids), hand
