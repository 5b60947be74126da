"""A pool's place in a cluster: who its master is, what speaks to it, and what operators can ask of it here.

With ``--master`` the masters are elsewhere, and what is asked of the cluster here (``/v1/nodes``, ``/v1/route`` ...) is handed on to the
one that is spoken to. Without it a master runs in this process: the same state machine, fed by the same reports, answering the same
questions, for a cluster of one; and other pools may name this one as their master.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

from umbp.admin.api import Endpoint, Nothing, Raw, Reply
from umbp.config import PoolConfig
from umbp.core.master import Master
from umbp.core.membership import SOCKET
from umbp.core.objects import LIVE
from umbp.core.pool import Pool
from umbp.errors import UmbpError, Unavailable
from umbp.grammar import Address
from umbp.master import protocol as say
from umbp.master.documents import Policies, PolicyDocument
from umbp.master.probe import Prober
from umbp.master.rest import Choice, Handlers, OfPolicy, cluster_endpoints, event_stream, member_endpoints, member_routes
from umbp.master.service import MasterService
from umbp.pool.fetching import Fetching
from umbp.pool.guide import PortGuide
from umbp.pool.masters import Embedded, Port, Remote
from umbp.pool.neighbours import Neighbours
from umbp.pool.peers import Peers
from umbp.pool.reporting import Reporter
from umbp.pool.sources import Source
from umbp.transport.base import Transport
from umbp.transport.http import HttpTransport
from umbp.transport.nixl import NixlAgent, NixlTransport
from umbp.types import U8, Tier

log = logging.getLogger("umbp.pool.cluster")
FORWARD_SECONDS_MAX = 5.0
EMBEDDED_KEYS_MIN = 1 << 16
KERNEL_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class ClusterSide:
    """Reporter, and master or the way to it. ``http`` is what this pool really listens on."""

    def __init__(self, config: PoolConfig, pool: Pool, name: str, boot: int, http: Address) -> None:
        self.config, self.pool = config, pool
        self._service: MasterService | None = None
        self._prober = Prober(config.token)
        advertised = config.advertise or http
        self.address = dataclasses.replace(advertised, port=advertised.port or http.port)
        ports: list[Port] = [Remote(address, config.token) for address in config.master]
        if not ports:
            keys_max = max(EMBEDDED_KEYS_MIN, pool.objects.capacity * 5 // 4)  # memory is taken as keys come
            core = Master(self.now(), boot=secrets.randbits(62), seed=secrets.randbits(63), keys_max=keys_max)
            self._service = MasterService(core, probe=self._prober, masters=lambda: [self.address.url])
            ports.append(Embedded(self._service))
        self.more_tiers: list[Callable[[], say.Capacity]] = []
        self.reporter = Reporter(pool, name, boot, _place(config), ports, self._tiers)
        self.reporter.addresses["http"] = self.address.netloc
        self.reporter.tags = dict(config.tag)
        self.neighbours = Neighbours(self.reporter, reads=bool(config.master) and config.neighbours == "read")
        if config.neighbours == "read":
            self.reporter.addresses[SOCKET] = config.socket

    def __repr__(self) -> str:
        return f"<ClusterSide with {self.reporter.port!r}>"

    @staticmethod
    def now() -> float:
        """Seconds on a clock that only grows."""
        return time.monotonic()

    @property
    def master(self) -> MasterService:
        """The master in this process."""
        if self._service is None:
            raise Unavailable(f"this pool's master is {self.reporter.port.url}")
        return self._service

    @property
    def warnings(self) -> list[str]:
        """What is wrong between this pool and its master, one sentence each."""
        trouble = [f"no member of the cluster: {self.reporter.trouble}"] if self.reporter.trouble else []
        return [*trouble, *self.reporter.warnings]

    def sources(self, agent: NixlAgent | None) -> list[Source]:
        """The other nodes, where there are any: a pool that has a master elsewhere reads what it lacks from them."""
        moves = self.config.fetch == "promote"
        transports: dict[str, Transport] = {"http": HttpTransport(self.config.token, moves=moves)}
        if agent is not None:
            transports = {"nixl": NixlTransport(agent, self.config.token, moves=moves), **transports}
            self.reporter.addresses["nixl"] = self.address.netloc  # orders go the same way; only the pages do not
        if not self.config.master:
            return []
        guide = PortGuide(self.reporter.name, lambda: self.reporter.port)
        peers = Peers(self.reporter.name, guide, transports)
        self.neighbours.guide = guide
        self.reporter.measure = peers.take_measured
        return [peers]

    def copies_by(self, fetching: Fetching) -> None:
        """How pages are brought here that the master would have here."""

        def copy(digest: bytes, keys: U8, seconds: float, request: str) -> bool:
            state = self.pool.by_digest.get(digest)
            if state is None or not fetching.sources:
                return False
            try:
                fetching.prefetch(self.now(), state.account.row, state.account.number, keys, request=request, seconds=seconds, hold=0.0)
            except UmbpError as error:
                log.info("pages are not copied here as the master would have it: %s", error)
                return False
            return True

        self.reporter.heeding.copy = copy

    # -- life --------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reporter.run())
            if self._service is not None:
                tasks.create_task(self._service.run())

    async def close(self) -> None:
        """Leave the cluster."""
        await self.neighbours.close()
        await self.reporter.close()
        await self._prober.close()

    def _tiers(self) -> list[say.Capacity]:
        objects = self.pool.objects
        dram = say.Capacity(
            tier=int(Tier.DRAM),
            capacity_bytes=objects.allocator.capacity_bytes,
            used_bytes=objects.allocated_bytes(),
            keys=max(0, objects.counts[LIVE] - objects.in_limbo()[0]),
        )
        return [dram, *(tier() for tier in self.more_tiers)]

    # -- REST --------------------------------------------------------------------------------------------------------------------------

    def endpoints(self) -> list[Endpoint]:
        """What can be asked of the cluster, here."""
        own = cluster_endpoints(self)
        if self._service is not None:
            return [*own, *member_endpoints(self)]
        return [dataclasses.replace(endpoint, handler=self._forwarding(endpoint)) for endpoint in own]

    def routes(self) -> list[Raw]:
        """What is no JSON endpoint."""
        if self._service is not None:
            return [*member_routes(self), event_stream(self)]
        return [Raw("GET", "/v1/events", "What happens, live", self._live, "text/event-stream")]

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """The master's stream, handed on as it comes."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        async with self._remote().stream(f"/v1/events?{request.query_string}") as source:
            response.set_status(source.status)
            await response.prepare(request)
            async for part in source.content.iter_any():
                await response.write(part)
        return response

    async def policies(self) -> list[PolicyDocument]:
        """The master's kinds; none where it does not answer."""
        if self._service is not None:
            return (await Handlers(self).policies(Nothing(), Nothing())).policies
        with suppress(Unavailable):
            _, _, content = await self._remote().forward("GET", "/v1/policies", b"", FORWARD_SECONDS_MAX)
            with suppress(msgspec.MsgspecError):
                return msgspec.json.decode(content, type=Policies).policies
        return []

    async def choose_policy(self, kind: str, name: str) -> Reply:
        """Another policy of a master's kind."""
        if self._service is not None:
            return Reply(await Handlers(self).choose_policy(OfPolicy(kind=kind), Choice(name=name)))
        return await self._forward("PUT", f"/v1/policies/{quote(kind, safe='')}", msgspec.json.encode({"name": name}))

    def _remote(self) -> Remote:
        port = self.reporter.port
        assert isinstance(port, Remote)
        return port

    def _forwarding(self, endpoint: Endpoint) -> Any:
        async def forward(params: msgspec.Struct, body: msgspec.Struct) -> Reply:
            given = {name: value for name, value in msgspec.to_builtins(params).items() if value is not None}
            fields = {name: quote(str(given.pop(name)), safe="") for name in endpoint.path_fields}
            path = endpoint.path.format(**fields) + (f"?{urlencode(given)}" if given else "")
            has_body = bool(msgspec.structs.fields(endpoint.body))
            return await self._forward(endpoint.method, path, msgspec.json.encode(body) if has_body else b"")

        forward.__name__ = endpoint.handler.__name__
        return forward

    async def _forward(self, method: str, path: str, body: bytes) -> Reply:
        status, media_type, content = await self._remote().forward(method, path, body, FORWARD_SECONDS_MAX)
        return Reply(content, status=status, media_type=media_type)


def _place(config: PoolConfig) -> str:
    """One text for all lives of one pool on one machine: kernel, folder of the segment, name. Two live pools cannot share it."""
    try:
        with open(KERNEL_BOOT_ID) as file:
            kernel = file.read(64).strip()
        folder = os.stat(config.shm_dir)
    except OSError:  # no such place: then every life is at another one, and the master waits for the old one's silence
        return secrets.token_hex(8)
    return f"{kernel}:{folder.st_dev}:{folder.st_ino}:{config.name}"
