"""A small part of the segment that pages from elsewhere pass through when all the rest is leased, pinned or being written.

Theory of operation. The last bytes of the data, and a few entry ids, are for nothing but the pool's own reads for clients who take a page
and let go of it (`umbp.pool.passing`). A page there is an object like any other: reserved, committed when it is whole, leased for who
waits; but it makes room for nothing else, a lease or a pin of anybody else does not hold it, no disk is told to keep it and no master hears
of it. It goes with its last lease, or at the latest when somebody else needs its place.

`Objects` frees by offset: what lies at or above ``start`` goes back here. After a restart pages are found here, or across the border, that
a pool of another size or without sources had put there: those that lie here go at once, and the border moves up behind those that lie
across it, until the next start.

Cost: the share of the memory, and one comparison where an offset is looked at.
"""

from __future__ import annotations

from umbp.core.allocator import PAGE_GRANULE, Allocator
from umbp.types import I64, Mask

SHARE = 64  # one in this many bytes of the pool: 1 GiB of 64
BYTES_MIN = 16 << 20  # a few pages of the largest kinds; where that would be a good part of a small pool,
SHARE_MAX = 16  # one in this many bytes
BYTES_MAX = 1 << 30  # moves tens of GB a second: a page is here for some milliseconds
IDS = 64


def passage_bytes(capacity_bytes: int, last_bytes: int = 0) -> int:
    """How large it is in a pool of this size. ``last_bytes``: of the last of its regions, where it has some; it is a part of that."""
    wanted = min(max(capacity_bytes // SHARE, BYTES_MIN), capacity_bytes // SHARE_MAX, (last_bytes or capacity_bytes) // 2, BYTES_MAX)
    return wanted // PAGE_GRANULE * PAGE_GRANULE


class Passage:
    """The bytes from ``start`` to ``end`` of the data; none where both are the same. ``ids``: entries that are kept for it."""

    def __init__(self, start: int, end: int, ids: int) -> None:
        self.start, self.end, self.ids = start, end, ids
        self.allocator = Allocator(end - start)

    def __repr__(self) -> str:
        return f"<Passage of {self.allocator.capacity_bytes} bytes, {self.allocator.free_bytes} free>"

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.end - self.start

    def among(self, offsets: I64) -> Mask:
        """Which objects at these offsets are in it."""
        found: Mask = offsets >= self.start
        return found

    def allocate(self, size_bytes: int, count: int) -> I64:
        """Up to so many offsets for objects of this size."""
        return self.allocator.allocate(size_bytes, count) + self.start

    def free(self, offsets: I64, sizes: I64) -> None:
        """Give objects back."""
        self.allocator.free(offsets - self.start, sizes)

    def occupy(self, offsets: I64, sizes: I64) -> None:
        """At re-attach: these objects are used. SegmentError if they overlap or lie outside."""
        self.allocator.occupy(offsets - self.start, sizes)

    def narrow(self, start: int) -> None:
        """At re-attach: something of a former life lies across the border, which is here for now."""
        self.start = min(self.end, start)
        self.allocator = Allocator(self.end - self.start)
