"""One pool for the tests that do nothing to it but use it, each in a namespace of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually, keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus


@pytest.fixture(scope="session")
def shared() -> Iterator[PoolProcess]:
    with PoolProcess() as server:
        yield server
        assert server.alive
        ours = [part for part in server.log().split("Traceback")[1:] if "/umbp/" in part]
        assert not ours, ours[0]


@pytest.fixture
def pool(shared: PoolProcess) -> Iterator[umbp.Pool]:
    """A client of the shared pool."""
    with umbp.connect(shared.socket) as client:
        yield client


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> str:
    """The test's own."""
    return str(request.node.name)[:200]


@pytest.fixture
def space_of(pool: umbp.Pool, tenant: str) -> Callable[[int], Any]:
    """A namespace of the test's own on the shared pool, of objects of this size."""
    return lambda size: open_namespace(pool, size, tenant=tenant)


@pytest.fixture
def healthy(pool: umbp.Pool, space_of: Callable[[int], Any], tenant: str) -> Iterator[Any]:
    """A namespace with three pages; afterwards they are as they were, and nothing else was added or left open."""
    space = space_of(256)
    assert space.put(keys_of(1, 2, 3), values_of([1, 2, 3], 256)).all(WriteStatus.STORED, WriteStatus.EXISTS)
    yield space
    out = np.zeros((3, 256), np.uint8)
    assert space.get(keys_of(1, 2, 3), out).all(ReadStatus.HIT)
    assert (out == values_of([1, 2, 3], 256)).all()
    eventually(lambda: (s := pool.status())["leases"] == s["reservations"] == s["pins"] == 0, "nothing is left open")
    mine = [n for n in pool.status()["namespaces"] if n["identity"]["tenant"] == tenant]
    assert [n["held_bytes"] for n in mine] == [3 * 256]
    assert pool.statistics().connects == 1  # nothing of this cost the connection
