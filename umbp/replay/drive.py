"""The driver of a replay: hands requests to engine processes, kills some of them if asked to, and sums up what they report.

Requests are handed out in the trace's order to whichever engine is free, so that a session's pages are stored by one process and read by
others; never two of one agent at a time, since the second builds on what the first has stored. An engine that was killed is started again
and gets the same request once more. Engines read their requests from a pipe and end when it does: none outlives the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from umbp.errors import DeadlineExceeded, ProtocolError, UmbpError, from_wire
from umbp.replay.messages import LINE_BYTES_MAX, Answer, Done, Failure, Job, Ready, Setup, job_of
from umbp.replay.tally import Tally
from umbp.sim.workload import TraceRequest

LOOKAHEAD = 64  # requests looked through for one whose agent is free
START_SECONDS_MAX = 30.0
REQUEST_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 5.0
FIRST_GUESS_S = 0.02  # how long a request takes, before one was made


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do beside the requests themselves. ``kill_every``: one engine is killed about every so many requests; 0 for never."""

    setup: Setup
    processes: int = 1
    kill_every: int = 0


class Feed:
    """Requests in order, each at its time, one at a time of each agent. Requests without a session do not wait for each other."""

    def __init__(self, requests: Iterator[TraceRequest]) -> None:
        self._requests = enumerate(requests)
        self._ahead: deque[tuple[int, TraceRequest]] = deque()
        self._busy: set[tuple[str, str]] = set()
        self._freed = asyncio.Event()
        self._started: float | None = None

    async def next_or_none(self) -> tuple[int, TraceRequest] | None:
        """The next request, when it is due; None when all have been handed out."""
        while (found := self._take()) is None:
            if not self._ahead:
                return None
            await self._freed.wait()
        now = asyncio.get_running_loop().time()
        if self._started is None:
            self._started = now
        await asyncio.sleep(max(0.0, self._started + found[1].time_s - now))
        return found

    def done(self, request: TraceRequest) -> None:
        """Its agent may go on."""
        self._busy.discard((request.session, request.agent))
        self._freed.set()
        self._freed.clear()

    def _take(self) -> tuple[int, TraceRequest] | None:
        while len(self._ahead) < LOOKAHEAD and (following := next(self._requests, None)) is not None:
            self._ahead.append(following)
        for place, (_, request) in enumerate(self._ahead):
            agent = (request.session, request.agent)
            if agent not in self._busy:
                if request.session:
                    self._busy.add(agent)
                found = self._ahead[place]
                del self._ahead[place]
                return found
        return None


class EngineProcess:
    """One engine, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
        self.was_killed = False

    @classmethod
    async def start(cls, setup: Setup) -> EngineProcess:
        """A new process, connected to the pool."""
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "umbp.replay.engine"]
        # In a session of its own, Ctrl-C reaches the driver alone, which ends the engines in order.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LINE_BYTES_MAX, start_new_session=True)
        engine = cls(process)
        try:
            answer = await engine._exchange(setup, START_SECONDS_MAX)
            if not isinstance(answer, Ready):
                raise ProtocolError(f"an engine began with {type(answer).__name__}")
        except BaseException:
            await engine.close()
            raise
        return engine

    async def ask(self, job: Job) -> Done | None:
        """Make a request; None if the engine was killed before it had answered."""
        answer = await self._exchange(job, REQUEST_SECONDS_MAX)
        if answer is not None and not isinstance(answer, Done):
            raise ProtocolError(f"an engine answered a request with {type(answer).__name__}")
        return answer

    def kill(self) -> None:
        """SIGKILL, whatever it is doing."""
        self.was_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Let it end by itself; kill it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def _exchange(self, message: Setup | Job, seconds_max: float) -> Answer | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        try:
            async with asyncio.timeout(seconds_max):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    stdin.write(msgspec.json.encode(message) + b"\n")
                    await stdin.drain()
                line = await stdout.readline()
        except TimeoutError:
            self.kill()
            raise DeadlineExceeded(f"an engine did not answer within {seconds_max:g} s") from None
        if not line.endswith(b"\n"):
            status = await self._process.wait()
            if self.was_killed:
                return None
            raise UmbpError(f"an engine ended by itself with status {status}")
        answer = self._decoder.decode(line)
        if isinstance(answer, Failure):
            raise from_wire(answer.code, answer.text)
        return answer


class Driver:
    """A replay on its way. ``tally`` can be read at any time, also after `run` was interrupted."""

    def __init__(self, plan: Plan, requests: Iterator[TraceRequest], on_progress: Callable[[Tally], None]) -> None:
        self.plan = plan
        self.tally = Tally(plan.setup.object_bytes)
        self._requests = requests
        self._on_progress = on_progress
        self._dice = random.Random(plan.setup.seed)
        self._request_s = FIRST_GUESS_S

    def __repr__(self) -> str:
        return f"<Driver of {self.plan.processes} engines, {self.tally.requests} requests made>"

    async def run(self) -> Tally:
        """Make all requests. The first error of an engine ends all."""
        feed, failed = Feed(self._requests), list[BaseException]()
        try:
            async with asyncio.TaskGroup() as engines:
                for _ in range(self.plan.processes):
                    engines.create_task(self._engine(feed))
        except* (UmbpError, OSError) as group:
            failed += group.exceptions
        if failed:
            raise failed[0]
        return self.tally

    async def _engine(self, feed: Feed) -> None:
        """One engine's life: all its processes, one after the other."""
        process = await EngineProcess.start(self.plan.setup)
        try:
            while (following := await feed.next_or_none()) is not None:
                index, request = following
                ideal_tokens = self.tally.ask(request)
                while (done := await self._ask(process, job_of(index, request))) is None:
                    self.tally.kills += 1
                    await process.close()
                    process = await EngineProcess.start(self.plan.setup)
                feed.done(request)
                self.tally.add(request, done, ideal_tokens)
                self._on_progress(self.tally)
        finally:
            await process.close()

    async def _ask(self, process: EngineProcess, job: Job) -> Done | None:
        """One request, in the middle of which the engine may be killed."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        if self.plan.kill_every and self._dice.random() * self.plan.kill_every < 1:
            loop.call_later(self._dice.uniform(0, 2 * self._request_s), process.kill)
        done = await process.ask(job)
        self._request_s += 0.1 * (loop.time() - started - self._request_s)
        return done
