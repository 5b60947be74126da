"""The SSD tier as a source of pages (`umbp.pool.sources`): each disk is a place, and a page comes straight into its reserved memory.

A page that was removed while it was read is a MISS, so that it does not come back by way of DRAM; one that could not be read back is
FAILED, is listed no more from then on, and may be stored again. Disks that are away, or hang, offer nothing.
"""

from __future__ import annotations

import numpy as np

from umbp.pool.sources import Offer, Space, Taken
from umbp.pool.ssd import SsdSide
from umbp.store.index import place_word
from umbp.store.ssd_reads import takes_direct
from umbp.types import I64, U8, ReadStatus, Tier

READ_BYTES_MAX = 16 << 20  # four threads, each a run of 4 MiB: the disk's bandwidth, and the first pages within some 10 ms
RATE_FIRST = 1e9  # bytes a second, until one was measured
RATE_SHARE = 0.2  # of each new measurement


class SsdSource:
    """Reads from `SsdSide`."""

    name = "ssd"
    local = True
    read_bytes_max = READ_BYTES_MAX

    def __init__(self, side: SsdSide) -> None:
        self.side = side
        self._rates: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<SsdSource {self.side.tier!r}>"

    async def offers(self, space: Space, keys: U8, exclude: frozenset[str], deadline: float, *, peek: bool) -> list[Offer]:
        """See `umbp.pool.sources.Source`."""
        tier, now = self.side.tier, self.side.now()
        place = place_word(space.number, space.object_bytes)
        found = tier.catalog.find(place, keys)
        hits = np.flatnonzero(found.hit)
        if not len(hits):
            return []
        files = tier.catalog.where(place, found, hits).pages.files
        numbers, inverse = np.unique(files, return_inverse=True)
        owners = [tier.drives.index(tier.ledger.drive_of[id(tier.catalog.files[number])]) for number in numbers.tolist()]
        owner = np.array(owners)[inverse]
        offers = []
        for at, drive in enumerate(tier.drives):
            name, which = f"ssd:{drive.path}", hits[owner == at]
            if len(which) and name not in exclude and drive.may_read(now):
                offers.append(Offer(name, Tier.SSD, which, len(which) * space.object_bytes / self._rates.get(name, RATE_FIRST)))
        return offers

    async def read(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64, deadline: float) -> Taken:
        """See `umbp.pool.sources.Source`."""
        tier, size = self.side.tier, space.object_bytes
        place = place_word(space.number, size)
        before = tier.catalog.find(place, keys)
        sums = np.where(before.hit, tier.catalog.whole[np.where(before.hit, before.ids, 0)], 0).astype(np.uint64)
        view = memoryview(data.data)
        bodies = [view[offset : offset + size] for offset in offsets.tolist()]
        straight = bool(takes_direct(data.ctypes.data, size) and (offsets % 512 == 0).all())
        began = self.side.now()
        codes = await self.side.walk(tier.read_steps(began, place, keys, bodies, straight=straight))
        status = np.where(codes == ReadStatus.BUSY, ReadStatus.FAILED, codes).astype(np.uint8)
        hit = status == ReadStatus.HIT
        status[hit & ~tier.find(place, keys)] = ReadStatus.MISS  # removed meanwhile
        if hit.any():
            rate = int(np.count_nonzero(hit)) * size / max(1e-6, self.side.now() - began)
            known = self._rates.get(offer.place, rate)
            self._rates[offer.place] = known + RATE_SHARE * (rate - known)
        return Taken(status, sums, verified=True)

    async def close(self) -> None:
        """`SsdSide` closes the disks."""
