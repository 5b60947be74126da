"""Reading a load's pages from a disk or a node stage by stage, so that its first layers are there long before its last.

Theory of operation. All pages of a part are reserved at once, and read in the load's order: the first stage of all of them, then the next
(`umbp.core.stages`). After each read the reserved entries say in shared memory which chunks are there (`umbp.store.index`), and the bell
rings; who waits copies them from the reserved memory, before the page is visible to anybody. When the last chunk of a page is there it is
committed like any fetched page. What a reader copied early counts only if it then sees that very reservation committed: so a page that
fails late, is removed meanwhile, or whose pool dies is a miss for that page, whatever of it was copied, and no index ever lists a page that
is not whole.

    reserve all -> (stage: read, mark) ... -> commit what is whole and right, give back the rest

A disk verifies what it reads piece by piece; what comes from a node is compared when a page is whole (`umbp.pool.peer_parts`), which is
early enough, for the same reason: until then nothing of it counts.

A page that fails in any stage is tried elsewhere at once, into the same memory, while the part goes on with the others
(`umbp.pool.elsewhere`), and so are all that are left when the place fails. Nobody has it, or with other bytes where some were shown: then
it has failed for who waits. What is whole of a part is committed when its last stage is read; the part is over when all of its pages are.

Several loads share a place fairly: each read of `READ_BYTES_MAX` at most takes its turn (`umbp.pool.places`), stage by stage. A disk
that hangs keeps its turn, and the pages; who waits has its deadline. A node has `READ_SECONDS_MAX` for each read, and `READ_SHARE` of the
time that is left, so that there is some for another. Nobody reads on for nobody: a stage is not begun when the last who waits has gone.

Costs memory ahead of time: at most one in `SHARE` of the pool's bytes is reserved for all such parts together, and what is above that is
read page by page. Whole pages, of one chunk, come as ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from umbp.core.fetches import Batch
from umbp.core.stages import Ranges, Step, steps
from umbp.errors import InvalidRequest, UmbpError
from umbp.pool.elsewhere import Elsewhere
from umbp.pool.parts import Left, Part
from umbp.pool.places import SUSPECT_FROM_SECONDS
from umbp.pool.rooms import Rooms
from umbp.pool.sources import Ranged, Reading, Space
from umbp.types import I64, U8, Mask, ReadStatus

if TYPE_CHECKING:
    from umbp.pool.fetching import Fetching

log = logging.getLogger("umbp.pool.staged")
SHARE = 2
READ_SECONDS_MAX = 2.0  # what takes longer is of no use to a prefill
READ_SHARE = 0.6
READ_BYTES_MAX = 16 << 20  # of one stage: four threads of a disk, each a run of 4 MiB, and what comes first is there within some 10 ms
PARTS_MAX = 16  # at a time; each has some of the reservations that the pool may have


def checked_stages(stages: Sequence[Any], size: int) -> tuple[Ranges, ...]:
    """What a client has sent. InvalidRequest if these are no byte ranges of pages of this size."""
    made = tuple(tuple((int(start), int(stop)) for start, stop in stage) for stage in stages)
    for start, stop in (span for stage in made for span in stage):
        if not 0 <= start < stop <= size:
            raise InvalidRequest(f"bytes {start} to {stop} of a page of {size}", field="stages", example=f"[[[0, {size}]]]")
    return made


class Staged:
    """All parts of one pool that are read so."""

    def __init__(self, fetching: Fetching) -> None:
        self.fetching = fetching
        self.parts = 0
        self.reserved_bytes = 0

    def __repr__(self) -> str:
        return f"<Staged {self.parts} parts, {self.reserved_bytes} bytes>"

    def pages_max(self, wanted: int, space: Space, besides: int) -> int:
        """How many of so many pages may be read so now, ``besides`` others that are about to be."""
        room = self.fetching.pool.objects.allocator.capacity_bytes // SHARE - self.reserved_bytes
        return 0 if self.parts >= PARTS_MAX else max(0, min(wanted, room // space.object_bytes - besides))

    async def take(self, batch: Batch, space: Space, part: Part, codes: U8) -> Left:
        """Read one part. The pages (indices of the batch) that did not come, and may be elsewhere or pass through."""
        size = len(part.which) * space.object_bytes
        if self.fetching.now() >= batch.deadline:
            codes[part.which] = ReadStatus.BUSY
            self.fetching.land(batch, part.which, codes)
            return Left(part.which[:0], part.which[:0])
        self.parts += 1
        self.reserved_bytes += size
        failed = part.which[:0]
        try:
            waiting, refused, rooms = self.fetching.reserve(batch, space, part, batch.deadline, codes)
            if len(rooms.which):
                failed = await self._fill(batch, space, part, rooms, codes)
        finally:
            self.parts -= 1
            self.reserved_bytes -= size
        return Left(np.concatenate([failed, await self.fetching.await_writers(batch, waiting, codes)]), refused)

    async def _fill(self, batch: Batch, space: Space, part: Part, rooms: Rooms, codes: U8) -> I64:
        """Read into these reservations and end them; the pages that failed all together, and are left to the caller."""
        fetching, source = self.fetching, part.source
        assert isinstance(source, Ranged)
        which, stored = rooms.which, np.zeros(len(rooms.which), bool)
        elsewhere = Elsewhere(fetching, batch, space, part, codes)
        reading: Reading | None = None
        done = broken = False
        try:
            reading = await source.begin(space, part.offer, batch.keys[which], fetching.data, rooms.offsets)
            if await self._stages(batch, part, reading, steps(batch.stages, space.object_bytes), rooms, codes, elsewhere):
                taken = reading.end()
                codes[which[taken.status == ReadStatus.MISS]] = ReadStatus.MISS
                good = np.flatnonzero(taken.status == ReadStatus.HIT)
                stored[rooms.store(good, taken.sums[good])] = True
            done = True
        except (UmbpError, OSError) as error:
            broken = True
            fetching.places.suspect(part.offer.place, error)
        finally:
            if reading is not None:
                reading.close()
            rooms.give_back()
            self._count(part, space, which, stored, codes)
            codes[which[stored]] = ReadStatus.HIT
            fetching.land(batch, which[stored], codes, ours=rooms.ids[stored])
            await elsewhere.end(cancel=not done)
        rest: I64 = which[~stored]
        rest = rest[np.array([batch.pages[at].running for at in rest.tolist()], bool)]
        if broken:
            return rest
        fetching.land(batch, rest, codes)
        return which[:0]

    async def _stages(
        self, batch: Batch, part: Part, reading: Reading, todo: list[Step], rooms: Rooms, codes: U8, elsewhere: Elsewhere
    ) -> bool:
        """All stages; False if nobody waits any more. Pages that fail are looked for elsewhere at once."""
        which = rooms.which
        alive: Mask = np.ones(len(which), bool)
        for number, step in enumerate(todo):
            each = sum(stop - start for start, stop in step.spans)
            count = max(1, min(reading.pages_max, min(READ_BYTES_MAX, part.source.read_bytes_max) // each))
            left = np.flatnonzero(alive)
            chunks = [left[start : start + count] for start in range(0, len(left), count)]
            reads = (self._read(batch, part, reading, step, chunk, which, rooms.ids) for chunk in chunks)
            done = await asyncio.gather(*reads, return_exceptions=True)  # all of them: the memory goes when this is over
            for chunk, status in zip(chunks, done, strict=True):
                if isinstance(status, BaseException):
                    raise status
                if status is None:
                    codes[which[alive]] = ReadStatus.BUSY
                    return False
                bad = chunk[status != ReadStatus.HIT]
                if len(bad):
                    alive[bad] = False
                    codes[which[bad]] = status[status != ReadStatus.HIT]
                    elsewhere.look(rooms.split(bad), tuple(span for shown in todo[:number] for span in shown.spans))
        return True

    async def _read(self, batch: Batch, part: Part, reading: Reading, step: Step, chunk: I64, which: I64, ids: I64) -> U8 | None:
        """One read of one stage, when it is its turn: `ReadStatus` each. None if nobody waits any more."""
        fetching = self.fetching
        async with fetching.places.of(part.offer.place).turns, fetching.reads:
            now = fetching.now()
            if now >= batch.deadline:
                return None
            seconds = min(READ_SECONDS_MAX, READ_SHARE * (batch.deadline - now))
            try:
                status = await reading.read(chunk, step.spans, now + seconds)
            except (UmbpError, OSError) as error:
                if not (isinstance(error, TimeoutError) and seconds < SUSPECT_FROM_SECONDS):
                    fetching.places.suspect(part.offer.place, error)
                return np.full(len(chunk), ReadStatus.FAILED, np.uint8)
            fetching.pool.table.fill(ids[chunk[status == ReadStatus.HIT]], step.chunks)
            fetching.bell.ring({ticket.session for at in which[chunk].tolist() for ticket, _ in batch.pages[at].waiters}, lacking=False)
            return status

    def _count(self, part: Part, space: Space, which: I64, stored: Mask, codes: U8) -> None:
        counts = self.fetching.counts[part.source.name]
        counts.pages += int(np.count_nonzero(stored))
        counts.size_bytes += int(np.count_nonzero(stored)) * space.object_bytes
        missed = int(np.count_nonzero(codes[which[~stored]] == ReadStatus.MISS))
        counts.missed += missed
        counts.failed += int(np.count_nonzero(~stored)) - missed
