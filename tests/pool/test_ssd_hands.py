"""The process that moves a disk's bytes: it does so, and whichever of the two is killed or stopped, no byte is wrong and nothing hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.masters import MasterProcess, reported
from tests.pools import PoolProcess
from umbp.store.locks import is_alive
from umbp.types import NOWHERE, ReadStatus, Tier

SIZE = 65_536
COUNT = 300  # pages: 20 MiB, where DRAM has 16
HIT = ReadStatus.HIT


def keys_of(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def pages_of(*numbers: int) -> np.ndarray:
    return np.stack([np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8) for number in numbers])


def status(pool: PoolProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{pool.http}/v1/status", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def warnings(pool: PoolProcess) -> str:
    with urllib.request.urlopen(f"{pool.http}/readyz", timeout=60) as answer:
        return " ".join(json.load(answer)["warnings"])


def hands_of(pool: PoolProcess) -> list[int]:
    """Processes that serve its disks."""
    return [int(word) for word in Path(f"/proc/{pool.pid}/task/{pool.pid}/children").read_text().split()]


def called(pid: int) -> tuple[int, int]:
    """Bytes that the process has had read and written by system calls: not its socket's, which are received and sent."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


@contextlib.contextmanager
def connected(pool: PoolProcess) -> Iterator[umbp.Namespace]:
    with umbp.connect(pool.socket) as client:
        yield client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE), replicated=True)


def fill(pool: PoolProcess, ns: umbp.Namespace) -> None:
    """Store pages, and have all of them on SSD."""
    for start in range(0, COUNT, 60):
        ns.put(keys_of(*range(start, start + 60)), pages_of(*range(start, start + 60)))
        eventually(lambda: status(pool)["ssd"]["waiting"] == 0, "the queue is empty")
    eventually(lambda: status(pool)["ssd"]["keys"] == COUNT, "all are on SSD")


def right(ns: umbp.Namespace, *numbers: int, deadline: float = 30.0) -> int:
    """Read these back: how many were hits. No hit has a wrong byte."""
    out = np.zeros((len(numbers), SIZE), np.uint8)
    codes = ns.get(keys_of(*numbers), out, deadline=deadline).codes
    wanted = pages_of(*numbers)
    for at in np.flatnonzero(codes == HIT).tolist():
        assert np.array_equal(out[at], wanted[at]), numbers[at]
    return int(np.count_nonzero(codes == HIT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def pool(folder: Path) -> Iterator[PoolProcess]:
    with PoolProcess("--ssd", f"{folder}:64MiB", "--ssd-admission", "always", dram="16MiB") as made:
        yield made


def on_ssd(ns: umbp.Namespace) -> list[int]:
    return np.flatnonzero(ns.locate(keys_of(*range(COUNT))) == Tier.SSD).tolist()


def test_the_hands_move_the_bytes_hold_the_locks_and_end_with_their_pool(pool: PoolProcess, folder: Path) -> None:
    (hands,) = hands_of(pool)
    before = called(hands)
    with connected(pool) as ns:
        fill(pool, ns)
        every = keys_of(*range(COUNT))
        reads = called(hands)[0]
        assert ns.lookup(every, tier=Tier.SSD).all()
        assert ns.prefix(every, tier=Tier.SSD) == COUNT
        old = on_ssd(ns)[:60]
        assert called(hands)[0] == reads, "to ask is not to read"
        assert right(ns, *old) == len(old)
    read, written = (now - then for now, then in zip(called(hands), before, strict=True))
    assert written >= COUNT * SIZE
    assert read >= len(old) * SIZE
    held = {os.readlink(path) for path in Path(f"/proc/{hands}/fd").iterdir() if path.exists()}
    assert str(folder / "owner.lock") in held
    assert str(next(pool.shm_dir.glob("*.lock"))) in held
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # of a terminal, or a service, to all of a group
        os.kill(hands, number)
    with connected(pool) as ns:
        assert right(ns, *range(0, COUNT, 7)) == len(range(0, COUNT, 7))
    assert hands_of(pool) == [hands]
    assert "process that served" not in warnings(pool)
    assert pool.stop() == 0
    assert not is_alive(hands)
    pool.restart()
    (again,) = hands_of(pool)
    pool.kill()
    eventually(lambda: not is_alive(again), "the hands end with their pool")
    assert "Traceback" not in pool.log()


def test_a_pool_whose_hands_are_killed_does_it_all_by_itself(pool: PoolProcess) -> None:
    (hands,) = hands_of(pool)
    stop, faults, rounds = threading.Event(), list[BaseException](), [0, 0]

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            with connected(pool) as mine:
                while not stop.is_set():
                    numbers = draw.choice(COUNT, 30, replace=False).tolist()
                    mine.put(keys_of(*numbers[:10]), pages_of(*numbers[:10]))  # some have gone to SSD alone, or nowhere
                    right(mine, *numbers)
                    rounds[seed] += 1
        except BaseException as error:  # noqa: BLE001 - shown by the test
            faults.append(error)

    with connected(pool) as ns:
        fill(pool, ns)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: min(rounds) >= 3 or faults, "there is traffic")
        os.kill(hands, signal.SIGKILL)
        eventually(lambda: "process that served" in warnings(pool), "it is said")
        seen = list(rounds)
        eventually(lambda: all(now >= then + 3 for now, then in zip(rounds, seen, strict=True)) or faults, "it goes on")
        stop.set()
        for thread in threads:
            thread.join(60.0)
        assert not faults, faults
        old = on_ssd(ns)
        assert right(ns, *old[:100]) == len(old[:100])
    assert "is gone; the pool serves it by itself" in pool.log()
    pool.restart()
    assert len(hands_of(pool)) == 1
    assert "process that served" not in warnings(pool)
    with connected(pool) as ns:
        kept = np.flatnonzero(ns.locate(keys_of(*range(COUNT))) != NOWHERE).tolist()
        assert len(kept) == COUNT
        assert right(ns, *kept) == COUNT
    assert "Traceback" not in pool.log()


def test_heartbeats_go_on_while_a_disk_hangs(folder: Path) -> None:
    """Reads and writes hang in the disk; of what the master hears of the node nothing does."""
    options = ("--ssd", f"{folder}:64MiB", "--ssd-admission", "always")
    timing = ("--heartbeat", "0.05s", "--suspect-after", "30s", "--dead-after", "60s")
    with MasterProcess(timing=timing) as master, master.pool(*options) as pool, connected(pool) as ns:
        fill(pool, ns)
        master.synced(pool)
        (hands,), (*read, again) = hands_of(pool), on_ssd(ns)[:21]
        os.kill(hands, signal.SIGSTOP)
        try:
            assert right(ns, *read, deadline=0.1) == 0
            fresh = range(COUNT, COUNT + 20)
            ns.put(keys_of(*fresh), pages_of(*fresh))
            joins, beats = reported(pool, "joins"), reported(pool, "beats")
            eventually(lambda: reported(pool, "beats") >= beats + 50, "heartbeats go on")
            assert master.states() == {pool.name: "alive"}
            assert reported(pool, "joins") == joins
            eventually(
                lambda: any(place == (pool.name, "dram") for place in master.locations(keys_of(fresh[-1]).tobytes())), "so do events"
            )
            assert right(ns, again, deadline=0.1) == 0  # it hangs still
        finally:
            os.kill(hands, signal.SIGCONT)
        eventually(lambda: right(ns, *read) == len(read), "all is read")
        eventually(lambda: status(pool)["ssd"]["waiting"] == 0, "all is written")


@pytest.mark.slow  # as long as a disk may be silent
def test_hands_that_are_stopped_are_a_stalled_disk_and_nobody_else_waits(pool: PoolProcess) -> None:
    (hands,) = hands_of(pool)
    with connected(pool) as ns:
        fill(pool, ns)
        old = on_ssd(ns)
        os.kill(hands, signal.SIGSTOP)
        assert right(ns, *old[:20], deadline=0.2) == 0
        fresh = range(COUNT, COUNT + 20)
        assert ns.put(keys_of(*fresh), pages_of(*fresh)).codes.max() < 16  # all are stored
        assert right(ns, *fresh) == len(fresh)
        eventually(lambda: "does not answer" in warnings(pool), "the disk counts as stalled")
        assert right(ns, *old[20:40], deadline=5.0) == 0  # at once: it is not asked
        os.kill(hands, signal.SIGCONT)
        eventually(lambda: "does not answer" not in warnings(pool), "it is back")
        eventually(lambda: right(ns, *old[:40]) == 40, "all is read")
        eventually(lambda: status(pool)["ssd"]["keys"] == COUNT + 20, "all is written")
    assert "Traceback" not in pool.log()


@pytest.mark.slow  # each of what a stop waits for has its time
def test_stopped_hands_keep_no_pool_from_its_end(pool: PoolProcess) -> None:
    (hands,) = hands_of(pool)
    with connected(pool) as ns:
        fill(pool, ns)
        os.kill(hands, signal.SIGSTOP)
        right(ns, *on_ssd(ns)[:20], deadline=0.1)
        ns.put(keys_of(9999), pages_of(9999))
    assert pool.stop() == 0
    assert not is_alive(hands)
    pool.restart()
    with connected(pool) as ns:
        assert right(ns, *range(COUNT)) >= COUNT - 1


@pytest.mark.parametrize("which", ["pool", "hands first"])
def test_killed_in_the_middle_of_reads_and_writes_the_next_life_has_right_bytes(pool: PoolProcess, which: str) -> None:
    with connected(pool) as ns:
        fill(pool, ns)
    draw = np.random.default_rng(len(which))
    for life in range(2):
        (hands,) = hands_of(pool)
        moved = called(hands)
        began, stop = threading.Event(), threading.Event()

        def work(seed: int, began: threading.Event = began, stop: threading.Event = stop) -> None:
            random = np.random.default_rng(seed)
            with contextlib.suppress(umbp.UmbpError, OSError), connected(pool) as mine:
                while not stop.is_set():
                    numbers = random.choice(COUNT, 40, replace=False).tolist()
                    right(mine, *numbers, deadline=5.0)
                    fresh = random.integers(COUNT, 1 << 30, 20).tolist()
                    mine.put(keys_of(*fresh), pages_of(*fresh))
                    began.set()

        threads = [threading.Thread(target=work, args=(10 * life + seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        assert began.wait(60.0)
        target = int(draw.integers(1, 8 << 20))
        eventually(lambda: sum(called(hands)) - sum(moved) > target, "bytes move")  # noqa: B023 - called here
        if which != "pool":
            os.kill(hands, signal.SIGKILL)
        pool.kill()
        stop.set()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        pool.restart()
        with connected(pool) as ns:
            tiers = ns.locate(keys_of(*range(COUNT)))
            kept = np.flatnonzero(tiers != NOWHERE).tolist()
            assert right(ns, *kept) == len(kept)
    found = status(pool)["ssd"]
    assert (found["damaged_keys"], found["unreadable_keys"]) == (0, 0)
    assert "Traceback" not in pool.log()
