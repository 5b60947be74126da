"""What a pool and the process that serves one of its disks say to each other: one datagram an order, one an answer, arrays as they are.

Little-endian. Both ends are one program, forked, so there is no version. An order begins with its kind, how many things it is about, and
its number, which the answer repeats. Memory is named by its offset in the segment's pages, a file by the pool's descriptor of it.

    TAKE    descriptors of the segment and of its owner's lock; where the pages lie in it                                     no answer
    KNOW    a descriptor, and the pool's number of it                                                                         no answer
    FORGET  numbers of descriptors                                   answered when they are closed
    READ    runs of pages (`RUN`), then each page (`ASKED`)          answer: a code of `ssd_reads` a page
    WRITE   records (`RECORD`), then each body (`BODY`)              answer: `WROTE` a record, then `ssd_format.PAGE` of what was written
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from umbp.store.ssd_format import PAGE
from umbp.store.ssd_reads import Pages, Run
from umbp.store.ssd_records import Draft, Record, SegmentFile
from umbp.types import I64, U8

TAKE, KNOW, FORGET, READ, WRITE = range(1, 6)
HEAD = struct.Struct("<IIQ")  # kind, count, number
AREA = struct.Struct("<QQ")  # offset and bytes of the pages in the segment's file
DESCRIPTOR = struct.Struct("<i")
MESSAGE_BYTES_MAX = 160 << 10  # below what a socket takes at once where nobody has set anything
RUN = np.dtype([("fd", "<i4"), ("direct", "<u4"), ("straight", "<u4"), ("pages", "<u4"), ("size", "<u8")])
ASKED = np.dtype([("block", "<i8"), ("check", "<u8"), ("offset", "<i8")])
RECORD = np.dtype(
    [
        ("fd", "<i4"),
        ("direct", "<u4"),
        ("straight", "<u4"),
        ("pages", "<u4"),
        *((name, "<u8") for name in ("file", "at", "sequence", "size", "day", "day_bytes")),
        ("namespace", "V32"),
    ]
)
BODY = np.dtype([("key", "V32"), ("whole", "<u8"), ("offset", "<i8")])
WROTE = np.dtype([("errno", "<i4"), ("pages", "<u4")])
Buffers = list[Any]


def portions(sizes: Sequence[int]) -> list[slice]:
    """Cut things of so many bytes each, so that each portion fits into a message."""
    found, start, total = list[slice](), 0, 0
    for at, size in enumerate(sizes):
        if at > start and total + size > MESSAGE_BYTES_MAX - HEAD.size:
            found.append(slice(start, at))
            start, total = at, 0
        total += size
    return [*found, slice(start, len(sizes))] if len(sizes) else []


def split(counts: Sequence[int]) -> Iterator[slice]:
    """Where each of things that follow one another lies, given how long each is."""
    end = 0
    for count in counts:
        yield slice(end, end + count)
        end += count


def _tables(body: memoryview, kind: Any, count: int, inner: Any, length: str) -> tuple[Any, Any]:
    """``count`` rows of one kind, and those of another that follow, as many as the column ``length`` of the first says."""
    outer = np.frombuffer(body[: count * kind.itemsize], kind)
    return outer, np.frombuffer(body[count * kind.itemsize :], inner, int(outer[length].sum()))


# -- reading -----------------------------------------------------------------------------------------------------------------------


def run_bytes(run: Run) -> int:
    """Of a message, for a run."""
    return RUN.itemsize + len(run.out) * ASKED.itemsize


def encode_runs(runs: Sequence[Run]) -> Buffers:
    """Body of an order. All ``offsets`` are known."""
    counts = [len(run.out) for run in runs]
    heads = np.array([(run.fd, run.direct, run.straight, count, run.pages.size) for run, count in zip(runs, counts, strict=True)], RUN)
    asked = np.empty(sum(counts), ASKED)
    for run, part in zip(runs, split(counts), strict=True):
        asked["block"][part], asked["check"][part], asked["offset"][part] = run.pages.block, run.pages.checks, run.offsets
    return [heads.data, asked.data]


def decode_runs(body: memoryview, count: int, view: memoryview, files: dict[int, int]) -> list[Run]:
    """The other way, in a process that has the pages as ``view`` and the pool's descriptors as ``files``."""
    heads, asked = _tables(body, RUN, count, ASKED, "pages")
    found = []
    for (fd, direct, straight, pages, size), part in zip(heads.tolist(), split(heads["pages"].tolist()), strict=True):
        mine = asked[part]
        out = _bodies(view, mine["offset"], size)
        found.append(
            Run(files[fd], bool(direct), Pages(size, np.zeros(pages, np.int64), mine["block"], mine["check"]), out, bool(straight))
        )
    return found


def decode_codes(body: memoryview, counts: Sequence[int]) -> list[U8]:
    """Answer: the codes of each run."""
    codes = np.frombuffer(body, np.uint8).copy()
    return [codes[part] for part in split(counts)]


# -- writing -----------------------------------------------------------------------------------------------------------------------


def record_bytes(record: Record) -> int:
    """Of a message, or its answer, for a record."""
    return RECORD.itemsize + len(record.draft.bodies) * max(BODY.itemsize, PAGE.itemsize)


def encode_records(records: Sequence[Record]) -> Buffers:
    """Body of an order. All ``offsets`` are known."""
    heads, bodies = np.zeros(len(records), RECORD), Buffers()
    for at, record in enumerate(records):
        draft, file = record.draft, record.file
        numbers = (file.number, record.at, draft.sequence, draft.size, record.day, record.day_bytes)
        heads[at] = (file.fd, record.direct, draft.straight, len(draft.bodies), *numbers, np.void(draft.namespace))
        mine = np.empty(len(draft.bodies), BODY)
        mine["key"], mine["whole"], mine["offset"] = np.ascontiguousarray(draft.keys).view("V32").ravel(), draft.wholes, draft.offsets
        bodies.append(mine.data)
    return [heads.data, *bodies]


def decode_records(body: memoryview, count: int, view: memoryview, files: dict[int, int]) -> list[Record]:
    """The other way, in a process that has the pages as ``view`` and the pool's descriptors as ``files``."""
    heads, bodies = _tables(body, RECORD, count, BODY, "pages")
    found = []
    for head, part in zip(heads, split(heads["pages"].tolist()), strict=True):
        mine, size = bodies[part], int(head["size"])
        keys = np.ascontiguousarray(mine["key"]).view(np.uint8).reshape(-1, 32)
        memory = _bodies(view, mine["offset"], size)
        draft = Draft(head["namespace"].tobytes(), size, keys, mine["whole"], memory, bool(head["straight"]), int(head["sequence"]))
        file = SegmentFile(0, files[int(head["fd"])], int(head["file"]))
        found.append(Record(file, draft, int(head["at"]), int(head["day"]), int(head["day_bytes"]), bool(head["direct"])))
    return found


def encode_written(made: Sequence[Any]) -> Buffers:
    """Answer: of each record its (n,) of `PAGE`, or the number of the error."""
    wrote = np.array([(0, len(each)) if isinstance(each, np.ndarray) else (each, 0) for each in made], WROTE)
    return [wrote.data, *(each.data for each in made if isinstance(each, np.ndarray))]


def decode_written(body: memoryview, count: int) -> list[Any]:
    """The other way: of each record its pages, or the error."""
    wrote, pages = _tables(body, WROTE, count, PAGE, "pages")
    pages = pages.copy()
    each = zip(wrote["errno"].tolist(), split(wrote["pages"].tolist()), strict=True)
    return [OSError(number, os.strerror(number)) if number else pages[part] for number, part in each]


def _bodies(view: memoryview, offsets: I64, size: int) -> list[memoryview]:
    return [view[offset : offset + size] for offset in offsets.tolist()]


Told = Callable[[memoryview, int], list[Any]]
"""Makes of the body of an answer, and of how many things it is about, what each of them has come to: a result or an exception."""
