"""Keys, tiers, statuses and the frozen values that travel between the parts.

A page key is 32 bytes; n of them are an ``(n, 32)`` uint8 array everywhere. Statuses of a batch are uint8 arrays whose values are
the members below: a read is never folded into a bool, nor a write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32

U8: TypeAlias = npt.NDArray[np.uint8]
U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
F64: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]


class Tier(IntEnum):
    """Where the bytes of a page can lie, fastest first; but NEIGHBOUR, another pool's DRAM on this machine, is next to DRAM."""

    HBM = 0
    HOST = 1
    DRAM = 2
    SSD = 3
    REMOTE = 4
    NEIGHBOUR = 5


# Arrays of statuses are compared with and filled from `.value`: to make an item of an enum's member costs NumPy 8 us a call.
class ReadStatus(IntEnum):
    """What became of one page of a read."""

    MISS = 0  # nothing is stored under this key: recompute
    HIT = 1  # exactly the committed bytes are in the caller's buffer
    BUSY = 2  # the pool could not answer in time (stopped, restarting): recompute, ask again later
    FAILED = 3  # the page is stored but could not be read (I/O error, bad checksum): recompute


class WriteStatus(IntEnum):
    """What became of one page of a write. Values from 16 on are refusals."""

    PENDING = 0  # another writer is filling this key right now (never a final answer of ``put``)
    STORED = 1  # this call's bytes are committed and readable
    EXISTS = 2  # the key was stored already; nothing was copied
    ALL_LEASED = 16  # no room, and everything that could be evicted is leased or pinned
    TOO_LARGE = 17  # larger than the pool or than the namespace's quota
    FRAGMENTED = 18  # enough bytes are free or evictable, but leased objects leave no run that is long enough
    OVER_QUOTA = 19  # the namespace is at its quota and nothing of it can be evicted
    KEY_LIMIT = 20  # the index is full and nothing in it can be evicted
    NOT_ADMITTED = 21  # the admission policy declined
    EXPIRED = 22  # the reservation had run out before the commit
    FLUSHED = 23  # the namespace was flushed while the page was being written
    UNAVAILABLE = 24  # the pool could not be reached in time
    IN_FLIGHT = 25  # another writer held the key for longer than this put was willing to wait
    TOO_MANY_RESERVATIONS = 26  # this session has more writes open than a session may

    @property
    def refused(self) -> bool:
        """True for every status that means "nothing was kept"."""
        return self >= 16

    @property
    def code(self) -> str:
        """The name as it stands on the wire and in metrics, such as ``all_leased``."""
        return self.name.lower()


PENDING = 255  # of a page that is being fetched: on its way; every other status of it is a `ReadStatus`
NOWHERE = 255  # where a `Tier` is asked for: nobody has the page


class PrefetchState(IntEnum):
    """What has become of a prefetch."""

    QUEUED = 0  # nothing of it has begun
    RUNNING = 1
    READY = 2  # every page is in DRAM
    PARTIAL = 3  # some are
    FAILED = 4  # none is
    EXPIRED = 5  # its deadline came before all was decided; what is there counts


class Statuses(Sequence[Any]):
    """One status per item of a batch, in the caller's order.

    ``codes`` is the uint8 array; indexing gives members of ``kind``.
    """

    __slots__ = ("codes", "kind")

    def __init__(self, codes: U8, kind: type[ReadStatus] | type[WriteStatus]) -> None:
        self.codes = codes
        self.kind = kind

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Statuses: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Statuses(self.codes[index], self.kind)
        return self.kind(int(self.codes[index]))

    def __iter__(self) -> Iterator[Any]:
        kind = self.kind
        return (kind(code) for code in self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Statuses):
            return self.kind is other.kind and bool(np.array_equal(self.codes, other.codes))
        if isinstance(other, list | tuple):
            return len(other) == len(self) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.kind, self.codes.tobytes()))

    def __repr__(self) -> str:
        names = ", ".join(f"{self.kind(v).name.lower()} x{c}" for v, c in sorted(self.counts().items()))
        return f"<{len(self)} {self.kind.__name__}: {names or 'none'}>"

    def where(self, status: ReadStatus | WriteStatus) -> Mask:
        """Bool mask, shape (n,), of the items that have this status."""
        mask: Mask = self.codes == int(status)
        return mask

    def all(self, *statuses: ReadStatus | WriteStatus) -> bool:
        """True if every item has one of the given statuses (also for an empty batch)."""
        return bool(np.isin(self.codes, [int(s) for s in statuses]).all())

    def counts(self) -> dict[int, int]:
        """Status value -> number of items."""
        values, counts = np.unique(self.codes, return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    @property
    def refused(self) -> Mask:
        """Bool mask, shape (n,), of refused writes."""
        mask: Mask = self.codes >= 16
        return mask
