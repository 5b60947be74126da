"""What several masters share: a log of every change, in Redis or Valkey, that each of them applies.

Theory of operation
-------------------
Every master has the whole directory in its own memory and answers questions from it, without a call. What changes it (registrations,
heartbeats, events, pieces, deaths ...) is entered in one Redis stream before it is applied and answered; every master reads the stream and
applies what the others entered. So any master answers for any pool, and a pool whose master is gone goes on with the next one in the middle
of its numbering. Per node the order is that of the log; between nodes there is none to keep.

    umbp:log            stream of changes, the last `LOG_ENTRIES`          umbp:members         node -> registration and what it joined with
    umbp:registrations  the last number given out                           umbp:active          who sweeps, for `ACTIVE_SECONDS`
    umbp:masters        URL -> when it was last there

One master is *active*: it alone declares nodes dead and gives advice, which goes through the log to nodes that speak to another one
(`umbp.master.relay`). It holds a key that expires; when it dies another one takes the key, in `ACTIVE_SECONDS` at the most, and gives every
node its time anew. Heat is each master's own, of the routes that it was asked for.

A master that starts, or that has fallen behind what the log keeps, takes the members from their table and asks them (by the log, through
the masters they speak to) for resyncs. It serves what it has heard until then; the others are not disturbed, since a resync is never worse
than what was before. Once in `RECONCILE_SECONDS` every master compares its members with the table.

Without the store nothing new is entered: events are refused for the time (pools keep them, and send all again if it takes long), nobody is
declared dead, and all masters go on answering from memory. Nothing of a page's truth is in Redis: it can be emptied, and all is sent again.

Cost: an entry of 4,096 keys is 140 KB and one round trip; a route costs nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from umbp.errors import ConfigError, Unavailable

log = logging.getLogger("umbp.master.shared")
LOG_ENTRIES = 1024
ACTIVE_SECONDS = 2.0
RECONCILE_SECONDS = 5.0
CALL_SECONDS_MAX = 2.0
MASTER_SECONDS = 5.0  # a master that has not said so for this long is not named to pools
READ_ENTRIES = 32
_ACTIVATE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class MemberRecord(msgspec.Struct, frozen=True):
    """A row of the table of members: registration and the `umbp.master.protocol.Join` it came with, as JSON."""

    registration: int
    join: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: its kind, whom it is about, and its content."""

    kind: str
    node: str
    payload: bytes


class SharedLog:
    """The store of several masters. ``url`` of this master is told to the others; ``apply`` is given what they entered, in order."""

    shared = True

    def __init__(self, address: str, url: Callable[[], str], prefix: str = "umbp") -> None:
        self.id = secrets.token_hex(8)
        self.active = False
        self.trouble = "not connected yet"
        self.masters: list[str] = []
        self._url = url
        self._names = {name: f"{prefix}:{name}" for name in ("log", "members", "registrations", "active", "masters")}
        import redis.asyncio as redis  # a tenth of the start of every pool and master, of which few have such a store

        self._failed = redis.RedisError
        try:
            self._redis: redis.Redis = redis.Redis.from_url(
                address, socket_timeout=CALL_SECONDS_MAX, socket_connect_timeout=CALL_SECONDS_MAX, max_connections=64
            )
        except ValueError as error:
            raise ConfigError(str(error), field="store", example="redis://10.0.0.1:6379/0") from None
        self._position: bytes = b"0-0"
        self._moved = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SharedLog {'active' if self.active else 'standing by'}{', ' + self.trouble if self.trouble else ''}>"

    # -- writing -----------------------------------------------------------------------------------------------------------------------

    async def register(self, node: str, join: bytes) -> int:
        """See `Store`."""
        number = int(await self._call(self._redis.incr(self._names["registrations"])))
        record = msgspec.json.encode(MemberRecord(number, msgspec.Raw(join)))
        async with self._redis.pipeline(transaction=True) as together:
            together.hset(self._names["members"], node, record)
            self._add(together, "join", node, record)
            await self._call(together.execute())
        return number

    async def enter(self, kind: str, node: str, payload: bytes) -> None:
        """See `Store`."""
        async with self._redis.pipeline(transaction=False) as together:
            self._add(together, kind, node, payload)
            await self._call(together.execute())

    async def gone(self, node: str, registration: int) -> None:
        """See `Store`."""
        async with self._redis.pipeline(transaction=True) as together:
            together.hdel(self._names["members"], node)
            self._add(together, "dead", node, str(registration).encode())
            await self._call(together.execute())

    def _add(self, together: Any, kind: str, node: str, payload: bytes) -> None:
        fields = {"k": kind, "n": node, "p": payload, "m": self.id}
        together.xadd(self._names["log"], fields, maxlen=LOG_ENTRIES, approximate=True)

    # -- reading -----------------------------------------------------------------------------------------------------------------------

    async def begin(self) -> dict[str, MemberRecord]:
        """Where the log is now, and the members as of then or a little later. Unavailable if the store cannot be reached."""
        last = await self._call(self._redis.xrevrange(self._names["log"], count=1))
        self._position = last[0][0] if last else b"0-0"
        return await self.members()

    async def members(self) -> dict[str, MemberRecord]:
        """The table of members."""
        rows = await self._call(self._redis.hgetall(self._names["members"]))
        found = {}
        for node, row in rows.items():
            try:
                found[node.decode()] = msgspec.json.decode(row, type=MemberRecord)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.error("a member in the store cannot be read: %s", error)
        return found

    async def read(self, apply: Callable[[Entry], Awaitable[None]], *, block_ms: int) -> int:
        """Apply what others have entered since the last call, waiting that long for something; how many entries there were."""
        streams: dict[Any, Any] = {self._names["log"]: self._position}
        answer = await self._call(self._redis.xread(streams, count=READ_ENTRIES, block=block_ms or None))
        entries = answer[0][1] if answer else []
        for position, fields in entries:
            if fields.get(b"m") != self.id.encode():
                await apply(Entry(fields[b"k"].decode(), fields[b"n"].decode(), fields[b"p"]))
            self._position = position
        self._moved.set()
        return len(entries)

    async def catch_up(self, seconds: float) -> None:
        """Until all that is in the log now has been read (by `read`, which goes on meanwhile), or the time is over."""
        last = await self._call(self._redis.xrevrange(self._names["log"], count=1))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while last and _order(self._position) < _order(last[0][0]):
                    self._moved.clear()
                    await self._moved.wait()

    # -- who is there ------------------------------------------------------------------------------------------------------------------

    async def attend(self) -> bool:
        """Say that this master is here, see who else is, and hold or take the key of the active one; True if it has just become active."""
        was = self.active
        try:
            seconds, _ = await self._call(self._redis.time())
            await self._call(self._redis.zadd(self._names["masters"], {self._url(): seconds}))
            await self._call(self._redis.zremrangebyscore(self._names["masters"], 0, seconds - 60))
            rows = await self._call(self._redis.zrangebyscore(self._names["masters"], seconds - MASTER_SECONDS, "+inf"))
            self.masters = sorted(row.decode() for row in rows)
            held = await self._call(self._redis.eval(_ACTIVATE, 1, self._names["active"], self.id, str(int(ACTIVE_SECONDS * 1000))))
            self.active = bool(held)
        except Unavailable:
            self.active = False  # whoever else can reach it may be by now
            raise
        return self.active and not was

    async def close(self) -> None:
        """Let others become active at once."""
        try:
            if self.active:
                await self._call(self._redis.delete(self._names["active"]))
            await self._call(self._redis.zrem(self._names["masters"], self._url()))
        except Unavailable as error:
            log.info("the store was not told of the stop: %s", error)
        await self._redis.aclose()

    async def _call(self, what: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_SECONDS_MAX):
                answer = await what
        except (self._failed, OSError, TimeoutError) as error:
            _heed_cancellation()
            self.trouble = f"the store cannot be reached: {error or type(error).__name__}"
            raise Unavailable(self.trouble) from None
        _heed_cancellation()
        self.trouble = ""
        return answer


def _heed_cancellation() -> None:
    """The client of Redis may lose a cancellation that comes together with an answer; who is told to stop would then go on for ever."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _order(position: bytes) -> tuple[int, int]:
    """An entry's place in the log."""
    milliseconds, _, number = position.partition(b"-")
    return int(milliseconds), int(number or 0)
