"""Reservations from reserve to commit, and every way in which they end otherwise (`core.script` says what the lines mean)."""

import numpy as np
import pytest
from core.script import Script, play
from core.world import World, find, keys_of, open_namespace, put

from umbp.core import pool as pool_module
from umbp.core import writes
from umbp.errors import InvalidRequest
from umbp.policies.base import Inserted
from umbp.policies.lru import Lru
from umbp.store.index import W_SUM, W_VERSION
from umbp.types import WriteStatus

OPEN = "open a 4096\n"


def test_a_page_is_visible_after_its_commit_only() -> None:
    play(f"""{OPEN}
        1> reserve a 1 2 as w -> pending pending
        stored a 1 2 -> no no
        states -> 2 reserved
        held a -> 8192
        keys a -> 0
        1> commit w -> stored stored
        stored a 1 2 -> yes yes
        keys a -> 2
        1> commit w -> expired expired       # it is over
    """)


def test_a_key_is_written_by_the_first_who_reserves_it() -> None:
    play(f"""{OPEN}
        1> reserve a 1 1 2 as w -> pending pending pending      # 1 once
        2> reserve a 2 3 as v -> pending pending                # 2 is on its way, 3 is ours
        states -> 3 reserved
        2> commit v -> stored
        1> commit w -> stored stored
        2> put a 1-3 -> exists exists exists
        states -> 3 live
    """)


def test_what_was_not_filled_is_given_back_and_free_for_others() -> None:
    play(f"""{OPEN}
        1> reserve a 1-3 as w -> pending pending pending
        1> commit w but 2 -> stored unavailable stored
        states -> 2 live
        2> put a 2 -> stored
    """)


def test_a_commit_by_another_session_changes_nothing() -> None:
    play(f"""{OPEN}
        1> reserve a 1 as w -> pending
        2> commit w -> expired
        states -> 1 reserved
        1> commit w -> stored
    """)


def test_an_expired_write_frees_its_keys_but_not_its_memory() -> None:
    play(
        f"""{OPEN}
        1> reserve a 1 2 as w -> pending pending
        at 5
        states -> 2 orphan
        held a -> 8192
        2> put a 1 -> stored
        states -> 1 live 2 orphan
        1> commit w -> expired expired      # the late commit says that its writer has let go
        states -> 1 live
        stored a 1 2 -> yes no
    """,
        reservation_seconds=5.0,
    )


def test_a_closed_connection_of_a_living_process_keeps_the_memory_until_it_is_gone() -> None:
    play(f"""{OPEN}
        1> reserve a 1 2 as w -> pending pending
        1> close -> waits
        states -> 2 orphan
        2> put a 1 2 -> stored stored
        gone 1
        states -> 2 live
        gone 1                              # twice is once
    """)


def test_a_dead_process_gives_everything_back_at_once() -> None:
    play(
        f"""{OPEN}
        1> reserve a 1 as w -> pending
        at 5
        1> reserve a 1 2 as v -> pending pending
        states -> 2 reserved 1 orphan
        1> die -> done
        states -> -
        2> put a 1 2 -> stored stored
    """,
        reservation_seconds=5.0,
    )


def test_a_session_with_nothing_unfinished_does_not_wait() -> None:
    play(f"""{OPEN}
        1> put a 1 -> stored
        1> close -> done
    """)


def test_an_orphans_memory_is_given_to_nobody() -> None:
    script = play(
        """
        open a 262144
        1> reserve a 1-4 as w -> pending pending pending pending
        1> close -> waits
        2> put a 5 -> all_leased
        gone 1
        2> put a 5 -> stored
    """,
    )
    assert script.pool.namespaces[script.rows["a"]].account.refused == {"all_leased": 1}


def test_a_flush_between_reserve_and_commit_wins() -> None:
    play(f"""{OPEN}
        1> put a 1 -> stored
        1> reserve a 2 as w -> pending
        flush a -> 1
        keys a -> 0
        held a -> 4096                      # what is being written
        2> put a 1 2 -> stored stored       # the new weights' pages, at once
        1> commit w -> flushed
        stored a 1 2 -> yes yes
        at 1
        states -> 2 live
        held a -> 8192
    """)


def test_a_flush_after_the_write_expired_changes_its_answer_not() -> None:
    play(
        f"""{OPEN}
        1> reserve a 1 as w -> pending
        at 5
        flush a -> 0
        2> reserve a 1 as v -> pending
        1> commit w -> expired
        2> commit v -> stored
    """,
        reservation_seconds=5.0,
    )


def test_flushed_objects_do_not_count_against_the_quota() -> None:
    play(f"""{OPEN}
        quota a 8192
        1> put a 1 2 -> stored stored
        1> lease a 1 2 as x -> held held
        flush a -> 2
        held a -> 0
        1> put a 3 4 -> stored stored
        states -> 4 live
        at 1
        states -> 2 live 2 zombie
    """)


def test_ids_of_flushed_objects_that_were_reused_meanwhile_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "DOOMED_SLICE", 2)
    play(
        """
        open a 4096
        open b 4096
        1> put a 1-8 -> stored stored stored stored stored stored stored stored
        flush a -> 8
        1> put b 1-4 -> stored stored stored stored     # room only by evicting flushed ones
        at 100
        stored b 1-4 -> yes yes yes yes
        states -> 4 live
    """,
        entries=8,
    )


def test_a_session_has_a_limited_number_of_writes_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "RESERVATIONS_PER_SESSION_MAX", 2)
    script = play(
        f"""{OPEN}
        1> put a 9 -> stored
        1> reserve a 1 as u -> pending
        1> reserve a 2 as v -> pending
        1> reserve a 9 1 3 as w -> exists pending too_many_reservations
        2> put a 3 -> stored
        at 5                                # expired ones count: their memory is held
        1> reserve a 4 as w -> too_many_reservations
        1> commit u -> expired
        1> put a 4 -> stored
    """,
        reservation_seconds=5.0,
    )
    assert script.pool.namespaces[script.rows["a"]].account.refused == {"too_many_reservations": 2, "expired": 1}


def test_deadlines_of_writes_long_ended_do_not_pile_up() -> None:
    world = World(1 << 20, 64)
    row = open_namespace(world.pool, "a", 256)
    for number in range(5000):
        put(world.pool, row, number)
    assert len(world.pool.writes._deadlines) < 3000
    world.pool.reserve(0.0, 1, row, keys_of(9000), b"", 0.0)
    assert world.pool.writes.expire(1000.0) == 1


def test_a_commit_of_another_length_is_refused_and_the_write_stays_open() -> None:
    world = World(1 << 20, 64)
    row = open_namespace(world.pool, "a", 4096)
    made = world.pool.reserve(0.0, 1, row, keys_of(1, 2), b"", 0.0)
    with pytest.raises(InvalidRequest, match="the reservation has 2"):
        world.pool.commit(0.0, 1, made.number, np.ones(3, bool), None)
    assert world.pool.commit(0.0, 1, made.number, np.ones(2, bool), None).tolist() == [WriteStatus.STORED] * 2


def test_an_answer_of_exists_is_not_what_makes_room_for_the_rest() -> None:
    """Key 1 is the oldest, and stands in the same put."""
    play(
        """
        open a 262144
        1> put a 1 -> stored
        1> put a 2-4 -> stored stored stored
        at 10
        1> put a 1 5 -> exists stored
        stored a 1-5 -> yes yes yes no yes      # of one put the deepest page goes first
    """,
        watermark_high=1.0,
        watermark_low=1.0,
    )


# -- what policies are told of chains ------------------------------------------------------------------------------------------------------


class Told(Lru):
    """LRU that keeps what it was told."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.events: list[Inserted] = []

    def on_inserted(self, event: Inserted) -> None:
        self.events.append(event)
        super().on_inserted(event)


def told_parents(script: Script, *keys: int) -> dict[int, int]:
    """Key -> its parent's key (0: none) as the last insert told it."""
    event = script.pool.objects.policy_now().events[-1]
    key_of = {-1: 0} | {int(i): int.from_bytes(script.pool.table.entries[i, :4].tobytes(), "big") for i in range(64)}
    return {key_of[i]: key_of[p] for i, p in zip(event.ids.tolist(), event.parents.tolist(), strict=True)}


def told_world(capacity_bytes: int = 1 << 20, entries: int = 64) -> Script:
    script = Script(World(capacity_bytes, entries))
    script.pool.objects.policy = Told(entries)
    return script


def test_the_parent_is_the_page_before_stored_or_of_the_same_put() -> None:
    script = told_world()
    script.run(f"{OPEN} 1> put a 1-3 -> stored stored stored")
    assert told_parents(script) == {1: 0, 2: 1, 3: 2}
    script.run("1> put a 3-5 -> exists stored stored")
    assert told_parents(script) == {4: 3, 5: 4}
    row = script.rows["a"]
    made = script.pool.reserve(0.0, 1, row, keys_of(6), keys_of(5).tobytes(), 0.0)
    script.pool.commit(0.0, 1, made.number, np.ones(1, bool), None)
    assert told_parents(script) == {6: 5}
    made = script.pool.reserve(0.0, 1, row, keys_of(7), keys_of(99).tobytes(), 0.0)
    script.pool.commit(0.0, 1, made.number, np.ones(1, bool), None)
    assert told_parents(script) == {7: 0}


def test_a_page_that_was_not_filled_is_nobodys_parent() -> None:
    script = told_world()
    script.run(f"""{OPEN}
        1> reserve a 1-3 as w -> pending pending pending
        1> commit w but 2 -> stored unavailable stored
    """)
    assert told_parents(script) == {1: 0, 3: 0}


def test_a_parent_that_went_before_the_commit_is_not_told_even_if_its_id_lives_on() -> None:
    script = told_world()
    script.run(f"""{OPEN}
        1> put a 1 -> stored
        1> reserve a 1 2 as w -> exists pending
        remove a 1 -> yes
        2> put a 7 -> stored                # takes the id of 1
        1> commit w -> stored
    """)
    assert told_parents(script) == {2: 0}


# -- adoption after a restart --------------------------------------------------------------------------------------------------------------


def test_a_restart_keeps_what_was_committed_and_asks_about_the_rest() -> None:
    play(f"""{OPEN}
        1> put a 1 2 -> stored stored
        1> reserve a 3 4 as w -> pending pending
        2> reserve a 5 as v -> pending
        3> put a 6 -> stored
        reboot -> 1:2 2:1
        states -> 3 live 3 orphan
        stored a 1-6 -> yes yes no no no yes
        4> put a 3 5 -> stored stored       # the keys are free, the memory is not
        gone 1                              # dead
        states -> 5 live 1 orphan
        reboot -> 2:1                       # 2 lives on, and the pool starts once more
        gone 2
        states -> 5 live
    """)


def test_leases_pins_and_removed_objects_do_not_outlive_a_restart() -> None:
    play(f"""{OPEN}
        1> put a 1-3 -> stored stored stored
        1> lease a 1 2 as x -> held held
        0> pin a 3 as p -> 1
        remove a 1 -> yes
        reboot -> -
        states -> 2 live
        1> renew x -> lost x
        0> unpin p -> not_found
    """)


def test_a_flush_cut_short_by_a_restart_is_finished_by_it() -> None:
    play(f"""{OPEN}
        1> put a 1 2 -> stored stored
        1> reserve a 3 as w -> pending
        flush a -> 2
        1> put a 2 -> stored
        reboot -> 1:1
        states -> 1 live 1 orphan
        stored a 1-3 -> no yes no
        held a -> 4096                      # the orphan is of a namespace number that is no more
        1> put a 1 3 -> stored stored
        gone 1
        states -> 3 live
    """)


def test_adopted_orphans_of_many_sizes_are_each_given_back() -> None:
    play("""
        open a 4096
        open b 300
        1> reserve a 1 as u -> pending
        1> reserve b 1 2 as v -> pending pending
        2> reserve b 3 as w -> pending
        flush a -> 0
        flush b -> 0
        reboot -> 1:3 2:1
        reboot -> 1:3 2:1
        gone 2
        gone 1
        states -> -
    """)


def test_numbers_and_versions_of_a_former_boot_are_not_given_out_again() -> None:
    script = play(f"{OPEN} 1> put a 1 -> stored")
    seen = find(script.pool, script.rows["a"], 1)
    script.run("""
        reboot -> -
        remove a 1 -> yes
        1> put a 1 -> stored
    """)
    again = find(script.pool, script.rows["a"], 1)
    assert again.ids[0] == seen.ids[0], "the entry was not reused: this proves nothing"
    assert again.versions[0] > seen.versions[0]
    before = int(script.pool.rows[script.rows["a"], 0])
    script.run("reboot -> - \n flush a -> 1")
    assert int(script.pool.rows[script.rows["a"], 0]) > before


def test_an_object_that_finds_no_slot_at_a_restart_is_dropped_and_the_pool_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    script = play(f"{OPEN} 1> put a 1-4 -> stored stored stored stored")
    real = type(script.pool.table).enter

    def enter_but_one(self, ids):
        return np.r_[real(self, ids[:-1]), np.zeros(len(ids[-1:]), bool)]

    monkeypatch.setattr(type(script.pool.table), "enter", enter_but_one)
    script.run("""
        reboot -> -
        states -> 3 live
        stored a 1-4 -> no yes yes yes
    """)


def test_checksums_that_are_missing_after_a_restart_are_queued() -> None:
    script = play(f"{OPEN} 1> put a 1 2 -> stored stored")
    ids, versions = script.pool.next_unsummed()
    assert script.pool.set_sums(ids[:1], versions[:1], np.array([7], np.uint64)).all()
    script.run("reboot -> -")
    ids, _ = script.pool.next_unsummed()
    assert script.pool.table.entries[ids, W_SUM].tolist() == [0]
    assert len(ids) == 1


def test_a_write_cut_in_the_middle_of_its_entry_is_no_write() -> None:
    """The version is stored last: without it the entry is free, whatever its other words say."""
    script = play(f"{OPEN} 1> reserve a 1 as w -> pending")
    at = script.pool.table.reserved()
    script.world.entries[at, W_VERSION] = 0
    script.run("""
        reboot -> -
        states -> -
        1> put a 1 -> stored
    """)
