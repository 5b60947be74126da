"""`Loader`: what a serving loop calls. `lookup`, `load`, `offload`.

Theory of operation
-------------------
A load alone takes one lease for all its pages, so that what was found stays, and gives it to the *mover* of its tensors: `Copies` on the
CPU, `DeviceMover` or `Bounce` on a GPU. Layers come one after the other, each a few native calls or one launch whatever the number of
pages. At the end the lease is asked whether it stood all the time: pages for which it did not are missing, as are those that were never
found. What was read of versions that are still there counts without an answer of the pool's. Nothing else can fail a page, and no failure
raises into the serving loop: it is a reason in the answer. A load of a group: see `umbp.loader.group`; whatever it cannot do there it does
alone. Which of the two, and how, is `umbp.core.movers`'s choice.

Pages that are not in DRAM (`umbp.client.fetches`) are brought there first, for at most `FETCH_SHARE` of the load's time, and held until the
load is over; what has not come by then is missing. A load of pages that are all in DRAM makes no call for it. Where a good part is on this
node's SSD or on others, it begins with the layers that have come (`umbp.loader.streams`); pages that DRAM has no room for are moved as they
come (but for a load that compares checksums: for that they are missing).

An offload: see `umbp.loader.offloads`.

Loads run one after the other in a thread of the loader, offloads in another, so that an offload never delays a load's first layer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from umbp.client import Lease, Namespace
from umbp.client.fetches import end, hold
from umbp.core.movers import WAYS, Choice, Facts, choose
from umbp.core.roofline import Load as LoadShape
from umbp.core.roofline import break_even
from umbp.core.stages import Stages
from umbp.errors import InvalidRequest, LeaseLost, UmbpError
from umbp.layout import as_keys
from umbp.loader.area import TABLE_PAGES_MAX
from umbp.loader.copies import Taken
from umbp.loader.counters import counters
from umbp.loader.equipment import equip
from umbp.loader.group import Alone, Group, Rank
from umbp.loader.handles import Load, Offload
from umbp.loader.offloads import Offloads
from umbp.loader.past import may_read_past
from umbp.loader.runtime import Fault, Runtime
from umbp.loader.streams import Stream, no_room, streaming_or_none
from umbp.loader.tensors import KvTensors, as_slots
from umbp.types import I64, NOWHERE, U8, Mask

log = logging.getLogger("umbp.loader")
DEADLINE_SECONDS = 10.0
FETCH_SHARE = 0.8  # of a load's time may be spent on waiting for pages from elsewhere: the rest is for moving what came
COPY_THREADS_MAX = 4
STREAMED = {
    "ssd": "a good part is on SSD: each rank moves what has been read of it",
    "remote": "a good part is on other nodes: each rank moves what has come of it",
    "no_room": "there is no room for some of the pages in DRAM: each rank moves them as they pass through",
}
FULL_SECONDS = 10.0  # for so long a pool is thought to have no room still, for loads that would find out in their middle
LAYER_GROUPS = 8  # what the break-even is asked for: a typical load


@dataclass(frozen=True, slots=True)
class LoaderStatistics:
    """Counts of one loader. Bytes ``own`` + ``group`` + ``fallback`` left the segment; ``received`` came from other ranks' staging.

    ``way``, ``cause`` and ``reason``: how the last load went, and why so. ``lost_owners``: ranks that were not waited for any longer.
    """

    way: str
    cause: str
    reason: str
    solo_loads: int
    staged_loads: int
    fused_loads: int
    pages: int
    missing_pages: int
    own_bytes: int
    group_bytes: int
    fallback_bytes: int
    received_bytes: int
    lost_owners: int
    offloaded_bytes: int


class Loader:
    """Moves pages of one namespace to and from one rank's KV tensors, on the CPU or on a GPU.

    ``tensors``: component -> one tensor a layer, None where skipped. ``group``: the ranks to load and offload with, None for none.
    ``UMBP_LOAD`` says how: auto (the default), solo, fused or staged (with the group, also what is small). ``copy_threads``: of loads on
    the CPU. ``runtime``: in place of the one of the tensors' device.
    """

    def __init__(
        self,
        namespace: Namespace,
        tensors: Mapping[str, Sequence[Any]],
        group: Group | None = None,
        *,
        copy_threads: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.namespace = namespace
        self.group = group
        self.tensors = KvTensors.of(tensors, namespace.identity.layout)
        if group is not None and not namespace.identity.replicated:
            raise InvalidRequest(
                "the KV of this namespace differs from rank to rank: there is nothing to share", field="group", example="None"
            )
        self._asked = os.environ.get("UMBP_LOAD", "auto")
        if self._asked not in WAYS:
            raise InvalidRequest(f"{self._asked!r} is none of {', '.join(WAYS)}", field="UMBP_LOAD", example="auto")
        cores = len(os.sched_getaffinity(0))
        threads = max(1, min(cores, COPY_THREADS_MAX) if copy_threads is None else copy_threads)
        self._equipment = equip(self.tensors, namespace, group, runtime=runtime, copy_threads=threads)
        self._mover = self._equipment.mover
        self.copy_threads = threads
        self._rank = Rank(namespace, group, self._equipment.party) if group is not None and self._equipment.party is not None else None
        self._offloading = Offloads(namespace, group, self._mover)
        self._closed = False
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="umbp-load")
        self._offloads = ThreadPoolExecutor(1, thread_name_prefix="umbp-offload")
        self._taken = Taken()
        self._full_until = 0.0
        self._lost_owners = 0  # as far as it is counted
        self._last = Choice("", "", "")
        self._count = {"solo": 0, "staged": 0, "fused": 0, "pages": 0, "missing": 0}
        self._counters = counters()
        if self._rank is not None:
            with contextlib.suppress(Alone):  # so that the others know of this rank before its first load; it tries again then
                self._rank.enter()

    def __repr__(self) -> str:
        return f"<Loader of {len(self.tensors.planes)} planes x {self.tensors.pages} pages>"

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def lookup(self, keys: Any, *, session: str = "") -> int:
        """How many leading pages can be restored now. No call, but one for pages that may be elsewhere, where there is such a place."""
        array = as_keys(keys)
        length = self.namespace.prefix(array, session=session)
        if length < len(array) and self.namespace.operations.may_fetch:
            absent = self.namespace.locate(array[length:]) == NOWHERE
            length += int(absent.argmax()) if absent.any() else len(absent)
        return length

    def load(
        self,
        keys: Any,
        slots: Any,
        *,
        deadline: float = DEADLINE_SECONDS,
        verify: str = "never",
        after: Any = None,
        begin_within: float | None = None,
        noted: bool = False,
    ) -> Load:
        """Start to restore pages into these slots; returns at once.

        ``keys`` (n, 32), ``slots`` (n,) distinct page indices of the tensors. ``deadline``: seconds after which what is not there is
        missing. ``verify``: compare checksums of no, some or all pages before they are moved. ``after``: something with ``synchronize()``
        (a torch event), waited for before anything is written; without it, on a GPU, what the caller's current stream has queued is.
        ``begin_within``: seconds after which a load that has not begun is given up, for callers whom a silent pool must not hold up.
        ``noted``: the access history has this request already. In a group, a load of no pages helps the other ranks with theirs.
        """
        array = as_keys(keys)
        places: I64 = as_slots(slots, len(array), self.tensors.pages)
        for field, seconds in (("deadline", deadline), ("begin_within", deadline if begin_within is None else begin_within)):
            if not isinstance(seconds, int | float) or not 0 < seconds <= 3600:
                raise InvalidRequest(f"{seconds!r} is not a number of seconds above 0 and up to an hour", field=field, example="10")
        start, now = self._equipment.mark() if after is None else None, time.monotonic()
        begin_by = math.inf if begin_within is None else now + begin_within
        load = Load(len(array), self.tensors.layers, now + deadline, start, begin_by=begin_by, noted=noted)
        self._submit(self._loads, self._run, load, array, places, verify, after)
        return load

    def offload(self, keys: Any, slots: Any, *, after: Any = None, parent: bytes | None = None) -> Offload:
        """Start to store pages from these slots; returns at once. The slots must keep their bytes until the handle's result is there.

        ``after``: something with ``synchronize()`` (a torch event), waited for before the tensors are read; without it, on a GPU, what the
        caller's current stream has queued is. ``parent``: the key before the first, where there is one. In a group each rank is given the
        same keys, and each page is stored by one of them.
        """
        array = as_keys(keys)
        places: I64 = as_slots(slots, len(array), self.tensors.pages)
        offload = Offload(len(array))
        after = after or self._equipment.mark_to_wait_for()
        self._submit(self._offloads, self._offloading.run, offload, array, places, after, parent)
        return offload

    def statistics(self) -> LoaderStatistics:
        """A snapshot."""
        taken, count = self._taken, self._count
        return LoaderStatistics(
            self._last.mover,
            self._last.cause,
            self._last.reason,
            solo_loads=count["solo"],
            staged_loads=count["staged"],
            fused_loads=count["fused"],
            pages=count["pages"],
            missing_pages=count["missing"],
            own_bytes=taken.own,
            group_bytes=taken.group,
            fallback_bytes=taken.fallback,
            received_bytes=taken.received,
            lost_owners=self._rank.party.lost_owners if self._rank else 0,
            offloaded_bytes=self._offloading.read_bytes,
        )

    def close(self) -> None:
        """Wait for what is on its way, leave the group, and end the threads. Loads and offloads are refused from now on."""
        self._closed = True
        self._loads.shutdown(wait=True)
        self._offloads.shutdown(wait=True)
        if self._rank is not None:
            self._rank.close()
        self._mover.close()

    def _submit(self, thread: ThreadPoolExecutor, *work: Any) -> None:
        try:
            thread.submit(*work)
        except RuntimeError:  # also where somebody closes it at this very moment
            if not self._closed:
                raise
            raise InvalidRequest("this loader was closed", field="loader", example="umbp.Loader(namespace, tensors)") from None

    # -- loads -------------------------------------------------------------------------------------------------------------------------

    def _run(self, load: Load, keys: U8, slots: I64, verify: str, after: Any) -> None:
        """One load, to its end; nothing raises."""
        held: Mask = np.zeros(len(keys), bool)
        reason, taken, wanted = "", Taken(), None
        try:
            if load.over:  # its deadline passed before its turn came
                return
            seconds = max(0.0, FETCH_SHARE * (load.deadline - time.monotonic()))
            if verify == "never" and (streaming := streaming_or_none(self.namespace, keys)) is not None:
                if time.monotonic() < self._full_until and may_read_past(self.namespace):
                    streaming = (no_room(self.namespace.identity.layout, self.namespace.object_bytes, len(keys)), "no_room")
                self._stream(load, keys, slots, after, taken, seconds, *streaming)
                return
            wanted = self.namespace.run(hold(self.namespace.operations, keys, seconds, lambda: load.over or load.cancelled))
            if verify == "never" and wanted is not None and wanted.refused:
                seconds = max(0.0, FETCH_SHARE * (load.deadline - time.monotonic()))
                how = no_room(self.namespace.identity.layout, self.namespace.object_bytes, len(keys))
                self._stream(load, keys, slots, after, taken, seconds, how, "no_room")
                return
            if after is not None:
                after.synchronize()
            choice = self._choose(len(keys), verify)
            if choice.mover != "solo" and self._rank is not None:
                try:
                    self._went(load, choice)
                    held, reason = self._rank.load(load, keys, slots, taken, choice.mover)
                except Alone as error:
                    choice = Choice("solo", "no_meeting", str(error))
            if choice.mover == "solo":
                self._went(load, choice)
                held, reason = self._alone(load, keys, slots, verify, taken)
        except (UmbpError, Fault) as error:
            reason = str(error)
        except Exception as error:
            log.exception("a load failed")
            reason = f"internal error: {error}"
        finally:
            self._end(load, held, reason, taken)
            if wanted is not None:
                self.namespace.run(end(wanted))

    def _stream(self, load: Load, keys: U8, slots: I64, after: Any, taken: Taken, seconds: float, how: Stages, cause: str) -> None:
        """A load whose pages are moved as they come, to its end."""
        if after is not None:
            after.synchronize()
        self._went(load, Choice("solo", cause, STREAMED[cause]))
        stream = Stream(load, self.namespace, self._mover, slots, taken, how.needs)
        with contextlib.suppress(LeaseLost):  # what did not count was told as missing
            stream.run(keys, seconds, how, lambda held, reason: self._end(load, held, reason, taken))
        if stream.passed:
            self._full_until = time.monotonic() + FULL_SECONDS

    def _choose(self, pages: int, verify: str) -> Choice:
        """How this load is done."""
        alone = None
        if self._rank is None:
            alone = ("unreachable", self._equipment.unreachable) if self.group is not None else ("no_group", "no group")
        elif verify != "never":
            alone = ("verify", "checksums are compared, which reads all pages")
        elif pages > TABLE_PAGES_MAX:
            alone = ("too_many_pages", f"{pages} pages are more than the {TABLE_PAGES_MAX} that a rank may bring to a meeting")
        world = self.group.world if self.group is not None else 1
        shape = LoadShape(pages, self.namespace.object_bytes, world, min(LAYER_GROUPS, self.tensors.layers))
        facts = Facts(
            pages * self.namespace.object_bytes,
            break_even(self._equipment.machine, shape, meet=True),
            alone,
            unmapped=self._equipment.unmapped,
            unreachable=self._equipment.unreachable,
        )
        return choose(self._asked, facts)

    def _went(self, load: Load, choice: Choice) -> None:
        load.choice = choice
        if (self._last.mover, self._last.cause) != (choice.mover, choice.cause):
            log.info("loads are %s (%s): %s", choice.mover, choice.cause, choice.reason)
        self._last = choice

    def _end(self, load: Load, held: Mask, reason: str, taken: Taken) -> None:
        """Count the load and then tell who waits for it: whoever has heard of it finds it counted. Only the first call does something."""
        if load.counted:
            return
        load.counted, load.read_bytes = True, taken.segment
        missing = load.pages if load.over else int(np.count_nonzero(~held))
        if load.choice is not None:
            self._count[load.choice.mover] += 1
        self._taken.add(taken)
        self._count["pages"] += load.pages
        self._count["missing"] += missing
        self._counters.load(load.choice, taken, pages=load.pages, missing=missing)
        lost = self._rank.party.lost_owners if self._rank else 0
        self._counters.lost.inc(lost - self._lost_owners)
        self._lost_owners = lost
        load.end(held, reason)

    def _alone(self, load: Load, keys: U8, slots: I64, verify: str, taken: Taken) -> tuple[Mask, str]:
        """Which pages are there, and why the others are not."""
        held: Mask = np.zeros(len(keys), bool)
        try:
            # The lease lasts as long as the load may, and ends with it.
            with self.namespace.lease(keys, max(0.001, load.deadline - time.monotonic()), verify=verify, noted=load.noted) as lease:
                if lease.look is None and not self.namespace.operations.link.ready():
                    return held, "no pool answers at the moment"
                if self._move(load, lease, slots, taken):
                    held = lease.check()
                    if bool((lease.unchanged() | ~held).all()):  # whole, whatever became of the lease: nobody waits for its release
                        self._end(load, held, _gone(held), taken)
                else:  # decided already: nor here
                    self._end(load, held, "cancelled" if load.cancelled else "the deadline passed", taken)
        except LeaseLost as error:
            return np.zeros(len(keys), bool), str(error)
        return held, _gone(held)

    def _move(self, load: Load, lease: Lease, slots: I64, taken: Taken) -> bool:
        """All layers of what the lease holds; False if it was stopped on the way."""
        which = np.flatnonzero(lease.held)
        return self._mover.restore(load, lease.data, lease.offsets[which], slots[which], taken)


def _gone(held: Mask) -> str:
    """Why a load of these pages is not whole; "" if it is."""
    return "" if held.all() else f"{int(np.count_nonzero(~held))} pages are not stored any more"


__all__ = ["Loader", "LoaderStatistics"]
