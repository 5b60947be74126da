"""The border to a GPU's runtime: what the loader asks of it, and nothing else of the loader knows whose GPU it is.

Everything that decides (which way, which tables, when a gate changes, what is released in which order) is on this side and runs the same
over `umbp.loader.gpu.GpuRuntime` and over the tests' runtime, whose device memory is memory that processes share and whose kernels run
in Triton's interpreter.

Four things are asked for: host memory that kernels can reach (an *alias*: the address as the device sees it), device memory of one's own,
device memory of other processes (a *handle*, opened once a process and allocation), and order. Order is by marks: a mark is a point in
the work queued on a stream, that another stream can be made to wait for and that the host can ask about. The host never blocks in here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from umbp.types import U8


class Fault(Exception):
    """Something that the machine cannot do. The text says what, why if the runtime knows, what to change, and what is used instead."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Device memory as another process can open it: the handle of its allocation, and where in that it begins."""

    handle: bytes
    offset: int


class Mark(Protocol):
    """A point in the work of a stream."""

    def hold(self) -> None:
        """The caller's current stream goes on only behind this point; the host does not wait."""

    def done(self) -> bool:
        """Whether the device has passed it."""


class Runtime(Protocol):
    """One device of one process. ``blocks``: of a launch that is to keep host link and fabric busy."""

    name: str
    device: torch.device
    blocks: int

    def numa_node(self) -> int | None:
        """The NUMA node of this host that the device is attached to; None where that is not known."""

    def use(self) -> AbstractContextManager[None]:
        """Around all that follows: this thread is on the runtime's device."""

    def register(self, memory: U8) -> int:
        """Make host memory reachable for kernels; its alias. Fault if it cannot be."""

    def unregister(self, memory: U8) -> None:
        """End that. No kernel reads it any more."""

    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory that other processes can open and whose atomics all of them see. Fault if there is none."""

    def free(self, address: int) -> None:
        """Give it back."""

    def share(self, address: int) -> Shared:
        """What another process needs to reach this device memory, a tensor's or allocated. Fault if it cannot be shared."""

    def open(self, handle: bytes) -> int:
        """Where another process's allocation lies here. Fault if it cannot be reached."""

    def close(self, address: int) -> None:
        """End that. No kernel writes there any more."""

    def stream(self) -> Any:
        """A new stream."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """What is queued in the block goes to this stream."""

    def mark(self) -> Mark:
        """A point behind all that is queued on the current stream so far."""


class Kernels(Protocol):
    """The kernels of `umbp.kernels`, each under its name and with the arguments of its launcher."""

    fused_read_push: Any
    gather_push: Any
    stage_scatter: Any
    stage_free: Any
    page_load: Any
    page_mend: Any
    page_store: Any
    turn_gates: Any
    wait_signal: Any
