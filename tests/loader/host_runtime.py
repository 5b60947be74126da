"""A GPU's runtime without a GPU: device memory is files in shared memory, kernels run in Triton's interpreter, one after another.

Real where the loader could tell: memory of another process is reached by opening a handle, and lies at another address in each; an alias
of the segment is a second mapping of it, so a kernel that is given the host's address where it needs the device's finds other bytes only
where nothing is mapped, and crashes; what is not closed, freed or unregistered is known. Every call can be made to fail.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch

from umbp.loader.runtime import Fault, Mark, Shared
from umbp.types import U8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
NUMA_NODE = 5  # that the device is attached to
BOTH, SHARED = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED


def map_file(path: str, size: int, offset: int = 0) -> int:
    """Map a file; its address."""
    fd = os.open(path, os.O_RDWR)
    try:
        address = _libc.mmap(None, size, BOTH, SHARED, fd, offset)
    finally:
        os.close(fd)
    assert address not in (None, 2**64 - 1), os.strerror(ctypes.get_errno())
    return int(address)


class Passed:
    """The interpreter has done everything by the time it returns."""

    held = 0

    def hold(self) -> None:
        Passed.held += 1

    def done(self) -> bool:
        return True


class HostRuntime:
    """One "device"; ``folder`` is in shared memory and the same for all ranks. ``failing``: call -> the text of its fault."""

    name = "host"
    device = torch.device("cpu")
    blocks = 2

    def __init__(self, folder: str, failing: dict[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self.failing = failing or {}
        self.calls: Counter[str] = Counter()
        self.registered: dict[int, tuple[int, int]] = {}  # address -> (alias, bytes)
        self.allocated: dict[int, tuple[str, int]] = {}  # address -> (path, bytes)
        self.opened: dict[int, tuple[str, int]] = {}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An engine's tensor, in device memory."""
        size = prod(shape) * dtype.itemsize
        address = self._new(size)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8).view(dtype).view(shape)

    def numa_node(self) -> int | None:
        return NUMA_NODE

    def use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def register(self, memory: U8) -> int:
        self._call("register")
        address, size = memory.ctypes.data, memory.nbytes
        path, offset = mapped_at(address)
        alias = map_file(path, size, offset)
        assert alias != address
        assert address not in self.registered, "registered twice"
        self.registered[address] = (alias, size)
        return alias

    def unregister(self, memory: U8) -> None:
        self._call("unregister")
        alias, size = self.registered.pop(memory.ctypes.data)
        _libc.munmap(alias, size)

    def allocate(self, nbytes: int) -> int:
        self._call("allocate")
        return self._new(nbytes)

    def _new(self, nbytes: int) -> int:
        self.calls["files"] += 1
        path = self.folder / f"{os.getpid()}-{self.calls['files']}-{id(self):x}"
        size = -(-nbytes // 4096) * 4096
        with path.open("xb") as file:
            file.truncate(size)
        address = map_file(str(path), size)
        self.allocated[address] = (str(path), size)
        return address

    def free(self, address: int) -> None:
        self._call("free")
        path, size = self.allocated.pop(address)
        os.unlink(path)
        _libc.munmap(address, size)

    def share(self, address: int) -> Shared:
        self._call("share" if len(self.allocated) and address in list(self.allocated)[-2:] else "share_tensor")
        for base, (path, size) in self.allocated.items():
            if base <= address < base + size:
                return Shared(path.encode(), address - base)
        raise AssertionError("not device memory")

    def open(self, handle: bytes) -> int:
        self._call("open")
        path = handle.decode()
        size = os.stat(path).st_size
        address = map_file(path, size)
        self.opened[address] = (path, size)
        return address

    def close(self, address: int) -> None:
        self._call("close")
        _, size = self.opened.pop(address)
        _libc.munmap(address, size)

    def stream(self) -> Any:
        return object()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        yield

    def mark(self) -> Mark:
        return Passed()

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.failing:
            raise Fault(self.failing[name])


def mapped_at(address: int) -> tuple[str, int]:
    """Path of the file that is mapped at an address, and from which byte of it on."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, path = (line + " ").split(" ", 5)
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            return path.strip(), int(offset, 16) + address - first
    raise AssertionError("nothing is mapped there")
