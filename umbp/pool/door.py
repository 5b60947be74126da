"""Who a new connection is for: its first bytes decide.

On the Unix socket these are the upgrade request of a session, or plain HTTP, which is handed to the REST application as it came; on TCP
another node's, or plain HTTP. A stranger that says nothing is cut off after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

FIRST_BYTES_SECONDS_MAX = 10.0


class FrontDoor(asyncio.Protocol):
    """Looks at the first bytes of a connection and hands it to whom they are for, else to the HTTP application.

    ``doors``: first bytes, and what makes the protocol for a connection that begins with them; whether it is given these bytes as well.
    ``on_left``: called when it is decided, or the connection is lost before.
    """

    def __init__(
        self,
        doors: Mapping[bytes, tuple[Callable[[], asyncio.Protocol], bool]],
        http: Callable[[], asyncio.BaseProtocol],
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._doors = doors
        self._http = http
        self._on_left = on_left
        self._start = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first bytes; an idle stranger is cut off."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are transports without saying so
        self._timer = asyncio.get_running_loop().call_later(FIRST_BYTES_SECONDS_MAX, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """It never said what it wanted."""
        self._timer.cancel()
        self._on_left()

    def data_received(self, data: bytes) -> None:
        """Decide as soon as it can be told."""
        self._start += data
        start, transport = bytes(self._start), self._transport
        if any(len(start) < len(wanted) and wanted.startswith(start) for wanted in self._doors):
            return
        assert transport is not None
        self._timer.cancel()
        self._on_left()
        protocol: Any = None
        for wanted, (door, whole) in self._doors.items():
            if start.startswith(wanted):
                protocol, start = door(), start if whole else start[len(wanted) :]
                break
        else:
            protocol = self._http()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if start:
            protocol.data_received(start)
