"""Stages of loads: what is read when, and from which chunks a layer is known to be there."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.core.stages import RANGES_MAX, STAGE_BYTES_MIN, STAGES_MAX, Stages, runs, stages, steps
from umbp.store.index import chunks_of

KIB, MIB = 1 << 10, 1 << 20


def layout(*components: list[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Offsets and sizes of components, each a list of its layers' bytes, 0 where it has none; and the page's size."""
    sizes = np.array(components, np.int64)
    ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    return np.where(sizes > 0, ends - sizes, -1), np.where(sizes > 0, sizes, -1), int(sizes.sum())


def test_a_stage_takes_as_much_as_all_before_it_and_the_first_layer_comes_after_an_eighth() -> None:
    offsets, sizes, size = layout([128 * KIB] * 8)
    made = stages(offsets, sizes, size, 1000)
    assert made.ranges == (((0, 128 * KIB),), ((128 * KIB, 256 * KIB),), ((256 * KIB, 512 * KIB),), ((512 * KIB, 1024 * KIB),))
    assert [int(need) for need in made.needs] == [(1 << layer + 1) - 1 for layer in range(8)]


def test_each_component_has_its_range_and_a_stage_is_never_small() -> None:
    offsets, sizes, size = layout([1 * MIB] * 8, [1 * MIB] * 8)
    made = stages(offsets, sizes, size, 2)  # 32 MiB: two halves
    assert made.ranges == (((0, 4 * MIB), (8 * MIB, 12 * MIB)), ((4 * MIB, 8 * MIB), (12 * MIB, 16 * MIB)))
    assert stages(offsets, sizes, size, 1).ranges == ()


def test_pages_of_one_chunk_and_of_one_layer_come_whole() -> None:
    offsets, sizes, size = layout([16 * KIB] * 8)
    assert stages(offsets, sizes, size, 100_000).ranges == ()
    offsets, sizes, size = layout([64 * MIB])
    assert stages(offsets, sizes, size, 100).ranges == ()


def check(made: Stages, offsets: np.ndarray, sizes: np.ndarray, size: int, pages: int) -> None:
    """Whole pages are read, no byte twice; and a layer is known to be there exactly when all its bytes are."""
    assert len(made.ranges) <= STAGES_MAX
    assert sum(map(len, made.ranges)) <= RANGES_MAX
    read, seen = np.zeros(size, np.uint8), 0
    done = 0
    for number, step in enumerate(steps(made.ranges, size)):
        assert not step.chunks & seen
        seen |= step.chunks
        for start, stop in step.spans:
            read[start:stop] += 1
            assert step.chunks | chunks_of(size, start, stop) == step.chunks
        known = sum(1 for need in made.needs if int(need) & seen == int(need))
        there = [
            all(
                read[offset : offset + nbytes].all()
                for offset, nbytes in zip(offsets[:, : layer + 1].ravel().tolist(), sizes[:, : layer + 1].ravel().tolist(), strict=True)
                if offset >= 0
            )
            for layer in range(offsets.shape[1])
        ]
        assert known <= sum(there), "a layer is told that is not there"
        if number < len(made.ranges):
            assert known > done, "a stage without a layer"
        done = known
    assert (read == 1).all()
    assert done == offsets.shape[1]
    if len(made.ranges) > 1:
        for stage in made.ranges:
            assert sum(stop - start for start, stop in stage) * pages >= STAGE_BYTES_MIN or stage is made.ranges[-1]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(
        st.lists(st.sampled_from([0, 700, 36 * KIB, 74 * KIB, 128 * KIB, 300_000]), min_size=6, max_size=6), min_size=1, max_size=3
    ),
    pages=st.sampled_from([1, 40, 500, 3000]),
)
def test_any_layout_is_read_whole_and_in_order(shape: list[list[int]], pages: int) -> None:
    shape[0] = [max(1, nbytes) for nbytes in shape[0]]  # no layer without a byte
    offsets, sizes, size = layout(*shape)
    check(stages(offsets, sizes, size, pages), offsets, sizes, size, pages)


@given(
    offsets=st.lists(st.integers(0, 12), unique=True, max_size=8),
    cuts=st.sets(st.integers(0, 60), min_size=2, max_size=8),
    gap=st.integers(0, 3),
)
def test_spans_of_pages_are_the_same_bytes_in_the_same_order_in_as_few_runs_as_can_be(offsets: list[int], cuts: set[int], gap: int) -> None:
    """Against a list of all bytes. Pages of 60 bytes that lie side by side, or apart."""
    bounds = sorted(cuts)
    spans = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    places = np.array(offsets, np.int64) * (60 + gap)
    want = [at for place in places.tolist() for start, stop in spans for at in range(place + start, place + stop)]
    starts, lengths = runs(places, spans)
    made = [at for start, length in zip(starts.tolist(), lengths.tolist(), strict=True) for at in range(start, start + length)]
    assert made == want
    assert len(starts) == sum(1 for before, at in zip([-2, *want], want, strict=False) if at != before + 1)
