"""The policies of the SSD tier: chosen by name at the start, shown and swapped while it runs, as those of the DRAM tier are.

Each has the name of its option (`ssd_eviction`, `ssd_admission`, `ssd_cleaning`, `ssd_striping`). A new eviction policy is told of all
pages on SSD, the longest unused first, before it decides anything; what is stored stays, and what waits to be written still does. One of
another package is held to what it may answer (`umbp.core.guard`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from umbp.config import PoolConfig
from umbp.core.guard import check_sound, failed, guarded, guarded_admission, guarded_cleaning, guarded_striping
from umbp.errors import NotFound
from umbp.policies.base import ADMISSION, CLEANING, EVICTION, SSD_KINDS, STRIPING, AdmissionPolicy, EvictionPolicy, Inserted, build
from umbp.policies.cleaning import CleaningPolicy
from umbp.policies.striping import StripingPolicy
from umbp.store.index import hashes
from umbp.store.ssd import SsdTier
from umbp.store.ssd_catalog import LOW
from umbp.types import I64

TELL_SLICE = 65_536


class SsdPolicies:
    """One policy a kind. ``oldest_first`` gives the ids of all pages on SSD, the longest unused first."""

    def __init__(self, config: PoolConfig, entries: int, oldest_first: Callable[[], I64]) -> None:
        self.names = {kind: str(getattr(config, kind)) for kind in SSD_KINDS}
        self._entries, self._oldest_first = entries, oldest_first
        self.eviction = self._eviction(config.ssd_eviction)
        self.admission: AdmissionPolicy = guarded_admission(build(ADMISSION, config.ssd_admission, entries))
        self.cleaning: CleaningPolicy = guarded_cleaning(build(CLEANING, config.ssd_cleaning))
        self.striping: StripingPolicy = guarded_striping(build(STRIPING, config.ssd_striping))

    def __repr__(self) -> str:
        return f"<SsdPolicies {', '.join(f'{kind} {name}' for kind, name in self.names.items())}>"

    @property
    def faults(self) -> list[str]:
        """What policies of other packages did wrong."""
        every = (self.eviction, self.admission, self.cleaning, self.striping)
        return [fault for policy in every if (fault := failed(policy))]

    def swap(self, now: float, tier: SsdTier, kind: str, name: str) -> None:
        """Another policy from now on. NotFound for a kind or name that there is not; then nothing is changed."""
        match SSD_KINDS.get(kind):
            case "eviction":
                self.eviction = tier.catalog.policy = self.told(now, tier, name)
            case "admission":
                self.admission = guarded_admission(build(ADMISSION, name, self._entries))
            case "cleaning":
                self.cleaning = tier.cleaning = guarded_cleaning(build(CLEANING, name))
            case "striping":
                self.striping = tier.striping = guarded_striping(build(STRIPING, name))
            case _:
                raise NotFound(f"no policy kind {kind!r} of the SSD tier", field="kind", example="ssd_eviction")
        self.names[kind] = name

    def _eviction(self, name: str) -> EvictionPolicy:
        return guarded(build(EVICTION, name, self._entries), self._entries, self._oldest_first)

    def told(self, now: float, tier: SsdTier, name: str) -> EvictionPolicy:
        """The eviction policy of this name, told of all pages; a swap makes it the one in use. NotFound, InvalidRequest."""
        policy = self._eviction(name)
        order, table = self._oldest_first(), tier.catalog.table
        for start in range(0, len(order), TELL_SLICE):
            ids = order[start : start + TELL_SLICE]
            rows = table.entries[ids]
            prints = hashes(rows[:, :4], rows[:, 4] & LOW, table.seed)
            policy.on_inserted(Inserted(now, ids.astype(np.int32), np.full(len(ids), -1, np.int32), prints))
        check_sound(policy)
        return policy
