"""Checksums of objects: xxh3-64 over the bytes. 0 stands for "none yet", so a sum of 0 is said as 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from umbp.types import I64, U8, U64


def checksum(data: Any) -> int:
    """Of one buffer."""
    return xxhash.xxh3_64_intdigest(data) or 1


class Growing:
    """Checksums of pages of ``size`` bytes at ``offsets`` (m,) of a buffer whose bytes come in parts.

    As far as a page's parts follow one another they are summed when they come, while they are in cache; the rest when all are there.
    ``sums`` (m,): of pages that are whole, 0 of others. Parts of different pages may be told of by different threads.
    """

    def __init__(self, data: U8, offsets: I64, size: int) -> None:
        self._data, self._offsets, self._size = data.data, offsets.tolist(), size
        self._states = [xxhash.xxh3_64() for _ in self._offsets]
        self._summed, self._there = [0] * len(self._offsets), [0] * len(self._offsets)
        self.sums = np.zeros(len(self._offsets), np.uint64)

    def __repr__(self) -> str:
        return f"<Growing {np.count_nonzero(self.sums)} of {len(self.sums)} pages whole>"

    def came(self, page: int, start: int, stop: int) -> None:
        """Bytes [start, stop) of this page are there, for the first time."""
        self._there[page] += stop - start
        whole = self._there[page] == self._size
        if start == self._summed[page] or whole:
            end = self._size if whole else stop
            at = self._offsets[page]
            self._states[page].update(self._data[at + self._summed[page] : at + end])
            self._summed[page] = end
        if whole:
            self.sums[page] = self._states[page].intdigest() or 1


def checksums(data: U8, offsets: I64, sizes: I64) -> U64:
    """One for each (offset, size) of a buffer, shape (n,)."""
    digest, view = xxhash.xxh3_64_intdigest, data.data
    pairs = zip(offsets.tolist(), sizes.tolist(), strict=True)
    return np.fromiter((digest(view[offset : offset + size]) or 1 for offset, size in pairs), np.uint64, len(offsets))
