"""A region of the segment on each NUMA node: placed for real on the nodes of this machine, and refused where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.masters import call, metric
from tests.pools import PoolProcess
from umbp.config import Numa, NumaPart, PoolConfig
from umbp.errors import ConfigError, OutOfMemory
from umbp.pool import dram, regions
from umbp.store import numa, segment

MIB = 1 << 20
NODE = numa.numa_nodes()[0]
PAGE = 64 << 10


def config(folder: Path, nodes: str, **options: object) -> PoolConfig:
    """Of two regions that are on one node, where a machine has no more of them: the parser takes each node once."""
    parts = tuple(NumaPart(int(node)) for node in nodes.split(","))
    return PoolConfig(name="regions", shm_dir=str(folder), dram=8 * MIB, numa=Numa(parts=parts), keys_max=1024, **options)


def acquired(made: PoolConfig) -> dram.Dram:
    return dram.acquire(made, lambda done, total: None)


def test_each_region_is_on_its_node_and_is_found_again(tmp_path: Path) -> None:
    made = config(tmp_path, f"{NODE},{NODE}", numa_strict=True)
    first = acquired(made)
    assert not first.attached
    assert first.segment.geometry.regions == 2
    assert regions.parts(made, first.segment.geometry) == [(0, 4 * MIB), (4 * MIB, 4 * MIB)]
    assert not [line for line in first.fallbacks if "numa" in line]
    for start, length in regions.parts(made, first.segment.geometry):
        assert set(numa.where(first.segment.data, start, length)) <= {NODE}
    first.segment.words[segment.H_STATE] = segment.STOPPED
    first.close(release=False)
    again = acquired(made)
    assert again.attached
    again.close(release=False)
    alone = acquired(config(tmp_path, str(NODE)))
    assert not alone.attached, "memory that is cut otherwise is made anew"
    alone.close(release=True)


def test_nodes_that_are_not_there_and_memory_too_little_to_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no node 900, only \[") as caught:
        acquired(config(tmp_path, f"{NODE},900"))
    assert caught.value.field == "numa"
    with pytest.raises(ConfigError, match="too few for 5 regions") as caught:
        acquired(config(tmp_path, ",".join([str(NODE)] * 5)))
    assert caught.value.field == "dram"
    assert not list(tmp_path.glob("*.segment"))


def test_strict_looks_before_it_binds_and_says_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "free_bytes", lambda node: 3 * MIB)
    with pytest.raises(OutOfMemory, match=f"node {NODE} has 3MiB left, 4MiB of the segment"):
        acquired(config(tmp_path, f"{NODE},{NODE}", numa_strict=True))
    assert not list(tmp_path.glob("*.segment"))
    acquired(config(tmp_path, f"{NODE},{NODE}")).close(release=True)


def test_a_region_that_is_elsewhere_is_said_or_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = numa.where
    monkeypatch.setattr(numa, "where", lambda *part: type(where(*part))({NODE: 3, NODE + 1: 1}))
    loose = acquired(config(tmp_path, str(NODE)))
    assert [line for line in loose.fallbacks if line == f"numa: 25% of the region of node {NODE} (8MiB) is on other nodes"]
    loose.close(release=True)
    with pytest.raises(OutOfMemory, match="on other nodes"):
        acquired(config(tmp_path, str(NODE), numa_strict=True))


def test_a_pool_says_where_its_memory_is_and_its_clients_write_near_them() -> None:
    with PoolProcess("--numa", str(NODE), "--numa-strict", "on", dram="8MiB") as pool:
        source = (
            "import sys, numpy, umbp\n"
            "with umbp.connect(sys.argv[1]) as pool:\n"
            f"    ns = pool.namespace(model='m', page_tokens=16, layout=umbp.Layout.opaque({PAGE}), replicated=True)\n"
            "    keys = umbp.page_keys(numpy.arange(16 * 5), page_tokens=16)\n"
            f"    assert ns.put(keys, numpy.ones((5, {PAGE}), numpy.uint8)).all(umbp.WriteStatus.STORED)\n"
            "    print(pool.status()['regions'][0]['sessions'])\n"
        )
        cpu = str(min(numa.cpus_of(NODE) & os.sched_getaffinity(0), default=min(os.sched_getaffinity(0))))
        command = ["taskset", "-c", cpu, sys.executable, "-c", source, pool.socket]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "1"
        (region,) = call(pool.http + "/v1/status")["regions"]
        assert (region["numa_node"], region["capacity_bytes"]) == (NODE, 8 * MIB)
        assert (region["near_pages"], region["far_pages"]) == (5, 0)
        assert metric(pool, f'umbp_written_near_pages_total{{level="",near="yes",numa_node="{NODE}"}}') == 5
        assert metric(pool, f'umbp_region_free_bytes{{level="",numa_node="{NODE}"}}') == region["free_bytes"] <= 8 * MIB - 5 * PAGE
