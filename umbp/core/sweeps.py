"""A resync as the master sees it: pieces in order, each with the sum over all until it; what to do with the next one.

    piece 0 of another sweep     begins that one: `apply`
    the next piece               `apply` where its sum is right, else `torn`: something of it, or of those before, is not what was sent
    one before                   `again`: it was applied, and its answer was lost
    one that comes too early     `gap`
    any, if a bundle is missing  `lost`: what it said cannot be said again, so only a new sweep makes it right

After `torn` and `gap` the pool goes on at the piece that is wanted (`wanted`), which it makes anew of what it holds by then: a piece has no
fixed content, since the bundles between two pieces say what changed meanwhile. So an interruption costs one piece, not all.

The sum is a chain: it is right only if every piece until here came once, whole and in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["apply", "again", "gap", "torn", "lost"]
_FACTOR, _MASK = 0x9E37_79B9_7F4A_7C15, (1 << 63) - 1


def chained(total: int, content: int) -> int:
    """The sum after a piece of this content, given that before it; below 2 ** 63."""
    return ((total + 1) * _FACTOR + content) & _MASK


@dataclass(slots=True)
class Sweep:
    """Of one member. ``number`` -1: there was none. ``pieces`` are applied; ``total`` is their sum; ``over`` after the last one."""

    number: int = -1
    pieces: int = 0
    total: int = 0
    over: bool = True

    def begins(self, number: int, index: int) -> bool:
        """Whether such a piece is the first one of another sweep."""
        return index == 0 and number != self.number

    def expects(self, number: int, index: int, total: int, content: int) -> Verdict:
        """What to do with a piece that says that the sum is ``total`` with it; ``content`` is its own, as it came. Nothing is changed."""
        if number != self.number:
            return "lost"
        if index < self.pieces:
            return "again"
        if self.over or index > self.pieces:
            return "gap"
        return "apply" if chained(self.total, content) == total else "torn"

    def applied(self, total: int, *, last: bool) -> None:
        """The next piece is applied."""
        self.pieces, self.total, self.over = self.pieces + 1, total, last

    def wanted(self, number: int) -> int:
        """The piece to go on at; -1 where only a new sweep helps."""
        return self.pieces if number == self.number and not self.over else -1
