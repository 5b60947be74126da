"""A pool on each NUMA node: two real pools of one machine that have a copy each, and clients that find the near one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.masters import MasterProcess, call
from tests.pools import PoolProcess
from umbp.client.address import pool_address
from umbp.config import default_socket, load_pool_config, near_pool
from umbp.errors import UmbpError
from umbp.per_node import flags
from umbp.store import numa
from umbp.types import ReadStatus, WriteStatus

NODE = numa.numa_nodes()[0]
SIZE = 65_536
NOWHERE = 255  # of `locate`


def keys_of(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def pages_of(*numbers: int) -> np.ndarray:
    return np.stack([np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8) for number in numbers])


def namespace(client: umbp.Pool) -> umbp.Namespace:
    return client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE), replicated=True)


# -- two copies ----------------------------------------------------------------------------------------------------------------------------


PATIENT = ("--heartbeat", "0.2s", "--suspect-after", "60s", "--dead-after", "120s")  # a busy machine is no reason to give a pool no copies


@pytest.fixture
def pools() -> Iterator[tuple[PoolProcess, PoolProcess]]:
    master = MasterProcess("--replication", "numa", "--advice-bandwidth", "4GiB", timing=PATIENT)
    near = ("--neighbours", "read")
    with master, master.pool(*near) as here, master.pool(*near) as there:
        master.synced(here, there)
        yield here, there


def test_a_page_has_a_copy_in_each_pool_of_the_machine_and_is_found_by_either(pools: tuple[PoolProcess, PoolProcess]) -> None:
    keys, pages, out = keys_of(*range(1, 21)), pages_of(*range(1, 21)), np.zeros((20, SIZE), np.uint8)
    with umbp.connect(pools[0].socket) as writer, umbp.connect(pools[1].socket) as reader:
        here, there = namespace(writer), namespace(reader)
        assert here.put(keys, pages).all(WriteStatus.STORED)
        eventually(lambda: there.lookup(keys).all(), "the second copies have come, without anybody having asked")
        assert there.get(keys, out).all(ReadStatus.HIT), "and are read from near memory"
        assert np.array_equal(out, pages)
        here.remove(keys)
        assert not here.lookup(keys).any()
        eventually(lambda: (here.locate(keys) != NOWHERE).all(), "one copy is enough to be found")
        out[:] = 0
        assert here.get(keys, out, deadline=30.0).all(ReadStatus.HIT)
        assert np.array_equal(out, pages)

        def copied() -> bool:
            assert here.get(keys, out, deadline=30.0).all(ReadStatus.HIT)
            return bool(here.lookup(keys).all())

        eventually(copied, "what is in use has a copy on either side again")


# -- the near one --------------------------------------------------------------------------------------------------------------------------


def test_a_client_finds_the_pool_of_the_node_that_its_processors_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"UMBP_RUNTIME_DIR": str(tmp_path)}
    for number in (0, 1):
        (tmp_path / f"default-numa{number}.sock").touch()
    (tmp_path / "b-numa1.sock").touch()
    monkeypatch.setattr("umbp.client.address.numa_nodes", lambda: [0, 1])
    for at, expected in ((0, 0), (1, 1), (None, 0)):
        monkeypatch.setattr("umbp.client.address.node_of_process", lambda at=at: at)
        assert pool_address("numa", environ).path == default_socket(near_pool("default", expected), environ)
        assert pool_address("", environ | {"UMBP_POOL": "numa"}).path == default_socket(near_pool("default", expected), environ)
        assert pool_address("numa@1", environ).path == default_socket("default-numa1", environ)
        assert pool_address("numa:b", environ).path == default_socket("b-numa1", environ), "where only that one is"
        assert pool_address("numa:b@0", environ).path == default_socket("b-numa0", environ), "which it says, there or not"
    with pytest.raises(UmbpError):
        pool_address("numa:../x", environ)


def test_a_pool_is_started_with_its_part_of_what_is_given() -> None:
    given = ["--name", "a", "--dram=64MiB", "--numa", "0,1", "--eviction", "lru", "--numa-strict=on"]
    made = flags(load_pool_config(given, {}), given, 1, 2, "127.0.0.1:7410")
    config = load_pool_config(made, {})
    assert (config.name, config.numa_nodes, config.dram, config.eviction) == ("a-numa1", (1,), 32 << 20, "lru")
    assert (str(config.master[0]), config.numa_strict) == ("127.0.0.1:7410", True)


# -- the command ---------------------------------------------------------------------------------------------------------------------------


class PerNode:
    """`python -m umbp.per_node` over the nodes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.environ = os.environ | {"UMBP_RUNTIME_DIR": str(folder)}
        options = ["--dram", "32MiB", "--shm-dir", str(folder), "--numa", str(NODE)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "umbp.per_node", *options], env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.ready: dict[str, Any] = {}

    def start(self) -> None:
        assert self.process.stdout is not None
        word, _, said = self.process.stdout.readline().partition(" ready ")
        assert word == "umbp.per_node", self.process.communicate()[1]
        self.ready = json.loads(said)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def per_node(tmp_path: Path) -> Iterator[PerNode]:
    made = PerNode(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_one_command_runs_all_of_it_and_what_is_killed_comes_back_with_its_pages(
    per_node: PerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBP_RUNTIME_DIR", per_node.environ["UMBP_RUNTIME_DIR"])
    assert list(per_node.ready["sockets"]) == [str(NODE)]
    master = f"http://{per_node.ready['master'].removeprefix('http://')}"
    policies = {each["kind"]: each["current"] for each in call(master + "/v1/policies")["policies"]}
    assert policies["replication"] == "numa"
    with umbp.connect("numa") as client:
        ns = namespace(client)
        assert client.status()["name"] == f"default-numa{NODE}"
        assert ns.put(keys_of(1, 2), pages_of(1, 2)).all(WriteStatus.STORED)
    lock = next(Path(per_node.environ["UMBP_RUNTIME_DIR"]).glob("umbp.*.lock"))
    os.kill(int(lock.read_text()), signal.SIGKILL)  # the pool

    def back() -> bool:
        try:
            with umbp.connect("numa") as client:
                return bool(namespace(client).lookup(keys_of(1, 2)).all())
        except UmbpError:
            return False

    eventually(back, "the pool is there again with its pages")
    assert call(master + "/v1/nodes")["nodes"][0]["state"] == "alive"
    per_node.process.kill()
    per_node.process.communicate(timeout=60)  # until nobody has its standard error any more: all have ended with it


def test_a_bad_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    for options, why in (
        (["--numa", "near=0,far=1"], "numa: "),
        (["--http", "127.0.0.1:9"], "http: "),
        (["--shm-dir", "/none"], "shm_dir"),
    ):
        command = [sys.executable, "-m", "umbp.per_node", "--dram", "8MiB", *options]
        environ = os.environ | {"UMBP_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
        assert done.returncode == 2
        assert why in done.stderr
    assert not list(tmp_path.glob("*.sock"))
