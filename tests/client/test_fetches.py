"""Pages that are not in DRAM, through both faces of the client and a real pool process with two real sources (`tests.sourced`)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.client.test_contract import Plain
from tests.field.people import Child, Wire, becomes, bytes_of, eventually, keys_of, open_namespace, values_of, within
from tests.pools import PoolProcess
from umbp import Layout, ReadStatus, Tier, WriteStatus
from umbp.client import fetches
from umbp.store import segment
from umbp.types import NOWHERE, PrefetchState

SIZE = 64 << 10
SUSPECT_SECONDS = 1.0  # of a place that has failed once
WHILE_SUSPECT = (0, 200, 400, 600)  # other places, where the time is over before the second question
HIT, MISS, BUSY, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.BUSY, ReadStatus.FAILED


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sources were asked to read."""
    return tmp_path_factory.mktemp("sourced") / "log"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to come does, however busy the machine is."""
    monkeypatch.setattr(fetches, "FETCH_SECONDS", 30.0)


@contextlib.contextmanager
def held_up(log: Path) -> Iterator[None]:
    """The pages 12000 to 12999 do not come before the end of the block."""
    gate = log.with_name(f"{log.name}.gate")
    gate.unlink(missing_ok=True)
    try:
        yield
    finally:
        gate.touch()


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[PoolProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCED_LOG", str(log))
        with PoolProcess(module="tests.sourced", dram="16MiB") as running:
            yield running
            assert "Traceback" not in running.log()


@pytest.fixture(params=["plain", "asyncio"])
async def pool(request: pytest.FixtureRequest, server: PoolProcess) -> AsyncIterator[Any]:
    made: Any = Plain(umbp.connect(server.socket)) if request.param == "plain" else await umbp.connect_async(server.socket)
    yield made

    async def clean() -> bool:  # what was on its way when its caller left is there by now, and nothing of it is left
        status = await made.status()
        return [status[name] for name in ("reservations", "being_written", "abandoned", "leases")] == [0] * 4

    await becomes(clean, "nothing is left")
    await made.close()


@pytest.fixture
async def space(pool: Any, request: pytest.FixtureRequest, log: Path) -> Any:
    log.write_text("")
    return await pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), tenant=request.node.name)


@pytest.fixture
def face(request: pytest.FixtureRequest) -> int:
    """Hundreds of its own for each face, where a place gets a bad name."""
    return 100 if request.node.callspec.params["pool"] == "plain" else 200


def buffer(count: int) -> np.ndarray:
    return np.zeros((count, SIZE), np.uint8)


def same(out: np.ndarray, *numbers: int) -> bool:
    return bool((out == values_of(numbers, SIZE)).all())


async def test_a_get_brings_what_is_elsewhere(space: Any, log: Path) -> None:
    await space.put(keys_of(1), values_of([1], SIZE))
    out = buffer(4)
    assert await space.get(keys_of(1, 1001, 404, 5001), out, verify="always") == [HIT, HIT, MISS, HIT]
    assert same(out[[0, 1, 3]], 1, 1001, 5001)
    assert (await space.lookup(keys_of(1001, 5001, 404))).tolist() == [True, True, False]  # they are here now
    assert await space.get(keys_of(1001, 5001), out[:2], deadline=0) == [HIT, HIT]
    assert sorted(log.read_text().split("\n")[:-1]) == ["far 5001", "near 1001"]  # each by the cheapest who has it, once


async def test_a_get_of_dram_only_asks_nobody(space: Any, log: Path) -> None:
    assert (await space.get(keys_of(1002), buffer(1), deadline=0)).all(MISS)
    assert log.read_text() == ""


async def test_many_pages_come_in_order_and_whole(space: Any) -> None:
    numbers = range(1100, 1220)  # 7.5 MiB of 16
    out = buffer(120)
    assert (await space.get(keys_of(*numbers), out)).all(HIT)
    assert same(out, *numbers)


async def test_a_place_that_fails_is_excluded_and_the_other_asked(space: Any, log: Path, face: int) -> None:
    out, numbers = buffer(3), (2001 + face, 3001 + face, 4001 + face)
    assert (await space.get(keys_of(*numbers), out)).all(HIT)
    assert same(out, *numbers)  # near's bytes of 4001 did not match their checksum: they were never seen by anybody
    asked = log.read_text().split("\n")[:-1]
    assert sorted(asked) == sorted(f"{name} {number}" for name in ("near", "far") for number in numbers)
    for hundreds in WHILE_SUSPECT:
        began = time.monotonic()
        for number in (2003, 2004):
            assert (await space.get(keys_of(number + face + hundreds), out[:1])).all(HIT)
        if time.monotonic() - began < SUSPECT_SECONDS:
            assert f"near {2004 + face + hundreds}" not in log.read_text()  # that place is not asked for a while
            return
    raise AssertionError("this machine is too busy to ask twice within a second")


async def test_what_came_before_the_source_failed_is_there(space: Any, face: int) -> None:
    numbers, out = range(11_000 + face, 11_008 + face), buffer(8)
    statuses = await space.get(keys_of(*numbers), out)
    assert statuses == [HIT] * 7 + [FAILED]
    assert same(out[:7], *numbers[:7])
    assert (await space.get(keys_of(*numbers[:7]), out[:7], verify="always", deadline=0)).all(HIT)


async def test_pages_that_only_a_failed_place_has_are_a_quick_miss(space: Any, log: Path, face: int) -> None:
    for hundreds in WHILE_SUSPECT:
        began = time.monotonic()
        assert await space.get(keys_of(9001 + face + hundreds), buffer(1)) == [FAILED]
        second = await space.get(keys_of(9002 + face + hundreds), buffer(1))
        if time.monotonic() - began < SUSPECT_SECONDS:
            assert second == [MISS]
            assert f"near {9002 + face + hundreds}" not in log.read_text()
            return
    raise AssertionError("this machine is too busy to ask twice within a second")


async def test_a_place_that_never_answers_costs_its_share_of_the_time(space: Any, face: int) -> None:
    await space.put(keys_of(1), values_of([1], SIZE))
    out = buffer(3)
    with within(4.0):  # of which it has two
        assert await space.get(keys_of(1, 6001 + face, 8001 + face), out, deadline=4.0) == [HIT, HIT, FAILED]
    assert same(out[:2], 1, 6001 + face)  # the other place had time enough


async def test_partial_results_at_the_deadline(space: Any) -> None:
    numbers = [*range(7000, 7100), 1001]  # 6 MiB of slow pages: reads of a MiB, two at a time, take 1.2 s
    for tenths in range(5, 30):  # as soon as this machine brings some
        out = buffer(len(numbers))
        statuses = await space.get(keys_of(*numbers), out, deadline=tenths / 10)
        hits = np.flatnonzero(statuses.where(HIT))
        assert same(out[hits], *np.array(numbers)[hits].tolist())
        assert statuses.all(HIT, BUSY)
        if statuses[-1] == HIT and 1 < len(hits) < len(numbers):
            return
        await space.remove(keys_of(*numbers))
    raise AssertionError("it was all or nothing at every deadline")


async def test_a_get_from_a_pool_that_is_stopped_ends_by_its_deadline(
    space: Any, pool: Any, server: PoolProcess, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays, and what was asked for in vain is ended when the pool goes on (`pool` looks whether anything is left)."""
    for module in ("connection", "aio"):
        monkeypatch.setattr(f"umbp.client.{module}.CALL_SECONDS_MAX", 600.0)  # and no answer is too late for it
    await space.put(keys_of(1), values_of([1], SIZE))
    link, out = pool._link, buffer(2)
    server.signal(signal.SIGSTOP)
    try:
        for calls in range(1, 4):  # the first is left behind; the others find its answer outstanding
            assert await space.get(keys_of(1, 1700), out, deadline=0.05) == [HIT, BUSY]
            assert same(out[:1], 1)
            assert link.late.calls == calls
    finally:
        server.signal(signal.SIGCONT)
    assert await space.get(keys_of(1, 1700), out) == [HIT, HIT]
    assert same(out, 1, 1700)
    assert pool.statistics().connects == 1
    await becomes(lambda: asyncio.sleep(0, not link.late), "what was left behind is seen to")


async def test_memory_that_may_still_be_written_to_is_nobody_s(space: Any, pool: Any, face: int) -> None:
    numbers = range(10_000 + face, 10_020 + face)
    began = time.monotonic()
    assert (await space.get(keys_of(*numbers), buffer(20))).all(FAILED)
    being_written = (await pool.status())["being_written"]  # what had begun; the rest is not begun after that
    assert being_written > 0 or time.monotonic() - began > 1.0
    out = buffer(50)
    for start in range(0, 400, 50):  # through all of the memory, while it is written to
        others = range(start, start + 50)
        await space.put(keys_of(*others), values_of(others, SIZE))
        hits = np.flatnonzero((await space.get(keys_of(*others), out, deadline=0)).where(HIT))
        assert len(hits) > 0
        assert same(out[hits], *(start + hits).tolist())


async def test_any_number_of_callers_share_one_fetch(space: Any, log: Path) -> None:
    async def one() -> None:
        out = buffer(2)
        assert await space.get(keys_of(7100, 1300), out) == [HIT, HIT]
        assert same(out, 7100, 1300)

    await asyncio.gather(*(one() for _ in range(8)))
    assert sorted(log.read_text().split("\n")[:-1]) == ["near 1300", "near 7100"]


async def test_locate_says_the_tier(space: Any) -> None:
    await space.put(keys_of(1), values_of([1], SIZE))
    assert (await space.locate(keys_of(1, 1001, 5001, 404))).tolist() == [Tier.DRAM, Tier.SSD, Tier.REMOTE, NOWHERE]
    assert (await space.locate(keys_of(1))).tolist() == [Tier.DRAM]
    assert len(await space.locate(keys_of()[:0])) == 0


async def test_prefetch_and_its_status(space: Any) -> None:
    async def ended(name: str) -> Any:
        async def over() -> bool:
            return bool((await space.prefetch_status(name)).over)

        await becomes(over, "it is over")
        return await space.prefetch_status(name)

    first = await space.prefetch(keys_of(1001, 1002, 404), request_id="r1")
    assert first.state in (PrefetchState.QUEUED, PrefetchState.RUNNING)
    assert (await ended("r1")).state == PrefetchState.PARTIAL
    assert (await space.prefetch_status("r1")).there.tolist() == [True, True, False]
    again = await space.prefetch(keys_of(1001, 1002, 404), request_id="r1")
    assert (again.state, again.left) == (PrefetchState.PARTIAL, 0)
    with pytest.raises(umbp.Conflict):
        await space.prefetch(keys_of(1001), request_id="r1")
    with pytest.raises(umbp.NotFound):
        await space.prefetch_status("r9")
    named = await space.prefetch(keys_of(1001, 1002))
    assert (named.state, named.there.all()) == (PrefetchState.READY, True)
    assert (await space.prefetch(keys_of(404), request_id="r2")).request_id == "r2"
    assert (await ended("r2")).state == PrefetchState.FAILED
    await space.prefetch(keys_of(8001, 1003), request_id="r3", deadline=1.5)
    assert (await ended("r3")).state in (PrefetchState.EXPIRED, PrefetchState.PARTIAL)
    assert (await space.lookup(keys_of(1003))).all()


async def test_bad_arguments_are_named(space: Any) -> None:
    for call in (
        lambda: space.get(keys_of(1), buffer(1), deadline=-1),
        lambda: space.get(keys_of(1), buffer(1), deadline="soon"),
        lambda: space.prefetch(keys_of(1), request_id=7),
        lambda: space.prefetch(keys_of(1), deadline=1e9),
        lambda: space.prefetch(np.zeros((5000, 32), np.uint8)),
        lambda: space.prefetch(keys_of(1), hold=-1),
        lambda: space.prefetch_status(""),
    ):
        with pytest.raises(umbp.InvalidRequest):
            await call()


async def on_its_way(pool: Any) -> None:
    """Until a fetch has begun."""

    async def begun() -> bool:
        return bool((await pool.status())["being_written"])

    await becomes(begun, "a fetch has begun")


async def test_a_flush_while_pages_are_on_their_way(pool: Any, space: Any, face: int, log: Path) -> None:
    async def get() -> Any:
        call = asyncio.to_thread(space._inner.get, keys, buffer(1)) if isinstance(space, Plain) else space.get(keys, buffer(1))
        return await call

    keys = keys_of(12_000 + face)
    with held_up(log):
        task = asyncio.ensure_future(get())
        await on_its_way(pool)
        await space.flush()
    assert (await task).all(MISS)
    assert not (await space.lookup(keys)).any()


async def test_cancelled_while_it_waits_leaves_nothing(server: PoolProcess, log: Path) -> None:
    async with await umbp.connect_async(server.socket) as pool:
        space = await pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), tenant="cancelled")
        with held_up(log):
            task = asyncio.ensure_future(space.get(keys_of(12_300), buffer(1)))
            await on_its_way(pool)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await pool.status())["leases"] == 0
        assert (await space.get(keys_of(12_300), buffer(1))).all(HIT)  # its fetch went on, or begins again


def test_a_client_that_dies_while_it_waits_leaves_nothing(server: PoolProcess, log: Path) -> None:
    def wait(child: Child, socket: str) -> None:
        space = open_namespace(umbp.connect(socket), SIZE, tenant="dies")
        child.say("waiting")
        space.get(keys_of(*range(12_400, 12_440)), buffer(40))
        child.say("not killed")

    with Child(wait, server.socket) as child, umbp.connect(server.socket) as pool:
        with held_up(log):
            assert child.hear() == "waiting"
            eventually(lambda: pool.status()["being_written"], "the fetch has begun")
            child.kill()
        eventually(lambda: not pool.status()["being_written"], "its pages have come or were given up")
        eventually(lambda: (s := pool.status())["leases"] == s["reservations"] == 0, "nothing is held any more")


def test_a_page_that_a_client_is_writing_is_waited_for(server: PoolProcess) -> None:
    with Wire(server.socket, SIZE, tenant="writer") as writer, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE, tenant="writer")
        number, _, ids, offsets = writer.reserve(keys_of(1500))
        out, said = buffer(1), []
        thread = threading.Thread(target=lambda: said.append(space.get(keys_of(1500), out)))
        thread.start()
        mapped = segment.attach(writer.welcome.segment, owner=False)
        mapped.data.array[offsets[0] : offsets[0] + SIZE] = 9
        time.sleep(0.05)
        assert not said
        assert writer.commit(number, len(ids)).tolist() == [WriteStatus.STORED]
        thread.join(60)
        assert said[0].all(HIT)
        assert (out == 9).all()  # the client's bytes, not another copy of the source's
        mapped.close()


def test_a_pool_that_is_killed_while_pages_are_on_their_way_forgets_them(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCED_LOG", str(log))
    with held_up(log), PoolProcess(module="tests.sourced", dram="16MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        said: list[Any] = []
        numbers = range(12_600, 12_664)
        thread = threading.Thread(target=lambda: said.append(space.get(keys_of(*numbers), buffer(64), deadline=5.0)))
        thread.start()
        eventually(lambda: pool.status()["being_written"], "the fetch has begun")
        server.kill()
        thread.join(60)
        assert said[0].all(BUSY, HIT)
        server.restart()
        eventually(lambda: pool.connected, "the client is back")
        status = pool.status()
        assert [status[name] for name in ("being_written", "abandoned", "reservations")] == [0] * 3
        assert status["used_bytes"] == status["keys"] * SIZE
        out = buffer(2)
        assert space.get(keys_of(1001, 5001), out).all(HIT)
        assert same(out, 1001, 5001)


@pytest.mark.parametrize("options", [("--fetch", "pass_through"), ("--admission", "second_touch")])
def test_pages_that_only_pass_through_are_gone_after_their_use(options: tuple[str, ...]) -> None:
    with PoolProcess(*options, module="tests.sourced", dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        space.put(keys_of(*range(80)), values_of(range(80), SIZE))  # the admission policy begins at half full
        stored, out = pool.status()["used_bytes"], buffer(20)
        assert space.get(keys_of(*range(1000, 1020)), out).all(HIT)
        assert same(out, *range(1000, 1020))
        eventually(lambda: not space.lookup(keys_of(*range(1000, 1020))).any(), "they are gone")
        eventually(lambda: pool.status()["used_bytes"] == stored, "their memory too")


def test_more_than_fits_evicts_and_never_waits_for_ever(server: PoolProcess) -> None:
    with umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE, tenant="more than fits")
        numbers = range(1000, 1400)  # 25 MiB into 16
        out = buffer(400)
        statuses = space.get(keys_of(*numbers), out, deadline=5.0)
        hits = np.flatnonzero(statuses.where(HIT))
        assert len(hits) > 100
        assert same(out[hits], *(1000 + hits).tolist())
        assert statuses.all(HIT, BUSY, MISS)
        assert space.put(keys_of(1), values_of([1], SIZE)).all(WriteStatus.STORED)


def test_a_pool_without_sources_answers_a_miss_without_a_call() -> None:
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        calls, call = [], pool.call
        pool.call = lambda step: calls.append(step) or call(step)  # type: ignore[method-assign]
        assert space.get(keys_of(1001), buffer(1)).all(MISS)
        assert space.locate(keys_of(1001)).tolist() == [NOWHERE]
        assert calls == []
        assert space.prefetch(keys_of(1001)).state == PrefetchState.FAILED
        assert bytes_of(1, 8).any()
