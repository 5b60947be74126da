r"""Pages on their way into DRAM, looked at before they are whole: for loads that begin with the first layers.

Theory of operation. The pool is asked once for the pages and the order of their bytes (`umbp.core.stages`). What it does then is seen in
shared memory without a call: an entry that it fills says which chunks of the page are there, and verified; one that is committed is whole.
So each page is, for its reader,

    awaited --its entry is seen--> coming (chunk after chunk) --committed--> whole
       \--missing, failed, too late--> lost <--its entry is another's--/

The *mark* of a page is the version of the reservation under which it was seen. Whoever copies bytes of a page early asks `held` after the
last copy: the page counts if its entry is committed under that very mark at that moment. Then it was never given back in between, so all
bytes that were copied are the committed ones, whatever was evicted, removed, restarted or killed meanwhile. A page that is lost stays so,
though it be committed a moment later: nobody has copied it since.

A page that there is no room for is whole when it comes, and stays only until it is said to be had (`Arrivals.take`): what was copied before
counts if it was `held` then.

What is not seen is asked about now and then, as with any fetch (`umbp.client.fetches`).
"""

from __future__ import annotations

import time

import numpy as np

from umbp.client.fetches import ANSWER_SECONDS, Wanted, ask, end, taken
from umbp.client.link import Bond
from umbp.client.operations import Operations
from umbp.client.steps import Operation
from umbp.core.stages import Ranges
from umbp.store.index import FILLING, W_OFFSET, W_SUM, W_VERSION, key_words, place_word
from umbp.types import I64, PENDING, U8, U64, Mask, ReadStatus

AWAITED, COMING, WHOLE, LOST = 0, 1, 2, 3
ALL = np.uint64((1 << 64) - 1)
_ONE, _FILLING = np.uint64(1), np.uint64(FILLING)


class Arrivals:
    """Pages (n,) that were asked for. ``state``; ``chunks``: which are there, all bits once whole; ``offsets`` in the segment's data."""

    def __init__(self, operations: Operations, keys: U8, bond: Bond, number: int, seconds: float) -> None:
        n = len(keys)
        self.keys, self.bond, self.number = keys, bond, number
        self.state = np.zeros(n, np.uint8)
        self.chunks: U64 = np.zeros(n, np.uint64)
        self.offsets: I64 = np.zeros(n, np.int64)
        self._ids: I64 = np.zeros(n, np.int64)
        self._marks: U64 = np.zeros(n, np.uint64)
        self.had: Mask = np.zeros(n, bool)  # those that passed through, and were held when they had been copied
        self._operations = operations
        self._wanted = Wanted(np.arange(n), np.full(n, PENDING, np.uint8), time.monotonic() + seconds + ANSWER_SECONDS)

    def __repr__(self) -> str:
        return f"<Arrivals {np.bincount(self.state, minlength=4).tolist()} awaited, coming, whole, lost>"

    @property
    def over(self) -> bool:
        """Whether each page is whole or lost."""
        return bool((self.state >= WHOLE).all())

    def look(self) -> Operation[None]:
        """See what has come."""
        wanted = self._wanted
        wanted.hear()
        self._see()
        awaited = np.flatnonzero(self.state == AWAITED)
        if len(awaited):
            self._find(awaited)
        wanted.status[self.state == WHOLE] = ReadStatus.HIT.value
        yield from wanted.ask_again(time.monotonic())
        late = wanted.over and (wanted.status == PENDING).any()
        gone = (wanted.status != PENDING) & (wanted.status != ReadStatus.HIT.value)
        if late:
            gone |= wanted.status == PENDING
        told = (wanted.status == ReadStatus.HIT.value) & (self.state < WHOLE)
        if told.any():  # the pool says so: then the index shows it, or it has gone again
            self._see()
            self._find(np.flatnonzero(told & (self.state == AWAITED)))
            gone |= told & (self.state < WHOLE)
        self.state[gone & (self.state != WHOLE)] = LOST

    def pause(self) -> Operation[None]:
        """Until the next look."""
        yield from self._wanted.pause()

    def held(self) -> Mask:
        """Which pages are whole, were the same since they were seen first, and not lost; (n,) bool. For bytes that were copied before."""
        same: Mask = self.bond.index.versions_of(self._ids) == self._marks & ~_ONE
        if self._operations.link.number_of(self.bond, self._operations.opened) != self.number:
            same[:] = False
        same &= (self._marks != 0) & (self.state != LOST)
        return same | self.had

    def passing(self) -> I64:
        """Those that are whole and cannot stay: to be copied now, and then said to be."""
        at: I64 = np.flatnonzero((self.state == WHOLE) & ~self.had & (self.offsets >= self.bond.passage))
        return at if self.bond.passage else at[:0]

    def take(self, which: I64) -> Operation[None]:
        """These of `passing` have been copied; those that went meanwhile are lost."""
        self.had[which] = self.held()[which]
        self.state[which[~self.had[which]]] = LOST
        yield from taken(self._wanted, which)

    def causes(self) -> str:
        """Why pages are lost, as far as the pool has said so; for the log."""
        codes = self._wanted.status[self.state == LOST]
        said = {ReadStatus.MISS: "not stored", ReadStatus.FAILED: "not readable", ReadStatus.BUSY: "without room or too late"}
        counts = {text: int(np.count_nonzero(codes == code.value)) for code, text in said.items()}
        counts["gone again"] = int(np.count_nonzero(self.state == LOST)) - sum(counts.values())
        return ", ".join(f"{count} {text}" for text, count in counts.items() if count)

    def end(self) -> Operation[None]:
        """Wait no longer, and let go of what came."""
        yield from end(self._wanted)

    def ask(self, seconds: float, stages: tuple[Ranges, ...]) -> Operation[None]:
        """Have the pool bring them."""
        yield from ask(self._operations, self._wanted, self.keys, seconds, stages, passing=True)

    def _see(self) -> None:
        """What has become of entries that were seen before."""
        coming = np.flatnonzero(self.state == COMING)
        if not len(coming):
            return
        ids, marks = self._ids[coming], self._marks[coming]
        before = self.bond.index.versions_of(ids)
        words = self.bond.index.entries[ids, W_SUM]
        after = self.bond.index.versions_of(ids)
        filled = (before == marks) & (after == marks)
        self.chunks[coming[filled]] = words[filled] & ~_FILLING
        whole, lost = after == marks & ~_ONE, (after != marks) & (after != marks & ~_ONE)
        self.chunks[coming[whole]] = ALL
        self.state[coming[whole]], self.state[coming[lost]] = WHOLE, LOST

    def _find(self, items: I64) -> None:
        """Entries of pages that have none yet."""
        index, words = self.bond.index, key_words(self.keys[items])
        place = place_word(self.number, self._operations.object_bytes)
        for state, found in ((COMING, index.filling(words, self.number, place)), (WHOLE, index.find(words, self.number, place))):
            at = items[found.hit]
            rows = found.rows[found.hit]
            self.state[at], self._ids[at] = state, found.ids[found.hit]
            self._marks[at], self.offsets[at] = rows[:, W_VERSION] | _ONE, rows[:, W_OFFSET].view(np.int64)
            self.chunks[at] = ALL if state == WHOLE else rows[:, W_SUM] & ~_FILLING


def arrive(operations: Operations, keys: U8, seconds: float, stages: tuple[Ranges, ...]) -> Operation[Arrivals]:
    """Ask for pages that are not in DRAM; returns at once. Unavailable if there is no pool; `Arrivals.end` must follow."""
    bond, number = operations.current()
    made = Arrivals(operations, keys, bond, number, seconds)
    try:
        yield from made.ask(seconds, stages)
    except BaseException:
        yield from made.end()
        raise
    return made


__all__ = ["AWAITED", "COMING", "LOST", "WHOLE", "Arrivals", "arrive"]
