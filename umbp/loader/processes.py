"""Whether another process is gone for good: by a descriptor of it where it can be seen, else by the lock of its mapping."""

from __future__ import annotations

import contextlib
import os
import select
import time

from umbp.store.segment import held, process_started

# The lock of a mapping ends when its memory is torn down, shortly before the process's other descriptors, the GPU's among them, are closed.
SETTLE_SECONDS = 1.0


class Watch:
    """One process. ``holder``: of its mapping of the segment at ``path``, for one that lives in another pid namespace."""

    def __init__(self, pid: int, since: int, path: str, holder: int) -> None:
        self._path = path
        self._holder = holder
        self._let_go_at = 0.0
        self._pidfd = -1
        self._gone = False
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)
        if self._pidfd >= 0 and process_started(pid) != since:
            os.close(self._pidfd)  # another process of this namespace
            self._pidfd = -1

    def gone(self) -> bool:
        """Whether it will never do anything any more."""
        if not self._gone:
            self._gone = self._exited() if self._pidfd >= 0 else self._unmapped()
        return self._gone

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._gone = True

    def _exited(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _unmapped(self) -> bool:
        if held(self._path, self._holder):
            self._let_go_at = 0.0
            return False
        self._let_go_at = self._let_go_at or time.monotonic()
        return time.monotonic() - self._let_go_at > SETTLE_SECONDS
