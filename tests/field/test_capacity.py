"""Room: every free byte is usable for any size, the full pool goes on, and what cannot be kept is refused by name.

Field reports KV-08, KV-09, KV-10, KV-20 and R-05.
"""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import bytes_of, eventually, keys_of, open_namespace, rss_bytes, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus
from umbp.client.http import PoolHttp

MIB = 1 << 20
SLOW = pytest.mark.slow


def numbers(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


# -- KV-08: lookups protect nothing, leases protect for a time ------------------------------------------------------------------------


def test_keys_that_are_asked_for_all_the_time_make_room_all_the_same() -> None:
    size, count = 256 << 10, 60
    with PoolProcess(dram="16MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        keys = keys_of(*numbers(0, count))
        space.put(keys, values_of(numbers(0, count), size))
        stop = threading.Event()

        def poll() -> None:
            with umbp.connect(server.socket) as other:
                mine = open_namespace(other, size)
                while not stop.is_set():
                    mine.lookup(keys)
                    mine.prefix(keys)

        threads, began = [threading.Thread(target=poll) for _ in range(4)], time.monotonic()
        for thread in threads:
            thread.start()
        try:
            out = np.zeros((1, size), np.uint8)
            for number in numbers(1000, 100):
                assert space.put(keys_of(number), values_of([number], size)).all(WriteStatus.STORED), number
                assert space.get(keys_of(number), out).all(ReadStatus.HIT), number
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        counters, seconds = pool.status()["counters"], time.monotonic() - began
        assert counters["evicted_keys"] >= 90
        assert counters["noted_requests"] < 4 * 2 * (seconds / 0.05 + 2) + 400  # not one for each time that somebody asked


def test_all_leased_is_said_at_once_and_ends_with_the_leases() -> None:
    size, count = 256 << 10, 64
    with PoolProcess("--watermark-high", "1.0", dram="16MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        keys = keys_of(*numbers(0, count))
        assert space.put(keys, values_of(numbers(0, count), size)).all(WriteStatus.STORED)
        with space.lease(keys, 60.0, renew=False) as lease:
            assert lease.held.all()
            status = space.put(keys_of(1, 2, 1000, 1001), values_of([1, 2, 1000, 1001], size))
            assert not lease.expired  # it did not wait for that
            assert status.codes.tolist() == [WriteStatus.EXISTS] * 2 + [WriteStatus.ALL_LEASED] * 2
            text = urllib.request.urlopen(f"{server.http}/metrics").read().decode()
            assert "all_leased" in text
            assert pool.status()["leased_bytes"] == count * size
            assert lease.check().all()
        with space.lease(keys, 0.2, renew=False):
            eventually(lambda: pool.status()["leases"] == 0, "the leases' time is over")
        assert space.put(keys_of(1000), values_of([1000], size)).all(WriteStatus.STORED)
        space.pin(keys_of(*numbers(0, count)))
        space.pin(keys_of(1000))
        assert space.put(keys_of(1002), values_of([1002], size)).all(WriteStatus.ALL_LEASED)


def test_lease_share_bounds_what_may_be_held() -> None:
    size = 256 << 10
    with PoolProcess("--lease-share", "0.5", dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, size)
        space.put(keys_of(*numbers(0, 24)), values_of(numbers(0, 24), size))
        with space.lease(keys_of(*numbers(0, 12))) as one, space.lease(keys_of(*numbers(0, 12))):  # the same bytes count once
            with pytest.raises(umbp.LimitReached), space.lease(keys_of(*numbers(12, 8))):
                pass
            with space.lease(keys_of(*numbers(12, 4))) as two:
                assert one.held.all()
                assert two.held.all()
            out = np.zeros((24, size), np.uint8)
            assert space.get(keys_of(*numbers(0, 24)), out).all(ReadStatus.HIT)  # reads need no lease
            for number in numbers(100, 30):
                assert space.put(keys_of(number), values_of([number], size)).all(WriteStatus.STORED)
        assert pool.status()["leased_bytes"] == 0


def test_leases_of_a_session_are_bounded_and_dropped_ones_come_back() -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 4096)
        space.put(keys_of(1), values_of([1], 4096))
        held = [space.lease(keys_of(1)) for _ in range(1025)]
        for lease in held[:1024]:
            lease.__enter__()
        with pytest.raises(umbp.LimitReached):
            held[1024].__enter__()
        assert pool.status()["leases"] == 1024
        for lease in held[:1024]:
            lease.__exit__(None, None, None)
        assert pool.status()["leases"] == 0
        with space.lease(keys_of(1)):
            pass


# -- KV-09: any mix of sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [4096, 4 * MIB])
def test_pool_filled_with_one_size_then_emptied_takes_another(first: int) -> None:
    capacity = 32 * MIB
    with PoolProcess("--watermark-high", "1.0", dram="32MiB") as server, umbp.connect(server.socket) as pool:
        for how in ("remove", "flush"):
            for size in (first, 4096 if first > 4096 else 4 * MIB):
                space, count = open_namespace(pool, size), capacity // size
                keys = keys_of(*numbers(0, count))
                status = space.put(keys, values_of(numbers(0, count), size))
                kept = int(space.lookup(keys).sum())
                assert kept * size >= 0.9 * capacity, (size, kept, status)
                if how == "remove":
                    assert space.remove(keys).sum() == kept
                else:
                    assert space.flush() == kept
                eventually(lambda: pool.status()["used_bytes"] == 0, "empty")
        assert pool.status()["largest_free_run_bytes"] == capacity


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=SLOW)])
def test_random_mix_of_sizes_is_never_refused(seconds: float) -> None:
    chance = random.Random(17)
    sizes = [256, 1000, 4096, 20_000, 65_536, 300_000, MIB, 3 * MIB + 5, 12 * MIB]
    with PoolProcess(dram="64MiB") as server, umbp.connect(server.socket) as pool:
        spaces = [open_namespace(pool, size) for size in sizes]
        stop, number, puts = time.monotonic() + seconds, 0, 0
        last: list[tuple[Any, int, int]] = []
        values = {size: bytes_of(0, size).copy() for size in sizes}
        while time.monotonic() < stop or puts <= 20:
            which = min(chance.randrange(len(sizes)), chance.randrange(len(sizes)))
            size, space = sizes[which], spaces[which]
            count = max(1, min(32, 2 * MIB // size))
            batch = numbers(number, count)
            number += count
            rows = [values[size].copy() for _ in batch]
            for each, row in zip(batch, rows, strict=True):
                row[:8] = np.array([each], np.uint64).view(np.uint8)
            assert space.put(keys_of(*batch), rows).all(WriteStatus.STORED), (size, number, pool.status())
            puts += 1
            last = [*last[-3:], (space, size, batch[-1])]
            for other, bytes_, key in last:
                out = np.zeros((1, bytes_), np.uint8)
                if other.get(keys_of(key), out).all(ReadStatus.HIT):
                    assert int(out[0, :8].view(np.uint64)[0]) == key
                    assert (out[0, 8:] == values[bytes_][8:]).all()
                else:
                    assert (other, bytes_, key) != last[-1], "what was just acknowledged is gone"
            if chance.random() < 0.2:
                space.remove(keys_of(*chance.sample(range(number), min(number, 50))))
        status = pool.status()
        assert status["used_bytes"] <= status["allocated_bytes"] <= status["capacity_bytes"]


def test_larger_than_the_pool_or_the_batch_larger_than_the_pool() -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        huge = open_namespace(pool, 9 * MIB)
        assert huge.put(keys_of(1), np.zeros((1, 9 * MIB), np.uint8)).all(WriteStatus.TOO_LARGE)
        whole = open_namespace(pool, 8 * MIB)
        assert whole.put(keys_of(1), values_of([1], 8 * MIB)).all(WriteStatus.STORED)
        assert whole.put(keys_of(2), values_of([2], 8 * MIB)).all(WriteStatus.STORED)
        space = open_namespace(pool, 256 << 10)
        batch = numbers(0, 100)  # three times the pool, in one call
        status = space.put(keys_of(*batch), values_of(batch, 256 << 10))
        stored, out = status.where(WriteStatus.STORED), np.zeros((100, 256 << 10), np.uint8)
        assert stored.sum() >= 20
        assert set(status) <= {WriteStatus.STORED, WriteStatus.ALL_LEASED}, status
        got = space.get(keys_of(*batch), out)
        assert (got.where(ReadStatus.HIT) == stored).all()
        assert (out[stored] == values_of(batch, 256 << 10)[stored]).all()
        # Afterwards it is a pool like any other.
        assert space.put(keys_of(500), values_of([500], 256 << 10)).all(WriteStatus.STORED)


# -- KV-10: quotas -------------------------------------------------------------------------------------------------------------------


def test_quota_evicts_within_the_namespace_and_never_what_was_just_stored() -> None:
    size = MIB
    with PoolProcess(dram="64MiB") as server, umbp.connect(server.socket) as pool:
        small, other = open_namespace(pool, size, tenant="small"), open_namespace(pool, size, tenant="other")
        assert other.put(keys_of(*numbers(0, 20)), values_of(numbers(0, 20), size)).all(WriteStatus.STORED)
        rest = PoolHttp(server.http)
        row = next(n["row"] for n in rest.get("/v1/namespaces")["namespaces"] if n["identity"]["tenant"] == "small")
        rest.put(f"/v1/namespaces/{row}/quota", {"quota": "10MiB"})
        out = np.zeros((1, size), np.uint8)
        for number in numbers(0, 50):
            assert small.put(keys_of(number), values_of([number], size)).all(WriteStatus.STORED)
            assert small.get(keys_of(number), out).all(ReadStatus.HIT)
            assert (out[0] == bytes_of(number, size)).all()
        facts = rest.get(f"/v1/namespaces/{row}")
        resident = int(small.lookup(keys_of(*numbers(0, 50))).sum())
        assert facts["stored_keys"] - facts["evicted_keys"] == facts["keys"] == resident == 10
        assert facts["evicted_for_quota_keys"] == 40
        assert facts["held_bytes"] <= 10 * MIB
        assert other.lookup(keys_of(*numbers(0, 20))).all()
        with small.lease(keys_of(*numbers(40, 10))) as lease:  # nothing of it can go: refused by name, and others lose nothing
            assert lease.held.all()
            status = small.put(keys_of(100, 101), values_of([100, 101], size))
            assert status.all(WriteStatus.OVER_QUOTA)
        assert rest.get(f"/v1/namespaces/{row}")["refused"] == {"over_quota": 2}
        assert other.lookup(keys_of(*numbers(0, 20))).all()
        rest.put(f"/v1/namespaces/{row}/quota", {"quota": "2MiB"})
        eventually(lambda: rest.get(f"/v1/namespaces/{row}")["held_bytes"] <= 2 * MIB, "a smaller quota is kept by and by")
        server.restart()
        eventually(lambda: pool.connected, "connected again")
        assert PoolHttp(server.http).get(f"/v1/namespaces/{row}")["quota_bytes"] == 2 * MIB
        for number in numbers(200, 5):
            assert small.put(keys_of(number), values_of([number], size)).all(WriteStatus.STORED)
        assert small.lookup(keys_of(*numbers(200, 5))).sum() == 2
        assert other.lookup(keys_of(*numbers(0, 20))).all()


# -- the number of keys --------------------------------------------------------------------------------------------------------


def test_keys_are_bounded_like_bytes() -> None:
    with PoolProcess("--keys-max", "2000", dram="16MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, 8)  # tiny values: the keys run out long before the bytes
        values = values_of(numbers(0, 500), 8)
        for start in range(0, 10_000, 500):
            assert space.put(keys_of(*numbers(start, 500)), values).all(WriteStatus.STORED)
            assert space.lookup(keys_of(*numbers(start, 500))).all()
        before = rss_bytes(server.pid)
        for start in range(10_000, 60_000, 500):
            assert space.put(keys_of(*numbers(start, 500)), values).all(WriteStatus.STORED)
        status = pool.status()
        assert status["keys"] <= status["limits"]["keys"] == 2000
        assert status["counters"]["evicted_keys"] >= 58_000
        assert rss_bytes(server.pid) < before + 8 * MIB
        kept = numbers(59_000, 1000)
        with space.lease(keys_of(*numbers(58_000, 2000))) as lease:
            if lease.held.sum() == 2000:
                assert space.put(keys_of(70_000), values[:1]).all(WriteStatus.KEY_LIMIT)
        assert space.lookup(keys_of(*kept)).all()


def test_namespaces_are_bounded_and_empty_ones_make_room() -> None:
    with PoolProcess("--namespaces-max", "8", dram="8MiB") as server, umbp.connect(server.socket) as pool:
        spaces = [open_namespace(pool, 4096, tenant=f"t{i}") for i in range(8)]
        for _ in range(100):
            open_namespace(pool, 4096, tenant="t0")  # the same again and again is one
        with pytest.raises(umbp.LimitReached):
            open_namespace(pool, 4096, tenant="one too many")
        spaces[0].put(keys_of(1), values_of([1], 4096))
        pool.close()
        with umbp.connect(server.socket) as second:
            eventually(lambda: second.status()["sessions"] == 1, "the first client is gone")
            fresh = [open_namespace(second, 4096, tenant=f"n{i}") for i in range(7)]
            with pytest.raises(umbp.LimitReached):
                open_namespace(second, 4096, tenant="n7")
            assert not any(space.lookup(keys_of(1)).any() for space in fresh)
            assert open_namespace(second, 4096, tenant="t0").lookup(keys_of(1)).all()


# -- KV-20: what the gauges say ------------------------------------------------------------------------------------------------------


def _scrape(server: PoolProcess) -> dict[str, float]:
    text = urllib.request.urlopen(f"{server.http}/metrics").read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("umbp_"))
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=SLOW)])
def test_gauges_and_counters_are_true_at_every_scrape(seconds: float) -> None:
    sizes, capacity = (4096, 100_000, 700_000), 16 * MIB
    with PoolProcess("--lease-seconds", "0.2s", dram="16MiB") as server, umbp.connect(server.socket) as pool:
        first = _scrape(server)
        assert first['umbp_capacity_bytes{tier="dram"}'] == capacity
        assert first['umbp_used_bytes{tier="dram"}'] == first["umbp_keys"] == 0
        stop, faults = time.monotonic() + seconds, []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                with umbp.connect(server.socket) as mine:
                    spaces = [open_namespace(mine, size) for size in sizes]
                    while time.monotonic() < stop:
                        which = chance.randrange(len(sizes))
                        space, batch = spaces[which], chance.sample(range(60), 8)
                        action = chance.randrange(10)
                        if action < 5:
                            space.put(keys_of(*batch), np.zeros((8, sizes[which]), np.uint8))
                        elif action < 7:
                            space.get(keys_of(*batch), np.zeros((8, sizes[which]), np.uint8))
                        elif action == 7:
                            space.remove(keys_of(*batch))
                        elif action == 8:
                            with space.lease(keys_of(*batch), 0.1, renew=False):
                                time.sleep(0.02)
                        elif chance.random() < 0.2:
                            space.flush()
            except umbp.LeaseLost:
                pass
            except BaseException as error:  # noqa: BLE001 - told below
                faults.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        before = first
        while time.monotonic() < stop:
            now = _scrape(server)
            used, allocated = now['umbp_used_bytes{tier="dram"}'], now['umbp_allocated_bytes{tier="dram"}']
            assert 0 <= used <= allocated <= capacity
            assert all(value >= 0 for value in now.values()), now
            assert 0 <= now["umbp_keys"] <= now["umbp_keys_max"]
            shrunk = [name for name, value in before.items() if name.split("{")[0].endswith("_total") and value > now.get(name, 0.0)]
            assert not shrunk, shrunk
            before = now
        for thread in threads:
            thread.join()
        assert not faults, faults
        spaces = [open_namespace(pool, size) for size in sizes]
        eventually(lambda: (s := pool.status())["leases"] == s["reservations"] == 0 == _scrape(server)["umbp_flushed_bytes"], "at rest")

        def agree() -> bool:
            """What the pool says and what a client sees, unless it evicts ahead of need between the two."""
            found = [int(space.lookup(keys_of(*numbers(0, 60))).sum()) for space in spaces]
            last, used = _scrape(server), sum(n * size for n, size in zip(found, sizes, strict=True))
            return (last["umbp_keys"], last['umbp_used_bytes{tier="dram"}']) == (sum(found), used)

        eventually(agree, "the gauges say what clients see", 20.0)
        for space in spaces:
            space.remove(keys_of(*numbers(0, 60)))
        last = _scrape(server)
        assert last["umbp_keys"] == last['umbp_used_bytes{tier="dram"}'] == last['umbp_allocated_bytes{tier="dram"}'] == 0
