"""A pool that cannot see its clients' processes, as between containers: what protects the memory that they may still write to."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.pools import PoolProcess
from umbp.types import ReadStatus, WriteStatus

SIZE = 1 << 20
OURS, THEIRS = 0x11, 0x22


@pytest.fixture
def pool() -> Iterator[PoolProcess]:
    apart = [shutil.which("unshare") or "/usr/bin/unshare", "--fork", "--pid", "--mount-proc", "--kill-child=KILL"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("processes cannot be put in a pid namespace of their own here")
    made = PoolProcess(dram="64MiB")
    made.command = [*apart, *made.command]
    with made:
        yield made
        made.kill()  # unshare hands no SIGTERM on


def keys_of(start: int, count: int) -> np.ndarray:
    return np.frombuffer(b"".join(n.to_bytes(32, "big") for n in range(start, start + count)), np.uint8).reshape(-1, 32)


def namespace(client: umbp.Pool) -> umbp.Namespace:
    return client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE))


class Writer:
    """A put of 20 pages in a thread, stopped before its copy."""

    def __init__(self, client: umbp.Pool) -> None:
        self.reserved, self.go_on = threading.Event(), threading.Event()
        self.statuses: umbp.Statuses | None = None
        self._thread = threading.Thread(target=self._put, args=(namespace(client),), daemon=True)
        self._thread.start()
        assert self.reserved.wait(60)

    def _put(self, ns: umbp.Namespace) -> None:
        self.statuses = ns.fill(keys_of(1000, 20), self._fill)

    def _fill(self, which: np.ndarray, data: np.ndarray, offsets: np.ndarray) -> None:
        self.reserved.set()
        assert self.go_on.wait(60)
        for offset in offsets.tolist():
            data[offset : offset + SIZE] = OURS

    def finish(self) -> umbp.Statuses:
        self.go_on.set()
        self._thread.join(60)
        assert self.statuses is not None
        return self.statuses


@pytest.mark.parametrize("event", ["connection lost", "pool killed"])
def test_memory_under_a_writer_that_cannot_be_seen_is_given_to_nobody(pool: PoolProcess, event: str) -> None:
    with umbp.connect(pool.socket) as one:
        writer = Writer(one)
        if event == "pool killed":
            pool.kill()
            pool.restart()
        else:
            one._down()  # as after a call that was not answered in time
            one._waker.wake()
        with umbp.connect(pool.socket) as two:
            ns = namespace(two)
            eventually(lambda: two.status()["abandoned"] == 20, "the pool does not know what the first writer does")
            put = ns.put(keys_of(0, 60), np.full((60, SIZE), THEIRS, np.uint8))
            stored = put.where(WriteStatus.STORED)
            assert 0 < np.count_nonzero(stored) <= 44, "twenty of the 64 pages are still the first writer's"
            assert writer.finish().all(WriteStatus.UNAVAILABLE, WriteStatus.EXPIRED)
            out = np.zeros((60, SIZE), np.uint8)
            hit = ns.get(keys_of(0, 60), out).where(ReadStatus.HIT)
            assert hit.any()
            assert (out[hit] == THEIRS).all(), "bytes of another writer under a hit"
            eventually(lambda: two.status()["abandoned"] == 0, "it has let go, and says so on its new connection")
            assert ns.put(keys_of(2000, 60), np.full((60, SIZE), THEIRS, np.uint8)).all(WriteStatus.STORED)


def test_memory_of_a_dead_writer_that_could_not_be_seen_comes_back(pool: PoolProcess) -> None:
    code = (
        "import os, signal, sys, numpy as np, umbp\n"
        "ns = umbp.connect(sys.argv[1]).namespace(model='m', page_tokens=64, layout=umbp.Layout.opaque(1 << 20))\n"
        "keys = np.arange(20 * 32, dtype=np.uint16).astype(np.uint8).reshape(20, 32); keys[:, 0] = np.arange(20)\n"
        "ns.fill(keys, lambda *a: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    subprocess.run([sys.executable, "-c", code, pool.socket], check=False, timeout=60)
    with umbp.connect(pool.socket) as client:
        eventually(lambda: (s := client.status())["being_written"] + s["abandoned"] == 0, "the dead hold nothing")
        assert namespace(client).put(keys_of(0, 60), np.full((60, SIZE), THEIRS, np.uint8)).all(WriteStatus.STORED)
