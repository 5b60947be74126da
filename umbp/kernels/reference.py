"""What every kernel does, in the plainest way: one memmove after another. The oracle of the tests, and what runs without Triton.

Same signatures, same checks. Memory of this process only: an address is one that the CPU may read. Signals are exact between
processes as long as each counter has one writer, which is how the loader uses them; on a processor with a weaker order than x86 they
need a fence.
"""

from __future__ import annotations

import ctypes

import torch

from umbp.kernels.staging import Staging
from umbp.kernels.tables import LayerGroup, Pads, Window, check_push, check_solo, check_wait, signal_address


def fused_read_push(window: Window, group: LayerGroup, pads: Pads, *, rank: int, signal: int, blocks: int) -> None:
    """See `umbp.kernels.fused_read_push`."""
    check_push(window, group, pads, rank, signal, blocks)
    order = [(rank + 1 + turn) % group.ranks for turn in range(group.ranks)]
    for reader in order:
        _copy(window, group, reader, store=False)
    for reader in order:
        if pad := int(pads.table[reader]):
            _counter(signal_address(pad, signal)).value += blocks


def wait_signal(addresses: torch.Tensor, wanted: torch.Tensor, status: torch.Tensor, *, polls: int) -> None:
    """See `umbp.kernels.wait_signal`."""
    check_wait(addresses, wanted, status, polls)
    for word, (address, want) in enumerate(zip(addresses.tolist(), wanted.tolist(), strict=True)):
        counter = _counter(address)
        while counter.value < want and polls > 0:
            polls -= 1
        status[word] = int(counter.value < want)


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
