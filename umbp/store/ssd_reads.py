"""Reading pages of segment files: neighbours in one call, straight into where they are wanted, and each compared with its checksum.

A *run* is what one `preadv` brings: bodies of one file that lie close together; gaps between them (heads, pages that nobody wants) go to a
scratch that is thrown away. Memory that direct I/O cannot take (not on a 512-byte boundary, or a size that is no multiple of it) is read
by way of a buffer. A run that fails is read once more page by page, so that one bad sector costs one page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from umbp.store.ssd_format import BLOCK, PIECE_BYTES, RecordHead, blocks, check_of, decode_head, head_length, padded, piece_sums
from umbp.store.ssd_system import System, aligned
from umbp.types import I64, U8, U64

SECTOR = 512  # what direct I/O wants memory and lengths to be multiples of; offsets in the file are multiples of 4096 anyway
RUN_BYTES_MAX = 4 << 20  # 2 to 3 ms of a fast disk: large enough for its full bandwidth, small enough to share it
RUN_PAGES_MAX = 480  # each may take two of the 1,024 buffers of a call
GAP_BYTES_MAX = 64 << 10  # reading this for nothing costs less than another call

GOOD, DAMAGED, UNREADABLE = 0, 1, 2
_SCRATCH = aligned(GAP_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages to read, all of one size: (m,) each. ``files`` numbers a file each, ``block`` is where the body lies in it."""

    size: int
    files: I64
    block: I64
    checks: U64

    def only(self, which: I64) -> Pages:
        """Those of them."""
        return Pages(self.size, self.files[which], self.block[which], self.checks[which])


def runs(pages: Pages) -> list[I64]:
    """Indices of the pages of each run, in the order in which its first page was asked for."""
    if not len(pages.block):
        return []
    order = np.lexsort((pages.block, pages.files))
    files, start = pages.files[order], pages.block[order]
    length = blocks(pages.size)
    gap = (start[1:] - start[:-1] - length) * BLOCK
    apart = (files[1:] != files[:-1]) | (gap > GAP_BYTES_MAX) | (gap < 0)
    cuts, first = [0], 0
    for at in range(1, len(order)):
        span = int(start[at] + length - start[first]) * BLOCK
        if apart[at - 1] or span > max(RUN_BYTES_MAX, padded(pages.size)) or at - first >= RUN_PAGES_MAX:
            cuts.append(at)
            first = at
    found = np.split(order, cuts[1:])
    return sorted(found, key=lambda run: int(run.min()))


def takes_direct(address: int, size: int) -> bool:
    """Whether direct I/O can use this memory."""
    return address % SECTOR == 0 and size % SECTOR == 0


def read_run(system: System, fd: int, direct: bool, pages: Pages, out: list[memoryview], straight: bool) -> U8:
    """Read pages of one file, ascending by block, into ``out`` (one writable buffer a page). GOOD, DAMAGED or UNREADABLE a page.

    ``straight``: `takes_direct` holds for all of ``out``.
    """
    if not direct or straight:
        return _read(system, fd, pages, out)
    length = padded(pages.size)
    memory = aligned(len(out) * length)
    bounce = [memory[at * length : (at + 1) * length] for at in range(len(out))]
    codes = _read(system, fd, pages, bounce)
    for at in np.flatnonzero(codes == GOOD).tolist():
        out[at][:] = bounce[at][: pages.size]
    return codes


def _read(system: System, fd: int, pages: Pages, out: list[memoryview]) -> U8:
    """``out``: buffers of a page's size, or of its size on disk."""
    length, size = padded(pages.size), pages.size
    buffers: list[Any] = []
    first = end = int(pages.block[0]) * BLOCK
    for block, buffer in zip(pages.block.tolist(), out, strict=True):
        start = block * BLOCK
        if start > end:
            buffers.append(_SCRATCH[: start - end])
        buffers.append(buffer)
        if len(buffer) < length:
            buffers.append(_SCRATCH[: length - len(buffer)])
        end = start + length
    try:
        came = first + system.read(fd, buffers, first)
    except OSError:
        if len(out) == 1:
            return np.array([UNREADABLE], np.uint8)
        return np.concatenate([_read(system, fd, pages.only(np.array([at])), [buffer]) for at, buffer in enumerate(out)])
    codes = np.full(len(out), UNREADABLE, np.uint8)
    for at, (block, check) in enumerate(zip(pages.block.tolist(), pages.checks.tolist(), strict=True)):
        if block * BLOCK + size <= came:
            codes[at] = GOOD if check_of(piece_sums(out[at][:size])) == check else DAMAGED
    return codes


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that one call reads: `read_run` and what it needs. ``offsets``: where ``out`` lies in the segment's pages; None: elsewhere."""

    fd: int
    direct: bool
    pages: Pages
    out: list[memoryview]
    straight: bool
    offsets: I64 | None = None

    def read(self, system: System) -> U8:
        """GOOD, DAMAGED or UNREADABLE a page."""
        return read_run(system, self.fd, self.direct, self.pages, self.out, self.straight)


# -- parts of pages ----------------------------------------------------------------------------------------------------------------


def read_blocks(system: System, fd: int, at: int, count: int) -> memoryview:
    """These blocks of a file, fewer where it ends."""
    memory = aligned(count * BLOCK)
    return memory[: system.read(fd, [memory], at * BLOCK)]


def read_head(system: System, fd: int, number: int, at: int) -> RecordHead | None:
    """The head at this block of the file of this number; None if there is none or it is damaged. OSError as the disk says."""
    first = read_blocks(system, fd, at, 1)
    length = head_length(first, number, at)
    if length > 1:
        first = read_blocks(system, fd, at, length)
    return decode_head(first, number, at) if length else None


def read_part(system: System, fd: int, head: RecordHead, block: int, start: int, stop: int, out: memoryview) -> int:
    """Bytes [start, stop) of the body at this block, widened to pieces and verified by the head's sums. GOOD, DAMAGED or UNREADABLE."""
    item = (block - head.at - head.head_blocks) // blocks(head.size)
    low, high = start // PIECE_BYTES, -(-stop // PIECE_BYTES)
    begin, end = low * PIECE_BYTES, min(high * PIECE_BYTES, head.size)
    try:
        memory = read_blocks(system, fd, block + begin // BLOCK, blocks(end - begin))
    except OSError:
        return UNREADABLE
    if len(memory) < end - begin:
        return UNREADABLE
    found = memory[: end - begin]
    if not np.array_equal(piece_sums(found), head.sums[item][low:high]):
        return DAMAGED
    out[:] = found[start - begin : stop - begin]
    return GOOD


def read_parts(
    system: System, fd: int, number: int, direct: bool, pages: Pages, back: I64, start: int, stop: int, out: list[memoryview]
) -> U8:
    """`read_part` of pages of the file of this number, whose heads lie ``back`` blocks before them; the head of a record is read once.

    Where a head, or a sum in it, is damaged the whole page is read instead and verified by its check.
    """
    codes = np.full(len(out), UNREADABLE, np.uint8)
    head: RecordHead | None = None
    for at, (block, distance) in enumerate(zip(pages.block.tolist(), back.tolist(), strict=True)):
        if head is None or head.at != block - distance:
            try:
                head = read_head(system, fd, number, block - distance)
            except OSError:
                head = None
        if head is not None:
            codes[at] = read_part(system, fd, head, block, start, stop, out[at])
        if codes[at] != GOOD:
            whole = memoryview(bytearray(pages.size))
            codes[at] = read_run(system, fd, direct, pages.only(np.array([at])), [whole], False)[0]
            if codes[at] == GOOD:
                out[at][:] = whole[start:stop]
    return codes
