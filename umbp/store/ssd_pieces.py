"""Reading pages of the SSD tier in parts, in any order, each part verified by its own sums before it counts.

Theory of operation. A `PieceReader` is made for some pages; it holds their files, so that neither cleaning nor eviction takes one away, and
finds the sums of their pieces in the heads of their records (`open_steps`, one small read a record). They must add up to the check that the
index has of the page: so the parts of a page are those of one version, the one that was listed when the reader was made. `read_steps` then
reads spans of bytes that begin on pieces straight to where they belong and compares each piece. A page whose head is damaged is read whole
at its first span, and verified by its check.

A page that fails stays failed: it is listed no more and counted, as after a whole read. A disk that is given up and opened anew meanwhile
has other files: nothing is read from it any more, and its pages are FAILED without being blamed.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from umbp.store.ssd import Job, SsdTier
from umbp.store.ssd_drive import Drive
from umbp.store.ssd_folder import Folder
from umbp.store.ssd_format import BLOCK, PIECE_BYTES, check_of, padded, piece_sums
from umbp.store.ssd_reads import DAMAGED, GOOD, RUN_BYTES_MAX, SECTOR, UNREADABLE, Pages, read_blocks, read_head, read_run
from umbp.store.ssd_records import SegmentFile
from umbp.store.ssd_system import Steps, System
from umbp.types import I64, U8, U64, Mask, ReadStatus

Spans = tuple[tuple[int, int], ...]
JOB_BYTES_MIN = 512 << 10  # less is not worth a thread's waking
JOBS = 8  # of one call, if each has as much: two for each thread of a disk, so that one that is late leaves little


class PieceReader:
    """See above. ``out``: one writable buffer a page; ``straight``: `takes_direct` holds for all. ``status``: HIT so far, MISS, FAILED."""

    def __init__(self, tier: SsdTier, now: float, place: np.uint64, keys: U8, out: list[memoryview], *, straight: bool) -> None:
        self.tier, self._out, self._straight = tier, out, straight
        found = tier.catalog.find(place, keys)
        tier.catalog.touch(now, place, keys, found=found)
        self.which = np.flatnonzero(found.hit)  # of the keys, those that are listed: what all arrays below are about
        self.status = np.where(found.hit, ReadStatus.HIT, ReadStatus.MISS).astype(np.uint8)
        self.wholes = np.zeros(len(keys), np.uint64)  # the sum that each has in DRAM, 0 where it is not known
        self.wholes[self.which] = tier.catalog.whole[found.ids[self.which]]
        self._row = np.full(len(keys), -1)
        self._row[self.which] = np.arange(len(self.which))
        self._where = tier.catalog.where(place, found, self.which)
        self._files: list[SegmentFile] = [tier.catalog.files[number] for number in self._where.pages.files.tolist()]
        self._homes: dict[int, tuple[Drive, Folder]] = {}
        for file in dict.fromkeys(self._files):
            drive = tier.ledger.drive_of[id(file)]
            self._homes[id(file)] = (drive, drive.folder)
            file.readers += 1
        self._sums: list[U64 | None] = [None] * len(self.which)
        self._entire: Mask = np.zeros(len(self.which), bool)  # read whole already

    def __repr__(self) -> str:
        return f"<PieceReader of {len(self.which)} pages in {len(self._homes)} files>"

    def open_steps(self, now: float) -> Steps[None]:
        """Find the sums of the pieces. Where that fails the first read of the page is of all of it."""
        rows = np.arange(len(self.which))
        asked: list[tuple[I64, Future[list[U64 | None]]]] = []
        for file, part in self._by_file(rows):
            drive, folder = self._homes[id(file)]
            if drive.folder is folder and drive.may_read(now):
                pages = self._where.pages.only(part)
                asked.append((part, drive.read(now, _sums_of, drive.system, file.fd, file.number, pages, self._where.back[part])))
        yield [future for _, future in asked]
        for part, future in asked:
            if future.exception() is None:
                for row, sums in zip(part.tolist(), future.result(), strict=True):
                    self._sums[row] = sums

    def read_steps(self, now: float, items: I64, spans: Spans) -> Steps[U8]:
        """Read these bytes of these pages (indices of the keys); their status now. Ends when nothing of it writes any more."""
        rows = self._row[items[self.status[items] == ReadStatus.HIT]]
        rows = rows[~self._entire[rows]]
        jobs: list[Job] = []
        each = sum(stop - start for start, stop in spans)
        self.status[self.which[rows]] = ReadStatus.FAILED
        for file, part in self._by_file(rows):
            drive, folder = self._homes[id(file)]
            if drive.folder is not folder or not drive.may_read(now):
                continue
            step = max(1, min(RUN_BYTES_MAX, max(JOB_BYTES_MIN, len(rows) * each // JOBS)) // max(1, each))
            for start in range(0, len(part), step):
                some = part[start : start + step]
                sums = [self._sums[row] for row in some.tolist()]
                out = [self._out[item] for item in self.which[some].tolist()]
                pages, direct = self._where.pages.only(some), folder.direct
                jobs.append(
                    Job(drive, file, some, drive.read(now, _read, drive.system, file.fd, direct, pages, sums, spans, out, self._straight))
                )
        yield [job.codes for job in jobs]
        self.tier.judge(now, self._where, self.which, jobs, self.status)
        for job in jobs:
            good = job.which[self.status[self.which[job.which]] == ReadStatus.HIT]
            entire = np.array([self._sums[row] is None for row in good.tolist()], bool)
            self._entire[good[entire]] = True
            job.drive.read_bytes += int(np.where(entire, padded(self._where.pages.size), each).sum())
        return self.status[items]

    def end(self) -> None:
        """All that was wanted of those that are HIT has been read: they count as read."""
        self.tier.counters.hits += int(np.count_nonzero(self.status == ReadStatus.HIT))

    def close(self) -> None:
        """Let go of the files. Nothing may be under way."""
        for file in dict.fromkeys(self._files):
            file.readers -= 1
        self._files = []

    def _by_file(self, rows: I64) -> list[tuple[SegmentFile, I64]]:
        """These pages by file, and as they lie in it."""
        numbers = self._where.pages.files[rows]
        order = rows[np.lexsort((self._where.pages.block[rows], numbers))]
        cuts = np.flatnonzero(np.diff(self._where.pages.files[order])) + 1
        return [(self._files[int(part[0])], part) for part in np.split(order, cuts) if len(part)]


def _sums_of(system: System, fd: int, number: int, pages: Pages, back: I64) -> list[U64 | None]:
    """The sums of the pieces of these pages of one file, whose heads lie ``back`` blocks before them; None where none are right."""
    found: list[U64 | None] = []
    head = None
    for block, distance, check in zip(pages.block.tolist(), back.tolist(), pages.checks.tolist(), strict=True):
        if head is None or head.at != block - distance:
            try:
                head = read_head(system, fd, number, block - distance)
            except OSError:
                head = None
        sums = None
        if head is not None and head.size == pages.size:
            sums = head.sums[(distance - head.head_blocks) // (padded(pages.size) // BLOCK)]
        found.append(sums if sums is not None and check_of(np.ascontiguousarray(sums)) == check else None)
    return found


def _read(
    system: System, fd: int, direct: bool, pages: Pages, sums: list[U64 | None], spans: Spans, out: list[memoryview], straight: bool
) -> U8:
    """Spans of pages of one file, verified. GOOD, DAMAGED or UNREADABLE a page."""
    codes = np.full(len(out), GOOD, np.uint8)
    for at, (block, known) in enumerate(zip(pages.block.tolist(), sums, strict=True)):
        if known is None:
            codes[at] = read_run(system, fd, direct, pages.only(np.array([at])), [out[at]], straight)[0]
            continue
        for start, stop in spans:
            codes[at] = _span(system, fd, direct and not straight, block, start, out[at][start:stop], known)
            if codes[at] != GOOD:
                break
    return codes


def _span(system: System, fd: int, bounced: bool, block: int, start: int, into: memoryview, sums: U64) -> int:
    """Bytes of a body from ``start`` on, which begins a piece."""
    try:
        if bounced or len(into) % SECTOR:
            memory = read_blocks(system, fd, block + start // BLOCK, -(-len(into) // BLOCK))
            came = min(len(memory), len(into))
            into[:came] = memory[:came]
        else:
            came = system.read(fd, [into], block * BLOCK + start)
    except OSError:
        return UNREADABLE
    if came < len(into):
        return UNREADABLE
    first = start // PIECE_BYTES
    made = piece_sums(into)
    return GOOD if np.array_equal(made, sums[first : first + len(made)]) else DAMAGED


__all__ = ["PieceReader", "Spans"]
