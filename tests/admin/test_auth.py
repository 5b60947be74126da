"""Who may call: tokens over TCP, none over the socket, and no page of another site."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from umbp.admin import auth
from umbp.admin.api import Body, Document, Endpoint, Nothing, make_application
from umbp.admin.auth import Peer
from umbp.grammar import Address
from umbp.metrics import Metrics

TOKEN = "s3cret-token"


class Done(Document, frozen=True):
    """Done."""

    done: bool


class Note(Body, frozen=True):
    """Anything."""

    text: str = ""


async def touch(params: Nothing, body: Any) -> Done:
    return Done(done=True)


async def peek(params: Nothing, body: Any) -> Done:
    return Done(done=True)


async def alive(params: Nothing, body: Any) -> Done:
    return Done(done=True)


async def scrape(params: Nothing, body: Any) -> Done:
    return Done(done=True)


ENDPOINTS = [
    Endpoint("GET", "/healthz", "x", alive, Done, access="anyone"),
    Endpoint("GET", "/metrics", "x", scrape, Done, access="local"),
    Endpoint("GET", "/v1/thing", "x", peek, Done),
    Endpoint("POST", "/v1/thing", "x", touch, Done, body=Note),
]


def application(token: str, listening: str = "127.0.0.1") -> web.Application:
    return make_application(ENDPOINTS, title="t", version="1", token=token, listening=Address(listening, 7411), metrics=Metrics(list))


@asynccontextmanager
async def client(token: str = "", listening: str = "127.0.0.1") -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(application(token, listening))) as made:
        yield made


async def statuses(c: Any, headers: dict[str, str]) -> dict[str, int]:
    paths = [("GET", "/healthz"), ("GET", "/metrics"), ("GET", "/v1/thing"), ("POST", "/v1/thing"), ("GET", "/v1/unknown")]
    found = {}
    for method, path in paths:
        async with c.request(method, path, headers=headers) as response:
            found[f"{method} {path}"] = response.status
    return found


@pytest.mark.parametrize(
    "authorization",
    [None, "", TOKEN, "Bearer", "Bearer ", f"Basic {TOKEN}", "Bearer wrong", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff"],
)
async def test_without_the_right_token_reads_and_changes_are_refused(authorization: str | None) -> None:
    async with client(TOKEN) as c:
        found = await statuses(c, {} if authorization is None else {"Authorization": authorization})
        assert found == {"GET /healthz": 200, "GET /metrics": 200, "GET /v1/thing": 401, "POST /v1/thing": 401, "GET /v1/unknown": 401}
        response = await c.get("/v1/thing")
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        problem = await response.json(content_type=None)
        assert (problem["code"], problem["field"]) == ("unauthorized", "Authorization")
        assert TOKEN not in str(problem)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_with_the_token_everything_is_open(scheme: str) -> None:
    async with client(TOKEN) as c:
        found = await statuses(c, {"Authorization": f"{scheme} {TOKEN}", "Host": "node7:7411"})
    assert found == {"GET /healthz": 200, "GET /metrics": 200, "GET /v1/thing": 200, "POST /v1/thing": 200, "GET /v1/unknown": 404}


async def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return real(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    async with client(TOKEN) as c:
        await c.get("/v1/thing", headers={"Authorization": "Bearer wrong"})
    assert seen == [(b"wrong", TOKEN.encode())]


async def test_metrics_of_another_machine_need_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "peer_of", lambda request: Peer(unix=False, local=False, name="tcp 10.0.0.9 port 1"))
    async with client(TOKEN, "0.0.0.0") as c:
        found = await statuses(c, {})
        assert (found["GET /metrics"], found["GET /healthz"]) == (401, 200)
        assert (await statuses(c, {"Authorization": f"Bearer {TOKEN}"}))["GET /metrics"] == 200


async def test_the_socket_needs_no_token_and_knows_its_peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = web.AppRunner(application(TOKEN))
    await runner.setup()
    path = str(tmp_path / "a.sock")
    await web.UnixSite(runner, path).start()
    with caplog.at_level(logging.INFO, "umbp.admin"):
        async with aiohttp.ClientSession("http://anything", connector=aiohttp.UnixConnector(path)) as session:
            found = await statuses(session, {})
    await runner.cleanup()
    assert found["GET /v1/thing"] == found["POST /v1/thing"] == 200
    assert f"POST '/v1/thing' '' by unix pid={os.getpid()} uid={os.getuid()}" in caplog.text


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:7411", True),
        ("localhost:9", True),
        ("LOCALHOST", True),
        ("[::1]:7411", True),
        ("node7.lan:7411", False),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("0.0.0.0:7411", False),
        ("/run/x.sock", False),
        ("http://localhost", False),
        ("user@localhost", False),
        ("", False),
    ],
)
async def test_without_a_token_only_a_loopback_name_is_answered(host: str, fine: bool) -> None:
    async with client() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
        answers = {}
        for path in ("/v1/thing", "/metrics", "/healthz"):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split()[0])
            await reader.readexactly(length)
            answers[path] = int(head.split()[1])
        writer.close()
    assert answers == {"/v1/thing": 200 if fine else 403, "/metrics": 200 if fine else 403, "/healthz": 200}


async def test_the_configured_address_is_a_name_of_this_server() -> None:
    async with client(listening="127.0.0.77") as c:
        assert (await c.get("/v1/thing", headers={"Host": "127.0.0.77:7411"})).status == 200


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize(
    ("headers", "fine"),
    [
        ({}, True),
        ({"Origin": "http://localhost:7411"}, True),
        ({"Origin": "http://localhost:8000"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
    ],
)
async def test_changes_are_not_taken_from_another_site(headers: dict[str, str], fine: bool, token: str) -> None:
    headers = {"Host": "localhost:7411", "Authorization": f"Bearer {token}", **headers}
    async with client(token) as c:
        assert (await c.post("/v1/thing", headers=headers)).status == (200 if fine else 403)
        assert (await c.get("/v1/thing", headers=headers)).status == 200


async def test_refusals_are_logged_with_the_peer_and_without_the_token(caplog: pytest.LogCaptureFixture) -> None:
    async with client(TOKEN) as c:
        await c.post("/v1/thing?x=%0Aforged", headers={"Authorization": "Bearer guess"})
    assert "refused 'POST'" in caplog.text
    assert "tcp 127.0.0.1" in caplog.text
    assert "guess" not in caplog.text
    assert "\nforged" not in caplog.text


async def test_a_route_that_is_no_endpoint_is_closed() -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = application(TOKEN)
    app.router.add_get("/live", hello)
    async with TestClient(TestServer(app)) as c:
        assert (await c.get("/live")).status == 401
        assert (await c.get("/live", headers={"Authorization": f"Bearer {TOKEN}"})).status == 200
