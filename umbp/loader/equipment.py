"""What a loader works with, given where its tensors are: the mover of its own pages, and how it takes part in its group.

On the CPU: threads that copy, and rings in the segment. On a GPU: kernels and pushes, where the machine has all that they need; what it
lacks is found here, once, said in the log with what to change, and replaced by the next best:

    no Triton, or one that miscompiles our kernels        pages go through a pinned buffer, each rank for itself
    rows that are no multiple of 4 bytes                  the same
    host memory that cannot be registered                 the same (`umbp.loader.device` finds out at the first load)
    device memory that cannot be shared                   each rank reads for itself with the kernels
    tensors that cannot be shared, or not be mapped       the exchange goes through staging buffers
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from umbp.client import Namespace
from umbp.core.roofline import MACHINES, Machine
from umbp.errors import InvalidRequest, Unavailable
from umbp.loader.bounce import Bounce
from umbp.loader.convoy import wait_mark
from umbp.loader.copies import Copies
from umbp.loader.device import DeviceMover, fits, granule_of
from umbp.loader.driver import INSTEAD
from umbp.loader.gpu import GpuRuntime
from umbp.loader.group import Group, Party
from umbp.loader.mover import Mover
from umbp.loader.pushes import PushParty
from umbp.loader.rings import RingParty
from umbp.loader.runtime import Fault, Mark, Runtime
from umbp.loader.startup import host_link, kernels_or_fault
from umbp.loader.tensors import KvTensors

log = logging.getLogger("umbp.loader")


class Waitable:
    """A mark as `Loader.offload` takes an event."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def synchronize(self) -> None:
        """Until the device has passed it."""
        wait_mark(self._mark)


@dataclass(slots=True)
class Equipment:
    """``party``: None without a group, and where ``unreachable`` says why there can be none. ``machine``: the rates that choices use."""

    mover: Mover
    party: Party | None
    machine: Machine
    runtime: Runtime | None
    unreachable: str

    @property
    def unmapped(self) -> str:
        """Why others cannot push into this rank's tensors or it into theirs, as far as is known by now; "" if they can."""
        found: str = getattr(self.party, "unmapped", "")
        return found

    def mark(self) -> Mark | None:
        """On a GPU: what the caller's current stream has queued so far."""
        if self.runtime is None:
            return None
        with self.runtime.use():
            return self.runtime.mark()

    def mark_to_wait_for(self) -> Any:
        """The same as something with ``synchronize``."""
        mark = self.mark()
        return None if mark is None else Waitable(mark)


def equip(tensors: KvTensors, namespace: Namespace, group: Group | None, *, runtime: Runtime | None, copy_threads: int) -> Equipment:
    """For tensors on the CPU or a GPU. InvalidRequest for other devices."""
    if runtime is None and tensors.device.type == "cpu":
        copies = Copies(tensors, copy_threads)
        party = RingParty(group, copies, namespace.object_bytes) if group is not None else None
        # The break-even of a GPU: what is tried on a CPU is then what would be done there.
        return Equipment(copies, party, MACHINES["MI355X"], None, "")
    if runtime is None:
        if tensors.device.type != "cuda":
            raise InvalidRequest(f"tensors on {tensors.device}", field="tensors", example="tensors on the CPU or on a GPU")
        runtime = GpuRuntime(tensors.device)
    if (node := runtime.numa_node()) is not None:
        with suppress(Unavailable):  # it is said again when there is a connection
            namespace.run(namespace.operations.link.be_near(node))
    machine = MACHINES["MI355X" if runtime.name == "hip" else "H200"]
    world, rank = (group.world, group.rank) if group is not None else (1, 0)
    try:
        if why := fits(tensors):
            raise Fault(f"{why}; {INSTEAD}")
        kernels = kernels_or_fault(runtime, world=world, rank=rank, granule=granule_of(tensors))
    except Fault as fault:
        log.warning("%s", fault)
        return Equipment(Bounce(tensors, runtime), None, machine, runtime, str(fault))
    mover = DeviceMover(tensors, runtime, kernels)
    return _in_group(mover, namespace, group, machine)


def _in_group(mover: DeviceMover, namespace: Namespace, group: Group | None, machine: Machine) -> Equipment:
    runtime, unreachable, party = mover.runtime, "", None
    bond = namespace.operations.link.bond_or_none()
    if bond is not None and runtime.device.type == "cuda":
        try:
            measured = host_link(runtime, mover.kernels, mover.segment.alias(bond.data), bond.data, blocks=mover.blocks)
            log.info("%s reads the pool's memory at %.1f GB/s", runtime.device, measured)
            machine = replace(machine, host_link=measured) if measured else machine
        except Fault as fault:
            unreachable = str(fault)
    if group is not None and not unreachable:
        try:
            party = PushParty(group, mover, namespace)
        except Fault as fault:
            unreachable = str(fault)
            log.warning("%s", fault)
    return Equipment(mover, party, machine, runtime, unreachable)
