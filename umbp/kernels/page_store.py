"""Copy one rank's KV slots into a window's pages in host memory: the offload.

For work item (page p, tile t of run s) and the rank r that this is, with the tables of `page_load` read the other way:

    host_base + page_offsets[p] + object_offset[s] + first[t] ..  =  dst_base[r, s] + slots[r, p] * dst_page_stride[s] + first[t] ..

Slot -1 is a page that this rank does not own: neither read nor written, so that each page of replicated KV leaves one GPU of the
group only.

No barrier: the host may look at the pages when an event behind this kernel has completed, as the end of a kernel writes back what the
caches hold for host memory. Whoever commits the pages waits for that event first.

When it wins: against one copy-engine call a (page, component, layer), always; a copy engine is better for one large contiguous run.
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
def page_store_kernel(
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
        owned = only_for(slot, mask)
        source = payload(uniform(tl.load(run + (3 + RANK)) + slot * tl.load(run + 2) + first, HIP), GRANULE)
        target = payload(uniform(host_base + tl.load(page) + tl.load(run) + first, HIP), GRANULE)
        values = tl.load(source + index, mask=owned, cache_modifier=".cg")
        tl.store(target + index, values, mask=owned)


def page_store(window: Window, group: LayerGroup, *, rank: int, blocks: int) -> Any:
    """Queue it on the current stream. Returns Triton's compiled kernel; None in the interpreter or without pages."""
    granule = check_solo(window, group, rank, blocks)
    if window.pages == 0:
        return None
    return page_store_kernel[(blocks,)](
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
