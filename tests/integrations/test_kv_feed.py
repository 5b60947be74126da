"""An engine's events to a master over real sockets: what the master believes is what the engine holds, after every accident."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, eventually
from tests.masters import free_port
from tests.pools import PoolProcess
from umbp.client.http import PoolHttp
from umbp.errors import InvalidRequest, UmbpError
from umbp.integrations import kv_feed
from umbp.integrations.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Publisher, hashes_of
from umbp.integrations.kv_feed import Chains, Feed, Holdings, Source

pytest.importorskip("zmq", reason="events need pyzmq: pip install 'umbp[events]'")
PAGE = 16
NAMESPACE = "ab" * 32


class Master:
    """Keeps what it is told, tier by tier, as `/v1/external` is documented; refuses where told to."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[str]] = {"hbm": set(), "host": set()}
        self.refuse = False
        self.bodies: list[dict[str, Any]] = []
        master = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = (503, {"state": "starting"}) if master.refuse else (200, master.take(self.path, body))
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def take(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/v1/external"
        assert set(body) == {"engine", "node", "tier", "namespace", "add", "remove", "clear", "page_bytes"}
        assert len(body["add"]) <= 8192
        assert len(body["remove"]) <= 8192
        self.bodies.append(body)
        held = self.tiers[body["tier"]]
        if body["clear"]:
            held.clear()
        held.difference_update(body["remove"])
        held.update(body["add"])
        return {"keys": len(body["add"])}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class World:
    """An engine's publisher, a master, and a feed between them."""

    def __init__(self, *, replay: bool = True, refresh_seconds: float = 60.0) -> None:
        self.master = Master()
        self.publisher = Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")
        again = self.publisher.replay_endpoint if replay else None
        self.source = Source(self.publisher.endpoint, "node7-a.0", "node7-a", NAMESPACE, again)
        self.refresh_seconds = refresh_seconds
        self.feed = self.start()

    def start(self) -> Feed:
        feed = Feed(self.source, self.master.url, refresh_seconds=self.refresh_seconds)
        eventually(lambda: self.probe(feed), "the feed hears")
        return feed

    def probe(self, feed: Feed) -> bool:
        self.publisher.publish()
        return feed._next is not None

    def store(self, number: int, pages: int, medium: str | None = "GPU", *, tokens: bool = True) -> list[str]:
        """A prompt of its own; its keys."""
        words = (np.arange(pages * PAGE) + number * 100_000).tolist()
        keys = umbp.page_keys(words, PAGE)
        self.publisher.publish(BlockStored(hashes_of(keys), None, words if tokens else [], PAGE, None, medium))
        return [key.tobytes().hex() for key in keys]

    def close(self) -> None:
        self.feed.close()
        self.publisher.close()
        self.master.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def hashes(texts: list[str]) -> list[int]:
    return hashes_of(np.frombuffer(bytes.fromhex("".join(texts)), np.uint8).reshape(-1, 32))


def test_stored_and_removed_blocks_are_keys_of_their_tier(world: World) -> None:
    gpu, host = world.store(1, 5), world.store(2, 3, "CPU_PINNED")
    world.store(3, 2, "DISK")
    world.publisher.publish(BlockRemoved(hashes(gpu[3:]), "GPU"), BlockRemoved([12345], "GPU"))
    eventually(lambda: world.master.tiers == {"hbm": set(gpu[:3]), "host": set(host)}, "the master knows")
    body = world.master.bodies[-1]
    assert (body["engine"], body["node"], body["namespace"]) == ("node7-a.0", "node7-a", NAMESPACE)
    world.publisher.publish(AllBlocksCleared())
    eventually(lambda: world.master.tiers == {"hbm": set(), "host": set()}, "all is gone")


def test_a_lower_tier_without_tokens_is_known_by_its_hash(world: World) -> None:
    keys = world.store(1, 4)
    world.store(1, 4, "CPU_PINNED", tokens=False)
    eventually(lambda: world.master.tiers["host"] == set(keys), "the host tier is known")
    world.store(9, 2, "CPU_PINNED", tokens=False)
    eventually(lambda: world.feed.holdings.chains.unknown == 2, "what cannot be named is counted")


def test_a_chain_goes_on_from_its_parent_and_a_salted_one_is_left_out() -> None:
    chains, words = Chains(), list(range(4 * PAGE))
    keys = umbp.page_keys(words, PAGE)
    numbers = hashes_of(keys)
    assert chains.stored(numbers[:2], None, words[: 2 * PAGE], PAGE) == [key.tobytes() for key in keys[:2]]
    assert chains.stored(numbers[2:], numbers[1], words[2 * PAGE :], PAGE) == [key.tobytes() for key in keys[2:]]
    salted = hashes_of(umbp.page_keys(words, PAGE, b"s" * 32))
    assert chains.stored(salted, None, words, PAGE) == []
    assert chains.unknown == 4
    assert chains.stored(salted[1:2], 777, words[:PAGE], PAGE) == []


def test_a_gap_is_filled_by_a_replay(world: World) -> None:
    first = world.store(1, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(first), "it hears")
    world.feed._next = 0  # as if nothing had been heard: what follows is a gap
    second = world.store(2, 2)
    eventually(lambda: world.master.tiers["hbm"] == {*first, *second}, "nothing is lost")
    assert world.feed.gaps == 0


def test_a_gap_without_a_replay_clears_what_is_in_doubt() -> None:
    world = World(replay=False)
    first = world.store(1, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(first), "it hears")
    gaps = world.feed.gaps
    world.feed._next = 1 << 20
    second = world.store(2, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(second), "only what is certain")
    assert world.feed.gaps == gaps + 1
    world.close()


def test_a_master_that_does_not_answer_is_told_all_of_it_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.store(1, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(first) and not world.feed.holdings.doubtful, "it hears, and all is told")
    world.master.refuse = True
    second = world.store(2, 2)
    world.publisher.publish(BlockRemoved(hashes(first[:1]), "GPU"))
    eventually(lambda: world.feed.holdings.doubtful, "a report was refused")
    world.master.tiers["hbm"].clear()  # it restarts meanwhile
    world.master.refuse = False
    eventually(lambda: world.master.tiers["hbm"] == {first[1], *second}, "all of it is told")


def test_a_master_that_forgot_is_told_again() -> None:
    world = World(refresh_seconds=0.2)
    keys = world.store(1, 3)
    eventually(lambda: world.master.tiers["hbm"] == set(keys), "it hears")
    world.master.tiers["hbm"].clear()
    eventually(lambda: world.master.tiers["hbm"] == set(keys), "it is told again")
    world.close()


def test_a_new_feed_begins_with_what_can_be_replayed(world: World) -> None:
    keys = world.store(1, 3)
    world.feed.close()
    world.feed = world.start()
    eventually(lambda: world.master.tiers["hbm"] == set(keys), "the past is asked for")


def test_reports_are_cut_into_pieces_and_begin_with_a_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "KEYS_A_POST", 10)
    holdings, words = Holdings(), list(range(25 * PAGE))
    keys = umbp.page_keys(words, PAGE)
    holdings.apply([["BlockStored", hashes_of(keys), None, words, PAGE, None, "GPU"]])  # the positional form of older engines
    reports = holdings.reports()
    assert [(each["tier"], each["clear"], len(each["add"])) for each in reports] == [
        ("hbm", True, 10),
        ("hbm", False, 10),
        ("hbm", False, 5),
        ("host", True, 0),
    ]
    holdings.told()
    assert holdings.reports() == []
    holdings.apply([{"type": "BlockRemoved", "block_hashes": hashes_of(keys[:3]), "medium": "GPU"}])
    assert [(len(each["add"]), len(each["remove"]), each["clear"]) for each in holdings.reports()] == [(0, 3, False)]
    holdings.apply([{"type": "SomethingNew", "x": 1}])


def test_noise_is_no_end(world: World) -> None:
    keys = world.store(1, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(keys), "it hears")
    with world.publisher._change:
        world.publisher._waiting.append((world.publisher._next, b"\xc1 no msgpack"))
        world.publisher._next += 1
        world.publisher._change.notify()
    more = world.store(2, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(more), "it goes on, with what is certain")


def test_a_real_master_knows_where_pages_are_and_is_told_again_when_it_restarts() -> None:
    with PoolProcess("--http", f"127.0.0.1:{free_port()}", dram="8MiB") as pool:
        publisher = Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")
        source = Source(publisher.endpoint, "engine-7", pool.name, NAMESPACE, publisher.replay_endpoint, page_bytes=1 << 20)
        feed = Feed(source, pool.http)
        words = list(range(6 * PAGE))
        keys = umbp.page_keys(words, PAGE)
        publisher.publish(BlockStored(hashes_of(keys), None, words, PAGE, None, "GPU"))

        def hbm_keys() -> int:
            publisher.publish()  # so that a feed that was late finds that it missed something
            try:
                engines = PoolHttp(pool.http).get("/v1/external")["engines"]
            except UmbpError:
                return -1
            return sum(each["hbm_keys"] for each in engines if each["engine"] == "engine-7")

        eventually(lambda: hbm_keys() == 6, "the master knows all pages")
        publisher.publish(BlockRemoved(hashes_of(keys[4:]), "GPU"))
        eventually(lambda: hbm_keys() == 4, "and what was removed")
        pool.restart()
        assert hbm_keys() == 0
        publisher.publish(BlockRemoved(hashes_of(keys[3:4]), "GPU"))
        eventually(lambda: hbm_keys() in (0, 3), "a change reaches the new one")
        feed.holdings.doubtful = True  # as the next refresh says
        eventually(lambda: hbm_keys() == 3, "all of it is told again")
        feed.close()
        publisher.close()


def _engine(child: Child, endpoint: str) -> None:
    """An engine's publisher that stores two pages when it is told to."""
    publisher = Publisher(endpoint)
    child.say(publisher.endpoint)
    while True:
        number = child.hear(120)
        words = (np.arange(2 * PAGE) + number * 100_000).tolist()
        publisher.publish(BlockStored(hashes_of(umbp.page_keys(words, PAGE)), None, words, PAGE, None, "GPU"))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_gone_holds_nothing(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "ENGINE_SECONDS_MAX", 1.0)
    monkeypatch.setattr(kv_feed, "ASK_SECONDS", 0.2)
    master, said = Master(), iter(range(1, 10_000))

    def holds(engine: Child) -> bool:
        engine.say(next(said))  # again and again: a subscription takes a moment, and what was published before it is lost
        return bool(master.tiers["hbm"])

    with Child(_engine, f"tcp://127.0.0.1:{free_port()}") as engine:
        endpoint = engine.hear()
        feed = Feed(Source(endpoint, "node7-a.0", "node7-a", NAMESPACE), master.url)
        eventually(lambda: holds(engine), "its pages are known")
        engine.signal(end)
        eventually(lambda: not master.tiers["hbm"], "they are forgotten")
        eventually(lambda: feed.lost >= 1, "that is counted")  # on a busy machine it may have been silent before too
    with Child(_engine, endpoint) as engine:
        assert engine.hear() == endpoint
        eventually(lambda: holds(engine), "and known again when it is back")
    feed.close()
    master.close()


def test_tokens_that_no_key_is_made_of_are_counted_and_it_goes_on(world: World) -> None:
    for number in (-1, 1 << 32):
        world.publisher.publish(BlockStored([5], None, [number] * PAGE, PAGE, None, "GPU"))
    eventually(lambda: world.feed.holdings.chains.unknown == 2, "they are counted")
    keys = world.store(1, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(keys), "it goes on")


def test_a_message_that_cannot_be_read_is_counted_and_it_goes_on(world: World) -> None:
    world.publisher.publish(5)  # type: ignore[arg-type]
    eventually(lambda: world.feed.unread == 1, "it is counted")
    keys = world.store(1, 2)
    eventually(lambda: world.master.tiers["hbm"] == set(keys), "it goes on")


def test_endpoints_are_checked() -> None:
    for source, field in (
        (Source("banana", "e", "n", NAMESPACE), "events"),
        (Source("tcp://127.0.0.1:5557", "e", "n", NAMESPACE, "banana"), "replay"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            Feed(source, "http://127.0.0.1:9")
    words = [
        "--events",
        "tcp://127.0.0.1:5557",
        "--replay",
        "banana",
        "--to",
        "http://127.0.0.1:9",
        "--engine",
        "e",
        "--node",
        "n",
        "--namespace",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "umbp.integrations.kv_feed", *words, NAMESPACE], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "replay" in ended.stderr
    assert "Traceback" not in ended.stderr
