"""The pool's state machine: every request of a client or an operator, and the passing of time, as one synchronous call each.

Theory of operation
-------------------
The shell (umbp.pool) calls one method per event with the time; nothing in here waits, so two requests cannot see each other half done.
Hard state and who changes it: objects (`objects`), leases and pins (`leases`), writes on their way (`writes`), scratch (`scratch`),
namespaces (here). What clients asked for waits in `history` until the shell has time for it.

A namespace has a *row* (its place in the segment's table, fixed) and a *number* (written into every entry). Clients read the number from
the row at each call, so a flush is one store: the row gets a new number, all old entries are unreachable at once, and are then removed in
slices. Numbers are never used twice, over restarts neither.

A session ends in two steps. Its connection closes: leases and its pins end, its writes become orphans. Its process is gone (or says on a
new connection that it has let go): the orphans' memory is given back. Where the shell knows at once that the process is gone, both are one.

After a restart `adopt` takes over what the segment holds: committed entries as they are; reserved ones become orphans of their owners.

What it costs: each call is a fixed number of vectorised passes over its keys; `tick` is bounded by its slice sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from umbp.core.allocator import WHOLE, Allocator, Region
from umbp.core.guard import check_sound, failed, guarded, guarded_admission
from umbp.core.history import History
from umbp.core.leases import Lease, Leases, Pin
from umbp.core.levels import Levels
from umbp.core.limits import Limits
from umbp.core.namespaces import NamespaceState, remember
from umbp.core.objects import LIVE, ORPHAN, RESERVED, Account, Counters, Objects
from umbp.core.passage import IDS, Passage
from umbp.core.puts import PUT, Kind, Puts, Reserved, flushed
from umbp.core.room import Room, Watermarks
from umbp.core.scratch import Scratch
from umbp.core.spares import Spares
from umbp.core.writes import Reservation
from umbp.errors import InvalidRequest, LimitReached, NotFound
from umbp.policies.base import ADMISSION, EVICTION, AdmissionPolicy, EvictionPolicy, Inserted, build
from umbp.store.index import FILLING, W_PLACE, W_SUM, Found, IndexWriter, hashes, key_words, place_word
from umbp.types import I64, U8, U64, Mask

DOOMED_SLICE = 4096  # objects of flushed namespaces removed a tick: about 2 ms
UNSUMMED_BATCHES_MAX = 65_536  # about 20 MB where batches are small


class Pool:
    """One node's pool.

    ``table`` is the index, ``rows`` the segment's namespace table, ``counter`` its word for the last namespace number given out.
    """

    def __init__(
        self,
        table: IndexWriter,
        rows: U64,
        counter: U64,
        capacity_bytes: int,
        limits: Limits,
        *,
        eviction: str,
        admission: str,
        regions: Sequence[Region] = WHOLE,
    ) -> None:
        self.table = table
        self.rows = rows
        self.limits = limits
        self.eviction, self.admission_name = eviction, admission
        policy = build(EVICTION, eviction, len(table.entries))
        passage = Passage(capacity_bytes - limits.passage_bytes, capacity_bytes, IDS if limits.passage_bytes else 0)
        allocator = Allocator(passage.start, regions, capacity_bytes)
        self.objects = Objects(table, allocator, guarded(policy, len(table.entries), self._oldest_first), passage)
        self.admission: AdmissionPolicy = guarded_admission(build(ADMISSION, admission, len(table.entries)))
        self.room = Room(self.objects, Watermarks(limits.watermark_high, limits.watermark_low))
        marks = (limits.level_high, limits.level_low)
        self.levels = Levels(self.objects, self.room, self._limbo, self._queue_sums, *marks, promotes=limits.promote)
        self.leases = Leases(
            self.objects,
            seconds_max=limits.lease_seconds_max,
            bytes_max=int(limits.lease_share * self.objects.allocator.capacity_bytes),
        )
        self.puts = Puts(table, self.objects, self.room, limits.reservation_seconds, self._queue_sums)
        self.puts.admission = self._asked()
        self.writes = self.puts.writes
        self.scratch = Scratch(self.objects, self.room, self._limbo)
        self.spares = Spares(self.objects, self.room, self.writes, self._limbo, limits.reservation_seconds)
        self.namespaces: dict[int, NamespaceState] = {}  # by row
        self.by_digest: dict[bytes, NamespaceState] = {}
        self.digests: dict[int, bytes] = {}  # by number, also of numbers that were in use a while ago
        self.counters = Counters()
        self.history = History(table, self.objects, self.namespaces, lambda: self.admission, self.counters)
        self._limited: dict[int, None] = {}  # rows with a quota
        self._doomed: list[I64] = []  # ids of flushed namespaces, still to be removed
        self._unsummed: deque[tuple[I64, U64]] = deque(maxlen=UNSUMMED_BATCHES_MAX)  # the oldest go; who needs their sums has them made
        self._counter = counter

    def __repr__(self) -> str:
        return f"<Pool {self.objects!r}, {len(self.namespaces)} namespaces>"

    # -- a former life ------------------------------------------------------------------------------------------------------------------

    def adopt(self, now: float) -> dict[int, int]:
        """Take over what is in the segment. Sessions with unfinished writes, and how many objects: the shell must say when they are gone.

        SegmentError if the entries contradict each other; then the segment is of no use.
        """
        for row in np.flatnonzero(self.rows[:, 0]).tolist():
            words = self.rows[row]
            number, object_bytes, quota, length = (int(word) for word in words[:4])
            digest, text = words[8:12].tobytes(), words[12:].tobytes()[:length]
            self._enter(NamespaceState(digest, text, Account(row, number, object_bytes, quota)))
        by_number = {state.account.number: state.account for state in self.namespaces.values()}
        for ids, reserved in ((self.table.committed(), False), (self.table.reserved(), True)):
            places = self.table.entries[ids, W_PLACE]
            for place in np.unique(places).tolist():
                part, size = ids[places == place], place >> 32
                account = by_number.get(place & 0xFFFF_FFFF)
                if account is not None and account.object_bytes == size:
                    self.objects.adopt(account, part, reserved=reserved)
                elif reserved:  # its namespace was flushed, but its writer may still be at it
                    self.objects.adopt(self._limbo(size), part, reserved=True)
                else:
                    self.table.forget(part)
        self.objects.settle(now)
        live = self.objects.live_ids()
        shown = self.table.rebuild(live)
        shown &= ~self.objects.passing(live)  # those of a former life that lie where pages only pass through now
        self.objects.hide(live[~shown], evicted=True)  # keys entered in another order may, once in a blue moon, not all find a slot
        live = live[shown]
        self._tell_policy(now, self.objects.policy)
        self._queue_sums(live[self.table.entries[live, W_SUM] == 0])
        orphans = np.flatnonzero(self.objects.state == ORPHAN)
        owner_of = self.table.entries[orphans, W_SUM]
        owner_of = np.where(owner_of >= np.uint64(FILLING), 0, owner_of).astype(np.int64)  # what the pool itself was filling
        owners = {int(owner): orphans[owner_of == owner] for owner in np.unique(owner_of).tolist()}
        for owner, part in owners.items():
            self.writes.adopt(now, owner, self._limbo(0), part)
        return {owner: len(part) for owner, part in owners.items()}

    def _limbo(self, size: int) -> Account:
        """An account for memory of a namespace that is no more, by object size."""
        accounts = self.objects.accounts
        limbo = [account for account in accounts.values() if account.row < 0]
        for account in limbo:
            if account.object_bytes == size:
                return account
        for account in limbo:  # so that callers who think of ever new sizes do not fill the table
            if not account.held_bytes:
                del accounts[account.row]
        account = Account(min([0, *accounts]) - 1, 0, size)
        accounts[account.row] = account
        return account

    def faults(self) -> list[str]:
        """What policies of other packages did wrong."""
        return [fault for policy in (self.objects.policy, self.admission) if (fault := failed(policy))]

    def _oldest_first(self) -> I64:
        """Live objects, the longest unused first."""
        ids = self.objects.live_ids()
        return ids[np.argsort(self.objects.accessed_at[ids], kind="stable")]

    def _tell_policy(self, now: float, policy: EvictionPolicy) -> None:
        """Give a fresh policy all objects, the longest unused first."""
        order = self._oldest_first()
        rows = self.table.entries[order]
        prints = hashes(rows[:, :4], rows[:, 4] & np.uint64(0xFFFF_FFFF), self.table.seed)
        for start in range(0, len(order), 65536):
            part = slice(start, start + 65536)
            ids = order[part].astype(np.int32)
            policy.on_inserted(Inserted(now, ids, np.full(len(ids), -1, np.int32), prints[part]))

    # -- namespaces --------------------------------------------------------------------------------------------------------------------

    def open_namespace(self, session: int, digest: bytes, canonical: bytes, object_bytes: int) -> Account:
        """The account of this identity, made if it is new; it stays in the table while a session has it open or it holds objects."""
        if len(canonical) > (self.rows.shape[1] - 12) * 8:
            raise InvalidRequest(f"the namespace's identity takes {len(canonical)} bytes", field="namespace", example="shorter names")
        state = self.by_digest.get(digest)
        if state is None:
            row = self._free_row()
            state = NamespaceState(digest, canonical, Account(row, self._number(), object_bytes))
            words = self.rows[row]
            words[1:4] = (object_bytes, 0, len(canonical))
            words[8:12] = np.frombuffer(digest, np.uint64)
            words[12:] = 0
            words[12:].view(np.uint8)[: len(canonical)] = np.frombuffer(canonical, np.uint8)
            words[0] = state.account.number  # last: a row with a number is complete
            self._enter(state)
        if state.account.object_bytes != object_bytes:
            raise InvalidRequest(f"objects of this namespace have {state.account.object_bytes} bytes, not {object_bytes}", field="layout")
        state.sessions[session] = None
        return state.account

    def close_namespace(self, session: int, row: int) -> None:
        """This session is through with it: its row may go to another, where nobody else has it open and it holds nothing."""
        self.find_namespace(row).sessions.pop(session, None)

    def find_namespace(self, row: int) -> NamespaceState:
        """By row. NotFound if there is none."""
        state = self.namespaces.get(row)
        if state is None:
            raise NotFound(f"no namespace {row}", field="namespace", example=str(next(iter(self.namespaces), 0)))
        return state

    def set_quota(self, row: int, quota_bytes: int) -> None:
        """Limit a namespace to this many bytes; 0 is no limit. What is above goes by and by."""
        account = self.find_namespace(row).account
        account.quota_bytes = quota_bytes
        self.rows[row, 2] = quota_bytes
        if quota_bytes:
            self._limited[row] = None
        else:
            self._limited.pop(row, None)

    def flush(self, row: int, *, number: int | None = None) -> int:
        """Everything of a namespace is gone from now on, writes on their way included; how many objects."""
        account = self.find_namespace(row).account
        if number is not None and number != account.number:
            return 0  # somebody else has just done it
        account.number = self._number()
        self.rows[row, 0] = account.number
        remember(self.digests, self.namespaces, account.number, self.namespaces[row].digest)
        doomed = self.objects.live_ids(row)
        if len(doomed):
            self.objects.outbox.flushed(doomed)
            self.objects.transfer(doomed, self._limbo(account.object_bytes))
            self._doomed.append(doomed)
        self.counters.flushes += 1
        return len(doomed)

    def _enter(self, state: NamespaceState) -> None:
        self.namespaces[state.account.row] = self.by_digest[state.digest] = state
        self.objects.accounts[state.account.row] = state.account
        remember(self.digests, self.namespaces, state.account.number, state.digest)
        if state.account.quota_bytes:
            self._limited[state.account.row] = None

    def _free_row(self) -> int:
        free = np.flatnonzero(self.rows[:, 0] == 0)
        if len(free):
            return int(free[0])
        for row, state in sorted(self.namespaces.items(), key=lambda item: item[1].account.ssd_bytes):  # what is on SSD alone goes last
            if not state.sessions and not state.account.held_bytes and not state.account.quota_bytes:
                del self.namespaces[row], self.by_digest[state.digest], self.objects.accounts[row]
                self.rows[row, 0] = 0
                return row
        raise LimitReached(f"{len(self.namespaces)} namespaces are in use, which is the limit", field="namespaces_max")

    def _number(self) -> int:
        self._counter[0] += np.uint64(1)
        return int(self._counter[0])

    # -- writes ------------------------------------------------------------------------------------------------------------------------

    def reserve(
        self, now: float, session: int, row: int, keys: U8, parent: bytes, seconds: float, *, number: int | None = None, kind: Kind = PUT
    ) -> Reserved:
        """Room for those of these keys that are neither stored nor being written. ``parent`` is the key before the first, or empty.

        ``number`` is the namespace number that the client knows: if the row has another now (a flush, or a new segment), all is FLUSHED.
        ``kind``: who decides, and where they go.
        """
        reserved = self.begin_reserve(now, session, row, keys, parent, seconds, number=number, kind=kind)
        self.settle()
        return reserved

    def begin_reserve(
        self, now: float, session: int, row: int, keys: U8, parent: bytes, seconds: float, *, number: int | None = None, kind: Kind = PUT
    ) -> Reserved:
        """`reserve`, as far as its client waits for it. `settle` must follow."""
        account = self.find_namespace(row).account
        if number is not None and number != account.number:
            return flushed(len(keys))
        return self.puts.begin_reserve(now, session, account, keys, parent, seconds, kind)

    def commit(self, now: float, session: int, number: int, filled: Mask, sums: U64 | None) -> U8:
        """End a reservation: show what was filled. One status per item, in the order of its ids."""
        status = self.begin_commit(now, session, number, filled, sums)
        self.settle()
        return status

    def begin_commit(self, now: float, session: int, number: int, filled: Mask, sums: U64 | None) -> U8:
        """`commit`, as far as its client waits for it. `settle` must follow."""
        return self.puts.begin_commit(now, session, number, filled, sums)

    def use_spare(self, now: float, session: int, row: int, spare: int, keys: U8, parent: bytes, number: int) -> None:
        """The client fills these keys into memory that it was given ahead; the next is made ready. Its commit has the statuses."""
        state = self.namespaces.get(row)
        account = state.account if state is not None else None
        if account is None or account.number != number:
            return
        if self.puts.use_spare(session, account, spare, keys, parent):
            self.spares.prepare(now, session, account.object_bytes, len(keys))

    def give_spare(self, now: float, session: int, account: Account, count: int) -> Reservation | None:
        """Memory ahead for the next ``count`` pages of this namespace; None if there is none to spare, or each put needs a look first."""
        if not count or account.quota_bytes or self.puts.admission is not None:
            return None
        return self.spares.give(now, session, account.object_bytes, count)

    def commit_some(self, now: float, session: int, number: int, chosen: Mask, sums: U64) -> bool:
        """Show these of a reservation's items, which are filled, while others are still being filled. False: nothing was done."""
        return self.writes.finish_some(now, session, number, chosen, sums)

    @property
    def being_written(self) -> int:
        """Pages on their way: neither scratch nor memory ahead is any, nor what moves."""
        return self.objects.counts[RESERVED] - len(self.scratch.pieces) - self.writes.blank_keys - self.levels.moving_keys

    def settle(self) -> None:
        """The other half of the last `begin_...`: before anything else is asked of the pool."""
        self.puts.settle()

    # -- reads -------------------------------------------------------------------------------------------------------------------------

    def lease(self, now: float, session: int, ids: I64, versions: U64, seconds: float) -> tuple[Lease, Mask]:
        """Pin exact versions until released or over. Ids out of range are not held, like any that changed."""
        good = (ids >= 0) & (ids < self.objects.capacity)
        lease, held = self.leases.grant(
            now, session, np.where(good, ids, 0), np.where(good, versions, 0), seconds or self.limits.lease_seconds
        )
        return lease, held & good

    def note(self, now: float, row: int, keys: U8, conversation: int = 0) -> None:
        """A request asked for these keys: entered at once, however long that takes."""
        self.history.add(0, row, keys, [(len(keys), conversation)])
        while self.history.heed(now, 0):
            pass

    def pin(self, now: float, session: int, row: int, keys: U8, seconds: float, note: str, *, number: int | None = None) -> Pin:
        """Pin what is stored of these keys, for a session or (0) for an operator; without seconds until taken back."""
        account = self.find_namespace(row).account
        if number is not None and number != account.number:
            keys = keys[:0]
        found = self.find_keys(account, keys)
        return self.leases.pin(now, session, found.ids[found.hit], seconds, note)

    def find_keys(self, account: Account, keys: U8) -> Found:
        """What is stored of these keys."""
        return self.table.find(key_words(keys), account.number, place_word(account.number, account.object_bytes))

    def versions(self, ids: I64, versions: U64) -> Mask:
        """Which of these are still live at this version."""
        good = (ids >= 0) & (ids < self.objects.capacity) & (versions != 0) & (versions & np.uint64(1) == 0)
        mask: Mask = good & (self.table.versions_of(np.where(good, ids, 0)) == versions)
        return mask

    # -- removal -----------------------------------------------------------------------------------------------------------------------

    def remove(self, row: int, keys: U8, *, number: int | None = None) -> Mask:
        """Make these keys invisible now; which of them were stored. Removing what is not there is no error."""
        account = self.find_namespace(row).account
        if number is not None and number != account.number:
            return np.zeros(len(keys), bool)
        found = self.find_keys(account, keys)
        gone = np.unique(found.ids[found.hit])
        self.objects.hide(gone, evicted=False)
        self.counters.removed += len(gone)
        return found.hit

    def drop_corrupt(self, ids: I64, versions: U64) -> int:
        """Objects whose bytes do not match their checksum: gone, and counted."""
        gone = np.unique(ids[self.versions(ids, versions)])
        self.objects.hide(gone, evicted=False)
        self.counters.corrupt += len(gone)
        return len(gone)

    def evict(self, now: float, size_bytes: int, *, row: int = -1, dry_run: bool) -> I64:
        """Free this many bytes by the policy's choice, or say what would go; the ids. Bounded: call again for more."""
        ids = self.room.preview(now, size_bytes, row=row)
        if not dry_run:
            self.objects.hide(ids, evicted=True)
        return ids

    # -- checksums ---------------------------------------------------------------------------------------------------------------------

    def _queue_sums(self, ids: I64) -> None:
        if len(ids) and self.limits.checksum != "off":
            self._unsummed.append((ids, self.table.versions_of(ids)))

    def next_unsummed(self) -> tuple[I64, U64] | None:
        """The batch of objects (ids, versions) that has waited longest for its checksums, taken off the queue; None if there is none."""
        return self._unsummed.popleft() if self._unsummed else None

    @property
    def unsummed_batches(self) -> int:
        """Batches that wait for checksums."""
        return len(self._unsummed)

    def sums_of(self, ids: I64, versions: U64) -> U64:
        """The checksums of these objects, (n,) uint64; 0 for those that have none yet or are gone."""
        same = self.versions(ids, versions)
        return np.where(same, self.table.entries[np.where(same, ids, 0), W_SUM], np.uint64(0))

    def set_sums(self, ids: I64, versions: U64, sums: U64) -> U64:
        """Enter checksums for those that are still the same object and have none; `sums_of` them then.

        The first one stays: by what is made later, bytes that have changed since would be right.
        """
        new = self.versions(ids, versions) & (self.sums_of(ids, versions) == 0)
        self.table.entries[ids[new], W_SUM] = sums[new]
        self.counters.sums += int(np.count_nonzero(new))
        return self.sums_of(ids, versions)

    # -- policies ----------------------------------------------------------------------------------------------------------------------

    def swap_eviction(self, now: float, name: str) -> None:
        """Another eviction policy from now on; it is given all objects, longest unused first."""
        policy = guarded(build(EVICTION, name, self.objects.capacity), self.objects.capacity, self._oldest_first)
        self._tell_policy(now, policy)
        check_sound(policy)  # first, so that one that cannot take it changes nothing
        self.objects.install(policy)
        self.eviction = name

    def preview_eviction(self, now: float, size_bytes: int, name: str, *, row: int = -1) -> I64:
        """What another eviction policy would let go first to free this many bytes, had it taken over now. Nothing is changed."""
        policy = guarded(build(EVICTION, name, self.objects.capacity), self.objects.capacity, self._oldest_first)
        self._tell_policy(now, policy)
        ids = self.room.preview(now, size_bytes, row=row, policy=policy)
        check_sound(policy)
        return ids

    def swap_admission(self, name: str) -> None:
        """Another admission policy from now on."""
        self.admission = guarded_admission(build(ADMISSION, name, self.objects.capacity))
        self.admission_name = name
        self.puts.admission = self._asked()

    def _asked(self) -> AdmissionPolicy | None:
        """The admission policy for `Puts`: the one that says yes to everything need not be asked."""
        return None if self.admission_name == "always" else self.admission

    # -- sessions and time -------------------------------------------------------------------------------------------------------------

    def connection_closed(self, session: int, *, gone: bool) -> bool:
        """The session's connection closed; with ``gone`` its process is dead. True if memory still waits for its writer."""
        self.leases.end_session(session)
        self.objects.claims.end_session(session)
        self.spares.end_session(session)
        self.room.near.pop(session, None)
        for state in self.namespaces.values():
            state.sessions.pop(session, None)
        if gone:
            self.writes.end_session(session)
        else:
            self.writes.orphan_session(session)
        if gone:
            self.scratch.end_session(session)
        return session in self.writes.by_session or self.scratch.has(session)

    def writer_gone(self, session: int) -> None:
        """The process of a closed session is dead, or has said that it is not writing any more."""
        self.writes.end_session(session)
        self.scratch.end_session(session)

    def tick(self, now: float) -> bool:
        """Let time pass: leases and reservations end, a slice of eviction and of flushed objects. True if there is more to do at once."""
        self.leases.expire(now)
        self.objects.claims.expire(now)
        self.writes.expire(now)
        busy = False
        if self._doomed:
            part, rest = self._doomed[-1][:DOOMED_SLICE], self._doomed.pop()[DOOMED_SLICE:]
            self._remove_stale(part)
            if len(rest):
                self._doomed.append(rest)
            busy = True
        for row in self._limited:
            account = self.objects.accounts[row]
            if account.quota_bytes < account.held_bytes and account.live_keys:
                busy |= self.room.shrink(now, account) > 0
        self.objects.policy_now()
        return self.room.evict_slice(now) > 0 or busy

    def _remove_stale(self, ids: I64) -> None:
        """Of these ids, those that still are flushed objects: some were evicted meanwhile, and the id reused."""
        self.objects.hide(ids[(self.objects.state[ids] == LIVE) & (self.objects.row[ids] < 0)], evicted=False)

    def check(self) -> None:
        """All invariants: slow."""
        self.objects.check()
        self.leases.check()
        self.writes.check()
        self.scratch.check()
        self.spares.check()
        self.levels.check()
        self.history.check()
        self.table.check()
        reserved = np.flatnonzero((self.objects.state == RESERVED) | (self.objects.state == ORPHAN))
        assert np.array_equal(reserved, self.table.reserved()), "reserved entries differ"


__all__ = ["Limits", "NamespaceState", "Pool"]
