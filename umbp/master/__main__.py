"""`python -m umbp.master`: the master of a cluster."""

from __future__ import annotations

import logging
import os
import sys

import uvloop

from umbp.admin.logs import set_up_logging
from umbp.errors import UmbpError
from umbp.master.config import load_master_config
from umbp.master.server import MasterServer


def main() -> int:
    """0 after a clean stop, 2 when a bad option or the machine stopped the start."""
    try:
        config = load_master_config(sys.argv[1:], os.environ)
        set_up_logging(config.log_level, config.log_format)
        for warning in config.warnings:
            logging.getLogger("umbp.master").warning("%s", warning)

        async def serve() -> None:
            await MasterServer(config).run()

        uvloop.run(serve())
    except UmbpError as error:
        print(f"umbp.master: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
