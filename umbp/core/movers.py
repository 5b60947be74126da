"""How a load is done: alone, through staging memory, or pushed into the slots of all ranks. A pure choice from facts.

`UMBP_LOAD` is a wish. What it asks for is done where it can be, else the next best; the answer always says why, in a word for the metrics
(`cause`, few and fixed) and in a sentence for the log.

    fused    each rank reads 1/N and pushes it into all slots: needs tensors that peers can map
    staged   the same through buffers that peers can reach: for tensors that they cannot map, and for tensors on the CPU
    solo     each rank reads what it wants: no group, KV that differs from rank to rank, and loads below the break-even

In a group the ranks' choices need not agree: those who choose to be alone do not come to the meeting, and a round is staged as soon as one
of those who came cannot be pushed to.
"""

from __future__ import annotations

from dataclasses import dataclass

WAYS = ("auto", "fused", "staged", "solo")
CAUSES = (
    "no_group",
    "asked",
    "small",
    "verify",
    "too_many_pages",
    "replicated",
    "unmapped",
    "unreachable",
    "no_meeting",
    "ssd",
    "remote",
    "no_room",
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a choice is made from. ``alone``: (cause, sentence) if the load cannot be the group's, whatever is asked.

    ``unmapped``: why peers' tensors cannot be pushed into, "" if they can. ``unreachable``: why no memory of peers can be reached.
    """

    size_bytes: int
    break_even_bytes: float
    alone: tuple[str, str] | None = None
    unmapped: str = ""
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """``mover`` is fused, staged or solo; ``cause`` one of `CAUSES`; ``reason`` a sentence."""

    mover: str
    cause: str
    reason: str


def choose(asked: str, facts: Facts) -> Choice:
    """``asked`` is one of `WAYS`."""
    assert asked in WAYS, asked
    if facts.alone is not None:
        return Choice("solo", *facts.alone)
    if asked == "solo":
        return Choice("solo", "asked", "UMBP_LOAD is solo")
    # A load of nothing is there to help the others with theirs, however small.
    if asked == "auto" and 0 < facts.size_bytes < facts.break_even_bytes:
        least = "never" if facts.break_even_bytes == float("inf") else f"from {facts.break_even_bytes:.0f} on"
        return Choice("solo", "small", f"{facts.size_bytes} bytes are there sooner without a meeting: sharing pays {least}")
    if facts.unreachable:
        return Choice("solo", "unreachable", facts.unreachable)
    if asked == "staged":
        return Choice("staged", "asked", "UMBP_LOAD is staged")
    if facts.unmapped:
        return Choice("staged", "unmapped", facts.unmapped)
    if asked == "fused":
        return Choice("fused", "asked", "UMBP_LOAD is fused")
    return Choice("fused", "replicated", "the ranks hold the same KV: each page is read once for all")
