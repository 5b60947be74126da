"""Replication `numa`: what comes to a pool is copied to the other pools of its machine, full ones too, and to nobody else."""

from __future__ import annotations

import numpy as np

from tests.core.cluster import GIB, PAGE_BYTES, Cluster, Node

MACHINES = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}
NUMA = {"policies": {"replication": "numa"}, "advice_bytes_per_second": GIB}


def made(**options: object) -> Cluster:
    return Cluster(*MACHINES, "c", machines=MACHINES, **{**NUMA, **options})


def synced(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        node.untold.clear()
        node.resync()


def copies(node: Node) -> list[int]:
    """Keys that this node was told to copy, from its neighbour on the machine."""
    assert {advice.verb for advice in node.advice} <= {"copy"}
    assert {advice.source[0] for advice in node.advice} <= {node.name[0]}
    return sorted(key for advice in node.advice for key in advice.keys.view(np.uint64).reshape(-1, 4)[:, 0].tolist())


def test_new_pages_are_copied_to_the_other_pool_of_their_machine_as_soon_as_they_have_come() -> None:
    cluster = made()
    synced(cluster)
    cluster["a0"].put(*range(5)).tell()
    cluster["b1"].put(*range(10, 13)).tell()
    cluster["c"].put(20).tell()
    cluster.wait(2.0, *cluster.nodes.values())
    assert {name: copies(node) for name, node in cluster.nodes.items()} == {
        "a0": [],
        "a1": [*range(5)],
        "b0": [*range(10, 13)],
        "b1": [],
        "c": [],
    }
    cluster["a1"].put(*range(5)).tell()  # the copies have come
    cluster.wait(2.0, *cluster.nodes.values())
    assert copies(cluster["a0"]) == []
    cluster.master.check()


def test_a_full_pool_makes_room_for_copies_and_both_are_kept() -> None:
    cluster = made()
    cluster["a1"].used = int(9.9 * GIB)
    synced(cluster)
    cluster["a0"].put(1, 2).tell()
    cluster.wait(2.0, *cluster.nodes.values())
    assert copies(cluster["a1"]) == [1, 2]
    cluster["a1"].put(1, 2).tell()
    cluster.wait(5.0, *cluster.nodes.values())
    assert copies(cluster["a1"]) == [1, 2], "nobody is told to let one of the two go"


def test_a_page_that_is_asked_for_again_gets_its_second_copy_again() -> None:
    cluster = made()
    cluster["a0"].put(*range(4))
    synced(cluster)
    cluster.wait(2.0, *cluster.nodes.values())
    assert copies(cluster["a1"]) == [], "what a resync tells of is not new"
    cluster.plan(range(2), "a0")
    cluster.plan(range(2), "a0")
    cluster.wait(2.0, *cluster.nodes.values())
    assert copies(cluster["a1"]) == [0, 1]


def test_copies_keep_to_the_bytes_a_second_that_are_allowed() -> None:
    cluster = made(advice_bytes_per_second=2 * PAGE_BYTES)
    synced(cluster)
    for number in range(40):
        cluster["a0"].put(number).tell()
    cluster.wait(4.0, *cluster.nodes.values())
    assert 4 <= len(copies(cluster["a1"])) <= 12


def test_a_pool_that_drains_gets_none() -> None:
    cluster = made()
    synced(cluster)
    cluster.master.drain(cluster.now, "a1", on=True)
    cluster["a0"].put(1).tell()
    cluster.wait(2.0, *cluster.nodes.values())
    assert copies(cluster["a1"]) == []
