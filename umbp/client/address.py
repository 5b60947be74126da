"""Where the pool is: the argument, else ``UMBP_POOL``, else the default socket.

``numa``, or ``numa:NAME``, is one of the pools of this name that are one a NUMA node (`umbp.per_node`): that of the node that all CPUs of
this process are of, where there is one; else the first. ``numa@1`` names the node, for a process that may run on any CPU but whose GPU is
at that one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from umbp.config import OPTIONS, POOL_VARIABLE, Address, default_socket, near_pool
from umbp.errors import InvalidRequest
from umbp.grammar import parse_address, quoted
from umbp.store.numa import node_of_process, numa_nodes

_NEAR = re.compile(r"numa(?::([A-Za-z0-9][A-Za-z0-9._-]{0,63}))?(?:@([0-9]{1,3}))?")


def pool_address(text: str, environ: Mapping[str, str], *, field: str = "pool") -> Address:
    """Where the pool is: ``text``, else ``UMBP_POOL``, else the default socket of this user."""
    text = text or environ.get(POOL_VARIABLE, "")
    if near := _NEAR.fullmatch(text):
        return Address(path=_near_socket(near[1] or OPTIONS["name"].default, near[2], environ))
    found = parse_address(text or default_socket(OPTIONS["name"].default, environ), field)
    if not found.is_unix and not found.port:  # most likely a pool's name
        example = f"{default_socket(found.host, environ)}, or 127.0.0.1:7411"
        raise InvalidRequest(f"{quoted(text)} is no path of a socket, and has no port", field=field, example=example)
    return found


def _near_socket(name: str, node: str | None, environ: Mapping[str, str]) -> str:
    """Of the pool that is near, as far as it is known what that is."""
    number = int(node) if node is not None else node_of_process()
    sockets = [default_socket(near_pool(name, each), environ) for each in ([number] if number is not None else [])]
    if node is None:
        sockets += [default_socket(near_pool(name, each), environ) for each in numa_nodes()]
    return next((socket for socket in sockets if os.path.exists(socket)), sockets[0])


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
