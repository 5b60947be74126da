"""Cleaning: what is still wanted in a segment file is copied to another, so that its space can be used again; in portions.

Theory of operation. Pages die one by one, space comes back file by file. When a disk has few files left to begin, the cleaning policy names
the next one; its live pages are read, verified, written as new records (with their sequence numbers anew, so that the copy is the one that
counts) and listed at the new place, if they are still listed at the old one. An empty file is freed. A file that is too full to be worth it
is left; a write that then finds no room empties one without copying (`SsdTier.free_a_file`): writes never wait for cleaning.

A portion is a few megabytes, so that whoever calls can keep to a budget of bytes a second between two.
"""

from __future__ import annotations

import numpy as np

from umbp.store.index import W_PLACE
from umbp.store.ssd import SsdTier
from umbp.store.ssd_catalog import Where
from umbp.store.ssd_drive import AWAY, Drive
from umbp.store.ssd_format import BLOCK, padded
from umbp.store.ssd_moving import PORTION_BYTES, move
from umbp.store.ssd_reads import DAMAGED, GOOD, UNREADABLE, read_run, runs
from umbp.store.ssd_records import SegmentFile
from umbp.store.ssd_system import Steps, aligned
from umbp.types import U8

FILES_LOW = 4  # cleaning begins when fewer files than this can be begun
LIVE_SHARE_MAX = 0.75  # copying more than this gains too little


def wanted(tier: SsdTier, now: float, drive: Drive) -> bool:
    """Whether there is something to clean on this disk now."""
    return bool(drive.state != AWAY and drive.may_write(now) and drive.folder.room_files < FILES_LOW and _next(tier, now, drive))


def _next(tier: SsdTier, now: float, drive: Drive) -> SegmentFile | None:
    limit = LIVE_SHARE_MAX * drive.folder.segment_bytes
    return next((file for file in tier.cleanable(now, drive) if file.live_bytes <= limit), None)


def clean_steps(tier: SsdTier, now: float, drive: Drive) -> Steps[int]:
    """One portion: bytes read and written. 0: there is nothing to do, or it cannot be done now."""
    file = _next(tier, now, drive)
    if file is None:
        return 0
    if not file.live_pages:
        freed = yield from tier.free_steps(now, drive, file)
        return BLOCK if freed else 0
    ids = tier.catalog.ids_of_file(file)
    place = int(tier.catalog.table.entries[ids[0], W_PLACE])
    each = padded(place >> 32)
    ids = ids[tier.catalog.table.entries[ids, W_PLACE] == np.uint64(place)][: max(1, PORTION_BYTES // each)]
    if tier.ledger.day_bytes_max and tier.ledger.today() + len(ids) * each > tier.ledger.day_bytes_max:
        return 0
    where = tier.catalog.where_ids(ids)
    memory = aligned(len(ids) * each)
    bodies = [memory[at * each :][: where.pages.size] for at in range(len(ids))]
    file.readers += 1
    try:
        codes = yield from _read(now, drive, file, where, bodies)
        good = np.flatnonzero(codes == GOOD)
        if len(good) < len(ids):
            damaged = int(np.count_nonzero(codes == DAMAGED))
            tier.counters.damaged += damaged
            tier.counters.unreadable += len(ids) - len(good) - damaged
            bad = ids[codes != GOOD]
            tier.ledger.forget(now, bad[tier.catalog.same(bad, where.versions[codes != GOOD])], evicted=False)
        if len(good):
            moved = yield from move(
                tier, now, drive, np.uint64(place), where, good, bodies, straight=where.pages.size % BLOCK == 0, spare=0
            )
            tier.counters.cleaned_bytes += moved.written_bytes
    finally:
        file.readers -= 1
    return 2 * len(ids) * each


def _read(now: float, drive: Drive, file: SegmentFile, where: Where, bodies: list[memoryview]) -> Steps[U8]:
    codes = np.full(len(bodies), UNREADABLE, np.uint8)
    straight = where.pages.size % BLOCK == 0
    jobs = []
    for run in runs(where.pages):
        pages, out = where.pages.only(run), [bodies[at] for at in run.tolist()]
        jobs.append((run, drive.read(now, read_run, drive.system, file.fd, drive.folder.direct, pages, out, straight)))
    yield [future for _, future in jobs]
    for run, future in jobs:
        if future.exception() is None:
            codes[run] = future.result()
    return codes
