"""Listening on TCP: the socket bound before anything else of a server exists, and what a server does with connections too many."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import resource
import socket as sockets

from umbp.errors import Conflict
from umbp.grammar import Address

BACKLOG = 1024
"""Connections that may wait to be accepted: every client of a node may start at once."""


class Refusal(asyncio.Protocol):
    """For a connection too many: closed as it comes, so that idle strangers cannot use up the descriptors that clients need."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def bind_tcp(address: Address) -> sockets.socket:
    """A listening TCP socket. Conflict if the port is taken or the address is not of this machine."""
    try:
        family, kind, protocol, _, where = sockets.getaddrinfo(address.host, address.port or 0, type=sockets.SOCK_STREAM)[0]
        bound = sockets.socket(family, kind, protocol)
        try:
            bound.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            bound.bind(where)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise Conflict(
            f"cannot listen on {address}: {error.strerror}", field="http", example="--http 127.0.0.1:0 (any free port)"
        ) from None
    bound.setblocking(False)
    return bound


def bound_address(address: Address, bound: sockets.socket) -> Address:
    """The address with the port that was found."""
    return dataclasses.replace(address, port=bound.getsockname()[1])


def raise_file_limit() -> None:
    """Two descriptors a client (socket, pidfd): take what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
