"""Where the pool is: the argument, else ``UMBP_POOL``, else the default socket."""

from __future__ import annotations

import os

from umbp.config import POOL_VARIABLE, default_socket
from umbp.errors import InvalidRequest
from umbp.grammar import parse_address


def socket_path(address: str | None) -> str:
    """Path of a pool's Unix socket. InvalidRequest for a TCP address: sessions share memory, so they are of the same machine."""
    text = address or os.environ.get(POOL_VARIABLE) or default_socket("default", os.environ)
    parsed = parse_address(text, "address")
    if not parsed.is_unix:
        raise InvalidRequest(
            f"{text} is not a Unix socket, which a client needs to share memory with the pool",
            field="address",
            example="/run/umbp/default.sock",
        )
    return str(parsed.path)
