"""A small world for kernels: a host segment, KV tensors and pads of several ranks in one process, with guard bytes everywhere.

What must come out is computed by NumPy slices here, for kernel and reference alike; every byte of every tensor is compared, so a byte
written where none belongs is found too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tests.kernels.cases import Case
from umbp.kernels.tables import CHANNEL_BYTES, LINE_BYTES, LayerGroup, Pads, Tile, Window

CHANNEL = CHANNEL_BYTES // 8  # words: arrived, then on lines of their own the gate and what was refused
GATE, REFUSED = LINE_BYTES // 8, 2 * LINE_BYTES // 8


class World:
    """Tensors of a case on a device, filled with bytes that differ everywhere. Two worlds of one case are equal."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        random = np.random.default_rng(case.seed)
        self.case, self.device = case, device
        aligned = next(align for align in (16, 8, 4) if not any(size % align for size in (*case.sizes, case.slack)))
        slot_count = case.pages + 3
        self.sizes = np.array(case.sizes, np.int64)
        self.strides = self.sizes + case.slack
        # an object has a hole before each run, and holes lie between objects
        self.object_offset = np.cumsum(self.sizes + aligned) - self.sizes
        object_bytes = int(self.object_offset[-1] + self.sizes[-1]) + aligned
        order = random.permutation(max(1, case.pages))[: case.pages]
        self.page_offsets = case.host_shift + (order * -(-object_bytes // 16) * 16).astype(np.int64)
        host_bytes = case.host_shift + max(1, case.pages) * -(-object_bytes // 16) * 16
        self.host_start = _bytes(random, host_bytes)
        self.kv_start = [[_bytes(random, slot_count * int(s)) for s in self.strides] for _ in range(case.ranks)]
        self.slots = np.array([random.permutation(slot_count)[: case.pages] for _ in range(case.ranks)], np.int64).reshape(case.ranks, -1)
        self.slots[random.random(self.slots.shape) < case.unwanted] = -1
        self.host = _host(self.host_start, device)
        self.kv = [[torch.from_numpy(part.copy()).to(device) for part in rank] for rank in self.kv_start]
        self.pads = [torch.zeros(4 * CHANNEL, dtype=torch.int64, device=device) for _ in range(case.ranks)]

    def window(self) -> Window:
        return Window.of(self.host.data_ptr(), self.page_offsets, self.slots, self.device)

    def group(self) -> LayerGroup:
        bases = np.array([[part.data_ptr() for part in rank] for rank in self.kv], np.int64)
        tile = tile_of(self.case, self.device)
        return LayerGroup.of(self.object_offset, self.sizes, self.strides, bases, device=self.device, tile=tile)

    def pad_table(self, *, tags: Any = None, without: int | None = None) -> Pads:
        addresses = np.array([0 if rank == without else pad.data_ptr() for rank, pad in enumerate(self.pads)], np.int64)
        return Pads.of(addresses, self.device, tags=None if tags is None else np.array(tags, np.int64))

    def pad_words(self, rank: int) -> dict[int, int]:
        """What is not 0 in a pad."""
        return {word: value for word, value in enumerate(self.pads[rank].tolist()) if value}

    def wipe(self) -> None:
        """KV as it was at the start."""
        for rank, parts in enumerate(self.kv_start):
            for run, part in enumerate(parts):
                self.kv[rank][run].copy_(torch.from_numpy(part))

    def loaded(self, ranks: range, pages: Iterable[int] | None = None) -> list[list[np.ndarray[Any, Any]]]:
        """KV of all ranks after ``ranks`` have received their pages, or only these."""
        kv = [[part.copy() for part in rank] for rank in self.kv_start]
        for rank in ranks:
            for host, run, at in self._places(rank, pages):
                kv[rank][run][at : at + self.sizes[run]] = self.host_start[host : host + self.sizes[run]]
        return kv

    def stored(self, rank: int) -> np.ndarray[Any, Any]:
        """The host segment after ``rank`` has stored its pages."""
        segment = self.host_start.copy()
        for host, run, at in self._places(rank):
            segment[host : host + self.sizes[run]] = self.kv_start[rank][run][at : at + self.sizes[run]]
        return segment

    def _places(self, rank: int, pages: Iterable[int] | None = None) -> list[tuple[int, int, int]]:
        return [
            (int(self.page_offsets[page] + self.object_offset[run]), run, int(self.slots[rank, page] * self.strides[run]))
            for page in (range(self.case.pages) if pages is None else pages)
            for run in range(len(self.sizes))
            if self.slots[rank, page] >= 0
        ]

    def check(self, *, kv: list[list[np.ndarray[Any, Any]]] | None = None, host: np.ndarray[Any, Any] | None = None) -> None:
        """Every byte of host segment and KV is as given; None means as at the start."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        assert np.array_equal(self.host.cpu().numpy(), self.host_start if host is None else host), "host segment"
        for rank, parts in enumerate(self.kv_start if kv is None else kv):
            for run, part in enumerate(parts):
                got = self.kv[rank][run].cpu().numpy()
                if not np.array_equal(got, part):
                    bad = np.flatnonzero(got != part)
                    raise AssertionError(f"rank {rank} run {run}: {len(bad)} bytes differ, first at {bad[0]} of {len(part)}")


def tile_of(case: Case, device: str) -> Tile | None:
    """The case's own in the interpreter, where small ones show more; the device's on a GPU."""
    return Tile(*case.tile) if device == "cpu" else None


def _bytes(random: np.random.Generator, size: int) -> np.ndarray[Any, Any]:
    return random.integers(0, 256, size, dtype=np.uint8)


def _host(start: np.ndarray[Any, Any], device: str) -> torch.Tensor:
    host = torch.from_numpy(start.copy())
    return host if device == "cpu" else host.pin_memory()
