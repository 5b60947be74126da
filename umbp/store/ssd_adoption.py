"""What the disks hold at start, or when one is back: which of it counts, and into the index with it.

Theory of operation. Every page found in a segment file has a sequence number. Of the copies of a page (one name in several places: it was
copied by cleaning, or evicted and written again) the last one counts, and if that one was removed all of them are dead. Of a namespace that
was flushed nothing below the mark counts, the highest mark of any disk. What is over the limits goes, the oldest first. Whatever is on disk
and does not count is noted there, so that the next start need not find out again. Pages of namespaces that nobody knows are left alone.

Cost: a sort and some twenty passes over the pages found, about a second for a million.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from umbp.store.index import hashes
from umbp.store.ssd import SsdTier
from umbp.store.ssd_drive import Drive
from umbp.store.ssd_folder import Found, note
from umbp.store.ssd_format import PAGE, encode_meta, padded
from umbp.store.ssd_ledger import pages_bytes
from umbp.store.ssd_records import Placed
from umbp.store.ssd_system import Steps
from umbp.types import I64, U64, Mask

NAMESPACES_MANY = 4096
SEQUENCES_SKIPPED = 1 << 20  # so that no number of a record that was never answered is given out again


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages found: (n,) each. ``file`` indexes ``files``."""

    files: list[tuple[Drive, Found]]
    pages: Any
    file: I64
    number: I64
    counts: Mask


def adopt_steps(tier: SsdTier, now: float, opened: dict[Drive, list[Found]]) -> Steps[int]:
    """List what counts of the disks that were just opened; how many pages. Those that are listed already stay as they are.

    What takes long is done in a thread, and files are listed one by one, so that others have their turns in between.
    """
    for drive in opened:
        for digest, known in drive.folder.meta.namespaces.items():
            tier.flushed[digest] = max(tier.flushed.get(digest, 0), known.flushed)
    for drive, held in opened.items():
        _tell_flushes(tier, now, drive, held)
    files = [(drive, each) for drive, held in opened.items() for each in held]
    meanings = [_meaning(tier, each) for _, each in files]
    if files:
        sorting = files[0][0].read(now, _judged, files, meanings, tier.catalog.table.seed)
        yield [sorting]
        found, alive, killed = sorting.result()
        tier.sequence = max(tier.sequence, int(found.pages["sequence"].max(initial=0)) + SEQUENCES_SKIPPED)
        alive &= ~_listed(tier, found)
        _keep_within(tier, found, alive)
        count = yield from _enter(tier, now, found, alive)
        _note_dead(now, found, found.counts & ~alive & ~killed)
        tier.counters.found_pages += count
        tier.counters.orphans += len(alive) - count
    tier.sequence = max(tier.sequence, *tier.flushed.values(), 1)
    for drive, held in opened.items():
        _tell_flushes(tier, now, drive, held)  # of meanwhile
        day, total = drive.folder.last
        if day == int(tier.ledger.clock() // 86_400):
            tier.ledger.wrote_before(drive, total)
    return count if files else 0


def _meaning(tier: SsdTier, found: Found) -> tuple[I64, U64]:
    """For each namespace of a file its number now, -1 where it has none, and the mark below which nothing counts."""
    tier.counters.torn += found.contents.torn
    names = found.contents.namespaces
    numbers = [-1 if (number := tier.naming.number_of(name)) is None else number for name in names]
    return np.array([*numbers, -1], np.int64), np.array([*(tier.flushed.get(name, 0) for name in names), 0], np.uint64)


def _judged(files: list[tuple[Drive, Found]], meanings: list[tuple[I64, U64]], seed: np.uint64) -> tuple[_Pages, Mask, Mask]:
    """In a thread: all pages found, which of them count, and which have a note that they are no more."""
    found = _gather(files, meanings)
    killed = _killed(found)
    order, newest = _newest(found, seed)
    alive = np.zeros(len(found.pages), bool)
    alive[order[newest]] = ~killed[order[newest]] & found.counts[order[newest]]
    return found, alive, killed


def _tell_flushes(tier: SsdTier, now: float, drive: Drive, found: list[Found]) -> None:
    """A disk learns of flushes that it missed while it was away, and forgets namespaces of which it holds nothing when they are many."""
    known = drive.folder.meta.namespaces
    if len(known) > NAMESPACES_MANY:
        held = {digest for each in found for digest in each.contents.namespaces}
        drive.folder.meta.namespaces = known = {digest: each for digest, each in known.items() if digest in held}
    missed = [digest for digest, each in known.items() if each.flushed < tier.flushed[digest]]
    for digest in missed:
        known[digest].flushed = tier.flushed[digest]
    if missed:
        drive.write(now, drive.folder.write_meta, encode_meta(drive.folder.meta))


def _gather(files: list[tuple[Drive, Found]], meanings: list[tuple[I64, U64]]) -> _Pages:
    pages, file, number, counts = [np.zeros(0, PAGE)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    for at, ((_, each), (numbers, marks)) in enumerate(zip(files, meanings, strict=True)):
        mine = each.contents.pages
        which = np.minimum(mine["namespace"], len(numbers) - 1)
        pages.append(mine)
        file.append(np.full(len(mine), at))
        number.append(numbers[which])
        counts.append((numbers[which] >= 0) & (mine["sequence"] >= marks[which]))
    return _Pages(files, np.concatenate(pages), np.concatenate(file), np.concatenate(number), np.concatenate(counts))


def _killed(found: _Pages) -> Mask:
    """Which have a note that they are no more."""
    killed = np.zeros(len(found.pages), bool)
    ends = np.searchsorted(found.file, np.arange(len(found.files) + 1))
    for at, (drive, each) in enumerate(found.files):
        numbers, sequences = drive.folder.dead
        mine = sequences[numbers == np.uint64(each.file.number)]
        if len(mine):
            part = slice(int(ends[at]), int(ends[at + 1]))
            killed[part] = np.isin(found.pages["sequence"][part], mine)
    return killed


def _words(pages: Any) -> U64:
    return np.frombuffer(np.ascontiguousarray(pages["key"]).tobytes(), np.uint64).reshape(-1, 4)


def _newest(found: _Pages, seed: np.uint64) -> tuple[I64, Mask]:
    """An order in which copies of a page follow each other, and in that order whether each is the last of its page."""
    words = _words(found.pages)
    number = found.number.astype(np.uint64)
    hashed = hashes(words, number, seed)
    order = np.lexsort((found.pages["sequence"], hashed))
    h, w, n = hashed[order], words[order], number[order]
    same = (h[1:] == h[:-1]) & (n[1:] == n[:-1]) & (w[1:] == w[:-1]).all(axis=1)
    return order, np.r_[~same, np.ones(min(1, len(order)), bool)]


def _listed(tier: SsdTier, found: _Pages) -> Mask:
    """Which are in the index by another copy: a disk that is back has pages that were written elsewhere meanwhile."""
    listed = np.zeros(len(found.pages), bool)
    if tier.catalog.count:
        places = _places(found)
        words = _words(found.pages)
        for place in np.unique(places).tolist():
            mine = np.flatnonzero(places == place)
            listed[mine] = tier.catalog.table.find(words[mine], place & 0xFFFF_FFFF, np.uint64(place)).hit
    return listed


def _places(found: _Pages) -> U64:
    """The place words of pages; those of nobody get number 2^32 - 1, which no namespace has."""
    places: U64 = found.pages["size"].astype(np.uint64) << np.uint64(32) | (found.number & 0xFFFF_FFFF).astype(np.uint64)
    return places


def _keep_within(tier: SsdTier, found: _Pages, alive: Mask) -> None:
    """The oldest go where there is more than the limits allow."""
    ids = np.flatnonzero(alive)
    ids = ids[np.argsort(found.pages["sequence"][ids])[::-1]]
    sizes = -(-found.pages["size"][ids].astype(np.int64) // padded(1)) * padded(1)
    limit = sum(pages_bytes(drive.folder) for drive in tier.drives)  # also of those that are still to be opened
    over = (np.cumsum(sizes) + tier.used_bytes > limit) | (np.arange(len(ids)) >= tier.catalog.free_ids)
    alive[ids[over]] = False


def _enter(tier: SsdTier, now: float, found: _Pages, alive: Mask) -> Steps[int]:
    """File by file, the one written first first, so that the eviction policy takes them for as old as they are."""
    count, places = 0, _places(found)
    ends = np.searchsorted(found.file, np.arange(len(found.files) + 1))
    first = [int(each.contents.pages["sequence"].min(initial=0)) for _, each in found.files]
    for at in np.argsort(np.array(first, np.int64), kind="stable").tolist():
        drive, each = found.files[at]
        part = slice(int(ends[at]), int(ends[at + 1]))
        each.file.written_at = now
        for place in np.unique(places[part][alive[part]]).tolist():
            mine = alive[part] & (places[part] == place)
            shown = tier.ledger.enter(now, np.uint64(place), drive, Placed(each.file, found.pages[part]), mine)
            alive[part.start + np.flatnonzero(mine)[~shown]] = False
            count += int(np.count_nonzero(shown))
        yield []
    tier.counters.stored -= count
    return count


def _note_dead(now: float, found: _Pages, dead: Mask) -> None:
    for at in np.unique(found.file[dead]).tolist():
        drive, each = found.files[at]
        sequences = found.pages["sequence"][dead & (found.file == at)]
        drive.write(now, note, drive.folder, np.full(len(sequences), each.file.number, np.uint64), sequences, False)
