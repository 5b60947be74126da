"""SGLang is booted before the tests are collected, as they import it; one server-wide configuration without a model or a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engines.sglang.boot import boot
from tests.pools import PoolProcess

boot()
torch.set_num_threads(1)  # ranks are forked: no threads of torch may be left behind


@pytest.fixture(scope="session")
def server() -> Iterator[PoolProcess]:
    """A pool for the tests that do not restart it."""
    with PoolProcess(dram="256MiB") as pool:
        yield pool
