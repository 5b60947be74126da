"""Short ways to say a policy's events in tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from umbp.policies.base import Eligible, Inserted, Request
from umbp.types import I32, Mask


def anything(ids: I32) -> Mask:
    """Every id may go."""
    return np.ones(len(ids), np.bool_)


def all_but(kept: Collection[int]) -> Eligible:
    """Every id may go but these."""
    return lambda ids: ~np.isin(ids, list(kept))


def ids_of(*ids: int) -> I32:
    """An int32 array."""
    return np.array(ids, np.int32)


def inserted(
    ids: Sequence[int], *, parents: Sequence[int] | None = None, fingerprints: Sequence[int] | None = None, now: float = 0.0
) -> Inserted:
    """A chain: without ``parents`` each page's is the one before it. Without ``fingerprints`` an id is its own."""
    return Inserted(
        now,
        np.array(ids, np.int32),
        np.array([-1, *ids[:-1]] if parents is None else parents, np.int32),
        np.array(ids if fingerprints is None else fingerprints, np.uint64),
    )


def request(ids: Sequence[int], *, fingerprints: Sequence[int] | None = None, now: float = 0.0) -> Request:
    """A request for a chain; without ``fingerprints`` an id is its own, and -1 some other."""
    keys = [identifier if identifier >= 0 else 1_000_000 for identifier in ids] if fingerprints is None else fingerprints
    return Request(now, np.array(ids, np.int32), np.array(keys, np.uint64))
