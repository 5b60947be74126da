"""A dozen calls into libamdhip64 or libcudart, by ctypes: argument types, error codes, and messages that say what to do.

torch has brought one of the two libraries into the process; it is found among those, so that there are never two runtimes. HIP copies
CUDA's names and signatures here, with three differences: memory that several GPUs do atomics on is asked for by flags, the extent of an
allocation comes from the same library (CUDA keeps it in libcuda), and the device's address of registered host memory differs from the
host's, which is why it is always asked for.

No call is made when this module is imported, and none leaves an error behind: the runtime keeps the last one, and torch would raise it
later in somebody else's name.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

from umbp.loader.runtime import Fault

HANDLE_BYTES = 64
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2
IPC_LAZY_PEER_ACCESS = 1
# Uncached, fine-grained, plain: the first that this GPU has. Counters that peers add to must not stay in one GPU's cache.
HIP_SIGNAL_FLAGS = (3, 1, 0)

LIBRARIES = {"hip": r"libamdhip64\.so[.\d]*", "cuda": r"libcudart[^/]*\.so[.\d]*"}
DRIVERS = {"hip": r"libamdhip64\.so[.\d]*", "cuda": r"libcuda\.so[.\d]*"}

INSTEAD = "pages are copied through a pinned buffer instead"
ADVICE = {
    "HostRegister": f"raise the limit of locked memory (ulimit -l unlimited; docker: --ulimit memlock=-1 --cap-add=IPC_LOCK); {INSTEAD}",
    "HostGetDevicePointer": f"this GPU cannot read registered host memory; {INSTEAD}",
    "HostUnregister": "the process will hold the segment's memory until it ends",
    "Malloc": "no memory for signals and staging is left on this GPU; give the engine a little less; every rank reads for itself instead",
    "Memset": "every rank reads for itself instead",
    "MemGetAddressRange": "this memory comes from an allocator whose memory cannot be shared; staging buffers are used instead",
    "IpcGetMemHandle": "memory of torch's expandable segments or of a virtual allocator cannot be shared (PYTORCH_CUDA_ALLOC_CONF="
    "expandable_segments:False); staging buffers are used instead",
    "IpcOpenMemHandle": "ranks must see each other's GPUs (no CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES of one each) and share the pid "
    "and ipc namespaces (docker: --ipc=host --pid=host); what cannot be reached is read by each rank for itself instead",
    "IpcCloseMemHandle": "it stays mapped until this process ends",
    "DeviceGetPCIBusId": "which NUMA node it is near is not known; pages are written to any",
    "Free": "it stays allocated until this process ends",
}


class Handle(ctypes.Structure):
    """hipIpcMemHandle_t and cudaIpcMemHandle_t: 64 bytes, by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def loaded(pattern: str) -> str:
    """Path of a library of this name that is in the process already; Fault if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if re.fullmatch(pattern, path.rsplit("/", 1)[-1]):
            return path
    raise Fault(f"no library {pattern} is loaded in this process, though torch sees a GPU; {INSTEAD}")


class Driver:
    """The calls of one library. ``kind`` is hip or cuda. Every method acts on the thread's current device."""

    def __init__(self, kind: str, library: str, ranges: str) -> None:
        self.kind = kind
        self._library = ctypes.CDLL(library)
        self._ranges = self._library if ranges == library else ctypes.CDLL(ranges)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._declare("HostRegister", [pointer, size, ctypes.c_uint])
        self._declare("HostGetDevicePointer", [ctypes.POINTER(pointer), pointer, ctypes.c_uint])
        self._declare("HostUnregister", [pointer])
        self._declare("Malloc", [ctypes.POINTER(pointer), size])
        self._declare("Memset", [pointer, ctypes.c_int, size])
        self._declare("Free", [pointer])
        self._declare("IpcGetMemHandle", [ctypes.POINTER(Handle), pointer])
        self._declare("IpcOpenMemHandle", [ctypes.POINTER(pointer), Handle, ctypes.c_uint])
        self._declare("IpcCloseMemHandle", [pointer])
        self._declare("DeviceGetPCIBusId", [ctypes.c_char_p, ctypes.c_int, ctypes.c_int])
        self._declare("GetLastError", [])
        if kind == "hip":
            self._declare("ExtMallocWithFlags", [ctypes.POINTER(pointer), size, ctypes.c_uint])
        self._text = getattr(self._library, f"{kind}GetErrorString")
        self._text.argtypes, self._text.restype = [ctypes.c_int], ctypes.c_char_p
        self._range = getattr(self._ranges, "hipMemGetAddressRange" if kind == "hip" else "cuMemGetAddressRange_v2")
        self._range.argtypes, self._range.restype = [ctypes.POINTER(pointer), ctypes.POINTER(size), pointer], ctypes.c_int

    @classmethod
    def of_process(cls, kind: str) -> Driver:
        """The one that torch has loaded."""
        return cls(kind, loaded(LIBRARIES[kind]), loaded(DRIVERS[kind]))

    def __repr__(self) -> str:
        return f"<Driver {self.kind} {self._library._name}>"

    def register(self, address: int, nbytes: int) -> int:
        """Lock host memory and give its address as the device sees it."""
        flags = REGISTER_PORTABLE | REGISTER_MAPPED
        self._call("HostRegister", address, nbytes, flags, about=f"{nbytes} bytes of the pool's segment")
        alias = ctypes.c_void_p()
        try:
            self._call("HostGetDevicePointer", ctypes.byref(alias), address, 0, about="the pool's segment")
        except Fault:
            self.unregister(address)
            raise
        return int(alias.value or 0)

    def unregister(self, address: int) -> None:
        """Unlock it."""
        self._call("HostUnregister", address, about="the pool's segment")

    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory that peers may do atomics on."""
        found = ctypes.c_void_p()
        about = f"{nbytes} bytes of device memory"
        if self.kind == "hip":
            for flags in HIP_SIGNAL_FLAGS:
                if self._code("ExtMallocWithFlags", ctypes.byref(found), nbytes, flags) == 0:
                    break
        if not found.value:
            self._call("Malloc", ctypes.byref(found), nbytes, about=about)
        address = int(found.value or 0)
        try:
            self._call("Memset", address, 0, nbytes, about=about)
        except Fault:
            self.free(address)
            raise
        return address

    def free(self, address: int) -> None:
        """Give it back."""
        self._call("Free", address, about="device memory")

    def extent(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation that an address lies in."""
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        code = int(self._range(ctypes.byref(base), ctypes.byref(size), address))
        if code:
            self._library[f"{self.kind}GetLastError"]()
            raise self._fault("MemGetAddressRange", code, f"the allocation of {address:#x}")
        return int(base.value or 0), int(size.value)

    def handle(self, base: int) -> bytes:
        """What another process opens an allocation by."""
        made = Handle()
        self._call("IpcGetMemHandle", ctypes.byref(made), base, about=f"the allocation at {base:#x}")
        return bytes(memoryview(made).cast("B"))

    def open(self, handle: bytes) -> int:
        """Where another process's allocation lies here."""
        found = ctypes.c_void_p()
        given = Handle.from_buffer_copy(handle)
        self._call("IpcOpenMemHandle", ctypes.byref(found), given, IPC_LAZY_PEER_ACCESS, about="another rank's memory")
        return int(found.value or 0)

    def close(self, address: int) -> None:
        """Unmap it."""
        self._call("IpcCloseMemHandle", address, about="another rank's memory")

    def bus(self, device: int) -> str:
        """Where on the PCI bus a device is, by its number in this process."""
        text = ctypes.create_string_buffer(32)
        self._call("DeviceGetPCIBusId", text, len(text), device, about=f"device {device}")
        return text.value.decode("ascii", "replace")

    def _declare(self, name: str, arguments: Sequence[object]) -> None:
        call = getattr(self._library, self.kind + name)
        call.argtypes, call.restype = list(arguments), ctypes.c_int

    def _code(self, name: str, *arguments: object) -> int:
        code = int(getattr(self._library, self.kind + name)(*arguments))
        if code:
            getattr(self._library, f"{self.kind}GetLastError")()  # or torch would find it and raise it as its own
        return code

    def _call(self, name: str, *arguments: object, about: str) -> None:
        if code := self._code(name, *arguments):
            raise self._fault(name, code, about)

    def _fault(self, name: str, code: int, about: str) -> Fault:
        text = (self._text(code) or b"").decode(errors="replace")
        return Fault(f"{self.kind}{name} of {about} failed with {code} ({text}): {ADVICE[name]}")
