"""Feeds a master with what engines say of their own caches: KV events in, ``/v1/external`` out. `python -m umbp.integrations.kv_feed`.

Theory of operation
-------------------
An engine's event names blocks by 64 bits, the directory by page keys of 32 bytes. A stored block comes with its tokens and its parent, so
the key is made again from them (`Chains`) and held against the 64 bits: a chain that started from something else (a salt, a LoRA) does not
match, and is left out and counted, since its key cannot be known from outside. Blocks without tokens (lower tiers) are those of a hash that
was seen with them.

What the engine holds is kept as a state per tier, and changes go out in pieces. Whatever puts the state in doubt (a gap in the numbers that
no replay fills, a number that starts again, a master that does not answer) ends in the same way: the tier is cleared there and told anew.
It is told anew every `REFRESH_SECONDS` too, as a master that restarted has forgotten it.

An engine that dies, or stands still, holds nothing that a router should send anyone to: when its connection ends, or it does not answer
for `ENGINE_SECONDS_MAX`, all of it is cleared. When it is back, or was only cut off, its replay or its next events tell what it has.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from umbp.client.http import PoolHttp
from umbp.errors import InvalidRequest, UmbpError

log = logging.getLogger("umbp.integrations.kv_feed")
TIERS = {None: "hbm", "GPU": "hbm", "CPU": "host", "CPU_PINNED": "host"}
BLOCKS_MAX = 1 << 18  # known by their hash; an engine's own caches hold fewer
KEYS_A_POST = 8192
FLUSH_SECONDS = 0.05
REFRESH_SECONDS = 60.0
RETRY_SECONDS = (0.2, 5.0)  # after the master did not answer: first, longest
REPLAY_SECONDS = 2.0
ENGINE_SECONDS_MAX = 10.0
ASK_SECONDS = 2.0  # how often an engine is asked whether it is there, by the transport itself


class Chains:
    """Block hashes and the page keys that they are the first 8 bytes of. ``unknown`` blocks could not be named."""

    def __init__(self) -> None:
        self.known: OrderedDict[int, bytes] = OrderedDict()
        self.unknown = 0

    def stored(self, hashes: list[int], parent: int | None, tokens: list[int], block_tokens: int) -> list[bytes]:
        """The keys of these blocks, as far as they can be named; blocks follow each other."""
        before = b"" if parent is None else self.known.get(parent)
        found = []
        for number, block in enumerate(hashes):
            part = tokens[number * block_tokens : (number + 1) * block_tokens]
            key = self.known.get(block)
            if key is None and before is not None and len(part) == block_tokens > 0:
                made = _key_of(before, part)
                key = made if int.from_bytes(made[:8], "big", signed=True) == block else None
            if key is None:
                self.unknown += 1
            else:
                self.known[block] = key
                self.known.move_to_end(block)
                found.append(key)
            before = key
        while len(self.known) > BLOCKS_MAX:
            self.known.popitem(last=False)
        return found

    def named(self, hashes: list[int]) -> list[bytes]:
        """The keys of blocks that were stored before."""
        return [self.known[block] for block in hashes if block in self.known]


class Holdings:
    """What an engine holds in each tier, and what of it the master has not been told."""

    def __init__(self) -> None:
        self.chains = Chains()
        self.held: dict[str, set[bytes]] = {tier: set() for tier in ("hbm", "host")}
        self.changed: dict[str, dict[bytes, bool]] = {tier: {} for tier in self.held}
        self.doubtful = True  # at first: an engine of this name may have reported before

    def apply(self, events: Iterable[Any]) -> None:
        """Events of a batch, in order, as decoded: maps with their ``type``, or lists that begin with it."""
        for event in events:
            kind, field = _reader(event)
            tier = TIERS.get(field("medium", 6 if kind == "BlockStored" else 2))
            if kind == "AllBlocksCleared":
                self.clear()
            elif tier is not None and kind == "BlockStored":
                tokens, size = field("token_ids", 3) or [], field("block_size", 4) or 0
                for key in self.chains.stored(_numbers(field("block_hashes", 1)), field("parent_block_hash", 2), tokens, size):
                    self.held[tier].add(key)
                    self.changed[tier][key] = True
            elif tier is not None and kind == "BlockRemoved":
                for key in self.chains.named(_numbers(field("block_hashes", 1))):
                    self.held[tier].discard(key)
                    self.changed[tier][key] = False

    def clear(self) -> None:
        """The engine holds nothing, or nobody knows what."""
        for tier in self.held:
            self.held[tier].clear()
        self.doubtful = True

    def reports(self) -> list[dict[str, Any]]:
        """What is to be posted, in order; `told` once it was."""
        found: list[dict[str, Any]] = []
        for tier, held in self.held.items():
            if self.doubtful:
                add, remove, first = sorted(held), [], True
            else:
                add = [key for key, present in self.changed[tier].items() if present]
                remove, first = [key for key, present in self.changed[tier].items() if not present], False
            for start in range(0, max(len(add), len(remove), int(first)), KEYS_A_POST):
                part = slice(start, start + KEYS_A_POST)
                found.append({"tier": tier, "clear": first, "remove": _hex(remove[part]), "add": _hex(add[part])})
                first = False
        return found

    def told(self) -> None:
        """The master knows all of it."""
        self.doubtful = False
        for changed in self.changed.values():
            changed.clear()


def _reader(event: Any) -> tuple[str, Any]:
    if isinstance(event, dict):
        return str(event.get("type")), lambda name, _: event.get(name)
    return str(event[0]), lambda _, index: event[index] if index < len(event) else None


def _key_of(before: bytes, tokens: list[int]) -> bytes:
    """The page key of these tokens; "" where one of them is no 32-bit number, as no key is made of such."""
    try:
        return hashlib.sha256(before + np.asarray(tokens, "<u4").tobytes()).digest()
    except (OverflowError, TypeError, ValueError):
        return b""


def _numbers(values: Any) -> list[int]:
    return [value for value in values or () if isinstance(value, int)]


def _hex(keys: list[bytes]) -> list[str]:
    return [key.hex() for key in keys]


@dataclass(frozen=True, slots=True)
class Source:
    """One engine's events: where they are published, and who it is to the master. ``namespace``: digest of its pages' namespace, in hex."""

    endpoint: str
    engine: str
    node: str
    namespace: str
    replay: str | None = None
    topic: str = ""
    page_bytes: int = 0


class Feed:
    """Carries one engine's events to a master, in a thread, until closed."""

    def __init__(self, source: Source, master: str, *, token: str = "", refresh_seconds: float = REFRESH_SECONDS) -> None:
        import zmq

        self._zmq = zmq
        self.source = source
        self.holdings = Holdings()
        self.gaps = self.posts = self.unread = self.lost = 0
        self._refresh_seconds = refresh_seconds
        self._http = PoolHttp(master, token)
        self._next: int | None = None
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(ASK_SECONDS * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(ENGINE_SECONDS_MAX * 1000))
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._connect(self._socket, source.endpoint, "events", "tcp://127.0.0.1:5557")
            if source.replay is not None:
                with self._context.socket(zmq.DEALER) as probe:
                    self._connect(probe, source.replay, "replay", "tcp://127.0.0.1:5558")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._work, name="umbp-feed", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        held = {tier: len(keys) for tier, keys in self.holdings.held.items()}
        return f"<Feed of {self.source.engine} to {self._http.address}: {held}, {self.gaps} gaps, {self.unread} unread>"

    def _connect(self, socket: Any, endpoint: str, field: str, example: str) -> None:
        """Name a socket's other end, which need not be there. InvalidRequest if no address can be such."""
        try:
            socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise InvalidRequest(f"{endpoint!r} is no endpoint: {error}", field=field, example=example) from error

    def wait(self) -> None:
        """Until it is closed."""
        self._stop.wait()

    def close(self) -> None:
        """End it. What the master was told stays until the engine's node leaves, or another feed of this name begins."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _work(self) -> None:
        pause, retry_at, refresh_at = RETRY_SECONDS[0], 0.0, time.monotonic() + self._refresh_seconds
        while not self._stop.is_set():
            try:
                flush_at = time.monotonic() + FLUSH_SECONDS
                while (left := flush_at - time.monotonic()) > 0 and self._socket.poll(max(1, int(left * 1000))):
                    self._take(*self._socket.recv_multipart()[-2:])
                self._watch()
                now = time.monotonic()
                if now >= refresh_at:
                    self.holdings.doubtful = True
                    refresh_at = now + self._refresh_seconds
                if now >= retry_at and (reports := self.holdings.reports()):
                    self._post(reports)
                    pause = RETRY_SECONDS[0]
            except UmbpError as error:
                log.warning("the master did not take the report: %s", error)
                self.holdings.doubtful = True
                retry_at, pause = time.monotonic() + pause, min(pause * 2, RETRY_SECONDS[1])
            except (ArithmeticError, AttributeError, ValueError, TypeError, LookupError, msgspec.DecodeError) as error:
                log.warning("a message that is no batch of events: %s", error)
                self.unread += 1
                self.holdings.clear()
            except self._zmq.ZMQError as error:
                log.warning("the engine's events could not be received: %s", error)
                self.gaps += 1
                self.holdings.clear()
                self._stop.wait(RETRY_SECONDS[0])

    def _watch(self) -> None:
        """See whether the engine is still there. What it sent last has been read."""
        while self._ends.poll(0):
            self._ends.recv_multipart()
            log.warning("the connection to %s has ended: what it held is forgotten", self.source.engine)
            self.lost += 1
            self._next = None
            self.holdings.clear()

    def _take(self, number_bytes: bytes, payload: bytes) -> None:
        number = int.from_bytes(number_bytes, "big")
        if self._next is not None and number != self._next:
            self._missed(self._next, number)
        elif self._next is None and number:
            self._missed(0, number)
        self._next = number + 1
        self.holdings.apply(msgspec.msgpack.decode(payload)[1])

    def _missed(self, first: int, until: int) -> None:
        """Ask for what was missed; forget all if it cannot be had whole."""
        batches = self._replayed(first) if until > first else {}
        wanted = range(first, until)
        if until > first and all(number in batches for number in wanted):
            for number in wanted:
                self.holdings.apply(msgspec.msgpack.decode(batches[number])[1])
            return
        self.gaps += 1
        log.warning("events %d to %d of %s were missed: what it holds is told anew as it is heard of", first, until - 1, self.source.engine)
        self.holdings.clear()

    def _replayed(self, first: int) -> dict[int, bytes]:
        """Batches from a number on, as far as the engine has them and answers in time."""
        found: dict[int, bytes] = {}
        if self.source.replay is None:
            return found
        socket = self._context.socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.LINGER, 0)
        try:
            socket.connect(self.source.replay)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            give_up = time.monotonic() + REPLAY_SECONDS
            while (left := give_up - time.monotonic()) > 0 and socket.poll(max(1, int(left * 1000))):
                number, payload = socket.recv_multipart()[-2:]
                if not payload:
                    break
                found[int.from_bytes(number, "big")] = payload
        finally:
            socket.close()
        return found

    def _post(self, reports: list[dict[str, Any]]) -> None:
        source = self.source
        who = {"engine": source.engine, "node": source.node, "namespace": source.namespace, "page_bytes": source.page_bytes}
        for report in reports:
            self._http.post("/v1/external", who | report)
            self.posts += 1
        self.holdings.told()


def main() -> None:
    """Run one feed."""
    parser = argparse.ArgumentParser(prog="python -m umbp.integrations.kv_feed", description="An engine's own KV events to a UMBP master.")
    parser.add_argument("--events", required=True, metavar="tcp://127.0.0.1:5557", help="where the engine publishes (--kv-events-config)")
    parser.add_argument("--replay", metavar="tcp://127.0.0.1:5558", help="its replay endpoint")
    parser.add_argument("--topic", default="", help="its topic")
    parser.add_argument("--to", required=True, metavar="http://127.0.0.1:7070", help="the master")
    parser.add_argument("--token-file", metavar="FILE", help="the master's token")
    parser.add_argument("--engine", required=True, metavar="node7-a.0", help="the engine's name")
    parser.add_argument("--node", required=True, metavar="node7-a", help="the pool's name on its node")
    parser.add_argument("--namespace", required=True, metavar="DIGEST", help="of its pages, as the linker logs it at its start")
    parser.add_argument("--page-bytes", type=int, default=0, metavar="BYTES", help="of one page, where known")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    token = Path(options.token_file).read_text().strip() if options.token_file else ""
    source = Source(options.events, options.engine, options.node, options.namespace, options.replay, options.topic, options.page_bytes)
    try:
        feed = Feed(source, options.to, token=token)
    except UmbpError as error:
        parser.error(str(error))
    log.info("%s publishes on %s; what it says goes to %s", source.engine, source.endpoint, options.to)
    try:
        feed.wait()
    except KeyboardInterrupt:
        feed.close()


if __name__ == "__main__":
    main()
