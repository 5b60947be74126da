"""Where a master enters changes before it applies them: nowhere, for one master alone; for several see `umbp.master.shared`."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Where changes are entered before they are applied."""

    @property
    def active(self) -> bool:
        """Whether this master declares nodes dead."""
        ...

    @property
    def trouble(self) -> str:
        """What is wrong with it now, or ""."""
        ...

    @property
    def heard(self) -> float | None:
        """When what other masters heard came last, on the clock of `time.monotonic`; None where there are no others."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other masters read it."""
        ...

    async def register(self, node: str, join: bytes, *, draining: bool) -> int:
        """Enter a registration; its number, 0 where the master counts for itself. Unavailable if it cannot be entered."""
        ...

    async def enter(self, kind: str, node: str, payload: bytes, *, seconds: float | None = None) -> None:
        """Enter a change. Unavailable if it cannot be, within so many seconds."""
        ...

    async def decide(self, kind: str, name: str, value: bytes) -> None:
        """Enter what an operator decided, for masters that come later too. Unavailable if it cannot be."""
        ...

    async def gone(self, node: str, registration: int) -> None:
        """Enter that a node is dead."""
        ...

    async def catch_up(self, seconds: float) -> None:
        """Until all that was entered so far is applied, or the time is over."""
        ...


class Alone:
    """No other masters: everything is in memory."""

    active = True
    trouble = ""
    heard = None
    shared = False

    def __repr__(self) -> str:
        return "<Alone>"

    async def register(self, node: str, join: bytes, *, draining: bool) -> int:
        """The core counts."""
        return 0

    async def enter(self, kind: str, node: str, payload: bytes, *, seconds: float | None = None) -> None:
        """Nobody else wants to know."""

    async def decide(self, kind: str, name: str, value: bytes) -> None:
        """Nobody else wants to know."""

    async def gone(self, node: str, registration: int) -> None:
        """Nobody else wants to know."""

    async def catch_up(self, seconds: float) -> None:
        """Nothing was entered."""
