"""What one load has queued on the device: how much at a time, which layers it makes ready, and when the device is through with it.

Everything is queued ahead, so that the caller's stream can be made to wait for any layer without the host; but not more than some 20 ms of
work, so that a load that is cancelled or late is over soon after: what is queued cannot be taken back.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from umbp.loader.handles import Load
from umbp.loader.runtime import Fault, Mark

QUEUED_BYTES_MAX = 1 << 30  # 20 ms of a host link of 55 GB/s
LOOK_SECONDS = (20e-6, 500e-6)  # between two looks at a mark: first, longest
HANG_SECONDS_MAX = 60.0  # for what takes milliseconds


@dataclass(slots=True)
class _Queued:
    mark: Mark
    layers: int
    nbytes: int


class Convoy:
    """The queued work of one load, in the order of its marks."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self._queue: deque[_Queued] = deque()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Convoy of {len(self._queue)} marks, {self._bytes} bytes>"

    def admit(self, nbytes: int) -> bool:
        """Wait until there is room for as many bytes more. False if the load is cancelled or its deadline has passed."""
        pause = LOOK_SECONDS[0]
        while True:
            if self.load.cancelled or time.monotonic() > self.load.deadline:
                return False
            self._look()
            if not self._queue or self._bytes + nbytes <= QUEUED_BYTES_MAX:
                return True
            time.sleep(pause)
            pause = min(pause * 2, LOOK_SECONDS[1])

    def add(self, mark: Mark, *, layers: int = 0, nbytes: int = 0) -> None:
        """All layers below ``layers`` are there when the mark is passed; 0 for a mark that makes no layer ready."""
        if layers:
            self.load.queue(layers, mark)
        self._queue.append(_Queued(mark, layers, nbytes))
        self._bytes += nbytes

    def drain(self) -> bool:
        """Until the device is through with all of it, whatever the load's deadline. False if it was cancelled.

        Fault if the device does not come to the end of it.
        """
        started, pause = time.monotonic(), LOOK_SECONDS[0]
        while True:
            self._look()
            if not self._queue:
                return not self.load.cancelled  # late by what was queued is not missing: it is there
            if time.monotonic() - started > HANG_SECONDS_MAX:
                raise Fault(f"the GPU has not done in {HANG_SECONDS_MAX} s what takes milliseconds: it hangs")
            time.sleep(pause)
            pause = min(pause * 2, LOOK_SECONDS[1])

    def _look(self) -> None:
        while self._queue and self._queue[0].mark.done():
            passed = self._queue.popleft()
            self._bytes -= passed.nbytes
            if passed.layers:
                self.load.advance(passed.layers)


def wait_mark(mark: Mark, seconds: float = HANG_SECONDS_MAX) -> None:
    """Until the device has passed it. Fault if it does not."""
    started, pause = time.monotonic(), LOOK_SECONDS[0]
    while not mark.done():
        if time.monotonic() - started > seconds:
            raise Fault(f"the GPU has not come to a mark in {seconds} s")
        time.sleep(pause)
        pause = min(pause * 2, LOOK_SECONDS[1])
