"""Pages between the levels of the memory: down when a level fills up, up when they were asked for on a lower one (`umbp.core.levels`).

Theory of operation. One task asks the state machine for a portion, has it copied by a thread (the copy of a page lets go of the interpreter
lock), and settles it; then it waits for as long as the portion takes at ``numa_move_rate``. Bounded: one portion at a time. What fails: a
copy cannot; a fault of ours is said, its portion stays where it was, and the pool goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from umbp.config import PoolConfig
from umbp.core.levels import Level, Levels, Move
from umbp.core.pool import Pool
from umbp.types import U8

log = logging.getLogger("umbp.pool.memory")
IDLE_SECONDS = 0.05  # between two looks whether there is something to move
FAULT_SECONDS = 1.0


class MemoryMoving:
    """Of one pool; with one level there is nothing to do. ``data`` is the pages."""

    def __init__(self, config: PoolConfig, pool: Pool, data: U8, now: Callable[[], float]) -> None:
        self.config, self.pool, self.data, self.now = config, pool, data, now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbp-move")

    def __repr__(self) -> str:
        return f"<MemoryMoving over {self.levels!r}>"

    @property
    def levels(self) -> Levels:
        """What moves."""
        return self.pool.levels

    def named(self) -> Iterator[tuple[str, int, Level]]:
        """The levels by name, first to last, with their number; none where there is but one."""
        every = self.levels.every
        yield from zip(self.config.numa_levels, range(len(every)), every, strict=True) if len(every) > 1 else ()

    async def run(self) -> None:
        """As long as the pool does."""
        while len(self.levels.every) > 1:
            seconds = IDLE_SECONDS
            try:
                move = self.levels.next(self.now())
                if move is not None:
                    await self._copy(move)
                    seconds = 2 * move.size_bytes / self.config.numa_move_rate  # read once, written once
            except Exception:  # our own fault: the pool goes on
                log.exception("pages did not move between the levels of the memory")
                seconds = FAULT_SECONDS
            await asyncio.sleep(seconds)

    async def _copy(self, move: Move) -> None:
        """Where the pool stops in the middle of it, the target stays reserved: it goes with the next start, and until then with nobody."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, copy, self.data, move)
        except Exception:
            self.levels.settle(move, copied=False)
            raise
        self.levels.settle(move, copied=True)

    def close(self) -> None:
        """After `run` has ended; when this returns nothing is written any more."""
        self._thread.shutdown()


def copy(data: U8, move: Move) -> None:
    """The bytes of all pages of a move."""
    for source, target in zip(move.sources.tolist(), move.targets.tolist(), strict=True):
        np.copyto(data[target : target + move.size], data[source : source + move.size])


__all__ = ["MemoryMoving", "copy"]
