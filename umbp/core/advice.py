"""What the master would have pools do with some keys, and the order that keeps the last copy safe.

Theory of operation. A pool evicts for itself, at once, without asking. Advice makes it choose better, later, and may be lost or ignored.

    copy    fetch these keys from a source                       offered -> done | over
    hold    do not evict these keys for a while                  offered -> held -> over
    drop    these keys are elsewhere: evict them first           offered -> done | over

A `drop` is made only of a `hold` that another pool has answered for: that pool has looked into its own state, found the keys and keeps
them until the hold is over, and the drop ends `MARGIN_SECONDS` before that. A key that is part of any advice is part of no other. So two
nodes that hold the same two keys are never both told that the other one does, and the last copy is not dropped in the belief of another,
however old the directory is. Times are durations from the arrival of each message, so clocks that differ do no harm; what a message took
to arrive is within the margin, and a pool that was stopped for longer than that finds its drop over.

Bounded: advice a node, keys an advice, bytes a second of copies (a bucket that fills with time and overflows at one second's worth).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from umbp.types import I64, U8, Mask

PER_NODE_MAX = 8
KEYS_MAX = 64
HOLD_SECONDS, MARGIN_SECONDS = 30.0, 10.0
OFFER_SECONDS = 10.0  # for which an offer waits for its answer

COPY, HOLD, DROP = "copy", "hold", "drop"


@dataclass(slots=True)
class Advice:
    """One advice to one node. ``keys`` (n, 32) of namespace ``digest``; ``rows`` are theirs in the directory."""

    number: int
    verb: str
    node: str
    digest: bytes
    keys: U8
    rows: list[int]
    until: float
    source: str = ""  # copy: where from; drop: who holds them
    giver: str = ""  # hold: who may drop once it is held
    held: bool = False
    sent: bool = False

    def seconds(self, now: float) -> float:
        """How long it is good for, from now on."""
        return max(0.0, self.until - now)


class Ledger:
    """All advice that is out."""

    def __init__(self, bytes_per_second: float, boot: int) -> None:
        self.bytes_per_second = bytes_per_second
        self._bytes = 0.0
        self._filled_at: float | None = None
        self._numbers = boot % (1 << 42) << 20  # a promise made to another master, or to an earlier life of this one, is no answer here
        self.by_number: dict[int, Advice] = {}
        self.by_node: dict[str, dict[int, Advice]] = {}
        self._rows: dict[int, int] = {}  # row -> number of the advice that it is part of
        self.counts = {COPY: 0, HOLD: 0, DROP: 0}

    def __repr__(self) -> str:
        return f"<Ledger {len(self.by_number)} out>"

    # -- giving ------------------------------------------------------------------------------------------------------------------------

    def free(self, row: int) -> bool:
        """Whether this row is part of no advice."""
        return row not in self._rows

    def can_give(self, node: str) -> bool:
        """Whether the node has not got as much as it may."""
        return len(self.by_node.get(node, ())) < PER_NODE_MAX

    def brings(self, node: str, rows: I64) -> Mask:
        """Which of these rows the node has been advised to copy: that it asks where they are is no use of them, (n,) bool."""
        mine = {row for advice in self.by_node.get(node, {}).values() if advice.verb == COPY for row in advice.rows}
        return np.array([row in mine for row in rows.tolist()], bool)

    def bytes_now(self, now: float) -> int:
        """Bytes that may be copied now."""
        if self._filled_at is not None:
            self._bytes = min(self.bytes_per_second, self._bytes + (now - self._filled_at) * self.bytes_per_second)
        self._filled_at = now
        return int(self._bytes)

    def copy(self, now: float, node: str, source: str, digest: bytes, keys: U8, rows: list[int], size_bytes: int) -> Advice:
        """Have the node fetch these keys from the source."""
        self._bytes -= size_bytes
        return self._give(Advice(self._number(), COPY, node, digest, keys, rows, now + HOLD_SECONDS, source=source))

    def hold(self, now: float, node: str, giver: str, digest: bytes, keys: U8, rows: list[int]) -> Advice:
        """Have the node keep these keys, so that the giver may let them go."""
        return self._give(Advice(self._number(), HOLD, node, digest, keys, rows, now + OFFER_SECONDS, giver=giver))

    # -- answers -----------------------------------------------------------------------------------------------------------------------

    def take(self, node: str) -> list[Advice]:
        """What has not been said to the node yet; it is now."""
        fresh = [advice for advice in self.by_node.get(node, {}).values() if not advice.sent]
        for advice in fresh:
            advice.sent = True
        return fresh

    def held(self, now: float, node: str, number: int) -> Advice | None:
        """The node holds all keys of this advice from now on, for `HOLD_SECONDS`; the drop that follows from it."""
        advice = self.by_number.get(number)
        if advice is None or advice.node != node or advice.verb != HOLD or advice.held:
            return None
        advice.held, advice.until = True, now + HOLD_SECONDS - MARGIN_SECONDS
        if not self.can_give(advice.giver):
            return None
        rows, advice.rows = advice.rows, []  # the rows are the drop's from now on
        return self._give(Advice(self._number(), DROP, advice.giver, advice.digest, advice.keys, rows, advice.until, source=node))

    def done(self, node: str, number: int) -> None:
        """The node has dealt with it."""
        advice = self.by_number.get(number)
        if advice is not None and advice.node == node:
            self._end(advice)

    def expire(self, now: float) -> None:
        """What is over goes."""
        for advice in [advice for advice in self.by_number.values() if advice.until <= now]:
            self._end(advice)

    def forget(self, node: str) -> None:
        """The node is gone: with it what it was to do, to give, or to hold for others."""
        for advice in [advice for advice in self.by_number.values() if node in (advice.node, advice.source)]:
            self._end(advice)

    def check(self) -> None:
        """The invariants."""
        assert {number for advice in self.by_number.values() for number in [advice.number]} == set(self.by_number)
        assert all(len(out) <= PER_NODE_MAX for out in self.by_node.values())
        rows = [row for advice in self.by_number.values() for row in advice.rows]
        assert len(rows) == len(set(rows)) == len(self._rows), "a key is part of two"

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _give(self, advice: Advice) -> Advice:
        assert len(advice.rows) <= KEYS_MAX
        self.by_number[advice.number] = advice
        self.by_node.setdefault(advice.node, {})[advice.number] = advice
        self._rows.update(dict.fromkeys(advice.rows, advice.number))
        self.counts[advice.verb] += 1
        return advice

    def _end(self, advice: Advice) -> None:
        self.by_number.pop(advice.number, None)
        of_node = self.by_node.get(advice.node, {})
        of_node.pop(advice.number, None)
        if not of_node:
            self.by_node.pop(advice.node, None)
        for row in advice.rows:
            self._rows.pop(row, None)
