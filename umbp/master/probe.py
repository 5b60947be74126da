"""Asks a node, by the address that it advertises, who it is."""

from __future__ import annotations

from urllib.parse import quote

import aiohttp

from umbp.core.membership import Member
from umbp.errors import ConfigError
from umbp.grammar import parse_address

PROBE_SECONDS_MAX = 1.0
ANSWER_BYTES_MAX = 4096
PATH = "/v1/whoami"


class Prober:
    """HTTP to any number of nodes, each call bounded in time and size. ``token`` is the cluster's."""

    def __init__(self, token: str) -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, member: Member) -> str:
        """ "" where the member answers by its address, else what is wrong."""
        text = member.addresses.get("http", "")
        if not text:
            return ""  # it serves nobody by HTTP, and what it does serve by is not asked for a name
        try:
            url = f"{parse_address(text, 'http').url}{quote(PATH)}"
        except ConfigError as error:
            return f"its address is none: {error}"
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS_MAX)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers, connector=aiohttp.TCPConnector(force_close=True))
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    return f"{text} answers {response.status}"
                answer = await response.content.read(ANSWER_BYTES_MAX)
        except TimeoutError:
            return f"{text} does not answer within {PROBE_SECONDS_MAX:g} s"
        except (aiohttp.ClientError, OSError) as error:
            inner = getattr(error, "os_error", error)  # aiohttp says the address once more, and more of it
            return f"{text} cannot be reached: {getattr(inner, 'strerror', '') or str(inner) or type(error).__name__}"
        named = b'"name":"' + member.node.encode() + b'"'
        if named not in answer or b'"boot":' + str(member.boot).encode() not in answer:
            return f"{text} is somebody else"
        return ""

    async def close(self) -> None:
        """Let go of connections."""
        if self._session is not None:
            await self._session.close()
