"""The segment is registered once a process and device, whatever the number of loaders, and released by the last."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.loader.host_runtime import HostRuntime
from umbp.loader import registered
from umbp.loader.registered import Segment
from umbp.loader.runtime import Fault
from umbp.types import U8


class Known(HostRuntime):
    """Takes any memory."""

    def register(self, memory: U8) -> int:
        self._call("register")
        return memory.ctypes.data + (1 << 40)

    def unregister(self, memory: U8) -> None:
        self._call("unregister")


def memory() -> U8:
    return np.frombuffer(mmap.mmap(-1, 8192), np.uint8)


def test_loaders_share_one_registration_and_the_last_releases_it() -> None:
    runtime, data = Known("/dev/shm"), memory()
    first, second = Segment(runtime), Segment(runtime)
    assert first.alias(data) == second.alias(data) == first.alias(data) == data.ctypes.data + (1 << 40)
    assert runtime.calls["register"] == 1
    first.close()
    assert runtime.calls["unregister"] == 0
    second.close()
    second.close()
    assert runtime.calls["unregister"] == 1


def test_other_memory_is_registered_anew_and_the_former_released() -> None:
    runtime, one, other = Known("/dev/shm"), memory(), memory()
    segment = Segment(runtime)
    assert segment.alias(one) != segment.alias(other)
    assert (runtime.calls["register"], runtime.calls["unregister"]) == (2, 1)
    segment.close()
    assert runtime.calls["unregister"] == 2


def test_what_fails_is_tried_once_and_never_released() -> None:
    runtime, data = Known("/dev/shm", {"register": "no memory may be locked"}), memory()
    segment = Segment(runtime)
    for _ in range(3):
        with pytest.raises(Fault, match="no memory may be locked"):
            segment.alias(data)
    assert runtime.calls["register"] == 1
    segment.close()
    assert runtime.calls["unregister"] == 0


def test_at_the_exit_of_a_process_all_is_released() -> None:
    runtime, data = Known("/dev/shm"), memory()
    segment = Segment(runtime)
    segment.alias(data)
    registered._at_exit()
    assert runtime.calls["unregister"] == 1
    assert data.ctypes.data not in {key[2] for key in registered._made}
    segment.close()
