"""The master process: one event loop around one `core.master.Master`.

Theory of operation
-------------------
    starting -> ready -> stopping
The socket is bound first, so a busy port is an error at once; the directory is empty and fills with what pools say. Ready means that it can
answer, not that it knows: a master that has just started says who has what as far as pools have told it, within seconds for a million
keys. A pool that cannot reach its master serves its own engines as ever, and tries the next URL it has.

Stop (SIGTERM, SIGINT): listeners closed, connections cut within `STOP_SECONDS_MAX`. Nothing is written: the pools have it all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import secrets
import signal
import socket
import time
from typing import TYPE_CHECKING, Literal

import numpy.ma  # noqa: F401 - `np.unique` imports it at its first call
from aiohttp import web

from umbp.admin.api import Document, Endpoint, Nothing, Reply, make_application
from umbp.admin.listening import BACKLOG, Refusal, bind_tcp, bound_address, raise_file_limit
from umbp.admin.openapi import release
from umbp.core.master import Master
from umbp.core.membership import Timing
from umbp.master.config import MasterConfig
from umbp.master.probe import Prober
from umbp.master.quick import Doors, QuickDoor
from umbp.master.readings import readings
from umbp.master.rest import cluster_endpoints, event_stream, master_endpoints, member_endpoints, member_routes
from umbp.master.service import MasterService
from umbp.metrics import CONTENT_TYPE, Metrics
from umbp.policies.base import CLUSTER_KINDS, find

if TYPE_CHECKING:
    from umbp.master.following import Follower
    from umbp.master.shared import SharedLog

log = logging.getLogger("umbp.master")
STOP_SECONDS_MAX = 3.0
CONNECTIONS_MAX = 8192  # two of each of `NODES_MAX` pools


class Health(Document, frozen=True):
    """Whether this process should be left alone or replaced, as a pool says it. A master that answers is never to be replaced."""

    healthy: bool
    reasons: list[str]


class Readiness(Document, frozen=True):
    """Whether requests should be sent here, and what is not as it was asked for."""

    state: str
    ready: bool
    reasons: list[str]
    warnings: list[str]


class Links(Document, frozen=True):
    """Where to go from here."""

    name: str
    links: dict[str, str]


class MasterServer:
    """The process. `run` is its life."""

    def __init__(self, config: MasterConfig) -> None:
        self.config = config
        self.state: Literal["starting", "ready", "stopping"] = "starting"
        self.http = config.http
        self._prober = Prober(config.token)
        policies = {kind: getattr(config, kind) for kind in CLUSTER_KINDS}
        for kind, name in policies.items():
            find(kind, name)
        core = Master(
            time.monotonic(),
            boot=secrets.randbits(62),
            seed=secrets.randbits(63),
            keys_max=config.keys_max,
            timing=Timing(config.heartbeat, config.suspect_after, config.dead_after, min(1.0, config.heartbeat)),
            policies=policies,
            advice_bytes_per_second=config.advice_bandwidth,
        )
        self._shared: SharedLog | None = None
        self._follower: Follower | None = None
        if config.store != "embedded":
            from umbp.master.following import Follower  # the client of Redis costs every process that has no use for it 0.1 s
            from umbp.master.shared import SharedLog

            self._shared = SharedLog(config.store, lambda: self.url)
        self.master = MasterService(core, probe=self._prober, masters=self._masters, store=self._shared)
        if self._shared is not None:
            self._follower = Follower(self.master, self._shared)
        self.metrics = Metrics(lambda: readings(core, self.master.now()))
        self._doors = Doors(
            {b"/v1/plan": self.master.plan, b"/v1/locate": self.master.locate},
            {b"events": self.master.events, b"resync": self.master.piece},
            self._aiohttp,
            config.token,
            config.http,
        )
        self._stop = asyncio.Event()

    def __repr__(self) -> str:
        return f"<MasterServer {self.config.name} {self.state}>"

    @property
    def url(self) -> str:
        """How pools reach it."""
        return (self.config.advertise or self.http).url

    def _masters(self) -> list[str]:
        """This one first: whoever is told so is speaking to it."""
        others = [] if self._shared is None else [url for url in self._shared.masters if url != self.url]
        return [self.url, *others]

    async def run(self) -> None:
        """Serve until told to stop. Raises what stopped the start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        raise_file_limit()
        with contextlib.closing(bind_tcp(self.config.http)) as tcp:
            self.http = bound_address(self.config.http, tcp)
            await self._serve(tcp)

    async def _serve(self, tcp: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        listener = await loop.create_server(self._protocol, sock=tcp, backlog=BACKLOG)
        gc.collect()
        gc.freeze()
        self.state = "ready"
        facts = {
            "http": str(self.http),
            "name": self.config.name,
            "boot": self.master.core.boot,
            "store": self.config.store.partition(":")[0],
        }
        print("umbp.master ready " + json.dumps(facts), flush=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.master.run())]
                if self._follower is not None:
                    running.append(tasks.create_task(self._follower.run()))
                await self._stop.wait()
                self.state = "stopping"
                for task in running:
                    task.cancel()
        finally:
            listener.close()
            await self._doors.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await self._runner.cleanup()
            await self._prober.close()
            if self._shared is not None:
                await self._shared.close()
            log.info("stopped")

    def _protocol(self) -> asyncio.BaseProtocol:
        if len(self._doors.open) >= CONNECTIONS_MAX:
            return Refusal()
        return QuickDoor(self._doors)

    def _aiohttp(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or len(server.connections) >= CONNECTIONS_MAX:
            return Refusal()
        return server()

    # -- its own endpoints -------------------------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        own = [
            Endpoint("GET", "/", "Where to go from here", self._links, Links, access="local"),
            Endpoint("GET", "/healthz", "Alive?", self._health, Health, access="anyone"),
            Endpoint("GET", "/readyz", "Ready? 503 says: not now", self._readiness, Readiness, access="anyone", also=(503,)),
            Endpoint("GET", "/metrics", "Prometheus metrics", self._scrape, str, access="local", media_type="text/plain"),
        ]
        return make_application(
            [*own, *cluster_endpoints(self), *master_endpoints(self), *member_endpoints(self)],
            title="UMBP master",
            version=release(),
            token=self.config.token,
            listening=self.config.http,
            metrics=self.metrics,
            raw=[*member_routes(self), event_stream(self)],
        )

    async def _links(self, params: Nothing, body: Nothing) -> Links:
        paths = ("/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/cluster", "/v1/nodes", "/v1/hot", "/v1/links", "/v1/policies")
        return Links(name=self.config.name, links={path.rpartition("/")[2]: path for path in paths})

    async def _health(self, params: Nothing, body: Nothing) -> Reply:
        return Reply(Health(healthy=True, reasons=[]))

    async def _readiness(self, params: Nothing, body: Nothing) -> Reply:
        ready = self.state == "ready"
        answer = Readiness(state=self.state, ready=ready, reasons=[], warnings=self._warnings())
        return Reply(answer, status=200 if ready else 503)

    def _warnings(self) -> list[str]:
        trouble = self.master.store.trouble
        return [*self.config.warnings, *self.master.core.choices.faults, *([trouble] if trouble else [])]

    async def _scrape(self, params: Nothing, body: Nothing) -> Reply:
        return Reply(self.metrics.text(), media_type=CONTENT_TYPE)
