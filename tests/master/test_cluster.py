"""Real masters and pools over loopback: who is seen where, and how soon."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

import umbp
from tests.masters import MasterProcess, call, metric, reported, until
from tests.pools import PoolProcess, together
from umbp.layout import Namespace

PAGE = 4096
IDENTITY: dict[str, Any] = {"model": "m", "revision": "r1", "page_tokens": 16, "layout": umbp.Layout.opaque(PAGE), "replicated": True}


def keys_of(*numbers: int) -> np.ndarray:
    return umbp.page_keys(np.arange(numbers[0] * 1000, numbers[0] * 1000 + 16 * len(numbers), dtype=np.uint32), page_tokens=16)


def put(pool: PoolProcess, *numbers: int, identity: dict[str, Any] = IDENTITY) -> np.ndarray:
    """Put a chain of pages; its keys."""
    keys = keys_of(*numbers)
    client = umbp.connect(pool.socket)
    try:
        pages = [bytes([number % 256]) * PAGE for number in numbers]
        assert client.namespace(**identity).put(keys, pages).refused.sum() == 0
    finally:
        client.close()
    return keys


@pytest.fixture(scope="module")
def world() -> Any:
    """A master and two pools."""
    master = MasterProcess()
    with together(master, a := master.pool("--tag", "rack=r12,hw=MI355X"), b := master.pool("--tag", 'rack=r"13')):
        master.synced(a, b)
        yield master, a, b


def test_a_commit_is_told_without_waiting_for_a_heartbeat() -> None:
    slow = ("--heartbeat", "60s", "--suspect-after", "180s", "--dead-after", "600s")
    with MasterProcess(timing=slow) as master, master.pool() as a:  # not together: who comes first tries again after a heartbeat
        master.synced(a)
        beats = reported(a, "beats")
        keys = put(a, 1)
        until(lambda: master.locations(bytes(keys[0])) == {(a.name, "dram")})
        assert reported(a, "beats") <= beats + 1
        assert master.nodes()[a.name]["tiers"][0]["tier"] == "dram"


def test_a_removal_is_seen_too(world: Any) -> None:
    master, a, _ = world
    keys = put(a, 100)
    until(lambda: master.locations(bytes(keys[0])))
    client = umbp.connect(a.socket)
    assert client.namespace(**IDENTITY).remove(keys) == 1
    client.close()
    until(lambda: not master.locations(bytes(keys[0])))


def test_a_route_names_who_has_it_and_who_should_take_it(world: Any) -> None:
    master, a, b = world
    keys = put(a, 200, 201, 202, 203)
    put(b, 200, 201)
    until(lambda: len(master.locations(bytes(keys[3]))) == 1 and len(master.locations(bytes(keys[1]))) == 2)
    namespace = Namespace(**IDENTITY).digest().hex()
    body = {"namespace": namespace, "keys": [bytes(key).hex() for key in keys], "requester": b.name, "prefill_tokens_per_second": 100.0}
    answer = master.post("/v1/route", body)
    assert (answer["held"], answer["pages"]) == (4, 4)
    assert [(run["node"], run["tier"]) for run in answer["runs"]][-1] == (a.name, "dram")
    assert answer["targets"][0]["node"] == a.name  # everything is there already
    assert answer["targets"][0]["pool_pages"] == 4
    assert answer["targets"][1]["remote_pages"] == 2
    dry = master.post("/v1/route", {**body, "policy": "local_first", "requester": b.name})
    assert [(run["node"], run["start"], run["stop"]) for run in dry["runs"]] == [(b.name, 0, 2), (a.name, 2, 4)]


def test_a_requester_that_is_no_node_is_refused_and_the_nodes_are_named(world: Any) -> None:
    master, a, b = world
    body = {"namespace": Namespace(**IDENTITY).digest().hex(), "keys": ["0" * 64]}
    for asked in (a, master):  # a member hands the question on
        for path in ("/v1/route", "/v1/place"):
            call(asked.http + path, body, "POST")  # who is on no node names none
            with pytest.raises(urllib.error.HTTPError) as caught:
                call(asked.http + path, {**body, "requester": "other"}, "POST")
            problem = json.loads(caught.value.read())
            assert (problem["status"], problem["field"]) == (404, "requester")
            assert all(name in problem["detail"] for name in ("'other'", a.name, b.name))


def test_the_root_says_where_to_go_and_all_of_it_is_there(world: Any) -> None:
    for process in world[:2]:
        links = call(process.http + "/")["links"]
        assert "openapi" in str(links)
        for path in links.values():
            with urllib.request.urlopen(process.http + path, timeout=60) as answer:
                assert answer.status == 200


def test_what_a_member_is_asked_of_the_cluster_it_hands_on(world: Any) -> None:
    master, a, b = world
    assert {node["id"] for node in call(a.http + "/v1/nodes")["nodes"]} == {a.name, b.name}
    assert call(a.http + f"/v1/nodes/{b.name}")["id"] == b.name
    assert call(a.http + "/v1/cluster")["master"] == master.ready["boot"]
    kinds = {policy["kind"]: policy["current"] for policy in call(a.http + "/v1/policies")["policies"]}
    assert kinds["routing"] == "fastest"
    assert call(a.http + "/v1/policies/routing", {"name": "local_first"}, "PUT")["current"] == "local_first"
    assert {p["kind"]: p["current"] for p in master.get("/v1/policies")["policies"]}["routing"] == "local_first"
    master.post("/v1/policies/routing", {"name": "fastest"}, "PUT")


def test_tags_are_what_the_node_joined_with_whatever_it_says_since(world: Any) -> None:
    master, a, b = world
    assert master.nodes()[a.name]["tags"] == {"rack": "r12", "hw": "MI355X"}
    assert call(a.http + f"/v1/nodes/{b.name}")["tags"] == {"rack": 'r"13'}
    of_a = f'umbp_node_info{{node="{a.name}",tag_hw="MI355X",tag_rack="r12"}}'
    of_b = f'umbp_node_info{{node="{b.name}",tag_hw="",tag_rack="r\\"13"}}'
    assert metric(master, of_a) == metric(master, of_b) == 1  # one set of labels for all; an empty one is none
    assert metric(a, of_a) == 1
    labels = f'{{node="{a.name}",tier="dram"}}'
    assert metric(master, "umbp_node_capacity_bytes" + labels) == master.nodes()[a.name]["tiers"][0]["capacity_bytes"] > 0
    put(a, 900)
    until(lambda: metric(master, "umbp_node_keys" + labels) > 0 and metric(master, "umbp_node_used_bytes" + labels) >= PAGE)
    assert metric(master, f'umbp_node_source{{node="{a.name}"}}') == 1
    beats = reported(a, "beats")
    until(lambda: reported(a, "beats") > beats + 1)
    assert master.nodes()[a.name]["tags"] == {"rack": "r12", "hw": "MI355X"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        master.post("/v1/members", {"node": "c", "boot": 1, "place": "c", "addresses": {}, "tiers": [], "tags": {"rack": "a,b"}})
    problem = json.loads(refused.value.read())
    assert (refused.value.code, problem["field"]) == (400, "tags"), problem
    assert "c" not in master.nodes()


def test_draining_is_kept_by_the_node_and_survives_both(world: Any) -> None:
    master, a, _ = world
    assert master.post(f"/v1/nodes/{a.name}/drain")["state"] == "draining"
    beats = reported(a, "beats")
    until(lambda: reported(a, "beats") >= beats + 2)  # one that began after that was answered: the pool has been told
    master.restart()
    master.synced(a)
    assert master.nodes()[a.name]["draining"]
    a.restart()
    master.synced(a)
    assert (master.nodes()[a.name]["state"], master.nodes()[a.name]["tags"]["rack"]) == ("draining", "r12")
    assert master.post(f"/v1/nodes/{a.name}/drain", method="DELETE")["state"] == "alive"


def test_a_pool_alone_has_the_same_answers() -> None:
    with PoolProcess(dram="16MiB") as pool:
        keys = put(pool, 1, 2, 3)

        def one() -> tuple[Any, ...]:
            (node,) = call(pool.http + "/v1/nodes")["nodes"]
            return node["synced"], node["id"], node["state"], node["source"]

        until(lambda: one() == (True, pool.name, "alive", True), one)
        until(lambda: call(pool.http + "/v1/cluster")["keys"] == 3)
        namespace = Namespace(**IDENTITY).digest().hex()
        body = {"namespace": namespace, "keys": [bytes(key).hex() for key in keys], "requester": pool.name}
        answer = call(pool.http + "/v1/route", body)
        assert [(run["node"], run["start"], run["stop"]) for run in answer["runs"]] == [(pool.name, 0, 3)]
        with PoolProcess("--master", pool.http, dram="16MiB") as other:  # it is a master like any other
            until(lambda: {node["id"] for node in call(pool.http + "/v1/nodes")["nodes"]} == {pool.name, other.name})


def test_a_prefix_stored_on_one_node_is_got_on_another(world: Any) -> None:
    master, a, b = world
    keys = put(a, 300, 301, 302)
    until(lambda: master.locations(bytes(keys[2])))
    client = umbp.connect(b.socket)
    try:
        pages = [bytearray(PAGE) for _ in keys]
        status = client.namespace(**IDENTITY).get(keys, pages, deadline=30.0)
        assert status.all(umbp.ReadStatus.HIT), status
        assert [bytes(page) for page in pages] == [bytes([number % 256]) * PAGE for number in (300, 301, 302)]
    finally:
        client.close()
    until(lambda: master.locations(bytes(keys[0])) == {(a.name, "dram"), (b.name, "dram")})
    until(lambda: any(link["source"] == a.name for link in master.get("/v1/links")["links"]))
