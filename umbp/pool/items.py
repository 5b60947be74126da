"""What REST answers about single keys, pins and sessions: one Struct each, and how it is filled from the state."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from umbp.admin.api import Document
from umbp.core.fetches import Ticket
from umbp.core.leases import Pin
from umbp.core.objects import Account
from umbp.core.pool import Pool
from umbp.pool.node import Node, SessionFacts
from umbp.store.index import W_PLACE, W_SUM, W_VERSION, key_words, place_word
from umbp.types import I64, PENDING, U64, ReadStatus

# -- keys --------------------------------------------------------------------------------------------------------------------------


class Location(Document, frozen=True):
    """One copy of an object. ``idle_seconds`` since it was last asked for, ``hits`` since it was stored."""

    node: str
    tier: Literal["dram", "ssd"]
    bytes: int
    version: int
    leases: int
    pins: int
    age_seconds: float
    idle_seconds: float
    hits: int
    checksum: bool


class KeyDocument(Document, frozen=True):
    """Where a key is."""

    namespace: int
    key: str
    locations: list[Location]


class Keys(Document, frozen=True):
    """The same key in several namespaces, or several keys."""

    keys: list[KeyDocument]


class Removed(Document, frozen=True):
    """How many keys were stored and are not any more."""

    removed: int


class Victim(Document, frozen=True):
    """An object that went, or would."""

    namespace: int
    key: str
    bytes: int


def ssd_victims(node: Node, ids: I64) -> list[Victim]:
    """Pages on SSD by entry ids. A page whose namespace was flushed is its former row's no more: -1."""
    assert node.ssd is not None
    rows = node.ssd.tier.catalog.table.entries[ids]
    keys = [row[:4].tobytes().hex() for row in rows]
    places = rows[:, W_PLACE].tolist()
    numbers = {state.account.number: state.account.row for state in node.pool.namespaces.values()}
    return [
        Victim(namespace=numbers.get(place & 0xFFFF_FFFF, -1), key=key, bytes=place >> 32) for key, place in zip(keys, places, strict=True)
    ]


class Evicted(Document, frozen=True):
    """What went, or with ``dry_run`` would go first. ``complete``: as many bytes as were asked for."""

    dry_run: bool
    complete: bool
    objects: int
    bytes: int
    first: list[Victim]


def key_texts(pool: Pool, ids: I64) -> list[str]:
    """Keys of entries as hex digits; also of ones hidden in this very moment."""
    raw = np.ascontiguousarray(pool.table.entries[ids, :4]).tobytes()
    return [raw[at : at + 32].hex() for at in range(0, len(raw), 32)]


def words_of(key: str) -> U64:
    """Key words of one key of 64 hex digits, (1, 4) uint64."""
    return key_words(np.frombuffer(bytes.fromhex(key), np.uint8))


def key_documents(node: Node, ids: I64) -> list[KeyDocument]:
    """About live entries, in this order."""
    pool, now = node.pool, node.now()
    objects, entries = pool.objects, pool.table.entries
    return [
        KeyDocument(
            namespace=int(objects.row[i]),
            key=key,
            locations=[
                Location(
                    node=node.name,
                    tier="dram",
                    bytes=int(objects.size[i]),
                    version=int(entries[i, W_VERSION]),
                    leases=int(objects.leases[i]),
                    pins=int(objects.pins[i]),
                    age_seconds=max(0.0, now - float(objects.committed_at[i])),
                    idle_seconds=max(0.0, now - float(objects.accessed_at[i])),
                    hits=int(objects.hits[i]),
                    checksum=bool(entries[i, W_SUM]),
                )
            ],
        )
        for i, key in zip(ids.tolist(), key_texts(pool, ids), strict=True)
    ]


def ssd_locations(node: Node, account: Account, key: str) -> list[Location]:
    """The copy of a key on SSD: one or none."""
    if not node.ssd:
        return []
    catalog, now = node.ssd.tier.catalog, node.now()
    found = catalog.table.find(words_of(key), account.number, place_word(account.number, account.object_bytes))
    if not found.hit[0]:
        return []
    entry = int(found.ids[0])
    return [
        Location(
            node=node.name,
            tier="ssd",
            bytes=account.object_bytes,
            version=int(found.versions[0]),
            leases=0,
            pins=0,
            age_seconds=max(0.0, now - float(catalog.written_at[entry])),
            idle_seconds=max(0.0, now - float(catalog.accessed_at[entry])),
            hits=0,
            checksum=True,
        )
    ]


# -- pins and sessions -------------------------------------------------------------------------------------------------------------


class PinDocument(Document, frozen=True):
    """A pin. ``session`` 0 is an operator's; ``seconds_left`` is null where it stays until taken back."""

    id: int
    session: int
    keys: int
    note: str
    seconds_left: float | None


class Pins(Document, frozen=True):
    """A part of all pins, the oldest first."""

    total: int
    pins: list[PinDocument]


class Pinned(Document, frozen=True):
    """A new pin, and the keys that were not stored and so are not pinned."""

    pin: PinDocument
    missing: list[str]


class SessionDocument(Document, frozen=True):
    """A client. One that is not connected still has memory that its process may write to."""

    session: int
    pid: int
    client: str
    connected: bool
    age_seconds: float
    leases: int
    reservations: int


class Sessions(Document, frozen=True):
    """A part of all sessions."""

    total: int
    sessions: list[SessionDocument]


def pin_document(pin: Pin, now: float) -> PinDocument:
    left = None if math.isinf(pin.expires) else max(0.0, pin.expires - now)
    return PinDocument(id=pin.number, session=pin.session, keys=len(pin.ids), note=pin.note, seconds_left=left)


def session_document(node: Node, facts: SessionFacts) -> SessionDocument:
    pool = node.pool
    return SessionDocument(
        session=facts.session,
        pid=facts.pid,
        client=facts.client,
        connected=facts.connected,
        age_seconds=max(0.0, node.now() - facts.opened),
        leases=len(pool.leases.by_session.get(facts.session, ())),
        reservations=len(pool.writes.by_session.get(facts.session, ())),
    )


class PrefetchDocument(Document, frozen=True):
    """What has become of a prefetch by now: pages in DRAM, pages on their way, and what each page is (hit, miss, busy, failed, pending)."""

    request_id: str
    state: str
    pages: int
    there: int
    left: int
    status: list[str]


def prefetch_document(ticket: Ticket) -> PrefetchDocument:
    names = {status.value: status.name.lower() for status in ReadStatus} | {PENDING: "pending"}
    return PrefetchDocument(
        request_id=ticket.request,
        state=ticket.state.name.lower(),
        pages=len(ticket.keys),
        there=int((ticket.status == ReadStatus.HIT).sum()),
        left=ticket.left,
        status=[names[code] for code in ticket.status.tolist()],
    )
