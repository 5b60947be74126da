"""The cases that every copying kernel is run in: sizes, ranks, unwanted pages. No torch here, so that tests can be named without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """``sizes`` are the runs' bytes a page; ``unwanted`` the share of (page, rank) pairs that are -1; ``slack`` the bytes between slots."""

    ranks: int = 1
    pages: int = 3
    sizes: tuple[int, ...] = (4096,)
    blocks: int = 2
    tile: tuple[int, int, int] = (32, 1, 4)  # lanes, warps, unroll: 2 KiB
    unwanted: float = 0.0
    slack: int = 16
    host_shift: int = 0
    seed: int = 0

    @property
    def rank(self) -> int:
        return self.seed % self.ranks


# name -> case. The same ones for every kernel that copies: each once as host to KV, once the other way, once pushed, once staged.
CASES: dict[str, Case] = {
    "one page": Case(pages=1),
    "no page": Case(ranks=2, pages=0, sizes=(64, 128)),
    "two ranks, two components": Case(ranks=2, pages=5, sizes=(2048, 528), seed=1),
    "four ranks, unwanted pages": Case(ranks=4, pages=6, sizes=(4112, 64), unwanted=0.4, seed=2),
    "eight ranks, more blocks than work": Case(ranks=8, pages=2, sizes=(1024,), blocks=5, seed=3),
    "584-byte rows, one of them": Case(ranks=2, pages=3, sizes=(584, 1168), slack=8, seed=5),
    "584-byte rows, 64 of them": Case(ranks=2, pages=2, sizes=(64 * 584,), tile=(64, 4, 4), seed=6),
    "656-byte rows, 64 of them, and an indexer": Case(ranks=2, pages=2, sizes=(64 * 656, 8448), tile=(64, 4, 4), blocks=3, seed=7),
    "multiples of 4 only": Case(ranks=2, pages=3, sizes=(4, 2052, 36), slack=4, seed=8),
    "host addresses at multiples of 4": Case(ranks=2, pages=3, sizes=(528,), host_shift=4, seed=9),
    "nobody wants anything": Case(ranks=2, pages=3, unwanted=1.0, seed=10),
    "exactly one tile, and one element more": Case(ranks=1, pages=2, sizes=(2048, 2064, 2032), seed=11),
}
WAIT_CASES = ["one page"]
MOVERS = ["kernel", "reference"]
