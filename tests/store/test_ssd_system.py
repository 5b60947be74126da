"""Memory for direct I/O: where it begins, what is in it, and what a forked child sees of it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from umbp.store.memory import HUGE_BYTES
from umbp.store.ssd_system import aligned

FORKED = """
import os
from umbp.store.memory import HUGE_BYTES
from umbp.store.ssd_system import aligned
memory = aligned(HUGE_BYTES)
memory[:] = b"x" * HUGE_BYTES
child = os.fork()
if not child:
    private = memory[0] == 0
    memory[:] = b"y" * HUGE_BYTES
    os._exit(0 if private else 3)
status = os.waitpid(child, 0)[1]
assert memory == b"x" * HUGE_BYTES
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    ("size", "boundary"), [(0, 4096), (1, 4096), (HUGE_BYTES - 1, 4096), (HUGE_BYTES, HUGE_BYTES), (5_000_000, HUGE_BYTES)]
)
def test_memory_for_direct_io_begins_on_a_page_and_is_zero(size: int, boundary: int) -> None:
    memory = np.frombuffer(aligned(size), np.uint8)
    assert len(memory) == size
    assert not memory.any()
    assert not size or memory.ctypes.data % boundary == 0
    memory[:] = 7
    assert (memory == 7).all()


def test_a_forked_child_has_zeros_of_large_memory_and_changes_none_of_it() -> None:
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=60).returncode == 0
