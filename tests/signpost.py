"""A signpost: answers a pool's questions who has what from a table that the test fills, over the master's own protocol and real HTTP.

async with Signpost() as master:                     # master.url
    master.add(pool, space, keys)                    # this pool has these pages
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from tests.pools import PoolProcess
from umbp import wire
from umbp.core.plans import NOTHING, Plan, Run, Source
from umbp.master.protocol import FRAME, LocateAnswer, LocateRequest, RouteRequest, encode_plan
from umbp.types import Tier


class Signpost:
    """Runs in a thread of its own, so that plain and asyncio tests can use it alike."""

    def __init__(self) -> None:
        self.table: dict[tuple[str, bytes], list[Source]] = {}  # the first one is named, unless it is excluded
        self.asked: list[tuple[str, int, bool, list[str]]] = []  # kind, keys, count, exclude
        self.failed: list[tuple[str, str]] = []
        self.seconds = 0.001  # that each run is said to take
        self.delay = 0.0
        self._avoided: dict[str, float] = {}  # until when nobody is sent to a node that failed
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Signpost:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def add(self, pool: PoolProcess, space: Any, keys: np.ndarray, **changes: Any) -> None:
        """This pool has these pages; ``changes`` to what is said of it, such as another address."""
        source = dataclasses.replace(Source(pool.name, int(pool.ready["boot"]), {"http": str(pool.ready["http"])}), **changes)
        for key in keys:
            self.table.setdefault((space.identity.digest().hex(), key.tobytes()), []).append(source)

    # -- the server --------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=4 << 20)
        app.router.add_post("/v1/plan", self._answered(self._plan))
        app.router.add_post("/v1/locate", self._answered(self._locate))
        app.router.add_post("/v1/members/{node}/failed", self._failed)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    def _answered(self, answer: Callable[[bytes], bytes]) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            await asyncio.sleep(self.delay)
            return web.Response(body=answer(body), content_type=FRAME)

        return handle

    def _plan(self, body: bytes) -> bytes:
        request, blob = wire.decode(body, msgspec.json.Decoder(RouteRequest))
        self.asked.append(("plan", request.n, request.count and not request.again, request.exclude))
        runs: list[Run] = []
        for at, key in enumerate(blob.keys(request.n)):
            holders = [each for each in self._holders(request.namespace, key) if each.node not in request.exclude]
            if not holders:
                break
            if runs and runs[-1].source is holders[0]:
                runs[-1] = dataclasses.replace(runs[-1], stop=at + 1)
            else:
                runs.append(Run(at, at + 1, holders[0], Tier.DRAM, self.seconds))
        pages = runs[-1].stop if runs else 0
        return encode_plan(Plan(tuple(runs), pages, pages, 0.001) if runs else NOTHING)

    def _locate(self, body: bytes) -> bytes:
        request, blob = wire.decode(body, msgspec.json.Decoder(LocateRequest))
        self.asked.append(("locate", request.n, False, []))
        copies = [len(self._holders(request.namespace, key)) for key in blob.keys(request.n)]
        held = np.array(copies, np.uint8)
        return wire.encode(LocateAnswer(request.n), held, np.where(held > 0, 1 << Tier.DRAM, 0).astype(np.uint8))

    def _holders(self, namespace: str, key: np.ndarray) -> list[Source]:
        now = time.monotonic()
        return [each for each in self.table.get((namespace, key.tobytes()), []) if self._avoided.get(each.node, 0.0) < now]

    async def _failed(self, request: web.Request) -> web.Response:
        said = await request.json()
        self.failed.append((request.match_info["node"], said["why"]))
        self._avoided[request.match_info["node"]] = time.monotonic() + 0.5
        return web.json_response({"state": "suspect"})
