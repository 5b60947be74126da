"""Regions of the DRAM segment, one on each NUMA node that ``--numa 0,1`` names: placed, faulted in from there, looked at afterwards.

The segment stays one file with one index; only its data is cut, into as many equal parts, or parts of the sizes that are given
(`umbp.core.allocator`). A client says which node it is near, and what it writes goes to that part while there is room (`umbp.core.room`). A
page that was written from one node and is read from another crosses the link between them, as half of each page does with ``interleave``.

Parts may make levels, ``--numa near=0:64GiB --numa near=1:64GiB --numa far=2:512GiB``, of which the last is memory without processors of
its own (CXL), and pages move between them (`umbp.core.levels`, `umbp.pool.memory_moving`). A node may be in several levels: then they
differ in nothing but what goes first, which is of use to try them out.

Without ``--numa-strict`` a node without enough memory is helped out by the others, which is said; with it that stops the start. The pool
looks first: the kernel ends a process that asks a node for more than it has.
"""

from __future__ import annotations

import errno
import os
from itertools import accumulate
from typing import Literal

from umbp.config import PoolConfig
from umbp.core.allocator import WHOLE, Region, region_starts
from umbp.errors import ConfigError, OutOfMemory
from umbp.grammar import format_size
from umbp.store import numa
from umbp.store.memory import Near
from umbp.store.segment import Geometry, Segment

ELSEWHERE_SAID = 0.02  # a share of pages on other nodes that is worth a word


def check(config: PoolConfig, geometry: Geometry) -> None:
    """ConfigError if there are no such nodes, or memory is too little to be cut."""
    known = numa.numa_nodes()
    if unknown := [node for node in config.numa_nodes if node not in known]:
        raise ConfigError(f"there is no node {unknown[0]}, only {known}", field="numa", example=",".join(map(str, known)))
    try:
        region_starts(geometry.data_bytes, cut(config))
    except ValueError as error:
        raise ConfigError(str(error), field="dram", example="64GiB") from None


def cut(config: PoolConfig) -> tuple[Region, ...]:
    """The regions that the memory is to have."""
    levels = {name: at for at, name in enumerate(config.numa_levels)}
    return tuple(Region(part.size_bytes, levels[part.level], part.weight) for part in config.numa.parts) or WHOLE


def edges(config: PoolConfig) -> tuple[int, ...]:
    """Where one region ends and the next begins, if sizes are given; else that follows from their number."""
    sizes = [part.size_bytes for part in config.numa.parts]
    return tuple(accumulate(sizes[:-1])) if any(sizes) else ()


def parts(config: PoolConfig, geometry: Geometry) -> list[tuple[int, int]]:
    """Start and length of each region of the data."""
    starts = region_starts(geometry.data_bytes, cut(config)).tolist()
    return [(start, stop - start) for start, stop in zip(starts, [*starts[1:], geometry.data_bytes], strict=True)]


def place(config: PoolConfig, found: Segment, *, attached: bool) -> list[str]:
    """Say to the kernel where memory is to be, before it is faulted in; what could not be had. OutOfMemory, if strict."""
    known, nodes = numa.numa_nodes(), config.numa_nodes
    check(config, found.geometry)
    if config.numa.mode == "interleave" or (config.numa.mode == "auto" and len(known) > 1):
        error = numa.place(found.data, 0, len(found.data), known, "interleave")
        return [f"numa: pages are not interleaved over nodes {known} ({_name(error)})"] if error else []
    said = []
    for node, (start, length) in zip(nodes, parts(config, found.geometry) if nodes else (), strict=True):
        left = numa.free_bytes(node)
        if config.numa_strict and not attached and left is not None and left < length:
            raise OutOfMemory(
                f"node {node} has {format_size(left)} left, {format_size(length)} of the segment are to be there",
                field="numa_strict",
                example="off, or --dram " + format_size(left * 8 // 10 * len(nodes)),
            )
        mode: Literal["bind", "prefer"] = "bind" if config.numa_strict else "prefer"
        if error := numa.place(found.data, start, length, [node], mode, move=attached):
            said.append(f"numa: memory is not placed on node {node} ({_name(error)})")
    if said and config.numa_strict:
        raise ConfigError("; ".join(said), field="numa_strict", example="off")
    return said


def near(config: PoolConfig, found: Segment) -> list[Near]:
    """What `umbp.store.memory.populate` needs to know."""
    mine = os.sched_getaffinity(0)
    placed = zip(config.numa_nodes, parts(config, found.geometry) if config.numa_nodes else (), strict=True)
    return [Near(start, start + length, numa.cpus_of(node) & mine) for node, (start, length) in placed]


def elsewhere(config: PoolConfig, found: Segment, *, attached: bool) -> list[str]:
    """Which regions are not on their nodes, now that they are faulted in. OutOfMemory, if strict."""
    said = []
    for node, (start, length) in zip(config.numa_nodes, parts(config, found.geometry) if config.numa_nodes else (), strict=True):
        seen = numa.where(found.data, start, length)
        share = 1 - seen[node] / seen.total() if seen else 0.0
        if share > ELSEWHERE_SAID:
            said.append(f"numa: {share:.0%} of the region of node {node} ({format_size(length)}) is on other nodes")
    if said and config.numa_strict:
        why = "; what an earlier life put there stays while others have it mapped"
        raise OutOfMemory("; ".join(said) + (why if attached else ""), field="numa_strict", example="off, or a smaller --dram")
    return said


def _name(error: int) -> str:
    return errno.errorcode.get(error, str(error))


__all__ = ["check", "cut", "edges", "elsewhere", "near", "parts", "place"]
