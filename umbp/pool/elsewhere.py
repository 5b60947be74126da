"""Pages that a place could not give after all while a load was looking at them: tried once more, elsewhere, in the same memory.

Theory of operation. A page that is read in parts and fails in the middle has parts that its readers may have used. Another place that has
a page of this key is asked for it, whole; it is read over what is there, and counts only if it is right by its own checksum, and the parts
that had been shown are the same bytes afterwards as before. Then all that was used of it is that very page's; the entry, its mark and its
chunks stay, and who looks at it sees nothing but a page that took longer. So it is no matter why the first copy failed, nor whether what
was shown of it had been verified.

    read in parts --a part fails--> reservation of its own --another place has it--> read whole, compared --> all chunks, committed
                                                          `--nobody has it, or it fails too--> given back: a miss for that page

Each batch of pages that fail together is one task of the part that they were read with; that part goes on meanwhile, and is over when they
are. Bounded: one attempt, within the deadline of who waits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from umbp.core.fetches import Batch
from umbp.core.stages import Ranges
from umbp.pool.parts import Part
from umbp.pool.rooms import Rooms
from umbp.pool.sources import Space
from umbp.store.checksums import checksums
from umbp.types import I64, U8, U64, Mask

if TYPE_CHECKING:
    from umbp.pool.fetching import Fetching


class Elsewhere:
    """The pages of one part that failed while it was read. ``codes``: what each page of the batch ends with where it does not come."""

    def __init__(self, fetching: Fetching, batch: Batch, space: Space, part: Part, codes: U8) -> None:
        self._fetching, self._batch, self._space, self._part, self._codes = fetching, batch, space, part, codes
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Elsewhere {sum(not task.done() for task in self._tasks)} attempts>"

    def look(self, rooms: Rooms, shown: Ranges) -> None:
        """Try these pages elsewhere; each lands, sooner or later. ``shown``: the bytes of them that readers may have used."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._try(rooms, shown)))

    async def end(self, *, cancel: bool) -> None:
        """Until all have landed."""
        if cancel:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=cancel)

    async def _try(self, rooms: Rooms, shown: Ranges) -> None:
        fetching, batch, codes = self._fetching, self._batch, self._codes
        every, left = rooms.which, np.ones(len(rooms.which), bool)
        try:
            until = fetching.offers_until(batch)
            places = fetching.places.suspects | {self._part.offer.place}
            offers = await fetching.offers(self._space, batch.keys[every], places, until, far=batch.far)
            for source, offer in offers:
                mine: I64 = offer.which[left[offer.which]]
                left[mine] = False
                step = max(1, source.read_bytes_max // self._space.object_bytes)
                for start in range(0, len(mine), step):
                    some = rooms.split(mine[start : start + step])
                    same = Same(fetching.data, some.offsets, shown) if shown else None
                    await fetching.read_over(batch, self._space, Part(source, offer, some.which), some, same, codes)
        finally:
            rooms.give_back()
            fetching.land(batch, np.array([at for at in every.tolist() if batch.pages[at].running], np.int64), codes)


class Same:
    """The bytes ``spans`` of pages at ``offsets`` (m,), which must be there again when the pages have been read over."""

    def __init__(self, data: U8, offsets: I64, spans: Ranges) -> None:
        self._data, self._offsets, self._spans = data, offsets, spans
        self._before: U64 | None = None

    async def note(self) -> None:
        """Before anything is written there."""
        self._before = await asyncio.to_thread(self._sums)

    async def again(self) -> Mask:
        """Which pages have them now, (m,) bool."""
        assert self._before is not None
        same: Mask = (await asyncio.to_thread(self._sums) == self._before).all(axis=1)
        return same

    def _sums(self) -> U64:
        each = [checksums(self._data, self._offsets + start, np.full(len(self._offsets), stop - start)) for start, stop in self._spans]
        return np.array(each, np.uint64).reshape(len(self._spans), -1).T
