"""A network of its own for a process, and a wire to it that loses what goes one way: real network namespaces, a route that drops.

with Island() as island:                             # skips the test where namespaces are not permitted
    pool.command = [*island.enter, *pool.command]    # it is at island.there, this process at island.here
    island.cut(TO)                                   # what is sent to it is lost: it is heard, and hears nothing
    island.mend()
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

import pytest

TO, FROM = "to it", "from it"  # which way is lost: it is heard and does not hear; it hears and is not heard


class Island:
    """Between this network and one that has a name of its own."""

    def __init__(self) -> None:
        self.name = f"umbp{os.getpid()}"
        network = f"10.231.{os.getpid() // 64 % 256}.{os.getpid() % 64 * 4}"  # another test run may have one too
        self.here, self.there = (f"{network.rpartition('.')[0]}.{int(network.rpartition('.')[2]) + host}" for host in (1, 2))
        self.enter = [shutil.which("ip") or "ip", "netns", "exec", self.name]
        self._drops = {TO: f"blackhole {self.there}/32", FROM: f"blackhole {self.here}/32"}

    def __enter__(self) -> Island:
        steps = [
            f"ip netns add {self.name}",
            f"ip link add {self.name}a type veth peer name {self.name}b",
            f"ip link set {self.name}b netns {self.name}",
            f"ip addr add {self.here}/30 dev {self.name}a",
            f"ip link set {self.name}a up",
            f"ip netns exec {self.name} ip addr add {self.there}/30 dev {self.name}b",
            f"ip netns exec {self.name} ip link set {self.name}b up",
            f"ip netns exec {self.name} ip link set lo up",
        ]
        if not shutil.which("ip") or any(_run(step) for step in steps):
            self._remove()
            pytest.skip("no network namespaces here: ip netns is refused")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def cut(self, way: str) -> None:
        """From now on what goes this way is lost."""
        assert not _run(self._step(way, "add")), f"what goes {way} cannot be dropped"

    def mend(self) -> None:
        """Nothing is lost any more."""
        for way in self._drops:
            _run(self._step(way, "del"))

    def _step(self, way: str, what: str) -> str:
        return f"{'' if way == TO else ' '.join(self.enter)} ip route {what} {self._drops[way]}"

    def _remove(self) -> None:
        if shutil.which("ip"):
            self.mend()
            _run(f"ip link del {self.name}a")
            _run(f"ip netns del {self.name}")


def _run(step: str) -> int:
    return subprocess.run(step.split(), capture_output=True, check=False, timeout=60).returncode
