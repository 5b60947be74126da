"""Loads of pages that are on this node's SSD or on other nodes: their first layers are moved while the others are still being read.

Theory of operation
-------------------
Where a good part of a load is not in DRAM, waiting for whole pages would cost the time of reading all of it before the first layer. So
the pool is asked to read first the first layers of all pages, then the next ones (`umbp.core.stages`), from the disk and from other nodes
at the same time, and what is there is seen in shared memory (`umbp.client.arrivals`). The load goes through its layers as far as all its
pages have them: pages in DRAM, which are leased, have all; what comes by a transport that knows no parts has none before it is whole.

    lease what is in DRAM; ask for the rest
    repeat: look -> layers that every page has which is not lost -> move them, for all pages at once -> tell the load
    at the end: pages of the lease by the lease, the others by their marks

Pages that there is no room for in DRAM come whole and stay for a moment (`umbp.pool.passing`): they are moved as they come, all their
layers at once, and layers are ready when all of them have come. A load that waited for whole pages, and was told that there is no room, is
done so too: `no_room`. What it can it reads from the files itself first (`umbp.loader.past`); so do, for a while, loads after one that
found out in its middle.

*Invariant 1*: what was moved early counts if the page is committed under the very mark under which it was seen, looked at after the last
move (`Arrivals.held`). A page that fails late is missing, though its first layers were moved: `finish` names exactly those pages. A page
that failed before does not hold up the others.

*Deadlines*: the slots are claimed only while bytes move, never while the pool or a disk is waited for. So whatever hangs, the load ends at
its deadline. Pages that are not whole by the time that may be spent on waiting are lost, and the others are moved in the rest of it.

In a group each rank moves all that it wants for itself: all of them look at the same read, and a disk, or a stream of a node's, is slower
than every rank's link together. So a group is not worth a meeting when more than one in `AWAY_SHARE` bytes must come from there. Pages that
nobody has are taken for such, as only the pool could say: whoever asks before (`Loader.lookup`) has none in its load.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from umbp.client import Lease, Namespace
from umbp.client.arrivals import LOST, Arrivals, arrive
from umbp.core.stages import Stages, stages
from umbp.errors import Unavailable
from umbp.layout import Layout
from umbp.loader.copies import Taken
from umbp.loader.handles import Load
from umbp.loader.mover import Mover
from umbp.loader.past import Past
from umbp.types import I64, U8, U64, Mask

AWAY_SHARE = 8  # a disk of 7 GB/s is to a host link of 55 GB/s as 1 to 8
AWAY_BYTES_MIN = 32 << 20  # less is read whole in the time of some polls


def streaming_or_none(namespace: Namespace, keys: U8) -> tuple[Stages, str] | None:
    """How to stream this load, and why: "ssd" or "remote", where most of it comes from. None if it is not worth it. No call."""
    operations, layout = namespace.operations, namespace.identity.layout
    bond = operations.link.bond_or_none()
    if bond is None or not (bond.ssd or bond.ranged) or layout.layers < 2 or not len(keys):
        return None
    look = operations.look(keys)
    absent = keys[~look.found.hit] if look is not None and look.bond is bond else keys[:0]
    if look is None or not _worth_it(len(absent), len(keys), namespace.object_bytes):
        return None
    on_ssd = int(np.count_nonzero(operations.on_ssd(look, absent))) if bond.ssd is not None else 0
    pages = len(absent) if bond.ranged else on_ssd
    if not _worth_it(pages, len(keys), namespace.object_bytes):
        return None
    order = stages(layout.offsets, layout.sizes, namespace.object_bytes, pages)
    return (order, "ssd" if 2 * on_ssd >= pages else "remote") if order.ranges else None


def _worth_it(away: int, pages: int, size: int) -> bool:
    """Whether so many of so many pages, of ``size`` bytes, are enough to begin before they are whole."""
    return away * AWAY_SHARE >= pages and away * size >= AWAY_BYTES_MIN


def no_room(layout: Layout, size: int, pages: int) -> Stages:
    """How a load goes on whose pages, of ``size`` bytes, have no room: each is moved when it comes."""
    order = stages(layout.offsets, layout.sizes, size, pages)
    return Stages((), order.needs)


class Stream:
    """One such load. Used by the loader's thread."""

    def __init__(self, load: Load, namespace: Namespace, mover: Mover, slots: I64, taken: Taken, needs: U64) -> None:
        self._load, self._namespace, self._mover, self._taken = load, namespace, mover, taken
        self._slots, self._needs = slots, needs
        self._ready = 0  # layers that are in the slots
        self.passed = False  # some pages had no room

    def run(self, keys: U8, seconds: float, how: Stages, end: Callable[[Mask, str], None]) -> None:
        """All of it. ``end`` is told which pages are there, and why the others are not, before the pool hears that it is over."""
        load, namespace = self._load, self._namespace
        held: Mask = np.zeros(len(keys), bool)
        with namespace.lease(keys, max(0.001, load.deadline - time.monotonic()), noted=load.noted) as lease:
            rest = np.flatnonzero(~lease.held)
            had = rest[:0]
            if not how.ranges:  # there is no room for them: what this process can read itself it does
                began = time.monotonic()
                there = Past(load, namespace, self._mover, self._taken).move(keys[rest], self._slots[rest], seconds)
                had, rest, seconds = rest[there], rest[~there], max(0.0, seconds - (time.monotonic() - began))
            try:
                arrivals = namespace.run(arrive(namespace.operations, keys[rest], seconds, how.ranges))
            except Unavailable:
                return end(held, "no pool answers at the moment")
            try:
                if load.claim():  # it has begun: the pool answers, it is a disk that is waited for
                    load.let_go()
                if not self._layers(lease, arrivals, rest):
                    return end(held, "cancelled" if load.cancelled else "the deadline passed")
                held[rest], held[had] = arrivals.held(), True
                held |= lease.check()
                end(held, "" if held.all() else f"{int(np.count_nonzero(~held))} pages could not be had: {arrivals.causes()}")
            finally:
                namespace.run(arrivals.end())

    def _layers(self, lease: Lease, arrivals: Arrivals, rest: I64) -> bool:
        """All layers of what is not lost; False if the load was stopped on the way."""
        load, namespace = self._load, self._namespace
        offsets = lease.offsets.copy()
        while True:
            if load.over or load.cancelled or time.monotonic() > load.deadline:
                return False
            namespace.run(arrivals.look())
            if len(through := arrivals.passing()) and not self._pass(arrivals, through, rest):
                return False
            there = lease.held.copy()
            there[rest] = (arrivals.state != LOST) & ~arrivals.had
            offsets[rest] = arrivals.offsets
            common = np.bitwise_and.reduce(arrivals.chunks[arrivals.state != LOST], initial=np.uint64((1 << 64) - 1))
            layers = int(np.count_nonzero((common & self._needs) == self._needs))  # needs only grow from layer to layer
            if layers > self._ready:
                which = np.flatnonzero(there)
                if not self._mover.restore(
                    load, arrivals.bond.data, offsets[which], self._slots[which], self._taken, (self._ready, layers)
                ):
                    return False
                self._ready = layers
            if self._ready == len(self._needs) and arrivals.over:  # a page with all its bytes is committed a moment later
                return True
            namespace.run(arrivals.pause())

    def _pass(self, arrivals: Arrivals, through: I64, rest: I64) -> bool:
        """Move pages that cannot stay, and let them go; False if the load was stopped on the way."""
        self.passed = True
        slots, data = self._slots[rest[through]], arrivals.bond.data
        with self._load.ahead():
            moved = self._mover.restore(self._load, data, arrivals.offsets[through], slots, self._taken)
        if moved:
            self._namespace.run(arrivals.take(through))
        return moved


__all__ = ["Stream", "no_room", "streaming_or_none"]
