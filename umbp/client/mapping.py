"""A pool's files in shared memory as a client maps them: the segment, and the index of the SSD tier."""

from __future__ import annotations

import os
import threading

from umbp.errors import SegmentError, Unavailable
from umbp.store import memory, segment, ssd_table
from umbp.store.index import IndexReader
from umbp.store.segment import Segment


def here(path: str) -> str:
    """Where a file of the pool's is for this process: ``UMBP_SHM_DIR`` names the folder, where it is not the pool's."""
    return os.path.join(os.environ.get("UMBP_SHM_DIR", os.path.dirname(path)), os.path.basename(path))


def mapped(path: str, boot: int, holder: int, *, writes: bool) -> Segment:
    """The segment of the pool of this boot. Unavailable, with what to do, if it is not there."""
    try:
        found = segment.attach(path, owner=False, holder=holder, writes=writes)
    except (OSError, SegmentError) as error:
        raise Unavailable(
            f"the pool's memory {path} cannot be mapped ({error}): share its folder with this container, or name it by UMBP_SHM_DIR"
        ) from error
    if found.boot != boot:
        found.close()
        raise Unavailable(f"{path} is another pool's memory: share the folder of this one with this container, or name it by UMBP_SHM_DIR")
    memory.populate(found.head, write=False, threads=1)
    # The first pass over pages that are not in this process's page tables costs twice a warm one, so they are entered ahead of use.
    threading.Thread(target=_populate, args=(found,), name="umbp-populate", daemon=True).start()
    return found


def ssd_index(path: str) -> IndexReader | None:
    """The index of the SSD tier, if there is a path of one; without it where pages are is asked by a call."""
    if not path:
        return None
    try:
        return ssd_table.reader(here(path))
    except (OSError, SegmentError):
        return None


def _populate(found: Segment) -> None:
    mapping = found.data
    keep = mapping.array  # while this is held the memory stays mapped
    advice = memory.MADV_POPULATE_WRITE if keep.flags.writeable else memory.MADV_POPULATE_READ
    for start in range(0, found.geometry.data_bytes, memory.SLICE_BYTES):
        if mapping.array is not keep:  # closed meanwhile
            return
        mapping.advise(start, min(memory.SLICE_BYTES, found.geometry.data_bytes - start), advice)
