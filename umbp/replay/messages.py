"""What the driver of a replay and its engine processes say to each other: one JSON object a line, over pipes."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from umbp.sim.workload import TraceRequest
from umbp.types import I64

LINE_BYTES_MAX = 16 << 20  # a request of 2**20 blocks, none adjacent to another, is 12 MB


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line to an engine. ``leased``: pages are read in place under a lease instead of copied.

    ``workload`` and ``seed`` make the namespace: block ids of two traces are the same numbers and not the same blocks.
    """

    socket: str
    object_bytes: int
    workload: str
    seed: int
    leased: bool


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """First line of an engine: it is connected."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. ``ranges`` are (first id, count) of its full blocks, in order."""

    index: int
    session: str
    block_tokens: int
    ranges: list[tuple[int, int]]


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """What became of a request, in pages: those read one by one and those that were the leading run; seconds spent in the pool's calls.

    ``unread`` counts pages that the lookup promised and the read did not bring, by status; ``refused`` writes by code.
    """

    index: int
    pages: int
    hit_pages: int
    read_pages: int
    wrong_pages: int
    stored_pages: int
    existing_pages: int
    lookup_s: float
    get_s: float
    put_s: float
    unread: dict[str, int]
    refused: dict[str, int]


class Failure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
    """An engine cannot go on."""

    code: str
    text: str


Answer: TypeAlias = Ready | Done | Failure


def job_of(index: int, request: TraceRequest) -> Job:
    """The request as an engine is told it. The partial last block has no key and is left out."""
    return Job(index, request.session, request.block_tokens, ranges_of(request.block_ids[: request.full_blocks]))


def ranges_of(ids: I64) -> list[tuple[int, int]]:
    """Runs of ids that follow one another, as (first, count)."""
    if not len(ids):
        return []
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts = np.r_[0, cuts]
    counts = np.diff(np.r_[firsts, len(ids)])
    return list(zip(ids[firsts].tolist(), counts.tolist(), strict=True))


def ids_of(ranges: list[tuple[int, int]]) -> I64:
    """The ids again."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, first + count) for first, count in ranges)])
