"""Bytes from strangers: what is no message closes that connection, and nothing that was sent is ever run. Field report KV-23."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import resource
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import HEAR_SECONDS_MAX, Wire, eventually, keys_of, open_namespace, rss_bytes, values_of
from tests.pools import PoolProcess
from umbp import WriteStatus, wire

SIZE = 256
MIB = 1 << 20
KEYS = keys_of(1, 2, 3)


def faults_in(log: str) -> list[str]:
    """Tracebacks through our own code; aiohttp writes one for each request that is no HTTP."""
    return [part for part in log.split("Traceback")[1:] if "/umbp/" in part]


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def _upgraded(path: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(HEAR_SECONDS_MAX)
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
    stranger.settimeout(HEAR_SECONDS_MAX)
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
        assert rss_bytes(shared.pid) < before + 48 * MIB


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
                prefix = bytearray(8)
                assert sock.recv_into(prefix, 0, socket.MSG_WAITALL) == 8
                rest = bytearray(wire.frame_bytes(prefix) - 8)
                assert sock.recv_into(rest, 0, socket.MSG_WAITALL) == len(rest)
                reply, blob = wire.decode_reply(prefix + rest)
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
        reply, blob = session.ask(wire.GetStatus())
        status = blob.document(reply.size)
        assert status["used_bytes"] <= status["capacity_bytes"]
        session.ask(wire.Bye())
    assert not faults_in(shared.log())


def test_a_pool_that_stops_answers_nobody_and_waits_for_nobody() -> None:
    """Who says only then what its connection is for, and who does not read its answers, while another reads his."""
    with PoolProcess(dram="16MiB") as server, contextlib.ExitStack() as stack, umbp.connect(server.socket) as pool:
        hello = wire.UPGRADE_REQUEST + wire.encode(wire.Hello(wire.VERSION, "late", 0, 7))
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
        for each in silent:
            each.connect(server.socket)
        deaf = stack.enter_context(socket.socket(socket.AF_UNIX))
        deaf.connect(server.socket)
        deaf.sendall(hello)
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.send(wire.encode(wire.GetStatus()))
        assert pool.status()["name"] == server.name
        server.signal(signal.SIGTERM)
        for each in silent:
            with contextlib.suppress(OSError):
                each.sendall(hello + wire.encode(wire.LetGo(1)))
            time.sleep(0.001)  # so that all of the stop has some
        assert server.stop() == 0
        assert not faults_in(server.log())
