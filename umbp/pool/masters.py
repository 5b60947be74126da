"""A pool's way to a master: the one in its own process, or one by HTTP; and which of several is spoken to.

Heartbeats, what the pool holds, and questions each have connections of their own, so that none waits behind another. Every call is bounded
in time by its caller. What a master answers wrongly or not at all is `Unavailable`; what it refuses is raised as the error that it names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import numpy as np

from umbp.core.plans import Plan
from umbp.errors import DeadlineExceeded, ProtocolError, Unavailable, from_wire
from umbp.grammar import Address
from umbp.master import protocol as say
from umbp.master.service import MasterService, Told
from umbp.pool.asking import Asker
from umbp.store.index import key_words
from umbp.types import I64, U8
from umbp.wire import Blob, decode, encode

ANSWER_BYTES_MAX = 8 << 20
STREAM_SILENCE_SECONDS_MAX = 30.0  # twice as long as a master leaves a stream without a sign
_T = TypeVar("_T")
_VERDICTS: msgspec.json.Decoder[say.Verdicts] = msgspec.json.Decoder(say.Verdicts)
_LOCATED: msgspec.json.Decoder[say.LocateAnswer] = msgspec.json.Decoder(say.LocateAnswer)


class Port(Protocol):
    """One master as a pool speaks to it. ``seconds`` is how long a call may take."""

    @property
    def url(self) -> str:
        """Where it is; "" for the embedded one."""
        ...

    async def join(self, body: say.Join, seconds: float) -> say.Joined: ...
    async def beat(self, node: str, body: say.Heartbeat, seconds: float) -> say.Beat: ...
    async def leave(self, node: str, body: say.Leaving, seconds: float) -> None: ...
    async def failed(self, node: str, body: say.Failed, seconds: float) -> None: ...
    async def tell(self, node: str, registration: int, number: int, told: Told, seconds: float) -> say.Applied: ...
    async def tell_piece(
        self, node: str, registration: int, sweep: int, index: int, told: Told, seconds: float, *, bundle: int, total: int, last: bool
    ) -> say.Applied: ...
    async def victims(self, node: str, registration: int, spaces: list[tuple[bytes, int]], keys: U8, seconds: float) -> I64: ...
    async def plan(self, request: say.RouteRequest, keys: U8, seconds: float) -> Plan: ...
    async def locate(self, digest: bytes, keys: U8, seconds: float) -> tuple[U8, U8]: ...
    async def close(self) -> None: ...


class Embedded:
    """The master in this process: the same calls without a network."""

    url = ""

    def __init__(self, service: MasterService) -> None:
        self.service = service

    def __repr__(self) -> str:
        return "<Embedded master>"

    async def join(self, body: say.Join, seconds: float) -> say.Joined:
        """See `Port`."""
        return await self.service.join(body)

    async def beat(self, node: str, body: say.Heartbeat, seconds: float) -> say.Beat:
        """See `Port`."""
        return await self.service.beat(node, body)

    async def leave(self, node: str, body: say.Leaving, seconds: float) -> None:
        """See `Port`."""
        await self.service.leave(node, body)

    async def failed(self, node: str, body: say.Failed, seconds: float) -> None:
        """See `Port`."""
        await self.service.failed(node, body)

    async def tell(self, node: str, registration: int, number: int, told: Told, seconds: float) -> say.Applied:
        """See `Port`."""
        return await self.service.tell(node, registration, number, told)

    async def tell_piece(
        self, node: str, registration: int, sweep: int, index: int, told: Told, seconds: float, *, bundle: int, total: int, last: bool
    ) -> say.Applied:
        """See `Port`."""
        return await self.service.tell_piece(node, registration, sweep, index, told, bundle=bundle, total=total, last=last)

    async def victims(self, node: str, registration: int, spaces: list[tuple[bytes, int]], keys: U8, seconds: float) -> I64:
        """See `Port`."""
        return _verdicts(self.service.victims(node, _victims(registration, spaces, keys)), len(keys))

    async def plan(self, request: say.RouteRequest, keys: U8, seconds: float) -> Plan:
        """See `Port`."""
        return say.decode_plan(self.service.plan(encode(request, keys)))

    async def locate(self, digest: bytes, keys: U8, seconds: float) -> tuple[U8, U8]:
        """See `Port`."""
        core = self.service.core
        return core.locate(self.service.now(), digest, key_words(keys))

    async def close(self) -> None:
        """Nothing to close: the service is the process's."""


class Remote:
    """A master by HTTP."""

    def __init__(self, address: Address, token: str) -> None:
        self.url = address.url
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._askers: dict[str, Asker] = {}

    def __repr__(self) -> str:
        return f"<Remote master {self.url}>"

    async def join(self, body: say.Join, seconds: float) -> say.Joined:
        """See `Port`."""
        return await self._json("beats", "/v1/members", body, say.Joined, seconds)

    async def beat(self, node: str, body: say.Heartbeat, seconds: float) -> say.Beat:
        """See `Port`."""
        return await self._json("beats", f"/v1/members/{quote(node)}/heartbeat", body, say.Beat, seconds)

    async def leave(self, node: str, body: say.Leaving, seconds: float) -> None:
        """See `Port`."""
        await self._json("beats", f"/v1/members/{quote(node)}/leave", body, say.Left, seconds)

    async def failed(self, node: str, body: say.Failed, seconds: float) -> None:
        """See `Port`."""
        await self._json("questions", f"/v1/members/{quote(node)}/failed", body, say.Left, seconds)

    async def tell(self, node: str, registration: int, number: int, told: Told, seconds: float) -> say.Applied:
        """See `Port`."""
        header = say.Events(registration=registration, number=number, n=len(told.words), **_spaces(told))
        frame = encode(header, told.words, told.tiers, told.present)
        return await self._framed("data", f"/v1/members/{quote(node)}/events", frame, say.Applied, seconds)

    async def tell_piece(
        self, node: str, registration: int, sweep: int, index: int, told: Told, seconds: float, *, bundle: int, total: int, last: bool
    ) -> say.Applied:
        """See `Port`."""
        header = say.Piece(
            registration=registration,
            sweep=sweep,
            index=index,
            bundle=bundle,
            total=total,
            last=last,
            n=len(told.words),
            **_spaces(told),
        )
        frame = encode(header, told.words, told.tiers)
        return await self._framed("data", f"/v1/members/{quote(node)}/resync", frame, say.Applied, seconds)

    async def victims(self, node: str, registration: int, spaces: list[tuple[bytes, int]], keys: U8, seconds: float) -> I64:
        """See `Port`."""
        frame = _victims(registration, spaces, keys)
        return _verdicts(await self._call("questions", f"/v1/members/{quote(node)}/victims", frame, say.FRAME, seconds), len(keys))

    async def plan(self, request: say.RouteRequest, keys: U8, seconds: float) -> Plan:
        """See `Port`."""
        return say.decode_plan(await self._call("questions", "/v1/plan", encode(request, keys), say.FRAME, seconds))

    async def locate(self, digest: bytes, keys: U8, seconds: float) -> tuple[U8, U8]:
        """See `Port`."""
        request = encode(say.LocateRequest(namespace=digest.hex(), n=len(keys)), keys)
        blob: Blob
        answer, blob = decode(await self._call("questions", "/v1/locate", request, say.FRAME, seconds), _LOCATED)
        copies, tiers = blob.take(np.uint8, answer.n), blob.take(np.uint8, answer.n)
        blob.end()
        if answer.n != len(keys):
            raise ProtocolError(f"the master answered for {answer.n} keys, {len(keys)} were asked about")
        return copies, tiers

    async def forward(self, method: str, path: str, body: bytes, seconds: float) -> tuple[int, str, bytes]:
        """Any other call: status, media type and content of the answer, whatever it is."""
        try:
            async with asyncio.timeout(seconds):
                headers = {"Content-Type": "application/json"} if body else {}
                async with self._session("questions").request(method, self.url + path, data=body or None, headers=headers) as response:
                    return response.status, response.content_type, await self._read(response)
        except TimeoutError:
            raise DeadlineExceeded(f"the master at {self.url} did not answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the master at {self.url} cannot be reached: {error or type(error).__name__}") from None

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """A GET whose answer does not end by itself."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=STREAM_SILENCE_SECONDS_MAX)
        try:
            async with self._session("streams").get(self.url + path, timeout=timeout) as response:
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the master at {self.url} cannot be reached: {error or type(error).__name__}") from None

    async def close(self) -> None:
        """Let go of connections."""
        for session in self._sessions.values():
            await session.close()
        for asker in self._askers.values():
            await asker.close()

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _session(self, purpose: str) -> aiohttp.ClientSession:
        session = self._sessions.get(purpose)
        if session is None:
            connector = aiohttp.TCPConnector(limit=_connections_max(purpose), keepalive_timeout=30.0)
            session = aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)
            self._sessions[purpose] = session
        return session

    async def _json(self, purpose: str, path: str, body: msgspec.Struct, kind: type[_T], seconds: float) -> _T:
        return self._decoded(await self._call(purpose, path, msgspec.json.encode(body), "application/json", seconds), kind)

    async def _framed(self, purpose: str, path: str, frame: bytes, kind: type[_T], seconds: float) -> _T:
        return self._decoded(await self._call(purpose, path, frame, say.FRAME, seconds), kind)

    def _decoded(self, content: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"{self.url} is no master of this version: {error}") from None

    async def _call(self, purpose: str, path: str, body: bytes, media_type: str, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                status, content = await self._post(purpose, path, body, media_type)
        except TimeoutError:
            raise DeadlineExceeded(f"the master at {self.url} did not answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the master at {self.url} cannot be reached: {error or type(error).__name__}") from None
        except ProtocolError as error:
            raise Unavailable(f"{self.url} is no master: {error}") from None
        if status >= 400:
            raise self._problem(status, content)
        return content

    async def _post(self, purpose: str, path: str, body: bytes, media_type: str) -> tuple[int, bytes]:
        """Status and content."""
        if self._address.scheme == "https":
            headers = {"Content-Type": media_type}
            async with self._session(purpose).post(self.url + path, data=body, headers=headers, allow_redirects=False) as response:
                return response.status, await self._read(response)
        asker = self._askers.get(purpose)
        if asker is None:
            asker = self._askers[purpose] = Asker(
                self._address, self._headers, connections_max=_connections_max(purpose), answer_bytes_max=ANSWER_BYTES_MAX
            )
        return await asker.post(path, body, media_type)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) > ANSWER_BYTES_MAX:
            raise ProtocolError(f"the answer of {self.url} is larger than {ANSWER_BYTES_MAX} bytes")
        return await response.read()

    def _problem(self, status: int, content: bytes) -> Exception:
        try:
            problem: Any = msgspec.json.decode(content)
            return from_wire(str(problem["code"]), str(problem["detail"]), str(problem.get("field", "")))
        except (msgspec.MsgspecError, KeyError, TypeError):
            return Unavailable(f"{self.url} is no master: it answered {status}")


def _victims(registration: int, spaces: list[tuple[bytes, int]], keys: U8) -> bytes:
    named = [(digest.hex(), count) for digest, count in spaces]
    return encode(say.Victims(registration=registration, n=len(keys), spaces=named), keys)


def _verdicts(frame: bytes, count: int) -> I64:
    answer, blob = decode(frame, _VERDICTS)
    verdict = blob.take(np.int8, answer.n).astype(np.int64)
    blob.end()
    if answer.n != count:
        raise ProtocolError(f"the master answered for {answer.n} keys, {count} were asked about")
    return verdict


def _connections_max(purpose: str) -> int:
    return 2 if purpose in ("beats", "data") else 16


def _spaces(told: Told) -> dict[str, Any]:
    """The namespaces of a bundle or piece, as its header has them."""
    return {
        "spaces": [(digest.hex(), size, count) for digest, size, count in told.spaces],
        "identities": {digest.hex(): text.decode() for digest, text in told.identities.items()},
    }
