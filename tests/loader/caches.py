"""A small paged KV cache on the CPU, with bytes that name their page, layer and component, for tests of the loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import umbp
from umbp.types import I64, Mask

PAGES = 48
TOKENS = 8
# Rows of 584 and 656 bytes as fp8 latents have, and a component that every second layer skips.
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "latent": ((584, 584, 584, 584), torch.uint8),
    "indexer": ((656, 0, 656, 0), torch.uint8),
    "window": ((0, 6, 6, 6), torch.bfloat16),
}
GUARD = 0xA5


class Cache:
    """Tensors of one rank. Slot 0 and the last one are guards that nobody is given.

    ``device``: where they are. `views` of tensors on a GPU are copies, taken before each look and brought there after each change.
    """

    def __init__(self, shapes: Any = None, pages: int = PAGES, make: Any = torch.empty, device: str = "cpu") -> None:
        self.pages = pages
        self.tensors: dict[str, list[torch.Tensor | None]] = {}
        for name, (widths, kind) in (shapes or SHAPES).items():
            rows = [make((pages * TOKENS, width), dtype=kind) if width else None for width in widths]
            self.tensors[name] = list(rows)
        self.views = {
            (name, layer): tensor.view(torch.uint8).reshape(pages, -1).numpy()
            for name, tensors in self.tensors.items()
            for layer, tensor in enumerate(tensors)
            if tensor is not None
        }
        self.layers = max(layer for _, layer in self.views) + 1
        self._there: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and what its view looks at
        if device != "cpu":
            for tensors in self.tensors.values():
                for layer, tensor in enumerate(tensors):
                    if tensor is not None:
                        there = tensors[layer] = tensor.to(device)
                        self._there.append((there, tensor))
        self.wipe()

    @property
    def layout(self) -> umbp.Layout:
        return umbp.Layout.of(self.tensors, page_tokens=TOKENS)

    def namespace(self, pool: umbp.Pool, **identity: Any) -> umbp.Namespace:
        return pool.namespace(**{"model": "m", "page_tokens": TOKENS, "layout": self.layout, "replicated": True, **identity})

    def wipe(self, value: int = GUARD) -> None:
        for view in self.views.values():
            view[:] = value
        self._push()

    def _push(self) -> None:
        for there, here in self._there:
            there.copy_(here)
        if self._there:
            torch.cuda.synchronize()

    def _pull(self) -> None:
        for there, here in self._there:
            here.copy_(there)

    def write(self, numbers: Any, slots: Any) -> None:
        """What a forward pass would leave there for these pages."""
        for (name, layer), view in self.views.items():
            for number, slot in zip(list(numbers), list(slots), strict=True):
                view[slot] = row_of(name, layer, number, view.shape[1])
        self._push()

    def has(self, numbers: Any, slots: Any, layer: int | None = None) -> Mask:
        """Which of these pages are in their slots, byte for byte."""
        self._pull()
        pairs = list(zip(list(numbers), list(slots), strict=True))
        good = np.ones(len(pairs), bool)
        for (name, at), view in self.views.items():
            if layer is None or at == layer:
                good &= np.array([(view[slot] == row_of(name, at, number, view.shape[1])).all() for number, slot in pairs], bool)
        return good

    def untouched(self, slots: Any, value: int = GUARD) -> bool:
        """Whether all other slots still are what `wipe` left."""
        self._pull()
        others = np.setdiff1d(np.arange(self.pages), np.asarray(slots))
        return all(bool((view[others] == value).all()) for view in self.views.values())


def row_of(name: str, layer: int, number: int, nbytes: int) -> np.ndarray:
    """One page of one component in one layer."""
    seed = sum(name.encode()) * 1_000_003 + layer * 7919 + number
    return ((np.arange(nbytes, dtype=np.int64) * 31 + seed * 131 + (np.arange(nbytes) >> 8) * seed) % 251).astype(np.uint8)


def keys_of(numbers: Any) -> np.ndarray:
    """(n, 32) keys; their first eight bytes are spread as a digest's are."""
    words = np.zeros((len(list(numbers)), 4), np.uint64)
    with np.errstate(over="ignore"):
        words[:, 0] = np.array(list(numbers), np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(7)
    words[:, 1] = np.array(list(numbers), np.uint64)
    return words.view(np.uint8).reshape(-1, 32)


def slots_for(seed: int, count: int, pages: int = PAGES) -> I64:
    """Distinct slots in random order, without the guards."""
    return np.random.default_rng(seed).permutation(np.arange(1, pages - 1))[:count].astype(np.int64)
