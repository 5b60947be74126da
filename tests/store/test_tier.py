"""What every tier promises (`umbp.store.base`): one contract, over the fake in memory, the DRAM segment with the pool's core, and SSDs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.store.disks import make_tier
from umbp.client.mover import gather, scatter
from umbp.core.pool import Limits, Pool
from umbp.store import segment
from umbp.store.base import MemoryTier, Tier
from umbp.store.index import key_words, place_word
from umbp.store.segment import Geometry, create
from umbp.store.ssd import SsdTier
from umbp.types import U8, Mask, ReadStatus, WriteStatus

MIB = 1 << 20
CAPACITY = 4 * MIB
SMALL, PAGE, LARGE = place_word(1, 300), place_word(2, 65_536), place_word(3, MIB)
OTHER = place_word(4, 65_536)
STORED, EXISTS, HIT, MISS = WriteStatus.STORED, WriteStatus.EXISTS, ReadStatus.HIT, ReadStatus.MISS


def size_of(place: np.uint64) -> int:
    return int(place) >> 32


class DramTier:
    """The DRAM segment as a tier: what pool and client do between them, in one process and without a session."""

    def __init__(self, directory: str, capacity_bytes: int) -> None:
        self.segment = create(directory, "tier", Geometry(capacity_bytes, 4096, 16, 4), boot=1, seed=5)
        counter = self.segment.words[segment.H_NUMBERS : segment.H_NUMBERS + 1]
        limits = Limits(watermark_high=1.0, watermark_low=1.0, checksum="off")
        self.pool = Pool(
            self.segment.writer(), self.segment.namespaces, counter, capacity_bytes, limits, eviction="lru", admission="always"
        )
        self.reader = self.segment.reader()
        self.capacity_bytes = capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.pool.objects.used_bytes

    def _account(self, place: np.uint64):
        return self.pool.open_namespace(1, int(place).to_bytes(32, "big"), str(place).encode(), size_of(place))

    def _find(self, place: np.uint64, keys: U8):
        account = self._account(place)
        return self.reader.find(key_words(keys), account.number, place_word(account.number, account.object_bytes))

    def find(self, place: np.uint64, keys: U8) -> Mask:
        return self._find(place, keys).hit

    def write(self, now: float, place: np.uint64, keys: U8, values: U8) -> U8:
        made = self.pool.reserve(now, 1, self._account(place).row, keys, b"", 0.0)
        status = made.status.copy()
        if len(made.ids):
            scatter(self.segment.data.array, made.offsets, np.ascontiguousarray(values[made.mine]))
            status[made.mine] = self.pool.commit(now, 1, made.number, np.ones(len(made.ids), bool), None)
        again = status == WriteStatus.PENDING  # the same key twice in one batch
        status[again] = np.where(self.find(place, keys[again]), EXISTS, WriteStatus.UNAVAILABLE)
        return status

    def read(self, now: float, place: np.uint64, keys: U8, out: U8) -> U8:
        found = self._find(place, keys)
        which = np.flatnonzero(found.hit)
        pages = np.empty((len(which), size_of(place)), np.uint8)
        gather(self.segment.data.array, found.rows[which, 5].astype(np.int64), pages)
        whole = self.reader.versions_of(found.ids[which]) == found.versions[which]
        out[which[whole]] = pages[whole]
        self.pool.note(now, self._account(place).row, keys)
        status = np.full(len(keys), MISS, np.uint8)
        status[which[whole]] = HIT
        return status

    def remove(self, place: np.uint64, keys: U8) -> Mask:
        return self.pool.remove(self._account(place).row, keys)

    def evict(self, now: float, size_bytes: int) -> int:
        before = self.used_bytes
        while before - self.used_bytes < size_bytes and len(self.pool.evict(now, size_bytes - before + self.used_bytes, dry_run=False)):
            pass
        return before - self.used_bytes

    def close(self) -> None:
        self.pool.check()


TIERS: dict[str, Callable[[Path], Tier]] = {
    "memory": lambda path: MemoryTier(CAPACITY),
    "dram": lambda path: DramTier(str(path), CAPACITY),
    "ssd": lambda path: ssd_tier(path),
    "two ssds": lambda path: ssd_tier(path / "a", path / "b"),
}


def ssd_tier(*folders: Path) -> SsdTier:
    """Its files may be larger than its pages: what is in between is what cleaning works with."""
    tier = make_tier(*folders, size=32 * MIB, segment_bytes=2 * MIB)
    tier.ledger.pages_bytes_max = CAPACITY
    return tier


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = TIERS[request.param](tmp_path)
    yield made
    if isinstance(made, SsdTier):
        made.check()
    if isinstance(made, DramTier | SsdTier):
        made.close()


def keys_of(*numbers: int) -> U8:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def page_of(place: np.uint64, number: int, edition: int = 0) -> U8:
    """The bytes that belong under a name."""
    return np.random.default_rng([int(place), number, edition]).integers(0, 256, size_of(place), dtype=np.uint8)


def write(tier: Tier, place: np.uint64, *numbers: int, now: float = 0.0, edition: int = 0) -> list[int]:
    values = np.stack([page_of(place, number, edition) for number in numbers])
    return tier.write(now, place, keys_of(*numbers), values).tolist()


def read(tier: Tier, place: np.uint64, *numbers: int, now: float = 0.0, edition: int = 0) -> list[int]:
    """Statuses; what was hit is compared, what was missed must be untouched."""
    out = np.full((len(numbers), size_of(place)), 0xEE, np.uint8)
    status = tier.read(now, place, keys_of(*numbers), out)
    for number, row, code in zip(numbers, out, status.tolist(), strict=True):
        assert np.array_equal(row, page_of(place, number, edition)) if code == HIT else (row == 0xEE).all()
    assert (tier.find(place, keys_of(*numbers)) == (status == HIT)).all()
    return status.tolist()


def test_what_was_written_is_read_and_nothing_else(tier: Tier) -> None:
    assert (tier.capacity_bytes, tier.used_bytes) == (CAPACITY, 0)
    assert read(tier, PAGE, 1, 2) == [MISS, MISS]
    assert write(tier, PAGE, 1, 2, 3) == [STORED] * 3
    assert read(tier, PAGE, 3, 9, 1, 1) == [HIT, MISS, HIT, HIT]
    assert tier.used_bytes == 3 * 65_536


def test_what_is_kept_is_not_written_again(tier: Tier) -> None:
    assert write(tier, PAGE, 1) == [STORED]
    assert write(tier, PAGE, 2, 1, edition=1) == [STORED, EXISTS]
    assert read(tier, PAGE, 1) == [HIT]
    assert read(tier, PAGE, 2, edition=1) == [HIT]


def test_a_key_twice_in_a_batch_is_kept_once(tier: Tier) -> None:
    assert write(tier, PAGE, 1, 1, 2) == [STORED, EXISTS, STORED]
    assert tier.used_bytes == 2 * 65_536


def test_namespaces_and_sizes_are_apart(tier: Tier) -> None:
    for place in (SMALL, PAGE, OTHER):
        assert write(tier, place, 1) == [STORED]
    assert tier.remove(PAGE, keys_of(1)).tolist() == [True]
    assert read(tier, PAGE, 1) == [MISS]
    assert read(tier, SMALL, 1) == read(tier, OTHER, 1) == [HIT]


def test_what_is_removed_is_gone_and_can_be_written_anew(tier: Tier) -> None:
    write(tier, PAGE, 1, 2)
    assert tier.remove(PAGE, keys_of(1, 9)).tolist() == [True, False]
    assert tier.used_bytes == 65_536
    assert read(tier, PAGE, 1, 2) == [MISS, HIT]
    assert write(tier, PAGE, 1, edition=1) == [STORED]
    assert read(tier, PAGE, 1, edition=1) == [HIT]


def test_a_full_tier_makes_room_by_what_was_used_longest_ago(tier: Tier) -> None:
    for number in range(64):
        assert write(tier, PAGE, number, now=float(number)) == [STORED]
    assert read(tier, PAGE, 0, now=70.0) == [HIT]
    assert write(tier, PAGE, 64, 65, now=80.0) == [STORED] * 2
    assert read(tier, PAGE, 0, 1, 2, 3, 64, 65, now=80.0) == [HIT, MISS, MISS, HIT, HIT, HIT]
    assert tier.used_bytes <= CAPACITY


def test_large_pages_find_room_among_small_ones(tier: Tier) -> None:
    for number in range(0, 4000, 100):
        write(tier, SMALL, *range(number, number + 100))
    for number in range(4):
        assert write(tier, LARGE, number, now=10.0 + number) == [STORED]
    assert tier.used_bytes <= CAPACITY


def test_a_batch_larger_than_the_tier_is_kept_in_part_and_says_which(tier: Tier) -> None:
    write(tier, SMALL, 1)
    status = write(tier, LARGE, *range(6), now=10.0)
    kept = status.count(STORED)
    assert 3 <= kept <= 4  # the first may lie such that no four fit
    assert status[:kept] == [STORED] * kept
    assert all(WriteStatus(code).refused for code in status[kept:])
    assert read(tier, LARGE, *range(6), now=10.0) == [HIT] * kept + [MISS] * (6 - kept)


def test_larger_than_the_tier_is_too_large_and_costs_no_page(tier: Tier) -> None:
    write(tier, PAGE, 1)
    assert write(tier, place_word(9, CAPACITY + 1), 1) == [WriteStatus.TOO_LARGE]
    assert read(tier, PAGE, 1) == [HIT]


def test_evict_frees_what_was_asked_or_all(tier: Tier) -> None:
    write(tier, PAGE, *range(10))
    assert 3 * 65_536 >= tier.evict(10.0, 2 * 65_536 + 1) >= 2 * 65_536 + 1
    assert sum(code == HIT for code in read(tier, PAGE, *range(10))) == 7
    assert tier.evict(10.0, CAPACITY) == 7 * 65_536
    assert (tier.used_bytes, tier.evict(10.0, 1)) == (0, 0)


def test_no_items_are_no_work(tier: Tier) -> None:
    none, nothing = np.empty((0, 32), np.uint8), np.empty((0, 65_536), np.uint8)
    assert tier.write(0.0, PAGE, none, nothing).tolist() == []
    assert tier.read(0.0, PAGE, none, nothing).tolist() == []
    assert tier.remove(PAGE, none).tolist() == []
    assert tier.find(PAGE, none).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_any_order_never_gives_other_bytes(tier: Tier, seed: int) -> None:
    draw = random.Random(seed)
    edition: dict[tuple[int, int], int] = {}  # of the last write that was answered STORED; forgotten when removed
    for step in range(300):
        now = step / 1000  # about as fast as it goes: a disk that has not answered for seconds of this clock is taken for one that hangs
        place = draw.choice((SMALL, PAGE, OTHER, LARGE))
        numbers = draw.sample(range(40), draw.randrange(1, 4))
        verb = draw.choice(("write", "write", "read", "read", "remove", "evict"))
        if verb == "write":
            for number, code in zip(numbers, write(tier, place, *numbers, now=now, edition=step), strict=True):
                if code == STORED:
                    edition[int(place), number] = step
                else:
                    assert code != EXISTS or (int(place), number) in edition
        elif verb == "read":
            for number in numbers:
                known = edition.get((int(place), number), -1)
                assert known >= 0 or read(tier, place, number, now=now) == [MISS], f"seed {seed}, step {step}"
                read(tier, place, number, now=now, edition=max(known, 0))
        elif verb == "remove":
            gone = tier.remove(place, keys_of(*numbers))
            for number, had in zip(numbers, gone.tolist(), strict=True):
                assert edition.pop((int(place), number), None) is not None or not had
            assert not tier.find(place, keys_of(*numbers)).any()
        else:
            tier.evict(now, draw.randrange(MIB))
        assert 0 <= tier.used_bytes <= CAPACITY
