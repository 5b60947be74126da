"""The SSD tier as a source of pages (`umbp.pool.sources`): each disk is a place, a page comes straight into its reserved memory.

It comes whole or, for loads that want their first layers first, in parts.

A page that was removed while it was read is a MISS, so that it does not come back by way of DRAM; one that could not be read back is
FAILED, is listed no more from then on, and may be stored again. Disks that are away, or hang, offer nothing.
"""

from __future__ import annotations

import numpy as np

from umbp.core.stages import Ranges
from umbp.pool.sources import Offer, Space, Taken
from umbp.pool.ssd import SsdSide
from umbp.store.index import place_word
from umbp.store.ssd_pieces import PieceReader
from umbp.store.ssd_reads import takes_direct
from umbp.transport.base import Came
from umbp.types import I64, U8, ReadStatus, Tier

READ_BYTES_MAX = 32 << 20  # 30 ms of a fast disk; a read costs the pool's loop 2 to 3 ms, one of half as many bytes nearly as much
RATE_FIRST = 1e9  # bytes a second, until one was measured
RATE_SHARE = 0.2  # of each new measurement


class SsdSource:
    """Reads from `SsdSide`."""

    name = "ssd"
    local = True
    ranged = True
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
                seconds = len(which) * space.object_bytes / self._rates.get(name, RATE_FIRST)
                offers.append(Offer(name, Tier.SSD, which, seconds, ranged=True))
        return offers

    async def read(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64, deadline: float, came: Came) -> Taken:
        """See `umbp.pool.sources.Source`."""
        tier, size = self.side.tier, space.object_bytes
        place = place_word(space.number, size)
        bodies, straight = _bodies(data, offsets, size)
        sums = np.zeros(len(keys), np.uint64)
        began = self.side.now()
        codes = await self.side.walk(tier.read_steps(began, place, keys, bodies, straight=straight, sums=sums, offsets=offsets))
        await self.side.turns.wait()
        status = np.where(codes == ReadStatus.BUSY, ReadStatus.FAILED, codes).astype(np.uint8)
        hit = status == ReadStatus.HIT
        status[hit & ~tier.find(place, keys)] = ReadStatus.MISS  # removed meanwhile
        if hit.any():
            self.measured(offer.place, int(np.count_nonzero(hit)) * size, self.side.now() - began)
            self.side.moving.came(place, keys[hit])
        return Taken(status, sums, verified=True)

    async def begin(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64) -> SsdReading:
        """See `umbp.pool.sources.Ranged`."""
        bodies, straight = _bodies(data, offsets, space.object_bytes)
        place = place_word(space.number, space.object_bytes)
        now = self.side.now()
        pieces = PieceReader(self.side.tier, now, place, keys, bodies, straight=straight)
        try:
            await self.side.walk(pieces.open_steps(now))
        except BaseException:
            pieces.close()
            raise
        return SsdReading(self, offer.place, place, keys, pieces)

    def measured(self, place: str, size_bytes: int, seconds: float) -> None:
        """So many bytes came from there in this time."""
        rate = size_bytes / max(1e-6, seconds)
        known = self._rates.get(place, rate)
        self._rates[place] = known + RATE_SHARE * (rate - known)

    async def close(self) -> None:
        """`SsdSide` closes the disks."""


class SsdReading:
    """Pages of one disk that are read in parts."""

    def __init__(self, source: SsdSource, place: str, word: np.uint64, keys: U8, pieces: PieceReader) -> None:
        self._source, self._place, self._word, self._keys, self._pieces = source, place, word, keys, pieces

    def __repr__(self) -> str:
        return f"<SsdReading from {self._place}: {self._pieces!r}>"

    pages_max = 1 << 16

    async def read(self, which: I64, spans: Ranges, deadline: float) -> U8:
        """See `umbp.pool.sources.Reading`; it ends when the disk is done, whatever the deadline is."""
        side = self._source.side
        began = side.now()
        status = await side.walk(self._pieces.read_steps(began, which, spans))
        came = int(np.count_nonzero(status == ReadStatus.HIT)) * sum(stop - start for start, stop in spans)
        if came:
            self._source.measured(self._place, came, side.now() - began)
        return status

    def end(self) -> Taken:
        """See `umbp.pool.sources.Reading`; a page that was removed meanwhile is a MISS."""
        self._pieces.end()
        status, tier = self._pieces.status.copy(), self._source.side.tier
        status[(status == ReadStatus.HIT) & ~tier.find(self._word, self._keys)] = ReadStatus.MISS
        self._source.side.moving.came(self._word, self._keys[status == ReadStatus.HIT])
        return Taken(status, self._pieces.wholes, verified=True)

    def close(self) -> None:
        """See `umbp.pool.sources.Reading`."""
        self._pieces.close()


def _bodies(data: U8, offsets: I64, size: int) -> tuple[list[memoryview], bool]:
    """The memory of these pages, and whether direct I/O takes all of it as it is."""
    view = memoryview(data.data)
    straight = bool(takes_direct(data.ctypes.data, size) and (offsets % 512 == 0).all())
    return [view[offset : offset + size] for offset in offsets.tolist()], straight
