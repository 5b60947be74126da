"""KV events: what a pool holds, told to routers in the format that engines publish in (SGLang's and vLLM's: msgpack over ZMQ).

Theory of operation
-------------------
A message has three parts: topic, sequence number (8 bytes, big-endian), and a batch ``[time, events, data parallel rank]``. An event is a
map with its ``type``: BlockStored, BlockRemoved, AllBlocksCleared. A block's hash is the first 8 bytes of its page key as a signed number,
which is what SGLang publishes for the same block of a request without salt and extra key; its ``medium`` is EXTERNAL. Tokens are left
empty, as vLLM does for what lies below its own cache: a pool keeps digests, and SGLang tells a linker no tokens. A router that goes by
hashes needs none; one that goes by tokens knows them from the engine's event of the same hash.

`Publisher` numbers batches when they are given to it, so that one that had to be dropped (a full queue) shows as a gap; past batches are
kept for those who ask again on the replay socket. `Residents` decides what is worth an event: a page is told once, when it is stored or
first found; and looked up again in the pool in slow rounds, so that what was evicted is told too. What subscribers believe is therefore
right but for the time of a round (`ROUND_SECONDS`, longer for more than `ROUND_PAGES`). What no longer fits its memory is told as removed.

What was there before, and what others store in the same pool, is found by a *survey* of the shared index: the whole of it at the start,
then `SURVEY_ENTRIES` a round, round and round. The index does not say what a page follows, so each is an event of its own without a parent;
when a request finds or stores it, it is told once more, in its place. A survey adds no more than fits the memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from umbp.errors import InvalidRequest
from umbp.grammar import quoted
from umbp.types import I64, KEY_BYTES, U8, Mask

log = logging.getLogger("umbp.integrations.kv_events")
MEDIUM = "EXTERNAL"
QUEUE_BATCHES_MAX = 10_000
REPLAY_BATCHES_MAX = 10_000
NEWS_MAX = 4096  # key lists that wait to be told
PAGES_MAX = 1 << 18  # known to subscribers through us: 40 MB here
ROUND_SECONDS = 1.0
ROUND_PAGES = 8192
SURVEY_ENTRIES = 65_536  # two milliseconds
EVENTS_A_BATCH = 1024
END = (-1).to_bytes(8, "big", signed=True)  # of a replay


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """A tagged map; fields that are None are left out."""


class BlockStored(Event, tag=True, omit_defaults=True):
    """These blocks are there; each follows the one before it, the first follows ``parent_block_hash`` where that is known."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    session_id: str | None = None


class BlockRemoved(Event, tag=True, omit_defaults=True):
    """These blocks are gone."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event, tag=True, omit_defaults=True):
    """All blocks are gone."""


class Batch(msgspec.Struct, array_like=True):
    """What one message says."""

    ts: float
    events: Sequence[Event]
    attn_dp_rank: int | None = None


def hashes_of(keys: U8) -> list[int]:
    """(n, 32) page keys as the block hashes that SGLang publishes."""
    return np.ascontiguousarray(keys[:, :8]).view(">i8").reshape(-1).tolist()


def shifted(endpoint: str, by: int) -> str:
    """The endpoint of another data parallel rank: the port that much higher, or the name with a suffix."""
    if not by:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{by}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise InvalidRequest(f"{quoted(endpoint)} has no port", field="events", example="tcp://*:5560")
    return f"{host}:{int(port) + by}"


class Publisher:
    """A PUB socket on ``endpoint``, and a ROUTER on ``replay``, served by a thread. Batches ``sent`` and ``dropped`` are counted."""

    def __init__(self, endpoint: str, *, rank: int = 0, topic: str = "", replay: str | None = None) -> None:
        import zmq

        self._zmq = zmq
        self.rank = rank
        self.dropped = self.sent = 0
        self._topic = topic.encode()
        self._next = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._past: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES_MAX)
        self._stop = False
        self._change = threading.Condition()
        self._context = zmq.Context()
        try:
            self._socket = self._bound(zmq.PUB, shifted(endpoint, rank))
            self._replay = self._bound(zmq.ROUTER, shifted(replay, rank)) if replay else None
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidRequest(f"{error}: {quoted(endpoint)}", field="events", example="tcp://*:5560") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay is not None else ""
        self._thread = threading.Thread(target=self._work, name="umbp-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Publisher on {self.endpoint}, {self.sent} batches sent, {self.dropped} dropped>"

    def publish(self, *events: Event) -> None:
        """One batch; never waits."""
        payload = msgspec.msgpack.encode(Batch(time.time(), events, self.rank))
        with self._change:
            if len(self._waiting) >= QUEUE_BATCHES_MAX:
                self.dropped += 1
            else:
                self._waiting.append((self._next, payload))
            self._next += 1
            self._change.notify()

    def close(self) -> None:
        """Send what waits, within a second, and end."""
        with self._change:
            self._stop = True
            self._change.notify()
        self._thread.join()
        self._context.destroy(linger=500)

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(QUEUE_BATCHES_MAX)
        socket.bind(endpoint)
        return socket

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._stop, 0.05 if self._replay is not None else None)
                batches = list(self._waiting)
                self._waiting.clear()
                if self._stop and not batches:
                    return
            for number, payload in batches:
                self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
                self._past.append((number, payload))
                self.sent += 1
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)

    def _answer(self, socket: Any) -> None:
        """Whoever asks for a number gets all batches from it on, and an end."""
        frames = socket.recv_multipart()
        if len(frames) < 2 or len(frames[-1]) != 8:
            log.warning("a replay was asked for in %d frames", len(frames))
            return
        wanted = int.from_bytes(frames[-1], "big")
        for number, payload in list(self._past):
            if number >= wanted:
                socket.send_multipart((*frames[:-1], number.to_bytes(8, "big"), payload))
        socket.send_multipart((*frames[:-1], END, b""))


class Residents:
    """The pages that subscribers take to be in the pool.

    ``look``: which of these keys are stored, None if nobody can say now. ``survey``: as `umbp.client.operations.Operations.survey`.
    """

    def __init__(
        self,
        publisher: Publisher,
        look: Callable[[U8], Mask | None],
        survey: Callable[[int, int], tuple[U8, int]],
        block_tokens: int,
        *,
        round_seconds: float = ROUND_SECONDS,
    ) -> None:
        self._publisher = publisher
        self._look = look
        self._survey = survey
        self._surveyed = 0
        self._block_tokens = block_tokens
        self._round_seconds = round_seconds
        self._known: OrderedDict[bytes, bool] = OrderedDict()  # True: it was told in its place, with what it follows
        self._news: deque[tuple[U8, bytes | None, str | None]] = deque(maxlen=NEWS_MAX)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="umbp-residents", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Residents: {len(self._known)} pages told>"

    def there(self, keys: U8, parent: bytes | None = None, session: str | None = None) -> None:
        """These pages, which follow each other, are in the pool. Never waits; where too many wait, the oldest are told when found again."""
        if len(keys):
            self._news.append((keys, parent, session))
            self._wake.set()

    def close(self) -> None:
        """End the thread; the publisher is not ours."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        due, whole = time.monotonic() + self._round_seconds, False
        while not self._stop.is_set():
            if whole:
                self._wake.wait(max(0.0, due - time.monotonic()))
                self._wake.clear()
            try:
                while self._news:
                    self._tell(*self._news.popleft())
                if not whole:
                    whole = self._look_through()
                elif time.monotonic() >= due:
                    self._look_through()
                    self._round()
                    due = time.monotonic() + self._round_seconds
            except Exception:
                log.exception("events could not be made")

    def _tell(self, keys: U8, parent: bytes | None, session: str | None) -> None:
        """An event for each run of pages that is news."""
        texts = [key.tobytes() for key in keys]
        news = np.array([not self._known.get(text, False) for text in texts])
        edges = np.flatnonzero(np.diff(np.concatenate([[False], news, [False]]).astype(np.int8)))
        for low, high in edges.reshape(-1, 2).tolist():
            before = parent if low == 0 else texts[low - 1]
            follows = hashes_of(np.frombuffer(before, np.uint8).reshape(1, -1))[0] if before else None
            stored = BlockStored(hashes_of(keys[low:high]), follows, [], self._block_tokens, None, MEDIUM, session)
            self._publisher.publish(stored)
            self._known.update(dict.fromkeys(texts[low:high], True))
        gone = [self._known.popitem(last=False)[0] for _ in range(len(self._known) - PAGES_MAX)]
        self._forget(gone)

    def _look_through(self) -> bool:
        """Tell of pages in the next part of the index that nobody has told of; whether that was its end."""
        keys, self._surveyed = self._survey(self._surveyed, SURVEY_ENTRIES)
        news = [text for key in keys if (text := key.tobytes()) not in self._known][: max(0, PAGES_MAX - len(self._known))]
        for start in range(0, len(news), EVENTS_A_BATCH):
            part = news[start : start + EVENTS_A_BATCH]
            hashes = hashes_of(np.frombuffer(b"".join(part), np.uint8).reshape(-1, KEY_BYTES))
            self._publisher.publish(*(BlockStored([block], None, [], self._block_tokens, None, MEDIUM) for block in hashes))
        self._known.update(dict.fromkeys(news, False))
        return self._surveyed == 0

    def _round(self) -> None:
        """Look again at those that were not looked at for the longest time."""
        part = [text for text, _ in zip(self._known, range(ROUND_PAGES), strict=False)]
        if not part:
            return
        found = self._look(np.frombuffer(b"".join(part), np.uint8).reshape(-1, KEY_BYTES))
        if found is None:
            return
        which: I64 = np.flatnonzero(~found)
        for text in part:
            self._known.move_to_end(text)
        gone = [part[index] for index in which.tolist()]
        for text in gone:
            del self._known[text]
        self._forget(gone)

    def _forget(self, gone: list[bytes]) -> None:
        if gone:
            self._publisher.publish(BlockRemoved(hashes_of(np.frombuffer(b"".join(gone), np.uint8).reshape(-1, KEY_BYTES)), MEDIUM))


__all__ = ["AllBlocksCleared", "Batch", "BlockRemoved", "BlockStored", "Publisher", "Residents", "hashes_of", "shifted"]
