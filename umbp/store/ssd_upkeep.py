"""What an SSD tier needs from time to time, disk by disk: a look whether it is there, another try where it was not, cleaning.

Theory of operation. Each call is about one disk, so that one that hangs keeps nobody but itself waiting. `watch_steps` is for every second
or so. A disk that was away is opened as at a start: what it holds is listed again.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

import numpy as np

from umbp.errors import UmbpError
from umbp.store.ssd import SsdTier
from umbp.store.ssd_adoption import adopt_steps
from umbp.store.ssd_drive import AWAY, Drive
from umbp.store.ssd_folder import Found, note
from umbp.store.ssd_system import Steps

log = logging.getLogger("umbp.store.ssd")
SPACE_SECONDS = 30.0  # after this a file system that had no room for another file is asked again


def watch_steps(tier: SsdTier, now: float, drive: Drive) -> Steps[None]:
    """Look after one disk. Ends at once if it hangs."""
    if drive.state == AWAY:
        if drive.may_open(now):
            yield from open_steps(tier, now, drive)
        return
    if drive.stalled(now):
        return
    if drive.folder.refused_space and now - drive.space_asked_at > SPACE_SECONDS:
        drive.space_asked_at, drive.folder.refused_space = now, False
    if drive.folder.removals.behind and drive.may_write(now):
        none = np.empty(0, np.uint64)
        drive.write(now, note, drive.folder, none, none, False)
    future = drive.read(now, drive.folder.is_there)
    yield [future]
    error = future.exception()
    if error is not None:
        tier.ledger.lose(now, drive, f"its folder is gone ({error})")
    elif not future.result():
        tier.ledger.lose(now, drive, "another folder is in its place")


def open_steps(tier: SsdTier, now: float, *drives: Drive) -> Steps[None]:
    """Open disks and list what they hold. The error that kept one from being opened is in its ``error``."""
    opening = {drive: drive.read(now, drive.open) for drive in drives}
    yield list(opening.values())
    yield from opened_steps(tier, now, opening)


def opened_steps(tier: SsdTier, now: float, opening: dict[Drive, Future[list[Found]]]) -> Steps[None]:
    """List what disks hold that have been opened, or have not let themselves be. All of a start together: copies are told apart then."""
    good: dict[Drive, list[Found]] = {}
    for drive, future in opening.items():
        drive.error = future.exception()
        if drive.error is None:
            good[drive] = future.result()
        elif isinstance(drive.error, OSError | UmbpError):
            drive.lost(now, str(drive.error))
        else:
            raise drive.error
    if good:
        count = yield from adopt_steps(tier, now, good)
        for drive in good:
            drive.opened()
            for line in drive.folder.said:
                log.warning("%s", line)
        torn = sum(each.contents.torn for found in good.values() for each in found)
        log.info("%s: %d pages found, %d torn", ", ".join(drive.path for drive in good), count, torn)
