"""The short way in for what comes often: questions and bundles are read and answered by the connection itself, all else by aiohttp.

Theory of operation. A connection begins here. As long as what comes is exactly such a request (``POST /v1/plan``, ``/v1/locate``, or what a
node holds, ``/v1/members/NODE/events`` and ``/resync``; HTTP/1.1, a frame of known length, nothing that needs judgement: no ``Origin``, no
``Expect``, no chunks), it is held against the same rules as everywhere (the token, or a ``Host`` of ours). A question is answered at once.
What a node holds is answered by a task when it is applied; until then the connection only collects what comes after it. At the first thing
that is anything else, or that is refused, the connection is handed over to aiohttp for good, with what was read so far, that request
included: so every refusal, error and other path is aiohttp's and `umbp.admin`'s, and there is no second opinion here. Being told twice
does no harm: bundles and pieces are numbered.

What it saves: 150 us of a request's 200, which matters where the question is one key, or the bundle what one put has stored. Bounded:
`BODY_BYTES_MAX` a request, one at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import msgspec

from umbp.admin.api import BODY_BYTES_MAX
from umbp.errors import ConfigError, UmbpError
from umbp.grammar import Address, parse_address
from umbp.master.protocol import FRAME

HEAD_BYTES_MAX = 4096
_MEMBERS = b"/v1/members/"
_NODE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # as `umbp.master.protocol.Name`; whatever else is for aiohttp to judge
_UNUSUAL = (b"\r\norigin:", b"\r\nsec-fetch-site:", b"\r\nexpect:", b"\r\ntransfer-encoding:", b"\r\nconnection: close", b"\r\nupgrade:")


class Doors:
    """All connections of one listener.

    ``answers``: path -> what answers a frame; ``tell``: last word of a node's path -> what is told; ``hand_over`` makes the protocol of all
    else.
    """

    def __init__(
        self,
        answers: Mapping[bytes, Callable[[bytes], bytes]],
        tell: Mapping[bytes, Callable[[str, bytes], Awaitable[msgspec.Struct]]],
        hand_over: Callable[[], asyncio.BaseProtocol],
        token: str,
        listening: Address,
    ) -> None:
        self.answers, self.tell, self.hand_over, self.listening = answers, tell, hand_over, listening
        self.bearer = b"Bearer " + token.encode() if token else b""
        self.open: set[QuickDoor] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Doors {len(self.open)} open, {len(self.tasks)} being told>"

    async def close(self) -> None:
        """Cut them all."""
        for door in list(self.open):
            door.close()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class QuickDoor(asyncio.Protocol):
    """One connection."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._admitted: bytes | None = None  # the header that was looked at last and let in
        self._buffer = bytearray()
        self._needed = 0  # bytes of the request that has come in part
        self._busy = False  # with what a node tells
        self._full = self._unread = False  # it has sent enough meanwhile; it does not read its answers
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._doors.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._doors.open.discard(self)
        self._transport = None

    def close(self) -> None:
        """Cut it."""
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        """The caller does not read its answers: no more of its requests."""
        self._unread = True
        self._read_or_not()

    def resume_writing(self) -> None:
        """It reads again."""
        self._unread = False
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._full or self._unread:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Requests, whole or in parts."""
        self._buffer += data
        if self._busy and len(self._buffer) > self._needed + BODY_BYTES_MAX:
            self._full = True
            self._read_or_not()
        elif not self._busy and len(self._buffer) >= self._needed:
            self._serve()

    def _serve(self) -> None:
        while self._buffer and self._transport is not None:
            end = self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
            if end < 0:
                if len(self._buffer) >= HEAD_BYTES_MAX or not self._could_be_ours():
                    self._away()
                return
            path, length = self._judged(bytes(self._buffer[: end + 2]))
            if not 0 < length <= BODY_BYTES_MAX:
                self._away()
                return
            self._needed = end + 4 + length
            if len(self._buffer) < self._needed:
                return
            with memoryview(self._buffer) as view:
                body = bytes(view[end + 4 : self._needed])
            answer = self._doors.answers.get(path)
            if answer is None:
                task = asyncio.get_running_loop().create_task(self._be_told(path, body))
                self._busy = True
                self._doors.tasks.add(task)
                task.add_done_callback(self._doors.tasks.discard)
                return
            try:
                content = answer(body)
            except UmbpError:  # said by those who say such things
                self._away()
                return
            self._answer(FRAME.encode(), content)

    async def _be_told(self, path: bytes, body: bytes) -> None:
        _, _, _, node, verb = path.split(b"/")
        try:
            said = await self._doors.tell[verb](node.decode(), body)
        except Exception:  # noqa: BLE001 - met again, and said, by those who say such things
            self._busy = False
            self._away()
            return
        self._busy = self._full = False
        if self._transport is not None and not self._transport.is_closing():
            self._answer(b"application/json", msgspec.json.encode(said))
            self._read_or_not()
            self._serve()

    def _answer(self, kind: bytes, content: bytes) -> None:
        """The first request in the buffer is dealt with."""
        del self._buffer[: self._needed]
        self._needed = 0
        assert self._transport is not None
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(content)) + content)

    def _could_be_ours(self) -> bool:
        line = bytes(self._buffer[:64])
        starts = [b"POST %s HTTP/1.1\r\n" % path for path in self._doors.answers]
        return any(line.startswith(start) or start.startswith(line) for start in (*starts, b"POST " + _MEMBERS))

    def _judged(self, head: bytes) -> tuple[bytes, int]:
        """The path, and the length of the body; 0 where it is not for us."""
        line, _, fields = head.partition(b"\r\n")
        parts = line.split(b" ")
        if len(parts) != 3 or parts[0] != b"POST" or parts[2] != b"HTTP/1.1" or not self._is_ours(parts[1]):
            return b"", 0
        low = (b"\r\n" + fields).lower()
        if any(unusual in low for unusual in _UNUSUAL) or low.count(b"\r\ncontent-length:") != 1 or low.count(b"\r\nhost:") != 1:
            return b"", 0
        if _field(low, b"content-type") != FRAME.encode() or not self._admits(b"\r\n" + fields, low):
            return b"", 0
        length = _field(low, b"content-length")
        return parts[1], int(length) if length.isdigit() and len(length) < 9 else 0

    def _is_ours(self, path: bytes) -> bool:
        if path in self._doors.answers:
            return True
        node, _, verb = path.removeprefix(_MEMBERS).partition(b"/")
        return path.startswith(_MEMBERS) and verb in self._doors.tell and _NODE.fullmatch(node) is not None

    def _admits(self, fields: bytes, low: bytes) -> bool:
        """The rules of `umbp.admin.auth`, where they say yes; a no is for it to say."""
        name = b"authorization" if self._doors.bearer else b"host"
        at = low.find(b"\r\n" + name + b":")
        if at < 0:
            return False
        value = fields[at + len(name) + 3 : fields.index(b"\r\n", at + 2)].strip()
        if value == self._admitted and not self._doors.bearer:
            return True
        if self._doors.bearer:
            return low.count(b"\r\nauthorization:") == 1 and hmac.compare_digest(value, self._doors.bearer)
        try:
            host = parse_address(value.decode("ascii"), "Host")
        except (ConfigError, UnicodeDecodeError):
            return False
        if host.is_unix or host.scheme or not (host.is_loopback or host.host.lower() == self._doors.listening.host.lower() != ""):
            return False
        self._admitted = value
        return True

    def _away(self) -> None:
        """The rest of this connection is aiohttp's."""
        transport, self._transport = self._transport, None
        self._doors.open.discard(self)
        if transport is None or transport.is_closing():
            return
        protocol = cast(asyncio.Protocol, self._doors.hand_over())
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._full or self._unread:
            transport.resume_reading()
        data, self._buffer = bytes(self._buffer), bytearray()
        if data and not transport.is_closing():
            protocol.data_received(data)


def _field(low: bytes, name: bytes) -> bytes:
    """The value of a header field, of all fields in small letters; b"" if there is none."""
    at = low.find(b"\r\n" + name + b":")
    return b"" if at < 0 else low[at + len(name) + 3 : low.index(b"\r\n", at + 2)].strip()
