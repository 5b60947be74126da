"""The core in a seeded world against a deliberately dumb model: random events, all invariants after each."""

import random

import numpy as np
import pytest
from core.world import World, find, keys_of, open_namespace

from umbp.errors import LimitReached
from umbp.types import WriteStatus

SIZES = (256, 1000, 4096, 20_000, 65_536, 300_000)
STEPS = 600


class Model:
    """What must be true, kept in dicts: key -> committed value, open writes, leases."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], int] = {}  # (row, key) -> version of the index when it was committed
        self.writes: dict[int, tuple[int, int, list[int], float]] = {}  # reservation -> session, row, keys, expires
        self.spares: dict[int, tuple[int, int, int, float, np.ndarray]] = {}  # session, index of size, pages, expires, offsets
        self.used: dict[int, tuple[int, int, list[int], float, bool, np.ndarray]] = {}  # as `writes`; whether it fits, what is filled
        self.leases: dict[int, tuple[int, np.ndarray, np.ndarray, float]] = {}  # lease -> session, ids, versions, expires
        self.recalled: dict[int, int] = {}  # session -> up to which number its memory ahead is recalled
        self.unread: set[int] = set()  # sessions that have sent what the pool has not read yet

    def recall(self, session: int, number: int) -> bool:
        self.recalled[session] = number
        return session not in self.unread


class Run:
    """One seeded run."""

    def __init__(self, seed: int, eviction: str) -> None:
        self.random = random.Random(seed)
        self.world = World(1 << 20, 512, eviction=eviction, reservation_seconds=5.0, lease_seconds_max=8.0)
        self.rows = [open_namespace(self.world.pool, f"ns{size}", size) for size in SIZES]
        self.model = Model()
        self.now = 1000.0
        self.memory = np.zeros(1 << 20, np.uint8)
        self.evicted = self.spares_used = self.spares_recalled = 0
        self.pool.spares.recall = self.model.recall

    @property
    def pool(self):
        return self.world.pool

    def some_keys(self) -> list[int]:
        start, count = self.random.randrange(40), self.random.randrange(1, 12)
        return [start + i for i in range(count)] + self.random.choices(range(40), k=self.random.randrange(2))

    def reserve(self) -> None:
        index = self.random.randrange(len(SIZES))
        row, keys, session = self.rows[index], self.some_keys(), self.random.randrange(1, 5)
        made = self.pool.reserve(self.now, session, row, keys_of(*keys), b"", 0.0)
        mine = [key for key, m in zip(keys, made.mine.tolist(), strict=True) if m]
        assert len(set(mine)) == len(mine) == len(made.ids)
        for key, status in zip(keys, made.status.tolist(), strict=True):
            if status == WriteStatus.EXISTS:
                assert (row, key) in self.model.values
        for number, (owner, _, _, _, theirs) in self.model.spares.items():
            if number <= self.model.recalled.get(owner, 0):
                continue  # who finds this before it fills does not fill
            assert not np.isin(made.offsets, theirs).any(), "memory that its writer has and may be filling was given to another"
        for _, _, _, _, _, theirs in self.model.used.values():
            assert not np.isin(made.offsets, theirs).any(), "memory that is being filled was given to another"
        for offset in made.offsets.tolist():
            self.memory[offset : offset + SIZES[index]] = made.number % 251
        if mine:
            self.model.writes[made.number] = (session, row, mine, self.now + 5.0)
        self.forget_evicted()

    def commit(self) -> None:
        if not self.model.writes:
            return
        number = self.random.choice(list(self.model.writes))
        session, row, keys, expires = self.model.writes.pop(number)
        filled = np.array([self.random.random() < 0.9 for _ in keys])
        status = self.pool.commit(self.now, session, number, filled, None)
        for key, full, code in zip(keys, filled.tolist(), status.tolist(), strict=True):
            if code == WriteStatus.STORED:
                assert full
                self.model.values[row, key] = number
            elif expires <= self.now:
                assert code == WriteStatus.EXPIRED
            else:
                assert code in (WriteStatus.UNAVAILABLE, WriteStatus.FLUSHED)

    def spare(self) -> None:
        index, session, count = self.random.randrange(3), self.random.randrange(1, 5), self.random.randrange(1, 7)
        made = self.pool.give_spare(self.now, session, self.pool.namespaces[self.rows[index]].account, count)
        if made is not None:
            assert len(made.ids) == count
            assert made.number not in self.model.spares
            self.model.spares[made.number] = (session, index, count, made.expires, self.pool.objects.offset[made.ids])

    def use(self) -> None:
        if not self.model.spares:
            return
        number = self.random.choice(list(self.model.spares))
        session, index, count, expires, offsets = self.model.spares.pop(number)
        # The client sends which keys it fills and looks whether it may; the pool reads that some time later.
        self.model.unread.add(session)
        self.meanwhile()
        if number <= self.model.recalled.get(session, 0):
            self.model.unread.discard(session)
            self.spares_recalled += 1
            assert (self.pool.commit(self.now, session, number, np.zeros(count, bool), None) == WriteStatus.EXPIRED).all()
            return
        self.model.used[number] = (session, -1, [], expires, False, offsets)  # it is being filled from here on
        self.meanwhile()
        self.model.unread.discard(session)
        del self.model.used[number]
        other = self.random.random() < 0.1
        shift = self.random.choice((0, 40))  # only what is new as a whole is filled ahead
        row, keys = self.rows[(index + other) % 3], [key + shift for key in self.some_keys()[: count + self.random.choice((0, 0, 0, 1))]]
        self.pool.use_spare(self.now, session, row, number, keys_of(*keys), b"", self.pool.namespaces[row].account.number)
        fits = not self.pool.writes.open[number].blank
        assert not fits or (not other and len(keys) <= count and expires > self.now and len(set(keys)) == len(keys))
        self.model.used[number] = (session, row, keys, expires, fits, offsets[: len(keys)])
        self.spares_used += fits

    def meanwhile(self) -> None:
        if self.random.random() < 0.5:
            self.reserve()

    def commit_used(self) -> None:
        if not self.model.used:
            return
        number = self.random.choice(list(self.model.used))
        session, row, keys, expires, fits, _ = self.model.used.pop(number)
        filled = np.array([self.random.random() < 0.9 for _ in keys])
        status = self.pool.commit(self.now, session, number, filled, None)
        for key, full, code in zip(keys, filled.tolist(), status.tolist(), strict=True):
            if not fits:
                assert code == WriteStatus.EXPIRED
            elif code == WriteStatus.STORED:
                assert full
                assert (row, key) not in self.model.values
                self.model.values[row, key] = number
            else:
                ends = (WriteStatus.EXPIRED,) if expires <= self.now else (WriteStatus.UNAVAILABLE, WriteStatus.FLUSHED)
                assert code in ends

    def lease(self) -> None:
        row, keys = self.random.choice(self.rows), self.some_keys()
        found = find(self.pool, row, *keys)
        for key, hit in zip(keys, found.hit.tolist(), strict=True):
            assert hit == ((row, key) in self.model.values)
        ids, versions = found.ids.copy(), np.where(found.hit, found.versions, 0).astype(np.uint64)
        session = self.random.randrange(1, 5)
        try:
            lease, held = self.pool.lease(self.now, session, ids, versions, self.random.choice([0.0, 1.0, 4.0, 100.0]))
        except LimitReached:
            return
        assert np.array_equal(held, found.hit)
        self.model.leases[lease.number] = (session, ids[held], versions[held], lease.expires)

    def release(self) -> None:
        if self.model.leases:
            number = self.random.choice(list(self.model.leases))
            session, _, _, expires = self.model.leases.pop(number)
            assert self.pool.leases.release(session, number) == (expires > self.now)

    def remove(self) -> None:
        row, keys = self.random.choice(self.rows), self.some_keys()[:3]
        gone = self.pool.remove(row, keys_of(*keys))
        assert gone.tolist() == [(row, key) in self.model.values for key in keys]
        for key in keys:
            self.model.values.pop((row, key), None)

    def flush(self) -> None:
        row = self.random.choice(self.rows)
        self.pool.flush(row)
        self.model.values = {key: value for key, value in self.model.values.items() if key[0] != row}

    def note(self) -> None:
        keys = self.some_keys()
        self.pool.history.add(self.random.randrange(1, 5), self.random.choice(self.rows), keys_of(*keys), [(len(keys), 0)])

    def heed(self) -> None:
        self.pool.history.heed(self.now, self.random.choice([None, 1, 2, 3, 4]))

    def close_session(self) -> None:
        session, gone = self.random.randrange(1, 5), self.random.random() < 0.5
        self.pool.connection_closed(session, gone=gone)
        for row in self.rows:
            self.pool.namespaces[row].sessions[session] = None
        self.model.leases = {n: lease for n, lease in self.model.leases.items() if lease[0] != session}
        for writes in (self.model.writes, self.model.spares, self.model.used):
            for number in [number for number, write in writes.items() if write[0] == session]:
                del writes[number]
        self.model.recalled.pop(session, None)  # who has this number from here on is another
        if not gone:
            self.pool.writer_gone(session)

    def pass_time(self) -> None:
        self.now += self.random.choice([0.1, 1.0, 3.0])
        while self.pool.tick(self.now):
            pass
        self.model.leases = {n: lease for n, lease in self.model.leases.items() if lease[3] > self.now}
        self.forget_evicted()

    def reboot(self) -> None:
        self.evicted += self.pool.objects.evicted_keys
        writers = {made.session for made in self.pool.writes.open.values() if len(made.ids)}
        owners = self.world.reboot(self.now)
        assert set(owners) == writers >= {write[0] for write in self.model.writes.values()}
        for kept in (self.model.leases, self.model.writes, self.model.spares, self.model.used, self.model.recalled):
            kept.clear()
        self.pool.spares.recall = self.model.recall
        self.pool.check()
        for owner in owners:
            self.pool.writer_gone(owner)
        for row in self.rows:
            assert self.pool.namespaces[row].account.object_bytes in SIZES

    def forget_evicted(self) -> None:
        """Evictions are the pool's choice; what must hold is that nothing leased went, and that all else is as it was."""
        for _, ids, versions, expires in self.model.leases.values():
            held = self.pool.objects.leases[ids]
            assert expires <= self.now or (held > 0).all()
            live = self.pool.versions(ids, versions)
            assert (self.pool.objects.state[ids[~live]] != 0).all(), "memory of a leased object was given back"
        for row, key in list(self.model.values):
            if not find(self.pool, row, key).hit[0]:
                del self.model.values[row, key]


@pytest.mark.parametrize("eviction", ["lru", "sieve", "s3fifo", "leaf_lru"])
@pytest.mark.parametrize("seed", range(6))
def test_random_events_keep_all_invariants(seed: int, eviction: str) -> None:
    run = Run(seed, eviction)
    events = [run.reserve] * 6 + [run.commit] * 6 + [run.lease] * 4 + [run.release] * 3 + [run.note, run.note, run.heed, run.heed]
    events += [run.spare, run.spare, run.spare, run.use, run.use, run.commit_used, run.commit_used]
    events += [run.remove, run.flush, run.close_session, run.pass_time, run.pass_time, run.pass_time]
    for step in range(STEPS):
        event = run.reboot if run.random.random() < 0.01 else run.random.choice(events)
        try:
            event()
            run.pool.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}, {event.__name__}: {error}") from error
    assert run.spares_used > 1, "the run hardly used memory ahead"
    assert run.spares_recalled > 3, "the run hardly recalled any"
    assert run.evicted + run.pool.objects.evicted_keys > 0, "the run never evicted: it proves nothing"


def test_the_same_seed_gives_the_same_run() -> None:
    def digest(seed: int) -> tuple:
        run = Run(seed, "leaf_lru")
        for _ in range(200):
            run.random.choice([run.reserve, run.commit, run.note, run.pass_time])()
        return run.pool.objects.state.tobytes(), run.pool.objects.offset.tobytes(), run.world.entries.tobytes()

    assert digest(3) == digest(3)
