"""One folder of the SSD tier: its lock, its segment files and what becomes of them.

Theory of operation
-------------------
A segment file's life:   FREE --begin--> ACTIVE --seal--> SEALED --free--> FREE
                                          (a write failed, or it was found unsealed at start: sealed as far as it is good)
At most one file is ACTIVE. Appending: records go to their places in parallel, then one fdatasync, then they are answered. So what is
answered survives a power cut, and a record that is torn was never answered. While the last of an append's records are on their way, those
of the next one are given to the threads already, if they go to the same file (`_look_ahead`): the disk is not idle between two batches.
They lie behind the first ones and are answered after them, by a sync of their own; if the first ones fail, or the file is sealed, they are
waited for, count as never written, and are written elsewhere when their turn comes. A file that is full is sealed while the first records
of the next one are on their way, so two may be unsealed when the power goes. A file is begun by its header with a new number and
reused without being made anew: its space stays ours, and a full disk cannot take it. It is freed by a header that says so, synced, before
anything else can happen to it.

Every page that dies while its file lives is noted in `removed.log` (removal by a client: synced before it is answered; eviction: not, a
page that comes back after a power cut is only a page). The log is written anew without the notes on files that are no more when it has
grown to twice what then was left. `folder.meta` is replaced in one step; a flush is answered after it was.

Who calls: `Folder.open` before anything else, then all that writes in one thread of the folder's own (`worker`), so that nothing here is
locked. Reading needs only a file's descriptor, and whoever reads counts in `SegmentFile.readers` so that the file is not freed.

What fails: everything, with OSError, and the caller decides (`umbp.store.ssd`). No O_DIRECT, no fallocate: found out at start, said once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np

from umbp.errors import Conflict, SegmentError
from umbp.store.locks import lock_patiently
from umbp.store.ssd_crew import Crew
from umbp.store.ssd_format import (
    BLOCK,
    ITEM,
    PAGE,
    Header,
    Meta,
    Summary,
    blocks,
    decode_meta,
    encode_header,
    encode_meta,
    encode_summary,
    head_blocks,
    padded,
    pieces,
    summary_bytes,
)
from umbp.store.ssd_records import ACTIVE, BROKEN, FREE, SEALED, Append, Draft, Flight, Placed, Record, SegmentFile
from umbp.store.ssd_recovery import Contents, contents
from umbp.store.ssd_removals import RemovalLog
from umbp.store.ssd_system import Workers, aligned, aligned_copy, read_file, replace_file, write_all
from umbp.types import I64, U64

SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 1 << 20, 256 << 20
SEGMENTS_WANTED = 32  # files a folder: enough to clean one at a time, few enough that each is large
NUMBERS_SKIPPED = 16  # at start, so that no number of a header that was lost is given out again
RECORD_BYTES_MAX = 4 << 20  # written by one call
RECORD_PAGES_MAX = 256
OTHER_BYTES = 1 << 20  # of a folder's limit, for what is not segments


class Full(Exception):
    """No file is free and none more may be made: something must be freed first."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file that held pages at start."""

    file: SegmentFile
    contents: Contents


class Folder:
    """See above."""

    def __init__(self, path: str, size_bytes: int, crew: Crew, *, segment_bytes: int = 0) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.crew, self.system = crew, crew.system
        automatic = min(max(size_bytes // SEGMENTS_WANTED, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX)
        self.segment_bytes = padded(segment_bytes or automatic // SEGMENT_BYTES_MIN * SEGMENT_BYTES_MIN)
        self.direct = False
        self.allocates = True
        self.said: list[str] = []  # what the file system cannot do, or what was found: once
        self.meta = Meta(b"", self.segment_bytes)
        self.files: dict[int, SegmentFile] = {}
        self.active: SegmentFile | None = None
        self.dead: tuple[U64, U64] = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))  # notes found at start
        self.worker = Workers(1, f"ssd-{os.path.basename(path)}")
        self.removals = RemovalLog(path, self.system)
        self.refused_space = False  # the file system had no room for one more file: none is made for a while
        self.cramped = False  # and so it was when the last one was to be made
        self.last = (0, 0)  # the day on which was written last, and how many bytes on it
        self.coming: deque[Append] = deque()  # what the worker was asked to append and has not begun, in order; the tier adds to it
        self._full: list[SegmentFile] = []  # and not sealed yet
        self._ahead: tuple[Append, Flight] | None = None  # the first of those, if some of it is on its way
        self._lock: int | None = None
        self._identity: tuple[int, int] = (0, 0)
        self._free: list[SegmentFile] = []
        self._number = 0

    def __repr__(self) -> str:
        return f"<Folder {self.path} {len(self.files)} files, {len(self._free)} of them free>"

    # -- start and end -----------------------------------------------------------------------------------------------------------------

    def open(self) -> list[Found]:
        """Take the folder, and say what it holds. Conflict if it has an owner, SegmentError if it is of another format."""
        self.system.make_folder(self.path)
        path = self._at("owner.lock")
        self._lock = lock_patiently(lambda: self.system.lock(path), path)
        if self._lock is None:
            raise Conflict(f"{self.path} is in use by another pool", field="ssd", example="--ssd ANOTHER_FOLDER:SIZE")
        self.crew.opened(self._lock)
        try:
            self._identity = self.system.identity(self.path)
            self._probe()
            self._read_meta()
            found = self._read_files()
            self.dead = self.removals.open(self._numbers())
            return found
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of everything; what is active stays unsealed."""
        self.worker.close()
        self.removals.close()
        self._let_go([*(file.fd for file in self.files.values()), *(() if self._lock is None else (self._lock,))])
        self.files, self._free, self._full, self.active, self._lock = {}, [], [], None, None

    def _let_go(self, fds: list[int]) -> None:
        self.crew.closing(fds)
        for fd in fds:
            with contextlib.suppress(OSError):
                self.system.close(fd)

    def is_there(self) -> bool:
        """Whether the folder is still the one that was opened. OSError as the system says."""
        return self.system.identity(self.path) == self._identity

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _probe(self) -> None:
        """What the file system can do; it must at least keep a block."""
        path, block = self._at("probe.tmp"), aligned_copy(secrets.token_bytes(BLOCK))
        for direct in (True, False):
            fd = -1
            try:
                fd = self.system.open(path, create=True, direct=direct)
                back = aligned(BLOCK)
                good = self.system.write(fd, [block], 0) == BLOCK and self.system.read(fd, [back], 0) == BLOCK
                self.direct = direct
                if good and back == block:
                    break
            except OSError as error:
                if not direct:
                    raise
                self.said.append(f"{self.path}: no direct I/O here ({error.strerror}); going through the page cache")
            finally:
                if fd >= 0:
                    self.system.close(fd)
                with contextlib.suppress(OSError):
                    self.system.remove(path)

    def _read_meta(self) -> None:
        try:
            fd = self.system.open(self._at("folder.meta"))
        except FileNotFoundError:
            found = None
        else:
            try:
                found = decode_meta(read_file(self.system, fd))
            except SegmentError as error:
                raise SegmentError(f"{self.path} cannot be used: {error}", field="ssd") from error
            finally:
                self.system.close(fd)
            if found is None:  # which namespaces were flushed is not known any more, so nothing in here can be trusted
                self.said.append(f"{self.path}: folder.meta is damaged; what the folder held is forgotten")
        if found is None:
            self.meta = Meta(secrets.token_bytes(16), self.segment_bytes)
            self.write_meta(encode_meta(self.meta))
        elif found.segment_bytes != self.segment_bytes:
            self.said.append(f"{self.path}: its files have {found.segment_bytes} bytes, as they were made")
            self.meta, self.segment_bytes = found, found.segment_bytes
        else:
            self.meta = found

    @property
    def files_max(self) -> int:
        """Files that the limit allows."""
        return max(0, (self.size_bytes - OTHER_BYTES) // self.segment_bytes)

    def _read_files(self) -> list[Found]:
        found: list[Found] = []
        names = [name for name in self.system.list(self.path) if name.startswith("segment-") and name.endswith(".umbp")]
        broken, strange = list[str](), list[str]()
        for name in names:
            digits = name.removeprefix("segment-").removesuffix(".umbp")
            if not (digits.isdecimal() and len(digits) == 5):
                continue
            fd = self.system.open(self._at(name), direct=self.direct)
            self.crew.opened(fd)
            file = SegmentFile(int(digits), fd)
            self.files[file.slot] = file
            try:
                held = contents(self.system, fd, self.segment_bytes, self.meta.folder)
            except OSError as error:
                broken.append(f"{name} ({error.strerror})")
                file.state = BROKEN
                continue
            self._number = max(self._number, held.number)
            if held.strange:
                strange.append(name)
            if held.free:
                self._free.append(file)
                continue
            file.number, file.end, file.state = held.number, held.end, SEALED
            file.namespaces = {digest: at for at, digest in enumerate(held.namespaces)}
            file.parts, file.count = [held.pages], len(held.pages)
            file.listed = file.count  # nobody frees a file before the tier has looked at all of them
            found.append(Found(file, held))
        self._number += NUMBERS_SKIPPED
        if broken:
            self.said.append(f"{self.path}: cannot be read and are left alone: {', '.join(broken[:5])}")
        if strange:
            self.said.append(f"{self.path}: {len(strange)} files do not begin as files of it, and are used anew: {', '.join(strange[:5])}")
        self.last = max(((each.contents.day, each.contents.day_bytes) for each in found), default=(0, 0))
        for each in found:
            if not each.contents.sealed:
                with contextlib.suppress(OSError):
                    self._seal(each.file)
        self._shrink_to_limit(found)
        return found

    def _shrink_to_limit(self, found: list[Found]) -> None:
        """A limit that is lower than it was: free files go first, then the oldest."""
        while len(self.files) > self.files_max and self.files:
            file = self._free.pop() if self._free else min(self.files.values(), key=lambda each: each.number)
            found[:] = [each for each in found if each.file is not file]
            self._let_go([file.fd])
            self.system.remove(self._at(_name(file.slot)))
            del self.files[file.slot]

    # -- appending ---------------------------------------------------------------------------------------------------------------------

    def append(self, request: Append) -> tuple[list[Placed], OSError | Full | None]:
        """Write these records, in order, which `coming` holds; those that are on disk for good, and why the others are not."""
        self.coming.remove(request)
        placed, flights = list[Placed](), self._taken_ahead(request)
        try:
            reason = self._give_rest(request, flights)
            while flights:
                self._seal_full(flights)
                placed += self._land(flights[0], look_ahead=reason is None and len(flights) == 1)
                flights.pop(0).file.written_at = request.now
            self._seal_full(flights)
        except OSError as error:
            wait([future for flight in flights for future in flight.futures])  # of a file after the one that failed: as if never written
            return placed, error
        return placed, reason

    def _give_rest(self, request: Append, flights: list[Flight]) -> OSError | Full | None:
        """Give all of these records that are not in flight to the threads, in as many files as it takes; why not more."""
        given = sum(len(flight.records) for flight in flights)
        try:
            while given < len(request.drafts):
                file, left = self.active, request.drafts[given:]
                if flights or file is None or not self._fits(file, file.end, file.count, left[0]):
                    file = self._begin_file(request.spare)
                before = flights[-1].day_bytes if flights else request.day_bytes
                flights.append(self._give(left, Flight(file, request.day, file.end, file.count, before)))
                assert flights[-1].records, "a record is larger than a file"
                given += len(flights[-1].records)
        except (OSError, Full) as error:
            return error
        return None

    def _give(self, drafts: list[Draft], flight: Flight) -> Flight:
        """Give as many of these records to the threads as fit into the file."""
        for draft in drafts:
            if not self._fits(flight.file, flight.end, flight.count, draft):
                break
            flight.day_bytes += draft.blocks * BLOCK
            flight.records.append(Record(flight.file, draft, flight.end, flight.day, flight.day_bytes, self.direct))
            flight.end, flight.count = flight.end + draft.blocks, flight.count + len(draft.bodies)
        flight.futures = self.crew.write(flight.records)
        return flight

    def _land(self, flight: Flight, *, look_ahead: bool) -> list[Placed]:
        """Wait for records, sync, and count them as written."""
        file = flight.file
        try:
            errors: list[BaseException] = []
            for future in flight.futures:
                if look_ahead and not errors:
                    self._look_ahead(flight)
                if (error := future.exception()) is not None:
                    errors.append(error)
            if errors:
                raise errors[0]
            self.system.sync(file.fd)
        except OSError:
            if self.active is file:
                self.active = None  # what is answered is before the hole; nothing will be after it
            with contextlib.suppress(OSError):
                self._seal(file)
            raise
        if not self.direct:
            self.system.forget_cached(file.fd)
        placed = []
        for future, record in zip(flight.futures, flight.records, strict=True):
            pages = future.result()
            pages["namespace"] = file.namespaces.setdefault(record.draft.namespace, len(file.namespaces))
            file.parts.append(pages)
            file.count += len(pages)
            file.end = record.at + record.draft.blocks
            self.last = (record.day, record.day_bytes)
            placed.append(Placed(file, pages))
        return placed

    def _look_ahead(self, flight: Flight) -> None:
        """Give the threads what comes next, behind these records, as far as it fits into their file."""
        if self._ahead is None and self.coming:
            request = self.coming[0]
            behind = Flight(flight.file, request.day, flight.end, flight.count, request.day_bytes)
            if self._give(request.drafts, behind).records:
                self._ahead = (request, behind)

    def _taken_ahead(self, request: Append) -> list[Flight]:
        """Its records that are on their way already."""
        if self._ahead is None or self._ahead[0] is not request:
            return []
        flight, self._ahead = self._ahead[1], None
        return [flight]

    def _write_at(self, file: SegmentFile, block: int, text: bytes) -> None:
        write_all(self.system, file.fd, [aligned_copy(text)], block * BLOCK, len(text))

    def _fits(self, file: SegmentFile, at: int, count: int, draft: Draft) -> bool:
        names = len(file.namespaces) + 64  # more than a batch has
        end = at + draft.blocks + summary_bytes(count + len(draft.bodies), names) // BLOCK + 1
        return end * BLOCK <= self.segment_bytes

    def record_pages(self, size: int) -> int:
        """Most pages of this size in one record; 0: not even one fits into a file."""
        bare = max(1, (self.segment_bytes - 8 * BLOCK) // (padded(size) + ITEM.itemsize + PAGE.itemsize + 8 * pieces(size)))
        count = min(bare, max(1, min(RECORD_PAGES_MAX, RECORD_BYTES_MAX // padded(size))))
        while (
            count
            and (1 + head_blocks(count, size) + count * blocks(size) + summary_bytes(count, 65) // BLOCK + 1) * BLOCK > self.segment_bytes
        ):
            count -= 1
        return count

    def _begin_file(self, spare: int) -> SegmentFile:
        """Another active file; the one before is sealed later (`_seal_full`). Full if there is none."""
        if self.active is not None:
            self._full.append(self.active)
            self.active = None
        if self.room_files <= spare:
            raise Full
        if not self._free:
            self._free.append(self._make_file())
        file = self._free[-1]
        number = self._number + 1
        self._write_at(file, 0, encode_header(Header(number, self.segment_bytes, self.meta.folder)))
        self._write_at(file, self.segment_bytes // BLOCK - 1, bytes(BLOCK))  # the trailer of a former life
        self._free.pop()
        self._number = file.number = number
        file.end, file.count, file.parts, file.namespaces, file.state = 1, 0, [], {}, ACTIVE
        self.active = file
        return file

    def _make_file(self) -> SegmentFile:
        if len(self.files) >= self.files_max or self.refused_space:
            raise Full
        slot = next(slot for slot in range(len(self.files) + 1) if slot not in self.files)
        path = self._at(_name(slot))
        fd = self.system.open(path, create=True, direct=self.direct)
        try:
            if self.allocates:
                try:
                    self.system.allocate(fd, self.segment_bytes)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
                    self.allocates = False
                    self.said.append(f"{self.path}: space cannot be set aside here ({error.strerror}); it is taken as it is written")
            if not self.allocates:
                self.system.truncate(fd, self.segment_bytes)
            self.system.sync_folder(self.path)
        except OSError as error:
            self.system.close(fd)
            with contextlib.suppress(OSError):
                self.system.remove(path)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # go on with the files there are
                self.refused_space = self.cramped = True
                if self.files:
                    raise Full from error
            raise
        self.cramped = False
        self.crew.opened(fd)
        file = self.files[slot] = SegmentFile(slot, fd)
        return file

    def _seal_full(self, flights: list[Flight]) -> None:
        """Seal the files that are full, but for those into which any of this flies; what comes next is on its way meanwhile."""
        for file in [file for file in self._full if all(flight.file is not file for flight in flights)]:
            self._seal(file)

    def _seal(self, file: SegmentFile) -> None:
        """Nothing is added to this file any more, and it is said so on disk."""
        file.state = SEALED
        self._full = [other for other in self._full if other is not file]
        if self._ahead is not None and self._ahead[1].file is file:  # behind the last record, where the summary is about to go
            wait(self._ahead[1].futures)
            self._ahead = None
        pages = np.concatenate(file.parts) if file.parts else np.zeros(0, PAGE)
        text, trailer = encode_summary(Summary(file.number, *self.last, list(file.namespaces), pages), file.end)
        self._write_at(file, file.end, text)
        self._write_at(file, self.segment_bytes // BLOCK - 1, trailer)
        self.system.sync(file.fd)

    def settle(self) -> None:
        """At a stop in order: all notes are written, and the next start need not go through the file that is being filled."""
        if self.removals.behind:
            self.removals.note(np.empty(0, np.uint64), np.empty(0, np.uint64), sync=True)
        self._seal_full([])
        if self.active is not None:
            file, self.active = self.active, None
            self._seal(file)

    def free(self, file: SegmentFile) -> None:
        """Nothing leads to this file any more: it is said so on disk, and it is used again."""
        self._write_at(file, 0, encode_header(Header(file.number, self.segment_bytes, self.meta.folder, free=True)))
        self.system.sync(file.fd)
        file.number, file.parts, file.namespaces, file.count, file.listed, file.state = 0, [], {}, 0, 0, FREE
        self._free.append(file)

    @property
    def room_files(self) -> int:
        """Files that can be begun without freeing one."""
        more = 0 if self.refused_space else self.files_max - len(self.files)
        return len(self._free) + max(0, more)

    @property
    def live_bytes(self) -> int:
        """On disk, of pages that the index leads to."""
        return sum(file.live_bytes for file in list(self.files.values()))

    @property
    def live_pages(self) -> int:
        """Pages that the index leads to."""
        return sum(file.live_pages for file in list(self.files.values()))

    def spent_or_none(self) -> SegmentFile | None:
        """A file that can be given back for nothing: idle, and no page in it is alive."""
        return next((file for file in list(self.files.values()) if file.idle and not file.live_pages), None)

    # -- removals and meta -------------------------------------------------------------------------------------------------------------

    def note_removed(self, numbers: I64 | U64, sequences: I64 | U64, *, sync: bool) -> None:
        """These pages are no more; with ``sync`` also after a power cut."""
        self.removals.note(numbers, sequences, sync=sync)
        if self.removals.has_grown and not self.removals.behind:
            self.removals.write_anew(self._numbers())

    def _numbers(self) -> U64:
        return np.array([file.number for file in self.files.values()], np.uint64)

    def write_meta(self, text: bytes) -> None:
        """Keep this description (`encode_meta`), in one step and for good."""
        replace_file(self.system, self.path, "folder.meta", text)


def note(folder: Folder, numbers: U64, sequences: U64, sync: bool) -> None:
    """`Folder.note_removed` as a job for the folder's thread."""
    folder.note_removed(numbers, sequences, sync=sync)


def _name(slot: int) -> str:
    """Made of a number: nothing that a caller says is ever part of a path."""
    return f"segment-{slot:05d}.umbp"
