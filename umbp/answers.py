"""What a pool answers to a session's messages; `umbp.wire` has the messages, and hands these on."""

from __future__ import annotations

from typing import Annotated

import msgspec

from umbp.frames import FRAME_BYTES_MAX, Message


class Neighbour(Message, frozen=True, tag="neighbour"):
    """Another pool of this machine: its name, boot id and Unix socket, as the master says."""

    name: str
    boot: int
    socket: str


class Neighbours(Message, frozen=True, tag="neighbours"):
    """All that this pool knows of; a bounded number."""

    neighbours: list[Neighbour]


class Welcome(Message, frozen=True, tag="welcome", omit_defaults=True):
    """The session is open. ``segment`` is the path of the shared-memory file; ``fetches``: pages may be had from elsewhere than DRAM.

    ``ssd`` is the path of the SSD tier's index, where there is one; ``far``: pages may be had from other nodes, ``ranged``: in stages
    (`Fetch`). ``numa``: NUMA nodes on which this pool has memory, where a client may choose (`Near`). What lies at ``passage`` or beyond,
    in the segment's data, only passes through (`Taken`); 0: nothing does. ``handover``: what to say to be handed descriptors
    (`HANDOVER_REQUEST`), as hex; "": none are. ``files``: pages that are on SSD may be read from its files (`ReadFiles`); ``through``: and
    need not be kept in DRAM. ``neighbours``: whose memory clients may read too; None: nobody's, and there is no use in asking again.
    """

    session: int
    boot: int
    name: str
    segment: str
    lease_seconds: float
    lease_seconds_max: float
    reservation_seconds: float
    checksum: str
    fetches: bool = False
    ssd: str = ""
    far: bool = False
    ranged: bool = False
    numa: tuple[int, ...] = ()
    passage: int = 0
    handover: str = ""
    files: bool = False
    through: bool = False
    neighbours: list[Neighbour] | None = None


class NamespaceOpened(Message, frozen=True, tag="namespace"):
    """The row of the segment's namespace table to read the number from."""

    row: int
    object_bytes: int


class Reserved(Message, frozen=True, tag="reserved"):
    """Arrays: status u8[n], mine u8[n], ids i64[m], offsets i64[m]."""

    number: int
    n: int
    m: int


class Statuses(Message, frozen=True, tag="statuses"):
    """Arrays: one u8 an item: write statuses, or 0 and 1."""

    n: int


class Committed(Message, frozen=True, tag="committed"):
    """Spare memory for the next k pages, as reservation ``spare``; none if k is 0. Arrays: status u8[n], offsets i64[k].

    ``unused``: what was committed is spare memory that could not be used for its keys. They want a reservation.
    """

    n: int
    unused: bool = False
    spare: int = 0
    k: int = 0


class Leased(Message, frozen=True, tag="leased"):
    """Arrays: held u8[n]."""

    number: int
    n: int
    seconds: float


class Numbers(Message, frozen=True, tag="numbers"):
    """A list of numbers: the lost leases, or one count."""

    numbers: list[int]


class Sums(Message, frozen=True, tag="sums"):
    """Arrays: sums u64[n], 0 for what is gone."""

    n: int


class ScratchTaken(Message, frozen=True, tag="scratch"):
    """Where the piece is in the segment's data. Its bytes are whatever was there before."""

    number: int
    offset: int


class Roster(Message, frozen=True, tag="roster"):
    """Who is in this round: rank, sequence of its table, offset and bytes of its scratch, pages it wants; ascending by rank.

    Arrays: held u8[sum of the pages]: which of them exist, in that order.
    """

    round: int
    seats: list[tuple[int, int, int, int, int]]


class Fetched(Message, frozen=True, tag="fetched"):
    """``left`` pages are still on their way. Arrays: status u8[n] of `umbp.types.ReadStatus`, 255 on its way."""

    number: int
    n: int
    left: int


class Errand(Message, frozen=True, tag="errand"):
    """What has been ordered of a peer, on a connection that was handed over as the ``number``-th `PEER_LINE`; 0: nothing was.

    It is to be there within ``seconds``, after ``skip`` bytes that are of no interest. Arrays: offsets i64[n], in the order of the keys:
    where a page belongs in the segment's data, in memory of ``reservation``; `ALONE`: nowhere but to the client; `NOBODY` has it;
    `NOT_NOW`: it was not ordered.
    """

    number: int
    reservation: int
    n: int
    seconds: float
    skip: int = 0


class Prefetched(Message, frozen=True, tag="prefetched"):
    """``state``: queued, running, ready, partial, failed, expired. Arrays: status u8[n] as in `Fetched`."""

    request: str
    state: str
    n: int
    left: int


class FileRefs(Message, frozen=True, tag="files"):
    """Hold ``number``, for ``seconds``, on m of the pages, in k files; descriptors of those that the client has not are on their way to it.

    Arrays: status u8[n] of `umbp.types.ReadStatus`, HIT for those m; of each of them: file u8[m], an index; block i64[m] of the body,
    back i64[m] from there to its record's head, check u64[m]; of each file: token u64[k], number u64[k], direct u8[k].
    """

    number: int
    n: int
    m: int
    k: int
    seconds: float


class Document(Message, frozen=True, tag="document"):
    """Any JSON, as text beside the header, which it might be too long for. Arrays: text u8[size]."""

    size: Annotated[int, msgspec.Meta(ge=0, le=FRAME_BYTES_MAX)]


class Failed(Message, frozen=True, tag="error"):
    """The request was refused as a whole; nothing was changed."""

    code: str
    message: str
    field: str = ""
