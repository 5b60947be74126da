"""What a transport is: it moves pages of a peer's segment into this one's, whole and right, or says which it could not.

Theory of operation
-------------------
A reader sends an *order*: pages of one namespace, by key. The peer *grants* it: what it holds is leased, so that it stays where it is; with
each page goes its checksum. Then the bytes move. When the reader has all of them, and not before, it sends a *receipt*, and the peer
answers which of the pages are still the versions that were granted. So versions are looked at before and after, and what counts as whole
was leased all the time in between. A peer that was stopped for longer than its lease, or a reader that is slower than that, gets a refusal
for the pages that went, never another key's bytes.

The receipt matters for streams too: what a kernel has "sent" by `sendfile` still refers to the segment's memory until the reader has copied
it out. A peer that let go of its lease when its last call returned would send whatever is written there next.

An order may name *spans*: then only these bytes of each page are sent, the same of all, so that the first layers of many pages come before
the last ones of any (`umbp.pool.peer_parts`). The grant has the versions of the pages, so that a reader of several orders knows that it has
parts of one and the same page; the checksum is still of the whole page, and only the reader who has all of its bytes can compare it.

An order names the process that it is meant for, by name and boot id: who answers at a wrong or reused address refuses.

Bounded: pages and bytes of an order, seconds of a grant, orders served at a time. Both ends keep their own time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from umbp.core.stages import RANGES_MAX, Ranges, runs
from umbp.errors import ProtocolError
from umbp.grammar import Address
from umbp.types import I64, U8, U64, Mask, ReadStatus
from umbp.wire import BATCH_MAX, Message, decode

GRANT_SECONDS_MAX = 30.0
GRANT_BYTES_MAX = 256 << 20  # what is more than this in an order is answered as not held, but for one page
PAGES_PATH = "/v1/pages"
FRAME_TYPE = "application/x-umbp-frame"
RECEIPT = b"\x06"

Digest: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Order(Message, frozen=True, tag="order", omit_defaults=True):
    """Pages wanted of the pool ``node`` of this ``boot``. ``how``: the transport, by name. Arrays: keys u8[n, 32].

    ``moves``: they are used from the reader's copy from now on; the peer need not count this as a use of its own. ``spans``: the bytes of
    each page that are sent, half-open, ascending and apart; none: all of it.
    """

    node: Annotated[str, Meta(max_length=64)]
    boot: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    namespace: Digest
    object_bytes: Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
    n: Annotated[int, Meta(ge=0, le=BATCH_MAX)]
    seconds: Annotated[float, Meta(ge=0, le=GRANT_SECONDS_MAX)]
    how: Annotated[str, Meta(max_length=16)] = "http"
    moves: bool = False
    spans: Annotated[tuple[tuple[int, int], ...], Meta(max_length=RANGES_MAX)] = ()


class Granted(Message, frozen=True, tag="granted"):
    """The answer: ``m`` of the ``n`` pages are held. Arrays: held u8[n], sums u64[m], offsets i64[m] in the peer's segment;
    to an order of spans also versions u64[m].

    ``agent`` and ``base``: what a reader of another ``how`` needs to reach the segment's memory; "" and 0 for streams.
    """

    n: int
    m: int
    agent: Annotated[str, Meta(max_length=16_384)] = ""
    base: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0


@dataclass(frozen=True, slots=True)
class Held:
    """A `Granted` as its reader sees it: ``held`` (n,) bool; sums, offsets and versions (m,) of those, versions 0 if pages come whole."""

    held: Mask
    sums: U64
    offsets: I64
    versions: U64
    agent: str
    base: int

    def codes(self, whole: Mask, sums: U64) -> U8:
        """`ReadStatus` of what is held: ``whole`` (m,) is what the peer said to the receipt, ``sums`` (m,) are of the bytes that came."""
        right = (self.sums == 0) | (self.sums == sums)
        made: U8 = np.where(whole & right, ReadStatus.HIT, np.where(whole, ReadStatus.FAILED, ReadStatus.MISS)).astype(np.uint8)
        return made


_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_granted: msgspec.json.Decoder[Granted] = msgspec.json.Decoder(Granted)


def decode_order(frame: bytes) -> tuple[Order, U8]:
    """Order and keys of a frame. ProtocolError if it is none."""
    order, blob = decode(frame, _orders)
    keys = blob.keys(order.n)
    blob.end()
    end = 0
    for start, stop in order.spans:
        if not end <= start < stop <= order.object_bytes:
            raise ProtocolError(f"bytes {start} to {stop} of a page of {order.object_bytes}, after byte {end}", field="spans")
        end = stop
    return order, keys


def decode_granted(frame: bytes | bytearray | memoryview, pages: int, *, spans: bool = False) -> Held:
    """What is held of an order of so many pages, or of ``spans`` of them. ProtocolError if it is no such answer."""
    granted, blob = decode(frame, _granted)
    if granted.n != pages or not 0 <= granted.m <= pages:
        raise ProtocolError(f"an answer of {granted.m} of {granted.n} pages, {pages} were asked for")
    held: Mask = blob.take("u1", granted.n) != 0
    sums, offsets = blob.take("<u8", granted.m), blob.take("<i8", granted.m)
    versions = blob.take("<u8", granted.m) if spans else np.zeros(granted.m, np.uint64)
    blob.end()
    if int(held.sum()) != granted.m:
        raise ProtocolError(f"{int(held.sum())} pages are held, {granted.m} are sent")
    return Held(held, sums, offsets, versions, granted.agent, granted.base)


@dataclass(frozen=True, slots=True)
class Peer:
    """A pool to read from: its name, its boot id, and where this transport reaches it."""

    node: str
    boot: int
    address: Address


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of an order. ``status`` (n,) uint8 of `umbp.types.ReadStatus`; ``sums`` (n,) uint64, made of the bytes as they came."""

    status: U8
    sums: U64
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Parted:
    """What came of an order of spans. ``status`` (n,): HIT where these bytes are of one version, MISS elsewhere. ``sums`` (n,) of the whole
    pages, as the peer has them, 0 where it has none; ``versions`` (n,) of the pages there."""

    status: U8
    sums: U64
    versions: U64


PartCame: TypeAlias = Callable[[int, int, int], None]
"""(which of the pages of a read; from, to): these bytes of it are there. Called from whatever thread received them."""

Came: TypeAlias = Callable[[I64, U64], None]
"""(which of the pages of a read, ascending; their checksums): they are whole, and right, while others are still on their way."""


class Transport(Protocol):
    """Reads pages of peers."""

    @property
    def name(self) -> str:
        """As in a node's addresses."""
        ...

    @property
    def ranged(self) -> bool:
        """Whether it can `read_spans`."""
        ...

    async def read(self, peer: Peer, namespace: str, size: int, keys: U8, data: U8, offsets: I64, deadline: float, came: Came) -> Moved:
        """Read ``keys`` (m, 32) to ``data[offset : offset + size]`` each, by ``deadline`` (`time.monotonic`).

        ``came`` may be called meanwhile, in the event loop, for pages that match the checksum that the peer gave with them: these are
        done with whatever becomes of the rest, and nothing is written to them any more.

        OSError, TimeoutError or what the peer refused with (an `umbp.errors.UmbpError`) where nothing counts. It ends, cancelled too, only
        when nothing is written to ``data`` any more; or with `Lingering`, which says when that will be.
        """
        ...

    async def read_spans(
        self,
        peer: Peer,
        namespace: str,
        size: int,
        keys: U8,
        data: U8,
        offsets: I64,
        spans: Ranges,
        deadline: float,
        came: PartCame,
        *,
        again: bool,
    ) -> Parted:
        """Read these bytes of ``keys`` (m, 32), pages of ``size`` bytes, to where they belong in ``data[offset : offset + size]`` each.

        ``again``: the peer has counted the use of these pages already. Errors and ending: as of `read`; nothing counts where it raises.
        """
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Pages that a peer holds for a reader: ``held`` (n,) bool of its keys; offsets in the data of the segment and sums of those (m,)."""

    held: Mask
    offsets: I64
    sums: U64
    size: int
    ids: I64
    versions: U64
    lease: int

    def runs(self, spans: Ranges) -> list[tuple[int, int]]:
        """(offset, bytes): the pages in order, or ``spans`` of each; what lies side by side as one."""
        starts, lengths = runs(self.offsets, spans or ((0, self.size),))
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))


class Lingering(TimeoutError):
    """The time is over, but the hardware may still write to the pages. ``settled`` is done when it cannot any more."""

    def __init__(self, message: str, settled: asyncio.Future[None]) -> None:
        super().__init__(message)
        self.settled = settled


class Window(Protocol):
    """The segment's memory as a transport of another ``how`` shows it to readers."""

    @property
    def agent(self) -> str:
        """What a reader needs to connect, as text."""
        ...

    @property
    def base(self) -> int:
        """The address of the data's first byte."""
        ...

    def open(self) -> AbstractContextManager[None]:
        """Around the time in which a reader may be reading."""
        ...


class Shelf(Protocol):
    """What whoever serves pages needs of its pool. `umbp.pool.shelf` is the pool's."""

    @property
    def data(self) -> U8:
        """The segment's memory."""
        ...

    @property
    def data_at(self) -> int:
        """Where the data begins in the segment's file."""
        ...

    @property
    def path(self) -> str:
        """The segment's file."""
        ...

    async def grant(self, order: Order, keys: U8, deadline: float) -> Grant:
        """Lease what is held of these. NotFound if the order is meant for another process."""
        ...

    def unchanged(self, grant: Grant) -> Mask:
        """Which pages of the grant are what they were, (m,) bool."""
        ...

    def give_back(self, grant: Grant) -> None:
        """The reader is through, or gone."""
        ...
