"""A real pool process whose SSD can be held up: `python -m tests.slow_disk`.

In the folder named by SLOW_DISK a test says what it wants: a file ``gate`` with a number in it lets so many bytes more be read from the
disk, counted from when it was written; then reads wait until the file is gone. ``read`` tells, in lines, what was read: offset and bytes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from umbp.admin.logs import set_up_logging
from umbp.config import load_pool_config
from umbp.pool import ssd
from umbp.pool.server import PoolServer
from umbp.store.ssd_system import System

FOLDER = Path(os.environ["SLOW_DISK"])
SMALL = 8192  # heads of records are no bodies: they always pass


class Slow(System):
    """The real thing behind a gate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate = ""
        self._left = 0

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        size = sum(len(buffer) for buffer in buffers)
        if size > SMALL:
            while not self._may(size):
                time.sleep(0.001)
            with self._lock, (FOLDER / "read").open("a") as log:
                log.write(f"{offset} {size}\n")
        return super().read(fd, buffers, offset)

    def _may(self, size: int) -> bool:
        with self._lock:
            try:
                gate = (FOLDER / "gate").read_text()
            except FileNotFoundError:
                return True
            if gate != self._gate:
                self._gate, self._left = gate, int(gate.split()[0])
            if self._left < size:
                return False
            self._left -= size
            return True


async def serve() -> None:
    config = load_pool_config(sys.argv[1:], {})
    set_up_logging(config.log_level, config.log_format)
    await PoolServer(config).run()


if __name__ == "__main__":
    ssd.System = Slow  # type: ignore[misc]
    uvloop.run(serve())
