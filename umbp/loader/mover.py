"""What moves pages between the pool's segment and one rank's tensors, whatever they are made of."""

from __future__ import annotations

from typing import Protocol

from umbp.loader.copies import Taken
from umbp.loader.handles import Load
from umbp.types import I64, U8


class Mover(Protocol):
    """One rank's tensors. ``data``: the segment's pages; ``offsets`` and ``slots`` (n,) int64: where each page is, and where it belongs."""

    layer_bytes: list[int]

    @property
    def beside(self) -> Mover:
        """The one for pages that are in other memory of this process than the segment: its ``data`` may be any."""

    def restore(self, load: Load, data: U8, offsets: I64, slots: I64, taken: Taken, layers: tuple[int, int] | None = None) -> bool:
        """All layers of these pages into their slots, each told to the load. False if it was cancelled, late, or over before it began.

        ``layers``: only these, half-open; those before them are there. When this returns or raises, nothing of it is written any more.
        """

    def save(self, data: U8, offsets: I64, slots: I64) -> None:
        """All layers of these pages from their slots into the segment, whole when this returns."""

    def close(self) -> None:
        """Give back what it holds. Nothing of it is under way."""
