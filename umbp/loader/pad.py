"""This rank's signal pad, as its reader: which loads may write into this rank's memory, what has arrived, and when nobody writes any more.

Theory of operation
-------------------
There is a channel for each rank that pushes to this one, and one for each rank that tells it of a staging place that is free again
(`umbp.kernels.tables`). Each load has a tag, made of the sequence number that its table was posted under:

    closed --open(tag)--> open --shut()--> closed, and quiet

While open, blocks with this tag are let in and counted. `shut` closes all gates and then looks until, in every channel, all blocks that
have entered have arrived or been refused. That holds whatever became of the writers' hosts: a block that was let in runs to its end
without them, and one that was not, because its launch came late, finds another tag and writes nothing. The exception is a process that
is killed in the middle: its blocks never arrive, and they are gone with it, so its channel is written off when the process is gone.

So invariant 3 needs no promise of a peer and no time that was guessed. What is bounded by time is only the case of a GPU that neither
finishes a kernel nor loses its process: then the pad is `broken`, which ends group loads for good, and says so.

What has arrived in earlier loads stays in the counters. As nothing is under way when `shut` has returned, what `open` finds there is where
the next load counts from.

The memory is never given back, some 64 KiB a loader: a launch that comes late looks at the gate before it can know that nobody is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from umbp.kernels.tables import CHANNEL_BYTES, POLLS_MAX, TAG_CLOSED, TAG_MAX, TAG_SHIFT, signal_address
from umbp.loader.runtime import Fault, Kernels, Runtime
from umbp.types import I64

LOOK_SECONDS = (50e-6, 2e-3)  # between two looks of the host: first, longest
QUIET_SECONDS_MAX = 30.0  # a push takes milliseconds; a GPU that needs this long for one is hung
CALIBRATION_POLLS = 200


def tag_of(sequence: int) -> int:
    """The tag of the load whose table was posted under this number."""
    return sequence % TAG_MAX + 1


def in_flight(seen: I64) -> I64:
    """(channels,) blocks that are inside, of ``seen`` (channels, 3): gate, arrived, refused, looked at in the order of `turn_gates`."""
    entered = seen[:, 0] & ((1 << TAG_SHIFT) - 1)
    inside: I64 = entered - seen[:, 1] - seen[:, 2]
    return inside


class Pad:
    """Channels 0 .. world - 1 for pushes of each rank, world .. 2 world - 1 for their word that a staging place is free."""

    def __init__(self, runtime: Runtime, kernels: Kernels, world: int) -> None:
        self.world = world
        self.nbytes = 2 * world * CHANNEL_BYTES
        self.broken = ""
        self._runtime = runtime
        self._kernels = kernels
        self.address = runtime.allocate(self.nbytes)
        self._stream = runtime.stream()
        self._tag = 0
        self._lost: I64 = np.zeros(2 * world, np.int64)  # entered, and went with their process
        with runtime.use(), runtime.on(self._stream):
            addresses = torch.tensor([signal_address(self.address, number) for number in range(2 * world)])
            self._channels = addresses.to(runtime.device)
            self._seen = torch.zeros((2 * world, 3), dtype=torch.int64, device=runtime.device)
        self.seconds_per_poll = self._calibrate()

    def __repr__(self) -> str:
        return f"<Pad of {self.world} ranks, tag {self._tag}{', broken' if self.broken else ''}>"

    def polls(self, seconds: float) -> int:
        """How many vain looks of `wait_signal` take this long."""
        return max(1, min(POLLS_MAX, int(seconds / self.seconds_per_poll)))

    def addresses(self, channels: I64) -> torch.Tensor:
        """Where these channels count arrivals, on the device."""
        return self._channels[torch.from_numpy(channels).to(self._channels.device)]

    def open(self, tag: int) -> I64:
        """Let blocks with this tag in. (channels,) what each has counted as arrived so far."""
        if self.broken:
            raise Fault(self.broken)
        return self._turn(tag)[:, 1].copy()

    def shut(self, gone: Callable[[int], bool]) -> None:
        """Let nobody in any more, and wait until nobody is inside. ``gone``: whether the process of a rank is."""
        seen = self._turn(TAG_CLOSED)
        started, pause = time.monotonic(), LOOK_SECONDS[0]
        while True:
            seen = self._turn(TAG_CLOSED)
            inside = in_flight(seen) - self._lost
            if not inside.any():
                return
            for channel in np.flatnonzero(inside).tolist():
                if gone(channel % self.world):
                    # Looked at again: what it had queued may have come to its end between the look and its death.
                    self._lost[channel] += in_flight(self._turn(TAG_CLOSED))[channel] - self._lost[channel]
            if time.monotonic() - started > QUIET_SECONDS_MAX:
                ranks = sorted({channel % self.world for channel in np.flatnonzero(inside).tolist()})
                self.broken = f"a push of ranks {ranks} has not come to its end for {QUIET_SECONDS_MAX} s: their GPU hangs"
                raise Fault(self.broken)
            time.sleep(pause)
            pause = min(pause * 2, LOOK_SECONDS[1])

    def _turn(self, tag: int) -> I64:
        """Change to this tag; what was seen, on the host."""
        change, self._tag = (tag - self._tag) << TAG_SHIFT, tag
        with self._runtime.use(), self._runtime.on(self._stream):
            self._kernels.turn_gates(self._channels, torch.full_like(self._channels, change), self._seen)
            seen: I64 = self._seen.cpu().numpy().copy()  # waits for the kernel: some 20 us
        return seen

    def _calibrate(self) -> float:
        with self._runtime.use(), self._runtime.on(self._stream):
            never = torch.ones(1, dtype=torch.int64, device=self._runtime.device)
            status = torch.zeros(1, dtype=torch.int32, device=self._runtime.device)
            taken = []
            for _ in range(3):  # the first one compiles
                status.zero_()
                status.cpu()
                started = time.perf_counter()
                self._kernels.wait_signal(self._channels[:1], never, status, polls=CALIBRATION_POLLS)
                status.cpu()
                taken.append(time.perf_counter() - started)
        return min(taken) / CALIBRATION_POLLS
