"""What a client does with a namespace: put, get, lookup, lease, remove, flush; written once as steps (`umbp.client.steps`).

Theory of operation
-------------------
*Lookup* reads the shared index and asks nobody.

*Get* copies first and asks afterwards: entry ids, versions and offsets come from the index, the bytes from the mapped segment, and then
the versions are read again. A version that is still the same was never evicted in between (the pool changes it before it gives the memory
to anyone), so the bytes are those that were committed. What changed is tried once more under a lease. Copies go in chunks, so that bytes
are checked soon after they were read.

*Put* asks the index first: a batch that is stored already costs no call. Then one call reserves, one copy fills, one call commits. Who
puts batch after batch is given the memory for the next one with the answer to the commit (`umbp.core.spares`): then the keys are sent, are
filled while the pool makes itself ready, and one call commits. Keys that another client is writing at the moment are waited for.

Every answer is per item. No pool, a stopped pool, a frozen pool: BUSY for reads, UNAVAILABLE for writes, within the call's time limit.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from umbp import wire
from umbp.client import mover
from umbp.client.arguments import check_lengths, check_seconds, check_verify
from umbp.client.buffers import Rows, as_rows
from umbp.client.late import forgotten
from umbp.client.lease import Lease, let_go
from umbp.client.link import Bond, Link, Look
from umbp.client.notes import conversation_number
from umbp.client.opened import Opened, Spare
from umbp.client.steps import CALL_SECONDS_MAX, Operation, Pause, Send, Work
from umbp.errors import InvalidRequest, LimitReached, Unavailable
from umbp.layout import as_keys
from umbp.store.checksums import checksum, checksums
from umbp.store.index import W_PLACE, W_VERSION, key_words, place_word
from umbp.types import I64, KEY_BYTES, U8, U64, Mask, ReadStatus, Statuses, Tier, WriteStatus

CHUNK_BYTES = 64 << 20  # about 5 ms of copying between two checks
IN_FLIGHT_SECONDS_MAX = 2.0  # a put waits this long for another client that is writing the same key
RELEASE_SECONDS_MAX = 2.0  # who does not hear of it in this time takes the lease for lost: what was read is then judged by versions
LEASE_SECONDS_MIN = 2.0  # a shorter lease is waited for this long
Fill = Callable[[I64, U8, I64], None]
"""(which items of the batch, the segment's data, their offsets in it): write those objects, and return only when it is done."""
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

    def look(self, keys: U8) -> Look | None:
        """Probe the index. None if there is no pool to ask."""
        current = self._current_or_none()
        if current is None:
            return None
        bond, number = current
        return Look(bond, number, bond.index.find(key_words(keys), number, place_word(number, self.object_bytes)))

    def survey(self, start: int, count: int) -> tuple[U8, int]:
        """Keys (n, 32) of the stored pages among ``count`` entries of the index from ``start`` on; where the next begin, 0 at the end.

        No call. What comes or goes meanwhile may be among them or not. Nothing if there is no pool to ask.
        """
        current = self._current_or_none()
        if current is None:
            return np.empty((0, KEY_BYTES), np.uint8), 0
        bond, number = current
        entries = bond.index.entries
        part = entries[start : start + count]
        versions = part[:, W_VERSION].copy()
        mine = part[:, W_PLACE] == place_word(number, self.object_bytes)
        which = np.flatnonzero(mine & (versions != 0) & (versions & np.uint64(1) == 0))
        words = part[which, :4]
        words = words[part[which, W_VERSION] == versions[which]]
        keys: U8 = np.ascontiguousarray(words).view(np.uint8).reshape(-1, KEY_BYTES)
        return keys, start + count if start + count < len(entries) else 0

    def lookup(self, keys: Any, session: str, tier: Tier = Tier.DRAM) -> Mask:
        """Which keys are stored in this tier of this node or a faster one, DRAM or SSD, or in DRAM or a neighbour's; (n,) bool. No call."""
        array = as_keys(keys)
        if tier not in (Tier.DRAM, Tier.SSD, Tier.NEIGHBOUR):
            raise InvalidRequest(f"{tier!r} cannot be looked up without a call: see locate()", field="tier", example="umbp.Tier.SSD")
        if not len(array):
            return np.zeros(0, bool)
        look = self.look(array)
        self.note(array, session)
        if look is None:
            return np.zeros(len(array), bool)
        hit = look.found.hit
        if tier is Tier.SSD and not hit.all():
            absent = np.flatnonzero(~hit)
            hit[absent] = self.on_ssd(look, array[absent])
        if tier is Tier.NEIGHBOUR and not hit.all():
            absent = np.flatnonzero(~hit)
            hit[absent] = self.nearby(array[absent])
        return hit

    def on_ssd(self, look: Look, keys: U8) -> Mask:
        """Which of these the index of this node's SSD tier shows; none where it has none."""
        if look.bond.ssd is None:
            return np.zeros(len(keys), bool)
        return look.bond.ssd.find(key_words(keys), look.number, place_word(look.number, self.object_bytes)).hit

    def nearby(self, keys: U8) -> Mask:
        """Which of these neighbours have in DRAM."""
        return self.link.neighbours.hold(self, keys) if self.link.neighbours is not None else np.zeros(len(keys), bool)

    def prefix(self, keys: Any, session: str, tier: Tier = Tier.DRAM) -> int:
        """Length of the leading run of stored keys. No call."""
        hit = self.lookup(keys, session, tier)
        return len(hit) if hit.all() else int(hit.argmin())

    def get(self, keys: Any, out: Any, verify: str) -> Operation[Statuses]:
        """Copy pages out; one `ReadStatus` an item."""
        array, rows = as_keys(keys), self.rows(out)
        check_lengths(array, rows, "out")
        check_verify(verify)
        if len(array):
            self.note_once(array)
        return (yield from self.read(array, rows, verify))

    def read(self, array: U8, rows: Rows, verify: str, look: Look | None = None) -> Operation[Statuses]:
        """`get` of what is in DRAM, of arguments that were checked, without a note to the history. ``look``: theirs, if it was made."""
        status = np.full(len(array), ReadStatus.MISS.value, np.uint8)
        if not len(array):
            return Statuses(status, ReadStatus)
        look = look or self.look(array)
        if look is None:
            status[:] = ReadStatus.BUSY.value
            return Statuses(status, ReadStatus)
        wanted = np.flatnonzero(look.found.hit)
        good = yield from self.copy_found(look, wanted, rows)
        status[wanted[good]] = ReadStatus.HIT.value
        again = wanted[~good]
        if verify != "never":
            yield from self._verify(look, rows, status, verify)
        if len(again):
            self.link.statistics.optimistic_lost += len(again)
            yield from self._get_leased(array, again, rows, status, verify)
        return Statuses(status, ReadStatus)

    def rows(self, out: Any) -> Rows:
        """The caller's memory for a read."""
        return as_rows(out, self.object_bytes, "out", writable=True)

    @property
    def may_fetch(self) -> bool:
        """Whether the pool can have pages brought that are not in its DRAM."""
        bond = self.link.bond_or_none()
        return bond is not None and bond.fetches

    def copy_found(self, look: Look, which: I64, rows: Rows) -> Operation[Mask]:
        """Copy these items of a probe, a chunk at a time, and say which were whole: `read` without a second try."""
        step = max(1, CHUNK_BYTES // self.object_bytes)
        good = np.zeros(len(which), bool)
        for start in range(0, len(which), step):
            good[start : start + step] = yield from self._copy_out(look, which[start : start + step], rows)
        return good

    def _copy_out(self, look: Look, which: I64, rows: Rows) -> Operation[Mask]:
        """Copy these items of a probe and say which were whole: still of the same version, in a namespace of the same number."""
        found, data = look.found, look.bond.data
        offsets = found.rows[which, 5].view(np.int64)
        yield Work(lambda: rows.fill(which, lambda at, out: mover.gather(data, offsets[at], out)), len(which) * self.object_bytes)
        good: Mask = look.bond.index.versions_of(found.ids[which]) == found.versions[which]
        if self.link.number_of(look.bond, self.opened) != look.number:
            good[:] = False
        return good

    def _get_leased(self, keys: U8, which: I64, rows: Rows, status: U8, verify: str) -> Operation[None]:
        """Second try for pages that went while they were copied: what is there again is leased first."""
        try:
            lease = yield from self.lease(keys[which], None, "never")
        except LimitReached:  # too much is leased already: they stay misses
            return
        try:
            held = np.flatnonzero(lease.held)
            if lease.look is None or not len(held):
                return
            look = Look(lease.look.bond, lease.look.number, lease.look.found.only(held))
            part = rows.only(which[held])
            good = yield from self._copy_out(look, np.arange(len(held)), part)
            again = np.where(good, ReadStatus.HIT.value, ReadStatus.MISS.value).astype(np.uint8)
            if verify != "never":
                yield from self._verify(look, part, again, verify)
            status[which[held]] = again
        finally:
            yield from self.release(lease)

    def _verify(self, look: Look, rows: Rows, status: U8, verify: str) -> Operation[None]:
        """Hits that do not match their checksum become misses; those that cannot be compared now, because the pool went, are BUSY."""
        hits = np.flatnonzero((status == ReadStatus.HIT.value) & look.found.hit)
        bad, unknown = yield from self._wrong(look, hits, rows.row, verify)
        status[bad], status[unknown] = ReadStatus.MISS.value, ReadStatus.BUSY.value

    def _wrong(self, look: Look, which: I64, bytes_of: Callable[[int], memoryview], verify: str) -> Operation[tuple[I64, I64]]:
        """Of these items, which do not match the pool's checksums (they are dropped and counted), and which could not be compared."""
        none = which[:0]
        if verify == "sampled":
            which = which[self.sample(len(which))]
        if verify == "never" or not len(which):
            return none, none
        ids, versions = look.found.ids[which], look.found.versions[which]
        try:
            wanted = yield from self._sums(look.bond, ids, versions)
        except Unavailable:
            return none, which
        made = yield from self.summed(which, bytes_of)
        bad = (wanted != 0) & (made != wanted)
        if bad.any():
            self.link.statistics.corrupt += int(np.count_nonzero(bad))
            with contextlib.suppress(Unavailable):
                yield from self.link.late.ended(look.bond.call(wire.Corrupt(int(np.count_nonzero(bad))), ids[bad], versions[bad]))
        return which[bad], none

    def summed(self, which: I64, bytes_of: Callable[[int], memoryview]) -> Operation[U64]:
        """Checksums of the bytes of these items."""
        work = Work(
            lambda: np.fromiter(map(checksum, map(bytes_of, which.tolist())), np.uint64, len(which)), len(which) * self.object_bytes
        )
        made: U64 = yield work
        return made

    def sample(self, count: int) -> Mask:
        """One in so many, others each time."""
        self._sample += 1
        chosen: Mask = (np.arange(count) + self._sample) % SAMPLE_ONE_IN == 0
        return chosen

    def _sums(self, bond: Bond, ids: I64, versions: U64) -> Operation[U64]:
        """Checksums of these objects; those that have none yet are asked for. 0: there is none (any more)."""
        sums = bond.index.sums_of(ids, versions)
        none = np.flatnonzero(sums == 0)
        if len(none) and bond.checksum != "off":
            _, blob = yield bond.call(wire.MakeSums(len(none)), ids[none], versions[none], late=forgotten)
            sums[none] = blob.take(np.uint64, len(none))
        return sums

    # -- leases ------------------------------------------------------------------------------------------------------------------------

    def lease(self, keys: Any, seconds: float | None, verify: str, *, renew: bool = True, noted: bool = False) -> Operation[Lease]:
        """Pin what is stored of these keys. A pool that cannot be reached gives a lease that holds nothing.

        ``noted``: the access history has this request already.
        """
        array = as_keys(keys)
        check_verify(verify)
        if seconds is not None:
            check_seconds(seconds, zero=False)
        look = self.look(array) if len(array) else None
        if look is None or not look.found.hit.any():
            return Lease.of_nothing(self.link, self.opened, len(array), self.object_bytes)
        if not noted:
            self.note_once(array)
        asked = time.monotonic()
        try:
            versions = np.where(look.found.hit, look.found.versions, 0).astype(np.uint64)
            within = max(seconds or CALL_SECONDS_MAX, LEASE_SECONDS_MIN)  # a lease that is granted later is over when it comes
            message, late = wire.TakeLease(len(array), seconds or 0.0), functools.partial(let_go, look.bond)
            reply, blob = yield look.bond.call(message, look.found.ids, versions, seconds=within, late=late)
        except Unavailable:
            return Lease.of_nothing(self.link, self.opened, len(array), self.object_bytes)
        held = blob.take(np.uint8, len(array)).astype(bool) & look.found.hit
        lease = Lease(self.link, self.opened, reply.number, look, held, self.object_bytes, asked, reply.seconds, renew=renew)
        self.link.keep(lease, look.bond)
        lease.find_moved()
        try:
            bad, unknown = yield from self._wrong(look, np.flatnonzero(held), lambda i: lease.view(i).data, verify)
        except BaseException:
            yield from self.release(lease)
            raise
        held[bad] = held[unknown] = False
        return lease

    def release(self, lease: Lease) -> Operation[None]:
        """End a lease; it is over whatever happens."""
        if lease.end():
            try:
                assert lease.look is not None
                end = lease.look.bond.call(wire.Release(lease.number), seconds=RELEASE_SECONDS_MAX)
                reply, _ = yield from self.link.late.ended(end)
                lease.lost |= bool(reply.numbers)
            except Unavailable:
                lease.lost = True

    # -- writes ------------------------------------------------------------------------------------------------------------------------

    def put(self, keys: Any, values: Any, parent: bytes | None) -> Operation[Statuses]:
        """Store pages; one `WriteStatus` an item."""
        array, rows = as_keys(keys), as_rows(values, self.object_bytes, "values", writable=False)
        check_lengths(array, rows, "values")

        def fill(which: I64, data: U8, offsets: I64, *, beside: bool = False) -> None:
            rows.read(which, lambda at, values: mover.scatter(data, offsets[at], values, beside=beside))

        return (yield from self.fill(array, fill, parent, ahead=functools.partial(fill, beside=True)))

    def fill(self, keys: Any, fill: Fill, parent: bytes | None, *, ahead: Fill | None = None) -> Operation[Statuses]:
        """Store pages that ``fill`` writes in place; one `WriteStatus` an item.

        ``ahead`` does the same beside the pool, before it is known which are stored already: None if that might cost too much.
        """
        array = as_keys(keys)
        before = b"" if parent is None else as_keys([parent], "parent")[0].tobytes()
        status = np.full(len(array), WriteStatus.UNAVAILABLE.value, np.uint8)
        step = max(1, min(wire.BATCH_MAX, CHUNK_BYTES // self.object_bytes))
        for start in range(0, len(array), step):
            chunk = slice(start, min(start + step, len(array)))
            part = status[chunk]
            try:
                yield from self._put_chunk(array[chunk], np.arange(chunk.start, chunk.stop), fill, before, part, ahead=ahead)
            except Unavailable:
                part[part == WriteStatus.PENDING.value] = WriteStatus.UNAVAILABLE.value  # the other answers stay true
            before = array[chunk.stop - 1].tobytes()
        return Statuses(status, WriteStatus)

    def _put_chunk(self, keys: U8, items: I64, fill: Fill, parent: bytes, status: U8, *, ahead: Fill | None) -> Operation[None]:
        """Store these ``keys``, the caller's ``items``; ``status`` is theirs."""
        # A put of pages that are all stored makes no call. Where the first is new most are: to ask for all then costs more than it saves.
        current = self._current_or_none()
        if current is None:
            return
        bond, number = current
        if bond.index.has(keys[0], number, place_word(number, self.object_bytes)):
            look = self.look(keys)
            if look is None:
                return
            if look.found.hit.all():
                status[:] = WriteStatus.EXISTS.value
                return
            bond, number, ahead = look.bond, look.number, None
        spare = self.opened.take_spare(bond, len(keys)) if ahead else None
        codes = None
        if spare is not None and ahead is not None:
            codes = yield from self._write_ahead(spare, number, keys, items, ahead, parent)
        if codes is None:
            wanted = self.opened.pages_ahead(len(keys), self.object_bytes) if ahead else 0
            codes = yield from self._write(bond, number, keys, items, fill, parent, wanted)
        status[:] = codes
        give_up = time.monotonic() + IN_FLIGHT_SECONDS_MAX
        pause = 0.001
        while WriteStatus.PENDING.value in status.tobytes():
            pending = np.flatnonzero(status == WriteStatus.PENDING.value)
            look = self.look(keys[pending])
            if look is None:
                status[pending] = WriteStatus.UNAVAILABLE.value
                return
            status[pending[look.found.hit]] = WriteStatus.EXISTS.value
            pending = pending[~look.found.hit]
            if not pending.size:
                return
            if time.monotonic() > give_up:
                status[pending] = WriteStatus.IN_FLIGHT.value
                return
            yield Pause(pause)
            pause = min(pause * 2, 0.05)
            if pause > 0.02:  # perhaps its writer gave up: then it is ours to write
                status[pending] = yield from self._write(look.bond, look.number, keys[pending], items[pending], fill, b"", 0)

    def _write_ahead(self, spare: Spare, number: int, keys: U8, items: I64, fill: Fill, parent: bytes) -> Operation[U8 | None]:
        """Fill these keys into memory that is there already, and commit. None if it could not be used for them."""
        try:
            yield from self.link.take_notes()
            yield Send(wire.UseSpare(self.opened.row, number, len(keys), spare.number, parent.hex()), (keys,), spare.bond)
        except BaseException:
            with contextlib.suppress(Unavailable):
                yield spare.returned()
            raise
        if spare.recalled():
            yield spare.returned()
            return None
        self.link.statistics.puts_ahead += 1
        ahead = self.opened.pages_ahead(len(keys), self.object_bytes)
        status, unused = yield from self._fill(spare.bond, spare.number, items, spare.offsets, fill, ahead)
        return None if unused else status

    def _write(self, bond: Bond, number: int, keys: U8, items: I64, fill: Fill, parent: bytes, ahead: int) -> Operation[U8]:
        """Reserve, fill, commit what is absent of these keys, the caller's ``items``; PENDING for what another is writing."""
        yield from self.link.take_notes()  # before the write: what a request missed was not there when it asked
        reply, blob = yield bond.call(wire.Reserve(self.opened.row, number, len(keys), 0.0, parent.hex()), keys)
        status: U8 = blob.take(np.uint8, reply.n).copy()
        mine = blob.take(np.uint8, reply.n).astype(bool)
        ids, offsets = blob.take(np.int64, reply.m), blob.take(np.int64, reply.m)
        if not len(ids):
            return status
        status[mine], _ = yield from self._fill(bond, reply.number, items if len(ids) == len(items) else items[mine], offsets, fill, ahead)
        return status

    def _fill(self, bond: Bond, reservation: int, items: I64, offsets: I64, fill: Fill, ahead: int) -> Operation[tuple[U8, bool]]:
        """Fill and commit a reservation, and have memory ``ahead`` for so many pages more; a status an item, `wire.Committed.unused`."""
        data = bond.data

        def work() -> U64 | None:
            with self.link.filling(bond):
                fill(items, data, offsets)
                return checksums(data, offsets, np.full(len(offsets), self.object_bytes)) if bond.checksum == "put" else None

        filled = np.zeros(len(items), np.uint8)
        sums: U64 | None = None
        try:
            sums = yield Work(work, len(items) * self.object_bytes)
            filled[:] = 1
        finally:
            arrays = (filled,) if sums is None else (filled, sums)
            asked = time.monotonic()
            done, result = yield bond.call(wire.Commit(reservation, len(items), sums is not None, ahead), *arrays)
            status: U8 = result.take(np.uint8, done.n)
            if done.k:
                self.opened.spares.append(Spare(bond, done.spare, result.take(np.int64, done.k), asked, self.link.spare_seconds))
                self.link.keeps_spares = True
                while not self.opened.users and self.opened.spares:  # closed meanwhile: nobody looks there any more
                    yield self.opened.spares.popleft().returned()
        return status, done.unused

    # -- removal and pins --------------------------------------------------------------------------------------------------------------

    def remove(self, keys: Any) -> Operation[Mask]:
        """Make keys invisible; which of them were stored."""
        array = as_keys(keys)
        if not len(array):
            return np.zeros(0, bool)
        hit = np.zeros(len(array), bool)
        for start in range(0, len(array), wire.BATCH_MAX):
            part = array[start : start + wire.BATCH_MAX]
            bond, number = self.current()
            reply, blob = yield bond.call(wire.Remove(self.opened.row, number, len(part)), part)
            hit[start : start + len(part)] = blob.take(np.uint8, reply.n)
        return hit

    def flush(self) -> Operation[int]:
        """Everything of the namespace is gone; how many objects that was."""
        bond, number = self.current()
        reply, _ = yield bond.call(wire.Flush(self.opened.row, number))
        return int(reply.numbers[0])

    def pin(self, keys: Any, seconds: float, note: str) -> Operation[int]:
        """Pin what is stored of these keys until `unpin`, for at most ``seconds`` (0: no limit), not longer than this session."""
        array = as_keys(keys)
        check_seconds(seconds, zero=True)
        if not isinstance(note, str) or len(note) > wire.TEXT_CHARS_MAX or not note.isprintable():
            why = f"a note is printable text of at most {wire.TEXT_CHARS_MAX} characters"
            raise InvalidRequest(why, field="note", example="system prompt")
        bond, number = self.current()
        reply, _ = yield bond.call(wire.Pin(self.opened.row, number, len(array), seconds, note), array)
        return int(reply.numbers[0])

    def unpin(self, number: int) -> Operation[None]:
        """Take a pin back."""
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
            raise InvalidRequest(f"{number!r} is not the number of a pin", field="number", example="what pin() returned")
        yield self.link.bond_now().call(wire.Unpin(number))

    def _current_or_none(self) -> tuple[Bond, int] | None:
        """The bond of the moment and the namespace's number under it. None if there is no pool, or the row is another's now."""
        bond = self.link.bond_or_none()
        number = self.link.number_of(bond, self.opened) if bond is not None else 0
        return (bond, number) if bond is not None and number else None

    def current(self) -> tuple[Bond, int]:
        """The bond of the moment and the namespace's number under it. Unavailable if there is no pool."""
        bond = self.link.bond_now()
        number = self.link.number_of(bond, self.opened)
        if not number:
            raise Unavailable("the namespace's row is another's now")
        return bond, number

    def note_once(self, keys: U8) -> None:
        """`note`, unless the last one says the same."""
        if not self.link.notes.covered(self.opened.row, keys):
            self.note(keys)

    def note(self, keys: U8, session: str = "") -> None:
        """Keep the access history. ``session``: the conversation's name."""
        self.link.notes.add(self.opened.row, keys, conversation_number(session))


def open_or_raise(operations: Operations | None) -> Operations:
    """Those of a namespace that is open, None of one that was closed. InvalidRequest then."""
    if operations is None:
        raise InvalidRequest("this namespace was closed", field="namespace", example="another one from pool.namespace()")
    return operations
