"""What several masters share: a log of every change, in Redis or Valkey, that each of them applies.

Theory of operation
-------------------
Every master has the whole directory in its own memory and answers questions from it, without a call. What changes it (registrations,
heartbeats, events, pieces, deaths ...) is entered in one Redis stream before it is applied and answered; every master reads the stream and
applies what the others entered. So any master answers for any pool, and a pool whose master is gone goes on with the next one in the middle
of its numbering. Per node the order is that of the log; between nodes there is none to keep.

    umbp:log            stream of changes, the last `LOG_BYTES` of them    umbp:members         node -> registration and what it joined with
    umbp:registrations  the last number given out                           umbp:active          who sweeps, for `ACTIVE_SECONDS`
    umbp:masters        URL -> when it was last there                       umbp:decisions       what operators decided: policies, drains

One master is *active*: it alone declares nodes dead and gives advice, which goes through the log to nodes that speak to another one
(`umbp.master.relay`). It holds a key that expires; when it dies another one takes the key, in `ACTIVE_SECONDS` at the most, and gives every
node its time anew. What each was asked to route it tells the others once a second (`umbp.core.uses`), so the active one advises on what
the whole cluster asks for, whichever master that is asked at.

A master that starts, or that has fallen behind what the log keeps (it was stopped, or the store was emptied), takes members and decisions
from their tables and asks the nodes (by the log, through the masters they speak to) for resyncs. It serves what it has heard until then;
the others are not disturbed, since a resync is never worse than what was before. Once in `RECONCILE_SECONDS` every master compares its
members and policies with the tables.

Without the store (gone, frozen, full) nothing new is entered: events are refused for the time (pools keep them, and send all again if it
takes long), nobody is suspected or declared dead (of the time since the log was `heard` last nothing is known), and all masters go on
answering from memory, heartbeats too. The first call that fails says so for all; `attend` alone tries again, twice a second. Nothing of a
page's truth is in Redis: it can be emptied, and all is sent again; decisions are put back by whichever master still knows them.

Of a store with a memory limit the log takes a quarter at the most; where others fill it, the log is cut so that it can go on.

Cost: an entry of 4,096 keys is 140 KB and one round trip; a route costs nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from umbp.core.uses import Lot
from umbp.errors import ConfigError, Unavailable

log = logging.getLogger("umbp.master.shared")
LOG_BYTES = 128 << 20  # some 30 s of 64 busy nodes: how long a master may be stopped and miss nothing
LOG_ENTRIES_MIN, LOG_ENTRIES_MAX = 1024, 65_536
ENTRY_BYTES = 200  # of an entry beside its payload
ACTIVE_SECONDS = 2.0
RECONCILE_SECONDS = 5.0
CALL_SECONDS_MAX = 2.0
MASTER_SECONDS = 5.0  # a master that has not said so for this long is not named to pools
READ_ENTRIES = 32
DECIDED = ("swap", "drain")  # kinds of entries that are in the table of decisions too
_ACTIVATE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


# Numbers only grow, also when the store was emptied: from microseconds of its clock on.
_REGISTER = """
local time = redis.call('TIME')
local number = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[1], string.format('%.0f', number))
return string.format('%.0f', number)
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
        self._names = {name: f"{prefix}:{name}" for name in ("log", "members", "registrations", "active", "masters", "decisions")}
        import redis.asyncio as redis  # a tenth of the start of every pool and master, of which few have such a store

        self._failed = redis.RedisError
        try:
            self._redis: redis.Redis = redis.Redis.from_url(
                address, socket_timeout=CALL_SECONDS_MAX, socket_connect_timeout=CALL_SECONDS_MAX, max_connections=64
            )
        except ValueError as error:
            raise ConfigError(str(error), field="store", example="redis://10.0.0.1:6379/0") from None
        self.heard: float | None = time.monotonic()  # the log was read last
        self.behind = False  # entries have gone that were not read
        self._up = asyncio.Event()  # the last `attend` went well, and nothing has failed since
        self._decisions: dict[tuple[str, str], str] = {}  # as far as this master has heard of them
        self._position: bytes = b"0-0"
        self._doubtful = False  # the store was away: it may have been emptied
        self._log_bytes, self._entry_bytes = LOG_BYTES, 4096.0
        self._moved = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SharedLog {'active' if self.active else 'standing by'}{', ' + self.trouble if self.trouble else ''}>"

    # -- writing -----------------------------------------------------------------------------------------------------------------------

    async def register(self, node: str, join: bytes, *, draining: bool) -> int:
        """See `Store`."""
        self._check_up()
        number = int(await self._call(self._redis.eval(_REGISTER, 1, self._names["registrations"])))
        record = msgspec.json.encode(MemberRecord(number, msgspec.Raw(join)))
        async with self._redis.pipeline(transaction=True) as together:
            together.hset(self._names["members"], node, record)
            if draining:
                together.hset(self._names["decisions"], f"drain:{node}", b"1")
            self._add(together, "join", node, record)
            await self._call(together.execute())
        return number

    async def enter(self, kind: str, node: str, payload: bytes, *, seconds: float | None = None) -> None:
        """See `Store`."""
        self._check_up()
        async with self._redis.pipeline(transaction=False) as together:
            self._add(together, kind, node, payload)
            await self._call(together.execute(), seconds or CALL_SECONDS_MAX)

    async def decide(self, kind: str, name: str, value: bytes) -> None:
        """See `Store`. Who decides is a person or a script of one: a moment is waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_SECONDS_MAX):
                await self._up.wait()
        self._check_up()
        async with self._redis.pipeline(transaction=True) as together:
            together.hset(self._names["decisions"], f"{kind}:{name}", value)
            self._add(together, kind, name, value)
            await self._call(together.execute())
        self._decisions[kind, name] = value.decode()

    async def gone(self, node: str, registration: int) -> None:
        """See `Store`."""
        self._check_up()
        async with self._redis.pipeline(transaction=True) as together:
            together.hdel(self._names["members"], node)
            self._add(together, "dead", node, str(registration).encode())
            await self._call(together.execute())

    def _add(self, together: Any, kind: str, node: str, payload: bytes) -> None:
        fields = {"k": kind, "n": node, "p": payload, "m": self.id}
        self._weigh(payload)
        entries = int(self._log_bytes / self._entry_bytes)
        together.xadd(self._names["log"], fields, maxlen=max(LOG_ENTRIES_MIN, min(LOG_ENTRIES_MAX, entries)), approximate=True)

    def _weigh(self, payload: bytes) -> None:
        self._entry_bytes += (len(payload) + ENTRY_BYTES - self._entry_bytes) / 64

    def _check_up(self) -> None:
        if not self._up.is_set():
            raise Unavailable(self.trouble or "the store cannot be reached")

    # -- reading -----------------------------------------------------------------------------------------------------------------------

    async def begin(self) -> dict[str, MemberRecord]:
        """Where the log is now, and the members as of then or a little later. Unavailable if the store cannot be reached."""
        memory = await self._call(self._redis.info("memory"))
        if limit := int(memory.get("maxmemory", 0)):
            self._log_bytes = min(LOG_BYTES, limit // 4)
        last = await self._call(self._redis.xrevrange(self._names["log"], count=1))
        self._position = last[0][0] if last else b"0-0"
        self.behind = self._doubtful = False
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

    async def decisions(self) -> dict[tuple[str, str], str]:
        """(kind, name) -> value of what operators decided. What the table does not know any more, but this master, is put back."""
        rows = await self._call(self._redis.hgetall(self._names["decisions"]))
        split = [(name.decode().partition(":"), value.decode()) for name, value in rows.items()]
        found = {(kind, name): value for (kind, _, name), value in split}
        for kind, name in self._decisions.keys() - found.keys():  # unless somebody decides or knows otherwise at this moment
            await self._call(self._redis.hsetnx(self._names["decisions"], f"{kind}:{name}", self._decisions[kind, name]))
        self._decisions |= found
        return found

    async def read(self, apply: Callable[[Entry], Awaitable[None]], *, block_ms: int) -> int:
        """Apply what others have entered since the last call, waiting that long for something; how many entries there were.

        ``behind`` is set if some were gone before they were read.
        """
        streams: dict[Any, Any] = {self._names["log"]: self._position}
        try:
            answer = await self._call(self._redis.xread(streams, count=READ_ENTRIES, block=block_ms or None))
            self.heard = time.monotonic()
            entries = answer[0][1] if answer else []
            if len(entries) == READ_ENTRIES or (self._doubtful and entries):  # it is only then that some can be gone
                first = await self._call(self._redis.xrange(self._names["log"], count=1))
                self.behind |= self._position != b"0-0" and bool(first) and _order(first[0][0]) > _order(self._position)
                self._doubtful = False
        except Unavailable:
            self._doubtful = True
            raise
        for position, fields in entries:
            self._weigh(fields[b"p"])
            if fields.get(b"m") != self.id.encode():
                entry = Entry(fields[b"k"].decode(), fields[b"n"].decode(), fields[b"p"])
                if entry.kind in DECIDED:
                    self._decisions[entry.kind, entry.node] = entry.payload.decode("utf-8", "replace")
                await apply(entry)
            self._position = position
        self._moved.set()
        return len(entries)

    async def catch_up(self, seconds: float) -> None:
        """Until all that is in the log now has been read (by `read`, which goes on meanwhile), or the time is over."""
        self._check_up()
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
            self.active, self.trouble = bool(held), ""
            self._up.set()
        except Unavailable as error:
            self.active = False  # whoever else can reach it may be by now
            if "maxmemory" in str(error):  # an entry would cut the log, but is refused
                entries = await self._call(self._redis.xlen(self._names["log"]))
                await self._call(self._redis.xtrim(self._names["log"], maxlen=entries // 2, approximate=False))
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

    async def _call(self, what: Any, seconds: float = CALL_SECONDS_MAX) -> Any:
        try:
            async with asyncio.timeout(seconds):
                answer = await what
        except (self._failed, OSError, TimeoutError) as error:
            _heed_cancellation()
            if isinstance(error, TimeoutError) and seconds < CALL_SECONDS_MAX:  # it may only have been late
                raise Unavailable(f"the store did not answer within {seconds:g} s") from None
            self._up.clear()
            self.trouble = f"the store cannot be reached: {str(error) or type(error).__name__}"
            raise Unavailable(self.trouble) from None
        _heed_cancellation()
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


def encode_uses(weight: float, lots: list[Lot]) -> bytes:
    """What a master was asked, as it stands in the log."""
    return msgspec.msgpack.encode((weight, [(lot.digest, lot.words.tobytes()) for lot in lots]))


def decode_uses(payload: bytes) -> tuple[float, list[Lot]]:
    """How many questions each one stands for, and the questions."""
    weight, rows = msgspec.msgpack.decode(payload, type=tuple[float, list[tuple[bytes, bytes]]])
    return weight, [Lot(digest, np.frombuffer(words, np.uint64).reshape(-1, 4), 0.0) for digest, words in rows]
