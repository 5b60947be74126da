"""Checksums of pages whose bytes come in parts: those of the whole page, in whatever order they came, and none before."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umbp.store.checksums import Growing, checksums


@given(st.data())
def test_a_page_has_its_checksum_when_its_last_part_has_come(data: st.DataObject) -> None:
    size, pages = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 4))
    memory = np.random.default_rng(size).integers(0, 256, pages * size, np.uint8)
    offsets = np.arange(pages)[::-1] * size
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=6))})
    parts = [(page, start, stop) for page in range(pages) for start, stop in pairwise(cuts)]
    arrived = memory.copy()
    arrived[:] = 0
    growing = Growing(arrived, offsets, size)
    left = {page: len(cuts) - 1 for page in range(pages)}
    want = checksums(memory, offsets, np.full(pages, size))
    for page, start, stop in data.draw(st.permutations(parts)):
        at = int(offsets[page])
        arrived[at + start : at + stop] = memory[at + start : at + stop]
        growing.came(page, start, stop)
        left[page] -= 1
        assert growing.sums.tolist() == [0 if left[each] else want[each] for each in range(pages)]
