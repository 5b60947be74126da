"""`Loader`: what a serving loop calls. `lookup`, `load`, `offload`.

Theory of operation
-------------------
A load alone takes one lease for all its pages, so that what was found stays; finds its `Route` once (vectorised over pages); and then
moves layer after layer, each one a few native calls whatever the number of pages, telling the handle after each. At the end the lease is
asked whether it stood all the time: pages for which it did not are missing, as are those that were never found. Nothing else can fail a
page, and no failure raises into the serving loop: it is a reason in the answer. A load of a group: see `umbp.loader.group`; whatever it
cannot do there it does alone.

Pages that are not in DRAM (`umbp.client.fetches`) are brought there first, for at most `FETCH_SHARE` of the load's time, and held until the
load is over; what has not come by then is missing. A load of pages that are all in DRAM makes no call for it.

An offload: see `umbp.loader.offloads`.

Loads run one after the other in a thread of the loader, offloads in another, so that an offload never delays a load's first layer. Copies
are split over `copy_threads` cores by pages.

This file moves tensors on the CPU. Tensors on a GPU are refused until the kernels of `umbp.kernels` are wired in here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from umbp.client import Lease, Namespace
from umbp.client.fetches import end, hold
from umbp.errors import InvalidRequest, LeaseLost, UmbpError
from umbp.layout import as_keys
from umbp.loader.area import TABLE_PAGES_MAX
from umbp.loader.copies import Copies, Taken
from umbp.loader.group import Alone, Group, Rank
from umbp.loader.handles import Load, Offload
from umbp.loader.offloads import Offloads
from umbp.loader.tensors import KvTensors, as_slots
from umbp.types import I64, NOWHERE, U8, Mask

log = logging.getLogger("umbp.loader")
DEADLINE_SECONDS = 10.0
FETCH_SHARE = 0.8  # of a load's time may be spent on waiting for pages from elsewhere: the rest is for moving what came
COPY_THREADS_MAX = 4
WAYS = ("auto", "solo", "staged")
# A meeting costs about 0.3 ms (two round trips), in which one link of 55 GB/s carries 16 MB: what is less is there sooner alone.
MEET_BYTES_MIN = 16 << 20


@dataclass(frozen=True, slots=True)
class LoaderStatistics:
    """Counts of one loader. Bytes ``own`` + ``group`` + ``fallback`` left the segment; ``received`` came from other ranks' staging.

    ``way`` and ``reason``: how the last load went, and why so. ``lost_owners``: ranks that were not waited for any longer.
    """

    way: str
    reason: str
    solo_loads: int
    staged_loads: int
    pages: int
    missing_pages: int
    own_bytes: int
    group_bytes: int
    fallback_bytes: int
    received_bytes: int
    lost_owners: int
    offloaded_bytes: int


class Loader:
    """Moves pages of one namespace to and from one rank's KV tensors.

    ``tensors``: component -> one tensor a layer, None where skipped. ``group``: the ranks to load and offload with, None for none.
    ``UMBP_LOAD`` says how: auto (the default), solo, or staged (with the group, also what is small).
    """

    def __init__(
        self, namespace: Namespace, tensors: Mapping[str, Sequence[Any]], group: Group | None = None, *, copy_threads: int | None = None
    ) -> None:
        self.namespace = namespace
        self.group = group
        self.tensors = KvTensors.of(tensors, namespace.identity.layout)
        if self.tensors.device.type != "cpu":
            raise InvalidRequest(f"tensors on {self.tensors.device} cannot be loaded yet", field="tensors", example="tensors on the CPU")
        if group is not None and not namespace.identity.replicated:
            raise InvalidRequest(
                "the KV of this namespace differs from rank to rank: there is nothing to share", field="group", example="None"
            )
        self._way = os.environ.get("UMBP_LOAD", "auto")
        if self._way not in WAYS:
            raise InvalidRequest(f"{self._way!r} is none of {', '.join(WAYS)}", field="UMBP_LOAD", example="auto")
        cores = len(os.sched_getaffinity(0))
        threads = max(1, min(cores, COPY_THREADS_MAX) if copy_threads is None else copy_threads)
        self._copies = Copies(self.tensors, threads)
        self._rank = Rank(namespace, group, self._copies) if group is not None else None
        self._offloading = Offloads(namespace, group, self._copies)
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="umbp-load")
        self._offloads = ThreadPoolExecutor(1, thread_name_prefix="umbp-offload")
        self._taken = Taken()
        self._last = ("", "")
        self._count = {"solo": 0, "staged": 0, "pages": 0, "missing": 0}
        if self._rank is not None:
            with contextlib.suppress(Alone):  # so that the others know of this rank before its first load; it tries again then
                self._rank.enter()

    def __repr__(self) -> str:
        return f"<Loader of {len(self.tensors.planes)} planes x {self.tensors.pages} pages>"

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def copy_threads(self) -> int:
        """Threads that copy for a load."""
        return self._copies.threads

    def lookup(self, keys: Any, *, session: str = "") -> int:
        """How many leading pages can be restored now. No call, but one for pages that may be elsewhere, where there is such a place."""
        array = as_keys(keys)
        length = self.namespace.prefix(array, session=session)
        if length < len(array) and self.namespace.operations.may_fetch:
            absent = self.namespace.locate(array[length:]) == NOWHERE
            length += int(absent.argmax()) if absent.any() else len(absent)
        return length

    def load(self, keys: Any, slots: Any, *, deadline: float = DEADLINE_SECONDS, verify: str = "never", after: Any = None) -> Load:
        """Start to restore pages into these slots; returns at once.

        ``keys`` (n, 32), ``slots`` (n,) distinct page indices of the tensors. ``deadline``: seconds after which what is not there is
        missing. ``verify``: compare checksums of no, some or all pages before they are moved. ``after``: something with ``synchronize()``
        (a torch event), waited for before anything is written. In a group, a load of no pages helps the other ranks with theirs.
        """
        array = as_keys(keys)
        places: I64 = as_slots(slots, len(array), self.tensors.pages)
        if not isinstance(deadline, int | float) or not 0 < deadline <= 3600:
            raise InvalidRequest(f"{deadline!r} is not a number of seconds above 0 and up to an hour", field="deadline", example="10")
        load = Load(len(array), self.tensors.layers, time.monotonic() + deadline)
        self._loads.submit(self._run, load, array, places, verify, after)
        return load

    def offload(self, keys: Any, slots: Any, *, after: Any = None, parent: bytes | None = None) -> Offload:
        """Start to store pages from these slots; returns at once. The slots must keep their bytes until the handle's result is there.

        ``after``: something with ``synchronize()`` (a torch event), waited for before the tensors are read. ``parent``: the key before the
        first, where there is one. In a group each rank is given the same keys, and each page is stored by one of them.
        """
        array = as_keys(keys)
        places: I64 = as_slots(slots, len(array), self.tensors.pages)
        offload = Offload(len(array))
        self._offloads.submit(self._offloading.run, offload, array, places, after, parent)
        return offload

    def statistics(self) -> LoaderStatistics:
        """A snapshot."""
        taken, count = self._taken, self._count
        return LoaderStatistics(
            *self._last,
            solo_loads=count["solo"],
            staged_loads=count["staged"],
            pages=count["pages"],
            missing_pages=count["missing"],
            own_bytes=taken.own,
            group_bytes=taken.group,
            fallback_bytes=taken.fallback,
            received_bytes=taken.received,
            lost_owners=self._rank.lost_owners if self._rank else 0,
            offloaded_bytes=self._offloading.read_bytes,
        )

    def close(self) -> None:
        """Wait for what is on its way, leave the group, and end the threads."""
        self._loads.shutdown(wait=True)
        self._offloads.shutdown(wait=True)
        if self._rank is not None:
            self._rank.close()
        self._copies.close()

    # -- loads -------------------------------------------------------------------------------------------------------------------------

    def _run(self, load: Load, keys: U8, slots: I64, verify: str, after: Any) -> None:
        """One load, to its end; nothing raises."""
        held: Mask = np.zeros(len(keys), bool)
        reason, taken, wanted = "", Taken(), None
        try:
            if load.over:  # its deadline passed before its turn came
                return
            seconds = max(0.0, FETCH_SHARE * (load.deadline - time.monotonic()))
            wanted = self.namespace.run(hold(self.namespace.operations, keys, seconds, lambda: load.over or load.cancelled))
            if after is not None:
                after.synchronize()
            why = self._why_alone(len(keys), verify)
            if not why and self._rank is not None:
                try:
                    held, reason = self._rank.load(load, keys, slots, taken)
                    self._went("staged", self._way if self._way != "auto" else "the group's pages are read once")
                except Alone as error:
                    why = str(error)
            if why:
                self._went("solo", why)
                held, reason = self._alone(load, keys, slots, verify, taken)
        except UmbpError as error:
            reason = str(error)
        except Exception as error:
            log.exception("a load failed")
            reason = f"internal error: {error}"
        finally:
            load.read_bytes = taken.segment
            load.end(held, reason)
            if wanted is not None:
                self.namespace.run(end(wanted))
            self._taken.add(taken)
            self._count["pages"] += len(keys)
            self._count["missing"] += len(load.finish().missing)

    def _why_alone(self, pages: int, verify: str) -> str:
        """Why this load is not the group's; "" if it is."""
        if self._rank is None:
            return "no group"
        if self._way == "solo":
            return "UMBP_LOAD"
        if verify != "never":
            return "checksums are compared, which reads all pages"
        if pages > TABLE_PAGES_MAX:
            return f"{pages} pages are more than the {TABLE_PAGES_MAX} that a rank may bring to a meeting"
        size = pages * self.namespace.object_bytes
        if self._way == "auto" and 0 < size < MEET_BYTES_MIN:
            return f"{size} bytes are there sooner without a meeting"
        return ""

    def _went(self, way: str, reason: str) -> None:
        self._count[way] += 1
        if self._last != (way, reason):
            log.info("loads are %s: %s", way, reason)
            self._last = (way, reason)

    def _alone(self, load: Load, keys: U8, slots: I64, verify: str, taken: Taken) -> tuple[Mask, str]:
        """Which pages are there, and why the others are not."""
        held: Mask = np.zeros(len(keys), bool)
        try:
            # The lease lasts as long as the load may, and ends with it.
            with self.namespace.lease(keys, max(0.001, load.deadline - time.monotonic()), verify=verify) as lease:
                if lease.look is None and not self.namespace.operations.link.ready():
                    return held, "no pool answers at the moment"
                if self._move(load, lease, slots, taken):
                    held = lease.check()
                else:  # decided already: nobody waits for the pool to hear of it
                    load.end(held, "cancelled" if load.cancelled else "the deadline passed")
        except LeaseLost as error:
            return np.zeros(len(keys), bool), str(error)
        return held, "" if held.all() else f"{int(np.count_nonzero(~held))} pages are not stored any more"

    def _move(self, load: Load, lease: Lease, slots: I64, taken: Taken) -> bool:
        """All layers of what the lease holds; False if it was stopped on the way."""
        which = np.flatnonzero(lease.held)
        routes = self._copies.route(lease.offsets[which], slots[which])
        data = lease.data
        if not load.claim():
            return False
        try:
            for layer in range(self.tensors.layers):
                if load.cancelled or time.monotonic() > load.deadline:
                    return False
                taken.own += self._copies.load(data, routes, layer)
                load.read_bytes = taken.segment
                load.advance(layer + 1)
        finally:
            load.let_go()
        return True


__all__ = ["Loader", "LoaderStatistics"]
