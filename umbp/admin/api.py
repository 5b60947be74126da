"""The application that serves endpoints: a request is held against its definition, then handled, then answered.

What is not exactly what the `Endpoint` says is refused before the handler runs, with the field at fault and a good value, so a handler sees
only values that its types allow.

Every error is a problem document (RFC 9457): also an unknown path or method, a body that is no JSON or too large, and our own faults, of
which the caller learns only that there was one.

Bounded: bytes of a body, seconds until it is there, length of a text that is repeated in an error or in the log.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from umbp.admin.auth import Guard, Next, peer_of
from umbp.admin.endpoint import JSON, Body, Document, Endpoint, Nothing, Params, Raw, Reply, examples_of, properties_of
from umbp.admin.openapi import Problem, describe
from umbp.errors import DeadlineExceeded, InvalidRequest, UmbpError
from umbp.grammar import Address, quoted
from umbp.metrics import Metrics

log = logging.getLogger("umbp.admin")

__all__ = ["Body", "Document", "Endpoint", "Nothing", "Params", "Problem", "Problems", "Raw", "Reply", "make_application", "problem"]

BODY_BYTES_MAX = 1 << 20  # 4,096 keys as hex digits are 0.3 MiB
BODY_SECONDS_MAX = 10.0
DETAIL_CHARS_MAX = 500
PROBLEM = "application/problem+json"


def make_application(
    endpoints: Sequence[Endpoint],
    *,
    title: str,
    version: str,
    token: str,
    listening: Address,
    metrics: Metrics,
    raw: Sequence[Raw] = (),
) -> web.Application:
    """The application with these endpoints and ``/openapi.json``; ``token`` (or "") and ``listening`` are the configured ones."""

    async def openapi(params: Nothing, body: Nothing) -> dict[str, Any]:
        return document

    own = Endpoint("GET", "/openapi.json", "This description", openapi, dict[str, Any], access="local")
    every = [*endpoints, own]
    document = describe(every, raw, title=title, version=version)
    guard = Guard(token, listening, {endpoint.path: endpoint.access for endpoint in every})
    problems = Problems(metrics, {endpoint.path for endpoint in every} | {route.path for route in raw})
    application = web.Application(middlewares=[problems.middleware, guard.middleware], client_max_size=BODY_BYTES_MAX)
    for endpoint in every:
        serve = _served(endpoint, metrics)
        if endpoint.method == "GET":
            application.router.add_get(endpoint.path, serve)  # and HEAD
        else:
            application.router.add_route(endpoint.method, endpoint.path, serve)
    for route in raw:
        application.router.add_route(route.method, route.path, _bounded(route))
    return application


# -- a request ---------------------------------------------------------------------------------------------------------------------


def _served(endpoint: Endpoint, metrics: Metrics) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    operation = f"{endpoint.method} {endpoint.path}"

    async def serve(request: web.Request) -> web.StreamResponse:
        params = _params(endpoint, request)
        raw = await _raw_body(request)
        body = _body(endpoint, request, raw)
        if endpoint.changes_state and endpoint.logged:  # before it is done, so that what goes wrong half-way has been said too
            peer = peer_of(request)
            log.info("%s %s %s by %s", endpoint.method, quoted(request.raw_path), quoted(raw.decode("utf-8", "replace")), peer)
        started = time.monotonic()
        answer = await endpoint.handler(params, body)
        metrics.observe(operation, time.monotonic() - started)
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        content = reply.value if isinstance(reply.value, bytes) else msgspec.json.encode(reply.value)
        headers = {"Content-Type": reply.media_type or endpoint.media_type, **_HEADERS}
        return web.Response(body=content, status=reply.status, headers=headers)

    return serve


def _bounded(route: Raw) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def serve(request: web.Request) -> web.StreamResponse:
        if route.consumes and request.content_type != route.consumes:  # a page of another site can send a form, but not this
            raise web.HTTPUnsupportedMediaType(text=f"the body must be sent as {route.consumes}")
        if (request.content_length or 0) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(BODY_BYTES_MAX, request.content_length or 0)
        return await route.handler(request)

    return serve


# Numbers of a moment are not to be kept, and no browser is to guess at types.
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _params(endpoint: Endpoint, request: web.Request) -> Any:
    values = dict(request.match_info)
    for name, value in request.query.items():
        if name in values:
            raise InvalidRequest("given twice", field=_cut(name))
        values[name] = value
    try:
        return msgspec.convert(values, endpoint.params, strict=False)
    except msgspec.ValidationError as error:
        field, why = _fault(error, endpoint.params)
        example = examples_of(endpoint.params).get(field)
        raise InvalidRequest(why, field=field, example="" if example is None else str(example)) from None


async def _raw_body(request: web.Request) -> bytes:
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise web.HTTPRequestEntityTooLarge(BODY_BYTES_MAX, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            return await request.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not come within {BODY_SECONDS_MAX:g} s") from None
    except (ConnectionError, web.RequestPayloadError) as error:
        raise InvalidRequest(f"the body broke off: {error}", field="body") from None


def _body(endpoint: Endpoint, request: web.Request, raw: bytes) -> Any:
    examples = examples_of(endpoint.body)
    example = msgspec.json.encode(examples).decode() if examples else ""
    if not raw:
        if any(field.required for field in msgspec.structs.fields(endpoint.body)):
            raise InvalidRequest("a JSON body is needed", field="body", example=example)
        return endpoint.body()
    if request.content_type != JSON:
        # A page of another site can send a form without asking, but not JSON.
        raise web.HTTPUnsupportedMediaType(text=f"the body is {quoted(request.content_type)}; it must be sent as {JSON}")
    try:
        return endpoint.decoder.decode(raw)
    except msgspec.ValidationError as error:
        field, why = _fault(error, endpoint.body)
        raise InvalidRequest(why, field=field or "body", example=example) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not JSON: {error}", field="body", example=example) from None


_AT = re.compile(r" - at `\$\.?(.*?)`$", re.DOTALL)
_NAMED = re.compile(r"^Object (?:contains unknown field|missing required field) `(.*)`$", re.DOTALL)


def _fault(error: msgspec.ValidationError, struct: type[msgspec.Struct]) -> tuple[str, str]:
    """The field of this Struct that msgspec complains of, and what is wrong with it, or what there is instead."""
    text = str(error)
    at = _AT.search(text)
    text = _AT.sub("", text)
    named = _NAMED.match(text)
    parts = [at[1] if at else "", named[1] if named else ""]
    field = _cut(".".join(part for part in parts if part))
    known = properties_of(struct)
    if named and "unknown field" in text:
        instead = "" if at else f"; there are {', '.join(known)}" if known else "; there are none"
        return field, f"{field} is unknown{instead}"
    if named:
        return field, f"{field} is missing"
    if text.startswith("Invalid enum value") and (choices := known.get(field, {}).get("enum")):
        text = f"{text.removeprefix('Invalid enum value ')} is none of {', '.join(map(str, choices))}"
    elif "matching regex" in text and (about := known.get(field, {}).get("description")):
        text = f"what is wanted: {about}"
    return field, f"{field}: {_cut(text)}" if field else _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


# -- errors ------------------------------------------------------------------------------------------------------------------------


class Problems:
    """Turns whatever is raised into a problem document, and counts all answers."""

    def __init__(self, metrics: Metrics, routes: set[str]) -> None:
        self._metrics = metrics
        self._routes = routes

    @web.middleware
    async def middleware(self, request: web.Request, handler: Next) -> web.StreamResponse:
        """The outermost one."""
        try:
            response = await handler(request)
        except UmbpError as error:
            if error.http_status >= 500 and not error.retryable:
                log.error("%s %s: %s", quoted(request.method), quoted(request.raw_path), error)
            response = problem(error.http_status, error.code, str(error), field=error.field, retryable=error.retryable)
        except web.HTTPException as error:
            code = _CODES.get(error.status, http.HTTPStatus(error.status).name.lower())
            response = problem(error.status, code, _about(error, request))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except Exception:
            log.exception("%s %s failed", quoted(request.method), quoted(request.raw_path))
            response = problem(500, UmbpError.code, "an internal error; the log of the server says more")
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        known = route in self._routes
        method = request.method if known and response.status != 405 else "other"
        self._metrics.count_response(method, route if known else "other", response.status)
        return response


_CODES = {404: "not_found", 413: "too_large", 415: "unsupported_media_type"}


def _about(error: web.HTTPException, request: web.Request) -> str:
    if error.status == 404:
        return f"there is no {quoted(request.path)}; /openapi.json lists what there is"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{quoted(error.method)} is not possible here, only {', '.join(sorted(error.allowed_methods))}"
    if error.status == 413:
        return f"the body is larger than {BODY_BYTES_MAX} bytes"
    return error.text or error.reason


def problem(status: int, code: str, detail: str, *, field: str = "", retryable: bool = False) -> web.Response:
    """The answer that says what was wrong."""
    said = Problem(
        type=f"urn:umbp:problem:{code}",
        title=code.replace("_", " ").capitalize(),
        status=status,
        detail=detail if len(detail) <= DETAIL_CHARS_MAX else detail[: DETAIL_CHARS_MAX - 3] + "...",
        code=code,
        field=field,
        retryable=retryable,
    )
    headers = {"Content-Type": PROBLEM, **_HEADERS}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="umbp"'
    if retryable:
        headers["Retry-After"] = "1"
    return web.Response(body=msgspec.json.encode(said), status=status, headers=headers)
