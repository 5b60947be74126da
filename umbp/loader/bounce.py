"""Pages to and from a GPU without a kernel of ours: rows are gathered on the CPU into a pinned buffer, copied, and scattered by torch.

What is used where the pool's memory cannot be registered, where Triton is missing, and where it miscompiles. Two buffers take turns, so the
CPU fills one while the copy engine empties the other. It costs a copy by the CPU and one in device memory, and one call a layer and buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from umbp.loader.convoy import Convoy, wait_mark
from umbp.loader.copies import Taken
from umbp.loader.handles import Load
from umbp.loader.rows import Route
from umbp.loader.runtime import Mark, Runtime
from umbp.loader.tensors import KvTensors, Plane
from umbp.types import I64, U8

BUFFER_BYTES = 32 << 20


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    mark: Mark | None = None


class _Lane:
    """A stream and two buffers that take turns: one for loads, one for offloads, as each has a thread of its own. Made when first used."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self.stream = runtime.stream()
        self.nbytes = nbytes
        self._pinned = runtime.device.type == "cuda"
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def next(self) -> _Buffer:
        """The buffer that was used longer ago, when the device is through with it."""
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer(torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._pinned)))
            return self._buffers[-1]
        buffer = self._buffers[self._turn]
        self._turn ^= 1
        if buffer.mark is not None:
            wait_mark(buffer.mark)
            buffer.mark = None
        return buffer


class Bounce:
    """The planes of one rank."""

    def __init__(self, tensors: KvTensors, runtime: Runtime) -> None:
        self.tensors = tensors
        self.layer_bytes = [sum(plane.nbytes for plane in tensors.planes if plane.layer == layer) for layer in range(tensors.layers)]
        self._runtime = runtime
        size = max(BUFFER_BYTES, max(plane.nbytes for plane in tensors.planes))
        self._loads, self._saves = _Lane(runtime, size), _Lane(runtime, size)

    def __repr__(self) -> str:
        return f"<Bounce of {len(self.tensors.planes)} planes>"

    @property
    def beside(self) -> Bounce:
        """See `Mover.beside`."""
        return self

    def restore(self, load: Load, data: U8, offsets: I64, slots: I64, taken: Taken, layers: tuple[int, int] | None = None) -> bool:
        """As `Mover.restore`."""
        if not load.claim():
            return False
        convoy = Convoy(load)
        try:
            with self._runtime.use(), self._runtime.on(self._loads.stream):
                load.hold_start()
                for layer in range(*(layers or (0, self.tensors.layers))):
                    size = self.layer_bytes[layer] * len(slots)
                    if not convoy.admit(size):
                        return False
                    for plane in self._planes(layer):
                        self._fill(plane, data, offsets, slots)
                    convoy.add(self._runtime.mark(), layers=layer + 1, nbytes=size)
                    taken.own += size
                    load.read_bytes = taken.segment
            return convoy.drain()
        finally:
            convoy.drain()
            load.let_go()

    def save(self, data: U8, offsets: I64, slots: I64) -> None:
        """As `Mover.save`."""
        with self._runtime.use(), self._runtime.on(self._saves.stream):
            for plane in self.tensors.planes:
                for part in _parts(plane, len(slots), self._saves.nbytes):
                    buffer = self._saves.next()
                    rows = buffer.memory[: (part.stop - part.start) * plane.nbytes].view(-1, plane.nbytes)
                    index = torch.from_numpy(slots[part]).to(self._runtime.device)
                    rows.copy_(plane.pages.index_select(0, index), non_blocking=True)
                    wait_mark(self._runtime.mark())
                    Route(offsets[part], np.arange(part.stop - part.start)).store(data, plane.object_offset, rows.numpy())

    def close(self) -> None:
        """As `Mover.close`."""

    def _fill(self, plane: Plane, data: U8, offsets: I64, slots: I64) -> None:
        for part in _parts(plane, len(slots), self._loads.nbytes):
            buffer = self._loads.next()
            rows = buffer.memory[: (part.stop - part.start) * plane.nbytes].view(-1, plane.nbytes)
            Route(offsets[part], np.arange(part.stop - part.start)).load(data, plane.object_offset, rows.numpy())
            index = torch.from_numpy(slots[part]).to(self._runtime.device)
            plane.pages.index_copy_(0, index, rows.to(self._runtime.device, non_blocking=True))
            buffer.mark = self._runtime.mark()

    def _planes(self, layer: int) -> list[Plane]:
        return [plane for plane in self.tensors.planes if plane.layer == layer]


def _parts(plane: Plane, pages: int, nbytes: int) -> list[slice]:
    step = max(1, nbytes // plane.nbytes)
    return [slice(at, min(at + step, pages)) for at in range(0, pages, step)]
