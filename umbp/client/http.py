"""REST calls to a pool, over its Unix socket or a URL: one short connection a call, bounded in time and size."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from umbp.config import OPTIONS, default_socket
from umbp.errors import DeadlineExceeded, ProtocolError, UmbpError, Unauthorized, Unavailable, from_wire
from umbp.grammar import Address, parse_address, quoted

CALL_SECONDS_MAX = 10.0
ANSWER_BYTES_MAX = 64 << 20  # 1,000 namespaces of 2 KiB each are 2 MiB


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket. The host is a name that is never looked up."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class PoolHttp:
    """A pool's REST. Answers are the JSON objects of ``/openapi.json``; a problem document is raised as the `UmbpError` that it names.

    ``address`` is a Unix socket's path or a URL, ``token`` is for a URL that asks for one. Thread-safe: no connection is kept.
    """

    def __init__(self, address: str | Address, token: str = "") -> None:
        self.address = parse_address(address, "pool") if isinstance(address, str) else address
        self._token = token

    def __repr__(self) -> str:
        return f"<PoolHttp {self.address}>"

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """GET. A parameter that is None is left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return self.call("GET", f"{path}?{urlencode(given)}" if given else path)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds_max: float = CALL_SECONDS_MAX) -> dict[str, Any]:
        """POST, with a JSON body where one is given."""
        return self.call("POST", path, body, seconds_max=seconds_max)

    def put(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """PUT."""
        return self.call("PUT", path, body)

    def delete(self, path: str) -> dict[str, Any]:
        """DELETE."""
        return self.call("DELETE", path)

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds_max: float = CALL_SECONDS_MAX
    ) -> dict[str, Any]:
        """One request and its answer. `Unavailable` where nobody listens, `DeadlineExceeded` where the answer is late."""
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        raw = None if body is None else json.dumps(body).encode()
        if raw is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection(seconds_max)
        try:
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            content = response.read(ANSWER_BYTES_MAX + 1)
        except TimeoutError:
            raise DeadlineExceeded(f"the pool at {self.address} did not answer within {seconds_max:g} s: is it stopped?") from None
        except (ConnectionRefusedError, FileNotFoundError):
            raise Unavailable(f"no pool listens at {self.address}; start one: {self._how_to_start()}") from None
        except PermissionError:
            owner = _owner(self.address.path)
            raise Unauthorized(f"{self.address} is not ours to use{owner}: run this as that user, or use its URL and a token") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the pool at {self.address} broke off: {error or type(error).__name__}") from None
        finally:
            connection.close()
        return self._answer(response.status, content)

    def _connection(self, seconds_max: float) -> http.client.HTTPConnection:
        address = self.address
        if address.is_unix:
            return _UnixConnection(address.path, seconds_max)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        return kind(address.host, address.port or None, timeout=seconds_max)

    def _how_to_start(self) -> str:
        if not self.address.is_unix:
            return f"python -m umbp.pool --http {self.address.netloc}"
        if self.address.path == default_socket(OPTIONS["name"].default, os.environ):
            return "python -m umbp.pool"
        return f"python -m umbp.pool --socket {self.address.path}"

    def _answer(self, status: int, content: bytes) -> dict[str, Any]:
        if len(content) > ANSWER_BYTES_MAX:
            raise ProtocolError(f"the answer of {self.address} is larger than {ANSWER_BYTES_MAX} bytes")
        try:
            document = json.loads(content)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ProtocolError(f"{self.address} is no pool: it answered {status} with {quoted(content[:80].decode('utf-8', 'replace'))}")
        if status < 400:
            return document
        raise self._error(status, document)

    def _error(self, status: int, document: dict[str, Any]) -> UmbpError:
        if "detail" in document:
            return from_wire(str(document.get("code", "")), str(document["detail"]), str(document.get("field", "")))
        state = str(document.get("state", "not ready"))
        done, total = document.get("faulted_in_bytes", 0), document.get("bytes", 0)
        memory = f": {done} of {total} bytes of memory are there" if total else ""
        return Unavailable(f"the pool at {self.address} is {state}{memory}" if status == 503 else f"{self.address} answered {status}")


def segment_of_path(text: str) -> str:
    """``text`` as one segment of a path."""
    return quote(text, safe="")


def _owner(path: str) -> str:
    try:
        return f" but of uid {os.stat(path).st_uid}'s"
    except OSError:
        return ""
