"""A real Redis (or Valkey) for tests, in memory alone, on a port of its own that it keeps over restarts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

import pytest
import redis

from tests.masters import CALL_SECONDS_MAX, free_port, until
from tests.pools import TIED

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisProcess:
    """Running while the ``with`` block does; skips the test where there is no server to run."""

    def __init__(self) -> None:
        if SERVER is None:
            pytest.skip("no redis-server here: apt-get install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = tempfile.mkdtemp(prefix="umbp-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start with nothing in it, and wait until it answers."""
        assert SERVER is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self._folder]
        command = [sys.executable, "-I", "-S", "-c", TIED, SERVER, *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, lambda: "redis-server answers")

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")

    def kill(self) -> None:
        """SIGKILL: all that it had is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60.0)
            self._process = None

    def __call__(self, *command: object) -> Any:
        """One command, as `redis.Redis.execute_command` has it."""
        with redis.Redis(port=self.port, socket_timeout=CALL_SECONDS_MAX) as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]

    def signal(self, number: int) -> None:
        """Such as SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(number)
