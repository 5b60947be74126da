"""The pool process: one event loop around one `core.pool.Pool`.

Theory of operation
-------------------
    starting -> ready -> stopping
Start, each step able to say no before anything of the next exists: configuration, socket and port (bound, so a busy one is an error at
once), memory (in a thread; HTTP answers ``/healthz`` and ``/readyz`` meanwhile), adoption of what the segment held, then the ready line.

Everything that changes state happens in the loop, one call of the core at a time. What takes long runs elsewhere: faulting in memory,
checksums. `_housekeeping` lets time pass for the core in slices of at most a few milliseconds, woken early when a request has made work;
`_heed_notes` enters what clients asked for, a slice of a millisecond at a time.

Stop (SIGTERM, SIGINT): no new sessions, listeners closed, sessions cut, segment marked stopped and kept (or released) within
`STOP_SECONDS_MAX`. A SIGKILL leaves the segment as it is, which the next start takes over: there is no state that only memory had, except
leases and clients' pins (they end), and histories of the policies.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket as sockets
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy.ma  # noqa: F401 - `np.unique` imports it at its first call: 20 ms in the middle of somebody's request
from aiohttp import web

from umbp import wire
from umbp.admin.listening import BACKLOG, Refusal, bind_tcp, bound_address, raise_file_limit
from umbp.config import PoolConfig
from umbp.core.groups import Groups
from umbp.core.passage import passage_bytes
from umbp.core.pool import Limits, Pool
from umbp.errors import Conflict, SegmentError
from umbp.grammar import format_size
from umbp.master.readings import readings as master_readings
from umbp.metrics import Metrics, Reading
from umbp.policies.base import ADMISSION, CLEANING, EVICTION, STRIPING, find
from umbp.pool import dram as dram_start
from umbp.pool import regions
from umbp.pool.cluster import ClusterSide
from umbp.pool.documents import status_document
from umbp.pool.door import FrontDoor
from umbp.pool.errands import Errands
from umbp.pool.fetching import Fetching
from umbp.pool.handover import Handovers
from umbp.pool.meetings import Meetings
from umbp.pool.memory_moving import MemoryMoving
from umbp.pool.owners import Owner, Owners
from umbp.pool.pins import KeptPins
from umbp.pool.readings import readings
from umbp.pool.references import References
from umbp.pool.rest import make_app
from umbp.pool.sessions import Session
from umbp.pool.shelf import PoolShelf
from umbp.pool.sources import Source
from umbp.pool.ssd import SsdSide
from umbp.pool.ssd_source import SsdSource
from umbp.pool.sums import Summer
from umbp.pool.turns import Turns
from umbp.store import segment as segments
from umbp.store.ssd_hands import Hands, share
from umbp.transport.nixl import NixlAgent
from umbp.transport.sending import FIRST_LINE, PageServer
from umbp.types import I64, U64

log = logging.getLogger("umbp.pool")
STOP_SECONDS_MAX = 5.0
TICK_SECONDS = 0.05
BETWEEN_SECONDS = 0.02  # two rounds of looking after everything, half a millisecond each, but where writers wait for room
HTTP_CONNECTIONS_MAX = 1024


class StoppedEarly(Exception):
    """A signal came while memory was being faulted in."""


class PoolServer:
    """The process. `run` is its life."""

    def __init__(self, config: PoolConfig, sources: Sequence[Source] = (), hands: Sequence[Hands] = ()) -> None:
        """``sources``: where pages come from that are not in DRAM, besides those that the configuration names.

        ``hands``: processes that serve the disks of the SSD tier, one each (`umbp.store.ssd_hands`), or none.
        """
        self.config = config
        self.sources = list(sources)
        self.hands = hands
        self.name = config.name
        self.started = time.monotonic()
        self.state: Literal["starting", "ready", "stopping"] = "starting"
        self.progress = (0, 0)
        self._warnings: list[str] = []
        self.metrics = Metrics(self._readings)
        self.http = config.http
        self.socket = config.socket
        self.turns = Turns()
        self._wake = asyncio.Event()
        self._noted = asyncio.Event()
        self._stop = asyncio.Event()
        self.ssd: SsdSide | None = None
        self.handovers = Handovers()
        self.references: References | None = None
        self._sessions: set[Session] = set()
        self._undecided = 0  # TCP connections that have not said yet what they want

    def __repr__(self) -> str:
        return f"<PoolServer {self.name} {self.state}>"

    # -- what sessions and REST ask of it ---------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on a clock that only grows."""
        return time.monotonic()

    def wake(self) -> None:
        """There may be something to do before the next tick."""
        self._wake.set()
        self.summer.committed()
        self.cluster.reporter.wake()

    async def keep_pins(self) -> None:
        """Operators' pins are others than before: the next start is to find them."""
        await self.pins.keep()

    def noted(self) -> None:
        """There are requests to be entered in the history."""
        self._noted.set()

    def observe(self, op: str, seconds: float) -> None:
        """A session's message was answered in this time."""
        self.metrics.observe(op, seconds)

    def status_document(self) -> dict[str, Any]:
        """What ``/v1/status`` says."""
        document: dict[str, Any] = msgspec.to_builtins(status_document(self))
        return document

    async def make_sums(self, ids: I64, versions: U64) -> U64:
        """Checksums now, for a reader that wants to verify what has none yet."""
        return await self.summer.make(ids, versions)

    @property
    def unhealthy(self) -> list[str]:
        """Why this pool should be started anew: without its file no client finds the segment any more, nor would the next start."""
        if self.state != "ready" or self.segment.is_at(self.segment.path):
            return []
        return [f"{self.segment.path} was removed: who has it mapped goes on, nobody else can come; start this pool anew"]

    @property
    def warnings(self) -> list[str]:
        """What is not as it was asked for: fall-backs at the start, policies that failed, and what keeps it from its master."""
        if self.state != "ready":
            return self._warnings
        disks = self.ssd.warnings if self.ssd else []
        return self._warnings + self.pool.faults() + self.cluster.warnings + disks + self.pins.warnings

    @property
    def boot(self) -> int:
        """Boot id of the segment."""
        return self.segment.boot

    @property
    def dram_bytes(self) -> int:
        """Bytes of pages this pool can hold."""
        return self.segment.geometry.data_bytes

    def _readings(self) -> Iterator[Reading]:
        yield from readings(self)
        if self.state == "ready" and not self.config.master:
            yield from master_readings(self.cluster.master.core, self.cluster.now())

    def sessions(self) -> list[Owner]:
        """Clients, connected or still owning memory."""
        return list(self.owners.by_session.values())

    # -- life --------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until told to stop. Raises what stopped the start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        raise_file_limit()
        find(EVICTION, self.config.eviction)  # an unknown name stops the start before there is anything to clean up
        find(ADMISSION, self.config.admission)
        for kind in (EVICTION, ADMISSION, CLEANING, STRIPING):
            find(kind, getattr(self.config, f"ssd_{kind}"), f"ssd_{kind}")
        with contextlib.closing(bind_tcp(self.config.http)) as tcp, contextlib.closing(bind_unix(self.socket)) as unix:
            self.http = bound_address(self.config.http, tcp)
            try:
                await self._serve(unix, tcp)
            except StoppedEarly:
                log.info("stopped before it was ready; nothing is left of it")
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.socket)

    async def _serve(self, unix: sockets.socket, tcp: sockets.socket) -> None:
        loop = asyncio.get_running_loop()
        # Until the pool stands, HTTP is served by an application that only says so.
        self._http = starter = await self._runner(web.Application(middlewares=[self._not_yet]))
        http = await loop.create_server(self._tcp_door, sock=tcp, backlog=BACKLOG)
        start = loop.run_in_executor(None, dram_start.acquire, self.config, self._on_progress)
        try:
            slice_ = await start
        except BaseException:
            http.close()
            await starter.cleanup()
            raise
        try:
            self._warnings = slice_.fallbacks
            self._build(slice_)
            if self.ssd:
                await self.ssd.open()
            self._http = await self._runner(make_app(self))
            door = await loop.create_unix_server(self._front_door, sock=unix, backlog=BACKLOG)
            gc.collect()
            gc.freeze()  # what was made until here stays: a later collection need not walk through it while clients wait
            self.state = "ready"
            self.segment.words[segments.H_STATE] = segments.SERVING
            self._say_ready()
            async with asyncio.TaskGroup() as tasks:
                running = [self._housekeeping(), self._heed_notes(), self.summer.run(), self.fetching.run(), self.cluster.run()]
                running += [self.moving.run(), *([self.ssd.run()] if self.ssd else [])]
                background = [tasks.create_task(each) for each in running]
                await self._stop.wait()
                self.state = "stopping"
                if self.ssd:
                    self.ssd.stopping = True
                for task in background:
                    task.cancel()
            door.close()
        finally:
            http.close()
            await self._shut(slice_, starter)

    def _build(self, slice_: dram_start.Dram) -> None:
        config, self.segment = self.config, slice_.segment
        geometry = self.segment.geometry
        ssd = bool(config.ssd) and config.ssd_policy != "off"
        limits = _limits(config, geometry, elsewhere=bool(self.sources or config.master or ssd))

        def make() -> Pool:
            return Pool(
                self.segment.writer(),
                self.segment.namespaces,
                self.segment.words[segments.H_NUMBERS : segments.H_NUMBERS + 1],
                self.segment.geometry.data_bytes,
                limits,
                eviction=config.eviction,
                admission=config.admission,
                regions=regions.cut(config),
            )

        self.pool = make()
        unfinished: dict[int, int] = {}
        if slice_.attached:
            try:
                unfinished = self.pool.adopt(self.now())
            except SegmentError as error:
                log.error("%s: emptied", error)
                self.segment.entries[:] = 0
                self.segment.buckets[:] = 0
                self.segment.namespaces[:, 0] = 0
                self.pool = make()
        self.summer = Summer(self.pool, self.segment.data.array, self.now)
        self.summer.committed()
        self.moving = MemoryMoving(config, self.pool, self.segment.data.array, self.now)
        rounds = self.segment.words[segments.H_ROUNDS : segments.H_ROUNDS + 1]
        self.meetings = Meetings(Groups(self.pool.leases, self.pool.scratch, rounds), self.now)
        self.cluster = ClusterSide(config, self.pool, self.name, self.boot, self.http)
        self.cluster.reporter.turn, self.neighbours = self.turns.wait, self.cluster.neighbours
        self.agent = NixlAgent(f"{self.name}-{self.boot}", self.segment.data.array) if config.transport == "nixl" else None
        self.sources += self.cluster.sources(self.agent)
        if ssd:
            share(self.hands, self.segment, slice_.lock)
            self.ssd = SsdSide(config, self.pool, self.segment.data.array, self.now, turns=self.turns, hands=self.hands)
            self.sources.insert(0, SsdSource(self.ssd))
            self.references = References(self.ssd, self.handovers) if config.ssd_files else None
            self.cluster.more_tiers.append(self.ssd.capacity)
            self.cluster.reporter.keeps.append(self.ssd.keys)
        self.fetching = Fetching(
            self.pool, self.segment.data.array, self.segment.bell(), self.now, self.wake, self.sources, config.fetch, self.turns
        )
        self.errands = Errands(self.fetching, self.handovers)
        self.cluster.copies_by(self.fetching)
        self.shelf = PoolShelf(self.name, self.pool, self.segment, self.make_sums, self.fetching.bring)
        windows = {"nixl": self.agent} if self.agent else {}
        self.pages = PageServer(self.shelf, token=config.token, listening=self.http, windows=windows)
        self.owners = Owners(self, config.sessions_max)
        self.owners.adopt(unfinished)
        self.pins = KeptPins(self.pool.leases, self.segment.path, int(self.segment.words[segments.H_SEED]))
        if slice_.attached:
            log.info("%d pins of operators hold on", self.pins.restore(self.now()))
        else:
            self.pins.forget()
        self.pool.spares.recall = self.owners.recall
        if slice_.attached:
            log.info("took over %d objects, %s", len(self.pool.objects.live_ids()), format_size(self.pool.objects.used_bytes))

    async def _shut(self, slice_: dram_start.Dram, starter: web.AppRunner) -> None:
        for session in list(self._sessions):
            session.close()
        runners = {self._http, starter}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await asyncio.gather(*(runner.cleanup() for runner in runners))
                while self._sessions:  # noqa: ASYNC110 - the end of each is heard in one of the next rounds, and needs the segment
                    await asyncio.sleep(0)
        if hasattr(self, "owners"):
            self.owners.close()
            self.meetings.close()
            await self.cluster.close()
            self.errands.close()
            await self.fetching.close()
            await self.pages.close()
            if self.agent:
                self.agent.close()
            if self.references:
                self.references.close()
            if self.ssd:
                self.ssd.close()
            self.summer.close()
            self.moving.close()
            self.segment.words[segments.H_STATE] = segments.STOPPED
            kept = "released" if self.config.on_exit == "release" else "kept for the next start (--on-exit release gives it back)"
            log.info("stopped; %s of memory %s", format_size(self.dram_bytes), kept)
        slice_.close(release=self.config.on_exit == "release")

    async def _housekeeping(self) -> None:
        said: list[str] = []
        looked = float("-inf")
        while True:
            if (faults := self.pool.faults()) != said:
                said = faults
                log.error("%s", "; ".join(faults) or "policies are well again")
            busy = self.pool.tick(self.now())
            await self.turns.wait()
            if busy and self.now() < looked + TICK_SECONDS:
                continue
            looked = self.now()
            self.owners.sweep()
            self.fetching.tick(self.now())
            self.errands.tick(self.now())
            if self.ssd:
                self.ssd.tick(self.now())
            if self.references:
                self.references.tick(self.now())
            self.cluster.reporter.wake()  # of what was evicted
            if busy:
                await self.turns.wait()
                continue
            done = self.now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
            if not self.pool.room.pressed and (early := done + BETWEEN_SECONDS - self.now()) > 0:
                await asyncio.sleep(early)
            self._wake.clear()
            await self.turns.wait()

    async def _heed_notes(self) -> None:
        while True:
            await self._noted.wait()
            self._noted.clear()
            await self.turns.wait()
            while self.pool.history.heed(self.now()):
                await self.turns.wait()

    # -- connections -------------------------------------------------------------------------------------------------------------------

    def _front_door(self) -> FrontDoor:
        doors = {wire.UPGRADE_REQUEST: (self._new_session, False), wire.HANDOVER_REQUEST: (self.handovers.door, False)}
        return FrontDoor(doors, self._http_protocol)

    def _tcp_door(self) -> asyncio.BaseProtocol:
        if self.state != "ready":
            return self._http_protocol()
        if self._undecided >= HTTP_CONNECTIONS_MAX:
            return Refusal()
        self._undecided += 1
        return FrontDoor({FIRST_LINE: (self._pages_door, True)}, self._http_protocol, self._decided)

    def _pages_door(self) -> asyncio.Protocol:
        return self.pages.door() if self.state == "ready" else Refusal()

    def _decided(self) -> None:
        self._undecided -= 1

    def _new_session(self) -> asyncio.Protocol:
        if self.state != "ready":  # who has connected before, and says only now what for
            return Refusal()
        session = Session(self, self.owners, self._session_number, on_closed=self._sessions.discard)
        self._sessions.add(session)
        return session

    def _session_number(self) -> int:
        words = self.segment.words
        words[segments.H_SESSIONS] += 1
        return int(words[segments.H_SESSIONS])

    def _http_protocol(self) -> asyncio.BaseProtocol:
        server = self._http.server
        if server is None or len(server.connections) >= HTTP_CONNECTIONS_MAX:
            return Refusal()
        return server()

    async def _runner(self, app: web.Application) -> web.AppRunner:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        return runner

    @web.middleware
    async def _not_yet(self, request: web.Request, handler: Any) -> web.StreamResponse:
        done, total = self.progress
        body = {"state": self.state, "faulted_in_bytes": done, "bytes": total}
        return web.json_response(body, status=200 if request.path == "/healthz" else 503, headers={"Retry-After": "1"})

    # -- what it says ------------------------------------------------------------------------------------------------------------------

    def _on_progress(self, done: int, total: int) -> None:
        """From the thread that faults memory in: a line for every tenth, where it takes long enough to wonder."""
        if self._stop.is_set():
            raise StoppedEarly
        before, self.progress = self.progress[0], (done, total)
        if total >= 1 << 30 and (done * 10 // total) != (before * 10 // total):
            print(f"umbp.pool memory {format_size(done)} of {format_size(total)}", file=sys.stderr, flush=True)

    def _say_ready(self) -> None:
        facts = {"socket": self.socket, "http": str(self.http), "name": self.name, "dram_bytes": self.dram_bytes, "boot": self.boot}
        print("umbp.pool ready " + json.dumps(facts), flush=True)


def _limits(config: PoolConfig, geometry: segments.Geometry, *, elsewhere: bool) -> Limits:
    """``elsewhere``: pages come from other places than this pool's clients, and may have to pass through."""
    last = regions.parts(config, geometry)[-1][1]
    return Limits(
        lease_seconds=config.lease_seconds,
        lease_seconds_max=config.lease_seconds_max,
        lease_share=config.lease_share,
        reservation_seconds=config.reservation_seconds,
        watermark_high=config.watermark_high,
        watermark_low=config.watermark_low,
        checksum=config.checksum,
        passage_bytes=passage_bytes(geometry.data_bytes, last) if elsewhere else 0,
        level_high=config.numa_marks[0],
        level_low=config.numa_marks[1],
        promote=config.numa_promote,
    )


def bind_unix(path: str) -> sockets.socket:
    """A listening Unix socket of mode 0600. A stale file goes; a live listener is a Conflict."""
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise Conflict(
            f"cannot make the folder {folder}: {error.strerror}", field="socket", example="--socket /run/umbp/pool.sock"
        ) from None
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise Conflict(f"{path} exists and is not a socket", field="socket", example="--socket /run/umbp/pool.sock")
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                os.unlink(path)
            except OSError as error:
                raise Conflict(f"{path} is in use ({error})", field="socket", example="--socket /run/umbp/second.sock") from None
            else:
                raise Conflict(f"a process is listening on {path}", field="socket", example="--name second") from None
    bound = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    before = os.umask(0o177)  # the file has its mode from the first moment
    try:
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise Conflict(f"cannot listen on {path}: {error.strerror}", field="socket", example="--socket /run/umbp/pool.sock") from None
    finally:
        os.umask(before)
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return bound
