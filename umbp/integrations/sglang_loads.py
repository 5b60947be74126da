"""The loads of SGLang's batches: what its forward waits on, layer by layer, and how keys that are asked for twice are taken apart."""

from __future__ import annotations

import numpy as np

from umbp.loader import Load
from umbp.types import I64, U8


class LayerLoads:
    """The loads of each batch, as what SGLang's pools wait on: it stands where SGLang's own layer counter would."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.producer_index = -1
        self.consumer_index = -1
        self._batches: dict[int, list[Load]] = {}

    def begin(self, loads: list[Load]) -> int:
        """A new batch's number."""
        self.producer_index += 1
        self._batches[self.producer_index] = loads
        return self.producer_index

    def set_consumer(self, index: int) -> None:
        """The forward that comes next is this batch's."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Before the forward reads this layer. A layer that will not come does not raise: `end` tells."""
        for load in self._batches.get(self.consumer_index, ()):
            load.wait(min(layer, load.layers - 1))

    def end(self, index: int) -> list[Load]:
        """The batch's loads; it is forgotten."""
        return self._batches.pop(index, [])

    def reset(self) -> list[Load]:
        """All loads that were not ended; back to the start."""
        loads = [load for batch in self._batches.values() for load in batch]
        self._batches.clear()
        self.producer_index = self.consumer_index = -1
        return loads


def distinct(keys: U8) -> list[I64]:
    """Indices of keys such that each part has each key once: the first part all distinct keys, the next the second ones, and so on."""
    words = np.ascontiguousarray(keys).view(np.uint64)[:, 0]  # of a digest, so that two keys of one word are as likely as a broken sha256
    left: I64 = np.arange(len(keys))
    parts = []
    while len(left):
        _, first = np.unique(words[left], return_index=True)
        first.sort()
        parts.append(left[first])
        left = np.delete(left, first)
    return parts


def never(reason: str) -> Load:
    """A load of one page that has failed already."""
    load = Load(1, 1, 0.0)
    load.end(np.zeros(1, bool), reason)
    return load
