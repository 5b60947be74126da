"""A sweep: everything once, in bounded pieces, in any of which it can go on; found out where something of it is torn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from umbp.core.master import Master, Part
from umbp.master import protocol as say
from umbp.master.service import Told
from umbp.pool.sweeping import PIECE_KEYS, RESUMES_MAX, Piece, Sweep
from umbp.types import I64, U64, Tier

DIGEST = b"\7" * 32


class Shelf:
    """A tier whose positions hold a key or not."""

    def __init__(self, tier: Tier, size: int, every: int) -> None:
        self.tier = tier
        self.rows = np.zeros((size, 5), np.uint64)
        for number in range(0, size, every):
            self.put(number)

    @property
    def end(self) -> int:
        return len(self.rows)

    def put(self, position: int) -> None:
        self.rows[position, :4] = [position + 1, int(self.tier), 3, 4]

    def held(self, start: int, stop: int) -> tuple[I64, U64]:
        positions = np.flatnonzero(self.rows[start:stop, 0]) + start
        return positions, self.rows[positions]


def told(rows: U64, tier: Tier) -> Iterator[Told]:
    """Two bundles a piece, as if there were that many namespaces."""
    for half in np.array_split(rows, 2) if len(rows) > 1 else [rows][: len(rows)]:
        ones = np.ones(len(half), np.uint8)
        yield Told(np.ascontiguousarray(half[:, :4]), ones * tier, ones, [(DIGEST, 4096, len(half))])


class Listener:
    """A master's core that hears pieces; ``holds`` is what it knows then."""

    def __init__(self) -> None:
        self.core = Master(0.0, boot=1, seed=7, keys_max=1 << 18)
        self.member = self.core.join(0.0, "a", 1, "p", {}, {})

    def hear(self, sweep: Sweep, piece: Piece, *, damage: int = 0) -> int | None:
        """None where it is applied, else the piece that is wanted."""
        told = piece.told
        content = say.content_sum(told.words, told.tiers, told.spaces) ^ damage
        member, verdict = self.core.expects_piece(1.0, "a", self.member.registration, sweep.number, piece.index, 0, piece.total, content)
        if verdict == "apply":
            spaces = self.core.spaces(told.spaces)
            self.core.apply(1.0, Part(member, told.words, spaces, told.tiers, told.present, fresh=False))
            self.core.piece_applied(1.0, member, piece.total, last=piece.last)
        return None if verdict in ("apply", "again") else member.sweep.wanted(sweep.number)

    def copies(self, shelf: Shelf) -> int:
        words = np.ascontiguousarray(shelf.rows[shelf.rows[:, 0] != 0, :4])
        return int((self.core.locate(1.0, DIGEST, words)[1] >> shelf.tier & 1).sum())


def test_all_that_two_tiers_hold_is_told_once_and_in_bounded_pieces() -> None:
    dense, sparse = Shelf(Tier.DRAM, 3 * PIECE_KEYS + 5, 1), Shelf(Tier.SSD, 300_000, 1000)
    sweep, listener = Sweep(1, [dense, sparse], told), Listener()
    pieces: list[Piece] = []
    while not pieces or not pieces[-1].last:
        pieces.append(sweep.take())
        assert listener.hear(sweep, pieces[-1]) is None
    assert sum(len(piece.told.words) for piece in pieces) == sweep.keys == len(dense.rows) + 300
    assert max(len(piece.told.words) for piece in pieces) <= PIECE_KEYS
    assert (listener.copies(dense), listener.copies(sparse), len(pieces[-1].told.words)) == (len(dense.rows), 300, 0)
    assert [piece.more for piece in pieces[:3]] == [True, False, True]
    assert listener.member.synced


@pytest.mark.parametrize("torn", [0, 1, 3])
def test_a_torn_piece_is_found_and_the_sweep_goes_on_there_with_what_is_held_by_then(torn: int) -> None:
    shelf = Shelf(Tier.DRAM, 4 * PIECE_KEYS, 2)
    sweep, listener = Sweep(1, [shelf], told), Listener()
    over, heard = False, 0
    while not over:
        piece = sweep.take()
        wanted = listener.hear(sweep, piece, damage=1 if piece.index == torn and not sweep.resumes else 0)
        heard += wanted is None
        if wanted is not None:
            assert wanted == torn
            shelf.put(4 * PIECE_KEYS - 1)  # the sweep has not been there yet
            assert sweep.back_to(wanted)
        over = piece.last and wanted is None
    assert (listener.core.counts.torn, sweep.resumes, listener.core.counts.resyncs) == (1, 1, 1)
    assert listener.copies(shelf) == 2 * PIECE_KEYS + 1
    assert heard == listener.core.counts.pieces == sweep.pieces


def test_a_piece_that_another_master_has_not_heard_is_where_it_goes_on() -> None:
    shelf = Shelf(Tier.DRAM, 4 * PIECE_KEYS, 1)
    sweep, one, two = Sweep(1, [shelf], told), Listener(), Listener()
    for number in range(4):
        piece = sweep.take()
        assert one.hear(sweep, piece) is None
        assert number == 3 or two.hear(sweep, piece) is None
    piece = sweep.take()
    assert two.hear(sweep, piece) == 3
    assert sweep.back_to(3)
    piece = sweep.take()
    while not piece.last:
        assert two.hear(sweep, piece) is None
        piece = sweep.take()
    assert two.hear(sweep, piece) is None
    assert two.copies(shelf) == 4 * PIECE_KEYS


def test_a_sweep_goes_back_only_so_often_and_to_what_it_has_made() -> None:
    sweep = Sweep(1, [Shelf(Tier.DRAM, 10, 1)], told)
    assert not sweep.back_to(0)
    sweep.take()
    assert not sweep.back_to(-1)
    for _ in range(RESUMES_MAX):
        assert sweep.back_to(0)
        sweep.take()
    assert not sweep.back_to(0)
