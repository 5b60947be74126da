"""Leases and pins, as scripts (`core.script` says what the lines mean)."""

import numpy as np
import pytest
from core.script import Script, play
from core.world import World, keys_of

from umbp.core import leases
from umbp.errors import LimitReached, NotFound

BASE = """
    open a 4096
    1> put a 1-4 -> stored stored stored stored
"""


def test_a_lease_holds_what_is_stored_and_says_so_an_item() -> None:
    play(f"""{BASE}
        1> lease a 1 9 3 1 as x -> held gone held held
        1> release x -> yes
        1> release x -> no          # once
    """)


def test_a_removed_object_stays_in_memory_until_its_last_lease_ends() -> None:
    play(f"""{BASE}
        1> lease a 1 2 as x -> held held
        2> lease a 2 3 as y -> held held
        remove a 1-4 -> yes yes yes yes
        stored a 1-4 -> no no no no
        states -> 3 zombie
        1> release x -> yes
        states -> 2 zombie
        2> release y -> yes
        states -> -
        held a -> 0
    """)


def test_a_key_put_again_under_a_lease_is_another_object() -> None:
    play(f"""{BASE}
        1> lease a 1 as x -> held
        remove a 1 -> yes
        2> put a 1 -> stored
        states -> 4 live 1 zombie
        2> lease a 1 as y -> held
        1> release x -> yes
        stored a 1 -> yes
        states -> 4 live
        2> release y -> yes
    """)


def test_a_version_that_was_looked_up_before_it_changed_is_not_held() -> None:
    play(f"""{BASE}
        find a 1 2 3 as seen -> yes yes yes
        remove a 1 2 -> yes yes
        2> put a 2 -> stored
        1> lease seen as x -> gone gone held
    """)


def test_a_flushed_object_cannot_be_leased_while_its_removal_is_under_way() -> None:
    play(f"""{BASE}
        find a 1-4 as seen -> yes yes yes yes
        flush a -> 4
        1> lease seen as x -> gone gone gone gone
        keys a -> 0
        at 1
        states -> -
    """)


def test_a_lease_taken_before_a_flush_protects_until_it_ends() -> None:
    play(f"""{BASE}
        1> lease a 1 as x -> held
        flush a -> 4
        at 1
        stored a 1 -> no
        states -> 1 zombie
        1> release x -> yes
        states -> -
    """)


def test_time_runs_from_the_grant_and_anew_from_each_renewal() -> None:
    play(f"""{BASE}
        at 10
        1> lease a 1 for 5 as x -> held
        1> lease a 2 for 5 as y -> held
        at 14
        1> renew x -> -
        at 15                       # y is over at its limit, not after it
        1> renew x y -> lost y
        1> release y -> no
        at 19
        1> release x -> yes
    """)


def test_a_lease_ends_at_the_pools_limit_whatever_was_asked() -> None:
    play(
        f"""{BASE}
        1> lease a 1 for 1000 as x -> held
        1> lease a 1 as y -> held   # nothing asked: the default
        at 5
        1> renew x y -> lost y
        at 13
        1> renew x -> lost x
    """,
        lease_seconds=5.0,
        lease_seconds_max=8.0,
    )


def test_a_lease_is_its_sessions_own() -> None:
    play(f"""{BASE}
        1> lease a 1 as x -> held
        2> release x -> no
        2> renew x -> lost x
        2> die -> done
        1> renew x -> -
        1> close -> done
        1> renew x -> lost x
    """)


def test_an_expired_lease_of_a_removed_object_gives_its_memory_back() -> None:
    play(f"""{BASE}
        1> lease a 1-4 for 5 as x -> held held held held
        remove a 1-4 -> yes yes yes yes
        states -> 4 zombie
        at 5
        states -> -
    """)


def test_a_pin_outlives_leases_and_ends_with_its_session_time_or_unpin() -> None:
    play(f"""{BASE}
        1> pin a 1 2 9 as p -> 2
        0> pin a 3 for 20 as q -> 1
        0> pin a 4 as r -> 1
        at 19
        1> die -> done
        0> unpin p -> not_found
        at 20
        0> unpin q -> not_found
        0> unpin r -> ok
        0> unpin r -> not_found
    """)


def test_a_pin_does_not_pass_on_to_whatever_takes_the_entry_next() -> None:
    """Entry ids are reused, last freed first: the put below gets the id of the pinned key 1."""
    script = play(f"""{BASE}
        0> pin a 1 as p -> 1
        0> pin a 1 as q -> 1
        remove a 1 -> yes
        1> put a 5 -> stored
    """)
    pinned = int(script.pool.leases.pins[script.named["p"]].ids[0])
    assert script.pool.table.entries[pinned, :4].tobytes() == keys_of(5).tobytes(), "the id was not reused: this proves nothing"
    script.run("""
        0> pin a 5 as s -> 1
        0> unpin p -> ok
        0> unpin s -> ok
        0> unpin q -> ok
    """)


def test_a_pinned_object_that_is_removed_under_a_lease_goes_with_the_lease() -> None:
    play(f"""{BASE}
        0> pin a 1 as p -> 1
        1> lease a 1 as x -> held
        remove a 1 -> yes
        states -> 3 live 1 zombie
        0> unpin p -> ok
        1> release x -> yes
        states -> 3 live
    """)


def test_leases_are_bounded_by_bytes_and_a_refusal_changes_nothing() -> None:
    play(
        f"""{BASE}
        1> lease a 1 2 as x -> held held
        2> lease a 1 2 as y -> held held       # the same bytes once more are no more bytes
        2> lease a 1 3 as z -> limit_reached
        1> release x -> yes
        2> lease a 3 as z -> limit_reached
        2> release y -> yes
        2> lease a 3 4 as z -> held held
    """,
        lease_share=2 * 4096 / (1 << 20),
    )


def test_leases_are_bounded_in_number_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASES_PER_SESSION_MAX", 50)
    script = play(BASE)
    take = "1> lease a 1 as x -> held\n"
    script.run(take * leases.LEASES_PER_SESSION_MAX)
    script.run("""
        1> lease a 1 as y -> limit_reached
        2> lease a 1 as y -> held
        1> release x -> yes
        1> lease a 1 as x -> held
    """)


def test_pins_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PINS_MAX", 3)
    play(f"""{BASE}
        0> pin a 1 as p -> 1
        0> pin a 1 as q -> 1
        1> pin a 1 as r -> 1
        0> pin a 1 as s -> limit_reached
        1> close -> done
        0> pin a 1 as s -> 1
    """)


@pytest.mark.parametrize("verb", ["renew", "release"])
def test_deadlines_that_mean_nothing_any_more_do_not_pile_up(verb: str) -> None:
    script = play(BASE)
    pool = script.pool
    none = np.empty(0, np.int64)
    lease, _ = pool.lease(0.0, 1, none, none.view(np.uint64), 100.0)
    for step in range(20_000):
        if verb == "renew":
            assert pool.leases.renew(step / 1000, 1, [lease.number]) == []
        else:
            assert pool.leases.release(1, lease.number)
            lease, _ = pool.lease(step / 1000, 1, none, none.view(np.uint64), 100.0)
    assert len(pool.leases._deadlines) < 5000
    assert pool.leases.expire(200.0) == 1


def test_ids_that_are_none_are_not_held() -> None:
    pool = Script(World(1 << 20, 64)).pool
    lease, held = pool.lease(0.0, 1, np.array([-1, 64, 1 << 40, 0], np.int64), np.array([2, 2, 2, 0], np.uint64), 1.0)
    assert held.tolist() == [False] * 4
    assert len(lease.ids) == 0
    pool.check()


def test_errors_name_the_limit() -> None:
    pool = Script(World(1 << 20, 64)).pool
    with pytest.raises(NotFound, match="no pin 7"):
        pool.leases.unpin(7)
    none = np.empty(0, np.int64)
    for _ in range(leases.LEASES_PER_SESSION_MAX):
        pool.lease(0.0, 1, none, none.view(np.uint64), 1.0)
    with pytest.raises(LimitReached, match="limit is 1024"):
        pool.lease(0.0, 1, none, none.view(np.uint64), 1.0)
