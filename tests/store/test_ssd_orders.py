"""Orders and answers: what comes out at the other end is what went in."""

from __future__ import annotations

import errno

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umbp.store.ssd_format import PAGE
from umbp.store.ssd_orders import (
    HEAD,
    MESSAGE_BYTES_MAX,
    decode_codes,
    decode_records,
    decode_runs,
    decode_written,
    encode_records,
    encode_runs,
    encode_written,
    portions,
    record_bytes,
    run_bytes,
)
from umbp.store.ssd_reads import Pages, Run
from umbp.store.ssd_records import Draft, Record, SegmentFile

MEMORY = memoryview(bytearray(np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8).tobytes()))
FILES = {5: 105, 7: 107}  # the pool's descriptors, and those of the other process
sizes = st.sampled_from([1, 512, 4096, 5000])


def joined(buffers: list[object]) -> memoryview:
    return memoryview(b"".join(bytes(each) for each in buffers))


def some(draw: st.DrawFn, size: int) -> tuple[int, np.ndarray]:
    offsets = np.array(draw(st.lists(st.integers(0, len(MEMORY) - size), min_size=1, max_size=9)))
    return len(offsets), offsets


@st.composite
def runs(draw: st.DrawFn) -> Run:
    size = draw(sizes)
    n, offsets = some(draw, size)
    words = np.random.default_rng(draw(st.integers(0, 9)))
    pages = Pages(size, np.full(n, 3), words.integers(0, 1 << 24, n), words.integers(0, 1 << 64, n, dtype=np.uint64))
    out = [MEMORY[at : at + size] for at in offsets.tolist()]
    return Run(draw(st.sampled_from([5, 7])), draw(st.booleans()), pages, out, draw(st.booleans()), offsets)


@st.composite
def records(draw: st.DrawFn) -> Record:
    size = draw(sizes)
    n, offsets = some(draw, size)
    words = np.random.default_rng(draw(st.integers(0, 9)))
    keys, wholes = words.integers(0, 256, (n, 32), dtype=np.uint8), words.integers(0, 1 << 64, n, dtype=np.uint64)
    bodies = [MEMORY[at : at + size] for at in offsets.tolist()]
    draft = Draft(words.bytes(32), size, keys, wholes, bodies, draw(st.booleans()), draw(st.integers(0, 1 << 60)), offsets)
    file = SegmentFile(1, draw(st.sampled_from([5, 7])), draw(st.integers(0, 1 << 60)))
    return Record(
        file, draft, draw(st.integers(1, 1 << 24)), draw(st.integers(0, 1 << 30)), draw(st.integers(0, 1 << 60)), draw(st.booleans())
    )


@given(st.lists(runs(), min_size=1, max_size=5))
def test_runs_arrive_as_they_were(asked: list[Run]) -> None:
    body = joined(encode_runs(asked))
    assert len(body) == sum(map(run_bytes, asked))
    for one, other in zip(asked, decode_runs(body, len(asked), MEMORY, FILES), strict=True):
        assert (FILES[one.fd], one.direct, one.straight, one.pages.size) == (other.fd, other.direct, other.straight, other.pages.size)
        assert np.array_equal(one.pages.block, other.pages.block)
        assert np.array_equal(one.pages.checks, other.pages.checks)
        assert one.out == other.out


@given(st.lists(records(), min_size=1, max_size=5))
def test_records_arrive_as_they_were(asked: list[Record]) -> None:
    body = joined(encode_records(asked))
    assert len(body) <= sum(map(record_bytes, asked))
    for one, other in zip(asked, decode_records(body, len(asked), MEMORY, FILES), strict=True):
        assert (one.at, one.day, one.day_bytes, one.direct) == (other.at, other.day, other.day_bytes, other.direct)
        assert (FILES[one.file.fd], one.file.number) == (other.file.fd, other.file.number)
        mine, theirs = one.draft, other.draft
        assert (mine.namespace, mine.size, mine.straight, mine.sequence) == (
            theirs.namespace,
            theirs.size,
            theirs.straight,
            theirs.sequence,
        )
        assert np.array_equal(mine.keys, theirs.keys)
        assert np.array_equal(mine.wholes, theirs.wholes)
        assert mine.bodies == theirs.bodies


def test_codes_arrive_as_they_were() -> None:
    assert [each.tolist() for each in decode_codes(memoryview(b"\0\1\2"), [2, 1])] == [[0, 1], [2]]


def test_an_answer_tells_records_that_were_written_from_those_that_were_not() -> None:
    pages = np.zeros(3, PAGE)
    pages["sequence"] = [7, 8, 9]
    first, failed, last = decode_written(joined(encode_written([pages[:2], errno.ENOSPC, pages[2:]])), 3)
    assert (first["sequence"].tolist(), last["sequence"].tolist()) == ([7, 8], [9])
    assert isinstance(failed, OSError)
    assert failed.errno == errno.ENOSPC
    first["namespace"] = 4  # the pool enters what only it knows


@given(st.lists(st.integers(1, MESSAGE_BYTES_MAX // 3), max_size=30))
def test_portions_fit_into_a_message_and_hold_all_in_order(lengths: list[int]) -> None:
    cut = [lengths[part] for part in portions(lengths)]
    assert [length for part in cut for length in part] == lengths
    assert all(sum(part) + HEAD.size <= MESSAGE_BYTES_MAX for part in cut)
