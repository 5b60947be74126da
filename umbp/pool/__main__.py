"""`python -m umbp.pool`: the pool of one node."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

import uvloop
from aiohttp.http_exceptions import HttpProcessingError

from umbp.config import PoolConfig, load_pool_config
from umbp.errors import UmbpError
from umbp.pool.server import PoolServer


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, text and, where there is one, the traceback."""
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class NoStrangers(logging.Filter):
    """Drops what aiohttp says of connections that are not HTTP: anybody could fill the log with its tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for those."""
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def set_up_logging(config: PoolConfig) -> None:
    """Logs go to standard error; standard output is for the ready line."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(JsonLines() if config.log_format == "json" else formatter)
    logging.getLogger("aiohttp.server").addFilter(NoStrangers())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])


def main() -> int:
    """0 after a clean stop, 2 when a bad option or the machine stopped the start."""
    try:
        config = load_pool_config(sys.argv[1:], os.environ)
        set_up_logging(config)
        for warning in config.warnings:
            logging.getLogger("umbp.pool").warning("%s", warning)

        async def serve() -> None:
            await PoolServer(config).run()

        uvloop.run(serve())
    except UmbpError as error:
        print(f"umbp.pool: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
