"""The caller's memory as rows: what is taken, what is refused with words, and which bytes a copy sees."""

import array
import mmap
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.client.buffers import Rows, as_rows, empty_rows
from umbp.errors import InvalidRequest

SIZE = 64


def pages(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, SIZE), dtype=np.uint8)


def read_all(rows: Rows) -> bytes:
    """Every row's bytes, by `fill`, which must cover each row once."""
    out = np.zeros((len(rows), SIZE), np.uint8)
    times = np.zeros(len(rows), int)

    def copy(at: slice, part: np.ndarray) -> None:
        assert part.shape == (at.stop - at.start, SIZE)
        assert part.dtype == np.uint8
        assert all(row.flags.c_contiguous for row in part)
        out[at] = part
        times[at] += 1

    rows.fill(np.arange(len(rows)), copy)
    assert (times == 1).all()
    assert [rows.row(i).tobytes() for i in range(len(rows))] == [row.tobytes() for row in out]
    return out.tobytes()


@pytest.mark.parametrize(
    "shape",
    [
        lambda data: data,
        lambda data: data.view(np.uint32),
        lambda data: data.view(np.float16),
        lambda data: data.view(">i8"),
        lambda data: data.view(np.complex64),
        lambda data: data.view(np.int8).reshape(4, 2, 4, 8),
        lambda data: data.view(f"V{SIZE}").reshape(4),
        lambda data: data.view("M8[s]"),
        lambda data: list(data),
        lambda data: tuple(data),
        lambda data: [row.tobytes() for row in data],
        lambda data: [bytearray(row) for row in data],
        lambda data: [memoryview(row) for row in data],
        lambda data: [row.view(np.uint32).reshape(4, 4) for row in data],
        lambda data: [row.view(np.float16) for row in data],
        lambda data: [row.view(">f8") for row in data],
        lambda data: [row.view(np.complex64) for row in data],
        lambda data: [row.view([("Onset", "u4"), ("rest", "V60")]) for row in data],
        lambda data: [array.array("d", row.tobytes()) for row in data],
        lambda data: [data[0], data[1].tobytes(), memoryview(data[2]), bytearray(data[3])],
    ],
)
def test_bytes_are_bytes_whatever_they_are_called(shape) -> None:
    data = pages(4)
    assert read_all(as_rows(shape(data), SIZE, "values", writable=False)) == data.tobytes()


def test_nothing_is_copied() -> None:
    data, buffers = pages(3), [bytearray(SIZE) for _ in range(3)]
    for rows in (as_rows(data, SIZE, "out", writable=True), as_rows(buffers, SIZE, "out", writable=True)):
        rows.fill(np.arange(3), lambda at, part: part.fill(at.start + 1))
    assert (data[:, 0] >= 1).all()
    assert [buffer[0] for buffer in buffers] == [1, 2, 3]


def test_shared_memory_and_read_only_buffers() -> None:
    memory = mmap.mmap(-1, SIZE)
    assert len(as_rows([memory], SIZE, "out", writable=True)) == 1
    assert len(as_rows([bytes(SIZE)], SIZE, "values", writable=False)) == 1
    fixed = pages(2)
    fixed.flags.writeable = False
    assert len(as_rows(fixed, SIZE, "values", writable=False)) == 2
    memory.close()


@pytest.mark.parametrize("empty", [[], (), np.empty((0, SIZE), np.uint8), np.empty((0, 7), np.float32), np.empty(0)])
def test_no_items(empty) -> None:
    rows = as_rows(empty, SIZE, "values", writable=False)
    assert len(rows) == 0
    assert read_all(rows) == b""


def read_only(data: np.ndarray) -> np.ndarray:
    data.flags.writeable = False
    return data


class OnDevice:
    """Memory of a GPU, as its arrays say of themselves: its address means nothing here."""

    __cuda_array_interface__: ClassVar = {"shape": (SIZE,), "typestr": "|u1", "data": (0x7F00_0000_0000, False), "version": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pages(4)[:, :63], "not contiguous"),
        (pages(4)[::2], "not contiguous"),
        (np.asfortranarray(pages(4)), "not contiguous"),
        (np.uint8(3), "neither an array nor a list"),
        (np.array(3), "not contiguous"),
        (np.zeros((2, SIZE + 1), np.uint8), "65 bytes an item, objects of this namespace have 64"),
        (np.zeros((2, SIZE), np.uint16), "128 bytes an item"),
        (np.zeros(SIZE, np.uint8), "1 bytes an item"),
        (np.zeros((2, 0), np.uint8), "0 bytes an item"),
        (np.zeros((2, SIZE // 8), object), "Python objects"),
        (read_only(pages(2)), "read-only"),
        ([bytearray(SIZE), bytes(SIZE)], r"out\[1\].*read-only"),
        ([bytearray(SIZE), bytearray(SIZE - 1)], r"out\[1\].*63 bytes"),
        ([bytearray(SIZE), bytearray()], r"out\[1\].*0 bytes"),
        ([bytearray(SIZE), memoryview(bytearray(2 * SIZE))[::2]], r"out\[1\].*not contiguous"),
        ([bytearray(SIZE), pages(2)[:, 0]], r"out\[1\].*not contiguous"),
        ([bytearray(SIZE), "text"], r"out\[1\].*str is not a buffer"),
        ([bytearray(SIZE), None], r"out\[1\].*NoneType is not a buffer"),
        ([3], r"out\[0\].*int is not a buffer"),
        ([np.zeros(SIZE // 8, object)], r"out\[0\].*objects"),
        ([np.zeros(SIZE // 16, [("a", "u8"), ("b", object)])], r"out\[0\].*objects"),
        (bytearray(SIZE), "bytearray is neither an array nor a list"),
        ({0: bytearray(SIZE)}, "dict is neither"),
        (None, "NoneType is neither"),
        (OnDevice(), "OnDevice is neither"),
        ([OnDevice()], r"out\[0\].*OnDevice is not a buffer"),
        (iter([bytearray(SIZE)]), "neither an array nor a list"),
    ],
)
def test_what_is_refused_and_how(values, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        as_rows(values, SIZE, "out", writable=True)
    assert f"an (n, {SIZE}) uint8 array" in str(caught.value)


def test_dates_in_a_list_are_bytes_too_or_refused_with_words() -> None:
    """NumPy gives no buffer of them."""
    with pytest.raises(InvalidRequest, match=r"out\[0\]"):
        as_rows([np.zeros(SIZE // 8, "M8[s]")], SIZE, "out", writable=True)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), matrix=st.booleans(), count=st.integers(0, 30))
def test_any_choice_of_any_choice_is_the_right_rows(data: st.DataObject, matrix: bool, count: int) -> None:
    values = pages(count)
    rows = as_rows(values if matrix else list(values), SIZE, "values", writable=False)
    expected = np.arange(count)
    for _ in range(data.draw(st.integers(0, 3))):
        chosen = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected)))).astype(np.int64)
        rows, expected = rows.only(chosen), expected[chosen]
        assert read_all(rows) == values[expected].tobytes()
    which = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected)))).astype(np.int64)
    parts: list[bytes] = []
    rows.fill(which, lambda at, part: parts.append(part.tobytes()))
    assert b"".join(parts) == values[expected[which]].tobytes()
    starts: list[slice] = []
    rows.read(which, lambda at, part: starts.append(at))
    assert [i for at in starts for i in range(at.start, at.stop)] == list(range(len(which)))


def test_neighbouring_rows_of_a_matrix_come_as_one() -> None:
    seen: list[slice] = []
    as_rows(pages(10), SIZE, "values", writable=False).fill(np.array([0, 1, 2, 5, 6, 9]), lambda at, part: seen.append(at))
    assert seen == [slice(0, 3), slice(3, 5), slice(5, 6)]


@pytest.mark.parametrize("count", [-1, True, 1.5, "64", None, 1 << 62])
def test_memory_is_made_for_a_number_of_pages_alone(count: object) -> None:
    with pytest.raises(InvalidRequest, match=r"count: .*for example: 64"):
        empty_rows(count, SIZE)  # type: ignore[arg-type]
    assert empty_rows(np.int64(2), SIZE).shape == (2, SIZE)
