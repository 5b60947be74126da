"""What a pool has to tell, against what it holds: whatever happens between two takes, the listener ends up with the same keys."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.pool.rest_node import FakeNode
from umbp.core import outbox
from umbp.core.objects import LIVE
from umbp.types import Tier


def live(node: FakeNode) -> np.ndarray:
    return (node.pool.objects.state == LIVE) & (node.pool.objects.row >= 0)


def held(node: FakeNode) -> set[tuple[bytes, bytes]]:
    """(digest, key) of all that can be found."""
    pool = node.pool
    ids = np.flatnonzero(live(node))
    digests = [pool.namespaces[int(pool.objects.row[i])].digest for i in ids.tolist()]
    return {(digest, pool.table.entries[i, :4].tobytes()) for digest, i in zip(digests, ids.tolist(), strict=True)}


class Listener:
    """Applies what it is told, as a master would."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.has: set[tuple[bytes, bytes]] = set()

    def begin(self) -> None:
        self.node.pool.objects.outbox.begin()
        self.has = held(self.node)

    def take(self, keys_max: int = 1 << 20) -> None:
        box = self.node.pool.objects.outbox
        if box.overflow:
            self.begin()
            return
        changes = box.take(keys_max, live(self.node).take)
        for words, number, here in zip(changes.words, changes.numbers.tolist(), changes.present.tolist(), strict=True):
            item = (self.node.pool.digests[number], words.tobytes())
            (self.has.add if here else self.has.discard)(item)


@pytest.mark.parametrize("seed", range(8))
def test_the_listener_ends_up_with_what_the_pool_holds(seed: int) -> None:
    draw = random.Random(seed)
    node = FakeNode(capacity=40 * 4096)
    rows = [node.namespace("m"), node.namespace("n")]
    listener = Listener(node)
    listener.begin()
    for _ in range(300):
        verb = draw.choices(["put", "remove", "evict", "flush", "take", "little", "tick"], [9, 2, 2, 0.5, 2, 3, 2])[0]
        node.time += 0.3
        row = draw.choice(rows)
        if verb == "put":
            start = draw.randrange(60)
            node.put(row, *range(start, start + draw.randrange(1, 6)))
        elif verb == "remove":
            keys = np.frombuffer(draw.randrange(60).to_bytes(32, "big"), np.uint8).reshape(1, 32)
            node.pool.remove(row, keys)
        elif verb == "evict":
            node.pool.evict(node.time, draw.randrange(1, 20_000), dry_run=False)
        elif verb == "flush":
            node.pool.flush(row)
        elif verb in ("take", "little"):
            listener.take(4 if verb == "little" else 1 << 20)
        else:
            node.pool.tick(node.time)
    while node.pool.objects.outbox.keys:
        listener.take()
    assert listener.has == held(node), f"seed {seed}"
    assert not node.pool.objects.outbox.take(10, live(node).take).words.size


def test_nothing_is_kept_for_nobody_and_an_overflow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "KEYS_MAX", 10)
    node = FakeNode()
    row = node.namespace()
    node.put(row, 1, 2, 3)
    box = node.pool.objects.outbox
    assert box.overflow  # nobody has asked yet
    assert box.keys == 0
    box.begin()
    node.put(row, *range(10, 19))
    assert (box.keys, box.overflow) == (9, False)
    node.put(row, 30, 31)
    assert (box.keys, box.overflow) == (0, True)


def test_a_large_flush_is_told_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FLUSH_KEYS_MAX", 5)
    node = FakeNode()
    row = node.namespace()
    node.put(row, *range(5))
    box = node.pool.objects.outbox
    box.begin()
    node.pool.flush(row)
    assert not box.overflow
    assert len(box.take(100, live(node).take)) == 5
    node.put(row, *range(6))
    node.pool.flush(row)
    assert box.overflow


def test_what_went_is_told_before_what_came() -> None:
    node = FakeNode()
    row = node.namespace()
    box = node.pool.objects.outbox
    box.begin()
    node.put(row, 1, 2)
    node.pool.remove(row, np.frombuffer((1).to_bytes(32, "big") + (2).to_bytes(32, "big"), np.uint8).reshape(2, 32))
    node.put(row, 3, 1)
    changes = box.take(100, live(node).take)
    keys = [int.from_bytes(words.tobytes(), "big") for words in changes.words]
    assert set(zip(keys, changes.present.tolist(), strict=True)) == {(1, 0), (2, 0), (3, 1), (1, 1)}
    assert changes.present.tolist() == sorted(changes.present.tolist())


def test_the_last_word_of_a_key_and_tier_counts() -> None:
    box = outbox.Outbox(np.zeros((4, 8), np.uint64))
    box.begin()
    rows = np.array([[1, 0, 0, 0, 4096 << 32 | 7], [2, 0, 0, 0, 4096 << 32 | 7]], np.uint64)
    box.told(rows, Tier.SSD, present=True)
    box.told(rows[:1], Tier.SSD, present=False)
    box.told(rows[1:], Tier.DRAM, present=False)
    box.told(rows[1:], Tier.DRAM, present=True)
    changes = box.take(100, lambda ids: ids >= 0)
    assert list(zip(changes.words[:, 0].tolist(), changes.tiers.tolist(), changes.present.tolist(), strict=True)) == [
        (1, 3, 0),
        (2, 3, 1),
        (2, 2, 1),
    ]
    assert set(changes.numbers.tolist()) == {7}
    assert set(changes.sizes.tolist()) == {4096}
