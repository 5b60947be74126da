"""`umbp.loader.runtime` on a GPU that torch sees: streams and events are torch's, memory is asked for through `umbp.loader.driver`."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from umbp.loader.driver import Driver
from umbp.loader.runtime import Fault, Mark, Shared
from umbp.store.numa import node_of_device
from umbp.types import U8

log = logging.getLogger("umbp.loader")
# By Little's law 34 blocks of 16 KiB keep the fabric busy, 7 the host link (`umbp.kernels.tables.Tile`); the rest is for jitter.
BLOCKS = 48
# Smaller allocations lie together in one block of memory, and a handle opens the block: so what is shared has blocks of its own.
SHARE_BYTES = 2 << 20


class GpuMark:
    """An event of torch's."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def hold(self) -> None:
        """See `Mark.hold`."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        """See `Mark.done`."""
        return bool(self._event.query())


class GpuRuntime:
    """One GPU, of AMD or NVIDIA."""

    blocks = BLOCKS

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.name = "hip" if torch.version.hip is not None else "cuda"
        torch.cuda.init()
        self._found = driver

    def __repr__(self) -> str:
        return f"<GpuRuntime {self.name} {self.device}>"

    @property
    def _driver(self) -> Driver:
        """Found when it is first needed: without one, torch alone still moves pages."""
        if self._found is None:
            self._found = Driver.of_process(self.name)
        return self._found

    def numa_node(self) -> int | None:
        """See `Runtime.numa_node`."""
        try:
            return node_of_device(self._driver.bus(self.device.index))
        except Fault as fault:
            log.info("%s", fault)
            return None

    def use(self) -> AbstractContextManager[None]:
        """See `Runtime.use`."""
        here: AbstractContextManager[None] = torch.cuda.device(self.device)
        return here

    def register(self, memory: U8) -> int:
        """See `Runtime.register`."""
        with self.use():
            return self._driver.register(memory.ctypes.data, memory.nbytes)

    def unregister(self, memory: U8) -> None:
        """See `Runtime.unregister`."""
        with self.use():
            self._driver.unregister(memory.ctypes.data)

    def allocate(self, nbytes: int) -> int:
        """See `Runtime.allocate`."""
        with self.use():
            return self._driver.allocate(-(-nbytes // SHARE_BYTES) * SHARE_BYTES)

    def free(self, address: int) -> None:
        """See `Runtime.free`."""
        with self.use():
            self._driver.free(address)

    def share(self, address: int) -> Shared:
        """See `Runtime.share`."""
        with self.use():
            base, _ = self._driver.extent(address)
            return Shared(self._driver.handle(base), address - base)

    def open(self, handle: bytes) -> int:
        """See `Runtime.open`."""
        with self.use():
            return self._driver.open(handle)

    def close(self, address: int) -> None:
        """See `Runtime.close`."""
        with self.use():
            self._driver.close(address)

    def stream(self) -> Any:
        """See `Runtime.stream`."""
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """See `Runtime.on`."""
        here: AbstractContextManager[None] = torch.cuda.stream(stream)
        return here

    def mark(self) -> Mark:
        """See `Runtime.mark`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return GpuMark(event, self.device)
