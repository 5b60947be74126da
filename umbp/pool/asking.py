"""POSTs to a master on kept connections, with no more of HTTP than the two ends need: a general client takes 0.3 ms of each question.

Theory of operation. A connection carries one request at a time: one write, and an answer of a known length (``Content-Length``; a master of
ours sends nothing else). What is anything else ends the connection and is a `ProtocolError`. A connection that its other end closes while
nobody uses it is forgotten; one that has rested for long is not used again, as the other end may be about to close it. Who is cancelled, by
a time limit too, takes the connection with it, since an answer may still come.

Bounded: connections, bytes of an answer's head and body. Time is the caller's to limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from umbp.errors import ProtocolError
from umbp.grammar import Address

REST_SECONDS_MAX = 30.0  # aiohttp closes what has rested for 75 s
HEAD_BYTES_MAX = 16 << 10


class Asker:
    """Requests to one address. ``headers`` go with each."""

    def __init__(self, address: Address, headers: Mapping[str, str], *, connections_max: int, answer_bytes_max: int) -> None:
        self._address = address
        lines = [f"Host: {address.netloc}", *(f"{name}: {value}" for name, value in headers.items())]
        self._fields = "".join(f"{line}\r\n" for line in lines)
        self._answer_bytes_max = answer_bytes_max
        self._turns = asyncio.Semaphore(connections_max)
        self._resting: list[_Line] = []

    def __repr__(self) -> str:
        return f"<Asker of {self._address}, {len(self._resting)} connections rest>"

    async def post(self, path: str, body: bytes, media_type: str) -> tuple[int, bytes]:
        """Status and content of the answer. OSError if it cannot be had, ProtocolError if it is none."""
        head = f"POST {path} HTTP/1.1\r\n{self._fields}Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        async with self._turns:
            line = self._rested_or_none() or await self._connect()
            try:
                answer = await line.ask(head.encode("ascii") + body)
            except BaseException:
                line.cut()
                raise
            line.rests_since = asyncio.get_running_loop().time()
            self._resting.append(line)
            return answer

    async def close(self) -> None:
        """Cut all connections that rest."""
        while self._resting:
            self._resting.pop().cut()

    def _rested_or_none(self) -> _Line | None:
        since = asyncio.get_running_loop().time() - REST_SECONDS_MAX
        while self._resting:
            line = self._resting.pop()
            if not line.lost and line.rests_since >= since:
                return line
            line.cut()
        return None

    async def _connect(self) -> _Line:
        made = await asyncio.get_running_loop().create_connection(
            lambda: _Line(self._answer_bytes_max), self._address.host, self._address.port
        )
        return made[1]


class _Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, answer_bytes_max: int) -> None:
        self.lost = False
        self.rests_since = 0.0
        self._answer_bytes_max = answer_bytes_max
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = bytearray()
        self._status = self._start = 0
        self._whole = 0  # bytes of the answer, its head included; 0 before that is known

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send this, and wait for the answer."""
        if self.lost or self._transport is None:
            raise ConnectionResetError("the connection is gone")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def cut(self) -> None:
        """At once."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._fail(error or ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._buffer += data
        try:
            if self._answer is None or self._answer.done():
                raise ProtocolError("something came that nobody asked for")
            if not self._whole and not self._head():
                return
        except ProtocolError as error:
            self._fail(error)
            self.cut()
            return
        if len(self._buffer) < self._whole:
            return
        status, content = self._status, bytes(self._buffer[self._start : self._whole])
        if len(self._buffer) > self._whole:
            self.cut()
        self._buffer.clear()
        self._whole = 0
        self._answer.set_result((status, content))

    def _head(self) -> bool:
        """Whether the answer's head is there. ProtocolError if it is none."""
        end = self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if end < 0:
            if len(self._buffer) >= HEAD_BYTES_MAX:
                raise ProtocolError("the head of the answer has no end")
            return False
        line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        words = line.split(" ", 2)
        if len(words) < 2 or words[0] != "HTTP/1.1" or not words[1].isdigit():
            raise ProtocolError("it does not speak HTTP/1.1")
        fields = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        length = fields.get("content-length", "")
        if not length.isdigit() or "transfer-encoding" in fields:
            raise ProtocolError("the answer does not say how long it is")
        if int(length) > self._answer_bytes_max:
            raise ProtocolError(f"an answer of {length} bytes, at most {self._answer_bytes_max} are read")
        if fields.get("connection", "").lower() == "close":
            self.lost = True  # after this answer
        self._status, self._start = int(words[1]), end + 4
        self._whole = self._start + int(length)
        return True

    def _fail(self, error: Exception) -> None:
        self.lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
