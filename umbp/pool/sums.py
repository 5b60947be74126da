"""Checksums made by the pool: right after commit, off the writer's path, in a thread that yields to traffic.

xxh3-64 over the object's bytes; 0 is kept for "none yet". A batch waits until commits have paused for a moment, at most `WAIT_SECONDS_MAX`:
a checksum reads every byte once more, and a writer that is using the memory's bandwidth should have it. Between slices the thread looks
again. An object that goes meanwhile has another version afterwards, and its sum is thrown away. One that has its sum by now, as a reader
asked for it, is not summed again: it would cost another pass over its bytes, and hide what became of them since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from umbp.core.pool import Pool
from umbp.store.checksums import checksums
from umbp.types import I64, U8, U64

QUIET_SECONDS = 0.02
WAIT_SECONDS_MAX = 2.0
SLICE_BYTES = 8 << 20  # about 1 ms of reading


class Summer:
    """Works off the pool's queue of objects without checksum."""

    def __init__(self, pool: Pool, data: U8, now: Callable[[], float]) -> None:
        self.pool = pool
        self.data = data
        self.now = now
        self.last_commit = 0.0
        self._more = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")

    def __repr__(self) -> str:
        return f"<Summer {self.pool.unsummed_batches} batches wait>"

    def committed(self) -> None:
        """Something was committed just now."""
        self.last_commit = self.now()
        self._more.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._more.wait()
            self._more.clear()
            while (batch := self.pool.next_unsummed()) is not None:
                await self._quiet()
                await self.make(*batch, polite=True)

    async def make(self, ids: I64, versions: U64, *, polite: bool = False) -> U64:
        """Checksums of these objects, made where there are none and entered in the index; 0 for those that are gone."""
        sums = self.pool.sums_of(ids, versions)
        loop = asyncio.get_running_loop()
        todo = np.flatnonzero(self.pool.versions(ids, versions) & (sums == 0))  # a client may ask for ids that never were
        while len(todo):
            count = max(1, int(np.searchsorted(np.cumsum(self.pool.objects.size[ids[todo]]), SLICE_BYTES)))
            part, todo = todo[:count], todo[count:]
            sums[part] = self.pool.sums_of(ids[part], versions[part])
            part = part[self.pool.versions(ids[part], versions[part]) & (sums[part] == 0)]
            offsets, lengths = self.pool.objects.offset[ids[part]], self.pool.objects.size[ids[part]]
            made = await loop.run_in_executor(self._thread, checksums, self.data, offsets, lengths)
            sums[part] = self.pool.set_sums(ids[part], versions[part], made)
            if polite and len(todo):
                await self._quiet()
        return sums

    async def _quiet(self) -> None:
        for _ in range(int(WAIT_SECONDS_MAX / QUIET_SECONDS)):
            wait = self.last_commit + QUIET_SECONDS - self.now()
            if wait <= 0:
                break
            await asyncio.sleep(wait)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
