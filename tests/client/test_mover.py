"""Copying between segment and caller, byte for byte against the loop that it replaces."""

import itertools
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.client import mover
from umbp.client.mover import gather, scatter

KIB, MIB = 1 << 10, 1 << 20
GUARD = 0xEE


def segment(size_bytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def check_both_ways(data_bytes: int, offsets: np.ndarray, size: int) -> None:
    """Gather and scatter these objects, and see that nothing else was touched."""
    data = segment(data_bytes)
    before = data.copy()
    out = np.full((len(offsets) + 2, size), GUARD, np.uint8)  # a row before and one after
    gather(data, offsets, out[1:-1])
    for row, offset in zip(out[1:-1], offsets.tolist(), strict=True):
        assert np.array_equal(row, before[offset : offset + size])
    assert (out[[0, -1]] == GUARD).all()
    assert np.array_equal(data, before), "a gather wrote into the segment"

    values = segment(len(offsets) * size, seed=2).reshape(len(offsets), size)
    kept = values.copy()
    scatter(data, offsets, values)
    for row, offset in zip(kept, offsets.tolist(), strict=True):
        before[offset : offset + size] = row
    assert np.array_equal(data, before)
    assert np.array_equal(values, kept), "a scatter wrote into the values"


def places(kind: str, count: int, step: int) -> np.ndarray:
    """Offsets of ``count`` objects ``step`` apart at the least."""
    at = np.arange(count, dtype=np.int64) * step
    if kind == "two runs":
        at[count // 2 :] += 7 * step
    elif kind == "scattered":
        at = np.random.default_rng(3).permutation(3 * count)[:count].astype(np.int64) * step
    elif kind == "backwards":
        at = at[::-1].copy()
    elif kind == "pairs":  # many short runs
        at += (np.arange(count) // 2) * step
    return at


@pytest.mark.parametrize("kind", ["one run", "two runs", "scattered", "backwards", "pairs"])
@pytest.mark.parametrize("size", [1, 3, 255, 256, 257, 1000, 4096, 4097, 65_536, 100_001])
@pytest.mark.parametrize("count", [1, 2, 5, 37])
def test_every_shape_of_a_batch(kind: str, size: int, count: int) -> None:
    step = -(-size // 256) * 256
    offsets = places(kind, count, step) + 256
    check_both_ways(int(offsets.max()) + size + 300, offsets, size)


@pytest.mark.parametrize("shift", [0, 1, 256, 4096])
@pytest.mark.parametrize("size", [256, 768, 4096, 12_288])
def test_offsets_that_are_less_aligned_than_the_size(shift: int, size: int) -> None:
    check_both_ways(64 * size + shift, places("scattered", 20, size) + shift, size)


def test_objects_that_end_at_the_segments_last_byte() -> None:
    for size, tail in itertools.product((256, 1000, 4096), (0, 1, 255)):
        data_bytes = 40 * 4096 + tail
        offsets = np.array([0, 8192, 4096 * 30, data_bytes - size, 4096 * 20, 4096 * 10], np.int64)
        check_both_ways(data_bytes, offsets, size)


@pytest.mark.parametrize("kind", ["one run", "scattered", "pairs"])
@pytest.mark.parametrize(
    ("count", "size"), [(1, 5 * MIB), (1, 5 * MIB + 13), (2, 3 * MIB), (3, MIB + 256), (33, 64 * KIB), (1000, 4 * KIB), (1001, 5000)]
)
def test_batches_that_are_split_over_threads(kind: str, count: int, size: int) -> None:
    step = -(-size // 4096) * 4096
    offsets = places(kind, count, step)
    check_both_ways(int(offsets.max()) + size, offsets, size)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_threads", threads)
    monkeypatch.setattr(mover, "_helpers", None)
    monkeypatch.setattr(mover, "SPLIT_BYTES", 10_000)
    monkeypatch.setattr(mover, "PIECE_BYTES_MIN", 5_000)
    for count, size in ((1, 50_001), (2, 30_000), (3, 20_000), (5, 4096), (50, 1000)):
        for kind in ("one run", "scattered"):
            offsets = places(kind, count, -(-size // 256) * 256)
            check_both_ways(int(offsets.max()) + size, offsets, size)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3000),
    slots=st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True),
    unit=st.sampled_from((1, 8, 256, 512)),
)
def test_any_batch_agrees_with_the_loop(size: int, slots: list[int], unit: int) -> None:
    step = -(-size // unit) * unit
    check_both_ways(61 * step, np.array(slots, np.int64) * step, size)


def test_one_object_may_be_read_into_several_rows() -> None:
    data = segment(64 * KIB)
    offsets = np.array([4096, 0, 4096, 4096, 8192, 0, 12_288], np.int64)
    out = np.zeros((7, 4096), np.uint8)
    gather(data, offsets, out)
    assert np.array_equal(out, data.reshape(-1, 4096)[offsets // 4096])


def test_no_objects_are_no_copy() -> None:
    data = segment(4096)
    gather(data, np.empty(0, np.int64), np.empty((0, 256), np.uint8))
    scatter(data, np.empty(0, np.int64), np.empty((0, 256), np.uint8))
    assert np.array_equal(data, segment(4096))


def test_rows_of_a_wider_matrix() -> None:
    """Rows are contiguous, the matrix is not."""
    data = segment(64 * KIB)
    wide = np.full((6, 5000), GUARD, np.uint8)
    offsets = np.array([0, 8192, 16_384, 24_576, 40_960, 57_344], np.int64)
    gather(data, offsets, wide[:, 100:4196])
    assert np.array_equal(wide[:, 100:4196], np.stack([data[at : at + 4096] for at in offsets]))
    assert (wide[:, :100] == GUARD).all()
    assert (wide[:, 4196:] == GUARD).all()
    other = np.zeros_like(data)
    scatter(other, offsets, wide[:, 100:4196])
    for at in offsets:
        assert np.array_equal(other[at : at + 4096], data[at : at + 4096])


def test_many_threads_of_the_caller_at_once() -> None:
    data = segment(16 * MIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        offsets = np.random.default_rng(number).permutation(256)[:64].astype(np.int64) * (64 * KIB)
        for _ in range(5):
            out = np.zeros((64, 64 * KIB), np.uint8)
            gather(data, offsets, out)
            if not np.array_equal(out, data.reshape(-1, 64 * KIB)[offsets // (64 * KIB)]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    """Threads do not survive a fork; a copy that waited for the parent's would wait for ever."""
    offsets = places("scattered", 100, 64 * KIB)
    check_both_ways(int(offsets.max()) + 64 * KIB, offsets, 64 * KIB)
    child = os.fork()
    if child == 0:
        try:
            check_both_ways(int(offsets.max()) + 64 * KIB, offsets, 64 * KIB)
            os._exit(0)
        finally:
            os._exit(1)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the child's copy did not end")
    assert status == 0


def test_an_error_in_a_part_comes_out_when_all_parts_have_ended() -> None:
    data = segment(2 * MIB)
    out = np.zeros((2, 2 * MIB), np.uint8)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gather(data, np.array([0, 0], np.int64), out)


def test_a_fault_of_one_piece_is_raised_when_all_have_ended() -> None:
    data, out = segment(4 * MIB), np.zeros((64, 256 * KIB), np.uint8)
    with pytest.raises(ValueError, match=r"reshape|broadcast"):
        gather(data, np.arange(64, dtype=np.int64) * (256 * KIB), out)
    check_both_ways(64 * 256 * KIB, np.arange(64, dtype=np.int64) * (256 * KIB), 256 * KIB)
