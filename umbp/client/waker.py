"""A pipe by which one thread ends another's `select`."""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """A pipe that ends another thread's `select`. It is closed once, at the latest with its last holder, and then does nothing:
    its descriptors may be somebody else's by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read_fd = self._write_fd = -1
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)  # a full pipe wakes as well

    def wake(self) -> None:
        """Let the thread look."""
        with self._lock:
            if self._write_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write_fd, b"x")

    def clear(self) -> None:
        """It has looked."""
        with self._lock:
            if self.read_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.read_fd, 65536)

    def close(self) -> None:
        """At once; does nothing the second time."""
        with self._lock:
            fds, self.read_fd, self._write_fd = (self.read_fd, self._write_fd), -1, -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)

    def forked(self) -> None:
        """In the child of a fork: our copies of the descriptors go, whoever held the lock."""
        self._lock = threading.Lock()
        self.close()

    def __del__(self) -> None:
        self.close()
