"""NUMA: the kernel's own answers on this machine's nodes, and what is read of machines with more of them."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from umbp.store import numa
from umbp.store.memory import Mapping, Near, populate

MIB = 1 << 20
NODES = numa.numa_nodes()
NO_NODE = 900


@pytest.fixture
def mapping(tmp_path: Path) -> Mapping:
    fd = os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4 * MIB)
    try:
        return Mapping(fd, 4 * MIB, writable=True)
    finally:
        os.close(fd)


@pytest.fixture
def system(tmp_path: Path) -> str:
    """Two nodes: four CPUs and 3 MiB on the one, CPUs without memory on the other."""
    for node, cpus, meminfo in (
        (0, "0-2,8", "Node 0 MemTotal: 8192 kB\nNode 0 MemFree:  2048 kB\nNode 0 Inactive(file): 1024 kB\n"),
        (3, "3", ""),
    ):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(meminfo)
    return str(tmp_path / "node")


@pytest.mark.parametrize("mode", ["prefer", "bind", "interleave"])
def test_memory_is_where_it_was_placed(mapping: Mapping, mode: str) -> None:
    node = NODES[-1]
    if error := numa.place(mapping, 0, 2 * MIB, [node], mode):
        pytest.skip(f"this kernel places no memory ({errno.errorcode[error]})")
    assert not numa.where(mapping, 0, 2 * MIB), "nothing is there before it is faulted in"
    populate(mapping, write=True, threads=2, parts=[Near(0, 2 * MIB, numa.cpus_of(node)), Near(2 * MIB, 4 * MIB)])
    assert numa.where(mapping, 0, 2 * MIB, 64) == {node: 64}
    assert numa.where(mapping, 2 * MIB, 2 * MIB).total() == numa.SAMPLES
    assert numa.where(mapping, 0, 3 * 4096).total() == 3


def test_what_cannot_be_placed_is_an_errno(mapping: Mapping) -> None:
    assert numa.place(mapping, 0, MIB, [NO_NODE], "bind") in (errno.EINVAL, errno.ENOSYS, errno.EPERM)
    assert numa.place(mapping, mmap.PAGESIZE // 2, MIB, [NODES[0]], "prefer") in (errno.EINVAL, errno.ENOSYS, errno.EPERM)


def test_moving_what_is_there_keeps_its_bytes(mapping: Mapping) -> None:
    mapping.array[:] = np.arange(4 * MIB, dtype=np.uint64).astype(np.uint8)
    assert numa.place(mapping, 0, 4 * MIB, [NODES[0]], "prefer", move=True) in (0, errno.ENOSYS, errno.EPERM)
    assert np.array_equal(mapping.array, np.arange(4 * MIB, dtype=np.uint64).astype(np.uint8))


def test_parts_are_faulted_in_by_threads_of_their_own_cpus_and_ours_stay_ours(mapping: Mapping) -> None:
    before = os.sched_getaffinity(0)
    seen: list[int] = []
    cpu = min(before)
    populate(
        mapping, write=True, threads=3, progress=seen.append, parts=[Near(0, MIB, frozenset({cpu})), Near(MIB, 4 * MIB, frozenset({4095}))]
    )
    assert seen[-1] == 4 * MIB
    assert os.sched_getaffinity(0) == before


def test_this_machine() -> None:
    assert os.sched_getaffinity(0) <= {cpu for node in NODES for cpu in numa.cpus_of(node)} or not numa.cpus_of(NODES[0])
    assert (numa.free_bytes(NODES[0]) or MIB) >= MIB
    if len(NODES) == 1 and numa.cpus_of(NODES[0]):
        assert numa.node_of_process() == NODES[0]


def test_nodes_their_cpus_and_what_they_have_left(system: str) -> None:
    assert numa.numa_nodes(system) == [0, 3]
    assert (numa.cpus_of(0, system), numa.cpus_of(3, system), numa.cpus_of(7, system)) == ({0, 1, 2, 8}, {3}, frozenset())
    assert (numa.free_bytes(0, system), numa.free_bytes(3, system), numa.free_bytes(7, system)) == (3 * MIB, None, None)
    assert numa.numa_nodes(system + "/none") == [0]


@pytest.mark.parametrize(("cpus", "node"), [({0, 8}, 0), ({3}, 3), ({2, 3}, None), ({5}, None)])
def test_a_process_is_near_the_node_on_which_alone_it_may_run(
    system: str, cpus: set[int], node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    assert numa.node_of_process(system) == node


@pytest.mark.parametrize(
    ("bus", "text", "node"),
    [("0000:C1:00.0", "1\n", 1), ("0000:c1:00.0", "-1\n", None), ("0000:c1:00.0", None, None), ("../../etc/passwd", "1\n", None)],
)
def test_a_device_is_near_the_node_that_its_bus_hangs_on(tmp_path: Path, bus: str, text: str | None, node: int | None) -> None:
    (tmp_path / "0000:c1:00.0").mkdir()
    if text is not None:
        (tmp_path / "0000:c1:00.0" / "numa_node").write_text(text)
    assert numa.node_of_device(bus, str(tmp_path)) == node
