"""What the SSD tier may hold and does hold: bytes by disk and by namespace, caps and quotas, what goes to make room, and its notes on disk.

Theory of operation. The ledger stands between the tier's operations and the catalog: whatever enters or leaves the index does so here, so
that sums, quotas and the notes that keep a page from coming back are always those of the index. Nothing in here waits; notes are handed to
the disks' threads, and whoever needs them to be there waits for their futures.

Limits: bytes of pages (`pages_bytes` of each disk that is there), entries of the index, a namespace's quota (on this tier for itself), and
bytes written a day, which lie in the heads of records and so are known again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from umbp.policies.base import EvictionPolicy
from umbp.store.index import W_PLACE
from umbp.store.ssd_catalog import LOW, Catalog
from umbp.store.ssd_drive import AWAY, Drive
from umbp.store.ssd_folder import Folder, note
from umbp.store.ssd_format import BLOCK, NamespaceNote, padded
from umbp.store.ssd_records import Placed, SegmentFile
from umbp.types import I64, U64, Mask, WriteStatus

FULL_SHARE = 0.9  # of the space in files is for pages; the rest is what cleaning works with
FILES_SPARE = 2  # a file that is being filled and one to clean into


class Naming(Protocol):
    """What namespaces are called in memory and on disk."""

    def digest_of(self, number: int) -> bytes | None:
        """The digest (32 bytes) of the namespace that has this number now; None if there is none."""

    def number_of(self, digest: bytes) -> int | None:
        """The number of this namespace now; None if there is none, which leaves its pages where they are."""

    def note_of(self, digest: bytes) -> NamespaceNote:
        """What the disk should know of it, but for the mark of its last flush."""

    def quota_of(self, number: int) -> int:
        """Most bytes of its pages on this tier; 0: no limit."""


@dataclass(slots=True)
class Counters:
    """Since the start. ``dropped``: pages evicted so that a write need not wait for cleaning. ``capped``: not written for the day's cap."""

    hits: int = 0
    by_clients: int = 0  # of the hits: read by clients from the files
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    capped: int = 0
    removed: int = 0
    damaged: int = 0
    unreadable: int = 0
    cleaned_bytes: int = 0
    found_pages: int = 0  # listed at a start
    orphans: int = 0  # on disk at a start, and of no account: removed, flushed, copied elsewhere
    torn: int = 0  # at a start: not written to their end


class Ledger:
    """See above. ``clock``: seconds since 1970, for the day on which bytes are written."""

    def __init__(
        self, drives: Sequence[Drive], catalog: Catalog, naming: Naming, clock: Callable[[], float], *, day_bytes_max: int = 0
    ) -> None:
        self.drives = list(drives)
        self.catalog = catalog
        self.naming = naming
        self.clock = clock
        self.day_bytes_max = day_bytes_max
        self.counters = Counters()
        self.day, self.day_bytes = 0, 0
        self._day_bytes_of: dict[Drive, int] = {}
        self.held: dict[int, int] = {}  # bytes on disk by number of the namespace
        self.drive_of: dict[int, Drive] = {}  # by the identity of a file
        self.pending_bytes = 0  # being written
        self.pending: dict[int, int] = {}  # the same by namespace number: what is on its way counts against its quota
        self.pages_bytes_max = 0  # a limit below that of the disks; 0: theirs

    def __repr__(self) -> str:
        return f"<Ledger {self.used_bytes} of {self.capacity_bytes} bytes, {len(self.held)} namespaces>"

    # -- what it has -------------------------------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of pages, as they lie on disk, over the disks that are there."""
        there = sum(pages_bytes(drive.folder) for drive in self.drives if drive.state != AWAY)
        return min(there, self.pages_bytes_max) if self.pages_bytes_max else there

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that it lists, as they lie on disk."""
        return self.catalog.used_bytes

    @property
    def fill(self) -> float:
        """Used share."""
        return (self.used_bytes + self.pending_bytes) / max(1, self.capacity_bytes)

    def today(self) -> int:
        """Bytes written on this day."""
        day = int(self.clock() // 86_400)
        if day != self.day:
            self.day, self.day_bytes = day, 0
            self._day_bytes_of.clear()
        return self.day_bytes

    def today_of(self, drive: Drive) -> tuple[int, int]:
        """This day, and the bytes written to one disk on it: each folder keeps its own, and all of them together are known at a start."""
        self.today()
        return self.day, self._day_bytes_of.get(drive, 0)

    def wrote_before(self, drive: Drive, size_bytes: int) -> None:
        """A folder that was opened says how much was written to it on this day; what this process wrote of it is counted already."""
        _, known = self.today_of(drive)
        if size_bytes > known:
            self._day_bytes_of[drive] = size_bytes
            self.day_bytes += size_bytes - known

    def enter(self, now: float, place: np.uint64, drive: Drive, record: Placed, which: Mask) -> Mask:
        """List these pages of a record that is on disk."""
        pages = record.pages[which]
        self.drive_of[id(record.file)] = drive
        keys = np.frombuffer(pages["key"].tobytes(), np.uint8).reshape(-1, 32)
        at = pages["block"].astype(np.int64) << 20 | pages["back"].astype(np.int64)
        shown = self.catalog.enter(now, place, record.file, keys, pages["check"], pages["whole"], pages["sequence"], at)
        stored = int(np.count_nonzero(shown))
        self.held[int(place & LOW)] = self.held.get(int(place & LOW), 0) + stored * padded(int(place >> np.uint64(32)))
        self.counters.stored += stored
        return shown

    def relocate(self, now: float, ids: I64, drive: Drive, record: Placed, which: Mask) -> None:
        """These listed pages are the ones of a record that is on disk, and their old places are noted as dead."""
        self.drive_of[id(record.file)] = drive
        pages = record.pages[which]
        at = pages["block"].astype(np.int64) << 20 | pages["back"].astype(np.int64)
        self._note(now, self.catalog.relocate(ids, record.file, pages["check"], pages["sequence"], at), sync=False)

    def wrote(self, drive: Drive, size_bytes: int) -> None:
        """So many bytes went to disk."""
        _, before = self.today_of(drive)
        self.day_bytes += size_bytes
        self._day_bytes_of[drive] = before + size_bytes
        drive.written_bytes += size_bytes

    def make_room(self, now: float, number: int, size: int, count: int, kept: I64) -> tuple[int, WriteStatus]:
        """For how many pages there is room, evicting others; and why not for more."""
        reason, each = WriteStatus.STORED, padded(size)
        if self.day_bytes_max:
            spare = max(0, (self.day_bytes_max - self.today() - self.pending_bytes) // (each + BLOCK))
            if spare < count:
                self.counters.capped += count - spare
                count, reason = spare, WriteStatus.NOT_ADMITTED
        quota = self.naming.quota_of(number)
        if quota:
            quota -= self.pending.get(number, 0)
            excess = self.held.get(number, 0) + count * each - quota
            if excess > 0:
                self.evict(now, excess, -(-excess // each), kept, number=number)
            spare = max(0, (quota - self.held.get(number, 0)) // each)
            if spare < count:
                count, reason = spare, WriteStatus.OVER_QUOTA
        excess = self.used_bytes + self.pending_bytes + count * each - self.capacity_bytes
        if excess > 0:
            self.evict(now, excess, 0, kept)
        if self.catalog.free_ids < count:
            self.evict(now, 0, count - self.catalog.free_ids, kept)
        spare = max(0, (self.capacity_bytes - self.used_bytes - self.pending_bytes) // each)
        if spare < count:
            count, reason = spare, WriteStatus.ALL_LEASED
        if self.catalog.free_ids < count:
            count, reason = self.catalog.free_ids, WriteStatus.KEY_LIMIT
        return count, reason

    def begin(self, number: int, size_bytes: int) -> None:
        """So many bytes of a namespace are being written from now on."""
        self.pending_bytes += size_bytes
        self.pending[number] = self.pending.get(number, 0) + size_bytes

    def end(self, number: int, size_bytes: int) -> None:
        """They are written, or given up."""
        self.pending_bytes -= size_bytes
        self.pending[number] -= size_bytes
        if not self.pending[number]:
            del self.pending[number]

    def evict(self, now: float, size_bytes: int, count: int, kept: I64, *, number: int = -1) -> int:
        """Forget pages by the policy's choice, none of those ``kept``, until so many bytes are free and so many are gone; bytes freed."""
        freed = 0
        while freed < size_bytes or count > 0:
            ids, sizes = self.victims(size_bytes - freed, count, kept, number=number)
            if not len(ids):
                break
            self.forget(now, ids, evicted=True)
            self.counters.evicted += len(ids)
            freed += int(sizes.sum())
            count -= len(ids)
        return freed

    def victims(self, size_bytes: int, count: int, kept: I64, *, number: int = -1, policy: EvictionPolicy | None = None) -> tuple[I64, I64]:
        """The first pages that `evict` would forget, by another policy if one is given, and their bytes on disk. A peek."""
        average = max(BLOCK, self.used_bytes // max(1, self.catalog.count))
        ids = self.catalog.victims(max(count, -(-size_bytes // average), 1), kept, number=number, policy=policy)
        sizes = padded_sizes(self.catalog.table.entries[ids, W_PLACE])
        enough = (np.cumsum(sizes) - sizes < size_bytes) | (np.arange(len(ids)) < count)
        return ids[enough], sizes[enough]

    def forget(self, now: float, ids: I64, *, evicted: bool, sync: bool = False, noted: bool = True) -> list[Future[Any]]:
        """Take pages out of the index; the futures of their notes, of which there are none unless ``noted``."""
        if not len(ids):
            return []
        places = self.catalog.table.entries[ids, W_PLACE]
        for place in np.unique(places).tolist():
            count = int(np.count_nonzero(places == place))
            self.held[place & 0xFFFF_FFFF] -= count * padded(place >> 32)
        gone = self.catalog.forget(ids, evicted=evicted)
        return self._note(now, gone, sync=sync) if noted else []

    def _note(self, now: float, gone: list[tuple[SegmentFile, U64]], *, sync: bool) -> list[Future[Any]]:
        """Have it noted that these copies are dead."""
        by_drive: dict[Drive, list[tuple[SegmentFile, U64]]] = {}
        for file, sequences in gone:
            by_drive.setdefault(self.drive_of[id(file)], []).append((file, sequences))
        waiting = []
        for drive, parts in by_drive.items():
            numbers = np.repeat(np.array([file.number for file, _ in parts], np.uint64), [len(sequences) for _, sequences in parts])
            waiting.append(drive.write(now, note, drive.folder, numbers, np.concatenate([sequences for _, sequences in parts]), sync))
        return waiting

    def lose(self, now: float, drive: Drive, reason: str) -> None:
        """A disk is gone: nothing of it is listed."""
        for file in list(drive.folder.files.values()):
            if file.live_pages:
                self.forget(now, self.catalog.ids_of_file(file), evicted=True, noted=False)
            self.catalog.drop_file(file)
            self.drive_of.pop(id(file), None)
        drive.lost(now, reason)

    def check(self) -> None:
        """The invariants: slow."""
        self.catalog.check()
        _, places = self.catalog.places()
        for number in np.unique(places & LOW).tolist():
            assert self.held[number] == int(padded_sizes(places[places & LOW == np.uint64(number)]).sum())
        assert self.used_bytes == sum(self.held.values())
        for file in self.catalog.files.values():
            assert self.drive_of[id(file)].folder.files[file.slot] is file


def pages_bytes(folder: Folder) -> int:
    """Bytes of pages that a folder is meant to hold."""
    return max(0, int((folder.files_max - FILES_SPARE) * folder.segment_bytes * FULL_SHARE) // BLOCK * BLOCK)


def padded_sizes(places: U64) -> I64:
    """Bytes on disk of pages with these place words."""
    sizes: I64 = (places >> np.uint64(32)).astype(np.int64)
    return -(-sizes // BLOCK) * BLOCK
