"""What a rank on a GPU waits for in one round, and what it knows afterwards of who brought it."""

from __future__ import annotations

import numpy as np
import torch

from umbp.loader.copies import Taken
from umbp.loader.deals import Parts
from umbp.loader.runtime import Kernels
from umbp.types import I64

ROW_WORDS = 4  # int32 in 16 bytes


class Arrivals:
    """A status for each owner and turn, on the device, in which a lost owner stays lost."""

    def __init__(self, kernels: Kernels, parts: Parts, me: int, addresses: torch.Tensor, wanted: I64, polls: int) -> None:
        """``addresses``: of the owners' counters, on the device; ``wanted`` (turns, owners): what each shows when its turn has come."""
        device = addresses.device
        self.parts = parts
        self.me = me
        self._kernels = kernels
        self._polls = polls
        self._addresses = addresses
        turns, owners = wanted.shape
        # Rows begin at multiples of 16 bytes: Triton would compile a variant of its own for each other alignment, in the first loads.
        width = -(-owners // ROW_WORDS) * ROW_WORDS
        padded = np.zeros((turns, width), np.int64)
        padded[:, :owners] = wanted
        self._wanted = torch.from_numpy(padded).to(device)[:, :owners]
        self.starts = torch.from_numpy(parts.starts).to(device)
        self.status = torch.zeros((turns, width), dtype=torch.int32, device=device)[:, :owners]

    def expect(self, brings: list[bool]) -> None:
        """Who will bring something; the others are lost from the start. Before the first wait."""
        lost = torch.tensor([not each for each in brings], dtype=torch.int32).to(self.status.device)
        self.status.copy_(lost.expand_as(self.status))

    def wait(self, turn: int) -> None:
        """Queue the wait for what a turn brings."""
        if turn:
            self.status[turn].copy_(torch.maximum(self.status[turn], self.status[turn - 1]))
        self._kernels.wait_signal(self._addresses, self._wanted[turn], self.status[turn], polls=self._polls)

    def account(self, turns: list[I64], taken: Taken) -> tuple[int, ...]:
        """When all is done: count what came from whom; the seats that were lost. ``turns``: bytes of each owner's part in each turn."""
        moved = np.array(turns, np.int64).reshape(len(turns), len(self.parts.owners))
        status = self.status[: len(moved)].cpu().numpy().astype(bool)
        other = np.array(self.parts.owners, np.int64) != self.me
        taken.fallback += int(moved[status].sum())
        taken.received += int(moved[:, other][~status[:, other]].sum())
        return tuple(owner for owner, lost in zip(self.parts.owners, np.any(status, axis=0), strict=True) if lost)
