"""What requests asked for, on its way to the pool's history: with a call, or by the background."""

from __future__ import annotations

import numpy as np
import pytest

import umbp
from tests.field.people import eventually, keys_of, values_of
from tests.pools import PoolProcess
from umbp.client import notes
from umbp.client.notes import NOTES_MAX, RIDE_BYTES_MAX, Notes
from umbp.client.statistics import ClientStatistics
from umbp.layout import Layout
from umbp.types import ReadStatus, WriteStatus


def test_they_ride_when_it_is_time_and_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(notes.time, "monotonic", lambda: now[0])
    statistics = ClientStatistics()
    kept = Notes(statistics)
    assert kept.seconds_left(now[0]) == float("inf")
    assert not kept.may_ride(now[0])
    kept.add(1, keys_of(1, 2), 7)
    assert not kept.may_ride(now[0])  # others may come
    assert kept.seconds_left(now[0] + 0.01) == pytest.approx(notes.NOTE_SECONDS - 0.01)
    kept.add(1, keys_of(1, 2), 7)  # the same again
    now[0] += notes.RIDE_SECONDS
    assert (kept.kept, kept.made) == (1, 1)
    assert kept.may_ride(now[0])
    assert len(list(kept.take())) == 1
    assert (kept.kept, kept.made, statistics.notes_sent) == (0, 1, 1)
    kept.add(1, np.zeros((RIDE_BYTES_MAX // 32 + 1, 32), np.uint8), 0)
    assert not kept.may_ride(now[0] + 1.0)  # a call would wait for so many
    assert kept.seconds_left(now[0] + 1.0) == 0.0


def test_the_oldest_go_first_and_are_counted() -> None:
    statistics = ClientStatistics()
    kept = Notes(statistics)
    for number in range(NOTES_MAX + 5):
        kept.add(1, keys_of(number), 0)
    assert (kept.kept, statistics.notes_dropped) == (NOTES_MAX, 5)
    kept.forget()
    assert kept.kept == 0
    assert not list(kept.take())


def test_a_call_takes_them_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the background, which would wait for a minute here: they are in the history when the next call is answered."""
    monkeypatch.setattr(notes, "NOTE_SECONDS", 60.0)
    monkeypatch.setattr(notes, "RIDE_SECONDS", 0.0)
    with PoolProcess(dram="16MiB") as server, umbp.connect(server.socket) as pool:
        space = pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(4096))
        assert space.put(keys_of(1, 2), values_of([1, 2], 4096)).all(WriteStatus.STORED)
        before = pool.status()["counters"]["lookups"]
        for _ in range(3):
            assert space.get(keys_of(1, 2), np.zeros((2, 4096), np.uint8)).all(ReadStatus.HIT)
            with space.lease(keys_of(1, 2)) as lease:  # of the same request
                assert lease.held.all()
        eventually(lambda: pool.status()["counters"]["lookups"] == before + 6, "entered")
        assert pool.statistics().notes_sent >= 3


def test_the_background_sends_what_no_call_takes() -> None:
    with PoolProcess(dram="16MiB") as server, umbp.connect(server.socket) as pool, umbp.connect(server.socket) as other:
        space = pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(4096))
        assert not space.lookup(keys_of(1, 2, 3)).any()
        eventually(lambda: other.status()["counters"]["lookups"] == 3, "entered")
