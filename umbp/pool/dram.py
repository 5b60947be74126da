"""Getting the DRAM slice at start: find or make the segment, place it, fault it in, and say what could not be had.

Order, so that nothing is half done: the owner lock first (a live pool of this name refuses), then leftovers of dead pools go, then the
segment of this name is attached if it is whole and of the size asked for, else made anew. What is there goes only when it is known that
what is asked for can be had: a size mistyped costs no cache. A fall-back (no huge pages, no NUMA binding) is said once and is in
``/readyz``; too little memory is an error that says what was found.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from umbp.config import PoolConfig
from umbp.errors import ConfigError, OutOfMemory, SegmentError
from umbp.grammar import format_size
from umbp.machine import MEMORY_FILESYSTEMS, auto_dram, filesystem, text_or_empty
from umbp.pool import regions
from umbp.store import memory, segment
from umbp.store.segment import Geometry, OwnerLock, Segment

log = logging.getLogger("umbp.pool.dram")

ENTRY_FOR_BYTES = 16384  # automatic key limit: one entry for this many bytes of DRAM,
ENTRIES_SMALL_MAX = 65536  # but one for every 4 KiB up to this many,
KEPT_SECONDS = 3600.0  # a segment that a pool left in order is another's to reclaim after this, or when there is no room otherwise
ENTRIES_MAX = 4 << 20  # and not more than this: 4 M entries are 0.4 GiB of index


@dataclass(slots=True)
class Dram:
    """The slice of this pool: its lock, its segment, whether it was there before, and what could not be had."""

    lock: OwnerLock
    segment: Segment
    attached: bool
    fallbacks: list[str]

    def close(self, *, release: bool) -> None:
        """Unmap; with ``release`` the memory goes back to the system."""
        path = self.segment.path
        self.segment.close()
        if release:
            Path(path).unlink(missing_ok=True)  # somebody else may have removed it
            segment.remove_beside(Path(path))
        self.lock.close(remove=release)


def automatic_entries(dram_bytes: int) -> int:
    """Key limit for a slice of this size, where none is configured."""
    return max(1024, min(dram_bytes // 4096, ENTRIES_SMALL_MAX), min(dram_bytes // ENTRY_FOR_BYTES, ENTRIES_MAX))


def acquire(config: PoolConfig, progress: Callable[[int, int], None]) -> Dram:
    """Everything up to memory that is really there. Blocks: run it in a thread. ``progress`` gets bytes done and bytes in all."""
    _check_platform()
    if not os.path.isdir(config.shm_dir):
        raise ConfigError(f"{config.shm_dir} is not a folder", field="shm_dir", example="/dev/shm")
    lock = OwnerLock(config.shm_dir, config.name)
    try:
        _reclaim(config)
        fallbacks: list[str] = list(config.warnings)
        found, useless = _attach(config)
        attached = found is not None
        if found is None:
            if useless and not config.dram_wanted:
                _own(config).unlink()  # what is automatic is what fits without it
            dram = config.dram_wanted or auto_dram(config.shm_dir)
            geometry = Geometry(
                dram // 4096 * 4096,
                config.keys_max or automatic_entries(dram),
                config.namespaces_max,
                config.sessions_max,
                max(1, len(config.numa_nodes)),
                regions.edges(config),
            )
            regions.check(config, geometry)
            found = _create(config, geometry)
            if useless:
                log.warning("%s: made anew, what it held is gone", useless)
        try:
            fallbacks += _place(config, found, attached=attached)
            _populate(config, found, progress)
            fallbacks += regions.elsewhere(config, found, attached=attached)
        except BaseException:
            path = found.path
            found.close()
            if not attached:
                os.unlink(path)
            raise
        for line in fallbacks[len(config.warnings) :]:
            log.warning("%s", line)
        if attached:
            found.words[segment.H_BOOT] = _boot(found.boot)
        return Dram(lock, found, attached, fallbacks)
    except BaseException:
        lock.close()
        raise


def _own(config: PoolConfig) -> Path:
    return Path(config.shm_dir, segment.file_stem(config.name) + ".segment")


def _boot(before: int) -> int:
    return max(before + 1, time.time_ns() // 1_000_000)


def _check_platform() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        log.warning("%s: readers of the shared index rely on the load order of x86-64; verify reads here", platform.machine())


def _create(config: PoolConfig, geometry: Geometry) -> Segment:
    """A new segment; where there is no room for it, what stopped pools have kept goes too, if that makes enough."""
    try:
        return segment.create(config.shm_dir, config.name, geometry, boot=_boot(0), seed=secrets.randbits(63))
    except OutOfMemory:
        enough = segment.room_bytes(config.shm_dir, [_own(config), *segment.leftovers(config.shm_dir)])
        if geometry.file_bytes > enough or not _reclaim(config, kept=True):
            raise
        return segment.create(config.shm_dir, config.name, geometry, boot=_boot(0), seed=secrets.randbits(63))


def _reclaim(config: PoolConfig, *, kept: bool = False) -> int:
    """Give back segments of dead pools of other names; those that were kept on purpose only after a time, or if ``kept``. Bytes freed."""
    own, freed = segment.file_stem(config.name), 0
    for path in segment.leftovers(config.shm_dir):
        try:
            age = time.time() - path.with_suffix(".lock").stat().st_mtime
        except FileNotFoundError:
            age = 0.0
        wait = config.reclaim_after
        if segment.was_kept(path):
            wait = 0.0 if kept else max(wait, KEPT_SECONDS)
        if path.stem != own and age >= wait:
            size = segment.reclaim(path)
            if size:  # of one that died early there was the lock only
                log.warning("%s of a dead pool: %s given back", path, format_size(size))
            freed += size
    return freed


def _attach(config: PoolConfig) -> tuple[Segment | None, str]:
    """The segment that an earlier life of this pool left, if it can be used; else, where there is one, why it cannot."""
    path = _own(config)
    try:
        found = segment.attach(str(path), owner=True)
    except FileNotFoundError:
        return None, ""
    except (SegmentError, ValueError, KeyError, TypeError, OSError) as error:
        return None, f"{path} cannot be used: {error}"
    geometry = found.geometry
    wanted = (
        config.dram_wanted is None or config.dram_wanted // 4096 * 4096 == geometry.data_bytes,
        config.keys_max is None or config.keys_max == geometry.entries,
        config.namespaces_max == geometry.namespaces,
        config.sessions_max == geometry.sessions,
        max(1, len(config.numa_nodes)) == geometry.regions,
        regions.edges(config) == geometry.edges,
    )
    if all(wanted) and found.state in (segment.SERVING, segment.STOPPED):
        return found, ""
    found.close()
    return None, f"{path} " + ("was not finished" if all(wanted) else f"has {geometry}, which is not what is configured")


def _place(config: PoolConfig, found: Segment, *, attached: bool) -> list[str]:
    """Memory, NUMA and huge pages, as far as the machine has them; what it has not."""
    said: list[str] = []
    kind = filesystem(text_or_empty(Path("/proc/mounts")), os.path.realpath(config.shm_dir))
    if kind not in MEMORY_FILESYSTEMS:
        said.append(f"shm_dir: {config.shm_dir} is {kind}, not memory: the kernel writes pages to a disk; set --shm-dir to a tmpfs")
    said += regions.place(config, found, attached=attached)
    if config.hugepages != "off":
        setting = memory.shmem_huge_pages()
        if setting in ("never", "deny", "unknown"):
            advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or a --shm-dir on hugetlbfs"
            if config.hugepages == "on":
                raise ConfigError(
                    f"the kernel gives no huge pages to shared memory (shmem_enabled is {setting}): {advice}", field="hugepages"
                )
            said.append(f"hugepages: none for shared memory (shmem_enabled is {setting}): {advice}")
        elif error := found.data.advise(0, len(found.data), memory.MADV_HUGEPAGE):
            said.append(f"hugepages: refused ({errno.errorcode.get(error, error)})")
    return said


def _populate(config: PoolConfig, found: Segment, progress: Callable[[int, int], None]) -> None:
    threads = config.prefault_threads or min(os.cpu_count() or 1, 16)
    total, head = len(found.head) + len(found.data), len(found.head)
    memory.populate(found.head, write=True, threads=threads, progress=lambda done: progress(done, total))
    parts = regions.near(config, found)
    memory.populate(found.data, write=True, threads=threads, progress=lambda done: progress(head + done, total), parts=parts)
