"""Descriptors that the pool has handed to this client: of files of its SSD tier, to read only.

Theory of operation. They come by the client's connection for descriptors (`umbp.client.handover`). A file is known by its token, which
means something under one bond only. An answer that names a token was written after the descriptor was handed over, so `take` waits for
nothing.

Bounded: `FILES_MAX` descriptors that nobody uses at the moment, the longest unused go first; and none is kept for longer than
`IDLE_SECONDS` unused, so that a file system that was unmounted is let go of by this process too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass

from umbp import wire
from umbp.client.handover import Handover

IDLE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class File:
    """One of them. ``users``: whoever reads from it."""

    token: int
    fd: int
    used_at: float
    users: int = 0


class Files:
    """Those of one client. Any thread calls."""

    def __init__(self, handover: Handover) -> None:
        self._lock = threading.Lock()
        self._bond: object = None
        self._handover = handover
        self._files: dict[int, File] = {}

    def __repr__(self) -> str:
        return f"<Files {len(self._files)}>"

    def known(self, bond: object) -> list[int]:
        """The tokens of what is here."""
        with self._lock:
            return list(self._files) if self._bond is bond else []

    def take(self, bond: object, tokens: list[int]) -> list[File] | None:
        """These files, to be given back by `give_back`; None if one is not here."""
        with self._lock:
            if self._bond is not bond:
                self._forget(bond)
            for token, fd in self._handover.take_all(bond, wire.SSD_FILE):
                if token in self._files:
                    os.close(fd)
                else:
                    self._files[token] = File(token, fd, time.monotonic())
            found = [self._files.get(token) for token in tokens]
            taken = [file for file in found if file is not None]
            if len(taken) < len(tokens):
                return None
            for file in taken:
                file.users += 1
            return taken

    def give_back(self, files: list[File]) -> None:
        """Nothing is read from these any more, for one `take`."""
        with self._lock:
            now = time.monotonic()
            for file in files:
                file.users -= 1
                file.used_at = now
                if not file.users and self._files.get(file.token) is not file:  # forgotten meanwhile
                    os.close(file.fd)
            self._shed(now)

    def shed(self) -> None:
        """Close what has not been used for a while."""
        with self._lock:
            self._shed(time.monotonic())

    def idle(self, now: float) -> bool:
        """Whether there is something to `shed`."""
        with self._lock:
            return any(not file.users and now - file.used_at > IDLE_SECONDS for file in self._files.values())

    @property
    def any(self) -> bool:
        """Whether there are descriptors to be closed some time."""
        return bool(self._files)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._forget(None)

    def forked(self) -> None:
        """In the child of a fork: what reads is the parent's, and so is its lock; the descriptors here are copies."""
        self._lock, files = threading.Lock(), list(self._files.values())
        self._files, self._bond = {}, None
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file.fd)

    def _forget(self, bond: object) -> None:
        files, self._files, self._bond = self._files, {}, bond
        for file in files.values():
            if not file.users:  # else by who uses it
                os.close(file.fd)

    def _shed(self, now: float) -> None:
        idle = sorted((file for file in self._files.values() if not file.users), key=lambda file: file.used_at)
        for at, file in enumerate(idle):
            if now - file.used_at > IDLE_SECONDS or at < len(self._files) - wire.FILES_MAX:
                del self._files[file.token]
                os.close(file.fd)
