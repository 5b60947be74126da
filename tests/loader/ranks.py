"""Ranks of a group as processes: told what to load, and made to stop, die or dawdle at a chosen point of their load.

A rank counts the points that it passes (a table posted, a unit begun, staged, published, pulled, consumed ...). ``at`` names the one where
``what`` happens: ``kill`` and ``stop`` are signals to itself, ``slow`` is a sleep there and a short one at each point after it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import REGISTRY

import umbp
from tests.field.people import Child, eventually, stalled_seconds
from tests.loader.caches import Cache, keys_of
from tests.loader.host_runtime import HostRuntime
from umbp.loader.area import Area
from umbp.loader.board import Board
from umbp.loader.copies import Copies
from umbp.loader.group import Rank
from umbp.loader.pad import Pad
from umbp.loader.pushes import PushParty
from umbp.loader.rings import RingParty

ROOT = Path(__file__).resolve().parents[2]
POINTS = (
    (Area, "post"),
    (Rank, "_meet"),
    (RingParty, "tables"),
    (Area, "begin"),
    (Copies, "stage"),
    (Area, "publish"),
    (Copies, "pull"),
    (Area, "consume"),
    (Copies, "load"),
    (Copies, "store"),
    (Area, "stop"),
)


def device_points() -> tuple[tuple[Any, str], ...]:
    """The same of a rank whose tensors are on a device; in a process whose Triton is the interpreter's."""
    from umbp.kernels import launchers

    names = ("fused_read_push", "gather_push", "wait_signal", "page_mend", "stage_scatter", "stage_free", "page_load", "page_store")
    return (
        (Pad, "open"),
        (Board, "post"),
        (Rank, "_meet"),
        (Board, "announce"),
        (PushParty, "announced"),
        (Pad, "shut"),
        *((launchers, name) for name in names),
    )


class Accident:
    """What happens to this process, and when."""

    def __init__(self) -> None:
        self.what, self.at, self.seconds, self.passed, self.jitter, self.met = "", -1, 0.0, 0, 0.0, 0

    def plan(self, what: str = "", at: int = -1, seconds: float = 0.0, jitter: float = 0.0) -> None:
        self.what, self.at, self.seconds, self.passed, self.jitter, self.met = what, at, seconds, 0, jitter, 0

    def point(self) -> None:
        self.passed += 1
        if self.jitter:
            time.sleep(self.jitter)
        if self.what == "slow" and self.passed > self.at >= 0:
            time.sleep(0.001)
        if self.passed != self.at:
            return
        if self.what == "slow":
            time.sleep(self.seconds)
        elif self.what:
            os.kill(os.getpid(), signal.SIGKILL if self.what == "kill" else signal.SIGSTOP)
            time.sleep(0.05)  # another thread may take the signal: here this one is stopped, and not in a kernel, where no GPU would stop

    def watch(self, points: tuple[tuple[Any, str], ...]) -> None:
        """Make each point known: before and after each of these calls."""
        for owner, name in points:
            setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        meet = Rank.__dict__["_meet"]

        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.point()
            result = call(*arguments, **named)
            if call is meet:
                self.met = len(result.seats)
            self.point()
            return result

        return wrapped


def yielding(wait_signal: Callable[..., Any], patience_seconds: float) -> Callable[..., Any]:
    """A GPU that waits leaves the CPU to others; in the interpreter a wait takes a core from the rank that is waited for.

    So the counters are looked at from here, now and then, until they have grown or the patience is over, and by the kernel then.
    """

    def wait(addresses: torch.Tensor, wanted: torch.Tensor, status: torch.Tensor, *, polls: int) -> Any:
        every = zip(addresses.tolist(), wanted.tolist(), status.tolist(), strict=True)
        left = [(ctypes.c_int64.from_address(address), target) for address, target, lost in every if not lost]
        until, pause = time.monotonic() + patience_seconds, 50e-6
        while any(word.value < target for word, target in left) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 0.002)
        return wait_signal(addresses, wanted, status, polls=1)

    return wait


def work(child: Any, socket: str, tenant: str, rank: int, world: int, options: dict[str, Any], way: str) -> None:
    """A rank's life. ``device`` in the options: a folder for device memory, and by rank what fails there; or ``gpu`` for a real one."""
    torch.set_num_threads(1)
    os.environ["UMBP_LOAD"] = way
    accident, runtime, points, device, place = Accident(), None, POINTS, options.pop("device", None), "cpu"
    if device is not None and "gpu" in device:
        place = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(place)
        points = device_points()
    elif device is not None:
        os.environ |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
        runtime = HostRuntime(device["folder"], device.get("failing", {}).get(str(rank)))
        points = device_points()
    cache = Cache(make=runtime.tensor) if runtime is not None else Cache(device=place)
    with umbp.connect(socket, client=f"rank {rank}") as pool:
        namespace = cache.namespace(pool, tenant=tenant)
        group = umbp.Group("g", rank, world, **options)
        with umbp.Loader(namespace, cache.tensors, group, copy_threads=1, runtime=runtime) as loader:
            if runtime is not None:
                launchers: Any = importlib.import_module("umbp.kernels.launchers")
                launchers.wait_signal = yielding(launchers.wait_signal, group.patience_seconds)
            accident.watch(points)
            child.say("here")
            while (told := child.hear(120.0))["do"] != "end":
                child.say(Rehearsed(cache, namespace, loader, accident).obey(told))
    child.say("gone")


class Rehearsed:
    """The commands."""

    def __init__(self, cache: Cache, namespace: umbp.Namespace, loader: umbp.Loader, accident: Accident) -> None:
        self.cache, self.namespace, self.loader, self.accident = cache, namespace, loader, accident

    def obey(self, told: dict[str, Any]) -> Any:
        command = told.pop("do")
        return getattr(self, command)(**told)

    def load(self, numbers: list[int], slots: list[int], deadline: float = 20.0, sentinel: int = 1, **planned: Any) -> dict[str, Any]:
        """Load, look at the bytes, then write a sentinel over all of the cache, which `untouched` must find later."""
        self.cache.wipe()
        self.accident.plan(**planned)
        started = time.monotonic() - stalled_seconds()
        load = self.loader.load(keys_of(numbers), np.array(slots, np.int64), deadline=deadline)
        done = load.finish()
        seconds, met = time.monotonic() - stalled_seconds() - started, self.accident.met
        self.accident.plan()
        there = np.setdiff1d(np.arange(len(numbers)), done.missing)
        good = self.cache.has(numbers, slots)[there] if len(numbers) else np.ones(0, bool)
        answer = {
            "missing": done.missing.tolist(),
            "reason": done.reason,
            "bytes": done.read_bytes,
            "seconds": seconds,  # without those in which somebody waited for what others kept busy (`tests.field.people.within`)
            "met": met,  # ranks that came in time, this one too
            "wrong": there[~good].tolist(),
            "clean": self.cache.untouched(slots),
            "layers": int(np.isfinite(done.ready_at).sum()),
        }
        self.cache.wipe(sentinel)
        return answer

    def ready(self) -> bool:
        """Whether the pool can be asked: a call that did not come back in time, as of a rank that was stopped, costs the connection."""
        return bool(eventually(lambda: self.namespace.operations.link.ready(), "connected again"))

    def untouched(self, sentinel: int = 1) -> bool:
        return self.cache.untouched([], sentinel)

    def offload(self, numbers: list[int], **planned: Any) -> dict[str, Any]:
        slots = np.arange(1, len(numbers) + 1)
        self.cache.write(numbers, slots)
        self.accident.plan(**planned)
        offload = self.loader.offload(keys_of(numbers), slots)
        status = offload.result()
        self.accident.plan()
        return {"codes": status.codes.tolist(), "bytes": offload.read_bytes}

    def metrics(self) -> dict[str, float]:
        """What this process shows to Prometheus of its loads: name and labels -> value."""
        found = (sample for family in REGISTRY.collect() for sample in family.samples if sample.name.startswith("umbp_load"))
        return {f"{sample.name}{sorted(sample.labels.values())}": sample.value for sample in found}

    def device(self) -> dict[str, Any]:
        """What is held of the other ranks' memory, and of the pool's."""
        runtime = self.loader._equipment.runtime
        assert isinstance(runtime, HostRuntime)
        return {"opened": len(runtime.opened), "registered": len(runtime.registered), "calls": dict(runtime.calls)}

    def statistics(self) -> dict[str, Any]:
        found = self.loader.statistics()
        return {name: getattr(found, name) for name in found.__slots__}


class Spawned:
    """As `Child`, for a rank that is started anew."""

    def __init__(self, *arguments: Any) -> None:
        command = [sys.executable, "-m", "tests.loader.ranks", json.dumps(arguments)]
        environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out, self._rest = self._process.stdin, self._process.stdout, b""

    def say(self, value: Any) -> None:
        self._in.write(json.dumps(value).encode() + b"\n")
        self._in.flush()

    def hear(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._out.fileno(), 65536) if readable else b""
            assert part, "the other process is gone" if readable else f"the other process said nothing for {seconds} s"
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()


class Pipes:
    """The other end of `Spawned`."""

    def say(self, value: Any) -> None:
        print(json.dumps(value), flush=True)

    def hear(self, seconds: float) -> Any:
        line = sys.stdin.readline()
        assert line, "the test is gone"
        return json.loads(line)


class Ranks:
    """All ranks of a group."""

    def __init__(self, socket: str, tenant: str, world: int, *, way: str = "staged", **options: Any) -> None:
        self.arguments = (socket, tenant)
        self.world = world
        self.way = way
        self.options = options
        self.children: dict[int, Child | Spawned] = {}

    def start(self, *ranks: int) -> None:
        """These, or all; those that run are ended first."""
        for rank in ranks or range(self.world):
            if rank in self.children:
                self.end(rank)
            given = (*self.arguments, rank, self.world, dict(self.options), self.way)
            # CUDA and HIP do not survive a fork, so a rank on a real GPU is a process from the start.
            self.children[rank] = Spawned(*given) if "gpu" in self.options.get("device", {}) else Child(work, *given)
        for rank in ranks or range(self.world):
            assert self.hear(rank) == "here"

    def tell(self, rank: int, do: str, **what: Any) -> None:
        self.children[rank].say({"do": do, **what})

    def hear(self, rank: int, seconds: float = 60.0) -> Any:
        return self.children[rank].hear(seconds)

    def answered(self, rank: int, seconds: float) -> bool:
        """Whether it says something within this time; it is heard afterwards."""
        child = self.children[rank]
        return bool(select.select([child._out if isinstance(child, Spawned) else child._read], [], [], seconds)[0])

    def ask(self, rank: int, do: str, **what: Any) -> Any:
        self.tell(rank, do, **what)
        return self.hear(rank)

    def end(self, rank: int) -> None:
        child = self.children.pop(rank)
        child.kill()
        child.__exit__(None, None, None)

    def stopped(self, rank: int) -> bool:
        with open(f"/proc/{self.children[rank].pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0] in (b"T", b"Z")


@contextmanager
def ranks(socket: str, tenant: str, world: int, *, way: str = "staged", **options: Any) -> Iterator[Ranks]:
    """A group whose ranks have all come; none is left afterwards."""
    group = Ranks(socket, tenant, world, way=way, **options)
    try:
        group.start()
        yield group
    finally:
        for rank in list(group.children):
            group.end(rank)


def nothing_is_leased(pool: umbp.Pool) -> None:
    """Once all ranks have left, the pool protects nothing any more."""
    eventually(lambda: pool.status()["leases"] == 0, "all leases of rounds are over")


if __name__ == "__main__":
    work(Pipes(), *json.loads(sys.argv[1]))
