"""NUMA: which nodes a machine has, what is near each, placing memory on them, and where memory really is.

Memory is placed by mbind before it is faulted in; on a tmpfs the kernel keeps that with the file. ``prefer`` takes from other nodes what
its node has not; ``bind`` never does, and the kernel ends a process that asks for more than is there: so whoever binds looks at
`free_bytes` first. What the kernel did is asked for afterwards (`where`), by move_pages without a move.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from umbp.store.memory import Mapping

NODES_MAX = 1024
PAGE_BYTES = 4096
MOVE = 2  # MPOL_MF_MOVE: pages that nobody else has mapped
SAMPLES = 256  # pages of a region whose node is asked for: a share is known to 3 % by them
_MODES = {"prefer": 1, "bind": 2, "interleave": 3}
_SYSCALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}  # mbind, move_pages
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def numa_nodes(root: str = "/sys/devices/system/node") -> list[int]:
    """Nodes of this machine, ascending; [0] where the kernel says nothing."""
    found = [int(path.name[4:]) for path in Path(root).glob("node[0-9]*")] if os.path.isdir(root) else []
    return sorted(found) or [0]


def cpus_of(node: int, root: str = "/sys/devices/system/node") -> frozenset[int]:
    """The CPUs of a node; none where it has none, or the kernel does not say."""
    return _listed(_text(Path(root, f"node{node}", "cpulist")))


def free_bytes(node: int, root: str = "/sys/devices/system/node") -> int | None:
    """What a node has left, counting what the kernel gives up when asked; None where it does not say."""
    found = {name: int(kib) << 10 for name, kib in re.findall(r"(\S+):\s+(\d+) kB", _text(Path(root, f"node{node}", "meminfo")))}
    if "MemFree" not in found:
        return None
    return sum(found.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))


def node_of_process(root: str = "/sys/devices/system/node") -> int | None:
    """The node on whose CPUs alone this process may run; None if it may run on several, or there is only one to be on."""
    nodes = numa_nodes(root)
    allowed = os.sched_getaffinity(0)
    return next((node for node in nodes if allowed <= cpus_of(node, root)), None)


def node_of_device(bus: str, root: str = "/sys/bus/pci/devices") -> int | None:
    """The node that a PCI device (``0000:c1:00.0``) is attached to; None where the kernel does not say."""
    if not re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", bus.lower()):
        return None
    text = _text(Path(root, bus.lower(), "numa_node")).strip()
    return int(text) if text.isdigit() else None


def place(
    mapping: Mapping, start: int, length: int, nodes: Sequence[int], mode: Literal["prefer", "bind", "interleave"], *, move: bool = False
) -> int:
    """mbind a part of the mapping, whole pages, before it is faulted in; 0 or the errno. ``move``: what is there already, if it can be."""
    numbers = _SYSCALLS.get(os.uname().machine)
    if numbers is None:
        return errno.ENOSYS
    words = (ctypes.c_ulong * (NODES_MAX // 64))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    address, size = ctypes.c_void_p(mapping.address + start), ctypes.c_size_t(length)
    result = _libc.syscall(numbers[0], address, size, _MODES[mode], words, ctypes.c_ulong(NODES_MAX), MOVE if move else 0)
    return 0 if result == 0 else ctypes.get_errno()


def where(mapping: Mapping, start: int, length: int, samples: int = SAMPLES) -> Counter[int]:
    """On which nodes pages of this part are, by as many of them, evenly spaced; empty where the kernel does not say."""
    numbers = _SYSCALLS.get(os.uname().machine)
    pages = length // PAGE_BYTES
    count = min(samples, pages)
    if numbers is None or not count:
        return Counter()
    addresses = (ctypes.c_void_p * count)(*(mapping.address + start + at * pages // count * PAGE_BYTES for at in range(count)))
    status = (ctypes.c_int * count)()
    if _libc.syscall(numbers[1], 0, ctypes.c_ulong(count), addresses, None, status, 0):
        return Counter()
    return Counter(node for node in status if node >= 0)  # a page that is not there has an error in place of its node


def _listed(text: str) -> frozenset[int]:
    """The numbers of a list as the kernel writes it, ``0-3,8``."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(number for first, _, last in spans for number in range(int(first), int(last or first) + 1))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
