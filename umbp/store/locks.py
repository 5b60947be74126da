"""Locks that say who owns a segment or a folder: `flock`, held as long as anything of the owner may still write.

An owner signs its lock with its process id. One that was killed may be gone while its hands (`umbp.store.ssd_hands`) are still in a call to
a disk: the lock is theirs until they have ended, for milliseconds where the disk answers. Who starts anew waits for that, and does not take
it for another owner: it sees that who has signed is dead.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

LIVING_SECONDS_MAX = 0.5  # others may just be looking whether it is held
DYING_SECONDS_MAX = 15.0  # processes that are killed on a machine that has no moment for them, a disk that takes its time
LOOK_SECONDS = 0.01


def lock_patiently(lock: Callable[[], int | None], path: str) -> int | None:
    """The descriptor that ``lock`` got of this file, signed; None if a living process holds it."""
    began = time.monotonic()
    while (fd := lock()) is None:
        if time.monotonic() - began > (LIVING_SECONDS_MAX if is_alive(signer(path)) else DYING_SECONDS_MAX):
            return None
        time.sleep(LOOK_SECONDS)
    with contextlib.suppress(OSError):  # a full file system: the lock is what counts
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def signer(path: str) -> int:
    """The process that has signed this lock; 0 if none can be read."""
    try:
        with open(path, "rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 0


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended; of process 0, which nobody has signed as, nothing is known: yes."""
    return not pid or stat_fields(pid)[:1] not in ([], [b"Z"], [b"X"])


def stat_fields(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on (field 3 of proc(5)); nothing if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return []
