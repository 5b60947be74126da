"""A node for tests of REST: a real core pool on plain arrays, a clock that tests move, and the application over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from umbp.config import PoolConfig
from umbp.core.pool import Limits, Pool
from umbp.grammar import Address
from umbp.layout import Layout, Namespace
from umbp.metrics import Metrics
from umbp.pool.cluster import ClusterSide
from umbp.pool.errands import Errands
from umbp.pool.fetching import Fetching
from umbp.pool.handover import Handovers
from umbp.pool.memory_moving import MemoryMoving
from umbp.pool.readings import readings
from umbp.pool.rest import make_app
from umbp.store.bell import Bell
from umbp.store.index import IndexWriter, buckets_for

ENTRIES = 512
CAPACITY = 1 << 20


class FakeNode:
    """Fulfils `umbp.pool.node.Node`."""

    def __init__(self, *, token: str = "", eviction: str = "lru", capacity: int = CAPACITY, http: str = "127.0.0.1", **limits: Any) -> None:
        arrays = [np.zeros((buckets_for(ENTRIES), 8), np.uint64), np.zeros((ENTRIES, 8), np.uint64), np.zeros(1, np.uint64)]
        table = IndexWriter(*arrays, 7, np.zeros(1, np.uint64))
        rows, counter = np.zeros((16, 256), np.uint64), np.zeros(1, np.uint64)
        self.pool = Pool(table, rows, counter, capacity, Limits(**limits), eviction=eviction, admission="always")
        self.fetching = Fetching(self.pool, np.zeros(0, np.uint8), Bell(np.zeros(2, np.uint64)), self.now, self.wake, ())
        self.errands = Errands(self.fetching, Handovers())
        self.ssd = None
        self.shelf = SimpleNamespace(granted_pages=0, stale_pages=0)
        self.config = PoolConfig(token=token, socket="/run/umbp/default.sock", http=Address(http, 7411))
        self.moving = MemoryMoving(self.config, self.pool, np.zeros(0, np.uint8), self.now)
        self.metrics = Metrics(lambda: readings(self))
        self.name, self.boot, self.dram_bytes, self.socket = "default", 123, capacity, self.config.socket
        self.http = Address("127.0.0.1", 7411)
        self.started, self.state = 100.0, "ready"
        self.warnings: list[str] = []
        self.unhealthy: list[str] = []
        self.woken = self.kept_pins = 0
        self.time = 1000.0
        self.cluster = ClusterSide(self.config, self.pool, self.name, self.boot, self.http)

    def now(self) -> float:
        return self.time

    def wake(self) -> None:
        self.woken += 1

    async def keep_pins(self) -> None:
        self.kept_pins += 1

    def sessions(self) -> list[Any]:
        return [SimpleNamespace(session=1, pid=42, client="test", opened=900.0, connected=True)]

    def namespace(self, model: str = "m", object_bytes: int = 4096, **fields: Any) -> int:
        """Open a namespace; its row."""
        identity = Namespace(model=model, page_tokens=64, layout=Layout.opaque(object_bytes), **fields)
        return self.pool.open_namespace(1, identity.digest(), identity.canonical(), object_bytes).row

    def put(self, row: int, *numbers: int) -> list[int]:
        """Reserve and commit; the status codes."""
        made = self.pool.reserve(self.time, 1, row, key_array(*numbers), b"", 0.0)
        status = made.status.copy()
        if len(made.ids):
            status[made.mine] = self.pool.commit(self.time, 1, made.number, np.ones(len(made.ids), bool), None)
        return list(map(int, status))

    def note(self, row: int, *numbers: int) -> None:
        """Ask for keys."""
        self.pool.note(self.time, row, key_array(*numbers))

    def digest(self) -> tuple[Any, ...]:
        """All that a refused request must not have changed."""
        self.pool.check()
        objects = self.pool.objects
        quotas = [state.account.quota_bytes for state in self.pool.namespaces.values()]
        numbers = [state.account.number for state in self.pool.namespaces.values()]
        policies = (self.pool.eviction, self.pool.admission_name)
        return (objects.state.tobytes(), objects.pins.tobytes(), quotas, numbers, policies, sorted(self.pool.leases.pins))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[TestClient]:
        """Over TCP on loopback."""
        async with TestClient(TestServer(make_app(self))) as client, self.in_cluster():
            yield client

    @asynccontextmanager
    async def in_cluster(self) -> AsyncIterator[None]:
        """A member of its own cluster of one, which has heard what it holds."""
        task = asyncio.get_running_loop().create_task(self.cluster.run())
        try:
            async with asyncio.timeout(10.0):
                await self.cluster.reporter.wait_synced()
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.cluster.close()

    @asynccontextmanager
    async def unix_client(self, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
        """Over a Unix socket."""
        runner = web.AppRunner(make_app(self))
        await runner.setup()
        path = str(folder / "a.sock")
        await web.UnixSite(runner, path).start()
        try:
            async with aiohttp.ClientSession("http://umbp", connector=aiohttp.UnixConnector(path)) as session:
                yield session
        finally:
            await runner.cleanup()


def key_array(*numbers: int) -> np.ndarray:
    """(n, 32) uint8 keys made from integers."""
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def key_text(number: int) -> str:
    """The same as hex digits."""
    return number.to_bytes(32, "big").hex()


async def get(client: Any, path: str, status: int = 200) -> Any:
    """The JSON of a GET that must end with this status."""
    async with client.get(path) as response:
        assert response.status == status, await response.text()
        return await response.json(content_type=None)


async def call(client: Any, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    """The JSON of any request that must end with this status."""
    async with client.request(method, path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json(content_type=None)
