"""Which of several SSDs a record goes to.

Theory of operation. A page lies whole on one disk, pages that are written together in records of some megabytes, and each record may go to
another disk: so a batch is written, and later read, by all of them at once. `even` takes the disk with the fewest bytes waiting for its
size, and of those the one with the most room; `fill` takes the one with the most room alone, which suits disks of very different age.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from umbp.policies.base import STRIPING, register
from umbp.types import F64


class StripingPolicy(Protocol):
    """Chooses to which of several SSDs a record goes. Built without arguments; a peek."""

    def choose(self, size: F64, used: F64, waiting: F64) -> int:
        """Index of one of (n,) disks that work: their limits, the bytes of pages they hold, and the bytes on their way to them."""


@register(STRIPING, "even")
class Even:
    """The least busy."""

    def __repr__(self) -> str:
        return "<Even>"

    def choose(self, size: F64, used: F64, waiting: F64) -> int:
        """See `StripingPolicy`."""
        return int(np.lexsort((used / size, waiting / size))[0])


@register(STRIPING, "fill")
class Fill:
    """The emptiest."""

    def __repr__(self) -> str:
        return "<Fill>"

    def choose(self, size: F64, used: F64, waiting: F64) -> int:
        """See `StripingPolicy`."""
        return int(np.lexsort((waiting / size, (used + waiting) / size))[0])
