"""What a caller holds of a load or an offload on its way.

A handle is written by the loader's worker and read by the caller. Layers become ready in order; each has an event, so `wait` costs nothing
once its layer is there, and an asyncio caller is woken through its own loop. `finish` is the border: before it returns the worker has let
go of the slots, whatever happened, and the answer names exactly the pages to recompute.

On a GPU a layer is *queued* before it is there: the worker names a mark behind which it will be, and `wait` makes the caller's current
stream wait for that mark. The host blocks only until the layer's launches are queued, which is before any of its bytes have moved.

The deadline holds whatever the worker waits for. It *claims* the slots before it writes to them and lets go of them when it calls the
pool; a load whose deadline passes while they are not claimed ends there and then, and can never be claimed again. So does one that has not
been claimed at all by the time it was to begin.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from umbp.core.movers import Choice
from umbp.errors import InvalidRequest
from umbp.loader.runtime import Mark
from umbp.types import F64, I64, U8, Mask, Statuses, WriteStatus


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The end of a load. ``missing`` (m,) int64: indices of the keys to recompute, ascending; ``reason`` for the log, "" if all is there.

    ``read_bytes``: what this rank took out of the segment. ``ready_at`` (layers,) float64: seconds from the start to each layer, nan for
    those that never came.
    """

    missing: I64
    reason: str
    read_bytes: int
    ready_at: F64


class Load:
    """A load on its way: ``for layer in ...: load.wait(layer); forward(layer)``, then ``load.finish()``.

    ``choice``: how it is done and why, once that is decided. ``start``: on a GPU, the work of the caller that was queued before the load.
    ``begin_by``: when it is given up if nothing of it has begun by then, on the clock of ``deadline``; ``silent``: it was. ``noted``: the
    access history has this request already. ``counted``: the loader's statistics have it.
    """

    def __init__(
        self,
        pages: int,
        layers: int,
        deadline: float,
        start: Mark | None = None,
        *,
        begin_by: float = math.inf,
        noted: bool = False,
    ) -> None:
        self.pages = pages
        self.layers = layers
        self.deadline = deadline  # on time.monotonic
        self.begin_by = begin_by
        self.noted = noted
        self.begun = self.silent = False
        self.counted = False
        self.started = time.monotonic()
        self.cancelled = False
        self.layers_ready = 0
        self.ready_at: F64 = np.full(layers, np.nan)
        self.read_bytes = 0
        self.choice: Choice | None = None
        self.start = start
        self._marks: list[tuple[int, Mark]] = []  # layers below, mark
        self._held: Mask = np.zeros(pages, bool)
        self._reason = ""
        self._over = False
        self._claimed = self._ahead = False
        self._change = threading.Condition()
        self._waiters: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "over" if self._over else "cancelled" if self.cancelled else "on its way"
        return f"<Load of {self.pages} pages, {self.layers_ready} of {self.layers} layers, {state}>"

    # -- for the caller ----------------------------------------------------------------------------------------------------------------

    def wait(self, layer: int) -> bool:
        """Block until this layer of every page that can be had is in its slots; False if it will not come (see `finish`).

        For tensors on a GPU: the caller's current stream waits for it, in place of the host.
        """
        self._check(layer)
        with self._change:
            while not (self._comes(layer) or self._over):
                self._wait()
        return self._hold(layer)

    async def ready(self, layer: int) -> bool:
        """`wait` for asyncio."""
        self._check(layer)
        await self._until(partial(self._comes, layer))
        return self._hold(layer)

    def finish(self) -> LoadDone:
        """Wait for the end. Nothing of this load is written into any slot after this returns."""
        with self._change:
            while not self._over:
                self._wait()
        return self._done()

    async def finished(self) -> LoadDone:
        """`finish` for asyncio."""
        await self._until(lambda: False)
        return self._done()

    def cancel(self) -> None:
        """Stop: at once, or after the layer that is being moved; `finish` then names every page."""
        with self._change:
            self.cancelled = True
            if not self._claimed:  # it may be waiting for the pool, for as long as its deadline allows
                self.end(np.zeros(self.pages, bool), "cancelled")

    @property
    def over(self) -> bool:
        """Whether `finish` would return at once."""
        return self._over

    @property
    def progress(self) -> float:
        """Share of the layers that are there, 0 to 1."""
        return self.layers_ready / self.layers

    # -- for the worker ----------------------------------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Before the slots are written to; False if the load is over, and they must not be."""
        with self._change:
            self._claimed = not self._over
            self.begun |= self._claimed
            return self._claimed

    def let_go(self) -> None:
        """Nothing of this load is being written now."""
        with self._change:
            self._claimed = False
            self._notify()

    def hold_start(self) -> None:
        """The worker's current stream goes on behind what the caller had queued before the load: it may still read the slots."""
        if self.start is not None:
            self.start.hold()

    @contextmanager
    def ahead(self) -> Generator[None]:
        """What is moved in this block is some of the pages, before the others: it makes no layer ready."""
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    def queue(self, layers: int, mark: Mark) -> None:
        """All layers below this one will be in their slots behind this mark."""
        if self._ahead:
            return
        with self._change:
            self._marks.append((layers, mark))
            self._notify()

    def advance(self, layers_ready: int) -> None:
        """All layers below this one are in their slots."""
        if self._ahead:
            return
        with self._change:
            self.ready_at[self.layers_ready : layers_ready] = time.monotonic() - self.started
            self.layers_ready = layers_ready
            self._notify()

    def end(self, held: Mask, reason: str) -> None:
        """The worker has let go of all slots; ``held`` are the pages that count. Only the first call does something."""
        with self._change:
            if not self._over:
                self._held, self._reason, self._over, self._claimed = held, reason, True, False
                self._notify()

    def _comes(self, layer: int) -> bool:
        return self.layers_ready > layer or bool(self._marks and self._marks[-1][0] > layer)

    def _hold(self, layer: int) -> bool:
        """Whether the layer comes; if it is only queued, the caller's stream waits for it."""
        for layers, mark in self._marks if self.layers_ready <= layer else ():
            if layers > layer:
                mark.hold()
                return True
        return self.layers_ready > layer

    def _wait(self) -> None:
        """For any change, or until the deadline ends the load. Holds the lock."""
        left = self._left()
        if left is None or left > 0:
            self._change.wait(left)
        else:
            self._expire()

    def _left(self) -> float | None:
        """Seconds until the deadline; None while the worker writes, as it looks at the deadline itself then."""
        if self._claimed:
            return None
        return (self.deadline if self.begun else min(self.deadline, self.begin_by)) - time.monotonic()

    def _expire(self) -> None:
        with self._change:
            left = self._left()
            if left is not None and left <= 0:
                self.silent = not self.begun and self.begin_by < self.deadline
                self.end(np.zeros(self.pages, bool), "the pool did not answer in time" if self.silent else "the deadline passed")

    def _notify(self) -> None:
        self._change.notify_all()
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def _done(self) -> LoadDone:
        return LoadDone(np.flatnonzero(~self._held), self._reason, self.read_bytes, self.ready_at)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Look at each change, until it is true or the load is over."""
        loop = asyncio.get_running_loop()
        while True:
            event = asyncio.Event()
            with self._change:  # looked at under the lock, so that no change falls between the look and the wait
                if true() or self._over:
                    return
                self._waiters.append(partial(_wake, loop, event))
                left = self._left()
            try:
                async with asyncio.timeout(left):
                    await event.wait()
            except TimeoutError:
                self._expire()

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise InvalidRequest(f"{layer} is not a layer from 0 to {self.layers - 1}", field="layer", example="0")


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


class OffloadOver(Exception):
    """The offload was cancelled: its tensors must not be read any more."""


class Offload:
    """An offload on its way. ``result`` waits for one `WriteStatus` a key.

    The worker claims the tensors for as long as it reads them, which is the copy of one batch and no call to the pool. So it can be
    cancelled at once, or after milliseconds, whatever the pool does.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.read_bytes = 0  # taken out of the tensors: 0 for pages that were stored already
        self.codes: U8 = np.full(pages, WriteStatus.UNAVAILABLE.value, np.uint8)  # as far as they are known
        self._status: Statuses | None = None
        self._error: BaseException | None = None
        self._claimed = False
        self._change = threading.Condition()
        self._over = threading.Event()

    def __repr__(self) -> str:
        return f"<Offload of {self.pages} pages, {'over' if self.done else 'on its way'}>"

    # -- for the caller ----------------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the tensors are not read any more and the answer is there."""
        return self._over.is_set()

    def result(self) -> Statuses:
        """One `WriteStatus` a key. The slots may be reused after this."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        assert self._status is not None
        return self._status

    async def results(self) -> Statuses:
        """`result` for asyncio."""
        return await asyncio.get_running_loop().run_in_executor(None, self.result)

    def wait(self, seconds: float) -> bool:
        """Wait so long at the most; `done`."""
        return self._over.wait(seconds)

    def cancel(self) -> None:
        """End it. The slots may be reused after this, which takes no longer than the copy of the batch that is being read.

        `result` then has the pages that were stored by now; the others are UNAVAILABLE: none of them is stored in part, and one whose
        bytes were with the pool already may be stored as a whole all the same.
        """
        with self._change:
            while self._claimed:
                self._change.wait()
            self.end(Statuses(self.codes.copy(), WriteStatus))

    # -- for the worker ----------------------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Before the tensors are read. OffloadOver if it was cancelled, and they must not be."""
        with self._change:
            if self._over.is_set():
                raise OffloadOver
            self._claimed = True

    def let_go(self) -> None:
        """Nothing of the tensors is being read now."""
        with self._change:
            self._claimed = False
            self._change.notify_all()

    def end(self, status: Statuses | None, error: BaseException | None = None) -> None:
        """The worker is through. Only the first call does something."""
        with self._change:
            if not self._over.is_set():
                self._status, self._error = status, error
                self._over.set()
