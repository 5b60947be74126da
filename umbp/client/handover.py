"""Descriptors that the pool hands to this client: the other end of `umbp.pool.handover`.

Theory of operation. They come by a connection of their own, made when the first one is wanted; where it cannot be made, there are none for
a while, and where the pool closes it none under this bond (`umbp.client.link`). What an answer of the pool speaks of was handed over before
that answer, so `take` waits for nothing. Several threads may ask: who reads another's descriptor keeps it for him. Of those that nobody
asks for, because their answer was lost, the first go when there are too many.
"""

from __future__ import annotations

import array
import math
import os
import socket
import threading
import time

from umbp import wire
from umbp.errors import Unavailable

CONNECT_SECONDS_MAX, RETRY_SECONDS = 5.0, 10.0
KEPT_MAX = 128
FD_BYTES = socket.CMSG_LEN(array.array("i").itemsize)


class Handover:
    """Of one client. Any thread calls."""

    def __init__(self) -> None:
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._bond: object = None
        self._socket: socket.socket | None = None
        self._retry_at = math.inf  # where the pool did not answer; what it has closed is not made again
        self._kept: dict[tuple[int, int], int] = {}

    def __repr__(self) -> str:
        return f"<Handover {'open' if self._socket else 'closed'}, {len(self._kept)} descriptors>"

    def is_open(self, bond: object) -> bool | None:
        """Whether there is the connection of this bond; None: that was not tried yet, or not for a while."""
        with self._lock:
            known = self._bond is bond and (self._socket is not None or time.monotonic() < self._retry_at)
            return self._socket is not None if known else None

    def open(self, bond: object, path: str, secret: str, until: float = math.inf) -> bool:
        """Have the connection of this bond; whether there is one by then (`time.monotonic`). Takes a moment the first time."""
        if not self._opening.acquire(timeout=min(CONNECT_SECONDS_MAX, max(0.0, until - time.monotonic()))):
            return False
        try:
            if (known := self.is_open(bond)) is not None:
                return known
            self._forget(bond)
            seconds = until - time.monotonic()
            try:
                made = _connect(path, bytes.fromhex(secret), min(CONNECT_SECONDS_MAX, max(0.001, seconds)))
            except (OSError, Unavailable):  # who was in a hurry says nothing of the pool
                self._retry_at = time.monotonic() + (RETRY_SECONDS if seconds >= CONNECT_SECONDS_MAX else 0.0)
                return False
            with self._lock:
                self._socket = made
            return True
        finally:
            self._opening.release()

    def take(self, bond: object, kind: int, number: int) -> int | None:
        """The descriptor of this kind and number, the caller's from now on; None if it is not here."""
        with self._lock:
            if self._bond is not bond:
                return None
            while (wanted := self._kept.pop((kind, number), None)) is None:
                if not self._receive():
                    return None
            return wanted

    def take_all(self, bond: object, kind: int) -> list[tuple[int, int]]:
        """All descriptors of this kind that are here: number and descriptor, the caller's from now on."""
        with self._lock:
            while self._bond is bond and self._receive():
                pass
            mine = [tag for tag in self._kept if tag[0] == kind] if self._bond is bond else []
            return [(tag[1], self._kept.pop(tag)) for tag in mine]

    def close(self) -> None:
        """Let go of everything."""
        self._forget(None)

    def forked(self) -> None:
        """In the child of a fork: the connection is the parent's, and the locks may be held for ever."""
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._forget(None)

    def _forget(self, bond: object) -> None:
        with self._lock:
            made, kept = self._socket, self._kept
            self._socket, self._kept, self._bond, self._retry_at = None, {}, bond, math.inf
        for fd in kept.values():
            os.close(fd)
        if made is not None:
            made.close()

    def _receive(self) -> bool:
        """One more, if it is there. A connection that the pool has closed is not made again under this bond."""
        if self._socket is None:
            return False
        try:
            tag, beside, _, _ = self._socket.recvmsg(wire.TAG.size, FD_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            tag, beside = b"", []
        if len(tag) < wire.TAG.size or len(beside) != 1:  # closed, or no descriptor is to be had in this process
            self._socket.close()
            self._socket = None
            return False
        (fd,) = array.array("i", beside[0][2])
        self._kept[wire.TAG.unpack(tag)] = fd
        if len(self._kept) > KEPT_MAX:
            os.close(self._kept.pop(next(iter(self._kept))))
        return True


def _connect(path: str, secret: bytes, seconds: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(seconds)
        made.connect(path)
        made.sendall(wire.HANDOVER_REQUEST + secret)
        if made.recv(len(wire.HANDOVER_REPLY), socket.MSG_WAITALL) != wire.HANDOVER_REPLY:
            raise Unavailable(f"the pool on {path} hands no descriptors over to this client")
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made
