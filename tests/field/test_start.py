"""Starts that cannot be: bad options, too little memory, taken ports; each one clear error, and nothing half runs.

Field reports KV-18, KV-19 and R-10, through the real command line.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import umbp
from tests.field.people import keys_of, open_namespace, values_of
from tests.hatchery import hatchery, special
from tests.pools import NO_TLS, ROOT, PoolProcess
from umbp import ReadStatus, WriteStatus
from umbp.machine import MEMORY_FILESYSTEMS, filesystem
from umbp.pool.server import bind_unix

MIB = 1 << 20


def refused(folder: Path, *options: str, variables: dict[str, str] | None = None) -> str:
    """Start a pool that must not start: exit status 2, nothing said on standard output, no file and no socket left; its message."""
    shm = folder / "shm"
    shm.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "umbp.pool", "--name", "refused", "--socket", str(folder / "s"), "--shm-dir", str(shm), *options]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UMBP_")} | NO_TLS | (variables or {})
    with tempfile.TemporaryFile() as errors:
        process = hatchery(special(environ)).start(command, environ, ROOT, errors)
        try:
            status = process.wait(60.0)
        finally:
            process.kill()
        errors.seek(0)
        said = errors.read().decode()
        with process.stdout as out:
            assert not out.read()
    assert status == 2, (status, said)
    assert "Traceback" not in said, said
    assert not (folder / "s").exists()
    assert not list(shm.glob("*.segment"))
    return said


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="umbp-") as name:
        yield Path(name)


@pytest.fixture
def small_tmpfs() -> Iterator[Path]:
    """A file system of 64 MiB."""
    with tempfile.TemporaryDirectory(prefix="umbp-") as name:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", name], capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


# -- KV-18: sizes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (["--dram", "64 megs"], {}, "dram"),
        (["--dram=-1"], {}, "dram"),
        ([], {"UMBP_DRAM": "1.5.2"}, "dram"),
        ([], {"UMBP_DRAM": ""}, "dram"),
        (["--drum", "64MiB"], {}, "drum"),
        (["--eviction", "magic"], {}, "magic"),
    ],
)
def test_bad_option_stops_the_start_by_name(folder: Path, options: list[str], variables: dict[str, str], words: str) -> None:
    said = refused(folder, *options, variables=variables)
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_one_grammar_for_flag_variable_and_file(folder: Path) -> None:
    (folder / "pool.toml").write_text('dram = " 4 MB "\neviction = "sieve"\n')
    with PoolProcess("--config", str(folder / "pool.toml"), dram="8mib") as server:
        assert server.ready["dram_bytes"] == 8 * MIB  # the flag wins
        with umbp.connect(server.socket) as pool:
            assert pool.status()["eviction"] == "sieve"
        for bad in (b"", b"{", b'{"quota": "64 megs"}', b"[]", b'{"quota": null}'):
            request = urllib.request.Request(
                f"{server.http}/v1/namespaces/0/quota", bad, {"Content-Type": "application/json"}, method="PUT"
            )
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request)
            assert 400 <= error.value.code < 500
            assert "detail" in error.value.read().decode()
        assert urllib.request.urlopen(f"{server.http}/healthz").status == 200


# -- KV-19: memory -------------------------------------------------------------------------------------------------------------------


def test_too_small_a_tmpfs_is_said_before_anything_is_touched(folder: Path, small_tmpfs: Path) -> None:
    said = refused(folder, "--shm-dir", str(small_tmpfs), "--dram", "256MiB")
    assert "dram" in said
    assert str(small_tmpfs) in said
    assert str(64 * MIB) in said or "64" in said  # what was found
    assert str(256 * MIB) in said or "256" in said  # what was asked for
    assert "--shm-size" in said or "remount" in said  # what to change
    assert not list(small_tmpfs.glob("*.segment"))


def test_tmpfs_that_is_full_by_then_is_an_error_and_no_signal(folder: Path, small_tmpfs: Path) -> None:
    """Room for the file by its size, but another file takes it: faulting in says so, and SIGBUS never comes."""
    (small_tmpfs / "other").write_bytes(bytes(40 * MIB))
    said = refused(folder, "--shm-dir", str(small_tmpfs), "--dram", "40MiB")
    assert "dram" in said


def test_tmpfs_that_fills_up_after_the_start_harms_no_put(small_tmpfs: Path) -> None:
    with PoolProcess("--shm-dir", str(small_tmpfs), dram="32MiB") as server, umbp.connect(server.socket) as pool:
        with pytest.raises(OSError, match="No space"):
            (small_tmpfs / "other").write_bytes(bytes(64 * MIB))
        space, numbers = open_namespace(pool, MIB), list(range(100))
        out = np.zeros((1, MIB), np.uint8)
        for number in numbers:  # every byte of the pool is written: it was all there from the start
            assert space.put(keys_of(number), values_of([number], MIB)).all(WriteStatus.STORED)
            assert space.get(keys_of(number), out).all(ReadStatus.HIT)
        assert server.alive


def test_auto_size_in_a_tmpfs_that_is_too_small_says_so(folder: Path, small_tmpfs: Path) -> None:
    said = refused(folder, "--shm-dir", str(small_tmpfs))
    assert "64MiB" in said
    assert "--shm-size" in said


def test_locked_memory_limit_does_not_matter() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
        with PoolProcess(dram="16MiB") as server, umbp.connect(server.socket) as pool:
            found = Path(f"/proc/{server.pid}/status").read_text()
            assert int(re.search(r"RssShmem:\s+(\d+) kB", found)[1]) >= 16 << 10  # type: ignore[index] # all of it is there when it is ready
            assert open_namespace(pool, MIB).put(keys_of(1), values_of([1], MIB)).all(WriteStatus.STORED)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_folder_of_shared_memory_that_is_none(folder: Path) -> None:
    assert "shm_dir" in refused(folder, "--shm-dir", str(folder / "nowhere"))


def test_folder_of_shared_memory_on_a_disk_is_said(folder: Path) -> None:
    kind = filesystem(Path("/proc/mounts").read_text(), os.path.realpath(folder))
    if kind in MEMORY_FILESYSTEMS:
        pytest.skip(f"temporary folders are on {kind or 'an unknown file system'} here")
    with PoolProcess("--shm-dir", str(folder), dram="16MiB") as server, urllib.request.urlopen(server.http + "/readyz") as answer:
        warnings = json.load(answer)["warnings"]
    assert [line for line in warnings if line.startswith("shm_dir: ") and f"is {kind}, not memory" in line], warnings


# -- ports and sockets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_taken_port_is_one_clear_error(folder: Path, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        other = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")
    with other:
        port = other.getsockname()[1]
        text = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        said = refused(folder, "--http", text, "--dram", "4MiB")
        assert text in said
        assert "in use" in said.lower()


def test_address_of_another_machine_and_beyond_loopback(folder: Path) -> None:
    assert "203.0.113.1" in refused(folder, "--http", "203.0.113.1:0", "--token", "secret", "--dram", "4MiB")
    assert "token" in refused(folder, "--http", "0.0.0.0:0", "--dram", "4MiB")


def test_socket_that_is_alive_or_no_socket_at_all(folder: Path) -> None:
    with PoolProcess(dram="4MiB") as server:
        second = [sys.executable, "-m", "umbp.pool", "--name", "x", "--socket", server.socket, "--shm-dir", str(folder), "--dram", "4MiB"]
        done = subprocess.run(second, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 2
        assert server.socket in done.stderr
        assert not list(folder.glob("*.segment"))
        with umbp.connect(server.socket) as pool:  # the first still has its socket
            assert pool.status()["name"] == server.name
        assert os.stat(server.socket).st_mode & 0o777 == 0o600
    plain = folder / "file"
    plain.write_text("precious")
    done = subprocess.run([*second[:5], "--socket", str(plain), *second[7:]], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert plain.read_text() == "precious"
    with pytest.raises(umbp.Conflict, match="folder"):
        bind_unix(f"{plain}/pool.sock")


def test_connect_where_nobody_listens_says_what_to_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.client.connection.CONNECT_SECONDS_MAX", 0.2)
    with pytest.raises(umbp.Unavailable, match=r"python -m umbp\.pool"):
        umbp.connect(str(folder / "nobody.sock"))
    (folder / "stale.sock").write_text("")
    with pytest.raises(umbp.Unavailable, match=r"python -m umbp\.pool"):
        umbp.connect(str(folder / "stale.sock"))
    with pytest.raises(umbp.InvalidRequest, match="Unix socket"):
        umbp.connect("127.0.0.1:80")
    listener = socket.socket(socket.AF_UNIX)  # something that is no pool
    listener.bind(str(folder / "other.sock"))
    listener.listen()
    with pytest.raises(umbp.Unavailable):
        umbp.connect(str(folder / "other.sock"))
    listener.close()
