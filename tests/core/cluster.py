"""Simulated pools around a real master core: what each holds, what it has told, and a clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np

from umbp.core.master import Master, Part
from umbp.core.membership import Member, Timing
from umbp.core.plans import Plan
from umbp.core.sweeps import chained
from umbp.errors import UnknownNode
from umbp.types import U64, Tier

DIGEST = b"\7" * 32
PAGE_BYTES = 1 << 20
DRAM, SSD = int(Tier.DRAM), int(Tier.SSD)
GIB = 1 << 30


def words(numbers: Iterable[int]) -> U64:
    """Keys: the number, and three words that look like a digest's."""
    first = np.array(list(numbers), np.uint64)
    mixed = [(first + np.uint64(at)) * np.uint64(0x9E37_79B9_7F4A_7C15) for at in (1, 2, 3)]
    return np.stack([first, *((word ^ word >> np.uint64(29)) * np.uint64(0xBF58_476D_1CE4_E5B9) for word in mixed)], axis=1)


class Node:
    """A pool as the protocol has it: an outbox of numbered bundles, a resync when it is told to."""

    def __init__(self, cluster: Cluster, name: str, boot: int = 1, *, capacity: int = 10 * GIB) -> None:
        self.cluster, self.name, self.boot, self.capacity = cluster, name, boot, capacity
        self.holds: dict[tuple[int, int], None] = {}  # (key, tier)
        self.untold: list[tuple[int, int, bool]] = []
        self.registration = 0
        self.number = 0
        self.sweep = 0
        self.totals: dict[tuple[int, int], int] = {}  # (sweep, piece) -> sum with it
        self.used = 0
        self.advice: list[Any] = []
        self.place = f"place of {name}"

    @property
    def member(self) -> Member:
        return self.cluster.master.membership.members[self.name]

    def join(self) -> Node:
        tiers = {DRAM: (self.capacity, self.used), SSD: (100 * GIB, 0)}
        addresses = {"http": f"{self.name}:7411"}
        member = self.cluster.master.join(self.cluster.now, self.name, self.boot, self.place, addresses, tiers)
        self.registration, self.number = member.registration, 0
        return self

    def put(self, *numbers: int, tier: int = DRAM) -> Node:
        for number in numbers:
            self.holds[number, tier] = None
            self.untold.append((number, tier, True))
        return self

    def evict(self, *numbers: int, tier: int = DRAM) -> Node:
        for number in numbers:
            self.holds.pop((number, tier), None)
            self.untold.append((number, tier, False))
        return self

    def tell(self, *, lose: bool = False) -> str:
        """Send what is untold as one bundle; with ``lose`` it never arrives."""
        told, self.untold = self.untold, []
        net = {(number, tier): here for number, tier, here in told}
        self.number += 1
        if lose:
            return "lost"
        master = self.cluster.master
        member, verdict = master.expects(self.cluster.now, self.name, self.registration, self.number)
        if verdict == "apply":
            array = np.array([(tier, here) for (_, tier), here in net.items()], np.uint8).reshape(-1, 2)
            keys = words(number for number, _ in net)
            spaces = master.spaces([(DIGEST, PAGE_BYTES, len(keys))])
            master.apply(self.cluster.now, Part(member, keys, spaces, array[:, 0], array[:, 1]))
            master.applied(member, self.number)
        return verdict

    def pieces(self, size: int = 3) -> Iterable[str]:
        """The resync, a piece at a time; what happens between two of them is the caller's."""
        self.sweep += 1
        every = list(self.holds)
        count = max(1, -(-len(every) // size))
        for index in range(count):
            part = [item for item in every[index * size : (index + 1) * size] if item in self.holds]
            yield self.piece(index, part, last=index == count - 1)

    def piece(self, index: int, part: list[tuple[int, int]], *, last: bool, damage: int = 0) -> str:
        """``damage``: what arrives has another sum."""
        master, now = self.cluster.master, self.cluster.now
        keys, tiers = words(number for number, _ in part), np.array([tier for _, tier in part], np.uint8)
        content = crc32(keys.tobytes() + tiers.tobytes())
        total = self.totals[self.sweep, index] = chained(self.totals.get((self.sweep, index - 1), 0), content)
        member, verdict = master.expects_piece(now, self.name, self.registration, self.sweep, index, self.number, total, content ^ damage)
        if verdict == "apply":
            spaces, ones = master.spaces([(DIGEST, PAGE_BYTES, len(keys))]), np.ones(len(keys), np.uint8)
            master.apply(now, Part(member, keys, spaces, tiers, ones, fresh=False))
            master.piece_applied(now, member, total, last=last)
        return verdict

    def resync(self) -> Node:
        assert set(self.pieces()) <= {"apply"}
        return self

    def beat(self, held: list[int] | None = None, done: list[int] | None = None) -> Node:
        tiers = {DRAM: (self.capacity, self.used), SSD: (100 * GIB, 0)}
        self.cluster.master.beat(self.cluster.now, self.name, self.registration, tiers, held, done)
        self.advice += self.cluster.master.advisor.ledger.take(self.name)
        return self


class Cluster:
    """The master, its nodes and the time. ``machines``: on which one some of the nodes are; the others are on one of their own each."""

    def __init__(self, *names: str, machines: dict[str, str] | None = None, **options: Any) -> None:
        self.now = 1000.0
        self.options = options
        self.master = self._master(1)
        self.nodes = {name: Node(self, name) for name in names}
        for name, machine in (machines or {}).items():
            self.nodes[name].place = f"{machine}:7:9:{name}"  # as a pool says it: kernel, folder, name
        for node in self.nodes.values():
            node.join()

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def _master(self, boot: int) -> Master:
        given = {"keys_max": 4096, "timing": Timing(), "seed": 7, **self.options}
        return Master(self.now, boot=boot, **given)

    def restart_master(self) -> None:
        self.master = self._master(self.master.boot + 1)

    def wait(self, seconds: float, *beating: Node) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.5)
            for node in beating:
                try:
                    node.beat()
                except UnknownNode:
                    node.join().resync()
            self.master.tick(self.now)

    def plan(self, numbers: Iterable[int], requester: str = "", **options: Any) -> Plan:
        keys = words(numbers)
        plan = self.master.route(self.now, DIGEST, keys, requester, np.zeros(1), **options)
        plan.check()
        return plan

    def located(self, numbers: Iterable[int]) -> list[int]:
        return self.master.locate(self.now, DIGEST, words(numbers))[0].tolist()


def runs(plan: Plan) -> list[tuple[int, int, str, str]]:
    """(start, stop, node, tier) of each."""
    return [(run.start, run.stop, run.source.node, run.tier.name.lower()) for run in plan.runs]
