"""The short way answers as the general one does, or not at all."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from tests.core.cluster import DIGEST, DRAM, PAGE_BYTES, SSD, Cluster, words
from umbp.core.single import route_one


@pytest.mark.parametrize("seed", range(6))
def test_one_page_is_routed_as_many_would_be(seed: int) -> None:
    draw = random.Random(seed)
    cluster = Cluster("a", "b", "c", keys_max=256)
    for _ in range(60):
        node = cluster[draw.choice("abc")]
        node.put(draw.randrange(40), tier=draw.choice([DRAM, SSD])).tell()
        cluster.master.costs.measured(draw.choice("abc"), DRAM, draw.choice("abcr"), PAGE_BYTES * draw.randrange(1, 9), draw.random() / 50)
    cluster.master.failed(cluster.now, draw.choice("abc"), "r", "no")
    if seed % 2:
        cluster["a"].sweep += 1
        cluster["a"].piece(0, [(number, DRAM) for number in range(0, 40, 3)], last=True)
    same = 0
    for step in range(80):
        cluster.now += 0.05
        key, requester = words([draw.randrange(45)]), draw.choice("abcr")
        other = copy.deepcopy(cluster.master)
        expected = other.route(cluster.now, DIGEST, key, requester, np.zeros(1))
        found = route_one(cluster.master, cluster.now, DIGEST, key, requester, np.zeros(1))
        assert found is not None
        assert (found.pages, found.held) == (expected.pages, expected.held), step
        assert found.seconds == pytest.approx(expected.seconds)  # of two that are equally fast either may be named
        if [run.source.node for run in found.runs] == [run.source.node for run in expected.runs]:
            same += 1
            assert [cluster.master.costs.backlog(cluster.now, name) for name in "abc"] == pytest.approx(
                [other.costs.backlog(cluster.now, name) for name in "abc"]
            )
        rows = other.directory.find(key, 0)
        if rows[0] >= 0:
            ours, theirs = cluster.master.directory.use(cluster.now, rows), other.directory.use(cluster.now, rows)
            assert ours.accesses.tolist() == theirs.accesses.tolist()
            assert ours.heat.tolist() == pytest.approx(theirs.heat.tolist())
    assert same > 40


def test_what_is_unusual_goes_the_general_way() -> None:
    cluster = Cluster(*"abcde")
    for name in "abcde":
        cluster[name].put(1).tell()
    assert route_one(cluster.master, cluster.now, DIGEST, words([1]), "r", np.zeros(1)) is None  # five holders
    cluster.master.choices.swap("routing", "random")
    assert route_one(cluster.master, cluster.now, DIGEST, words([2]), "r", np.zeros(1)) is None
