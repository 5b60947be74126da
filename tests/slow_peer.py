"""A real pool process whose orders from other pools can be held up before they are granted: `python -m tests.slow_peer`.

In the folder named by SLOW_PEER a test says how many bytes may be granted (`tests.gate`). As a reader it gives other pools the time that
tests take on a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from tests.gate import Gate
from umbp.admin.logs import set_up_logging
from umbp.config import load_pool_config
from umbp.pool import server, staged
from umbp.transport.base import Grant, Order
from umbp.transport.sending import PageServer
from umbp.types import U8

gate = Gate(Path(os.environ["SLOW_PEER"]))


class Slow(PageServer):
    """The real thing behind a gate."""

    async def grant(self, order: Order, keys: U8, deadline: float) -> Grant:
        await asyncio.to_thread(gate.wait, f"{order.n}", order.n * (sum(stop - start for start, stop in order.spans) or order.object_bytes))
        return await super().grant(order, keys, deadline)


async def serve() -> None:
    config = load_pool_config(sys.argv[1:], {})
    set_up_logging(config.log_level, config.log_format)
    await server.PoolServer(config).run()


if __name__ == "__main__":
    server.PageServer = Slow  # type: ignore[misc]
    staged.READ_SECONDS_MAX = 30.0
    uvloop.run(serve())
