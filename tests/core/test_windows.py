"""Who reads what: properties of the deal, against what the words say."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umbp.core.windows import windows

wants = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=30), min_size=1, max_size=8)


@given(wants, st.data())
def test_every_wanted_page_has_one_owner_who_helps(lists: list[list[int]], data: st.DataObject) -> None:
    helps = data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists)))
    dealt = windows([np.array(ids, np.int64) for ids in lists], helps)
    assert dealt.pages.tolist() == sorted({page for ids in lists for page in ids})
    for page, owner in zip(dealt.pages.tolist(), dealt.owner.tolist(), strict=True):
        assert helps[owner] if any(helps) else page in lists[owner]


@given(wants)
def test_windows_are_even_and_whole_and_know_every_reader(lists: list[list[int]]) -> None:
    dealt = windows([np.array(ids, np.int64) for ids in lists], [True] * len(lists))
    sizes = [len(dealt.of(rank)) for rank in range(len(lists))]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == len(dealt.pages)
    for rank, ids in enumerate(lists):
        brought = np.concatenate([dealt.from_owner(rank, owner) for owner in range(len(lists))])
        assert sorted(dealt.pages[brought].tolist()) == sorted(ids)
        assert [ids[at] for at in dealt.position[rank][np.sort(brought)].tolist()] == dealt.pages[np.sort(brought)].tolist()


def test_nobody_wants_anything() -> None:
    dealt = windows([np.empty(0, np.int64)] * 4, [True] * 4)
    assert len(dealt.pages) == 0
    assert len(dealt.of(2)) == 0


def test_a_rank_that_wants_nothing_still_reads_its_share() -> None:
    dealt = windows([np.arange(8), np.empty(0, np.int64)], [True, True])
    assert dealt.of(1).tolist() == [4, 5, 6, 7]
    assert dealt.from_owner(0, 1).tolist() == [4, 5, 6, 7]
