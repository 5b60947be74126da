"""File descriptors of a client: none is kept when it is gone, and none that is somebody else's by now is written to."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import umbp
from tests.field.people import eventually, keys_of
from tests.pools import PoolProcess
from umbp import Layout
from umbp.client.waker import Waker
from umbp.errors import Unavailable


@pytest.fixture(scope="module")
def server() -> Iterator[PoolProcess]:
    with PoolProcess(dram="16MiB") as running:
        yield running


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_use_after_close_writes_to_nobodys_file(server: PoolProcess, tmp_path: Path) -> None:
    pool = umbp.connect(server.socket)
    space = pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(64), replicated=True)
    space.lookup(keys_of(1))
    pool.close()
    with contextlib.ExitStack() as files:
        for number in range(8):  # they take the numbers that the client's descriptors had
            files.enter_context(open(tmp_path / str(number), "wb"))
        for number in range(4):
            assert not space.lookup(keys_of(number)).any()
            assert space.prefix(keys_of(number, number + 1)) == 0
        pool.close()
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [0] * 8


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_client_that_is_dropped_without_close_leaves_no_descriptor(server: PoolProcess) -> None:
    umbp.connect(server.socket).close()
    before = descriptors()
    for _ in range(20):
        pool = umbp.connect(server.socket)
        pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(64), replicated=True).lookup(keys_of(1))
        del pool
    # The background thread looks every ten seconds whether its pool is still wanted.
    eventually(lambda: descriptors() <= before, lambda: f"as many as before: {descriptors()} descriptors, {before} before")


def test_a_refused_connect_leaves_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    for _ in range(20):
        with pytest.raises(Unavailable):
            umbp.connect(str(tmp_path / "nobody.sock"))
    eventually(lambda: descriptors() <= before, "as many as before")


def test_a_waker_that_nobody_reads_never_waits_and_is_closed_once(tmp_path: Path) -> None:
    waker = Waker()
    for _ in range(100_000):  # a pipe holds 65,536
        waker.wake()
    waker.clear()
    waker.close()
    with contextlib.ExitStack() as stack:  # they take the numbers that its descriptors had
        files = [stack.enter_context(open(tmp_path / str(number), "w+b")) for number in range(8)]
        waker.close()
        waker.wake()
        waker.clear()
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 8
