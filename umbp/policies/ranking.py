"""Live ids in order of a rank, lowest first, without sorting a million of them for each eviction.

Theory of operation. `rank` and `live` are arrays by id. A queue holds, sorted, every live id whose rank is at most `_bound`; an
entry counts while its id is live and its rank unchanged, so a touch costs one store and leaves a dead entry behind. When the
queue is used up it is extended by about the next 1/32 of the live ids (9 ms at a million ids on a busy x86 core, so 0.3
microseconds an eviction). Ranks that arrive at or below the bound (never with plain LRU) wait in `_late` and are merged at the next
peek.

Bytes an id: 8 rank, 1 live; 12 for each queued id, which is 1/32 of them unless a peek had to pass over everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from umbp.policies.base import Eligible
from umbp.types import I32, I64, Mask

QUEUE_SHARE = 32  # an extension takes one in this many of the live ids ...
QUEUE_IDS_MIN = 1024  # ... but not fewer than this
SAMPLES_BELOW_CUT = 512  # the cut is estimated from a sample, to about 4 %: partitioning all ids takes longer than all the rest
CHUNK_IDS_MIN = 64
CHUNK_IDS_MAX = 65_536
LOWEST = int(np.iinfo(np.int64).min)


def first_of_each(ids: I32) -> Mask:
    """Mask, shape (n,), of the first occurrence of each id."""
    ordered = np.sort(ids)
    if not (ordered[1:] == ordered[:-1]).any():  # nearly always, and a tenth of the time of finding out which
        return np.ones(len(ids), np.bool_)
    mask = np.zeros(len(ids), np.bool_)
    mask[np.unique(ids, return_index=True)[1]] = True
    return mask


class Ranking:
    """A set of ids below ``capacity``, each with an int64 rank above `LOWEST`; equal ranks go by queue age, then by id."""

    __slots__ = ("_bound", "_head", "_late", "_late_count", "_queue", "_queue_ranks", "live", "live_count", "rank")

    def __init__(self, capacity: int) -> None:
        self.rank: I64 = np.zeros(capacity, np.int64)
        self.live: Mask = np.zeros(capacity, np.bool_)
        self.live_count = 0
        self._forget_queue()

    def __repr__(self) -> str:
        return f"<Ranking {self.live_count} live, {len(self._queue) - self._head} queued>"

    @property
    def queued_count(self) -> int:
        """Entries in the queue, dead ones too."""
        return len(self._queue) - self._head

    def place(self, ids: I32, ranks: I64) -> None:
        """Enters or moves these distinct ids."""
        self.live_count += len(ids) - int(np.count_nonzero(self.live[ids]))
        self.rank[ids] = ranks
        self.live[ids] = True
        late = ids[ranks <= self._bound]
        if len(late):
            self._late.append(late)
            self._late_count += len(late)
            if self._late_count > self.live_count:  # merging would cost more than starting anew; also what bounds the list
                self._forget_queue()

    def discard(self, ids: I32) -> None:
        """Takes these distinct live ids out."""
        self.live[ids] = False
        self.live_count -= len(ids)

    def walk(self, chunk_ids: int) -> Iterator[I32]:
        """Every live id once, lowest rank first, in growing chunks; the caller may stop at any time. A peek."""
        self._merge_late()
        self._drop_dead_front()
        at = self._head
        size = min(max(chunk_ids, CHUNK_IDS_MIN), CHUNK_IDS_MAX)
        wanted = max(QUEUE_IDS_MIN, self.live_count // QUEUE_SHARE)
        while True:
            while at < len(self._queue):
                ids = self._queue[at : at + size]
                yield ids[self._counts(at, at + size)]
                at += size
                size = min(size * 2, CHUNK_IDS_MAX)
            at = len(self._queue) - self._head
            if not self._extend(wanted):
                return
            wanted *= 2  # whoever comes this far is passing over many: the whole pass stays within a few sorts

    def peek(self, eligible: Eligible, count: int) -> I32:
        """Up to ``count`` eligible ids, lowest rank first."""
        found: list[I32] = []
        need = count
        if need > 0:
            for ids in self.walk(count):
                ids = ids[eligible(ids)][:need]
                found.append(ids)
                need -= len(ids)
                if need <= 0:
                    break
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def check(self) -> None:
        """The counts agree, and every live id at or below the bound is queued or late, in order."""
        assert self.live_count == int(np.count_nonzero(self.live))
        counts = self._counts(self._head, len(self._queue))
        queued = self._queue[self._head :][counts]
        assert len(np.unique(queued)) == len(queued), "an id is queued twice"
        assert bool(np.all(np.diff(self._queue_ranks[self._head :]) >= 0)), "the queue is out of order"
        reachable = np.concatenate([queued, *self._late])
        below = np.flatnonzero(self.live & (self.rank <= self._bound))
        assert bool(np.isin(below, reachable).all()), "an id is lost"

    def _forget_queue(self) -> None:
        self._queue: I32 = np.empty(0, np.int32)
        self._queue_ranks: I64 = np.empty(0, np.int64)
        self._head = 0
        self._bound = LOWEST
        self._late: list[I32] = []
        self._late_count = 0

    def _counts(self, start: int, stop: int) -> Mask:
        ids = self._queue[start:stop]
        mask: Mask = self.live[ids] & (self.rank[ids] == self._queue_ranks[start:stop])
        return mask

    def _drop_dead_front(self) -> None:
        while self._head < len(self._queue):
            counts = self._counts(self._head, self._head + CHUNK_IDS_MAX)
            first = int(counts.argmax())
            if counts[first]:
                self._head += first
                return
            self._head += len(counts)

    def _merge_late(self) -> None:
        if not self._late:
            return
        late = np.concatenate(self._late)
        late = late[self.live[late] & (self.rank[late] <= self._bound)]
        # An id can come back with the very rank of an old entry of its own, which then counts again: hence unique.
        ids = np.unique(np.concatenate([self._queue[self._head :][self._counts(self._head, len(self._queue))], late]))
        ids = ids[np.argsort(self.rank[ids], kind="stable")]
        self._queue, self._queue_ranks, self._head = ids, self.rank[ids], 0
        self._late, self._late_count = [], 0

    def _extend(self, wanted: int) -> bool:
        ids = np.flatnonzero(self.live & (self.rank > self._bound)).astype(np.int32)
        if not len(ids):
            return False
        ranks = self.rank[ids]
        if len(ids) > wanted:
            step = max(1, wanted // SAMPLES_BELOW_CUT)
            place = wanted // step - 1
            nearest = ranks <= np.partition(ranks[::step], place)[place]  # with all that tie: some must pass, whatever the ranks
            ids, ranks = ids[nearest], ranks[nearest]
        order = np.argsort(ranks, kind="stable")
        self._queue = np.concatenate([self._queue[self._head :], ids[order]])
        self._queue_ranks = np.concatenate([self._queue_ranks[self._head :], ranks[order]])
        self._head = 0
        self._bound = int(self._queue_ranks[-1])
        return True
