"""What a pool leaves when it ends, and what the next one on the machine does with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
from pathlib import Path

import numpy as np
import pytest

import umbp
from tests.masters import call
from tests.pools import PoolProcess
from umbp.types import WriteStatus


def put_some(pool: PoolProcess) -> None:
    with umbp.connect(pool.socket) as client:
        ns = client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(4096))
        assert ns.put([bytes([n]) * 32 for n in range(50)], np.ones((50, 4096), np.uint8)).all(WriteStatus.STORED)


def held(pool: PoolProcess) -> int:
    with umbp.connect(pool.socket) as client:
        ns = client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(4096))
        return ns.prefix([bytes([n]) * 32 for n in range(50)])


def beside(pool: PoolProcess, *options: str) -> PoolProcess:
    """Another pool over the same folder of shared memory."""
    other = PoolProcess(*options, dram="8MiB")
    other.command[other.command.index("--shm-dir") + 1] = str(pool.shm_dir)
    return other


def test_memory_kept_on_purpose_is_not_the_next_pools_to_take() -> None:
    with PoolProcess(dram="8MiB") as pool:
        put_some(pool)
        pool.stop()
        with beside(pool):
            pass
        pool.restart()
        assert held(pool) == 50


def test_memory_of_a_killed_pool_is_reclaimed_by_the_next() -> None:
    with PoolProcess(dram="8MiB") as pool:
        put_some(pool)
        pool.kill()
        with beside(pool) as other:
            assert len(list(Path(pool.shm_dir).glob("*.segment"))) == 1, other.log()
        pool.restart()
        assert held(pool) == 0


def stopped_at_once(pool: PoolProcess) -> tuple[bytes, bytes]:
    """Start a pool and stop it as soon as it says that it has its memory; what it said and what it logged."""
    process = subprocess.Popen(pool.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while b"memory" not in (line := process.stderr.readline()) and line:
            pass
        process.send_signal(signal.SIGTERM)
        said, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        return said, log
    finally:
        process.kill()
        process.wait()


def test_a_stop_while_memory_is_faulted_in_is_quick_and_leaves_nothing() -> None:
    pool = PoolProcess("--prefault-threads", "1", "--on-exit", "release", dram="2GiB")
    try:
        for _ in range(10):
            said, log = stopped_at_once(pool)
            if not said:
                break  # else this process was kept from running until the pool was ready, which it was to be stopped before
        assert said == b"", "it said that it was ready"
        assert b"stopped before it was ready" in log
        assert not list(Path(pool.shm_dir).glob("*.segment"))
        assert not os.path.exists(pool.socket)
    finally:
        pool.remove()


def test_a_pool_whose_memory_was_removed_says_that_it_is_to_be_started_anew() -> None:
    """As a cleaner of temporary files does it: who has it mapped goes on, but nobody else can come."""
    with PoolProcess("--on-exit", "release", dram="8MiB") as pool:
        put_some(pool)
        assert call(pool.http + "/healthz") == {"healthy": True, "reasons": []}
        path = pool.segment
        path.unlink()
        for probe in ("/healthz", "/readyz"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                call(pool.http + probe)
            assert caught.value.code == 503
            assert str(path) in json.loads(caught.value.read())["reasons"][0]
        assert pool.stop() == 0, pool.log()
        pool.start()
        assert held(pool) == 0
        assert call(pool.http + "/readyz")["ready"]
