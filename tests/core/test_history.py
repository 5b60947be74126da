"""The access history: what is entered when, in which order, and what is given up."""

import numpy as np
from core.world import World, keys_of, open_namespace, put

from umbp.core.history import BYTES_MAX, REQUESTS_MAX, SLICE_KEYS, SLICE_REQUESTS


class Heard:
    """An admission policy that writes down what it is told: the conversation of each request, and the ids of its keys."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, list[int]]] = []

    def on_request(self, event) -> None:
        self.requests.append((event.conversation, event.ids.tolist()))

    @property
    def conversations(self) -> list[int]:
        return [conversation for conversation, _ in self.requests]


def world_of(entries: int = 8192) -> tuple[World, int, Heard]:
    world = World(entries * 256, entries)
    world.pool.admission = Heard()
    return world, open_namespace(world.pool, "a", 256), world.pool.admission


def many(count: int, start: int = 0) -> np.ndarray:
    keys = np.zeros((count, 32), np.uint8)
    keys[:, -8:] = np.arange(start, start + count, dtype=">u8").view(np.uint8).reshape(-1, 8)
    return keys


def drain(world: World, session: int | None = None) -> int:
    """Calls until nothing waits."""
    calls = 1
    while world.pool.history.heed(1.0, session):
        world.pool.history.check()
        calls += 1
    world.pool.history.check()
    return calls


def test_a_request_is_told_once_all_of_its_keys_were_looked_up_a_slice_at_a_time() -> None:
    world, row, heard = world_of(3 * SLICE_KEYS)
    assert put(world.pool, row, 1, 2 * SLICE_KEYS + 1) == ["stored", "stored"]
    count = 2 * SLICE_KEYS + 2
    world.pool.history.add(1, row, many(count), [(count, 7)])
    assert world.pool.history.heed(1.0)
    assert world.pool.history.heed(1.0)
    assert heard.requests == []
    assert not world.pool.history.heed(1.0)
    ((conversation, ids),) = heard.requests
    assert conversation == 7
    assert np.flatnonzero(np.array(ids) >= 0).tolist() == [1, count - 1]
    counters = world.pool.counters
    assert (counters.notes, counters.lookups, counters.hits) == (1, count, 2)


def test_what_went_between_two_slices_is_no_hit_although_its_entry_is_anothers_now() -> None:
    world, row, heard = world_of()
    assert put(world.pool, row, 1, 2) == ["stored", "stored"]
    world.pool.history.add(1, row, many(SLICE_KEYS + 1), [(SLICE_KEYS + 1, 0)])
    assert world.pool.history.heed(1.0)
    world.pool.remove(row, keys_of(1))
    assert put(world.pool, row, 10**6) == ["stored"]  # in the entry that has just become free
    assert drain(world) == 1
    assert np.flatnonzero(np.array(heard.requests[0][1]) >= 0).tolist() == [2]


def test_small_requests_are_looked_up_together_and_told_some_at_a_time_in_their_order() -> None:
    world, row, heard = world_of()
    count = 3 * SLICE_REQUESTS + 1
    world.pool.history.add(1, row, many(count), [(1, number) for number in range(count)])
    assert drain(world) == 4
    assert heard.conversations == list(range(count))


def test_requests_without_keys_are_requests_too() -> None:
    world, row, heard = world_of()
    world.pool.history.add(1, row, many(1), [(0, 1), (1, 2), (0, 3)])
    drain(world)
    assert heard.conversations == [1, 2, 3]


def test_sessions_take_turns_and_each_keeps_its_order() -> None:
    world, row, heard = world_of()
    for number in range(4):
        world.pool.history.add(1, row, many(SLICE_KEYS), [(SLICE_KEYS, 10 + number)])
    world.pool.history.add(2, row, many(3), [(1, 20), (2, 21)])
    drain(world)
    assert heard.conversations == [10, 20, 21, 11, 12, 13]


def test_one_session_can_be_served_before_the_others() -> None:
    world, row, heard = world_of()
    for session in (1, 2):
        for number in range(2):
            world.pool.history.add(session, row, many(2), [(2, 10 * session + number)])
    assert world.pool.history.waits(2)
    assert drain(world, session=2) == 2
    assert not world.pool.history.waits(2)
    assert world.pool.history.waits(1)
    assert heard.conversations == [20, 21]


def test_requests_of_a_namespace_that_was_flushed_are_forgotten() -> None:
    world, row, heard = world_of()
    other = open_namespace(world.pool, "b", 256)
    world.pool.history.add(1, row, many(SLICE_KEYS + 1), [(SLICE_KEYS + 1, 1)])
    world.pool.history.add(1, other, many(1), [(1, 2)])
    world.pool.history.add(1, row + other + 1, many(1), [(1, 3)])  # there is no such namespace
    assert world.pool.history.heed(1.0)
    world.pool.flush(row)
    drain(world)
    assert heard.conversations == [2]


def test_the_oldest_of_the_session_with_the_most_goes_when_too_much_waits() -> None:
    world, row, heard = world_of()
    history, keys = world.pool.history, many(65_536)
    history.add(2, row, many(1), [(1, 99)])
    most = BYTES_MAX // keys.nbytes
    for number in range(most + 2):
        history.add(1, row, keys, [(len(keys), number)])
        history.check()
    assert world.pool.counters.notes_dropped == 3
    while history.heed(1.0):
        pass
    assert heard.conversations == [99, *range(3, most + 2)]


def test_the_number_of_requests_that_wait_is_bounded_too() -> None:
    world, row, heard = world_of()
    for number in range(5):
        world.pool.history.add(number, row, many(0), [(0, number)] * (REQUESTS_MAX // 4))
        world.pool.history.check()
    assert world.pool.counters.notes_dropped == REQUESTS_MAX // 4
    drain(world)
    assert heard.conversations.count(0) == 0
    assert len(heard.conversations) == REQUESTS_MAX
