"""What pools and masters say to each other: JSON for control, frames of packed arrays where many keys travel.

    POST /v1/members                      Join -> Joined              a pool registers, also again: the answer says from where to report
    POST /v1/members/{node}/heartbeat     Heartbeat -> Beat           its own connection and task; never behind data
    POST /v1/members/{node}/leave         Leaving -> Left             a clean stop
    POST /v1/members/{node}/events        frame Events -> Applied     numbered changes of what the pool holds
    POST /v1/members/{node}/resync        frame Piece -> Applied      a part of all that the pool holds, between the events
    POST /v1/members/{node}/victims       frame Victims -> frame      a nearly full pool asks which of its next victims to keep
    POST /v1/members/{node}/failed        Failed -> Left              a fetch from that node failed: it is avoided for a while, by all
    POST /v1/plan                         frame RouteRequest -> frame RouteAnswer
    POST /v1/locate                       frame LocateRequest -> frame LocateAnswer

A frame is that of `umbp.wire`: a JSON header and raw arrays. ``n`` is a number of keys; a namespace is its digest as 64 hex digits, the one
identity that is the same on all nodes.

Numbering. A registration has a number (``registration``) given by the master; another is refused with the code ``unknown_node``
and the pool registers again. Event bundles are numbered from 1 within a registration; one that was applied already is acknowledged again
without effect (a retry), one that comes too early is answered ``gap`` and the pool resyncs.

Resync: the pool begins a ``sweep`` (a number of its own), sends the keys it holds in pieces of at most `KEYS_MAX`, and ends with a last
piece. Events go on meanwhile and are of the same order: what an event said after the sweep began is not undone by a piece. The master
then forgets in slices whatever of this node was neither in a piece nor in an event since. Each piece has the sum over all until it, and the
number of the bundle before it: what is torn or missing is found at that piece, and the answer says where to go on (`umbp.core.sweeps`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Annotated, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from umbp.admin.endpoint import Body, Document
from umbp.core.membership import SOCKET, Member
from umbp.core.plans import Plan, Run, Source
from umbp.errors import ProtocolError
from umbp.grammar import TAG_KEY, TAG_VALUE_CHARS_MAX, TAGS_MAX
from umbp.types import U8, U64, Tier
from umbp.wire import Message, decode, encode

KEYS_MAX = 8192  # of one bundle or piece: 265 KiB, applied in some 3 ms, in slices
SPACES_MAX = 128  # namespaces of one bundle or piece; their identities are 230 KiB at the most
IDENTITY_BYTES_MAX = 1800
KEEP_SECONDS = 30.0
ASKED_MAX = 16_384  # keys of one question: a million tokens of 64 a page

FRAME = "application/x-umbp-frame"

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", examples=["node7-a"])]
Digest: TypeAlias = Annotated[
    str, Meta(pattern="^[0-9a-f]{64}$", examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"])
]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1, examples=[1])]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=ASKED_MAX)]
Batch: TypeAlias = Annotated[int, Meta(ge=0, le=KEYS_MAX)]
Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 60, examples=[1 << 30])]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
SECONDS_MAX = 86_400.0
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e12)]
Text: TypeAlias = Annotated[str, Meta(max_length=256)]
Addresses: TypeAlias = Annotated[dict[Annotated[str, Meta(max_length=16)], Annotated[str, Meta(max_length=300)]], Meta(max_length=8)]
TagKey: TypeAlias = Annotated[str, Meta(pattern=TAG_KEY)]
Tags: TypeAlias = Annotated[dict[TagKey, Annotated[str, Meta(min_length=1, max_length=TAG_VALUE_CHARS_MAX)]], Meta(max_length=TAGS_MAX)]
Identities: TypeAlias = Annotated[dict[str, Annotated[str, Meta(max_length=IDENTITY_BYTES_MAX)]], Meta(max_length=SPACES_MAX)]
TierNumber: TypeAlias = Annotated[int, Meta(ge=0, le=3)]

# -- membership --------------------------------------------------------------------------------------------------------------------


class Capacity(Body, frozen=True):
    """Bytes and keys of one tier of a pool."""

    tier: TierNumber
    capacity_bytes: Bytes
    used_bytes: Bytes
    keys: Bytes = 0


class Join(Body, frozen=True, omit_defaults=True):
    """A pool registers. ``place`` is one text for all lives of one pool on one machine: a new boot at the old place replaces it at once.

    ``tags``: what the node is, in its operator's words; the same until it joins again.
    """

    node: Annotated[Name, Meta(examples=["node7-a"])]
    boot: Number
    place: Annotated[Text, Meta(examples=["5e1f"])]
    addresses: Annotated[Addresses, Meta(examples=[{"http": "10.0.0.7:7411"}])]
    tiers: Annotated[list[Capacity], Meta(max_length=4, examples=[[]])]
    draining: bool = False
    tags: Annotated[Tags, Meta(examples=[{"rack": "r12"}])] = {}  # noqa: RUF012 - msgspec copies it


class Neighbour(Document, frozen=True):
    """Another pool of the same machine, whose memory clients there may read where it lies: the Unix ``socket`` by which they reach it."""

    node: str
    boot: int
    socket: str


def neighbours(members: Iterable[Member]) -> list[Neighbour]:
    """As they are told of."""
    return [Neighbour(node=member.node, boot=member.boot, socket=member.addresses[SOCKET]) for member in members]


class Joined(Document, frozen=True):
    """From now on. ``master`` is this master's boot id; ``heartbeat_seconds`` how often to beat."""

    registration: int
    master: int
    heartbeat_seconds: float
    dead_seconds: float
    masters: list[str]
    neighbours: list[Neighbour] = []  # noqa: RUF012 - msgspec copies it


class Measured(Body, frozen=True):
    """One fetch as the requester saw it."""

    node: Name
    tier: TierNumber
    bytes: Bytes
    seconds: Seconds


class Heartbeat(Body, frozen=True):
    """A pool lives. ``held``: advice that it keeps to, by number; ``done``: advice it has dealt with."""

    registration: Annotated[Number, Meta(examples=[1])]
    tiers: Annotated[list[Capacity], Meta(max_length=4, examples=[[]])]
    measured: Annotated[list[Measured], Meta(max_length=256)] = []  # noqa: RUF012 - msgspec copies it
    held: Annotated[list[Number], Meta(max_length=64)] = []  # noqa: RUF012
    done: Annotated[list[Number], Meta(max_length=64)] = []  # noqa: RUF012


class Advice(Document, frozen=True):
    """What the master would have this pool do with some keys.

    ``hold``: do not evict them for ``seconds``; ``drop``: let them go first, others hold them; ``copy``: fetch them from
    ``source``; ``identity`` and ``page_bytes`` are for a pool that does not know the namespace yet.
    """

    number: int
    verb: str
    namespace: str
    identity: str
    page_bytes: int
    keys: list[str]
    seconds: float
    source: str = ""


class Beat(Document, frozen=True):
    """The answer to a heartbeat. ``resync``: the master lacks something of this pool; send all.

    ``judges``: it knows of uses that the pool may not, and is worth asking before pages go (`Victims`).
    """

    state: str
    resync: bool
    acknowledged: int
    warnings: list[str]
    advice: list[Advice]
    masters: list[str]
    judges: bool = False
    neighbours: list[Neighbour] = []  # noqa: RUF012 - msgspec copies it


class Leaving(Body, frozen=True):
    """A clean stop."""

    registration: Annotated[Number, Meta(examples=[1])]


class Failed(Body, frozen=True):
    """``by`` could not fetch from the node in the path."""

    by: Annotated[Name, Meta(examples=["node7-b"])]
    why: Text = ""


class Left(Document, frozen=True):
    """Done; the state the node is in now."""

    state: str


# -- what a pool holds -------------------------------------------------------------------------------------------------------------


class Events(Message, frozen=True, tag="events"):
    """A numbered bundle. ``spaces``: digest, object bytes, and how many of the keys, in order, are of it.

    ``identities``: the canonical text of namespaces (its sha256 is the digest) that this registration has not named before.

    Arrays: keys u8[n, 32], tier u8[n], present u8[n] (1: it holds the key there now, 0: not any more).
    In one namespace what went stands before what came: a key that stands in both is held.
    """

    registration: Number
    number: Number
    n: Batch
    spaces: Annotated[list[tuple[Digest, Bytes, Batch]], Meta(max_length=SPACES_MAX)]
    identities: Identities = {}  # noqa: RUF012 - msgspec copies it


class Piece(Message, frozen=True, tag="piece"):
    """A part of a sweep: keys that the pool holds. ``last`` ends it; ``bundle`` is the number of the last bundle sent before this piece.

    ``total``: `umbp.core.sweeps.chained` over the `content_sum` of the pieces until this one. Arrays: keys u8[n, 32], tier u8[n].
    """

    registration: Number
    sweep: Number
    index: Number
    bundle: Number
    total: Number
    last: bool
    n: Batch
    spaces: Annotated[list[tuple[Digest, Bytes, Batch]], Meta(max_length=SPACES_MAX)]
    identities: Identities = {}  # noqa: RUF012


class Applied(Document, frozen=True):
    """``acknowledged`` is the last bundle applied; ``gap``: something is missing before what was sent.

    ``piece``: where a sweep is to go on then; -1: a new one is needed.
    """

    acknowledged: int
    gap: bool
    piece: int = -1


def content_sum(words: U64, tiers: U8, spaces: list[tuple[bytes, int, int]]) -> int:
    """xxh3-64 of what a piece says. ``words`` (n, 4), ``tiers`` (n,), ``spaces`` as (digest, object bytes, count)."""
    state = xxhash.xxh3_64(words.tobytes())
    state.update(tiers.tobytes())
    for digest, size, count in spaces:
        state.update(b"%s %d %d" % (digest, size, count))
    return state.intdigest()


class Victims(Message, frozen=True, tag="victims"):
    """Pages that a nearly full pool would let go next. ``spaces``: digest of a namespace, and how many of the keys, in order, are of it.

    Arrays: keys u8[n, 32].
    """

    registration: Number
    n: Batch
    spaces: Annotated[list[tuple[Digest, Batch]], Meta(max_length=SPACES_MAX)]


class Verdicts(Message, frozen=True, tag="verdicts"):
    """Arrays: verdict i8[n], 1: keep it while anything else can go, for `KEEP_SECONDS`; 0: no word; -1: a spare copy."""

    n: Batch


# -- questions ---------------------------------------------------------------------------------------------------------------------


class RouteRequest(Message, frozen=True, tag="route", omit_defaults=True):
    """Who serves these keys to ``requester``? ``prefill``: tokens a second that it computes, 0 where not known; ``page_tokens`` with it.

    ``count`` is False for a question that no load follows, ``again`` True where the question before has counted the use.
    ``moves`` is False where the use counts and nothing is to be moved. ``exclude``: nodes not to name. Arrays: keys u8[n, 32], root first.
    """

    namespace: Digest
    requester: Annotated[str, Meta(max_length=64)]
    n: Count
    prefill: Rate = 0.0
    page_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    count: bool = True
    again: bool = False
    moves: bool = True
    exclude: Annotated[list[Name], Meta(max_length=64)] = []  # noqa: RUF012


class RouteAnswer(Message, frozen=True, tag="plan"):
    """An `umbp.core.plans.Plan`. ``sources``: node, boot, addresses. ``runs``: start, stop, index of the source, tier, seconds.

    ``recompute_seconds`` is -1 where it is not known.
    """

    sources: list[tuple[str, int, dict[str, str]]]
    runs: list[tuple[int, int, int, int, float]]
    pages: int
    held: int
    seconds: float
    recompute_seconds: float


class LocateRequest(Message, frozen=True, tag="locate"):
    """Does anybody have these keys? No side effects. Arrays: keys u8[n, 32]."""

    namespace: Digest
    n: Count


class LocateAnswer(Message, frozen=True, tag="located"):
    """Arrays: copies u8[n], the number of live nodes and engines that hold each; tiers u8[n], bit t set where a copy is in tier t."""

    n: int


_PLAN = msgspec.json.Decoder(RouteAnswer)


def encode_plan(plan: Plan) -> bytes:
    """A frame that `decode_plan` reads."""
    sources = list({run.source.node: run.source for run in plan.runs}.values())
    index = {source.node: at for at, source in enumerate(sources)}
    answer = RouteAnswer(
        sources=[(source.node, source.boot, source.addresses) for source in sources],
        runs=[(run.start, run.stop, index[run.source.node], int(run.tier), run.seconds) for run in plan.runs],
        pages=plan.pages,
        held=plan.held,
        seconds=plan.seconds,
        recompute_seconds=plan.recompute_seconds if plan.recompute_seconds < inf else -1.0,
    )
    return encode(answer)


def decode_plan(frame: bytes) -> Plan:
    """The plan in a frame. ProtocolError if it is none."""
    answer, blob = decode(frame, _PLAN)
    blob.end()
    try:
        sources = [Source(node, boot, addresses) for node, boot, addresses in answer.sources]
        runs = tuple(Run(start, stop, sources[at], Tier(tier), seconds) for start, stop, at, tier, seconds in answer.runs)
        plan = Plan(runs, answer.pages, answer.held, answer.seconds, answer.recompute_seconds if answer.recompute_seconds >= 0 else inf)
        plan.check()
    except (IndexError, ValueError, AssertionError) as error:
        raise ProtocolError(f"not a plan: {error}") from None
    return plan
