"""What went wrong with bytes elsewhere: other keys' bytes as a success, other formats' bytes, half-made values, stale references.

Field reports KV-01, KV-02, KV-12, KV-14, R-12 and R-14, each with real processes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, Wire, bytes_of, cpu_seconds, eventually, keys_of, open_namespace, values_of
from tests.pools import ROOT, PoolProcess
from umbp import Layout, ReadStatus, WriteStatus
from umbp.client import mover, operations

MIB = 1 << 20
BIG = 2 * MIB


# -- KV-01: a read that is slower than its protection ------------------------------------------------------------------------------


def _slow_reader(child: Child, socket: str, how: str) -> None:
    """Reads four pages by one of the ways there are, and is stopped in the middle of it."""
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, BIG)
        keys, out = keys_of(0, 1, 2, 3), np.zeros((4, BIG), np.uint8)
        if how == "get":
            copy = mover.gather

            def halfway(data: Any, offsets: Any, rows: Any) -> None:
                child.say("reading")
                assert child.hear(60) == "go on"  # here it is stopped, between the probe and the copy
                mover.gather = copy
                copy(data, offsets, rows)

            mover.gather = halfway
            status = space.get(keys, out).codes.tolist()
        else:
            status = [int(ReadStatus.MISS)] * 4
            try:
                with space.lease(keys, 0.3, renew=how == "renewed") as lease:
                    child.say("reading")
                    assert child.hear(60) == "go on"
                    for i in np.flatnonzero(lease.held).tolist():
                        out[i] = lease.view(i)
                    good = lease.check()
                    status = [int(ReadStatus.HIT) if whole else int(ReadStatus.MISS) for whole in good]
            except umbp.LeaseLost:
                child.say("lost")
                status = [int(ReadStatus.MISS)] * 4
        right = [bool((row == bytes_of(i, BIG)).all()) for i, row in enumerate(out)]
        child.say([status, right])


@pytest.mark.parametrize("how", ["get", "leased", "renewed"])
def test_stopped_reader_gets_its_bytes_or_a_miss(how: str) -> None:
    with PoolProcess("--reservation-seconds", "1s", dram="32MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, BIG)
        assert space.put(keys_of(0, 1, 2, 3), values_of(range(4), BIG)).all(WriteStatus.STORED)
        with Child(_slow_reader, server.socket, how) as reader:
            assert reader.hear() == "reading"
            reader.signal(signal.SIGSTOP)
            eventually(lambda: pool.status()["leases"] == 0, "the lease of a stopped client ends")
            numbers = range(100, 140)  # more than twice the pool: every byte of it is another's now
            for number in numbers:
                assert space.put(keys_of(number), values_of([number], BIG)).all(WriteStatus.STORED)
            assert not space.lookup(keys_of(0, 1, 2, 3)).any()
            reader.say("go on")
            reader.signal(signal.SIGCONT)
            said = reader.hear()
            if how != "get":
                assert said == "lost"
                said = reader.hear()
            status, right = said
            assert status == [ReadStatus.MISS] * 4
            assert not any(right)  # the test is one: the memory did change under the reader


def test_renewed_lease_outlives_its_time_while_the_pool_is_full() -> None:
    """A time that also a machine with much else to do renews in: of a lease that is lost nothing is to be shown here."""
    with PoolProcess(dram="32MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, BIG)
        space.put(keys_of(0, 1), values_of([0, 1], BIG))
        start = time.monotonic()
        with space.lease(keys_of(0, 1), 2.5) as lease:
            for number in range(100, 130):
                assert space.put(keys_of(number), values_of([number], BIG)).all(WriteStatus.STORED)
            eventually(lambda: time.monotonic() - start > 3.0, "more than the lease's time has passed")
            assert lease.check().all()
            assert all((lease.view(i) == bytes_of(i, BIG)).all() for i in range(2))
        assert pool.status()["leases"] == 0


def test_reads_under_constant_eviction_are_right_or_misses() -> None:
    """Two writers turn the whole pool over again and again while batches are read through every way."""
    size, numbers = 64 << 10, list(range(240))
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        with Child(_churn, server.socket, size, 1) as one, Child(_churn, server.socket, size, 2) as two:
            one.hear(), two.hear()
            chance, out, hits = random.Random(5), np.zeros((64, size), np.uint8), 0
            for turn in range(250):
                batch = chance.sample(numbers, 64)
                if turn % 4 == 3:
                    with space.lease(keys_of(*batch)) as lease:
                        for i in np.flatnonzero(lease.held).tolist():
                            assert (lease.view(i) == bytes_of(batch[i], size)).all(), (turn, batch[i])
                    continue
                out[:] = 0
                status = space.get(keys_of(*batch), out, verify="sampled" if turn % 4 == 2 else "never")
                for i in np.flatnonzero(status.where(ReadStatus.HIT)).tolist():
                    hits += 1
                    assert (out[i] == bytes_of(batch[i], size)).all(), (turn, batch[i])
            assert hits > 500
            eventually(lambda: pool.status()["counters"]["evicted_keys"] > 500, "the writers had the pool evict")
            assert pool.status()["counters"]["corrupt_keys"] == 0


def _churn(child: Child, socket: str, size: int, seed: int) -> None:
    chance = random.Random(seed)
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, size)
        values = {number: bytes_of(number, size) for number in range(240)}
        child.say("writing")
        while True:
            batch = chance.sample(range(240), 16)
            space.put(keys_of(*batch), [values[number] for number in batch])


# -- KV-02: the same key, another meaning ------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "model": "m",
    "revision": "r1",
    "dtype": "bfloat16",
    "page_tokens": 64,
    "layout": Layout.opaque(4096),
    "tp_rank": 0,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 2,
    "cp_rank": 0,
    "cp_size": 2,
    "adapter": "a",
    "tenant": "t",
    "salt": "s",
}
CHANGES: list[dict[str, Any]] = [
    {"model": "m2"},
    {"model": "M"},
    {"revision": "r2"},
    {"revision": ""},
    {"dtype": "float8_e4m3fn"},
    {"dtype": ""},
    {"page_tokens": 32},
    {"tp_rank": 1},
    {"tp_size": 4},
    {"replicated": True},
    {"pp_rank": 1},
    {"pp_size": 4},
    {"cp_rank": 1},
    {"cp_size": 4},
    {"adapter": "b"},
    {"adapter": None},
    {"adapter": ""},
    {"adapter": "at", "tenant": ""},
    {"adapter": "s", "salt": "a"},
    {"tenant": "u"},
    {"tenant": None},
    {"tenant": "ts", "salt": ""},
    {"salt": "z"},
    {"salt": None},
    {"layout": Layout((umbp.Component("object", (0,), 4096, dtype="bfloat16"),))},
    {"layout": Layout((umbp.Component("kv", (0,), 4096),))},
    {"layout": Layout((umbp.Component("object", (0, 1), 2048),))},
    {"layout": Layout((umbp.Component("object", (0,), 4096, rows="token"),))},
    {"layout": Layout.opaque(4352)},
]


def test_one_field_changed_never_hits(shared: PoolProcess, pool: umbp.Pool) -> None:
    with umbp.connect(shared.socket) as other:
        space = pool.namespace(**BASE)
        keys, values = keys_of(1, 2, 3), values_of([1, 2, 3], 4096)
        assert space.put(keys, values).all(WriteStatus.STORED)
        for change in CHANGES:
            foreign = other.namespace(**{**BASE, **change})
            out = np.zeros((3, foreign.object_bytes), np.uint8)
            assert not foreign.lookup(keys).any(), change
            assert foreign.prefix(keys) == 0, change
            assert foreign.get(keys, out).all(ReadStatus.MISS), change
            assert not out.any(), change
            with foreign.lease(keys) as lease:
                assert not lease.held.any(), change
            assert not foreign.remove(keys).any(), change
            assert foreign.flush() == 0, change
        assert len({(change_key(space), change_key(other.namespace(**{**BASE, **change}))) for change in CHANGES}) == len(CHANGES)
        out = np.zeros((3, 4096), np.uint8)
        assert space.get(keys, out).all(ReadStatus.HIT)
        assert (out == values).all()
        same = other.namespace(**BASE)
        assert same.lookup(keys).all()


def change_key(space: Any) -> str:
    return str(space.identity.digest().hex())


def test_same_key_in_two_namespaces_is_two_objects(pool: umbp.Pool) -> None:
    spaces = [open_namespace(pool, 4096, tenant=tenant) for tenant in ("a", "b")]
    for writer, space in enumerate(spaces):
        assert space.put(keys_of(1), values_of([1], 4096, writer=writer)).all(WriteStatus.STORED)
    out = np.zeros((1, 4096), np.uint8)
    spaces[0].flush()
    assert spaces[0].get(keys_of(1), out).all(ReadStatus.MISS)
    assert spaces[1].get(keys_of(1), out).all(ReadStatus.HIT)
    assert (out[0] == bytes_of(1, 4096, writer=1)).all()


@pytest.mark.parametrize("size", [1, 4095, 4097, 8192])
def test_buffer_of_another_size_is_refused_not_truncated(space_of: Any, size: int) -> None:
    space = space_of(4096)
    space.put(keys_of(1), values_of([1], 4096))
    for out in (np.zeros((1, size), np.uint8), [bytearray(size)]):
        with pytest.raises(umbp.InvalidRequest, match="4096"):
            space.get(keys_of(1), out)
        with pytest.raises(umbp.InvalidRequest, match="4096"):
            space.put(keys_of(2), out)
    assert space.lookup(keys_of(1, 2)).tolist() == [True, False]


def test_unknown_or_missing_identity_field_fails_closed(shared: PoolProcess, pool: umbp.Pool) -> None:
    with pytest.raises(umbp.InvalidRequest, match="quantisation"):
        pool.namespace(**BASE, quantisation="int4")
    with Wire(shared.socket, 4096) as session:
        good = umbp.layout.Namespace(**BASE).to_dict()
        for bad in ({**good, "quantisation": "int4"}, {name: value for name, value in good.items() if name != "salt"}, {}):
            with pytest.raises(umbp.InvalidRequest):
                session.ask(umbp.wire.OpenNamespace(bad))
        session.ask(umbp.wire.OpenNamespace(good))


# -- KV-12: many writers of one key ------------------------------------------------------------------------------------------------


def _rank(child: Child, socket: str, size: int, seed: int) -> None:
    chance = random.Random(seed)
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, size)
        child.say("connected")
        child.hear()
        order = list(range(200))
        chance.shuffle(order)
        order += order[:20] if seed % 3 == 0 else []
        counts: dict[str, int] = {}
        for start in range(0, len(order), 25):
            batch = order[start : start + 25]
            if seed % 4 == 0:
                batch = batch + batch[:5]  # the same key twice in one batch
            absent = [number for number, there in zip(batch, space.lookup(keys_of(*batch)), strict=True) if not there]
            while absent:  # what another rank has been writing for longer than a put waits is asked for again
                status = space.put(keys_of(*absent), values_of(absent, size))
                absent = [number for number, each in zip(absent, status, strict=True) if each is WriteStatus.IN_FLIGHT]
                for each in status:
                    if each is not WriteStatus.IN_FLIGHT:
                        counts[each.code] = counts.get(each.code, 0) + 1
            out = np.zeros((len(batch), size), np.uint8)
            assert space.get(keys_of(*batch), out).all(ReadStatus.HIT)
            assert (out == values_of(batch, size)).all()
        child.say(counts)


def test_many_ranks_put_the_same_keys_once() -> None:
    size, ranks = 4096, 32
    with PoolProcess() as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        children = [Child(_rank, server.socket, size, seed) for seed in range(ranks)]
        try:
            for child in children:
                child.hear()
            for child in children:
                child.say("go")
            totals: dict[str, int] = {}
            for child in children:
                for code, count in child.hear(60).items():
                    totals[code] = totals.get(code, 0) + count
        finally:
            for child in children:
                child.__exit__(None, None, None)
        assert set(totals) <= {"stored", "exists"}, totals
        assert totals["stored"] == 200
        status = pool.status()
        assert (status["keys"], status["used_bytes"]) == (200, 200 * size)
        out = np.zeros((200, size), np.uint8)
        assert space.get(keys_of(*range(200)), out, verify="always").all(ReadStatus.HIT)
        assert (out == values_of(range(200), size)).all()


# -- KV-14: a write that stalls ----------------------------------------------------------------------------------------------------


def test_stalled_write_is_a_miss_for_all_and_wakes_nobody() -> None:
    with PoolProcess("--reservation-seconds", "1s") as server, Wire(server.socket, 4096) as writer:
        number, status, ids, _ = writer.reserve(keys_of(1))
        assert status.tolist() == [WriteStatus.PENDING]
        clients = [umbp.connect(server.socket) for _ in range(10)]
        spaces = [open_namespace(client, 4096) for client in clients]
        before, out = cpu_seconds(server.pid), np.zeros((1, 4096), np.uint8)
        for _ in range(100):
            for space in spaces:
                assert not space.lookup(keys_of(1)).any()
                assert space.get(keys_of(1), out).all(ReadStatus.MISS)
        assert cpu_seconds(server.pid) - before < 1.0  # two thousand questions, and none of them reached the pool
        # A put of the key waits for the writer until its deadline, then takes the key over.
        assert spaces[0].put(keys_of(1), values_of([1], 4096)).all(WriteStatus.STORED)
        # The late completion is discarded whole, and says so.
        assert writer.commit(number, len(ids)).tolist() == [WriteStatus.EXPIRED]
        assert spaces[1].get(keys_of(1), out).all(ReadStatus.HIT)
        assert (out[0] == bytes_of(1, 4096)).all()
        for client in clients:
            client.close()


def test_put_waits_for_another_writer_and_copies_nothing(
    shared: PoolProcess, space_of: Any, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "IN_FLIGHT_SECONDS_MAX", 0.3)
    with Wire(shared.socket, 4096, tenant=tenant) as writer:
        space = space_of(4096)
        number, _, ids, _ = writer.reserve(keys_of(1, 2))
        assert space.put(keys_of(1), values_of([1], 4096)).all(WriteStatus.IN_FLIGHT)  # after its patience: it says so
        with Child(_put_one, shared.socket, tenant) as other:
            other.hear()
            assert writer.commit(number, len(ids)).tolist() == [WriteStatus.STORED] * 2
            assert other.hear() == WriteStatus.EXISTS
        out = np.zeros((2, 4096), np.uint8)
        assert space.get(keys_of(1, 2), out).all(ReadStatus.HIT)


def _put_one(child: Child, socket: str, tenant: str) -> None:
    operations.IN_FLIGHT_SECONDS_MAX = 60.0  # however long it is until the other has its turn
    with umbp.connect(socket) as pool:
        space = open_namespace(pool, 4096, tenant=tenant)
        child.say("putting")
        child.say(int(space.put(keys_of(1), values_of([1], 4096))[0]))


# -- keys of other processes, references of other times ---------------------------------------------------------------


def test_keys_do_not_depend_on_the_process() -> None:
    program = "import umbp; print(umbp.page_keys(list(range(640)), 64).tobytes().hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 10 * 64


def test_stale_reference_is_refused() -> None:
    """Entry ids and versions kept over an eviction and a reuse of the very same place."""
    size = 256 << 10
    with PoolProcess(dram="4MiB") as server, umbp.connect(server.socket) as pool, Wire(server.socket, size) as session:
        space = open_namespace(pool, size)
        space.put(keys_of(1), values_of([1], size))
        look = space._operations.look(keys_of(1))
        ids, versions = look.found.ids, look.found.versions
        space.remove(keys_of(1))
        assert space.put(keys_of(2), values_of([2], size)).all(WriteStatus.STORED)
        again = space._operations.look(keys_of(2)).found
        assert (again.ids == ids).all()
        assert (again.rows[:, 5] == look.found.rows[:, 5]).all()  # the same place
        _, blob = session.ask(umbp.wire.TakeLease(1), ids, versions)
        assert blob.take(np.uint8, 1).tolist() == [0]
        assert session.ask(umbp.wire.Corrupt(1), ids, versions)[0].numbers == [0]
        assert session.ask(umbp.wire.MakeSums(1), ids, versions)[1].take(np.uint64, 1).tolist() == [0]
        assert space.lookup(keys_of(2)).all()


def test_references_from_nowhere_are_refused(shared: PoolProcess, space_of: Any) -> None:
    with Wire(shared.socket, 4096) as session:
        space = space_of(4096)
        space.put(keys_of(1), values_of([1], 4096))
        ids = np.array([-1, -(1 << 62), 1 << 40, (1 << 63) - 1, 0, 1], np.int64)
        versions = np.array([2, 0, 1, 3, (1 << 64) - 1, 0], np.uint64)
        assert not session.ask(umbp.wire.TakeLease(6), ids, versions)[1].take(np.uint8, 6).any()
        assert session.ask(umbp.wire.Corrupt(6), ids, versions)[0].numbers == [0]
        assert not session.ask(umbp.wire.MakeSums(6), ids, versions)[1].take(np.uint64, 6).any()
        assert space.lookup(keys_of(1)).all()


# -- checksums ---------------------------------------------------------------------------------------------------------------------


def _flip(server: PoolProcess, space: Any, number: int) -> None:
    """One bit of a committed object, in the file itself."""
    offset = int(space._operations.look(keys_of(number)).found.rows[0, 5])
    header = umbp.store.segment.attach(str(server.segment), owner=False)
    at = header.geometry.sections()["data"][0] + offset + 1000
    header.close()
    with open(server.segment, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)


@pytest.mark.parametrize("checksum", ["lazy", "put"])
def test_flipped_bit_is_a_counted_miss_and_the_object_goes(checksum: str) -> None:
    with PoolProcess("--checksum", checksum) as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 4096)
        numbers = list(range(32))
        keys, values, out = keys_of(*numbers), values_of(numbers, 4096), np.zeros((32, 4096), np.uint8)
        for times, how in enumerate(("get", "lease", "sampled"), 1):
            space.put(keys, values)
            assert space.get(keys, out, verify="always").all(ReadStatus.HIT)  # all have a checksum now
            assert (out == values).all()
            _flip(server, space, 5)
            assert space.get(keys, out, verify="never").all(ReadStatus.HIT)
            if how == "lease":
                with space.lease(keys, verify="always") as lease:
                    held = lease.held.copy()
            elif how == "get":
                held = space.get(keys, out, verify="always").where(ReadStatus.HIT)
            else:
                held = np.ones(32, bool)
                for _ in range(16):  # one in sixteen of each call, another one each time
                    held &= space.get(keys, out, verify="sampled").where(ReadStatus.HIT)
            assert np.flatnonzero(~held).tolist() == [5], how
            assert pool.statistics().corrupt == times
            assert pool.status()["counters"]["corrupt_keys"] == times
            assert np.flatnonzero(~space.lookup(keys)).tolist() == [5]


def test_checksum_off_verifies_nothing_and_fails_nothing() -> None:
    with PoolProcess("--checksum", "off") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 4096)
        space.put(keys_of(1), values_of([1], 4096))
        out = np.zeros((1, 4096), np.uint8)
        assert space.get(keys_of(1), out, verify="always").all(ReadStatus.HIT)
        with space.lease(keys_of(1), verify="always") as lease:
            assert lease.held.all()


# -- flush -------------------------------------------------------------------------------------------------------------------------


def test_flush_takes_what_is_being_written_too() -> None:
    with PoolProcess() as server, Wire(server.socket, 4096) as writer, umbp.connect(server.socket) as pool:
        space, other = open_namespace(pool, 4096), open_namespace(pool, 4096, tenant="other")
        space.put(keys_of(1), values_of([1], 4096))
        other.put(keys_of(1, 2), values_of([1, 2], 4096))
        number, _, ids, _ = writer.reserve(keys_of(2, 3))
        assert space.flush() == 1
        assert not space.lookup(keys_of(1, 2, 3)).any()
        assert space.put(keys_of(2), values_of([2], 4096, writer=1)).all(WriteStatus.STORED)  # the new weights' page
        assert writer.commit(number, len(ids)).tolist() == [WriteStatus.FLUSHED] * 2
        out = np.zeros((3, 4096), np.uint8)
        assert space.get(keys_of(1, 2, 3), out).codes.tolist() == [ReadStatus.MISS, ReadStatus.HIT, ReadStatus.MISS]
        assert (out[1] == bytes_of(2, 4096, writer=1)).all()
        assert other.lookup(keys_of(1, 2)).all()
        eventually(lambda: pool.status()["used_bytes"] == 3 * 4096, "the flushed bytes come back")


def test_flush_under_a_lease_leaves_the_reader_its_bytes() -> None:
    with PoolProcess() as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 4096)
        space.put(keys_of(1), values_of([1], 4096))
        with space.lease(keys_of(1)) as lease:
            space.flush()
            assert not space.lookup(keys_of(1)).any()
            space.put(keys_of(*range(2, 200)), values_of(range(2, 200), 4096))
            assert (lease.view(0) == bytes_of(1, 4096)).all()
            assert lease.check().all()
        space.flush()
        eventually(lambda: pool.status()["used_bytes"] == 0, "all bytes come back")
