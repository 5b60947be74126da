"""A client's connection to its pool for plain callers: one request, then its reply."""

from __future__ import annotations

import select
import socket
from typing import Any

from umbp import wire
from umbp.client.steps import CALL_SECONDS_MAX, Call, Send
from umbp.errors import DeadlineExceeded, ProtocolError, Unavailable, from_wire

CONNECT_SECONDS_MAX = 2.0
REPLY_BYTES = 32 << 10  # most replies are smaller, and come whole with one read


class Connection:
    """One session's socket: a request, then its reply. Not for two threads at once."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_SECONDS_MAX)
            self._socket.connect(path)
            self._socket.sendall(wire.UPGRADE_REQUEST)
            answer = self._exactly(len(wire.UPGRADE_REPLY))
            if bytes(answer) != wire.UPGRADE_REPLY:
                raise Unavailable(f"{path} is not a pool, or it is not ready yet: {bytes(answer[:40])!r}")
            self._seconds_max = CALL_SECONDS_MAX
            self._buffer = bytearray(REPLY_BYTES)
        except TimeoutError as error:
            self.close()
            raise Unavailable(f"the pool on {path} does not answer within {CONNECT_SECONDS_MAX:g} s: it may still be starting") from error
        except OSError as error:
            self.close()
            raise Unavailable(f"no pool answers on {path} ({error.strerror or error}): start one with `python -m umbp.pool`") from error
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    @property
    def broken(self) -> bool:
        """Whether the other end is gone."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def hurry(self, seconds: float) -> None:
        """From now on wait only this long."""
        self._seconds_max = seconds

    def call(self, call: Call) -> tuple[Any, wire.Blob]:
        """Send and receive. Unavailable if the connection broke, DeadlineExceeded if nothing came; then it is of no more use."""
        self.send(call)
        try:
            frame = self._frame()
        except TimeoutError:
            raise DeadlineExceeded(f"the pool did not answer within {call.seconds:.3g} s") from None
        except OSError as error:
            raise Unavailable(f"the connection to the pool broke ({error})") from error
        reply, blob = wire.decode_reply(frame)
        if isinstance(reply, wire.Failed):
            raise from_wire(reply.code, reply.message, reply.field)
        return reply, blob

    def send(self, call: Call | Send) -> None:
        """Send only."""
        seconds = call.seconds if isinstance(call, Call) else CALL_SECONDS_MAX
        self._socket.settimeout(max(0.001, min(seconds, self._seconds_max)))
        try:
            self._socket.sendall(wire.encode(call.message, *call.arrays))
        except TimeoutError:
            raise DeadlineExceeded(f"the pool did not read within {seconds:.3g} s") from None
        except OSError as error:
            raise Unavailable(f"the connection to the pool broke ({error})") from error

    def _frame(self) -> bytearray:
        """The one reply that is to come: mostly all of it in one read."""
        view, got = memoryview(self._buffer), 0
        while got < wire.PREFIX.size:
            more = self._socket.recv_into(view[got:])
            if not more:
                raise Unavailable("the pool closed the connection")
            got += more
        size = wire.frame_bytes(view)
        if got > size:
            raise ProtocolError(f"{got - size} bytes after a reply that nobody asked for")
        frame = bytearray(view[:got])
        if got < size:
            frame += self._exactly(size - got)
        return frame

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise Unavailable("the pool closed the connection")
            at += got
        return data

    def close(self) -> None:
        """At once."""
        self._socket.close()
