#!/usr/bin/env python3
"""`page_mend`: what it costs in every load where nobody is lost, and against `page_load` where all are."""

from __future__ import annotations

import torch
from bench_page_load import Bytes, floor, kernels, options, row, seconds


def main() -> None:
    asked, (mover, ours) = options("page_mend"), kernels()
    for pages in asked.pages:
        world = Bytes(pages, asked.layers)
        window, plain = world.window(), floor(world)
        starts = torch.tensor([0, pages // 2, pages], device=world.device)
        for lost in (0, 1):
            status = torch.full((2,), lost, dtype=torch.int32, device=world.device)
            for blocks in asked.blocks:
                taken = seconds(
                    lambda w=window, s=world, b=blocks, t=status, a=starts: ours.page_mend(w, s.group, a, t, rank=0, blocks=b), world.device
                )
                row("page_mend", mover, world, taken, plain, blocks=blocks, lost=bool(lost))


if __name__ == "__main__":
    main()
