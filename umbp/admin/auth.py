"""Who may call: the owner of the socket, this machine, or whoever has the token.

Over the Unix socket the file's mode (0600) is the guard, and nothing else is asked. Over TCP:

* With a token configured, a request needs ``Authorization: Bearer TOKEN``, reads too. Two exceptions: ``anyone`` (health and readiness:
  an orchestrator's probes carry no secret, and learn nothing but that) and ``local`` (metrics, the description: without a token only
  for a peer on a loopback address; beware of a proxy on this machine, whose clients all look local).
* Without a token the server listens on loopback alone (`umbp.config` sees to that), and the guard is against the browser of somebody
  on this machine. A page from elsewhere can make it send requests here, under a name that resolves to 127.0.0.1: so the ``Host`` must be
  a loopback name or the configured address, for reads too.
* A request that changes something is never taken from another origin's page, token or not.

What is not known to the table of endpoints needs the token: a route that somebody forgot to declare is closed.
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aiohttp import web

from umbp.errors import ConfigError, Unauthorized
from umbp.grammar import Address, parse_address, quoted

log = logging.getLogger("umbp.admin")

Access: TypeAlias = Literal["token", "local", "anyone"]
Next: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection. ``local``: a process of this machine."""

    unix: bool
    local: bool
    name: str

    def __str__(self) -> str:
        return self.name


def peer_of(request: web.Request) -> Peer:
    """Who is at the other end, as the kernel knows it; no header is believed."""
    transport = request.transport
    connection = transport.get_extra_info("socket") if transport is not None else None
    if transport is None or connection is None:
        return Peer(unix=False, local=False, name="a closed connection")
    if connection.family == socket.AF_UNIX:
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer(unix=True, local=True, name=f"unix pid={pid} uid={uid}")
    host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
    return Peer(unix=False, local=Address(host=str(host)).is_loopback, name=f"tcp {host} port {port}")


class Guard:
    """Admits or refuses requests. ``access`` says what each path template asks for; ``listening`` is the configured TCP address."""

    def __init__(self, token: str, listening: Address, access: Mapping[str, Access]) -> None:
        self._token = token
        self._listening = listening
        self._access = access

    def __repr__(self) -> str:
        return f"<Guard of {self._listening}, {'with' if self._token else 'without'} a token>"

    @web.middleware
    async def middleware(self, request: web.Request, handler: Next) -> web.StreamResponse:
        """For `aiohttp.web.Application`, inside of what turns errors into answers."""
        peer = peer_of(request)
        if not peer.unix:
            try:
                self.admit(request, peer)
            except (Unauthorized, web.HTTPForbidden) as error:
                log.warning("refused %s %s of %s: %s", quoted(request.method), quoted(request.raw_path), peer, error)
                raise
        return await handler(request)

    def admit(self, request: web.Request, peer: Peer) -> None:
        """Raises where a request over TCP may not go on."""
        resource = request.match_info.route.resource
        access = self._access.get(resource.canonical, "token") if resource is not None else "token"
        if request.method not in SAFE_METHODS:
            _check_origin(request)
        if access == "anyone":
            return
        if not self._token:
            given = request.headers.get("Host", "")
            if not is_our_host(given, self._listening):
                raise web.HTTPForbidden(
                    text=f"Host: {quoted(given)} is not a name of this server, which is reached as {self._listening.host}"
                )
        elif not (access == "local" and peer.local):
            check_token(request.headers.get("Authorization", ""), self._token)


def check_token(header: str, token: str) -> None:
    """Unauthorized if this ``Authorization`` does not carry the token."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not given:
        need = "a token is needed (--token-file or UMBP_TOKEN of a pool, a master or umbp)"
        raise Unauthorized(need, field="Authorization", example="Authorization: Bearer TOKEN")
    if not hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode()):
        raise Unauthorized("the token is not the right one", field="Authorization")


def is_our_host(header: str, listening: Address) -> bool:
    """Whether this ``Host`` is a loopback name, or the address that is listened on."""
    try:
        host = parse_address(header, "Host")
    except ConfigError:
        return False
    ours = host.is_loopback or (host.host != "" and host.host.lower() == listening.host.lower())
    return ours and not host.is_unix and not host.scheme


def _check_origin(request: web.Request) -> None:
    """A browser says where a page that changes something comes from; programs say nothing."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
    if origin is not None and origin.lower().partition("://")[2] != request.headers.get("Host", "").lower():
        raise web.HTTPForbidden(text=f"Origin: {quoted(origin)} is another site's; changes are taken from this server's pages only")
    if site not in ("none", "same-origin"):
        raise web.HTTPForbidden(text=f"Sec-Fetch-Site: {quoted(site)}; changes are taken from this server's pages only")
