"""Groups of real processes: each page leaves the segment once, and whatever happens to a rank, the others have their bytes in time."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

import umbp
from tests.pools import PoolProcess
from umbp.types import WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.field.people import SLACK_SECONDS, eventually
from tests.loader.caches import PAGES, Cache, keys_of, slots_for
from tests.loader.ranks import Ranks, nothing_is_leased, ranks
from umbp.loader.exchange import Exchange

NUMBERS = list(range(40))
# Nobody is given up on a machine that is busy with other things: what is read twice would be that machine's fault.
PATIENT = {"meet_seconds": 1.0, "patience_seconds": 20.0, "staging_bytes": 1 << 20}
HEAR_SECONDS = 60.0


@pytest.fixture(scope="module")
def tenant(server: PoolProcess) -> str:
    """The namespace that has the pages."""
    cache = Cache()
    with umbp.connect(server.socket) as pool, umbp.Loader(cache.namespace(pool, tenant="group"), cache.tensors) as loader:
        cache.write(NUMBERS, range(1, 41))
        assert loader.offload(keys_of(NUMBERS), np.arange(1, 41)).result().all(WriteStatus.STORED)
    return "group"


@pytest.fixture(scope="module")
def object_bytes() -> int:
    return Cache().layout.object_bytes


def load_all(group: Ranks, wanted: dict[int, list[int]], **options: Any) -> dict[int, Any]:
    """All of these ranks at once; slots differ. Each answer is right byte for byte where it says so."""
    for rank, numbers in wanted.items():
        group.tell(rank, "load", numbers=numbers, slots=slots_for(rank, len(numbers)).tolist(), **options)
    answers = {rank: group.hear(rank) for rank in wanted}
    for rank, answer in answers.items():
        assert answer["wrong"] == [], f"rank {rank}: {answer}"
        assert "internal error" not in answer["reason"], answer["reason"]
        assert answer["clean"], f"rank {rank} wrote outside of its slots"
    return answers


def load_together(group: Ranks, wanted: dict[int, list[int]], **options: Any) -> dict[int, Any]:
    """As `load_all`, once all have come within the second that a meeting may take: a busy machine may let one of them come later."""
    for _ in range(20):
        answers = load_all(group, wanted, **options)
        if all(answer["met"] == len(wanted) for answer in answers.values()):
            return answers
    raise AssertionError(f"they never came within a second: {answers}")


@pytest.mark.parametrize("world", [2, 4])
def test_each_page_leaves_the_segment_once(server: PoolProcess, tenant: str, object_bytes: int, world: int) -> None:
    with ranks(server.socket, tenant, world, **PATIENT) as group, umbp.connect(server.socket) as pool:
        same = load_together(group, dict.fromkeys(range(world), NUMBERS))
        assert all(answer["missing"] == [] for answer in same.values()), same
        assert sum(answer["bytes"] for answer in same.values()) == len(NUMBERS) * object_bytes
        assert max(answer["bytes"] for answer in same.values()) == -(-len(NUMBERS) // world) * object_bytes

        parts = {rank: NUMBERS[rank * 5 : rank * 5 + 20] for rank in range(world)}
        union = len(set().union(*map(set, parts.values())))
        different = load_together(group, parts)
        assert all(answer["missing"] == [] for answer in different.values()), different
        assert sum(answer["bytes"] for answer in different.values()) == union * object_bytes

        nothing = load_together(group, {rank: [] if rank == 0 else NUMBERS for rank in range(world)})
        assert all(answer["missing"] == [] for answer in nothing.values()), nothing
        assert sum(answer["bytes"] for answer in nothing.values()) == len(NUMBERS) * object_bytes
        assert nothing[0]["bytes"] > 0, "who wants nothing helps"

        absent = load_all(group, {rank: [1000, *NUMBERS[:9], 2000] for rank in range(world)})
        assert all(answer["missing"] == [0, 10] for answer in absent.values()), absent
        for rank in range(world):
            assert group.ask(rank, "statistics")["fallback_bytes"] == 0
        nothing_is_leased(pool)


def test_a_window_larger_than_the_ring_passes_through_it(server: PoolProcess, tenant: str, object_bytes: int) -> None:
    with ranks(server.socket, tenant, 2, **{**PATIENT, "staging_bytes": 128 << 10}) as group:
        answers = load_together(group, {0: NUMBERS, 1: NUMBERS})
        assert all(answer["missing"] == [] for answer in answers.values()), answers
        assert sum(answer["bytes"] for answer in answers.values()) == len(NUMBERS) * object_bytes


def test_a_rank_that_does_not_help_reads_nothing(server: PoolProcess, tenant: str, object_bytes: int) -> None:
    with ranks(server.socket, tenant, 2, **{**PATIENT, "helps": False}) as group:
        answers = load_all(group, {0: NUMBERS, 1: NUMBERS})  # then each reads for itself
        assert [answers[rank]["bytes"] for rank in (0, 1)] == [len(NUMBERS) * object_bytes] * 2
        group.options = PATIENT
        group.start(1)
        answers = load_together(group, {0: NUMBERS, 1: NUMBERS})
        assert answers[0]["bytes"] == 0
        assert answers[1]["bytes"] == len(NUMBERS) * object_bytes


def test_a_rank_that_never_joins_is_done_without(server: PoolProcess, tenant: str, object_bytes: int) -> None:
    with ranks(server.socket, tenant, 4, **{**PATIENT, "meet_seconds": 0.3}) as group:
        answers = load_together(group, dict.fromkeys((0, 1, 3), NUMBERS))
        assert all(answer["missing"] == [] for answer in answers.values())
        assert sum(answer["bytes"] for answer in answers.values()) == len(NUMBERS) * object_bytes
        late = load_all(group, {2: NUMBERS})
        assert late[2]["missing"] == []


def test_small_loads_are_alone_unless_told_otherwise(server: PoolProcess, tenant: str) -> None:
    with ranks(server.socket, tenant, 2, way="auto", **PATIENT) as group:
        assert load_all(group, {0: NUMBERS})[0]["missing"] == []
        found = group.ask(0, "statistics")
        assert found["way"] == "solo"
        assert "sooner without a meeting" in found["reason"]


def test_groups_of_one_node_load_side_by_side_each_page_once_a_group(
    server: PoolProcess, tenant: str, object_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with data-parallel attention: each group is a subset of the ranks, with requests of its own."""
    monkeypatch.setenv("UMBP_LOAD", "staged")
    wanted = {"dp0": NUMBERS, "dp1": NUMBERS[20:]}
    with contextlib.ExitStack() as stack:
        ranks_of: dict[str, list[tuple[Cache, umbp.Loader]]] = {name: [] for name in wanted}
        for name, made in ranks_of.items():
            for rank in range(2):
                cache, pool = Cache(), stack.enter_context(umbp.connect(server.socket))
                group = umbp.Group(name, rank, 2, **PATIENT)
                loader = umbp.Loader(cache.namespace(pool, tenant=tenant), cache.tensors, group, copy_threads=1)
                made.append((cache, stack.enter_context(loader)))
        loads = {
            name: [loader.load(keys_of(wanted[name]), slots_for(rank, len(wanted[name]))) for rank, (_, loader) in enumerate(made)]
            for name, made in ranks_of.items()
        }
        for name, numbers in wanted.items():
            done = [load.finish() for load in loads[name]]
            assert [each.missing.tolist() for each in done] == [[], []]
            assert sum(each.read_bytes for each in done) == len(numbers) * object_bytes
            for rank, (cache, loader) in enumerate(ranks_of[name]):
                assert cache.has(numbers, slots_for(rank, len(numbers))).all()
                assert loader.statistics().staged_loads == 1


def test_an_offload_stores_each_page_once_and_shares_the_reading(server: PoolProcess, object_bytes: int) -> None:
    with ranks(server.socket, "offload", 4, **PATIENT) as group:
        for rank in range(4):
            group.tell(rank, "offload", numbers=NUMBERS)
        answers = [group.hear(rank) for rank in range(4)]
        assert sum(answer["bytes"] for answer in answers) == len(NUMBERS) * object_bytes
        assert all(0 < answer["bytes"] < 20 * object_bytes for answer in answers)
        codes = np.array([answer["codes"] for answer in answers])
        assert ((codes == WriteStatus.STORED).sum(axis=0) == 1).all()
        assert ((codes == WriteStatus.EXISTS).sum(axis=0) == 3).all()
        again = group.ask(2, "offload", numbers=NUMBERS)
        assert again["bytes"] == 0
        assert load_all(group, dict.fromkeys(range(4), NUMBERS))[3]["missing"] == []


def test_a_dead_ranks_share_of_an_offload_is_stored_by_others(server: PoolProcess, object_bytes: int) -> None:
    with ranks(server.socket, "offload without one", 2, **{**PATIENT, "patience_seconds": 0.2}) as group:
        alone = group.ask(1, "offload", numbers=NUMBERS)
        assert set(alone["codes"]) == {WriteStatus.STORED}
        assert alone["bytes"] == len(NUMBERS) * object_bytes


@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_that_dies_while_it_stores_its_share_leaves_it_to_others(server: PoolProcess, object_bytes: int, at: int) -> None:
    with ranks(server.socket, f"offload, one dies at {at}", 3, **{**PATIENT, "patience_seconds": 0.2}) as group:
        for rank in range(3):
            group.tell(rank, "offload", numbers=NUMBERS, **({"what": "kill", "at": at} if rank == 1 else {}))
        answers = [group.hear(rank) for rank in (0, 2)]
        codes = np.array([answer["codes"] for answer in answers])
        assert np.isin(codes, [WriteStatus.STORED, WriteStatus.EXISTS]).all()
        assert ((codes == WriteStatus.STORED).sum(axis=0) == 1).all()
        assert load_all(group, {0: NUMBERS})[0]["missing"] == []


def test_a_group_needs_kv_that_is_the_same_on_all_ranks(server: PoolProcess) -> None:
    cache = Cache()
    with umbp.connect(server.socket) as pool:
        namespace = cache.namespace(pool, replicated=False, tp_rank=0, tp_size=2)
        with pytest.raises(umbp.InvalidRequest, match="nothing to share"):
            umbp.Loader(namespace, cache.tensors, umbp.Group("g", 0, 2))


def test_a_pool_that_is_killed_during_group_loads_fails_no_page_wrongly() -> None:
    cache = Cache()
    with PoolProcess() as server, umbp.connect(server.socket) as pool:
        with umbp.Loader(cache.namespace(pool, tenant="t"), cache.tensors) as loader:
            cache.write(NUMBERS, range(1, 41))
            assert loader.offload(keys_of(NUMBERS), np.arange(1, 41)).result().all(WriteStatus.STORED)
        with ranks(server.socket, "t", 2, **{**PATIENT, "patience_seconds": 0.5}) as group:
            for seed in range(3):
                for rank in (0, 1):
                    slots = slots_for(rank, 40).tolist()
                    group.tell(rank, "load", numbers=NUMBERS, slots=slots, deadline=8.0, jitter=0.0005)
                time.sleep(0.01 * seed + 0.005)
                server.restart()
                answers = [group.hear(rank) for rank in (0, 1)]
                assert [answer["wrong"] for answer in answers] == [[], []]
                assert all(answer["seconds"] < 8.0 + SLACK_SECONDS for answer in answers)
                assert group.ask(0, "untouched")
                assert group.ask(1, "untouched")
            eventually(lambda: pool.connected, "connected again")
            assert all(group.ask(rank, "ready") for rank in (0, 1))
            answers = load_all(group, {0: NUMBERS, 1: NUMBERS})
            assert answers[0]["missing"] == answers[1]["missing"] == []


@pytest.mark.parametrize("moment", ["before the meeting", "in the exchange"])
def test_a_pool_that_is_frozen_costs_a_group_no_more_than_the_deadline(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBP_LOAD", "staged")
    cache = Cache()
    with PoolProcess() as server, umbp.connect(server.socket) as pool:
        namespace = cache.namespace(pool)
        with umbp.Loader(namespace, cache.tensors, umbp.Group("g", 0, 1)) as loader:
            cache.write(NUMBERS, range(1, 41))
            assert loader.offload(keys_of(NUMBERS), np.arange(1, 41)).result().all(WriteStatus.STORED)
            if moment == "before the meeting":
                server.signal(signal.SIGSTOP)
            else:
                run = Exchange.run

                def frozen(self: Exchange, *arguments: Any) -> bool:
                    server.signal(signal.SIGSTOP)
                    return run(self, *arguments)

                monkeypatch.setattr(Exchange, "run", frozen)
            done = loader.load(keys_of(NUMBERS), slots_for(1, 40), deadline=0.5).finish()
            assert done.missing.tolist() == NUMBERS
            assert done.reason == "the deadline passed"  # a call to a frozen pool takes 2 s and more, and would be the reason
            cache.wipe(3)
            time.sleep(0.1)
            server.signal(signal.SIGCONT)
            time.sleep(0.3)
            assert cache.untouched([], 3)


class Accidents:
    """One run after the other with the same ranks, each with an accident at a seeded point."""

    def __init__(
        self, group: Ranks, pool: umbp.Pool, seed: int, numbers: list[int] = NUMBERS, deadlines: tuple[float, ...] = (6.0, 6.0, 0.6)
    ) -> None:
        self.group = group
        self.numbers = numbers
        self.deadlines = deadlines
        self.slack = SLACK_SECONDS
        self.hear_seconds = HEAR_SECONDS
        self.pool = pool
        self.random = random.Random(seed)

    def run(self) -> str:
        """One load of all ranks, one of which has an accident. What it was."""
        choose, world = self.random, self.group.world
        victim, what = choose.randrange(world), choose.choice(("kill", "stop", "slow", "stop", "kill", "late"))
        at = choose.choice((choose.randrange(1, 12), choose.randrange(1, 120)))
        deadline, sentinel = choose.choice(self.deadlines), choose.randrange(1, 250)
        plan = {"what": what, "at": at, "seconds": choose.choice((0.005, 0.03, 0.3))} if what != "late" else {}
        wanted = {rank: choose.sample(self.numbers, choose.choice((0, 7, *[len(self.numbers)] * 3))) for rank in range(world)}
        story = f"{what} of rank {victim} of {world} at {at}, deadline {deadline}, pages {[len(each) for each in wanted.values()]}"
        slots = {rank: choose.sample(range(1, PAGES - 1), len(numbers)) for rank, numbers in wanted.items()}
        assert all(self.group.ask(rank, "ready") for rank in wanted)
        for rank in sorted(wanted, key=lambda each: (what == "late" and each == victim, choose.random())):
            if rank == victim and what == "late":
                time.sleep(choose.choice((0.004, 0.02, 0.06)))
            options = {"deadline": deadline, "sentinel": sentinel, "jitter": choose.choice((0.0, 0.0002))}
            more = plan if rank == victim else {}
            self.group.tell(rank, "load", numbers=wanted[rank], slots=slots[rank], **options, **more)
        for rank in wanted:
            if rank != victim or what in ("slow", "late"):
                self.judge(rank, self.group.hear(rank, self.hear_seconds), deadline, story, rank == victim)
        self.recover(victim, what, deadline, story)
        for rank in wanted:
            assert self.group.ask(rank, "untouched", sentinel=sentinel if what != "kill" or rank != victim else 0xA5), (
                f"{story}: something wrote into rank {rank}'s slots after its load"
            )
        return what

    def judge(self, rank: int, answer: Any, deadline: float, story: str, is_victim: bool) -> None:
        where = f"{story}: rank {rank}: {answer}"
        assert answer["wrong"] == [], where
        assert "internal error" not in answer["reason"], where
        assert answer["clean"], where
        assert answer["seconds"] < deadline + self.slack, where
        if deadline > 5 and not is_victim:
            assert answer["missing"] == [], where

    def recover(self, victim: int, what: str, deadline: float, story: str) -> None:
        """Let a stopped one go on and end its load; put a new one in a dead one's place."""
        child = self.group.children[victim]
        if what == "stop":
            # Where the point was not reached its load has ended and it is not stopped.
            if self.group.stopped(victim):
                time.sleep(self.random.choice((0.0, 0.0, 0.05, deadline if deadline < 5 else 0.0)))
            # One that is slow may come to its point only now, and stop after it was told to go on: it is told until it answers.
            until = time.monotonic() + self.hear_seconds
            while not self.group.answered(victim, 0.1) and time.monotonic() < until:
                child.signal(signal.SIGCONT)
            self.judge(victim, self.group.hear(victim, self.hear_seconds), deadline + 30.0, story, True)
        elif what == "kill":
            self.group.start(victim)


def accidents(server: PoolProcess, tenant: str, world: int, seed: int, runs: int) -> None:
    options = {"meet_seconds": 0.05, "patience_seconds": 0.02, "staging_bytes": 256 << 10}
    with umbp.connect(server.socket) as pool, ranks(server.socket, tenant, world, **options) as group:
        course = Accidents(group, pool, seed)
        for run in range(runs):
            try:
                course.run()
            except BaseException as error:
                raise AssertionError(f"seed {seed}, run {run}") from error
        nothing_is_leased(pool)


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (4, 2)])
def test_whatever_happens_to_a_rank_the_others_have_their_bytes(server: PoolProcess, tenant: str, world: int, seed: int) -> None:
    accidents(server, tenant, world, seed, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_a_pool_that_dies_and_gives_the_memory_to_others_fails_no_page_wrongly(seed: int) -> None:
    choose, cache = random.Random(seed), Cache()
    with PoolProcess(dram="4MiB") as server, umbp.connect(server.socket) as pool:
        namespace = cache.namespace(pool, tenant="t")
        with umbp.Loader(namespace, cache.tensors) as loader, ranks(server.socket, "t", 3, meet_seconds=0.5, patience_seconds=0.5) as group:

            def store(numbers: list[int]) -> None:
                eventually(lambda: pool.connected, "connected again")
                cache.write(numbers, range(1, len(numbers) + 1))
                loader.offload(keys_of(numbers), np.arange(1, len(numbers) + 1)).result()

            there = 0
            for run in range(8):
                store(NUMBERS)
                assert all(group.ask(rank, "ready") for rank in range(3))
                for rank in range(3):
                    slots = choose.sample(range(1, PAGES - 1), 40)
                    group.tell(rank, "load", numbers=NUMBERS, slots=slots, deadline=6.0, jitter=choose.choice((0.01, 0.1, 0.2)))
                time.sleep(choose.uniform(0.0, 0.3))
                server.restart()
                eventually(lambda: pool.connected, "connected again")
                namespace.flush()
                store([5000 + 40 * run + number for number in NUMBERS])  # in the memory that the pages had
                answers = [group.hear(rank) for rank in range(3)]
                assert [answer["wrong"] for answer in answers] == [[], [], []], f"seed {seed}, run {run}: {answers}"
                assert all(answer["seconds"] < 6.0 + SLACK_SECONDS for answer in answers)
                assert all(group.ask(rank, "untouched") for rank in range(3))
                there += sum(40 - len(answer["missing"]) for answer in answers)
            assert there, "no load of any run got a page"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "seed"), [(2, 11), (2, 12), (3, 13), (4, 14), (4, 15), (4, 16)])
def test_hundreds_of_accidents(server: PoolProcess, tenant: str, world: int, seed: int) -> None:
    accidents(server, tenant, world, seed, 60)
