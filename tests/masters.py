"""A real master process for tests, started, waited for, killed and restarted like the pools of `tests.pools`; and pools that belong to it.

with MasterProcess() as master, master.pool() as a, master.pool() as b:
    master.until(lambda: master.states() == {a.name: "alive", b.name: "alive"})
"""

from __future__ import annotations

import json
import random
import socket
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.field.people import eventually
from tests.pools import PoolProcess

HEARTBEAT = 0.2
DEAD_AFTER = 1.8
TIMING = ("--heartbeat", f"{HEARTBEAT}s", "--suspect-after", "1.5s", "--dead-after", f"{DEAD_AFTER}s")
CALL_SECONDS_MAX = 60.0
PORTS_FROM = 10_240


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens at, for who is to come back at the same one: below those that the kernel gives to connections."""
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(PORTS_FROM, below)
        try:
            with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                return port
        except OSError:
            continue


def until(true: Callable[[], Any], what: Callable[[], Any] = lambda: "a condition of this test") -> None:
    """`eventually`, where errors of HTTP count as not true yet."""

    def answered() -> Any:
        try:
            return true()
        except (OSError, KeyError):
            return False

    eventually(answered, what)


def call(url: str, body: Any = None, method: str = "") -> Any:
    """The JSON answer of a GET, or of a POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {}, method=method or None)
    with urllib.request.urlopen(request, timeout=CALL_SECONDS_MAX) as response:
        return json.loads(response.read())


def metrics(process: PoolProcess) -> dict[str, float]:
    """All series of a process at one moment, by their names and labels as ``/metrics`` has them."""
    with urllib.request.urlopen(process.http + "/metrics", timeout=CALL_SECONDS_MAX) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().split("\n") if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def metric(process: PoolProcess, name: str) -> float:
    """One of them."""
    return metrics(process)[name]


def reported(pool: PoolProcess, what: str) -> int:
    """What a pool has told its masters, or heard from them."""
    return int(metric(pool, f'umbp_reported_total{{what="{what}"}}'))


class MasterProcess(PoolProcess):
    """One master on a port of its own, which it keeps over restarts."""

    said = "umbp.master ready "

    def __init__(self, *options: str, timing: tuple[str, ...] = TIMING) -> None:
        self.name = f"master-{uuid.uuid4().hex[:8]}"
        self.folder = Path(tempfile.mkdtemp(prefix="umbp-"))
        self.shm_dir = self.folder
        self.socket = ""
        self.ready = {}
        self._log = self.folder / "log"
        self._process = None
        where = ["--name", self.name, *(() if "--http" in options else ("--http", f"127.0.0.1:{free_port()}")), "--keys-max", "200000"]
        self.command = [sys.executable, "-m", "umbp.master", *where, *timing, *options]

    @property
    def http(self) -> str:
        """Its base URL, also before it is started: the port is chosen by then."""
        return f"http://{self.command[self.command.index('--http') + 1]}"

    def pool(self, *options: str, dram: str = "16MiB") -> PoolProcess:
        """A pool of this master, not started yet."""
        return PoolProcess("--master", self.http, *options, dram=dram)

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        return call(self.http + path)

    def post(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """The JSON of a POST, or of what ``method`` says."""
        return call(self.http + path, {} if body is None else body, method)

    def nodes(self) -> dict[str, Any]:
        """Documents by name."""
        return {node["id"]: node for node in self.get("/v1/nodes")["nodes"]}

    def states(self) -> dict[str, str]:
        """State by name."""
        return {name: node["state"] for name, node in self.nodes().items()}

    def synced(self, *pools: PoolProcess) -> None:
        """Wait until it knows all that these pools hold, and can reach them."""
        names = {pool.name for pool in pools}

        def there() -> bool:
            nodes = self.nodes()
            return all(name in nodes and nodes[name]["synced"] and nodes[name]["source"] for name in names)

        until(there, lambda: (self.get("/v1/nodes"), self.log()[-2000:]))

    def locations(self, key: bytes) -> set[tuple[str, str]]:
        """(node, tier) of a key."""
        found = self.get(f"/v1/keys/{key.hex()}")["keys"]
        return {(place["node"], place["tier"]) for document in found for place in document["locations"]}
