"""One connection to a peer, with plain blocking calls that keep a deadline."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections import deque

from umbp.grammar import Address

LIMIT_SECONDS = 0.02  # a wait may be longer than its deadline allows by this
CONNECT_SECONDS_MAX = 0.5
VECTORS_MAX = 512
HEAD_READ_BYTES = 4096  # of an answer's head at a time: what comes of the pages with it is copied once more


class Line:
    """One connection, for one thread at a time; `cut` is for others."""

    def __init__(self, address: Address, deadline: float) -> None:
        seconds = min(CONNECT_SECONDS_MAX, deadline - time.monotonic())
        if seconds <= 0:
            raise TimeoutError("no time is left to connect")
        self._socket = socket.create_connection((address.host, address.port), seconds)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.owed = 0  # bytes of the last answer's end that were not waited for
        self._limited = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # seconds that its waits may take

    @property
    def broken(self) -> bool:
        """Whether the other end is gone, or has sent what nobody asked for."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLRDHUP if self.owed else select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def has_some(self) -> bool:
        """Whether something can be received without waiting."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    @classmethod
    def of(cls, connection: socket.socket) -> Line:
        """One that somebody else has made."""
        line = cls.__new__(cls)
        line._socket, line.owed = connection, 0
        line.forget_limits()
        return line

    def fileno(self) -> int:
        """For who is handed it."""
        return self._socket.fileno()

    def forget_limits(self) -> None:
        """Another process may have set others."""
        self._limited = {socket.SO_RCVTIMEO: float("inf"), socket.SO_SNDTIMEO: float("inf")}

    def post(self, data: bytes) -> bool:
        """Send all of it at once; False where that would have to wait, or the other end is gone. What is owed comes before the answer."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT) == len(data)
        except OSError:
            return False

    def send(self, data: bytes, deadline: float) -> None:
        """All of it."""
        self._limit(socket.SO_SNDTIMEO, deadline)
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise TimeoutError("the peer does not read its orders") from None

    def some(self, deadline: float) -> bytes:
        """What is there of an answer's head, at least a byte."""
        self._limit(socket.SO_RCVTIMEO, deadline)
        try:
            data = self._socket.recv(HEAD_READ_BYTES)
        except BlockingIOError:
            raise TimeoutError("the peer does not answer in time") from None
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        return data

    def fill(self, views: deque[memoryview], deadline: float) -> None:
        """Receive into these, one after the other, all of them."""
        while views:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                got = self._socket.recvmsg_into([views[at] for at in range(min(len(views), VECTORS_MAX))], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                raise TimeoutError("the peer did not send all of it in time") from None
            if not got:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
            take(views, got)

    def rest(self, deadline: float) -> bytearray:
        """What is still owed of the last answer."""
        data, self.owed = bytearray(self.owed), 0
        self.fill(deque([memoryview(data)] if data else []), deadline)
        return data

    def cut(self) -> None:
        """From another thread: what waits here ends with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """At once."""
        self._socket.close()

    def _limit(self, option: int, deadline: float) -> None:
        """The kernel counts from the start of each wait, so the limit is set anew when much of it has passed, or for another deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the order's time is over")
        if abs(self._limited[option] - left) > LIMIT_SECONDS:
            self._limited[option] = left
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(max(1, int(left * 1e6)), 1_000_000)))


def take(views: deque[memoryview], count: int) -> None:
    """Forget the first ``count`` bytes of these."""
    while count:
        if count < len(views[0]):
            views[0] = views[0][count:]
            return
        count -= len(views.popleft())


def pour(data: bytes, views: deque[memoryview]) -> bytes:
    """Copy to these what has come already; what is left of it."""
    while data and views:
        count = min(len(data), len(views[0]))
        views[0][:count] = data[:count]
        take(views, count)
        data = data[count:]
    return data
