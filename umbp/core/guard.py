"""A policy from another package, so that its faults are its own: nothing it does or answers can lose memory or stop the pool.

Every answer of `victims` is held against what a policy may say: ids of this pool, none twice, all of them eligible. The first wrong answer
or exception is its last: LRU takes its place, told of all live objects, and `fault` says why, which is in the log and in ``/readyz``.

Cost: one more pass over the victims, some 10 us a call. Our own policies pass the contract test instead and are not wrapped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from umbp.errors import InvalidRequest
from umbp.policies.base import (
    ADMISSION,
    CLEANING,
    EVICTION,
    STRIPING,
    AdmissionPolicy,
    Eligible,
    EvictionPolicy,
    Inserted,
    Request,
)
from umbp.policies.cleaning import CleaningPolicy, CostBenefit
from umbp.policies.lru import Lru
from umbp.policies.striping import Even, StripingPolicy
from umbp.types import F64, I32, I64, U64, Mask

IN_ITS_PLACE = {EVICTION: "lru", ADMISSION: "always", CLEANING: "cost_benefit", STRIPING: "even"}  # of one that failed, by kind


class Guarded:
    """Stands in for ``policy`` as long as it behaves. ``live`` gives the ids of all live objects, the longest unused first."""

    def __init__(self, policy: EvictionPolicy, capacity: int, live: Callable[[], I64]) -> None:
        self.policy = policy
        self.fault = ""
        self._capacity = capacity
        self._live = live

    def __repr__(self) -> str:
        return f"<Guarded {self.policy!r}{', ' + self.fault if self.fault else ''}>"

    def on_inserted(self, event: Inserted) -> None:
        """Objects were committed."""
        try:
            self.policy.on_inserted(event)
        except Exception as error:  # noqa: BLE001 - a foreign policy may raise anything
            self._replace("on_inserted", error)

    def on_request(self, event: Request) -> None:
        """A client asked for these keys."""
        try:
            self.policy.on_request(event)
        except Exception as error:  # noqa: BLE001 - as above
            self._replace("on_request", error)

    def victims(self, eligible: Eligible, count: int) -> I32:
        """What the policy offers, checked."""
        try:
            offered = np.asarray(self.policy.victims(eligible, count))
            if offered.ndim != 1 or offered.dtype.kind not in "iu":
                raise ValueError(f"victims are a flat array of ids, not {offered.dtype} of shape {offered.shape}")
            ids: I32 = offered[:count].astype(np.int32)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._capacity:
                raise ValueError(f"ids from {ids.min()} to {ids.max()}, there are {self._capacity}")
            if len(np.unique(ids)) != len(ids):
                raise ValueError("an id is offered twice")
            if not eligible(ids).all():
                raise ValueError("ids are offered that are not eligible")
        except Exception as error:  # noqa: BLE001 - as above
            self._replace("victims", error)
            return self.policy.victims(eligible, count)
        return ids

    def on_removed(self, ids: I32, *, evicted: bool) -> None:
        """These are gone."""
        try:
            self.policy.on_removed(ids, evicted=evicted)
        except Exception as error:  # noqa: BLE001 - as above
            self._replace("on_removed", error)

    def _replace(self, call: str, error: Exception) -> None:
        if self.fault:  # our own LRU: a fault of ours
            raise error
        self.fault = f"the eviction policy {type(self.policy).__name__} failed in {call} ({error!r}); lru took its place"
        self.policy = Lru(self._capacity)
        live = self._live().astype(np.int32)
        self.policy.on_inserted(Inserted(0.0, live, np.full(len(live), -1, np.int32), np.zeros(len(live), np.uint64)))


def failed(policy: object) -> str:
    """What this policy did wrong, and what took its place; "" if nothing."""
    return str(getattr(policy, "fault", ""))


def check_sound(policy: object) -> None:
    """InvalidRequest if this policy has failed: who asks for it is told so, and not given what another one does in its place."""
    if fault := failed(policy):
        raise InvalidRequest(fault.rpartition("; ")[0], field="policy")


def guarded(policy: EvictionPolicy, capacity: int, live: Callable[[], I64]) -> EvictionPolicy:
    """The policy itself if it is one of ours."""
    ours = type(policy).__module__.startswith("umbp.policies.")
    return policy if ours else Guarded(policy, capacity, live)


class GuardedAdmission:
    """The same for admission: after a fault everything is admitted."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy
        self.fault = ""

    def __repr__(self) -> str:
        return f"<GuardedAdmission {self.policy!r}{', ' + self.fault if self.fault else ''}>"

    def on_request(self, event: Request) -> None:
        """A client asked for these keys."""
        if not self.fault:
            try:
                self.policy.on_request(event)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up("on_request", error)

    def admit(self, now: float, fingerprints: U64, *, fill: float) -> Mask:
        """What the policy says, checked."""
        if not self.fault:
            try:
                mask = np.asarray(self.policy.admit(now, fingerprints, fill=fill))
                if mask.shape != fingerprints.shape or mask.dtype != np.bool_:
                    raise ValueError(f"a bool for each of {len(fingerprints)} pages is wanted, not {mask.dtype} of shape {mask.shape}")
                return mask
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up("admit", error)
        return np.ones(len(fingerprints), bool)

    def _give_up(self, call: str, error: Exception) -> None:
        self.fault = f"the admission policy {type(self.policy).__name__} failed in {call} ({error!r}); everything is admitted"


def guarded_admission(policy: AdmissionPolicy) -> AdmissionPolicy:
    """The policy itself if it is one of ours."""
    return policy if type(policy).__module__.startswith("umbp.policies.") else GuardedAdmission(policy)


class GuardedCleaning:
    """The same for cleaning: after a fault `cost_benefit` goes on."""

    def __init__(self, policy: CleaningPolicy) -> None:
        self.policy = policy
        self.fault = ""

    def __repr__(self) -> str:
        return f"<GuardedCleaning {self.policy!r}{', ' + self.fault if self.fault else ''}>"

    def order(self, live: F64, age: F64) -> I64:
        """What the policy says, checked: each file once."""
        try:
            order = np.asarray(self.policy.order(live, age))
            if order.shape != live.shape or order.dtype.kind not in "iu":
                raise ValueError(f"an index for each of {len(live)} files is wanted, not {order.dtype} of shape {order.shape}")
            if not np.array_equal(np.sort(order), np.arange(len(live))):
                raise ValueError(f"each of {len(live)} files is wanted once")
            return order.astype(np.int64)
        except Exception as error:
            if self.fault:  # ours: a fault of ours
                raise
            self.fault = f"the cleaning policy {type(self.policy).__name__} failed in order ({error!r}); cost_benefit took its place"
            self.policy = CostBenefit()
            return self.policy.order(live, age)


def guarded_cleaning(policy: CleaningPolicy) -> CleaningPolicy:
    """The policy itself if it is one of ours."""
    return policy if type(policy).__module__.startswith("umbp.policies.") else GuardedCleaning(policy)


class GuardedStriping:
    """The same for striping: after a fault `even` goes on."""

    def __init__(self, policy: StripingPolicy) -> None:
        self.policy = policy
        self.fault = ""

    def __repr__(self) -> str:
        return f"<GuardedStriping {self.policy!r}{', ' + self.fault if self.fault else ''}>"

    def choose(self, size: F64, used: F64, waiting: F64) -> int:
        """What the policy says, checked: one of the disks."""
        try:
            choice = operator.index(self.policy.choose(size, used, waiting))
            if not 0 <= choice < len(size):
                raise ValueError(f"disk {choice}, there are {len(size)}")
            return choice
        except Exception as error:
            if self.fault:
                raise
            self.fault = f"the striping policy {type(self.policy).__name__} failed in choose ({error!r}); even took its place"
            self.policy = Even()
            return self.policy.choose(size, used, waiting)


def guarded_striping(policy: StripingPolicy) -> StripingPolicy:
    """The policy itself if it is one of ours."""
    return policy if type(policy).__module__.startswith("umbp.policies.") else GuardedStriping(policy)
