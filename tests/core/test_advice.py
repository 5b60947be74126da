"""Advice: copies within bounds, and never the last one dropped in the belief of another."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.cluster import GIB, PAGE_BYTES, Cluster, words
from umbp.core import advisor
from umbp.core.advice import PER_NODE_MAX


def synced(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        node.untold.clear()
        node.resync()


def test_a_copy_is_dropped_only_after_another_node_has_promised_to_hold_it() -> None:
    cluster = Cluster("a", "b")
    a, b = cluster["a"].put(1, 2, 3), cluster["b"].put(2, 3)
    a.used = 9 * GIB
    synced(cluster)
    cluster.wait(1.0, a, b)
    assert [(advice.verb, len(advice.keys)) for advice in b.advice] == [("hold", 2)]
    assert not a.advice
    b.beat(held=[b.advice[0].number])
    a.beat()
    assert [(advice.verb, sorted(advice.keys.view(np.uint64).reshape(-1, 4)[:, 0].tolist())) for advice in a.advice] == [("drop", [2, 3])]
    assert a.advice[0].seconds(cluster.now) < 25.0
    cluster.master.check()


def test_two_full_nodes_are_never_both_told_that_the_other_holds_it() -> None:
    cluster = Cluster("a", "b")
    a, b = cluster["a"].put(*range(20)), cluster["b"].put(*range(20))
    a.used = b.used = 9 * GIB
    synced(cluster)
    for _ in range(30):
        cluster.wait(0.5, a, b)
        for node in (a, b):
            node.beat(held=[advice.number for advice in node.advice if advice.verb == "hold"])
    dropped = [{bytes(key) for advice in node.advice if advice.verb == "drop" for key in advice.keys} for node in (a, b)]
    assert dropped[0] | dropped[1]
    assert not dropped[0] & dropped[1]


def test_a_promise_that_is_not_made_drops_nothing() -> None:
    cluster = Cluster("a", "b")
    a, b = cluster["a"].put(1), cluster["b"].put(1)
    a.used = 9 * GIB
    synced(cluster)
    cluster.wait(5.0, a, b)
    assert not a.advice
    a.beat(held=[b.advice[0].number])  # not the one that was asked
    cluster.wait(1.0, a)
    assert not a.advice


def test_the_drop_ends_with_the_node_that_holds() -> None:
    cluster = Cluster("a", "b")
    a, b = cluster["a"].put(1), cluster["b"].put(1)
    a.used = 9 * GIB
    synced(cluster)
    cluster.wait(1.0, a, b)
    b.beat(held=[b.advice[0].number])
    cluster.master.leave(cluster.now, "b", b.registration)
    cluster.wait(1.0, a)
    assert not a.advice
    assert not cluster.master.advisor.ledger.by_number


def test_hot_prefixes_are_copied_within_the_bytes_a_second_that_are_allowed() -> None:
    cluster = Cluster("a", "b", "c", policies={"replication": "hot_prefixes"}, advice_bytes_per_second=4 * PAGE_BYTES)
    a = cluster["a"].put(*range(20))
    synced(cluster)
    for _ in range(10):
        cluster.plan(range(20), "b")
    cluster.wait(3.0, *cluster.nodes.values())
    copies = [advice for node in cluster.nodes.values() for advice in node.advice]
    assert {advice.verb for advice in copies} == {"copy"}
    assert {advice.source for advice in copies} == {"a"}
    assert not a.advice
    assert 8 <= sum(len(advice.keys) for advice in copies) <= 16
    cluster.master.check()


def test_what_is_cold_or_has_copies_enough_is_not_copied() -> None:
    cluster = Cluster("a", "b", "c", policies={"replication": "hot_prefixes"}, advice_bytes_per_second=GIB)
    cluster["a"].put(*range(20))
    cluster["b"].put(*range(10))
    synced(cluster)
    for _ in range(10):
        cluster.plan(range(10), "c")
    cluster.wait(3.0, *cluster.nodes.values())
    assert not [advice for node in cluster.nodes.values() for advice in node.advice]


def test_a_drained_node_gives_what_only_it_has_away() -> None:
    cluster = Cluster("a", "b", advice_bytes_per_second=GIB)
    cluster["a"].put(*range(20))
    cluster["b"].put(*range(5))
    synced(cluster)
    cluster.master.drain(cluster.now, "a", on=True)
    cluster.wait(2.0, *cluster.nodes.values())
    assert sum(len(advice.keys) for advice in cluster["b"].advice) == 15
    assert {advice.verb for advice in cluster["b"].advice} == {"copy"}


def test_a_crowded_node_gives_to_a_roomy_one_where_the_policy_says_so() -> None:
    cluster = Cluster("a", "b", policies={"rebalancing": "even_fill"}, advice_bytes_per_second=GIB)
    cluster["a"].put(*range(20))
    cluster["a"].used = int(9.5 * GIB)
    synced(cluster)
    cluster.wait(2.0, *cluster.nodes.values())
    assert sum(len(advice.keys) for advice in cluster["b"].advice if advice.verb == "copy") == 20


def test_a_promise_to_another_master_is_no_answer_to_this_one() -> None:
    """A pool whose master died answers the next one: the numbers of two masters never meet, so no promise is taken for another."""
    cluster = Cluster("a", "b")
    a, b = cluster["a"].put(1), cluster["b"].put(1)
    a.used = 9 * GIB
    synced(cluster)
    cluster.wait(1.0, a, b)
    (promised,) = [advice.number for advice in b.advice]
    cluster.restart_master()
    for node in (a, b):
        node.advice.clear()
        node.join().resync()
        node.beat()
    cluster.wait(1.0, a, b)
    assert [advice.verb for advice in b.advice] == ["hold"]
    b.beat(held=[promised])
    cluster.wait(1.0, a)
    assert not a.advice


def test_advice_that_nobody_takes_is_bounded() -> None:
    cluster = Cluster("a", "b", policies={"replication": "hot_prefixes"}, advice_bytes_per_second=100 * GIB)
    cluster["a"].put(*range(2000))
    synced(cluster)
    for _ in range(10):
        cluster.plan(range(2000), "c")
    for _ in range(40):
        cluster.now += 0.05
        cluster.master.tick(cluster.now)
    assert len(cluster.master.advisor.ledger.by_node["b"]) == PER_NODE_MAX
    cluster.master.check()


# -- where copies go ---------------------------------------------------------------------------------------------------------------


def copies(cluster: Cluster) -> dict[str, int]:
    """Pages that each node is advised to copy."""
    return {name: sum(len(one.keys) for one in node.advice if one.verb == "copy") for name, node in cluster.nodes.items()}


@pytest.mark.parametrize("policy", ["local_first", "most_available", "same_node", "rendezvous", "weighted_random"])
def test_copies_go_where_the_placement_policy_says(policy: str) -> None:
    cluster = Cluster("a", "b", "c", "d", policies={"placement": policy}, advice_bytes_per_second=100 * GIB)
    cluster["d"].used = int(9.5 * GIB)  # nearly full: no page is copied there
    cluster["a"].put(*range(60))
    synced(cluster)
    cluster.master.drain(cluster.now, "a", on=True)
    cluster.wait(2.0, *cluster.nodes.values())
    got = copies(cluster)
    assert got.pop("a") == got.pop("d") == 0
    assert sum(got.values()) == 60
    assert sorted(got.values())[0] == 0 if policy == "same_node" else min(got.values()) >= 15


def test_new_pages_are_copied_to_the_node_that_the_policy_names_and_only_once() -> None:
    cluster = Cluster("a", "b", "c", policies={"placement": "rendezvous"}, advice_bytes_per_second=100 * GIB)
    synced(cluster)
    cluster["a"].put(*range(60)).tell()
    cluster.wait(2.0, *cluster.nodes.values())
    got = copies(cluster)
    assert got["a"] == 0
    assert min(got["b"], got["c"]) >= 10
    assert 10 <= 60 - got["b"] - got["c"] <= 30  # these stay where they are
    for name in ("b", "c"):  # they come, and the master hears of it
        node = cluster[name]
        for advice in node.advice:
            node.put(*(int(word) for word in advice.keys.view(np.uint64).reshape(-1, 4)[:, 0])).tell()
        node.beat(done=[advice.number for advice in node.advice])
    cluster.wait(5.0, *cluster.nodes.values())
    assert copies(cluster) == got
    cluster.master.check()


def test_new_pages_stay_where_they_are_put_by_default_and_what_is_told_again_is_not_new() -> None:
    cluster = Cluster("a", "b", advice_bytes_per_second=100 * GIB)
    synced(cluster)
    cluster["a"].put(*range(20)).tell()
    cluster.wait(2.0, *cluster.nodes.values())
    assert copies(cluster) == {"a": 0, "b": 0}
    cluster.master.choices.swap("placement", "most_available")
    cluster["a"].resync()
    cluster.wait(2.0, *cluster.nodes.values())
    assert copies(cluster) == {"a": 0, "b": 0}


def test_new_pages_are_placed_within_the_bytes_a_second_and_too_many_are_left_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisor, "ARRIVALS_MAX", 100)
    cluster = Cluster("a", "b", policies={"placement": "rendezvous"}, advice_bytes_per_second=4 * PAGE_BYTES)
    synced(cluster)
    for start in range(0, 1000, 50):
        cluster["a"].put(*range(start, start + 50)).tell()
    cluster.wait(3.0, *cluster.nodes.values())
    assert 4 <= copies(cluster)["b"] <= 16
    cluster.wait(60.0, *cluster.nodes.values())
    assert copies(cluster)["b"] <= 100


def test_a_page_that_is_copied_by_advice_is_not_taken_for_one_that_is_asked_for() -> None:
    cluster = Cluster("a", "b", policies={"placement": "rendezvous"}, advice_bytes_per_second=100 * GIB)
    synced(cluster)
    cluster["a"].put(*range(20)).tell()
    cluster.wait(2.0, *cluster.nodes.values())
    moving = [int(word) for advice in cluster["b"].advice for word in advice.keys.view(np.uint64).reshape(-1, 4)[:, 0]]
    cluster.plan(moving, "b")
    cluster.plan(moving[:1], "b")
    heat = cluster.master.directory.use(cluster.now, cluster.master.directory.find(words(range(20)), 0)).heat
    assert not heat.any()
    cluster.plan(moving[:1], "c")
    assert cluster.master.directory.use(cluster.now, cluster.master.directory.find(words(moving[:1]), 0)).heat.tolist() == [1.0]
