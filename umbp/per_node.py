"""`python -m umbp.per_node`: a pool on each NUMA node of this machine, which keep copies of each other's pages, and a master for them.

Theory of operation. A page that is read from both sockets of a machine crosses the link between them half of the time. With two copies, one
in each node's memory, every read is a near one; that costs half of the capacity, so it is for machines whose memory is not what is short
(`--numa 0,1` of one pool, one copy of each page, is for the others). This is not a second kind of pool: there is

    a pool a node     `python -m umbp.pool --name NAME-numaN --numa N`, with its part of --dram; clients use the one that is near them
    a master          with `--replication numa`: what comes to one pool is copied to the others of the machine, at --advice-bandwidth, and
                      again when it is asked for and one of the copies has gone (`umbp.core.advisor`)

so all that holds for pools and masters holds here. A put is one copy and answered at once; the second is there some tenths of a second
later. Until then, or if a pool has let its copy go, a get reads the page in the other's memory (`umbp.client.neighbours`), and a load
has the own pool bring it, which keeps it: a page is found by either pool as long as one has it. A pool knows namespaces that one of its
clients has opened, and takes copies of no others.

Clients say ``numa`` (or ``numa:NAME``) for the pool's address, or in UMBP_POOL, and get the pool of the node that all their CPUs are of;
``numa@1`` names the node, for a process that may run anywhere but whose GPU is there (`umbp.client.address`).

Options are those of the pool, given to each; but --dram is of all together, and --numa the nodes, by default all of them. With --master no
master is started, and that one's policies count.

States: a process that ends is started again, after a second, at the same address; a pool finds its segment and serves the same pages. One
that ends by itself within its first seconds with status 2 (a bad option, no such memory) ends all. SIGTERM and SIGINT end all. Nothing is
shared between the processes, so whichever of them dies, the others serve on. If this one is killed the kernel tells them to stop, as nobody
would start them again, and the next start would find their sockets in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from umbp.config import PoolConfig, default_socket, load_pool_config, near_pool
from umbp.errors import ConfigError, UmbpError
from umbp.machine import auto_dram
from umbp.process import end_with
from umbp.store.numa import numa_nodes

AGAIN_SECONDS = 1.0
STOP_SECONDS_MAX = 10.0
BAD_START = 2  # the status of a process that could not start as it was told
GRANULE = 2 << 20
ADVICE_BANDWIDTH = "4GiB"  # copies are of one machine's memory to the same machine's
OWN = ("--name", "--socket", "--numa", "--dram", "--master")
WORDS = {"master": b"umbp.master ready ", "pool": b"umbp.pool ready "}


def flags(config: PoolConfig, given: Sequence[str], node: int, nodes: int, master: str) -> list[str]:
    """What the pool of this node is started with."""
    dram = config.dram_wanted if config.dram_wanted is not None else auto_dram(config.shm_dir)
    name, socket = near_pool(config.name, node), default_socket(near_pool(config.name, node), os.environ)
    own = ["--name", name, "--socket", socket, "--numa", str(node), "--dram", str(dram // nodes // GRANULE * GRANULE)]
    return [*own, "--master", master, *_without(given, OWN)]


def _without(given: Sequence[str], names: Sequence[str]) -> list[str]:
    """Flags but for some of them and their values."""
    kept, skip = [], False
    for word in given:
        if skip:
            skip = False
        elif word in names:
            skip = True
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept


class Child:
    """One process that is kept alive. ``ready`` is what its ready line says, once it has said it."""

    def __init__(self, kind: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """``variables``: of its environment, besides ours."""
        self.kind, self.command, self.variables = kind, list(command), {**os.environ, **(variables or {})}
        self.ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Child {' '.join(self.command)}>"

    async def keep(self) -> None:
        """Until cancelled. ConfigError where it could not start as it was told."""
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"umbp.{self.kind}",
                *self.command,
                stdout=asyncio.subprocess.PIPE,
                env=self.variables,
                preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
            )
            try:
                assert process.stdout is not None
                async for line in process.stdout:
                    if line.startswith(WORDS[self.kind]) and not self.ready.done():
                        self.ready.set_result(json.loads(line[len(WORDS[self.kind]) :]))
                status = await process.wait()
            except asyncio.CancelledError:
                await _end(process)
                raise
            if status == BAD_START and not self.ready.done():
                raise ConfigError(f"umbp.{self.kind} did not start; above it says why", field=self.kind)
            print(f"umbp.per_node: umbp.{self.kind} ended ({status}) and is started again", file=sys.stderr, flush=True)
            await asyncio.sleep(AGAIN_SECONDS)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def serve(given: Sequence[str], environ: Mapping[str, str]) -> None:
    """All of it, until a signal."""
    config = load_pool_config(given, environ)
    nodes = list(config.numa_nodes) or numa_nodes()
    if config.http.port:
        raise ConfigError("each pool has a port of its own", field="http", example="127.0.0.1:0")
    if any(part.level or part.size_bytes for part in config.numa.parts):
        raise ConfigError("these are nodes with a pool on each, as large as the others", field="numa", example="0,1")
    if config.ssd and len(nodes) > 1:
        raise ConfigError("a folder is one pool's: start the pools one by one", field="ssd", example="no ssd")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        children = []
        master = ",".join(str(address) for address in config.master)
        if not master:
            options = ["--http", str(config.http), "--replication", "numa", "--advice-bandwidth", ADVICE_BANDWIDTH]
            first = Child("master", options, {"UMBP_TOKEN": config.token} if config.token else {})
            children.append(tasks.create_task(first.keep()))
            master = first.command[1] = (await _ready(first, stop)).get("http", "")  # the same when it is started again
        pools = [Child("pool", flags(config, given, node, len(nodes), master)) for node in nodes]
        children += [tasks.create_task(pool.keep()) for pool in pools]
        said = [await _ready(pool, stop) for pool in pools]
        if not stop.is_set():
            sockets = {str(node): each["socket"] for node, each in zip(nodes, said, strict=True)}
            print("umbp.per_node ready " + json.dumps({"name": config.name, "master": master, "sockets": sockets}), flush=True)
        await stop.wait()
        for task in children:
            task.cancel()


async def _ready(child: Child, stop: asyncio.Event) -> dict[str, str]:
    """What it says; nothing, if we are told to stop before it has."""
    waiting = asyncio.ensure_future(stop.wait())
    either: list[asyncio.Future[Any]] = [child.ready, waiting]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return child.ready.result() if child.ready.done() else {}


def main() -> int:
    """0 after a clean stop, 2 when a bad option or the machine stopped the start."""
    status = 0
    try:
        asyncio.run(serve(sys.argv[1:], os.environ))
    except* UmbpError as errors:
        status = BAD_START
        for error in errors.exceptions:
            print(f"umbp.per_node: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
