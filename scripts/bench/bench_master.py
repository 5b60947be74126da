"""One master over many nodes: routes, existence, events, resyncs and deaths, by the real protocol over loopback; one JSON line a row.

    python scripts/bench/bench_master.py [--keys 10000000] [--nodes 64] [--seconds 5]

The master is a process of its own, on one core. Simulated pools (a child process) join it and send what they hold as pools do: numbered
bundles, and pieces of a resync; keys are random, a prompt is 2,200 keys of one node. Times are of whole calls over one connection, the
HTTP included; ``master_cpu_ms`` is what the master itself needed for each, whatever else the machine did. The floor of a route is the same
bytes to a bare aiohttp handler that reads them and answers as much, in the same run: ``ratio`` is the route over that. ``others_per_s``:
what else the master did meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import msgspec
import numpy as np

from tests.masters import MasterProcess
from tests.redis_process import SERVER, RedisProcess
from umbp.core.sweeps import chained
from umbp.master import protocol as say
from umbp.wire import encode

PROMPT = 2200
DIGEST = "ab" * 32
PAGE_BYTES = 2_600_000
BUNDLE = 4096
SMALL = 64  # keys of a bundle that tells of one put
SINGLE_SECONDS = 3.0


class Call:
    """HTTP over one connection that is kept: as little as can be between the clock and the master."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=60.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = f"{host}:{port}"

    def __call__(self, path: str, body: bytes, kind: str = say.FRAME) -> bytes:
        self.send(path, body, kind)
        return self.answer()

    def send(self, path: str, body: bytes, kind: str = say.FRAME) -> None:
        self._socket.sendall(self.request(path, body, kind))

    def answer(self) -> bytes:
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._more()
        header, _, content = answer.partition(b"\r\n\r\n")
        length = int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(content) < length:
            content += self._more()
        assert header.startswith(b"HTTP/1.1 200"), header + content
        return content

    def request(self, path: str, body: bytes, kind: str = say.FRAME) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def together(self, requests: list[bytes]) -> None:
        """Several requests at once, and all their answers."""
        self._socket.sendall(b"".join(requests))
        answers, seen = 0, b""
        while answers < len(requests):
            part = self._more()
            answers += (seen + part).count(b"HTTP/1.1 200")
            seen = part[-11:]  # one less than what is looked for

    def json(self, path: str, body: Any) -> Any:
        return json.loads(self(path, msgspec.json.encode(body), "application/json"))

    def _more(self) -> bytes:
        part = self._socket.recv(1 << 20)
        assert part, "the connection was closed"
        return part


def node_keys(node: int, count: int) -> np.ndarray:
    """(count, 4) key words of a node: the same in every process."""
    return np.random.default_rng(1000 + node).integers(1, 1 << 63, (count, 4), dtype=np.uint64)


class Node:
    """A simulated pool. ``data`` is a connection that carries nothing but what nodes hold, as that of a pool does."""

    def __init__(self, call: Call, data: Call, number: int, name: str = "") -> None:
        self.data, self.number, self.name = data, number, name or f"node{number}"
        tiers = [say.Capacity(tier=2, capacity_bytes=1 << 40, used_bytes=1 << 39, keys=1)]
        joined = call.json("/v1/members", say.Join(node=self.name, boot=number + 1, place=self.name, addresses={}, tiers=tiers))
        self.registration, self.bundle, self.tiers = joined["registration"], 0, tiers

    def beat(self, call: Call) -> None:
        call.json(f"/v1/members/{self.name}/heartbeat", say.Heartbeat(registration=self.registration, tiers=self.tiers))

    def sweep(self, words: np.ndarray, number: int = 1) -> None:
        for path, frame in self.pieces(words, number):
            answer = self.data(path, frame)
            assert b'"gap":false' in answer, answer

    def pieces(self, words: np.ndarray, number: int) -> Iterator[tuple[str, bytes]]:
        """All of them: path and frame."""
        count, total = len(words), 0
        for index, start in enumerate(range(0, count, BUNDLE)):
            part = words[start : start + BUNDLE]
            last = start + BUNDLE >= count
            spaces, tiers = [(DIGEST, PAGE_BYTES, len(part))], np.full(len(part), 2, np.uint8)
            total = chained(total, say.content_sum(part, tiers, [(bytes.fromhex(DIGEST), PAGE_BYTES, len(part))]))
            at = {"registration": self.registration, "sweep": number, "index": index, "bundle": self.bundle}
            header = say.Piece(**at, total=total, last=last, n=len(part), spaces=spaces)
            yield f"/v1/members/{self.name}/resync", encode(header, part, tiers)

    def events(self, words: np.ndarray, present: np.ndarray) -> None:
        self.data(*self.bundled(words, present))

    def bundled(self, words: np.ndarray, present: np.ndarray) -> tuple[str, bytes]:
        """The next bundle: path and frame."""
        self.bundle += 1
        n = len(words)
        header = say.Events(registration=self.registration, number=self.bundle, n=n, spaces=[(DIGEST, PAGE_BYTES, n)])
        return f"/v1/members/{self.name}/events", encode(header, words, np.full(n, 2, np.uint8), present)


# -- the child: pools --------------------------------------------------------------------------------------------------------------


def be_pools(host: str, port: int, nodes: int, keys: int) -> None:
    """Join, send everything, then do what is read from standard input, a line each; answers are lines too."""
    call, data, beats, members = Call(host, port), Call(host, port), Call(host, port), list[Node]()

    def beat() -> None:
        while True:
            for member in list(members):
                member.beat(beats)
            time.sleep(0.5)

    threading.Thread(target=beat, daemon=True).start()
    for number in range(nodes):
        members.append(Node(call, data, number))
        members[-1].sweep(node_keys(number, keys // nodes))
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, rest = line.partition(" ")
        began = time.monotonic()
        if verb == "churn":  # events as fast as they are taken, for so many seconds
            seconds, count = float(rest), 0
            random = np.random.default_rng(7)
            while time.monotonic() - began < seconds:
                fresh = random.integers(1, 1 << 63, (BUNDLE // 2, 4), dtype=np.uint64)
                gone = fresh[::-1].copy()
                member = members[count // BUNDLE % nodes]
                member.events(fresh, np.ones(len(fresh), np.uint8))
                member.events(gone, np.zeros(len(gone), np.uint8))
                count += 2 * len(fresh)
            print(count / (time.monotonic() - began), flush=True)
        elif verb == "trickle":  # all nodes at once tell of a put each, over connections of their own, again and again
            print(trickle(members, [Call(host, port) for _ in members], float(rest)), flush=True)
        elif verb == "herd":  # all nodes send all that they have, at once
            herd(members, [Call(host, port) for _ in members], keys // nodes, int(rest))
            print(time.monotonic() - began, flush=True)
        elif verb == "giant":  # a further node with so many keys
            member = Node(call, data, nodes + 7, "giant")
            words = node_keys(nodes + 7, int(rest))
            began = time.monotonic()
            member.sweep(words)
            print(time.monotonic() - began, flush=True)


def trickle(members: list[Node], calls: list[Call], seconds: float) -> float:
    """Bundles a second: half of their keys go, half come."""
    began, count = time.monotonic(), 0
    words = np.random.default_rng(8).integers(1, 1 << 63, (64 * SMALL, 4), dtype=np.uint64)
    present = np.arange(SMALL, dtype=np.uint8) // (SMALL // 2)
    while time.monotonic() - began < seconds:
        for member, call in zip(members, calls, strict=True):
            start = count % 63 * SMALL + member.number % SMALL
            call.send(*member.bundled(words[start : start + SMALL], present))
            count += 1
        for call in calls:
            assert b'"gap":false' in call.answer()
    return count / (time.monotonic() - began)


def herd(members: list[Node], calls: list[Call], keys: int, number: int) -> None:
    """A resync of all nodes together, each with one piece on its way."""
    sweeps = [(member.pieces(node_keys(member.number, keys), number), call) for member, call in zip(members, calls, strict=True)]
    while sweeps:
        going = []
        for pieces, call in sweeps:
            if (piece := next(pieces, None)) is not None:
                call.send(*piece)
                going.append((pieces, call))
        for _, call in going:
            assert b'"gap":false' in call.answer()
        sweeps = going


class Pools:
    """The child as the parent sees it."""

    def __init__(self, host: str, port: int, nodes: int, keys: int) -> None:
        command = [sys.executable, __file__, "--pools", f"{host}:{port}", "--nodes", str(nodes), "--keys", str(keys)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    @contextmanager
    def answering(self) -> Iterator[tuple[Callable[[], bool], list[str]]]:
        """Whether they are still at what they were told, and their answer when they are not."""
        answer: list[str] = []
        reader = threading.Thread(target=lambda: answer.append(self.read()))
        reader.start()
        yield reader.is_alive, answer
        reader.join()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


# -- the floor ---------------------------------------------------------------------------------------------------------------------


def be_bare() -> None:
    """An aiohttp handler that reads a body and answers 300 bytes."""
    import uvloop
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=bytes(300))

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/plan", answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        print(site._server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Event().wait()

    uvloop.run(serve())


@contextmanager
def bare() -> Iterator[Call]:
    with subprocess.Popen([sys.executable, __file__, "--bare"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Call("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


# -- measuring ---------------------------------------------------------------------------------------------------------------------


def prompts(nodes: int, keys: int) -> Iterator[np.ndarray]:
    """Prompts without end: runs of a node's keys."""
    random = np.random.default_rng(3)
    some = {node: node_keys(node, keys // nodes) for node in random.integers(0, nodes, 4).tolist()}
    while True:
        for words in some.values():
            start = int(random.integers(0, max(1, len(words) - PROMPT)))
            yield words[start : start + PROMPT]


def route_frame(words: np.ndarray) -> bytes:
    return encode(say.RouteRequest(namespace=DIGEST, requester="nobody", n=len(words)), words)


def locate_frame(words: np.ndarray) -> bytes:
    return encode(say.LocateRequest(namespace=DIGEST, n=len(words)), words)


class Clock:
    """Times calls, and what processor time the master uses for them."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __call__(self, frames: Iterator[bytes], call: Callable[[bytes], object], seconds: float) -> list[float]:
        """Seconds of each call until the time is over."""
        times, over, before = [], time.monotonic() + seconds, harness.cpu_seconds(self._pid)
        for frame in frames:
            began = time.perf_counter()
            call(frame)
            times.append(time.perf_counter() - began)
            if time.monotonic() > over:
                break
        self.cpu_ms = (harness.cpu_seconds(self._pid) - before) / len(times) * 1e3
        return times


def row(name: str, times: list[float], **more: Any) -> None:
    harness.emit(
        bench="master",
        case=name,
        calls=len(times),
        p50_ms=round(float(np.percentile(times, 50)) * 1e3, 2),
        p99_ms=round(float(np.percentile(times, 99)) * 1e3, 2),
        max_ms=round(max(times) * 1e3, 2),
        **more,
    )


def rss(pid: int) -> int:
    return harness.anonymous_bytes(pid)


def single(call: Call, clock: Clock, source: Iterator[np.ndarray], name: str) -> None:
    """Routes of one key, one at a time and 16 at once."""
    one = clock((route_frame(words[:1]) for words in source), lambda frame: call("/v1/plan", frame), SINGLE_SECONDS)
    cpu = clock.cpu_ms
    frames = [call.request("/v1/plan", route_frame(words[:1])) for words, _ in zip(source, range(512), strict=False)]
    count, began = 0, time.monotonic()
    while time.monotonic() - began < SINGLE_SECONDS:
        call.together(frames[count % 512 : count % 512 + 16])
        count += 16
    rate = count / (time.monotonic() - began)
    more = {"calls_per_s": round(rate), "target": ">= 5.2 K calls a second (upstream's, published)", "met": rate >= 5200}
    row(name, one, master_cpu_ms=round(cpu, 3), **more)


def behind_redis(seconds: float) -> None:
    """The same behind a Redis, with 200,000 keys: routes do not ask it, events are entered in it."""
    if SERVER is None:
        print("no redis-server here: the rows of a shared store are left out", file=sys.stderr)
        return
    with RedisProcess() as store, MasterProcess("--store", store.url) as master:
        port = int(master.http.rpartition(":")[2])
        pools = Pools("127.0.0.1", port, 4, 200_000)
        try:
            source, clock, call = prompts(4, 200_000), Clock(master.pid), Call("127.0.0.1", port)
            single(call, clock, source, "redis: route of one key")
            pools.tell(f"churn {seconds}")
            times = clock((route_frame(words) for words in source), lambda frame: call("/v1/plan", frame), seconds)
            row("redis: route while events come", times, others_per_s=round(float(pools.read())))
        finally:
            pools.end()


def visibility(master: MasterProcess, what: str = "", busy: Callable[[], bool] = lambda: False, rounds: int = 60) -> None:
    """From the return of a put at a real pool to the master's answer that names it, asked again and again; on while ``busy``."""
    call = Call("127.0.0.1", int(master.http.rpartition(":")[2]))
    with harness.pool("--master", master.http, dram="64MiB") as (pool, client):
        space = harness.namespace(client, 4096, "visible")
        digest = space.identity.digest().hex()
        times = []
        for key in harness.random_keys(4096, 9 + len(what)).reshape(-1, 1, 32):
            if len(times) >= rounds and not busy():
                break
            space.put(key, [bytes(4096)])
            began = time.perf_counter()
            frame = encode(say.LocateRequest(namespace=digest, n=1), key)
            while call("/v1/locate", frame)[-2] == 0:
                time.sleep(0.001)
            times.append(time.perf_counter() - began)
        assert pool.alive
    met = bool(np.percentile(times, 99) < 50e-3)
    row("from a commit to the master's answer" + what, times, target="p99 < 50 ms", met=met)


def alone(master: MasterProcess, pools: Pools, seconds: float, verb: str, what: str) -> None:
    """What one of these costs the master, beside what it does without (heartbeats, a sweep), and while nobody asks it anything."""
    idle = harness.cpu_seconds(master.pid)
    time.sleep(seconds)
    before = harness.cpu_seconds(master.pid)
    pools.tell(f"{verb} {seconds}")
    rate = float(pools.read())
    each = (harness.cpu_seconds(master.pid) - before - (before - idle)) / (rate * seconds) * 1e6
    harness.emit(bench="master", case=f"{what}, and nothing else", each_per_s=round(rate), master_cpu_us_each=round(each, 3))


def all_again(master: MasterProcess, pools: Pools, clock: Clock, routes: Iterator[bytes], plan: Callable[[bytes], None]) -> None:
    """All nodes resync together, as after a restart of the master: routes meanwhile, and what a further node commits."""
    times: list[float] = []
    pools.tell("herd 2")
    with pools.answering() as (busy, answer):
        while busy():
            times += clock(routes, plan, 0.2)
    met = bool(np.percentile(times, 99) < 20e-3)
    row("route while all nodes resync at once", times, resync_seconds=round(float(answer[0]), 2), target="p99 < 20 ms", met=met)
    pools.tell("herd 3")
    with pools.answering() as (busy, _):
        visibility(master, ", while all nodes resync at once", busy)


def measure(arguments: argparse.Namespace, master: MasterProcess, pools: Pools, empty: int) -> None:
    host, port = "127.0.0.1", int(master.http.rpartition(":")[2])
    call, seconds, nodes, keys = Call(host, port), arguments.seconds, arguments.nodes, arguments.keys
    known = master.get("/v1/cluster")["keys"]
    each = (rss(master.pid) - empty) / known
    harness.emit(bench="master", case="memory", keys=known, bytes_a_key=round(each, 1), target="<= 150", met=each <= 150)
    source, clock = prompts(nodes, keys), Clock(master.pid)

    def plan(frame: bytes) -> None:
        assert b'"pages":' in call("/v1/plan", frame)

    def frames(make: Callable[[np.ndarray], bytes]) -> Iterator[bytes]:
        return (make(words) for words in source)

    with bare() as floor:
        base = clock(frames(route_frame), lambda frame: floor("/v1/plan", frame), seconds)
        times = clock(frames(route_frame), plan, seconds)
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    ratio = float(np.median(times) / np.median(base))
    beside = {"master_cpu_ms": round(clock.cpu_ms, 2), "floor_p50_ms": round(float(np.median(base)) * 1e3, 2), "ratio": round(ratio, 2)}
    row("route", times, **beside, target="p50 < 3, p99 < 10 ms", met=bool(p50 < 3 and p99 < 10))
    times = clock(frames(locate_frame), lambda frame: call("/v1/locate", frame), seconds)
    row("locate", times, master_cpu_ms=round(clock.cpu_ms, 2), target="p50 < 2 ms", met=bool(np.percentile(times, 50) < 2e-3))
    single(call, clock, source, "route of one key")
    visibility(master)
    alone(master, pools, seconds, "churn", "events")
    alone(master, pools, seconds, "trickle", f"bundles of {SMALL} keys, {nodes} nodes at once")
    pools.tell(f"churn {seconds}")
    times = clock(frames(route_frame), plan, seconds)
    rate = float(pools.read())
    met = bool(np.percentile(times, 99) < 10e-3) and rate >= 2e5
    more = {"others_per_s": round(rate), "target": ">= 200 K events a second, p99 < 10 ms", "met": met}
    row("route while events come", times, **more)
    pools.tell(f"trickle {seconds}")
    times = clock(frames(route_frame), plan, seconds)
    row(f"route while {nodes} nodes tell {SMALL} keys each, at once", times, bundles_per_s=round(float(pools.read())))
    all_again(master, pools, clock, frames(route_frame), plan)
    known = master.get("/v1/cluster")["keys"]
    pools.tell("giant 1000000")
    times = []
    with pools.answering() as (busy, answer):
        while busy():
            times += clock(frames(route_frame), plan, 0.2)
    took = float(answer[0])
    met = took < 5 and bool(np.percentile(times, 99) < 20e-3)
    row("route while a node of 1 M keys resyncs", times, resync_seconds=round(took, 2), target="< 5 s, p99 < 20 ms", met=met)
    times = []
    while master.states()["giant"] != "dead" or master.get("/v1/cluster")["keys"] > known:  # it sends no heartbeats
        times += clock(frames(route_frame), plan, 0.3)
    row("route while a node of 1 M keys dies and is swept", times, target="p99 < 20 ms", met=bool(np.percentile(times, 99) < 20e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=harness.at_least(100_000), default=10_000_000)
    parser.add_argument("--nodes", type=harness.at_least(1), default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pools", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        be_bare()
    elif arguments.pools:
        host, _, port = arguments.pools.rpartition(":")
        be_pools(host, int(port), arguments.nodes, arguments.keys)
    else:
        room = str(arguments.keys + 1_200_000)
        with MasterProcess("--keys-max", room, timing=("--heartbeat", "1s", "--suspect-after", "3s", "--dead-after", "5s")) as master:
            empty = rss(master.pid)
            began = time.monotonic()
            pools = Pools("127.0.0.1", int(master.http.rpartition(":")[2]), arguments.nodes, arguments.keys)
            took = time.monotonic() - began
            harness.emit(bench="master", case="fill", keys=arguments.keys, nodes=arguments.nodes, keys_per_s=round(arguments.keys / took))
            try:
                measure(arguments, master, pools, empty)
            finally:
                pools.end()
        behind_redis(arguments.seconds)


if __name__ == "__main__":
    main()
