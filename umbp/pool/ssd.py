"""The SSD tier in a pool process: what is written to it and when, what is read from it, and the tasks that look after it.

Theory of operation
-------------------
The tier itself (`umbp.store.ssd`) belongs to the event loop; its steps are walked here. What moves:

    write behind   pages that were committed, and those asked for again that are in DRAM alone, wait in `WriteQueue` if the admission policy
                   wants them on SSD; while a batch is written it is held like a lease, at most `BATCHES_MORE` + disks batches at a time
    on evict       the pages that eviction would take next are written ahead of it, while the pool is nearly full
    down, up       between the levels of the tier, where there are several: `umbp.pool.ssd_moving`
    read           `SsdSource`, for `umbp.pool.fetching`: straight into the pages that were reserved for them
    remove, flush  of a client or operator: listed no more at once; answered when it is on disk

Namespaces found on disk get a row in the segment's table at the start, so that they can be asked for, flushed and limited before a client
opens them. A namespace that loses its row loses its pages here.

What fails stays here: a fault of a disk is a warning in ``/readyz`` and a state in the metrics, never an error of a client's call, but for
`flush` and `remove`, which say so if the disk did not take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from umbp.config import PoolConfig
from umbp.core.objects import LIVE, Account
from umbp.core.pool import Pool
from umbp.errors import LimitReached, UmbpError, Unavailable
from umbp.master.protocol import Capacity
from umbp.pool.ssd_moving import SsdMoving
from umbp.pool.ssd_policies import SsdPolicies
from umbp.pool.ssd_queue import WriteQueue
from umbp.pool.ssd_steps import advance, when_done
from umbp.pool.turns import Turns
from umbp.store.index import W_PLACE, W_SUM, W_VERSION, place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_cleaning import clean_steps, wanted
from umbp.store.ssd_drive import AWAY, UP, Drive
from umbp.store.ssd_format import NamespaceNote
from umbp.store.ssd_hands import Hands
from umbp.store.ssd_reads import takes_direct
from umbp.store.ssd_records import Batch, SegmentFile
from umbp.store.ssd_system import Steps, System
from umbp.store.ssd_table import SsdTable
from umbp.store.ssd_upkeep import opened_steps, watch_steps
from umbp.types import I64, U8, U64, Mask, Tier, WriteStatus

log = logging.getLogger("umbp.pool.ssd")
ENTRY_FOR_BYTES = 64 << 10  # automatic limit of keys: one for this many bytes of SSD,
ENTRIES_MIN, ENTRIES_MAX = 4096, 4 << 20  # within these: 4 M take 0.4 GiB of shared memory
QUEUE_PAGES_MAX = 1 << 16
BATCH_BYTES_MAX = 32 << 20  # held in DRAM while it is written: 20 ms of a fast disk
HELD_SHARE = 8  # and at most one in this many bytes of the pool, over all batches
BATCH_PAGES_MAX = 256  # 2 ms of the event loop before they are on their way, and 2 ms after
BATCHES_MORE = 1
ADMITTED_SHARE = 32  # of the tier at most is admitted at a time
NOTES_MAX = 512  # of requests whose keys are still to be looked at, some in each; the oldest are forgotten
NOTE_KEYS, NOTE_REQUESTS = 1024, 8  # are looked at together, and others have their turn: some 0.3 ms
WATCH_SECONDS = 1.0
CLEAN_SECONDS = 0.2
OPEN_SECONDS_MAX = 15.0  # a disk that takes longer is opened while the pool serves already
ANSWER_SECONDS_MAX = 5.0  # a flush or removal that a disk has not taken by then is answered with that
DEMOTE_SHARE = 0.05  # on evict: begins this far below the low watermark
DEMOTE_BYTES = 64 << 20
COUNT_SECONDS = 0.25
STOP_SECONDS_MAX = 2.0
SHRINK_BYTES = 64 << 20  # of a namespace above its quota, a tick
_T = TypeVar("_T")


class SsdKeys:
    """The keys of the tier, as a resync of the master sees them (`umbp.pool.sweeping.Keeps`)."""

    tier = Tier.SSD

    def __init__(self, rows: U64) -> None:
        self._rows = rows

    @property
    def end(self) -> int:
        """See `Keeps`."""
        return len(self._rows)

    def held(self, start: int, stop: int) -> tuple[I64, U64]:
        """See `Keeps`."""
        positions: I64 = np.flatnonzero(self._rows[start:stop, W_VERSION] != 0) + start
        return positions, self._rows[positions, :5]


class SsdSide:
    """The tier and its tasks in one pool process; without folders it does nothing."""

    def __init__(
        self,
        config: PoolConfig,
        pool: Pool,
        data: U8,
        now: Callable[[], float],
        system: System | None = None,
        turns: Turns | None = None,
        hands: Sequence[Hands] = (),
    ) -> None:
        """``hands``: a process for each disk, which has ``data`` already; or none."""
        self.config, self.pool, self.now = config, pool, now
        self.turns = turns or Turns()
        self.data, self._view = data, memoryview(data.data)
        self.policy = config.ssd_policy
        self.drives = [
            Drive(each.path, each.size_bytes, system or System(), level=config.ssd_levels.index(each.level), weight=each.weight, hands=mine)
            for each, mine in zip_longest(config.ssd, hands)
        ]
        total = sum(folder.size_bytes for folder in config.ssd)
        entries = config.ssd_keys_max or min(ENTRIES_MAX, max(ENTRIES_MIN, total // ENTRY_FOR_BYTES))
        self.table = SsdTable(config.shm_dir, config.name, entries, int(pool.table.seed) ^ 0x55D)
        self.policies = SsdPolicies(config, entries, self._oldest_first)
        self.tier = SsdTier(
            self.drives,
            self.table.writer,
            self,
            time.time,
            eviction=self.policies.eviction,
            cleaning=self.policies.cleaning,
            striping=self.policies.striping,
            day_bytes_max=config.ssd_write_max or 0,
        )
        self.tier.catalog.changed = self._tell
        self.moving = SsdMoving(self)
        self.queue = WriteQueue(pool.objects, min(QUEUE_PAGES_MAX, pool.objects.capacity))
        self.not_admitted = 0
        slots = len(self.drives) + BATCHES_MORE
        self.batch_bytes = min(BATCH_BYTES_MAX * len(self.drives), pool.objects.allocator.capacity_bytes // (HELD_SHARE * slots))
        self.slots = asyncio.Semaphore(slots)
        self._more, self._noted = asyncio.Event(), asyncio.Event()
        self._notes: deque[tuple[int, U8, Sequence[tuple[int, int]]]] = deque(maxlen=NOTES_MAX)
        self._counted_at = float("-inf")
        self.keys = SsdKeys(self.table.writer.entries)
        self.held: Counter[SegmentFile] = Counter()  # files that clients read from (`umbp.pool.references`), and by how many holds
        self.stopping = False
        pool.objects.fresh = deque()

    def __repr__(self) -> str:
        return f"<SsdSide {self.tier!r}, {self.queue!r}>"

    # -- naming (`umbp.store.ssd_ledger.Naming`) ---------------------------------------------------------------------------------------

    def account_or_none(self, number: int) -> tuple[bytes, Account] | None:
        """Digest and account of the namespace that has this number now."""
        digest = self.pool.digests.get(number)
        state = None if digest is None else self.pool.by_digest.get(digest)
        return (state.digest, state.account) if state is not None and state.account.number == number else None

    def digest_of(self, number: int) -> bytes | None:
        """See `Naming`."""
        found = self.account_or_none(number)
        return found[0] if found else None

    def number_of(self, digest: bytes) -> int | None:
        """See `Naming`; a namespace that is on disk alone gets a row of the table."""
        state = self.pool.by_digest.get(digest)
        if state is None:
            note = next((each for drive in self.drives if (each := drive.folder.meta.namespaces.get(digest))), None)
            if note is None or not note.canonical:
                return None
            try:
                self.pool.open_namespace(0, digest, note.canonical.encode(), note.object_bytes)
            except (LimitReached, UmbpError) as error:
                log.warning("a namespace that is on SSD is left there: %s", error)
                return None
            state = self.pool.by_digest[digest]
            del state.sessions[0]
            if note.quota_bytes:
                self.pool.set_quota(state.account.row, note.quota_bytes)
        state.account.ssd_bytes = max(1, state.account.ssd_bytes)  # kept in the table until the pages are counted
        return state.account.number

    def note_of(self, digest: bytes) -> NamespaceNote:
        """See `Naming`."""
        state = self.pool.by_digest.get(digest)
        if state is None:
            return NamespaceNote()
        return NamespaceNote(state.canonical.decode(), state.account.object_bytes, state.account.quota_bytes)

    def quota_of(self, number: int) -> int:
        """See `Naming`."""
        found = self.account_or_none(number)
        return found[1].quota_bytes if found else 0

    # -- steps -------------------------------------------------------------------------------------------------------------------------

    async def walk(self, steps: Steps[_T]) -> _T:
        """Run steps in the event loop. Where it is cancelled it goes on to their end first: threads may be writing into memory."""
        return await self._rest(steps, advance(steps))

    async def _rest(self, steps: Steps[_T], at: list[Future[Any]] | tuple[_T]) -> _T:
        cancelled: asyncio.CancelledError | None = None
        while isinstance(at, list):
            over = when_done(at)
            while not over.done():
                try:
                    await asyncio.wait((over,), timeout=STOP_SECONDS_MAX if self.stopping else None)
                except asyncio.CancelledError as error:
                    cancelled = error
                if self.stopping and cancelled and not over.done():
                    raise cancelled  # the disk hangs, and the process is about to end: nobody uses that memory any more
            try:
                await self.turns.wait()
            except asyncio.CancelledError as error:
                cancelled = error
            at = advance(steps)
        if cancelled is not None:
            raise cancelled
        return at[0]

    # -- life --------------------------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the folders and list what they hold. Conflict, SegmentError: a folder is not ours to use."""
        now, loop = self.now(), asyncio.get_running_loop()
        for hands in self._hands:
            loop.add_reader(hands.fileno(), self._receive, hands)
        opening = {drive: drive.read(now, drive.open) for drive in self.drives}
        await asyncio.to_thread(wait, opening.values(), OPEN_SECONDS_MAX)
        done = {drive: future for drive, future in opening.items() if future.done()}
        await self.walk(opened_steps(self.tier, now, done))
        for drive in self.drives:
            if isinstance(drive.error, UmbpError):
                raise drive.error
        if self.policy == "write_behind":  # what a crash kept from being written
            self._want(self.pool.objects.live_ids()[-self.queue.pages_max :])
        self.tick(self.now())

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_at_notes())
            for drive in self.drives:
                tasks.create_task(self._look_after(drive))
            for moving in self.moving.tasks():
                tasks.create_task(moving)
            while True:
                await self._more.wait()
                self._more.clear()
                while True:
                    await self.slots.acquire()
                    ids = self._next()
                    if not len(ids):
                        self.slots.release()
                        break
                    self.pool.objects.lease(ids)  # in the step in which they were seen to be there
                    tasks.create_task(self._write(ids))

    def close(self) -> None:
        """After `run` has ended."""
        with contextlib.ExitStack() as attended:
            for hands in self._hands:
                asyncio.get_running_loop().remove_reader(hands.fileno())
                attended.enter_context(hands.attended())
            self.tier.stop(self.now())
            self.tier.close()
        for hands in self._hands:
            hands.close()
        self.table.close()

    @property
    def _hands(self) -> list[Hands]:
        return [hands for drive in self.drives if (hands := drive.crew.hands) is not None]

    def _receive(self, hands: Hands) -> None:
        hands.receive()
        if not hands.alive:
            asyncio.get_running_loop().remove_reader(hands.fileno())

    async def _look_after(self, drive: Drive) -> None:
        looked = float("-inf")
        while True:
            now, moved = self.now(), 0
            try:
                if now - looked >= WATCH_SECONDS:
                    looked = now
                    await self.walk(watch_steps(self.tier, now, drive))
                if wanted(self.tier, now, drive):
                    moved = await self.walk(clean_steps(self.tier, now, drive))
            except Exception:  # our own fault: the pool goes on
                log.exception("%r was not looked after", drive)
            if self.queue.count and drive.may_write(now):
                self._more.set()
            await asyncio.sleep(moved / self.config.ssd_clean_rate if moved else CLEAN_SECONDS)

    # -- writing -----------------------------------------------------------------------------------------------------------------------

    def committed(self) -> None:
        """Pages were committed just now: those that the pool's core has put down for us."""
        fresh = self.pool.objects.fresh
        assert fresh is not None
        if fresh:
            ids = np.concatenate(fresh)
            fresh.clear()
            if self.policy == "write_behind":
                self._want(ids[self.pool.objects.state[ids] == LIVE])

    def noted(self, row: int, keys: U8, requests: Sequence[tuple[int, int]]) -> None:
        """Requests of one namespace (`Pool.note_all`). They are looked at by and by, some at a time: the loop has others to serve."""
        at, first = 0, 0
        for number, (count, _) in enumerate(requests, start=1):
            at += count
            if number == len(requests) or at >= NOTE_KEYS or number - first >= NOTE_REQUESTS:
                self._notes.append((row, keys[:at], requests[first:number]))
                keys, at, first = keys[at:], 0, number
        self._noted.set()

    async def _look_at_notes(self) -> None:
        while True:
            await self._noted.wait()
            self._noted.clear()
            await self.turns.wait()
            while self._notes:
                try:
                    self._note(self.now(), *self._notes.popleft())
                except Exception:  # our own fault: the pool goes on
                    log.exception("requests were not looked at")
                await self.turns.wait()

    def _note(self, now: float, row: int, keys: U8, requests: Sequence[tuple[int, int]]) -> None:
        state = self.pool.namespaces.get(row)
        if state is None:
            return
        place = place_word(state.account.number, state.account.object_bytes)
        ids = self.tier.catalog.touch(now, place, keys, requests, self.policies.admission)
        if self.policy == "write_behind" and (ids < 0).any():
            found = self.pool.find_keys(state.account, keys[ids < 0])
            self._want(found.ids[found.hit])

    def _want(self, ids: I64) -> None:
        """Have these written, if they are not on SSD and the policy wants them there. They come in chain order, which it goes by."""
        for place, part in self._by_place(ids[np.sort(np.unique(ids, return_index=True)[1])]):
            if not any(drive.folder.record_pages(int(place) >> 32) for drive in self.drives):
                continue  # larger than a file
            part = part[self.pool.objects.row[part] >= 0]
            keys = _keys_of(self.pool.table.entries, part)
            absent = ~self.tier.find(place, keys)
            part, keys = part[absent], keys[absent]
            # In steps: how full the tier is counts what waits, and one commit, or many that came together, may be more than all of it.
            step = max(1, self.tier.capacity_bytes // ADMITTED_SHARE // max(1, int(place) >> 32)) if self.tier.capacity_bytes else len(ids)
            for start in range(0, len(part), step):
                self._admit(place, part[start : start + step], keys[start : start + step])
        if self.queue.count:
            self._more.set()

    def _admit(self, place: np.uint64, ids: I64, keys: U8) -> None:
        """Those of these pages, of one place, that the policy wants on SSD wait to be written."""
        waiting = self.queue.count * (int(place) >> 32) / max(1, self.tier.capacity_bytes)
        fill = min(1.0, self.tier.ledger.fill + waiting)
        admitted = self.policies.admission.admit(self.now(), self.tier.catalog.prints(place, keys), fill=fill)
        self.not_admitted += int(np.count_nonzero(~admitted))
        self.queue.add(ids[admitted])

    def _by_place(self, ids: I64) -> Iterator[tuple[np.uint64, I64]]:
        places = self.pool.table.entries[ids, W_PLACE]
        for place in np.unique(places).tolist():
            yield np.uint64(place), ids[places == place]

    def _next(self) -> I64:
        now = self.now()
        if not any(drive.may_write(now) for drive in self.drives):
            return np.empty(0, np.int64)
        return self.queue.take(self.batch_bytes, BATCH_PAGES_MAX)

    async def _write(self, ids: I64) -> None:
        """Write one batch of pages that are held, and let go of them."""
        objects = self.pool.objects
        versions = self.pool.table.versions_of(ids)
        try:
            status = await self.walk(self.tier.write_steps(self.now(), self.batch_of(ids)))
            left = (status == WriteStatus.UNAVAILABLE) & self.pool.versions(ids, versions)
            self.queue.put_back(ids[left])
        except Exception:  # our own fault: these pages are not on SSD, the pool goes on
            log.exception("%d pages could not be written to SSD", len(ids))
        finally:
            objects.unlease(ids)
            self.slots.release()

    def batch_of(self, ids: I64) -> Batch:
        """Pages in DRAM, of one namespace, as the tier writes them; they must stay what they are until it has."""
        objects, entries = self.pool.objects, self.pool.table.entries
        offsets, size = objects.offset[ids], int(objects.size[ids[0]])
        bodies = [self._view[offset : offset + size] for offset in offsets.tolist()]
        straight = bool(takes_direct(self.data.ctypes.data, size) and (offsets % 512 == 0).all())
        return Batch(np.uint64(entries[ids[0], W_PLACE]), _keys_of(entries, ids), bodies, entries[ids, W_SUM].copy(), straight, offsets)

    def _demote(self, now: float) -> None:
        """On evict: what would go next is written first."""
        objects = self.pool.objects
        used = objects.allocated_bytes() / max(1, objects.allocator.capacity_bytes)
        if used > self.pool.limits.watermark_low - DEMOTE_SHARE and self.queue.count < self.queue.pages_max // 2:
            size = min(DEMOTE_BYTES, objects.allocator.capacity_bytes // 4)
            self._want(self.pool.evict(now, size, dry_run=True))

    # -- removing ----------------------------------------------------------------------------------------------------------------------

    def remove(self, row: int, keys: U8, number: int | None) -> Coroutine[Any, Any, Mask] | None:
        """Forget these now; which were here, when that is for good. None if there is nothing to wait for."""
        account = self.pool.find_namespace(row).account
        if number is not None and number != account.number:
            return None
        steps = self.tier.remove_steps(self.now(), place_word(account.number, account.object_bytes), keys)
        at = advance(steps)
        return self._answered(self._rest(steps, at), "removed") if isinstance(at, list) else None

    def flush(self, digest: bytes, old_number: int) -> Coroutine[Any, Any, int] | None:
        """Forget all of a namespace now, which had this number; how many pages, when that is for good."""
        steps = self.tier.flush_steps(self.now(), digest, old_number)
        at = advance(steps)
        return self._answered(self._rest(steps, at), "flushed") if isinstance(at, list) else None

    async def _answered(self, rest: Coroutine[Any, Any, _T], what: str) -> _T:
        task = asyncio.ensure_future(rest)
        done, _ = await asyncio.wait([task], timeout=ANSWER_SECONDS_MAX)
        error = task.exception() if done else TimeoutError(f"no answer for {ANSWER_SECONDS_MAX:g} s")
        if error is not None:
            task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
            raise Unavailable(f"{what} in memory, but a disk did not take it ({error}): it may come back at a restart; try again")
        return task.result()

    # -- time and questions ------------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass."""
        self.committed()
        if self.policy == "on_evict":
            self._demote(now)
        if now >= self._counted_at + COUNT_SECONDS:
            self._counted_at = now
            self._count(now)

    def _count(self, now: float) -> None:
        """Tell namespaces what they have here; quotas that were lowered, and namespaces that are no more."""
        held, none = self.tier.ledger.held, np.empty(0, np.int64)
        for state in self.pool.namespaces.values():
            account = state.account
            account.ssd_bytes = held.get(account.number, 0)
            if account.quota_bytes and account.ssd_bytes > account.quota_bytes:
                self.tier.ledger.evict(now, min(account.ssd_bytes - account.quota_bytes, SHRINK_BYTES), 0, none, number=account.number)
        for number in [number for number, size in held.items() if self.account_or_none(number) is None]:
            if held[number]:
                self.tier.ledger.forget(now, self.tier.catalog.ids_of_number(number), evicted=True)
            held.pop(number, None)

    def capacity(self) -> Capacity:
        """What the master is told of the tier."""
        tier = self.tier
        return Capacity(tier=int(Tier.SSD), capacity_bytes=tier.capacity_bytes, used_bytes=tier.used_bytes, keys=tier.catalog.count)

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the disks, one sentence each."""
        now = self.now()
        said = [f"ssd: {line}" for drive in self.drives for line in drive.folder.said]
        for drive in self.drives:
            if drive.stalled(now):
                said.append(f"ssd: {drive.path} does not answer; it is not asked for anything until it does")
            elif drive.state != UP:
                said.append(f"ssd: {drive.path} {'is not there' if drive.state == AWAY else 'is only read'}: {drive.fault}")
            elif drive.folder.cramped:
                said.append(f"ssd: {drive.path}: the file system is full; it does with less than the {drive.size_bytes} bytes it may take")
            if drive.crew.hands and not drive.crew.hands.alive:
                said.append(
                    f"ssd: {drive.path}: the process that served it is gone; short calls wait longer beside it until the next start"
                )
        return said + [f"ssd: {fault}" for fault in self.policies.faults]

    def _tell(self, rows: U64, present: bool) -> None:
        """Pages came or went: the master hears of it."""
        self.pool.objects.outbox.told(rows, Tier.SSD, present=present)

    def _oldest_first(self) -> I64:
        ids = self.table.writer.committed()
        order: I64 = ids[np.argsort(self.tier.catalog.accessed_at[ids], kind="stable")]
        return order


def _keys_of(entries: U64, ids: I64) -> U8:
    return np.ascontiguousarray(entries[ids, :4]).view(np.uint8).reshape(-1, 32)
