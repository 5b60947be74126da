"""A lease in the hands of a client: what it holds, views of it, and whether it still counts.

While it is held, the pool keeps exactly these versions where they are. It is renewed in the background at a third of its time. A process
that was stopped for longer loses it: the memory under its views may then hold anything. So whoever used views asks `check` (or leaves the
``with`` block, which asks) before the bytes count: a version that is still the same was there all the time, lease or no lease.
"""

from __future__ import annotations

import time

import numpy as np

from umbp import wire
from umbp.client.link import Bond, Link, Look
from umbp.client.opened import Opened
from umbp.client.steps import Operation
from umbp.errors import InvalidRequest, LeaseLost
from umbp.store.index import W_OFFSET, W_VERSION
from umbp.types import I64, U8, Mask


class Lease:
    """Protection of the stored ones of some keys. ``held``: (n,) bool, in the order of the keys."""

    def __init__(
        self,
        link: Link,
        opened: Opened,
        number: int,
        look: Look | None,
        held: Mask,
        object_bytes: int,
        asked: float,
        seconds: float,
        *,
        renew: bool,
    ) -> None:
        self.number = number
        self.look = look
        self.held = held
        self.seconds = seconds
        self.renew = renew
        self.lost = False
        self.renewed_at = asked  # before the call: the pool's clock started later
        self._link = link
        self._opened = opened
        self._object_bytes = object_bytes
        self._over = False

    @classmethod
    def of_nothing(cls, link: Link, opened: Opened, count: int, object_bytes: int) -> Lease:
        """A lease that holds none of ``count`` keys."""
        lease = cls(link, opened, 0, None, np.zeros(count, bool), object_bytes, time.monotonic(), 0.0, renew=False)
        lease._over = True
        return lease

    def find_moved(self) -> None:
        """Once the pool has granted it: pages that had moved since they were looked up are leased where they are now (`umbp.core.levels`).

        If the lease is over by now and the entry is another page's, that is not held; one that is removed (version 0) stays in place as
        long as the lease holds, and is found changed if it does not.
        """
        if self.look is None:
            return
        found, index = self.look.found, self.look.bond.index
        moved = np.flatnonzero(self.held & (index.versions_of(found.ids) != found.versions))
        if not len(moved):
            return
        ids, before = found.ids[moved], index.versions_of(found.ids[moved])
        rows = index.entries[ids]
        same = (rows[:, :W_OFFSET] == found.rows[moved, :W_OFFSET]).all(axis=1)  # of this key, namespace and size
        same &= (rows[:, W_VERSION] == before) & (before == index.versions_of(ids)) & (before & np.uint64(1) == 0)
        self.held[moved[~same]] = False
        found.rows[moved[same], W_OFFSET] = rows[same, W_OFFSET]
        there = same & (before != 0)
        found.rows[moved[there], W_VERSION] = before[there]

    def __repr__(self) -> str:
        state = "lost" if self.lost else "over" if self._over else "held"
        return f"<Lease {self.number} of {int(np.count_nonzero(self.held))} of {len(self.held)} pages, {state}>"

    def __len__(self) -> int:
        return len(self.held)

    @property
    def expired(self) -> bool:
        """Whether its time is over by this process's clock; the pool may have ended it."""
        return self.lost or time.monotonic() > self.renewed_at + self.seconds

    def view(self, index: int) -> U8:
        """The bytes of item ``index``: (object_bytes,) uint8, read-only, in place. Valid while the lease is held; see `check`."""
        if not -len(self.held) <= index < len(self.held) or not self.held[index]:
            raise InvalidRequest(f"item {index} is not held by this lease", field="index", example="an index where lease.held is True")
        if self._over:
            raise LeaseLost("this lease was released")
        assert self.look is not None
        offset = int(self.look.found.rows[index, 5])
        view: U8 = self.look.bond.data[offset : offset + self._object_bytes].view()
        view.flags.writeable = False
        return view

    @property
    def data(self) -> U8:
        """The segment's pages, for those who copy many at once; (0,) if nothing is held."""
        return self.look.bond.data if self.look is not None else np.empty(0, np.uint8)

    @property
    def offsets(self) -> I64:
        """(n,) int64: where each item lies in `data`; meaningless where ``held`` is False."""
        if self.look is None:
            return np.zeros(len(self.held), np.int64)
        return self.look.found.rows[:, 5].view(np.int64)

    def check(self) -> Mask:
        """Which items were whole until now; (n,) bool. What was read from a view before this call counts exactly where it is True."""
        unchanged = self.unchanged()
        # A leased object that was removed is invisible (its version is 0) and still in place: held, as long as the lease is. The lease
        # is as long as its session is: asked after the versions were read, so that a pool that restarts now cannot have reused anything.
        if self.look is not None and not self.expired and not self._over and self._link.bond_or_none() is self.look.bond:
            return self.held.copy()
        return self.held & unchanged

    def unchanged(self) -> Mask:
        """Which items are still stored as the versions that were leased, whatever became of the lease; (n,) bool."""
        if self.look is None:
            return np.zeros(len(self.held), bool)
        bond, found = self.look.bond, self.look.found
        same: Mask = bond.index.versions_of(found.ids) == found.versions
        if self._link.number_of(bond, self._opened) != self.look.number:
            same[:] = False
        return same

    def end(self) -> bool:
        """Mark as over; True if the pool must be told."""
        if self._over:
            return False
        self._over = True
        self._link.drop(self)
        return True

    def raise_if_lost(self, unchanged: Mask) -> None:
        """After release, which tells: LeaseLost if the pool had ended the lease before and items were not `unchanged` after their use."""
        if self.lost and (gone := np.flatnonzero(self.held & ~unchanged)).size:
            self._link.statistics.leases_lost += 1
            raise LeaseLost(
                f"the lease was lost (this process was stopped for more than {self.seconds} s, or the pool restarted) and "
                f"{len(gone)} of its pages changed, the first is item {gone[0]}: what was read of them does not count"
            )


def let_go(bond: Bond, reply: wire.Leased, blob: wire.Blob) -> Operation[None]:
    """Of a lease that was granted when nobody waited for it any more."""
    yield bond.call(wire.Release(reply.number))
