"""Turns of work that nobody waits for: one slice a round of the event loop, so that a client's call waits for one slice at most.

Theory of operation. An event loop runs all that is ready before it looks for what clients have sent. With pages coming from SSD there are
often four or five slices ready at once (pages to enter, others to reserve, evictions, requests to look at, records to list), each of up
to a millisecond, and a short call would wait for all of them. So each of these asks for its turn first. Turns are given in order, one a
round; where nobody else wants one it costs two rounds of an idle loop, some 20 us.

A turn is only the right to begin: the slice ends where its task waits next. It holds nothing, so one that never ends delays nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<Turns, {len(self._waiting)} wait>"

    async def wait(self) -> None:
        """Until it is the caller's turn."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if len(self._waiting) == 1:
            loop.call_soon(self._give)
        await mine

    def _give(self) -> None:
        """One turn in this round; the next ones in the rounds that follow."""
        mine = self._waiting.popleft()
        if not mine.done():  # else its task was cancelled
            mine.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)
