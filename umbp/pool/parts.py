"""Pages of a batch as they are dealt to sources: which one read brings, the memory reserved for them, and what came of it, counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.core.fetches import Batch
from umbp.pool.sources import Offer, Source
from umbp.types import I64, U8

RUNS_MAX = 8  # reservations of one part: where pages are more scattered than that, the policies do without the hint


@dataclass(slots=True)
class SourceCounts:
    """Of one source, since the start."""

    pages: int = 0
    size_bytes: int = 0
    missed: int = 0
    failed: int = 0
    refused: int = 0  # no room here


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of a batch that one read brings: ``which`` (m,) indices of the batch. ``staged``: stage by stage (`umbp.pool.staged`)."""

    source: Source
    offer: Offer
    which: I64
    staged: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """A reservation of the pool's own: entries and offsets of the pages ``which`` (m,), indices of the batch."""

    number: int
    which: I64
    ids: I64
    offsets: I64


def names(keys: U8) -> list[bytes]:
    """(n, 32) keys as bytes."""
    each: list[bytes] = np.ascontiguousarray(keys).view("V32").reshape(-1).tolist()
    return each


def runs(batch: Batch, which: I64) -> list[I64]:
    """Pages that follow one another in their request: each run is reserved in one call, which takes its keys for consecutive pages."""
    breaks = [at for at in range(1, len(which)) if batch.pages[which[at]].before != batch.pages[which[at - 1]].key]
    return np.split(which, breaks) if len(breaks) < RUNS_MAX else [which]
