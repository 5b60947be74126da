"""What `umbp doctor` looks at: the machine, its limits and its leftovers, each with what to change.

It only looks: nothing is created, removed or reserved. A probe that cannot read something says so and leaves the others alone.
torch is never imported here; where it is installed, a child process with a time limit is asked.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from umbp.config import POOL_VARIABLE, PoolConfig, load_pool_config, runtime_dir
from umbp.errors import ConfigError
from umbp.grammar import format_size
from umbp.machine import MEMORY_FILESYSTEMS, filesystem, fit_dram, probe_memory, text_or_empty
from umbp.store.segment import file_stem

Status = Literal["ok", "info", "warn", "bad"]

CONTAINER_SHM_BYTES = 64 << 20  # what docker and Kubernetes give a container that asked for nothing
TORCH_SECONDS_MAX = 60.0  # the first import after an installation compiles thousands of files
CONNECT_SECONDS_MAX = 0.5
FILES_BESIDE_SESSIONS = 256  # logs, segment, timers, HTTP connections
PACKAGES = ("aiohttp", "msgspec", "numpy", "prometheus-client", "rich", "typer", "uvloop", "xxhash")
TESTED_GPUS = ("gfx950", "gfx942", "sm_90")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``advice`` is what to change, empty where nothing is amiss."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class World:
    """Where the probes look. ``root`` is the folder in which /proc, /sys and /dev are found."""

    environ: Mapping[str, str]
    config: PoolConfig
    root: Path = Path("/")
    kernel: str = field(default_factory=lambda: os.uname().release)
    processor: str = field(default_factory=lambda: os.uname().machine)
    memlock: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def text(self, path: str) -> str:
        """The text of a file of /proc or /sys, without the newline; empty where there is none."""
        return text_or_empty(self.root / path).strip()


def examine(environ: Mapping[str, str], root: str = "/") -> list[Finding]:
    """Everything at once, in the order of the report, for the pool that ``environ`` describes."""
    findings, config = configuration(environ)
    world = World(environ, config, Path(root))
    for probe in PROBES:
        try:
            findings += probe(world)
        except OSError as error:
            findings.append(Finding(probe.__name__.replace("_", " "), "info", f"could not be read: {error}"))
    return findings


def configuration(environ: Mapping[str, str]) -> tuple[list[Finding], PoolConfig]:
    """Would a pool start with these variables, and with which configuration? With a bad one the rest is judged by the defaults."""
    try:
        config = load_pool_config([], environ)
    except ConfigError as error:
        kept = {name: value for name, value in environ.items() if name in ("UMBP_RUNTIME_DIR", "XDG_RUNTIME_DIR")}
        return [Finding("configuration", "bad", str(error), "correct or unset it; a pool does not start like this")], load_pool_config(
            [], kept
        )
    odd = [Finding("configuration", "warn", line, "correct its name or unset it") for line in config.warnings]
    return odd or [Finding("configuration", "ok", f"pool {config.name!r} at {config.socket}")], config


# -- software ----------------------------------------------------------------------------------------------------------------------


def python(world: World) -> list[Finding]:
    """The interpreter and the packages that the pool needs."""
    version = ".".join(map(str, sys.version_info[:3]))
    new_enough = sys.version_info >= (3, 11)
    findings = [Finding("python", "ok" if new_enough else "bad", version, "" if new_enough else "use Python 3.11 or later")]
    missing = [name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        findings.append(Finding("packages", "bad", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"))
    else:
        findings.append(Finding("packages", "ok", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("uvloop", "numpy"))))
    return findings


def kernel(world: World) -> list[Finding]:
    """Features of the kernel that there is a slower way around, and the processor's memory order, around which there is none."""
    match = re.match(r"(\d+)\.(\d+)", world.kernel)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    lacking = []
    if version < (5, 3):
        lacking.append("pidfd (5.3): the exit of a rank is noticed by polling")
    if version < (5, 14):
        lacking.append("MADV_POPULATE_WRITE (5.14): memory is faulted in by touching it, which is slower")
    advice = "a kernel of 5.14 or later" if lacking else ""
    findings = [Finding("kernel", "warn" if lacking else "ok", "; ".join([world.kernel, *lacking]), advice)]
    if world.processor not in ("x86_64", "AMD64"):
        advice = "lock-free reads of the index rely on the store order of x86-64; run the pool there"
        findings.append(Finding("processor", "bad", world.processor, advice))
    return findings


# -- memory ------------------------------------------------------------------------------------------------------------------------


def shared_memory(world: World) -> list[Finding]:
    """The folder of the segment: what it is, how large, and whether the pool asked for fits."""
    folder = world.config.shm_dir
    if not os.path.isdir(folder):
        return [Finding("shared memory", "bad", f"{folder} is no folder", "mount a tmpfs there or set --shm-dir")]
    disk = os.statvfs(folder)
    kind = filesystem(world.text("proc/mounts"), os.path.realpath(folder))
    writable = os.access(folder, os.W_OK | os.X_OK)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize + held_bytes(world.config)
    return judge_shared_memory(folder, kind, size=size, free=free, writable=writable, wanted=world.config.dram_wanted)


def held_bytes(config: PoolConfig) -> int:
    """What the pool of this name holds already, alive or not: it is asked for once, not twice."""
    path = Path(config.shm_dir, file_stem(config.name) + ".segment")
    return path.stat().st_blocks * 512 if path.exists() else 0


def judge_shared_memory(folder: str, kind: str, *, size: int, free: int, writable: bool, wanted: int | None) -> list[Finding]:
    """The verdict on a folder for the segment. ``wanted`` is the pool's size, None for "what fits"."""
    found = f"{folder} ({kind or 'unknown'}): {format_size(size)}, {format_size(free)} free"
    more = "docker run --shm-size=64g (or --ipc=host); Kubernetes: mount an emptyDir of medium Memory there"
    if not writable:
        return [Finding("shared memory", "bad", f"{found}, not writable", "run the pool as a user who may write there, or set --shm-dir")]
    if wanted is not None and wanted > free:
        return [Finding("shared memory", "bad", f"{found}; {format_size(wanted)} asked for", f"a smaller --dram, or {more}")]
    if size <= CONTAINER_SHM_BYTES:
        return [Finding("shared memory", "bad", f"{found}: what a container gets that asked for nothing", more)]
    if kind not in MEMORY_FILESYSTEMS:
        return [Finding("shared memory", "warn", f"{found}: not memory; pages are written to a disk", "set --shm-dir to a tmpfs")]
    return [Finding("shared memory", "ok", found)]


def memory(world: World) -> list[Finding]:
    """What is free, what the cgroup allows, and the size that a pool without --dram would take."""
    if not os.path.isdir(world.config.shm_dir):
        return []
    probed = probe_memory(world.config.shm_dir, str(world.root))
    left = None if probed.cgroup_limit is None else probed.cgroup_limit - probed.cgroup_used
    limit = "none" if left is None else f"{format_size(probed.cgroup_limit or 0)}, {format_size(left)} left"
    found = f"{format_size(probed.available)} available; cgroup limit: {limit}"
    wanted = world.config.dram_wanted
    if wanted is not None:
        room = probed.available if left is None else min(probed.available, left)
        if wanted > room + held_bytes(world.config):
            return [Finding("memory", "bad", f"{found}; {format_size(wanted)} asked for", "a smaller --dram, or a larger --memory limit")]
        return [Finding("memory", "ok", found)]
    try:
        fits = fit_dram(probed.available, probed.shm_free, left)
    except ConfigError as error:
        return [Finding("memory", "bad", f"{found}; {error}", "give the container more memory")]
    return [Finding("memory", "ok", f"{found}; a pool without --dram takes {format_size(fits)}")]


def limits(world: World) -> list[Finding]:
    """Locked memory, which RDMA and pinning count against, and open files, of which a session takes one."""
    findings = []
    unlimited = world.memlock == resource.RLIM_INFINITY
    devices = [name for name in ("dev/kfd", "dev/nvidia0", "sys/class/infiniband") if (world.root / name).exists()]
    needed = bool(devices) and not unlimited
    advice = "ulimit -l unlimited; docker --ulimit memlock=-1; systemd LimitMEMLOCK=infinity" if needed else ""
    shown = "unlimited" if unlimited else format_size(world.memlock)
    findings.append(Finding("locked memory", "warn" if needed else "ok", shown, advice))
    files = world.config.sessions_max + FILES_BESIDE_SESSIONS
    few = world.open_files != resource.RLIM_INFINITY and world.open_files < files
    advice = f"ulimit -n {files}, or a smaller --sessions-max" if few else ""
    findings.append(Finding("open files", "warn" if few else "ok", str(world.open_files), advice))
    return findings


def huge_pages(world: World) -> list[Finding]:
    """2 MiB pages for the segment: transparent ones on a tmpfs, or reserved ones."""
    setting = re.search(r"\[(\w+)\]", world.text("sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    transparent = setting[1] if setting else "not offered"
    reserved = world.text("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages") or "0"
    found = f"transparent for shared memory: {transparent}; reserved: {reserved}"
    if transparent in ("always", "advise", "within_size", "force"):
        return [Finding("huge pages", "ok", found)]
    advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (fewer TLB misses: 4 KiB pages work, slower)"
    return [Finding("huge pages", "bad" if world.config.hugepages == "on" else "warn", found, advice)]


def numa(world: World) -> list[Finding]:
    """Nodes, and whether the kernel moves pages between them on its own."""
    nodes = sorted(path.name for path in (world.root / "sys/devices/system/node").glob("node[0-9]*"))
    missing = [node for node in world.config.numa_nodes if nodes and f"node{node}" not in nodes]
    if missing:
        return [Finding("numa", "bad", f"{len(nodes)} nodes, no node {missing[0]}", f"set --numa to 0 to {len(nodes) - 1}, or auto")]
    balancing = world.text("proc/sys/kernel/numa_balancing")
    if len(nodes) > 1 and balancing not in ("", "0"):
        advice = "sysctl kernel.numa_balancing=0: its page faults stall copies between host and GPU"
        return [Finding("numa", "warn", f"{len(nodes)} nodes, automatic balancing is on", advice)]
    return [Finding("numa", "ok", f"{max(len(nodes), 1)} node{'s' if len(nodes) > 1 else ''}")]


# -- accelerator -------------------------------------------------------------------------------------------------------------------

ASK_TORCH = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
p = torch.cuda.get_device_properties(0) if n else None
arch = getattr(p, "gcnArchName", "").split(":")[0] or (f"sm_{p.major}{p.minor}" if p else "")
if n and not torch.version.hip: arch = f"sm_{p.major}{p.minor}"
peers = all(torch.cuda.can_device_access_peer(0, i) for i in range(1, n))
print(json.dumps({"version": torch.__version__, "count": n, "name": p.name if p else "", "arch": arch, "peers": peers}))
"""


def accelerator(world: World) -> list[Finding]:
    """Device files, torch and triton, and the GPU as torch sees it. The pool needs none of them, a GPU engine's loader does."""
    devices = [name for name in ("kfd", "nvidia0") if (world.root / "dev" / name).exists()]
    closed = [f"/dev/{name}" for name in devices if not os.access(world.root / "dev" / name, os.R_OK | os.W_OK)]
    if closed:
        advice = "add the user to the groups render and video (docker: --group-add)"
        return [Finding("gpu", "warn", f"{', '.join(closed)} cannot be opened", advice)]
    if importlib.util.find_spec("torch") is None:
        if devices:
            return [Finding("torch", "warn", "not installed, but a GPU is there", "install the build of torch that your engine uses")]
        return [Finding("torch", "info", "not installed; the pool does not need it"), Finding("gpu", "info", "none found")]
    has_triton = importlib.util.find_spec("triton") is not None
    triton = importlib.metadata.version("triton") if has_triton else "not installed"
    return [*judge_torch(ask_torch(), gpu_expected=bool(devices)), judge_triton(triton, gpu_expected=bool(devices))]


def ask_torch(seconds_max: float = TORCH_SECONDS_MAX) -> dict[str, object] | str:
    """What a child process says of torch, or why it said nothing."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=seconds_max,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds_max:g} s"
    lines = (child.stderr if child.returncode else child.stdout).strip().splitlines() or [f"exit status {child.returncode}"]
    try:
        answer = json.loads(lines[-1]) if child.returncode == 0 else lines[-1]
    except ValueError:
        answer = lines[-1]
    return answer if isinstance(answer, dict) else str(answer)


def judge_torch(answer: dict[str, object] | str, *, gpu_expected: bool) -> list[Finding]:
    """The verdict on what `ask_torch` brought."""
    if isinstance(answer, str):
        return [Finding("torch", "bad", f"cannot be imported: {answer}", "repair the installation of torch; the pool runs without it")]
    findings = [Finding("torch", "ok", str(answer["version"]))]
    if not answer["count"]:
        advice = "install the torch build for this GPU (ROCm or CUDA); the loader copies on the CPU until then" if gpu_expected else ""
        return [*findings, Finding("gpu", "warn" if gpu_expected else "info", "torch sees none", advice)]
    found = f"{answer['count']} x {answer['name']} ({answer['arch']})"
    if not answer["peers"]:
        advice = "group loads write over the fabric: check that IOMMU and ACS allow access between GPUs"
        return [*findings, Finding("gpu", "warn", f"{found}; GPU 0 cannot reach all others", advice)]
    tested = answer["arch"] in TESTED_GPUS
    return [*findings, Finding("gpu", "ok" if tested else "info", found + ("" if tested else "; not among the tested ones"))]


def judge_triton(version: str, *, gpu_expected: bool) -> Finding:
    """The kernels need Triton 3.8 or later where there is a GPU."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) >= (3, 8):
        return Finding("triton", "ok", version)
    return Finding("triton", "warn" if gpu_expected else "info", version, "pip install 'triton>=3.8'" if gpu_expected else "")


# -- what others left --------------------------------------------------------------------------------------------------------------


def leftovers(world: World) -> list[Finding]:
    """Segments in the folder, alive and dead. A live pool holds the lock beside its own; the kernel drops it when it dies."""
    folder = Path(world.config.shm_dir)
    segments = sorted(folder.glob("umbp.*.segment")) if folder.is_dir() else []
    dead = [path for path in segments if not is_locked(path.with_suffix(".lock"))]
    alive = len(segments) - len(dead)
    if not dead:
        return [Finding("segments", "ok", f"{alive} of live pools, none of dead ones")]
    size = sum(path.stat().st_blocks * 512 for path in dead)
    remove = f"rm {' '.join(map(str, dead[:4]))}"
    advice = f"a pool that starts takes back its own and removes the others; or remove them, and what they keep: {remove}"
    return [Finding("segments", "warn", f"{alive} of live pools, {len(dead)} of dead ones ({format_size(size)})", advice)]


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock. A shared lock is tried, and let go at once; a lock we may not open belongs to someone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def sockets(world: World) -> list[Finding]:
    """The folder of sockets, and which of them answer."""
    folder = Path(runtime_dir(world.environ))
    findings = []
    if folder.is_dir() and (stat.S_IMODE(folder.stat().st_mode) & 0o022 or folder.stat().st_uid != os.getuid()):
        advice = f"chmod 700 {folder}, or set UMBP_RUNTIME_DIR: another user could put a socket of his own there"
        findings.append(Finding("socket folder", "bad", f"{folder} can be written by others or is not ours", advice))
    named = {Path(world.config.socket)}
    if (other := world.environ.get(POOL_VARIABLE, "")) and "://" not in other:  # where this user's clients look
        named.add(Path(other))
    paths = sorted({*folder.glob("*.sock"), *named}) if folder.is_dir() else sorted(named)
    there = [path for path in paths if path.exists()]
    if not there:
        return [*findings, Finding("socket", "info", f"no pool listens at {world.config.socket}", "start one: python -m umbp.pool")]
    for path in there:
        answers = connects(str(path))
        advice = "" if answers else "its pool is dead or stopped; the next pool of that name takes the place"
        findings.append(Finding("socket", "ok" if answers else "warn", f"{path} {'answers' if answers else 'does not answer'}", advice))
    return findings


def connects(path: str) -> bool:
    """Whether something accepts a connection there in time."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_SECONDS_MAX)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


Probe = Callable[[World], list[Finding]]
PROBES: tuple[Probe, ...] = (
    python,
    kernel,
    shared_memory,
    memory,
    limits,
    huge_pages,
    numa,
    accelerator,
    leftovers,
    sockets,
)
