"""Processes that die: clients between reserve and commit, engines under leases; and what the dead leave behind.

Field reports KV-05, KV-06, KV-07 and R-17. What a restart of the pool owes its clients is in test_restart.
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
from tests.field.people import (
    WAIT_SECONDS_MAX,
    Child,
    Wire,
    bytes_of,
    eventually,
    half_a_put,
    keys_of,
    open_namespace,
    rss_bytes,
    values_of,
    within,
)
from tests.pools import ROOT, PoolProcess
from umbp import ReadStatus, WriteStatus
from umbp.client import link, sync

MIB = 1 << 20


# -- KV-05: the writer dies --------------------------------------------------------------------------------------------------------


def test_writer_killed_between_reserve_and_commit_leaves_nothing() -> None:
    size = 64 << 10
    with PoolProcess("--reservation-seconds", "60s") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        for turn in range(20):
            with Child(half_a_put, server.socket, size, [1, 2, turn + 10]) as writer:
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
        before = rss_bytes(server.pid)
        out = np.zeros((1, size), np.uint8)
        for _ in range(5):
            with Child(_hold, server.socket, size, count) as engine:
                assert engine.hear() == count
                assert (pool.status()["leases"], pool.status()["pins"]) == (1, 1)
                engine.kill()
                deadline = time.monotonic() + 30
                while (status := pool.status())["leases"] or status["pins"] or status["sessions"] != 1:
                    assert time.monotonic() < deadline, status
                    with within(1.0):
                        assert space.get(keys_of(5), out).all(ReadStatus.HIT)
            assert pool.status()["evictable_keys"] == count
        assert rss_bytes(server.pid) < before + 8 * MIB
        assert space.put(keys_of(*range(1000, 1000 + count)), values_of(range(1000, 1000 + count), size)).all(WriteStatus.STORED)


# -- KV-06: what the dead leave in /dev/shm ----------------------------------------------------------------------------------------


def _blocks(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
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
        refused = subprocess.run(second, capture_output=True, text=True, cwd=ROOT, timeout=120)
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
def test_close_is_bounded_without_a_pool(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "CLOSE_SECONDS_MAX", 0.5)
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
        threads = [threading.Thread(target=pool.close) for pool in pools]
        with within(5.0):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_SECONDS_MAX)
        assert not any(thread.is_alive() for thread in threads)
        for pool in pools:
            pool.close()
            with pytest.raises(umbp.Unavailable):
                pool.status()
        assert spaces[0].put(keys_of(2), values_of([2], 4096)).all(WriteStatus.UNAVAILABLE)
        assert spaces[0].get(keys_of(1), np.zeros((1, 4096), np.uint8)).all(ReadStatus.BUSY)
        mapped = lambda: Path("/proc/self/maps").read_text().count(str(server.segment))  # noqa: E731
        # What the two open leases look at, header and pages each; the other two clients hold nothing, once their threads have ended.
        eventually(lambda: mapped() == 4, lambda: f"{mapped()} mappings are 4")
        del leases, spaces


def test_frozen_pool_delays_no_read_and_no_call_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space, out = open_namespace(pool, 4096), np.zeros((1, 4096), np.uint8)
        space.put(keys_of(1), values_of([1], 4096))
        server.signal(19)
        calls, call = [], pool.call
        pool.call = lambda step: calls.append(step) or call(step)  # type: ignore[method-assign]
        for _ in range(100):
            assert space.lookup(keys_of(1)).all()
            assert space.get(keys_of(1), out).all(ReadStatus.HIT)
        assert calls == []  # a read asks nobody, so nobody delays it
        with monkeypatch.context() as patch:
            patch.setattr(link.Bond.call, "__kwdefaults__", {"seconds": 0.5, "late": None})
            assert space.put(keys_of(2), values_of([2], 4096)).all(WriteStatus.UNAVAILABLE)
            assert space.put(keys_of(2), values_of([2], 4096)).all(WriteStatus.UNAVAILABLE)
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
            assert server.stop() == 0
        assert not list(server.shm_dir.iterdir())


def test_process_that_ends_without_closing_is_not_held_up(shared: PoolProcess) -> None:
    program = (
        "import umbp\n"
        f"pool = umbp.connect({shared.socket!r})\n"
        "ns = pool.namespace(model='m', page_tokens=64, layout=umbp.Layout.opaque(4096), tenant='forgetful')\n"
        "print(ns.put([b'k' * 32], [bytes(4096)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
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
