"""Memory ahead of a put, from the commit that gives it to every end that it can have (`core.script` says what the lines mean)."""

import functools

import core.script
import numpy as np
from core.world import World, keys_of, open_namespace, put

from umbp.core.spares import BYTES_MAX, SHARE
from umbp.core.writes import RESERVATIONS_PER_SESSION_MAX
from umbp.store.index import W_OFFSET
from umbp.types import WriteStatus

OPEN = "open a 4096\n"
play = functools.partial(core.script.play, entries=256)


def test_what_is_filled_ahead_is_visible_after_its_commit_only() -> None:
    play(f"""{OPEN}
        1> spare a 2 as s -> 2
        keys a -> 0
        held a -> 0                     # it is nobody's
        1> use s a 1 2
        stored a 1 2 -> no no
        held a -> 8192
        2> put a 1 -> pending           # it is on its way
        1> commit s -> stored stored
        stored a 1 2 -> yes yes
        1> commit s -> expired expired
    """)


def test_the_next_is_ready_when_one_is_used_and_given_once() -> None:
    play(f"""{OPEN}
        1> spare a 2 as s -> 2
        1> use s a 1 2
        states -> 4 reserved            # and two for the next
        1> spare a 2 as t -> 2          # those
        states -> 4 reserved
        1> commit s -> stored stored
        1> use t a 3 4
        1> commit t -> stored stored
        keys a -> 4
    """)


def test_memory_that_is_being_filled_for_nothing_is_nobodys_until_its_commit() -> None:
    """Its writer fills all of its pages, also those that are stored, or on their way, or twice in the batch."""
    for batch, answers in (("1 2", "exists stored"), ("2 3", "stored pending"), ("2 2", "stored pending")):
        play(f"""{OPEN}
            1> put a 1 -> stored
            2> reserve a 3 as w -> pending
            1> spare a 2 as s -> 2
            1> use s a {batch}
            states -> 3 reserved 1 live
            2> put a 2 -> stored            # the key is free, the memory is not
            2> remove a 2 -> yes
            1> commit s -> expired expired
            states -> 1 reserved 1 live
            1> put a {batch} -> {answers}
        """)


def test_fewer_pages_than_there_is_memory_for_give_the_rest_back() -> None:
    play(f"""{OPEN}
        1> spare a 4 as s -> 4
        1> use s a 1
        1> commit s -> stored
        1> die -> done
        states -> 1 live
    """)


def test_what_was_not_filled_is_given_back() -> None:
    play(f"""{OPEN}
        1> spare a 3 as s -> 3
        1> use s a 1-3
        1> commit s but 2 -> stored unavailable stored
        1> die -> done
        states -> 2 live
    """)


def test_memory_that_is_not_used_goes_back_by_its_commit() -> None:
    play(f"""{OPEN}
        1> spare a 2 as s -> 2
        1> commit s -> expired expired
        states -> -
        1> use s a 1 2                  # too late
        1> commit s -> expired expired
    """)


def test_it_serves_no_more_pages_and_no_other_size_than_it_was_for() -> None:
    play(f"""{OPEN}open b 8192
        1> spare a 2 as s -> 2
        1> use s a 1-3
        1> commit s -> expired expired expired
        1> spare a 2 as s -> 2
        1> use s b 1 2
        1> commit s -> expired expired
        1> spare a 2 as s -> 2
        2> use s a 1 2                  # another's
        2> commit s -> expired expired
        1> use s a 1 2
        1> commit s -> stored stored
    """)


def test_a_flush_reaches_what_is_filled_ahead() -> None:
    play(f"""{OPEN}
        1> spare a 2 as s -> 2
        1> use s a 1 2
        flush a -> 0
        1> commit s -> flushed flushed
        stored a 1 2 -> no no
    """)


def test_its_memory_is_kept_for_a_writer_that_may_still_write() -> None:
    play(
        f"""{OPEN}
        1> spare a 2 as s -> 2
        1> use s a 1 2
        1> spare a 2 as t -> 2
        at 5
        states -> 4 orphan
        1> commit s -> expired expired
        1> commit t -> expired expired  # not used in time
        states -> -
        """,
        reservation_seconds=5.0,
    )
    play(f"""{OPEN}
        1> spare a 2 as s -> 2
        1> close -> waits
        states -> 2 orphan
        gone 1
        states -> -
    """)


def test_what_was_never_given_is_free_at_its_time_and_at_the_end_of_the_session() -> None:
    play(
        f"""{OPEN}
        1> spare a 2 as s -> 2
        1> use s a 1 2
        1> commit s -> stored stored
        states -> 2 reserved 2 live
        at 5
        states -> 2 live
        """,
        reservation_seconds=5.0,
    )
    play(f"""{OPEN}
        1> spare a 2 as s -> 2
        1> use s a 1 2
        1> commit s -> stored stored
        1> close -> done
        states -> 2 live
    """)


def test_after_a_restart_it_is_an_orphan_of_its_session() -> None:
    script = play(f"""{OPEN}
        1> spare a 2 as s -> 2
        2> spare a 1 as t -> 1
        2> use t a 7
        reboot -> 1:2 2:2               # 2 has one that is filled, and one ready
        stored a 7 -> no
        gone 1
        gone 2
        states -> -
    """)
    assert script.pool.objects.allocated_bytes() == 0


def test_there_is_none_where_each_put_needs_a_look() -> None:
    play(f"{OPEN}quota a 40960\n1> spare a 2 as s -> 0")
    play(f"{OPEN}1> spare a 2 as s -> 0", admission="second_touch")
    play(f"""{OPEN}
        1> spare a 2 as s -> 2
        quota a 4096
        1> use s a 1 2
        1> commit s -> expired expired
        held a -> 0
    """)


def test_it_costs_no_eviction_and_is_bounded() -> None:
    world = World(1 << 20, 1024)
    row = open_namespace(world.pool, "a", 4096)
    account = world.pool.find_namespace(row).account
    most = (1 << 20) // SHARE // 4096
    given = [world.pool.give_spare(0.0, session, account, 3) for session in range(1, 8)]
    assert sum(len(made.ids) for made in given if made) == most // 3 * 3
    world.pool.check()
    for session in range(1, 8):
        world.pool.connection_closed(session, gone=True)
    assert put(world.pool, row, *range(245)) == ["stored"] * 245
    assert world.pool.give_spare(0.0, 1, account, 4) is None, "it would reach above the high watermark"
    assert world.pool.objects.evicted_keys == 0
    large = World(64 * BYTES_MAX, 1024)
    account = large.pool.find_namespace(open_namespace(large.pool, "a", BYTES_MAX // 8)).account
    assert large.pool.give_spare(0.0, 1, account, 9) is None
    assert large.pool.give_spare(0.0, 1, account, 6) is not None
    assert large.pool.give_spare(0.0, 1, account, 6) is None, "one session has so much at most"
    assert large.pool.give_spare(0.0, 2, account, 6) is not None


def test_what_is_ready_goes_back_before_anyone_is_refused() -> None:
    play(
        f"""{OPEN}
        1> spare a 1 as s -> 1
        1> use s a 1                    # and one page is ready for the next
        2> put a 2-31 -> {" ".join(["stored"] * 30)}
        2> pin a 2-31 as p -> 30
        2> put a 32 -> stored
        2> put a 33 -> stored           # in the place of 32
        2> pin a 33 as q -> 1
        2> put a 34 -> all_leased
        1> commit s -> stored
        1> spare a 1 as t -> 0
        """,
        capacity_bytes=32 * 4096,
        watermark_high=1.0,
        watermark_low=0.99,
    )


def test_memory_ahead_does_not_count_as_an_open_write() -> None:
    world = World(1 << 24, 16384)
    row = open_namespace(world.pool, "a", 256)
    account = world.pool.find_namespace(row).account
    assert all(world.pool.give_spare(0.0, 1, account, 1) for _ in range(RESERVATIONS_PER_SESSION_MAX))
    assert world.pool.give_spare(0.0, 1, account, 1) is None
    assert put(world.pool, row, 1, session=1) == ["stored"]


def test_entries_stay_reserved_while_they_get_their_keys() -> None:
    """Their writer is at it: after a crash at any moment of it the memory must not be anybody's."""
    world = World(1 << 20, 256)
    row = open_namespace(world.pool, "a", 4096)
    account = world.pool.find_namespace(row).account
    made = world.pool.give_spare(0.0, 1, account, 3)
    assert made is not None
    offsets = world.entries[made.ids, W_OFFSET].copy()
    name = world.pool.table.name_reserved

    def watched(ids, words, place):
        assert np.isin(made.ids, world.pool.table.reserved()).all()
        name(ids, words, place)
        assert np.isin(made.ids, world.pool.table.reserved()).all()
        assert np.array_equal(world.entries[made.ids, W_OFFSET], offsets)

    world.pool.table.name_reserved = watched
    world.pool.use_spare(0.0, 1, row, made.number, keys_of(1, 2, 3), b"", account.number)
    assert world.pool.commit(0.0, 1, made.number, np.ones(3, bool), None).tolist() == [WriteStatus.STORED] * 3


def full_but_for_what_is_given(pages: int = 1) -> tuple[World, int, list[tuple[int, int]]]:
    """A pool of 64 pages of which these are given to session 1, and all others are pinned; what the session is told is kept."""
    world = World(64 * 4096, 128, watermark_high=1.0, watermark_low=0.99)
    row = open_namespace(world.pool, "a", 4096)
    made = world.pool.give_spare(0.0, 1, world.pool.find_namespace(row).account, pages)
    assert made is not None
    assert set(put(world.pool, row, *range(64 - pages), session=2)) == {"stored"}
    world.pool.pin(0.0, 2, row, keys_of(*range(64 - pages)), 0.0, "")
    told: list[tuple[int, int]] = []
    return world, row, told


def test_what_was_given_is_recalled_before_anyone_is_refused() -> None:
    world, row, told = full_but_for_what_is_given(2)
    (number,) = world.pool.writes.open

    def recall(session: int, newest: int) -> bool:
        told.append((session, newest))
        return True

    world.pool.spares.recall = recall
    assert put(world.pool, row, 100, 101, session=3) == ["stored", "stored"]
    assert told == [(1, number)]
    world.pool.use_spare(0.0, 1, row, number, keys_of(200, 201), b"", world.pool.find_namespace(row).account.number)  # too late
    assert world.pool.commit(0.0, 1, number, np.zeros(2, bool), None).tolist() == [WriteStatus.EXPIRED] * 2
    world.pool.check()


def test_what_may_be_being_filled_is_not_taken_back() -> None:
    world, row, told = full_but_for_what_is_given()
    (number,) = world.pool.writes.open
    world.pool.spares.recall = lambda session, newest: bool(told.append((session, newest)))
    assert put(world.pool, row, 100, session=3) == ["all_leased"]
    assert told == [(1, number)]
    world.pool.use_spare(0.0, 1, row, number, keys_of(200), b"", world.pool.find_namespace(row).account.number)
    assert put(world.pool, row, 100, session=3) == ["all_leased"]
    assert told == [(1, number)], "it is a write as any other by now"
    assert world.pool.commit(0.0, 1, number, np.ones(1, bool), None).tolist() == [WriteStatus.STORED]
    world.pool.check()
