"""What a client does with a namespace: put, get, lookup, lease, remove, flush; written once as steps (`umbp.client.steps`).

Theory of operation
-------------------
*Lookup* reads the shared index and asks nobody.

*Get* copies first and asks afterwards: entry ids, versions and offsets come from the index, the bytes from the mapped segment, and then
the versions are read again. A version that is still the same was never evicted in between (the pool changes it before it gives the memory
to anyone), so the bytes are those that were committed. What changed is tried once more under a lease. Copies go in chunks, so that bytes
are checked soon after they were read.

*Put* asks the index first: what is stored already costs nothing. Then one call reserves, one copy fills, one call commits. Keys that
another client is writing at the moment are waited for, not written twice.

Every answer is per item. No pool, a stopped pool, a frozen pool: BUSY for reads, UNAVAILABLE for writes, within the call's time limit.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import xxhash

from umbp import wire
from umbp.client import mover
from umbp.client.buffers import Rows, as_rows
from umbp.client.lease import Lease
from umbp.client.link import Link, Opened
from umbp.client.steps import Call, Operation, Pause, Work
from umbp.errors import InvalidRequest, Unavailable
from umbp.layout import as_keys
from umbp.store.index import Found, key_words, place_word
from umbp.types import I64, U8, U64, Mask, ReadStatus, Statuses, WriteStatus

CHUNK_BYTES = 64 << 20  # about 5 ms of copying between two checks
IN_FLIGHT_SECONDS_MAX = 2.0  # a put waits this long for another client that is writing the same key
VERIFY = ("never", "sampled", "always")
SAMPLE_ONE_IN = 16


class Operations:
    """The operations of one namespace of one client, as generators of steps."""

    def __init__(self, link: Link, opened: Opened, object_bytes: int) -> None:
        self.link = link
        self.opened = opened
        self.object_bytes = object_bytes
        self._sample = 0

    def __repr__(self) -> str:
        return f"<Operations {self.opened.identity.model} row {self.opened.row}>"

    # -- reads -------------------------------------------------------------------------------------------------------------------------

    def find(self, keys: U8) -> Found | None:
        """Probe the index. None if there is no pool to ask."""
        link = self.link
        if not link.ready() or self.opened.row < 0:
            return None
        number = link.number_of(self.opened)
        if not number or link.index is None:
            return None
        return link.index.find(key_words(keys), number, place_word(number, self.object_bytes))

    def lookup(self, keys: Any, session: str) -> Mask:
        """Which keys are stored; (n,) bool. No call."""
        array = as_keys(keys)
        if not len(array):
            return np.zeros(0, bool)
        found = self.find(array)
        self._note(array, session)
        return np.zeros(len(array), bool) if found is None else found.hit

    def prefix(self, keys: Any, session: str) -> int:
        """Length of the leading run of stored keys. No call."""
        hit = self.lookup(keys, session)
        return len(hit) if hit.all() else int(hit.argmin())

    def get(self, keys: Any, out: Any, verify: str) -> Operation[Statuses]:
        """Copy pages out; one `ReadStatus` an item."""
        array, rows = as_keys(keys), as_rows(out, self.object_bytes, "out", writable=True)
        _check_lengths(array, rows, "out")
        _check_verify(verify)
        status = np.full(len(array), ReadStatus.MISS, np.uint8)
        if not len(array):
            return Statuses(status, ReadStatus)
        found = self.find(array)
        if not self.link.covered(self.opened.row, array):
            self._note(array)
        if found is None:
            status[:] = ReadStatus.BUSY
            return Statuses(status, ReadStatus)
        wanted = np.flatnonzero(found.hit)
        step = max(1, CHUNK_BYTES // self.object_bytes)
        lost: list[I64] = []
        for start in range(0, len(wanted), step):
            part = wanted[start : start + step]
            good = yield from self._copy_out(found, part, rows)
            status[part[good]] = ReadStatus.HIT
            lost.append(part[~good])
        again = np.concatenate(lost) if lost else wanted
        if len(again):
            self.link.statistics.optimistic_lost += len(again)
            yield from self._get_leased(array, again, rows, status)
        if verify != "never":
            yield from self._verify(found, rows, status, verify)
        return Statuses(status, ReadStatus)

    def _copy_out(self, found: Found, which: I64, rows: Rows) -> Operation[Mask]:
        """Copy these items of a probe and say which were whole: still of the same version, in a namespace of the same number."""
        link = self.link
        segment, index, number = link.segment, link.index, self.opened.number
        if segment is None or index is None:
            return np.zeros(len(which), bool)
        offsets = found.rows[which, 5].view(np.int64)
        data = segment.data.array
        yield Work(lambda: rows.fill(which, lambda at, out: mover.gather(data, offsets[at], out)), len(which) * self.object_bytes)
        good: Mask = index.versions_of(found.ids[which]) == found.versions[which]
        if link.number_of(self.opened) != number:
            good[:] = False
        return good

    def _get_leased(self, keys: U8, which: I64, rows: Rows, status: U8) -> Operation[None]:
        """Second try for pages that went while they were copied: what is there again is leased first."""
        lease = yield from self.lease(keys[which], None, "never")
        try:
            held = np.flatnonzero(lease.held)
            good = yield from self._copy_out(lease.found.only(held), np.arange(len(held)), rows.only(which[held]))
            status[which[held[good]]] = ReadStatus.HIT
        finally:
            yield from self.release(lease)

    def _verify(self, found: Found, rows: Rows, status: U8, verify: str) -> Operation[None]:
        """Compare with the checksums that the pool has. A mismatch is a miss, and the pool drops the object."""
        hits = np.flatnonzero((status == ReadStatus.HIT) & found.hit)
        if verify == "sampled":
            self._sample += 1
            hits = hits[(np.arange(len(hits)) + self._sample) % SAMPLE_ONE_IN == 0]
        if not len(hits):
            return
        ids, versions = found.ids[hits], found.versions[hits]
        wanted = yield from self._sums(ids, versions)
        digest = xxhash.xxh3_64_intdigest
        made = yield Work(
            lambda: np.fromiter((digest(rows.row(i)) or 1 for i in hits.tolist()), np.uint64, len(hits)), len(hits) * self.object_bytes
        )
        yield from self._report(hits, ids, versions, (wanted != 0) & (made != wanted), status)

    def _report(self, which: I64, ids: I64, versions: U64, bad: Mask, status: U8) -> Operation[None]:
        if bad.any():
            status[which[bad]] = ReadStatus.MISS
            self.link.statistics.corrupt += int(np.count_nonzero(bad))
            yield Call(wire.Corrupt(int(np.count_nonzero(bad))), (ids[bad], versions[bad]))

    def _sums(self, ids: I64, versions: U64) -> Operation[U64]:
        """Checksums of these objects; those that have none yet are asked for. 0: there is none (any more)."""
        assert self.link.index is not None
        sums: U64 = self.link.index.entries[ids, 6].copy()
        sums[self.link.index.versions_of(ids) != versions] = 0
        none = np.flatnonzero(sums == 0)
        if len(none) and self.link.welcome is not None and self.link.welcome.checksum != "off":
            _, blob = yield Call(wire.MakeSums(len(none)), (ids[none], versions[none]))
            sums[none] = blob.take(np.uint64, len(none))
        return sums

    # -- leases ------------------------------------------------------------------------------------------------------------------------

    def lease(self, keys: Any, seconds: float | None, verify: str, *, renew: bool = True) -> Operation[Lease]:
        """Pin what is stored of these keys. A pool that cannot be reached gives a lease that holds nothing."""
        array = as_keys(keys)
        _check_verify(verify)
        if seconds is not None and not 0 < seconds <= 86_400:
            raise InvalidRequest(f"{seconds} is not a number of seconds above 0 and up to a day", field="seconds", example="10")
        found = self.find(array) if len(array) else None
        if found is None or not found.hit.any():
            return Lease.of_nothing(self.link, self.opened, len(array), self.object_bytes)
        if not self.link.covered(self.opened.row, array):
            self._note(array)
        asked = time.monotonic()
        try:
            versions = np.where(found.hit, found.versions, 0).astype(np.uint64)
            reply, blob = yield Call(wire.TakeLease(len(array), seconds or 0.0), (found.ids, versions))
        except Unavailable:
            return Lease.of_nothing(self.link, self.opened, len(array), self.object_bytes)
        held = blob.take(np.uint8, len(array)).astype(bool) & found.hit
        lease = Lease(self.link, self.opened, reply.number, found, held, self.object_bytes, asked, reply.seconds, renew=renew)
        self.link.leases[reply.number] = lease
        if verify != "never":
            yield from self._verify_lease(lease, verify)
        return lease

    def _verify_lease(self, lease: Lease, verify: str) -> Operation[None]:
        which = np.flatnonzero(lease.held)
        if verify == "sampled":
            self._sample += 1
            which = which[(np.arange(len(which)) + self._sample) % SAMPLE_ONE_IN == 0]
        if not len(which):
            return
        ids, versions = lease.found.ids[which], lease.found.versions[which]
        wanted = yield from self._sums(ids, versions)
        views = [lease.view(i) for i in which.tolist()]
        digest = xxhash.xxh3_64_intdigest
        made = yield Work(
            lambda: np.fromiter((digest(view.data) or 1 for view in views), np.uint64, len(views)), len(views) * self.object_bytes
        )
        status = np.where(lease.held, ReadStatus.HIT, ReadStatus.MISS).astype(np.uint8)
        yield from self._report(which, ids, versions, (wanted != 0) & (made != wanted), status)
        lease.held &= status == ReadStatus.HIT

    def release(self, lease: Lease) -> Operation[None]:
        """End a lease; it is over whatever happens."""
        if lease.end():
            try:
                reply, _ = yield Call(wire.Release(lease.number))
                lease.lost |= bool(reply.numbers)
            except Unavailable:
                lease.lost = True

    # -- writes ------------------------------------------------------------------------------------------------------------------------

    def put(self, keys: Any, values: Any, parent: bytes | None) -> Operation[Statuses]:
        """Store pages; one `WriteStatus` an item."""
        array, rows = as_keys(keys), as_rows(values, self.object_bytes, "values", writable=False)
        _check_lengths(array, rows, "values")
        before = b"" if parent is None else as_keys([parent], "parent")[0].tobytes()
        status = np.full(len(array), WriteStatus.UNAVAILABLE, np.uint8)
        step = max(1, CHUNK_BYTES // self.object_bytes)
        for start in range(0, len(array), step):
            part = np.arange(start, min(start + step, len(array)))
            try:
                yield from self._put_chunk(array, part, rows, before, status)
            except Unavailable:
                status[part[status[part] < WriteStatus.ALL_LEASED]] = WriteStatus.UNAVAILABLE
            before = array[part[-1]].tobytes()
        return Statuses(status, WriteStatus)

    def _put_chunk(self, keys: U8, part: I64, rows: Rows, parent: bytes, status: U8) -> Operation[None]:
        found = self.find(keys[part])
        if found is None:
            return
        if found.hit.all():
            status[part] = WriteStatus.EXISTS
            return
        status[part] = yield from self._write(keys[part], part, rows, parent)
        give_up = time.monotonic() + IN_FLIGHT_SECONDS_MAX
        pause = 0.001
        while (pending := part[status[part] == WriteStatus.PENDING]).size:
            found = self.find(keys[pending])
            if found is None:
                status[pending] = WriteStatus.UNAVAILABLE
                return
            status[pending[found.hit]] = WriteStatus.EXISTS
            pending = pending[~found.hit]
            if not pending.size:
                return
            if time.monotonic() > give_up:
                status[pending] = WriteStatus.IN_FLIGHT
                return
            yield Pause(pause)
            pause = min(pause * 2, 0.05)
            if pause > 0.02:  # perhaps its writer gave up: then it is ours to write
                status[pending] = yield from self._write(keys[pending], pending, rows, b"")

    def _write(self, keys: U8, which: I64, rows: Rows, parent: bytes) -> Operation[U8]:
        """Reserve, fill, commit what is absent of these keys; PENDING for what another is writing."""
        link = self.link
        if (notes := link.take_notes()) is not None:  # before the write: what a request missed was not there when it asked
            yield notes
        reply, blob = yield Call(wire.Reserve(self.opened.row, len(keys), 0.0, parent.hex()), (keys,))
        status: U8 = blob.take(np.uint8, reply.n).copy()
        mine = blob.take(np.uint8, reply.n).astype(bool)
        ids, offsets = blob.take(np.int64, reply.m), blob.take(np.int64, reply.m)
        if not len(ids):
            return status
        segment, targets = link.segment, which[mine]
        if segment is None:
            raise Unavailable("the pool went away")
        data = segment.data.array

        def fill() -> U64 | None:
            with link.filling():
                rows.read(targets, lambda at, values: mover.scatter(data, offsets[at], values))
                if link.welcome is not None and link.welcome.checksum == "put":
                    digest = xxhash.xxh3_64_intdigest
                    return np.fromiter((digest(rows.row(i)) or 1 for i in targets.tolist()), np.uint64, len(targets))
                return None

        filled = np.zeros(len(ids), np.uint8)
        sums: U64 | None = None
        try:
            sums = yield Work(fill, len(ids) * self.object_bytes)
            filled[:] = 1
        finally:
            arrays = (filled,) if sums is None else (filled, sums)
            done, result = yield Call(wire.Commit(reply.number, len(ids), sums is not None), arrays)
            status[mine] = result.take(np.uint8, done.n)
        return status

    # -- removal and pins --------------------------------------------------------------------------------------------------------------

    def remove(self, keys: Any) -> Operation[Mask]:
        """Make keys invisible; which of them were stored."""
        array = as_keys(keys)
        if not len(array):
            return np.zeros(0, bool)
        reply, blob = yield Call(wire.Remove(self.opened.row, len(array)), (array,))
        hit: Mask = blob.take(np.uint8, reply.n).astype(bool)
        return hit

    def flush(self) -> Operation[int]:
        """Everything of the namespace is gone; how many objects that was."""
        reply, _ = yield Call(wire.Flush(self.opened.row))
        return int(reply.numbers[0])

    def pin(self, keys: Any, seconds: float, note: str) -> Operation[int]:
        """Pin what is stored of these keys until `unpin`, for at most ``seconds`` (0: no limit), not longer than this session."""
        array = as_keys(keys)
        reply, _ = yield Call(wire.Pin(self.opened.row, len(array), seconds, note), (array,))
        return int(reply.numbers[0])

    def unpin(self, number: int) -> Operation[None]:
        """Take a pin back."""
        yield Call(wire.Unpin(number))

    def _note(self, keys: U8, session: str = "") -> None:
        """Keep the access history. A conversation's name travels as 63 bits of its digest."""
        number = int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "little") >> 1 if session else 0
        self.link.note(self.opened.row, keys, number)


def _check_lengths(keys: U8, rows: Rows, field: str) -> None:
    if len(keys) != len(rows):
        raise InvalidRequest(f"{len(rows)} items for {len(keys)} keys", field=field, example=f"{len(keys)} items")


def _check_verify(verify: str) -> None:
    if verify not in VERIFY:
        raise InvalidRequest(f"{verify!r} is none of {', '.join(VERIFY)}", field="verify", example="sampled")
