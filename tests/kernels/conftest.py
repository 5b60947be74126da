"""Starts what takes long, and what this session's tests will ask for, before the first test of all: it has what processor others leave."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels import processes


def pytest_collection_finish(session: pytest.Session) -> None:
    """Called when it is known which tests will run."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing or session.config.option.collectonly:
        return
    files = dict.fromkeys(item.path.stem.removeprefix("test_") for item in session.items if item.path.parent.name == "kernels")
    processes.asked[:] = [name for name in files if name in processes.INTERPRETED]
    if processes.asked:
        processes.interpreter(tuple(processes.asked))
    if "assembly" in files:
        processes.compiler()


def pytest_sessionfinish() -> None:
    """Nothing of it is left."""
    if processes.asked:
        processes.interpreter(tuple(processes.asked)).close()
