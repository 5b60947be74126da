"""Events over real sockets: their format, their numbers, replays, and what follows from a pool's own changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import umbp
from tests.field.people import eventually, keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp.errors import InvalidRequest
from umbp.integrations import kv_events
from umbp.integrations.kv_events import BlockRemoved, BlockStored, Publisher, Residents, hashes_of, shifted
from umbp.types import U8, Mask

zmq = pytest.importorskip("zmq", reason="events need pyzmq: pip install 'umbp[events]'")


class Listener:
    """A subscriber that a publisher has noticed."""

    def __init__(self, publisher: Publisher, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(publisher.endpoint)
        self.batches: list[tuple[int, Any]] = []
        self.probes = 0
        eventually(lambda: self._noticed(publisher), "the subscription has arrived")
        self.batches.clear()

    def _noticed(self, publisher: Publisher) -> bool:
        publisher.publish()  # an empty batch
        self.probes += 1
        return self.take(0.01) is not None

    def take(self, seconds: float = 60.0) -> Any:
        """The next batch that is not a probe, or None."""
        while self.socket.poll(int(seconds * 1000)):
            _, number, payload = self.socket.recv_multipart()
            batch = msgspec.msgpack.decode(payload)
            self.batches.append((int.from_bytes(number, "big"), batch))
            if batch[1] or seconds < 1:
                return batch
        return None

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher("tcp://127.0.0.1:*", topic="kv", replay="tcp://127.0.0.1:*")
    yield made
    made.close()


@pytest.fixture
def listener(publisher: Publisher) -> Iterator[Listener]:
    heard = Listener(publisher, "kv")
    yield heard
    heard.close()


def test_an_event_is_a_tagged_map_in_a_positional_batch(publisher: Publisher, listener: Listener) -> None:
    publisher.publish(BlockStored([1, -2], None, [], 64, None, "EXTERNAL"), BlockRemoved([3]))
    time, events, rank = listener.take()
    assert isinstance(time, float)
    assert rank == 0
    assert events == [
        {"type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": None, "token_ids": [], "block_size": 64, "lora_id": None}
        | {"medium": "EXTERNAL"},
        {"type": "BlockRemoved", "block_hashes": [3]},
    ]


def test_numbers_grow_by_one_and_show_what_was_dropped(publisher: Publisher, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        publisher.publish(BlockRemoved([number]))
    for _ in range(20):
        listener.take()
    numbers = [number for number, batch in listener.batches if batch[1]]
    assert numbers == list(range(numbers[0], numbers[0] + 20))
    monkeypatch.setattr(kv_events, "QUEUE_BATCHES_MAX", 0)
    publisher.publish(BlockRemoved([99]))
    monkeypatch.undo()
    publisher.publish(BlockRemoved([100]))
    assert listener.take()[1][0]["block_hashes"] == [100]
    assert listener.batches[-1][0] == numbers[-1] + 2
    assert publisher.dropped == 1


def test_what_was_missed_is_sent_again(publisher: Publisher, listener: Listener) -> None:
    for number in range(5):
        publisher.publish(BlockRemoved([number]))
    for _ in range(5):
        listener.take()
    first = listener.batches[-5][0]
    context = zmq.Context()
    asker = context.socket(zmq.REQ)
    asker.setsockopt(zmq.RCVTIMEO, 60_000)
    asker.connect(publisher.replay_endpoint)
    asker.send((first + 3).to_bytes(8, "big"))
    number, payload = asker.recv_multipart()
    assert int.from_bytes(number, "big") == first + 3
    assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [3]
    context.destroy(linger=0)


def nothing(start: int, count: int) -> tuple[U8, int]:
    """A survey of an empty index."""
    return np.empty((0, 32), np.uint8), 0


def test_what_is_there_before_and_what_others_store_is_told(
    server: PoolProcess, publisher: Publisher, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "SURVEY_ENTRIES", 1000)
    monkeypatch.setattr(kv_events, "EVENTS_A_BATCH", 8)
    with umbp.connect(server.socket) as pool:
        namespace, other = open_namespace(pool, 256, tenant="before"), open_namespace(pool, 256, tenant="not it")
        keys = keys_of(*range(20))
        namespace.put(keys, values_of(range(20), 256))
        other.put(keys_of(50), values_of([50], 256))
        seen, at, parts = [], 0, 0
        while parts == 0 or at:
            part, at = namespace.operations.survey(at, 1000)
            seen += part.tolist()
            parts += 1
        assert sorted(seen) == sorted(keys.tolist())
        assert parts > 1
        residents = Residents(publisher, lambda keys: namespace.lookup(keys), namespace.operations.survey, 64, round_seconds=0.05)
        told: list[int] = []
        while len(told) < 20:
            for event in listener.take()[1]:
                assert (event["type"], event["parent_block_hash"], event["medium"]) == ("BlockStored", None, "EXTERNAL")
                (block,) = event["block_hashes"]
                told.append(block)
        assert sorted(told) == sorted(hashes_of(keys))
        namespace.put(keys_of(30), values_of([30], 256))
        (event,) = listener.take()[1]
        assert event["block_hashes"] == hashes_of(keys_of(30)), "stored by somebody else"
        residents.there(keys[3:5], keys[2].tobytes())
        (event,) = listener.take()[1]
        assert (event["block_hashes"], event["parent_block_hash"]) == (hashes_of(keys[3:5]), hashes_of(keys[2:3])[0]), "now in its place"
        residents.there(keys[3:5], keys[2].tobytes())
        namespace.remove(keys[:1])
        (event,) = listener.take()[1]
        assert (event["type"], event["block_hashes"]) == ("BlockRemoved", hashes_of(keys[:1])), "and not again"
        residents.close()


def test_residents_tell_each_page_once_and_what_went(server: PoolProcess, publisher: Publisher, listener: Listener) -> None:
    with umbp.connect(server.socket) as pool:
        namespace = open_namespace(pool, 256, tenant="residents")

        def look(keys: U8) -> Mask | None:
            found = namespace.operations.look(keys)
            return None if found is None else found.found.hit

        residents = Residents(publisher, look, nothing, 64, round_seconds=0.05)
        keys = keys_of(*range(8))
        namespace.put(keys, values_of(range(8), 256))
        hashes = hashes_of(keys)
        residents.there(keys[2:5], keys[1].tobytes(), "chat-1")
        (event,) = listener.take()[1]
        assert (event["block_hashes"], event["parent_block_hash"], event["session_id"]) == (hashes[2:5], hashes[1], "chat-1")
        residents.there(keys)
        events = [listener.take()[1][0], listener.take()[1][0]]
        assert [(each["block_hashes"], each["parent_block_hash"]) for each in events] == [(hashes[:2], None), (hashes[5:], hashes[4])]
        namespace.remove(keys[3:5])
        (event,) = listener.take()[1]
        assert (event["type"], event["block_hashes"], event["medium"]) == ("BlockRemoved", hashes[3:5], "EXTERNAL")
        residents.there(keys[3:4])
        assert [event["type"] for event in (listener.take()[1][0], listener.take()[1][0])] == ["BlockStored", "BlockRemoved"]
        residents.close()


def test_more_pages_than_can_be_remembered_are_told_as_gone(
    publisher: Publisher, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "PAGES_MAX", 5)
    residents = Residents(publisher, lambda keys: np.ones(len(keys), bool), nothing, 64, round_seconds=60)
    keys = keys_of(*range(8))
    residents.there(keys)
    assert listener.take()[1][0]["block_hashes"] == hashes_of(keys)
    assert listener.take()[1][0] == {"type": "BlockRemoved", "block_hashes": hashes_of(keys[:3]), "medium": "EXTERNAL"}
    residents.close()


def test_endpoints_of_ranks() -> None:
    assert shifted("tcp://*:5560", 0) == "tcp://*:5560"
    assert shifted("tcp://*:5560", 3) == "tcp://*:5563"
    assert shifted("ipc:///tmp/x", 2) == "ipc:///tmp/x_dp2"
    with pytest.raises(InvalidRequest, match="has no port"):
        shifted("tcp://host", 1)
    with pytest.raises(InvalidRequest, match="events"):
        Publisher("tcp://nonsense")
