"""What this machine has for a pool: memory that is free, shared memory, and the limits of its cgroups."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from umbp.errors import ConfigError
from umbp.grammar import SIZE_BYTES_MAX, format_size

HUGE_PAGE_BYTES = 2 << 20
MEMORY_FILESYSTEMS = ("tmpfs", "hugetlbfs", "ramfs", "")  # "": it cannot be told
AUTO_DRAM_BYTES_MIN = 64 << 20  # what a pool that was told no size insists on finding
AUTO_SHARE_OF_AVAILABLE = 0.25  # the rest is the engines': weights on their way to the device, pinned buffers, page cache
AUTO_SHARE_OF_SHM = 0.80  # /dev/shm is shared with NCCL, RCCL and data loaders, which die of a full one


@dataclass(frozen=True, slots=True)
class Memory:
    """What a machine has for a pool, in bytes. ``cgroup_limit`` is None where none is set."""

    available: int  # free or reclaimable, here and now
    shm_free: int
    cgroup_limit: int | None = None
    cgroup_used: int = 0  # without the page cache that the kernel gives up when asked


def fit_dram(available_bytes: int, shm_free_bytes: int, cgroup_limit: int | None) -> int:
    """The size of a pool that was given none: a multiple of 2 MiB. ``cgroup_limit`` is what the cgroup still allows."""
    allowed = available_bytes if cgroup_limit is None else min(available_bytes, cgroup_limit)
    share = min(int(allowed * AUTO_SHARE_OF_AVAILABLE), int(shm_free_bytes * AUTO_SHARE_OF_SHM))
    size = max(share, 0) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size >= AUTO_DRAM_BYTES_MIN:
        return size
    limit = "no limit" if cgroup_limit is None else format_size(max(cgroup_limit, 0))
    raise ConfigError(
        f"this machine has room for a pool of only {format_size(size)}: available memory {format_size(available_bytes)}, free "
        f"shared memory {format_size(shm_free_bytes)}, left by the cgroup: {limit}. Give the container more (docker --shm-size, "
        f"--memory; Kubernetes: an emptyDir of medium Memory) or say a size",
        field="dram",
        example="64MiB",
    )


def auto_dram(shm_dir: str) -> int:
    """`fit_dram` of this machine, now."""
    memory = probe_memory(shm_dir)
    left = None if memory.cgroup_limit is None else memory.cgroup_limit - memory.cgroup_used
    return fit_dram(memory.available, memory.shm_free, left)


def probe_memory(shm_dir: str, root: str = "/") -> Memory:
    """Reads what `fit_dram` goes by. ``root`` is where /proc and /sys are looked for."""
    try:
        shm = os.statvfs(shm_dir)
    except OSError as error:
        raise ConfigError(f"cannot use {shm_dir}: {error.strerror}", field="shm_dir", example="/dev/shm") from error
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text_or_empty(Path(root, "proc/meminfo")), re.MULTILINE)
    available = int(match[1]) * 1024 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = tightest_cgroup(Path(root))
    return Memory(available, shm.f_bavail * shm.f_frsize, limit, used)


def tightest_cgroup(root: Path) -> tuple[int | None, int]:
    """Limit and use of that cgroup of ours, or of those above it, which has least left. cgroup v2, v1 and both at once."""
    found: list[tuple[int, int]] = []
    for line in text_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            tops = [root / "sys/fs/cgroup/memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be one of the host that is not mounted here; its top is then ours.
        folders = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        for folder in (top / below for top in tops for below in folders):
            limit = text_or_empty(folder / names[0]).strip()
            if limit.isdigit() and int(limit) < SIZE_BYTES_MAX // 2:  # v1 says "none" by a number close to 2**63
                used = text_or_empty(folder / names[1]).strip()
                cached = re.search(rf"^{names[2]} (\d+)$", text_or_empty(folder / "memory.stat"), re.MULTILINE)
                found.append((int(limit), max(0, int(used or 0) - int(cached[1] if cached else 0))))
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def text_or_empty(path: Path) -> str:
    """The text of a small file, such as one of /proc, or nothing where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def filesystem(mounts: str, path: str) -> str:
    """The type of the file system that holds ``path``, by the text of /proc/mounts; empty where it does not say."""
    best, kind = "", ""
    for line in mounts.splitlines():
        point, found = [*line.split(), "", "", ""][1:3]
        if len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, found
    return kind
