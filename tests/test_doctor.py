"""What the doctor finds, on a machine made of planted files and on this one."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp import doctor
from umbp.config import load_pool_config
from umbp.doctor import Finding, World, examine
from umbp.machine import filesystem
from umbp.store.segment import file_stem

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    for name in ("shm", "sockets"):
        (tmp_path / name).mkdir(mode=0o700)
    return {"UMBP_SHM_DIR": str(tmp_path / "shm"), "UMBP_RUNTIME_DIR": str(tmp_path / "sockets")}


@pytest.fixture
def torch_is_asked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, as another process imports it: one test does it."""
    monkeypatch.setattr(doctor, "ask_torch", lambda: {"version": "2.13.0", "count": 0, "name": "", "arch": "", "peers": True})


def world(environ: dict[str, str], root: Path = Path("/"), **found: object) -> World:
    return World(environ, load_pool_config([], environ), root, **found)  # type: ignore[arg-type]


def plant(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


def test_this_machine_is_examined_without_a_trace(environ: dict[str, str], tmp_path: Path) -> None:
    findings = examine(environ)
    assert {"configuration", "python", "kernel", "shared memory", "memory", "huge pages", "numa", "gpu", "segments", "socket"} <= {
        finding.name for finding in findings
    }
    assert all(finding.status in ("ok", "info", "warn", "bad") and finding.found for finding in findings)
    assert all(finding.advice for finding in findings if finding.status in ("warn", "bad"))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.usefixtures("torch_is_asked_elsewhere")
def test_a_bare_machine_is_examined(environ: dict[str, str], tmp_path: Path) -> None:
    assert statuses(examine(environ, str(tmp_path / "nothing")))["huge pages"] == "warn"


@pytest.mark.usefixtures("torch_is_asked_elsewhere")
def test_a_bad_variable_is_a_finding_and_the_rest_is_judged_all_the_same(environ: dict[str, str]) -> None:
    findings = examine(environ | {"UMBP_DRAM": "64 megs"})
    assert findings[0].status == "bad"
    assert "dram" in findings[0].found
    assert len(findings) > 8
    findings = examine(environ | {"UMBP_WHATEVER": "1"})
    assert (findings[0].status, "UMBP_WHATEVER" in findings[0].found) == ("warn", True)


def test_a_probe_that_fails_leaves_the_others_alone(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: World) -> list[Finding]:
        raise PermissionError("no")

    monkeypatch.setattr(doctor, "PROBES", (broken, doctor.python))
    assert statuses(examine(environ)) == {"configuration": "ok", "broken": "info", "python": "ok", "packages": "ok"}


@pytest.mark.parametrize(
    ("size", "free", "kind", "writable", "wanted", "status", "words"),
    [
        (64 * GIB, 60 * GIB, "tmpfs", True, None, "ok", "64GiB"),
        (64 * GIB, 60 * GIB, "tmpfs", True, 60 * GIB, "ok", "64GiB"),
        (64 * MIB, 64 * MIB, "tmpfs", True, None, "bad", "--shm-size"),
        (64 * MIB, 64 * MIB, "tmpfs", True, 256 * MIB, "bad", "256MiB asked for"),
        (64 * GIB, GIB, "tmpfs", True, 2 * GIB, "bad", "smaller --dram"),
        (64 * GIB, 60 * GIB, "tmpfs", False, None, "bad", "not writable"),
        (64 * GIB, 60 * GIB, "ext4", True, None, "warn", "tmpfs"),
    ],
)
def test_shared_memory_is_judged(size: int, free: int, kind: str, writable: bool, wanted: int | None, status: str, words: str) -> None:
    [finding] = doctor.judge_shared_memory("/dev/shm", kind, size=size, free=free, writable=writable, wanted=wanted)
    assert finding.status == status
    assert words in finding.found + finding.advice


@pytest.mark.usefixtures("torch_is_asked_elsewhere")
def test_a_missing_folder_of_segments_is_bad(environ: dict[str, str]) -> None:
    environ["UMBP_SHM_DIR"] = "/nonexistent"
    found = statuses(examine(environ))
    assert (found["shared memory"], found["segments"]) == ("bad", "ok")


def test_the_longest_mount_point_names_the_file_system() -> None:
    mounts = "overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw 0 0\nshm /dev/shm ext4 rw 0 0\nx /dev/shmem xfs rw 0 0\n"
    assert [filesystem(mounts, path) for path in ("/dev/shm", "/dev/shm/a", "/dev/x", "/home")] == [
        "ext4",
        "ext4",
        "tmpfs",
        "overlay",
    ]
    assert filesystem("", "/dev/shm") == ""


def test_memory_is_judged_by_the_cgroup(environ: dict[str, str], tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemAvailable: 67108864 kB\n", "proc/self/cgroup": "0::/\n"}
    root = plant(tmp_path / "root", files | {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(900 * MIB)})
    [finding] = doctor.memory(world(environ, root))
    assert (finding.status, "124MiB left" in finding.found) == ("bad", True)
    [finding] = doctor.memory(world(environ | {"UMBP_DRAM": "100MiB"}, root))
    assert finding.status == "ok"
    [finding] = doctor.memory(world(environ | {"UMBP_DRAM": "200MiB"}, root))
    assert finding.status == "bad"


def test_what_the_pool_holds_already_is_not_asked_for_twice(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "shm" / (file_stem("default") + ".segment")).write_bytes(b"x" * MIB)
    assert doctor.held_bytes(load_pool_config([], environ)) >= MIB
    assert doctor.held_bytes(load_pool_config(["--name", "other"], environ)) == 0


def test_limits_matter_where_something_is_pinned(environ: dict[str, str], tmp_path: Path) -> None:
    assert statuses(doctor.limits(world(environ, tmp_path, memlock=65536)))["locked memory"] == "ok"
    root = plant(tmp_path, {"dev/kfd": ""})
    assert statuses(doctor.limits(world(environ, root, memlock=65536)))["locked memory"] == "warn"
    assert statuses(doctor.limits(world(environ, root, memlock=resource.RLIM_INFINITY)))["locked memory"] == "ok"
    assert statuses(doctor.limits(world(environ, root, open_files=1024)))["open files"] == "warn"
    assert statuses(doctor.limits(world(environ, root, open_files=resource.RLIM_INFINITY)))["open files"] == "ok"


@pytest.mark.parametrize(
    ("release", "status"),
    [("6.8.0-41-generic", "ok"), ("5.14.0", "ok"), ("5.10.0", "warn"), ("4.18.0-el8", "warn"), ("odd", "warn")],
)
def test_kernels_without_a_feature_are_named(environ: dict[str, str], release: str, status: str) -> None:
    assert statuses(doctor.kernel(world(environ, kernel=release, processor="x86_64"))) == {"kernel": status}


def test_another_memory_order_is_bad(environ: dict[str, str]) -> None:
    assert statuses(doctor.kernel(world(environ, processor="aarch64")))["processor"] == "bad"


@pytest.mark.parametrize(
    ("shown", "asked", "status"),
    [("always [advise] never", "auto", "ok"), ("always advise [never]", "auto", "warn"), ("always advise [never]", "on", "bad")],
)
def test_huge_pages(environ: dict[str, str], tmp_path: Path, shown: str, asked: str, status: str) -> None:
    root = plant(tmp_path, {"sys/kernel/mm/transparent_hugepage/shmem_enabled": shown})
    [finding] = doctor.huge_pages(world(environ | {"UMBP_HUGEPAGES": asked}, root))
    assert finding.status == status


def test_numa(environ: dict[str, str], tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    assert doctor.numa(world(environ, tmp_path))[0] == Finding("numa", "ok", "2 nodes")
    assert doctor.numa(world(environ | {"UMBP_NUMA": "2"}, tmp_path))[0].status == "bad"
    plant(tmp_path, {"proc/sys/kernel/numa_balancing": "1\n"})
    assert doctor.numa(world(environ, tmp_path))[0].status == "warn"


GPU = {"version": "2.13.0", "count": 8, "name": "AMD Instinct MI355X", "arch": "gfx950", "peers": True}


@pytest.mark.parametrize(
    ("answer", "status"),
    [(GPU, "ok"), (GPU | {"arch": "gfx90a"}, "info"), (GPU | {"peers": False}, "warn"), (GPU | {"count": 0}, "warn")],
)
def test_what_torch_says_of_the_gpu(answer: dict[str, object], status: str) -> None:
    assert statuses(doctor.judge_torch(answer, gpu_expected=True)) == {"torch": "ok", "gpu": status}


def test_a_torch_that_cannot_be_asked() -> None:
    assert isinstance(doctor.ask_torch(seconds_max=0.001), str)
    [finding] = doctor.judge_torch("ImportError: libfoo.so", gpu_expected=False)
    assert (finding.status, "libfoo" in finding.found) == ("bad", True)


@pytest.mark.parametrize(("version", "status"), [("3.8.0", "ok"), ("4.0", "ok"), ("3.7.1", "warn"), ("not installed", "warn")])
def test_triton(version: str, status: str) -> None:
    assert doctor.judge_triton(version, gpu_expected=True).status == status


def test_segments_of_dead_pools_are_told_from_live_ones(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "shm"
    for name in ("alive", "dead", "lockless"):
        (folder / f"umbp.{name}.segment").write_bytes(b"x" * 8192)
    (folder / "umbp.dead.lock").touch()
    with (folder / "umbp.alive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [finding] = doctor.leftovers(world(environ))
    assert (finding.status, finding.found) == ("warn", "1 of live pools, 2 of dead ones (16KiB)")
    assert "umbp.dead.segment" in finding.advice
    assert "umbp.alive" not in finding.advice
    assert len(list(folder.iterdir())) == 5


@pytest.fixture
def listening(tmp_path: Path, environ: dict[str, str]) -> Iterator[Path]:
    path = tmp_path / "sockets" / "default.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


def test_sockets_that_answer_and_that_do_not(environ: dict[str, str], listening: Path) -> None:
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(listening.with_name("stale.sock")))
    found = {Path(f.found.split()[0]).name: f.status for f in doctor.sockets(world(environ))}
    assert found == {"default.sock": "ok", "stale.sock": "warn"}


def test_the_socket_that_this_users_clients_use_is_looked_at(environ: dict[str, str], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "elsewhere.sock"))
        server.listen()
        (found,) = doctor.sockets(world({**environ, "UMBP_POOL": str(tmp_path / "elsewhere.sock")}))
    assert (Path(found.found.split()[0]).name, found.status) == ("elsewhere.sock", "ok")


def test_a_folder_of_sockets_that_others_can_write_is_bad(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    os.chmod(folder, stat.S_IMODE(folder.stat().st_mode) | 0o022)
    assert statuses(doctor.sockets(world(environ))) == {"socket folder": "bad", "socket": "info"}
