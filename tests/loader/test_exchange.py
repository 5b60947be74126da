"""The exchange step by step, the clock in the test's hand: what a rank does when another is late, gone, too fast, or of another mind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.pools import PoolProcess

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.field.people import eventually
from tests.loader.caches import Cache, keys_of, slots_for
from umbp.core.windows import windows
from umbp.loader.area import RING_AT, RING_SLOTS, Area
from umbp.loader.copies import Copies, Taken
from umbp.loader.exchange import Exchange, Producer, Source, Window, digest, shared_by
from umbp.loader.tensors import KvTensors

PATIENCE = 0.02
PAGES = 12


class Pair:
    """Owner 0 stages all pages, reader 1 wants them; both by hand. The segment is an array with the pages one after the other."""

    def __init__(self, unit_pages: int = PAGES) -> None:
        self.caches = [Cache(), Cache()]
        layout = self.caches[0].layout
        self.numbers, self.slots = list(range(PAGES)), slots_for(5, PAGES)
        self.data = np.zeros(PAGES * layout.object_bytes, np.uint8)
        self.offsets = np.arange(PAGES, dtype=np.int64) * layout.object_bytes
        self.copies = [Copies(KvTensors.of(cache.tensors, layout), 1) for cache in self.caches]
        self.caches[0].write(self.numbers, self.numbers)
        self.copies[0].store(self.data, self.copies[0].route(self.offsets, np.arange(PAGES)))
        size = RING_AT + RING_SLOTS * 64 * 4096
        self.areas = [Area(np.zeros(size, np.uint8)) for _ in range(2)]
        self.taken = [Taken(), Taken()]
        wanted = np.arange(PAGES)
        window = Window(wanted, unit_pages)
        self.producer = Producer(self.areas[0], 0, 7, window, self.copies[0], PATIENCE)
        self.producer.plan(self.offsets, np.full(PAGES, -1), self.slots)
        self.producer.readers.append((self.areas[1], np.ones(window.chunks, bool)))
        self.areas[0].announce(99)
        self.source = Source(self.areas[0], 0, 7, window, 99, PATIENCE)
        self.source.plan(self.offsets, wanted, self.slots)

    def stage(self, now: float) -> bool:
        return self.producer.step(now, self.data, self.taken[0])

    def pull(self, now: float) -> bool:
        return self.source.step(now, self.areas[1], self.copies[1], self.data, self.taken[1])

    def there(self, layers: int) -> bool:
        return all(self.caches[1].has(self.numbers, self.slots, layer).all() for layer in range(layers))

    def close(self) -> None:
        for copies in self.copies:
            copies.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_unit_is_pulled_when_it_is_whole(pair: Pair) -> None:
    assert not pair.pull(1.0)
    pair.areas[0].begin(7, 0)
    assert not pair.pull(1.001)
    assert pair.stage(1.002)
    assert pair.pull(1.003)
    assert pair.there(1)
    assert pair.taken[1].fallback == 0
    assert pair.taken[1].received == PAGES * pair.copies[1].layer_bytes[0]
    assert not pair.pull(1.004)


def test_an_owner_waits_for_a_reader_that_has_not_copied_but_not_for_ever() -> None:
    pair = Pair(unit_pages=5)  # 3 units a layer: the fifth needs the first one's slot
    for _ in range(RING_SLOTS):
        assert pair.stage(1.0)
    assert not pair.stage(1.0)
    assert not pair.stage(1.0 + PATIENCE * 0.9)
    assert pair.pull(1.0 + PATIENCE * 0.9)
    assert pair.stage(1.0 + PATIENCE * 0.9)
    assert not pair.stage(2.0)
    assert pair.stage(2.0 + PATIENCE)  # too slow: it is not asked again
    while pair.producer.unit < pair.producer.units:
        assert pair.stage(2.0 + PATIENCE)
    while pair.source.layer < 4:
        assert pair.pull(3.0)
    assert pair.there(4)
    assert pair.taken[1].fallback > 0
    assert pair.taken[1].received > 0
    assert pair.taken[1].fallback + pair.taken[1].received == PAGES * sum(pair.copies[1].layer_bytes)
    pair.close()


def test_what_was_overwritten_while_it_was_copied_is_read_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.stage(1.0)
    pull = pair.copies[1].pull

    def torn(*arguments: Any) -> int:
        moved = pull(*arguments)
        pair.caches[1].write([1000] * PAGES, pair.slots)  # as if the copy had caught other bytes
        pair.areas[0].begin(7, RING_SLOTS)
        return moved

    monkeypatch.setattr(pair.copies[1], "pull", torn)
    assert pair.pull(1.0)
    assert pair.there(1)
    assert pair.taken[1].fallback > 0


def test_a_slot_is_nobodys_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(unit_pages=5)
    pair.producer.readers.clear()
    stage, area, seen = pair.copies[0].stage, pair.areas[0], []

    def watched(*arguments: Any) -> int:
        unit = pair.producer.unit
        seen.append((area.state(7, unit), area.state(7, max(0, unit - RING_SLOTS))))
        return stage(*arguments)

    monkeypatch.setattr(pair.copies[0], "stage", watched)
    while pair.stage(1.0):
        assert area.state(7, pair.producer.unit - 1) == 0
    assert seen[RING_SLOTS:] == [(-1, 1)] * (12 - RING_SLOTS)  # what was there before is not offered any more, what comes not yet
    pair.close()


def test_a_table_is_read_under_its_number_only(pair: Pair) -> None:
    area = pair.areas[0]
    area.post(41, np.array([5, 6, 7]), helps=True)
    table = area.table_or_none(41, 3)
    assert table is not None
    assert (table[0].tolist(), table[1]) == ([5, 6, 7], True)
    assert area.table_or_none(40, 3) is None
    assert area.table_or_none(41, 2) is None
    area.post(42, np.array([1]), helps=False)
    assert area.table_or_none(41, 3) is None
    table = area.table_or_none(42, 1)
    assert table is not None
    assert not table[1]


def test_an_owner_of_whom_nothing_comes_is_done_without(pair: Pair) -> None:
    assert not pair.pull(1.0)
    assert not pair.pull(1.0 + PATIENCE * 0.9)
    pair.areas[0].begin(7, 0)  # a sign of life
    assert not pair.pull(1.0 + PATIENCE * 1.5)
    assert not pair.pull(1.0 + PATIENCE * 2.4)
    assert pair.pull(1.0 + PATIENCE * 2.6)
    assert pair.source.lost
    for _ in range(3):
        assert pair.pull(1.1)
    assert pair.there(4)
    assert pair.taken[1].received == 0


def test_an_owner_that_has_stopped_is_not_waited_for(pair: Pair) -> None:
    assert pair.stage(1.0)
    pair.areas[0].stop(7)
    while pair.source.layer < 4:
        assert pair.pull(1.0)
    assert pair.there(4)
    assert pair.taken[1].received == PAGES * pair.copies[1].layer_bytes[0]


def test_an_owner_of_another_mind_is_not_believed(pair: Pair) -> None:
    pair.areas[0].announce(98)
    assert pair.stage(1.0)
    pair.areas[0].slot(0)[:] = 0  # what it staged is not what this rank thinks it is
    while pair.source.layer < 4:
        assert pair.pull(1.0)
    assert pair.there(4)
    assert pair.taken[1].received == 0


def test_units_of_another_round_are_never_taken(pair: Pair) -> None:
    for round_number in (6, 8):
        pair.areas[0].begin(round_number, 0)
        pair.areas[0].publish(round_number, 0)
        assert pair.areas[0].state(7, 0) == (-1 if round_number == 6 else 1)
    assert pair.pull(1.0)  # overwritten: read by itself
    assert pair.taken[1].received == 0


def test_minds_differ_in_digest_when_anything_that_orders_the_units_differs() -> None:
    a, b = np.array([1, 2, 3]), np.array([3, 4])
    seen = {
        digest(number, windows(wanted, helps))
        for number in (1, 2)
        for wanted in ([a, b], [a, b[:0]], [b, a])
        for helps in ([True, True], [True, False])
    }
    assert len(seen) == 12


@pytest.mark.parametrize("seed", range(20))
def test_ranks_in_threads_get_all_they_want_and_read_each_page_once(seed: int) -> None:
    choose = np.random.default_rng(seed)
    world, cache = int(choose.integers(1, 5)), Cache()
    layout, total = cache.layout, 40
    cache.write(range(total), range(total))
    data = np.zeros(total * layout.object_bytes, np.uint8)
    offsets = choose.permutation(total) * layout.object_bytes
    first = Copies(KvTensors.of(cache.tensors, layout), 1)
    first.store(data, first.route(offsets, np.arange(total)))
    wanted = [choose.permutation(total)[: choose.integers(0, total)].astype(np.int64) for _ in range(world)]
    helps = [bool(choose.integers(0, 4)) for _ in range(world)]
    helps[0] |= not any(helps)
    dealt = windows(wanted, helps)
    unit_pages = [int(choose.integers(1, 12)) for _ in range(world)]
    areas = [Area(np.zeros(RING_AT + RING_SLOTS * 64 * 4096, np.uint8)) for _ in range(world)]
    results: dict[int, tuple[Taken, bool]] = {}

    def rank(me: int) -> None:
        mine = Cache()
        copies, slots, taken = Copies(KvTensors.of(mine.tensors, layout), 1), slots_for(me, len(wanted[me])), Taken()
        position = dealt.position[me]
        parts = [shared_by(dealt, other) for other in range(world)]
        made = [Window(parts[other][0], unit_pages[other]) for other in range(world)]
        producer = Producer(areas[me], me, 3, made[me], copies, 10.0)
        producer.plan(offsets[dealt.pages][parts[me][0]], position[parts[me][0]], slots)
        areas[me].announce(5)
        sources = []
        for other in set(range(world)) - {me}:
            wants = dealt.position[other][parts[me][0]] >= 0
            producer.readers.append((areas[other], np.array([wants[made[me].chunk(c)].any() for c in range(made[me].chunks)], bool)))
            source = Source(areas[other], other, 3, made[other], 5, 10.0)
            source.plan(offsets[dealt.pages][parts[other][0]], position[parts[other][0]], slots)
            sources += [source] if source.pieces else []
        private = parts[me][1]
        own = copies.route(offsets[dealt.pages][private], slots[position[private]]) if len(private) else []
        load = umbp.loader.Load(len(slots), mine.layers, time.monotonic() + 30)
        assert Exchange(areas[me], producer, sources, own).run(load, data, taken)
        assert load.layers_ready == mine.layers
        copies.close()
        results[me] = taken, bool(mine.has(wanted[me], slots).all() and mine.untouched(slots))

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(good for _, good in results.values())
    assert len(results) == world
    assert sum(taken.segment for taken, _ in results.values()) == len(dealt.pages) * layout.object_bytes
    assert sum(taken.fallback for taken, _ in results.values()) == 0
    first.close()


def test_a_round_that_did_not_last_is_judged_by_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBP_LOAD", "staged")
    cache, numbers, slots = Cache(), list(range(20)), slots_for(3, 20)
    with PoolProcess() as server, umbp.connect(server.socket) as pool, umbp.connect(server.socket) as other:
        namespace, theirs = cache.namespace(pool), cache.namespace(other)
        with umbp.Loader(namespace, cache.tensors) as loader:
            cache.write(numbers, range(1, 21))
            loader.offload(keys_of(numbers), np.arange(1, 21)).result()
        run = Exchange.run

        def interrupted(self: Exchange, *arguments: Any) -> bool:
            whole = run(self, *arguments)
            server.restart()
            eventually(lambda: other.connected, "the other client is connected again")
            assert theirs.remove(keys_of([3, 4, 11])).all()
            return whole

        with umbp.Loader(namespace, cache.tensors, umbp.Group("g", 0, 1)) as loader:
            monkeypatch.setattr(Exchange, "run", interrupted)
            done = loader.load(keys_of(numbers), slots, deadline=20.0).finish()
            assert done.missing.tolist() == [3, 4, 11]
            assert loader.statistics().way == "staged"
            monkeypatch.setattr(Exchange, "run", run)
            eventually(lambda: pool.connected, "connected again")
            done = loader.load(keys_of(numbers), slots).finish()
            assert done.missing.tolist() == [3, 4, 11]
            assert loader.statistics().staged_loads == 2  # it is a member at the new pool


def test_what_came_from_others_is_read_again_after_a_round_that_did_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBP_LOAD", "staged")
    caches, numbers = [Cache(), Cache()], list(range(20))
    with PoolProcess() as server, umbp.connect(server.socket) as one, umbp.connect(server.socket) as two:
        spaces = [caches[0].namespace(one), caches[1].namespace(two)]
        with umbp.Loader(spaces[0], caches[0].tensors) as loader:
            caches[0].write(numbers, range(1, 21))
            loader.offload(keys_of(numbers), np.arange(1, 21)).result()
        run, once = Exchange.run, threading.Barrier(2, timeout=60)

        def interrupted(self: Exchange, *arguments: Any) -> bool:
            whole = run(self, *arguments)
            if once.wait() == 0:
                server.restart()
            once.wait()
            cache = caches[self.producer.rank]
            cache.wipe(1)  # as if others' staging had been given away before it was copied
            return whole

        monkeypatch.setattr(Exchange, "run", interrupted)
        groups = [umbp.Group("g", rank, 2, meet_seconds=1.0, patience_seconds=10.0) for rank in (0, 1)]
        with umbp.Loader(spaces[0], caches[0].tensors, groups[0]) as a, umbp.Loader(spaces[1], caches[1].tensors, groups[1]) as b:
            loads = [each.load(keys_of(numbers), slots_for(4, 20), deadline=30.0) for each in (a, b)]
            done = [load.finish() for load in loads]
            for rank, (loader, cache) in enumerate(zip((a, b), caches, strict=True)):
                found = loader.statistics()
                assert found.received_bytes == found.fallback_bytes == 10 * spaces[0].object_bytes
                assert done[rank].missing.tolist() == []
                assert cache.has(numbers, slots_for(4, 20)).sum() == 10  # those that came from the other, read again
