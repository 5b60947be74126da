"""Checksums that the pool makes: once an object, whoever asks first, and never of bytes that have changed since."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from pool.rest_node import CAPACITY, FakeNode

from umbp.pool import sums as module
from umbp.pool.sums import Summer
from umbp.store.checksums import checksums
from umbp.types import I64, U8, U64

SIZE = 4096


class Made:
    """A pool with four objects, their memory, and who makes their sums."""

    def __init__(self) -> None:
        self.node = FakeNode()
        self.pool = self.node.pool
        self.data = np.random.default_rng(1).integers(0, 256, CAPACITY, dtype=np.uint8)
        self.summer = Summer(self.pool, self.data, self.node.now)
        self.row = self.node.namespace()
        self.node.put(self.row, 1, 2, 3, 4)
        self.ids = self.pool.objects.live_ids()
        self.versions = self.pool.table.versions_of(self.ids)
        self.right = checksums(self.data, self.pool.objects.offset[self.ids], np.full(4, SIZE))

    def damage(self, which: int) -> None:
        self.data[int(self.pool.objects.offset[self.ids[which]]) + 100] ^= 4


@pytest.fixture
def made() -> Iterator[Made]:
    world = Made()
    yield world
    world.summer.close()


async def test_what_was_damaged_after_a_reader_had_its_sum_does_not_become_right(made: Made) -> None:
    """The batch that waits since the commit comes to its turn later than the reader's question."""
    batch = made.pool.next_unsummed()
    assert batch is not None
    assert (await made.summer.make(made.ids, made.versions)).tolist() == made.right.tolist()
    made.damage(2)
    assert sorted(await made.summer.make(*batch)) == sorted(made.right)
    assert made.pool.sums_of(made.ids, made.versions).tolist() == made.right.tolist()


async def test_a_sum_that_was_being_made_when_another_was_entered_is_thrown_away(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(data: U8, offsets: I64, lengths: I64) -> U64:
        begun.set()
        assert goes_on.wait(60)
        return checksums(data, offsets, lengths)

    monkeypatch.setattr(module, "checksums", slow)
    making = asyncio.ensure_future(made.summer.make(made.ids, made.versions))
    assert await asyncio.to_thread(begun.wait, 60)
    assert made.pool.set_sums(made.ids[:1], made.versions[:1], made.right[:1]).tolist() == made.right[:1].tolist()
    made.damage(0)
    goes_on.set()
    assert (await making).tolist() == made.right.tolist()


async def test_nothing_is_summed_twice_and_what_has_gone_has_no_sum(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []

    def counted(data: U8, offsets: I64, lengths: I64) -> U64:
        summed.append(len(offsets))
        return checksums(data, offsets, lengths)

    monkeypatch.setattr(module, "checksums", counted)
    await made.summer.make(made.ids[:3], made.versions[:3])
    made.pool.objects.hide(made.ids[:1], evicted=True)
    found = await made.summer.make(made.ids, made.versions)
    assert found.tolist() == [0, *made.right[1:].tolist()]
    assert summed == [3, 1]
    assert (await made.summer.make(np.array([-1, 1 << 40]), np.array([2, 2], np.uint64))).tolist() == [0, 0]
