"""Getting the memory at start: what is there goes only for what can be had."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp.config import PoolConfig
from umbp.errors import OutOfMemory
from umbp.pool import dram
from umbp.store import segment

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="umbp-test-", dir="/dev/shm") as path:
        yield Path(path)


def acquired(folder: Path, *, name: str = "one", **options: object) -> dram.Dram:
    return dram.acquire(PoolConfig(name=name, shm_dir=str(folder), keys_max=1024, **options), lambda done, total: None)


def kept(folder: Path, name: str = "one") -> None:
    """A pool of this name was here, and stopped in order."""
    found = acquired(folder, name=name, dram=8 * MIB)
    found.segment.words[segment.H_STATE] = segment.STOPPED
    found.close(release=False)


def test_a_size_that_cannot_be_had_costs_no_cache(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(folder, "other")
    kept(folder)
    free = segment.room_bytes(str(folder), list(folder.glob("*.segment")))
    with pytest.raises(OutOfMemory, match="ask for less") as caught:
        acquired(folder, dram=free * 1000)
    assert caught.value.field == "dram"
    assert "is gone" not in caplog.text
    for name in ("one", "other"):
        found = acquired(folder, name=name, dram=8 * MIB)
        assert found.attached, name
        found.close(release=True)


def test_another_size_that_can_be_had_is_made_anew_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(folder)
    found = acquired(folder, dram=4 * MIB)
    assert (found.attached, found.segment.geometry.data_bytes) == (False, 4 * MIB)
    assert "not what is configured: made anew, what it held is gone" in caplog.text
    found.close(release=True)


def test_the_room_of_what_is_replaced_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that fills its tmpfs may be started with another size."""
    kept(folder)
    (path,) = folder.glob("*.segment")
    full = os.statvfs(folder)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*full[:4], 0, *full[5:])))  # f_bavail
    found = acquired(folder, dram=4 * MIB)
    assert Path(found.segment.path) == path
    found.close(release=True)
