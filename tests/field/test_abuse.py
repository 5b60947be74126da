"""Callers who do it wrong: each item pays for itself, and nothing else changes. Field report KV-21."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import bytes_of, eventually, keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus

SIZE = 256
MIB = 1 << 20


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


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 1e9, "5", [1], True])
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
    for note in ("n" * 257, 5, None, "\ud800", "two\nlines"):
        with pytest.raises(umbp.InvalidRequest, match="note"):
            healthy.pin(KEYS, note=note)
    for number in (-1, 1 << 64, "1", None, 3.5, True):
        with pytest.raises(umbp.InvalidRequest, match="number"):
            healthy.unpin(number)
    with pytest.raises(umbp.NotFound):
        healthy.unpin(123_456)
    with healthy.lease(KEYS) as lease, pytest.raises(umbp.InvalidRequest, match="index"):
        lease.view(len(KEYS))
    with pytest.raises(umbp.InvalidRequest, match="address"):
        umbp.connect(5)  # type: ignore[arg-type]
    assert pool.statistics().connects == 1, "something cost this client its connection"
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
        receive = connection._frame

        def interrupted(until: float) -> bytearray:
            connection._frame = receive  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGINT)
            return receive(until)

        connection._frame = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            space.remove(keys_of(7, 8, 9))
        eventually(lambda: pool.connected, "connected again")
        assert space.remove(keys_of(1, 2)).tolist() == [True, False]
        assert pool.statistics().connects == 2
