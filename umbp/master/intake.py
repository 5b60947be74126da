"""Changes on their way into the directory: in slices of about a millisecond, one a round of the event loop, small bundles together.

Theory of operation. Bundles and pieces of all nodes wait in one queue, in the order they came. Whoever has one in there takes turns with
the others; a turn begins with one round of the loop, in which questions are answered and further bundles arrive, and then applies one
slice from the head of the queue, whosever it is. So between two slices everybody else is served, however many nodes send at once; and
many small bundles cost one batch of the directory together instead of one each. A node sends one thing at a time, so of one node nothing
is out of order.

A slice has as many keys as took `SLICE_SECONDS` of the processor of late: what counts is the time that a question waits. The time that
others had the processor is left out, since shorter slices would not make it less, and cost more.

What was not applied because its node is not a member any more is refused with `UnknownNode`; what its sender does not wait for any more
(a connection that ended, a stop) is taken out of the queue, and comes again with its number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from umbp.core.master import Master, Part
from umbp.errors import UmbpError

SLICE_SECONDS = 0.001
SLICE_KEYS_MIN, SLICE_KEYS_MAX = 512, 8192
_FIRST_KEYS = 1024
_LEARN_FROM = 512  # keys: of fewer the time says nothing about a key


@dataclass(slots=True, eq=False)
class _Waiting:
    """A bundle or piece; from ``start`` on it is still to be applied."""

    part: Part
    start: int = 0
    refused: UmbpError | None = None

    @property
    def done(self) -> bool:
        return self.refused is not None or self.start == len(self.part.words)


class Intake:
    """The queue of one master."""

    def __init__(self, core: Master) -> None:
        self._core = core
        self._waiting: deque[_Waiting] = deque()
        self._turn = asyncio.Lock()
        self._key_seconds = SLICE_SECONDS / _FIRST_KEYS

    def __repr__(self) -> str:
        return f"<Intake {len(self._waiting)} waiting, slices of {self.slice_keys} keys>"

    @property
    def slice_keys(self) -> int:
        """How many keys are applied in one go."""
        return max(SLICE_KEYS_MIN, min(SLICE_KEYS_MAX, int(SLICE_SECONDS / self._key_seconds)))

    async def apply(self, part: Part) -> None:
        """Until all of it is applied. UnknownNode if the member goes meanwhile."""
        mine = _Waiting(part)
        if mine.done:
            return
        self._waiting.append(mine)
        try:
            while not mine.done:
                async with self._turn:
                    await asyncio.sleep(0)
                    if not mine.done:
                        self._apply_slice()
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        if mine.refused is not None:
            raise mine.refused

    def _apply_slice(self) -> None:
        slices: list[tuple[_Waiting, Part]] = []
        room = self.slice_keys
        for one in list(self._waiting):
            if room <= 0:
                break
            try:
                self._core.membership.member(one.part.member.node, one.part.member.registration)
            except UmbpError as error:
                one.refused = error
                continue
            slices.append((one, one.part.sliced(one.start, one.start + room)))
            room -= len(slices[-1][1].words)
        if slices:
            began = time.thread_time()
            self._core.apply(time.monotonic(), *(part for _, part in slices))
            self._learn(sum(len(part.words) for _, part in slices), time.thread_time() - began)
        for one, part in slices:
            one.start += len(part.words)
        while self._waiting and self._waiting[0].done:
            self._waiting.popleft()

    def _learn(self, keys: int, seconds: float) -> None:
        if keys >= _LEARN_FROM:
            self._key_seconds += 0.2 * (seconds / keys - self._key_seconds)
