"""Pages of a real pool process over HTTP: right bytes or a refusal, whatever the peer, the reader or the pool's memory do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually, keys_of, open_namespace, values_of, within
from tests.masters import free_port
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus, wire
from umbp.errors import NotFound, ProtocolError, UmbpError, Unauthorized
from umbp.grammar import parse_address
from umbp.store.checksums import checksum
from umbp.transport.base import FRAME_TYPE, PAGES_PATH, Granted, Order, Peer, decode_granted
from umbp.transport.http import HttpTransport, Receive

SIZE = 256 << 10
HIT, MISS, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.FAILED


@pytest.fixture(scope="module")
def server() -> Iterator[PoolProcess]:
    with PoolProcess(dram="48MiB") as running:
        yield running
        assert "Traceback" not in running.log(), running.log()


@pytest.fixture
def pool(server: PoolProcess) -> Iterator[umbp.Pool]:
    with umbp.connect(server.socket) as client:
        yield client
        eventually(lambda: client.status()["leases"] == 0, "every grant was given back")


@pytest.fixture
def space(pool: umbp.Pool, request: pytest.FixtureRequest) -> Any:
    return open_namespace(pool, SIZE, tenant=request.node.name)


@pytest.fixture
async def transport() -> AsyncIterator[HttpTransport]:
    made = HttpTransport()
    yield made
    await made.close()


def peer_of(server: PoolProcess) -> Peer:
    return Peer(server.name, int(server.ready["boot"]), parse_address(str(server.ready["http"])))


def digest_of(space: Any) -> str:
    return str(space.identity.digest().hex())


async def read(
    transport: HttpTransport, peer: Peer, space: Any, keys: np.ndarray, *, deadline: float = 30.0, gap: int = 0
) -> tuple[Any, np.ndarray]:
    """What came, and the rows; ``gap`` bytes between them, which must stay what they were."""
    size = space.object_bytes
    data = np.full(len(keys) * (size + gap), 0xAA, np.uint8)
    offsets = np.arange(len(keys)) * (size + gap)
    came: list[tuple[int, int]] = []  # (page, checksum) of those said to be there before the end

    def note(which: np.ndarray, sums: np.ndarray) -> None:
        came.extend(zip(which.tolist(), sums.tolist(), strict=True))

    moved = await transport.read(peer, digest_of(space), size, keys, data, offsets, time.monotonic() + deadline, note)
    assert all(moved.status[page] == HIT and moved.sums[page] == made for page, made in came)
    rows = data.reshape(len(keys), size + gap)
    assert (rows[:, size:] == 0xAA).all()
    return moved, rows[:, :size]


def store(space: Any, *numbers: int) -> np.ndarray:
    values = values_of(numbers, space.object_bytes)
    assert space.put(keys_of(*numbers), values).all(WriteStatus.STORED)
    return values


# -- what it does --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("size", [1, 4096, 100_001, 3 << 20])
async def test_pages_come_whole_and_in_their_places(
    transport: HttpTransport, server: PoolProcess, pool: umbp.Pool, size: int, gap: int
) -> None:
    space = open_namespace(pool, size, tenant=f"whole {size} {gap}")
    values = store(space, 1, 2, 3, 4)
    moved, rows = await read(transport, peer_of(server), space, keys_of(3, 404, 1, 4, 2), gap=gap)
    assert moved.status.tolist() == [HIT, MISS, HIT, HIT, HIT]
    assert (rows[[0, 2, 3, 4]] == values[[2, 0, 3, 1]]).all()
    assert (rows[1] == 0xAA).all()
    assert moved.sums[[0, 2]].tolist() == [checksum(values[2].data), checksum(values[0].data)]
    assert moved.size_bytes == 4 * size


async def test_pages_are_said_to_be_there_while_others_are_on_their_way(transport: HttpTransport, server: PoolProcess, space: Any) -> None:
    numbers = range(80)  # 20 MiB by two connections, each of which says half of what is left, but no less than four
    values, keys = store(space, *numbers), keys_of(404, *numbers)
    data, offsets = np.zeros(81 * SIZE, np.uint8), np.arange(81)[::-1] * SIZE
    pieces: list[list[int]] = []

    def came(which: np.ndarray, sums: np.ndarray) -> None:
        for page, made in zip(which.tolist(), sums.tolist(), strict=True):
            assert made == checksum(values[page - 1].data) == checksum(data[offsets[page] : offsets[page] + SIZE].data)
        pieces.append(which.tolist())

    moved = await transport.read(peer_of(server), digest_of(space), SIZE, keys, data, offsets, time.monotonic() + 60, came)
    assert moved.status.tolist() == [MISS] + [HIT] * 80
    assert sorted(map(len, pieces)) == [4, 4, 16, 16, 20, 20]
    assert all(piece == sorted(piece) for piece in pieces)
    assert sorted(page for piece in pieces for page in piece) == list(range(1, 81))


async def test_a_connection_is_used_again_and_replaced_when_it_is_broken(
    server: PoolProcess, pool: umbp.Pool, transport: HttpTransport
) -> None:
    space = open_namespace(pool, SIZE, tenant="again")
    store(space, 1)
    for _ in range(3):
        assert (await read(transport, peer_of(server), space, keys_of(1)))[0].status.tolist() == [HIT]
    ((line,),) = transport._idle.values()
    line.cut()
    assert (await read(transport, peer_of(server), space, keys_of(1)))[0].status.tolist() == [HIT]


async def test_pages_that_were_said_to_be_there_are_not_written_again(transport: HttpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept connection that breaks in the middle of an order is an error: on a new one the same pages would be received once more."""
    monkeypatch.setattr(transport, "lanes_max", 1)
    keys, values = keys_of(*range(12)), values_of(range(12), 1 << 20)
    sums = np.array([checksum(page.data) for page in values], np.uint64)
    orders: list[int] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for whole in (True, False):
                rest = b""
                while b"\r\n\r\n" not in rest:
                    rest += connection.recv(65536)
                head, _, rest = rest.partition(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) - 1
                while len(rest) < size:
                    rest += connection.recv(65536)
                orders.append(len(rest))
                frame = wire.encode(Granted(12, 12), np.ones(12, np.uint8), sums, np.zeros(12, np.int64))
                answer = f"HTTP/1.1 200 OK\r\nContent-Type: {FRAME_TYPE}\r\nContent-Length: {len(frame) + values.nbytes + 12}\r\n\r\n"
                connection.sendall(answer.encode() + frame + values.tobytes()[: len(values) * (1 << 20) if whole else 10 << 20])
                if whole:
                    assert connection.recv(1) == b"\x06"
                    connection.sendall(b"\x01" * 12)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        peer = Peer("p", 1, address_of(listener))
        data, offsets = np.zeros(12 << 20, np.uint8), np.arange(12) << 20
        came: list[int] = []

        def note(which: np.ndarray, made: np.ndarray) -> None:
            came.extend(which.tolist())

        until = time.monotonic() + 60
        await transport.read(peer, "ab" * 32, 1 << 20, keys, data, offsets, until, note)
        assert came == list(range(12))
        came.clear()
        with pytest.raises(ConnectionError):
            await transport.read(peer, "ab" * 32, 1 << 20, keys, data, offsets, until, note)
        assert came == list(range(10))
        thread.join(60)
        assert len(orders) == 2


async def test_where_one_connection_fails_the_other_is_cut(transport: HttpTransport) -> None:
    """Of a read's two connections one is closed before it answers; the other would go on for ever."""
    keys = keys_of(*range(16))

    def serve() -> None:
        connections = [listener.accept()[0] for _ in range(2)]
        connections[1].close()
        while connections[0].recv(65536):  # until it is cut
            pass
        connections[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        data, offsets = np.zeros(16 << 20, np.uint8), np.arange(16) << 20
        with pytest.raises(ConnectionError):
            await transport.read(Peer("p", 1, address_of(listener)), "ab" * 32, 1 << 20, keys, data, offsets, time.monotonic() + 60, print)
        thread.join(60)
        assert not thread.is_alive()
    assert not any(transport._idle.values())


async def test_many_orders_at_a_time(transport: HttpTransport, server: PoolProcess, space: Any) -> None:
    values = store(space, *range(40))

    async def one(start: int) -> None:
        moved, rows = await read(transport, peer_of(server), space, keys_of(*range(start, start + 10)))
        assert (moved.status == HIT).all()
        assert (rows == values[start : start + 10]).all()

    await asyncio.gather(*(one(at % 30) for at in range(24)))


async def test_nothing_and_unknown_namespaces(transport: HttpTransport, server: PoolProcess, space: Any, pool: umbp.Pool) -> None:
    moved, _ = await read(transport, peer_of(server), space, keys_of()[:0].reshape(0, 32))
    assert len(moved.status) == 0
    store(space, 1)
    data = np.zeros(SIZE, np.uint8)
    until = time.monotonic() + 60
    for namespace, size in (("ab" * 32, SIZE), (digest_of(space), SIZE // 2)):
        moved = await transport.read(peer_of(server), namespace, size, keys_of(1), data, np.zeros(1, np.int64), until, print)
        assert moved.status.tolist() == [MISS]
    assert not data.any()


# -- refusals ------------------------------------------------------------------------------------------------------------------------


async def test_who_answers_at_a_wrong_address_refuses(transport: HttpTransport, server: PoolProcess, space: Any) -> None:
    store(space, 1)
    good = peer_of(server)
    for peer in (Peer("somebody", good.boot, good.address), Peer(good.node, good.boot - 1, good.address)):
        with pytest.raises(NotFound, match=server.name):
            await read(transport, peer, space, keys_of(1))
    assert (await read(transport, good, space, keys_of(1)))[0].status.tolist() == [HIT]


async def test_a_token_is_asked_for_and_sent() -> None:
    with PoolProcess("--token", "secret", dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        store(space, 1)
        for token in ("", "wrong"):
            stranger = HttpTransport(token)
            with pytest.raises(Unauthorized):
                await read(stranger, peer_of(server), space, keys_of(1))
            await stranger.close()
        friend = HttpTransport("secret")
        assert (await read(friend, peer_of(server), space, keys_of(1)))[0].status.tolist() == [HIT]
        await friend.close()


HEAD = f"POST {PAGES_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FRAME_TYPE}\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /v1/pages HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"401"),
        (b"POST /v1/pages HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n\r\n", b"400"),
        ((HEAD + "Content-Length: 9\r\n\r\n").encode() + bytes([9, 0, 0, 0, 200, 0, 0, 0, 0]), b"400"),
        ((HEAD + "Content-Length: 99\r\n\r\n").encode() + (12).to_bytes(4, "little") + (8).to_bytes(4, "little") + b"notjson!", b"400"),
        (b"POST /v1/pages HTTP/1.1\r\n" + b"A: " + b"x" * 20_000, b"400"),
    ],
)
def test_bad_orders_are_answered_and_cost_nothing(server: PoolProcess, pool: umbp.Pool, request_: bytes, status: bytes) -> None:
    address = parse_address(str(server.ready["http"]))
    with socket.create_connection((address.host, address.port), 60) as stranger:
        stranger.sendall(request_)
        assert stranger.recv(100).startswith(b"HTTP/1.1 " + status)
    assert pool.status()["leases"] == 0


# -- bad days ------------------------------------------------------------------------------------------------------------------------


class ByHand:
    """A reader that does not do what `HttpTransport` does."""

    def __init__(self, server: PoolProcess, space: Any, keys: np.ndarray, seconds: float, comes_from: str = "127.0.0.1") -> None:
        address = parse_address(str(server.ready["http"]))
        self.connection = socket.create_connection((address.host, address.port), 60, (comes_from, 0))
        frame = wire.encode(Order(server.name, int(server.ready["boot"]), digest_of(space), space.object_bytes, len(keys), seconds), keys)
        self.connection.sendall((HEAD + f"Content-Length: {len(frame) + 1}\r\n\r\n").encode() + frame)
        self.pages = len(keys)
        self.rest = b""
        while b"\r\n\r\n" not in self.rest:
            self.more()
        self.rest = self.rest.partition(b"\r\n\r\n")[2]
        granted = decode_granted(self.exactly(wire.frame_bytes(self.exactly(8, peek=True))), len(keys))
        self.held = int(granted.held.sum())

    def more(self) -> None:
        data = self.connection.recv(4096)
        if not data:
            raise ConnectionResetError
        self.rest += data

    def exactly(self, count: int, *, peek: bool = False) -> bytes:
        while len(self.rest) < count:
            self.more()
        data = self.rest[:count]
        self.rest = data + self.rest[count:] if peek else self.rest[count:]
        return data


@pytest.mark.parametrize("comes_from", ["127.0.0.1", "127.0.0.2"])
def test_memory_that_is_given_to_others_while_a_slow_reader_reads_is_not_the_granted(
    server: PoolProcess, space: Any, pool: umbp.Pool, comes_from: str
) -> None:
    """What `sendfile` has sent, to a reader with another address, still refers to the segment: only the receipt ends the lease."""
    values = store(space, *range(16))  # 4 MiB: some of it is in the kernel's buffers, the rest is still to be sent
    reader = ByHand(server, space, keys_of(*range(16)), 20.0, comes_from)
    assert reader.held == 16
    eventually(lambda: len(reader.connection.recv(1 << 16, socket.MSG_PEEK)) == 1 << 16, "some of it is in the kernel's buffers")
    assert space.remove(keys_of(*range(16))).all()
    for start in range(100, 400, 50):  # through the whole of the memory, more than once
        space.put(keys_of(*range(start, start + 50)), values_of(range(start, start + 50), SIZE))
    assert (np.frombuffer(reader.exactly(16 * SIZE), np.uint8).reshape(16, SIZE) == values).all()
    reader.connection.sendall(b"\x06")
    assert reader.exactly(16) == b"\x01" * 16
    reader.connection.close()


@pytest.mark.parametrize("comes_from", ["127.0.0.1", "127.0.0.2"])
def test_a_reader_that_stops_is_cut_off_when_its_time_is_over(server: PoolProcess, space: Any, pool: umbp.Pool, comes_from: str) -> None:
    store(space, *range(64))  # more than the kernel's buffers take
    reader = ByHand(server, space, keys_of(*range(64)), 0.5, comes_from)
    assert reader.held == 64
    eventually(lambda: pool.status()["leases"] == 0, "its grant is given back")
    with pytest.raises(ConnectionResetError):
        reader.exactly(64 * SIZE)
    reader.connection.close()


def test_a_reader_that_never_sends_its_receipt_is_cut_off(server: PoolProcess, space: Any, pool: umbp.Pool) -> None:
    store(space, 1)
    reader = ByHand(server, space, keys_of(1), 0.5)
    assert reader.held == 1
    eventually(lambda: pool.status()["leases"] == 0, "its grant is given back")
    with pytest.raises(ConnectionResetError):
        reader.exactly(SIZE + 1)
    reader.connection.close()


def test_a_source_that_was_stopped_for_longer_than_its_lease_refuses(server: PoolProcess, space: Any, pool: umbp.Pool) -> None:
    """Stopped until the grant's time is over, in the middle of it: no receipt of a page that may have gone is answered with yes."""
    store(space, *range(16))
    reader = ByHand(server, space, keys_of(*range(16)), 1.0)
    server.signal(signal.SIGSTOP)
    time.sleep(2.3)
    server.signal(signal.SIGCONT)
    with contextlib.suppress(OSError):
        reader.exactly(16 * SIZE)
        reader.connection.sendall(b"\x06")
        assert reader.exactly(16) == b"\x00" * 16
    reader.connection.close()


def test_a_pool_stops_while_it_sends_to_a_reader_that_does_not_read() -> None:
    with PoolProcess(dram="32MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        store(space, *range(64))  # more than the kernel's buffers take
        readers = [ByHand(server, space, keys_of(*range(64)), 20.0, comes_from) for comes_from in ("127.0.0.1", "127.0.0.2")]
        assert [reader.held for reader in readers] == [64, 64]
        with within(15.0):  # not when their time is over
            server.stop()
        for reader in readers:
            with pytest.raises(ConnectionResetError):
                reader.exactly(64 * SIZE)
            reader.connection.close()
        assert "Traceback" not in server.log(), server.log()


async def test_a_frozen_peer_is_bounded_by_the_deadline(transport: HttpTransport, server: PoolProcess, space: Any) -> None:
    store(space, 1)
    peer = peer_of(server)
    await read(transport, peer, space, keys_of(1))  # there is a connection
    server.signal(signal.SIGSTOP)
    try:
        for _ in range(2):  # on the old connection, and on a new one, which the kernel accepts for it
            with within(0.4), pytest.raises(TimeoutError):
                await read(transport, peer, space, keys_of(1), deadline=0.4)
    finally:
        server.signal(signal.SIGCONT)
    assert (await read(transport, peer, space, keys_of(1)))[0].status.tolist() == [HIT]


async def test_a_peer_that_is_not_there_or_does_not_accept(transport: HttpTransport, server: PoolProcess, space: Any) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        peer = peer_of(server)
        with within(1.0), pytest.raises(OSError, match="timed out"):  # connecting has a time limit of its own
            await read(transport, Peer(peer.node, peer.boot, address_of(full)), space, keys_of(1))
        for each in waiting:
            each.close()
    with pytest.raises(ConnectionRefusedError):
        await read(transport, Peer(peer.node, peer.boot, parse_address(f"127.0.0.1:{free_port()}")), space, keys_of(1))


def address_of(listener: socket.socket) -> Any:
    return parse_address(f"127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n\r\n", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n", UmbpError),
        (f"HTTP/1.1 200 OK\r\nContent-Type: {FRAME_TYPE}\r\n\r\n".encode() + b"\xff" * 16, ProtocolError),
        (b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 40_000, ProtocolError),
        (b"", OSError),
    ],
)
async def test_whoever_answers_something_else_is_an_error(
    transport: HttpTransport, server: PoolProcess, space: Any, answer: bytes, error: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                with contextlib.suppress(OSError):
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        peer = Peer(server.name, 1, address_of(listener))
        with pytest.raises(error):
            await read(transport, peer, space, keys_of(1))
        thread.join(60)
        assert not thread.is_alive()


async def test_who_is_cancelled_ends_when_nothing_is_written_any_more(transport: HttpTransport, server: PoolProcess, space: Any) -> None:
    store(space, *range(40))
    data, begun = np.zeros(40 * SIZE, np.uint8), asyncio.Event()

    def came(which: np.ndarray, sums: np.ndarray) -> None:
        begun.set()

    until, offsets = time.monotonic() + 60, np.arange(40) * SIZE
    task = asyncio.ensure_future(transport.read(peer_of(server), digest_of(space), SIZE, keys_of(*range(40)), data, offsets, until, came))
    await begun.wait()  # 8 of 10 MiB are there, the rest may be on its way
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    data[:] = 7
    await asyncio.sleep(0.05)
    assert (data == 7).all()


async def test_who_is_cancelled_just_when_all_has_come_keeps_no_connection_open(
    transport: HttpTransport, server: PoolProcess, space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(space, 1)
    loop, run, lines = asyncio.get_running_loop(), Receive.run, []

    def cancelled(self: Receive) -> Any:
        moved = run(self)
        lines.append(self.line)
        loop.call_soon_threadsafe(task.cancel)  # before the loop hears of the end
        return moved

    monkeypatch.setattr(Receive, "run", cancelled)
    task = asyncio.ensure_future(read(transport, peer_of(server), space, keys_of(1)))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [line._socket.fileno() for line in lines] == [-1]


def test_connections_leave_nothing_behind(server: PoolProcess, space: Any, pool: umbp.Pool) -> None:
    store(space, 1)

    def open_files() -> int:
        return len(os.listdir(f"/proc/{server.pid}/fd"))

    before = open_files()
    for _ in range(20):
        ByHand(server, space, keys_of(1), 5.0).connection.close()
    eventually(lambda: open_files() <= before, "the descriptors are closed")
    eventually(lambda: pool.status()["leases"] == 0, "the grants are given back")
