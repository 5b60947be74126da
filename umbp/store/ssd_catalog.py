"""What the SSD tier holds, in memory: the index, and for each page where it lies, when it was written and when it was last wanted.

Theory of operation. The index is an `umbp.store.index` table like the one of the DRAM tier (in the pool it lies in shared memory, so that
clients see what is on SSD without a call). Its word for the offset holds the location: the file, the block of the body, and how many blocks
before it the record's head lies; its word for the checksum the page's check. The rest stands in arrays by entry id. One thread changes it.

A page is in the index from the moment its bytes are on disk for good until it is removed, evicted, found unreadable, or its file or its
disk goes. `forget` says which notes (file number, sequence number) keep it from coming back at the next start.

Cost: 64 bytes an entry and 128 of buckets in the index, 36 here, and the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from umbp.policies.base import AdmissionPolicy, EvictionPolicy, Inserted, Request
from umbp.store.index import BUCKET_SLOTS, ENTRY_WORDS, W_OFFSET, W_PLACE, W_SUM, Found, IndexWriter, buckets_for, hashes, key_words
from umbp.store.ssd_format import BLOCK
from umbp.store.ssd_reads import Pages
from umbp.store.ssd_records import SegmentFile
from umbp.types import F64, I32, I64, U8, U64, Mask

LOW = np.uint64(0xFFFF_FFFF)
SHIFT = np.uint64(32)
BLOCK_BITS, BACK_BITS = 24, 20  # a file of up to 64 GiB, a record of up to 4 GiB
TELL_SLICE = 65_536
NOBODY, NOWHERE = -1, -2  # no file's number


def private_table(entries: int, seed: int) -> IndexWriter:
    """An index that only this process sees."""
    buckets = np.zeros((buckets_for(entries), BUCKET_SLOTS), np.uint64)
    return IndexWriter(buckets, np.zeros((entries, ENTRY_WORDS), np.uint64), np.zeros(1, np.uint64), seed, np.zeros(1, np.uint64))


@dataclass(frozen=True, slots=True)
class Where:
    """Pages of one size, found in the catalog: ids, versions, and what is needed to read them; (m,) each."""

    ids: I64
    versions: U64
    pages: Pages
    back: I64


class Catalog:
    """See above. ``used_bytes`` are those on disk of the pages that it leads to."""

    def __init__(self, table: IndexWriter, policy: EvictionPolicy) -> None:
        n = len(table.entries)
        self.table = table
        self.policy = policy
        self.changed: Callable[[U64, bool], None] | None = None  # is told of (n, 5) words of pages that came (True) or went
        self.files: dict[int, SegmentFile] = {}  # by the number that locations say
        self.used_bytes = 0
        self.count = 0
        self.sequence: U64 = np.zeros(n, np.uint64)
        self.whole: U64 = np.zeros(n, np.uint64)
        self.accessed_at: F64 = np.zeros(n, np.float64)
        self.written_at: F64 = np.zeros(n, np.float64)  # or found at a start
        self._ids: dict[int, int] = {}  # by the file's identity
        self._numbers: list[int] = []  # free ones
        self._file_of: I32 = np.full(n, NOBODY, np.int32)  # the location's file once more, dense: it is looked for by file
        self._free: I32 = np.arange(n - 1, -1, -1, dtype=np.int32)
        self.free_ids = n

    def __repr__(self) -> str:
        return f"<Catalog {self.count} pages, {self.used_bytes} bytes in {len(self.files)} files>"

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def find(self, place: np.uint64, keys: U8) -> Found:
        """What is held of these keys."""
        return self.table.find(key_words(keys), int(place & LOW), place)

    def where(self, place: np.uint64, found: Found, which: I64) -> Where:
        """Where these items of a probe, all of them hits, lie."""
        return self._where(int(place >> SHIFT), found.ids[which], found.rows[which])

    def where_ids(self, ids: I64) -> Where:
        """Where these pages, all of one size, lie."""
        rows = self.table.entries[ids]
        return self._where(int(rows[0, W_PLACE] >> SHIFT), ids, rows)

    def _where(self, size: int, ids: I64, rows: U64) -> Where:
        location = rows[:, W_OFFSET].view(np.int64)
        block = location >> BACK_BITS & ((1 << BLOCK_BITS) - 1)
        pages = Pages(size, location >> (BACK_BITS + BLOCK_BITS), block, rows[:, W_SUM])
        return Where(ids, rows[:, 7], pages, location & ((1 << BACK_BITS) - 1))

    def same(self, ids: I64, versions: U64) -> Mask:
        """Which of these are still what they were."""
        mask: Mask = self.table.versions_of(ids) == versions
        return mask

    def places(self) -> tuple[I64, U64]:
        """All pages: ids, ascending, and their place words."""
        ids = np.flatnonzero(self._file_of != NOBODY)
        return ids, self.table.entries[ids, W_PLACE]

    def ids_of_number(self, number: int) -> I64:
        """All pages of a namespace."""
        ids, places = self.places()
        mine: I64 = ids[places & LOW == np.uint64(number)]
        return mine

    def ids_of_file(self, file: SegmentFile) -> I64:
        """All pages in a file."""
        return np.flatnonzero(self._file_of == self._ids.get(id(file), NOWHERE))

    def file_numbers(self, ids: I64 | I32) -> I32:
        """In which file each is, by the numbers of `files`."""
        return self._file_of[ids]

    def prints(self, place: np.uint64, keys: U8) -> U64:
        """The fingerprints that policies know pages by."""
        return hashes(key_words(keys), place & LOW, self.table.seed)

    # -- changes -----------------------------------------------------------------------------------------------------------------------

    def enter(self, now: float, place: np.uint64, file: SegmentFile, keys: U8, sums: U64, wholes: U64, sequences: U64, at: I64) -> Mask:
        """List pages that are on disk. ``at``: blocks of the bodies << 20 | blocks back to the head. Which found a place in the index."""
        n = len(keys)
        shown = np.zeros(n, bool)
        taken = min(n, self.free_ids)
        ids = self._free[self.free_ids - taken : self.free_ids].astype(np.int64)
        self.free_ids -= taken
        words = key_words(keys)[:taken]
        number = self._file_number(file)
        prints = hashes(words, place & LOW, self.table.seed)
        self.table.write_reserved(ids, words, place, at[:taken] | number << (BLOCK_BITS + BACK_BITS), 0)
        shown[:taken] = self.table.enter(ids, prints)
        if not shown[:taken].all():
            lost = ids[~shown[:taken]]
            self.table.forget(lost)
            self._give_back(lost)
            ids, prints = ids[shown[:taken]], prints[shown[:taken]]
        self.table.publish(ids, sums[shown])
        if self.changed and len(ids):
            self.changed(self.table.entries[ids, :5], True)
        self.sequence[ids], self.whole[ids], self.accessed_at[ids] = sequences[shown], wholes[shown], now
        self.written_at[ids] = now
        self._file_of[ids] = number
        self._charge(file, len(ids), int(place >> SHIFT))
        for start in range(0, len(ids), TELL_SLICE):
            part = slice(start, start + TELL_SLICE)
            parents = np.full(len(ids[part]), -1, np.int32)
            self.policy.on_inserted(Inserted(now, ids[part].astype(np.int32), parents, prints[part]))
        return shown

    def touch(
        self,
        now: float,
        place: np.uint64,
        keys: U8,
        requests: Sequence[tuple[int, int]] = (),
        admission: AdmissionPolicy | None = None,
        *,
        found: Found | None = None,
    ) -> I64:
        """These keys were asked for; the ids of those that are here, -1 for the others.

        ``requests``: how many of the keys belong to each, and its conversation or 0, where it was not one request. ``admission`` is told
        too. ``found``: what `find` says of them now, if that is known.
        """
        words = key_words(keys)
        prints = hashes(words, place & LOW, self.table.seed)
        found = found or self.table.find(words, int(place & LOW), place, prints)
        ids = np.where(found.hit, found.ids, -1)
        self.accessed_at[ids[found.hit]] = now
        at, known = 0, ids.astype(np.int32)
        for count, conversation in requests or ((len(keys), 0),):
            request = Request(now, known[at : at + count], prints[at : at + count], conversation)
            self.policy.on_request(request)
            if admission is not None:
                admission.on_request(request)
            at += count
        return ids

    def relocate(self, ids: I64, file: SegmentFile, sums: U64, sequences: U64, at: I64) -> list[tuple[SegmentFile, U64]]:
        """These pages, all of one size, lie here now. For the notes: the files of before, each with the sequence numbers of its pages.

        They stay what they are to policies and readers: neither the key nor how long ago it was wanted has changed.
        """
        if not len(ids):
            return []
        size = int(self.table.entries[ids[0], W_PLACE] >> SHIFT)
        before, gone = self._file_of[ids].copy(), []
        for number in np.unique(before).tolist():
            mine = before == number
            gone.append((self.files[number], self.sequence[ids[mine]]))
            self._charge(self.files[number], -int(np.count_nonzero(mine)), size)
        number = self._file_number(file)
        self._charge(file, len(ids), size)
        self.table.entries[ids, W_OFFSET] = (at | number << (BLOCK_BITS + BACK_BITS)).astype(np.int64).view(np.uint64)
        self.table.entries[ids, W_SUM] = sums
        self.sequence[ids], self._file_of[ids] = sequences, number
        return gone

    def forget(self, ids: I64, *, evicted: bool) -> list[tuple[SegmentFile, U64]]:
        """Take pages out. For the notes: their files, each with the sequence numbers of its pages."""
        if not len(ids):
            return []
        rows = self.table.entries[ids]
        numbers = rows[:, W_OFFSET].view(np.int64) >> (BACK_BITS + BLOCK_BITS)
        sizes = (rows[:, W_PLACE] >> SHIFT).astype(np.int64)
        if self.changed:
            self.changed(rows[:, :5], False)
        self.table.unpublish(ids)
        gone = []
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            for size in np.unique(sizes[mine]).tolist():
                self._charge(self.files[number], -int(np.count_nonzero(mine & (sizes == size))), size)
            gone.append((self.files[number], self.sequence[ids[mine]]))
        self.policy.on_removed(ids.astype(np.int32), evicted=evicted)
        self._file_of[ids] = NOBODY
        self._give_back(ids)
        return gone

    def victims(self, count: int, kept: I64, *, number: int = -1, policy: EvictionPolicy | None = None) -> I64:
        """Up to this many pages to evict, the first to go first, none of those kept, and of one namespace if it is named. A peek.

        ``policy``: another than the one in use.
        """

        def eligible(ids: I32) -> Mask:
            mask: Mask = ~np.isin(ids, kept) if len(kept) else np.ones(len(ids), bool)
            if number >= 0:
                mask &= self.table.entries[ids, W_PLACE] & LOW == np.uint64(number)
            return mask

        return (policy or self.policy).victims(eligible, count).astype(np.int64)

    def drop_file(self, file: SegmentFile) -> None:
        """Nothing leads to this file any more, and it may be used anew."""
        number = self._ids.pop(id(file), None)
        if number is not None:
            del self.files[number]
            self._numbers.append(number)

    def check(self) -> None:
        """Sums over the index are what the counts say."""
        self.table.check()
        ids, places = self.places()
        assert len(ids) == self.count == len(self.table.entries) - self.free_ids
        sizes = (places >> SHIFT).astype(np.int64)
        padded = -(-sizes // BLOCK) * BLOCK
        assert self.used_bytes == int(padded.sum())
        numbers = self.table.entries[ids, W_OFFSET].view(np.int64) >> (BACK_BITS + BLOCK_BITS)
        for number, file in self.files.items():
            mine = numbers == number
            assert (file.live_pages, file.live_bytes) == (int(np.count_nonzero(mine)), int(padded[mine].sum())), file
        assert set(numbers.tolist()) <= self.files.keys()

    def _charge(self, file: SegmentFile, pages: int, size: int) -> None:
        on_disk = pages * (-(-size // BLOCK) * BLOCK)
        file.live_pages += pages
        file.live_bytes += on_disk
        self.used_bytes += on_disk
        self.count += pages

    def _give_back(self, ids: I64) -> None:
        self._free[self.free_ids : self.free_ids + len(ids)] = ids
        self.free_ids += len(ids)

    def _file_number(self, file: SegmentFile) -> int:
        number = self._ids.get(id(file))
        if number is None:
            number = self._numbers.pop() if self._numbers else len(self.files)
            self._ids[id(file)] = number
            self.files[number] = file
        return number
