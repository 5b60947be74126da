"""Where a prefix can end: after the leading run of its pages, at those whose window before them is whole."""

from __future__ import annotations

import numpy as np

from umbp.types import Mask


def leading(hit: Mask) -> int:
    """How many leading pages are there."""
    return len(hit) if hit.all() else int(hit.argmin())


def windows_that_are_whole(hit: Mask, window: int) -> Mask:
    """For each length 1 .. n: whether the last ``window`` pages of it (all, where it is shorter) are there; (n,) bool."""
    total = np.concatenate([[0], np.cumsum(hit)])
    ends = np.arange(1, len(hit) + 1)
    starts = np.maximum(ends - window, 0)
    whole: Mask = total[ends] - total[starts] == ends - starts
    return whole
