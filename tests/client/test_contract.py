"""One contract for both faces of the client: what `umbp.connect` promises, `umbp.connect_async` promises too.

Each test is written once, awaited; the plain face runs behind `Plain`, which only hands calls on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Wire, becomes, bytes_of, keys_of, values_of
from tests.pools import PoolProcess
from umbp import Layout, ReadStatus, WriteStatus
from umbp.client import mover

SIZE = 512 << 10  # above what asyncio copies in the loop itself


class Plain:
    """A plain pool or namespace with the shape of the asynchronous one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in ("statistics", "connected", "object_bytes", "identity") or not callable(found):
            return found
        if name == "lease":
            return self._lease

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return Plain(result) if isinstance(result, umbp.Namespace) else result

        return call

    @contextlib.asynccontextmanager
    async def _lease(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with self._inner.lease(*args, **kwargs) as lease:
            yield lease


Connect = Callable[[], Awaitable[Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[PoolProcess]:
    with PoolProcess(dram="48MiB") as running:
        yield running


@pytest.fixture(params=["plain", "asyncio"])
async def pool(request: pytest.FixtureRequest, server: PoolProcess) -> AsyncIterator[Any]:
    made: Any = Plain(umbp.connect(server.socket)) if request.param == "plain" else await umbp.connect_async(server.socket)
    yield made
    await made.close()
    await made.close()  # the second time does nothing


@pytest.fixture
async def space(pool: Any, request: pytest.FixtureRequest) -> Any:
    """A namespace of the test's own, with pages 1, 2 and 3 stored."""
    made = await pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), tenant=request.node.name)
    assert (await made.put(keys_of(1, 2, 3), values_of([1, 2, 3], SIZE))).all(WriteStatus.STORED)
    return made


def buffer(count: int) -> np.ndarray:
    return np.zeros((count, SIZE), np.uint8)


# -- the contract --------------------------------------------------------------------------------------------------------------------


async def test_what_was_put_is_what_is_got(space: Any) -> None:
    out = buffer(4)
    assert await space.get(keys_of(1, 2, 404, 3), out) == [ReadStatus.HIT, ReadStatus.HIT, ReadStatus.MISS, ReadStatus.HIT]
    for row, number in ((0, 1), (1, 2), (3, 3)):
        assert (out[row] == bytes_of(number, SIZE)).all()
    assert (await space.lookup(keys_of(1, 404, 2))).tolist() == [True, False, True]
    assert await space.prefix(keys_of(1, 2, 404, 3)) == 2
    assert await space.prefix(keys_of(1, 2)) == 2
    assert space.object_bytes == SIZE


async def test_arrays_and_lists_of_buffers_are_the_same(space: Any) -> None:
    keys = [key.tobytes() for key in keys_of(1, 2, 9)]
    assert await space.put(keys, [bytes(SIZE), bytearray(SIZE), memoryview(bytes_of(9, SIZE))]) == [
        WriteStatus.EXISTS,
        WriteStatus.EXISTS,
        WriteStatus.STORED,
    ]
    out = [bytearray(SIZE), np.zeros(SIZE, np.uint8), np.zeros((8, SIZE // 8), np.uint8)]
    assert (await space.get(keys, out, verify="always")).all(ReadStatus.HIT)
    for each, number in zip(out, (1, 2, 9), strict=True):
        assert bytes(each) == bytes_of(number, SIZE).tobytes()
    words = np.zeros((1, SIZE // 8), np.uint64)  # any type, as long as the bytes agree
    assert (await space.get(keys_of(9), words)).all(ReadStatus.HIT)
    assert (words.view(np.uint8)[0] == bytes_of(9, SIZE)).all()


async def test_batch_of_one_key_twice(space: Any) -> None:
    status = await space.put(keys_of(5, 5, 1, 5), values_of([5, 5, 1, 5], SIZE))
    assert status == [WriteStatus.STORED, WriteStatus.EXISTS, WriteStatus.EXISTS, WriteStatus.EXISTS]
    out = buffer(3)
    assert (await space.get(keys_of(5, 5, 5), out)).all(ReadStatus.HIT)
    assert (out == bytes_of(5, SIZE)).all()


async def test_lease_shows_bytes_in_place_until_it_ends(space: Any, pool: Any) -> None:
    async with space.lease(keys_of(1, 404, 3)) as lease:
        assert lease.held.tolist() == [True, False, True]
        view = lease.view(2)
        assert (view == bytes_of(3, SIZE)).all()
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        await space.remove(keys_of(1, 3))
        assert (lease.view(0) == bytes_of(1, SIZE)).all()
        assert lease.check().tolist() == [True, False, True]
        assert (await pool.status())["leases"] == 1
    assert (await pool.status())["leases"] == 0
    with pytest.raises(umbp.LeaseLost):
        lease.view(0)


async def test_lease_ends_with_an_exception_in_the_block(space: Any, pool: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with space.lease(keys_of(1)):
            raise ZeroDivisionError
    assert (await pool.status())["leases"] == 0


async def test_remove_flush_and_pins(space: Any, pool: Any) -> None:
    assert (await space.remove(keys_of(2, 404))).tolist() == [True, False]
    assert (await space.get(keys_of(2), buffer(1))).all(ReadStatus.MISS)
    number = await space.pin(keys_of(1, 3), note="system prompt")
    assert (await pool.status())["pins"] == 1
    await space.unpin(number)
    with pytest.raises(umbp.NotFound):
        await space.unpin(number)
    assert await space.flush() == 2
    assert not (await space.lookup(keys_of(1, 3))).any()


async def test_bad_calls_are_typed_and_cost_nothing(space: Any, pool: Any) -> None:
    for call in (
        lambda: space.put(keys_of(7), buffer(2)),
        lambda: space.put(keys_of(7), np.zeros((1, SIZE - 1), np.uint8)),
        lambda: space.get([b"short"], buffer(1)),
        lambda: space.get(keys_of(1), buffer(1), verify="perhaps"),
        lambda: space.lookup("k"),
        lambda: space.pin(keys_of(1), -1),
    ):
        with pytest.raises(umbp.InvalidRequest):
            await call()
    assert pool.statistics().connects == 1
    assert (await space.lookup(keys_of(1, 2, 3))).all()


async def test_history_reaches_the_pool_as_one_note_a_request(space: Any, pool: Any) -> None:
    before = (await pool.status())["counters"]
    assert (await space.lookup(keys_of(1, 2, 404), session="chat 1")).sum() == 2

    async def noted() -> bool:
        return bool((await pool.status())["counters"]["noted_requests"] > before["noted_requests"])

    await becomes(noted, "the note has come")
    now = (await pool.status())["counters"]
    assert now["noted_requests"] - before["noted_requests"] == 1
    assert now["lookups"] - before["lookups"] == 3
    assert now["hits"] - before["hits"] == 2


async def test_history_is_of_the_keys_as_they_were_asked_for(space: Any, pool: Any) -> None:
    await pool.flush_notes()
    before = (await pool.status())["counters"]["noted_requests"]
    keys = np.empty((3, 32), np.uint8)
    for number in range(10, 15):  # an engine fills the same array for each request
        keys[:] = keys_of(number, number + 1, number + 2)
        await space.lookup(keys)
    keys[:] = 0

    async def noted() -> bool:
        return bool((await pool.status())["counters"]["noted_requests"] - before == 5)

    await becomes(noted, "all notes have come")


async def test_pages_written_in_place_are_stored(space: Any) -> None:
    def fill(which: np.ndarray, data: np.ndarray, offsets: np.ndarray) -> None:
        for item, offset in zip(which.tolist(), offsets.tolist(), strict=True):
            data[offset : offset + SIZE] = 10 + item

    status = await space.fill(keys_of(3, 4, 5), fill)
    assert status == [WriteStatus.EXISTS, WriteStatus.STORED, WriteStatus.STORED]
    out = buffer(2)
    assert (await space.get(keys_of(4, 5), out)).all(ReadStatus.HIT)
    assert (out == [[11], [12]]).all()


async def test_unknown_field_of_a_namespace_is_named(pool: Any) -> None:
    with pytest.raises(umbp.InvalidRequest, match=r"flavour.*adapter"):
        await pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), flavour="vanilla")
    assert pool.connected


async def test_any_number_of_callers_at_a_time(space: Any) -> None:
    async def one(number: int) -> None:
        out = buffer(1)
        assert (await space.put(keys_of(number), values_of([number], SIZE))).all(WriteStatus.STORED)
        assert (await space.get(keys_of(number), out)).all(ReadStatus.HIT)
        assert (out[0] == bytes_of(number, SIZE)).all()
        async with space.lease(keys_of(number, 1)) as lease:
            await asyncio.sleep(0)
            assert lease.held.all()

    await asyncio.gather(*(one(number) for number in range(100, 120)))


@pytest.mark.parametrize("face", ["plain", "asyncio"])
async def test_restart_and_close(face: str) -> None:
    with PoolProcess(dram="8MiB") as own:
        made: Any = Plain(umbp.connect(own.socket)) if face == "plain" else await umbp.connect_async(own.socket)
        space = await made.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE))
        await space.put(keys_of(1), values_of([1], SIZE))
        own.kill()
        out = buffer(1)
        assert set(await space.get(keys_of(1), out)) <= {ReadStatus.HIT, ReadStatus.BUSY}
        assert (await space.put(keys_of(2), values_of([2], SIZE))).all(WriteStatus.UNAVAILABLE)
        assert (await space.get(keys_of(1), out, verify="always")).all(ReadStatus.BUSY)
        with pytest.raises(umbp.Unavailable):
            await space.flush()
        with pytest.raises(umbp.Unavailable):
            await made.status()
        own.restart()

        async def connected() -> bool:
            return bool(made.connected)

        await becomes(connected, "connected again")
        assert (await space.get(keys_of(1), out, verify="always")).all(ReadStatus.HIT)
        assert (await space.put(keys_of(2), values_of([2], SIZE))).all(WriteStatus.STORED)
        await made.close()
        assert (await space.put(keys_of(3), values_of([3], SIZE))).all(WriteStatus.UNAVAILABLE)
        assert (await space.get(keys_of(1), out)).all(ReadStatus.BUSY)
        assert not (await space.lookup(keys_of(1))).any()
        with pytest.raises(umbp.Unavailable):
            await space.remove(keys_of(1))
        async with space.lease(keys_of(1)) as lease:
            assert not lease.held.any()


# -- cancellation --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def aio(server: PoolProcess) -> AsyncIterator[umbp.AsyncPool]:
    async with await umbp.connect_async(server.socket) as made:
        yield made


async def _open(pool: umbp.AsyncPool, tenant: str) -> umbp.AsyncNamespace:
    return await pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), tenant=tenant)


@pytest.mark.parametrize("message", ["Reserve", "Commit", "TakeLease", "Release", "Pin"])
async def test_cancelled_in_any_call_leaks_nothing(aio: umbp.AsyncPool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled between a request and its answer: what the answer names is given back, and the answers stay with their requests."""
    space = await _open(aio, f"cancelled in {message}")
    await space.put(keys_of(1), values_of([1], SIZE))
    reached, go, call = asyncio.Event(), asyncio.Event(), aio.call

    async def slow(step: Any) -> Any:
        result = await call(step)
        if type(step.message).__name__ == message and not reached.is_set():
            reached.set()
            await go.wait()
        return result

    monkeypatch.setattr(aio, "call", slow)

    async def lease() -> None:
        async with space.lease(keys_of(1)):
            pass

    acts: dict[str, Callable[[], Any]] = {"TakeLease": lease, "Release": lease, "Pin": lambda: space.pin(keys_of(1))}
    task = asyncio.ensure_future(acts.get(message, lambda: space.put(keys_of(8, 9), values_of([8, 9], SIZE)))())
    await reached.wait()
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    status = await aio.status()
    assert [status[name] for name in ("reservations", "being_written", "abandoned", "leases", "pins")] == [0] * 5
    stored = await space.lookup(keys_of(8, 9))
    assert stored.all() if message == "Commit" else not stored.any()
    assert (await space.put(keys_of(8, 9), values_of([8, 9], SIZE))).all(WriteStatus.STORED, WriteStatus.EXISTS)
    out = buffer(2)
    assert (await space.get(keys_of(8, 9), out)).all(ReadStatus.HIT)
    assert (out == values_of([8, 9], SIZE)).all()
    assert aio.statistics().connects == 1


async def test_cancelled_in_the_copy_leaks_nothing_and_waits_for_the_copy(aio: umbp.AsyncPool, monkeypatch: pytest.MonkeyPatch) -> None:
    space = await _open(aio, "cancelled in the copy")
    copying, go, copy, ended = threading.Event(), threading.Event(), mover.scatter, []

    def slow(data: Any, offsets: Any, values: Any, *, beside: bool) -> None:
        copying.set()
        assert go.wait(60)
        copy(data, offsets, values)
        ended.append(True)

    monkeypatch.setattr(mover, "scatter", slow)
    task = asyncio.ensure_future(space.put(keys_of(8, 9), values_of([8, 9], SIZE)))
    assert await asyncio.to_thread(copying.wait, 60)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()  # an impatient one
    await asyncio.sleep(0.01)
    assert not task.done()  # the thread is using the caller's memory
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    monkeypatch.setattr(mover, "scatter", copy)
    status = await aio.status()
    assert [status[name] for name in ("reservations", "being_written", "abandoned")] == [0] * 3
    assert not (await space.lookup(keys_of(8, 9))).any()
    assert (await space.put(keys_of(8), values_of([8], SIZE))).all(WriteStatus.STORED)


async def test_cancelled_while_it_waits_for_another_writer(aio: umbp.AsyncPool, server: PoolProcess) -> None:
    space = await _open(aio, "waits")
    with Wire(server.socket, SIZE, tenant="waits") as other:
        number, _, ids, _ = other.reserve(keys_of(8))
        task = asyncio.ensure_future(space.put(keys_of(8), values_of([8], SIZE)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert other.commit(number, len(ids)).tolist() == [WriteStatus.STORED]
    assert (await space.lookup(keys_of(8))).all()


async def test_tasks_cancelled_at_random_leak_nothing_and_mix_nothing(aio: umbp.AsyncPool) -> None:
    space = await _open(aio, "at random")
    chance = np.random.default_rng(11)

    async def one(number: int) -> None:
        out = buffer(1)
        await space.put(keys_of(number), values_of([number], SIZE))
        if (await space.get(keys_of(number), out)).all(ReadStatus.HIT):
            assert (out[0] == bytes_of(number, SIZE)).all()
        async with space.lease(keys_of(number)) as lease:
            await asyncio.sleep(0.001)
            if lease.held.all():
                assert (lease.view(0) == bytes_of(number, SIZE)).all()
        await space.pin(keys_of(number), 0.5)

    for turn in range(6):
        tasks = [asyncio.ensure_future(one(turn * 100 + number)) for number in range(12)]
        for task in tasks:
            await asyncio.sleep(float(chance.random()) * 0.004)
            if chance.random() < 0.7:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results

    async def unpinned() -> bool:
        return (await aio.status())["pins"] == 0

    await becomes(unpinned, "the pins' time is over")
    status = await aio.status()
    assert [status[name] for name in ("reservations", "being_written", "abandoned", "leases")] == [0] * 4
    assert aio.statistics().connects == 1


async def test_close_with_calls_on_their_way_is_bounded(server: PoolProcess) -> None:
    pool = await umbp.connect_async(server.socket)
    space = await _open(pool, "closing")
    tasks = [asyncio.ensure_future(space.put(keys_of(n), values_of([n], SIZE))) for n in range(8)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await pool.close()
        for status in await asyncio.gather(*tasks):
            assert status.all(WriteStatus.STORED, WriteStatus.UNAVAILABLE)


async def test_close_gives_back_what_is_being_filled_once_nobody_fills_it(
    pool: Any, server: PoolProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives on, so nothing else would ever tell the pool that its memory is free."""
    for face in ("aio", "sync"):
        monkeypatch.setattr(f"umbp.client.{face}.CLOSE_SECONDS_MAX", 60.0)  # a busy machine may not let the thread end within two
    closing: Any = Plain(umbp.connect(server.socket)) if isinstance(pool, Plain) else await umbp.connect_async(server.socket)
    space = await closing.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), tenant="closing")
    filling, goes_on = threading.Event(), threading.Event()

    def fill(items: np.ndarray, data: np.ndarray, offsets: np.ndarray) -> None:
        filling.set()
        assert goes_on.wait(60)

    async def in_thread(function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return await asyncio.to_thread(asyncio.run, function(*args)) if isinstance(pool, Plain) else await function(*args)

    put = asyncio.ensure_future(in_thread(space.fill, keys_of(1), fill))
    assert await asyncio.to_thread(filling.wait, 60)
    end = asyncio.ensure_future(in_thread(closing.close))
    await becomes(lambda: asyncio.sleep(0, closing.connected is False), "it is being closed")
    goes_on.set()
    await end
    assert (await put).all(WriteStatus.UNAVAILABLE)
    status = await pool.status()
    assert (status["abandoned"], status["being_written"]) == (0, 0)


async def test_a_namespace_that_was_closed_says_so_and_can_be_opened_again(space: Any, pool: Any) -> None:
    async def open_again() -> Any:
        return await pool.namespace(model="m", page_tokens=64, layout=Layout.opaque(SIZE), tenant=space.identity.tenant)

    async def sessions() -> int:
        rows = (await pool.status())["namespaces"]
        return sum(each["sessions"] for each in rows if each["identity"]["tenant"] == space.identity.tenant)

    other = await open_again()
    async with space.lease(keys_of(1)) as lease:
        await space.close()
        assert (lease.view(0) == bytes_of(1, SIZE)).all()
    await space.close()
    assert space.object_bytes == SIZE
    calls = [
        lambda: space.put(keys_of(4), values_of([4], SIZE)),
        lambda: space.get(keys_of(1), buffer(1)),
        lambda: space.lookup(keys_of(1)),
        lambda: space.prefix(keys_of(1)),
        lambda: space.remove(keys_of(1)),
        lambda: space.pin(keys_of(1)),
        lambda: space.prefetch(keys_of(1)),
        lambda: space.flush(),
        lambda: space.lease(keys_of(1)).__aenter__(),
    ]
    for call in calls:
        with pytest.raises(umbp.InvalidRequest, match="this namespace was closed"):
            await call()
    assert (await other.lookup(keys_of(1, 2, 3))).all(), "another handle of it is open"
    assert await sessions() == 1
    await other.close()
    assert await sessions() == 0
    again = await open_again()
    out = buffer(3)
    assert (await again.get(keys_of(1, 2, 3), out)).all(ReadStatus.HIT)
    assert (out == values_of([1, 2, 3], SIZE)).all()
    assert await sessions() == 1


@pytest.mark.parametrize("when", ["opening", "its turn", "closing"])
async def test_opening_or_closing_that_is_cancelled_leaves_nothing_open(
    aio: umbp.AsyncPool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = f"cancelled in {when}"
    space = None if when == "opening" else await _open(aio, tenant)
    reached, go, call = asyncio.Event(), asyncio.Event(), aio.call

    async def slow(step: Any) -> Any:
        result = await call(step)
        if not reached.is_set():
            reached.set()
            await go.wait()
        return result

    monkeypatch.setattr(aio, "call", slow)
    first = asyncio.ensure_future(_open(aio, "before it")) if when == "its turn" else None
    if first is not None:
        await reached.wait()
    task: asyncio.Task[Any] = asyncio.ensure_future(_open(aio, tenant) if space is None else space.close())
    await (reached.wait() if first is None else asyncio.sleep(0))
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    if first is not None:
        await first
    rows = (await aio.status())["namespaces"]
    assert [each["sessions"] for each in rows if each["identity"]["tenant"] == tenant] in ([], [0])
