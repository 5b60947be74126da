"""A real pool process that reads from other nodes, guided by whoever answers at PEERED_MASTER: `python -m tests.peered`."""

from __future__ import annotations

import os
import sys

import uvloop

from umbp.admin.logs import set_up_logging
from umbp.config import load_pool_config
from umbp.pool.guide import HttpGuide
from umbp.pool.peers import Peers
from umbp.pool.server import PoolServer
from umbp.transport.http import HttpTransport


async def serve() -> None:
    config = load_pool_config(sys.argv[1:], {})
    set_up_logging(config.log_level, config.log_format)
    guide = HttpGuide(config.name, os.environ["PEERED_MASTER"].split(","))
    await PoolServer(config, sources=[Peers(config.name, guide, {"http": HttpTransport(config.token)})]).run()


if __name__ == "__main__":
    uvloop.run(serve())
