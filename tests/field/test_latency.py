"""What takes long elsewhere: a call a key, a lock a key, an interpreter that is held, long work in front of short calls.

Field reports KV-24 and KV-25. Counts where counts say it; else times of one run against each other, or processor time: a busy machine
stretches every other time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, eventually, keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus
from umbp.client import mover
from umbp.client.steps import Call

MIB = 1 << 20


@pytest.fixture
def calls(pool: umbp.Pool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls that a client makes from now on."""
    made: list[str] = []
    call = pool.call

    def counted(step: Call) -> Any:
        made.append(type(step.message).__name__)
        return call(step)

    monkeypatch.setattr(pool, "call", counted)
    return made


@pytest.mark.parametrize("count", [1, 100, 1000])
def test_calls_do_not_grow_with_the_keys(space_of: Any, calls: list[str], count: int) -> None:
    space, keys = space_of(64), keys_of(*range(count))
    values, out = values_of(range(count), 64), np.zeros((count, 64), np.uint8)
    calls.clear()
    assert not space.lookup(keys).any()
    assert space.prefix(keys) == 0
    assert space.get(keys, out).all(ReadStatus.MISS)
    assert calls == []  # absence is known without asking anybody
    assert space.put(keys, values).all(WriteStatus.STORED)
    assert calls == ["Reserve", "Commit"]
    calls.clear()
    assert space.lookup(keys).all()
    assert space.prefix(keys) == count
    assert space.get(keys, out).all(ReadStatus.HIT)
    assert space.put(keys, values).all(WriteStatus.EXISTS)
    assert calls == []
    with space.lease(keys) as lease:
        for i in range(count):
            lease.view(i)
        assert lease.check().all()
    assert calls == ["TakeLease", "Release"]
    calls.clear()
    assert space.remove(keys).all()
    assert calls == ["Remove"]


def test_large_gets_let_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ticks every millisecond beside gets of 100 MiB: it ticks while they copy."""
    with PoolProcess(dram="128MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, MIB)
        numbers = list(range(100))
        values = np.zeros((100, MIB), np.uint8)
        assert space.put(keys_of(*numbers), values).all(WriteStatus.STORED)
        stop, ticks, gather = threading.Event(), [0], mover.gather
        most = 0

        def tick() -> None:
            while not stop.is_set():
                time.sleep(0.001)
                ticks[0] += 1

        def counted(*copy: Any) -> None:
            nonlocal most
            before = ticks[0]
            gather(*copy)
            most = max(most, ticks[0] - before)

        def get() -> bool:
            assert space.get(keys_of(*numbers), values).all(ReadStatus.HIT)
            return most >= 4  # where the interpreter is held there is one at the most, before it was taken

        monkeypatch.setattr(mover, "gather", counted)
        ticker = threading.Thread(target=tick)
        ticker.start()
        try:
            eventually(get, "another thread ran while pages were copied")
        finally:
            stop.set()
            ticker.join()


def test_lookups_are_right_and_quick_while_the_full_pool_evicts() -> None:
    with PoolProcess("--keys-max", "20000", dram="16MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 64)
        keys = keys_of(*range(20_000))
        space.put(keys, np.zeros((20_000, 64), np.uint8))
        with Child(_evict_for_ever, server.socket) as writer:
            writer.hear()
            times: list[float] = []

            def look() -> bool:
                for _ in range(20):
                    start = time.thread_time()
                    found = space.lookup(keys)
                    times.append(time.thread_time() - start)
                    assert found.shape == (20_000,)
                return len(times) >= 60 and pool.status()["counters"]["evicted_keys"] > 1000

            eventually(look, "the pool evicts")
            assert sorted(times)[len(times) // 2] < 0.2


def _evict_for_ever(child: Child, socket: str) -> None:
    with umbp.connect(socket) as pool:
        space, number = open_namespace(pool, 64), 100_000
        child.say("evicting")
        while True:
            space.put(keys_of(*range(number, number + 500)), np.zeros((500, 64), np.uint8))
            number += 500


def test_short_calls_of_others_are_not_behind_a_large_put_or_verify() -> None:
    """One client stores and verifies 64 MiB at a time; the other's calls are answered in between."""
    with PoolProcess(dram="192MiB") as server, umbp.connect(server.socket) as pool, Child(_large, server.socket) as other:
        other.hear()
        space, short, large = open_namespace(pool, 64), [], []
        until = time.monotonic() + 2.0
        while time.monotonic() < until or len(short) < 20 or len(large) < 5:
            start = time.monotonic()
            space.remove(keys_of(1))
            short.append(time.monotonic() - start)
            if other.said():
                large.append(other.hear())
        assert sorted(short)[len(short) // 2] < sorted(large)[len(large) // 2] / 4


def _large(child: Child, socket: str) -> None:
    with umbp.connect(socket) as pool:
        space, number = open_namespace(pool, MIB), 0
        values = np.zeros((64, MIB), np.uint8)
        child.say("started")
        while True:
            batch = keys_of(*range(number, number + 64))
            start = time.monotonic()
            space.put(batch, values)
            space.get(batch, values, verify="always")
            child.say(time.monotonic() - start)
            number += 64
