"""The master's policies of other packages: checked at each answer, replaced at the first wrong one, and previewed without effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.cluster import DIGEST, PAGE_BYTES, Cluster, runs, words
from umbp.core.choices import DEFAULTS, Choices
from umbp.errors import NotFound
from umbp.policies import base
from umbp.policies.base import CLUSTER_KINDS


class Foreign:
    """A policy of another package: it answers what it is told to, whatever it is asked."""

    answer: Any = None

    def choose(self, view: Any) -> Any:
        return self._say(view)

    place = copies = moves = judge = choose

    def _say(self, view: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(view) if callable(self.answer) else self.answer


def foreign(monkeypatch: pytest.MonkeyPatch, kind: str, answer: Any) -> None:
    made = type("Strange", (Foreign,), {"answer": staticmethod(answer) if callable(answer) else answer, "__module__": "somebody.elses"})
    monkeypatch.setitem(base._registry[kind], "strange", made)


WRONG_ROUTES = [
    None,
    [0, 0, 0],
    np.zeros((4, 1), np.int64),
    np.full(4, 9),
    np.full(4, -2),
    np.full(4, -1),
    np.zeros(4),
    ValueError("a bug of theirs"),
]


@pytest.mark.parametrize("answer", WRONG_ROUTES, ids=lambda answer: type(answer).__name__)
def test_a_wrong_route_is_the_policy_s_last(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    foreign(monkeypatch, "routing", answer)
    cluster = Cluster("a")
    cluster["a"].put(*range(4)).tell()
    cluster.master.choices.swap("routing", "strange")
    assert runs(cluster.plan(range(4), "b")) == [(0, 4, "a", "dram")]
    assert cluster.master.choices.names["routing"] == DEFAULTS["routing"]
    assert "somebody" in cluster.master.choices.faults[0] or "strange" in cluster.master.choices.faults[0]
    cluster.master.choices.swap("routing", "random")
    assert not cluster.master.choices.faults


def test_a_good_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(monkeypatch, "routing", lambda view: np.where(view.held.any(1), view.held.argmax(1), -1))
    cluster = Cluster("a")
    cluster["a"].put(*range(4)).tell()
    cluster.master.choices.swap("routing", "strange")
    assert cluster.plan(range(4), "b").pages == 4
    assert cluster.master.choices.names["routing"] == "strange"


def test_a_placement_beyond_a_node_s_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(monkeypatch, "placement", lambda view: np.zeros(len(view.key_hashes), np.int64))
    cluster = Cluster("a", "b")
    cluster.master.choices.swap("placement", "strange")
    placed = cluster.master.place(cluster.now, DIGEST, words(range(20_000)), "", PAGE_BYTES, np.zeros(20_000)).nodes
    assert {placed.count(name) > 0 for name in ("a", "b")} == {True}
    assert cluster.master.choices.names["placement"] == DEFAULTS["placement"]


@pytest.mark.parametrize(("kind", "answer"), [("replication", [99] * 20), ("rebalancing", [(0, 0, 5)]), ("rebalancing", [(0, 7, 5)])])
def test_wrong_advice_is_none(monkeypatch: pytest.MonkeyPatch, kind: str, answer: Any) -> None:
    foreign(monkeypatch, kind, answer)
    cluster = Cluster("a", "b", advice_bytes_per_second=1e12)
    cluster["a"].put(*range(20))
    for node in cluster.nodes.values():
        node.untold.clear()
        node.resync()
    for _ in range(3):
        cluster.plan(range(20), "b")
    cluster.master.choices.swap(kind, "strange")
    cluster.wait(2.0, *cluster.nodes.values())
    assert cluster.master.choices.names[kind] == "none"
    assert not [advice for node in cluster.nodes.values() for advice in node.advice]


def test_a_last_copy_is_not_let_go_on_a_policy_s_word(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(monkeypatch, "cluster_eviction", lambda view: np.full(len(view.heat), -1))
    cluster = Cluster("a", policies={"cluster_eviction": "strange"})
    cluster["a"].put(1, 2).tell()
    spaces = np.zeros(2, np.uint32)
    assert cluster.master.judge("a", cluster["a"].registration, cluster.now, words([1, 2]), spaces).tolist() == [0, 0]
    assert "one copy" in cluster.master.choices.faults[0]


@pytest.mark.parametrize("kind", CLUSTER_KINDS)
def test_every_kind_has_a_default_that_can_be_had_and_previewed(kind: str) -> None:
    choices = Choices()
    assert choices.names[kind] in base.names(kind)
    with pytest.raises(NotFound, match=DEFAULTS[kind]):
        choices.swap(kind, "nonesuch")
    with pytest.raises(NotFound, match=f"no {kind} policy 'nonesuch'; there are: ") as caught:
        choices.preview(kind, "nonesuch", None)
    assert caught.value.field == "policy"
