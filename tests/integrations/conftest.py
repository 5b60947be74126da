"""One pool for the tests that do nothing to it but use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pools import PoolProcess


@pytest.fixture(scope="package")
def server() -> Iterator[PoolProcess]:
    with PoolProcess() as running:
        yield running
