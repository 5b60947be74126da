"""What a master was asked to route, for the other masters of its store: all of it while that is little, else a sample with its weight.

Theory of operation. Routes are answered from memory by whichever master is asked, so each knows only its own; what is hot must be known
where copies are decided on, by the active one. So each of them tells the others once a second what it was asked. A question is taken if its
draw is below ``share``; when more than `KEYS_MAX` keys or `LOTS_MAX` questions are kept, the share is halved and what is above it dropped.
So what is kept is a fair sample, each question of which stands for 1 / ``share``; the share doubles when there was room, and is 1, which
is everything, at a few long prompts a second.

What follows: heat, accesses and the order of the hottest are the same at every master but for a second of delay and, under load, the noise
of sampling: of a prefix that is a hundredth of 1,000 routes a second, a tenth. Bounded: half a megabyte a second in the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbp.types import U64

KEYS_MAX = 16_384  # one question of the most keys is always kept
LOTS_MAX = 128


@dataclass(frozen=True, slots=True)
class Lot:
    """One question: namespace digest and key words (n, 4), root first; words of 0 for what was no use. ``draw`` in [0, 1)."""

    digest: bytes
    words: U64
    draw: float


class Uses:
    """Since the last `take`."""

    def __init__(self) -> None:
        self.share = 1.0
        self._lots: list[Lot] = []
        self._keys = 0

    def __repr__(self) -> str:
        return f"<Uses {len(self._lots)} questions, {self.share:g} of them>"

    def asked(self, digest: bytes, words: U64, draw: float) -> None:
        """A question was routed and counts."""
        if draw >= self.share or not len(words):
            return
        self._lots.append(Lot(digest, words, draw))
        self._keys += len(words)
        while len(self._lots) > LOTS_MAX or (self._keys > KEYS_MAX and len(self._lots) > 1):
            self.share /= 2
            self._lots = [lot for lot in self._lots if lot.draw < self.share]
            self._keys = sum(len(lot.words) for lot in self._lots)

    def take(self) -> tuple[float, list[Lot]]:
        """How many questions each one stands for, and those that were kept; begins anew."""
        weight, lots = 1.0 / self.share, self._lots
        if self._keys <= KEYS_MAX // 2 and len(lots) <= LOTS_MAX // 2:
            self.share = min(1.0, self.share * 2)
        self._lots, self._keys = [], 0
        return weight, lots
