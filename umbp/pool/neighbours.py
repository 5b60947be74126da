"""Other pools of this machine, as this one tells its clients of them, and what these have read there (`umbp.client.neighbours`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from umbp import wire
from umbp.admin.endpoint import Document
from umbp.errors import UmbpError
from umbp.pool.guide import PortGuide
from umbp.pool.reporting import Reporter
from umbp.types import U8

NAMES_MAX = 64  # that reads are counted for; those of others are counted together
OTHERS = "(others)"
TELL_SECONDS_MAX = 1.0


class NeighbourDocument(Document, frozen=True):
    """Another pool of this machine, and what clients of this one have read in its memory. ``there``: it is, as the master says."""

    name: str
    there: bool
    pages: int
    bytes: int


class Neighbours:
    """Of one pool. ``reads``: whether its clients are to read there."""

    def __init__(self, reporter: Reporter, *, reads: bool) -> None:
        self.reads = reads
        self.reads_by_name: dict[str, tuple[int, int]] = {}  # pages, bytes
        self.guide: PortGuide | None = None  # to the master that hears of uses
        self._reporter = reporter
        self._telling: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Neighbours {', '.join(each.name for each in self.told()) or 'none'}>"

    def told(self) -> list[wire.Neighbour]:
        """What the master has said of them last. A hint: who goes there makes sure."""
        if not self.reads:
            return []
        return [wire.Neighbour(each.node, each.boot, each.socket) for each in self._reporter.neighbours]

    def used(self, namespace: str, keys: U8) -> None:
        """Clients have used these pages where they lie: the master counts that too, for its policies go by what is in use.

        One question at a time; what comes meanwhile is left out, as a sample will do.
        """
        if self.guide is not None and len(keys) and (self._telling is None or self._telling.done()):
            self._telling = asyncio.get_running_loop().create_task(_tell(self.guide, namespace, keys))

    async def close(self) -> None:
        """Tell no more."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    def documents(self) -> list[NeighbourDocument]:
        """Of each that is there or has been read from."""
        there = {each.name: (0, 0) for each in self.told()}
        reads = there | self.reads_by_name
        return [NeighbourDocument(name=name, there=name in there, pages=pages, bytes=size) for name, (pages, size) in reads.items()]

    def read(self, reads: Iterable[tuple[str, int, int]]) -> None:
        """A client says what it has read: name, pages and bytes."""
        for said, pages, size_bytes in reads:
            known = said in self.reads_by_name or (said in {each.name for each in self.told()} and len(self.reads_by_name) < NAMES_MAX)
            name = said if known else OTHERS
            before = self.reads_by_name.get(name, (0, 0))
            self.reads_by_name[name] = before[0] + pages, before[1] + size_bytes


async def _tell(guide: PortGuide, namespace: str, keys: U8) -> None:
    with contextlib.suppress(UmbpError, OSError, TimeoutError):  # a master that does not answer counts nothing
        await guide.used(namespace, keys, time.monotonic() + TELL_SECONDS_MAX)
