#!/usr/bin/env python3
"""`gather_push` and `stage_scatter`: the staged exchange of one rank's window and its scatter of all pages, against `fused_read_push`."""

from __future__ import annotations

import numpy as np
import torch
from bench_page_load import Bytes, floor, kernels, options, row, seconds

from umbp.kernels.staging import Staging
from umbp.kernels.tables import Window


def main() -> None:
    asked, (mover, ours) = options("gather_push"), kernels()
    for ranks in asked.ranks:
        for pages in asked.pages:
            world = Bytes(pages, asked.layers, ranks)
            buffers = [torch.zeros(world.size, dtype=torch.uint8, device=device) for device in world.devices]
            staging = Staging.of(
                world.offsets,
                world.sizes,
                world.sizes,
                world.bases[0],
                staging_base=np.array([buffer.data_ptr() for buffer in buffers], np.int64),
                staging_bytes=world.size,
                rank=0,
                device=world.device,
            )
            part, positions = slice(0, -(-pages // ranks)), np.arange(pages, dtype=np.int64)
            to_stage = np.tile(positions[part], (ranks, 1))
            pushed = Window.of(world.host.data_ptr(), world.page_offsets[part], to_stage, world.device)
            arrived, fused, plain = staging.window(positions, world.slots[0]), world.window(part), floor(world)
            for blocks in asked.blocks:
                push = seconds(
                    lambda w=pushed, t=staging, s=world, b=blocks: ours.gather_push(w, t, s.pads, rank=0, signal=0, blocks=b), world.device
                )
                scatter = seconds(lambda w=arrived, t=staging, b=blocks: ours.stage_scatter(w, t, blocks=b), world.device)
                direct = seconds(
                    lambda w=fused, s=world, b=blocks: ours.fused_read_push(w, s.group, s.pads, rank=0, signal=0, blocks=b), world.device
                )
                times = {"push_ms": round(push * 1e3, 4), "scatter_ms": round(scatter * 1e3, 4), "fused_ms": round(direct * 1e3, 4)}
                row("gather_push", mover, world, push + scatter, plain, blocks=blocks, gpus=len(set(world.devices)), **times)


if __name__ == "__main__":
    main()
