"""The pool's REST over a real core pool: what each endpoint answers, does, and refuses."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from admin.openapi_check import check_document
from pool.rest_node import ENTRIES, FakeNode, call, get, key_array, key_text

from umbp.admin.endpoint import examples_of
from umbp.core.pool import Pool
from umbp.errors import Unavailable
from umbp.pool.rest import endpoints

K1 = key_text(1)


# -- what it answers ---------------------------------------------------------------------------------------------------------------


async def test_health_and_readiness_follow_the_node() -> None:
    node = FakeNode()
    async with node.client() as client:
        assert (await get(client, "/readyz"))["ready"]
        node.warnings.append("no hugepages")
        assert (await get(client, "/readyz"))["warnings"] == ["no hugepages"]
        node.state = "stopping"
        assert (await get(client, "/readyz", 503))["state"] == "stopping"
        assert (await get(client, "/healthz"))["healthy"]
        node.unhealthy.append("the segment is gone")
        assert (await get(client, "/healthz", 503))["reasons"] == ["the segment is gone"]


async def test_before_there_is_a_pool_only_health_readiness_and_metrics_answer() -> None:
    class Starting(FakeNode):
        @property
        def pool(self) -> Pool:
            if self.state == "starting":
                raise Unavailable("the pool is starting")
            return self._pool

        @pool.setter
        def pool(self, pool: Pool) -> None:
            self._pool, self.state = pool, "ready"

    node = Starting()
    node.state = "starting"
    async with node.client() as client:
        await get(client, "/healthz")
        assert not (await get(client, "/readyz", 503))["ready"]
        assert "umbp_ready 0.0" in await (await client.get("/metrics")).text()
        problem = await get(client, "/v1/status", 503)
        assert (problem["code"], problem["retryable"]) == ("unavailable", True)


async def test_status_is_the_pool_s_own_numbers() -> None:
    node = FakeNode()
    row = node.namespace(tenant="t1", salt="secret")
    node.put(row, 1, 2, 3)
    async with node.client() as client:
        status = await get(client, "/v1/status")
        assert (status["keys"], status["used_bytes"], status["limits"]["keys"]) == (3, 3 * 4096, ENTRIES)
        assert status["capacity_bytes"] == status["allocated_bytes"] + status["free_bytes"] == node.dram_bytes
        assert status["largest_free_run_bytes"] <= status["free_bytes"]
        assert (status["uptime_seconds"], status["regions"]) == (900, [])
        (namespace,) = status["namespaces"]
        assert (namespace["keys"], namespace["stored_keys"], namespace["sessions"]) == (3, 3, 1)
        assert namespace["identity"]["tenant"] == "t1"
        assert "secret" not in json.dumps(status)


async def test_a_pool_alone_is_a_cluster_of_one_node() -> None:
    node = FakeNode()
    async with node.client() as client:
        assert (await get(client, "/v1/cluster"))["nodes"] == 1
        (one,) = (await get(client, "/v1/nodes"))["nodes"]
        assert (one["id"], one["state"], one["synced"]) == ("default", "alive", True)
        assert (await get(client, "/v1/nodes/default"))["boot"] == one["boot"] == 123
        assert (await get(client, "/v1/nodes/other", 404))["code"] == "not_found"


async def test_a_namespace_is_named_by_row_or_digest() -> None:
    node = FakeNode()
    rows = [node.namespace(f"m{i}") for i in range(3)]
    async with node.client() as client:
        listed = await get(client, "/v1/namespaces?limit=2&offset=1")
        assert listed["total"] == 3
        assert [n["row"] for n in listed["namespaces"]] == rows[1:]
        wanted = listed["namespaces"][0]
        for name in ("1", wanted["digest"], wanted["id"], wanted["digest"][:8], wanted["digest"].upper()):
            assert await get(client, f"/v1/namespaces/{name}") == wanted
        for name in ("9", "0" * 64):
            assert (await get(client, f"/v1/namespaces/{name}", 404))["field"] == "namespace"
        assert (await get(client, "/v1/namespaces/abc", 400))["field"] == "namespace"


async def test_where_a_key_is() -> None:
    node = FakeNode()
    row, other = node.namespace("a"), node.namespace("b")
    node.put(row, 1, 2)
    node.put(other, 1)
    node.time += 5
    node.note(row, 1)
    node.time += 2
    async with node.client() as client:
        found = await get(client, f"/v1/keys/{row}/{K1}")
        (location,) = found["locations"]
        assert (found["namespace"], found["key"], location["tier"], location["bytes"]) == (row, K1, "dram", 4096)
        assert (location["age_seconds"], location["idle_seconds"], location["hits"]) == (7, 2, 1)
        assert (location["leases"], location["pins"], location["checksum"]) == (0, 0, False)
        both = await get(client, f"/v1/keys/{K1}")
        assert [key["namespace"] for key in both["keys"]] == [row, other]
        assert (await get(client, f"/v1/keys/{other}/{key_text(2)}", 404))["field"] == "key"
        node.pool.reserve(node.time, 1, other, key_array(2), b"", 0.0)
        assert "being written" in (await get(client, f"/v1/keys/{other}/{key_text(2)}", 404))["detail"]


async def test_hot_lists_what_was_asked_for_most() -> None:
    node = FakeNode()
    row, other = node.namespace("a"), node.namespace("b")
    node.put(row, 1, 2, 3, 4)
    node.put(other, 5)
    for numbers in ((1, 2, 3), (2, 3), (3,)):
        node.note(row, *numbers)
    node.note(other, 5)
    async with node.client() as client:
        assert [k["key"] for k in (await get(client, "/v1/hot?n=2"))["keys"]] == [key_text(3), key_text(2)]
        everything = (await get(client, "/v1/hot"))["keys"]
        assert [k["locations"][0]["hits"] for k in everything] == [3, 2, 1, 1]
        assert [k["key"] for k in (await get(client, f"/v1/hot?namespace={other}"))["keys"]] == [key_text(5)]


# -- what it does ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "bytes_"), [("8KiB", 8192), (8192, 8192), (" 8 kb ", 8192), ("0.0078125 MiB", 8192), (0, 0), ("0", 0), (1 << 40, 1 << 40)]
)
async def test_a_quota_is_a_size_and_zero_is_none(given: Any, bytes_: int) -> None:
    node = FakeNode()
    row = node.namespace()
    async with node.client() as client:
        assert (await call(client, "PUT", f"/v1/namespaces/{row}/quota", {"quota": given}))["quota_bytes"] == bytes_
    assert node.pool.namespaces[row].account.quota_bytes == bytes_
    assert node.woken == 1


async def test_over_quota_evicts_within_the_namespace_and_counts_it() -> None:
    node = FakeNode()
    row, other = node.namespace("a"), node.namespace("b")
    node.put(other, 1, 2)
    node.put(row, *range(8))
    async with node.client() as client:
        await call(client, "PUT", f"/v1/namespaces/{row}/quota", {"quota": "16KiB"})
        node.time += 10
        while node.pool.tick(node.time):
            pass
        mine = await get(client, f"/v1/namespaces/{row}")
        assert (mine["keys"], mine["held_bytes"], mine["evicted_for_quota_keys"]) == (4, 16384, 4)
        assert (await get(client, f"/v1/namespaces/{other}"))["keys"] == 2
    node.pool.check()


async def test_flush_takes_a_whole_namespace_at_once() -> None:
    node = FakeNode()
    row, other = node.namespace("a"), node.namespace("b")
    node.put(row, 1, 2)
    node.put(other, 1)
    async with node.client() as client:
        assert (await call(client, "POST", f"/v1/namespaces/{row}/flush"))["keys"] == 2
        await get(client, f"/v1/keys/{row}/{K1}", 404)
        await get(client, f"/v1/keys/{other}/{K1}")
        node.pool.tick(node.time)
        assert (await get(client, "/v1/status"))["keys"] == 1


async def test_delete_removes_one_key_and_is_no_error_twice() -> None:
    node = FakeNode()
    row = node.namespace()
    node.put(row, 1, 2)
    async with node.client() as client:
        assert (await call(client, "DELETE", f"/v1/keys/{row}/{K1}"))["removed"] == 1
        assert (await call(client, "DELETE", f"/v1/keys/{row}/{K1}"))["removed"] == 0
        await get(client, f"/v1/keys/{row}/{key_text(2)}")


async def test_a_dry_run_names_what_evict_then_takes() -> None:
    node = FakeNode()
    row = node.namespace()
    node.put(row, *range(10))
    node.time += 10
    before = node.digest()
    async with node.client() as client:
        would = await call(client, "POST", "/v1/evict", {"bytes": "10KiB", "dry_run": True})
        assert node.digest() == before
        did = await call(client, "POST", "/v1/evict", {"bytes": 10240, "namespace": row})
    assert (did["objects"], did["bytes"], did["complete"]) == (3, 12288, True)
    assert would["first"] == did["first"]
    assert [v["key"] for v in did["first"]] == [key_text(n) for n in (9, 8, 7)]  # the end of a chain goes first
    assert node.pool.objects.evicted_keys == 3
    node.pool.check()


async def test_evict_takes_all_that_can_go_and_leaves_pinned_and_leased_alone() -> None:
    node = FakeNode()
    row, other = node.namespace("a"), node.namespace("b")
    node.put(row, *range(200))
    node.put(other, 1)
    node.time += 10
    account = node.pool.namespaces[row].account
    ids = node.pool.objects.live_ids(row)[:1]
    node.pool.lease(node.time, 1, ids, node.pool.table.versions_of(ids), 60.0)
    async with node.client() as client:
        pinned = await call(client, "POST", "/v1/pins", {"namespace": str(row), "keys": [key_text(150), key_text(999)], "note": "x"})
        assert pinned["missing"] == [key_text(999)]
        did = await call(client, "POST", "/v1/evict", {"bytes": "1GiB", "namespace": row, "show": 5})
        assert (did["objects"], did["complete"], len(did["first"])) == (198, False, 5)
        assert (await get(client, f"/v1/keys/{row}/{key_text(150)}"))["locations"][0]["pins"] == 1
    assert account.live_keys == 2
    assert node.pool.namespaces[other].account.live_keys == 1
    node.pool.check()


async def test_pins_are_listed_end_by_hand_or_by_time() -> None:
    node = FakeNode()
    row = node.namespace()
    node.put(row, 1, 2)
    async with node.client() as client:
        for_ever = (await call(client, "POST", "/v1/pins", {"namespace": row, "keys": [K1]}))["pin"]
        await call(client, "POST", "/v1/pins", {"namespace": row, "keys": [K1, key_text(2)], "seconds": 30, "note": "prompt"})
        assert for_ever["seconds_left"] is None
        listed = await get(client, "/v1/pins")
        assert (listed["total"], listed["pins"][1]["note"], listed["pins"][1]["seconds_left"]) == (2, "prompt", 30)
        await call(client, "DELETE", f"/v1/pins/{for_ever['id']}")
        assert (await call(client, "DELETE", f"/v1/pins/{for_ever['id']}", status=404))["code"] == "not_found"
        node.time += 31
        node.pool.tick(node.time)
        assert (await get(client, "/v1/pins"))["total"] == 0
    node.pool.check()


async def test_policies_are_shown_and_swapped() -> None:
    node = FakeNode(eviction="lru")
    row = node.namespace()
    node.put(row, *range(20))
    async with node.client() as client:
        shown = {p["kind"]: p for p in (await get(client, "/v1/policies"))["policies"]}
        assert shown["eviction"]["current"] == "lru"
        for kind in ("eviction", "admission"):
            for name in shown[kind]["available"]:
                assert (await call(client, "PUT", f"/v1/policies/{kind}", {"name": name}))["current"] == name
        assert (await call(client, "PUT", "/v1/policies/eviction", {"name": "nope"}, 404))["field"] == "eviction"
        node.time += 10
        assert (await call(client, "POST", "/v1/evict", {"bytes": 4096}))["objects"] == 1
    node.pool.check()


async def test_sessions_and_links() -> None:
    node = FakeNode()
    async with node.client() as client:
        (one,) = (await get(client, "/v1/sessions"))["sessions"]
        assert (one["session"], one["age_seconds"], one["leases"]) == (1, 100, 0)
        for path in (await get(client, "/"))["links"].values():
            assert (await client.get(path)).status == 200


# -- what it refuses ---------------------------------------------------------------------------------------------------------------

QUOTA, EVICT, PINS, POLICY = "/v1/namespaces/0/quota", "/v1/evict", "/v1/pins", "/v1/policies/eviction"
BAD: list[tuple[str, str, Any, int, str]] = [
    *[(m, p, raw, 400, "body") for m, p in (("PUT", QUOTA), ("POST", EVICT), ("POST", PINS), ("PUT", POLICY)) for raw in (None, b"")],
    *[("PUT", QUOTA, raw, 400, "body") for raw in (b"{", b"[]", b"null", b"1", b"\xff", b"{'quota': 1}", b"[" * 10000, b'{"quota": 1} {}')],
    ("PUT", QUOTA, b"{}", 400, "quota"),
    ("PUT", QUOTA, b'{"quota": 1, "other": 2}', 400, "other"),
    *[
        ("PUT", QUOTA, b'{"quota": %s}' % value, 400, "quota")
        for value in (
            b"null",
            b"true",
            b"1.5",
            b"-1",
            b"1e400",
            b"[]",
            b"{}",
            b'""',
            b'"abc"',
            b'"-1"',
            b'"1.5.2"',
            b'"64 megs"',
            b'"1e400"',
        )
    ],
    ("PUT", QUOTA, b'{"quota": 99999999999999999999}', 400, "quota"),
    ("PUT", QUOTA, b'{"quota": "' + b"9" * 100 + b'"}', 400, "quota"),
    ("PUT", "/v1/namespaces/7/quota", b'{"quota": 0}', 404, "namespace"),
    ("PUT", "/v1/namespaces/x/quota", b'{"quota": 0}', 400, "namespace"),
    ("PUT", QUOTA, b" " * (1 << 20) + b"{}", 413, ""),
    ("POST", "/v1/namespaces/7/flush", None, 404, "namespace"),
    ("POST", "/v1/namespaces/0/flush", b'{"all": 1}', 400, "all"),
    ("POST", "/v1/namespaces/0/flush?now=1", None, 400, "now"),
    ("GET", "/v1/namespaces/0000000g", None, 400, "namespace"),
    *[
        ("GET", f"/v1/namespaces?{query}", None, 400, query.partition("=")[0])
        for query in ("limit=0", "limit=1001", "limit=x", "offset=-1", "x=1")
    ],
    ("GET", "/v1/namespaces?limit=1&limit=2", None, 400, "limit"),
    *[
        (m, f"/v1/keys/0/{key}", None, 400, "key")
        for m in ("GET", "DELETE")
        for key in ("ab", "g" * 64, "0" * 63, "0" * 65, "0" * 63 + "%0A", "..%2f")
    ],
    ("GET", f"/v1/keys/7/{K1}", None, 404, "namespace"),
    ("DELETE", f"/v1/keys/7/{K1}", None, 404, "namespace"),
    ("GET", "/v1/keys/0123", None, 400, "key"),
    ("GET", "/v1/hot?n=0", None, 400, "n"),
    ("GET", "/v1/hot?n=1001", None, 400, "n"),
    ("GET", "/v1/hot?namespace=7", None, 404, "namespace"),
    ("POST", EVICT, b'{"bytes": "lots"}', 400, "bytes"),
    ("POST", EVICT, b'{"bytes": -4096}', 400, "bytes"),
    ("POST", EVICT, b'{"bytes": 4096, "dry_run": "yes"}', 400, "dry_run"),
    ("POST", EVICT, b'{"bytes": 4096, "dry_run": 1}', 400, "dry_run"),
    ("POST", EVICT, b'{"bytes": 4096, "namespace": 7}', 404, "namespace"),
    ("POST", EVICT, b'{"bytes": 4096, "namespace": -1}', 400, "namespace"),
    ("POST", EVICT, b'{"bytes": 4096, "show": 100000}', 400, "show"),
    ("POST", PINS, b'{"namespace": 0, "keys": []}', 400, "keys"),
    ("POST", PINS, b'{"namespace": 0, "keys": "%s"}' % K1.encode(), 400, "keys"),
    ("POST", PINS, b'{"namespace": 0, "keys": ["%s", "00"]}' % K1.encode(), 400, "keys[1]"),
    ("POST", PINS, b'{"namespace": 0, "keys": ["%s"]}' % key_text(99).encode(), 404, "keys"),
    ("POST", PINS, json.dumps({"namespace": 0, "keys": [K1] * 4097}).encode(), 400, "keys"),
    ("POST", PINS, b'{"namespace": 0, "keys": ["%s"], "seconds": -1}' % K1.encode(), 400, "seconds"),
    ("POST", PINS, json.dumps({"namespace": 0, "keys": [K1], "note": "x" * 257}).encode(), 400, "note"),
    ("POST", PINS, b'{"keys": ["%s"]}' % K1.encode(), 400, "namespace"),
    ("DELETE", "/v1/pins/x", None, 400, "pin"),
    ("DELETE", "/v1/pins/77", None, 404, "pin"),
    ("PUT", "/v1/policies/other", b'{"name": "lru"}', 400, "kind"),
    ("PUT", "/v1/policies/ssd_eviction", b'{"name": "lru"}', 404, "kind"),
    ("POST", EVICT, b'{"bytes": 1, "tier": "ssd"}', 404, "tier"),
    ("PUT", POLICY, b'{"name": "os.system"}', 404, "eviction"),
    ("PUT", POLICY, b'{"name": 1}', 400, "name"),
    ("GET", "/v1/status?verbose=1", None, 400, "verbose"),
    ("GET", "/v2", None, 404, ""),
    ("GET", "/v1/../etc/passwd", None, 404, ""),
    ("POST", "/v1/status", None, 405, ""),
    ("PATCH", QUOTA, b"{}", 405, ""),
]


async def test_a_bad_request_is_a_problem_and_changes_nothing() -> None:
    node = FakeNode()
    row = node.namespace()
    node.put(row, 1, 2, 3)
    before = node.digest()
    async with node.client() as client:
        for method, path, raw, status, field in BAD:
            headers = {"Content-Type": "application/json"} if raw is not None else {}
            async with client.request(method, path, data=io.BytesIO(raw) if raw else raw, headers=headers) as response:
                case = (method, path, (raw or b"")[:60], await response.text())
                assert response.status == status, case
                assert response.content_type == "application/problem+json", case
                problem = await response.json(content_type=None)
            assert (problem["status"], problem["field"]) == (status, field), case
            assert field.partition("[")[0] in problem["detail"], case
            assert problem["type"] == f"urn:umbp:problem:{problem['code']}", case
            assert node.digest() == before, case
        await get(client, "/v1/status")


async def test_a_missing_body_is_answered_with_a_good_one() -> None:
    node = FakeNode()
    node.namespace()
    async with node.client() as client:
        problem = await call(client, "PUT", QUOTA, status=400)
        good = json.loads(re.search(r"for example: (.*)\)$", problem["detail"])[1])
        await call(client, "PUT", QUOTA, good)


async def test_a_fault_of_ours_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    node = FakeNode()
    node.sessions = lambda: 1 / 0  # type: ignore[method-assign]
    async with node.client() as client:
        problem = await get(client, "/v1/sessions", 500)
    assert problem["code"] == "internal"
    assert "division" not in json.dumps(problem)
    assert "ZeroDivisionError" in caplog.text


async def test_every_endpoint_under_v1_needs_the_token_and_none_changes_a_thing_without(tmp_path: Path) -> None:
    node = FakeNode(token="right")
    row = node.namespace()
    node.put(row, 1, 2)
    before = node.digest()
    good = {"namespace": "0", "key": K1, "node": "default", "pin": "1", "kind": "eviction", "engine": "e", "request_id": "r"}
    async with node.client() as client, node.unix_client(tmp_path) as local:
        for endpoint in endpoints(node):
            path, body = endpoint.path.format(**good), examples_of(endpoint.body)
            for token in ("", "Bearer wrong"):
                async with client.request(endpoint.method, path, json=body, headers={"Authorization": token}) as response:
                    assert response.status == (401 if path.startswith("/v1") else 200), path
                    assert node.digest() == before, path
        for session, headers in ((client, {"Authorization": "Bearer right"}), (local, {})):
            for endpoint in endpoints(node):
                body = {**examples_of(endpoint.body), **({"keys": [key_text(2)]} if "keys" in examples_of(endpoint.body) else {})}
                path = endpoint.path.format(**good)
                async with session.request(endpoint.method, path, json=body or None, headers=headers) as response:
                    assert response.status in (200, 404), (path, await response.text())
                node.put(row, 1, 2)
    node.pool.check()


async def test_the_description_covers_every_route() -> None:
    node = FakeNode()
    async with node.client() as client:
        check_document(await get(client, "/openapi.json"), client.app, endpoints(node), node.cluster.routes())
