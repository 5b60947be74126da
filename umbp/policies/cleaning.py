"""Which segment file of an SSD is cleaned next: its live pages are copied on, or dropped, and its space is used again.

Theory of operation. A file that is mostly dead costs little to copy; one that is full may be worth waiting for, since more of it will die.
`cost_benefit` weighs both as the log-structured file system did: space gained times age, over what is read and written for it. `greedy`
takes the emptiest. Of equal ones the oldest goes.

Source: Rosenblum and Ousterhout, "The design and implementation of a log-structured file system", ACM TOCS 1992.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from umbp.policies.base import CLEANING, register
from umbp.types import F64, I64


class CleaningPolicy(Protocol):
    """Chooses which segment file of an SSD is cleaned. Built without arguments; a peek."""

    def order(self, live: F64, age: F64) -> I64:
        """Indices of (n,) files, the one to clean first in front: ``live`` is the share of each that is in use, ``age`` in seconds."""


@register(CLEANING, "cost_benefit")
class CostBenefit:
    """(1 - live) * age / (1 + live), the highest first."""

    def __repr__(self) -> str:
        return "<CostBenefit>"

    def order(self, live: F64, age: F64) -> I64:
        """See `CleaningPolicy`."""
        score = (1 - live) * (age + 1) / (1 + live)
        return np.lexsort((-age, -score))


@register(CLEANING, "greedy")
class Greedy:
    """The emptiest first."""

    def __repr__(self) -> str:
        return "<Greedy>"

    def order(self, live: F64, age: F64) -> I64:
        """See `CleaningPolicy`."""
        return np.lexsort((-age, live))
