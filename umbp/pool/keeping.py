"""What becomes of pages that have come from elsewhere: leased for who waited for them, and kept, or gone with their last lease.

``policy``: *copy* keeps what was fetched like any other page. *promote* does too, and the node that it came from does not count the read as
a use, so that its own copy goes before those that are used there. *pass_through* keeps it only while somebody who waited for it has it
leased; so it is also with pages that the admission policy declines, and with those that there is no room for (`umbp.pool.passing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import compress

import numpy as np

from umbp.core.fetches import Batch, Ticket
from umbp.core.objects import Account
from umbp.core.pool import Pool
from umbp.errors import LimitReached
from umbp.pool.passing import Passing
from umbp.store.index import hashes, key_words
from umbp.types import I64, U8, U64, Mask, ReadStatus


class Keeping:
    """For all fetches of one pool."""

    def __init__(self, pool: Pool, policy: str, passing: Passing) -> None:
        self.pool = pool
        self.policy = policy
        self.passing = passing
        self._through: dict[int, np.uint64] = {}  # entries that go with their last lease, and their versions

    def __repr__(self) -> str:
        return f"<Keeping by {self.policy}, {len(self._through)} pages only pass through>"

    def keep(
        self, now: float, account: Account, batch: Batch, which: I64, codes: U8, waited: dict[Ticket, list[int]], ours: I64 | None
    ) -> None:
        """Protect what has come for those who waited for it. ``ours``: see `umbp.pool.fetching.Fetching.land`."""
        if ours is None and not (codes[which] == ReadStatus.HIT).any():
            return
        ids, versions = np.full(len(codes), -1), np.zeros(len(codes), np.uint64)
        if ours is not None:
            ids[which], versions[which] = ours, self.pool.table.versions_of(ours)
        else:
            hits = which[codes[which] == ReadStatus.HIT]
            found = self.pool.find_keys(account, batch.keys[hits])
            ids[hits[found.hit]], versions[hits[found.hit]] = found.ids[found.hit], found.versions[found.hit]
        kept = np.zeros(len(codes), bool)  # by a prefetch
        for ticket, places in waited.items():
            there = np.array(places)[ids[places] >= 0]
            self.protect(now, ticket, [batch.pages[at].key for at in there.tolist()], ids[there], versions[there])
            kept[there] |= not ticket.session
        gone = which[(ids[which] >= 0) & self.pool.objects.passing(ids[which])]
        if ours is not None:
            passing = np.ones(len(which), bool) if self.policy == "pass_through" else ~self._admitted(now, account, batch.keys[which])
            gone = np.concatenate([gone, which[passing & ~kept[which]]])
        self._through.update(zip(ids[gone].tolist(), versions[gone], strict=True))

    def protect(self, now: float, ticket: Ticket, keys: Sequence[bytes], ids: I64, versions: U64) -> None:
        """Lease what is there, of these keys, for who waits; where too much is leased, it goes without."""
        through = self.pool.objects.passing(ids)
        if through.any():
            self.passing.hold(now, ticket, list(compress(keys, through.tolist())), ids[through], versions[through])
            ids, versions = ids[~through], versions[~through]
        seconds = ticket.hold if not ticket.session else ticket.deadline - now + self.pool.limits.lease_seconds
        if len(ids) and seconds > 0:
            with contextlib.suppress(LimitReached):
                lease, _ = self.pool.leases.grant(now, ticket.session, ids, versions, seconds)
                ticket.leases.append(lease.number)

    def keeps(self, now: float, account: Account, keys: U8) -> Mask:
        """Which of these are to stay when they have come, (n,) bool."""
        if self.policy == "pass_through":
            return np.zeros(len(keys), bool)
        return self._admitted(now, account, keys) if self.pool.puts.admission is not None else np.ones(len(keys), bool)

    def let_pass(self) -> None:
        """What only passes through and nobody holds any more goes."""
        if self._through:
            ids = np.fromiter(self._through, np.int64, len(self._through))
            versions = np.fromiter(self._through.values(), np.uint64, len(ids))
            same = self.pool.versions(ids, versions)
            free = same & (self.pool.objects.leases[ids] == 0)
            self.pool.objects.hide(ids[free & (self.pool.objects.pins[ids] == 0)], evicted=True)
            for entry in ids[free | ~same].tolist():
                del self._through[entry]

    def _admitted(self, now: float, account: Account, keys: U8) -> Mask:
        """What the admission policy would have had stored."""
        prints = hashes(key_words(keys), np.uint64(account.number), self.pool.table.seed)
        objects = self.pool.objects
        fill = objects.allocated_bytes() / max(1, objects.allocator.capacity_bytes)
        return self.pool.admission.admit(now, prints, fill=fill)
