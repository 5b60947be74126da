"""The directory against a dumb model: sets of (namespace, key, holder, tier)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umbp.core import keytable
from umbp.core.directory import Directory
from umbp.core.holders import BEGUN_MAX, HOLDERS_MAX, Holders
from umbp.core.keytable import KeyTable
from umbp.errors import LimitReached
from umbp.types import U32, U64

DRAM, SSD = 2, 3


def words(*numbers: int) -> U64:
    return np.array([[number, number >> 7, 3, 4] for number in numbers], np.uint64).reshape(-1, 4)


def spaces(count: int, number: int = 0) -> U32:
    return np.full(count, number, np.uint32)


def made(keys_max: int = 512) -> Directory:
    directory = Directory(keys_max, seed=7)
    directory.space(b"\0" * 32, 4096)
    directory.space(b"\1" * 32, 8192)
    return directory


def add(directory: Directory, holder: int, *numbers: int, tier: int = DRAM, space: int = 0, now: float = 0.0) -> int:
    return directory.add(now, words(*numbers), spaces(len(numbers), space), holder, tier)


def remove(directory: Directory, holder: int, *numbers: int, tier: int = DRAM, space: int = 0) -> int:
    return directory.remove(words(*numbers), spaces(len(numbers), space), holder, tier)


def held(directory: Directory, *numbers: int, space: int = 0) -> list[dict[int, int]]:
    """For each key: holder -> tier bits."""
    found = directory.locations(directory.find(words(*numbers), space))
    answer: list[dict[int, int]] = [{} for _ in numbers]
    for item, holder, tiers in zip(found.item.tolist(), found.holder.tolist(), found.tiers.tolist(), strict=True):
        assert holder not in answer[item], "one holder twice"
        answer[item][holder] = tiers
    assert found.item.tolist() == sorted(found.item.tolist())
    return answer


def swept(directory: Directory, slice_rows: int = 64) -> None:
    for _ in range(1000):
        if not directory.sweep(slice_rows):
            return
    raise AssertionError("the sweep does not end")


# -- single rules ------------------------------------------------------------------------------------------------------------------


def test_a_key_stands_once_a_holder_and_tier() -> None:
    directory = made()
    a, b = directory.holders.take(), directory.holders.take()
    assert add(directory, a, 1, 2, 2, 1) == 2
    assert add(directory, a, 1, tier=SSD) == 1
    assert add(directory, a, 1) == 0
    assert add(directory, b, 2) == 1
    assert held(directory, 1, 2, 3) == [{a: 12}, {a: 4, b: 4}, {}]
    assert held(directory, 1, space=1) == [{}]
    assert remove(directory, a, 1, 9) == 1
    assert held(directory, 1) == [{a: 8}]
    assert remove(directory, a, 1, tier=SSD) == 1
    assert len(directory) == 1
    directory.check()


def test_one_batch_may_name_a_key_many_times_and_counts_each_news_once() -> None:
    directory = made()
    holders = [directory.holders.take() for _ in range(7)]

    def change(*changes: tuple[int, int, int, bool]) -> int:
        keys, by, tiers, here = zip(*changes, strict=True)
        arrays = np.array([holders[one] for one in by], np.uint32), np.array(tiers, np.uint8), np.array(here, bool)
        return directory.change(0.0, words(*keys), spaces(len(keys)), *arrays)

    everybody = [(1, by, tier, True) for by in range(7) for tier in (DRAM, SSD)]
    assert change(*everybody, *everybody) == 14  # seven holders: more than a row has cells for
    assert held(directory, 1) == [dict.fromkeys(holders, 12)]
    assert change((1, 0, DRAM, True), (1, 0, DRAM, False), (2, 3, SSD, True), (2, 3, SSD, False)) == 3  # goes and comes, comes
    assert held(directory, 1, 2) == [dict.fromkeys(holders, 12), {holders[3]: 8}]
    directory.check()
    assert change(*((1, by, tier, False) for _, by, tier, _ in everybody), *((1, by, DRAM, False) for by in range(7))) == 14
    assert len(directory) == 1
    directory.check()


def test_a_key_that_everybody_holds_is_found_at_all_of_them() -> None:
    directory = made()
    holders = [directory.holders.take() for _ in range(100)]
    for holder in holders:
        add(directory, holder, 1, 2)
    assert held(directory, 1) == [dict.fromkeys(holders, 4)]
    for holder in holders[:-1]:
        remove(directory, holder, 1)
    assert held(directory, 1, 2) == [{holders[-1]: 4}, dict.fromkeys(holders, 4)]
    directory.check()


def test_a_dropped_holder_is_invisible_at_once_and_swept_by_and_by() -> None:
    directory = made()
    a, b = directory.holders.take(), directory.holders.take()
    add(directory, a, *range(300))
    add(directory, b, 5)
    directory.drop(a)
    assert held(directory, 5, 6) == [{b: 4}, {}]
    assert len(directory) == 300
    assert directory.sweep(100)
    assert len(directory) == 201
    swept(directory)
    assert len(directory) == 1
    directory.check()
    assert directory.holders.take() == a  # only now


def test_rows_that_come_while_a_round_of_the_sweep_runs_do_not_end_it_early() -> None:
    directory = made()
    a, b, c = (directory.holders.take() for _ in range(3))
    add(directory, a, *range(100))
    directory.drop(a)
    directory.sweep(50)
    add(directory, c, *range(100))
    directory.drop(c)  # at row 50
    add(directory, b, *range(100, 250))
    swept(directory, 30)
    assert len(directory) == 150
    directory.check()


def test_a_resync_shows_old_and_new_until_it_is_settled() -> None:
    directory = made()
    a = directory.holders.take()
    add(directory, a, 1, 2, 3)
    add(directory, a, 3, tier=SSD)
    directory.begin(a)
    assert held(directory, 1, 2, 3) == [{a: 4}, {a: 4}, {a: 12}]
    add(directory, a, 2, 4)
    add(directory, a, 3, tier=SSD)
    assert held(directory, 1, 2, 3, 4) == [{a: 4}, {a: 4}, {a: 8}, {a: 4}]
    directory.settle(a)
    assert held(directory, 1, 2, 3, 4) == [{}, {a: 4}, {a: 8}, {a: 4}]
    add(directory, a, 1)
    swept(directory)
    assert held(directory, 1, 2, 3, 4) == [{a: 4}, {a: 4}, {a: 8}, {a: 4}]
    directory.check()


def test_epochs_that_are_never_settled_do_not_wrap_round() -> None:
    directory = made()
    a = directory.holders.take()
    assert [directory.begin(a) for _ in range(BEGUN_MAX + 1)] == [True] * BEGUN_MAX + [False]
    directory.settle(a)
    swept(directory)
    assert directory.begin(a)


def test_keys_beyond_the_limit_are_left_out_and_counted() -> None:
    directory = made(64)
    a = directory.holders.take()
    assert add(directory, a, *range(100)) <= 64
    assert directory.left_out >= 36
    assert len(directory) + directory.left_out == 100
    directory.check()
    remove(directory, a, *range(100))
    assert len(directory) == 0
    assert add(directory, a, *range(200, 240)) == 40


def test_blocks_beyond_the_limit_are_left_out_and_counted() -> None:
    directory = made(16)  # 65 blocks
    for holder in (directory.holders.take() for _ in range(600)):
        add(directory, holder, 1, 2)
    assert directory.left_out > 0
    directory.check()


def test_a_use_heats_and_cools() -> None:
    directory = made()
    add(directory, directory.holders.take(), 1, 2, 3, now=10.0)
    rows = directory.find(words(1, 2, 9, 3), 0)
    directory.touch(20.0, rows)
    directory.touch(20.0, rows[:1])
    use = directory.use(620.0, rows[rows >= 0])
    assert use.accesses.tolist() == [2, 1, 1]
    assert use.heat.tolist() == pytest.approx([1.0, 0.5, 0.5])
    assert use.idle_seconds.tolist() == pytest.approx([600.0] * 3)
    assert use.age_seconds.tolist() == pytest.approx([610.0] * 3)
    best, heat = directory.hottest(620.0, 0, directory.rows_end, 2)
    assert best.tolist()[0] == rows[0]
    assert heat.tolist() == pytest.approx([1.0, 0.5])
    assert directory.hottest(620.0, 0, directory.rows_end, 2, space=1)[0].tolist() == []
    assert directory.chain(int(rows[1]), 10) == rows[:2].tolist()


def test_what_nobody_holds_is_not_hot() -> None:
    directory = made()
    a, b = directory.holders.take(), directory.holders.take()
    add(directory, a, 1)
    add(directory, b, 2)
    directory.touch(1.0, directory.find(words(1, 2), 0))
    directory.drop(a)
    assert directory.hottest(1.0, 0, 10, 5)[0].tolist() == directory.find(words(2), 0).tolist()


def test_namespaces_without_keys_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.core.directory.SPACES_MAX", 3)
    directory = made()
    a = directory.holders.take()
    add(directory, a, 1, space=1)
    assert directory.space(b"\2" * 32) == 2
    add(directory, a, 1, space=2)
    assert directory.space(b"\3" * 32) == 0
    assert directory.space_or_none(b"\0" * 32) is None
    add(directory, a, 1, space=0)
    with pytest.raises(LimitReached, match="namespaces"):
        directory.space(b"\4" * 32)


def test_holders_are_limited() -> None:
    holders = Holders()
    for _ in range(HOLDERS_MAX - 1):
        holders.take()
    with pytest.raises(LimitReached, match="limit"):
        holders.take()


def test_equal_tags_in_one_bucket_are_told_apart() -> None:
    """A hash that is always the same: one bucket, one tag, and the key decides."""

    class OneTag(KeyTable):
        def hashes(self, words: U64, spaces: U32) -> U64:
            return np.full(len(words), 5 << 32, np.uint64)

    records = np.zeros((64, 10), np.uint32)  # the key, the namespace, and a word to fill up
    table = OneTag(records, 8, 7)
    records.view(np.uint64)[:16, :4] = words(*range(16))
    rows = np.arange(16)
    stands = table.insert(rows, table.hashes(words(*range(16)), spaces(16)))
    entered = np.flatnonzero(stands >= 0)
    assert len(entered) in (8, 16)  # the second bucket may be the first
    assert table.find(words(*range(20)), spaces(20)).tolist() == [*np.where(stands >= 0, rows, -1).tolist(), -1, -1, -1, -1]
    table.remove(entered[:3])
    assert (table.find(words(*range(16)), spaces(16)) >= 0).sum() == len(entered) - 3
    table.check()


# -- the model ---------------------------------------------------------------------------------------------------------------------

some_keys = st.lists(st.integers(0, 30), max_size=12)
some_changes = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0, 1]), st.integers(0, 5), st.sampled_from([DRAM, SSD]), st.booleans()), max_size=24
)
steps = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), some_keys, st.sampled_from([0, 1]), st.sampled_from([DRAM, SSD])),
    st.tuples(st.just("remove"), st.integers(0, 5), some_keys, st.sampled_from([0, 1]), st.sampled_from([DRAM, SSD])),
    st.tuples(st.just("change"), some_changes),
    st.tuples(st.just("again"), st.integers(0, 5)),
    st.tuples(st.just("begin"), st.integers(0, 5)),
    st.tuples(st.just("settle"), st.integers(0, 5)),
    st.tuples(st.just("sweep"), st.integers(1, 20)),
)


class Model:
    """Per holder, what it was said to have, and what of it was named since `begin` (None: no resync)."""

    def __init__(self) -> None:
        self.has: dict[int, set[tuple[int, int, int]]] = {}
        self.named: dict[int, set[tuple[int, int, int]] | None] = {}

    def add(self, holder: int, items: set[tuple[int, int, int]]) -> None:
        named = self.named.get(holder)
        if named is not None:
            for space, key, tier in items:  # the first word of a key in a new epoch is all there is of it
                if not any((space, key, other) in named for other in (DRAM, SSD)):
                    self.has[holder] -= {(space, key, DRAM), (space, key, SSD)}
                named.add((space, key, tier))
                self.has[holder].add((space, key, tier))
        self.has.setdefault(holder, set()).update(items)

    def remove(self, holder: int, items: set[tuple[int, int, int]]) -> None:
        self.has.get(holder, set()).difference_update(items)
        named = self.named.get(holder)
        if named is not None:
            named.difference_update(items)


@pytest.mark.parametrize("few", [0, keytable.FEW])  # none one by one, or all that are left over
@settings(max_examples=100, deadline=None)
@given(script=st.lists(steps, max_size=60))
@example(script=[("begin", 0), ("add", 0, [0], 0, 2), ("settle", 0), ("begin", 0)])  # a second resync before the sweep came round
def test_any_order_of_changes_gives_what_sets_would(few: int, script: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keytable, "FEW", few)
        apply_and_compare(script)


def apply_and_compare(script: list[Any]) -> None:
    directory, model = made(128), Model()
    numbers = [directory.holders.take() for _ in range(6)]
    for verb, *arguments in script:
        holder = numbers[arguments[0]] if verb not in ("sweep", "change") else 0
        if verb in ("add", "remove"):
            keys, space, tier = arguments[1:]
            getattr(directory, verb)(*((0.0,) if verb == "add" else ()), words(*keys), spaces(len(keys), space), holder, tier)
            getattr(model, verb)(holder, {(space, key, tier) for key in keys})
        elif verb == "change":
            keys, number, who, tiers, here = (list(column) for column in zip(*arguments[0], strict=True)) if arguments[0] else ([],) * 5
            by = np.array([numbers[one] for one in who], np.uint32)
            directory.change(0.0, words(*keys), np.array(number, np.uint32), by, np.array(tiers, np.uint8), np.array(here, bool))
            for coming in (False, True):  # what goes, goes first
                for key, space, one, tier, present in arguments[0]:
                    if present == coming:
                        getattr(model, "add" if present else "remove")(numbers[one], {(space, key, tier)})
        elif verb == "again":
            directory.drop(holder)
            model.has.pop(holder, None)
            model.named.pop(holder, None)
            numbers[arguments[0]] = directory.holders.take()
        elif verb == "begin" and model.named.get(holder) is None and directory.begin(holder):
            model.named[holder] = set()
            model.has.setdefault(holder, set())
        elif verb == "settle" and (named := model.named.pop(holder, None)) is not None:
            directory.settle(holder)
            model.has[holder] = named
        elif verb == "sweep":
            directory.sweep(arguments[0], max(1, arguments[0] // 3))
    directory.check()
    for space in (0, 1):
        expected = [Counter[int]() for _ in range(31)]
        for holder, items in model.has.items():
            for of, key, tier in items:
                if of == space:
                    expected[key][holder] += 1 << tier
        assert held(directory, *range(31), space=space) == expected
    swept(directory)
    directory.check()
    assert len(directory) == len({item[:2] for items in model.has.values() for item in items})
