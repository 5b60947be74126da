"""Pages of peers by NIXL, where it is installed: RDMA where there is hardware for it, else UCX over shared memory or TCP.

Theory of operation. Orders, grants and receipts are those of `umbp.transport.sending`, on the same connections; only the bytes travel
otherwise: the grant names the peer's agent and where the pages lie in its memory, the reader posts one READ for all of them (pages that lie
side by side are one descriptor) and sends the receipt when it is done. So leases, versions, checksums and refusals are the same.

NIXL has no thread of its own here: its progress thread polls without pause, which costs a core for each pool. Without hardware that reads
by itself the peer's process must take part, so while an order is open it drives its agent from the thread that serves the order, with
short sleeps; and so does the reader with its own.

A READ cannot always be taken back. One whose time is over goes on being looked after, and until it has ended the memory it may write to
stays reserved (`umbp.transport.base.Lingering`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import threading
import time
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any

import numpy as np

from umbp.errors import ConfigError, Unavailable
from umbp.store.checksums import checksums
from umbp.transport.base import Held, Lingering
from umbp.transport.http import HttpTransport, Receive
from umbp.transport.line import Line
from umbp.types import I64, U8, U64

POLL_SECONDS = (0.00002, 0.0005)  # between two looks at a transfer: first, longest
PEERS_MAX = 256
LINGER_POLL_SECONDS = 0.01


def missing() -> str:
    """Why NIXL cannot be used here; "" if it can."""
    return "" if find_spec("nixl") is not None else "the package nixl is not installed: pip install nixl"


class NixlAgent:
    """This process's agent, with its segment's data registered; fulfils `umbp.transport.base.Window`. ConfigError without the package."""

    def __init__(self, name: str, data: U8) -> None:
        if why := missing():
            raise ConfigError(why, field="transport", example="http")
        from nixl._api import nixl_agent, nixl_agent_config

        theirs = logging.getLogger("nixl")  # it writes to standard output, which is for the ready line
        theirs.handlers.clear()
        theirs.propagate = True
        self.lock = threading.Lock()  # around every call of the agent
        self.native: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.base = int(data.ctypes.data)
        self._memory = self.native.register_memory([(self.base, data.nbytes, 0, "")], "DRAM")
        self.agent = base64.b64encode(self.native.get_agent_metadata()).decode()
        self._peers: dict[str, Any] = {}  # by their metadata
        self._open = 0
        self._driver: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<NixlAgent {self.native.name}, {len(self._peers)} peers>"

    @contextlib.contextmanager
    def open(self) -> Generator[None]:
        """See `umbp.transport.base.Window`: drives the agent meanwhile, in one thread for all who have it open."""
        with self.lock:
            self._open += 1
            if self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="umbp-nixl", daemon=True)
                self._driver.start()
        try:
            yield
        finally:
            with self.lock:
                self._open -= 1

    def _drive(self) -> None:
        while True:
            with self.lock:
                if not self._open:
                    self._driver = None
                    return
                self.native.get_new_notifs()
            time.sleep(POLL_SECONDS[0])

    def peer(self, metadata: str) -> Any:
        """The agent that is described by this, as the native one knows it."""
        with self.lock:
            if metadata not in self._peers:
                while len(self._peers) >= PEERS_MAX:
                    self.native.remove_remote_agent(self._peers.pop(next(iter(self._peers))))
                self._peers[metadata] = self.native.add_remote_agent(base64.b64decode(metadata))
            return self._peers[metadata]

    def forget(self, metadata: str) -> None:
        """It failed: the next order connects anew."""
        with self.lock:
            if (peer := self._peers.pop(metadata, None)) is not None:
                with contextlib.suppress(Exception):  # of NIXL's own; the peer is as good as forgotten
                    self.native.remove_remote_agent(peer)

    def post(self, peer: Any, ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> Any:
        """Begin to read ``theirs`` to ``ours``, (address, bytes) pairs; the handle."""
        with self.lock:
            native = self.native
            here = native.get_xfer_descs([(at, size, 0) for at, size in ours], "DRAM")
            there = native.get_xfer_descs([(at, size, 0) for at, size in theirs], "DRAM")
            handle = native.initialize_xfer("READ", here, there, peer, b"")
            native.transfer(handle)
            return handle

    def state(self, handle: Any) -> str:
        """DONE, PROC or ERR; the handle is over with the first and the last."""
        with self.lock:
            state = str(self.native.check_xfer_state(handle))
            if state != "PROC":
                self.native.release_xfer_handle(handle)
            return state

    def close(self) -> None:
        """After the last order."""
        with self.lock:
            for peer in self._peers.values():
                with contextlib.suppress(Exception):
                    self.native.remove_remote_agent(peer)
            self._peers.clear()
            self.native.deregister_memory(self._memory)


class NixlTransport(HttpTransport):
    """Reads pages of peers by NIXL; fulfils `umbp.transport.base.Transport`. ``agent``: this process's, of the memory that is read into."""

    name = "nixl"
    ranged = False  # what is late may still be written to: pages in parts that others look at would have to be kept for it one by one
    lanes_max = 1  # what NIXL has in flight is its own matter

    def __init__(self, agent: NixlAgent, token: str = "", *, moves: bool = False) -> None:
        super().__init__(token, moves=moves)
        self.agent = agent
        self._loop = asyncio.get_running_loop()

    def _receive(self, *arguments: Any) -> Receive:
        return NixlReceive(self.agent, self._loop, *arguments)


class NixlReceive(Receive):
    """One order whose pages are read by NIXL."""

    def __init__(self, agent: NixlAgent, loop: asyncio.AbstractEventLoop, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._agent = agent
        self._loop = loop

    def receive(self, line: Line, first: bytes, granted: Held, offsets: I64) -> U64:
        """See `Receive.receive`."""
        size = self.order.object_bytes
        if len(offsets):
            peer = self._agent.peer(granted.agent)
            ours, theirs = _descriptors(offsets + int(self.data.ctypes.data), granted.offsets + granted.base, size)
            handle = self._agent.post(peer, ours, theirs)
            pause = POLL_SECONDS[0]
            while (state := self._agent.state(handle)) == "PROC":
                if time.monotonic() > self.deadline or self._over:
                    raise Lingering("the peer's memory was not read in time", self._linger(handle, granted.agent))
                time.sleep(pause)
                pause = min(1.5 * pause, POLL_SECONDS[1])
            if state != "DONE":
                self._agent.forget(granted.agent)
                raise Unavailable("NIXL could not read the peer's memory")
        return checksums(self.data, offsets, np.full(len(offsets), size))

    def _linger(self, handle: Any, metadata: str) -> asyncio.Future[None]:
        """Look after a transfer that outlived its order."""
        settled: asyncio.Future[None] = self._loop.create_future()

        def wait() -> None:
            while self._agent.state(handle) == "PROC":
                time.sleep(LINGER_POLL_SECONDS)
            self._agent.forget(metadata)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                self._loop.call_soon_threadsafe(_settle, settled)

        threading.Thread(target=wait, name="umbp-nixl-linger", daemon=True).start()
        return settled


def _settle(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def _descriptors(ours: I64, theirs: I64, size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(address, bytes) pairs of both ends; pages that lie side by side at both ends are one."""
    breaks = np.flatnonzero((np.diff(ours) != size) | (np.diff(theirs) != size)) + 1
    starts = np.concatenate([np.zeros(1, np.int64), breaks])
    counts = np.diff(np.append(starts, len(ours))) * size
    here = list(zip(ours[starts].tolist(), counts.tolist(), strict=True))
    return here, list(zip(theirs[starts].tolist(), counts.tolist(), strict=True))
