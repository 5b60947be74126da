"""Logs of a server: lines of text or of JSON on standard error, without what strangers could fill them with."""

from __future__ import annotations

import json
import logging
import sys
import time

from aiohttp.http_exceptions import HttpProcessingError


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


def set_up_logging(level: str, form: str) -> None:
    """Logs go to standard error; standard output is for the ready line."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(JsonLines() if form == "json" else formatter)
    logging.getLogger("aiohttp.server").addFilter(NoStrangers())
    logging.basicConfig(level=level.upper(), handlers=[handler])
