"""A process from which pools and masters are forked, so that what they import is imported once a test run and not some hundred times.

Theory of operation. Half a second of a processor goes into the imports of a pool, and all of that is the same each time. So one process
imports them, has no threads, and does nothing else but fork at request. A child is a process as any other: its own descriptors,
environment, arguments and folder, its module run as by ``python -m``, its own end. It is killed by the kernel when the hatchery is gone,
and that when the test run is. Where a process must not be like the hatchery (another environment for Python or the C library, other
limits, another command) it is started anew: `Hatchery.can`.

    source = hatchery(special(environment))
    if source.can(command, environment):
        process = source.start(command, environment, folder, stderr)  # as `subprocess.Popen`, as far as is needed
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from umbp.process import end_with

ROOT = Path(__file__).resolve().parents[1]
SPECIAL = ("PYTHON", "LD_", "MALLOC", "GLIBC", "SSL_", "OMP_", "OPENBLAS")  # variables that count from the start of a process
REQUEST_BYTES_MAX = 256 << 10
WORD = struct.Struct("=i")
START_SECONDS_MAX = 120.0


class Hatched:
    """One child: what `subprocess.Popen` has of a process whose output is read."""

    def __init__(self, pid: int, said: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout, self.returncode = pid, stdout, None
        self._said, self._lock = said, threading.Lock()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # its status is on the way
            self._fd = -1

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, when it has ended."""
        if (status := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None and self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._said], [], [], seconds)[0]:
                (status,) = WORD.unpack(os.read(self._said, WORD.size))
                self.returncode = os.waitstatus_to_exitcode(status)
                for fd in (self._said, self._fd):
                    if fd >= 0:
                        os.close(fd)
            return self.returncode


class Hatchery:
    """The process, and this end of the connection to it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._same = _conditions(environment)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.hatchery", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        atexit.register(self.close)

    def can(self, command: list[str], environment: dict[str, str]) -> bool:
        """Whether a process of this command would be the same if it were forked."""
        return command[:2] == [sys.executable, "-m"] and _conditions(environment) == self._same and self._process.poll() is None

    def start(self, command: list[str], environment: dict[str, str], folder: Path, stderr: IO[bytes]) -> Hatched:
        """Run a module (``command[2]``) with its arguments."""
        read, write = os.pipe()
        said, say = os.pipe()
        request = json.dumps([command[2:], environment, str(folder)]).encode()
        assert len(request) <= REQUEST_BYTES_MAX
        try:
            with self._lock:
                socket.send_fds(self._socket, [request], [write, stderr.fileno(), say])
        finally:
            os.close(write)
            os.close(say)
        assert select.select([said], [], [], START_SECONDS_MAX)[0], "the hatchery does not answer"
        (pid,) = WORD.unpack(os.read(said, WORD.size))
        return Hatched(pid, said, os.fdopen(read, "rb", buffering=0))

    def close(self) -> None:
        """End it, and what came of it."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait()


@functools.cache
def hatchery(environment: tuple[tuple[str, str], ...]) -> Hatchery:
    """That of this test run, for processes of this environment."""
    return Hatchery(dict(environment))


def special(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that count from the start of a process."""
    return tuple(sorted((name, value) for name, value in environment.items() if name.startswith(SPECIAL)))


def _conditions(environment: dict[str, str]) -> Any:
    """What a forked process has of the hatchery and cannot be told."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return special(environment), [resource.getrlimit(limit) for limit in limits], os.sched_getaffinity(0)


# -- the process itself ------------------------------------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> list[str]:
    """Fork at request until the other end is closed. In a child: its module and arguments; everything else is as it should be."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    children: dict[int, tuple[int, int]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd != requests.fileno():
                poll.unregister(fd)
                pid, say = children.pop(fd)
                _, status = os.waitpid(pid, 0)
                os.close(fd)
                with contextlib.suppress(BrokenPipeError):
                    os.write(say, WORD.pack(status))
                os.close(say)
                continue
            data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 3)
            if not data:
                os._exit(0)
            arguments, environment, folder = json.loads(data)
            write, stderr, say = fds
            here = os.getpid()
            if (pid := os.fork()) == 0:
                _become(here, write, stderr, environment, folder)
                return arguments
            os.close(write)
            os.close(stderr)
            child = os.pidfd_open(pid)
            children[child] = pid, say
            poll.register(child, select.POLLIN)
            os.write(say, WORD.pack(pid))


def _become(parent: int, stdout: int, stderr: int, environment: dict[str, str], folder: str) -> None:
    end_with(parent, signal.SIGKILL)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def main() -> None:
    """``tests.hatchery DESCRIPTOR PARENT``."""
    requests, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    end_with(parent, signal.SIGKILL)
    import umbp.master.server
    import umbp.pool.server  # noqa: F401 - what the others import

    gc.collect()
    gc.freeze()
    module, *arguments = serve(requests)
    requests.detach()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
