"""vLLM is told what machine it runs on before it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from tests.pools import PoolProcess


@pytest.fixture(scope="session")
def server() -> Iterator[PoolProcess]:
    """A pool for the tests that do not restart it."""
    with PoolProcess(dram="256MiB") as pool:
        yield pool


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is well answers in time, however busy the machine is."""
    from umbp.integrations import vllm_offloading, vllm_runtime

    monkeypatch.setattr(vllm_offloading, "LEASE_SECONDS", 30.0)
    monkeypatch.setattr(vllm_offloading, "LEARN_SECONDS_MAX", 30.0)
    monkeypatch.setattr(vllm_runtime, "BEGIN_SECONDS", 30.0)
