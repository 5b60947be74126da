"""The master as fetches ask it for plans: whichever one this pool's reporter speaks to, its own embedded one included."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from umbp.core.plans import Plan
from umbp.errors import DeadlineExceeded
from umbp.master.protocol import Failed, RouteRequest
from umbp.pool.masters import Port
from umbp.types import U8, Mask, Tier

FAILED_SECONDS_MAX = 1.0
POOL_TIERS = np.uint8(1 << Tier.DRAM | 1 << Tier.SSD)  # what is only in an engine's own cache cannot be fetched


class PortGuide:
    """Fulfils `umbp.pool.peers.Guide`. ``port`` gives the master to ask now."""

    def __init__(self, node: str, port: Callable[[], Port]) -> None:
        self.node = node
        self._port = port

    def __repr__(self) -> str:
        return f"<PortGuide of {self.node} by {self._port()!r}>"

    async def plan(self, namespace: str, keys: U8, exclude: list[str], deadline: float, *, count: bool, again: bool = False) -> Plan:
        """See `umbp.pool.peers.Guide`."""
        request = RouteRequest(namespace=namespace, requester=self.node, n=len(keys), count=count, again=again, exclude=exclude[:64])
        return await self._port().plan(request, keys, _left(deadline))

    async def used(self, namespace: str, keys: U8, deadline: float) -> None:
        """These keys, (n, 32), were asked for, and read where they lie: nothing of them is on its way."""
        request = RouteRequest(namespace=namespace, requester=self.node, n=len(keys), moves=False)
        await self._port().plan(request, keys, _left(deadline))

    async def held(self, namespace: str, keys: U8, deadline: float) -> Mask:
        """See `umbp.pool.peers.Guide`."""
        _, tiers = await self._port().locate(bytes.fromhex(namespace), keys, _left(deadline))
        held: Mask = tiers & POOL_TIERS != 0
        return held

    async def failed(self, node: str, why: str) -> None:
        """See `umbp.pool.peers.Guide`."""
        await self._port().failed(node, Failed(by=self.node, why=why[:256]), FAILED_SECONDS_MAX)

    async def close(self) -> None:
        """Nothing: the port is the reporter's."""


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("no time is left to ask the master")
    return left
