"""Making room: which objects go so that new ones fit, in bytes, in keys, in one piece, and within a quota.

Theory of operation. `make_room` returns memory for up to `count` objects of one namespace and, if that is fewer, the reason for the rest.
It evicts in the policy's order, two passes: first without what was acknowledged in the last second (a page just put is not taken while
anything else can go), then all that is neither leased nor pinned. If bytes suffice but lie scattered, or the victims are much smaller
than the object, it evicts a *window*: the run of neighbours that costs the fewest bytes, near the policy's first victim if there is
one there, else anywhere; in the same two passes. So a put is refused only if what is leased, pinned, claimed
(`umbp.core.claims`) or being written leaves no room.

`evict_slice` works ahead of need, from the high watermark down to the low one, a bounded number of objects a call.

Cost: evicting k objects is a few vectorised passes over k; a window is a pass over the offsets (1 ms for 1 M objects), plus a sort when
only a search of the whole segment helps. Where few of many objects may go at all (most are leased, or it is about one namespace), that is
found out once for all ids, and the policy is not asked to walk over the others if there are none.

Where the segment has regions (`core.allocator`), a session may have one that is *near* it. What it writes goes there while memory is free
there, then elsewhere; only when nothing is free anywhere does something go, by the policy's order alone: what is wanted stays where it is.
Where regions make levels (`core.levels`) that is the policy's order in the last level first, and of all where nothing can go there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from umbp.core.allocator import ANYWHERE, granule, rounded, rounded_all
from umbp.core.objects import FREE, LIVE, Account, Objects
from umbp.errors import InvalidRequest
from umbp.policies.base import EvictionPolicy
from umbp.types import I32, I64, Mask, WriteStatus

GRACE_SECONDS = 1.0
WINDOW_SPAN = 16  # a window is first looked for within this many sizes of the policy's victim
FEW = 8  # "few" is less than one in this many
SMALLER = 4  # victims this many times smaller than the object are not worth freeing one by one
VICTIMS_MAX = 4096  # asked of a policy at once
SLICE_KEYS = 96  # a third of a millisecond
LAST_MOMENT_MAX = 8  # times that others are looked for because all victims were claimed just then


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the pool, 0 to 1: eviction ahead of need starts above ``high`` and ends at ``low``."""

    high: float
    low: float


class Room:
    """Eviction for one pool's objects."""

    def __init__(self, objects: Objects, watermarks: Watermarks) -> None:
        self.objects = objects
        self.watermarks = watermarks
        self.reclaim: Callable[[], bool] = lambda: False  # memory that is kept for next puts, some of it a call, before a refusal
        self.last: Mask | None = None  # the regions of the last level, where there are several
        self.placed: Callable[[I64, int], None] = lambda offsets, size: None  # who wants to hear where new objects of which size are
        self._draining = False
        self.near: dict[int, int] = {}  # session -> the region of memory that is near it
        regions = len(objects.allocator.starts)
        self.near_pages, self.far_pages = [0] * regions, [0] * regions  # of sessions near each: given memory there, and elsewhere

    def __repr__(self) -> str:
        return f"<Room {self.objects.allocated_bytes()} of {self.objects.allocator.capacity_bytes} bytes used>"

    def make_room(self, now: float, account: Account, count: int, session: int = 0) -> tuple[I64, WriteStatus]:
        """Offsets for up to ``count`` new objects of this namespace; if fewer, why the others are refused."""
        objects, size, region = self.objects, account.object_bytes, self.near.get(session, ANYWHERE)
        if rounded(size) > objects.allocator.object_bytes_max or 0 < account.quota_bytes < size:
            return np.empty(0, np.int64), WriteStatus.TOO_LARGE
        reason = WriteStatus.STORED
        if account.quota_bytes:
            spare = (account.quota_bytes - account.held_bytes) // size
            if spare < count:
                account.evicted_for_quota_keys += self._evict(now, count - spare, row=account.row)
                spare = max(0, (account.quota_bytes - account.held_bytes) // size)
                if spare < count:
                    count, reason = spare, WriteStatus.OVER_QUOTA
        kept = objects.passage.ids
        if objects.free_ids - kept < count:
            self._evict(now, count - (objects.free_ids - kept))
            while objects.free_ids - kept < count and self.reclaim():
                pass
            if objects.free_ids - kept < count:
                count, reason = max(0, objects.free_ids - kept), WriteStatus.KEY_LIMIT
        offsets = objects.allocator.allocate(size, count, region)
        while len(offsets) < count:
            if not self._free_some(now, size, count - len(offsets), offsets) and not self.reclaim():
                reason = WriteStatus.ALL_LEASED if objects.evictable == 0 else WriteStatus.FRAGMENTED
                break
            more = objects.allocator.allocate(size, min(count - len(offsets), objects.free_ids - kept - len(offsets)), region)
            offsets = np.concatenate([offsets, more])
        self._count_near(offsets, size, region)
        return offsets, reason

    def make_passage(self, account: Account, count: int) -> tuple[I64, WriteStatus]:
        """Offsets for up to ``count`` objects that only pass through; what lies there and nobody holds goes for them."""
        objects, size = self.objects, account.object_bytes
        count = min(count, objects.free_ids)
        offsets = objects.passage.allocate(size, count)
        if len(offsets) < count:
            there = np.flatnonzero(objects.state == LIVE)
            objects.hide(there[objects.passing(there) & (objects.leases[there] == 0)], evicted=False)
            offsets = np.concatenate([offsets, objects.passage.allocate(size, count - len(offsets))])
        return offsets, WriteStatus.STORED if len(offsets) else WriteStatus.ALL_LEASED

    def _count_near(self, offsets: I64, size: int, region: int) -> None:
        """How many pages came to be in the region that their writer wanted."""
        self.placed(offsets, size)
        if region != ANYWHERE and len(offsets):
            near = int(np.count_nonzero(self.objects.allocator.regions_of(offsets) == region))
            self.near_pages[region] += near
            self.far_pages[region] += len(offsets) - near

    def be_near(self, session: int, region: int) -> None:
        """What this session writes from now on goes to this region of the memory while there is room. `Pool.connection_closed` ends it."""
        if not 0 <= region < len(self.objects.allocator.starts):
            raise InvalidRequest(f"the memory has no region {region}", field="region", example="0")
        self.near[session] = region

    def take_free(self, size: int, count: int, session: int = 0) -> I64:
        """Offsets for ``count`` objects of this size, if there is room below the high watermark; else none. Evicts nothing."""
        objects, allocator, none = self.objects, self.objects.allocator, np.empty(0, np.int64)
        high = self.watermarks.high
        if allocator.capacity_bytes - allocator.free_bytes + rounded(size) * count > high * allocator.capacity_bytes:
            return none
        if objects.capacity - objects.free_ids + count > high * objects.capacity:
            return none
        region = self.near.get(session, ANYWHERE)
        offsets = allocator.allocate(size, count, region)
        if len(offsets) < count:
            allocator.free(offsets, np.full(len(offsets), size))
            return none
        self._count_near(offsets, size, region)
        return offsets

    def evict_slice(self, now: float) -> int:
        """Evict a bounded number of objects if the pool is above its watermarks; how many went. Call again while it is not zero."""
        objects, capacity = self.objects, self.objects.allocator.capacity_bytes
        used = self.used_share()
        if used > self.watermarks.high:
            self._draining = True
        elif used <= self.watermarks.low:
            self._draining = False
        if not self._draining:
            return 0
        if objects.evictable == 0:
            self._draining = False
            return 0
        excess_keys = objects.capacity - objects.free_ids - int(self.watermarks.low * objects.capacity)
        excess_bytes = objects.allocated_bytes() - int(self.watermarks.low * capacity)
        average = max(1, objects.used_bytes // max(1, objects.capacity - objects.free_ids))
        count = min(SLICE_KEYS, max(excess_keys, -(-excess_bytes // average)) + 8)  # asking for more costs as much as finding more
        victims = self._choose(now, count, grace=True)
        enough = np.cumsum(objects.size[victims]) - objects.size[victims] < excess_bytes
        enough |= np.arange(len(victims)) < excess_keys
        gone = objects.hide(victims[enough], evicted=True)
        self._draining = bool(enough.any())
        return gone

    def shrink(self, now: float, account: Account) -> int:
        """Evict a slice of a namespace that is above its quota; how many objects went."""
        excess = -(-(account.held_bytes - account.quota_bytes) // account.object_bytes)
        gone = self._evict(now, min(excess, SLICE_KEYS), row=account.row)
        account.evicted_for_quota_keys += gone
        return gone

    @property
    def pressed(self) -> bool:
        """Whether more is used than eviction ahead of need allows: its next slice should not wait."""
        return self.used_share() > self.watermarks.high

    def used_share(self) -> float:
        """Of bytes or of keys, whichever is more; 0 to 1."""
        objects = self.objects
        return max(objects.allocated_bytes() / max(1, objects.allocator.capacity_bytes), 1 - objects.free_ids / objects.capacity)

    def upcoming(self, now: float, count: int) -> I64:
        """The next victims at that time, first to go first, without those that will just have been put, or are spared then. A peek."""
        return self._choose(now, count, grace=True)

    def spare(self, ids: I64, until: float) -> None:
        """These live objects are not taken while anything else can go, until then: as if they had just been put."""
        times = self.objects.acknowledged_at
        times[ids] = np.maximum(times[ids], until - GRACE_SECONDS)

    def preview(self, now: float, size_bytes: int, *, row: int = -1, policy: EvictionPolicy | None = None) -> I64:
        """Which objects would go, first to go first, to free this many bytes, by the pool's policy or another one. A peek."""
        return self._victims(now, size_bytes, VICTIMS_MAX, row=row, policy=policy)

    def among(self, now: float, count: int, regions: Mask) -> I64:
        """What of these regions, (n,) bool, the policy would let go first. A peek."""
        return self._choose(now, count, grace=True, regions=regions) if self.objects.evictable else np.empty(0, np.int64)

    def _eligible(self, now: float, *, grace: bool, row: int = -1, regions: Mask | None = None) -> Eligibility:
        self.objects.claims.refresh()
        return Eligibility(self.objects, now - GRACE_SECONDS if grace else np.inf, row, regions)

    def _choose(
        self, now: float, count: int, *, grace: bool, row: int = -1, policy: EvictionPolicy | None = None, regions: Mask | None = None
    ) -> I64:
        """Ask the policy."""
        if self.last is not None and grace and regions is None:
            below = self._choose(now, count, grace=True, row=row, policy=policy, regions=self.last)
            if len(below):
                return below
        objects, eligible = self.objects, self._eligible(now, grace=grace, row=row, regions=regions)
        policy = policy or objects.policy_now()
        can_go = objects.evictable if row < 0 else min(objects.evictable, objects.accounts[row].live_keys)
        if can_go * FEW >= objects.counts[LIVE]:
            return policy.victims(eligible, count).astype(np.int64)
        mask = eligible(slice(None))
        if not mask.any():
            return np.empty(0, np.int64)
        return policy.victims(lambda ids: mask[ids], count).astype(np.int64)

    def _victims(self, now: float, size_bytes: float, count: int, *, row: int = -1, policy: EvictionPolicy | None = None) -> I64:
        """Ids in the policy's order, as many as cover the bytes, at most ``count``."""
        objects = self.objects
        if objects.evictable == 0:
            return np.empty(0, np.int64)
        count = min(count, VICTIMS_MAX)
        ids = self._choose(now, count, grace=True, row=row, policy=policy)
        if not len(ids):
            ids = self._choose(now, count, grace=False, row=row, policy=policy)
        if not np.isinf(size_bytes):
            sizes = objects.size[ids]
            ids = ids[np.cumsum(sizes) - sizes < size_bytes]
        return ids

    def _evict(self, now: float, keys: int, *, row: int = -1) -> int:
        """Evict this many objects, or as many as can go."""
        gone, tries = 0, LAST_MOMENT_MAX
        while gone < keys and tries:
            victims = self._victims(now, np.inf, keys - gone, row=row)
            if not len(victims):
                break
            now_gone = self.objects.hide(victims, evicted=True)
            gone += now_gone
            tries -= not now_gone
        return gone

    def _free_some(self, now: float, size: int, count: int, taken: I64) -> bool:
        """One step towards room for ``count`` objects of ``size``: True if something was freed that can help.

        ``taken`` are offsets of such objects that are allocated already and belong to no entry yet.
        """
        for _ in range(LAST_MOMENT_MAX):
            victims = self._to_go(now, size, count, taken)
            if not len(victims) or self.objects.hide(victims, evicted=True):
                return len(victims) > 0
        return False

    def _to_go(self, now: float, size: int, count: int, taken: I64) -> I64:
        """What `_free_some` frees; none if nothing can go that would help."""
        objects, none = self.objects, np.empty(0, np.int64)
        if objects.evictable == 0:
            return none
        need = rounded(size) * count
        average = max(1, objects.used_bytes // max(1, objects.capacity - objects.free_ids))
        missing = max(rounded(size), need - objects.allocator.free_bytes)
        victims = self._victims(now, missing, -(-missing // average) + 8)
        if not len(victims):
            return none
        scattered = objects.allocator.free_bytes >= need or objects.size[victims[0]] * SMALLER < size
        if scattered:
            window = self._window(now, size, int(objects.offset[victims[0]]), taken)
            return none if window is None else window
        return victims

    def _window(self, now: float, size: int, near: int, taken: I64) -> I64 | None:
        """The objects to evict for one run of ``size``: the cheapest window near an offset, else anywhere. None if there is no window."""
        capacity, span = self.objects.allocator.capacity_bytes, WINDOW_SPAN * rounded(size)
        low, high = max(0, near - span), min(capacity, near + span)
        for grace in (True, False):
            eligible = self._eligible(now, grace=grace)
            found = self._window_within(size, low, high, taken, eligible)
            if found is None and (low, high) != (0, capacity):
                found = self._window_within(size, 0, capacity, taken, eligible)
            if found is not None:
                return found
        return None

    def _window_within(self, size: int, low: int, high: int, taken: I64, eligible: Eligibility) -> I64 | None:
        objects, edges = self.objects, self.objects.allocator.edges
        length, unit = rounded(size), granule(size)
        held = np.flatnonzero((objects.state != FREE) & (objects.offset < high))
        starts = np.r_[objects.offset[held], taken]
        ends = np.r_[objects.offset[held] + rounded_all(objects.size[held]), taken + length]
        blocked = np.r_[~eligible(held), np.ones(len(taken), bool)]  # what passes through lies behind all windows
        order = np.argsort(starts)
        order = order[(ends[order] > low) & (starts[order] < high)]
        ids, starts, ends, blocked = np.r_[held, np.full(len(taken), -1)][order], starts[order], ends[order], blocked[order]
        blocked_before = np.r_[0, np.cumsum(blocked)]
        bytes_before = np.r_[0, np.cumsum(ends - starts)]
        candidates = np.unique(-(-np.r_[low, edges[(edges > low) & (edges < high)], ends] // unit) * unit)
        candidates = candidates[candidates + length <= high]
        if len(edges):  # no object lies in two regions
            regions_of = objects.allocator.regions_of
            candidates = candidates[regions_of(candidates) == regions_of(candidates + length - 1)]
        first = np.searchsorted(ends, candidates, side="right")
        last = np.searchsorted(starts, candidates + length, side="left")
        free_of_blocks = blocked_before[last] == blocked_before[first]
        if not free_of_blocks.any():
            return None
        cost = np.where(free_of_blocks, bytes_before[last] - bytes_before[first], np.iinfo(np.int64).max)
        best = int(cost.argmin())
        window: I64 = ids[first[best] : last[best]]
        assert len(window), "a run that is long enough is free, and the allocator did not find it"
        return window


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Which ids may be evicted: live, not leased, pinned or claimed, acknowledged before a time.

    And of a namespace, and in one of some regions, if that is asked.
    """

    objects: Objects
    acknowledged_before: float
    row: int
    regions: Mask | None = None

    def __call__(self, ids: I32 | I64 | slice) -> Mask:
        objects = self.objects
        mask: Mask = (objects.state[ids] == LIVE) & (objects.leases[ids] == 0) & (objects.pins[ids] == 0)
        mask &= objects.offset[ids] < objects.passage.start
        if (claimed := objects.claims.among(ids)) is not None:
            mask &= ~claimed
        if self.row >= 0:
            mask &= objects.row[ids] == self.row
        if self.regions is not None:
            mask &= self.regions[objects.allocator.regions_of(objects.offset[ids])]
        if np.isfinite(self.acknowledged_before):
            mask &= objects.acknowledged_at[ids] < self.acknowledged_before
        return mask
