"""The application of endpoints: what is refused before a handler runs, and how it describes itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import pytest
from admin.openapi_check import check_document
from aiohttp.test_utils import TestClient, TestServer
from msgspec import Meta

from umbp.admin import api
from umbp.admin.api import Body, Document, Endpoint, Nothing, Params, Reply, make_application
from umbp.errors import LimitReached, SegmentError
from umbp.grammar import Address
from umbp.metrics import Metrics


class Item(Params, frozen=True):
    """A numbered thing."""

    number: Annotated[int, Meta(ge=0, le=99, examples=[7])]
    loud: bool = False


class Paint(Body, frozen=True):
    """A colour."""

    colour: Annotated[Literal["red", "blue"], Meta(examples=["red"])]
    coats: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=3)] = []  # noqa: RUF012 - msgspec copies it


class Optional(Body, frozen=True):
    """All by default."""

    force: bool = False


class Said(Document, frozen=True):
    """What came in."""

    number: int
    text: str


class Boom(Exception):
    """Nobody expects it."""


async def read(params: Item, body: Nothing) -> Said:
    return Said(number=params.number, text="LOUD" if params.loud else "quiet")


async def paint(params: Item, body: Paint) -> Reply:
    return Reply(Said(number=params.number, text=f"{body.colour} {len(body.coats)}"), status=201)


async def reset(params: Item, body: Optional) -> Said:
    return Said(number=params.number, text=str(body.force))


async def beat(params: Item, body: Optional) -> Said:
    return Said(number=params.number, text="")


async def fail(params: Item, body: Nothing) -> Said:
    raise [Boom("the secret inside"), LimitReached("full", field="pins"), SegmentError("bad magic")][params.number]


ENDPOINTS = [
    Endpoint("GET", "/v1/items/{number}", "Read", read, Said, Item),
    Endpoint("PUT", "/v1/items/{number}", "Paint", paint, Said, Item, Paint, also=(201,)),
    Endpoint("POST", "/v1/items/{number}/reset", "Reset", reset, Said, Item, Optional),
    Endpoint("POST", "/v1/items/{number}/beat", "A machine says so, many times a second", beat, Said, Item, Optional, logged=False),
    Endpoint("GET", "/v1/fail/{number}", "Fail", fail, Said, Item),
]


@asynccontextmanager
async def client(metrics: Metrics | None = None) -> AsyncIterator[TestClient]:
    metrics = metrics or Metrics(list)
    app = make_application(ENDPOINTS, title="t", version="1", token="", listening=Address("127.0.0.1", 80), metrics=metrics)
    async with TestClient(TestServer(app)) as made:
        yield made


async def problem(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status == status, await response.text()
    assert response.content_type == "application/problem+json"
    said: dict[str, Any] = await response.json(content_type=None)
    assert said.keys() == {"type", "title", "status", "detail", "code", "field", "retryable"}
    assert (said["status"], said["code"]) == (status, code)
    return said


async def test_a_good_request_reaches_its_handler_with_typed_values() -> None:
    async with client() as c:
        assert await (await c.get("/v1/items/7?loud=true")).json() == {"number": 7, "text": "LOUD"}
        response = await c.put("/v1/items/8", json={"colour": "red", "coats": [1, 2]})
        assert (response.status, await response.json()) == (201, {"number": 8, "text": "red 2"})
        assert response.headers["Cache-Control"] == "no-store"
        assert (await c.head("/v1/items/7")).status == 200


async def test_a_body_of_which_nothing_is_required_may_be_absent() -> None:
    async with client() as c:
        assert (await (await c.post("/v1/items/1/reset")).json())["text"] == "False"
        assert (await (await c.post("/v1/items/1/reset", json={"force": True})).json())["text"] == "True"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/items/x", "number"),
        ("/v1/items/100", "number"),
        ("/v1/items/-1", "number"),
        ("/v1/items/1?loud=maybe", "loud"),
        ("/v1/items/1?other=1", "other"),
        ("/v1/items/1?number=2", "number"),
        ("/v1/items/1?loud=true&loud=false", "loud"),
        ("/v1/items/1?" + "y" * 3000 + "=1", "y" * 97 + "..."),
    ],
)
async def test_bad_params_name_the_field(path: str, field: str) -> None:
    async with client() as c:
        said = await problem(await c.get(path), 400, "invalid_request")
    assert said["field"] == field
    assert len(said["detail"]) <= api.DETAIL_CHARS_MAX
    if path == "/v1/items/100":
        assert "for example: 7" in said["detail"]


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"\xff\xfe", "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "colour"),
        (b'{"colour": "green"}', "colour"),
        (b'{"colour": 1}', "colour"),
        (b'{"colour": "red", "size": 1}', "size"),
        (b'{"colour": "red", "coats": [1, 0]}', "coats[1]"),
        (b'{"colour": "red", "coats": [1, "2"]}', "coats[1]"),
        (b'{"colour": "red", "coats": [1, 1, 1, 1]}', "coats"),
        (b'{"colour": "red", "coats": {}}', "coats"),
    ],
)
async def test_a_bad_body_names_the_field_and_shows_a_good_one(raw: bytes, field: str) -> None:
    async with client() as c:
        said = await problem(await c.put("/v1/items/1", data=raw, headers={"Content-Type": "application/json"}), 400, "invalid_request")
    assert said["field"] == field
    assert '{"colour":"red"}' in said["detail"]
    instead = {"size": "; there are colour, coats (", "colour": " is none of blue, red ("}.get(field, "")
    assert instead in said["detail"] or raw not in (b'{"colour": "red", "size": 1}', b'{"colour": "green"}')


async def test_a_body_that_a_form_could_send_is_refused() -> None:
    async with client() as c:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/octet-stream"):
            response = await c.put("/v1/items/1", data=b'{"colour": "red"}', headers={"Content-Type": kind})
            await problem(response, 415, "unsupported_media_type")


async def test_bodies_are_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b" " * 65536

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    headers = {"Content-Type": "application/json"}
    async with client() as c:
        await problem(await c.put("/v1/items/1", data=chunks(17), headers=headers), 413, "too_large")
        head = b"PUT /v1/items/1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{"
        reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
        writer.write(head % (1 << 40))
        assert b"413" in await reader.readline()
        writer.close()
        monkeypatch.setattr(api, "BODY_SECONDS_MAX", 0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
        writer.write(head % 10)
        assert b"504" in await reader.readline()
        writer.close()
        assert (await c.get("/v1/items/1")).status == 200


async def test_an_unknown_path_or_method_is_a_problem_too() -> None:
    async with client() as c:
        said = await problem(await c.get("/v1/nothing"), 404, "not_found")
        assert "/v1/nothing" in said["detail"]
        response = await c.delete("/v1/items/1")
        said = await problem(response, 405, "method_not_allowed")
        assert set(response.headers["Allow"].replace(" ", "").split(",")) >= {"GET", "PUT"}


async def test_errors_keep_their_code_and_unexpected_ones_their_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async with client() as c:
        said = await problem(await c.get("/v1/fail/0"), 500, "internal")
        assert "secret" not in str(said)
        assert "the secret inside" in caplog.text
        response = await c.get("/v1/fail/1")
        said = await problem(response, 429, "limit_reached")
        assert (said["field"], said["retryable"], response.headers["Retry-After"]) == ("pins", True, "1")
        said = await problem(await c.get("/v1/fail/2"), 500, "bad_segment")
        assert not said["retryable"]


async def test_what_changes_state_is_logged_with_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "umbp.admin"):
        async with client() as c:
            await c.get("/v1/items/1")
            await c.post("/v1/items/1/beat", json={})
            assert not [r for r in caplog.records if r.name == "umbp.admin"]
            await c.put("/v1/items/1?loud=1", json={"colour": "red"})
    (record,) = [r for r in caplog.records if r.name == "umbp.admin"]
    text = record.getMessage()
    assert "PUT '/v1/items/1?loud=1'" in text
    assert '{"colour": "red"}' in text
    assert "tcp 127.0.0.1 port" in text


async def test_answers_are_counted_by_template_and_never_by_text() -> None:
    metrics = Metrics(list)
    async with client(metrics) as c:
        for number in range(20):
            await c.get(f"/v1/items/{number}")
            await c.get(f"/no/{number}")
            await c.request(f"VERB{number}", "/v1/items/1")
    text = metrics.text().decode()
    assert 'umbp_http_responses_total{method="GET",route="/v1/items/{number}",status="200"} 20.0' in text
    assert 'umbp_http_responses_total{method="other",route="other",status="404"} 20.0' in text
    assert "VERB" not in text
    assert "/no" not in text


async def test_the_description_is_of_the_routes_and_its_examples_are_good() -> None:
    async with client() as c:
        document = await (await c.get("/openapi.json")).json()
        check_document(document, c.app, ENDPOINTS)
    assert document["paths"]["/v1/items/{number}"]["put"]["responses"]["201"]


def test_a_definition_that_could_not_explain_itself_is_our_fault() -> None:
    class Bare(Params, frozen=True):
        """No example."""

        number: int

    for definition in (
        lambda: Endpoint("GET", "/{number}", "x", read, Said, Bare),
        lambda: Endpoint("GET", "/{other}", "x", read, Said, Item),
        lambda: Endpoint("GET", "/{number}", "x", read, Said, Item, Paint),
    ):
        with pytest.raises(AssertionError):
            definition()
