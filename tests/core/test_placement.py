"""Placement around the policy: what is on its way, what is fair, who has just come, and what is there already."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.cluster import DIGEST, GIB, PAGE_BYTES, Cluster, Node, runs, words


def placed(cluster: Cluster, count: int, requester: str = "r", *, size: int = PAGE_BYTES) -> list[str]:
    draws = np.linspace(0, 1, count, endpoint=False)
    return cluster.master.place(cluster.now, DIGEST, words(range(count)), requester, size, draws).nodes


def test_batches_of_one_moment_do_not_herd_on_the_emptiest_node() -> None:
    cluster = Cluster("a", "b", "c")
    cluster["a"].used, cluster["b"].used, cluster["c"].used = 9 * GIB, 9 * GIB, 0
    for node in cluster.nodes.values():
        node.beat()
    cluster.master.choices.swap("placement", "most_available")
    chosen = [name for _ in range(100) for name in placed(cluster, 4, size=1 << 28)]
    assert max(chosen.count(name) for name in "abc") <= 0.5 * len(chosen)
    assert cluster.master.placement.debited("c") == chosen.count("c") << 28


def test_what_is_there_already_needs_no_place_and_is_on_its_way_nowhere() -> None:
    cluster = Cluster("a", "b", "c")
    cluster["a"].put(0, 1, 2).tell()
    cluster["b"].put(1).tell()
    draws = np.zeros(5)
    found = cluster.master.place(cluster.now, DIGEST, words(range(5)), "b", PAGE_BYTES, draws)
    assert found.nodes == ["a", "b", "a", "b", "b"]
    assert found.exists == [True, True, True, False, False]
    assert cluster.master.placement.debited("b") == 2 * PAGE_BYTES
    assert cluster.master.placement.debited("a") == 0
    cluster.master.leave(cluster.now, "a", cluster["a"].registration)
    assert cluster.master.place(cluster.now, DIGEST, words([0]), "c", PAGE_BYTES, draws).exists == [False]


def test_a_page_that_nobody_can_serve_now_is_not_counted_as_used() -> None:
    cluster = Cluster("a", "b")
    cluster["a"].put(1, 2).tell()
    cluster["b"].put(1).tell()
    cluster.plan([1, 2], "c", exclude=frozenset({"a"}))
    rows = cluster.master.directory.find(words([1, 2]), 0)
    assert cluster.master.directory.use(cluster.now, rows).accesses.tolist() == [1, 0]


def test_one_page_alone_finds_a_place_and_the_next_ones_go_elsewhere() -> None:
    cluster = Cluster("a", "b", "c")
    chosen = [placed(cluster, 1)[0] for _ in range(30)]
    assert {chosen.count(name) for name in "abc"} <= {8, 9, 10, 11, 12}


def test_a_batch_may_go_to_one_node_but_not_all_batches() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.master.choices.swap("placement", "same_node")
    batches = [placed(cluster, 50) for _ in range(12)]
    assert all(len(set(batch)) == 1 for batch in batches)
    nodes = [batch[0] for batch in batches]
    assert max(nodes.count(name) for name in "abc") <= 6


def test_where_only_one_has_room_it_is_not_refused_for_fairness() -> None:
    cluster = Cluster("a", "b", "c")
    for name in "ab":
        cluster[name].used = int(10.5 * GIB)  # even its turnover is spoken for
        cluster[name].beat()
    assert {name for _ in range(5) for name in placed(cluster, 10)} == {"c"}


def test_a_newcomer_ramps_up() -> None:
    cluster = Cluster("a", "b", "c", "d")
    cluster.wait(100.0, *cluster.nodes.values())
    cluster.nodes["e"] = Node(cluster, "e").join()
    cluster.master.choices.swap("placement", "most_available")
    fresh = placed(cluster, 1000).count("e")
    cluster.wait(90.0, *cluster.nodes.values())
    assert 10 <= fresh <= 60
    assert placed(cluster, 1000).count("e") == pytest.approx(200, abs=20)


def test_what_is_on_its_way_counts_until_the_node_must_have_counted_it() -> None:
    cluster = Cluster("a", "b")
    cluster.master.choices.swap("placement", "same_node")
    assert set(placed(cluster, 10)) == {"a"}
    assert cluster.master.placement.debited("a") == 10 * PAGE_BYTES
    cluster.now += 0.1
    cluster["a"].beat()
    assert cluster.master.placement.debited("a") > 0
    cluster.now += 1.0
    cluster["a"].beat()
    cluster.now += 1.0
    cluster["a"].beat()
    assert cluster.master.placement.debited("a") == 0


def test_draining_and_dead_nodes_get_nothing_new() -> None:
    cluster = Cluster("a", "b")
    cluster.master.drain(cluster.now, "a", on=True)
    assert set(placed(cluster, 10)) == {"b"}
    cluster.master.failed(cluster.now, "b", "x", "no")
    assert set(placed(cluster, 10)) == {""}
    assert runs(cluster.plan([1])) == []
