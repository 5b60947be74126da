"""The session's messages, each a frame (`umbp.frames`), and with `umbp.answers` what is answered.

A client opens a session on the pool's Unix socket as an HTTP upgrade (`UPGRADE_REQUEST`), then sends one request and reads one reply at
a time; `Note`, `Near`, `ReadNear`, `UsedNear`, `UseSpare`, `Taken` and `EndFetch` alone have no reply. Which arrays a message carries
stands in its docstring; n is a number of keys, m of reserved objects. Keys a call and text lengths are bounded; whatever does not fit its
message exactly closes that connection and no other.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeAlias

import msgspec

from umbp.answers import Committed as Committed
from umbp.answers import Document as Document
from umbp.answers import Errand as Errand
from umbp.answers import Failed as Failed
from umbp.answers import Fetched as Fetched
from umbp.answers import FileRefs as FileRefs
from umbp.answers import Leased as Leased
from umbp.answers import NamespaceOpened as NamespaceOpened
from umbp.answers import Neighbour as Neighbour
from umbp.answers import Neighbours as Neighbours
from umbp.answers import Numbers as Numbers
from umbp.answers import Prefetched as Prefetched
from umbp.answers import Reserved as Reserved
from umbp.answers import Roster as Roster
from umbp.answers import ScratchTaken as ScratchTaken
from umbp.answers import Statuses as Statuses
from umbp.answers import Sums as Sums
from umbp.answers import Welcome as Welcome
from umbp.blob import Blob as Blob
from umbp.frames import FRAME_BYTES_MAX as FRAME_BYTES_MAX
from umbp.frames import PREFIX as PREFIX
from umbp.frames import Message as Message
from umbp.frames import decode as decode
from umbp.frames import encode as encode
from umbp.frames import frame_bytes as frame_bytes

VERSION = 6
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
SSD_FILE, PEER_LINE = 1, 2
ALONE, NOBODY, NOT_NOW = -1, -2, -3  # of `Errand`
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


class Receive(Message, frozen=True, tag="receive"):
    """Pages of another node that this client would receive by itself (`umbp.pool.errands`).

    ``before``: the key before the first, or "". ``again``: they were asked for before, together with others. Arrays: keys u8[n, 32].
    """

    row: Row
    number: Number
    n: Batch
    seconds: FetchSeconds
    before: Hex = ""
    again: bool = False


class EndErrand(Message, frozen=True, tag="end_errand"):
    """It receives these no more; answered like the commit of ``reservation``. Arrays: status u8[n] of `umbp.types.ReadStatus`, sums u64[n].

    ``owed``: bytes of the peer's answer that are still to come, -1: the connection is of no more use. ``answered``: the peer had begun to.
    ``receipt``: it is still to be sent to the peer. ``why``: what the peer did wrong, or "".
    """

    number: Number
    reservation: Number
    n: Batch
    owed: Annotated[int, msgspec.Meta(ge=-1, le=BATCH_MAX)]
    answered: bool
    receipt: bool = False
    why: Text = ""


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


class GetNeighbours(Message, frozen=True, tag="get_neighbours"):
    """Who they are by now."""


class ReadNear(Message, frozen=True, tag="read_near"):
    """Pages that this client has read in the memory of neighbours, since it said so last: name, pages and bytes of each. No reply."""

    reads: Annotated[list[tuple[Text, Number, Number]], msgspec.Meta(max_length=64)]


class UsedNear(Message, frozen=True, tag="used_near"):
    """Pages of one namespace that were read there: other nodes are to know that they are in use. No reply. Arrays: keys u8[n, 32]."""

    row: Row
    number: Number
    n: Batch


class GetStatus(Message, frozen=True, tag="status"):
    """What ``/v1/status`` says."""


class Bye(Message, frozen=True, tag="bye"):
    """This client has let go of everything; the pool closes the connection after its reply."""


_OfSessions: TypeAlias = Hello | Near | OpenNamespace | LetGo | GetStatus | Bye
_OfPages: TypeAlias = Reserve | Commit | UseSpare | TakeLease | Renew | Release | Remove | Flush | Note | Corrupt | MakeSums | Pin | Unpin
_OfGroups: TypeAlias = TakeScratch | GiveScratch | OpenGroup | Join | Leave
_OfFetches: TypeAlias = Fetch | GetFetched | Taken | EndFetch | Locate | Prefetch | GetPrefetched
_ByClients: TypeAlias = ReadFiles | EndFiles | Receive | EndErrand | GetNeighbours | ReadNear | UsedNear
Request: TypeAlias = _OfSessions | _OfPages | _OfGroups | _OfFetches | _ByClients

_ForPages: TypeAlias = Reserved | Statuses | Committed | Leased | Numbers | Sums | Fetched | Errand | Prefetched
Reply: TypeAlias = _ForPages | FileRefs | Welcome | Neighbours | NamespaceOpened | ScratchTaken | Roster | Document | Failed

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def decode_request(frame: bytes | bytearray | memoryview) -> tuple[Request, Blob]:
    """Header and arrays of a whole frame."""
    return decode(frame, _requests)


def decode_reply(frame: bytes | bytearray | memoryview) -> tuple[Reply, Blob]:
    """Header and arrays of a whole frame."""
    return decode(frame, _replies)
