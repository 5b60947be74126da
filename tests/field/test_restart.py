"""The pool is killed in the middle of everything and started again: what it owes to those it had acknowledged, and to those it had not."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import (
    SLACK_SECONDS,
    Child,
    bytes_of,
    cpu_seconds,
    eventually,
    half_a_put,
    keys_of,
    open_namespace,
    stalled_seconds,
    values_of,
)
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus
from umbp.client import mover

MIB = 1 << 20


def _put_for_ever(child: Child, socket: str, size: int, seed: int) -> None:
    """Puts batch after batch and says what was acknowledged; goes on over every restart."""
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, size)
        number = seed * 100_000
        child.say("writing")
        while True:
            batch = list(range(number, number + 4))
            start = time.monotonic() - stalled_seconds()
            status = space.put(keys_of(*batch), values_of(batch, size))
            seconds = time.monotonic() - stalled_seconds() - start
            stored = [n for n, each in zip(batch, status, strict=True) if each in (WriteStatus.STORED, WriteStatus.EXISTS)]
            odd = sorted({each.code for each in status} - {"stored", "exists", "unavailable", "expired"})
            if stored or odd or seconds > 3:
                child.say([stored, odd, seconds])
                number += 4
            else:
                time.sleep(0.002)


def _collect(child: Child, into: set[int], until: float) -> None:
    while time.monotonic() < until:
        try:
            stored, odd, seconds = child.hear(max(0.01, until - time.monotonic()))
        except AssertionError:
            return
        assert not odd, odd
        assert seconds < 3 + SLACK_SECONDS, seconds
        into.update(stored)


def test_pool_killed_in_the_middle_of_puts_serves_what_it_acknowledged() -> None:
    size, chance = 4096, random.Random(3)
    # Room for all that is put, told or not: a page that was evicted would look like one that was lost.
    with PoolProcess("--keys-max", "131072", dram="512MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        writers = [Child(_put_for_ever, server.socket, size, seed) for seed in range(1, 4)]
        stored: list[set[int]] = [set() for _ in writers]
        try:
            for writer in writers:
                assert writer.hear() == "writing"
            for turn in range(2):
                until = time.monotonic() + 0.3 + chance.random() * 0.3
                listeners = [threading.Thread(target=_collect, args=(w, s, until)) for w, s in zip(writers, stored, strict=True)]
                for listener in listeners:
                    listener.start()
                time.sleep(max(0.0, until - time.monotonic() - 0.05))
                server.kill()
                out = np.zeros((8, size), np.uint8)
                assert set(space.get(keys_of(*range(8)), out)) <= {ReadStatus.MISS, ReadStatus.BUSY}
                assert space.put(keys_of(1), values_of([1], size)).all(WriteStatus.UNAVAILABLE)
                with space.lease(keys_of(*range(8))) as lease:
                    assert not lease.held.any()
                for listener in listeners:
                    listener.join()
                server.restart()
                eventually(lambda: pool.connected, "the client connects again by itself")
                everything = sorted(set().union(*stored))
                out = np.zeros((len(everything), size), np.uint8)
                assert space.get(keys_of(*everything), out, verify="always").all(ReadStatus.HIT), (turn, pool.status()["counters"])
                assert (out == values_of(everything, size)).all()
            for writer, seen in zip(writers, stored, strict=True):
                wanted = max(len(seen), 20)
                deadline = time.monotonic() + 60
                while len(seen) <= wanted:  # each writer is connected again, and stores
                    assert time.monotonic() < deadline
                    _collect(writer, seen, time.monotonic() + 0.2)
        finally:
            for writer in writers:
                writer.__exit__(None, None, None)
        eventually(lambda: (s := pool.status())["reservations"] == 0 and s["being_written"] == 0 and s["abandoned"] == 0, "no leftovers")
        status = pool.status()
        assert status["used_bytes"] == status["keys"] * size


def test_pool_killed_with_writes_open_drops_them_and_keeps_the_rest() -> None:
    size = 64 << 10
    with PoolProcess() as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        space.put(keys_of(1, 2, 3), values_of([1, 2, 3], size))
        quota_before = space.remove(keys_of(3)).sum()
        assert quota_before == 1
        with Child(half_a_put, server.socket, size, [10, 11]) as writer:
            writer.hear()
            server.kill()
            server.restart()
            eventually(lambda: pool.connected, "connected again")
            # The writer lives and may be writing, so its memory is kept apart; nobody sees it, and its keys can be put.
            assert pool.status()["abandoned"] == 2
            assert space.lookup(keys_of(1, 2, 3, 10, 11)).tolist() == [True, True, False, False, False]
            assert space.put(keys_of(10), values_of([10], size)).all(WriteStatus.STORED)
            writer.kill()
        eventually(lambda: pool.status()["abandoned"] == 0, "its death gives the memory back")
        out = np.zeros((3, size), np.uint8)
        assert space.get(keys_of(1, 2, 10), out, verify="always").all(ReadStatus.HIT)
        assert (out == values_of([1, 2, 10], size)).all()
        assert pool.status()["used_bytes"] == 3 * size


def test_writer_that_died_while_the_pool_was_down_leaves_nothing() -> None:
    size = 64 << 10
    with PoolProcess() as server:
        with Child(half_a_put, server.socket, size, [10, 11]) as writer:
            writer.hear()
            server.kill()
            writer.kill()
        server.restart()
        with umbp.connect(server.socket) as pool:
            status = pool.status()
            assert (status["abandoned"], status["used_bytes"], status["reservations"]) == (0, 0, 0)


def test_lease_over_a_restart_is_lost_but_what_is_the_same_still_counts() -> None:
    size = 256 << 10
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        space.put(keys_of(1, 2), values_of([1, 2], size))
        with space.lease(keys_of(1, 2), 300) as lease:
            server.restart()
            # The client may not have noticed yet: what it believes of its lease must not count from the moment on that the pool is new.
            assert (lease.view(0) == bytes_of(1, size)).all()
            assert lease.check().all()
            eventually(lambda: pool.connected, "connected again")
            assert lease.lost
            assert lease.check().all()
        with pytest.raises(umbp.LeaseLost):
            _lease_over_a_restart_and_reuse(server, space, size)


def _lease_over_a_restart_and_reuse(server: PoolProcess, space: Any, size: int) -> None:
    with space.lease(keys_of(1, 2), 300) as lease:
        server.restart()
        with umbp.connect(server.socket) as other:
            fresh = open_namespace(other, size)
            for number in range(100, 140):
                assert fresh.put(keys_of(number), values_of([number], size)).all(WriteStatus.STORED)
        assert not lease.check().any()


def test_pool_made_anew_is_never_mistaken_for_the_former() -> None:
    """Another size at restart: rows, numbers, ids and versions start again, and mean other things than a minute ago."""
    size = 64 << 10
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        spaces = [open_namespace(pool, size, tenant=tenant) for tenant in ("a", "b", "c")]
        for writer, space in enumerate(spaces):
            space.put(keys_of(1, 2), values_of([1, 2], size, writer=writer))
        lease = spaces[0].lease(keys_of(1, 2), 300)
        held = lease.__enter__()
        with pool._lock:  # so that the first client is the second to come, and the rows are others' then
            server.restart("--dram", "16MiB")
            other = umbp.connect(server.socket)
            for writer, tenant in ((2, "c"), (1, "b"), (0, "a")):
                fresh = open_namespace(other, size, tenant=tenant)
                assert not fresh.lookup(keys_of(1, 2)).any()
                assert fresh.put(keys_of(1), values_of([1], size, writer=writer)).all(WriteStatus.STORED)
        with other:
            eventually(lambda: pool.statistics().connects == 2, "connected again")
            assert held.lost
            assert (held.view(0) == bytes_of(1, size)).all()  # the old memory stays mapped as long as it is looked at
            with pytest.raises(umbp.LeaseLost):
                lease.__exit__(None, None, None)
            out = np.zeros((2, size), np.uint8)
            for writer, space in enumerate(spaces):
                assert space.get(keys_of(1, 2), out).codes.tolist() == [ReadStatus.HIT, ReadStatus.MISS]
                assert (out[0] == bytes_of(1, size, writer=writer)).all()
            assert spaces[1].flush() == 1
            assert [bool(space.lookup(keys_of(1))[0]) for space in spaces] == [True, False, True]


def test_late_commit_does_not_show_what_another_thread_has_reserved_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool restarts while one put copies; the next one gets the same small number, on the new connection of the same client."""
    size = 64 << 10
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space, copy, answers = open_namespace(pool, size), mover.scatter, {}
        space.put(keys_of(9), values_of([9], size))  # takes number 1; after the restart the orphans of the first put have it
        reached, go = {1: threading.Event(), 3: threading.Event()}, {1: threading.Event(), 3: threading.Event()}

        def slow(data: Any, offsets: Any, values: Any, *, beside: bool) -> None:
            first = next(number for number in (1, 3) if (values[0] == bytes_of(number, size)).all())
            reached[first].set()
            assert go[first].wait(60)
            copy(data, offsets, values, beside=beside)

        def put(first: int) -> None:
            answers[first] = space.put(keys_of(first, first + 1), values_of([first, first + 1], size))

        monkeypatch.setattr(mover, "scatter", slow)
        threads = [threading.Thread(target=put, args=(first,)) for first in (1, 3)]
        threads[0].start()
        assert reached[1].wait(60)
        server.restart()
        eventually(lambda: pool.connected and pool.statistics().connects == 2, "connected again")
        threads[1].start()
        assert reached[3].wait(60)
        go[1].set()
        threads[0].join()
        assert answers[1].all(WriteStatus.UNAVAILABLE)
        assert not space.lookup(keys_of(1, 2, 3, 4)).any()
        go[3].set()
        threads[1].join()
        assert answers[3].all(WriteStatus.STORED)
        out = np.zeros((2, size), np.uint8)
        assert space.get(keys_of(3, 4), out).all(ReadStatus.HIT)
        assert (out == values_of([3, 4], size)).all()


def test_copy_does_not_start_into_memory_that_was_let_go() -> None:
    """Between the reservation and the copy the pool restarts, the client connects again and lets go of what it is not filling yet."""
    size = 256 << 10
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool, umbp.connect(server.socket) as other:
        space, fresh = open_namespace(pool, size), open_namespace(other, size)
        link, numbers = pool._link, list(range(100, 140))
        filling = link.filling

        def late(bond: Any) -> Any:
            link.filling = filling  # type: ignore[method-assign]
            server.restart()
            eventually(lambda: pool.connected and other.connected and pool.statistics().connects == 2, "connected again")
            eventually(lambda: other.status()["abandoned"] == 0, "let go")
            for number in numbers:
                assert fresh.put(keys_of(number), values_of([number], size)).all(WriteStatus.STORED)
            return filling(bond)

        link.filling = late  # type: ignore[method-assign]
        assert space.put(keys_of(1, 2), values_of([1, 2], size)).all(WriteStatus.UNAVAILABLE)
        out = np.zeros((1, size), np.uint8)
        hits = 0
        for number in numbers:
            if fresh.get(keys_of(number), out).all(ReadStatus.HIT):
                hits += 1
                assert (out[0] == bytes_of(number, size)).all(), number
        assert hits >= 20


def test_puts_of_many_threads_over_restarts_never_mix() -> None:
    """However the restarts fall."""
    size = 256 << 10
    with PoolProcess(dram="64MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        stop, wrong = threading.Event(), []

        def work(seed: int) -> None:
            number, out = seed * 1000, np.zeros((2, size), np.uint8)
            while not stop.is_set():
                batch = [number, number + 1]
                space.put(keys_of(*batch), values_of(batch, size))
                status = space.get(keys_of(*batch), out)
                for i, each in enumerate(status):
                    if each is ReadStatus.HIT and not (out[i] == bytes_of(batch[i], size)).all():
                        wrong.append(batch[i])
                number += 2

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for turn in range(2):
            time.sleep(0.2)
            server.restart(*(["--dram", "48MiB"] if turn == 1 else []))
            eventually(lambda: pool.connected, "connected again")
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong


def test_idle_client_of_a_dead_pool_uses_no_processor_and_comes_back_by_itself() -> None:
    with PoolProcess() as server, Child(_idle, server.socket) as client:
        client.hear()
        server.kill()
        time.sleep(0.5)
        before = cpu_seconds(client.pid)
        time.sleep(1.0)
        assert cpu_seconds(client.pid) - before < 0.3
        server.restart()
        client.say("connected?")
        assert client.hear() == 2


def _idle(child: Child, socket: str) -> None:
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, 4096)
        child.say("idle")
        child.hear(60)
        eventually(lambda: pool.connected and pool.statistics().connects == 2, "connected again without a call")
        space.put(keys_of(1), values_of([1], 4096))
        child.say(pool.statistics().connects)
