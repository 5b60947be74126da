"""`python -m umbp.pool`: the pool of one node."""

from __future__ import annotations

import logging
import os
import sys

import uvloop

from umbp.admin.logs import set_up_logging
from umbp.config import load_pool_config
from umbp.errors import UmbpError
from umbp.pool.server import PoolServer
from umbp.store.ssd_hands import start

# A thread that checks what it read, or makes checksums of small pages, holds the interpreter lock for as long as this while the loop waits
# for it. The default, 5 ms, would be what a client's short call takes beside a busy disk.
SWITCH_SECONDS = 0.0005


def main() -> int:
    """0 after a clean stop, 2 when a bad option or the machine stopped the start."""
    try:
        config = load_pool_config(sys.argv[1:], os.environ)
        set_up_logging(config.log_level, config.log_format)
        for warning in config.warnings:
            logging.getLogger("umbp.pool").warning("%s", warning)
        sys.setswitchinterval(SWITCH_SECONDS)

        hands = start(len(config.ssd) if config.ssd_policy != "off" else 0)

        async def serve() -> None:
            await PoolServer(config, hands=hands).run()

        try:
            uvloop.run(serve())
        finally:
            for each in hands:
                each.close()
    except UmbpError as error:
        print(f"umbp.pool: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
