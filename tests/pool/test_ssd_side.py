"""The SSD tier's side of a pool with disks that hang or are slow: DRAM goes on, the queue is bounded, and it recovers by itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.store.disks import Fallible
from umbp.config import PoolConfig, SsdFolder
from umbp.core.objects import LIVE
from umbp.core.pool import Limits, Pool
from umbp.layout import Layout, Namespace
from umbp.pool import ssd
from umbp.pool.sources import Space
from umbp.pool.ssd import SsdSide
from umbp.pool.ssd_queue import WriteQueue
from umbp.pool.ssd_source import SsdSource
from umbp.store import ssd as store
from umbp.store import ssd_drive
from umbp.store.index import IndexWriter, buckets_for, place_word
from umbp.store.ssd_drive import STALL_SECONDS
from umbp.store.ssd_system import aligned
from umbp.types import ReadStatus, WriteStatus

SIZE, ENTRIES, CAPACITY = 65_536, 512, 16 << 20


def keys_of(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def body(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def core_pool() -> Pool:
    table = IndexWriter(
        np.zeros((buckets_for(ENTRIES), 8), np.uint64), np.zeros((ENTRIES, 8), np.uint64), np.zeros(1, np.uint64), 7, np.zeros(1, np.uint64)
    )
    limits = Limits(checksum="off")
    return Pool(table, np.zeros((16, 256), np.uint64), np.zeros(1, np.uint64), CAPACITY, limits, eviction="lru", admission="always")


class Node:
    """A core pool with memory, and the side under test, on a clock that runs ahead by what a test says."""

    def __init__(self, folder: Path, policy: str = "write_behind") -> None:
        self.ahead = 0.0
        self.system = Fallible()
        self.data = np.frombuffer(aligned(CAPACITY), np.uint8)
        self.pool = core_pool()
        identity = Namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE))
        self.account = self.pool.open_namespace(1, identity.digest(), identity.canonical(), SIZE)
        self.space = Space(identity.digest(), self.account.row, self.account.number, SIZE)
        config = PoolConfig(
            name=f"side-{time.monotonic_ns()}",
            ssd=(SsdFolder(str(folder), 64 << 20),),
            ssd_policy=policy,
            ssd_admission="always",
        )
        self.side = SsdSide(config, self.pool, self.data, self.now, self.system)
        self.source = SsdSource(self.side)

    def now(self) -> float:
        return time.monotonic() + self.ahead

    def put(self, *numbers: int) -> list[int]:
        made = self.pool.reserve(self.now(), 1, self.account.row, keys_of(*numbers), b"", 0.0)
        for number, offset in zip(np.array(numbers)[made.mine].tolist(), made.offsets.tolist(), strict=True):
            self.data[offset : offset + SIZE] = body(number)
        status = made.status.copy()
        status[made.mine] = self.pool.commit(self.now(), 1, made.number, np.ones(len(made.ids), bool), None)
        self.side.tick(self.now())
        return status.tolist()

    def on_ssd(self, *numbers: int) -> int:
        place = place_word(self.account.number, SIZE)
        return int(np.count_nonzero(self.side.tier.find(place, keys_of(*numbers))))

    async def until(self, condition: object, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # type: ignore[operator]
                self.side.tick(self.now())
                await asyncio.sleep(0)
                held = self.pool.objects.leases > 0
                assert (self.pool.objects.state[held] == LIVE).all(), "pages are held that are no more"


@contextlib.asynccontextmanager
async def node(folder: Path, policy: str = "write_behind") -> AsyncIterator[Node]:
    made = Node(folder, policy)
    await made.side.open()
    running = asyncio.create_task(made.side.run())
    try:
        yield made
    finally:
        made.side.stopping = True
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await running
        made.side.close()


async def test_a_disk_that_hangs_delays_no_put_and_holds_little_memory(tmp_path: Path) -> None:
    """Field report: slow disk writes kept DRAM pinned until every allocation failed, and nothing recovered without a restart."""
    async with node(tmp_path) as made:
        end = made.system.stalls["sync"] = threading.Event()
        for start in range(0, 2000, 20):  # eight times what DRAM holds
            assert made.put(*range(start, start + 20)) == [WriteStatus.STORED] * 20
            await asyncio.sleep(0)
        objects = made.pool.objects
        await made.until(lambda: made.system.waiting("sync"))  # the disk's thread may have begun later than that
        assert 0 < objects.leased_bytes <= 2 * CAPACITY // 16
        assert made.side.queue.count <= made.side.queue.pages_max
        made.ahead += STALL_SECONDS + 1
        assert "does not answer" in " ".join(made.side.warnings)
        before = made.system.calls["write"]
        made.put(*range(5000, 5020))
        await asyncio.sleep(0.05)
        assert made.system.calls["write"] == before, "a disk that hangs was given more"
        end.set()
        await made.until(lambda: made.on_ssd(*range(5000, 5020)) == 20)
        assert made.side.warnings == []
        assert objects.leased_bytes == 0
        made.side.tier.check()
        made.pool.check()


async def test_pages_that_go_while_they_wait_for_their_turn_are_not_held(tmp_path: Path) -> None:
    async with node(tmp_path) as made:
        end = made.system.stalls["sync"] = threading.Event()
        for start in range(0, 200, 20):
            made.put(*range(start, start + 20))
            await asyncio.sleep(0.005)
        made.ahead += 2.0  # nothing was acknowledged just now
        assert len(made.pool.evict(made.now(), CAPACITY, dry_run=False)) > 100
        end.set()
        await made.until(lambda: made.side.queue.count == 0 and made.pool.objects.leased_bytes == 0)
        assert made.put(*range(1000, 1020)) == [WriteStatus.STORED] * 20
        await made.until(lambda: made.on_ssd(*range(1000, 1020)) == 20)
        made.pool.check()


async def test_a_disk_that_cannot_be_written_is_tried_again_by_itself(tmp_path: Path) -> None:
    async with node(tmp_path) as made:
        made.system.fail(28, "write")
        made.put(*range(10))
        await made.until(lambda: "cannot be written" in " ".join(made.side.warnings))
        assert made.on_ssd(*range(10)) == 0
        made.system.heal()
        made.ahead += 60.0
        await made.until(lambda: made.on_ssd(*range(10)) == 10)
        assert made.side.warnings == []


async def test_a_page_removed_while_it_is_read_back_does_not_come_into_dram(tmp_path: Path) -> None:
    async with node(tmp_path) as made:
        made.put(1, 2)
        await made.until(lambda: made.on_ssd(1, 2) == 2)
        end = made.system.stalls["read"] = threading.Event()
        (offer,) = await made.source.offers(made.space, keys_of(1, 2), frozenset(), made.now() + 60, peek=False)
        offsets = np.array([8 << 20, 9 << 20])
        reading = asyncio.create_task(made.source.read(made.space, offer, keys_of(1, 2), made.data, offsets, made.now() + 60, print))
        await made.until(lambda: made.system.waiting("read"))
        rest = made.side.remove(made.account.row, keys_of(1), None)
        assert rest is not None
        end.set()
        assert (await rest).tolist() == [True]
        taken = await reading
        assert taken.status.tolist() == [ReadStatus.MISS, ReadStatus.HIT]
        assert np.array_equal(made.data[9 << 20 : (9 << 20) + SIZE], body(2))


async def test_a_read_that_is_cancelled_ends_only_when_nothing_writes_any_more(tmp_path: Path) -> None:
    async with node(tmp_path) as made:
        made.put(1)
        await made.until(lambda: made.on_ssd(1) == 1)
        end = made.system.stalls["read"] = threading.Event()
        (offer,) = await made.source.offers(made.space, keys_of(1), frozenset(), made.now() + 60, peek=False)
        reading = asyncio.create_task(
            made.source.read(made.space, offer, keys_of(1), made.data, np.array([8 << 20]), made.now() + 60, print)
        )
        await made.until(lambda: made.system.waiting("read"))
        reading.cancel()
        await asyncio.sleep(0.05)
        assert not reading.done()
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_stop_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((ssd, "STOP_SECONDS_MAX"), (store, "STOP_SECONDS_MAX"), (ssd_drive, "CLOSE_SECONDS_MAX")):
        monkeypatch.setattr(module, name, 0.2)
    end = threading.Event()
    async with asyncio.timeout(60.0):
        async with node(tmp_path) as made:
            made.system.stalls["sync"] = end
            made.put(1)
            await made.until(lambda: made.system.waiting("sync"))
    end.set()


async def test_what_a_disk_does_not_take_is_said_to_who_removes(tmp_path: Path) -> None:
    async with node(tmp_path) as made:
        made.put(1)
        await made.until(lambda: made.on_ssd(1) == 1)
        made.system.fail(5, "write")
        rest = made.side.remove(made.account.row, keys_of(1), None)
        assert rest is not None
        with pytest.raises(Exception, match="a disk did not take it"):
            await rest
        assert made.on_ssd(1) == 0
        made.system.heal()


def test_the_oldest_that_nobody_has_pinned_is_given_up_first() -> None:
    pool = core_pool()
    identity = Namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE))
    account = pool.open_namespace(1, identity.digest(), identity.canonical(), SIZE)
    queue = WriteQueue(pool.objects, 40)

    def put(*numbers: int) -> np.ndarray:
        made = pool.reserve(0.0, 1, account.row, keys_of(*numbers), b"", 0.0)
        pool.commit(0.0, 1, made.number, np.ones(len(made.ids), bool), None)
        return made.ids

    batches = [put(*range(start, start + 10)) for start in range(0, 60, 10)]
    pool.pin(0.0, 0, account.row, keys_of(3, 4), 0.0, "kept")
    for ids in batches:
        queue.add(ids)
        queue.add(ids)  # what waits already does not wait twice
    assert (queue.count, queue.dropped) == (32, 28)
    assert queue.take(1 << 30).tolist() == batches[0][[3, 4]].tolist()
    pool.remove(account.row, keys_of(30))
    assert queue.take(4 * SIZE).tolist() == batches[3][[1, 2, 3, 4]].tolist()
    assert queue.take(1 << 30).tolist() == batches[3][[5, 6, 7, 8, 9]].tolist()
    queue.put_back(batches[3][[8, 9]])
    assert queue.take(1 << 30).tolist() == batches[3][[8, 9]].tolist()
    assert queue.take(1 << 30).tolist() == batches[4].tolist()
    assert queue.take(1 << 30).tolist() == batches[5].tolist()
    assert (queue.take(1 << 30).tolist(), queue.count) == ([], 0)
    assert queue.overtaken == 1, "the page that was removed while it waited"
