"""A bell in shared memory: the pool rings when pages that clients wait for have come, and a client sleeps until it does.

Theory of operation. Two words of the segment's header, written by the pool alone: how often it rang, and how often for a page that did not
come. A client reads the words, looks at what it waits for, and if nothing has changed sleeps in the kernel (futex) until the first word is
another than it was; as the kernel compares once more before it puts anybody to sleep, no ring is missed. A ring is for sessions: of those
that share its bit (one of 32) some wake for nothing. Who sleeps needs to read the memory only.

What it costs: a ring 2 us, and nothing while nobody sleeps but the call; looking again and again instead takes a fifth of a core for as
long as a fetch lasts. Where the kernel has no such call, a client looks once a millisecond.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import time
from collections.abc import Iterable

from umbp.types import U64

CALLS = {"x86_64": 202, "aarch64": 98}  # the number of futex(2)
_WAIT, _WAKE = 9, 10  # FUTEX_WAIT_BITSET, with an absolute time on CLOCK_MONOTONIC; FUTEX_WAKE_BITSET
_ALL = 0x7FFF_FFFF
WORDS = 2
BLIND_SECONDS = 0.001

_number = CALLS.get(platform.machine(), -1)
_call = ctypes.CDLL(None, use_errno=True).syscall
_call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
_call.restype = ctypes.c_long


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """The two ``words`` of one segment, (2,) uint64."""

    __slots__ = ("_address", "_words")

    def __init__(self, words: U64) -> None:
        assert words.shape == (WORDS,), words.shape
        self._words = words  # keeps the mapping
        self._address = int(words.ctypes.data)

    def __repr__(self) -> str:
        return f"<Bell rang {self.rings} times>"

    @property
    def rings(self) -> int:
        """How often it rang."""
        return int(self._words[0])

    @property
    def lacks(self) -> int:
        """How often for pages that did not come."""
        return int(self._words[1])

    def ring(self, sessions: Iterable[int], *, lacking: bool) -> None:
        """Wake who waits for these sessions. For the pool only. ``lacking``: a page of theirs is not coming."""
        bits = 0
        for session in sessions:
            bits |= _bit(session)
        if not bits:
            return
        if lacking:
            self._words[1] += 1
        self._words[0] += 1
        if _number >= 0:
            _call(_number, self._address, _WAKE, _ALL, None, None, bits)

    def wait(self, rings: int, session: int, seconds: float) -> None:
        """Sleep until it rang more often than ``rings`` times, for so long at the most. Who wakes earlier looks and comes again."""
        if self.rings != rings:
            return
        if _number >= 0:
            until = divmod(int((time.monotonic() + seconds) * 1e9), 1_000_000_000)
            at = ctypes.byref(_Time(*until))
            if _call(_number, self._address, _WAIT, rings & 0xFFFF_FFFF, at, None, _bit(session)) == 0:
                return
            if ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                return
        time.sleep(min(seconds, BLIND_SECONDS))


def _bit(session: int) -> int:
    return 1 << session % 32
