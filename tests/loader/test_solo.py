"""One rank's loads and offloads on the CPU: bytes, guards, misses, cancellation, deadlines, a pool that dies."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.pools import PoolProcess
from umbp.client import Lease, link
from umbp.errors import InvalidRequest
from umbp.types import WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import torch

from tests.loader.caches import PAGES, Cache, keys_of, slots_for
from umbp.loader import Load
from umbp.loader.copies import Copies


def stored(cache: Cache, namespace: umbp.Namespace, numbers: Any) -> None:
    """Put these pages into the pool, from slots 1 on."""
    slots = np.arange(1, len(numbers) + 1)
    cache.write(numbers, slots)
    with umbp.Loader(namespace, cache.tensors) as loader:
        assert loader.offload(keys_of(numbers), slots).result().all(WriteStatus.STORED, WriteStatus.EXISTS)
    cache.wipe()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 17, PAGES - 2])
def test_pages_come_back_into_any_slots_and_nothing_else_is_touched(pool: umbp.Pool, threads: int, count: int) -> None:
    cache, numbers = Cache(), range(100, 100 + count)
    namespace = cache.namespace(pool, tenant=f"slots {threads} {count}")
    stored(cache, namespace, numbers)
    slots = slots_for(count, count)
    with umbp.Loader(namespace, cache.tensors, copy_threads=threads) as loader:
        assert loader.lookup(keys_of(numbers)) == count
        load = loader.load(keys_of(numbers), slots)
        for layer in range(cache.layers):
            assert load.wait(layer)
            assert cache.has(numbers, slots, layer).all()
        done = load.finish()
    assert done.missing.tolist() == []
    assert done.reason == ""
    assert done.read_bytes == count * namespace.object_bytes
    assert cache.has(numbers, slots).all()
    assert cache.untouched(slots)


def test_nothing_is_written_before_the_event(pool: umbp.Pool) -> None:
    class Event:
        def __init__(self) -> None:
            self.asked, self.passed = threading.Event(), threading.Event()

        def synchronize(self) -> None:
            self.asked.set()
            assert self.passed.wait(60)

    cache, numbers, event = Cache(), range(20), Event()
    namespace = cache.namespace(pool, tenant="after")
    stored(cache, namespace, numbers)
    cache.wipe()
    slots = slots_for(3, 20)
    with umbp.Loader(namespace, cache.tensors) as loader:
        load = loader.load(keys_of(numbers), slots, after=event)
        assert event.asked.wait(60)
        assert cache.untouched([])
        event.passed.set()
        assert load.finish().missing.tolist() == []
    assert cache.has(numbers, slots).all()


@pytest.mark.parametrize("width", [24, 8192])
def test_rows_that_lie_apart_are_moved_and_what_is_between_is_not(pool: umbp.Pool, width: int) -> None:
    memory = torch.full((PAGES, 3, width), 0xA5, dtype=torch.uint8)
    tensors = {"kv": [memory[:, 0], memory[:, 2]]}
    layout = umbp.Layout((umbp.Component("kv", (0, 1), width),))
    namespace = pool.namespace(model="apart", page_tokens=1, layout=layout, tenant=f"{width}")
    numbers, slots = range(500, 540), slots_for(3, 40)
    made = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 2, width), dtype=np.uint8))
    memory[slots, 0], memory[slots, 2] = made[:, 0], made[:, 1]
    with umbp.Loader(namespace, tensors) as loader:
        assert loader.offload(keys_of(numbers), slots).result().all(WriteStatus.STORED)
        memory[:] = 0xA5
        other = slots_for(4, 40)
        assert loader.load(keys_of(numbers), other).finish().missing.tolist() == []
    assert torch.equal(memory[other][:, [0, 2]], made)
    memory[other, 0] = memory[other, 2] = 0xA5
    assert bool((memory == 0xA5).all())


def test_layers_come_in_order_for_asyncio_too(pool: umbp.Pool) -> None:
    cache, numbers = Cache(), range(20)
    namespace = cache.namespace(pool, tenant="asyncio")
    stored(cache, namespace, numbers)
    slots = slots_for(1, 20)

    async def restore() -> None:
        with umbp.Loader(namespace, cache.tensors) as loader:
            load = loader.load(keys_of(numbers), slots)
            for layer in range(cache.layers):
                assert await load.ready(layer)
            assert len((await load.finished()).missing) == 0
            assert (await loader.offload(keys_of(numbers), slots).results()).all(WriteStatus.EXISTS)

    asyncio.run(restore())
    assert cache.has(numbers, slots).all()


def test_what_went_between_lookup_and_load_is_exactly_what_is_missing(pool: umbp.Pool) -> None:
    cache, numbers = Cache(), list(range(30))
    namespace = cache.namespace(pool, tenant="gone")
    stored(cache, namespace, numbers)
    slots, gone = slots_for(2, 30), [3, 7, 8, 29]
    with umbp.Loader(namespace, cache.tensors) as loader:
        assert loader.lookup(keys_of(numbers)) == 30
        assert namespace.remove(keys_of(gone)).all()
        done = loader.load(keys_of(numbers), slots).finish()
    assert done.missing.tolist() == gone
    assert "4 pages" in done.reason
    assert cache.has(numbers, slots).tolist() == [number not in gone for number in numbers]


def test_a_cancelled_load_names_every_page(pool: umbp.Pool) -> None:
    cache, numbers = Cache(), range(20)
    namespace = cache.namespace(pool, tenant="cancel")
    stored(cache, namespace, numbers)
    with umbp.Loader(namespace, cache.tensors) as loader:
        first = loader.load(keys_of(numbers), slots_for(3, 20))
        second = loader.load(keys_of(numbers), slots_for(4, 20))
        second.cancel()
        done = second.finish()
        assert first.finish().reason == ""
    assert done.missing.tolist() == list(range(20))
    assert done.reason == "cancelled"


def test_a_load_that_finished_writes_no_more(pool: umbp.Pool) -> None:
    cache, numbers = Cache(), range(PAGES - 2)
    namespace = cache.namespace(pool, tenant="late")
    stored(cache, namespace, numbers)
    with umbp.Loader(namespace, cache.tensors) as loader:
        for seed in range(20):
            load = loader.load(keys_of(numbers), slots_for(seed, len(numbers)))
            if seed % 2:
                load.cancel()
            load.finish()
            cache.wipe(seed)
            time.sleep(0.002)
            assert cache.untouched([], seed)


def test_offload_of_what_is_stored_reads_no_tensor(pool: umbp.Pool) -> None:
    cache, numbers = Cache(), range(20)
    namespace = cache.namespace(pool, tenant="dedup")
    stored(cache, namespace, numbers)
    with umbp.Loader(namespace, cache.tensors) as loader:
        again = loader.offload(keys_of(range(10, 25)), np.arange(1, 16))
        status = again.result()
    assert status == [WriteStatus.EXISTS] * 10 + [WriteStatus.STORED] * 5
    assert again.read_bytes == 5 * namespace.object_bytes


def test_what_was_closed_is_said_once_and_clearly(pool: umbp.Pool, caplog: pytest.LogCaptureFixture) -> None:
    cache, slots = Cache(), np.arange(1, 4)
    namespace = cache.namespace(pool, tenant="closed")
    with umbp.Loader(namespace, cache.tensors) as loader:
        namespace.close()
        with pytest.raises(umbp.UmbpError, match="this namespace was closed"):
            loader.offload(keys_of(range(3)), slots).result()
        assert [(entry.levelname, bool(entry.exc_info)) for entry in caplog.records] == [("WARNING", False)]
        assert "this namespace was closed" in loader.load(keys_of(range(3)), slots).finish().reason
    for call in (loader.load, loader.offload):
        with pytest.raises(umbp.UmbpError, match="this loader was closed"):
            call(keys_of(range(3)), slots)


def test_offload_waits_for_the_callers_event(pool: umbp.Pool) -> None:
    cache = Cache()
    namespace = cache.namespace(pool, tenant="event")

    class Event:
        def synchronize(self) -> None:
            cache.write([5], [1])

    with umbp.Loader(namespace, cache.tensors) as loader:
        assert loader.offload(keys_of([5]), [1], after=Event()).result() == [WriteStatus.STORED]
        loader.load(keys_of([5]), [2]).finish()
    assert cache.has([5], [2]).all()


def patient(client: umbp.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls wait for the pool for an hour, and so no run would wait for them."""
    monkeypatch.setattr(link, "CALL_SECONDS_MAX", 3600.0)
    monkeypatch.setattr(link.Bond.call, "__kwdefaults__", {"seconds": 3600.0, "late": None})
    assert client._connection is not None
    client._connection.hurry(3600.0)


def test_a_cancelled_load_does_not_wait_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, numbers = Cache(), range(20)
    with PoolProcess() as server, umbp.connect(server.socket) as client:
        patient(client, monkeypatch)
        namespace = cache.namespace(client)
        stored(cache, namespace, numbers)
        with umbp.Loader(namespace, cache.tensors) as loader:
            server.signal(signal.SIGSTOP)
            try:
                load = loader.load(keys_of(numbers), slots_for(1, 20), deadline=3600.0)
                load.cancel()
                assert load.finish().missing.tolist() == list(numbers)
                assert load.finish().reason == "cancelled"
            finally:
                server.signal(signal.SIGCONT)
        assert not cache.has(numbers, slots_for(1, 20)).any()


def test_a_cancelled_offload_does_not_wait_for_the_pool_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, numbers = Cache(), range(20)
    with PoolProcess() as server, umbp.connect(server.socket) as client:
        patient(client, monkeypatch)
        namespace = cache.namespace(client)
        cache.write(numbers, np.arange(1, 21))
        with umbp.Loader(namespace, cache.tensors) as loader:
            server.signal(signal.SIGSTOP)
            try:
                offloads = [loader.offload(keys_of(numbers), np.arange(1, 21)) for _ in range(2)]  # the second one waits for its turn
                for offload in offloads:
                    offload.cancel()
                    assert offload.result().all(WriteStatus.UNAVAILABLE)
            finally:
                server.signal(signal.SIGCONT)
        assert [offload.read_bytes for offload in offloads] == [0, 0]
        assert not namespace.lookup(keys_of(numbers)).any()
        status = client.status()
        assert (status["used_bytes"], status["reservations"]) == (0, 0)


def test_a_cancelled_offload_is_not_over_before_the_tensors_are_let_go(pool: umbp.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, reading, gate = Cache(), threading.Event(), threading.Event()
    namespace = cache.namespace(pool, tenant="let go")
    cache.write(range(20), np.arange(1, 21))
    with umbp.Loader(namespace, cache.tensors) as loader, ThreadPoolExecutor(1) as thread:
        save = loader._mover.save

        def gated(*arguments: Any) -> None:
            reading.set()
            assert gate.wait(60)
            save(*arguments)

        monkeypatch.setattr(loader._mover, "save", gated)
        offload = loader.offload(keys_of(range(20)), np.arange(1, 21))
        assert reading.wait(60)
        cancelled = thread.submit(offload.cancel)
        assert not offload.wait(0.05)
        assert not cancelled.done()
        gate.set()
        cancelled.result(60)
        cache.wipe()
    assert offload.result().all(WriteStatus.UNAVAILABLE, WriteStatus.STORED)
    with umbp.Loader(namespace, cache.tensors) as loader:
        done = loader.load(keys_of(range(20)), slots_for(1, 20)).finish()  # what was moved before was committed, as a whole
    assert len(done.missing) == 0
    assert cache.has(range(20), slots_for(1, 20)).all()


@pytest.mark.parametrize("verify", ["sampled", "always"])
def test_checksums_are_compared_where_asked(pool: umbp.Pool, verify: str) -> None:
    cache, numbers = Cache(), range(20)
    namespace = cache.namespace(pool, tenant=f"verify {verify}")
    stored(cache, namespace, numbers)
    with umbp.Loader(namespace, cache.tensors) as loader, namespace.lease(keys_of(numbers)) as lease:
        whole = loader.load(keys_of(numbers), slots_for(1, 20), verify="always").finish()  # the pool makes its sums for it
        assert len(whole.missing) == 0
        lease.data[int(lease.offsets[4]) + 100] ^= 1  # a bit of page 4 falls over
        done = loader.load(keys_of(numbers), slots_for(1, 20), verify=verify).finish()
    assert done.missing.tolist() in ([[4]] if verify == "always" else [[4], []])


def test_a_pool_that_is_frozen_costs_no_more_than_the_deadline(pool: umbp.Pool) -> None:
    cache, numbers = Cache(), range(20)
    with PoolProcess() as server, umbp.connect(server.socket) as client:
        namespace = cache.namespace(client)
        stored(cache, namespace, numbers)
        with umbp.Loader(namespace, cache.tensors) as loader:
            server.signal(signal.SIGSTOP)
            done = loader.load(keys_of(numbers), slots_for(1, 20), deadline=0.3).finish()
            assert done.missing.tolist() == list(numbers)
            assert done.reason == "the deadline passed"  # and not that the pool's answer, which takes 2 s to be given up, was waited for
            begun = loader.load(keys_of(numbers), slots_for(1, 20), deadline=3600.0, begin_within=0.1)
            assert not begun.wait(0)
            assert begun.finish().reason == "the pool did not answer in time"
            server.signal(signal.SIGCONT)


def test_a_load_that_has_begun_has_until_its_deadline(pool: umbp.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, numbers, move = Cache(), range(20), Copies.move
    namespace = cache.namespace(pool, tenant="begun")
    stored(cache, namespace, numbers)
    with umbp.Loader(namespace, cache.tensors) as loader:
        load: list[Load] = []

        def slow(copies: Copies, data: Any, layer: int, route: Any) -> None:
            while time.monotonic() < load[0].begin_by:  # it began in time, and takes longer
                time.sleep(0.01)
            move(copies, data, layer, route)

        monkeypatch.setattr(Copies, "move", slow)
        claim = Load.claim

        def claimed(handle: Load) -> bool:
            load.append(handle)
            handle.begin_by = time.monotonic() + 0.05  # however late this machine was with the lease
            return claim(handle)

        monkeypatch.setattr(Load, "claim", claimed)
        done = loader.load(keys_of(numbers), slots_for(1, 20), deadline=60.0, begin_within=60.0).finish()
        assert len(done.missing) == 0
        assert not load[0].silent


def test_a_load_is_noted_unless_it_was(pool: umbp.Pool) -> None:
    cache, numbers = Cache(), range(20)
    namespace = cache.namespace(pool, tenant="noted")
    stored(cache, namespace, numbers)
    link = pool._link
    with umbp.Loader(namespace, cache.tensors) as loader:
        counts = []
        for noted in (True, False):
            before = link.notes.made
            loader.load(keys_of(numbers), slots_for(1, 20), noted=noted).finish()
            counts.append(link.notes.made - before)
        assert counts == [0, 1]


def test_what_is_whole_is_told_before_the_pool_has_answered_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, numbers, check = Cache(), range(20), Lease.check
    with PoolProcess() as server, umbp.connect(server.socket) as client:
        namespace = cache.namespace(client)
        stored(cache, namespace, numbers)

        def frozen(lease: Lease) -> Any:
            server.signal(signal.SIGSTOP)
            return check(lease)

        monkeypatch.setattr(Lease, "check", frozen)
        with umbp.Loader(namespace, cache.tensors) as loader:
            done = loader.load(keys_of(numbers), slots_for(1, 20), deadline=3600.0).finish()
            assert loader.statistics().pages == 20  # who has heard of the end finds it counted
            server.signal(signal.SIGCONT)
        assert len(done.missing) == 0
        assert cache.has(numbers, slots_for(1, 20)).all()


@pytest.mark.parametrize("delay", [0.0, 0.0003, 0.001, 0.003])
def test_a_pool_that_is_killed_during_a_load_fails_no_page_wrongly(delay: float) -> None:
    cache, numbers = Cache(), range(PAGES - 2)
    with PoolProcess() as server, umbp.connect(server.socket) as client:
        namespace = cache.namespace(client)
        stored(cache, namespace, numbers)
        slots = slots_for(1, len(numbers))
        with umbp.Loader(namespace, cache.tensors) as loader:
            load = loader.load(keys_of(numbers), slots, deadline=5.0)
            time.sleep(delay)
            server.kill()
            done = load.finish()
            there = np.setdiff1d(np.arange(len(numbers)), done.missing)
            assert cache.has(numbers, slots)[there].all()
            server.restart()
            eventually(lambda: client.connected, "connected again")
            done = loader.load(keys_of(numbers), slots).finish()
            assert len(done.missing) == 0
            assert cache.has(numbers, slots).all()


@pytest.mark.parametrize(
    ("keys", "slots", "options", "field"),
    [
        ([1, 2], [1], {}, "slots"),
        ([1, 2], [1, 1], {}, "slots"),
        ([1], [PAGES], {}, "slots[0]"),
        ([1], [-1], {}, "slots[0]"),
        ([1], [1], {"deadline": 0}, "deadline"),
    ],
)
def test_a_call_that_cannot_be_right_is_refused_at_once(pool: umbp.Pool, keys: Any, slots: Any, options: Any, field: str) -> None:
    cache = Cache()
    with umbp.Loader(cache.namespace(pool, tenant="refused"), cache.tensors) as loader:
        with pytest.raises(InvalidRequest) as caught:
            loader.load(keys_of(keys), slots, **options)
        assert caught.value.field == field
        assert cache.untouched([])


def test_an_unknown_way_is_refused_at_the_start(pool: umbp.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    monkeypatch.setenv("UMBP_LOAD", "fastest")
    with pytest.raises(InvalidRequest, match="auto, fused, staged, solo"):
        umbp.Loader(cache.namespace(pool), cache.tensors)
