"""The exchange for KV tensors that peers cannot map: push into staging buffers that they can, then scatter at home.

With the buffers of `staging`:

    push     staging[r] + position[r, p] * page_bytes + at[s] ..  =  host_base + page_offsets[p] + object_offset[s] ..
    scatter  dst_base[s] + slot[p] * dst_page_stride[s] ..        =  staging[own] + position[p] * page_bytes + at[s] ..

Both are kernels that exist, over other tables: the push is `fused_read_push` whose "KV tensors" are the staging buffers, the scatter is
`page_load` whose "host memory" is the own staging buffer. So what is proven and checked for those holds here, and this file is the tables.

When it wins: when it must. It costs one more copy inside device memory (8 TB/s against 55 GB/s of the host link: 1 to 2 %), a scatter
launch a layer group, and a word back: a position may be written again only after its reader has scattered it. `stage_free` adds to
the writers' pads on the reader's stream, behind the scatter; a writer holds its next push with `wait_signal` until the counters are
there.
"""

from __future__ import annotations

from typing import Any

from umbp.kernels.fused_read_push import fused_read_push
from umbp.kernels.page_load import page_load
from umbp.kernels.staging import Staging
from umbp.kernels.tables import Pads, Window


def gather_push(window: Window, staging: Staging, pads: Pads, *, rank: int, signal: int, blocks: int) -> Any:
    """As `fused_read_push`; the window's slots are positions in the readers' staging buffers, -1 where a reader does not want the page."""
    staging.check(window)
    return fused_read_push(window, staging.push, pads, rank=rank, signal=signal, blocks=blocks)


def stage_scatter(window: Window, staging: Staging, *, blocks: int) -> Any:
    """From the own staging buffer into the own slots; ``window`` is of `Staging.window`."""
    return page_load(window, staging.scatter, rank=0, blocks=blocks)


def stage_free(staging: Staging, pads: Pads, *, rank: int, signal: int) -> Any:
    """Adds 1 to counter ``signal`` at every writer: what this rank has scattered on this stream may be written again."""
    nothing = Window.none(staging.push.ranks, staging.push.table.device)
    return fused_read_push(nothing, staging.push, pads, rank=rank, signal=signal, blocks=1)
