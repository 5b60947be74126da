"""Tensors on a GPU, moved by the kernels: tables of this rank's own planes, loads for itself, and offloads.

What a load costs the host is one table of its pages (vectorised), and per layer group a launch and a mark. Nothing is made per page and
layer. Tables of layers are made once a grouping and kept.

Where the segment cannot be registered the same pages go through `umbp.loader.bounce`, load by load, with the reason in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from umbp.core.layer_groups import layer_groups
from umbp.kernels.tables import LayerGroup, Window
from umbp.loader.bounce import Bounce
from umbp.loader.convoy import Convoy, wait_mark
from umbp.loader.copies import Taken
from umbp.loader.handles import Load
from umbp.loader.registered import Segment
from umbp.loader.runtime import Fault, Kernels, Runtime
from umbp.loader.tensors import KvTensors, Plane
from umbp.types import I64, U8

log = logging.getLogger("umbp.loader.device")


@dataclass(frozen=True, slots=True)
class Planes:
    """Layers ``first`` .. ``last`` of this rank. int64[S] each: where a run lies in an object, its bytes, how far apart
    slots lie, and where its tensor begins.

    ``which``: their places among all planes of the loader, as cards name them.
    """

    first: int
    last: int
    which: I64
    object_offset: I64
    nbytes: I64
    stride: I64
    base: I64

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in these layers."""
        return int(self.nbytes.sum())


class DeviceMover:
    """The planes of one rank on one GPU."""

    def __init__(self, tensors: KvTensors, runtime: Runtime, kernels: Kernels) -> None:
        self.tensors = tensors
        self.runtime = runtime
        self.kernels = kernels
        self.blocks = runtime.blocks
        self.layer_bytes = [0] * tensors.layers
        for plane in tensors.planes:
            self.layer_bytes[plane.layer] += plane.nbytes
        self.segment = Segment(runtime)
        self.stream = runtime.stream()
        # Offloads run in a thread of their own, and so hold the registration for themselves: a load that moves on to the memory of a new
        # pool does not take the former's away under a kernel that still stores there.
        self._saved_to = Segment(runtime)
        self._saves = runtime.stream()
        self._layers = np.array([plane.layer for plane in tensors.planes])
        self._offsets = np.array([plane.object_offset for plane in tensors.planes], np.int64)
        self._sizes = np.array([plane.nbytes for plane in tensors.planes], np.int64)
        self.strides = np.array([plane.pages.stride(0) for plane in tensors.planes], np.int64)
        self.addresses = np.array([plane.pages.data_ptr() for plane in tensors.planes], np.int64)
        self._tables: dict[tuple[int, int], LayerGroup] = {}  # by range of layers, which are few
        self.bounce = Bounce(tensors, runtime)  # the way without kernels; takes memory when it is first used
        self.table(0, tensors.layers)  # InvalidRequest now, not in a load, for tensors that kernels cannot move

    def __repr__(self) -> str:
        return f"<DeviceMover of {len(self.addresses)} planes on {self.runtime.device}>"

    def planes(self, first: int, last: int) -> Planes:
        """These layers."""
        which = np.flatnonzero((self._layers >= first) & (self._layers < last))
        return Planes(first, last, which, self._offsets[which], self._sizes[which], self.strides[which], self.addresses[which])

    def table(self, first: int, last: int) -> LayerGroup:
        """These layers of this rank alone, on the device."""
        made = self._tables.get((first, last))
        if made is None:
            part = self.planes(first, last)
            bases = part.base[None, :]
            with self.runtime.use():
                made = LayerGroup.of(part.object_offset, part.nbytes, part.stride, bases, device=self.runtime.device)
            self._tables[first, last] = made
        return made

    @property
    def beside(self) -> Bounce:
        """See `Mover.beside`: registering that memory for one load would cost more than it saves."""
        return self.bounce

    def restore(self, load: Load, data: U8, offsets: I64, slots: I64, taken: Taken, layers: tuple[int, int] | None = None) -> bool:
        """See `Mover.restore`."""
        begin, end = layers or (0, self.tensors.layers)
        try:
            alias = self.segment.alias(data)
        except Fault:
            return self.bounce.restore(load, data, offsets, slots, taken, layers)
        if not load.claim():
            return False
        convoy = Convoy(load)
        try:
            with self.runtime.use(), self.runtime.on(self.stream):
                window = Window.of(alias, offsets, slots[None, :], self.runtime.device)
                load.hold_start()  # behind the table, whose copy the host waits for
                groups = layer_groups(self.layer_bytes[begin:end], pages=len(slots), readers=1)
                queued = self.queue(window, [(begin + first, begin + last) for first, last in groups], convoy, taken)
            return queued and convoy.drain()
        finally:
            convoy.drain()  # also after an error: the slots are not let go before the device is through
            load.let_go()

    def queue(self, window: Window, groups: Sequence[tuple[int, int]], convoy: Convoy, taken: Taken) -> bool:
        """Queue the loads of this window, a layer group after the other, on the current stream. False if it is over before the last."""
        for first, last in groups:
            size = sum(self.layer_bytes[first:last]) * window.pages
            if not convoy.admit(size):
                return False
            if size:
                self.kernels.page_load(window, self.table(first, last), rank=0, blocks=self.blocks)
            convoy.add(self.runtime.mark(), layers=last, nbytes=size)
            taken.own += size
            convoy.load.read_bytes = taken.segment
        return True

    def save(self, data: U8, offsets: I64, slots: I64) -> None:
        """See `Mover.save`."""
        try:
            alias = self._saved_to.alias(data)
        except Fault:
            self.bounce.save(data, offsets, slots)
            return
        with self.runtime.use(), self.runtime.on(self._saves):
            window = Window.of(alias, offsets, slots[None, :], self.runtime.device)
            self.kernels.page_store(window, self.table(0, self.tensors.layers), rank=0, blocks=self.blocks)
            wait_mark(self.runtime.mark())

    def close(self) -> None:
        """See `Mover.close`."""
        self.segment.close()
        self._saved_to.close()


def fits(tensors: KvTensors) -> str:
    """Why the kernels cannot move these tensors; "" if they can."""
    for plane in tensors.planes:
        if _bits(plane) % 4:
            return f"a page of {plane.nbytes} bytes at byte {plane.object_offset} of an object: kernels move multiples of 4 bytes"
    return ""


def granule_of(tensors: KvTensors) -> int:
    """What divides all sizes and places of the tensors: 4, 8 or 16."""
    bits = 0
    for plane in tensors.planes:
        bits |= _bits(plane)
    return 16 if bits % 16 == 0 else 8 if bits % 8 == 0 else 4


def _bits(plane: Plane) -> int:
    bits: int = plane.nbytes | plane.object_offset | plane.pages.data_ptr() | plane.pages.stride(0)
    return bits
