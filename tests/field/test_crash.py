"""Processes that die: clients between reserve and commit, engines under leases, the pool itself in the middle of everything.

Field reports KV-05, KV-06, KV-07 and R-17, and what a restart owes its clients.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, Wire, bytes_of, cpu_seconds, eventually, keys_of, open_namespace, rss_bytes, values_of
from tests.pools import ROOT, PoolProcess
from umbp import ReadStatus, WriteStatus
from umbp.client import mover

MIB = 1 << 20


# -- KV-05: the writer dies --------------------------------------------------------------------------------------------------------


def _half_a_put(child: Child, socket: str, size: int, numbers: list[int]) -> None:
    session = Wire(socket, size)
    _, status, ids, offsets = session.reserve(keys_of(*numbers))
    from umbp.store import segment

    data = segment.attach(session.welcome.segment, owner=False).data.array
    for offset in offsets.tolist():
        data[offset : offset + size // 2] = 0xEE
    child.say([status.tolist(), len(ids)])
    child.hear(60)


def test_writer_killed_between_reserve_and_commit_leaves_nothing() -> None:
    size = 64 << 10
    with PoolProcess("--reservation-seconds", "60s") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        for turn in range(20):
            with Child(_half_a_put, server.socket, size, [1, 2, turn + 10]) as writer:
                assert writer.hear()[1] == 3
                assert pool.status()["used_bytes"] == 3 * size
                assert not space.lookup(keys_of(1, 2)).any()
                writer.kill()
            eventually(lambda: pool.status()["used_bytes"] == 0, "what the dead had reserved comes back")
            assert pool.status()["reservations"] == 0
        out = np.zeros((1, size), np.uint8)
        assert space.put(keys_of(1), values_of([1], size)).all(WriteStatus.STORED)
        assert space.get(keys_of(1), out).all(ReadStatus.HIT)
        assert (out[0] == bytes_of(1, size)).all()


def test_connection_lost_by_a_living_writer_keeps_its_memory_until_it_lets_go() -> None:
    """The process lives, so it may still be writing: the keys are free at once, the memory is not."""
    size = 64 << 10
    with PoolProcess("--reservation-seconds", "60s") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        session = Wire(server.socket, size)
        session.reserve(keys_of(1, 2))
        former = session.welcome.session
        session.connection.close()
        eventually(lambda: pool.status()["abandoned"] == 2, "the writes are orphans")
        assert space.put(keys_of(1), values_of([1], size)).all(WriteStatus.STORED)
        with Wire(server.socket, size) as again:
            again.ask(umbp.wire.LetGo(former))
            assert pool.status()["abandoned"] == 0
        assert pool.status()["used_bytes"] == size


def test_let_go_for_somebody_else_does_nothing() -> None:
    size = 64 << 10
    with PoolProcess("--reservation-seconds", "60s") as server, umbp.connect(server.socket) as pool:
        with Child(_half_a_put_and_close, server.socket, size) as writer:
            former = writer.hear()
            eventually(lambda: pool.status()["abandoned"] == 2, "the writes are orphans")
            with Wire(server.socket, size) as stranger:
                stranger.ask(umbp.wire.LetGo(former))
                with pytest.raises(umbp.InvalidRequest):
                    stranger.ask(umbp.wire.LetGo(stranger.welcome.session))
            assert pool.status()["abandoned"] == 2
        eventually(lambda: pool.status()["abandoned"] == 0, "its death gives them back")


def _half_a_put_and_close(child: Child, socket: str, size: int) -> None:
    session = Wire(socket, size)
    session.reserve(keys_of(1, 2))
    session.connection.close()
    child.say(session.welcome.session)
    child.hear(60)


# -- KV-07: the reader dies --------------------------------------------------------------------------------------------------------


def _hold(child: Child, socket: str, size: int, count: int) -> None:
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, size)
        space.pin(keys_of(*range(count)), note="a dead engine's")
        with space.lease(keys_of(*range(count)), 300) as lease:
            child.say(int(lease.held.sum()))
            child.hear(60)


def test_killed_reader_gives_back_leases_and_pins_at_once_and_nobody_waits() -> None:
    size, count = 128 << 10, 100
    with PoolProcess(dram="16MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        space.put(keys_of(*range(count)), values_of(range(count), size))
        for _ in range(3):
            pool.status()
        before, slowest = rss_bytes(server.pid), 0.0
        out = np.zeros((1, size), np.uint8)
        for _ in range(5):
            with Child(_hold, server.socket, size, count) as engine:
                assert engine.hear() == count
                assert (pool.status()["leases"], pool.status()["pins"]) == (1, 1)
                engine.kill()
                deadline = time.monotonic() + 5
                while (status := pool.status())["leases"] or status["pins"] or status["sessions"] != 1:
                    assert time.monotonic() < deadline, status
                    start = time.monotonic()
                    assert space.get(keys_of(5), out).all(ReadStatus.HIT)
                    slowest = max(slowest, time.monotonic() - start)
            assert pool.status()["evictable_keys"] == count
        assert slowest < 1.0
        assert rss_bytes(server.pid) < before + 8 * MIB
        assert space.put(keys_of(*range(1000, 1000 + count)), values_of(range(1000, 1000 + count), size)).all(WriteStatus.STORED)


# -- the pool is killed ------------------------------------------------------------------------------------------------------------


def _put_for_ever(child: Child, socket: str, size: int, seed: int) -> None:
    """Puts batch after batch and says what was acknowledged; goes on over every restart."""
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, size)
        number = seed * 100_000
        child.say("writing")
        while True:
            batch = list(range(number, number + 4))
            start = time.monotonic()
            status = space.put(keys_of(*batch), values_of(batch, size))
            seconds = time.monotonic() - start
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
        assert seconds < 3, seconds
        into.update(stored)


def test_pool_killed_in_the_middle_of_puts_serves_what_it_acknowledged() -> None:
    size, chance = 16 << 10, random.Random(3)
    with PoolProcess(dram="128MiB") as server, umbp.connect(server.socket) as pool:
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
                start = time.monotonic()
                assert set(space.get(keys_of(*range(8)), out)) <= {ReadStatus.MISS, ReadStatus.BUSY}
                assert space.put(keys_of(1), values_of([1], size)).all(WriteStatus.UNAVAILABLE)
                with space.lease(keys_of(*range(8))) as lease:
                    assert not lease.held.any()
                assert time.monotonic() - start < 1.0
                for listener in listeners:
                    listener.join()
                server.restart()
                eventually(lambda: pool.connected, "the client connects again by itself")
                everything = sorted(set().union(*stored))
                out = np.zeros((len(everything), size), np.uint8)
                assert space.get(keys_of(*everything), out, verify="always").all(ReadStatus.HIT), turn
                assert (out == values_of(everything, size)).all()
            for writer, seen in zip(writers, stored, strict=True):
                before = len(seen)
                deadline = time.monotonic() + 10
                while len(seen) <= before:  # each writer is connected again, and stores
                    assert time.monotonic() < deadline
                    _collect(writer, seen, time.monotonic() + 0.2)
            assert min(map(len, stored)) > 20
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
        with Child(_half_a_put, server.socket, size, [10, 11]) as writer:
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
        with Child(_half_a_put, server.socket, size, [10, 11]) as writer:
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
        server.restart("--dram", "16MiB")
        with umbp.connect(server.socket) as other:
            for writer, tenant in ((2, "c"), (1, "b"), (0, "a")):  # the rows are others' now
                fresh = open_namespace(other, size, tenant=tenant)
                assert not fresh.lookup(keys_of(1, 2)).any()
                assert fresh.put(keys_of(1), values_of([1], size, writer=writer)).all(WriteStatus.STORED)
            eventually(lambda: pool.connected, "connected again")
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

        def slow(data: Any, offsets: Any, values: Any) -> None:
            first = next(number for number in (1, 3) if (values[0] == bytes_of(number, size)).all())
            reached[first].set()
            assert go[first].wait(30)
            copy(data, offsets, values)

        def put(first: int) -> None:
            answers[first] = space.put(keys_of(first, first + 1), values_of([first, first + 1], size))

        monkeypatch.setattr(mover, "scatter", slow)
        threads = [threading.Thread(target=put, args=(first,)) for first in (1, 3)]
        threads[0].start()
        assert reached[1].wait(10)
        server.restart()
        eventually(lambda: pool.connected and pool.statistics().connects == 2, "connected again")
        threads[1].start()
        assert reached[3].wait(10)
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


# -- KV-06: what the dead leave in /dev/shm ----------------------------------------------------------------------------------------


def _blocks(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_shared_memory_is_flat_over_killed_pools(times: int) -> None:
    with PoolProcess(dram="8MiB") as server:
        for turn in range(times):
            server.kill()
            if turn % 2:
                server.command[server.command.index("--name") + 1] = f"{server.name}-{turn}"
            server.start()
            assert len(list(server.shm_dir.glob("*.segment"))) == 1
            assert _blocks(server.shm_dir) < 24 * MIB


def test_second_live_pool_of_a_name_is_refused_and_others_are_left_alone() -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 4096)
        space.put(keys_of(1), values_of([1], 4096))
        second = list(server.command)
        second[second.index("--socket") + 1] += "2"
        refused = subprocess.run(second, capture_output=True, text=True, cwd=ROOT, timeout=30)
        assert refused.returncode == 2
        assert "alive" in refused.stderr
        assert server.name in refused.stderr
        assert str(server.pid) in refused.stderr
        assert not os.path.exists(server.socket + "2")
        with PoolProcess("--shm-dir", str(server.shm_dir), dram="8MiB"):
            assert len(list(server.shm_dir.glob("*.segment"))) == 2
        out = np.zeros((1, 4096), np.uint8)
        assert space.get(keys_of(1), out).all(ReadStatus.HIT)
        assert (out[0] == bytes_of(1, 4096)).all()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "damage", ["short", "entries", "buckets", *(pytest.param(name, marks=SLOW) for name in ("magic", "geometry", "empty", "newer"))]
)
def test_damaged_segment_is_made_anew_or_repaired(damage: str) -> None:
    with PoolProcess(dram="4MiB") as server:
        with umbp.connect(server.socket) as pool:
            space = open_namespace(pool, 4096)
            space.put(keys_of(*range(100)), values_of(range(100), 4096))
        server.kill()
        from umbp.store import segment

        sections = segment.attach(str(server.segment), owner=False).geometry.sections()
        noise = random.Random(9).randbytes
        with open(server.segment, "r+b") as file:
            if damage == "magic":
                file.write(b"JUNKJUNK")
            elif damage == "geometry":
                file.seek(segment.TEXT_AT + 20)
                file.write(b"999")
            elif damage == "short":
                file.truncate(1 << 20)
            elif damage == "empty":
                file.truncate(0)
            elif damage == "newer":
                file.seek(8)
                file.write((99).to_bytes(8, "little"))
            else:
                at, length = sections[damage]
                file.seek(at)
                file.write(noise(min(length, 64 * 200)))
        server.restart()
        with umbp.connect(server.socket) as pool:
            space, out = open_namespace(pool, 4096), np.zeros((100, 4096), np.uint8)
            status = space.get(keys_of(*range(100)), out, verify="always")
            right = (out == values_of(range(100), 4096)).all(axis=1)
            assert right[status.where(ReadStatus.HIT)].all()
            if damage == "buckets":
                assert status.all(ReadStatus.HIT)
            assert space.put(keys_of(*range(200, 300)), values_of(range(200, 300), 4096)).all(WriteStatus.STORED)
            assert pool.status()["used_bytes"] == pool.status()["keys"] * 4096


# -- ends are bounded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["killed", "frozen"])
def test_close_is_bounded_without_a_pool(state: str) -> None:
    with PoolProcess(dram="8MiB") as server:
        pools = [umbp.connect(server.socket) for _ in range(4)]
        spaces = [open_namespace(pool, 4096) for pool in pools]
        spaces[0].put(keys_of(1), values_of([1], 4096))
        leases = [space.lease(keys_of(1)) for space in spaces]
        for lease in leases[:2]:
            lease.__enter__()
        if state == "killed":
            server.kill()
        else:
            server.signal(19)
        start = time.monotonic()
        threads = [threading.Thread(target=pool.close) for pool in pools]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5.0)
        assert time.monotonic() - start < 5.0
        for pool in pools:
            pool.close()
            with pytest.raises(umbp.Unavailable):
                pool.status()
        assert spaces[0].put(keys_of(2), values_of([2], 4096)).all(WriteStatus.UNAVAILABLE)
        assert spaces[0].get(keys_of(1), np.zeros((1, 4096), np.uint8)).all(ReadStatus.BUSY)
        mapped = Path("/proc/self/maps").read_text().count(str(server.segment))
        assert mapped == 4  # what the two open leases look at, header and pages each; the other two clients hold nothing
        del leases, spaces


def test_frozen_pool_delays_no_read_and_no_call_for_ever() -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space, out = open_namespace(pool, 4096), np.zeros((1, 4096), np.uint8)
        space.put(keys_of(1), values_of([1], 4096))
        server.signal(19)
        start = time.monotonic()
        for _ in range(100):
            assert space.lookup(keys_of(1)).all()
            assert space.get(keys_of(1), out).all(ReadStatus.HIT)
        assert time.monotonic() - start < 1.0
        assert space.put(keys_of(2), values_of([2], 4096)).all(WriteStatus.UNAVAILABLE)
        assert space.put(keys_of(2), values_of([2], 4096)).all(WriteStatus.UNAVAILABLE)
        assert time.monotonic() - start < 9.0
        server.signal(18)
        eventually(lambda: pool.connected, "connected again")
        assert space.put(keys_of(2), values_of([2], 4096)).all(WriteStatus.STORED, WriteStatus.EXISTS)


def test_clean_stop_keeps_or_releases_memory_and_never_its_socket() -> None:
    with PoolProcess(dram="8MiB") as server:
        with umbp.connect(server.socket) as pool:
            open_namespace(pool, 4096).put(keys_of(1), values_of([1], 4096))
        assert server.stop() == 0
        assert not os.path.exists(server.socket)
        assert server.segment.exists()
        server.start()
        with umbp.connect(server.socket) as pool:
            assert open_namespace(pool, 4096).lookup(keys_of(1)).all()
        server.restart("--on-exit", "release")
        with umbp.connect(server.socket) as pool:  # a client that is connected does not hold up the stop
            start = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - start < 5.0
        assert not list(server.shm_dir.iterdir())


def test_process_that_ends_without_closing_is_not_held_up(shared: PoolProcess) -> None:
    program = (
        "import umbp\n"
        f"pool = umbp.connect({shared.socket!r})\n"
        "ns = pool.namespace(model='m', page_tokens=64, layout=umbp.Layout.opaque(4096), tenant='forgetful')\n"
        "print(ns.put([b'k' * 32], [bytes(4096)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "stored" in done.stdout


# -- forks -------------------------------------------------------------------------------------------------------------------------


def _forked(child: Child, pool: Any, space: Any, lease: Any) -> None:
    out = np.zeros((1, 4096), np.uint8)
    first = [bool(space.lookup(keys_of(1))[0]), int(space.get(keys_of(1), out)[0]), bool((out[0] == bytes_of(1, 4096)).all())]
    put = int(space.put(keys_of(2), values_of([2], 4096))[0])
    held = bool(lease.check()[0])
    child.say([first, put, held, pool.status()["sessions"]])
    pool.close()


def test_forked_child_has_a_connection_of_its_own_from_its_first_call() -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 4096)
        space.put(keys_of(1), values_of([1], 4096))
        with space.lease(keys_of(1)) as lease:
            for turn in range(3):
                with Child(_forked, pool, space, lease) as child:
                    assert child.hear() == [[True, ReadStatus.HIT, True], WriteStatus.STORED if turn == 0 else WriteStatus.EXISTS, True, 2]
                    assert child.wait() == 0
            assert pool.status()["leases"] == 1  # the children's ends took nothing of the parent's
            assert lease.check().all()
        assert pool.statistics().connects == 1
