r"""Pages on SSD that clients of this machine read by themselves, straight into their own memory, where DRAM need not or cannot keep them.

Theory of operation
-------------------
A client asks for references (`umbp.store.file_refs`) to pages that its view of the tier's index shows, and gets them as far as the tier has
them now: where each lies, its check, and the descriptors of the files that it does not have yet (`umbp.pool.handover`). What was referred
to is a *hold* of its session: its files count one reader more (`SegmentFile.readers`), so that neither cleaning nor eviction uses one
again.

    referred --the client has read--> judged: counts, or not
       \--the session ends, or the hold's time is over--> over: whatever was read counts no more

The client verifies each page by its check, then ends the hold and asks which pages counted all the time: those whose hold stood, on a disk
that was not given up meanwhile, and that are listed still. So a reader that was stopped, and wakes when a file holds something else, is
told so; the check alone would have found it out too. A page that was removed or flushed meanwhile does not count, as with any other read.

*What cannot be read* is asked for by way of the pool next (`umbp.client.fetches`): it reads the page itself, finds it damaged or unreadable
like any other, lists it no more, counts it, and tries elsewhere. What a client says drops no page, and nobody else believes what it read.

*Trust.* Descriptors are opened anew to read only, and given to sessions that have opened a namespace; but a file holds pages of all
namespaces, and whoever may open the file's inode to write can do so by way of any descriptor. So a client that is given one can read, and
where it runs as the pool's user could damage, what is on this disk. That is what it can do to the DRAM segment anyway, which every client
maps whole. Where that is too much: ``--ssd-files off``, and pages come through the pool's memory.

*Bounded*: `HOLD_SECONDS`, holds of a session, files of an answer, and one in `HELD_SHARE` files held by all clients together, so that there
is always something to clean; what is above that comes by way of the pool. A disk that hangs, or does not let a file be opened within
`OPEN_SECONDS`, is referred to by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import numpy as np

from umbp import wire
from umbp.core.objects import Account
from umbp.pool.handover import Handover, Handovers
from umbp.pool.ssd import SsdSide
from umbp.store.index import place_word
from umbp.store.ssd_catalog import Where
from umbp.store.ssd_drive import Drive
from umbp.store.ssd_folder import Folder
from umbp.store.ssd_format import padded
from umbp.store.ssd_records import SegmentFile
from umbp.store.ssd_system import Workers
from umbp.types import I64, U8, U64, Mask, ReadStatus

HOLD_SECONDS = 30.0  # of a client's deadline at most; what one call refers to is read in a tenth of that by a slow disk
HOLDS_MAX = 16  # of a session: its threads, each with one
HELD_SHARE = 4
OPEN_SECONDS = 2.0


@dataclass(slots=True, eq=False)
class Hold:
    """Pages of one answer: ``which`` (m,) of the keys, ``where`` they lie, in which of the files (``index``, (m,)).

    ``homes``: the disk of each file, and the folder that it was opened as.
    """

    session: int
    until: float
    which: I64
    where: Where
    index: I64
    files: list[SegmentFile]
    homes: list[tuple[Drive, Folder]]


class References:
    """All of one pool process."""

    def __init__(self, side: SsdSide, handovers: Handovers) -> None:
        self.side, self.handovers = side, handovers
        self.refused = 0  # not read so, though on SSD: too much was held, or descriptors could not be handed over
        self.expired = 0  # holds whose time was over
        self._holds: dict[int, Hold] = {}
        self._numbers = count(1)
        self._held = side.held
        self._openers: dict[Drive, Workers] = {}
        self._late: dict[Drive, Future[int]] = {}  # files that a disk has not opened in time

    def __repr__(self) -> str:
        return f"<References of {len(self._holds)} holds on {len(self._held)} files>"

    # -- for sessions ------------------------------------------------------------------------------------------------------------------

    async def refer(self, session: int, account: Account, keys: U8, known: U64, seconds: float) -> bytes:
        """The answer to `umbp.wire.ReadFiles`."""
        tier, now = self.side.tier, self.side.now()
        place = place_word(account.number, account.object_bytes)
        found = tier.catalog.find(place, keys)
        tier.catalog.touch(now, place, keys, found=found)
        status = np.where(found.hit, ReadStatus.BUSY, ReadStatus.MISS).astype(np.uint8)
        which = np.flatnonzero(found.hit)
        handover = self.handovers.of(session)
        if handover is None or not len(which) or sum(hold.session == session for hold in self._holds.values()) >= HOLDS_MAX:
            self.refused += len(which)
            return wire.encode(wire.FileRefs(0, len(keys), 0, 0, 0.0), status)
        where = tier.catalog.where(place, found, which)
        numbers, inverse = np.unique(where.pages.files, return_inverse=True)
        every = [tier.catalog.files[at] for at in numbers.tolist()]
        files = self._may_be_held([file for file in every if self._answers(now, tier.ledger.drive_of[id(file)])])
        index = np.array([files.index(file) if file in files else -1 for file in every])[inverse]
        homes = [(drive, drive.folder) for file in files for drive in (tier.ledger.drive_of[id(file)],)]
        hold = Hold(session, now + min(seconds, HOLD_SECONDS), which, where, index, files, homes)
        number = next(self._numbers)
        self._holds[number] = hold  # before anything is waited for: the session may end
        for file in files:
            file.readers += 1
            self._held[file] += 1
        try:
            given = await self._give(handover, hold, set(known.tolist()))
        except BaseException:
            self._let_go(number)
            raise
        return self._answer(number, hold, given, status)

    def end(self, session: int, number: int, read: U8) -> U8:
        """The client has read these pages, 1 each, of what it was referred to; which of them count, (m,) uint8."""
        hold, tier = self._holds.get(number), self.side.tier
        if hold is None or hold.session != session or len(read) != len(hold.which):
            return np.zeros(len(read), np.uint8)
        stands = np.array([drive.folder is folder for drive, folder in hold.homes], bool)[hold.index]
        still = tier.catalog.same(hold.where.ids, hold.where.versions) & stands & (self.side.now() <= hold.until)
        good = still & (read != 0)
        tier.counters.by_clients += int(np.count_nonzero(good))
        tier.counters.hits += int(np.count_nonzero(good))
        for (drive, _), pages in zip(hold.homes, np.bincount(hold.index[good], minlength=len(hold.homes)).tolist(), strict=True):
            drive.read_bytes += pages * padded(hold.where.pages.size)
        self._let_go(number)
        counts: U8 = still.astype(np.uint8)
        return counts

    def session_ended(self, session: int) -> None:
        """Nothing is held for it any more."""
        for number in [number for number, hold in self._holds.items() if hold.session == session]:
            self._let_go(number)

    def tick(self, now: float) -> None:
        """Let time pass."""
        for number in [number for number, hold in self._holds.items() if now > hold.until]:
            self.expired += 1
            self._let_go(number)

    def close(self) -> None:
        """At the end of the process."""
        for number in list(self._holds):
            self._let_go(number)
        for opener in self._openers.values():
            opener.close()

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def _answers(self, now: float, drive: Drive) -> bool:
        """Whether a disk does what it is asked, as far as is known."""
        late = self._late.get(drive)
        return drive.may_read(now) and (late is None or late.done())

    def _may_be_held(self, files: list[SegmentFile]) -> list[SegmentFile]:
        """Of these files, which clients may hold."""
        total = sum(drive.folder.files_max for drive in self.side.drives)
        free = max(1, total // HELD_SHARE) - len(self._held)
        may = []
        for file in files[: wire.FILES_MAX]:
            if file not in self._held:
                if free <= 0:
                    continue
                free -= 1
            may.append(file)
        return may

    async def _give(self, handover: Handover, hold: Hold, known: set[int]) -> Mask:
        """Handover over the descriptors that the client has not; which files of the hold it has now."""
        given = np.array([file.token in known for file in hold.files], bool)
        opening: dict[int, Future[int]] = {}
        for at in np.flatnonzero(~given).tolist():
            drive, folder = hold.homes[at]
            opener = self._openers.get(drive) or self._openers.setdefault(drive, Workers(1, "ssd-open"))
            opening[at] = opener.submit(_open, drive, hold.files[at].fd, folder.direct)
        ready: dict[int, Future[int]] = {}
        try:
            if opening:
                await asyncio.wait([_watched(future) for future in opening.values()], timeout=OPEN_SECONDS)
            ready = {at: future for at, future in opening.items() if future.done()}
        finally:
            for at, future in opening.items():
                if at not in ready:
                    self._late[hold.homes[at][0]] = future
                    future.add_done_callback(_close_late)
        for at, future in ready.items():
            if future.exception() is None:
                try:
                    given[at] = handover.give(wire.SSD_FILE, hold.files[at].token, future.result())
                finally:
                    os.close(future.result())
        return given

    def _answer(self, number: int, hold: Hold, given: Mask, status: U8) -> bytes:
        """What the client is told; the hold is of what it can read."""
        if number not in self._holds:  # its time is over already
            given[:] = False
        mine = np.flatnonzero((hold.index >= 0) & given[hold.index]) if len(given) else hold.index[:0]
        self.refused += len(hold.which) - len(mine)
        if not len(mine):
            self._let_go(number)
            return wire.encode(wire.FileRefs(0, len(status), 0, 0, 0.0), status)
        where = hold.where
        hold.where = Where(where.ids[mine], where.versions[mine], where.pages.only(mine), where.back[mine])
        hold.which, hold.index = hold.which[mine], hold.index[mine]
        status[hold.which] = ReadStatus.HIT
        pages, files = hold.where.pages, hold.files
        return wire.encode(
            wire.FileRefs(number, len(status), len(mine), len(files), max(0.0, hold.until - self.side.now())),
            status,
            hold.index.astype(np.uint8),
            pages.block,
            hold.where.back,
            pages.checks,
            np.array([file.token for file in files], np.uint64),
            np.array([file.number for file in files], np.uint64),
            np.array([folder.direct for _, folder in hold.homes], np.uint8),
        )

    def _let_go(self, number: int) -> None:
        if (hold := self._holds.pop(number, None)) is None:
            return
        for file in hold.files:
            file.readers -= 1
            self._held[file] -= 1
            if not self._held[file]:
                del self._held[file]


def _watched(future: Future[int]) -> asyncio.Future[int]:
    """For `asyncio.wait`, which may leave it behind."""
    watched = asyncio.wrap_future(future)
    watched.add_done_callback(lambda done: done.cancelled() or done.exception())
    return watched


def _open(drive: Drive, fd: int, direct: bool) -> int:
    return drive.system.open_again(fd, direct=direct)


def _close_late(future: Future[int]) -> None:
    """Nobody waits for this descriptor any more."""
    if not future.cancelled() and future.exception() is None:
        with contextlib.suppress(OSError):
            os.close(future.result())
