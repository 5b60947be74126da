"""The master's REST: what each endpoint takes, and what it asks of the master.

`cluster_endpoints` are those of every process that has a master in it: the master itself, and a pool without another one. `member_routes`
are what pools say to it (`umbp.master.protocol`); ``/v1/events`` is a live stream of what happens, as server-sent events.

Handlers run in the master's loop; what looks at the whole directory does it in slices and lets others in between.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta

from umbp.admin.api import Body, Endpoint, Nothing, Params, Raw
from umbp.admin.endpoint import JSON
from umbp.core.directory import Directory
from umbp.core.master import Master
from umbp.core.targets import targets
from umbp.errors import InvalidRequest, NotFound
from umbp.master import documents as doc
from umbp.master import protocol as say
from umbp.master.dry_runs import Preview, Previewed, preview
from umbp.master.service import MasterService
from umbp.policies.base import PLACEMENT, ROUTING
from umbp.store.index import key_words
from umbp.types import U64, Tier

HOT_SLICE = 1 << 16  # rows looked at in one go: about 1 ms
HOT_CANDIDATES = 4096
FIND_SLICE = 256  # namespaces in which one key is looked for in one go
EVENT_STREAMS_MAX = 64
STREAM_SECONDS_MAX = 15.0  # a comment at least so often, so that either end notices that the other is gone

EXAMPLE_KEY = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
Key: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$", min_length=64, max_length=64, examples=[EXAMPLE_KEY])]
DigestText: TypeAlias = Annotated[
    str, Meta(pattern="^[0-9a-fA-F]{8,64}$", description="8 or more digits of the digest", examples=[EXAMPLE_KEY[:12]])
]
PolicyName: TypeAlias = Annotated[str, Meta(max_length=64, description="what another policy would choose; nothing is changed")]
Asked: TypeAlias = Annotated[list[Key], Meta(min_length=1, max_length=say.ASKED_MAX, examples=[[EXAMPLE_KEY]])]


class Listing(Params, frozen=True):
    """Which part of a list."""

    limit: Annotated[int, Meta(ge=1, le=1000, description="entries of the answer at most", examples=[100])] = 100
    offset: Annotated[int, Meta(ge=0, le=1 << 31, description="entries to leave out at the start", examples=[0])] = 0


class OfNode(Params, frozen=True):
    """One node."""

    node: Annotated[str, Meta(max_length=64, examples=["node7-a"])]


class OfKey(Params, frozen=True):
    """One key of one namespace."""

    namespace: DigestText
    key: Key


class AnyKey(Params, frozen=True):
    """One key, whatever the namespace."""

    key: Key


class Hottest(Params, frozen=True):
    """How many of the most used keys and prefixes, and of which namespace."""

    n: Annotated[int, Meta(ge=1, le=1000, examples=[20])] = 20
    namespace: DigestText | None = None


class OfPolicy(Params, frozen=True):
    """One kind of policy."""

    kind: Annotated[str, Meta(max_length=32, examples=[ROUTING])]


class Choice(Body, frozen=True):
    """A policy by name."""

    name: Annotated[str, Meta(min_length=1, max_length=64, examples=["fastest"])]


class Route(Body, frozen=True):
    """A prompt's page keys, root first. ``requester`` is the node that would fetch; without one only targets are answered.

    It is a node of the cluster, alive or not: pages are fetched by pools, so who is on none of their nodes, as a request router, has none.

    ``prefill_tokens_per_second``: how fast it is computed, 0 where not known. With ``count`` false, or a ``policy``, nothing is changed.
    """

    namespace: DigestText
    keys: Asked
    requester: Annotated[str, Meta(max_length=64, examples=["node7-a"])] = ""
    prefill_tokens_per_second: Annotated[float, Meta(ge=0, le=1e9, examples=[20000])] = 0.0
    page_tokens: Annotated[int, Meta(ge=1, le=1 << 20, examples=[64])] = 64
    count: bool = True
    policy: PolicyName = ""


class Place(Body, frozen=True):
    """New pages, and who would put them: ``requester`` as in `Route`.

    Without ``dry_run`` they are taken to be on their way to the nodes that are named.
    """

    namespace: DigestText
    keys: Asked
    page_bytes: Annotated[int, Meta(ge=0, le=1 << 40, description="0: as the namespace's others", examples=[2_600_000])] = 0
    requester: Annotated[str, Meta(max_length=64, examples=["node7-a"])] = ""
    dry_run: bool = False
    policy: PolicyName = ""


class External(Body, frozen=True):
    """Keys in an engine's own cache: ``add`` and ``remove`` are additive per tier; ``clear`` comes first and is of the whole tier.

    An engine of which nothing is heard for 200 s is forgotten: a report without any of these says that it lives.
    """

    engine: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", examples=["node7-a.0"])]
    node: Annotated[str, Meta(max_length=64, examples=["node7-a"])]
    tier: Annotated[Literal["hbm", "host"], Meta(examples=["hbm"])]
    namespace: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$", examples=[EXAMPLE_KEY])]
    add: Annotated[list[Key], Meta(max_length=8192, examples=[[EXAMPLE_KEY]])] = []  # noqa: RUF012 - msgspec copies it
    remove: Annotated[list[Key], Meta(max_length=8192)] = []  # noqa: RUF012
    clear: bool = False
    page_bytes: Annotated[int, Meta(ge=0, le=1 << 40, examples=[2_600_000])] = 0


class OfEngine(Params, frozen=True):
    """One engine."""

    engine: Annotated[str, Meta(max_length=64, examples=["node7-a.0"])]


class Has(Protocol):
    """A process with a master in it."""

    @property
    def master(self) -> MasterService: ...


def keys_words(keys: list[str]) -> U64:
    """(n, 4) key words of keys as hex digits."""
    return key_words(np.frombuffer(bytes.fromhex("".join(keys)), np.uint8))


def check_requester(core: Master, node: str) -> None:
    """NotFound if there is no such node: costs of one that nobody has heard of would be guesses that look like an answer."""
    if node:
        core.membership.find(node, "requester")


def digest_of(directory: Directory, text: str) -> bytes:
    """The digest that these first digits name; of a namespace nobody has reported, the digits themselves where they are all of them."""
    text = text.lower()
    if len(text) == 64:
        return bytes.fromhex(text)
    found = [digest for digest in directory.digests if digest.hex().startswith(text)]
    if not found:
        raise NotFound(f"no namespace whose digest begins with {text}", field="namespace")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} namespaces have digests that begin with {text}: give more digits", field="namespace")
    return found[0]


class Handlers:
    """What the endpoints do. Each takes its params and its body."""

    def __init__(self, process: Has) -> None:
        self.process = process

    @property
    def service(self) -> MasterService:
        """The master of this process."""
        return self.process.master

    # -- nodes

    async def cluster(self, params: Nothing, body: Nothing) -> doc.Cluster:
        return doc.cluster_document(self.service.core, self.service.now(), self.service.masters())

    async def nodes(self, params: Listing, body: Nothing) -> doc.Nodes:
        core, now = self.service.core, self.service.now()
        every = [core.membership.members[name] for name in sorted(core.membership.members)]
        part = every[params.offset : params.offset + params.limit]
        return doc.Nodes(total=len(every), nodes=[doc.node_document(core, member, now) for member in part])

    async def one_node(self, params: OfNode, body: Nothing) -> doc.NodeDocument:
        core = self.service.core
        return doc.node_document(core, core.membership.find(params.node), self.service.now())

    async def drain(self, params: OfNode, body: Nothing) -> doc.NodeDocument:
        return await self._drained(params.node, on=True)

    async def undrain(self, params: OfNode, body: Nothing) -> doc.NodeDocument:
        return await self._drained(params.node, on=False)

    async def _drained(self, node: str, *, on: bool) -> doc.NodeDocument:
        member = await self.service.drain(node, on=on)
        return doc.node_document(self.service.core, member, self.service.now())

    async def measured(self, params: Listing, body: Nothing) -> doc.Links:
        return doc.links_document(self.service.core, params.offset, params.limit)

    # -- engines

    async def external(self, params: Nothing, body: External) -> doc.Reported:
        service, digest, tier = self.service, bytes.fromhex(body.namespace), Tier[body.tier.upper()]
        changed = await service.clear(body.engine, tier) if body.clear else 0
        for keys, present in ((body.remove, False), (body.add, True)):
            if keys or (present and not body.remove and not body.clear):
                words, size = keys_words(keys), body.page_bytes
                changed += await service.external(body.engine, body.node, digest, tier, words, present=present, object_bytes=size)
        return doc.Reported(keys=changed)

    async def engines(self, params: Listing, body: Nothing) -> doc.Engines:
        every, now = self.service.core.engines.engines, self.service.now()
        part = sorted(every)[params.offset : params.offset + params.limit]
        return doc.Engines(total=len(every), engines=[doc.engine_document(every[name], now) for name in part])

    async def forget_engine(self, params: OfEngine, body: Nothing) -> doc.Reported:
        return doc.Reported(keys=await self.service.clear(params.engine, None))

    # -- keys

    async def where(self, params: OfKey, body: Nothing) -> doc.KeyDocument:
        core = self.service.core
        space = core.directory.space_or_none(digest_of(core.directory, params.namespace))
        rows = core.directory.find(keys_words([params.key]), space) if space is not None else np.full(1, -1, np.int64)
        found = doc.key_documents(core, rows[rows >= 0], self.service.now())
        if not found:
            raise NotFound("no node has the key", field="key")
        return found[0]

    async def where_any(self, params: AnyKey, body: Nothing) -> doc.Keys:
        core = self.service.core
        words, found = keys_words([params.key]), []
        for start in range(0, len(core.directory.digests), FIND_SLICE):
            spaces = np.arange(start, min(start + FIND_SLICE, len(core.directory.digests)), dtype=np.uint32)
            rows = core.directory.table.find(np.repeat(words, len(spaces), axis=0), spaces)
            found += doc.key_documents(core, rows[rows >= 0], self.service.now())
            await asyncio.sleep(0)
        return doc.Keys(keys=found)

    async def hot(self, params: Hottest, body: Nothing) -> doc.Hot:
        core, now = self.service.core, self.service.now()
        space = None
        if params.namespace is not None:
            space = core.directory.space_or_none(digest_of(core.directory, params.namespace))
            if space is None:
                return doc.Hot(keys=[], prefixes=[])
        rows, heat = np.empty(0, np.int64), np.empty(0, np.float64)
        for start in range(0, core.directory.rows_end, HOT_SLICE):
            more, more_heat = core.directory.hottest(now, start, start + HOT_SLICE, HOT_CANDIDATES, space)
            rows, heat = np.concatenate([rows, more]), np.concatenate([heat, more_heat])
            order = np.lexsort((rows, -heat))[:HOT_CANDIDATES]
            rows, heat = rows[order], heat[order]
            await asyncio.sleep(0)
        alive = core.directory.held(rows)  # some may have gone while others were served
        rows, heat = rows[alive], heat[alive]
        keys = doc.key_documents(core, rows[: params.n], now)
        return doc.Hot(keys=keys, prefixes=doc.prefix_documents(core, rows, heat, params.n))

    # -- the same, as a pool hands it on beside what it says of itself

    async def cluster_where(self, params: AnyKey, body: Nothing) -> doc.Keys:
        return await self.where_any(params, body)

    async def cluster_hot(self, params: Hottest, body: Nothing) -> doc.Hot:
        return await self.hot(params, body)

    # -- questions

    async def route(self, params: Nothing, body: Route) -> doc.RouteDocument:
        service = self.service
        core, now = service.core, service.now()
        check_requester(core, body.requester)
        digest, words, draws = digest_of(core.directory, body.namespace), keys_words(body.keys), service.draws(len(body.keys))
        prefill, page_tokens = body.prefill_tokens_per_second, body.page_tokens
        plan = core.route(
            now,
            digest,
            words,
            body.requester,
            draws,
            prefill=prefill,
            page_tokens=page_tokens,
            count=body.count,
            policy=body.policy,
        )
        found = targets(core, now, digest, words, draws, prefill=prefill, page_tokens=page_tokens)
        return doc.route_document(plan, len(words), found)

    async def place(self, params: Nothing, body: Place) -> doc.PlaceDocument:
        service = self.service
        core, words = service.core, keys_words(body.keys)
        check_requester(core, body.requester)
        policy = body.policy or (core.choices.names[PLACEMENT] if body.dry_run else "")
        digest, draws = digest_of(core.directory, body.namespace), service.draws(len(words))
        placed = core.place(service.now(), digest, words, body.requester, body.page_bytes, draws, policy=policy)
        return doc.PlaceDocument(nodes=placed.nodes, exists=placed.exists)

    # -- policies

    async def policies(self, params: Nothing, body: Nothing) -> doc.Policies:
        return doc.policies_document(self.service.core)

    async def choose_policy(self, params: OfPolicy, body: Choice) -> doc.PolicyDocument:
        await self.service.swap(params.kind, body.name)
        return doc.policy_document(self.service.core, params.kind)

    async def preview_policy(self, params: OfPolicy, body: Preview) -> Previewed:
        return await preview(self.service, params.kind, body)


def cluster_endpoints(process: Has) -> list[Endpoint]:
    """What can be asked of any process with a master in it."""
    do = Handlers(process)
    # fmt: off
    return [
        Endpoint("GET", "/v1/cluster", "Sums over the nodes", do.cluster, doc.Cluster),
        Endpoint("GET", "/v1/nodes", "The nodes", do.nodes, doc.Nodes, Listing),
        Endpoint("GET", "/v1/nodes/{node}", "One node", do.one_node, doc.NodeDocument, OfNode),
        Endpoint("POST", "/v1/nodes/{node}/drain", "Nothing new goes there", do.drain, doc.NodeDocument, OfNode),
        Endpoint("DELETE", "/v1/nodes/{node}/drain", "New pages go there again", do.undrain, doc.NodeDocument, OfNode),
        Endpoint("GET", "/v1/cluster/keys/{key}", "Where a key is in the cluster", do.cluster_where, doc.Keys, AnyKey),
        Endpoint("GET", "/v1/cluster/hot", "Keys and prefixes that routes asked for most", do.cluster_hot, doc.Hot, Hottest),
        Endpoint("GET", "/v1/links", "What fetches cost, as measured", do.measured, doc.Links, Listing),
        Endpoint("POST", "/v1/route", "Who serves a prompt, and who should take it", do.route, doc.RouteDocument, body=Route, logged=False),
        Endpoint("POST", "/v1/place", "Where new pages should go", do.place, doc.PlaceDocument, body=Place, logged=False),
        Endpoint("POST", "/v1/policies/{kind}/preview", "A dry run", do.preview_policy, Previewed, OfPolicy, Preview, logged=False),
        Endpoint("POST", "/v1/external", "What an engine's own caches hold", do.external, doc.Reported, body=External, logged=False),
        Endpoint("GET", "/v1/external", "Engines that report", do.engines, doc.Engines, Listing),
        Endpoint("DELETE", "/v1/external/{engine}", "An engine has nothing any more", do.forget_engine, doc.Reported, OfEngine),
    ]
    # fmt: on


def master_endpoints(process: Has) -> list[Endpoint]:
    """What can be asked of a master alone: a pool answers these for itself."""
    do = Handlers(process)
    # fmt: off
    return [
        Endpoint("GET", "/v1/keys/{key}", "Where a key is, in any namespace", do.where_any, doc.Keys, AnyKey),
        Endpoint("GET", "/v1/keys/{namespace}/{key}", "Where a key is", do.where, doc.KeyDocument, OfKey),
        Endpoint("GET", "/v1/hot", "Keys and prefixes asked for most", do.hot, doc.Hot, Hottest),
        Endpoint("GET", "/v1/policies", "Policies, current and available", do.policies, doc.Policies),
        Endpoint("PUT", "/v1/policies/{kind}", "Choose a policy", do.choose_policy, doc.PolicyDocument, OfPolicy, Choice),
    ]
    # fmt: on


# -- what pools say ----------------------------------------------------------------------------------------------------------------


def member_endpoints(process: Has) -> list[Endpoint]:
    """The JSON part of the protocol between pools and masters."""

    async def join(params: Nothing, body: say.Join) -> say.Joined:
        return await process.master.join(body)

    async def heartbeat(params: OfNode, body: say.Heartbeat) -> say.Beat:
        return await process.master.beat(params.node, body)

    async def leave(params: OfNode, body: say.Leaving) -> say.Left:
        return await process.master.leave(params.node, body)

    async def failed(params: OfNode, body: say.Failed) -> say.Left:
        return await process.master.failed(params.node, body)

    of = "/v1/members/{node}"
    return [
        Endpoint("POST", "/v1/members", "A pool registers", join, say.Joined, body=say.Join),
        Endpoint("POST", of + "/heartbeat", "A pool lives", heartbeat, say.Beat, OfNode, say.Heartbeat, logged=False),
        Endpoint("POST", of + "/leave", "A pool stops", leave, say.Left, OfNode, say.Leaving),
        Endpoint("POST", of + "/failed", "A fetch from a node failed", failed, say.Left, OfNode, say.Failed, logged=False),
    ]


def member_routes(process: Has) -> list[Raw]:
    """The part of the protocol that carries arrays."""

    async def events(request: web.Request) -> web.Response:
        return _json(await process.master.events(request.match_info["node"], await request.read()))

    async def resync(request: web.Request) -> web.Response:
        return _json(await process.master.piece(request.match_info["node"], await request.read()))

    async def victims(request: web.Request) -> web.Response:
        content = process.master.victims(request.match_info["node"], await request.read())
        return web.Response(body=content, content_type=say.FRAME)

    async def plan(request: web.Request) -> web.Response:
        return web.Response(body=process.master.plan(await request.read()), content_type=say.FRAME)

    async def locate(request: web.Request) -> web.Response:
        return web.Response(body=process.master.locate(await request.read()), content_type=say.FRAME)

    of = "/v1/members/{node}"
    return [
        Raw("POST", of + "/events", "A numbered bundle of changes", events, JSON, say.FRAME),
        Raw("POST", of + "/resync", "A part of all that a pool holds", resync, JSON, say.FRAME),
        Raw("POST", of + "/victims", "What a nearly full pool should keep", victims, say.FRAME, say.FRAME),
        Raw("POST", "/v1/plan", "Who serves these keys, as a frame", plan, say.FRAME, say.FRAME),
        Raw("POST", "/v1/locate", "Does anybody have these keys, as a frame", locate, say.FRAME, say.FRAME),
    ]


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)


def event_stream(process: Has) -> Raw:
    """``GET /v1/events?after=N``: server-sent events, first those since N that are still known."""
    streams = 0

    async def live(request: web.Request) -> web.StreamResponse:
        nonlocal streams
        text = request.query.get("after", "0")
        if not text.isascii() or not text.isdigit() or len(text) > 15:
            raise InvalidRequest("not a number of an event", field="after", example="0")
        if streams >= EVENT_STREAMS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{EVENT_STREAMS_MAX} streams are open, which is the limit")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        streams += 1
        try:
            await _stream(process.master, response, int(text))
        finally:
            streams -= 1
        return response

    return Raw("GET", "/v1/events", "What happens, live", live, "text/event-stream")


async def _stream(service: MasterService, response: web.StreamResponse, after: int) -> None:
    while True:
        try:
            async with asyncio.timeout(STREAM_SECONDS_MAX):
                found = await service.happened(after)
        except TimeoutError:
            await response.write(b": still here\n\n")
            continue
        for one in found:
            data = msgspec.json.encode(doc.event_document(one, service.now())).decode()
            await response.write(f"id: {one.number}\nevent: {one.kind}\ndata: {data}\n\n".encode())
            after = one.number


__all__ = ["Handlers", "cluster_endpoints", "event_stream", "master_endpoints", "member_endpoints", "member_routes"]
