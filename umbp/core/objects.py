"""The objects of a pool: their state, memory, protection and accounting, kept together in one place.

Theory of operation. Each entry id is in one state; the table of moves is `MOVES` and nothing else changes a state.

    FREE --reserve--> RESERVED --publish--> LIVE --hide--> (FREE, or ZOMBIE while leased) --unprotect--> FREE
                      RESERVED --abandon--> FREE           (its writer let go or is dead)
                      RESERVED --orphan---> ORPHAN --abandon--> FREE    (expired; its writer may still be writing)
    LIVE and RESERVED --relocate--> LIVE and FREE    (they change places, and the latter has the former one's memory: `core.levels`)

A ZOMBIE (evicted, removed or flushed under a lease) and an ORPHAN are invisible, but their memory is not given to anyone. Used bytes are
the bytes of everything that is not FREE. All arrays have one element per entry id; every call takes arrays of ids.

Cost beside the segment: about 61 bytes an entry id here, plus the policy's own.

An account with a negative row is a limbo: what it holds belongs to no namespace any more, is never leased, and goes by and by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from umbp.core.allocator import PAGE_GRANULE, Allocator, rounded, rounded_all
from umbp.core.claims import Claims
from umbp.core.outbox import Outbox
from umbp.core.passage import Passage
from umbp.policies.base import EvictionPolicy, Inserted, Request
from umbp.types import F64, I32, I64, U8, U64, Mask

FREE, RESERVED, LIVE, ZOMBIE, ORPHAN = range(5)
STATES = ("free", "reserved", "live", "zombie", "orphan")
MOVES = {
    (FREE, RESERVED),
    (RESERVED, LIVE),
    (RESERVED, FREE),
    (RESERVED, ORPHAN),
    (ORPHAN, FREE),
    (LIVE, FREE),
    (LIVE, ZOMBIE),
    (ZOMBIE, FREE),
}


class Found(Protocol):
    """What a probe of the table gives: see `umbp.store.index.Found`."""

    @property
    def hit(self) -> Mask: ...
    @property
    def ids(self) -> I64: ...


class Table(Protocol):
    """The index as the core needs it: see `umbp.store.index.IndexWriter`."""

    entries: U64

    def find(self, words: U64, number: int, place: np.uint64, hashed: U64 | None = None) -> Found: ...
    def versions_of(self, ids: I64) -> U64: ...
    def write_reserved(self, ids: I64, words: U64, place: np.uint64, offsets: I64, owner: int) -> None: ...
    def enter(self, ids: I64, hashed: U64 | None = None) -> Mask: ...
    def name_reserved(self, ids: I64, words: U64, place: np.uint64) -> None: ...
    def publish(self, ids: I64, sums: U64 | None) -> None: ...
    def withdraw(self, ids: I64) -> None: ...
    def unpublish(self, ids: I64) -> None: ...
    def forget(self, ids: I64) -> None: ...
    def remember(self, ids: I64, versions: U64) -> None: ...
    def relocate(self, ids: I64, offsets: I64) -> None: ...


@dataclass(slots=True)
class Account:
    """Bytes and keys of one namespace. ``held`` counts objects in any state but FREE; ``live`` the visible ones."""

    row: int
    number: int
    object_bytes: int
    quota_bytes: int = 0
    held_bytes: int = 0
    live_keys: int = 0
    evicted_keys: int = 0
    evicted_for_quota_keys: int = 0
    stored_keys: int = 0
    ssd_bytes: int = 0  # of its pages on SSD, where there is one
    refused: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """Monotonic counts since this boot."""

    hits: int = 0
    lookups: int = 0
    notes: int = 0
    notes_dropped: int = 0
    removed: int = 0
    corrupt: int = 0
    flushes: int = 0
    sums: int = 0


@dataclass(frozen=True, slots=True)
class Parents:
    """The page before each of n pages: its entry id, -1 where it is not known, and its version then, 0 where it is of the same batch.

    The version tells at the commit whether the id still is that page's: it may have been evicted meanwhile and the id reused.
    """

    ids: I64
    versions: U64

    def only(self, which: I64 | Mask) -> Parents:
        """Those of these pages."""
        return Parents(self.ids[which], self.versions[which])


class Objects:
    """State arrays, allocator and policy of one pool."""

    def __init__(self, table: Table, allocator: Allocator, policy: EvictionPolicy, passage: Passage | None = None) -> None:
        """``passage``: behind the memory of ``allocator``; none if it is not given."""
        n = len(table.entries)
        end = allocator.capacity_bytes
        self.passage = passage or Passage(end, end, 0)
        self.capacity = n
        self.table = table
        self.allocator = allocator
        self.policy = policy
        self.claims = Claims(n)  # what clients are about to lease: not evicted
        self.outbox = Outbox(table.entries)  # what a master has still to hear of
        self.fresh: deque[I64] | None = None  # commits that an SSD tier has still to see, where there is one
        self._untold: list[Inserted] = []  # commits that the policy has still to hear of, in order
        self.state: U8 = np.zeros(n, np.uint8)
        self.leases: I32 = np.zeros(n, np.int32)
        self.pins: I32 = np.zeros(n, np.int32)
        self.row: I32 = np.zeros(n, np.int32)
        self.size: I64 = np.zeros(n, np.int64)
        self.offset: I64 = np.zeros(n, np.int64)
        self.committed_at: F64 = np.zeros(n, np.float64)
        self.acknowledged_at: F64 = np.zeros(n, np.float64)  # a writer was told that it is stored: at commit, or later as "exists"
        self.accessed_at: F64 = np.zeros(n, np.float64)
        self.hits: I32 = np.zeros(n, np.int32)
        self.born: U64 | None = None  # where objects move: the version that each had before it first did, or 0
        self.asked: Callable[[I64], None] | None = None  # who wants to hear which objects requests asked for
        self._free: I32 = np.arange(n - 1, -1, -1, dtype=np.int32)  # a stack; the top is at index free_ids - 1
        self.free_ids = n
        self.accounts: dict[int, Account] = {}
        self.used_bytes = 0  # of objects in any state but FREE, unrounded
        self.leased_bytes = 0  # of distinct leased objects, but for those that only pass through
        self.counts = [n, 0, 0, 0, 0]  # entries by state
        self.protected = 0  # LIVE entries with a lease or a pin
        self.stored_keys = 0
        self.evicted_keys = 0
        self.evicted_bytes = 0

    def __repr__(self) -> str:
        return "<Objects " + ", ".join(f"{count} {name}" for name, count in zip(STATES, self.counts, strict=True)) + ">"

    # -- moves of state ----------------------------------------------------------------------------------------------------------------

    def take(self, words: U64, place: np.uint64, offsets: I64, owner: int) -> I64:
        """Entry ids for memory that a client will fill, entered in the segment; as many as offsets, and there must be that many free ids.

        `reserve` must follow.
        """
        n = len(offsets)
        assert n <= self.free_ids, "no free entry ids"
        ids = self._free[self.free_ids - n : self.free_ids].astype(np.int64)
        self.free_ids -= n
        self.table.write_reserved(ids, words, place, offsets, owner)
        return ids

    def reserve(self, account: Account, ids: I64, offsets: I64) -> None:
        """Account for what `take` took."""
        self._move(ids, FREE, RESERVED)
        self.row[ids], self.size[ids], self.offset[ids] = account.row, account.object_bytes, offsets
        self._charge(account, len(ids))

    def assign(self, ids: I64, account: Account) -> None:
        """Count reserved objects as another account's, one of the same object size."""
        for old, part in self._by_account(ids):
            assert old.object_bytes == account.object_bytes
            self._charge(old, -len(part))
        self.row[ids] = account.row
        self._charge(account, len(ids))

    def publish(self, now: float, ids: I64, parents: Parents, fingerprints: U64) -> None:
        """Account for reserved objects that the table shows now."""
        self._move(ids, RESERVED, LIVE)
        self.committed_at[ids] = self.acknowledged_at[ids] = self.accessed_at[ids] = now
        self.hits[ids] = 0
        self.stored_keys += len(ids)
        for account, part in self._by_account(ids):
            account.live_keys += len(part)
            account.stored_keys += len(part)
        alive = (parents.ids >= 0) & (self.state[parents.ids] == LIVE)
        alive &= (parents.versions == 0) | self.same(parents.ids, parents.versions)
        known = np.where(alive, parents.ids, -1).astype(np.int32)
        self._untold.append(Inserted(now, ids.astype(np.int32), known, fingerprints))
        if (passing := self.passing(ids)).any():
            ids = ids[~passing]
        self.outbox.came(ids)
        if self.fresh is not None:
            self.fresh.append(ids)

    def policy_now(self) -> EvictionPolicy:
        """The eviction policy, told of all commits. It learns of them late, since the writer that waits for its answer needs not."""
        untold, self._untold = self._untold, []
        for event in untold:
            self.policy.on_inserted(event)
        return self.policy

    def install(self, policy: EvictionPolicy) -> None:
        """Another policy from now on, which has been told of all live objects."""
        self.policy = policy
        self._untold = []

    def orphan(self, ids: I64) -> None:
        """Reserved objects whose time is over, and whose writer may not know yet."""
        self.table.withdraw(ids)
        self._move(ids, RESERVED, ORPHAN)

    def abandon(self, ids: I64) -> None:
        """Give reserved or orphaned objects back: nobody can be writing to them any more."""
        for state, free in ((RESERVED, self.table.unpublish), (ORPHAN, self.table.forget)):
            part = ids[self.state[ids] == state]
            if len(part):
                free(part)
                self._move(part, state, FREE)
                self._release(part)

    def hide(self, ids: I64, *, evicted: bool) -> int:
        """Make live objects invisible; their memory is given back now, or with their last lease. Pins on them end here.

        Returns how many went: of those that are ``evicted``, what is claimed stays.
        """
        if evicted and self.claims.areas and len(ids):
            ids = self._unclaimed(ids)
        if not len(ids):
            return 0
        known = self.row[ids] >= 0  # of the others everybody was told when their namespace was flushed
        self.outbox.went(ids if known.all() else ids[known])
        self.table.unpublish(ids)
        if evicted:
            self.evicted_keys += len(ids)
            self.evicted_bytes += int(self.size[ids].sum())
        for account, part in self._by_account(ids):
            account.live_keys -= len(part)
            account.evicted_keys += len(part) if evicted else 0
        self.protected -= int(np.count_nonzero((self.leases[ids] > 0) | (self.pins[ids] > 0)))
        self.pins[ids] = 0
        leased = self.leases[ids] > 0
        self._move(ids[leased], LIVE, ZOMBIE)
        gone = ids[~leased]
        self._move(gone, LIVE, FREE)
        self.policy_now().on_removed(ids.astype(np.int32), evicted=evicted)
        self._release(gone)
        return len(ids)

    def _unclaimed(self, ids: I64) -> I64:
        """Those of these objects that nobody claims, hidden from new claims; the others are as they were."""
        versions = self.table.versions_of(ids)
        self.table.forget(ids)
        claimed = self.claims.among_hidden(ids)
        if claimed is None or not claimed.any():
            return ids
        self.table.remember(ids[claimed], versions[claimed])
        return ids[~claimed]

    def relocate(self, ids: I64, entries: I64) -> None:
        """Live objects, which nobody holds, change places with reserved ones of the same size, where their bytes are by now."""
        assert self.born is not None, "nothing moves here"
        self.born[ids] = np.where(self.born[ids], self.born[ids], self.table.versions_of(ids))
        self.table.forget(entries)  # first: after a crash in between no two entries lead to one place
        old, new = self.offset[ids], self.offset[entries]
        self.table.relocate(ids, new)
        self.offset[ids], self.offset[entries] = new, old
        self.abandon(entries)

    def same(self, ids: I64, versions: U64) -> Mask:
        """Which of these entries are the objects that they were at these versions, wherever they are by now; (n,) bool.

        Versions only grow, so all that an entry had since its object was stored are the object's. Not for bytes that were read at the
        place that went with a version: those count if `table.versions_of` is what it was.
        """
        current = self.table.versions_of(ids)
        found: Mask = current == versions
        if self.born is not None:
            found |= (self.born[ids] != 0) & (self.born[ids] <= versions) & (versions < current)
        return found

    def transfer(self, ids: I64, account: Account) -> None:
        """`assign` for live objects."""
        for old, part in self._by_account(ids):
            old.live_keys -= len(part)
        self.assign(ids, account)
        account.live_keys += len(ids)

    def _move(self, ids: I64, old: int, new: int) -> None:
        assert (old, new) in MOVES, f"no move {STATES[old]} -> {STATES[new]}"
        if len(ids):
            wrong = self.state[ids] != old
            assert not wrong.any(), (
                f"entry {ids[wrong][0]} is {STATES[self.state[ids[wrong][0]]]}, not {STATES[old]}: {self.story(int(ids[wrong][0]))}"
            )
            self.state[ids] = new
            self.counts[old] -= len(ids)
            self.counts[new] += len(ids)

    def _release(self, ids: I64) -> None:
        n = len(ids)
        if not n:
            return
        offsets, sizes, passing = self.offset[ids], self.size[ids], self.passing(ids)
        if passing.any():
            self.passage.free(offsets[passing], sizes[passing])
            offsets, sizes = offsets[~passing], sizes[~passing]
        self.allocator.free(offsets, sizes)
        for account, part in self._by_account(ids):
            self._charge(account, -len(part))
        if self.born is not None:
            self.born[ids] = 0
        self._free[self.free_ids : self.free_ids + n] = ids
        self.free_ids += n

    def _charge(self, account: Account, objects: int) -> None:
        account.held_bytes += objects * account.object_bytes
        self.used_bytes += objects * account.object_bytes

    def _by_account(self, ids: I64) -> list[tuple[Account, I64]]:
        if not len(ids):
            return []
        rows = self.row[ids]
        if (rows == rows[0]).all():
            return [(self.accounts[int(rows[0])], ids)]
        return [(self.accounts[row], ids[rows == row]) for row in np.unique(rows).tolist()]

    # -- a former life -----------------------------------------------------------------------------------------------------------------

    def adopt(self, account: Account, ids: I64, *, reserved: bool) -> None:
        """Take over entries found in the segment: live ones, or reserved ones as orphans. `settle` must follow."""
        self.state[ids] = ORPHAN if reserved else LIVE
        self.row[ids], self.size[ids] = account.row, account.object_bytes
        self.offset[ids] = self.table.entries[ids, 5].view(np.int64)
        self._charge(account, len(ids))
        account.live_keys += 0 if reserved else len(ids)

    def settle(self, now: float) -> None:
        """After the last `adopt`: make free list, free space and counts fit. SegmentError if objects overlap or lie outside."""
        held = np.flatnonzero(self.state != FREE)
        ends = self.offset[held] + rounded_all(self.size[held])
        border = self.passage.start
        if len(across := ends[(self.offset[held] < border) & (ends > border)]):
            self.passage.narrow(-(-int(across.max()) // PAGE_GRANULE) * PAGE_GRANULE)
            self.allocator = Allocator(self.passage.start, self.allocator.regions, self.passage.end)
        passing = self.passing(held)
        self.allocator.occupy(self.offset[held[~passing]], self.size[held[~passing]])
        self.passage.occupy(self.offset[held[passing]], self.size[held[passing]])
        free = np.flatnonzero(self.state == FREE)[::-1]
        self.free_ids = len(free)
        self._free[: len(free)] = free
        self.counts = np.bincount(self.state, minlength=len(STATES)).tolist()
        self.committed_at[held] = self.acknowledged_at[held] = self.accessed_at[held] = now - 60.0  # not "just acknowledged"

    # -- protection --------------------------------------------------------------------------------------------------------------------

    def lease(self, ids: I64) -> int:
        """Count one lease more on each of these distinct live objects; bytes that became leased by it."""
        bare = (self.leases[ids] == 0) & (self.pins[ids] == 0)
        fresh = ids[self.leases[ids] == 0]
        self.leases[ids] += 1
        self.protected += int(np.count_nonzero(bare))
        added = int(self.size[fresh[~self.passing(fresh)]].sum())
        self.leased_bytes += added
        return added

    def unlease(self, ids: I64) -> None:
        """Count one lease less on each of these distinct objects; zombies whose last lease it was are given back."""
        self.leases[ids] -= 1
        assert (self.leases[ids] >= 0).all(), "released more often than leased"
        last = ids[self.leases[ids] == 0]
        self.leased_bytes -= int(self.size[last[~self.passing(last)]].sum())
        live = self.state[last] == LIVE
        self.protected -= int(np.count_nonzero(self.pins[last[live]] == 0))
        gone = last[~live]
        self._move(gone, ZOMBIE, FREE)
        self._release(gone)

    @contextmanager
    def held(self, ids: I64) -> Generator[None]:
        """Lease these objects, which may repeat, for as long as the block runs."""
        distinct = np.unique(ids) if len(ids) else ids
        if len(distinct):
            self.lease(distinct)
        try:
            yield
        finally:
            if len(distinct):
                self.unlease(distinct)

    def pin(self, ids: I64) -> None:
        """Count one pin more on each of these distinct live objects."""
        self.protected += int(np.count_nonzero((self.leases[ids] == 0) & (self.pins[ids] == 0)))
        self.pins[ids] += 1

    def unpin(self, ids: I64) -> None:
        """Count one pin less on each of these distinct live objects."""
        self.pins[ids] -= 1
        assert (self.pins[ids] >= 0).all(), "unpinned more often than pinned"
        self.protected -= int(np.count_nonzero((self.leases[ids] == 0) & (self.pins[ids] == 0)))

    # -- history -----------------------------------------------------------------------------------------------------------------------

    def request(self, request: Request) -> None:
        """One request's key list: the access history, for policies and for people."""
        held = request.ids[request.ids >= 0]
        self.accessed_at[held] = request.now
        self.hits[held] += 1
        self.policy_now().on_request(request)
        if self.asked is not None:
            self.asked(held.astype(np.int64))

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def passing(self, ids: I64) -> Mask:
        """Which of these only pass through."""
        return self.passage.among(self.offset[ids])

    @property
    def evictable(self) -> int:
        """Live objects without lease or pin."""
        return self.counts[LIVE] - self.protected

    def in_limbo(self) -> tuple[int, int]:
        """Keys and bytes that belong to no namespace any more and are still to be removed."""
        limbo = [account for account in self.accounts.values() if account.row < 0]
        return sum(account.live_keys for account in limbo), sum(account.held_bytes for account in limbo)

    def allocated_bytes(self) -> int:
        """Bytes of the segment that are not free, rounding included, but for what only passes through."""
        return self.allocator.capacity_bytes - self.allocator.free_bytes

    def live_ids(self, row: int | None = None) -> I64:
        """Ids of visible objects, of one namespace or of all, ascending."""
        mask = self.state == LIVE
        return np.flatnonzero(mask if row is None else mask & (self.row == row))

    def story(self, entry: int) -> str:
        """All that is known of one entry, for an error message."""
        return (
            f"state {STATES[self.state[entry]]}, row {self.row[entry]}, {self.size[entry]} bytes at {self.offset[entry]}, "
            f"{self.leases[entry]} leases, {self.pins[entry]} pins, version {int(self.table.entries[entry, 7])}"
        )

    def check(self) -> None:
        """The invariants of all of it: slow, for tests and the simulation."""
        counts = np.bincount(self.state, minlength=5).tolist()
        assert counts == self.counts, (counts, self.counts)
        held = np.flatnonzero(self.state != FREE)
        free = np.sort(self._free[: self.free_ids])
        assert np.array_equal(free, np.flatnonzero(self.state == FREE)), "the free list is wrong"
        assert self.used_bytes == int(self.size[held].sum()) == sum(account.held_bytes for account in self.accounts.values())
        sizes = np.array([rounded(size) for size in self.size[held].tolist()], np.int64)
        passing = self.passing(held)
        assert self.allocated_bytes() == int(sizes[~passing].sum()), "memory is leaked or given twice"
        passage = self.passage.allocator
        assert passage.capacity_bytes - passage.free_bytes == int(sizes[passing].sum()), "memory of the passage is leaked or given twice"
        passage.check()
        order = np.argsort(self.offset[held])
        starts, ends = self.offset[held][order], (self.offset[held] + sizes)[order]
        assert (starts[1:] >= ends[:-1]).all(), "objects overlap"
        assert (self.leases[(self.state != LIVE) & (self.state != ZOMBIE)] == 0).all()
        assert (self.leases[self.state == ZOMBIE] > 0).all()
        assert (self.pins[self.state != LIVE] == 0).all()
        leased = np.flatnonzero(self.leases > 0)
        assert self.leased_bytes == int(self.size[leased[~self.passing(leased)]].sum())
        assert self.protected == int(np.count_nonzero((self.state == LIVE) & ((self.leases > 0) | (self.pins > 0))))
        for account in self.accounts.values():
            assert account.live_keys == len(self.live_ids(account.row)), f"keys of row {account.row}"
        self.allocator.check()
        self.claims.check()
