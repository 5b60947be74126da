"""The staging buffers of the staged exchange as tables: where a page lies in them, on its way in and on its way out.

Every rank has one buffer that all ranks of the group have mapped. Its pages are those of one layer group, run after run, each run at a
multiple of 16 bytes: run s of position q is at ``staging_base + q * page_bytes + at[s]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from umbp.errors import InvalidRequest
from umbp.kernels.tables import LayerGroup, Tile, Window
from umbp.types import I64

ALIGN = 16


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """The staging buffers of one layer group: ``pages`` positions of ``page_bytes`` in each rank's."""

    push: LayerGroup
    scatter: LayerGroup
    own_base: int
    page_bytes: int
    pages: int

    @classmethod
    def of(
        cls,
        object_offset: I64,
        nbytes: I64,
        dst_page_stride: I64,
        dst_base: I64,
        *,
        staging_base: I64,
        staging_bytes: int,
        rank: int,
        device: Any = "cpu",
        tile: Tile | None = None,
    ) -> Staging:
        """Runs as in `LayerGroup.of`, but ``dst_base`` is int64[S], this rank's alone; ``staging_base`` int64[R] as mapped here."""
        if dst_base.ndim != 1 or staging_base.ndim != 1 or not 0 <= rank < len(staging_base):
            raise InvalidRequest(f"dst_base {dst_base.shape}, staging_base {staging_base.shape}, rank {rank}", field="staging_base")
        ends = np.cumsum(-(-nbytes // ALIGN) * ALIGN)
        at = ends - -(-nbytes // ALIGN) * ALIGN
        page_bytes = int(ends[-1])
        if int(staging_base[rank]) == 0 or int(np.bitwise_or.reduce(staging_base)) % ALIGN or staging_bytes < page_bytes:
            raise InvalidRequest(
                f"{staging_bytes} bytes; at least one page of {page_bytes}, at a multiple of {ALIGN}", field="staging_base"
            )
        bases = np.where(staging_base[:, None] == 0, 0, staging_base[:, None] + at[None, :])
        push = LayerGroup.of(object_offset, nbytes, np.full_like(nbytes, page_bytes), bases, device=device, tile=tile)
        scatter = LayerGroup.of(at, nbytes, dst_page_stride, dst_base[None, :], device=device, tile=tile)
        return cls(push, scatter, int(staging_base[rank]), page_bytes, staging_bytes // page_bytes)

    def window(self, positions: I64, slots: I64) -> Window:
        """What `stage_scatter` takes: int64[n] positions that have arrived, int64[n] slots they belong in."""
        if len(positions) and int(positions.max()) >= self.pages:
            raise InvalidRequest(f"position {int(positions.max())} of {self.pages}", field="positions")
        return Window.of(self.own_base, positions * self.page_bytes, slots[None, :], self.scatter.table.device)

    def check(self, window: Window) -> None:
        """Raises if a page of a push would go past the end of a staging buffer."""
        if window.slots_end > self.pages:
            raise InvalidRequest(f"position {window.slots_end - 1}, a staging buffer has {self.pages} pages", field="slots")
