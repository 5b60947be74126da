"""The description of endpoints as OpenAPI 3.1, from the Structs that validate their requests."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import msgspec

from umbp.admin.endpoint import JSON, REFERENCE, Endpoint, Raw, examples_of, properties_of


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrong with a request (RFC 9457). ``code`` is for programs, ``field`` is what was at fault, ``retryable``: again later."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str
    retryable: bool


def release() -> str:
    """Version of the installed package; "unknown" where it is run from a bare checkout."""
    try:
        return installed_version("umbp")
    except PackageNotFoundError:
        return "unknown"


def describe(endpoints: Sequence[Endpoint], raw: Sequence[Raw] = (), *, title: str, version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    bodies = [endpoint.body for endpoint in endpoints if msgspec.structs.fields(endpoint.body)]
    answers = [endpoint.response for endpoint in endpoints if endpoint.media_type == JSON]
    kinds = list(dict.fromkeys([*bodies, *answers, Problem]))
    references, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    schemas = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = paths.setdefault(endpoint.path, {})
        assert endpoint.method.lower() not in operation, f"{endpoint.method} {endpoint.path} is defined twice"
        operation[endpoint.method.lower()] = _operation(endpoint, schemas)
    for route in raw:
        paths.setdefault(route.path, {})[route.method.lower()] = _raw_operation(route, schemas[Problem])
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    schema = schemas[endpoint.response] if endpoint.media_type == JSON else {"type": "string"}
    answer = {"description": endpoint.summary, "content": {endpoint.media_type: {"schema": schema}}}
    wrong = {"description": "What was wrong", "content": {"application/problem+json": {"schema": schemas[Problem]}}}
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": endpoint.summary,
        "parameters": _parameters(endpoint),
        "responses": {**{str(status): answer for status in (200, *endpoint.also)}, "default": wrong},
    }
    if endpoint.body in schemas:
        content = {"schema": schemas[endpoint.body], "example": examples_of(endpoint.body)}
        required = any(field.required for field in msgspec.structs.fields(endpoint.body))
        operation["requestBody"] = {"required": required, "content": {JSON: content}}
    if endpoint.access != "anyone":
        operation["security"] = [{"token": []}, {}]  # none over the Unix socket, or where no token is configured
    return operation


def _raw_operation(route: Raw, wrong: dict[str, Any]) -> dict[str, Any]:
    bytes_ = {"schema": {"type": "string", "format": "binary"}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.path_fields],
        "responses": {
            "200": {"description": route.summary, "content": {route.produces: bytes_}},
            "default": {"description": "What was wrong", "content": {"application/problem+json": {"schema": wrong}}},
        },
        "security": [{"token": []}, {}],
    }
    if route.consumes:
        operation["requestBody"] = {"required": True, "content": {route.consumes: bytes_}}
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    required = {field.encode_name for field in msgspec.structs.fields(endpoint.params) if field.required}
    found = []
    for name, schema in properties_of(endpoint.params).items():
        in_path = name in endpoint.path_fields
        about = {key: value for key, value in schema.items() if key not in ("description", "examples")}
        entry = {"name": name, "in": "path" if in_path else "query", "required": in_path or name in required, "schema": about}
        if "description" in schema:
            entry["description"] = schema["description"]
        if schema.get("examples"):
            entry["example"] = schema["examples"][0]
        found.append(entry)
    return found
