"""Copying a rank's pages, layer by layer, with all threads that this rank may use; and what a load has taken from where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from umbp.loader.handles import Load
from umbp.loader.rows import CHUNK_BYTES, Route
from umbp.loader.tensors import KvTensors, Plane
from umbp.types import I64, U8

ALIGN = 64  # of a plane's rows in a ring slot: a cache line
PARTS = 2  # of a layer for each thread: what one that is late leaves to the others


@dataclass(slots=True)
class Taken:
    """Bytes that one load moved: out of the segment for itself, for the group, in place of another rank; and out of others' staging."""

    own: int = 0
    group: int = 0
    fallback: int = 0
    received: int = 0

    @property
    def segment(self) -> int:
        """All that was read from the segment."""
        return self.own + self.group + self.fallback

    def add(self, more: Taken) -> None:
        """Count another load's too."""
        self.own += more.own
        self.group += more.group
        self.fallback += more.fallback
        self.received += more.received


class Copies:
    """The planes of one rank, and the threads that copy for it: the mover of tensors on the CPU."""

    def __init__(self, tensors: KvTensors, threads: int) -> None:
        self.planes: list[list[tuple[Plane, U8]]] = [[] for _ in range(tensors.layers)]
        for plane in tensors.planes:
            self.planes[plane.layer].append((plane, plane.array()))
        self.threads = threads
        self.layer_bytes = [sum(plane.nbytes for plane, _ in planes) for planes in self.planes]
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="umbp-load-copy")

    def __repr__(self) -> str:
        return f"<Copies of {len(self.planes)} layers with {self.threads} threads>"

    @property
    def beside(self) -> Copies:
        """See `Mover.beside`."""
        return self

    def restore(self, load: Load, data: U8, offsets: I64, slots: I64, taken: Taken, layers: tuple[int, int] | None = None) -> bool:
        """See `Mover.restore`."""
        if not load.claim():
            return False
        try:
            first, last = layers or (0, len(self.planes))
            work = _Layers(self, load, data, Route(offsets, slots).split(self.threads * PARTS), taken, first, last)
            self._together(work.run)
        finally:
            load.let_go()
        return not work.stopped

    def save(self, data: U8, offsets: I64, slots: I64) -> None:
        """See `Mover.save`."""
        self.store(data, self.route(offsets, slots))

    def route(self, offsets: I64, slots: I64) -> list[Route]:
        """These pages, one part for each thread."""
        return Route(offsets, slots).split(self.threads)

    def load(self, data: U8, routes: list[Route], layer: int) -> int:
        """One layer of these pages from the segment into the planes; bytes."""
        self.each(routes, partial(self.move, data, layer))
        return sum(map(len, routes)) * self.layer_bytes[layer]

    def store(self, data: U8, routes: list[Route]) -> None:
        """All layers of these pages from the planes into the segment."""
        self.each(routes, partial(self._store, data))

    def stage(self, data: U8, routes: list[Route], layer: int, slot: U8, rows: int) -> int:
        """One layer of these pages from the segment into a ring slot that is laid out for ``rows`` pages; bytes."""
        for (plane, _), staged in zip(self.planes[layer], self.staged(slot, layer, rows), strict=True):
            self.each(routes, partial(_load, data, plane.object_offset, staged))
        return sum(map(len, routes)) * self.layer_bytes[layer]

    def pull(self, slot: U8, layer: int, rows: int, which: I64, slots: I64) -> int:
        """Rows ``which`` of a ring slot into ``slots`` of the planes; bytes."""
        for (_, array), staged in zip(self.planes[layer], self.staged(slot, layer, rows), strict=True):
            _pull(staged, which, array, slots)
        return len(which) * self.layer_bytes[layer]

    def staged(self, slot: U8, layer: int, rows: int) -> list[U8]:
        """The layer's planes in a ring slot, each (rows, nbytes)."""
        found, at = [], 0
        for plane, _ in self.planes[layer]:
            size = rows * plane.nbytes
            found.append(slot[at : at + size].reshape(rows, plane.nbytes))
            at += -(-size // ALIGN) * ALIGN
        return found

    def rows_in(self, slot_bytes: int) -> int:
        """Pages whose largest layer fits a ring slot."""
        padding = ALIGN * max(len(planes) for planes in self.planes)
        return max(0, slot_bytes - padding) // max(self.layer_bytes)

    def each(self, routes: list[Route], move: Callable[[Route], None]) -> None:
        """One route here, the others in copy threads; returns when all of them have let go of the memory, also after an error."""
        futures = [self._pool.submit(move, route) for route in routes[1:]]
        try:
            for route in routes[:1]:
                move(route)
        finally:
            for future in futures:
                future.exception()
        for future in futures:
            future.result()

    def _together(self, work: Callable[[], None]) -> None:
        """The same in all threads at once; returns when all have come back, also after an error."""
        futures = [self._pool.submit(work) for _ in range(self.threads - 1)]
        try:
            work()
        finally:
            for future in futures:
                future.exception()
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)

    def move(self, data: U8, layer: int, route: Route) -> None:
        """One layer of one route, in this thread."""
        for plane, array in self.planes[layer]:
            route.load(data, plane.object_offset, array)

    def _store(self, data: U8, route: Route) -> None:
        for planes in self.planes:
            for plane, array in planes:
                route.store(data, plane.object_offset, array)


def _load(data: U8, object_offset: int, plane: U8, route: Route) -> None:
    route.load(data, object_offset, plane)


def _pull(staged: U8, which: I64, array: U8, slots: I64) -> None:
    nbytes = array.shape[1]
    source, target = staged.view(f"V{nbytes}").reshape(-1), array.view(f"V{nbytes}").reshape(-1)
    first, last = int(which[0]), int(which[-1]) + 1
    if last - first == len(which) and bool((np.diff(which) == 1).all()):
        target[slots] = source[first:last]
        return
    step = max(1, CHUNK_BYTES // nbytes)
    for at in range(0, len(which), step):  # an indexed load makes a copy: a small one
        target[slots[at : at + step]] = source[which[at : at + step]]


class _Layers:
    """A load as pieces, layer after layer, that threads take in turns: none waits for another at the end of a layer.

    So a thread whose core is busy delays its own piece alone; the others are in the next layer meanwhile. A layer is told when its last
    piece and those of all layers before it are there.
    """

    def __init__(self, copies: Copies, load: Load, data: U8, routes: list[Route], taken: Taken, first: int, last: int) -> None:
        self.stopped = False
        self._copies, self._load, self._data, self._routes, self._taken = copies, load, data, routes, taken
        self._first, self._last = first, last
        self._next = count()
        self._left = [len(routes)] * last  # of each layer; those below the first are not looked at
        self._ready = first
        self._pages = sum(map(len, routes))
        self._lock = threading.Lock()
        self._tell()

    def run(self) -> None:
        """Take pieces until none is left, or the load is cancelled or late."""
        load, parts = self._load, len(self._routes)
        total = parts * (self._last - self._first)
        while (piece := next(self._next)) < total:  # one step of the interpreter: no piece is taken twice
            if self.stopped or load.cancelled or time.monotonic() > load.deadline:
                self.stopped = True
                return
            layer, part = divmod(piece, parts)
            layer += self._first
            try:
                self._copies.move(self._data, layer, self._routes[part])
            except BaseException:
                self.stopped = True
                raise
            with self._lock:
                self._left[layer] -= 1
                self._tell()

    def _tell(self) -> None:
        ready = self._ready
        while ready < len(self._left) and not self._left[ready]:
            self._taken.own += self._copies.layer_bytes[ready] * self._pages
            ready += 1
        if ready > self._ready:
            self._ready = ready
            self._load.read_bytes = self._taken.segment
            self._load.advance(ready)
