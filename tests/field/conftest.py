"""One pool for the tests that do nothing to it but use it, each in a namespace of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import umbp
from tests.field.people import open_namespace
from tests.pools import PoolProcess


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
