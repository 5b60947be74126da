"""Starts what takes long, and what this session's tests will ask for, before the first of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.kernels import processes


@pytest.fixture(scope="package", autouse=True)
def _background(request: pytest.FixtureRequest) -> Iterator[None]:
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
        yield
        return
    files = dict.fromkeys(item.path.stem.removeprefix("test_") for item in request.session.items if item.path.parent.name == "kernels")
    processes.asked[:] = [name for name in files if name in processes.INTERPRETED]
    if processes.asked:
        processes.interpreter(tuple(processes.asked))
    if "assembly" in files:
        processes.compiler()
    yield
    if processes.asked:
        processes.interpreter(tuple(processes.asked)).close()
