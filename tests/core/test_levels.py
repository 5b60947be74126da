"""Levels of the memory: what is put goes to the first one with room, down when that fills up, up when it is asked for, and never lost."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from core.world import World, find, keys_of, open_namespace, stored

from umbp.core.allocator import Region
from umbp.core.levels import Move
from umbp.store.index import W_OFFSET, W_SUM, W_VERSION
from umbp.types import WriteStatus

MIB = 1 << 20
PAGE = 64 << 10
PAGES = 32  # of a level of 2 MiB
CLOCK_LATER = 10.0  # what was put before is not "just put" any more
CLIENT, OTHER = 1, 9  # sessions


class Memory:
    """A world with bytes: near and far memory, and copies made as the pool's thread makes them. Of one put the last key goes first."""

    def __init__(self, *regions: Region, entries: int = 512, **options: object) -> None:
        self.regions = regions or (Region(2 * MIB), Region(4 * MIB, 1))
        size = sum(region.size_bytes for region in self.regions)
        self.world = World(size, entries, regions=self.regions, **{"watermark_high": 1.0, "watermark_low": 1.0, **options})
        self.data = np.zeros(size, np.uint8)
        self.row = open_namespace(self.world.pool, "a", PAGE)

    @property
    def pool(self):
        return self.world.pool

    def put(self, *keys: int, now: float = 0.0, row: int | None = None) -> list[str]:
        row = self.row if row is None else row
        made = self.pool.reserve(now, CLIENT, row, keys_of(*keys), b"", 0.0)
        status = made.status.copy()
        size = self.pool.find_namespace(row).account.object_bytes
        for key, offset in zip(np.array(keys)[made.mine].tolist(), made.offsets.tolist(), strict=True):
            self.data[offset : offset + size] = key % 251
        if len(made.ids):
            status[made.mine] = self.pool.commit(now, CLIENT, made.number, np.ones(len(made.ids), bool), None)
        return [WriteStatus(code).code for code in status.tolist()]

    def ask(self, *keys: int, now: float) -> None:
        self.pool.note(now, self.row, keys_of(*keys))

    def levels(self, *keys: int) -> list[int]:
        found = find(self.pool, self.row, *keys)
        assert found.hit.all()
        return self.pool.levels.levels_of(found.ids).tolist()

    def lease(self, *keys: int, now: float = 0.0) -> int:
        found = find(self.pool, self.row, *keys)
        lease, held = self.pool.lease(now, OTHER, found.ids, found.versions, 1e9)
        assert held.all()
        return lease.number

    def copy(self, move: Move) -> None:
        for source, target in zip(move.sources.tolist(), move.targets.tolist(), strict=True):
            self.data[target : target + move.size] = self.data[source : source + move.size]

    def moves(self, now: float) -> Iterator[int]:
        """Move what there is to move; how many pages each portion was."""
        while (move := self.pool.levels.next(now)) is not None:
            self.pool.check()
            self.copy(move)
            yield self.pool.levels.settle(move, copied=True)
            self.pool.check()

    def check(self, *keys: int, row: int | None = None) -> None:
        """Those that are there are what was put."""
        row = self.row if row is None else row
        size = self.pool.find_namespace(row).account.object_bytes
        found = find(self.pool, row, *keys)
        for key, offset, hit in zip(keys, found.rows[:, W_OFFSET].tolist(), found.hit.tolist(), strict=True):
            assert not hit or (self.data[offset : offset + size] == key % 251).all(), f"key {key} has other bytes"
        self.pool.check()


def test_what_finds_no_room_in_the_first_level_is_put_into_the_next_and_nothing_goes() -> None:
    memory = Memory()
    assert memory.put(*range(PAGES + 5)) == ["stored"] * (PAGES + 5)
    assert memory.levels(*range(PAGES + 5)) == [0] * PAGES + [1] * 5
    assert memory.pool.levels.every[0].spilled_pages == 5
    assert memory.put(*range(100, 100 + 2 * PAGES - 5)) == ["stored"] * (2 * PAGES - 5)
    assert memory.pool.objects.evicted_keys == 0, "the segment is just full"
    memory.check(*range(PAGES + 5), *range(100, 100 + 2 * PAGES - 5))


def test_a_level_takes_pages_by_size_and_weight_the_same_way_every_time() -> None:
    def fill() -> list[int]:
        memory = Memory(Region(4 * MIB), Region(4 * MIB, 0, 3.0), Region(2 * MIB, 1))
        for key in range(80):
            memory.put(key)
        found = find(memory.pool, memory.row, *range(80))
        return memory.pool.objects.allocator.regions_of(found.rows[:, W_OFFSET].view(np.int64)).tolist()

    places = fill()
    assert [places.count(region) for region in (0, 1, 2)] == [20, 60, 0]
    assert fill() == places


def test_above_its_high_mark_a_level_gives_the_coldest_to_the_next_down_to_its_low_mark() -> None:
    memory = Memory()
    for key in range(30):
        memory.put(key, now=key / 100)
    assert memory.pool.levels.next(1.0) is None, "all was put just now"
    memory.ask(0, 1, now=5.0)
    assert sum(memory.moves(CLOCK_LATER)) == 5  # from 30 pages, 94 %, to 25, which is below 80 % of 32
    assert memory.levels(*range(30)) == [0, 0] + [1] * 5 + [0] * 23, "the least recently used ones went"
    near = memory.pool.levels.every[0]
    assert (near.offloaded_pages, near.offloaded_bytes, near.stop) == (5, 5 * PAGE, None)
    memory.check(*range(30))


def test_on_evict_a_level_is_used_up_before_anything_goes_down() -> None:
    memory = Memory(level_high=0.98, level_low=0.96)
    memory.put(*range(31))
    assert memory.pool.levels.next(CLOCK_LATER) is None
    memory.put(31)
    assert sum(memory.moves(CLOCK_LATER)) == 2
    memory.check(*range(32))


def test_what_is_asked_for_on_a_lower_level_comes_up_while_there_is_room() -> None:
    memory = Memory()
    memory.put(*range(PAGES + 8))
    memory.pool.remove(memory.row, keys_of(*range(20)))
    memory.ask(*range(20, PAGES + 8), now=2.0)
    assert sum(memory.moves(CLOCK_LATER)) == 8
    assert set(memory.levels(*range(20, PAGES + 8))) == {0}
    assert memory.pool.levels.every[1].promoted_pages == 8
    memory.check(*range(20, PAGES + 8))


def test_what_comes_up_leaves_room_for_what_is_put() -> None:
    memory = Memory()
    memory.put(*range(PAGES + 30))
    memory.pool.remove(memory.row, keys_of(*range(10)))
    memory.ask(*range(PAGES, PAGES + 30), now=0.4)
    move = memory.pool.levels.next(0.5)  # when what is there was put just now, and does not go down yet
    assert move is not None
    memory.copy(move)
    assert memory.pool.levels.settle(move, copied=True) == 6, "of 22 pages up to 28, which is below 90 % of 32"
    assert memory.pool.levels.next(0.5) is None
    assert sum(memory.moves(CLOCK_LATER)) > 30 - 6, "the rest comes when others have gone down for them"
    assert memory.levels(*range(PAGES, PAGES + 30)).count(0) > 20
    assert memory.pool.levels.next(CLOCK_LATER) is None, "and then there is peace"
    memory.check(*range(10, PAGES + 30))


def test_nothing_comes_up_where_it_is_not_wanted() -> None:
    memory = Memory(promote=False)
    memory.put(*range(PAGES + 8))
    memory.pool.remove(memory.row, keys_of(*range(20)))
    memory.ask(*range(20, PAGES + 8), now=2.0)
    assert memory.pool.levels.next(CLOCK_LATER) is None


def test_what_is_leased_or_pinned_stays_where_it_is_also_if_that_begins_during_the_copy() -> None:
    memory = Memory()
    memory.put(*reversed(range(PAGES)))
    memory.lease(0)
    memory.pool.pin(0.0, 0, memory.row, keys_of(1), 0.0, "")
    move = memory.pool.levels.next(CLOCK_LATER)
    assert move is not None
    assert not np.isin(find(memory.pool, memory.row, 0, 1).ids, move.ids).any()
    memory.copy(move)
    memory.lease(2, now=CLOCK_LATER)
    memory.pool.pin(CLOCK_LATER, 0, memory.row, keys_of(3), 0.0, "")
    memory.pool.remove(memory.row, keys_of(4))
    before = find(memory.pool, memory.row, 2, 3).rows.copy()
    assert memory.pool.levels.settle(move, copied=True) == len(move.ids) - 3
    assert np.array_equal(find(memory.pool, memory.row, 2, 3).rows, before), "not even their versions changed"
    assert memory.levels(0, 1, 2, 3) == [0] * 4
    memory.check(*range(PAGES))


def test_a_copy_that_failed_is_nothing() -> None:
    memory = Memory()
    memory.put(*range(PAGES))
    before = find(memory.pool, memory.row, *range(PAGES)).rows.copy()
    move = memory.pool.levels.next(CLOCK_LATER)
    assert move is not None
    assert memory.pool.levels.settle(move, copied=False) == 0
    assert np.array_equal(find(memory.pool, memory.row, *range(PAGES)).rows, before)
    memory.check(*range(PAGES))


def test_a_reader_of_a_page_that_moved_finds_its_version_gone_and_is_leased_it_where_it_is_now() -> None:
    memory = Memory()
    memory.put(*reversed(range(PAGES)))
    seen = find(memory.pool, memory.row, 0)
    assert sum(memory.moves(CLOCK_LATER))
    now = find(memory.pool, memory.row, 0)
    assert now.ids == seen.ids
    assert now.versions != seen.versions, "what was copied from the old place meanwhile does not count"
    assert not memory.pool.versions(seen.ids, seen.versions).any()
    lease, held = memory.pool.lease(CLOCK_LATER, OTHER, seen.ids, seen.versions, 1.0)
    assert held.all(), "it is still the same page"
    memory.pool.leases.release(OTHER, lease.number)
    memory.ask(0, now=CLOCK_LATER)
    assert sum(memory.moves(CLOCK_LATER)) == 1, "up again"
    lease, held = memory.pool.lease(CLOCK_LATER, OTHER, seen.ids, seen.versions, 1.0)
    assert held.all(), "and again"
    memory.pool.leases.release(OTHER, lease.number)
    memory.pool.remove(memory.row, keys_of(0))
    memory.put(*range(1000, 1010), now=CLOCK_LATER)
    _, held = memory.pool.lease(CLOCK_LATER, OTHER, seen.ids, seen.versions, 1.0)
    assert not held.any(), "the entry is another page's, or nobody's"
    memory.pool.check()


def test_a_page_without_a_checksum_is_queued_for_one_where_it_is_now_and_one_that_has_it_keeps_it() -> None:
    memory = Memory()
    memory.put(*reversed(range(PAGES)))
    found = find(memory.pool, memory.row, 0)
    memory.pool.set_sums(found.ids, found.versions, np.array([77], np.uint64))
    while memory.pool.next_unsummed() is not None:
        pass
    moved = sum(memory.moves(CLOCK_LATER))
    assert find(memory.pool, memory.row, 0).rows[0, W_SUM] == 77
    queued = []
    while (batch := memory.pool.next_unsummed()) is not None:
        assert memory.pool.versions(*batch).all()
        queued += batch[0].tolist()
    assert len(queued) == moved - 1


def test_only_the_last_level_is_evicted_from_as_long_as_something_can_go_there() -> None:
    memory = Memory()
    memory.put(*range(3 * PAGES))
    assert memory.put(500, now=CLOCK_LATER) == ["stored"]
    assert stored(memory.pool, memory.row, *range(PAGES)) == [True] * PAGES
    far = [
        key for key, there in zip(range(PAGES, 3 * PAGES), stored(memory.pool, memory.row, *range(PAGES, 3 * PAGES)), strict=True) if there
    ]
    memory.lease(*far, 500, now=CLOCK_LATER)
    assert memory.put(501, now=2 * CLOCK_LATER) == ["stored"]
    assert stored(memory.pool, memory.row, *range(PAGES)).count(False) == 1, "there nothing can go any more"
    memory.check(*range(3 * PAGES), 500, 501)


def test_a_crash_during_a_move_leaves_each_page_in_one_place_and_leaks_nothing() -> None:
    memory = Memory()
    memory.put(*range(PAGES))
    move = memory.pool.levels.next(CLOCK_LATER)
    assert move is not None
    memory.copy(move)
    table = memory.pool.table
    table.forget(move.entries[:1])  # what `relocate` has done when the process is killed between two of its stores
    table.entries[move.ids[:1], W_OFFSET] = move.targets[:1].view(np.uint64)
    for session in memory.world.reboot(CLOCK_LATER):
        memory.pool.writer_gone(session)
    memory.check(*range(PAGES))
    assert memory.pool.objects.used_bytes == PAGES * PAGE
    assert memory.levels(*find_keys_at(memory, move, slice(0, 1))) == [1]
    assert memory.levels(*find_keys_at(memory, move, slice(1, None))) == [0] * (len(move.ids) - 1)


def find_keys_at(memory: Memory, move: Move, part: slice) -> list[int]:
    return [int.from_bytes(memory.pool.table.entries[entry, :4].tobytes(), "big") for entry in move.ids[part].tolist()]


def test_levels_may_be_others_after_a_restart_and_quotas_and_flushes_see_pages_on_all_of_them() -> None:
    memory = Memory()
    memory.put(*range(PAGES + 10))
    memory.world.options["regions"] = (Region(2 * MIB, 1), Region(4 * MIB))
    memory.world.reboot(CLOCK_LATER)
    assert memory.levels(*range(PAGES + 10)) == [1] * PAGES + [0] * 10
    assert memory.pool.flush(memory.row) == PAGES + 10
    while memory.pool.tick(CLOCK_LATER):
        pass
    assert memory.pool.objects.used_bytes == 0
    memory.pool.check()


@pytest.mark.parametrize(("seed", "eviction"), [(1, "lru"), (2, "leaf_lru"), (3, "s3fifo")])
def test_a_random_mix_never_shows_other_bytes_nor_loses_memory(seed: int, eviction: str) -> None:
    """Puts, requests, leases, removals and moves that are settled late, of two sizes over three levels."""
    draw = random.Random(seed)
    memory = Memory(Region(2 * MIB), Region(2 * MIB), Region(4 * MIB, 1), Region(4 * MIB, 2), entries=1024, eviction=eviction)
    rows = {memory.row: range(1, 150), open_namespace(memory.pool, "b", 5 * PAGE // 2): range(1000, 1030)}
    now, going, leases = 0.0, [], []
    for step in range(400):
        now += draw.choice((0.01, 2.0))
        row = draw.choice(list(rows))
        keys = draw.sample(rows[row], draw.randint(1, 12))
        match draw.randint(0, 9):
            case 0 | 1:
                memory.put(*keys, now=now, row=row)
            case 2:
                memory.pool.note(now, row, keys_of(*keys))
            case 3:
                found = find(memory.pool, row, *keys)
                leases.append(memory.pool.lease(now, OTHER, found.ids[found.hit], found.versions[found.hit], 1e9)[0].number)
                if len(leases) > 4:
                    memory.pool.leases.release(OTHER, leases.pop(0))
            case 4:
                memory.pool.remove(row, keys_of(*keys[:3]))
            case _:
                while len(going) > draw.randint(0, 1):
                    memory.pool.levels.settle(going.pop(draw.randrange(len(going))), copied=draw.random() < 0.9)
                if (move := memory.pool.levels.next(now)) is not None:
                    memory.copy(move)
                    going.append(move)
        try:
            for each, numbers in rows.items():
                memory.check(*numbers, row=each)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {error}") from error
    every = memory.pool.levels.every
    assert sum(level.offloaded_pages for level in every) > 20
    assert sum(level.promoted_pages for level in every) > 5
    assert (memory.pool.table.entries[:, W_VERSION] >> np.uint64(1)).max() > 300
