"""Pages between the levels of the SSD tier: down when a level fills up, up when they were read from a lower one (`umbp.store.ssd_levels`).

Theory of operation. A task a level copies down what is wanted least, in portions, at `ssd_clean_rate` a disk at most. What `SsdSource` has
read from a lower level is noted here; a moment later, when it is in DRAM, it is written to the first level from there, while it is held
like a lease: so nothing is read twice. A page that has not stayed in DRAM, or for which the first level has no room, comes up another time.

Bounded: `CAME_MAX` reads are remembered, and as many batches are held as `umbp.pool.ssd.SsdSide` allows for all that it writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

import numpy as np

from umbp.config import PoolConfig
from umbp.core.objects import Account
from umbp.core.pool import Pool
from umbp.store.ssd import SsdTier
from umbp.store.ssd_levels import Level
from umbp.store.ssd_moving import offload_steps, promote_steps
from umbp.store.ssd_records import Batch
from umbp.store.ssd_system import Steps
from umbp.types import I64, U8

log = logging.getLogger("umbp.pool.ssd")
CAME_MAX = 64
LANDING_SECONDS = 0.1  # what was read is committed in DRAM by then
OFFLOAD_SECONDS = 0.2


class Side(Protocol):
    """What of the SSD tier's side is needed here; `umbp.pool.ssd.SsdSide` is one."""

    config: PoolConfig
    pool: Pool
    tier: SsdTier
    slots: asyncio.Semaphore
    batch_bytes: int

    def now(self) -> float: ...
    def walk(self, steps: Steps[int]) -> Coroutine[Any, Any, int]: ...
    def batch_of(self, ids: I64) -> Batch: ...
    def account_or_none(self, number: int) -> tuple[bytes, Account] | None: ...


class SsdMoving:
    """The tasks of one pool's SSD tier; with one level there are none."""

    def __init__(self, side: Side) -> None:
        self.side = side
        config, levels = side.config, side.tier.levels
        levels.promotes = config.ssd_promote
        levels.high, levels.low = config.ssd_marks
        self._came: deque[tuple[float, int, U8]] = deque(maxlen=CAME_MAX)
        self._more = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SsdMoving over {self.side.tier.levels!r}, {len(self._came)} reads noted>"

    def named(self) -> Iterator[tuple[str, Level]]:
        """The levels by name; none where there is but one."""
        names, every = self.side.config.ssd_levels, self.side.tier.levels.every
        yield from zip(names, every, strict=True) if len(every) > 1 else ()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What is to run as long as the pool does."""
        count = len(self.side.tier.levels)
        running = [self._offload(level) for level in range(count - 1)]
        return running + ([self._promote()] if count > 1 and self.side.tier.levels.promotes else [])

    def came(self, place: np.uint64, keys: U8) -> None:
        """These pages were read back from SSD, and are on their way into DRAM."""
        if len(self.side.tier.levels) == 1 or not self.side.tier.levels.promotes or not len(keys):
            return
        tier = self.side.tier
        found = tier.catalog.find(place, keys)
        low = np.flatnonzero(found.hit)
        low = low[tier.levels.levels_of(tier.catalog, tier.ledger, found.ids[low]) > 0]
        if len(low):
            self._came.append((self.side.now() + LANDING_SECONDS, int(place) & 0xFFFF_FFFF, keys[low]))
            self._more.set()

    async def _offload(self, level: int) -> None:
        while True:
            moved, disks = 0, len(self.side.tier.levels.every[level].drives)
            try:
                moved = await self.side.walk(offload_steps(self.side.tier, self.side.now(), level))
            except Exception:  # our own fault: the pool goes on
                log.exception("nothing went down from level %d", level)
            await asyncio.sleep(moved / (self.side.config.ssd_clean_rate * disks) if moved else OFFLOAD_SECONDS)

    async def _promote(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._came:
                due, number, keys = self._came.popleft()
                await asyncio.sleep(max(0.0, due - self.side.now()))
                try:
                    await self._up(number, keys)
                except Exception:  # our own fault: the pool goes on
                    log.exception("%d pages did not come up", len(keys))

    async def _up(self, number: int, keys: U8) -> None:
        """Of these keys, what is in DRAM now."""
        objects = self.side.pool.objects
        start = 0
        while start < len(keys) and (known := self.side.account_or_none(number)) is not None:
            step = max(1, self.side.batch_bytes // known[1].object_bytes)
            await self.side.slots.acquire()
            found = self.side.pool.find_keys(known[1], keys[start : start + step])
            ids = np.unique(found.ids[found.hit])
            start += step
            if known[1].number != number or not len(ids):
                self.side.slots.release()
                continue
            objects.lease(ids)  # in the step in which they were seen to be there
            try:
                await self.side.walk(promote_steps(self.side.tier, self.side.now(), self.side.batch_of(ids)))
            finally:
                objects.unlease(ids)
                self.side.slots.release()
