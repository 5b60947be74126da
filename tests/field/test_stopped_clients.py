"""Clients that are stopped (SIGSTOP) for longer than they may hold what they have, and come back.

Others may write the key, but not into the memory that the stopped one may still be writing; and it is told when it comes back.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, Wire, bytes_of, eventually, keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus
from umbp.client import mover

SIZE = 64 << 10


class TooLate(Exception):
    """This process was kept from running for so long that its memory ahead is not its own any more."""


def _slow_writer(child: Child, socket: str, ahead: bool) -> None:
    """A real put, stopped in the middle of its copy. ``ahead``: after two others like it, into memory that it was given with the last."""
    with umbp.connect(socket) as pool:
        space, number = open_namespace(pool, SIZE), 3000
        copy = mover.scatter

        def halfway(data: Any, offsets: Any, values: Any, *, beside: bool) -> None:
            if beside != ahead:
                raise TooLate
            copy(data, offsets[:1], values[:1])
            child.say(offsets.tolist())
            child.hear(60)  # here it is stopped
            copy(data, offsets, values, beside=beside)

        status: Any = None
        while status is None:
            while ahead and not space.operations.opened.spares:
                space.put(keys_of(number, number + 1, number + 2), values_of([number] * 3, SIZE))
                number += 3
            mover.scatter = halfway
            with contextlib.suppress(TooLate):
                status = space.put(keys_of(1, 2, 3), values_of([1, 2, 3], SIZE, writer=1))
            mover.scatter = copy
        child.say([each.code for each in status])
        child.hear(60)
        child.say([each.code for each in space.put(keys_of(4), values_of([4], SIZE))])
        child.hear(60)


@pytest.mark.parametrize("ahead", [False, True])
def test_writer_stopped_past_its_time_is_told_and_its_memory_is_nobody_elses(ahead: bool) -> None:
    with PoolProcess("--reservation-seconds", "1.5s" if ahead else "0.3s", dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        with Child(_slow_writer, server.socket, ahead) as writer:
            held = set(writer.hear())
            assert len(held) == 3
            writer.signal(signal.SIGSTOP)
            eventually(lambda: pool.status()["abandoned"] == 3, "its reservation runs out")
            assert pool.status()["counters"]["reservations_expired"] == 1
            # Its keys are free for others, its memory is not: fill the pool over and over and look where objects lie.
            assert space.put(keys_of(1), values_of([1], SIZE)).all(WriteStatus.STORED)
            used = set()
            for number in range(100, 420):
                assert space.put(keys_of(number), values_of([number], SIZE)).all(WriteStatus.STORED)
                used.add(int(space._operations.look(keys_of(number)).found.rows[0, 5]))
            assert len(used) > 20
            assert not used & held
            last = list(range(410, 420))
            writer.say("go on")
            writer.signal(signal.SIGCONT)
            assert writer.hear() == ["expired"] * 3
            out = np.zeros((10, SIZE), np.uint8)
            assert space.get(keys_of(*last), out).all(ReadStatus.HIT)
            assert (out == values_of(last, SIZE)).all()  # what it wrote on resuming harmed nobody
            assert not space.lookup(keys_of(2, 3)).any()
            assert pool.status()["abandoned"] == 0  # its late commit let go of the memory
            writer.say("again")
            assert writer.hear() == ["stored"]


@pytest.mark.parametrize("ahead", [False, True])
def test_writer_stopped_over_a_lost_connection_and_a_restart_harms_nobody(ahead: bool) -> None:
    """The pool is killed and started again while the writer is stopped in its copy: its memory waits for it all the same."""
    with PoolProcess("--reservation-seconds", "30s", dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        with Child(_slow_writer, server.socket, ahead) as writer:
            held = set(writer.hear())
            theirs = 6 if ahead else 3  # and the memory for the next
            writer.signal(signal.SIGSTOP)
            server.restart()
            eventually(lambda: pool.connected, "connected again")
            assert pool.status()["abandoned"] == theirs
            used = set()
            for number in range(100, 140):
                assert space.put(keys_of(number), values_of([number], SIZE)).all(WriteStatus.STORED)
                used.add(int(space._operations.look(keys_of(number)).found.rows[0, 5]))
            assert not used & held
            writer.signal(signal.SIGCONT)
            eventually(lambda: pool.status()["sessions"] >= 2, "it has connected again")
            assert pool.status()["abandoned"] == theirs  # it is still writing: it has not let go
            writer.say("go on")
            assert writer.hear() == ["unavailable"] * 3
            eventually(lambda: pool.status()["abandoned"] == 0, "now it has let go")
            out = np.zeros((1, SIZE), np.uint8)
            assert space.get(keys_of(139), out).all(ReadStatus.HIT)
            assert (out[0] == bytes_of(139, SIZE)).all()
            assert not space.lookup(keys_of(1, 2, 3)).any()
            writer.say("again")
            assert writer.hear() == ["stored"]


def test_killed_while_stopped_gives_back_at_once() -> None:
    with (
        PoolProcess("--reservation-seconds", "60s", dram="8MiB") as server,
        umbp.connect(server.socket) as pool,
        Child(_slow_writer, server.socket, False) as writer,
    ):
        writer.hear()
        writer.signal(signal.SIGSTOP)
        assert pool.status()["being_written"] == 3
        writer.kill()
        eventually(lambda: pool.status()["used_bytes"] == 0, "the dead hold nothing, long before their time is over", 30.0)


def test_reservation_by_hand_expires_whole() -> None:
    """As far as a client can go wrong by itself: commits late, and for another."""
    with (
        PoolProcess("--reservation-seconds", "0.5s", dram="8MiB") as server,
        umbp.connect(server.socket) as pool,
        Wire(server.socket, SIZE) as one,
        Wire(server.socket, SIZE) as two,
    ):
        number, _, ids, _ = one.reserve(keys_of(1, 2), 3600.0)  # no client chooses a longer time than the pool's
        assert two.commit(number, len(ids)).tolist() == [WriteStatus.EXPIRED] * 2  # not its own
        assert one.commit(number + 1000, 5).tolist() == [WriteStatus.EXPIRED] * 5
        eventually(lambda: pool.status()["abandoned"] == 2, "the time is over")
        assert one.commit(number, len(ids)).tolist() == [WriteStatus.EXPIRED] * 2
        assert one.commit(number, len(ids)).tolist() == [WriteStatus.EXPIRED] * 2
        assert pool.status()["used_bytes"] == 0


def test_reservation_by_hand_is_committed_whole_and_once(shared: PoolProcess, pool: umbp.Pool, tenant: str) -> None:
    with Wire(shared.socket, SIZE, tenant=tenant) as one:
        number, _, _, _ = one.reserve(keys_of(1, 2))
        with pytest.raises(umbp.InvalidRequest):
            one.commit(number, 1)
        assert one.commit(number, 2).tolist() == [WriteStatus.STORED] * 2
        assert one.commit(number, 2).tolist() == [WriteStatus.EXPIRED] * 2
    mine = [each["held_bytes"] for each in pool.status()["namespaces"] if each["identity"]["tenant"] == tenant]
    assert mine == [2 * SIZE]


def test_lease_and_pin_have_their_limits() -> None:
    options = ("--lease-seconds", "0.2s", "--lease-seconds-max", "0.4s")
    with PoolProcess(*options, dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        space.put(keys_of(1), values_of([1], SIZE))
        start = time.monotonic()
        with space.lease(keys_of(1), 3600, renew=False) as lease:
            assert lease.seconds == 0.4
            eventually(lambda: pool.status()["leases"] == 0, "the longest time is over")
            assert time.monotonic() - start >= 0.4
            assert lease.expired
            assert lease.check().all()  # unchanged all the same
        start = time.monotonic()
        space.pin(keys_of(1), seconds=0.2)
        assert pool.status()["pins"] == 1 or time.monotonic() - start > 0.2
        eventually(lambda: pool.status()["pins"] == 0, "the pin's time is over")
