"""A real pool process whose SSD can be held up: `python -m tests.slow_disk`.

In the folder named by SLOW_DISK a test says how many bytes may be read (`tests.gate`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from tests.gate import Gate
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
        self._gate = Gate(FOLDER)

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        size = sum(len(buffer) for buffer in buffers)
        if size > SMALL:
            self._gate.wait(f"{offset}", size)
        return super().read(fd, buffers, offset)


async def serve() -> None:
    config = load_pool_config(sys.argv[1:], {})
    set_up_logging(config.log_level, config.log_format)
    await PoolServer(config).run()


if __name__ == "__main__":
    ssd.System = Slow  # type: ignore[misc]
    uvloop.run(serve())
