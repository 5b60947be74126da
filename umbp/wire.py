"""The session's messages, each a frame (`umbp.frames`).

A client opens a session on the pool's Unix socket as an HTTP upgrade (`UPGRADE_REQUEST`), then sends one request and reads one reply at
a time; `Note`, `Near`, `UseSpare`, `Taken` and `EndFetch` alone have no reply. Which arrays a message carries stands in its docstring; n is
a number of keys, m of reserved objects. Keys a call and text lengths are bounded; whatever does not fit its message exactly closes that
connection and no other.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeAlias

import msgspec

from umbp.blob import Blob as Blob
from umbp.frames import FRAME_BYTES_MAX as FRAME_BYTES_MAX
from umbp.frames import PREFIX as PREFIX
from umbp.frames import Message as Message
from umbp.frames import decode as decode
from umbp.frames import encode as encode
from umbp.frames import frame_bytes as frame_bytes

VERSION = 5
BATCH_MAX = 1024  # keys of one call that costs the pool a few microseconds a key: some ms is the longest that it is away from others
LARGE_BATCH_MAX = 4096  # and of one that costs it less than that: a prompt of 256 K tokens
FETCH_SECONDS_MAX, SECONDS_MAX = 3600, 86_400

UPGRADE_REQUEST = b"GET /v1/session HTTP/1.1\r\nHost: umbp\r\nConnection: Upgrade\r\nUpgrade: umbp-session/1\r\n\r\n"
UPGRADE_REPLY = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: umbp-session/1\r\n\r\n"

# Another connection, by which a session is handed descriptors (`umbp.pool.handover`): this request, then the bytes of `Welcome.handover`.
HANDOVER_REQUEST = b"GET /v1/descriptors HTTP/1.1\r\nHost: umbp\r\nConnection: Upgrade\r\nUpgrade: umbp-descriptors/1\r\n\r\n"
HANDOVER_REPLY = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: umbp-descriptors/1\r\n\r\n"
HANDOVER_BYTES = 32
TAG = struct.Struct("<QQ")  # comes with each descriptor: what it is, and its number among those
SSD_FILE = 1
FILES_MAX = 64  # of one answer, and that a client holds on to

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65_536)]
Batch: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=BATCH_MAX)]
LargeBatch: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGE_BATCH_MAX)]
Row: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
TEXT_CHARS_MAX = 256
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
FetchSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=FETCH_SECONDS_MAX)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Stages: TypeAlias = Annotated[list[Annotated[list[tuple[Number, Number]], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=8)]
Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]


# -- requests ----------------------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message. ``previous`` is the session that this client had before its connection was lost, or 0.

    ``holder``: the number that the client locks in the segment's file for as long as it has it mapped (`umbp.store.segment.held`).
    """

    version: int
    client: Text
    previous: Number = 0
    holder: Annotated[int, msgspec.Meta(ge=0, lt=1 << 61)] = 0


class Near(Message, frozen=True, tag="near"):
    """What this session writes is to be in memory of this NUMA node, one of `Welcome.numa`. No reply: it is a wish."""

    node: Row


class OpenNamespace(Message, frozen=True, tag="namespace"):
    """``identity`` is `umbp.layout.Namespace.to_dict`. ``close``: this session is through with it."""

    identity: dict[str, Any]
    close: bool = False


class Reserve(Message, frozen=True, tag="reserve"):
    """Room for new pages. ``number`` is the namespace's; ``parent`` the key before the first, or "". Arrays: keys u8[n, 32]."""

    row: Row
    number: Number
    n: Batch
    seconds: Seconds = 0.0
    parent: Hex = ""


class Commit(Message, frozen=True, tag="commit"):
    """End of a reservation. ``spare``: pages that memory is wanted for ahead. Arrays: filled u8[m], sums u64[m] if ``sums``."""

    number: Number
    m: Batch
    sums: bool = False
    spare: Batch = 0


class UseSpare(Message, frozen=True, tag="use_spare"):
    """These keys are being filled into the first n pages of the spare memory ``spare``; its `Commit`, of n items, must follow.

    No reply: the commit's has a status for each key, and says if the memory could not be used for them. Arrays: keys u8[n, 32].
    It must have been handed to the kernel before the client looks whether the memory is recalled (`umbp.core.spares`), and that before the
    first byte is written.
    """

    row: Row
    number: Number
    n: Batch
    spare: Number
    parent: Hex = ""


class TakeLease(Message, frozen=True, tag="lease"):
    """Arrays: ids i64[n], versions u64[n]. What has moved meanwhile is held where it is now: look again once it is granted."""

    n: Count
    seconds: Seconds = 0.0


class Renew(Message, frozen=True, tag="renew"):
    """Start the time of these leases again."""

    numbers: Annotated[list[Number], msgspec.Meta(max_length=1024)]


class Release(Message, frozen=True, tag="release"):
    """End a lease."""

    number: Number


class Remove(Message, frozen=True, tag="remove"):
    """Arrays: keys u8[n, 32]."""

    row: Row
    number: Number
    n: Batch


class Flush(Message, frozen=True, tag="flush"):
    """Everything of a namespace goes."""

    row: Row
    number: Number


class Note(Message, frozen=True, tag="note"):
    """Key lists of requests: (row, number of keys, conversation or 0) each; no reply. Arrays: keys u8[sum of the numbers, 32]."""

    requests: Annotated[list[tuple[Row, Count, Number]], msgspec.Meta(max_length=4096)]


class Corrupt(Message, frozen=True, tag="corrupt"):
    """Objects whose bytes do not match their checksum. Arrays: ids i64[n], versions u64[n]."""

    n: Count


class MakeSums(Message, frozen=True, tag="sums"):
    """Checksums of objects that have none yet, now. Arrays: ids i64[n], versions u64[n]."""

    n: Count


class LetGo(Message, frozen=True, tag="let_go"):
    """This client does not write any more into memory reserved by a former session of its process."""

    session: Number


class Pin(Message, frozen=True, tag="pin"):
    """Pin what is stored of these keys for this session. Arrays: keys u8[n, 32]."""

    row: Row
    number: Number
    n: Count
    seconds: Seconds = 0.0
    note: Text = ""


class Unpin(Message, frozen=True, tag="unpin"):
    """Take a pin back."""

    number: Number


class TakeScratch(Message, frozen=True, tag="scratch"):
    """A piece of the segment for this session's own use; ``claims``: for its claims (`umbp.core.claims`), of which there are none yet."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
    claims: bool = False


class GiveScratch(Message, frozen=True, tag="give_scratch"):
    """Give a piece back; a rank that uses it is no member of its group any more."""

    number: Number


class OpenGroup(Message, frozen=True, tag="group"):
    """Be a rank of the group of this name in this namespace, with a piece of scratch that the other ranks read."""

    row: Row
    name: Text
    world: Annotated[int, msgspec.Meta(ge=1, le=64)]
    rank: Annotated[int, msgspec.Meta(ge=0, le=63)]
    scratch: Number


class Join(Message, frozen=True, tag="join"):
    """Meet the other ranks; answered when all are there, or after ``wait``. ``sequence`` names the table that this rank has posted.

    Arrays: ids i64[n], versions u64[n].
    """

    member: Number
    sequence: Number
    n: Batch
    seconds: Seconds
    wait: Seconds


class Leave(Message, frozen=True, tag="leave"):
    """This rank reads nothing of the round any more."""

    member: Number
    round: Number


class Fetch(Message, frozen=True, tag="fetch", omit_defaults=True):
    """Bring what is not in DRAM from wherever it is, within ``seconds``; answered at once. ``before``: the key before the first, or "".

    ``stages``: what of each page to read first, second, ...: byte ranges (`umbp.core.stages`). ``passing``: pages that cannot stay in DRAM
    are taken too, and `Taken` is sent for them. Arrays: keys u8[n, 32].
    """

    row: Row
    number: Number
    n: Batch
    seconds: FetchSeconds
    before: Hex = ""
    stages: Stages = msgspec.field(default_factory=list)
    passing: bool = False


class Taken(Message, frozen=True, tag="taken"):
    """Pages of a fetch that cannot stay have been copied: others may have their place. No reply. Arrays: indices i64[n] of its keys."""

    number: Number
    n: Batch


class GetFetched(Message, frozen=True, tag="get_fetched"):
    """What has come of a fetch by now."""

    number: Number


class EndFetch(Message, frozen=True, tag="end_fetch"):
    """This client waits for it no more; what came is not protected for it any more. No reply."""

    number: Number


class ReadFiles(Message, frozen=True, tag="read_files"):
    """References to those of these pages that are on SSD, to be read by the client within ``seconds`` (`umbp.pool.references`).

    ``k``: files of which it has descriptors. Arrays: keys u8[n, 32], their tokens u64[k].
    """

    row: Row
    number: Number
    n: Batch
    seconds: FetchSeconds
    k: Annotated[int, msgspec.Meta(ge=0, le=FILES_MAX)] = 0


class EndFiles(Message, frozen=True, tag="end_files"):
    """It reads these no more; answered with which of the pages counted until now. Arrays: read u8[m], 1 for what it has, whole."""

    number: Number
    m: Batch


class Locate(Message, frozen=True, tag="locate"):
    """From which tier would these pages come? Arrays: keys u8[n, 32]."""

    row: Row
    number: Number
    n: LargeBatch


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Bring pages that are wanted later. The same ``request`` with the same keys is the same prefetch. Arrays: keys u8[n, 32]."""

    row: Row
    number: Number
    n: LargeBatch
    request: Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_CHARS_MAX)]
    seconds: FetchSeconds
    hold: FetchSeconds = 0.0


class GetPrefetched(Message, frozen=True, tag="get_prefetched"):
    """What has become of a prefetch by now."""

    row: Row
    request: Text


class GetStatus(Message, frozen=True, tag="status"):
    """What ``/v1/status`` says."""


class Bye(Message, frozen=True, tag="bye"):
    """This client has let go of everything; the pool closes the connection after its reply."""


_OfSessions: TypeAlias = Hello | Near | OpenNamespace | LetGo | GetStatus | Bye
_OfPages: TypeAlias = Reserve | Commit | UseSpare | TakeLease | Renew | Release | Remove | Flush | Note | Corrupt | MakeSums | Pin | Unpin
_OfGroups: TypeAlias = TakeScratch | GiveScratch | OpenGroup | Join | Leave
_OfFetches: TypeAlias = Fetch | GetFetched | Taken | EndFetch | ReadFiles | EndFiles | Locate | Prefetch | GetPrefetched
Request: TypeAlias = _OfSessions | _OfPages | _OfGroups | _OfFetches

# -- replies -----------------------------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome", omit_defaults=True):
    """The session is open. ``segment`` is the path of the shared-memory file; ``fetches``: pages may be had from elsewhere than DRAM.

    ``ssd`` is the path of the SSD tier's index, where there is one; ``far``: pages may be had from other nodes, ``ranged``: in stages
    (`Fetch`). ``numa``: NUMA nodes on which this pool has memory, where a client may choose (`Near`). What lies at ``passage`` or beyond,
    in the segment's data, only passes through (`Taken`); 0: nothing does. ``handover``: what to say to be handed descriptors
    (`HANDOVER_REQUEST`), as hex; "": none are. ``files``: pages that are on SSD may be read from its files (`ReadFiles`); ``through``: and
    need not be kept in DRAM.
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


_ForPages: TypeAlias = Reserved | Statuses | Committed | Leased | Numbers | Sums | Fetched | Prefetched
Reply: TypeAlias = _ForPages | FileRefs | Welcome | NamespaceOpened | ScratchTaken | Roster | Document | Failed

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def decode_request(frame: bytes | bytearray | memoryview) -> tuple[Request, Blob]:
    """Header and arrays of a whole frame."""
    return decode(frame, _requests)


def decode_reply(frame: bytes | bytearray | memoryview) -> tuple[Reply, Blob]:
    """Header and arrays of a whole frame."""
    return decode(frame, _replies)
