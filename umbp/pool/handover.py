"""Descriptors for clients: a second connection of a session, by which the pool hands over files that it has opened for it.

Theory of operation. A client that wants descriptors opens another connection to the pool's Unix socket and says the secret
(`umbp.wire.Welcome.handover`) that its session was given. From then on bytes go one way: `umbp.wire.TAG`, with one descriptor (SCM_RIGHTS)
each. What an answer on the session's own connection speaks of was handed over before that answer was written, so the client finds it here
without waiting.

    secret expected --known--> open --connection lost, another one of the same session, the session's end--> closed

Why a connection of its own: descriptors come with the bytes beside which they were sent, and the session's connection is read by event
loops that take bytes alone. On a pool that is reached by TCP, or through something that does not pass descriptors on, this connection is
never made, and clients do without.

Bounded: one for a session, seconds until the secret is there. What the kernel takes no more, because the client does not take it or has too
many descriptors on their way, is not handed over: `Handover.give` says so and nothing waits.
"""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
from typing import cast

from umbp import wire

SECRET_SECONDS_MAX = 10.0


class Handovers:
    """All of one pool."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, int] = {}
        self._secrets: dict[int, bytes] = {}
        self._open: dict[int, Handover] = {}

    def __repr__(self) -> str:
        return f"<Handovers of {len(self._open)} of {len(self._secrets)} sessions>"

    def promise(self, session: int) -> bytes:
        """The secret by which this session may open its connection."""
        secret = self._secrets[session] = secrets.token_bytes(wire.HANDOVER_BYTES)
        self._sessions[secret] = session
        return secret

    def door(self) -> Handover:
        """For a connection that asks for descriptors."""
        return Handover(self)

    def of(self, session: int) -> Handover | None:
        """That of a session, if it has one."""
        return self._open.get(session)

    def session_ended(self, session: int) -> None:
        """Nothing is handed to it any more."""
        if (secret := self._secrets.pop(session, None)) is not None:
            del self._sessions[secret]
        if (hand := self._open.pop(session, None)) is not None:
            hand.close()

    def opened(self, secret: bytes, hand: Handover) -> bool:
        """This one has said a secret; whether it is anybody's."""
        if (session := self._sessions.get(secret)) is None:
            return False
        if (before := self._open.get(session)) is not None:
            before.close()
        self._open[session] = hand
        return True

    def lost(self, hand: Handover) -> None:
        """Its connection is no more."""
        for session in [session for session, other in self._open.items() if other is hand]:
            del self._open[session]


class Handover(asyncio.Protocol):
    """One such connection."""

    def __init__(self, all_: Handovers) -> None:
        self._all = all_
        self._said = bytearray()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None  # the same, for what a transport cannot do

    def __repr__(self) -> str:
        return f"<Handover {'open' if self._socket else 'without a secret, or closed'}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The request was read; the secret is to follow."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are transports without saying so
        self._timer = asyncio.get_running_loop().call_later(SECRET_SECONDS_MAX, self._too_late)

    def data_received(self, data: bytes) -> None:
        """The secret, and nothing after it."""
        self._said += data
        if len(self._said) < wire.HANDOVER_BYTES:
            return
        assert self._transport is not None
        if self._socket is not None or not self._all.opened(bytes(self._said), self):
            self._transport.close()
            return
        self._timer.cancel()
        self._socket = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        self._socket.send(wire.HANDOVER_REPLY, socket.MSG_DONTWAIT)  # not by the transport, which may keep it until a descriptor has gone

    def connection_lost(self, exc: Exception | None) -> None:
        """However it ended."""
        self._timer.cancel()
        self._all.lost(self)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    def give(self, kind: int, number: int, fd: int) -> bool:
        """Hand over this descriptor, which stays the caller's too; False if that is not possible now."""
        if self._socket is None:
            return False
        tag = wire.TAG.pack(kind, number)
        try:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            return self._socket.sendmsg([tag], beside, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(tag)
        except OSError:  # it does not take them, or is gone
            return False

    def _too_late(self) -> None:
        if self._transport is not None:
            self._transport.close()
