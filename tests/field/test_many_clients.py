"""Many clients at a time: processes, connections, threads."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, Wire, bytes_of, eventually, keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus, wire

SIZE = 256
MIB = 1 << 20


def _small_engine(child: Child, socket_path: str, seed: int) -> None:
    with umbp.connect(socket_path) as pool:
        space = open_namespace(pool, 4096)
        child.say("connected")
        child.hear(60)
        batch = [seed % 50, 1000 + seed]
        status = space.put(keys_of(*batch), values_of(batch, 4096))
        out = np.zeros((2, 4096), np.uint8)
        good = space.get(keys_of(*batch), out).all(ReadStatus.HIT) and (out == values_of(batch, 4096)).all()
        with space.lease(keys_of(*batch)) as lease:
            child.say([status.all(WriteStatus.STORED, WriteStatus.EXISTS), bool(good), bool(lease.held.all())])
            child.hear(60)


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_many_processes_at_a_time(count: int) -> None:
    with PoolProcess() as server, umbp.connect(server.socket) as pool, contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(_small_engine, server.socket, seed)) for seed in range(count)]
        for child in children:
            assert child.hear(60) == "connected"
        for child in children:
            child.say("go")
        for child in children:
            assert child.hear(60) == [True, True, True]
        status = pool.status()
        assert (status["sessions"], status["leases"]) == (count + 1, count)
        for child in children:
            child.kill()
        eventually(lambda: (s := pool.status())["sessions"] == 1 and s["leases"] == 0, "all that they held is given back")
        assert pool.status()["keys"] == min(50, count) + count


def test_two_hundred_connections_and_no_more_than_the_limit() -> None:
    with PoolProcess("--sessions-max", "201", dram="8MiB") as server, umbp.connect(server.socket) as pool, contextlib.ExitStack() as stack:
        space = open_namespace(pool, SIZE)
        space.put(keys_of(1), values_of([1], SIZE))
        others = [stack.enter_context(Wire(server.socket, SIZE)) for _ in range(200)]
        for number, session in enumerate(others):
            assert session.reserve(keys_of(1000 + number))[1].tolist() == [WriteStatus.PENDING]
        assert pool.status()["sessions"] == 201
        with pytest.raises(umbp.LimitReached):
            umbp.connect(server.socket)
        for _ in range(50):  # short calls among two hundred sessions
            assert space.remove(keys_of(404)).tolist() == [False]
        for session in others[:100]:
            session.ask(wire.Bye())  # says that it has let go of everything
        stack.close()
        # The other half just closed, with writes open, and their process lives: they stay until it ends.
        eventually(lambda: pool.status()["sessions"] == 101, "only those that still own memory are there")
        assert pool.status()["abandoned"] == 100
        with umbp.connect(server.socket) as late:
            assert late.status()["keys"] == 1


def test_many_threads_share_one_client(pool: umbp.Pool, space_of: Any) -> None:
    space, faults = space_of(4096), []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        out = np.zeros((8, 4096), np.uint8)
        try:
            for _ in range(25):
                batch = chance.sample(range(100), 8)
                assert space.put(keys_of(*batch), values_of(batch, 4096)).all(WriteStatus.STORED, WriteStatus.EXISTS)
                assert space.get(keys_of(*batch), out).all(ReadStatus.HIT)
                assert (out == values_of(batch, 4096)).all()
                with space.lease(keys_of(*batch)) as lease:
                    assert all((lease.view(i) == bytes_of(batch[i], 4096)).all() for i in range(8))
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    assert pool.status()["leases"] == 0
