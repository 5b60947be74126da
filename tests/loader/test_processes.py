"""A process is gone when it can never write again: not while it is stopped, nor because another process has its number."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.field.people import Child, eventually
from umbp.loader import processes
from umbp.loader.processes import Watch
from umbp.store.segment import process_started


def rest(child: Child) -> None:
    child.hear(60.0)


def test_a_stopped_process_is_not_gone_and_a_killed_one_is() -> None:
    with Child(rest) as child:
        watch = Watch(child.pid, process_started(child.pid), "/nowhere", 1)
        assert not watch.gone()
        child.signal(signal.SIGSTOP)
        assert not watch.gone()
        child.kill()
        eventually(watch.gone, "the killed process is gone")
        watch.close()


def test_a_number_that_another_process_has_now_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is in another pid namespace, and the lock of its mapping tells."""
    monkeypatch.setattr(processes, "SETTLE_SECONDS", 0.0)
    told = [True]
    monkeypatch.setattr(processes, "held", lambda path, holder: told[0])
    watch = Watch(os.getpid(), process_started(os.getpid()) + 1, str(tmp_path / "segment"), 7)
    assert not watch.gone()
    told[0] = False
    eventually(watch.gone, "its mapping is gone")
    assert watch.gone()
    watch.close()


def test_a_mapping_that_has_just_gone_is_given_time_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "held", lambda path, holder: False)
    watch = Watch(0, 0, "/nowhere", 7)
    assert not watch.gone(), "the process's other descriptors, the GPU's among them, close after its memory"
    watch.close()
