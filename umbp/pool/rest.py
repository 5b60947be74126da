"""The pool's REST: what each endpoint takes, and what it asks of the pool.

`make_app` gives one application for the Unix socket and for TCP alike; who needs a token stands in `umbp.admin.auth`. Handlers run in the
pool's loop, so each stretch between two awaits is one step of the state machine, and none is long: what looks at all objects or all
namespaces does it in slices and lets requests in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Literal, TypeAlias, TypeVar

import numpy as np
from aiohttp import web
from msgspec import Meta

from umbp.admin.api import Body, Endpoint, Nothing, Params, Reply, make_application
from umbp.admin.openapi import release
from umbp.core.guard import check_sound
from umbp.core.objects import LIVE
from umbp.core.pool import NamespaceState, Pool
from umbp.errors import ConfigError, InvalidRequest, NotFound
from umbp.grammar import SIZE_BYTES_MAX, parse_size
from umbp.master.documents import PolicyDocument
from umbp.metrics import CONTENT_TYPE
from umbp.policies.base import ADMISSION, EVICTION, SSD_KINDS
from umbp.pool import documents as doc
from umbp.pool import items
from umbp.pool.node import Node, SessionFacts
from umbp.store.index import place_word
from umbp.types import I64
from umbp.wire import FETCH_SECONDS_MAX, TEXT_CHARS_MAX

__all__ = ["Node", "SessionFacts", "make_app"]

PIN_KEYS_MAX = 4096
EVICT_SECONDS_MAX = 30.0
EVICT_SLICE_BYTES = 1 << 30  # of the SSD tier in one go: 16,384 pages of 64 KiB
HOT_SLICE = 1 << 17  # entries looked at in one go: about 1 ms
FIND_SLICE = 8  # namespaces probed in one go: about 0.5 ms

# -- what requests carry -----------------------------------------------------------------------------------------------------------

EXAMPLE_KEY = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
Key: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$", min_length=64, max_length=64, examples=[EXAMPLE_KEY])]
Row: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
NAMESPACE_ABOUT = "row number, or 8 or more digits of the digest"
NAMESPACE_PATTERN = "^([0-9]{1,5}|[0-9a-fA-F]{8,64})$"
NamespaceText: TypeAlias = Annotated[str, Meta(pattern=NAMESPACE_PATTERN, max_length=64, description=NAMESPACE_ABOUT, examples=["0"])]
NamespaceName: TypeAlias = Annotated[Row | NamespaceText, Meta(description=NAMESPACE_ABOUT, examples=[0])]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=SIZE_BYTES_MAX)] | Annotated[str, Meta(max_length=64)]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=1000, description="entries of the answer at most", examples=[100])]
Offset: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 31, description="entries to leave out at the start", examples=[0])]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64, examples=["lru"])]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=10 * 366 * 86400.0, description="0: until taken back", examples=[3600])]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=SIZE_BYTES_MAX, examples=[1])]


class Listing(Params, frozen=True):
    """Which part of a list."""

    limit: Limit = 100
    offset: Offset = 0


class OfNamespace(Params, frozen=True):
    """One namespace."""

    namespace: NamespaceText


class OfKey(Params, frozen=True):
    """One key of one namespace."""

    namespace: NamespaceText
    key: Key


class AnyKey(Params, frozen=True):
    """One key, whatever the namespace."""

    key: Key


class OfPin(Params, frozen=True):
    """One pin."""

    pin: Number


class OfPolicy(Params, frozen=True):
    """One kind of policy."""

    # fmt: off
    kind: Annotated[Literal[
        "eviction", "admission", "ssd_eviction", "ssd_admission", "ssd_cleaning", "ssd_striping",
        "routing", "placement", "replication", "rebalancing", "cluster_eviction",
    ], Meta(examples=["eviction"])]
    # fmt: on


class Hottest(Params, frozen=True):
    """How many of the most used keys, and of which namespace."""

    n: Annotated[int, Meta(ge=1, le=1000, examples=[20])] = 20
    namespace: NamespaceText | None = None


class Quota(Body, frozen=True):
    """A quota in bytes, as a number or a size; 0 for none."""

    quota: Annotated[Size, Meta(examples=["10GiB"])]


class Evict(Body, frozen=True):
    """How many bytes to free, of which tier and namespace, whether only to say what would go, and how many objects to list.

    ``policy``, with ``dry_run``: what another eviction policy would let go, told of all objects, the longest unused first.
    """

    bytes: Annotated[Size, Meta(examples=["1GiB"])]
    tier: Literal["dram", "ssd"] = "dram"
    namespace: NamespaceName | None = None
    dry_run: bool = False
    policy: Annotated[str, Meta(max_length=64, examples=[""])] = ""
    show: Annotated[int, Meta(ge=0, le=1000, description="objects of the answer at most", examples=[20])] = 20


class NewPin(Body, frozen=True):
    """Keys to protect from eviction, for how long, and why."""

    namespace: NamespaceName
    keys: Annotated[list[Key], Meta(min_length=1, max_length=PIN_KEYS_MAX, examples=[[EXAMPLE_KEY]])]
    seconds: Seconds = 0.0
    note: Annotated[str, Meta(max_length=256, examples=["the system prompt"])] = ""


class NewPrefetch(Body, frozen=True):
    """Pages to have in DRAM soon, root first. The same ``request_id`` with the same values is the same prefetch."""

    namespace: NamespaceName
    keys: Annotated[list[Key], Meta(min_length=1, max_length=PIN_KEYS_MAX, examples=[[EXAMPLE_KEY]])]
    request_id: Annotated[str, Meta(min_length=1, max_length=TEXT_CHARS_MAX, examples=["chat-17.4"])]
    seconds: Annotated[float, Meta(gt=0, le=FETCH_SECONDS_MAX, examples=[20])] = 20.0
    hold: Annotated[float, Meta(ge=0, le=FETCH_SECONDS_MAX, examples=[5])] = 0.0


class OfPrefetch(Params, frozen=True):
    """One prefetch."""

    namespace: NamespaceText
    request_id: Annotated[str, Meta(min_length=1, max_length=TEXT_CHARS_MAX, examples=["chat-17.4"])]


class Choice(Body, frozen=True):
    """A policy by name."""

    name: Name


T = TypeVar("T")


def _part(every: Iterable[T], which: Listing) -> list[T]:
    return list(islice(every, which.offset, which.offset + which.limit))


def _size(value: int | str, field: str) -> int:
    """Bytes in the one grammar of sizes; 0 passes."""
    if isinstance(value, int) or value.strip() == "0":
        return int(value)
    try:
        return parse_size(value, field)
    except ConfigError as error:
        raise InvalidRequest(str(error), field=field) from None


def _namespace(pool: Pool, name: int | str) -> NamespaceState:
    """The namespace that a path or body names."""
    text = str(name).lower()
    if len(text) <= 5:
        return pool.find_namespace(int(text))
    found = [state for state in pool.namespaces.values() if state.digest.hex().startswith(text)]
    if not found:
        raise NotFound(f"no namespace whose digest begins with {text}", field="namespace")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} namespaces have digests that begin with {text}: give more digits", field="namespace")
    return found[0]


# -- handlers ----------------------------------------------------------------------------------------------------------------------


class Handlers:
    """What the endpoints do. Each takes its params and its body."""

    def __init__(self, node: Node) -> None:
        self.node = node

    # -- the process

    async def health(self, params: Nothing, body: Nothing) -> Reply:
        reasons = list(self.node.unhealthy)
        return Reply(doc.Health(healthy=not reasons, reasons=reasons), status=503 if reasons else 200)

    async def readiness(self, params: Nothing, body: Nothing) -> Reply:
        node = self.node
        ready = node.state == "ready" and not node.unhealthy
        answer = doc.Readiness(state=node.state, ready=ready, reasons=list(node.unhealthy), warnings=list(node.warnings))
        return Reply(answer, status=200 if ready else 503)

    async def scrape(self, params: Nothing, body: Nothing) -> Reply:
        return Reply(self.node.metrics.text(), media_type=CONTENT_TYPE)

    async def links(self, params: Nothing, body: Nothing) -> doc.Links:
        paths = ("/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/status", "/v1/namespaces", "/v1/hot", "/v1/policies")
        return doc.Links(name=self.node.name, links={path.rpartition("/")[2]: path for path in paths})

    async def status(self, params: Nothing, body: Nothing) -> doc.Status:
        return doc.status_document(self.node)

    async def sessions(self, params: Listing, body: Nothing) -> items.Sessions:
        every = self.node.sessions()
        return items.Sessions(total=len(every), sessions=[items.session_document(self.node, facts) for facts in _part(every, params)])

    async def who(self, params: Nothing, body: Nothing) -> doc.Identity:
        return doc.Identity(name=self.node.name, boot=self.node.boot)

    # -- namespaces

    async def namespaces(self, params: Listing, body: Nothing) -> doc.Namespaces:
        states = self.node.pool.namespaces
        part = [states[row] for row in _part(sorted(states), params)]
        return doc.Namespaces(total=len(states), namespaces=[doc.namespace_document(state) for state in part])

    async def one_namespace(self, params: OfNamespace, body: Nothing) -> doc.NamespaceDocument:
        return doc.namespace_document(_namespace(self.node.pool, params.namespace))

    async def set_quota(self, params: OfNamespace, body: Quota) -> doc.NamespaceDocument:
        pool = self.node.pool
        state = _namespace(pool, params.namespace)
        pool.set_quota(state.account.row, _size(body.quota, "quota"))
        if self.node.ssd:
            self.node.ssd.tier.describe(self.node.now(), state.digest)
        self.node.wake()
        return doc.namespace_document(state)

    async def flush(self, params: OfNamespace, body: Nothing) -> doc.Flushed:
        pool = self.node.pool
        state = _namespace(pool, params.namespace)
        row, before = state.account.row, state.account.number
        count = pool.flush(row)
        self.node.wake()
        if self.node.ssd and (rest := self.node.ssd.flush(state.digest, before)):
            count = max(count, await rest)
        return doc.Flushed(row=row, keys=count)

    # -- keys

    async def where(self, params: OfKey, body: Nothing) -> items.KeyDocument:
        pool = self.node.pool
        account = _namespace(pool, params.namespace).account
        if (found := self._where(account.row, params.key)) is None:
            on_its_way = bytes.fromhex(params.key) in pool.writes.in_flight.get(account.number, ())
            raise NotFound("the key is being written" if on_its_way else "the key is not stored", field="key")
        return found

    def _where(self, row: int, key: str) -> items.KeyDocument | None:
        """A key's copies in every tier of this node; None if there are none."""
        pool = self.node.pool
        ids = self._ids(pool, row, key)
        found = [place for document in items.key_documents(self.node, ids) for place in document.locations]
        found += items.ssd_locations(self.node, pool.find_namespace(row).account, key)
        return items.KeyDocument(namespace=row, key=key.lower(), locations=found) if found else None

    async def where_any(self, params: AnyKey, body: Nothing) -> items.Keys:
        pool, found = self.node.pool, []
        for number, row in enumerate(list(pool.namespaces), start=1):
            if row in pool.namespaces and (document := self._where(row, params.key)):
                found.append(document)
            if number % FIND_SLICE == 0:
                await asyncio.sleep(0)
        return items.Keys(keys=found)

    async def remove(self, params: OfKey, body: Nothing) -> items.Removed:
        pool = self.node.pool
        row = _namespace(pool, params.namespace).account.row
        keys = np.frombuffer(bytes.fromhex(params.key), np.uint8).reshape(1, -1)
        rest = self.node.ssd.remove(row, keys, None) if self.node.ssd else None
        gone = pool.remove(row, keys)
        self.node.wake()
        if rest:
            gone = gone | await rest
        return items.Removed(removed=int(np.count_nonzero(gone)))

    async def hot(self, params: Hottest, body: Nothing) -> items.Keys:
        pool = self.node.pool
        row = -1 if params.namespace is None else _namespace(pool, params.namespace).account.row
        best = np.empty(0, np.int64)
        for start in range(0, pool.objects.capacity, HOT_SLICE):
            part = np.arange(start, min(start + HOT_SLICE, pool.objects.capacity))
            best = self._hottest(pool, np.concatenate([best, part]), row, params.n)
            await asyncio.sleep(0)
        return items.Keys(keys=items.key_documents(self.node, self._hottest(pool, best, row, params.n)))

    @staticmethod
    def _ids(pool: Pool, row: int, key: str) -> I64:
        """Entry ids of a key: one or none."""
        account = pool.find_namespace(row).account
        found = pool.table.find(items.words_of(key), account.number, place_word(account.number, account.object_bytes))
        return found.ids[found.hit]

    @staticmethod
    def _hottest(pool: Pool, ids: I64, row: int, n: int) -> I64:
        """Those of these entries that are live, of the namespace (or any, -1) and were asked for most, the most first."""
        objects = pool.objects
        good = (objects.state[ids] == LIVE) & (objects.hits[ids] > 0)
        if row >= 0:
            good &= objects.row[ids] == row
        ids = ids[good]
        if len(ids) > n:
            ids = ids[np.argpartition(-objects.hits[ids], n - 1)[:n]]
        order: I64 = ids[np.lexsort((ids, -objects.hits[ids]))]
        return order

    # -- room

    async def evict(self, params: Nothing, body: Evict) -> items.Evicted:
        pool, now = self.node.pool, self.node.now
        wanted = _size(body.bytes, "bytes")
        account = None if body.namespace is None else _namespace(pool, body.namespace).account
        if body.policy and not body.dry_run:
            raise InvalidRequest("another policy is only asked what it would let go", field="policy", example='"dry_run": true')
        if body.tier == "ssd":
            return await self._evict_ssd(body, wanted, account.number if account else -1)
        row = account.row if account else -1
        first: list[items.Victim] = []
        objects = freed = 0
        deadline = now() + EVICT_SECONDS_MAX
        while freed < wanted and now() < deadline:
            if body.policy:
                ids = pool.preview_eviction(now(), wanted, body.policy, row=row)
            else:
                ids = pool.evict(now(), wanted - freed, row=row, dry_run=body.dry_run)
            sizes = pool.objects.size[ids]
            shown = ids[: body.show - len(first)]
            for i, key in zip(shown.tolist(), items.key_texts(pool, shown), strict=True):
                first.append(items.Victim(namespace=int(pool.objects.row[i]), key=key, bytes=int(pool.objects.size[i])))
            objects += len(ids)
            freed += int(sizes.sum())
            if not len(ids) or body.dry_run:  # a preview is of one slice: the next would name the same objects again
                break
            await asyncio.sleep(0)
        return items.Evicted(dry_run=body.dry_run, complete=freed >= wanted, objects=objects, bytes=freed, first=first)

    async def _evict_ssd(self, body: Evict, wanted: int, number: int) -> items.Evicted:
        """The same on SSD, by its own policy. What is in DRAM as well stays there."""
        ssd, now = self.node.ssd, self.node.now
        if ssd is None:
            raise NotFound("this pool has no SSD tier", field="tier", example="dram")
        first: list[items.Victim] = []
        objects, freed, ledger, none = 0, 0, ssd.tier.ledger, np.empty(0, np.int64)
        deadline = now() + EVICT_SECONDS_MAX
        while freed < wanted and now() < deadline:
            policy = ssd.policies.told(now(), ssd.tier, body.policy) if body.policy else None
            ids, sizes = ledger.victims(min(wanted - freed, EVICT_SLICE_BYTES), 0, none, number=number, policy=policy)
            check_sound(policy)
            if not len(ids):
                break
            first += items.ssd_victims(self.node, ids[: body.show - len(first)])
            objects += len(ids)
            freed += int(sizes.sum())
            if body.dry_run:
                break
            ledger.forget(now(), ids, evicted=True)
            ledger.counters.evicted += len(ids)
            await asyncio.sleep(0)
        return items.Evicted(dry_run=body.dry_run, complete=freed >= wanted, objects=objects, bytes=freed, first=first)

    async def pins(self, params: Listing, body: Nothing) -> items.Pins:
        held, now = self.node.pool.leases.pins, self.node.now()
        return items.Pins(total=len(held), pins=[items.pin_document(pin, now) for pin in _part(held.values(), params)])

    async def pin(self, params: Nothing, body: NewPin) -> items.Pinned:
        pool, now = self.node.pool, self.node.now()
        account = _namespace(pool, body.namespace).account
        keys = np.frombuffer(bytes.fromhex("".join(body.keys)), np.uint8).reshape(-1, 32)
        stored = pool.find_keys(account, keys).hit
        if not stored.any():
            raise NotFound("none of these keys is stored", field="keys")
        made = pool.pin(now, 0, account.row, keys, body.seconds, body.note)
        await self.node.keep_pins()
        missing = [key for key, held in zip(body.keys, stored.tolist(), strict=True) if not held]
        return items.Pinned(pin=items.pin_document(made, now), missing=missing)

    async def unpin(self, params: OfPin, body: Nothing) -> items.PinDocument:
        leases = self.node.pool.leases
        pin = leases.pins.get(params.pin)
        leases.unpin(params.pin)
        assert pin is not None
        self.node.wake()
        await self.node.keep_pins()
        return items.pin_document(pin, self.node.now())

    # -- policies

    # -- pages from elsewhere

    async def prefetch(self, params: Nothing, body: NewPrefetch) -> items.PrefetchDocument:
        node = self.node
        account = _namespace(node.pool, body.namespace).account
        keys = np.frombuffer(bytes.fromhex("".join(body.keys)), np.uint8).reshape(-1, 32)
        ticket = node.fetching.prefetch(
            node.now(), account.row, account.number, keys, request=body.request_id, seconds=body.seconds, hold=body.hold
        )
        return items.prefetch_document(ticket)

    async def prefetched(self, params: OfPrefetch, body: Nothing) -> items.PrefetchDocument:
        row = _namespace(self.node.pool, params.namespace).account.row
        return items.prefetch_document(self.node.fetching.fetches.prefetched(row, params.request_id))

    # -- policies

    async def policies(self, params: Nothing, body: Nothing) -> doc.Policies:
        pool, ssd = self.node.pool, self.node.ssd
        own = [doc.policy_document(pool, ssd, kind) for kind in (EVICTION, ADMISSION, *(SSD_KINDS if ssd else ()))]
        return doc.Policies(policies=[*own, *await self.node.cluster.policies()])

    async def choose_policy(self, params: OfPolicy, body: Choice) -> PolicyDocument | Reply:
        pool, ssd = self.node.pool, self.node.ssd
        if params.kind == EVICTION:
            pool.swap_eviction(self.node.now(), body.name)
        elif params.kind == ADMISSION:
            pool.swap_admission(body.name)
        elif params.kind not in SSD_KINDS:
            return await self.node.cluster.choose_policy(params.kind, body.name)
        elif ssd is None:
            raise NotFound("this pool has no SSD tier", field="kind", example="--ssd /nvme0/umbp:2TiB at its start")
        else:
            ssd.policies.swap(self.node.now(), ssd.tier, params.kind, body.name)
        return doc.policy_document(pool, ssd, params.kind)


# -- the table ---------------------------------------------------------------------------------------------------------------------


def endpoints(node: Node) -> list[Endpoint]:
    """Everything that can be asked, beside the description of it."""
    do = Handlers(node)
    of_namespace, of_key = "/v1/namespaces/{namespace}", "/v1/keys/{namespace}/{key}"
    # fmt: off
    return [
        Endpoint("GET", "/", "Where to go from here", do.links, doc.Links, access="local"),
        Endpoint("GET", "/healthz", "Alive? 503 says: replace it", do.health, doc.Health, access="anyone", also=(503,)),
        Endpoint("GET", "/readyz", "Ready? 503 says: not now", do.readiness, doc.Readiness, access="anyone", also=(503,)),
        Endpoint("GET", "/metrics", "Prometheus metrics", do.scrape, str, access="local", media_type="text/plain"),
        Endpoint("GET", "/v1/status", "All about this pool", do.status, doc.Status),
        Endpoint("GET", "/v1/sessions", "Clients", do.sessions, items.Sessions, Listing),
        Endpoint("GET", "/v1/whoami", "Which pool this is", do.who, doc.Identity),
        Endpoint("GET", "/v1/namespaces", "Namespaces", do.namespaces, doc.Namespaces, Listing),
        Endpoint("GET", of_namespace, "One namespace", do.one_namespace, doc.NamespaceDocument, OfNamespace),
        Endpoint("PUT", of_namespace + "/quota", "Limit its bytes", do.set_quota, doc.NamespaceDocument, OfNamespace, Quota),
        Endpoint("POST", of_namespace + "/flush", "Everything of it goes", do.flush, doc.Flushed, OfNamespace),
        Endpoint("GET", "/v1/keys/{key}", "Where a key is, in any namespace", do.where_any, items.Keys, AnyKey),
        Endpoint("GET", of_key, "Where a key is", do.where, items.KeyDocument, OfKey),
        Endpoint("DELETE", of_key, "Remove a key", do.remove, items.Removed, OfKey),
        Endpoint("GET", "/v1/hot", "Keys asked for most", do.hot, items.Keys, Hottest),
        Endpoint("POST", "/v1/evict", "Free bytes, or say what would go", do.evict, items.Evicted, body=Evict),
        Endpoint("GET", "/v1/pins", "Pins", do.pins, items.Pins, Listing),
        Endpoint("POST", "/v1/pins", "Protect keys from eviction", do.pin, items.Pinned, body=NewPin),
        Endpoint("DELETE", "/v1/pins/{pin}", "Take a pin back", do.unpin, items.PinDocument, OfPin),
        Endpoint("POST", "/v1/prefetch", "Have pages in DRAM soon", do.prefetch, items.PrefetchDocument, body=NewPrefetch),
        Endpoint("GET", "/v1/prefetch/{namespace}/{request_id}", "A prefetch", do.prefetched, items.PrefetchDocument, OfPrefetch),
        Endpoint("GET", "/v1/policies", "Policies, current and available", do.policies, doc.Policies),
        Endpoint("PUT", "/v1/policies/{kind}", "Choose a policy", do.choose_policy, PolicyDocument, OfPolicy, Choice),
        *node.cluster.endpoints(),
    ]
    # fmt: on


def make_app(node: Node) -> web.Application:
    """The application of this pool, for its Unix socket and its TCP address alike."""
    return make_application(
        endpoints(node),
        title="UMBP pool",
        version=release(),
        token=node.config.token,
        listening=node.config.http,
        metrics=node.metrics,
        raw=node.cluster.routes(),
    )
