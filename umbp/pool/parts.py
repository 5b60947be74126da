"""Pages of a batch as they are dealt to sources: which one read brings, and what came of it, counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.pool.sources import Offer, Source
from umbp.types import I64, U8


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
class Left:
    """Pages of a part that it did not bring, and that have not landed: those that may be elsewhere, and those that had no room here."""

    failed: I64
    refused: I64


def names(keys: U8) -> list[bytes]:
    """(n, 32) keys as bytes."""
    each: list[bytes] = np.ascontiguousarray(keys).view("V32").reshape(-1).tolist()
    return each
