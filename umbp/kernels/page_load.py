"""Copy a window's pages from host memory into one rank's own KV slots.

For work item (page p, tile t of run s) and the reader r that this rank is:

    dst_base[r, s] + slots[r, p] * dst_page_stride[s] + first[t] ..  =  host_base + page_offsets[p] + object_offset[s] + first[t] ..

Pages with slot -1 are neither read nor written. No barrier and no signal: the end of the kernel is what the stream waits for.

When it wins: KV that is sharded, so that no two ranks want the same bytes; and calls below the break-even of `fused_read_push`, 2 to 4 MB,
where a signal and a wait cost more than the bytes saved. Against the copy engine: many small runs, as there is one launch for all of them.
With host_base a staging buffer in device memory, it is the second half of the staged exchange (`staged`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from umbp.kernels.addressing import lanes, only_for, payload, uniform
from umbp.kernels.tables import LayerGroup, Window, check_solo


@triton.jit(do_not_specialize=["host_base", "page_count", "tile_count"])
def page_load_kernel(
    host_base: tl.int64,
    pages,
    runs,
    tiles,
    page_count: tl.int32,
    tile_count: tl.int32,
    RANKS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    GRANULE: tl.constexpr,  # noqa: N803
    ROW_BYTES: tl.constexpr,  # noqa: N803
    UNROLL: tl.constexpr,  # noqa: N803
    HIP: tl.constexpr,  # noqa: N803
):
    for item in range(tl.program_id(0), page_count * tile_count, tl.num_programs(0)):
        page = pages + (item // tile_count).to(tl.int64) * (1 + RANKS)
        tile = tiles + (item % tile_count) * 2
        run = runs + tl.load(tile) * (3 + RANKS)
        first = tl.load(tile + 1)
        slot = tl.load(page + (1 + RANK))
        index, mask = lanes(tl.load(run + 1) - first, GRANULE, ROW_BYTES, UNROLL)
        wanted = only_for(slot, mask)
        source = payload(uniform(host_base + tl.load(page) + tl.load(run) + first, HIP), GRANULE)
        target = payload(uniform(tl.load(run + (3 + RANK)) + slot * tl.load(run + 2) + first, HIP), GRANULE)
        values = tl.load(source + index, mask=wanted, cache_modifier=".cg")
        tl.store(target + index, values, mask=wanted)


def page_load(window: Window, group: LayerGroup, *, rank: int, blocks: int) -> Any:
    """Queue it on the current stream. Returns Triton's compiled kernel; None in the interpreter or without pages."""
    granule = check_solo(window, group, rank, blocks)
    if window.pages == 0:
        return None
    return page_load_kernel[(blocks,)](
        window.host_base,
        window.table,
        group.table,
        group.tiles,
        window.pages,
        len(group.tiles),
        RANKS=group.ranks,
        RANK=rank,
        GRANULE=granule,
        ROW_BYTES=group.tile.row_bytes,
        UNROLL=group.tile.unroll,
        HIP=torch.version.hip is not None and group.table.is_cuda,
        num_warps=group.tile.warps,
    )
