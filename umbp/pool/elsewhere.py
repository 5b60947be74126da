"""Pages that a place could not give after all while a load was looking at them: tried once more, elsewhere, in the same memory.

Theory of operation. A page that is read in parts and fails in the middle has chunks that its readers may have used: they are verified parts
of the page that the disk had listed. Another place that has a page of this key is asked for it, whole; it is read over what is there, and
counts only if its checksum is the one that the disk's copy had. Then all of it is that very page, the chunks that were used included; the
entry, its mark and its chunks stay, and who looks at it sees nothing but a page that took longer. Where the disk's copy had no checksum,
what came counts only if no chunk had been shown.

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
from umbp.pool.parts import Part
from umbp.pool.rooms import Rooms
from umbp.pool.sources import Space
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

    def look(self, rooms: Rooms, sums: U64, shown: bool) -> None:
        """Try these pages elsewhere; each lands, sooner or later. ``sums``: what they must have; ``shown``: chunks of them have been."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._try(rooms, sums, shown)))

    async def end(self, *, cancel: bool) -> None:
        """Until all have landed."""
        if cancel:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=cancel)

    async def _try(self, rooms: Rooms, sums: U64, shown: bool) -> None:
        fetching, batch, codes = self._fetching, self._batch, self._codes
        every, left = rooms.which, np.ones(len(rooms.which), bool)
        try:
            until = fetching.offers_until(batch)
            places = fetching.places.suspects | {self._part.offer.place}
            offers = await fetching.offers(self._space, batch.keys[every], places, until, far=batch.far)
            for source, offer in offers:
                mine: I64 = offer.which[left[offer.which]]
                left[mine] = False
                if len(mine):
                    some = rooms.split(mine)
                    part = Part(source, offer, some.which)
                    which = np.searchsorted(every, some.which)
                    await fetching.read_same(batch, self._space, part, some, Same(sums[which], shown), codes)
        finally:
            rooms.give_back()
            fetching.land(batch, np.array([at for at in every.tolist() if batch.pages[at].running], np.int64), codes)


class Same:
    """What pages must have that are read over parts of themselves: ``sums`` (m,), 0 where it is not known."""

    def __init__(self, sums: U64, shown: bool) -> None:
        self._sums, self._shown = sums, shown

    def __call__(self, places: I64, sums: U64) -> Mask:
        """Which of these pages (indices) are what they were."""
        must = self._sums[places]
        same: Mask = sums == must
        return same if self._shown else same | (must == 0)
