"""Rounds of ranks on devices, dealt: all ranks agree, every wanted page is brought once, and pieces of a staged round cover it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from umbp.client.ranks import RosterView, SeatView
from umbp.loader.board import BOARD_BYTES, Board, Card
from umbp.loader.deals import Deal, Parts, deal
from umbp.loader.group import Alone
from umbp.loader.peers import Reach
from umbp.loader.processes import Watch
from umbp.loader.runtime import Fault
from umbp.loader.stages import HALVES, pieces, regions

wants = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=20), min_size=1, max_size=5)
LAYERS = [4096, 0, 8192]


def round_of(lists: list[list[int]], *, staged: bool = False, moved_on: int | None = None) -> tuple[RosterView, list[Board]]:
    """Boards with posted tables; slots are page * 3 + rank. ``moved_on``: a rank that has posted another table since."""
    seats, boards = [], []
    for rank, ids in enumerate(lists):
        memory = np.zeros(BOARD_BYTES, np.uint8)
        board = Board(memory)
        board.post(7 + rank, np.array(ids, np.int64), np.array(ids, np.int64) * 3 + rank, helps=rank != 1, staged=staged and rank == 0)
        seats.append(SeatView(rank, 7 + rank, memory, len(ids), np.ones(len(ids), bool)))
        boards.append(board)
    if moved_on is not None:
        boards[moved_on].post(99, np.empty(0, np.int64), np.empty(0, np.int64), helps=True, staged=False)
    return RosterView(5, tuple(seats)), boards


def reach(rank: int, board: Board) -> Reach:
    card = Card(rank + 1, "host", 0, 0, 0, 2, [], [], (0, 0), (0, 0), 1 << 20, [], [], "")
    return Reach(card, 4096 * (rank + 1), 1 << 16, np.zeros(3, np.int64), "", Watch(0, 0, "", 0))


def deals(lists: list[list[int]], **options: bool) -> list[Deal]:
    roster, _ = round_of(lists, **options)  # type: ignore[arg-type]
    return [deal(roster, me, reach, LAYERS) for me in range(len(lists))]


@given(wants)
def test_all_ranks_make_the_same_deal_and_know_what_comes_from_whom(lists: list[list[int]]) -> None:
    made = deals(lists)
    assert len({each.digest for each in made}) == 1
    for me, each in enumerate(made):
        parts = Parts.of(each)
        assert sorted(each.windows.pages[parts.pages].tolist()) == sorted(lists[me])
        assert (parts.slots == each.windows.pages[parts.pages] * 3 + me).all()
        for word, owner in enumerate(parts.owners):
            brought = parts.pages[parts.starts[word] : parts.starts[word + 1]]
            assert (each.windows.owner[brought] == owner).all()
            assert each.wants_from(me, owner)
        assert (each.windows.owner[parts.pages[parts.from_others(me)]] != me).all()


@given(wants, st.integers(1, 7))
def test_pieces_are_numbered_alike_and_bring_every_page_once(lists: list[list[int]], pages: int) -> None:
    made = deals(lists, staged=True)
    assert all(each.staged for each in made)
    cut = [pieces(each, Parts.of(each), pages) for each in made]
    assert len({len(each) for each in cut}) == 1
    for me, each in enumerate(made):
        for number, piece in enumerate(cut[me]):
            assert len(piece.mine) <= pages
            for word, owner in enumerate(piece.parts.owners):
                brought = piece.parts.pages[piece.parts.starts[word] : piece.parts.starts[word + 1]]
                place = piece.place[piece.parts.starts[word] : piece.parts.starts[word + 1]]
                assert (cut[owner][number].mine[place] == brought).all(), "what an owner has at this place of its piece"
        assert sorted(page for piece in cut[me] for page in piece.parts.pages.tolist()) == sorted(Parts.of(each).pages.tolist())


def test_a_rank_that_has_moved_on_wants_nothing_and_is_seen_in_the_digest() -> None:
    lists = [[1, 2, 3], [2, 3], [4]]
    before, _ = round_of(lists)
    after, _ = round_of(lists, moved_on=2)
    one, other = deal(before, 0, reach, LAYERS), deal(after, 0, reach, LAYERS)
    assert one.digest != other.digest
    assert other.windows.pages.tolist() == [1, 2, 3]
    assert not other.seats[2].helps


def test_a_rank_whose_card_cannot_be_read_is_done_without() -> None:
    roster, _ = round_of([[1, 2], [2]])
    made = deal(roster, 0, lambda rank, board: None if rank == 1 else reach(rank, board), LAYERS)
    assert made.windows.pages.tolist() == [1, 2]
    assert made.seats[1].reach is None


def test_an_announcement_counts_for_its_own_deal_only() -> None:
    _, boards = round_of([[1], [1]])
    assert boards[0].announced(5) is None
    boards[0].announce(5, 0b11)
    assert boards[0].announced(5) == 0b11
    assert boards[0].announced(6) is None


def test_regions_hold_a_page_of_any_layer_and_do_not_overlap() -> None:
    made = deals([[1, 2], [2], [3]], staged=True)[0]
    size, pages = regions(made, [4096, 16, 10_016])
    owners = made.readers
    for page_bytes in (4096, 16, 10_016):
        for region in range(HALVES * owners):
            first = -(-region * size // page_bytes) * page_bytes
            assert region * size <= first
            assert first + pages * page_bytes <= (region + 1) * size <= 1 << 20
    with pytest.raises(Alone, match=r"raise Group\.staging_bytes"):
        regions(made, [1 << 19])


def test_a_card_comes_back_as_it_was_posted_and_half_a_card_is_none() -> None:
    board = Board(np.zeros(BOARD_BYTES, np.uint8))
    assert board.card_or_none() is None
    card = Card(1, "hip", 2, 3, 4, 48, [b"\x00" * 64], [4096], (0, 8), (0, 16), 1 << 20, [(0, 0)], [584], "")
    board.put_card(card)
    assert board.card_or_none() == card
    board._card[3] ^= 1
    assert board.card_or_none() is None
    many = Card(1, "hip", 2, 3, 4, 48, [bytes(64)] * 4000, [0] * 4000, (0, 0), (0, 0), 0, [(0, 0)] * 4000, [0] * 4000, "")
    with pytest.raises(Fault, match="too many"):
        board.put_card(many)
