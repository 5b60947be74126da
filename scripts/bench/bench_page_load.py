#!/usr/bin/env python3
"""`page_load`: host pages into the KV slots of one rank, against a plain copy of the same bytes from pinned memory, in the same run.

Where there is no GPU, the reference is measured instead, on the CPU; the row says so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import emit

from umbp.kernels import reference
from umbp.kernels.tables import LayerGroup, Pads, Window

LATENT, INDEXER = 64 * 656, 64 * 132  # fp8 rows of one page and layer
REPEATS = 15


def kernels() -> tuple[str, Any]:
    """("kernel", the Triton kernels) on a GPU, else ("reference", what runs without one)."""
    if not torch.cuda.is_available():
        return "reference", reference
    from tests.kernels.copies import Kernels

    return "kernel", Kernels()


class Bytes:
    """Pinned host pages and KV tensors of ``layers`` layers for each rank: on GPU r if there are as many, else all on the first."""

    def __init__(self, pages: int, layers: int, ranks: int = 1) -> None:
        gpu = torch.cuda.is_available()
        several = gpu and torch.cuda.device_count() >= ranks > 1
        self.devices = [torch.device(f"cuda:{rank if several else 0}" if gpu else "cpu") for rank in range(ranks)]
        self.device, self.ranks, self.pages = self.devices[0], ranks, pages
        self.sizes = np.array([LATENT] * layers + [INDEXER] * layers, np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.object_bytes = int(self.sizes.sum())
        self.host = torch.empty(pages * self.object_bytes, dtype=torch.uint8, pin_memory=gpu)
        self.host.view(-1, 64).copy_(torch.arange(64, dtype=torch.uint8))
        self.kv = [[torch.zeros(pages * int(size), dtype=torch.uint8, device=device) for size in self.sizes] for device in self.devices]
        if several:
            for device in self.devices[1:]:
                torch.zeros(1, device=device).copy_(torch.zeros(1, device=self.device))  # makes torch map the peers
        random = np.random.default_rng(0)
        self.slots = np.array([random.permutation(pages) for _ in range(ranks)], np.int64)
        self.page_offsets = random.permutation(pages).astype(np.int64) * self.object_bytes
        self.pad = torch.zeros(ranks, 1024, dtype=torch.int64, device=self.device)
        self.bases = np.array([[part.data_ptr() for part in rank] for rank in self.kv], np.int64)
        self.group = LayerGroup.of(self.offsets, self.sizes, self.sizes, self.bases, device=self.device)
        self.pads = Pads.of(np.array([row.data_ptr() for row in self.pad], np.int64), self.device)

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.object_bytes

    def window(self, pages: slice = slice(None)) -> Window:
        return Window.of(self.host.data_ptr(), self.page_offsets[pages], self.slots[:, pages], self.device)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of `REPEATS` calls, after two."""
    taken = []
    for turn in range(REPEATS + 2):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            passed = start.elapsed_time(end) / 1e3
        else:
            begun = time.perf_counter()
            call()
            passed = time.perf_counter() - begun
        if turn >= 2:
            taken.append(passed)
    return statistics.median(taken)


def floor(world: Bytes) -> float:
    """Seconds of one plain copy of the same bytes, host to device."""
    target = torch.empty(world.size, dtype=torch.uint8, device=world.device)
    return seconds(lambda: target.copy_(world.host, non_blocking=True), world.device)


def row(bench: str, mover: str, world: Bytes, taken: float, plain: float, **more: Any) -> None:
    """One JSON line."""
    name = torch.cuda.get_device_name(0) if world.device.type == "cuda" else "cpu"
    emit(
        bench=bench,
        mover=mover,
        device=name,
        ranks=world.ranks,
        pages=world.pages,
        bytes=world.size,
        ms=round(taken * 1e3, 4),
        gb_s=round(world.size / taken / 1e9, 2),
        plain_copy_gb_s=round(world.size / plain / 1e9, 2),
        ratio=round(plain / taken, 3),
        **more,
    )


def options(text: str) -> argparse.Namespace:
    """What all these benchmarks take."""
    parser = argparse.ArgumentParser(description=f"{text} Prints one JSON line a row.")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 256, 2200] if torch.cuda.is_available() else [16])
    parser.add_argument("--layers", type=int, default=8, help="of one layer group")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 32, 64, 128] if torch.cuda.is_available() else [1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    return parser.parse_args()


def main() -> None:
    asked, (mover, ours) = options("page_load"), kernels()
    for pages in asked.pages:
        world = Bytes(pages, asked.layers)
        window, plain = world.window(), floor(world)
        for blocks in asked.blocks:
            taken = seconds(lambda w=window, s=world, b=blocks: ours.page_load(w, s.group, rank=0, blocks=b), world.device)
            row("page_load", mover, world, taken, plain, blocks=blocks)


if __name__ == "__main__":
    main()
