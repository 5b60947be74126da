"""What a source of pages is: a place other than this node's DRAM from which pages can be read into it, such as the SSD or other nodes.

Theory of operation. A source is asked twice. `Source.offers`: which of these keys could you give, from where, and how soon? `Source.read`:
read these into the segment, at these offsets. In between the pool reserves the memory, as it does for a client that writes; what was read
is compared with its checksum and committed, and only then can anybody see it. So a source never touches the index, and whatever it does
wrong costs a page, not a wrong byte.

An offer is a hint, a read is the truth: a page that is gone meanwhile is a MISS, one that cannot be read FAILED, and either costs that page
alone. An offer names its ``place`` (a disk, a node): a place that failed is excluded, and the pages are asked for once more elsewhere.

Each is bounded in time by its caller. A read that is cancelled ends only when nothing of it writes to the segment any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from umbp.core.stages import Ranges
from umbp.transport.base import Came
from umbp.types import I64, U8, U64, Tier


@dataclass(frozen=True, slots=True)
class Space:
    """The namespace of what is fetched. ``digest`` (32 bytes) names it on every node and over restarts; ``number`` is the DRAM's of now."""

    digest: bytes
    row: int
    number: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Pages that one place can give: ``which`` (m,) int64, indices of the keys that were asked for, ascending.

    ``seconds``: expected until all of them are there, were they read now: sources are compared by it. ``handle``: the source's own.
    ``ranged``: the source is `Ranged`, and can read these in parts.
    """

    place: str
    tier: Tier
    which: I64
    seconds: float
    handle: object = None
    ranged: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of a read. ``status`` (m,) uint8 of `ReadStatus`: HIT, MISS (not there any more) or FAILED.

    ``sums`` (m,) uint64: checksums (`umbp.store.checksums`) that the bytes must have, 0 where the source has none to compare with.
    ``verified``: the source has compared them already, on the bytes as they are in the segment.
    """

    status: U8
    sums: U64
    verified: bool = False


class Source(Protocol):
    """A tier or a transport as fetches see it. All calls are made in the pool's event loop; what takes long is for a thread."""

    @property
    def name(self) -> str:
        """For logs and metrics, such as "ssd"."""
        ...

    @property
    def local(self) -> bool:
        """Whether it is of this node. Peers that ask this one for pages get those of its DRAM and of local sources, not of other peers."""
        ...

    @property
    def ranged(self) -> bool:
        """Whether it is `Ranged`: its offers may be so."""
        ...

    @property
    def read_bytes_max(self) -> int:
        """Most bytes that one `read` is asked for: a few milliseconds of work, so that the first pages are there early."""
        ...

    async def offers(self, space: Space, keys: U8, exclude: frozenset[str], deadline: float, *, peek: bool) -> list[Offer]:
        """Who could give which of these keys, (n, 32) uint8, root first. ``exclude``: places not to name.

        ``deadline``: on the clock of `time.monotonic`; an answer that comes later is of no use. A key may be in several offers. ``peek``:
        somebody wants to know; a read need not follow, and it is not to be counted as one.
        """
        ...

    async def read(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64, deadline: float, came: Came) -> Taken:
        """Read ``keys`` (m, 32), a part of the offer, to ``data[offset : offset + object_bytes]`` each.

        ``came`` may be called meanwhile for pages that are done with: see `umbp.transport.base.Transport.read`.

        Returns or raises only when it writes there no more. What is not there by the deadline is FAILED.
        """
        ...

    async def close(self) -> None:
        """Let go of threads, files and connections."""
        ...


class Reading(Protocol):
    """Pages that are read in parts, for who looks at them before they are whole."""

    @property
    def pages_max(self) -> int:
        """Of how many pages one `read` may be."""
        ...

    async def read(self, which: I64, spans: Ranges, deadline: float) -> U8:
        """Read these bytes of these pages (indices); `ReadStatus` each. Returns or raises only when it writes no more.

        Bytes may be wrong that are not the page's last ones; with those it is known, and the page FAILED. A page that is not HIT is not
        asked for again, nor is one of a read that raised. Spans begin on chunks (`umbp.store.index`). What is not there by the deadline is
        FAILED, or TimeoutError.
        """
        ...

    def end(self) -> Taken:
        """All that was wanted of the pages that are HIT has been read: what came of each, now."""
        ...

    def close(self) -> None:
        """Let go. Nothing is being read."""
        ...


@runtime_checkable
class Ranged(Protocol):
    """A source that can read parts of pages."""

    async def begin(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64) -> Reading:
        """Start on ``keys`` (m, 32), a part of the offer, that belong at ``data[offset : offset + object_bytes]`` each."""
        ...
