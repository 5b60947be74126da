"""Other nodes as a source: the master says who has what and how soon it would be here, a transport brings it, what it took is told back.

Theory of operation
-------------------
For the pages of a batch the master's plan is asked for: runs of the list, each from the node and tier that serves it fastest. Where the
list has holes (a plan ends at the first page that nobody has), the rest is asked for by what anybody has of it. A plan is a hint: what its
node does not hold any more is a miss, and is asked for once more with that node left out.

Where the last plans all named one node, that node is read from at once, and the master is asked when that is done (`umbp.pool.guesses`).

What each read took is told to the master (`take_measured`, with the heartbeats), in bytes and seconds per node and tier, from which the
next plans are made. That a node failed is told at once, so that it is avoided by all, not only by who found out; this pool does without it
for a while of its own accord (`umbp.pool.fetching`).

A master that does not answer costs its share of a fetch's time once; then it is not asked for a second, pages elsewhere are misses, and
what this node has goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from umbp.core import plans
from umbp.errors import ConfigError, UmbpError, Unavailable
from umbp.grammar import parse_address
from umbp.pool.guesses import Guesses
from umbp.pool.peer_parts import PeerReading
from umbp.pool.places import SUSPECT_FROM_SECONDS
from umbp.pool.sources import Offer, Space, Taken
from umbp.transport.base import Came, Peer, Transport
from umbp.transport.http import HttpTransport
from umbp.types import I64, U8, U64, Mask, ReadStatus, Tier

log = logging.getLogger("umbp.pool.peers")
READ_BYTES_MAX = 64 << 20  # 25 ms of a link of 25 Gbit/s, 0.6 s of one of 1 Gbit/s; what has come of it is there at once
MEASURED_MAX = 256  # kept for the next heartbeat; the oldest go
PLACE = "node "  # how a node is called among places, so that no disk has the same name
TELL_SECONDS_MAX = 1.0
HOLES_MAX = 4  # plans for one batch. What is believed to be held is planned at the second, but for pages of nodes that were left out


class Guide(Protocol):
    """Who knows which node has what: the master, as `umbp.pool.guide` reaches it."""

    async def plan(self, namespace: str, keys: U8, exclude: list[str], deadline: float, *, count: bool, again: bool = False) -> plans.Plan:
        """Who serves these keys, (n, 32), root first. ``count``: a load follows; ``again``: that was said of these keys already."""
        ...

    async def held(self, namespace: str, keys: U8, deadline: float) -> Mask:
        """Which of these keys any node has, (n,) bool."""
        ...

    async def failed(self, node: str, why: str) -> None:
        """A fetch from that node failed."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """One read as it was here: so many bytes of that node's tier took so long."""

    node: str
    tier: Tier
    size_bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class Guessed:
    """What an offer is that no plan was made for: the run, and what to ask the master afterwards, once."""

    run: plans.Run
    keys: U8
    without: list[str]
    confirmed: bool = False


class Peers:
    """Fulfils `umbp.pool.sources.Source`. ``transports``: those this node has, the best first."""

    name = "peers"
    local = False
    read_bytes_max = READ_BYTES_MAX

    def __init__(self, node: str, guide: Guide, transports: Mapping[str, Transport]) -> None:
        self.node = node
        self.guide = guide
        self.transports = dict(transports)
        self._measured: deque[Measured] = deque(maxlen=MEASURED_MAX)
        self._telling: set[asyncio.Task[None]] = set()
        self._guesses = Guesses()
        self._confirming: set[asyncio.Task[None]] = set()

    @property
    def ranged(self) -> bool:
        """Whether the best transport can read parts: the others are for nodes that do not have it."""
        return next((transport.ranged for transport in self.transports.values()), False)

    def __repr__(self) -> str:
        return f"<Peers of {self.node} by {', '.join(self.transports)}>"

    async def offers(self, space: Space, keys: U8, exclude: frozenset[str], deadline: float, *, peek: bool) -> list[Offer]:
        """See `umbp.pool.sources.Source`."""
        namespace = space.digest.hex()
        without = [self.node, *(each.removeprefix(PLACE) for each in exclude if each.startswith(PLACE))]
        if self._telling:  # that a node failed must be known before it is asked who else there is
            await asyncio.wait(self._telling, timeout=max(0.0, deadline - time.monotonic()) / 2)
        which: I64 = np.arange(len(keys))
        guess = None if peek else self._guesses.run_or_none(time.monotonic(), namespace, len(keys))
        if guess is not None and guess.source.node not in without:
            return [self._offer(guess, which, Guessed(guess, keys, without))]
        offers: list[Offer] = []
        for number in range(HOLES_MAX):
            # A plan counts the use of all its keys: one more behind a hole, or instead of who failed, is no more.
            again = number > 0 or len(without) > 1
            plan = await self.guide.plan(namespace, keys[which], without, deadline, count=not peek, again=again)
            self._guesses.planned(time.monotonic(), namespace, len(which), plan)
            offers += self._offers(plan, which)
            which = which[plan.pages + 1 :]  # the one after the plan's last is nobody's
            if len(which):
                which = which[await self.guide.held(namespace, keys[which], deadline)]
            if not len(which):
                break
        return offers

    async def read(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64, deadline: float, came: Came) -> Taken:
        """See `umbp.pool.sources.Source`."""
        run, guessed = _run_of(offer)
        began, some = time.monotonic(), False

        def note(which: I64, sums: U64) -> None:
            nonlocal some
            some = True
            came(which, sums)

        try:
            with self._blaming(run.source.node, space, lambda: some, deadline):
                transport, peer = self._way(run.source)
                moved = await transport.read(peer, space.digest.hex(), space.object_bytes, keys, data, offsets, deadline, note)
        finally:
            if guessed is not None:
                self._confirm(space.digest.hex(), guessed)
        self._learn(space, run, moved.status, moved.size_bytes, time.monotonic() - began)
        return Taken(moved.status, moved.sums, verified=True)

    async def begin(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64) -> PeerReading:
        """See `umbp.pool.sources.Ranged`."""
        run, guessed = _run_of(offer)

        def told(status: U8, size_bytes: int, seconds: float) -> None:
            self._learn(space, run, status, size_bytes, seconds)

        def over() -> None:
            if guessed is not None:
                self._confirm(space.digest.hex(), guessed)

        transport, peer = self._way(run.source)
        reading = PeerReading(
            transport,
            peer,
            space,
            keys,
            data,
            offsets,
            pages_max=max(1, READ_BYTES_MAX // space.object_bytes),  # the peer leases all of a page
            blamed=lambda until: self._blaming(run.source.node, space, lambda: reading.some, until),
            told=told,
            over=over,
        )
        return reading

    def guess_or_none(self, space: Space, keys: U8, *, again: bool) -> Offer | None:
        """What `offers` would answer without asking anybody, if it knows so much. ``again``: the use of these keys was counted."""
        namespace = space.digest.hex()
        guess = None if self._telling else self._guesses.run_or_none(time.monotonic(), namespace, len(keys))
        if guess is None or guess.source.node == self.node:
            return None
        return self._offer(guess, np.arange(len(keys)), Guessed(guess, keys, [self.node], again))

    def way_or_none(self, offer: Offer) -> tuple[HttpTransport, Peer] | None:
        """How pages of an offer come by a connection that can be handed to who receives them; None if they come by other ways."""
        with contextlib.suppress(Unavailable):
            transport, peer = self._way(_run_of(offer)[0].source)
            if type(transport) is HttpTransport:
                return transport, peer
        return None

    def received(self, space: Space, offer: Offer, status: U8, size_bytes: int, seconds: float, why: str) -> None:
        """A client has received these pages of an offer, or not; ``why``: what the peer did wrong, if anything."""
        run, guessed = _run_of(offer)
        if why:
            self._tell(run.source.node, why)
            self._guesses.wrong(space.digest.hex())
        self._learn(space, run, status, size_bytes, seconds)
        if guessed is not None:
            self._confirm(space.digest.hex(), guessed)

    def take_measured(self) -> list[Measured]:
        """What was measured since this was asked last."""
        measured = list(self._measured)
        self._measured.clear()
        return measured

    async def close(self) -> None:
        """See `umbp.pool.sources.Source`."""
        tasks = [*self._telling, *self._confirming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in self.transports.values():
            await transport.close()
        await self.guide.close()

    # -- steps of it -------------------------------------------------------------------------------------------------------------------

    def _offers(self, plan: plans.Plan, which: I64) -> list[Offer]:
        """The runs of other nodes. ``which``: the caller's indices of the keys that were asked about."""
        return [self._offer(run, which[run.start : run.stop], run) for run in plan.runs if run.source.node != self.node]

    def _offer(self, run: plans.Run, which: I64, handle: plans.Run | Guessed) -> Offer:
        """Of these pages, by the way that `_way` takes. In parts only out of DRAM: from its SSD the node must have all of a page first."""
        way = next((transport for name, transport in self.transports.items() if name in run.source.addresses), None)
        ranged = way is not None and way.ranged and run.tier == Tier.DRAM
        return Offer(PLACE + run.source.node, Tier.REMOTE, which, run.seconds, handle, ranged=ranged)

    @contextlib.contextmanager
    def _blaming(self, node: str, space: Space, some: Callable[[], bool], until: float) -> Generator[None]:
        """Whoever fails inside is told of. ``some``: whether it has brought some of it: then it is slow if it is late, and not gone.

        Nor is it to blame if there was hardly any time ``until`` then: one client in a hurry would have the whole cluster avoid it.
        """
        hurried = until - time.monotonic() < SUSPECT_FROM_SECONDS
        try:
            yield
        except (UmbpError, OSError, TimeoutError) as error:
            if not (isinstance(error, TimeoutError) and (hurried or some())):
                self._tell(node, f"{type(error).__name__}: {error}")
            self._guesses.wrong(space.digest.hex())
            raise

    def _learn(self, space: Space, run: plans.Run, status: U8, size_bytes: int, seconds: float) -> None:
        """What came of one order."""
        if (status == ReadStatus.MISS).any():
            self._guesses.wrong(space.digest.hex())
        if size_bytes and (status == ReadStatus.HIT).all():
            self._measured.append(Measured(run.source.node, run.tier, size_bytes, seconds))

    def _confirm(self, namespace: str, guessed: Guessed) -> None:
        """Ask the master for the plan that was guessed, without waiting for it: it counts the use, and the next guess is its answer."""
        if guessed.confirmed:
            return
        guessed.confirmed = True

        async def confirm() -> None:
            keys, until = guessed.keys, time.monotonic() + TELL_SECONDS_MAX
            try:
                plan = await self.guide.plan(namespace, keys, guessed.without, until, count=True)
            except (UmbpError, OSError, TimeoutError):
                self._guesses.wrong(namespace)  # who asks next finds out, and does without the master for a while
            else:
                self._guesses.planned(time.monotonic(), namespace, len(keys), plan)

        task = asyncio.get_running_loop().create_task(confirm())
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)

    def _way(self, source: plans.Source) -> tuple[Transport, Peer]:
        """The best transport that both have. Unavailable if there is none."""
        for name, transport in self.transports.items():
            if (text := source.addresses.get(name)) is not None:
                try:
                    return transport, Peer(source.node, source.boot, parse_address(text))
                except ConfigError as error:
                    raise Unavailable(f"{source.node} says that it is at {error}") from None
        raise Unavailable(f"{source.node} is reached by {', '.join(source.addresses)}, this node has {', '.join(self.transports)}")

    def _tell(self, node: str, why: str) -> None:
        """Let the master know, without waiting for it."""

        async def tell() -> None:
            with contextlib.suppress(UmbpError, OSError, TimeoutError):
                async with asyncio.timeout(TELL_SECONDS_MAX):
                    await self.guide.failed(node, why)

        task = asyncio.get_running_loop().create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _run_of(offer: Offer) -> tuple[plans.Run, Guessed | None]:
    """Of which run an offer is, and whether that was guessed."""
    guessed = offer.handle if isinstance(offer.handle, Guessed) else None
    run = guessed.run if guessed is not None else offer.handle
    assert isinstance(run, plans.Run)
    return run, guessed
