"""Policies as operators have them: looked at without effect and swapped while it runs, by REST and by command, ours and other packages'."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.master.test_cluster import IDENTITY, PAGE, put
from tests.masters import MasterProcess, call, until
from tests.pools import PoolProcess, together
from umbp.cli.app import main
from umbp.layout import Namespace

NAMESPACE = Namespace(**IDENTITY).digest().hex()
THEIRS = """
import numpy as np


class LastSource:
    def choose(self, view):
        last = view.held.shape[1] - 1 - view.held[:, ::-1].argmax(1)
        return np.where(view.held.any(1), last, -1).astype(np.int64)


class FirstNode:
    def place(self, view):
        return np.where(np.arange(len(view.key_hashes)) < view.free_bytes[0] // view.page_bytes, 0, -1)


class Everywhere:
    def copies(self, view):
        return np.full(len(view.heat), view.nodes)


class Around:
    def moves(self, view):
        nodes = len(view.capacity_bytes)  # one, where the other's beat is late on a busy machine
        return [(at, (at + 1) % nodes, 4096) for at in range(nodes)] if nodes > 1 else []


class KeepAll:
    def judge(self, view):
        return np.ones(len(view.heat), np.int64)


class LastIn:
    def __init__(self, capacity):
        self.order = []

    def on_inserted(self, event):
        self.order += event.ids.tolist()

    def on_request(self, event):
        pass

    def victims(self, eligible, count):
        ids = np.array(self.order[::-1], np.int32)
        return ids[eligible(ids)][:count]

    def on_removed(self, ids, *, evicted):
        gone = set(ids.tolist())
        self.order = [one for one in self.order if one not in gone]


class Nobody:
    def __init__(self, capacity):
        pass

    def on_request(self, event):
        pass

    def admit(self, now, fingerprints, *, fill):
        return np.zeros(len(fingerprints), bool)


class Broken:
    def __init__(self, *capacity):
        pass

    def choose(self, view):
        raise RuntimeError("a bug of theirs")

    place = copies = moves = judge = choose
"""
KINDS = {
    "routing": "LastSource",
    "placement": "FirstNode",
    "replication": "Everywhere",
    "rebalancing": "Around",
    "cluster_eviction": "KeepAll",
    "eviction": "LastIn",
    "admission": "Nobody",
}
OF_MASTER = [kind for kind in KINDS if kind not in ("eviction", "admission")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MasterProcess, PoolProcess, PoolProcess]]:
    """A master and two pools, where another package with a policy of every kind is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "their_cluster.py").write_text(THEIRS)
    information = site / "their_cluster-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-cluster\nVersion: 1.0\n")
    points = [f"[umbp.policies.{kind}]\ntheirs = their_cluster:{name}\nbroken = their_cluster:Broken\n" for kind, name in KINDS.items()]
    (information / "entry_points.txt").write_text("\n".join(points))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])))
        with together(master := MasterProcess("--advice-bandwidth", "0"), a := master.pool(), b := master.pool()):
            master.synced(a, b)
            keys = put(a, *range(1, 21))
            until(lambda: master.locations(bytes(keys[-1])))
            for _ in range(20):
                master.post("/v1/route", {"namespace": NAMESPACE, "keys": [bytes(key).hex() for key in keys], "requester": b.name})
            yield master, a, b


Run = Callable[..., Any]


@pytest.fixture
def run(world: tuple[MasterProcess, PoolProcess, PoolProcess], capsys: pytest.CaptureFixture[str]) -> Run:
    """The `umbp` command at a pool that is a member: it hands on what is the master's."""

    def call_it(*words: str, status: int = 0) -> Any:
        assert main(["--pool", world[1].http, *words, "--json"]) == status
        said = capsys.readouterr()
        return json.loads(said.out) if status == 0 else said.err

    return call_it


def current(master: MasterProcess) -> dict[str, str]:
    return {one["kind"]: one["current"] for one in master.get("/v1/policies")["policies"]}


@pytest.mark.parametrize("kind", OF_MASTER)
def test_each_kind_of_the_master_is_looked_at_without_effect_swapped_and_swapped_back(world: Any, run: Run, kind: str) -> None:
    master, *_ = world
    before = current(master)
    available = {one["kind"]: one["available"] for one in run("policies")["policies"]}[kind]
    assert {"theirs", "broken", before[kind]} <= set(available)
    for name in available:
        if name != "broken":
            assert run("policies", kind, name, "--preview")["name"] == name
    assert "a bug of theirs" in run("policies", kind, "broken", "--preview", status=2)
    assert current(master) == before
    assert run("policies", kind, "theirs")["policies"][0]["current"] == "theirs"
    assert current(master) == {**before, kind: "theirs"}
    assert master.post(f"/v1/policies/{kind}", {"name": before[kind]}, "PUT")["current"] == before[kind]
    assert "nonesuch" in run("policies", kind, "nonesuch", status=1)


def test_a_dry_run_says_what_would_be_done_with_the_pages_and_nodes_that_there_are(world: Any, run: Run) -> None:
    master, a, b = world
    would = lambda kind, name, *more: run("policies", kind, name, "--preview", *more)["choices"]  # noqa: E731
    (served,) = would("routing", "fastest", "--for", b.name)
    assert (served["verb"], served["node"], served["to"], served["pages"], served["bytes"]) == ("serve", a.name, b.name, 20, 20 * PAGE)
    (placed,) = would("placement", "local_first", "--for", b.name)
    assert (placed["verb"], placed["to"], placed["pages"]) == ("place", b.name, 1000)
    for name in ("most_available", "rendezvous", "weighted_random"):
        assert {one["to"]: one["pages"] > 300 for one in would("placement", name)} == {a.name: True, b.name: True}
    assert len(run("policies", "replication", "hot_prefixes", "--preview")["choices"]) == 20
    assert {(one["verb"], one["node"], one["pages"]) for one in would("replication", "theirs")} == {("copy", a.name, 1)}
    assert would("replication", "none") == would("rebalancing", "even_fill") == []
    assert {(one["node"], one["to"]) for one in would("rebalancing", "theirs")} == {(a.name, b.name), (b.name, a.name)}
    judged = {one["verb"]: one["pages"] for one in would("cluster_eviction", "spare_and_cold")}
    assert judged == {"keep": 10, "no_word": 10}
    (shown,) = master.post("/v1/policies/cluster_eviction/preview", {"name": "theirs"})["choices"]
    assert (shown["verb"], shown["node"], shown["pages"]) == ("keep", a.name, 20)
    assert "nowhere" in run("policies", "placement", "local_first", "--preview", "--for", "nowhere", status=1)
    assert "umbp evict 1GiB --preview --policy lru" in run("policies", "eviction", "lru", "--preview", status=2)
    assert "umbp evict 1GiB --tier ssd --preview" in run("policies", "ssd_eviction", "--preview", status=2)
    assert "umbp policies replication hot_prefixes --preview" in run("policies", "admission", "--preview", status=2)


def test_commands_at_a_master_say_what_it_knows_or_whom_to_ask(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    master, a, _ = world

    def at_master(*words: str, status: int = 0) -> str:
        assert main(["--pool", master.http, *words]) == status
        said = capsys.readouterr()
        return said.out if status == 0 else said.err

    keys = put(a, 1)
    shown = at_master("status")
    assert "2 alive" in shown
    assert a.name in shown
    assert f"{a.name} dram" in at_master("where", bytes(keys[0]).hex())
    hot = at_master("hot")
    assert f"{a.name} dram" in hot
    assert "pages" in hot  # of the prefixes
    assert "asked of the pool" in at_master("namespaces", status=1)


def test_a_policy_of_another_package_decides_from_the_moment_it_is_chosen(world: Any, run: Run) -> None:
    master, a, b = world
    placed = lambda requester: master.post("/v1/place", {**body, "requester": requester, "dry_run": True})["nodes"]  # noqa: E731
    body = {"namespace": NAMESPACE, "keys": [f"{at:064x}" for at in range(50)], "page_bytes": PAGE}
    assert (placed(a.name), placed(b.name)) == ([a.name] * 50, [b.name] * 50)
    run("policies", "placement", "theirs")
    assert placed(a.name) == placed(b.name) == [placed(a.name)[0]] * 50
    run("policies", "placement", "local_first")


def test_one_that_breaks_is_replaced_by_the_default_and_said(world: Any, run: Run) -> None:
    master, a, b = world
    run("policies", "routing", "broken")
    keys = put(a, 1)
    answer = master.post("/v1/route", {"namespace": NAMESPACE, "keys": [bytes(keys[0]).hex()], "requester": b.name})
    assert answer["held"] == 1
    assert current(master)["routing"] == "fastest"
    ready = call(master.http + "/readyz")  # 200, as is /healthz: nothing is better for being started anew with the same policy
    assert any("a bug of theirs" in line for line in ready["warnings"])
    assert call(master.http + "/healthz")["healthy"]
    run("policies", "routing", "fastest")
    assert not call(master.http + "/readyz")["warnings"]


def test_the_pool_s_own_kinds_too(world: Any, run: Run, tmp_path: Path) -> None:
    _, a, _ = world
    client = umbp.connect(a.socket)
    space = client.namespace(**{**IDENTITY, "tenant": "own"})
    keys = [umbp.page_keys(np.full(16, 500 + number, np.uint32), page_tokens=16) for number in range(6)]
    for one in keys:
        space.put(one, [bytes(PAGE)])
    time.sleep(1.1)  # what was just put is not taken while anything else can go
    row = next(one["row"] for one in call(a.http + "/v1/namespaces")["namespaces"] if one["digest"] == space.identity.digest().hex())
    first = lambda *more: run("evict", "4KiB", "--preview", "--namespace", str(row), *more)["first"][0]["key"]  # noqa: E731
    assert first() == bytes(keys[0][0]).hex()
    assert first("--policy", "theirs") == bytes(keys[-1][0]).hex()
    assert first() == bytes(keys[0][0]).hex()
    assert "policy" in run("evict", "4KiB", "--policy", "theirs", status=2)
    assert run("policies", "eviction", "theirs")["policies"][0]["current"] == "theirs"
    run("policies", "eviction", "leaf_lru")
    run("policies", "admission", "theirs")
    late = umbp.page_keys(np.full(16, 600, np.uint32), page_tokens=16)
    assert space.put(late, [bytes(PAGE)])[0] == umbp.WriteStatus.NOT_ADMITTED
    run("policies", "admission", "always")
    client.close()
