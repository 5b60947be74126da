r"""Errands: pages of another node that a client receives by itself, straight from the node's connection, into memory of the segment.

Theory of operation. Between the peer's memory and the caller's a page need not pass through this process: what is needed of it is to know
who has the page, to speak for the client (the token stays here), to give memory and to show what came. So a client that has memory for
pages at hand asks for an *errand* (`umbp.wire.Receive`):

    asked --peer known--> ordered: the order is sent, the memory reserved for the client, the connection handed to it
        \--no connection, no peer, pages on their way already--> nothing: the client fetches as ever (`umbp.pool.fetching`)
    ordered --told what came (`EndErrand`)--> what came is committed, the connection is kept for the next order
            \--client gone, or late--> the connection is cut, the memory given back as after any write that was given up

The order goes out first and the memory is reserved while the peer works on it. The reservation is the client's own, a write like any other:
nobody sees a page before the client has said that it came, with its checksum; a client that dies, is stopped or cancels leaves what any
writer leaves (`umbp.core.writes`); who else wants these pages waits for the writer, and fetches them when it gave up. Pages that the
policies would not keep, or that there is no room for, get no memory: they are received where the client wants them, and nobody else has
them.

Who has the pages is mostly known without a question (`umbp.pool.guesses`); else the sources are asked, for a moment, as the client's other
calls wait for it. An errand is of one peer, and of a part of the memory at most; what it does not bring the client asks for again, or
fetches. What went wrong at the peer is told and remembered as for any read.

Bounded: errands of a place, as its reads; of the pool; seconds of each. What it costs: one call before the bytes, 0.3 ms, and one after
them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from umbp import wire
from umbp.core.objects import Account
from umbp.core.puts import FETCH
from umbp.errors import Unavailable
from umbp.pool.fetching import FIRST_SHARE, READ_SECONDS_MAX, READS_MAX, Fetching
from umbp.pool.handover import Handover, Handovers
from umbp.pool.parts import names
from umbp.pool.peers import Peers
from umbp.pool.places import READS_PER_PLACE, SUSPECT_FROM_SECONDS
from umbp.pool.sources import Offer, Space
from umbp.store.index import hashes, key_words
from umbp.transport.base import GRANT_BYTES_MAX, Peer
from umbp.transport.http import HttpTransport
from umbp.transport.line import Line
from umbp.types import I64, U8, U64, Mask, ReadStatus

ASK_SECONDS = 0.05  # for who has the pages, and for a connection, as other calls of this client wait as long;
ASK_SHARE = 1 / 16  # or for this share of its time, if that is longer
ROOM_SHARE = 8  # an errand takes at most one in this many bytes of the pool
LATE_SECONDS = 1.0  # a client that is late by this is not waited for


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a session asks for, and until when it is to come."""

    session: int
    message: wire.Receive
    keys: U8
    space: Space
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """One order whose pages ``session`` receives. ``mine`` (n,) bool: those that memory is reserved for."""

    session: int
    space: Space
    offer: Offer
    way: tuple[HttpTransport, Peer]
    line: Line
    mine: Mask
    reservation: int
    began: float
    deadline: float


class Errands:
    """All of one pool."""

    def __init__(self, fetching: Fetching, handovers: Handovers) -> None:
        self.fetching = fetching
        self.handovers = handovers
        self.peers = next((source for source in fetching.sources if isinstance(source, Peers)), None)
        self.open: dict[int, Errand] = {}
        self.given = 0
        self._at: Counter[str] = Counter()  # open ones by place
        self._next = 1

    def __repr__(self) -> str:
        return f"<Errands {len(self.open)} open, {self.given} given>"

    @property
    def possible(self) -> bool:
        """Whether clients may ask for any."""
        return self.peers is not None

    def give(self, now: float, session: int, message: wire.Receive, keys: U8) -> bytes | Coroutine[Any, Any, bytes]:
        """The answer, or what makes it where somebody has to be asked first. `Pool.settle` must follow."""
        account, hand = self._account_or_none(message), self.handovers.of(session)
        if self.peers is None or account is None or hand is None or not message.seconds or not self._new(account, keys):
            return _nothing(keys)
        space = Space(self.fetching.pool.namespaces[account.row].digest, account.row, account.number, account.object_bytes)
        asked = Asked(session, message, keys, space, now + FIRST_SHARE * min(message.seconds, READ_SECONDS_MAX / FIRST_SHARE))
        offer = self.peers.guess_or_none(space, keys, again=message.again)
        way = self._way(offer) if offer is not None else None
        if offer is not None and way is not None:
            which = offer.which[: self._pages_max(space)]
            if (line := self._order(asked, way, which)) is not None:
                return self._hand_over(now, asked, hand, offer, which, way, line, np.full(len(keys), wire.NOT_NOW))
        return self._ask(asked)

    def end(self, now: float, session: int, message: wire.EndErrand, status: U8, sums: U64) -> U8:
        """The client says what came: a `WriteStatus` for each page that memory was reserved for. `Pool.settle` must follow."""
        errand = self.open.get(message.number)
        if errand is None or errand.session != session or len(errand.mine) != message.n:
            made = self.fetching.pool.writes.open.get(message.reservation)  # it was late, and is about to be told so
            count = len(made.ids) if made is not None and made.session == session else 0
            return self.fetching.pool.begin_commit(now, session, message.reservation, np.zeros(count, bool), np.zeros(count, np.uint64))
        self._forget(message.number)
        hit, mine = status == ReadStatus.HIT.value, errand.mine
        asyncio.get_running_loop().call_soon(self._learn, errand, message, status, now)  # the client has its answer first
        if not errand.reservation:
            return np.zeros(0, np.uint8)
        return self.fetching.pool.begin_commit(now, session, errand.reservation, hit[mine], sums[mine])

    def tick(self, now: float) -> None:
        """Who is much too late loses its connection; its memory is looked after by the reservation's time."""
        for number, errand in list(self.open.items()):
            if now > errand.deadline + LATE_SECONDS:
                self._cut(number)

    def session_ended(self, session: int) -> None:
        """Its connections are cut; its reservations end as those of any session."""
        for number, errand in list(self.open.items()):
            if errand.session == session:
                self._cut(number)

    def close(self) -> None:
        """Cut all."""
        for number in list(self.open):
            self._cut(number)

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def _new(self, account: Account, keys: U8) -> bool:
        """Whether none of these is on its way already, or there by now: then it is for a fetch to wait for it, and to find it."""
        pool = self.fetching.pool
        prints = hashes(key_words(keys), np.uint64(account.number), pool.table.seed)
        if not pool.table.none_of(prints) and pool.find_keys(account, keys).hit.any():
            return False
        pages, flying = self.fetching.fetches.pages, pool.writes.in_flight.get(account.number)
        if not pages and not flying:
            return True
        named = names(keys)
        return not (flying and not flying.isdisjoint(named)) and not any((account.number, name) in pages for name in named)

    def _way(self, offer: Offer) -> tuple[HttpTransport, Peer] | None:
        """How its pages can come, if the place may be asked for more now."""
        places = self.fetching.places
        if places.is_suspect(offer.place) or self._at[offer.place] >= READS_PER_PLACE or len(self.open) >= READS_MAX:
            return None
        assert self.peers is not None
        return self.peers.way_or_none(offer)

    def _pages_max(self, space: Space) -> int:
        """Of one errand."""
        return max(1, min(GRANT_BYTES_MAX, self.fetching.pool.objects.allocator.capacity_bytes // ROOM_SHARE) // space.object_bytes)

    def _order(self, asked: Asked, way: tuple[HttpTransport, Peer], which: I64) -> Line | None:
        space = asked.space
        return way[0].order_or_none(way[1], space.digest.hex(), space.object_bytes, asked.keys[which], asked.deadline)

    async def _ask(self, asked: Asked) -> bytes:
        """`give`, after who has the pages was asked for, and a connection made."""
        fetching, nothing = self.fetching, _nothing(asked.keys)
        until = min(asked.deadline, fetching.now() + max(ASK_SECONDS, ASK_SHARE * asked.message.seconds))
        offers = await fetching.offers(asked.space, asked.keys, fetching.places.suspects, until, peek=asked.message.again)
        places = np.full(len(asked.keys), -1)
        for at, (_, offer) in enumerate(offers):
            places[offer.which[places[offer.which] < 0]] = at
        offsets = np.where(places < 0, wire.NOBODY, wire.NOT_NOW)
        if not offers:
            return wire.encode(wire.Errand(0, 0, len(offsets), 0.0), offsets)
        source, offer = offers[0]
        way = self._way(offer) if source is self.peers else None
        if way is None:
            return nothing
        same = [at for at, (_, other) in enumerate(offers) if other.place == offer.place]
        which = np.flatnonzero(np.isin(places, same))[: self._pages_max(asked.space)]
        for _ in range(2):  # a kept connection may prove broken
            if not way[0].has_line(way[1]):
                try:
                    async with asyncio.timeout(max(0.0, until - fetching.now())):
                        await way[0].connect(way[1], until)
                except (OSError, TimeoutError):
                    break
            account, hand = self._account_or_none(asked.message), self.handovers.of(asked.session)
            if account is None or hand is None or not self._new(account, asked.keys) or self._way(offer) is None:
                break
            if (line := self._order(asked, way, which)) is not None:
                try:
                    return self._hand_over(fetching.now(), asked, hand, offer, which, way, line, offsets)
                finally:
                    fetching.pool.settle()
        return nothing

    def _hand_over(
        self, now: float, asked: Asked, hand: Handover, offer: Offer, which: I64, way: tuple[HttpTransport, Peer], line: Line, offsets: I64
    ) -> bytes:
        """The order is on its way: give the client its connection, and memory for what is to stay. ``offsets``: of what is not ordered."""
        number, space = self._next, asked.space
        if not hand.give(wire.PEER_LINE, number, line.fileno()):
            line.close()
            return _nothing(asked.keys)
        self._next += 1
        pool, mine, reservation = self.fetching.pool, np.zeros(len(which), bool), 0
        offsets[which] = wire.ALONE
        kept = self.fetching.keeping.keeps(now, pool.namespaces[space.row].account, asked.keys[which])
        if kept.any():
            chosen = np.flatnonzero(kept)
            keys, seconds = asked.keys[which[chosen]], asked.deadline - now + LATE_SECONDS
            made = pool.begin_reserve(
                now, asked.session, space.row, keys, bytes.fromhex(asked.message.before), seconds, number=space.number, kind=FETCH
            )
            mine[chosen[made.mine]] = True
            offsets[which[mine]], reservation = made.offsets, made.number
        self.open[number] = Errand(asked.session, space, offer, way, line, mine, reservation, now, asked.deadline)
        self._at[offer.place] += 1
        self.given += 1
        return wire.encode(wire.Errand(number, reservation, len(offsets), asked.deadline - now, line.owed), offsets)

    def _learn(self, errand: Errand, message: wire.EndErrand, status: U8, now: float) -> None:
        """What an errand that has ended says of its peer."""
        transport, peer = errand.way
        hits, missed = (int(np.count_nonzero(status == code.value)) for code in (ReadStatus.HIT, ReadStatus.MISS))
        size_bytes = hits * errand.space.object_bytes
        transport.took_back(peer, errand.line, message.owed, size_bytes, receipt=message.receipt)
        # A kept connection may have been closed by then, and hardly any time is too little for anybody: that says nothing of the peer.
        why = message.why if message.answered and errand.deadline - errand.began >= SUSPECT_FROM_SECONDS else ""
        if why:
            self.fetching.places.suspect(errand.offer.place, Unavailable(why))
        assert self.peers is not None
        self.peers.received(errand.space, errand.offer, status, size_bytes, now - errand.began, why)
        counts = self.fetching.counts[self.peers.name]
        counts.pages += hits
        counts.size_bytes += size_bytes
        counts.missed += missed
        counts.failed += len(status) - hits - missed

    def _account_or_none(self, message: wire.Receive) -> Account | None:
        state = self.fetching.pool.namespaces.get(message.row)
        return state.account if state is not None and state.account.number == message.number else None

    def _forget(self, number: int) -> Errand:
        errand = self.open.pop(number)
        self._at[errand.offer.place] -= 1
        if not self._at[errand.offer.place]:
            del self._at[errand.offer.place]
        return errand

    def _cut(self, number: int) -> None:
        errand = self._forget(number)
        errand.line.cut()
        errand.line.close()


def _nothing(keys: U8) -> bytes:
    return wire.encode(wire.Errand(0, 0, len(keys), 0.0), np.full(len(keys), wire.NOT_NOW))
