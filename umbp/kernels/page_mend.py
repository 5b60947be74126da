"""Read for oneself what lost owners should have pushed: `page_load` for those parts of a window whose status says so.

Part w of the window is its pages ``starts[w] .. starts[w + 1]``, those of one owner. Where ``status[w]`` is not 0 (as `wait_signal` leaves
it), every page of the part is copied as by `page_load`; the others are neither read nor written.

It follows the wait on the same stream, in front of the event that the layers are ready: so what a dead rank has left out is there when the
stream goes on, and no host had to look. Where nobody is lost it costs a launch that loads W statuses.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from umbp.kernels.addressing import lanes, only_for, payload, uniform
from umbp.kernels.tables import LayerGroup, Window, check_mend


@triton.jit(do_not_specialize=["host_base", "words", "tile_count"])
def page_mend_kernel(
    host_base: tl.int64,
    pages,
    runs,
    tiles,
    starts,
    status,
    words: tl.int32,
    tile_count: tl.int32,
    RANKS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    GRANULE: tl.constexpr,  # noqa: N803
    ROW_BYTES: tl.constexpr,  # noqa: N803
    UNROLL: tl.constexpr,  # noqa: N803
    HIP: tl.constexpr,  # noqa: N803
):
    for word in range(words):
        begin = tl.load(starts + word)
        pages_lost = tl.where(tl.load(status + word) != 0, tl.load(starts + (word + 1)) - begin, 0)
        count = pages_lost.to(tl.int32)
        for item in range(tl.program_id(0), count * tile_count, tl.num_programs(0)):
            page = pages + (begin + item // tile_count) * (1 + RANKS)
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


def page_mend(window: Window, group: LayerGroup, starts: torch.Tensor, status: torch.Tensor, *, rank: int, blocks: int) -> Any:
    """Queue it on the current stream. ``starts`` int64[W + 1], ascending from 0 to n; ``status`` int32[W].

    Returns Triton's compiled kernel; None in the interpreter or without pages.
    """
    granule = check_mend(window, group, starts, status, rank, blocks)
    if window.pages == 0:
        return None
    return page_mend_kernel[(blocks,)](
        window.host_base,
        window.table,
        group.table,
        group.tiles,
        starts,
        status,
        len(status),
        len(group.tiles),
        RANKS=group.ranks,
        RANK=rank,
        GRANULE=granule,
        ROW_BYTES=group.tile.row_bytes,
        UNROLL=group.tile.unroll,
        HIP=torch.version.hip is not None and group.table.is_cuda,
        num_warps=group.tile.warps,
    )
