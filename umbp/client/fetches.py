"""Pages that are not in this node's DRAM, as a client asks for them: `get` that waits for them, `hold` for a load, prefetches.

Theory of operation
-------------------
The pool brings the pages into its own DRAM, where they are read like all others. A fetch is asked for in one call, which is answered at
once, so that a page that takes its time keeps nobody else from using this client's connection. The pool rings (`umbp.store.bell`) when
something of it has come to its end. What has come is then seen in the shared index, as any page is; only what rang for a page that does not
come is asked about, and all of it now and then. Pages that have come are copied while others are on their way; until the client ends the
fetch the pool keeps them from eviction.

Where the pool has no room for pages they come all the same, a few at a time, and stay only until the client says that it has them
(`umbp.pool.passing`): `get` and loads say so when they have copied them. Those that are on this node's SSD `get` reads past the pool's
memory (`umbp.client.straight`) where it may; it does so at once where the pool says that what was read need not be kept.

Only what the index does not show costs a call, and only where the pool said at hello that it has sources: a pool that is all there is
answers a miss as before, without one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from umbp import wire
from umbp.client import errands, neighbours, straight
from umbp.client.buffers import Rows
from umbp.client.late import forgotten, within
from umbp.client.link import Bond, Look
from umbp.client.operations import Operations
from umbp.client.steps import Listen, Operation, Send
from umbp.core.stages import Ranges
from umbp.errors import InvalidRequest, UmbpError, Unavailable
from umbp.layout import as_keys
from umbp.store.index import W_OFFSET
from umbp.types import I64, NOWHERE, PENDING, U8, Mask, PrefetchState, ReadStatus, Statuses, Tier

FETCH_SECONDS = 2.0  # a prefill computes some 10 pages in this time: who has not come by then is better recomputed
LISTEN_SECONDS = 0.005  # the longest without hearing whether the caller has enough
TRIES = 3  # for pages that had come, and were gone when this process came to copy them
LOOK_SECONDS = 0.02  # and without a look at the index, for pages that come by other ways: a look at 128 keys takes 0.1 ms
ASK_SECONDS = (0.25, 0.05)  # between two questions what has become of the rest, where the bell did not ring for a page that is not coming:
# before the deadline, and after it, when the pool has ended the fetch in a moment
ANSWER_SECONDS = 0.25  # the pool ends a fetch at its deadline; this much later the client does


@dataclass(frozen=True, slots=True)
class PrefetchStatus:
    """What has become of a prefetch by now. ``there`` (n,) bool: which pages are in DRAM; ``left`` how many are on their way."""

    request_id: str
    state: PrefetchState
    there: Mask
    left: int

    def __repr__(self) -> str:
        some = f"{int(np.count_nonzero(self.there))} of {len(self.there)} pages are there, {self.left} on their way"
        return f"<PrefetchStatus {self.request_id!r} {self.state.name.lower()}: {some}>"

    @property
    def over(self) -> bool:
        """Whether it is decided for every page."""
        return self.state not in (PrefetchState.QUEUED, PrefetchState.RUNNING)


@dataclass(slots=True)
class Wanted:
    """Pages that this client has asked for. ``which`` (n,): indices of the caller's keys; ``status`` (n,) `ReadStatus` or PENDING."""

    which: I64
    status: U8
    give_up: float
    bond: Bond | None = None
    asked_at: float = 0.0
    rings: int = 0  # of the bell, when it was heard last
    lacks: int = 0
    asked_lacks: int = 0  # and when it was asked last
    parts: list[tuple[int, slice]] = field(default_factory=list)  # number of each fetch, and which of the pages are its
    looked_at: float = 0.0
    through: bool = False  # some of what came only passes through for somebody else
    seen: Mask = field(default_factory=lambda: np.zeros(0, bool))
    found: tuple[I64, Look] | None = None  # the pages that the last look found, and how

    @property
    def over(self) -> bool:
        """Whether nothing more is to be waited for."""
        return not (self.status == PENDING).any() or time.monotonic() > self.give_up

    @property
    def refused(self) -> bool:
        """Whether pages did not come though there is time, or cannot stay: there is no room for them."""
        busy = bool((self.status == ReadStatus.BUSY.value).any())
        return (busy or self.through) and time.monotonic() < self.give_up - ANSWER_SECONDS

    def fresh(self) -> tuple[I64, Look | None]:
        """Indices of the caller's keys that have come since this was asked last; and how they were found, where one look found them."""
        new = np.flatnonzero((self.status == ReadStatus.HIT.value) & ~self.seen)
        self.seen[new] = True
        found, self.found = self.found, None
        return self.which[new], found[1] if found is not None and np.array_equal(found[0], new) else None

    def hear(self) -> None:
        """Before a look: what comes after it will ring again."""
        assert self.bond is not None
        self.rings, self.lacks = self.bond.bell.rings, self.bond.bell.lacks

    def pause(self) -> Operation[None]:
        """Until something has happened since the bell was heard, or it is time to look."""
        assert self.bond is not None
        yield Listen(self.bond.bell, self.rings, self.bond.session, LISTEN_SECONDS)

    def look(self, operations: Operations, keys: U8) -> Operation[None]:
        """What has come stands in the index; the pool is asked about the rest where something did not come, and from time to time."""
        before, now = self.rings, time.monotonic()
        self.hear()
        pending = np.flatnonzero(self.status == PENDING)
        if len(pending) and (self.rings != before or now >= self.looked_at + LOOK_SECONDS):
            self.looked_at = now
            if (look := operations.look(keys[self.which[pending]])) is not None and look.found.hit.any():
                came = np.flatnonzero(look.found.hit)
                self.status[pending[came]] = ReadStatus.HIT
                self.found = pending[came], Look(look.bond, look.number, look.found.only(came))
        yield from self.ask_again(now)

    def ask_again(self, now: float) -> Operation[None]:
        """Ask the pool what has become of the rest, if there is reason to."""
        patience = ASK_SECONDS[now >= self.give_up - ANSWER_SECONDS]
        if self.over or (self.lacks == self.asked_lacks and now < self.asked_at + patience):
            return
        self.asked_at, self.asked_lacks = now, self.lacks
        assert self.bond is not None
        for number, part in self.parts:
            if (waiting := self.status[part] == PENDING).any():
                reply, blob = yield self.bond.call(wire.GetFetched(number), seconds=self.give_up - now, late=forgotten)
                self.status[part] = np.where(waiting, blob.take(np.uint8, reply.n), self.status[part])


def get(operations: Operations, keys: Any, out: Any, verify: str, deadline: float | None) -> Operation[Statuses]:
    """`Operations.get`, and what is not in DRAM by way of it or past it, within ``deadline`` seconds. What has not come by then is BUSY."""
    seconds = _seconds(deadline, FETCH_SECONDS)
    statuses = yield from within(operations.get(keys, out, verify), time.monotonic() + seconds + ANSWER_SECONDS)
    missing = np.flatnonzero(statuses.codes == ReadStatus.MISS.value)
    if not len(missing):
        return statuses
    array, rows, codes, until = as_keys(keys), operations.rows(out), statuses.codes, time.monotonic() + seconds
    missing = yield from neighbours.read(operations, array, rows, codes, missing, verify)
    bond = operations.link.bond_or_none()
    if not len(missing) or not seconds or bond is None or not bond.fetches:
        return statuses
    past = straight.able(bond)
    if past and bond.through:
        yield from straight.read(operations, array, codes, missing, straight.into(rows), until)
        missing, past = missing[codes[missing] != ReadStatus.HIT.value], False
    with contextlib.suppress(UmbpError):
        missing = yield from errands.receive(operations, array, rows, codes, missing, until - time.monotonic())
    for _ in range(TRIES + past):
        if not len(missing):
            break
        if time.monotonic() >= until:
            codes[missing] = ReadStatus.BUSY
            break
        wanted = missing
        missing = yield from _get_absent(operations, array, rows, codes, wanted, verify, until - time.monotonic(), passing=not past)
        if past:  # what there is no room for is read by this process, or passes through after all
            refused = wanted[codes[wanted] == ReadStatus.BUSY.value]
            yield from straight.read(operations, array, codes, refused, straight.into(rows), until)
            missing, past = np.union1d(missing, refused[codes[refused] != ReadStatus.HIT.value]), False
    return statuses


def _get_absent(
    operations: Operations, array: U8, rows: Rows, codes: U8, missing: I64, verify: str, seconds: float, *, passing: bool
) -> Operation[I64]:
    """Have these pages (indices) brought and copy them out, their codes with them; those that had come, and had gone before the copy.

    ``passing``: those that cannot stay too.
    """
    wanted = Wanted(missing, np.full(len(missing), PENDING, np.uint8), time.monotonic() + seconds + ANSWER_SECONDS)
    try:
        yield from ask(operations, wanted, array, seconds, passing=passing)
        while True:
            fresh, look = wanted.fresh()
            if len(fresh):
                look = look or operations.look(array[fresh])
                reading = operations.read(array[fresh], rows.only(fresh), verify, look)
                codes[fresh] = (yield from within(reading, wanted.give_up)).codes
                if look is not None and (through := pass_through(look)).any():
                    yield from taken(wanted, np.searchsorted(missing, fresh[through]))
            if wanted.over:
                break
            yield from wanted.pause()
            yield from wanted.look(operations, array)
    except UmbpError:  # the pool went, or it has no room for one more that waits
        pass
    finally:
        yield from end(wanted)
    absent = wanted.status != ReadStatus.HIT.value
    codes[missing[absent]] = np.where(wanted.status[absent] == PENDING, ReadStatus.BUSY.value, wanted.status[absent])
    gone: I64 = missing[~absent & (codes[missing] == ReadStatus.MISS.value)]
    return gone


def hold(operations: Operations, keys: U8, seconds: float, stop: Callable[[], bool]) -> Operation[Wanted | None]:
    """Have these pages brought into DRAM and wait for it, or until ``stop``; they stay until `end`.

    None if all are there, or can be had from nowhere else. What is there but only passes through for somebody else is not held: `refused`.
    """
    look = operations.look(keys) if operations.may_fetch and len(keys) else None
    if look is None or (look.found.hit & ~pass_through(look)).all():
        return None
    every = np.arange(len(keys))
    wanted = Wanted(every, np.full(len(keys), PENDING, np.uint8), time.monotonic() + seconds + ANSWER_SECONDS)
    try:
        yield from ask(operations, wanted, keys, seconds)
        while not wanted.over and not stop():
            yield from wanted.pause()
            yield from wanted.look(operations, keys)
        look = operations.look(keys)
        wanted.through = look is not None and bool(pass_through(look).any())
    except UmbpError:
        pass
    except BaseException:
        yield from end(wanted)
        raise
    return wanted


def end(wanted: Wanted) -> Operation[None]:
    """Wait no longer, and let go of what came."""
    parts, wanted.parts = wanted.parts, []
    for number, _ in parts:
        with contextlib.suppress(UmbpError):
            yield Send(wire.EndFetch(number))


def locate(operations: Operations, keys: Any) -> Operation[U8]:
    """The tier from which each page would come, (n,) uint8 of `Tier`, NOWHERE (255) where nobody has it. Protects nothing."""
    array = as_keys(keys)
    tiers = np.full(len(array), NOWHERE, np.uint8)
    look = operations.look(array) if len(array) else None
    if look is None:
        return tiers
    tiers[look.found.hit] = Tier.DRAM
    absent = np.flatnonzero(~look.found.hit)
    nearby = operations.nearby(array[absent])
    tiers[absent[nearby]] = Tier.NEIGHBOUR
    absent = absent[~nearby]
    if look.bond.ssd is not None and len(absent):
        on_ssd = operations.on_ssd(look, array[absent])
        tiers[absent[on_ssd]] = Tier.SSD
        absent = absent[~on_ssd]
    if look.bond.far or (look.bond.fetches and look.bond.ssd is None):
        for start in range(0, len(absent), wire.LARGE_BATCH_MAX):
            part = absent[start : start + wire.LARGE_BATCH_MAX]
            try:
                _, blob = yield look.bond.call(wire.Locate(operations.opened.row, look.number, len(part)), array[part])
            except Unavailable:
                break
            tiers[part] = blob.take(np.uint8, len(part))
    return tiers


def prefetch(operations: Operations, keys: Any, deadline: float | None, request_id: str, hold_seconds: float) -> Operation[PrefetchStatus]:
    """Have pages brought into DRAM that are wanted later; what has become of it. LimitReached, Conflict: see `umbp.core.fetches`."""
    array = as_keys(keys)
    if len(array) > wire.LARGE_BATCH_MAX:
        raise InvalidRequest(f"{len(array)} keys in one prefetch, at most {wire.LARGE_BATCH_MAX}", field="keys", example="several of them")
    seconds, kept = _seconds(deadline, 10 * FETCH_SECONDS), _seconds(hold_seconds, 0.0, "hold")
    name = request_id or secrets.token_hex(16)
    bond, number = operations.current()
    message = wire.Prefetch(operations.opened.row, number, len(array), _request_id(name), seconds, kept)
    reply, blob = yield bond.call(message, array)
    return _status(reply, blob)


def prefetch_status(operations: Operations, request_id: str) -> Operation[PrefetchStatus]:
    """What has become of the prefetch of this name. NotFound if there is none (any more)."""
    bond, _ = operations.current()
    reply, blob = yield bond.call(wire.GetPrefetched(operations.opened.row, _request_id(request_id)))
    return _status(reply, blob)


# -- steps of it ---------------------------------------------------------------------------------------------------------------------


def pass_through(look: Look) -> Mask:
    """Which of the pages that were found only pass through; (n,) bool."""
    found: Mask = look.found.hit & (look.found.rows[:, W_OFFSET] >= look.bond.passage) & (look.bond.passage > 0)
    return found


def taken(wanted: Wanted, places: I64) -> Operation[None]:
    """These pages, of those that only pass through, have been copied: indices of ``wanted``."""
    for number, part in wanted.parts:
        mine = places[(places >= part.start) & (places < part.stop)] - part.start
        if len(mine):
            yield Send(wire.Taken(number, len(mine)), (mine,), wanted.bond)


def ask(
    operations: Operations,
    wanted: Wanted,
    keys: U8,
    seconds: float,
    stages: tuple[Ranges, ...] = (),
    *,
    passing: bool = False,
) -> Operation[None]:
    """Have these pages brought, in these stages where a part of a page is of use (`umbp.core.stages`).

    ``passing``: those that cannot stay too; `taken` is said of them.
    """
    order, until = [list(stage) for stage in stages], time.monotonic() + seconds
    bond, number = operations.current()
    wanted.bond, wanted.seen, wanted.asked_at = bond, np.zeros(len(wanted.which), bool), time.monotonic()
    wanted.hear()
    wanted.asked_lacks = wanted.lacks
    for start in range(0, len(wanted.which), wire.BATCH_MAX):
        part = slice(start, min(start + wire.BATCH_MAX, len(wanted.which)))
        which = wanted.which[part]
        before = keys[which[0] - 1].tobytes().hex() if which[0] else ""
        message = wire.Fetch(operations.opened.row, number, len(which), seconds, before, order, passing)
        reply, blob = yield bond.call(message, keys[which], seconds=until - time.monotonic(), late=partial(_too_late, bond))
        if reply.number:
            wanted.parts.append((reply.number, part))
        wanted.status[part] = blob.take(np.uint8, reply.n)


def _too_late(bond: Bond, reply: Any, blob: wire.Blob) -> Operation[None]:
    """Nobody waits any more for what was asked for."""
    if reply.number:
        yield Send(wire.EndFetch(reply.number), (), bond)


def _status(reply: wire.Prefetched, blob: wire.Blob) -> PrefetchStatus:
    hits = blob.take(np.uint8, reply.n) == ReadStatus.HIT.value
    return PrefetchStatus(reply.request, PrefetchState[reply.state.upper()], hits, reply.left)


def _seconds(value: float | None, default: float, field_name: str = "deadline") -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= wire.FETCH_SECONDS_MAX:
        raise InvalidRequest(f"{value!r} is not a number of seconds from 0 to an hour", field=field_name, example="2.0")
    return float(value)


def _request_id(value: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= wire.TEXT_CHARS_MAX:
        raise InvalidRequest(f"a request id is text of 1 to {wire.TEXT_CHARS_MAX} characters", field="request_id", example="chat-17/4")
    return value
