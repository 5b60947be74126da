"""Which layers go together: all of them, in order, and no launch for next to nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umbp.core.layer_groups import GROUP_BYTES_MIN, layer_groups

sizes = st.lists(st.sampled_from([0, 4, 8448, 41_984, 1 << 20]), min_size=1, max_size=64)


@given(sizes, st.integers(0, 8192), st.integers(1, 64))
def test_every_layer_is_in_one_group(layer_bytes: list[int], pages: int, readers: int) -> None:
    groups = layer_groups(layer_bytes, pages=pages, readers=readers)
    assert [layer for first, last in groups for layer in range(first, last)] == list(range(len(layer_bytes)))
    assert all(first < last for first, last in groups)
    for first, last in groups[:-1]:
        assert sum(layer_bytes[first:last]) * pages >= GROUP_BYTES_MIN * readers


def test_a_long_prompt_comes_layer_by_layer_and_a_short_one_at_once() -> None:
    layers = [41_984] * 61
    assert len(layer_groups(layers, pages=2200, readers=8)) == 61
    assert len(layer_groups(layers, pages=1, readers=8)) == 1
    assert len(layer_groups(layers, pages=2200, readers=1)) == 61
