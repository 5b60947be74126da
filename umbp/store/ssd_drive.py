"""One disk of the SSD tier: a folder, the threads that read it, whether it works, and what it has done.

Theory of operation. A disk is in one of three states.

    UP        read and written.
    READING   a write failed (full, over quota, read-only, I/O error): read, and tried again with one batch after `RETRY_SECONDS_MIN`, then
              after twice as long, up to `RETRY_SECONDS_MAX`.
    AWAY      the folder is gone, is another one, or one read after the other fails: nothing of it is listed. It is opened anew, as at a
              start, in the same rhythm; what it still holds is listed again.

Beside that it may be *stalled*: something that was asked of it has not come back for `STALL_SECONDS`. Then nothing more is asked until it
does, so a disk that hangs holds its own threads and one batch of pages, and nothing of anybody else. Each disk has threads of its own.

Before it is opened anew its files are let go of, so that a file system that was unmounted can be checked and mounted again while the pool
runs. A folder that is to be opened anew must be on the file system of before, or hold what was in it before: an empty mount point is not
taken for the disk, and is not filled.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from umbp.store.ssd_crew import Crew
from umbp.store.ssd_folder import Folder, Found
from umbp.store.ssd_hands import Hands
from umbp.store.ssd_reads import Run
from umbp.store.ssd_system import System
from umbp.types import U8

log = logging.getLogger("umbp.store.ssd")
UP, READING, AWAY = "up", "reading", "away"
STALL_SECONDS = 5.0
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 1.0, 30.0
CLOSE_SECONDS_MAX = 2.0
FAILURES_MAX = 16  # reads in a row that fail before the disk is given up for a while
_T = TypeVar("_T")


class Drive:
    """See above. One thread, the tier's, calls; what takes long goes to the disk's own threads."""

    def __init__(
        self,
        path: str,
        size_bytes: int,
        system: System,
        *,
        segment_bytes: int = 0,
        level: int = 0,
        weight: float = 1.0,
        hands: Hands | None = None,
    ) -> None:
        """``level``, ``weight``: see `umbp.store.ssd_levels`. ``hands``: the process that serves it, with the real system only."""
        self.path = path
        self.size_bytes = size_bytes
        self.system = system
        self.level, self.weight = level, weight
        self.state = AWAY
        self.fault = "not opened yet"
        self.error: BaseException | None = None  # that came of the last try to open it
        self.space_asked_at = 0.0
        self.waiting_bytes = 0  # on their way to it
        self.read_bytes = self.written_bytes = self.freed_files = 0
        self.read_errors = self.write_errors = self.damaged_pages = 0
        self.crew = Crew(system, os.path.basename(path), hands)
        self.folder = Folder(path, size_bytes, self.crew, segment_bytes=segment_bytes)
        self._segment_bytes = segment_bytes
        self._out: dict[Future[Any], float] = {}  # what was asked and has not come back: since when
        self._failures = 0
        self._retry_at = 0.0
        self._retry_seconds = RETRY_SECONDS_MIN
        self._device: int | None = None  # known once it was opened

    def __repr__(self) -> str:
        return f"<Drive {self.path} {self.state}{', ' + self.fault if self.fault else ''}>"

    # -- asking it ---------------------------------------------------------------------------------------------------------------------

    def read(self, now: float, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Have one of the reading threads do this."""
        return self._watch(now, self.crew.submit(call, *arguments))

    def read_runs(self, now: float, runs: Sequence[Run]) -> list[Future[U8]]:
        """Read pages; the codes of each run."""
        return [self._watch(now, future) for future in self.crew.read(runs)]

    def write(self, now: float, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Have the folder's one thread do this, after all that it was given before."""
        return self._watch(now, self.folder.worker.submit(call, *arguments))

    def _watch(self, now: float, future: Future[_T]) -> Future[_T]:
        self._out[future] = now
        return future

    def out(self) -> list[Future[Any]]:
        """What was asked and has not come back, as far as is known."""
        return list(self._out)

    def stalled(self, now: float) -> bool:
        """Whether it hangs."""
        for future in [future for future in self._out if future.done()]:
            del self._out[future]
        return any(now - since > STALL_SECONDS for since in self._out.values())

    def may_read(self, now: float) -> bool:
        """Whether it makes sense to read from it."""
        return self.state != AWAY and not self.stalled(now)

    def may_write(self, now: float) -> bool:
        """Whether it makes sense to write to it: also one batch, to see whether it works again."""
        if self.state == AWAY or self.stalled(now):
            return False
        return self.state == UP or now >= self._retry_at

    # -- how it goes -------------------------------------------------------------------------------------------------------------------

    def worked(self, *, writing: bool) -> None:
        """Something succeeded."""
        if writing:
            self._retry_seconds = RETRY_SECONDS_MIN
            if self.state == READING:
                self.state, self.fault = UP, ""
                log.info("%s: can be written again", self.path)
        else:
            self._failures = 0

    def failed_write(self, now: float, error: BaseException) -> None:
        """A write failed: pause."""
        self.write_errors += 1
        if self.state != AWAY:
            self._worse(READING, f"cannot be written: {_reason(error)}", "read only, and tried again")
            self._pause(now)

    def failed_reads(self, count: int) -> bool:
        """Reads failed; True if it is to be given up for a while."""
        self.read_errors += count
        self._failures += count
        return self._failures >= FAILURES_MAX

    def lost(self, now: float, reason: str) -> None:
        """Nothing of it can be had for now."""
        self._worse(AWAY, reason, "nothing of it is listed until it is back")
        self._failures = 0
        self._pause(now)

    def may_open(self, now: float) -> bool:
        """Whether it is time to try again. Not while anything is still out: its descriptors are about to be closed."""
        self.stalled(now)
        return self.state == AWAY and now >= self._retry_at and not self._out

    def open(self) -> list[Found]:
        """Open the folder, anew if need be. Blocks. OSError, Conflict or SegmentError as `Folder.open`."""
        self.folder.close()  # first: a file system that was unmounted is in use, and cannot be repaired, for as long as its files are held
        if wait(self.crew.forgotten(), CLOSE_SECONDS_MAX).not_done:
            raise OSError(errno.EBUSY, f"process {self.crew.hands and self.crew.hands.pid} does not let go of its files")
        self.folder = Folder(self.path, self.size_bytes, self.crew, segment_bytes=self._segment_bytes)
        device = self._device_or_none()
        if self._device is not None and device != self._device and not os.path.lexists(os.path.join(self.path, "folder.meta")):
            raise OSError(2, "the file system that it was on is not mounted")
        found = self.folder.open()
        self._device = self._device_or_none()
        return found

    def opened(self) -> None:
        """It is there, and its pages are listed."""
        self.state, self.fault = UP, ""

    def close(self) -> None:
        """Let go, when all that it was asked has been done. What hangs keeps its files: their numbers must not become others'."""
        self.crew.close()
        if not wait(self._out, CLOSE_SECONDS_MAX).not_done:
            self.folder.close()

    def _worse(self, state: str, fault: str, what: str) -> None:
        """Said once, not at each further try."""
        if (state, fault) != (self.state, self.fault):
            log.warning("%s: %s; %s", self.path, fault, what)
        self.state, self.fault = state, fault

    def _pause(self, now: float) -> None:
        self._retry_at = now + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS_MAX)

    def _device_or_none(self) -> int | None:
        """The device on which the folder lies, or the nearest one above it that exists."""
        path = self.path
        while True:
            try:
                return self.system.identity(path)[0]
            except OSError:
                if path == os.path.dirname(path):
                    return None
                path = os.path.dirname(path)


def _reason(error: BaseException) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error) or type(error).__name__
