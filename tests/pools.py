"""A real pool process for tests: started, waited for, killed, restarted, and nothing of it left afterwards.

    with PoolProcess() as pool:                       # 64 MiB; more options as flags: PoolProcess("--eviction", "sieve", dram="8MiB")
        client = umbp.connect(pool.socket)
        pool.kill()                                   # SIGKILL; the segment stays
        pool.restart()                                # the same name, socket and memory; kills first where it still runs

Each one has a name, a socket and a folder in shared memory of its own, so any number can run side by side. What it logged is in
``pool.log()``, and in the message of the error where it does not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.hatchery import Hatched, hatchery, special

ROOT = Path(__file__).resolve().parents[1]
FORKED = False  # from one process that has imported all (`tests.hatchery`): set by `conftest`. What is measured starts as users start it
READY = "umbp.pool ready "
START_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 30.0
# Runs what follows, to be killed by the kernel when the thread that started it is gone: a test run that is killed leaves no pool behind.
TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


# Nobody here speaks TLS, and a tenth of the start of a process is what the certificates of this machine take to be read.
NO_TLS = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}


class PoolProcess:
    """One pool, started when the ``with`` block begins. ``ready`` is what its ready line says."""

    said = READY

    def __init__(self, *options: str, dram: str = "64MiB", module: str = "umbp.pool") -> None:
        """``module``: what is run by ``python -m`` instead of the pool, and takes the same options."""
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.folder = Path(tempfile.mkdtemp(prefix="umbp-"))  # short: the path of a socket has 107 bytes at most
        self.shm_dir = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))
        self.socket = str(self.folder / "pool.sock")
        self.ready: dict[str, Any] = {}
        self._log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | Hatched | None = None
        places = ["--name", self.name, "--socket", self.socket, "--shm-dir", str(self.shm_dir), "--http", "127.0.0.1:0", "--dram", dram]
        places += ["--neighbours", "off"]  # pages of other pools come by the network, as from other machines, unless a test is about this
        self.command = [sys.executable, "-m", module, *places, *options]

    def __enter__(self) -> PoolProcess:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            self.remove()

    def __repr__(self) -> str:
        return f"<PoolProcess {self.name} {'running' if self.alive else 'stopped'} at {self.socket}>"

    # -- what it is --------------------------------------------------------------------------------------------------------------------

    @property
    def http(self) -> str:
        """Base URL of its TCP listener, such as ``http://127.0.0.1:40123``."""
        address = str(self.ready["http"])
        return address if "://" in address else f"http://{address}"

    @property
    def pid(self) -> int:
        """Process id of the running or the last process."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def segment(self) -> Path:
        """Its file in shared memory."""
        (path,) = self.shm_dir.glob("umbp.*.segment")
        return path

    def log(self) -> str:
        """What all its lives have logged."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    # -- what is done to it ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start and wait for the ready line."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start, and do not wait: `await_ready` does."""
        assert not self.alive
        environ = {name: value for name, value in os.environ.items() if not name.startswith("UMBP_")} | NO_TLS
        source = hatchery(special(environ)) if FORKED else None
        with self._log.open("ab") as log:
            if source is not None and source.can(self.command, environ):
                self._process = source.start(self.command, environ, ROOT, log)
            else:
                tied = [sys.executable, "-I", "-S", "-c", TIED, *self.command]
                self._process = subprocess.Popen(tied, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environ)

    def await_ready(self) -> None:
        """Until it is."""
        try:
            self.ready = json.loads(self._first_line().removeprefix(self.said))
        except BaseException:
            self.kill()
            raise

    def restart(self, *options: str) -> None:
        """Start again, after a kill or instead of one. ``options`` come on top from now on; the last flag wins."""
        self.kill()
        self.command += options
        self.start()

    def signal(self, number: int) -> None:
        """Such as SIGSTOP and SIGCONT."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Its segment and its socket's file stay."""
        if self.alive:
            self.signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> int:
        """SIGTERM, and wait; its exit status (that of the kill where it had been killed)."""
        if self.alive:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        process = self._process
        if process is None:
            return 0
        try:
            return process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS_MAX)
            raise AssertionError(f"{self!r} did not stop within {STOP_SECONDS_MAX} s:\n{self.log()}") from None
        finally:
            assert process.stdout is not None
            process.stdout.close()

    def _first_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, said = time.monotonic() + START_SECONDS_MAX, b""
        out = self._process.stdout.fileno()
        while not said.endswith(b"\n"):
            readable, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(out, 4096) if readable else b""
            if not part:
                why = "ended" if readable else f"was not ready within {START_SECONDS_MAX} s"
                raise AssertionError(f"the pool {why}:\n{self.log()}")
            said += part
        line = said.decode()
        assert line.startswith(self.said), line
        return line

    def remove(self) -> None:
        """Its files; it is stopped."""
        for folder in (self.folder, self.shm_dir):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def together(*processes: PoolProcess) -> Iterator[None]:
    """All of these, started at the same time: starting one keeps one processor busy."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.remove)
            stack.callback(process.stop)
            process.launch()
        for process in processes:
            process.await_ready()
        yield
