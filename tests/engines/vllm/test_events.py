"""KV events of the pool's blocks, as a subscriber of vLLM's own publisher receives them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.engines.vllm.test_connector import forget
from tests.engines.vllm.world import Options, World, prompt
from tests.pools import PoolProcess


class Subscriber:
    """Receives from the start on: it waits until a first event has come through."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.events: list[Any] = []

    def receive(self) -> None:
        while self._socket.poll(5):
            self.events += self._decoder.decode(self._socket.recv_multipart()[-1]).events

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def subscribed(server: PoolProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[World, Subscriber]]:
    endpoint = f"ipc://{tmp_path}/events"
    with World(Options(server.socket, events=endpoint, extra={"umbp_tenant": request.node.name})) as world:
        subscriber = Subscriber(endpoint)
        for number in range(200):
            world.serve(f"first {number}", prompt(100 + number, 1))
            subscriber.receive()
            if subscriber.events:
                break
        assert subscriber.events
        subscriber.events.clear()
        yield world, subscriber
        subscriber.close()


def until(world: World, subscriber: Subscriber, kind: type, hashes: list[Any]) -> list[Any]:
    """Steps, as an idle engine makes them, until all these blocks of the pool were told of; the events, in their order."""
    deadline = time.monotonic() + 60
    while True:
        world.step()
        subscriber.receive()
        found = [event for event in subscriber.events if isinstance(event, kind) and event.medium == "CPU"]
        found = [event for event in found if not set(hashes).isdisjoint(event.block_hashes)]
        if {each for event in found for each in event.block_hashes} >= set(hashes):
            return found
        assert time.monotonic() < deadline, f"{len(found)} events of {kind.__name__}"


def test_stored_and_evicted_blocks_of_the_pool_are_told(subscribed: tuple[World, Subscriber]) -> None:
    world, subscriber = subscribed
    tokens = prompt(1, 5)
    world.serve("a", tokens)
    hashes = [maybe_convert_block_hash(each) for each in world.requests["a"].block_hashes[:5]]
    stored = until(world, subscriber, BlockStored, hashes)
    assert [event.block_hashes[0] for event in stored] == hashes
    assert [event.parent_block_hash for event in stored] == [None, *hashes[:4]]
    assert [event.token_ids for event in stored] == [tokens[at : at + 16] for at in range(0, 80, 16)]
    assert {event.locality for event in stored} == {"LOCAL"}
    forget(world, "a", 3, 4)
    until(world, subscriber, BlockRemoved, hashes[3:5])
    removed = {each for event in subscriber.events if isinstance(event, BlockRemoved) for each in event.block_hashes}
    assert removed.isdisjoint(hashes[:3])


def quota(server: PoolProcess, row: int, size: int) -> None:
    url, body = f"{server.http}/v1/namespaces/{row}/quota", json.dumps({"quota": size}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method="PUT")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def test_a_block_that_was_not_kept_is_not_told(server: PoolProcess, subscribed: tuple[World, Subscriber]) -> None:
    world, subscriber = subscribed
    row = world.workers[0].connector.connector_worker.runtime._namespaces[0].operations.opened.row
    quota(server, row, 1)  # nothing fits
    world.serve("a", prompt(1, 5))
    quota(server, row, 0)
    world.serve("b", prompt(2, 1))
    until(world, subscriber, BlockStored, [maybe_convert_block_hash(world.requests["b"].block_hashes[0])])
    told = {each for event in subscriber.events if event.medium == "CPU" for each in event.block_hashes}
    assert told.isdisjoint(map(maybe_convert_block_hash, world.requests["a"].block_hashes))
