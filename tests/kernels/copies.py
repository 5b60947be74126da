"""What each kernel must do in a world, for any mover: the Triton kernels in the interpreter or on a GPU, or the reference in torch.

``python -m tests.kernels.copies KERNEL ...`` runs all cases of these kernels in the interpreter and prints a line [kernel, {case: error or
null}] for each; a process of its own, as the interpreter is chosen when Triton is first imported.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import numpy as np
import torch

from tests.kernels.cases import CASES, WAIT_CASES
from tests.kernels.worlds import CHANNEL, GATE, REFUSED, World, tile_of
from umbp.kernels.staging import Staging
from umbp.kernels.tables import TAG_CLOSED, TAG_SHIFT, Window, signal_address


def fused_read_push(world: World, mover: Any) -> None:
    """Every rank that wants a page has it; every pad has grown by the blocks, once a launch; a rank without a pad is left alone.

    Last of all, a push with a tag that only some gates show: the others get nothing, and see how many came too late.
    """
    case, at = world.case, CHANNEL
    window, group, pads = world.window(), world.group(), world.pad_table()
    for epoch in (1, 2):
        mover.fused_read_push(window, group, pads, rank=case.rank, signal=1, blocks=case.blocks)
        world.check(kv=world.loaded(range(case.ranks)))
        for rank in range(case.ranks):
            assert world.pad_words(rank) == {at: epoch * case.blocks, at + GATE: epoch * case.blocks}, "pad"
    mover.fused_read_push(window, group, world.pad_table(without=0), rank=case.rank, signal=1, blocks=1)
    assert [pad[at].item() - 2 * case.blocks for pad in world.pads] == [0] + [1] * (case.ranks - 1), "a pad of 0"
    world.wipe()
    shown = [5 if rank % 2 else TAG_CLOSED for rank in range(case.ranks)]
    for pad, tag in zip(world.pads, shown, strict=True):
        pad[2 * at + GATE] = tag << TAG_SHIFT
    mover.fused_read_push(window, group, world.pad_table(tags=[5] * case.ranks), rank=case.rank, signal=2, blocks=case.blocks)
    world.check(kv=world.loaded(range(1, case.ranks, 2)))
    for rank, (pad, tag) in enumerate(zip(world.pads, shown, strict=True)):
        came = [pad[2 * at + word].item() for word in (0, GATE, REFUSED)]
        granted = case.blocks if rank % 2 else 0
        assert came == [granted, (tag << TAG_SHIFT) + case.blocks, case.blocks - granted], f"gate of rank {rank}"


def page_load(world: World, mover: Any) -> None:
    """One rank's slots have the pages; the others' are untouched."""
    case = world.case
    mover.page_load(world.window(), world.group(), rank=case.rank, blocks=case.blocks)
    world.check(kv=world.loaded(range(case.rank, case.rank + 1)))


def page_store(world: World, mover: Any) -> None:
    """The host pages that this rank owns have its bytes; all others, and all KV, are untouched."""
    case = world.case
    mover.page_store(world.window(), world.group(), rank=case.rank, blocks=case.blocks)
    world.check(host=world.stored(case.rank))


def gather_push(world: World, mover: Any) -> None:
    """Pushed into all staging buffers, scattered by each rank, signalled both ways."""
    case = world.case
    page_bytes = int((-(-world.sizes // 16) * 16).sum())
    capacity = case.pages + 1
    buffers = [torch.full(((capacity * page_bytes + 16) // 16, 2), -1, dtype=torch.int64, device=world.device) for _ in range(case.ranks)]
    stage = [
        Staging.of(
            world.object_offset,
            world.sizes,
            world.strides,
            np.array([part.data_ptr() for part in world.kv[rank]], np.int64),
            staging_base=np.array([buffer.data_ptr() for buffer in buffers], np.int64),
            staging_bytes=capacity * page_bytes,
            rank=rank,
            device=world.device,
            tile=tile_of(case, world.device),
        )
        for rank in range(case.ranks)
    ]
    assert stage[0].page_bytes == page_bytes
    assert stage[0].pages == capacity
    # positions: a rank packs what it wants, from the end
    wanted = world.slots >= 0
    positions = np.where(wanted, capacity - np.cumsum(wanted, axis=1), -1)
    window = Window.of(world.host.data_ptr(), world.page_offsets, positions, world.device)
    mover.gather_push(window, stage[case.rank], world.pad_table(), rank=case.rank, signal=1, blocks=case.blocks)
    for rank in range(case.ranks):
        arrived = stage[rank].window(positions[rank][wanted[rank]], world.slots[rank][wanted[rank]])
        mover.stage_scatter(arrived, stage[rank], blocks=case.blocks)
        mover.stage_free(stage[rank], world.pad_table(), rank=rank, signal=2)
    world.check(kv=world.loaded(range(case.ranks)))
    for buffer, pad in zip(buffers, world.pads, strict=True):
        assert buffer.view(-1)[-2:].tolist() == [-1, -1], "behind the staging buffer"
        came = [pad[signal * CHANNEL + word].item() for signal in (1, 2) for word in (0, GATE, REFUSED)]
        assert came == [case.blocks, case.blocks, 0, case.ranks, case.ranks, 0], "pad"


def page_mend(world: World, mover: Any) -> None:
    """The parts of the window whose status is not 0 are loaded, all others left alone."""
    case = world.case
    cuts = sorted({0, case.pages // 3, case.pages // 2, case.pages})
    starts = torch.tensor([*cuts, case.pages], device=world.device)  # the last part is empty
    for lost in ([0] * len(cuts), [word % 2 for word in range(len(cuts))], [1] * len(cuts)):
        status = torch.tensor(lost, dtype=torch.int32, device=world.device)
        mover.page_mend(world.window(), world.group(), starts, status, rank=case.rank, blocks=case.blocks)
        pages = [page for first, last, word in zip(cuts, [*cuts[1:], case.pages], lost, strict=True) if word for page in range(first, last)]
        world.check(kv=world.loaded(range(case.rank, case.rank + 1), pages))


def turn_gates(world: World, mover: Any) -> None:
    """Gates change by what is asked, and what was seen before is told, channel by channel."""
    pad = world.pads[0]
    pad[CHANNEL], pad[CHANNEL + GATE], pad[CHANNEL + REFUSED] = 7, (3 << TAG_SHIFT) + 9, 2
    channels = torch.tensor([signal_address(pad.data_ptr(), signal) for signal in (1, 0)], device=world.device)
    change = torch.tensor([-2 << TAG_SHIFT, 5 << TAG_SHIFT], device=world.device)
    seen = torch.full((2, 3), -1, dtype=torch.int64, device=world.device)
    mover.turn_gates(channels, change, seen)
    assert seen.tolist() == [[(3 << TAG_SHIFT) + 9, 7, 2], [0, 0, 0]], seen.tolist()
    mover.turn_gates(channels, torch.zeros_like(change), seen)
    assert seen.tolist() == [[(1 << TAG_SHIFT) + 9, 7, 2], [5 << TAG_SHIFT, 0, 0]], seen.tolist()
    mover.turn_gates(channels[:0], change[:0], seen[:0])


def wait_signal(world: World, mover: Any) -> None:
    """Status per word: 0 where it has arrived, 1 for a peer that never does, after the polls; the words behind it are still looked at."""
    pad = world.pads[0]
    for signal, value in enumerate((7, 2**40, 3)):
        pad[signal * CHANNEL] = value
    addresses = torch.tensor([signal_address(pad.data_ptr(), word) for word in (0, 3, 1, 2)], device=world.device)
    wanted = torch.tensor([7, 1, 2**40, 4], device=world.device)
    status = torch.zeros(4, dtype=torch.int32, device=world.device)
    mover.wait_signal(addresses, wanted, status, polls=200)
    assert status.tolist() == [0, 1, 0, 1], status.tolist()
    assert [pad[word * CHANNEL].item() for word in range(4)] == [7, 2**40, 3, 0]
    pad[3 * CHANNEL] = 1
    mover.wait_signal(addresses, wanted, status, polls=1)
    assert status.tolist() == [0, 1, 0, 1], "who is lost stays lost"
    status.zero_()
    mover.wait_signal(addresses[:1], wanted[:1], status[:1], polls=1)
    assert status.tolist() == [0, 0, 0, 0]
    mover.wait_signal(addresses[:0], wanted[:0], status[:0], polls=1)


MADE = (fused_read_push, page_load, page_mend, page_store, gather_push, turn_gates, wait_signal)
CHECKS = {check.__name__: check for check in MADE}


class Kernels:
    """The Triton kernels under the names of `reference`."""

    def __init__(self) -> None:
        from umbp.kernels import fused_read_push as fused
        from umbp.kernels import gather_push as staged
        from umbp.kernels import page_load as load
        from umbp.kernels import page_mend as mend
        from umbp.kernels import page_store as store
        from umbp.kernels import turn_gates as turn
        from umbp.kernels import wait_signal as wait

        self.fused_read_push = fused.fused_read_push
        self.gather_push, self.stage_scatter, self.stage_free = staged.gather_push, staged.stage_scatter, staged.stage_free
        self.page_load, self.page_store, self.wait_signal = load.page_load, store.page_store, wait.wait_signal
        self.page_mend, self.turn_gates = mend.page_mend, turn.turn_gates


def cases_of(kernel: str) -> list[str]:
    """Waits and gates do not depend on the world."""
    return WAIT_CASES if kernel in ("turn_gates", "wait_signal") else list(CASES)


def run(kernel: str, case: str, mover: Any, device: str = "cpu") -> None:
    """Raises what is wrong."""
    CHECKS[kernel](World(CASES[case], device), mover)


def outcome(kernel: str, case: str, mover: Any) -> str | None:
    try:
        run(kernel, case, mover)
    except Exception:  # noqa: BLE001
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    mover = Kernels()
    for name in sys.argv[1:]:
        print(json.dumps([name, {case: outcome(name, case, mover) for case in cases_of(name)}]), flush=True)
