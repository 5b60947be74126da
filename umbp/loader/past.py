"""Pages on this node's SSD that DRAM has no room for, read past it and moved to their slots, window by window.

Theory of operation. The loader's half of `umbp.client.straight`. A window of pages is read from the files into memory of this process, each
page verified, and all its layers are moved from there by the mover of pages that are not in the segment (`Mover.beside`): by the CPU, for a
GPU by way of its pinned buffers. They are moved ahead of the load's other pages and make no layer ready; they count if the pool says at the
end that they did until then, and are otherwise fetched like any other page. Why not read into the slots themselves: a page's layers lie in
as many tensors, in rows that are mostly no multiple of what direct I/O and checksums go by; the copy is a tenth of the disk's time.

*Deadlines*: as in `umbp.loader.streams`, the slots are claimed only while bytes move. A read that does not come back is left behind, with
its window's memory.
"""

from __future__ import annotations

import time

import numpy as np

from umbp.client import Namespace, straight
from umbp.loader.copies import Taken
from umbp.loader.handles import Load
from umbp.loader.mover import Mover
from umbp.store.file_refs import FileRefs
from umbp.store.ssd_format import padded
from umbp.store.ssd_reads import GOOD, UNREADABLE
from umbp.store.ssd_system import aligned
from umbp.types import I64, U8, Mask, ReadStatus

WINDOW_BYTES = 32 << 20


def may_read_past(namespace: Namespace) -> bool:
    """Whether this process may read from files of the SSD tier."""
    bond = namespace.operations.link.bond_or_none()
    return bond is not None and straight.able(bond)


class Past:
    """One load's way past DRAM. Used by the loader's thread."""

    def __init__(self, load: Load, namespace: Namespace, mover: Mover, taken: Taken) -> None:
        self._load, self._namespace, self._mover, self._taken = load, namespace, mover.beside, taken
        self._memory: U8 | None = None
        self._slots: I64 = np.empty(0, np.int64)

    def move(self, keys: U8, slots: I64, seconds: float) -> Mask:
        """Move those of these pages that can be had so to their slots; which of them are there, (n,) bool."""
        operations = self._namespace.operations
        codes = np.full(len(keys), ReadStatus.MISS.value, np.uint8)
        self._slots = slots
        self._namespace.run(straight.read(operations, keys, codes, np.arange(len(keys)), self._read, time.monotonic() + seconds))
        there: Mask = codes == ReadStatus.HIT.value
        return there

    def _read(self, refs: FileRefs, which: I64) -> U8:
        codes = np.full(len(which), UNREADABLE, np.uint8)
        size = refs.pages.size
        step = max(1, WINDOW_BYTES // padded(size))
        for start in range(0, len(which), step):
            part = np.arange(start, min(start + step, len(which)))
            load = self._load
            if load.over or load.cancelled or time.monotonic() > min(load.deadline, refs.until):
                break
            if self._memory is None:
                self._memory = np.frombuffer(aligned(min(step, len(which)) * padded(size)), np.uint8)
            data, offsets = self._memory, np.arange(len(part)) * padded(size)
            found = straight.read_refs(refs.only(part), [data[at : at + size] for at in offsets.tolist()], leave=True)
            if (found == straight.LEFT).any():
                self._memory = None  # a read may still write there
            good = np.flatnonzero(found == GOOD)
            with load.ahead():
                if len(good) and not self._mover.restore(load, data, offsets[good], self._slots[which[part[good]]], self._taken):
                    break
            codes[part] = found
        return codes
