"""The master as a pool asks it for plans: over HTTP, one of several masters, the next one when one does not answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np

from umbp import wire
from umbp.core.plans import Plan
from umbp.errors import ProtocolError, UmbpError, Unavailable, from_wire
from umbp.master.protocol import FRAME, LocateAnswer, LocateRequest, RouteRequest, decode_plan
from umbp.types import U8, Mask

ANSWER_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 4
_LOCATED: msgspec.json.Decoder[LocateAnswer] = msgspec.json.Decoder(LocateAnswer)


class HttpGuide:
    """Asks masters; fulfils `umbp.pool.peers.Guide`. ``masters``: base URLs; `masters` may be set anew at any time."""

    def __init__(self, node: str, masters: Sequence[str], token: str = "") -> None:
        self.node = node
        self.masters = list(masters)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._at = 0

    def __repr__(self) -> str:
        return f"<HttpGuide to {self.masters[self._at % len(self.masters)]}>"

    async def plan(self, namespace: str, keys: U8, exclude: list[str], deadline: float, *, count: bool) -> Plan:
        """See `umbp.pool.peers.Guide`."""
        request = RouteRequest(namespace, self.node, len(keys), count=count, exclude=exclude[:64])
        return decode_plan(await self._post("/v1/plan", wire.encode(request, keys), FRAME, deadline))

    async def held(self, namespace: str, keys: U8, deadline: float) -> Mask:
        """See `umbp.pool.peers.Guide`."""
        frame = await self._post("/v1/locate", wire.encode(LocateRequest(namespace, len(keys)), keys), FRAME, deadline)
        answer, blob = wire.decode(frame, _LOCATED)
        if answer.n != len(keys):
            raise ProtocolError(f"the master answered for {answer.n} keys, {len(keys)} were asked for")
        copies: Mask = blob.take(np.uint8, answer.n) > 0
        return copies

    async def failed(self, node: str, why: str) -> None:
        """See `umbp.pool.peers.Guide`."""
        body = msgspec.json.encode({"by": self.node, "why": why[:256]})
        await self._post(f"/v1/members/{node}/failed", body, "application/json", time.monotonic() + 1.0)

    async def close(self) -> None:
        """See `umbp.pool.peers.Guide`."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, path: str, body: bytes, kind: str, deadline: float) -> bytes:
        """The body of the answer. Unavailable if no master answers; what one refuses with is raised."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX), headers=self._headers)
        why: Any = "no time is left"
        for others in reversed(range(len(self.masters))):
            left = (deadline - time.monotonic()) / (1 + others)  # so that there is time for the others if this one is frozen
            if left <= 0:
                break
            url = self.masters[self._at % len(self.masters)].rstrip("/") + path
            try:
                limit = aiohttp.ClientTimeout(total=left)
                async with self._session.post(url, data=body, headers={"Content-Type": kind}, timeout=limit) as answer:
                    data = await answer.content.readexactly(min(answer.content_length or 0, ANSWER_BYTES_MAX))
                    if answer.status == 200:
                        return data
                    raise _refusal(answer.status, data)
            except (aiohttp.ClientError, OSError, TimeoutError, EOFError) as error:
                why = error
                self._at += 1  # the next one, also for those who ask later
        raise Unavailable(f"no master answers: {why or type(why).__name__}")


def _refusal(status: int, body: bytes) -> UmbpError:
    try:
        said = msgspec.json.decode(body)
        return from_wire(str(said["code"]), str(said["detail"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        return Unavailable(f"the master answered {status}")
