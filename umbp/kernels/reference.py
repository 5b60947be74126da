"""What every kernel does, in the plainest way: one memmove after another. The oracle of the tests, and what runs without Triton.

Same signatures, same checks. Memory of this process only: an address is one that the CPU may read. Signals are exact between
processes as long as each counter has one writer, which is how the loader uses them; on a processor with a weaker order than x86 they
need a fence.
"""

from __future__ import annotations

import ctypes

import torch

from umbp.kernels.staging import Staging
from umbp.kernels.tables import (
    TAG_SHIFT,
    LayerGroup,
    Pads,
    Window,
    check_gates,
    check_mend,
    check_push,
    check_solo,
    check_wait,
    gate_address,
    refused_address,
    signal_address,
)


def fused_read_push(window: Window, group: LayerGroup, pads: Pads, *, rank: int, signal: int, blocks: int) -> None:
    """See `umbp.kernels.fused_read_push`."""
    check_push(window, group, pads, rank, signal, blocks)
    order = [(rank + 1 + turn) % group.ranks for turn in range(group.ranks)]
    table = pads.table.tolist()
    granted = dict.fromkeys(order, True)
    for reader in order:
        if pad := table[reader][0]:
            gate = _counter(gate_address(pad, signal))
            granted[reader] = gate.value >> TAG_SHIFT == table[reader][1]
            gate.value += blocks
    for reader in order:
        if granted[reader]:
            _copy(window, group, reader, store=False)
    for reader in order:
        if pad := table[reader][0]:
            where = signal_address if granted[reader] else refused_address
            _counter(where(pad, signal)).value += blocks


def wait_signal(addresses: torch.Tensor, wanted: torch.Tensor, status: torch.Tensor, *, polls: int) -> None:
    """See `umbp.kernels.wait_signal`."""
    check_wait(addresses, wanted, status, polls)
    for word, (address, want) in enumerate(zip(addresses.tolist(), wanted.tolist(), strict=True)):
        counter, lost = _counter(address), bool(status[word])
        while counter.value < want and polls > 0 and not lost:
            polls -= 1
        status[word] = int(lost or counter.value < want)


def turn_gates(channels: torch.Tensor, change: torch.Tensor, seen: torch.Tensor) -> None:
    """See `umbp.kernels.turn_gates`."""
    check_gates(channels, change, seen)
    for word, (channel, add) in enumerate(zip(channels.tolist(), change.tolist(), strict=True)):
        arrived, refused = _counter(signal_address(channel, 0)).value, _counter(refused_address(channel, 0)).value
        gate = _counter(gate_address(channel, 0))
        seen[word] = torch.tensor([gate.value, arrived, refused])
        gate.value += add


def page_mend(window: Window, group: LayerGroup, starts: torch.Tensor, status: torch.Tensor, *, rank: int, blocks: int) -> None:
    """See `umbp.kernels.page_mend`."""
    check_mend(window, group, starts, status, rank, blocks)
    for word, lost in enumerate(status.tolist()):
        if lost:
            first, last = int(starts[word]), int(starts[word + 1])
            part = Window(window.host_base, window.table[first:last], window.granule, window.wanted, window.slots_end)
            _copy(part, group, rank, store=False)


def page_load(window: Window, group: LayerGroup, *, rank: int, blocks: int) -> None:
    """See `umbp.kernels.page_load`."""
    check_solo(window, group, rank, blocks)
    _copy(window, group, rank, store=False)


def page_store(window: Window, group: LayerGroup, *, rank: int, blocks: int) -> None:
    """See `umbp.kernels.page_store`."""
    check_solo(window, group, rank, blocks)
    _copy(window, group, rank, store=True)


def gather_push(window: Window, staging: Staging, pads: Pads, *, rank: int, signal: int, blocks: int) -> None:
    """See `umbp.kernels.gather_push`."""
    staging.check(window)
    fused_read_push(window, staging.push, pads, rank=rank, signal=signal, blocks=blocks)


def stage_scatter(window: Window, staging: Staging, *, blocks: int) -> None:
    """See `umbp.kernels.gather_push`."""
    page_load(window, staging.scatter, rank=0, blocks=blocks)


def stage_free(staging: Staging, pads: Pads, *, rank: int, signal: int) -> None:
    """See `umbp.kernels.gather_push`."""
    fused_read_push(Window.none(staging.push.ranks), staging.push, pads, rank=rank, signal=signal, blocks=1)


def _copy(window: Window, group: LayerGroup, reader: int, *, store: bool) -> None:
    slots = window.slots[reader].tolist()
    for offset, size, stride, base in zip(
        group.object_offset.tolist(),
        group.nbytes.tolist(),
        group.dst_page_stride.tolist(),
        group.dst_base[reader].tolist(),
        strict=True,
    ):
        for page, slot in zip(window.page_offsets.tolist(), slots, strict=True):
            if slot >= 0:
                host, device = window.host_base + page + offset, base + slot * stride
                ctypes.memmove(*((host, device) if store else (device, host)), size)


def _counter(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)
