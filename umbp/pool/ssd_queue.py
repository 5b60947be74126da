"""Pages that wait to be written to SSD: which, in which order, and which are given up when there are too many.

Theory of operation. The queue holds names (entry ids and versions), never memory: a page that is evicted, removed or flushed while it waits
is simply not written, and counted. So a slow disk costs copies on SSD and nothing else; puts neither wait for it nor find less room. When
more than ``pages_max`` wait, the oldest go first; pages that an operator or client has pinned stay, up to half the queue.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from umbp.core.objects import LIVE, Objects
from umbp.types import I64, U64, Mask


class WriteQueue:
    """Of one pool."""

    def __init__(self, objects: Objects, pages_max: int) -> None:
        self.objects = objects
        self.pages_max = pages_max
        self.count = 0
        self.dropped = 0
        self.overtaken = 0  # were no more in DRAM when their turn came
        self._batches: deque[tuple[I64, U64]] = deque()
        self._pinned: deque[tuple[I64, U64]] = deque()
        self._waiting: U64 = np.zeros(objects.capacity, np.uint64)  # the version that waits, by entry id

    def __repr__(self) -> str:
        return f"<WriteQueue {self.count} pages wait, {self.dropped} were given up>"

    def add(self, ids: I64) -> None:
        """Pages to write, those that wait already excepted."""
        versions = self.objects.table.versions_of(ids)
        new = self._waiting[ids] != versions
        ids, versions = ids[new], versions[new]
        if len(ids):
            self._waiting[ids] = versions
            self._batches.append((ids, versions))
            self.count += len(ids)
        while self.count > self.pages_max:
            self._give_up()

    def take(self, size_bytes: int, pages_max: int = 1 << 20) -> I64:
        """The pages to write next, of one namespace: those that have waited longest and are still what they were. Empty: none waits."""
        while self._pinned or self._batches:
            queue = self._pinned or self._batches
            ids, versions = queue.popleft()
            self.count -= len(ids)
            good = self._alive(ids, versions)
            self._waiting[ids[~good]] = 0
            self.overtaken += int(np.count_nonzero(~good))
            ids, versions = ids[good], versions[good]
            if not len(ids):
                continue
            mine = self.objects.row[ids] == self.objects.row[ids[0]]
            mine &= np.cumsum(self.objects.size[ids]) - self.objects.size[ids] < size_bytes
            mine[pages_max:] = False
            rest = ~mine
            if rest.any():
                queue.appendleft((ids[rest], versions[rest]))
                self.count += int(np.count_nonzero(rest))
            chosen: I64 = ids[mine]
            self._waiting[chosen] = 0
            return chosen
        return np.empty(0, np.int64)

    def put_back(self, ids: I64) -> None:
        """Pages that could not be written now: to the front."""
        if len(ids):
            versions = self.objects.table.versions_of(ids)
            self._waiting[ids] = versions
            self._batches.appendleft((ids, versions))
            self.count += len(ids)

    def _alive(self, ids: I64, versions: U64) -> Mask:
        alive: Mask = (self.objects.state[ids] == LIVE) & self.objects.same(ids, versions)
        return alive & (self.objects.row[ids] >= 0)

    def _give_up(self) -> None:
        """The oldest batch, but for what is pinned."""
        queue = self._batches or self._pinned
        ids, versions = queue.popleft()
        self.count -= len(ids)
        alive = self._alive(ids, versions)
        keep = alive & (self.objects.pins[ids] > 0)
        if queue is self._pinned or sum(len(each) for each, _ in self._pinned) + int(np.count_nonzero(keep)) > self.pages_max // 2:
            keep[:] = False
        if keep.any():
            self._pinned.append((ids[keep], versions[keep]))
            self.count += int(np.count_nonzero(keep))
        self._waiting[ids[~keep]] = 0
        self.dropped += int(np.count_nonzero(alive & ~keep))
