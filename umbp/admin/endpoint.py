"""What an endpoint is: method, path, one Struct for path and query, one for the JSON body, one for the answer, and the handler.

The same definition validates requests (`umbp.admin.api`) and describes itself (`umbp.admin.openapi`). Examples of fields (`msgspec.Meta`)
are no decoration: every required field has one, and they are what an error shows.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, TypeAlias

import msgspec
from aiohttp import web

from umbp.admin.auth import SAFE_METHODS, Access

JSON = "application/json"
REFERENCE = "#/components/schemas/{name}"


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of what stands in a path and its query. Text that reads as a number or truth value becomes one."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of JSON bodies. No value is taken for another type."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Root of answers."""


class Nothing(Params, frozen=True):
    """No parameters, or an empty body."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with another status than 200, or with another media type than its endpoint's."""

    value: Any
    status: int = 200
    media_type: str = ""


Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Endpoint:
    """One method of one path. ``handler(params, body)`` returns an instance of ``response``, or a `Reply`.

    ``access`` is who needs no token (see `umbp.admin.auth`); ``also`` are further statuses that carry the same answer.
    """

    method: Literal["GET", "PUT", "POST", "DELETE"]
    path: str
    summary: str
    handler: Handler
    response: Any
    params: type[Params] = Nothing
    body: type[Body] | type[Nothing] = Nothing
    access: Access = "token"
    media_type: str = JSON
    also: tuple[int, ...] = ()
    logged: bool = True  # where it changes state; not what machines say to each other many times a second

    def __post_init__(self) -> None:
        fields = {field.encode_name: field for field in msgspec.structs.fields(self.params)}
        assert self.method != "GET" or self.body is Nothing, f"{self.path}: a GET has no body"
        assert set(self.path_fields) <= set(fields), f"{self.path} names what {self.params.__name__} does not have"
        for struct in (self.params, self.body):
            missing = [f.name for f in msgspec.structs.fields(struct) if f.required and f.name not in examples_of(struct)]
            assert not missing, f"{struct.__name__}: no example of {missing}"

    @property
    def changes_state(self) -> bool:
        """By the method, so that no GET can be declared to do it."""
        return self.method not in SAFE_METHODS

    @property
    def path_fields(self) -> list[str]:
        """Names in the template of the path."""
        return re.findall(r"{(\w+)}", self.path)

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[Any]:
        """Of the body."""
        return msgspec.json.Decoder(self.body)


@dataclass(frozen=True)
class Raw:
    """One method of one path that neither takes nor gives JSON documents: it handles the request itself. It always needs the token."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    produces: str
    consumes: str = ""

    @property
    def path_fields(self) -> list[str]:
        """Names in the template of the path."""
        return re.findall(r"{(\w+)}", self.path)


@cache
def properties_of(struct: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """Field name -> JSON schema."""
    schema = msgspec.json.schema_components([struct], ref_template=REFERENCE)[1][struct.__name__]
    properties: dict[str, dict[str, Any]] = schema["properties"]
    return properties


@cache
def examples_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The first example of each field that has some: together a good value of the Struct."""
    return {name: schema["examples"][0] for name, schema in properties_of(struct).items() if schema.get("examples")}
