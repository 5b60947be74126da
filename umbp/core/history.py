"""The access history: key lists of requests that clients answered out of the shared index, entered a slice at a time.

Theory of operation. Clients say by and by, in batches, which keys their requests asked for. Looking up some hundred thousand keys and
telling the policies of each request takes 20 to 50 ms, in which nobody else would be answered. So what comes is queued, and `heed` enters
one slice of it, about 1 ms, for the shell to call again and again with other work in between:

    add --> queue of its session --heed: looked up, a slice of keys at a time--> all keys of a request known --> told to the policies

Requests of one session are told in the order in which they came; sessions take turns, so a busy one delays the others by a slice each.
A write, or a question for counts, of a session comes after the requests that it was sent behind: the shell calls `heed` for that session
until nothing of it waits. Leases do not depend on the history and do not wait.

What was looked up for a request in an earlier slice counts if its version is still the same when the policies are told. A request whose
namespace was flushed meanwhile is forgotten: what it asked for is gone.

Bounded: bytes of keys and requests that wait. Above it the oldest batch of the session with the most goes, and is counted. A request is one
event for the policies, however long it is: telling them of 2,200 keys takes 0.2 ms, of 65,536, the most that there are, some 5 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from umbp.core.namespaces import NamespaceState
from umbp.core.objects import Counters, Objects
from umbp.policies.base import AdmissionPolicy, Request
from umbp.store.index import IndexWriter, hashes, key_words, place_word
from umbp.types import I64, KEY_BYTES, U8, U64

SLICE_KEYS = 2048  # looked up in one go: 0.3 ms in warm memory, 1 ms in cold
SLICE_REQUESTS = 8  # told to the policies in one go, at 30 us and more each
BYTES_MAX = 16 << 20  # of keys that wait: half a second of work
REQUESTS_MAX = 16_384  # that wait


@dataclass(slots=True)
class Batch:
    """Requests of one namespace as they came, less what has been entered: ``keys`` of all of them, one after the other.

    ``ids`` (-1: not stored), ``versions`` and ``prints`` are of keys that were looked up already and whose request is still to be told;
    ``at``: the first key that was not.
    """

    state: NamespaceState
    number: int
    keys: U8
    requests: deque[tuple[int, int]]
    ids: I64
    versions: U64
    prints: U64
    at: int = 0


class History:
    """For one pool. ``namespaces`` by row; ``admission`` gives the admission policy of the moment: it is told as the eviction policy is."""

    def __init__(
        self,
        table: IndexWriter,
        objects: Objects,
        namespaces: dict[int, NamespaceState],
        admission: Callable[[], AdmissionPolicy],
        counters: Counters,
    ) -> None:
        self.table, self.objects, self.namespaces, self.admission, self.counters = table, objects, namespaces, admission, counters
        self.waiting_bytes = self.waiting_requests = 0
        self._queues: dict[int, deque[Batch]] = {}  # by session; the first one's turn is next

    def __repr__(self) -> str:
        return f"<History, {self.waiting_requests} requests of {len(self._queues)} sessions wait>"

    def waits(self, session: int) -> bool:
        """Whether something of this session is still to be entered."""
        return session in self._queues

    def add(self, session: int, row: int, keys: U8, requests: Sequence[tuple[int, int]]) -> None:
        """Requests of one namespace: how many of ``keys`` (n, 32) each has, in order, and its conversation or 0."""
        state = self.namespaces.get(row)
        if state is None or not requests:
            return
        none = np.empty(0, np.uint64)
        batch = Batch(state, state.account.number, keys, deque(requests), none.view(np.int64), none, none)
        self._queues.setdefault(session, deque()).append(batch)
        self._count(batch, 1)
        while self.waiting_bytes > BYTES_MAX or self.waiting_requests > REQUESTS_MAX:
            most = max(self._queues, key=lambda number: sum(map(_weight, self._queues[number])))
            self.counters.notes_dropped += len(self._queues[most][0].requests)
            self._drop(most)

    def heed(self, now: float, session: int | None = None) -> bool:
        """Enter one slice, of this session or of the one whose turn it is; whether more waits, of it or of any."""
        turn = next(iter(self._queues), None) if session is None else session
        if turn is not None and turn in self._queues:
            self._slice(now, turn)
        return bool(self._queues) if session is None else session in self._queues

    def _slice(self, now: float, session: int) -> None:
        queue = self._queues.pop(session)
        batch = queue[0]
        self._queues[session] = queue  # at the end: others are next
        if self.namespaces.get(batch.state.account.row) is not batch.state or batch.state.account.number != batch.number:
            self._drop(session)
            return
        self._count(batch, -1)
        before = len(batch.ids)
        if before < batch.requests[0][0]:
            self._look_up(batch)
        self._tell(now, batch, before)
        if batch.requests:
            self._count(batch, 1)
        else:
            self._forget_first(session)

    def _look_up(self, batch: Batch) -> None:
        """The next keys."""
        words = key_words(batch.keys[batch.at : batch.at + SLICE_KEYS])
        size = batch.state.account.object_bytes
        prints = hashes(words, np.uint64(batch.number), self.table.seed)
        found = self.table.find(words, batch.number, place_word(batch.number, size), prints)
        batch.ids = np.concatenate([batch.ids, np.where(found.hit, found.ids, -1)])
        batch.versions = np.concatenate([batch.versions, found.versions])
        batch.prints = np.concatenate([batch.prints, prints])
        batch.at += len(words)

    def _tell(self, now: float, batch: Batch, stale: int) -> None:
        """Tell the policies of requests whose keys are all looked up, the first ``stale`` of them in an earlier slice."""
        if stale:
            batch.ids[:stale][~self.objects.same(batch.ids[:stale], batch.versions[:stale])] = -1
        admission, ids, start, told = self.admission(), batch.ids.astype(np.int32), 0, 0
        while batch.requests and told < SLICE_REQUESTS and start + batch.requests[0][0] <= len(ids):
            count, conversation = batch.requests.popleft()
            request = Request(now, ids[start : start + count], batch.prints[start : start + count], conversation)
            self.objects.request(request)
            admission.on_request(request)
            start, told = start + count, told + 1
        self.counters.notes += told
        self.counters.lookups += start
        self.counters.hits += int(np.count_nonzero(ids[:start] >= 0))
        batch.ids, batch.versions, batch.prints = batch.ids[start:], batch.versions[start:], batch.prints[start:]

    def _drop(self, session: int) -> None:
        """Forget the oldest batch of a session."""
        self._count(self._queues[session][0], -1)
        self._forget_first(session)

    def _forget_first(self, session: int) -> None:
        queue = self._queues[session]
        queue.popleft()
        if not queue:
            del self._queues[session]

    def _count(self, batch: Batch, sign: int) -> None:
        self.waiting_bytes += sign * _weight(batch)
        self.waiting_requests += sign * len(batch.requests)

    def check(self) -> None:
        """The counts are those of what waits, and nobody is in the queue with nothing."""
        batches = [batch for queue in self._queues.values() for batch in queue]
        assert all(self._queues.values())
        assert all(batch.requests for batch in batches)
        assert self.waiting_bytes == sum(map(_weight, batches)) <= BYTES_MAX
        assert self.waiting_requests == sum(len(batch.requests) for batch in batches) <= REQUESTS_MAX


def _weight(batch: Batch) -> int:
    """Bytes of its keys that are still to be looked up."""
    return (len(batch.keys) - batch.at) * KEY_BYTES
