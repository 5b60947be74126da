"""Groups whose tensors are on devices: real processes, real kernels in Triton's interpreter, memory of each other by handles.

The same rules as for groups on the CPU (`test_group.py`), and the same accidents, at points of the device's protocol.
"""

from __future__ import annotations

import functools
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.kernels import processes
from tests.pools import PoolProcess
from umbp.types import WriteStatus

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.loader import test_group
from tests.loader.caches import Cache, keys_of, slots_for
from tests.loader.ranks import nothing_is_leased, ranks
from tests.loader.test_group import Accidents

NUMBERS = list(range(8))
PATIENT = {"meet_seconds": 1.0, "patience_seconds": 20.0, "staging_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def _triton() -> None:
    processes.need("triton")


@pytest.fixture(scope="module")
def tenant(server: PoolProcess) -> str:
    """The namespace that has the pages."""
    cache = Cache()
    with umbp.connect(server.socket) as pool, umbp.Loader(cache.namespace(pool, tenant="devices"), cache.tensors) as loader:
        cache.write(NUMBERS, range(1, len(NUMBERS) + 1))
        assert loader.offload(keys_of(NUMBERS), np.arange(1, len(NUMBERS) + 1)).result().all(WriteStatus.STORED)
    return "devices"


@pytest.fixture(scope="module")
def object_bytes() -> int:
    return Cache().layout.object_bytes


@pytest.fixture
def folder() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="umbp-device-", dir="/dev/shm")
    yield made
    shutil.rmtree(made)


# The interpreter takes a second for what a GPU does in 10 us, and more on a busy machine.
load_all, load_together = (functools.partial(load, deadline=50.0) for load in (test_group.load_all, test_group.load_together))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "way"),
    [pytest.param(2, "fused", marks=SLOW), (3, "fused"), (2, "staged"), pytest.param(4, "staged", marks=SLOW)],
)
def test_each_page_leaves_the_segment_once(server: PoolProcess, tenant: str, object_bytes: int, folder: str, world: int, way: str) -> None:
    options = {**PATIENT, "device": {"folder": folder}}
    with ranks(server.socket, tenant, world, way=way, **options) as group, umbp.connect(server.socket) as pool:
        same = load_together(group, dict.fromkeys(range(world), NUMBERS))
        assert all(answer["missing"] == [] for answer in same.values()), same
        assert sum(answer["bytes"] for answer in same.values()) == len(NUMBERS) * object_bytes
        assert max(answer["bytes"] for answer in same.values()) == -(-len(NUMBERS) // world) * object_bytes
        assert group.ask(0, "statistics")["way"] == way

        parts = {rank: NUMBERS[rank * 2 : rank * 2 + 4] for rank in range(world)}
        union = len(set().union(*map(set, parts.values())))
        different = load_together(group, parts)
        assert all(answer["missing"] == [] for answer in different.values()), different
        assert sum(answer["bytes"] for answer in different.values()) == union * object_bytes

        nothing = load_together(group, {rank: [] if rank == 0 else NUMBERS[:5] for rank in range(world)})
        assert all(answer["missing"] == [] for answer in nothing.values()), nothing
        assert sum(answer["bytes"] for answer in nothing.values()) == 5 * object_bytes

        absent = load_all(group, {rank: [1000, *NUMBERS[:3], 2000] for rank in range(world)})
        assert all(answer["missing"] == [0, 4] for answer in absent.values()), absent
        for rank in range(world):
            found = group.ask(rank, "statistics")
            assert (found["fallback_bytes"], found["lost_owners"]) == (0, 0)
        nothing_is_leased(pool)


def total(answers: dict[int, Any]) -> int:
    assert all(answer["missing"] == [] for answer in answers.values()), answers
    return int(sum(answer["bytes"] for answer in answers.values()))


def test_memory_of_others_is_opened_once_and_closed_when_they_go(server: PoolProcess, tenant: str, folder: str) -> None:
    allocations = 3 * 4 - 3 + 2  # tensors of the cache, each one of its own, pad and staging
    with ranks(server.socket, tenant, 2, way="fused", **PATIENT, device={"folder": folder}) as group:
        before = Counter(group.ask(0, "metrics"))  # a forked process goes on counting from what its parent had
        for _ in range(2):
            load_all(group, dict.fromkeys(range(2), NUMBERS))
            assert group.ask(0, "device")["opened"] == allocations
        group.start(1)
        load_all(group, dict.fromkeys(range(2), NUMBERS))
        found = group.ask(0, "device")
        assert (found["opened"], found["calls"]["open"], found["calls"]["close"]) == (allocations, 2 * allocations, allocations)
        assert found["registered"] == found["calls"]["register"] == 1
        shown = Counter(group.ask(0, "metrics")) - before
        assert shown["umbp_loads_total['asked', 'fused']"] == 3
        assert shown["umbp_load_pages_total['restored']"] == 3 * len(NUMBERS)


def test_tensors_that_cannot_be_shared_are_reached_through_staging(
    server: PoolProcess, tenant: str, object_bytes: int, folder: str
) -> None:
    device = {"folder": folder, "failing": {"1": {"share_tensor": "expandable segments"}}}
    with ranks(server.socket, tenant, 2, way="fused", **PATIENT, device=device) as group:
        for _ in range(2):
            assert total(load_together(group, dict.fromkeys(range(2), NUMBERS))) == len(NUMBERS) * object_bytes
        found = [group.ask(rank, "statistics") for rank in range(2)]
        assert [(each["way"], each["cause"]) for each in found] == [("staged", "unmapped")] * 2
        assert all("expandable segments" in each["reason"] for each in found)


def test_a_rank_that_cannot_reach_others_is_reached_all_the_same(server: PoolProcess, tenant: str, object_bytes: int, folder: str) -> None:
    device = {"folder": folder, "failing": {"0": {"open": "no peer access"}}}
    with ranks(server.socket, tenant, 2, way="fused", **PATIENT, device=device) as group:
        answers = load_together(group, dict.fromkeys(range(2), NUMBERS))
        half = len(NUMBERS) // 2 * object_bytes
        assert total(answers) == 3 * half
        assert answers[0]["bytes"] == half
        assert group.ask(1, "statistics")["fallback_bytes"] == half


@pytest.mark.parametrize(("what", "cause"), [("allocate", "unreachable"), ("register", "no_meeting")])
def test_a_machine_that_lacks_something_loads_alone(
    server: PoolProcess, tenant: str, object_bytes: int, folder: str, what: str, cause: str
) -> None:
    device = {"folder": folder, "failing": {str(rank): {what: "there is none"} for rank in range(2)}}
    with ranks(server.socket, tenant, 2, way="fused", **PATIENT, device=device) as group:
        assert total(load_all(group, dict.fromkeys(range(2), NUMBERS))) == 2 * len(NUMBERS) * object_bytes
        found = group.ask(0, "statistics")
        assert (found["way"], found["cause"]) == ("solo", cause)
        assert "there is none" in found["reason"]


BEFORE_LAUNCH = 9  # point of `device_points`: the gates are open, the table posted, the deal announced; next is the push


def test_a_push_that_was_decided_on_and_comes_late_lands_nowhere(server: PoolProcess, tenant: str, folder: str) -> None:
    options = {**PATIENT, "patience_seconds": 0.2, "device": {"folder": folder}}
    with ranks(server.socket, tenant, 2, way="fused", **options) as group:
        group.tell(0, "load", numbers=NUMBERS, slots=slots_for(0, len(NUMBERS)).tolist(), deadline=50.0, what="stop", at=BEFORE_LAUNCH)
        group.tell(1, "load", numbers=NUMBERS, slots=slots_for(1, len(NUMBERS)).tolist(), deadline=50.0, sentinel=9)
        answer = group.hear(1)
        assert (answer["missing"], answer["wrong"]) == ([], []), "the other half is read in its place"
        assert group.stopped(0)
        group.children[0].signal(signal.SIGCONT)
        late = group.hear(0)
        assert late["wrong"] == []
        assert group.ask(1, "untouched", sentinel=9)
        assert group.ask(1, "statistics")["lost_owners"] == 1
        again = load_all(group, dict.fromkeys(range(2), NUMBERS))
        assert all(answer["missing"] == [] for answer in again.values())


def accidents(server: PoolProcess, tenant: str, folder: str, world: int, way: str, seed: int, runs: int) -> None:
    """As on the CPU, at points of the device's protocol: between any two launches, before the table, behind the announcement ..."""
    options = {"meet_seconds": 0.2, "patience_seconds": 0.2, "staging_bytes": 1 << 20, "device": {"folder": folder}}
    with umbp.connect(server.socket) as pool, ranks(server.socket, tenant, world, way=way, **options) as group:
        # All of it is the interpreter's work: a load takes a second, and was seen to take 46 on two cores that twenty others wanted.
        course = Accidents(group, pool, seed, NUMBERS, (180.0, 180.0, 3.0))
        course.slack, course.hear_seconds = 15.0, 240.0
        for run in range(runs):
            try:
                course.run()
            except BaseException as error:
                raise AssertionError(f"seed {seed}, run {run}") from error
        nothing_is_leased(pool)


@pytest.mark.parametrize(("way", "seed"), [("fused", 1), ("staged", 2)])
def test_whatever_happens_to_a_rank_the_other_has_its_bytes(server: PoolProcess, tenant: str, folder: str, way: str, seed: int) -> None:
    accidents(server, tenant, folder, 2, way, seed, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "way", "seed"), [(2, "fused", 11), (3, "fused", 12), (2, "staged", 13), (3, "staged", 14)])
def test_many_accidents(server: PoolProcess, tenant: str, folder: str, world: int, way: str, seed: int) -> None:
    accidents(server, tenant, folder, world, way, seed, 40)
