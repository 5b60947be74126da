"""A real pool process that reads from other nodes, guided by whoever answers at PEERED_MASTER: `python -m tests.peered`."""

from __future__ import annotations

import os
import sys

import uvloop

from umbp.admin.logs import set_up_logging
from umbp.config import load_pool_config
from umbp.grammar import parse_address
from umbp.pool.guide import PortGuide
from umbp.pool.masters import Remote
from umbp.pool.peers import Peers
from umbp.pool.server import PoolServer
from umbp.transport.http import HttpTransport


async def serve() -> None:
    config = load_pool_config(sys.argv[1:], {})
    set_up_logging(config.log_level, config.log_format)
    master = Remote(parse_address(os.environ["PEERED_MASTER"]), config.token)
    guide = PortGuide(config.name, lambda: master)
    await PoolServer(config, sources=[Peers(config.name, guide, {"http": HttpTransport(config.token)})]).run()
    await master.close()


if __name__ == "__main__":
    uvloop.run(serve())
