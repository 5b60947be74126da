"""The ranks of a group that loads together, each in a process of its own, with nothing between them but shared memory and signals.

``python -m tests.kernels.exchange FILE`` forks a process for each rank, which maps the file that `tests.kernels.test_exchange` made, at an
address of its own, so that base tables are told apart. It runs `EPOCHS` fused loads and then staged ones, each of other pages into other
slots, and checks every byte of its KV after each; ``FILE.RANK`` then says {"errors": [...], "base": address}. Ranks launch different
numbers of blocks. Between two epochs a rank tells all others that it has checked.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

RANKS, EPOCHS, STAGED = 4, 3, 2
PAGES, SLOTS, SIZES, SLACK = 6, 9, (64 * 20, 528), 16
PAD_BYTES = 12288
POLLS = 2_000_000  # 30 to 60 us each: a peer may be late by its start-up on a loaded machine
PUSHED, CHECKED, FREED = 0, 8, 16  # first counter of each kind; one counter a writer

STRIDES = np.array([size + SLACK for size in SIZES], np.int64)
OFFSETS = np.array([0, SIZES[0] + 32], np.int64)
OBJECT = int(OFFSETS[-1] + SIZES[-1] + 16)
KV_BYTES = int(SLOTS * STRIDES.sum())
STAGE_BYTES = PAGES * sum(SIZES)
HOST_BYTES = PAGES * 2 * OBJECT
RANK_BYTES = PAD_BYTES + -(-(KV_BYTES + STAGE_BYTES) // 4096) * 4096
FILE_BYTES = -(-HOST_BYTES // 4096) * 4096 + RANKS * RANK_BYTES


def plan(epoch: int) -> tuple[Any, Any, Any]:
    """(owner of each page, its offset, slots of each rank): what all ranks agree on without a word. Some pages are not wanted by some."""
    random = np.random.default_rng(epoch)
    offsets = random.permutation(2 * PAGES)[:PAGES].astype(np.int64) * OBJECT
    slots = np.array([random.permutation(SLOTS)[:PAGES] for _ in range(RANKS)], np.int64)
    slots[random.random(slots.shape) < 0.3] = -1
    return random.integers(0, RANKS - (epoch == 2), PAGES), offsets, slots  # in epoch 2, the last rank owns nothing and only signals


class Rank:
    """What one process sees of the shared file."""

    def __init__(self, path: Path, rank: int) -> None:
        from tests.kernels.copies import Kernels
        from umbp.kernels.tables import LayerGroup, Pads, Tile

        self.rank, self.mover, self.errors = rank, Kernels(), list[str]()
        self.others = [np.memmap(path, np.uint8, "r") for _ in range(rank)]  # forked ranks would all map it at one address otherwise
        self.file = np.memmap(path, np.uint8, "r+")
        self.base = self.file.ctypes.data
        starts = [-(-HOST_BYTES // 4096) * 4096 + RANK_BYTES * r for r in range(RANKS)]
        self.kv = self.file[starts[rank] + PAD_BYTES :][:KV_BYTES]
        self.starts = np.array(starts, np.int64) + self.base
        self.bases = self.starts[:, None] + PAD_BYTES + np.array([0, SLOTS * STRIDES[0]])[None, :]
        self.tile = Tile(lanes=32, warps=1, unroll=2)
        self.group = LayerGroup.of(OFFSETS, np.array(SIZES), STRIDES, self.bases, tile=self.tile)
        self.pads = Pads.of(self.starts)
        self.wanted = {PUSHED: [0] * RANKS, CHECKED: [0] * RANKS, FREED: [0] * RANKS}

    def wait(self, kind: int, grown: list[int]) -> None:
        import torch

        from umbp.kernels.tables import signal_address

        self.wanted[kind] = [have + more for have, more in zip(self.wanted[kind], grown, strict=True)]
        addresses = torch.tensor([signal_address(int(self.starts[self.rank]), kind + writer) for writer in range(RANKS)])
        status = torch.zeros(RANKS, dtype=torch.int32)
        self.mover.wait_signal(addresses, torch.tensor(self.wanted[kind]), status, polls=POLLS)
        if status.any():
            self.errors.append(f"counters {kind}: {status.tolist()}")
            raise TimeoutError

    def say_checked(self) -> None:
        """Nobody writes here before all have looked: also the guard between two epochs."""
        from umbp.kernels.tables import Window

        self.mover.fused_read_push(Window.none(RANKS), self.group, self.pads, rank=self.rank, signal=CHECKED + self.rank, blocks=1)
        self.wait(CHECKED, [1] * RANKS)

    def check(self, before: Any, offsets: Any, slots: Any, what: str) -> None:
        expected = before.copy()
        for offset, slot in zip(offsets, slots[self.rank], strict=True):
            for run, size in enumerate(SIZES):
                at = int(run * SLOTS * STRIDES[0] + slot * STRIDES[run])
                if slot >= 0:
                    expected[at : at + size] = self.file[offset + OFFSETS[run] :][:size]
        if not np.array_equal(self.kv, expected):
            self.errors.append(f"{what}: {int((self.kv != expected).sum())} bytes differ")

    def fused(self, epoch: int) -> None:
        from umbp.kernels.tables import Window

        owners, offsets, slots = plan(epoch)
        before, mine = self.kv.copy(), owners == self.rank
        window = Window.of(self.base, offsets[mine], slots[:, mine])
        self.mover.fused_read_push(window, self.group, self.pads, rank=self.rank, signal=PUSHED + self.rank, blocks=1 + self.rank)
        self.wait(PUSHED, [1 + writer for writer in range(RANKS)])
        self.check(before, offsets, slots, f"fused {epoch}")
        self.say_checked()

    def staged(self, epoch: int) -> None:
        """Positions are the pages' numbers, the same in every staging buffer."""
        from umbp.kernels.staging import Staging
        from umbp.kernels.tables import Window

        owners, offsets, slots = plan(epoch)
        before, mine = self.kv.copy(), owners == self.rank
        stage = Staging.of(
            OFFSETS,
            np.array(SIZES),
            STRIDES,
            self.bases[self.rank],
            staging_base=self.starts + PAD_BYTES + KV_BYTES,
            staging_bytes=STAGE_BYTES,
            rank=self.rank,
            tile=self.tile,
        )
        positions = np.where(slots >= 0, np.arange(PAGES)[None, :], -1)
        window = Window.of(self.base, offsets[mine], positions[:, mine])
        self.mover.gather_push(window, stage, self.pads, rank=self.rank, signal=PUSHED + self.rank, blocks=2)
        self.wait(PUSHED, [2] * RANKS)
        wanted = np.flatnonzero(slots[self.rank] >= 0)
        self.mover.stage_scatter(stage.window(wanted, slots[self.rank][wanted]), stage, blocks=2)
        self.mover.stage_free(stage, self.pads, rank=self.rank, signal=FREED + self.rank)
        self.check(before, offsets, slots, f"staged {epoch}")
        self.wait(FREED, [1] * RANKS)  # the next push may write the staging buffers again


def main(path: Path, rank: int) -> None:
    """One rank's life, and what it found."""
    one = Rank(path, rank)
    try:
        for epoch in range(1, EPOCHS + 1):
            one.fused(epoch)
        for epoch in range(EPOCHS + 1, EPOCHS + STAGED + 1):
            one.staged(epoch)
    except TimeoutError:
        pass
    except BaseException:  # noqa: BLE001 - it is told
        one.errors.append(traceback.format_exc())
    path.with_name(f"{path.name}.{rank}").write_text(json.dumps({"errors": one.errors, "base": one.base}))


if __name__ == "__main__":
    import torch

    from tests.kernels.copies import Kernels

    torch.set_num_threads(1)
    Kernels()  # imported once, and not by each rank
    children = []
    for number in range(RANKS):
        if not (pid := os.fork()):
            main(Path(sys.argv[1]), number)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
