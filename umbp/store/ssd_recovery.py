"""What a segment file holds, found out at start: from its summary if it was sealed, else by going through its records.

A sealed file costs three reads (header, trailer, summary): 80 bytes a page. An unsealed one is read whole, at most two files a folder after
any end of the process, and every body of it is verified, since nothing says which of them were synced before the power went. What does not
verify is not listed. One that was cut short is unsealed too, and what is left of it counts. A damaged head hides the length of its record;
the next one is then looked for block by block. Whatever follows the last good record is a torn tail and counts as free space.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from umbp.store.ssd_format import (
    BLOCK,
    PAGE,
    RECORD_MAGIC,
    RecordHead,
    blocks,
    decode_head,
    decode_header,
    decode_summary,
    decode_trailer,
    head_length,
    piece_sums,
)
from umbp.store.ssd_reads import read_blocks
from umbp.store.ssd_system import System
from umbp.types import Mask

SEARCH_BLOCKS = 1024  # looked through at a time for the next record after a damaged one


@dataclass(slots=True)
class Contents:
    """What a file holds. ``number``: of its life, the last one if it is ``free``. ``end``: first block behind the last good record.

    ``strange``: it begins neither with a header of this folder nor, as one that was never used, with zeros.
    """

    number: int = 0
    free: bool = True
    sealed: bool = False
    end: int = 1
    day: int = 0
    day_bytes: int = 0
    namespaces: list[bytes] = field(default_factory=list)
    pages: Any = field(default_factory=lambda: np.zeros(0, PAGE))
    strange: bool = False
    torn: int = 0  # pages, or heads, that were found damaged: written when the power went, most of them


def contents(system: System, fd: int, segment_bytes: int, folder: bytes) -> Contents:
    """Look. SegmentError if the file is of another format; OSError as the disk says."""
    first = read_blocks(system, fd, 0, 1)
    header = decode_header(first)
    if header is None or header.folder != folder or header.segment_bytes != segment_bytes:
        return Contents(strange=bytes(first).strip(b"\0") != b"")
    if header.free:
        return Contents(header.number)
    last = segment_bytes // BLOCK - 1
    trailer = read_blocks(system, fd, last, 1)
    where = decode_trailer(trailer, header.number) if len(trailer) == BLOCK else None
    if where is not None and 0 < where[0] <= last and where[1] <= segment_bytes:
        at, length, total = where
        text = read_blocks(system, fd, at, blocks(length))[:length]
        summary = decode_summary(text, header.number, total) if len(text) == length else None
        if summary is not None:
            return Contents(header.number, False, True, at, summary.day, summary.day_bytes, summary.namespaces, summary.pages)
    return _scan(system, fd, header.number, last)


def _scan(system: System, fd: int, number: int, last: int) -> Contents:
    found = Contents(number, free=False)
    parts, digests = [], dict[bytes, int]()
    at = 1
    while at < last:
        head = _head_or_none(system, fd, number, at, last)
        if head is None:
            following = _next_record(system, fd, number, at + 1, last)
            if following is None:
                break
            found.torn += 1
            at = following
            continue
        good = _good_bodies(system, fd, head)
        found.torn += int(np.count_nonzero(~good))
        parts.append(head.pages(digests.setdefault(head.namespace, len(digests)))[good])
        at += head.blocks
        if good.any():
            found.end, found.day, found.day_bytes = at, head.day, head.day_bytes
    found.namespaces = list(digests)
    if parts:
        found.pages = np.concatenate(parts)
    return found


def _head_or_none(system: System, fd: int, number: int, at: int, last: int) -> RecordHead | None:
    first = read_blocks(system, fd, at, 1)
    length = head_length(first, number, at) if len(first) == BLOCK else 0
    if not length or at + length > last:
        return None
    if length > 1:
        first = read_blocks(system, fd, at, length)
    head = decode_head(first, number, at)
    return head if head is not None and at + head.blocks <= last else None


def _good_bodies(system: System, fd: int, head: RecordHead) -> Mask:
    good = np.zeros(len(head.items), bool)
    length = blocks(head.size)
    try:
        body = read_blocks(system, fd, head.body_at(0), len(good) * length)
    except OSError:  # a sector that cannot be read: at this place only
        return good
    for item in range(len(good)):
        part = body[item * length * BLOCK :][: head.size]
        good[item] = len(part) == head.size and np.array_equal(piece_sums(part), head.sums[item])
    return good


def _next_record(system: System, fd: int, number: int, at: int, last: int) -> int | None:
    """The next block where a record of this file begins."""
    while at < last:
        count = min(SEARCH_BLOCKS, last - at)
        memory = read_blocks(system, fd, at, count)
        whole = len(memory) // BLOCK
        starts = np.frombuffer(memory[: whole * BLOCK], np.uint8).reshape(-1, BLOCK)[:, :8]
        for hit in np.flatnonzero((starts == np.frombuffer(RECORD_MAGIC, np.uint8)).all(axis=1)).tolist():
            if _head_or_none(system, fd, number, at + hit, last) is not None:
                return at + hit
        if whole < count:
            return None
        at += count
    return None
