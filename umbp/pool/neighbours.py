"""Other pools of this machine, as this one tells its clients of them, and what these have read there (`umbp.client.neighbours`)."""

from __future__ import annotations

from collections.abc import Iterable

from umbp import wire
from umbp.admin.endpoint import Document
from umbp.pool.reporting import Reporter

NAMES_MAX = 64  # that reads are counted for; those of others are counted together
OTHERS = "(others)"


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
        self._reporter = reporter

    def __repr__(self) -> str:
        return f"<Neighbours {', '.join(each.name for each in self.told()) or 'none'}>"

    def told(self) -> list[wire.Neighbour]:
        """What the master has said of them last. A hint: who goes there makes sure."""
        if not self.reads:
            return []
        return [wire.Neighbour(each.node, each.boot, each.socket) for each in self._reporter.neighbours]

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
