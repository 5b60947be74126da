"""What the linker publishes, read by SGLang's own types: its hashes, and what a router would believe after stores, finds and evictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, KVEventBatch, StorageMedium, ZmqEventPublisher
from sglang.srt.mem_cache.utils import hash_str_to_int64

import umbp
from tests.engines.sglang.engine import Engine, configured, prompt
from tests.field.people import eventually
from tests.masters import free_port
from tests.pools import PoolProcess
from umbp.client.http import PoolHttp
from umbp.integrations.kv_feed import Feed, Source


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with configured():
        yield


class Router:
    """Believes what it is told, as SGLang's own subscribers decode it."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self.socket.connect(endpoint)
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.blocks: dict[int, str | None] = {}
        self.stored: list[Any] = []

    def hear(self) -> dict[int, str | None]:
        while self.socket.poll(50):
            for event in self.decoder.decode(self.socket.recv_multipart()[2]).events:
                if isinstance(event, BlockStored):
                    self.stored.append(event)
                    self.blocks |= dict.fromkeys(event.block_hashes, event.medium)
                elif isinstance(event, BlockRemoved):
                    for each in event.block_hashes:
                        self.blocks.pop(each, None)
        return self.blocks

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_a_router_knows_what_the_pool_holds(server: PoolProcess) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with Engine("mla", server.socket, tenant="events", events=endpoint) as engine:
        router = Router(endpoint)
        warm = prompt(9, 1, engine.page)
        for number in range(100):  # until the subscription has arrived
            engine.compute(prompt(100 + number, 1, engine.page), seed=1)
            if router.hear():
                break
        engine.compute(warm, seed=1)
        tokens = prompt(1, 8, engine.page)
        keys = [key.tobytes().hex() for key in umbp.page_keys(tokens, engine.page)]
        hashes = [hash_str_to_int64(key) for key in keys]
        engine.match(tokens, "r0")
        engine.compute(tokens, seed=7)
        eventually(lambda: set(hashes) <= set(router.hear()), "all pages are told")
        assert {router.blocks[each] for each in hashes} == {StorageMedium.EXTERNAL.value}
        (event,) = [each for each in router.stored if each.block_hashes == hashes]
        assert (event.block_size, event.token_ids, event.parent_block_hash) == (engine.page, [], None)
        engine.linker.shelves[0].namespace.remove(umbp.page_keys(tokens, engine.page)[6:])
        eventually(lambda: not set(hashes[6:]) & set(router.hear()), "what went is told")
        assert set(hashes[:6]) <= set(router.blocks)
    router.close()
    with Engine("mla", server.socket, tenant="events", events=endpoint, events_replay=replay):  # again, and nobody asks it for anything
        context = zmq.Context()
        asker = context.socket(zmq.DEALER)
        asker.connect(replay)

        def told() -> set[int]:
            """What one that comes late is sent again."""
            asker.send_multipart((b"", (0).to_bytes(8, "big")))
            found: set[int] = set()
            while asker.poll(1000) and (payload := asker.recv_multipart()[-1]):
                found |= {block for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events for block in event.block_hashes}
            return found

        eventually(lambda: set(hashes[:6]) <= told(), "what the pool holds already is told")
        assert not set(hashes[6:]) & told()
        context.destroy(linger=0)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_the_engines_own_events_reach_a_master(server: PoolProcess, core: str) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    publisher = ZmqEventPublisher(0, endpoint, replay, bind=True)
    with Engine("mla", server.socket, core=core, tenant=f"own {core}", tree={"enable_kv_cache_events": True}) as engine:
        namespace = engine.linker.shelves[0].namespace.identity.digest().hex()
        feed = Feed(Source(endpoint, f"engine-{core}", server.name, namespace, replay), server.http)

        def told() -> int:
            publisher.publish(KVEventBatch(0.0, engine.cache.take_events()))
            engines = PoolHttp(server.http).get("/v1/external")["engines"]
            return sum(each["hbm_keys"] for each in engines if each["engine"] == f"engine-{core}")

        first, second = prompt(1, 6, engine.page), prompt(2, 3, engine.page)
        engine.compute(first, seed=7)
        eventually(lambda: told() == 6, "the first events have arrived")
        engine.compute([*first[: 4 * engine.page], *second], seed=8)
        eventually(lambda: told() == 9, "the master knows all pages")
        assert feed.holdings.chains.unknown == 0
        engine.drop()
        eventually(lambda: told() == 0, "and that they were evicted")
    feed.close()
    publisher.shutdown()
