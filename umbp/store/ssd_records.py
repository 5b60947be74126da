"""Records on their way to a segment file: what is to be written, where in the file it goes, and the one call that writes it.

A record is a head and the bodies of a few pages (`ssd_format`). A thread of the folder's makes the checksums, then the head, and writes all
of it by one `pwritev` from where the bodies lie; so some threads make checksums while others wait for the disk.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from umbp.store.ssd_format import BLOCK, ITEM, RecordHead, blocks, body_sums, checks_of, encode_head, head_blocks, padded, words_of
from umbp.store.ssd_system import System, aligned, aligned_copy, write_all
from umbp.types import I64, U8, U64

FREE, ACTIVE, SEALED, BROKEN = "free", "active", "sealed", "broken"


@dataclass(slots=True, eq=False)
class SegmentFile:
    """One file. What stands below ``readers`` is the tier's, the rest the folder's."""

    slot: int
    fd: int
    number: int = 0
    state: str = FREE
    end: int = 1  # first block behind the last record
    namespaces: dict[bytes, int] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)  # arrays of `PAGE`, of what was answered
    count: int = 0
    readers: int = 0  # whoever reads, or is about to: not freed meanwhile
    live_bytes: int = 0  # on disk, of pages that the index leads to
    live_pages: int = 0
    listed: int = 0  # of ``count``, pages that the tier has heard of
    written_at: float = 0.0
    token: int = field(default_factory=itertools.count(1).__next__)  # no other file has it in this process, nor this one opened anew

    @property
    def settled(self) -> bool:
        """Whether nothing is added to it any more and ``live_pages`` tells of all that is in it: only then it may be cleaned or freed."""
        return self.state == SEALED and self.listed == self.count

    @property
    def idle(self) -> bool:
        """Whether nobody writes to it, or reads it."""
        return self.settled and not self.readers


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages to write, of one namespace and size. ``bodies`` must not change until they are written, and are taken as they are by direct I/O
    if ``straight`` (`takes_direct` holds for all). ``wholes``: their sums in DRAM, 0 for none.
    ``offsets``: where they lie in the segment's pages; None: elsewhere."""

    place: np.uint64
    keys: U8
    bodies: list[memoryview]
    wholes: U64
    straight: bool
    offsets: I64 | None = None

    @property
    def size(self) -> int:
        """Bytes of a page."""
        return int(self.place) >> 32

    @property
    def number(self) -> int:
        """Of the namespace."""
        return int(self.place) & 0xFFFF_FFFF


@dataclass(slots=True)
class Draft:
    """A record to be: bodies of one namespace and size. ``straight``: direct I/O can use their memory as it is.

    ``offsets``: where they lie in the segment's pages; None: elsewhere.
    """

    namespace: bytes
    size: int
    keys: U8
    wholes: U64
    bodies: list[memoryview]
    straight: bool
    sequence: int = 0
    offsets: I64 | None = None

    @property
    def blocks(self) -> int:
        """On disk."""
        return head_blocks(len(self.bodies), self.size) + len(self.bodies) * blocks(self.size)


@dataclass(frozen=True, slots=True)
class Record:
    """A draft and where it goes: block ``at`` of a file. ``day_bytes``: written on this ``day``, this record included."""

    file: SegmentFile
    draft: Draft
    at: int
    day: int
    day_bytes: int
    direct: bool

    def write(self, system: System) -> Any:
        """`write_record`."""
        return write_record(system, self.file, self.draft, self.at, self.day, self.day_bytes, direct=self.direct)


@dataclass(frozen=True, slots=True)
class Placed:
    """A draft that is on disk for good: its file and (n,) of `PAGE`."""

    file: SegmentFile
    pages: Any


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """Records to write, in this order. ``day_bytes``: written on this ``day`` before. ``spare``: so many files are to stay free."""

    drafts: list[Draft]
    day: int
    day_bytes: int
    now: float
    spare: int


@dataclass(slots=True, eq=False)
class Flight:
    """Records that were given to the threads: the first ``len(records)`` of what is left of an `Append`, all for one file.

    ``end``, ``count``: of the file when all of them are there.
    """

    file: SegmentFile
    day: int
    end: int
    count: int
    day_bytes: int
    records: list[Record] = field(default_factory=list)
    futures: list[Future[Any]] = field(default_factory=list)


def write_record(system: System, file: SegmentFile, draft: Draft, at: int, day: int, day_bytes: int, *, direct: bool) -> Any:
    """Write a record to block ``at``: (n,) of `PAGE`. OSError as the disk says."""
    sums = body_sums(draft.bodies)
    items = np.zeros(len(draft.bodies), ITEM)
    items["key"], items["whole"] = words_of(draft.keys), draft.wholes
    items["check"] = checks_of(sums)
    head = RecordHead(file.number, at, draft.sequence, day, day_bytes, draft.namespace, draft.size, items, sums)
    text, length = encode_head(head), padded(draft.size)
    buffers: list[Any]
    if direct and not draft.straight:
        memory = aligned(len(text) + length * len(draft.bodies))
        memory[: len(text)] = text
        for place, body in enumerate(draft.bodies):
            start = len(text) + place * length
            memory[start : start + draft.size] = body
        buffers = [memory]
    else:
        padding = [aligned(length - draft.size)] if length > draft.size else []
        buffers = [aligned_copy(text), *(each for body in draft.bodies for each in (body, *padding))]
    write_all(system, file.fd, buffers, at * BLOCK, draft.blocks * BLOCK)
    return head.pages(0)


def outcome(future: Future[Any]) -> tuple[list[Placed], Exception | None]:
    """What became of an `append`: what is on disk, and why the rest is not."""
    error = future.exception()
    if error is None:
        placed, failure = future.result()
        return placed, failure
    if not isinstance(error, Exception):
        raise error
    return [], error
