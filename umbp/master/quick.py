"""The short way in for questions: ``POST /v1/plan`` and ``/v1/locate`` read and answered by the connection itself, all else by aiohttp.

Theory of operation. A connection begins here. As long as what comes is exactly such a request (HTTP/1.1, a frame of known length, nothing
that needs judgement: no ``Origin``, no ``Expect``, no chunks), it is held against the same rules as everywhere (the token, or a ``Host`` of
ours) and answered at once. At the first thing that is anything else the connection is handed over to aiohttp for good, with what was read
so far: so every refusal, error and other path is aiohttp's and `umbp.admin`'s, and there is no second opinion here.

What it saves: 150 us of a request's 200, which matters where the question is one key. Bounded: `BODY_BYTES_MAX` a request, one at a time.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from typing import cast

from umbp.admin.api import BODY_BYTES_MAX
from umbp.errors import ConfigError, UmbpError
from umbp.grammar import Address, parse_address
from umbp.master.protocol import FRAME

HEAD_BYTES_MAX = 4096
_UNUSUAL = (b"\r\norigin:", b"\r\nsec-fetch-site:", b"\r\nexpect:", b"\r\ntransfer-encoding:", b"\r\nconnection: close", b"\r\nupgrade:")


class QuickDoor(asyncio.Protocol):
    """One connection. ``answers``: path -> what answers a frame; ``hand_over`` makes the protocol of all else; ``doors``: the open ones."""

    def __init__(
        self,
        answers: Mapping[bytes, Callable[[bytes], bytes]],
        hand_over: Callable[[], asyncio.BaseProtocol],
        token: str,
        listening: Address,
        doors: set[QuickDoor],
    ) -> None:
        self._answers, self._hand_over, self._doors = answers, hand_over, doors
        self._bearer = b"Bearer " + token.encode() if token else b""
        self._listening = listening
        self._admitted: bytes | None = None  # the header that was looked at last and let in
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._doors.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._doors.discard(self)
        self._transport = None

    def close(self) -> None:
        """Cut it."""
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        """The caller does not read its answers: no more of its questions."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Questions, whole or in parts."""
        self._buffer += data
        while self._buffer:
            end = self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
            if end < 0:
                if len(self._buffer) >= HEAD_BYTES_MAX or not self._could_be_ours():
                    self._away()
                return
            head = bytes(self._buffer[: end + 2])
            answer, length = self._judged(head)
            if answer is None or not 0 < length <= BODY_BYTES_MAX:
                self._away()
                return
            whole = end + 4 + length
            if len(self._buffer) < whole:
                return
            try:
                content = answer(bytes(self._buffer[end + 4 : whole]))
            except UmbpError:  # said by those who say such things
                self._away()
                return
            del self._buffer[:whole]
            assert self._transport is not None
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/x-umbp-frame\r\nContent-Length: %d\r\n\r\n" % len(content) + content
            )

    def _could_be_ours(self) -> bool:
        line = bytes(self._buffer[:64])
        return any(line.startswith(start) or start.startswith(line) for start in (b"POST %s HTTP/1.1\r\n" % path for path in self._answers))

    def _judged(self, head: bytes) -> tuple[Callable[[bytes], bytes] | None, int]:
        """Who answers, and the length of the body; None where it is not for us."""
        line, _, fields = head.partition(b"\r\n")
        parts = line.split(b" ")
        answer = self._answers.get(parts[1]) if len(parts) == 3 and parts[0] == b"POST" and parts[2] == b"HTTP/1.1" else None
        if answer is None:
            return None, 0
        low = (b"\r\n" + fields).lower()
        if any(unusual in low for unusual in _UNUSUAL) or low.count(b"\r\ncontent-length:") != 1 or low.count(b"\r\nhost:") != 1:
            return None, 0
        if _field(low, b"content-type") != FRAME.encode() or not self._admits(b"\r\n" + fields, low):
            return None, 0
        length = _field(low, b"content-length")
        return answer, int(length) if length.isdigit() and len(length) < 9 else 0

    def _admits(self, fields: bytes, low: bytes) -> bool:
        """The rules of `umbp.admin.auth`, where they say yes; a no is for it to say."""
        name = b"authorization" if self._bearer else b"host"
        at = low.find(b"\r\n" + name + b":")
        if at < 0:
            return False
        value = fields[at + len(name) + 3 : fields.index(b"\r\n", at + 2)].strip()
        if value == self._admitted and not self._bearer:
            return True
        if self._bearer:
            return low.count(b"\r\nauthorization:") == 1 and hmac.compare_digest(value, self._bearer)
        try:
            host = parse_address(value.decode("ascii"), "Host")
        except (ConfigError, UnicodeDecodeError):
            return False
        if host.is_unix or host.scheme or not (host.is_loopback or host.host.lower() == self._listening.host.lower() != ""):
            return False
        self._admitted = value
        return True

    def _away(self) -> None:
        """The rest of this connection is aiohttp's."""
        transport, self._transport = self._transport, None
        self._doors.discard(self)
        if transport is None:
            return
        protocol = cast(asyncio.Protocol, self._hand_over())
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        data, self._buffer = bytes(self._buffer), bytearray()
        if data and not transport.is_closing():
            protocol.data_received(data)


def _field(low: bytes, name: bytes) -> bytes:
    """The value of a header field, of all fields in small letters; b"" if there is none."""
    at = low.find(b"\r\n" + name + b":")
    return b"" if at < 0 else low[at + len(name) + 3 : low.index(b"\r\n", at + 2)].strip()
