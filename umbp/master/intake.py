"""Changes on their way into the directory: in slices of about a millisecond, one a round of the event loop, small bundles together.

Theory of operation. Bundles and pieces of all nodes wait in two queues, in the order they came. One of those who wait works: again and
again it lets the loop go round once, in which questions are answered and further bundles arrive, and then applies one slice from the head
of a queue, whosever it is, until its own is applied; then the next one who waits works. So between two slices everybody else is served,
however many nodes send at once; and many small bundles cost one batch of the directory together instead of one each. A node sends one
thing at a time, so of one node nothing is out of order.

What has just happened (bundles) goes before what is told again (pieces of resyncs): when a master has restarted and all nodes send all that
they hold, what is stored meanwhile is seen as soon as ever. Every `PIECES_TURN`-th slice begins with the pieces, so that a resync goes on
however much happens.

A slice has as many keys as took `SLICE_SECONDS` of the processor of late: what counts is the time that a question waits. The time that
others had the processor is left out, since shorter slices would not make it less, and cost more.

What was not applied because its node is not a member any more is refused with `UnknownNode`; what its sender does not wait for any more
(a connection that ended, a stop) is taken out of the queue, and comes again with its number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from umbp.core.master import Master, Part
from umbp.errors import UmbpError

SLICE_SECONDS = 0.001
SLICE_KEYS_MIN, SLICE_KEYS_MAX = 512, 8192
PIECES_TURN = 4
_FIRST_KEYS = 1024
_LEARN_FROM = 512  # keys: of fewer the time says nothing about a key


@dataclass(slots=True, eq=False)
class _Waiting:
    """A bundle or piece; from ``start`` on it is still to be applied."""

    part: Part
    start: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)  # it is applied or refused, or it is its sender who works now
    refused: UmbpError | None = None

    @property
    def done(self) -> bool:
        return self.refused is not None or self.start == len(self.part.words)


class Intake:
    """The queue of one master."""

    def __init__(self, core: Master) -> None:
        self._core = core
        self._bundles: deque[_Waiting] = deque()
        self._pieces: deque[_Waiting] = deque()
        self._worker: _Waiting | None = None
        self._slices = 0
        self._key_seconds = SLICE_SECONDS / _FIRST_KEYS

    def __repr__(self) -> str:
        return f"<Intake {len(self._bundles)} bundles and {len(self._pieces)} pieces waiting, slices of {self.slice_keys} keys>"

    @property
    def slice_keys(self) -> int:
        """How many keys are applied in one go."""
        return max(SLICE_KEYS_MIN, min(SLICE_KEYS_MAX, int(SLICE_SECONDS / self._key_seconds)))

    async def apply(self, part: Part) -> None:
        """Until all of it is applied. UnknownNode if the member goes meanwhile."""
        mine = _Waiting(part)
        if mine.done:
            return
        queue = self._bundles if part.fresh else self._pieces
        queue.append(mine)
        try:
            if self._worker is None:
                self._worker = mine
            else:
                await mine.called.wait()
            while not mine.done:
                await asyncio.sleep(0)
                self._apply_slice()
        finally:
            if mine in queue:
                queue.remove(mine)
            if self._worker is mine:
                self._worker = next(iter([*self._bundles, *self._pieces]), None)
                if self._worker is not None:
                    self._worker.called.set()
        if mine.refused is not None:
            raise mine.refused

    def _apply_slice(self) -> None:
        slices: list[tuple[_Waiting, Part]] = []
        room = self.slice_keys
        self._slices += 1
        queues = (self._bundles, self._pieces) if self._slices % PIECES_TURN else (self._pieces, self._bundles)
        for one in [*queues[0], *queues[1]]:
            if room <= 0:
                break
            try:
                self._core.membership.member(one.part.member.node, one.part.member.registration)
            except UmbpError as error:
                one.refused = error
                one.called.set()
                continue
            slices.append((one, one.part.sliced(one.start, one.start + room)))
            room -= len(slices[-1][1].words)
        if slices:
            began = time.thread_time()
            self._core.apply(time.monotonic(), *(part for _, part in slices))
            self._learn(sum(len(part.words) for _, part in slices), time.thread_time() - began)
        for one, part in slices:
            one.start += len(part.words)
            if one.done:
                one.called.set()
        for queue in queues:
            while queue and queue[0].done:
                queue.popleft()

    def _learn(self, keys: int, seconds: float) -> None:
        if keys >= _LEARN_FROM:
            self._key_seconds += 0.2 * (seconds / keys - self._key_seconds)
