#!/usr/bin/env python3
"""`fused_read_push`: one rank's window, 1/N of the pages, into the slots of N ranks; against the same rank reading all pages alone.

``ms`` is what one rank needs for its window; ``solo_ms`` what it needs for all pages with `page_load`. With N GPUs or more, the
readers' slots are on N of them and the pushes cross the fabric; with fewer, all are on one and only the host link is saved. One rank
works at a time: what N ranks do to each other is not measured here.
"""

from __future__ import annotations

from bench_page_load import Bytes, floor, kernels, options, row, seconds


def main() -> None:
    asked, (mover, ours) = options("fused_read_push"), kernels()
    for ranks in asked.ranks:
        for pages in asked.pages:
            world = Bytes(pages, asked.layers, ranks)
            plain, everything, part = floor(world), world.window(), world.window(slice(0, -(-pages // ranks)))
            for blocks in asked.blocks:
                solo = seconds(lambda w=everything, s=world, b=blocks: ours.page_load(w, s.group, rank=0, blocks=b), world.device)
                taken = seconds(
                    lambda w=part, s=world, b=blocks: ours.fused_read_push(w, s.group, s.pads, rank=0, signal=0, blocks=b), world.device
                )
                spread = len(set(world.devices))
                row("fused_read_push", mover, world, taken, plain, blocks=blocks, solo_ms=round(solo * 1e3, 4), gpus=spread)


if __name__ == "__main__":
    main()
