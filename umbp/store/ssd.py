"""The SSD tier: pages on one or several disks, that survive the end of the process and a power cut.

Theory of operation
-------------------
Parts: the format on disk (`ssd_format`), a folder's files (`ssd_folder`, `ssd_recovery`), a disk and its health (`ssd_drive`), who moves
its bytes (`ssd_crew`: threads, or a process beside this one), reading (`ssd_reads`), the index in memory (`ssd_catalog`), the start
(`ssd_adoption`), cleaning (`ssd_cleaning`).

One thread owns the tier (the pool's event loop). What takes long is done by the disks' threads; an operation is a generator of *steps*
that yields the futures it waits for, so that the same code serves an event loop and, by `finish`, a plain caller.

    write   which are new -> room for them, by the eviction policy -> a record for each few megabytes, to a disk by the striping policy
            -> on disk and synced -> listed
    read    where they lie -> their files are held -> runs of neighbours into the caller's memory, checksums compared -> what was not good
            is listed no more
    remove  listed no more -> noted on disk, synced -> answered
    flush   as remove, by one mark for the whole namespace

A write of a page that is removed or flushed meanwhile is thrown away when it ends, and the removal is answered after that.

Namespaces have a number here (in the index, shared with the DRAM tier) and a digest on disk, since numbers are a pool's own; `Naming`
translates. What may be held, and what goes to make room, is in `ssd_ledger`.

What fails: a page costs itself (FAILED, listed no more, counted, may be written again); a disk that cannot be written is read only; one
that is gone is listed no more; one that hangs is not asked. A tier with no disk left answers MISS and UNAVAILABLE at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from umbp.policies.base import EvictionPolicy
from umbp.policies.cleaning import CleaningPolicy
from umbp.policies.striping import StripingPolicy
from umbp.store.index import IndexWriter
from umbp.store.ssd_catalog import LOW, Catalog, Where
from umbp.store.ssd_drive import AWAY, Drive
from umbp.store.ssd_folder import Full, note
from umbp.store.ssd_format import BLOCK, NamespaceNote, encode_meta, padded, words_of
from umbp.store.ssd_ledger import Counters, Ledger, Naming, pages_bytes
from umbp.store.ssd_levels import Levels, shares
from umbp.store.ssd_reads import DAMAGED, GOOD, UNREADABLE, Run, read_parts, runs, takes_direct
from umbp.store.ssd_records import Append, Batch, Draft, Placed, SegmentFile, outcome
from umbp.store.ssd_system import Steps, finish
from umbp.types import I64, U8, U64, Mask, ReadStatus, WriteStatus

log = logging.getLogger("umbp.store.ssd")
STOP_SECONDS_MAX = 2.0
FILES_AHEAD = 2  # one that stays free for cleaning, and the one that is begun next


@dataclass(slots=True, eq=False)
class Writing:
    """Pages of one write on their way. ``gone``: keys that were removed meanwhile. ``ended`` is done when all of it has come to its end."""

    batch: Batch
    digest: bytes
    status: U8
    gone: set[bytes] = field(default_factory=set)
    ended: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Job:
    """A run of pages that a thread reads: ``which`` of those that were found."""

    drive: Drive
    file: SegmentFile
    which: I64
    codes: Future[U8]


Part = tuple[SegmentFile, I64]
"""A run of pages: its file, and which of those that were found."""


class SsdTier:
    """See above, and `umbp.store.base.Tier` for `find`, `read`, `write`, `remove`, `evict`, which block.

    ``clock``: seconds since 1970, for the day on which bytes are written.
    """

    def __init__(
        self,
        drives: Sequence[Drive],
        table: IndexWriter,
        naming: Naming,
        clock: Callable[[], float],
        *,
        eviction: EvictionPolicy,
        cleaning: CleaningPolicy,
        striping: StripingPolicy,
        day_bytes_max: int = 0,
    ) -> None:
        self.catalog = Catalog(table, eviction)
        self.ledger = Ledger(drives, self.catalog, naming, clock, day_bytes_max=day_bytes_max)
        self.drives = self.ledger.drives
        self.levels = Levels(self.drives)
        self.naming = naming
        self.cleaning = cleaning
        self.striping = striping
        self.sequence = int(clock() * 1e6)  # above those of a disk that is not there now, whose pages a flush must reach when it is back
        self.flushed: dict[bytes, int] = {}  # marks, by digest: of all disks, and for those that are away now
        self.writing: dict[tuple[int, bytes], Writing] = {}

    def __repr__(self) -> str:
        return f"<SsdTier {self.catalog.count} pages, {self.used_bytes} of {self.capacity_bytes} bytes, {len(self.drives)} disks>"

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of pages, as they lie on disk, over the disks that are there."""
        return self.ledger.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that it lists, as they lie on disk."""
        return self.catalog.used_bytes

    @property
    def counters(self) -> Counters:
        """What it has done."""
        return self.ledger.counters

    def find(self, place: np.uint64, keys: U8) -> Mask:
        """See `Tier`."""
        return self.catalog.find(place, keys).hit

    # -- reading -----------------------------------------------------------------------------------------------------------------------

    def read_steps(
        self,
        now: float,
        place: np.uint64,
        keys: U8,
        out: list[memoryview],
        *,
        straight: bool,
        asked: bool = True,
        sums: U64 | None = None,
        offsets: I64 | None = None,
    ) -> Steps[U8]:
        """Read whole pages; one `ReadStatus` an item (BUSY: its disk hangs). Ends when nothing writes to ``out`` any more.

        ``straight``: `takes_direct` holds for every buffer. ``asked``: somebody wants them, which counts. ``sums`` (n,) gets the sum that
        each page has in DRAM, where it is known. ``offsets`` (n,): where ``out`` lies in the segment's pages; None: elsewhere.
        """

        def ask(drive: Drive, where: Where, which: I64, parts: list[Part]) -> list[Future[U8]]:
            direct, asked = drive.folder.direct, list[Run]()
            for file, run in parts:
                items = which[run]
                places = None if offsets is None else offsets[items]
                asked.append(Run(file.fd, direct, where.pages.only(run), [out[at] for at in items.tolist()], straight, places))
            return drive.read_runs(now, asked)

        return (yield from self._read(now, place, keys, ask, asked, sums))

    def read_part_steps(self, now: float, place: np.uint64, keys: U8, start: int, stop: int, out: list[memoryview]) -> Steps[U8]:
        """Read bytes [start, stop) of pages, verified by the sums of their pieces; one `ReadStatus` an item."""

        def ask(drive: Drive, where: Where, which: I64, parts: list[Part]) -> list[Future[U8]]:
            def one(file: SegmentFile, run: I64) -> Future[U8]:
                pages, back, buffers = where.pages.only(run), where.back[run], [out[at] for at in which[run].tolist()]
                return drive.read(
                    now, read_parts, drive.system, file.fd, file.number, drive.folder.direct, pages, back, start, stop, buffers
                )

            return [one(file, run) for file, run in parts]

        return (yield from self._read(now, place, keys, ask, True, None))

    def _read(
        self, now: float, place: np.uint64, keys: U8, ask: Callable[..., list[Future[U8]]], asked: bool, sums: U64 | None
    ) -> Steps[U8]:
        status = np.full(len(keys), ReadStatus.MISS, np.uint8)
        found = self.catalog.find(place, keys)
        if asked:
            self.catalog.touch(now, place, keys, found=found)
        which = np.flatnonzero(found.hit)
        if not len(which):
            return status
        if sums is not None:
            sums[which] = self.catalog.whole[found.ids[which]]
        where = self.catalog.where(place, found, which)
        status[which] = ReadStatus.BUSY
        parts, may = dict[Drive, list[Part]](), {drive: drive.may_read(now) for drive in self.drives}
        for run in runs(where.pages):
            file = self.catalog.files[int(where.pages.files[run[0]])]
            drive = self.ledger.drive_of[id(file)]
            if may[drive]:
                file.readers += 1
                parts.setdefault(drive, []).append((file, run))
        jobs: list[Job] = []
        for drive, mine in parts.items():
            each = zip(mine, ask(drive, where, which, mine), strict=True)
            jobs += [Job(drive, file, run, codes) for (file, run), codes in each]
        try:
            yield [job.codes for job in jobs]
        finally:
            for job in jobs:
                job.file.readers -= 1
        self.judge(now, where, which, jobs, status)
        for job in jobs:
            good = int(np.count_nonzero(status[which[job.which]] == ReadStatus.HIT))
            self.counters.hits += good if asked else 0
            job.drive.read_bytes += good * padded(where.pages.size)
        return status

    def judge(self, now: float, where: Where, which: I64, jobs: list[Job], status: U8) -> None:
        """What came of reads that have ended: ``status[which[i]]`` of page i of ``where``; what was not good is listed no more."""
        lost: dict[Drive, None] = {}
        for job in jobs:
            codes = job.codes.result() if job.codes.exception() is None else np.full(len(job.which), UNREADABLE, np.uint8)
            good = codes == GOOD
            status[which[job.which]] = np.where(good, ReadStatus.HIT, ReadStatus.FAILED)
            if good.any():
                job.drive.worked(writing=False)
            if not good.all():
                self._drop_bad(now, where, job.which[~good], codes[~good])
                unreadable = int(np.count_nonzero(codes == UNREADABLE))
                if unreadable and job.drive.failed_reads(unreadable):
                    lost[job.drive] = None
        for drive in lost:
            self.ledger.lose(now, drive, "one read after the other fails")

    def _drop_bad(self, now: float, where: Where, which: I64, codes: U8) -> None:
        damaged = int(np.count_nonzero(codes == DAMAGED))
        self.counters.damaged += damaged
        self.counters.unreadable += len(codes) - damaged
        ids = np.unique(where.ids[which][self.catalog.same(where.ids[which], where.versions[which])])
        log.warning("%d pages could not be read back (%d of them damaged) and are listed no more", len(codes), damaged)
        self.ledger.forget(now, ids, evicted=False)

    # -- writing -----------------------------------------------------------------------------------------------------------------------

    def write_steps(self, now: float, batch: Batch) -> Steps[U8]:
        """Write pages; one `WriteStatus` an item. The first of the batch are the ones kept if not all find room."""
        found = self.catalog.find(batch.place, batch.keys)
        status = np.where(found.hit, WriteStatus.EXISTS, WriteStatus.UNAVAILABLE).astype(np.uint8)
        digest = self.naming.digest_of(batch.number)
        disks = [drive for drive in self.drives if drive.may_write(now)]
        able = [drive for drive in disks if drive.folder.record_pages(batch.size) and padded(batch.size) <= pages_bytes(drive.folder)]
        names: list[bytes] = words_of(batch.keys).tolist()
        number = batch.number
        wanted: dict[bytes, int] = {}
        for at in np.flatnonzero(~found.hit).tolist():
            if self.writing and (number, names[at]) in self.writing:
                status[at] = WriteStatus.PENDING
            else:
                wanted.setdefault(names[at], at)
        if not wanted or not disks or digest is None:
            return status
        if not able or padded(batch.size) > self.capacity_bytes:
            status[list(wanted.values())] = WriteStatus.TOO_LARGE
            return status
        count, reason = self.ledger.make_room(now, batch.number, batch.size, len(wanted), found.ids[found.hit])
        items = list(wanted.values())
        status[items[count:]] = reason
        items, able = items[:count], self.levels.for_write(able, count * padded(batch.size))
        part = Writing(batch, digest, status)
        self.writing.update(((number, names[at]), part) for at in items)
        self.ledger.begin(number, len(items) * padded(batch.size))
        try:
            yield from self._write(now, part, items, able)
        finally:
            self.ledger.end(number, len(items) * padded(batch.size))
            for at in items:
                del self.writing[number, names[at]]
            part.ended.set_result(None)
        for at in np.flatnonzero(~found.hit).tolist() if len(wanted) < len(names) else ():  # a key twice in one batch
            if wanted.get(names[at], at) != at and status[wanted[names[at]]] == WriteStatus.STORED:
                status[at] = WriteStatus.EXISTS
        return status

    def _write(self, now: float, part: Writing, items: list[int], disks: list[Drive]) -> Steps[None]:
        todo = self._drafts(part, items, disks)
        try:
            for drive in todo:
                self.name_on(now, drive, part.digest)
            freeing = [self.free_steps(now, drive, file) for drive in todo if (file := self._spent(drive)) is not None]
            freed = [future for steps in freeing for future in next(steps)]
            asked = {drive: self.append(now, drive, [draft for draft, _ in work], spare=1) for drive, work in todo.items()}
            while asked:
                yield [*asked.values(), *freed]
                for steps in freeing:
                    finish(steps)  # waits for nothing more
                freeing, freed = [], []
                again: dict[Drive, None] = {}
                for drive, future in asked.items():
                    placed, error = outcome(future)
                    done, todo[drive] = todo[drive][: len(placed)], todo[drive][len(placed) :]
                    yield from self._list(now, part, drive, placed, done)
                    if error is None:
                        drive.worked(writing=True)
                    elif not isinstance(error, Full):
                        drive.failed_write(now, error)
                    elif (below := self.levels.spill(now, drive, part.batch.size, todo)) is not None:
                        self.name_on(now, below, part.digest)
                        again[below] = None
                    elif (yield from self.free_a_file(now, drive)):
                        again[drive] = None
                asked = {drive: self.append(now, drive, [draft for draft, _ in todo[drive]], spare=1) for drive in again}
        finally:
            for drive, work in todo.items():
                drive.waiting_bytes -= sum(draft.blocks * BLOCK for draft, _ in work)

    def _drafts(self, part: Writing, items: list[int], disks: list[Drive]) -> dict[Drive, list[tuple[Draft, list[int]]]]:
        """Records of these items, and the disk of each."""
        batch = part.batch
        step = min(drive.folder.record_pages(batch.size) for drive in disks)
        sizes, used = shares(disks)
        todo: dict[Drive, list[tuple[Draft, list[int]]]] = {}
        for start in range(0, len(items), step):
            some = items[start : start + step]
            drive = disks[self.striping.choose(sizes, used, np.array([each.waiting_bytes for each in disks], np.float64))]
            bodies = [batch.bodies[at] for at in some]
            offsets = None if batch.offsets is None else batch.offsets[some]
            draft = Draft(part.digest, batch.size, batch.keys[some], batch.wholes[some], bodies, batch.straight, self.sequence, offsets)
            self.sequence += len(some)
            drive.waiting_bytes += draft.blocks * BLOCK
            todo.setdefault(drive, []).append((draft, some))
        return todo

    def append(self, now: float, drive: Drive, drafts: list[Draft], *, spare: int) -> Future[Any]:
        """Have these records written; what `Folder.append` answers."""
        request = Append(drafts, *self.ledger.today_of(drive), now, spare)
        drive.folder.coming.append(request)
        return drive.write(now, drive.folder.append, request)

    def _list(self, now: float, part: Writing, drive: Drive, placed: list[Placed], done: list[tuple[Draft, list[int]]]) -> Steps[None]:
        """Enter what is on disk, but for what was removed meanwhile: that is noted first."""
        batch, dead, numbers = part.batch, list[int](), list[int]()
        flushed = self.naming.digest_of(batch.number) != part.digest
        by_file: dict[int, list[int]] = {}
        for at, (record, (draft, _)) in enumerate(zip(placed, done, strict=True)):
            drive.waiting_bytes -= draft.blocks * BLOCK
            self.ledger.wrote(drive, draft.blocks * BLOCK)
            by_file.setdefault(id(record.file), []).append(at)
        for which in by_file.values() if drive.state != AWAY else ():
            file = placed[which[0]].file
            whole = Placed(file, np.concatenate([placed[at].pages for at in which]))  # one pass over the index for all of a file's records
            items = np.array([item for at in which for item in done[at][1]])
            alive = np.full(len(items), not flushed)
            if part.gone:
                alive &= np.array([batch.keys[item].tobytes() not in part.gone for item in items.tolist()])
            shown = self.ledger.enter(now, batch.place, drive, whole, alive)
            file.listed += len(whole.pages)
            part.status[items[alive]] = np.where(shown, WriteStatus.STORED, WriteStatus.KEY_LIMIT)
            part.status[items[~alive]] = WriteStatus.FLUSHED
            sequences = whole.pages["sequence"]
            dead += sequences[~alive].tolist() + sequences[alive][~shown].tolist()
            numbers += [file.number] * (len(dead) - len(numbers))
        if dead:
            yield [drive.write(now, note, drive.folder, np.array(numbers, np.uint64), np.array(dead, np.uint64), True)]

    # -- files -------------------------------------------------------------------------------------------------------------------------

    def cleanable(self, now: float, drive: Drive) -> list[SegmentFile]:
        """Files that nobody reads or writes, the one to clean first in front."""
        files = [file for file in list(drive.folder.files.values()) if file.idle]
        if not files:
            return []
        live = np.array([file.live_bytes / drive.folder.segment_bytes for file in files])
        order = self.cleaning.order(live, np.array([max(0.0, now - file.written_at) for file in files]))
        return [files[at] for at in order.tolist()]

    def free_steps(self, now: float, drive: Drive, file: SegmentFile) -> Steps[bool]:
        """Give an empty file back to its folder; False if the disk did not take it."""
        assert not file.live_pages
        self.catalog.drop_file(file)
        self.ledger.drive_of.pop(id(file), None)
        file.readers += 1  # nobody takes it for cleaning meanwhile
        future = drive.write(now, drive.folder.free, file)
        try:
            yield [future]
        finally:
            file.readers -= 1
        if (error := future.exception()) is not None:
            drive.failed_write(now, error)
            return False
        drive.freed_files += 1
        return True

    def _spent(self, drive: Drive) -> SegmentFile | None:
        """A file that holds nothing any more, if this disk will soon want one: it is given back beside a write, before one waits for it."""
        return drive.folder.spent_or_none() if drive.folder.room_files <= FILES_AHEAD else None

    def free_a_file(self, now: float, drive: Drive) -> Steps[bool]:
        """Empty the file that is next to be cleaned, without copying what is in it: a write does not wait for that."""
        files = self.cleanable(now, drive)
        if not files:
            return False
        file = next((file for file in files if not file.live_pages), files[0])
        ids = self.catalog.ids_of_file(file)
        self.counters.dropped += len(ids)
        self.ledger.forget(now, ids, evicted=True)
        return (yield from self.free_steps(now, drive, file))

    # -- removing ----------------------------------------------------------------------------------------------------------------------

    def remove_steps(self, now: float, place: np.uint64, keys: U8) -> Steps[Mask]:
        """Forget these, also after a power cut when it ends; which were held. OSError if a disk did not take it: they may come back."""
        found = self.catalog.find(place, keys)
        ids = np.unique(found.ids[found.hit])
        self.counters.removed += len(ids)
        waiting: list[Future[Any]] = self.ledger.forget(now, ids, evicted=False, sync=True)
        for drive in self.drives:
            if drive.folder.removals.behind:  # perhaps with a note on one of these, which was evicted
                none = np.empty(0, np.uint64)
                waiting.append(drive.write(now, note, drive.folder, none, none, True))
        for name in dict.fromkeys(key.tobytes() for key in keys) if self.writing else ():
            part = self.writing.get((int(place & LOW), name))
            if part is not None:
                part.gone.add(name)
                waiting += [part.ended] if part.ended not in waiting else []
        if waiting:
            yield waiting
        _raise_first(waiting)
        return found.hit

    def flush_steps(self, now: float, digest: bytes, number: int) -> Steps[int]:
        """Forget all of a namespace, which had this number; how many pages. OSError if a disk did not take it."""
        self.flushed[digest] = self.sequence
        ids = self.catalog.ids_of_number(number)
        self.ledger.forget(now, ids, evicted=False, noted=False)
        waiting: list[Future[Any]] = list({part.ended: None for (mine, _), part in self.writing.items() if mine == number})
        for drive in self.drives:
            if drive.state != AWAY:
                waiting.append(self.name_on(now, drive, digest) or drive.write(now, lambda: None))
        if waiting:
            yield waiting
        _raise_first(waiting)
        return len(ids)

    def describe(self, now: float, digest: bytes) -> None:
        """Have all disks know what has changed about a namespace, such as its quota."""
        for drive in self.drives:
            if drive.state != AWAY and digest in drive.folder.meta.namespaces:
                self.name_on(now, drive, digest)

    def name_on(self, now: float, drive: Drive, digest: bytes) -> Future[Any] | None:
        """Have a disk know of a namespace: its quota, and when it was flushed. None if it does already."""
        wanted, notes = self.naming.note_of(digest), drive.folder.meta.namespaces
        known = notes.get(digest)
        flushed = max(self.flushed.get(digest, 0), known.flushed if known else 0)
        fresh = NamespaceNote(wanted.canonical, wanted.object_bytes, wanted.quota_bytes, flushed)
        if known == fresh:
            return None
        notes[digest] = fresh
        return drive.write(now, drive.folder.write_meta, encode_meta(drive.folder.meta))

    # -- the blocking face -------------------------------------------------------------------------------------------------------------

    def read(self, now: float, place: np.uint64, keys: U8, out: U8) -> U8:
        """See `Tier`; FAILED where a page could not be read back."""
        straight = bool(len(out)) and takes_direct(out.ctypes.data, out.strides[0]) and takes_direct(0, out.shape[1])
        return finish(self.read_steps(now, place, keys, [row.data for row in out], straight=straight))

    def write(self, now: float, place: np.uint64, keys: U8, values: U8) -> U8:
        """See `Tier`."""
        values = np.ascontiguousarray(values)
        straight = bool(len(values)) and takes_direct(values.ctypes.data, values.shape[1])
        return finish(self.write_steps(now, Batch(place, keys, [row.data for row in values], np.zeros(len(keys), np.uint64), straight)))

    def remove(self, place: np.uint64, keys: U8) -> Mask:
        """See `Tier`."""
        return finish(self.remove_steps(0.0, place, keys))

    def evict(self, now: float, size_bytes: int) -> int:
        """See `Tier`."""
        return self.ledger.evict(now, size_bytes, 0, np.empty(0, np.int64))

    def stop(self, now: float) -> None:
        """Before `close`: seal the files that are being filled, so that the next start need not go through them."""
        asked = [drive.write(now, drive.folder.settle) for drive in self.drives if drive.may_read(now)]
        if wait(asked, STOP_SECONDS_MAX).not_done:
            log.warning("a disk has not ended its writes in %g s; the next start goes through its last files", STOP_SECONDS_MAX)

    def close(self) -> None:
        """Let go of the disks. What is on them stays."""
        for drive in self.drives:
            drive.close()

    def check(self) -> None:
        """The invariants: slow."""
        self.ledger.check()
        assert (self.ledger.pending_bytes > 0) == bool(self.writing)


def _raise_first(futures: list[Future[Any]]) -> None:
    for future in futures:
        if (error := future.exception()) is not None:
            raise error
