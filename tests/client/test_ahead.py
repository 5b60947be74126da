"""Memory that a client has before it asks: `umbp.core.spares` as a client sees it, plain and with asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import umbp
from tests.client.test_contract import Plain
from tests.field.people import Wire, becomes, bytes_of, keys_of, values_of
from tests.pools import PoolProcess
from umbp import Layout, ReadStatus, WriteStatus, wire
from umbp.client import link, opened
from umbp.client.steps import Call
from umbp.store import segment

SIZE = 16 << 10


@pytest.fixture(scope="module")
def server() -> Iterator[PoolProcess]:
    with PoolProcess(dram="64MiB") as running:
        yield running


def patient(patch: pytest.MonkeyPatch) -> None:
    """Puts of a busy machine come late."""
    patch.setattr(opened, "AHEAD_SECONDS_MAX", 60.0)
    patch.setattr(link, "SPARE_SECONDS", 60.0)


@pytest.fixture(params=["plain", "asyncio"])
async def pool(request: pytest.FixtureRequest, server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    patient(monkeypatch)
    made: Any = Plain(umbp.connect(server.socket)) if request.param == "plain" else await umbp.connect_async(server.socket)
    yield made
    await made.close()


@pytest.fixture
async def space(pool: Any, request: pytest.FixtureRequest) -> Any:
    return await pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), tenant=request.node.name)


def http(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="PUT" if body else "GET")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def buffer(count: int) -> np.ndarray:
    return np.zeros((count, SIZE), np.uint8)


async def put_series(space: Any, *batches: list[int]) -> list[list[str]]:
    """Put these batches one after the other; what was answered."""
    return [[each.code for each in await space.put(keys_of(*numbers), values_of(numbers, SIZE))] for numbers in batches]


async def test_who_puts_batch_after_batch_has_the_memory_before_it_asks(space: Any, pool: Any) -> None:
    before = pool.statistics().puts_ahead
    answers = await put_series(space, *([number, number + 1] for number in range(100, 120, 2)))
    assert answers == [["stored"] * 2] * 10
    assert pool.statistics().puts_ahead - before == 8, "all but the first two"
    out = buffer(20)
    assert (await space.get(keys_of(*range(100, 120)), out)).all(ReadStatus.HIT)
    assert (out == values_of(range(100, 120), SIZE)).all()


async def test_what_is_not_new_as_a_whole_is_answered_as_ever(space: Any, pool: Any, server: PoolProcess) -> None:
    before = pool.statistics().puts_ahead
    await put_series(space, [1, 101, 102], [103, 104, 105])
    (answer,) = await put_series(space, [106, 1, 106])  # 1 is stored
    assert answer == ["stored", "exists", "exists"]
    assert pool.statistics().puts_ahead == before + 1
    out = buffer(2)
    assert (await space.get(keys_of(106, 1), out)).all(ReadStatus.HIT)
    assert (out == values_of([106, 1], SIZE)).all()


async def test_memory_ahead_that_nobody_uses_is_given_back(
    space: Any, pool: Any, server: PoolProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_series(space, [100, 101], [102, 103], [104, 105])
    metrics = await asyncio.to_thread(http, f"{server.http}/metrics")
    assert f"umbp_spare_bytes {2 * SIZE}.0" in metrics, "none was given: this shows nothing"
    monkeypatch.setattr(link, "SPARE_SECONDS", 0.5)

    async def back() -> bool:
        status = await pool.status()
        return bool(status["used_bytes"] == sum(each["held_bytes"] for each in status["namespaces"]))

    await becomes(back, "it is given back")  # the background of a plain client slept when it was given


async def test_memory_ahead_of_a_namespace_that_is_closed_is_given_back_at_once(space: Any, pool: Any, server: PoolProcess) -> None:
    await put_series(space, [100, 101], [102, 103], [104, 105])
    metrics = await asyncio.to_thread(http, f"{server.http}/metrics")
    assert f"umbp_spare_bytes {2 * SIZE}.0" in metrics, "none was given: this shows nothing"
    await space.close()
    assert "umbp_spare_bytes 0.0" in await asyncio.to_thread(http, f"{server.http}/metrics")


async def test_memory_ahead_is_not_for_other_numbers_of_pages_nor_after_a_quota(space: Any, pool: Any, server: PoolProcess) -> None:
    before = pool.statistics().puts_ahead
    await put_series(space, [100, 101], [102, 103])
    assert await put_series(space, [104]) == [["stored"]]
    assert pool.statistics().puts_ahead == before
    await put_series(space, [110, 111])
    row = (space._inner if isinstance(space, Plain) else space)._operations.opened.row
    await asyncio.to_thread(http, f"{server.http}/v1/namespaces/{row}/quota", b'{"quota": "128KiB"}')
    for start in range(200, 240, 2):
        assert await put_series(space, [start, start + 1]) == [["stored"] * 2]
    assert sum((await space.lookup(keys_of(*range(200, 240)))).tolist()) <= 8, "the quota holds"


@contextlib.contextmanager
def small_pool() -> Iterator[tuple[PoolProcess, umbp.Namespace]]:
    """A pool of 1 MiB that evicts nothing before it is full, and a namespace of a client of it."""
    options = ("--watermark-high", "1.0", "--watermark-low", "0.99", "--lease-share", "1.0")
    with PoolProcess(*options, dram="1MiB") as server, umbp.connect(server.socket) as pool:
        yield server, pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE))


@contextlib.contextmanager
def full_but_for_one_ahead() -> Iterator[tuple[PoolProcess, umbp.Namespace, int]]:
    """A small pool where all pages are stored but one, which the client has ahead: pool, namespace, how many are stored."""
    with small_pool() as (server, space), pytest.MonkeyPatch.context() as patch:
        patient(patch)
        count = server.ready["dram_bytes"] // SIZE - 1
        for number in range(count):
            assert space.put(keys_of(number), values_of([number], SIZE))[0].code == "stored"
        assert f"umbp_spare_bytes {SIZE}.0" in http(f"{server.http}/metrics"), "none was given: this shows nothing"
        yield server, space, count


def test_memory_that_another_has_ahead_is_no_reason_to_refuse_a_put() -> None:
    """It is taken back at once, and who had it finds that out before its next put writes a byte."""
    with full_but_for_one_ahead() as (server, space, count), umbp.connect(server.socket) as other:
        theirs = other.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE))
        with theirs.lease(keys_of(*range(count))) as lease:
            assert lease.held.all()
            assert [each.code for each in theirs.put(keys_of(100, 101), values_of([100, 101], SIZE))] == ["stored", "all_leased"]
            with theirs.lease(keys_of(100)) as last:
                assert [each.code for each in space.put(keys_of(102), values_of([102], SIZE))] == ["all_leased"]
                assert (last.view(0) == values_of([100], SIZE)[0]).all()
        assert [each.code for each in space.put(keys_of(102), values_of([102], SIZE))] == ["stored"]


def test_memory_of_which_its_client_has_said_that_it_is_filled_is_not_taken_back() -> None:
    """Said, but not read by the pool yet: whichever of the two messages it reads first, the one that writes keeps its memory."""
    with small_pool() as (server, space), Wire(server.socket, SIZE) as session, Wire(server.socket, SIZE) as rival:
        stored = range(server.ready["dram_bytes"] // SIZE - 2)
        assert {each.code for each in space.put(keys_of(*stored), values_of(stored, SIZE))} == {"stored"}
        number, _, _, _ = session.reserve(keys_of(100))
        reply, blob = session.ask(wire.Commit(number, 1, spare=1), np.ones(1, np.uint8))
        assert blob.take(np.uint8, reply.n).tolist() == [WriteStatus.STORED]
        (offset,) = blob.take(np.int64, reply.k).tolist()
        mapped = segment.attach(session.welcome.segment, owner=False)
        with space.lease(keys_of(*stored, 100)) as lease, ThreadPoolExecutor(1) as thread:
            assert lease.held.all()
            server.signal(signal.SIGSTOP)
            try:
                use = wire.UseSpare(session.row, session.namespace_number(), 1, reply.spare)
                session.connection.send(Call(use, (keys_of(101),)))
                asked = thread.submit(rival.reserve, keys_of(102))
                mapped.data.array[offset : offset + SIZE] = bytes_of(101, SIZE)
            finally:
                server.signal(signal.SIGCONT)
            assert asked.result()[1].tolist() == [WriteStatus.ALL_LEASED]
            assert session.commit(reply.spare, 1).tolist() == [WriteStatus.STORED]
        mapped.close()
        out = buffer(1)
        assert space.get(keys_of(101), out).all(ReadStatus.HIT)
        assert (out[0] == bytes_of(101, SIZE)).all()


def test_memory_ahead_is_no_reason_to_refuse_a_put() -> None:
    """All but what this client has ahead is leased: a put of another number of pages gets that too."""
    with full_but_for_one_ahead() as (_, space, count), space.lease(keys_of(*range(count))) as lease:
        assert lease.held.all()
        assert [each.code for each in space.put(keys_of(100, 101), values_of([100, 101], SIZE))] == ["stored", "all_leased"]


def test_memory_that_is_given_back_for_a_put_costs_none_of_its_pages() -> None:
    """One page can go and one is ahead: two of three are stored, and stay."""
    with full_but_for_one_ahead() as (_, space, count), space.lease(keys_of(*range(1, count))) as lease:
        assert lease.held.all()
        answers = [each.code for each in space.put(keys_of(100, 101, 102), values_of([100, 101, 102], SIZE))]
        assert answers == ["stored", "stored", "all_leased"]
        assert space.lookup(keys_of(100, 101, 102)).tolist() == [True, True, False]
