"""What a tier is: a place that keeps the bytes of pages for a while, and its in-memory fake.

Theory of operation. A page is named by its place word (namespace number and size: `umbp.store.index.place_word`) and its key. A tier may
forget any page at any time, but never gives other bytes than those that were written under that name; a page is there as a whole or not
at all. Answers are per item. Copies between tiers, and which pages are worth one, are others' business.

`tests/store/test_tier.py` is the contract: every tier passes it, and `MemoryTier` is the one to test others with.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from umbp.types import U8, Mask, ReadStatus, WriteStatus


class Tier(Protocol):
    """Keeps pages. ``keys`` are (n, 32) uint8; ``values`` and ``out`` (n, size) uint8, the size being that of ``place``."""

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of pages that it keeps."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that it keeps now."""

    def find(self, place: np.uint64, keys: U8) -> Mask:
        """Which it keeps; (n,) bool. A peek: no access for the policy."""

    def write(self, now: float, place: np.uint64, keys: U8, values: U8) -> U8:
        """Keep these; one `WriteStatus` an item. What is kept already stays as it is (EXISTS). Others go to make room, never these."""

    def read(self, now: float, place: np.uint64, keys: U8, out: U8) -> U8:
        """Copy what is kept into ``out``; one `ReadStatus` an item. Rows of what is not kept are left alone."""

    def remove(self, place: np.uint64, keys: U8) -> Mask:
        """Forget these; which were kept."""

    def evict(self, now: float, size_bytes: int) -> int:
        """Forget pages of the tier's choice until this many bytes are freed or none is left; bytes freed."""


class MemoryTier:
    """A tier in a dict: the one that has been read or written longest ago goes first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._pages: dict[tuple[int, bytes], bytes] = {}  # the longest unused first

    def __repr__(self) -> str:
        return f"<MemoryTier {len(self._pages)} pages, {self.used_bytes} of {self.capacity_bytes} bytes>"

    def find(self, place: np.uint64, keys: U8) -> Mask:
        """See `Tier`."""
        return np.fromiter(((int(place), key.tobytes()) in self._pages for key in keys), bool, len(keys))

    def write(self, now: float, place: np.uint64, keys: U8, values: U8) -> U8:
        """See `Tier`."""
        names = [(int(place), key.tobytes()) for key in keys]
        kept = set(names)
        return np.fromiter((self._write(name, value, kept) for name, value in zip(names, values, strict=True)), np.uint8, len(keys))

    def read(self, now: float, place: np.uint64, keys: U8, out: U8) -> U8:
        """See `Tier`."""
        status = np.full(len(keys), ReadStatus.MISS, np.uint8)
        for i, key in enumerate(keys):
            name = (int(place), key.tobytes())
            if name in self._pages:
                self._pages[name] = page = self._pages.pop(name)
                out[i] = np.frombuffer(page, np.uint8)
                status[i] = ReadStatus.HIT
        return status

    def remove(self, place: np.uint64, keys: U8) -> Mask:
        """See `Tier`."""
        return np.fromiter((self._forget((int(place), key.tobytes())) > 0 for key in keys), bool, len(keys))

    def evict(self, now: float, size_bytes: int) -> int:
        """See `Tier`."""
        freed = 0
        for name in list(self._pages):
            if freed >= size_bytes:
                break
            freed += self._forget(name)
        return freed

    def _write(self, name: tuple[int, bytes], value: U8, kept: set[tuple[int, bytes]]) -> WriteStatus:
        if name in self._pages:
            return WriteStatus.EXISTS
        if value.nbytes > self.capacity_bytes:
            return WriteStatus.TOO_LARGE
        for victim in [other for other in self._pages if other not in kept]:
            if self.used_bytes + value.nbytes <= self.capacity_bytes:
                break
            self._forget(victim)
        if self.used_bytes + value.nbytes > self.capacity_bytes:
            return WriteStatus.ALL_LEASED
        self._pages[name] = value.tobytes()
        self.used_bytes += value.nbytes
        return WriteStatus.STORED

    def _forget(self, name: tuple[int, bytes]) -> int:
        size = len(self._pages.pop(name, b""))
        self.used_bytes -= size
        return size
