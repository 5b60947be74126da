"""Read each tile of a window from host memory once and store it into the KV slots of every rank that wants it, then signal.

For work item (page p, tile t of run s), reader r, in the order ``rank + 1, rank + 2, ... rank``:

    dst_base[r, s] + slots[r, p] * dst_page_stride[s] + first[t] .. + size  =  host_base + page_offsets[p] + object_offset[s] + first[t] ..

and, when a block has no item left, ``arrived += 1`` in channel ``signal`` of every rank r whose pad is known. A reader knows that all of
this launch has arrived when the counter has grown by the number of blocks. The grid is persistent and as large as the caller says: the
launch does not depend on the number of pages, and without any page it only signals.

Before its first item a block enters the gate of every reader (`umbp.kernels.tables`). A reader whose gate shows another tag gets nothing
of this block, which counts itself as refused there: so a launch that comes late harms nobody. It costs one round trip over the fabric a
launch, to all readers at once.

When it wins: B bytes of replicated KV cross the host link once a group instead of once a rank, and cross the fabric while they are
read. Above 2 to 4 MB a call; below, `page_load` on each rank saves the signal and the wait.

What each step of the end guards. `drain_stores`: this wave's stores have been acknowledged by the memory they go to. Barrier: all
waves of the block have come that far. Release at system scope: what this block's L2 still holds dirty is written back before the
counter moves; each block releases for itself, as there is an L2 per die. The order of readers is rotated so that the ranks do not all
write to one peer at a time.

Unwanted pages are masked, not branched around. After a branch, LLVM no longer knows how many stores are under way, and waits for
older stores before each new one: 4 stores in flight instead of 32. For the same reason the addresses of all readers are loaded before
the first store.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from umbp.kernels.addressing import drain_stores, lanes, only_for, payload, uniform
from umbp.kernels.tables import CHANNEL_BYTES, LINE_BYTES, TAG_SHIFT, LayerGroup, Pads, Window, check_push

_CHANNEL_WORDS = tl.constexpr(CHANNEL_BYTES // 8)
_LINE_WORDS = tl.constexpr(LINE_BYTES // 8)
_TAG_SHIFT = tl.constexpr(TAG_SHIFT)


@triton.jit(do_not_specialize=["host_base", "page_count", "tile_count", "signal"])
def fused_read_push_kernel(
    host_base: tl.int64,
    pages,
    runs,
    tiles,
    pads,
    page_count: tl.int32,
    tile_count: tl.int32,
    signal: tl.int32,
    RANKS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    GRANULE: tl.constexpr,  # noqa: N803
    ROW_BYTES: tl.constexpr,  # noqa: N803
    UNROLL: tl.constexpr,  # noqa: N803
    SEATS: tl.constexpr,  # noqa: N803
    HIP: tl.constexpr,  # noqa: N803
):
    seat = tl.arange(0, SEATS)
    pad = tl.load(pads + 2 * seat, mask=seat < RANKS, other=0)
    tag = tl.load(pads + 2 * seat + 1, mask=seat < RANKS, other=0)
    gate = pad.to(tl.pointer_type(tl.int64)) + (signal.to(tl.int64) * _CHANNEL_WORDS + _LINE_WORDS)
    shown = tl.atomic_add(gate, tl.full([SEATS], 1, tl.int64), mask=pad != 0, sem="acquire", scope="sys") >> _TAG_SHIFT
    open_to = uniform(tl.sum(((shown == tag) | (pad == 0)).to(tl.int64) << seat.to(tl.int64)), HIP)
    for item in range(tl.program_id(0), page_count * tile_count, tl.num_programs(0)):
        page = pages + (item // tile_count).to(tl.int64) * (1 + RANKS)
        tile = tiles + (item % tile_count) * 2
        run = runs + tl.load(tile) * (3 + RANKS)
        first = tl.load(tile + 1)
        index, mask = lanes(tl.load(run + 1) - first, GRANULE, ROW_BYTES, UNROLL)
        stride = tl.load(run + 2)
        targets = ()
        slots = ()
        for turn in tl.static_range(RANKS):
            slot = tl.load(page + (1 + (RANK + 1 + turn) % RANKS))
            base = tl.load(run + (3 + (RANK + 1 + turn) % RANKS))
            slots = slots + (tl.where(((open_to >> ((RANK + 1 + turn) % RANKS)) & 1) != 0, slot, -1),)  # noqa: RUF005
            targets = targets + (uniform(base + slot * stride + first, HIP),)  # noqa: RUF005
        source = payload(uniform(host_base + tl.load(page) + tl.load(run) + first, HIP), GRANULE)
        values = tl.load(source + index, mask=mask, cache_modifier=".cg")
        for turn in tl.static_range(RANKS):
            tl.store(payload(targets[turn], GRANULE) + index, values, mask=only_for(slots[turn], mask))
    counters = ()
    for turn in tl.static_range(RANKS):
        line = tl.where(((open_to >> ((RANK + 1 + turn) % RANKS)) & 1) != 0, 0, 2 * _LINE_WORDS * 8)
        pad_of = tl.load(pads + 2 * ((RANK + 1 + turn) % RANKS))
        counters = counters + (tl.where(pad_of != 0, pad_of + line, 0),)  # noqa: RUF005
    drain_stores(HIP)
    tl.debug_barrier()
    for turn in tl.static_range(RANKS):
        if counters[turn] != 0:
            counter = counters[turn].to(tl.pointer_type(tl.int64)) + signal.to(tl.int64) * _CHANNEL_WORDS
            tl.atomic_add(counter, 1, sem="release", scope="sys")


def fused_read_push(window: Window, group: LayerGroup, pads: Pads, *, rank: int, signal: int, blocks: int) -> Any:
    """Queue it on the current stream. Adds ``blocks`` to channel ``signal`` of every pad that is not 0: to what arrived, or was refused.

    Returns Triton's compiled kernel, for `aot.assembly_of`; None in the interpreter.
    """
    granule = check_push(window, group, pads, rank, signal, blocks)
    return fused_read_push_kernel[(blocks,)](
        window.host_base,
        window.table,
        group.table,
        group.tiles,
        pads.table,
        window.pages,
        len(group.tiles),
        signal,
        RANKS=group.ranks,
        RANK=rank,
        GRANULE=granule,
        ROW_BYTES=group.tile.row_bytes,
        UNROLL=group.tile.unroll,
        SEATS=triton.next_power_of_2(group.ranks),
        HIP=torch.version.hip is not None and group.table.is_cuda,
        num_warps=group.tile.warps,
    )
