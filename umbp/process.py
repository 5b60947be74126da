"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # here: a process that was only just forked should do as little as can be


def end_with(parent: int, number: int) -> None:
    """In a process that was just forked by process ``parent``: it gets this signal when that is gone, however it ended."""
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before that
        os._exit(0)
