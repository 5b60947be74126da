"""Leases for SGLang's requests: asked for in a thread, waited for a bounded time, released without anyone waiting.

A request is looked up, then loaded; its pages are leased in one call when the load is queued. A worker alone waits for the answer, and
computes what it does not get. Ranks with peers cannot say no one by one, and nothing of what they agreed on may go in between. So what a
lookup finds is protected before SGLang reduces the lengths over its ranks, in one of two ways (``protect``):

*load* (the default): it is claimed (`umbp.client.claims`), in shared memory and without a call, until the lease of the load is granted.
*lookup*: it is leased, for one call per request that finds something; the leases are kept `ahead` for the load, for a bounded time and
number of requests. A pool that does not answer then finds nothing, where it would fail a load that relied on a claim.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field

import numpy as np

from umbp.client import Lease, Namespace
from umbp.client.claims import Claims
from umbp.client.link import Look
from umbp.errors import UmbpError
from umbp.layout import KEYS_PER_CALL_MAX
from umbp.types import U8, Mask

log = logging.getLogger("umbp.integrations.sglang")
AHEAD_REQUESTS_MAX = 256
ENTER_SECONDS = 1.0  # between two tries to have a place for claims
SILENT_SECONDS = 1.0  # after a pool was silent: a scheduler with a hundred requests must not wait for each of them


@dataclass(slots=True)
class Held:
    """Pages of one request: shelf -> keys that were asked for, and the leases of those that were there, one a call."""

    keys: dict[int, U8]
    leases: dict[int, list[Lease]] = field(default_factory=dict)
    answer: Future[None] | None = None
    complete: bool = False

    def answered(self, seconds: float) -> bool:
        """Wait so long; whether the pool has answered for all."""
        assert self.answer is not None
        try:
            self.answer.result(seconds)
        except NotInTime:
            return False
        return self.complete

    def masks(self) -> dict[int, Mask]:
        """Shelf -> which of its keys are held and stay."""
        return {number: np.concatenate([lease.check() for lease in leases]) for number, leases in self.leases.items()}

    def whole(self) -> bool:
        """Whether all pages are held, as far as it is known now."""
        return self.answered(0.0) and all(mask.all() for mask in self.masks().values())


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was leased when a request was looked up: the first (n, 32) ``keys`` of its prompt, and for each shelf which of them are held."""

    keys: U8
    masks: dict[int, Mask]
    held: Held
    since: float

    def covers(self, wanted: dict[int, U8]) -> bool:
        """Whether the pages that end at one of its lengths are these: whole for KV, the last ones for windows and states."""
        count = max((len(keys) for keys in wanted.values()), default=0)
        for number, keys in wanted.items():
            part = slice(count - len(keys), count)
            if number not in self.masks or not np.array_equal(self.keys[part], keys) or not self.masks[number][part].all():
                return False
        return count > 0


class Leases:
    """The leases of one worker. ``namespaces``: one a shelf. ``claims``: whether what is looked up is claimed."""

    def __init__(self, namespaces: Sequence[Namespace], *, wait_seconds: float, ahead_seconds: float, claims: bool = False) -> None:
        self._namespaces = namespaces
        self._claims = Claims(namespaces[0].operations.link) if claims else None
        self._entering: Future[None] | None = None
        self._wait_seconds = wait_seconds
        self._ahead_seconds = ahead_seconds
        self._silent_until = 0.0
        self._ahead: OrderedDict[str, Ahead] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbp-lease")  # one, so that a release comes after what it releases
        self._enter_at = 0.0
        if self._claims is not None:
            self._enter(self._claims)

    def __repr__(self) -> str:
        return f"<Leases of {len(self._ahead)} requests ahead of their loads>"

    def ask(self, keys: dict[int, U8]) -> Held:
        """Ask for these pages."""
        held = Held(keys)
        held.answer = self._thread.submit(self._take, held)
        return held

    def answered(self, held: Held) -> bool:
        """Wait for the answer. One that did not come in time is a no, and the next ones are not waited for then, for a while."""
        assert held.answer is not None
        if time.monotonic() < self._silent_until and not held.answer.done():
            return False
        if held.answered(self._wait_seconds):
            return True
        if not held.answer.done():
            self._silent_until = time.monotonic() + SILENT_SECONDS
        return False

    def release(self, *gone: Held) -> None:
        """Let go of these, after all that was asked for them; nobody waits for it."""
        if gone:
            with contextlib.suppress(RuntimeError):  # after `close`: the leases go with the connection
                self._thread.submit(self._release, gone)

    # -- claims ------------------------------------------------------------------------------------------------------------------------

    def claim(self, rid: str, looks: dict[int, Look], pages: int) -> dict[int, Mask]:
        """Claim what was hit of the first ``pages`` of a prompt; what is claimed of it. Nothing while there is no place for claims.

        Of more than there is room for, the first ones.
        """
        claims = self._claims
        assert claims is not None
        if not claims.ready and time.monotonic() > self._enter_at and (self._entering is None or self._entering.done()):
            self._entering = self._thread.submit(self._enter, claims)
        pages = min(pages, claims.pages_max // len(looks))
        which = {number: np.flatnonzero(look.found.hit[:pages]) for number, look in looks.items()}
        ids = np.concatenate([look.found.ids[which[number]] for number, look in looks.items()])
        versions = np.concatenate([look.found.versions[which[number]] for number, look in looks.items()])
        bonds = {id(look.bond): look.bond for look in looks.values()}
        there = claims.claim(rid, next(iter(bonds.values())), ids, versions) if len(bonds) == 1 else np.zeros(len(ids), bool)
        masks, start = {}, 0
        for number, places in which.items():
            masks[number] = np.zeros(pages, bool)
            masks[number][places] = there[start : start + len(places)]
            start += len(places)
        return masks

    def keep_claim(self, rid: str, held: Held) -> None:
        """What was claimed for this request stays until its lease is answered."""
        if self._claims is not None and (answer := held.answer) is not None:
            self._claims.need(rid, lambda: not answer.done())

    def end_claims(self) -> None:
        """A batch is built: what was looked up and not loaded is claimed no more."""
        if self._claims is not None:
            self._claims.let_go()

    def _enter(self, claims: Claims) -> None:
        self._enter_at = time.monotonic() + ENTER_SECONDS
        try:
            self._namespaces[0].run(claims.enter())
        except UmbpError as error:
            log.warning("pages cannot be claimed, and so none are found for ranks with peers: %s", error)

    # -- ahead of loads ----------------------------------------------------------------------------------------------------------------

    def known(self, rid: str, keys: U8) -> dict[int, Mask] | None:
        """What is held for this request since an earlier lookup; None if nothing is, or for other pages."""
        self.sweep()
        ahead = self._ahead.get(rid)
        if ahead is None:
            return None
        if len(keys) >= len(ahead.keys) and np.array_equal(keys[: len(ahead.keys)], ahead.keys):
            return ahead.masks
        self.drop(rid)
        return None

    def promise(self, rid: str, keys: U8, hits: dict[int, Mask]) -> dict[int, Mask]:
        """Lease what was hit of these first pages of a prompt; what is held of it. Nothing if the pool does not answer in time."""
        which = {number: np.flatnonzero(hit[: len(keys)]) for number, hit in hits.items()}
        held = self.ask({number: keys[places] for number, places in which.items()})
        if not self.answered(held):
            self.release(held)
            return {number: np.zeros(len(keys), bool) for number in hits}
        masks = {}
        for number, mask in held.masks().items():
            masks[number] = np.zeros(len(keys), bool)
            masks[number][which[number][mask]] = True
        self._ahead[rid] = Ahead(keys, masks, held, time.monotonic())
        return masks

    def take(self, rid: str, wanted: dict[int, U8]) -> Held | None:
        """What was leased ahead for this load, if it is all of it and still stands."""
        ahead = self._ahead.pop(rid, None)
        if ahead is None:
            return None
        if ahead.covers(wanted) and ahead.held.whole():
            return ahead.held
        self.release(ahead.held)
        return None

    def drop(self, rid: str) -> None:
        """This request does not load what it was promised."""
        if (ahead := self._ahead.pop(rid, None)) is not None:
            self.release(ahead.held)

    def sweep(self) -> None:
        """Let go of what has waited for too long, and of the oldest where there are too many."""
        old = time.monotonic() - self._ahead_seconds
        while self._ahead and (len(self._ahead) > AHEAD_REQUESTS_MAX or next(iter(self._ahead.values())).since < old):
            self.release(self._ahead.popitem(last=False)[1].held)

    def clear(self) -> None:
        """Let go of all that is ahead."""
        for rid in list(self._ahead):
            self.drop(rid)

    def close(self) -> None:
        """Release everything, and end the thread."""
        self.clear()
        self._thread.shutdown(wait=True)

    # -- in the thread -----------------------------------------------------------------------------------------------------------------

    def _take(self, held: Held) -> None:
        try:
            for number, keys in held.keys.items():
                namespace, held.leases[number] = self._namespaces[number], []
                for start in range(0, max(1, len(keys)), KEYS_PER_CALL_MAX):
                    part = keys[start : start + KEYS_PER_CALL_MAX]
                    held.leases[number].append(namespace.run(namespace.operations.lease(part, None, "never")))
            held.complete = True
        except Exception as error:  # noqa: BLE001 - it is a no, whatever the reason
            log.warning("pages could not be leased: %s", error)

    def _release(self, gone: tuple[Held, ...]) -> None:
        for held in gone:
            for number, leases in held.leases.items():
                namespace = self._namespaces[number]
                for lease in leases:
                    namespace.run(namespace.operations.release(lease))
