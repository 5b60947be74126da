"""A namespace as a client has it open, and the memory that it has ahead for its next pages (`umbp.core.spares`)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from umbp import wire
from umbp.client.steps import Call
from umbp.layout import Namespace
from umbp.store.memory import fence
from umbp.store.segment import S_RECALLED, S_SESSION
from umbp.types import I64

if TYPE_CHECKING:
    from umbp.client.link import Bond

AHEAD_SECONDS_MAX = 1.0  # a put that comes this soon after one of as many pages is taken for the second of many
AHEAD_BYTES_MAX = 16 << 20  # of such puts: the pool gives no more


@dataclass(frozen=True, slots=True, eq=False)
class Spare:
    """Memory for the next pages of a namespace (`umbp.core.spares`), asked for at a time, not to be begun with after ``seconds``.

    Whoever takes it from its queue owns it, until the pool recalls it: see `recalled`.
    """

    bond: Bond
    number: int
    offsets: I64
    asked: float
    seconds: float

    def recalled(self) -> bool:
        """Whether the pool wants it back, or has it back already. False, after it was told what is filled in: nothing takes it any more."""
        fence()  # what was sent is with the pool before the number is read
        row = self.bond.row
        newest = int(row[S_RECALLED])  # before the look at whose row it is: it is not made this session's again
        return newest >= self.number or int(row[S_SESSION]) != self.bond.session

    def returned(self) -> Call:
        """What gives it back."""
        return self.bond.call(wire.Commit(self.number, len(self.offsets)), np.zeros(len(self.offsets), np.uint8))


@dataclass(slots=True)
class Opened:
    """A namespace as this client has it open. ``checked``: bond, row and number for which the row was seen to be its own.

    ``users``: handles of it that are not closed.
    """

    identity: Namespace
    users: int = 0
    row: int = -1
    checked: tuple[Bond, int, int] | None = None
    spares: deque[Spare] = field(default_factory=deque)
    put_at: float = float("-inf")  # when the last batch was put, and of how many pages
    put_pages: int = 0

    def pages_ahead(self, pages: int, object_bytes: int) -> int:
        """How many pages to have memory for ahead, now that so many are put: as many, if that goes on."""
        now = time.monotonic()
        again = self.put_pages == pages and now < self.put_at + AHEAD_SECONDS_MAX and not self.spares
        self.put_pages, self.put_at = pages, now
        return pages if again and self.users and pages * object_bytes <= AHEAD_BYTES_MAX else 0

    def take_spare(self, bond: Bond, pages: int) -> Spare | None:
        """Memory ahead for this many pages, if there is some."""
        try:
            spare = self.spares.popleft()
        except IndexError:
            return None
        if spare.bond is bond and len(spare.offsets) == pages and time.monotonic() < spare.asked + spare.seconds:
            return spare
        self.spares.append(spare)  # the upkeep gives it back
        return None
