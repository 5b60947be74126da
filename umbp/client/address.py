"""Where the pool is: the argument, else ``UMBP_POOL``, else the default socket."""

from __future__ import annotations

import os
from collections.abc import Mapping

from umbp.config import OPTIONS, POOL_VARIABLE, Address, default_socket
from umbp.errors import InvalidRequest
from umbp.grammar import parse_address, quoted


def pool_address(text: str, environ: Mapping[str, str], *, field: str = "pool") -> Address:
    """Where the pool is: ``text``, else ``UMBP_POOL``, else the default socket of this user."""
    text = text or environ.get(POOL_VARIABLE, "")
    found = parse_address(text or default_socket(OPTIONS["name"].default, environ), field)
    if not found.is_unix and not found.port:  # most likely a pool's name
        example = f"{default_socket(found.host, environ)}, or 127.0.0.1:7411"
        raise InvalidRequest(f"{quoted(text)} is no path of a socket, and has no port", field=field, example=example)
    return found


def socket_path(address: str | None) -> str:
    """Path of a pool's Unix socket. InvalidRequest for a TCP address: sessions share memory, so they are of the same machine."""
    if address is not None and not isinstance(address, str):
        raise InvalidRequest(f"{type(address).__name__}, expected text", field="address", example="/run/umbp/default.sock")
    found = pool_address(address or "", os.environ, field="address")
    if not found.is_unix:
        raise InvalidRequest(
            f"{found} is not a Unix socket, which a client needs to share memory with the pool, and is named by its absolute path",
            field="address",
            example="/run/umbp/default.sock",
        )
    return str(found.path)
