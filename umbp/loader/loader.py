"""`Loader`: what a serving loop calls. `lookup`, `load`, `offload`.

Theory of operation
-------------------
A load takes one lease for all its pages, so that what was found stays; finds its `Route` once (vectorised over pages); and then moves layer
after layer, each one a few native calls whatever the number of pages, telling the handle after each. At the end the lease is asked
whether it stood all the time: pages for which it did not are missing, as are those that were never found. Nothing else can fail a page,
and no failure raises into the serving loop: it is a reason in the answer.

An offload asks the index first: what is stored already costs no read of the tensors. The rest is reserved in one call a batch, moved
after the caller's event, and committed in one call; a page is visible when all of it is.

Loads run one after the other in a thread of the loader, offloads in another, so that an offload never delays a load's first layer. Copies
are split over `copy_threads` cores by pages.

This file moves tensors on the CPU. Tensors on a GPU are refused until the kernels of `umbp.kernels` are wired in here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from umbp.client import Lease, Namespace
from umbp.errors import InvalidRequest, UmbpError
from umbp.layout import as_keys
from umbp.loader.handles import Load, Offload
from umbp.loader.rows import Route
from umbp.loader.tensors import KvTensors, Plane, as_slots
from umbp.types import I64, U8, Mask, Statuses, WriteStatus

log = logging.getLogger("umbp.loader")
DEADLINE_SECONDS = 10.0
COPY_THREADS_MAX = 4
OFFLOAD_BYTES = 64 << 20  # reserved, filled and committed at a time


class Loader:
    """Moves pages of one namespace to and from one rank's KV tensors. ``tensors``: component -> one tensor a layer, None where skipped."""

    def __init__(self, namespace: Namespace, tensors: Mapping[str, Sequence[Any]], *, copy_threads: int | None = None) -> None:
        self.namespace = namespace
        self.tensors = KvTensors.of(tensors, namespace.identity.layout)
        if self.tensors.device.type != "cpu":
            raise InvalidRequest(f"tensors on {self.tensors.device} cannot be loaded yet", field="tensors", example="tensors on the CPU")
        self._planes: list[list[tuple[Plane, U8]]] = [[] for _ in range(self.tensors.layers)]
        for plane in self.tensors.planes:
            self._planes[plane.layer].append((plane, plane.array()))
        cores = len(os.sched_getaffinity(0))
        self._threads = max(1, min(cores, COPY_THREADS_MAX) if copy_threads is None else copy_threads)
        self._copies = ThreadPoolExecutor(max(1, self._threads - 1), thread_name_prefix="umbp-load-copy")
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="umbp-load")
        self._offloads = ThreadPoolExecutor(1, thread_name_prefix="umbp-offload")

    def __repr__(self) -> str:
        return f"<Loader of {len(self.tensors.planes)} planes x {self.tensors.pages} pages>"

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def lookup(self, keys: Any, *, session: str = "") -> int:
        """How many leading pages can be restored now; no call."""
        return self.namespace.prefix(keys, session=session)

    def load(self, keys: Any, slots: Any, *, deadline: float = DEADLINE_SECONDS, verify: str = "never") -> Load:
        """Start to restore pages into these slots; returns at once.

        ``keys`` (n, 32), ``slots`` (n,) distinct page indices of the tensors. ``deadline``: seconds after which what is not there is
        missing. ``verify``: compare checksums of no, some or all pages before they are moved.
        """
        array = as_keys(keys)
        places: I64 = as_slots(slots, len(array), self.tensors.pages)
        if not isinstance(deadline, int | float) or not 0 < deadline <= 3600:
            raise InvalidRequest(f"{deadline!r} is not a number of seconds above 0 and up to an hour", field="deadline", example="10")
        load = Load(len(array), self.tensors.layers, time.monotonic() + deadline)
        self._loads.submit(self._run_load, load, array, places, verify)
        return load

    def offload(self, keys: Any, slots: Any, *, after: Any = None, parent: bytes | None = None) -> Offload:
        """Start to store pages from these slots; returns at once. The slots must keep their bytes until the handle's result is there.

        ``after``: something with ``synchronize()`` (a torch event), waited for before the tensors are read. ``parent``: the key before the
        first, where there is one.
        """
        array = as_keys(keys)
        places: I64 = as_slots(slots, len(array), self.tensors.pages)
        offload = Offload(len(array))
        self._offloads.submit(self._run_offload, offload, array, places, after, parent)
        return offload

    def close(self) -> None:
        """Wait for what is on its way, and end the threads."""
        for pool in (self._loads, self._offloads, self._copies):
            pool.shutdown(wait=True)

    # -- loads -------------------------------------------------------------------------------------------------------------------------

    def _run_load(self, load: Load, keys: U8, slots: I64, verify: str) -> None:
        held: Mask = np.zeros(len(keys), bool)
        reason = ""
        try:
            # The lease lasts as long as the load may, and ends with it.
            with self.namespace.lease(keys, max(0.001, load.deadline - time.monotonic()), verify=verify) as lease:
                if self._move(load, lease, slots):
                    held = lease.check()
                else:
                    reason = "cancelled" if load.cancelled else "the deadline passed"
        except UmbpError as error:
            reason = str(error)
        except Exception as error:
            log.exception("a load failed")
            reason = f"internal error: {error}"
        if not reason and not held.all():
            reason = f"{int(np.count_nonzero(~held))} pages are not stored any more"
        load.end(held, reason)

    def _move(self, load: Load, lease: Lease, slots: I64) -> bool:
        """All layers of what the lease holds; False if it was stopped on the way."""
        which = np.flatnonzero(lease.held)
        routes = Route(lease.offsets[which], slots[which]).split(self._threads)
        data = lease.data
        for layer in range(self.tensors.layers):
            if load.cancelled or time.monotonic() > load.deadline:
                return False
            self._each(routes, partial(self._load_layer, data, layer))
            load.read_bytes += len(which) * sum(plane.nbytes for plane, _ in self._planes[layer])
            load.advance(layer + 1)
        return True

    def _load_layer(self, data: U8, layer: int, route: Route) -> None:
        for plane, array in self._planes[layer]:
            route.load(data, plane.object_offset, array)

    def _each(self, routes: list[Route], move: Any) -> None:
        """One route here, the others in copy threads; returns when all of them have let go of the memory, also after an error."""
        futures = [self._copies.submit(move, route) for route in routes[1:]]
        try:
            for route in routes[:1]:
                move(route)
        finally:
            for future in futures:
                future.exception()
        for future in futures:
            future.result()

    # -- offloads ----------------------------------------------------------------------------------------------------------------------

    def _run_offload(self, offload: Offload, keys: U8, slots: I64, after: Any, parent: bytes | None) -> None:
        try:
            if after is not None:
                after.synchronize()
            codes = np.full(len(keys), WriteStatus.UNAVAILABLE, np.uint8)
            step = max(1, OFFLOAD_BYTES // self.namespace.object_bytes)
            for start in range(0, len(keys), step):
                part = slice(start, start + step)
                before = keys[start - 1].tobytes() if start else parent
                places = slots[part]

                def fill(which: I64, data: U8, offsets: I64, places: I64 = places) -> None:
                    self._each(Route(offsets, places[which]).split(self._threads), partial(self._store, data))
                    offload.read_bytes += len(which) * self.namespace.object_bytes

                codes[part] = self.namespace.fill(keys[part], fill, parent=before).codes
            offload.end(Statuses(codes, WriteStatus))
        except BaseException as error:
            log.exception("an offload failed")
            offload.end(None, error)

    def _store(self, data: U8, route: Route) -> None:
        for planes in self._planes:
            for plane, array in planes:
                route.store(data, plane.object_offset, array)
