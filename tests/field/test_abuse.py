"""Callers and strangers who do it wrong: each item or each connection pays for itself, and nothing else changes.

Field reports KV-21 and KV-23, and many clients at a time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, Wire, bytes_of, eventually, keys_of, open_namespace, rss_bytes, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus, wire

SIZE = 256
MIB = 1 << 20


def faults_in(log: str) -> list[str]:
    """Tracebacks through our own code; aiohttp writes one for each request that is no HTTP."""
    return [part for part in log.split("Traceback")[1:] if "/umbp/" in part]


# -- KV-21: bad arguments ------------------------------------------------------------------------------------------------------------

KEYS = keys_of(1, 2, 3)
BAD_KEYS: list[tuple[str, Any]] = [
    ("none", None),
    ("a number", 7),
    ("text", "k" * 32),
    ("an empty key", [b""]),
    ("31 bytes", [b"k" * 31]),
    ("33 bytes", [b"k" * 33]),
    ("a MiB", [b"k" * MIB]),
    ("one bad among good", [b"a" * 32, b"b" * 32, "c" * 32]),
    ("none among good", [b"a" * 32, None]),
    ("not UTF-8 text", ["\udcff" * 32]),
    ("one row", np.zeros(32, np.uint8)),
    ("of another type", np.zeros((3, 32), np.int8)),
    ("too wide", np.zeros((3, 33), np.uint8)),
    ("objects", np.array([b"k" * 32], object)),
    ("200,000 keys", np.zeros((200_000, 32), np.uint8)),
    ("a generator", (key for key in [b"k" * 32])),
    ("a dict", {b"k" * 32: 1}),
]
BAD_ROWS: list[tuple[str, Any]] = [
    ("none", None),
    ("a number", 7),
    ("too few", np.zeros((2, SIZE), np.uint8)),
    ("too many", np.zeros((4, SIZE), np.uint8)),
    ("no bytes", np.zeros((3, 0), np.uint8)),
    ("one byte less", np.zeros((3, SIZE - 1), np.uint8)),
    ("one byte more", np.zeros((3, SIZE + 1), np.uint8)),
    ("not contiguous", np.zeros((3, SIZE * 2), np.uint8)[:, ::2]),
    ("a scalar", np.array(7, np.uint8)),
    ("objects", np.full((3, SIZE // 8), None, object)),
    ("empty buffers", [b"", b"", b""]),
    ("a None among good", [bytearray(SIZE), None, bytearray(SIZE)]),
    ("text", ["x" * SIZE] * 3),
    ("a short one last", [bytearray(SIZE), bytearray(SIZE), bytearray(SIZE - 1)]),
    ("a strided one", [bytearray(SIZE), bytearray(SIZE), memoryview(bytearray(SIZE * 2))[::2]]),
]


@pytest.fixture
def healthy(pool: umbp.Pool, space_of: Callable[[int], Any], tenant: str) -> Iterator[Any]:
    """A namespace with three pages; afterwards they are as they were, and nothing else was added or left open."""
    space = space_of(SIZE)
    assert space.put(KEYS, values_of([1, 2, 3], SIZE)).all(WriteStatus.STORED, WriteStatus.EXISTS)
    yield space
    out = np.zeros((3, SIZE), np.uint8)
    assert space.get(KEYS, out).all(ReadStatus.HIT)
    assert (out == values_of([1, 2, 3], SIZE)).all()
    status = pool.status()
    assert status["leases"] == status["reservations"] == status["pins"] == 0
    mine = [n for n in status["namespaces"] if n["identity"]["tenant"] == tenant]
    assert [n["held_bytes"] for n in mine] == [3 * SIZE]
    assert pool.statistics().connects == 1  # nothing of this cost the connection


def test_bad_keys_are_a_typed_error_in_every_call(healthy: Any) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "put": lambda keys: healthy.put(keys, np.zeros((3, SIZE), np.uint8)),
        "get": lambda keys: healthy.get(keys, np.zeros((3, SIZE), np.uint8)),
        "lookup": healthy.lookup,
        "prefix": healthy.prefix,
        "lease": lambda keys: healthy.lease(keys).__enter__(),
        "remove": healthy.remove,
        "pin": healthy.pin,
    }
    for what, keys in BAD_KEYS:
        for name, call in calls.items():
            with pytest.raises(umbp.InvalidRequest) as error:
                call(keys)
            assert "keys" in str(error.value), (what, name)
            assert error.value.code == "invalid_request"


def test_bad_buffers_are_a_typed_error_and_write_nothing(healthy: Any) -> None:
    for what, rows in BAD_ROWS:
        for name, call in (("values", healthy.put), ("out", healthy.get)):
            with pytest.raises(umbp.InvalidRequest) as error:
                call(keys_of(11, 12, 13) if name == "values" else KEYS, rows)
            assert name in str(error.value), (what, str(error.value))
    with pytest.raises(umbp.InvalidRequest, match="read-only"):
        healthy.get(KEYS, [bytes(SIZE)] * 3)
    frozen = np.zeros((3, SIZE), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(umbp.InvalidRequest, match="read-only"):
        healthy.get(KEYS, frozen)
    assert not healthy.lookup(keys_of(11, 12, 13)).any()


@pytest.mark.parametrize("empty", [[], (), b"", np.zeros((0, 32), np.uint8)], ids=["list", "tuple", "bytes", "array"])
def test_empty_batch_is_a_no_op_in_every_call(healthy: Any, empty: Any) -> None:
    for rows in ([], np.zeros((0, SIZE), np.uint8)):
        assert len(healthy.put(empty, rows)) == 0
        assert len(healthy.get(empty, rows, verify="always")) == 0
    assert healthy.lookup(empty).shape == (0,)
    assert healthy.prefix(empty) == 0
    assert healthy.remove(empty).shape == (0,)
    with healthy.lease(empty) as lease:
        assert len(lease) == 0
        assert lease.held.shape == lease.check().shape == (0,)
    healthy.unpin(healthy.pin(empty))


def test_one_missing_among_a_hundred_is_one_miss(healthy: Any) -> None:
    numbers = [1, 2, 3] * 33
    keys = keys_of(*numbers[:50], 404, *numbers[50:])
    out = np.zeros((100, SIZE), np.uint8)
    status = healthy.get(keys, out)
    assert np.flatnonzero(~status.where(ReadStatus.HIT)).tolist() == [50]
    assert status[50] is ReadStatus.MISS
    assert healthy.lookup(keys).sum() == 99
    assert healthy.prefix(keys) == 50
    with healthy.lease(keys) as lease:
        assert lease.held.sum() == 99
        with pytest.raises(umbp.InvalidRequest):
            lease.view(50)
    assert not healthy.remove(keys_of(404, 405)).any()


def test_keys_of_any_bytes_are_keys(space_of: Any) -> None:
    space = space_of(SIZE)
    keys = [bytes(32), b"\xff" * 32, b"\0" * 31 + b"\1", "ключ".encode()[:8] * 4, b"../../../../etc/passwd".ljust(32, b"\0")]
    assert space.put(keys, values_of(range(5), SIZE)).all(WriteStatus.STORED)
    out = [bytearray(SIZE) for _ in keys]
    assert space.get(keys, out).all(ReadStatus.HIT)
    assert [bytes(each) for each in out] == [bytes_of(i, SIZE).tobytes() for i in range(5)]


def test_the_largest_batch_works_and_one_more_is_refused(space_of: Any) -> None:
    space = space_of(8)
    keys = keys_of(*range(65_536))
    assert not space.lookup(keys).any()
    status = space.put(keys, np.zeros((65_536, 8), np.uint8))
    assert set(status) <= {WriteStatus.STORED, WriteStatus.KEY_LIMIT}
    assert len(space.get(keys, np.zeros((65_536, 8), np.uint8))) == 65_536
    with space.lease(keys) as lease:
        assert lease.check().sum() == lease.held.sum()
    space.remove(keys)
    with pytest.raises(umbp.InvalidRequest, match="65536"):
        space.lookup(np.zeros((65_537, 32), np.uint8))


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 1e9, "5", [1]])
def test_bad_times_are_refused_here(healthy: Any, seconds: Any) -> None:
    with pytest.raises(umbp.InvalidRequest, match="seconds"):
        healthy.lease(KEYS, seconds).__enter__()
    with pytest.raises(umbp.InvalidRequest, match="seconds"):
        healthy.pin(KEYS, seconds)


def test_other_bad_arguments(healthy: Any, pool: umbp.Pool) -> None:
    for bad in ("ALWAYS", None, True, 1):
        with pytest.raises(umbp.InvalidRequest, match="verify"):
            healthy.get(KEYS, np.zeros((3, SIZE), np.uint8), verify=bad)
        with pytest.raises(umbp.InvalidRequest, match="verify"):
            healthy.lease(KEYS, verify=bad).__enter__()
    for parent in ("x" * 32, b"short", 5):
        with pytest.raises(umbp.InvalidRequest, match="parent"):
            healthy.put(KEYS, np.zeros((3, SIZE), np.uint8), parent=parent)
    for note in ("n" * 257, 5, None):
        with pytest.raises(umbp.InvalidRequest, match="note"):
            healthy.pin(KEYS, note=note)
    for number in (-1, 1 << 64, "1", None, 3.5):
        with pytest.raises(umbp.InvalidRequest, match="number"):
            healthy.unpin(number)
    with pytest.raises(umbp.NotFound):
        healthy.unpin(123_456)
    for session in (5, None, b"x"):
        with pytest.raises(umbp.InvalidRequest, match="session"):
            healthy.lookup(KEYS, session=session)
    assert healthy.lookup(KEYS, session="\udcff" * 1000).all()
    for identity in ({"model": ""}, {"model": 5}, {"model": "m" * 300}, {"tenant": 7}, {"page_tokens": 0}, {"tp_rank": 8, "tp_size": 8}):
        with pytest.raises(umbp.InvalidRequest):
            pool.namespace(**{"model": "m", "page_tokens": 64, "layout": umbp.Layout.opaque(SIZE), **identity})
    with pytest.raises(umbp.InvalidRequest):
        pool.namespace(model="m", page_tokens=64, layout=SIZE)


def test_pins_are_taken_back_only_by_their_client(shared: PoolProcess, healthy: Any, tenant: str) -> None:
    number = healthy.pin(KEYS)
    with umbp.connect(shared.socket) as other, pytest.raises(umbp.NotFound):
        open_namespace(other, SIZE, tenant=tenant).unpin(number)
    healthy.unpin(number)


def test_exception_in_the_middle_of_a_call_does_not_shift_the_replies(shared: PoolProcess, tenant: str) -> None:
    """Ctrl-C, or a time-out by signal, between a request and its reply: the next call must not get that reply."""
    import signal

    with umbp.connect(shared.socket) as pool:
        space = open_namespace(pool, SIZE, tenant=tenant)
        space.put(keys_of(1), values_of([1], SIZE))
        pool._start()
        connection = pool._connection
        assert connection is not None
        receive = connection._exactly

        def interrupted(count: int) -> bytearray:
            connection._exactly = receive  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGINT)
            return receive(count)

        connection._exactly = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            space.remove(keys_of(7, 8, 9))
        eventually(lambda: pool.connected, "connected again")
        assert space.remove(keys_of(1, 2)).tolist() == [True, False]
        assert pool.statistics().connects == 2


# -- KV-23: what comes over the socket -------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def _upgraded(path: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(5)
    stranger.connect(path)
    stranger.sendall(wire.UPGRADE_REQUEST)
    got = b""
    while len(got) < len(wire.UPGRADE_REPLY):
        got += stranger.recv(4096)
    return stranger


def _ended(stranger: socket.socket) -> bytes:
    """Everything until the pool closes this connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while part := stranger.recv(65536):
            said += part
    stranger.close()
    return said


def _frame(header: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<II", 4 + len(header) + len(rest), len(header)) + header + rest


HELLO = wire.encode(wire.Hello(wire.VERSION, "stranger"))
DEEP = b"[" * 30_000 + b"]" * 30_000
MALFORMED: list[tuple[str, bytes]] = [
    ("a length of 2^32", b"\xff" * 8),
    ("a length of 2^40 as text", b"1099511627776\n"),
    ("a header longer than its frame", struct.pack("<II", 10, 4000) + bytes(100)),
    ("a header of no bytes", struct.pack("<II", 4, 0)),
    ("a frame of no bytes", struct.pack("<II", 0, 0)),
    ("not JSON", _frame(b"\x80\x04\x95junk")),
    ("no message", _frame(b"{}")),
    ("an unknown message", _frame(b'{"op": "exec", "code": "1"}')),
    ("an unknown field", _frame(json.dumps({"op": "hello", "version": 1, "client": "x", "admin": True}).encode())),
    ("another version", _frame(json.dumps({"op": "hello", "version": 99, "client": "x"}).encode())),
    ("a name too long", _frame(json.dumps({"op": "hello", "version": 1, "client": "x" * 300}).encode())),
    ("deep JSON", _frame(DEEP)),
    ("hello twice", HELLO + HELLO),
    ("status before hello", wire.encode(wire.GetStatus())),
    ("a count without its keys", HELLO + _frame(json.dumps({"op": "remove", "row": 0, "number": 0, "n": 100}).encode())),
    ("keys without their count", HELLO + _frame(json.dumps({"op": "remove", "row": 0, "number": 0, "n": 0}).encode(), bytes(32))),
    ("a negative count", HELLO + _frame(json.dumps({"op": "remove", "row": 0, "number": 0, "n": -1}).encode())),
    ("a huge count", HELLO + _frame(json.dumps({"op": "remove", "row": 0, "number": 0, "n": 1 << 40}).encode())),
    ("a number for ever", HELLO + _frame(b'{"op": "release", "number": 1' + b"0" * 5000 + b"}")),
    ("a parent that is no digest", HELLO + _frame(b'{"op":"reserve","row":0,"number":0,"n":0,"parent":"../../etc"}')),
    ("a note of strangers", HELLO + _frame(b'{"op":"note","requests":[[0,5,1],[0,70000,1]]}', bytes(160))),
]


def test_malformed_frames_close_that_connection_only(shared: PoolProcess, healthy: Any, tmp_path: Path) -> None:
    target = tmp_path / "made by a pickle"
    cases = [*MALFORMED, ("a pickle", pickle.dumps(Evil(str(target)))), ("a pickle in a frame", _frame(pickle.dumps(Evil(str(target)))))]
    chance = random.Random(23)
    cases += [(f"noise {i}", chance.randbytes(chance.choice([8, 64, 5000]))) for i in range(30)]
    for what, data in cases:
        stranger = _upgraded(shared.socket)
        with contextlib.suppress(BrokenPipeError):
            stranger.sendall(data)
            if what.startswith("noise"):
                stranger.shutdown(socket.SHUT_WR)  # noise may be the start of a frame that is allowed
        said = _ended(stranger)
        assert b"Traceback" not in said, what
        assert len(said) < 4096, what
        assert healthy.remove(keys_of(404)).tolist() == [False], what  # the others' calls are answered as before
    assert not target.exists()
    assert shared.alive


def test_half_frames_and_half_upgrades_leave_nothing(shared: PoolProcess, pool: umbp.Pool, healthy: Any) -> None:
    whole = wire.encode(wire.Hello(wire.VERSION, "cut"))
    for cut in range(1, len(whole), 7):
        stranger = _upgraded(shared.socket)
        stranger.sendall(whole[:cut])
        stranger.close()
    for cut in range(1, len(wire.UPGRADE_REQUEST), 9):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(shared.socket)
        stranger.sendall(wire.UPGRADE_REQUEST[:cut])
        stranger.close()
    eventually(lambda: pool.status()["sessions"] == 1, "only this client is there")


def test_a_frame_in_single_bytes_is_a_frame(shared: PoolProcess) -> None:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(5)
    stranger.connect(shared.socket)
    for byte in wire.UPGRADE_REQUEST + HELLO:
        stranger.sendall(bytes([byte]))
    got = b""
    while b"welcome" not in got:
        got += stranger.recv(65536)
    stranger.close()


def test_http_noise_on_both_listeners(shared: PoolProcess, healthy: Any) -> None:
    host, port = str(shared.ready["http"]).rsplit(":", 1)
    chance = random.Random(5)
    requests = [
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/evict HTTP/1.1\r\nHost: umbp\r\nContent-Length: 99999999999999\r\n\r\n",
        b"POST /v1/evict HTTP/1.1\r\nHost: umbp\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        pickle.dumps(Evil("/nowhere")),
        *(chance.randbytes(300) for _ in range(10)),
    ]
    for request in requests:
        for address in (shared.socket, (host, int(port))):
            stranger = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
            stranger.settimeout(0.5)
            stranger.connect(address)
            with contextlib.suppress(OSError):
                stranger.sendall(request)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(65536):
                    pass
            stranger.close()
            assert healthy.lookup(KEYS).all()
    assert shared.alive


@pytest.mark.parametrize("count", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_half_open_connections_keep_nobody_out(count: int) -> None:
    """Strangers who connect and say nothing, or say it one byte at a time, on both listeners."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count * 2 + 500)), hard))
    with PoolProcess(dram="8MiB") as server, umbp.connect(server.socket) as pool:
        space = open_namespace(pool, SIZE)
        before = rss_bytes(server.pid)
        host, port = str(server.ready["http"]).rsplit(":", 1)
        strangers = []
        try:
            for i in range(count):
                stranger = socket.socket(socket.AF_UNIX if i % 2 else socket.AF_INET)
                stranger.connect(server.socket if i % 2 else (host, int(port)))
                strangers.append(stranger)
                if i % 3 == 1:
                    stranger.sendall(wire.UPGRADE_REQUEST[: i % 60])
                elif i % 3 == 2:
                    stranger.sendall(b"GET /v1/status HTTP/1.1\r\nHo")
            for number in range(20):
                assert space.put(keys_of(number), values_of([number], SIZE)).all(WriteStatus.STORED)
            with umbp.connect(server.socket) as late:
                assert open_namespace(late, SIZE).lookup(keys_of(5)).all()
            assert rss_bytes(server.pid) < before + 16 * MIB + count * 16384
            assert pool.status()["sessions"] == 1
        finally:
            for stranger in strangers:
                stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) < 60, "their descriptors are closed")


def test_client_that_does_not_read_its_replies_is_not_listened_to(shared: PoolProcess, healthy: Any) -> None:
    """Requests without end, replies never read: the pool keeps a bounded amount for it, and others are served."""
    with Wire(shared.socket, SIZE) as session:
        sock = session.connection._socket
        sock.settimeout(0.3)
        before = rss_bytes(shared.pid)
        request, sent = wire.encode(wire.GetStatus()) * 1000, 0
        with contextlib.suppress(TimeoutError):
            while sent < 512 * MIB:
                sent += sock.send(request)
        assert sent < 64 * MIB
        assert healthy.remove(keys_of(404)).tolist() == [False]
        assert rss_bytes(shared.pid) < before + 64 * MIB


def test_requests_sent_ahead_are_answered_in_order(shared: PoolProcess, space_of: Any) -> None:
    space = space_of(SIZE)
    space.put(keys_of(*range(50)), values_of(range(50), SIZE))
    found = space._operations.look(keys_of(*range(50))).found
    with Wire(shared.socket, SIZE) as session:
        sock = session.connection._socket
        sums = wire.encode(wire.MakeSums(50), found.ids, found.versions)
        sock.sendall((sums + wire.encode(wire.Release(1)) + wire.encode(wire.Renew([7, 8]))) * 5)
        for _ in range(5):
            for kind in (wire.Sums, wire.Numbers, wire.Numbers):
                prefix = session.connection._exactly(8)
                rest = session.connection._exactly(wire.frame_bytes(prefix) - 8)
                reply, blob = wire.decode_reply(bytes(prefix) + bytes(rest))
                assert isinstance(reply, kind)
                if kind is wire.Sums:
                    assert (blob.take(np.uint64, 50) != 0).all()


def test_no_shape_of_message_is_an_internal_error(shared: PoolProcess, healthy: Any) -> None:
    """Well-formed messages with values from the edges: every one is answered, and the log has no traceback."""
    chance = random.Random(99)
    edges = [0, 1, 2, 1023, 1024, 65_535, (1 << 63) - 1]
    with Wire(shared.socket, SIZE, tenant="edges") as session:
        for _ in range(400):
            n = chance.choice([0, 1, 3, 100])
            ids = np.array([chance.choice([*edges, -1, -(1 << 63)]) for _ in range(n)], np.int64)
            versions = np.array([chance.choice([*edges, (1 << 64) - 1]) for _ in range(n)], np.uint64)
            keys = np.frombuffer(chance.randbytes(32 * n), np.uint8).reshape(n, 32)
            row, number = chance.choice([session.row, session.row, 65_535]), chance.choice([0, session.namespace_number()])
            messages: list[tuple[wire.Message, tuple[Any, ...]]] = [
                (wire.TakeLease(n, chance.choice([0.0, 1e-9, 86_400.0])), (ids, versions)),
                (wire.Renew([chance.choice(edges) for _ in range(n)]), ()),
                (wire.Release(chance.choice(edges)), ()),
                (wire.Remove(row, number, n), (keys,)),
                (wire.Flush(row, number), ()),
                (wire.Corrupt(n), (ids, versions)),
                (wire.MakeSums(n), (ids, versions)),
                (wire.LetGo(chance.choice(edges)), ()),
                (wire.Pin(row, number, n, 0.001, "x"), (keys,)),
                (wire.Unpin(chance.choice(edges)), ()),
                (wire.Commit(chance.choice(edges), n, True), (np.ones(n, np.uint8), versions)),
                (wire.Reserve(row, number, n, 0.001, chance.choice(["", "ab" * 32])), (keys,)),
            ]
            message, arrays = chance.choice(messages)
            with contextlib.suppress(umbp.InvalidRequest, umbp.NotFound, umbp.LimitReached):
                session.ask(message, *arrays)
        status = session.ask(wire.GetStatus())[0].value
        assert status["used_bytes"] <= status["capacity_bytes"]
        session.ask(wire.Bye())
    assert not faults_in(shared.log())


# -- many clients at a time ------------------------------------------------------------------------------------------------------------


def _small_engine(child: Child, socket_path: str, seed: int) -> None:
    with umbp.connect(socket_path) as pool:
        space = open_namespace(pool, 4096)
        child.say("connected")
        child.hear(60)
        batch = [seed % 50, 1000 + seed]
        status = space.put(keys_of(*batch), values_of(batch, 4096))
        out = np.zeros((2, 4096), np.uint8)
        good = space.get(keys_of(*batch), out).all(ReadStatus.HIT) and (out == values_of(batch, 4096)).all()
        with space.lease(keys_of(*batch)) as lease:
            child.say([status.all(WriteStatus.STORED, WriteStatus.EXISTS), bool(good), bool(lease.held.all())])
            child.hear(60)


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_processes_at_a_time(count: int) -> None:
    with PoolProcess() as server, umbp.connect(server.socket) as pool, contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(_small_engine, server.socket, seed)) for seed in range(count)]
        for child in children:
            assert child.hear(60) == "connected"
        for child in children:
            child.say("go")
        for child in children:
            assert child.hear(60) == [True, True, True]
        status = pool.status()
        assert (status["sessions"], status["leases"]) == (count + 1, count)
        for child in children:
            child.kill()
        eventually(lambda: (s := pool.status())["sessions"] == 1 and s["leases"] == 0, "all that they held is given back")
        assert pool.status()["keys"] == min(50, count) + count


def test_two_hundred_connections_and_no_more_than_the_limit() -> None:
    with PoolProcess("--sessions-max", "201", dram="8MiB") as server, umbp.connect(server.socket) as pool, contextlib.ExitStack() as stack:
        space = open_namespace(pool, SIZE)
        space.put(keys_of(1), values_of([1], SIZE))
        others = [stack.enter_context(Wire(server.socket, SIZE)) for _ in range(200)]
        for number, session in enumerate(others):
            assert session.reserve(keys_of(1000 + number))[1].tolist() == [WriteStatus.PENDING]
        assert pool.status()["sessions"] == 201
        with pytest.raises(umbp.LimitReached):
            umbp.connect(server.socket)
        start = time.monotonic()
        for _ in range(50):
            assert space.remove(keys_of(404)).tolist() == [False]
        assert time.monotonic() - start < 5
        for session in others[:100]:
            session.ask(wire.Bye())  # says that it has let go of everything
        stack.close()
        # The other half just closed, with writes open, and their process lives: they stay until it ends.
        eventually(lambda: pool.status()["sessions"] == 101, "only those that still own memory are there")
        assert pool.status()["abandoned"] == 100
        with umbp.connect(server.socket) as late:
            assert late.status()["keys"] == 1


def test_many_threads_share_one_client(pool: umbp.Pool, space_of: Any) -> None:
    space, faults = space_of(4096), []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        out = np.zeros((8, 4096), np.uint8)
        try:
            for _ in range(25):
                batch = chance.sample(range(100), 8)
                assert space.put(keys_of(*batch), values_of(batch, 4096)).all(WriteStatus.STORED, WriteStatus.EXISTS)
                assert space.get(keys_of(*batch), out).all(ReadStatus.HIT)
                assert (out == values_of(batch, 4096)).all()
                with space.lease(keys_of(*batch)) as lease:
                    assert all((lease.view(i) == bytes_of(batch[i], 4096)).all() for i in range(8))
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    assert pool.status()["leases"] == 0
