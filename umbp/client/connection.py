"""A client's connection to its pool for plain callers: one request, then its reply."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any

from umbp import wire
from umbp.client.late import Late
from umbp.client.steps import CALL_SECONDS_MAX, Call, LeftBehind, Send
from umbp.errors import DeadlineExceeded, ProtocolError, Unavailable, from_wire

CONNECT_SECONDS_MAX = 2.0
REPLY_BYTES = 32 << 10  # most replies are smaller, and come whole with one read


class Connection:
    """One session's socket: a request, then its reply. Not for two threads at once. ``late``: who sees to answers that come late."""

    def __init__(self, path: str, late: Late | None = None) -> None:
        self._late = Late() if late is None else late
        self._left: tuple[float, Call] | None = None  # what nobody waits for, and until when its answer must come
        self._unsent = memoryview(b"")  # of that
        self._got = 0  # bytes of the frame that is coming: in the buffer, or of a large one here
        self._large: bytearray | None = None
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

    @property
    def left_behind(self) -> bool:
        """Whether there is an answer to come that nobody waits for."""
        return self._left is not None

    def call(self, call: Call, riding: bytes = b"") -> tuple[Any, wire.Blob]:
        """Send and receive. Unavailable if the connection broke, DeadlineExceeded if nothing came; then it is of no more use.

        LeftBehind where a late answer will do: then it is. ``riding``: messages without reply that go with it, behind the request, so that
        its answer does not wait for them.
        """
        began, sent = time.monotonic(), False
        until = began + min(call.seconds, self._seconds_max)
        try:
            self._catch_up(until)
            data = memoryview(wire.encode(call.message, *call.arrays) + riding)
            self._unsent = data
            try:
                self._push(until)
            finally:
                if not (sent := len(self._unsent) < len(data)):
                    self._unsent = memoryview(b"")
            frame = self._frame(until)
        except TimeoutError:
            if call.late is None or self._overdue:
                raise DeadlineExceeded(f"the pool did not answer within {call.seconds:.3g} s") from None
            self._late.calls += 1
            if sent:
                self._left = began + CALL_SECONDS_MAX, call
            raise LeftBehind(call, sent=sent) from None
        except OSError as error:
            raise Unavailable(f"the connection to the pool broke ({error})") from error
        reply, blob = wire.decode_reply(frame)
        if isinstance(reply, wire.Failed):
            raise from_wire(reply.code, reply.message, reply.field)
        return reply, blob

    def send(self, call: Send) -> None:
        """Send only."""
        until = time.monotonic() + min(CALL_SECONDS_MAX, self._seconds_max)
        try:
            self._push(until)
            self._unsent = memoryview(wire.encode(call.message, *call.arrays))
            self._push(until)
        except TimeoutError:
            raise DeadlineExceeded(f"the pool did not read within {CALL_SECONDS_MAX:.3g} s") from None
        except OSError as error:
            raise Unavailable(f"the connection to the pool broke ({error})") from error

    def take_late(self) -> None:
        """Read the answer that nobody waits for, if it is here. DeadlineExceeded if it should have been."""
        try:
            with contextlib.suppress(TimeoutError):
                self._catch_up(time.monotonic())
        except OSError as error:
            raise Unavailable(f"the connection to the pool broke ({error})") from error
        if self._overdue:
            raise DeadlineExceeded(f"the pool did not answer within {CALL_SECONDS_MAX:.3g} s")

    @property
    def _overdue(self) -> bool:
        return self._left is not None and time.monotonic() >= self._left[0]

    def _catch_up(self, until: float) -> None:
        """What was left behind comes before anything else."""
        if self._left is not None:
            call = self._left[1]
            self._push(until)
            frame, self._left = self._frame(until), None
            reply, blob = wire.decode_reply(frame)
            if not isinstance(reply, wire.Failed):
                self._late.came(call, reply, blob)

    def _push(self, until: float) -> None:
        """Send the rest. Who runs out of time in the middle of a message leaves its end to the next."""
        while self._unsent:
            self._wait_until(until)
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _wait_until(self, until: float) -> None:
        self._socket.settimeout(max(0.001, until - time.monotonic()))

    def _frame(self, until: float) -> bytearray:
        """The one reply that is to come: mostly all of it in one read. Goes on where the time was over before."""
        view = memoryview(self._buffer)
        while self._got < wire.PREFIX.size:
            self._got += self._more(view[self._got :], until)
        size = wire.frame_bytes(view)
        if self._got > size:
            raise ProtocolError(f"{self._got - size} bytes after a reply that nobody asked for")
        if self._large is None:
            frame = bytearray(view[: self._got])
            if self._got == size:
                self._got = 0
                return frame
            self._large = frame + bytearray(size - self._got)
        view = memoryview(self._large)
        while self._got < size:
            self._got += self._more(view[self._got :], until)
        frame, self._large, self._got = self._large, None, 0
        return frame

    def _more(self, view: memoryview, until: float) -> int:
        self._wait_until(until)
        got = self._socket.recv_into(view)
        if not got:
            raise Unavailable("the pool closed the connection")
        return got

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
