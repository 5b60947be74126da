#!/usr/bin/env python3
"""`page_store`: KV slots of one rank into host pages, against a plain copy of the same bytes to pinned memory, in the same run."""

from __future__ import annotations

import torch
from bench_page_load import Bytes, kernels, options, row, seconds


def main() -> None:
    asked, (mover, ours) = options("page_store"), kernels()
    for pages in asked.pages:
        world = Bytes(pages, asked.layers)
        source = torch.empty(world.size, dtype=torch.uint8, device=world.device)
        plain = seconds(lambda s=source, w=world: w.host.copy_(s, non_blocking=True), world.device)
        window = world.window()
        for blocks in asked.blocks:
            taken = seconds(lambda w=window, s=world, b=blocks: ours.page_store(w, s.group, rank=0, blocks=b), world.device)
            row("page_store", mover, world, taken, plain, blocks=blocks)


if __name__ == "__main__":
    main()
