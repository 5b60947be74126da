"""Pages of the SSD tier that go from one place to another: copied, listed there, and dead where they were. Cleaning, offload, promotion.

Theory of operation. `move` writes pages whose bytes are in memory as one record, and when it is on disk for good makes it what the index
leads to, for those that are still what they were; the others' copies are noted as dead. To policies, quotas and readers nothing has
changed. Everything here goes in portions of a few megabytes, so that whoever calls can keep to a budget of bytes a second.

`offload_steps` and `promote_steps` are about levels: see `umbp.store.ssd_levels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.store.index import W_PLACE
from umbp.store.ssd import SsdTier
from umbp.store.ssd_catalog import LOW, SHIFT, Where
from umbp.store.ssd_drive import AWAY, Drive
from umbp.store.ssd_folder import Full, note
from umbp.store.ssd_format import BLOCK, padded
from umbp.store.ssd_levels import can_take, shares
from umbp.store.ssd_records import Batch, Draft, outcome
from umbp.store.ssd_system import Steps, aligned
from umbp.types import I64, ReadStatus

PORTION_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of it: pages that are listed there now, bytes written; ``full``: the disk had no file for them."""

    pages: int = 0
    written_bytes: int = 0
    full: bool = False


def move(
    tier: SsdTier,
    now: float,
    drive: Drive,
    place: np.uint64,
    where: Where,
    good: I64,
    bodies: list[memoryview],
    *,
    straight: bool,
    spare: int,
) -> Steps[Moved]:
    """Write these pages of ``where``, whose bytes are in ``bodies``, to a disk once more and list them there instead.

    ``straight``: direct I/O takes the bodies as they are. ``spare``: files that are to stay free there.
    """
    digest = tier.naming.digest_of(int(place & LOW))
    if digest is None:
        return Moved()
    tier.name_on(now, drive, digest)
    ids, versions, size = where.ids[good], where.versions[good], where.pages.size
    keys = tier.catalog.table.entries[ids, :4].copy().view(np.uint8).reshape(-1, 32)
    draft = Draft(digest, size, keys, tier.catalog.whole[ids], [bodies[at] for at in good.tolist()], straight, tier.sequence)
    tier.sequence += len(ids)
    drive.waiting_bytes += draft.blocks * BLOCK
    try:
        future = tier.append(now, drive, [draft], spare=spare)
        yield [future]
    finally:
        drive.waiting_bytes -= draft.blocks * BLOCK
    placed, error = outcome(future)
    if error is not None and not isinstance(error, Full):
        drive.failed_write(now, error)
    pages = 0
    for record in placed:
        tier.ledger.wrote(drive, draft.blocks * BLOCK)
        # Of two that move a page at a time the later copy stays: at a start the last one counts, and if that were dead the page would be.
        same = tier.catalog.same(ids, versions) & (tier.catalog.sequence[ids] < record.pages["sequence"])
        if drive.state == AWAY:
            same[:] = False
        tier.ledger.relocate(now, ids[same], drive, record, same)
        record.file.listed += len(record.pages)
        pages += int(np.count_nonzero(same))
        dead = record.pages["sequence"][~same]
        if len(dead):
            yield [drive.write(now, note, drive.folder, np.full(len(dead), record.file.number, np.uint64), dead, True)]
    return Moved(pages, len(placed) * draft.blocks * BLOCK, isinstance(error, Full))


def offload_steps(tier: SsdTier, now: float, level: int) -> Steps[int]:
    """One portion of what is to go down from a level: bytes read and written. 0: there is nothing to do, or it cannot be done now."""
    levels = tier.levels
    if not levels.wants_offload(level):
        return 0
    ids = levels.next_down(tier.catalog, tier.ledger, level)
    if not len(ids):
        return 0
    place = np.uint64(tier.catalog.table.entries[ids[0], W_PLACE])
    size, each = int(place >> SHIFT), padded(int(place >> SHIFT))
    below = levels.below(now, level, size)
    if not below:
        return 0
    count = max(1, min(len(ids), PORTION_BYTES // each, *(drive.folder.record_pages(size) for _, able in below for drive in able)))
    levels.put_back(tier.catalog, level, ids[count:])
    ids = ids[:count]
    if _capped(tier, count * each):
        return 0
    lower, able = next((pair for pair in below if pair[0].room_bytes >= count * each), below[-1])
    if lower.room_bytes < count * each:  # all below is full: what is wanted least goes, which may be on this level
        return tier.ledger.evict(now, count * each, 0, np.empty(0, np.int64))
    where = tier.catalog.where_ids(ids)
    memory, whole = aligned(count * each), size % BLOCK == 0
    bodies = [memory[at * each :][:size] for at in range(count)]
    keys = tier.catalog.table.entries[ids, :4].copy().view(np.uint8).reshape(-1, 32)
    status = yield from tier.read_steps(now, place, keys, bodies, straight=whole, asked=False)
    good = np.flatnonzero((status == ReadStatus.HIT) & tier.catalog.same(where.ids, where.versions))
    if not len(good):
        return count * each if (status != ReadStatus.BUSY).any() else 0
    drive = able[_stripe(tier, able)]
    moved = yield from move(tier, now, drive, place, where, good, bodies, straight=whole, spare=1)
    if moved.full and ((yield from _free_an_empty_file(tier, now, drive)) or (yield from tier.free_a_file(now, drive))):
        moved = yield from move(tier, now, drive, place, where, good, bodies, straight=whole, spare=1)
    levels.every[level].offloaded_pages += moved.pages
    levels.every[level].offloaded_bytes += moved.pages * each
    return (count + moved.pages) * each if moved.pages else 0


def promote_steps(tier: SsdTier, now: float, batch: Batch) -> Steps[int]:
    """Write those of these pages that are on lower levels to the first one, as far as there is room; how many that were."""
    levels, first, moved = tier.levels, tier.levels.every[0], 0
    able = [drive for drive in first.drives if can_take(drive, now, batch.size)]
    found = tier.catalog.find(batch.place, batch.keys)
    which = np.flatnonzero(found.hit)
    which = which[np.unique(found.ids[which], return_index=True)[1]]
    which = which[levels.levels_of(tier.catalog, tier.ledger, found.ids[which]) > 0]
    if not able or not len(which):
        return 0
    each = padded(batch.size)
    step = max(1, min(PORTION_BYTES // each, *(drive.folder.record_pages(batch.size) for drive in able)))
    for start in range(0, len(which), step):
        some = which[start : start + step]
        if first.room_bytes < len(some) * each or _capped(tier, len(some) * each):
            break
        some = some[tier.catalog.same(found.ids[some], found.versions[some])]
        if not len(some):
            continue
        where, from_levels = tier.catalog.where_ids(found.ids[some]), levels.levels_of(tier.catalog, tier.ledger, found.ids[some])
        bodies = [batch.bodies[at] for at in some.tolist()]
        drive, every = able[_stripe(tier, able)], np.arange(len(some))
        done = yield from move(tier, now, drive, batch.place, where, every, bodies, straight=batch.straight, spare=1)
        if done.full and (yield from _free_an_empty_file(tier, now, drive)):
            done = yield from move(tier, now, drive, batch.place, where, every, bodies, straight=batch.straight, spare=1)
        if not done.pages:
            break
        moved += done.pages
        for at in np.unique(from_levels).tolist():
            levels.every[at].promoted_pages += int(np.count_nonzero(from_levels == at))
    return moved


def _free_an_empty_file(tier: SsdTier, now: float, drive: Drive) -> Steps[bool]:
    """Give one back in which no page is alive; False if there is none."""
    empty = drive.folder.spent_or_none()
    return empty is not None and (yield from tier.free_steps(now, drive, empty))


def _stripe(tier: SsdTier, disks: list[Drive]) -> int:
    """Which of these disks, by the striping policy."""
    sizes, used = shares(disks)
    return tier.striping.choose(sizes, used, np.array([drive.waiting_bytes for drive in disks], np.float64))


def _capped(tier: SsdTier, size_bytes: int) -> bool:
    """Whether writing so many bytes more would be above the cap of the day."""
    cap = tier.ledger.day_bytes_max
    return bool(cap) and tier.ledger.today() + size_bytes > cap
