"""What must hold of an OpenAPI document and the application that serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from umbp.admin.api import Endpoint, Raw


def check_document(document: dict[str, Any], application: web.Application, endpoints: Sequence[Endpoint], raw: Sequence[Raw] = ()) -> None:
    """Every route is described and every description is a route; references lead somewhere; examples are good requests."""
    routes = {(r.method, r.resource.canonical) for r in application.router.routes() if r.resource and r.method != "HEAD"}
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert routes == described
    assert routes == {(e.method, e.path) for e in (*endpoints, *raw)} | {("GET", "/openapi.json")}
    assert document["openapi"] == "3.1.0"
    assert document["info"].keys() >= {"title", "version"}
    for reference in _references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"], reference
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    for endpoint in endpoints:
        _check_operation(document["paths"][endpoint.path][endpoint.method.lower()], endpoint)
    json.dumps(document)


def _check_operation(operation: dict[str, Any], endpoint: Endpoint) -> None:
    parameters = {parameter["name"]: parameter for parameter in operation["parameters"]}
    assert {name for name, p in parameters.items() if p["in"] == "path"} == set(endpoint.path_fields)
    assert all(p["required"] for p in parameters.values() if p["in"] == "path")
    values = {name: str(parameter["example"]) for name, parameter in parameters.items() if "example" in parameter}
    msgspec.convert(values, endpoint.params, strict=False)
    assert {"200", "default"} <= operation["responses"].keys()
    fields = {field.encode_name for field in msgspec.structs.fields(endpoint.body)}
    assert bool(fields) == ("requestBody" in operation)
    if fields:
        example = operation["requestBody"]["content"]["application/json"]["example"]
        endpoint.decoder.decode(msgspec.json.encode(example))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)
