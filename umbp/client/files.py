"""Descriptors that the pool has handed to this client: of files of its SSD tier, to read only.

Theory of operation. They come by a connection of their own (`umbp.pool.handover`), made when the first one is wanted; where it cannot be
made, nothing is asked for under this bond any more. A file is known by its token, which means something under one bond only. An answer that
names a token was written after the descriptor was handed over, so `take` waits for nothing.

Bounded: `FILES_MAX` descriptors that nobody uses at the moment, the longest unused go first; and none is kept for longer than
`IDLE_SECONDS` unused, so that a file system that was unmounted is let go of by this process too.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass

from umbp import wire
from umbp.errors import Unavailable

CONNECT_SECONDS_MAX = 2.0
IDLE_SECONDS = 5.0
FD_BYTES = socket.CMSG_LEN(array.array("i").itemsize)


@dataclass(slots=True, eq=False)
class File:
    """One of them. ``users``: whoever reads from it."""

    token: int
    fd: int
    used_at: float
    users: int = 0


class Files:
    """Those of one client. Any thread calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._bond: object = None
        self._handover: socket.socket | None = None
        self._files: dict[int, File] = {}
        self._refused = False

    def __repr__(self) -> str:
        return f"<Files {len(self._files)}{', refused' if self._refused else ''}>"

    def open(self, bond: object, path: str, secret: str) -> bool:
        """Have the connection of this bond; whether there is one. Takes a moment the first time."""
        with self._opening:
            with self._lock:
                if self._bond is bond:
                    return self._handover is not None and not self._refused
            self._forget(bond)
            try:
                handover = _connect(path, bytes.fromhex(secret))
            except (OSError, Unavailable):
                handover = None
            with self._lock:
                self._handover, self._refused = handover, handover is None
            return handover is not None

    def known(self, bond: object) -> list[int]:
        """The tokens of what is here."""
        with self._lock:
            return list(self._files) if self._bond is bond else []

    def take(self, bond: object, tokens: list[int]) -> list[File] | None:
        """These files, to be given back by `give_back`; None if one is not here."""
        with self._lock:
            if self._bond is not bond or self._handover is None:
                return None
            self._receive(self._handover)
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

    @property
    def any(self) -> bool:
        """Whether there are descriptors to be closed some time."""
        return bool(self._files)

    def close(self) -> None:
        """Let go of everything."""
        self._forget(None)

    def forked(self) -> None:
        """In the child of a fork: what reads is the parent's, and so are its locks; the descriptors here are copies."""
        handover, files = self._handover, list(self._files.values())
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._handover, self._files, self._bond, self._refused = None, {}, None, False
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file.fd)
        if handover is not None:
            handover.close()

    def _forget(self, bond: object) -> None:
        with self._lock:
            handover, files = self._handover, self._files
            self._handover, self._files, self._bond, self._refused = None, {}, bond, False
            for file in files.values():
                if not file.users:  # else by who uses it
                    os.close(file.fd)
            if handover is not None:
                handover.close()

    def _receive(self, handover: socket.socket) -> None:
        """All that was handed over by now."""
        while True:
            try:
                tag, beside, _, _ = handover.recvmsg(wire.TAG.size, FD_BYTES, socket.MSG_CMSG_CLOEXEC)
            except OSError:  # nothing more, or nothing ever
                return
            if len(tag) < wire.TAG.size or len(beside) != 1:  # the pool has closed it, or no descriptor is to be had in this process
                self._refused = True
                return
            kind, token = wire.TAG.unpack(tag)
            (fd,) = array.array("i", beside[0][2])
            if kind == wire.SSD_FILE and token not in self._files:
                self._files[token] = File(token, fd, time.monotonic())
            else:
                os.close(fd)

    def _shed(self, now: float) -> None:
        idle = sorted((file for file in self._files.values() if not file.users), key=lambda file: file.used_at)
        for at, file in enumerate(idle):
            if now - file.used_at > IDLE_SECONDS or at < len(self._files) - wire.FILES_MAX:
                del self._files[file.token]
                os.close(file.fd)


def _connect(path: str, secret: bytes) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(CONNECT_SECONDS_MAX)
        made.connect(path)
        made.sendall(wire.HANDOVER_REQUEST + secret)
        answer = b""
        while len(answer) < len(wire.HANDOVER_REPLY):
            if not (more := made.recv(len(wire.HANDOVER_REPLY) - len(answer))):
                break
            answer += more
        if answer != wire.HANDOVER_REPLY:
            raise Unavailable("the pool hands no descriptors to this client")
        made.setblocking(False)
        return made
    except BaseException:
        made.close()
        raise
