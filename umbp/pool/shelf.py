"""The pool as a peer reads from it: what an order gets is leased, with checksums, and looked at again when the reader has it.

Pages that are on this node's SSD alone are brought into DRAM first, and go from there. A page without a checksum gets one first, so that no
page travels without. What a reader takes counts as asked for with the eviction policy, as pages that other nodes want are worth keeping,
unless the reader says that it will use its own copy from now on; it does not count in the pool's own hit rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from umbp.core.objects import Account
from umbp.core.pool import Pool
from umbp.errors import LimitReached, NotFound
from umbp.policies.base import Request
from umbp.store.index import W_OFFSET, W_SUM, hashes, key_words
from umbp.store.segment import Segment
from umbp.transport.base import GRANT_BYTES_MAX, Grant, Order
from umbp.types import I64, U8, U64, Mask

SESSION = 0  # the pool's own
BRING_SHARE = 0.5  # of an order's time, for pages that must come from this node's SSD first
SPARE_SECONDS = 1.0  # a lease outlives the order's time by this, so that it is never the lease that ends first


class PoolShelf:
    """Fulfils `umbp.transport.base.Shelf` for one pool process."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        segment: Segment,
        make_sums: Callable[[I64, U64], Awaitable[U64]],
        bring: Callable[[Account, U8, float], Awaitable[None]],
    ) -> None:
        """``make_sums``: see `umbp.pool.sums`; ``bring``: `umbp.pool.fetching.Fetching.bring`."""
        self.name = name
        self.pool = pool
        self.segment = segment
        self.make_sums = make_sums
        self.bring = bring
        self.granted_pages = 0
        self.stale_pages = 0  # refused after they were sent

    def __repr__(self) -> str:
        return f"<PoolShelf of {self.name}, {self.granted_pages} pages granted>"

    @property
    def data(self) -> U8:
        """See `umbp.transport.base.Shelf`."""
        return self.segment.data.array

    @property
    def data_at(self) -> int:
        """See `umbp.transport.base.Shelf`."""
        return self.segment.geometry.sections()["data"][0]

    @property
    def path(self) -> str:
        """See `umbp.transport.base.Shelf`."""
        return self.segment.path

    async def grant(self, order: Order, keys: U8, deadline: float) -> Grant:
        """See `umbp.transport.base.Shelf`."""
        if order.node != self.name or order.boot != self.segment.boot:
            raise NotFound(
                f"this is {self.name} of boot {self.segment.boot}, not {order.node} of boot {order.boot}", field="node", example=self.name
            )
        now = time.monotonic()
        state = self.pool.by_digest.get(bytes.fromhex(order.namespace))
        if state is None or state.account.object_bytes != order.object_bytes:
            return _nothing(len(keys), order.object_bytes)
        account = state.account
        found = self.pool.find_keys(account, keys)
        if not found.hit.all():
            number = account.number
            await self.bring(account, keys[~found.hit], now + BRING_SHARE * (deadline - now))
            if account.number != number:
                return _nothing(len(keys), order.object_bytes)
            now, found = time.monotonic(), self.pool.find_keys(account, keys)
        held = found.hit.copy()
        held[max(1, GRANT_BYTES_MAX // order.object_bytes) :] = False
        ids, versions = found.ids[held], found.versions[held]
        if not len(ids):
            return _nothing(len(keys), order.object_bytes)
        try:
            lease, good = self.pool.leases.grant(now, SESSION, ids, versions, max(0.0, deadline - now) + SPARE_SECONDS)
        except LimitReached:  # nothing can be promised: to the reader it is as if nothing were here
            return _nothing(len(keys), order.object_bytes)
        try:
            held[held] = good
            ids, versions = ids[good], versions[good]
            entries = self.pool.table.entries
            sums: U64 = entries[ids, W_SUM].copy()
            offsets = entries[ids, W_OFFSET].astype(np.int64)
            if not order.moves:
                prints = hashes(key_words(keys[held]), np.uint64(account.number), self.pool.table.seed)
                request = Request(now, ids.astype(np.int32), prints, 0)
                asyncio.get_running_loop().call_soon(self.pool.objects.request, request)  # the reader has its answer first
            unsummed = sums == 0
            if unsummed.any() and self.pool.limits.checksum != "off":
                sums[unsummed] = await self.make_sums(ids[unsummed], versions[unsummed])
        except BaseException:
            self.pool.leases.release(SESSION, lease.number)
            raise
        self.granted_pages += len(ids)
        return Grant(held, offsets, sums, order.object_bytes, ids, versions, lease.number)

    def unchanged(self, grant: Grant) -> Mask:
        """See `umbp.transport.base.Shelf`. Pages that were removed under a lease that stood all the time are what they were."""
        same = self.pool.versions(grant.ids, grant.versions)
        if grant.lease in self.pool.leases.leases:
            same[:] = True
        self.stale_pages += int(np.count_nonzero(~same))
        return same

    def give_back(self, grant: Grant) -> None:
        """See `umbp.transport.base.Shelf`."""
        if grant.lease:
            self.pool.leases.release(SESSION, grant.lease)


def _nothing(pages: int, size: int) -> Grant:
    none = np.empty(0, np.int64)
    return Grant(np.zeros(pages, bool), none, none.astype(np.uint64), size, none, none.astype(np.uint64), 0)
