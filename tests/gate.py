"""A gate that a test opens by bytes, in front of a disk or a sender of another process: both meet in a folder.

A file ``gate`` with a number in it lets so many bytes more through, counted from when it was written; then all wait until the file is
gone. ``read`` tells, in lines, what went through: whose, and bytes.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path


class Gate:
    """In the process that is held up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._gate = ""
        self._left = 0

    def wait(self, whose: str, size: int) -> None:
        """Until so many bytes may go through."""
        while not self._may(size):
            time.sleep(0.001)
        with self._lock, (self._folder / "read").open("a") as log:
            log.write(f"{whose} {size}\n")

    def _may(self, size: int) -> bool:
        with self._lock:
            try:
                gate = (self._folder / "gate").read_text()
            except FileNotFoundError:
                return True
            if gate != self._gate:
                self._gate, self._left = gate, int(gate.split()[0])
            if self._left < size:
                return False
            self._left -= size
            return True


class Keeper:
    """In the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._turn = 0

    def let(self, size_bytes: int) -> None:
        """So many bytes more, and no further."""
        self._turn += 1
        (self.folder / "gate.new").write_text(f"{size_bytes} {self._turn}")
        (self.folder / "gate.new").rename(self.folder / "gate")

    def free(self) -> None:
        (self.folder / "gate").unlink(missing_ok=True)

    def read(self) -> int:
        """Bytes that went through."""
        log = self.folder / "read"
        return sum(int(line.split()[1]) for line in log.read_text().splitlines()) if log.exists() else 0
