"""Traces read as their README says, generated sessions look like them, and bytes that follow from keys convict any other page."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.errors import InvalidRequest
from umbp.sim.workload import (
    AgentProfile,
    Limits,
    Session,
    TraceRequest,
    Turn,
    block_keys,
    generate_agents,
    merge_sessions,
    page_bytes,
    parse_trace,
    read_trace,
    wrong_pages,
)

TRACES = Path(os.environ.get("UMBP_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
CHAT = [
    {"timestamp": 0, "input_length": 1_030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1_500, "input_length": 1_024, "output_length": 6, "hash_ids": [0, 1]},
]
AGENT = {
    "id": "s1", "bs": 64, "tool": 1, "sys": 1,
    "r": [
        [0.0, 640, 5, 0, [[1, 10]], 1.0, 0.0],
        [10.0, 768, 5, 9, [[11, 2], [20, 1]], None, None],
        {"t": 11.0, "sub": [[0.0, 128, 1, 0, [[100, 2]], 1.0, 0.0], [1.0, 192, 1, 2, [[102, 1]], 1.0, 0.0]]},
        [15.0, 832, 5, 12, [[30, 1]], 1.0, 1.0],
    ],
}  # fmt: skip


def lines(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() + b"\n" for value in values]


def local(request: TraceRequest) -> list[int]:
    return [int(block) & 0xFFFFFFFF for block in request.block_ids]


# -- parsing -----------------------------------------------------------------------------------------------------------------------


def test_conversation_requests() -> None:
    first, second = parse_trace(lines(*CHAT))
    assert (first.time_s, second.time_s) == (0.0, 1.5)
    assert first.block_ids.tolist() == [0, 1, 2]
    assert (first.input_tokens, first.output_tokens, first.block_tokens) == (1_030, 5, 512)
    assert (first.session, first.full_blocks, second.full_blocks) == ("", 2, 2)


def test_agent_requests_keep_the_first_ids_then_take_ranges() -> None:
    requests = list(parse_trace(lines(AGENT)))
    assert [(r.time_s, r.agent) for r in requests] == [
        (0.0, "main"), (10.0, "main"), (11.0, "main.1"), (12.0, "main.1"), (15.0, "main"),
    ]  # fmt: skip
    assert local(requests[0]) == list(range(1, 11))
    assert local(requests[1]) == [*range(1, 10), 11, 12, 20]
    assert local(requests[2]) == [100, 101]  # a sub-agent starts from nothing
    assert local(requests[3]) == [100, 101, 102]
    assert local(requests[4]) == [*range(1, 10), 11, 12, 20, 30]  # and its parent goes on from its own previous request
    assert {(r.session, r.block_tokens) for r in requests} == {("s1", 64)}


def test_local_ids_of_two_sessions_are_different_blocks() -> None:
    requests = list(parse_trace(lines(AGENT, {**AGENT, "id": "s2"})))
    blocks = {name: {int(b) for r in requests if r.session == name for b in r.block_ids} for name in ("s1", "s2")}
    assert len(blocks["s1"]) == len(blocks["s2"]) == 17
    assert not blocks["s1"] & blocks["s2"]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "no-suffix"])
def test_files_plain_or_gzipped_whatever_their_name(tmp_path: Path, name: str) -> None:
    for pack in (bytes, gzip.compress):
        (tmp_path / name).write_bytes(pack(b"\n" + b"".join(lines(*CHAT)) + b"\n\n"))
        assert len(list(read_trace(tmp_path / name))) == 2


def changed(request: list[Any]) -> dict[str, Any]:
    return {**AGENT, "r": [[0.0, 640, 5, 0, [[1, 10]]], request]}


def nested(depth: int) -> dict[str, Any]:
    return {"t": 0, "sub": [nested(depth - 1)] if depth else []}


BAD_LINES: list[tuple[Any, str]] = [
    (b"{", "not JSON"),
    (b"\xff\xfe{}", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[]", "list"),
    (b"7", "int"),
    ({"a": 1}, ""),
    ({**CHAT[0], "hash_ids": 5}, "hash_ids"),
    ({**CHAT[0], "hash_ids": [1, -1]}, "-1"),
    ({**CHAT[0], "hash_ids": [1.5]}, "1.5"),
    ({**CHAT[0], "hash_ids": [True]}, "True"),
    ({**CHAT[0], "hash_ids": [1 << 62]}, "hash_ids"),
    ({**CHAT[0], "timestamp": "0"}, "timestamp"),
    ({**CHAT[0], "timestamp": float("nan")}, "timestamp"),
    ({**CHAT[0], "timestamp": -1}, "timestamp"),
    ({**CHAT[0], "input_length": None}, "input_length"),
    ({**AGENT, "id": 7}, "id"),
    ({**AGENT, "id": ""}, "id"),
    ({**AGENT, "bs": 0}, "bs"),
    ({**AGENT, "bs": "64"}, "bs"),
    ({**AGENT, "r": None}, "main"),
    ({**AGENT, "r": [nested(20)]}, "too deep"),
    ({**AGENT, "r": [{"t": 0}]}, "main.1"),
    ({**AGENT, "r": [{"sub": []}]}, "main[0].t"),
    (changed([1.0, 64, 5, 11, []]), "keeps 11 blocks of 10"),
    (changed([1.0, 64, 5, 1]), "main[1]: expected"),
    (changed([1.0, 64, 5, 1, [[1]]]), "[1] is not [first, n]"),
    (changed([1.0, 64, 5, 1, [[1, -1]]]), "-1"),
    (changed([1.0, 64, 5, 1, [[1, 2**40]]]), "main[1]"),
    (changed([1.0, 64, 5, 1, [[2**32 - 1, 2]]]), "below 2**32"),
    (changed([1.0, 64, 5, 1, [[1, 2**21]]]), "blocks in one request"),
    (changed([-1.0, 64, 5, 1, []]), "-1.0"),
    (changed([1.0, 64.0, 5, 1, []]), "64.0"),
]


@pytest.mark.parametrize(("bad", "says"), BAD_LINES)
def test_a_bad_line_is_refused_by_its_number(bad: Any, says: str) -> None:
    line = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    good = CHAT[0] if b"hash_ids" in line else AGENT
    with pytest.raises(InvalidRequest) as caught:
        list(parse_trace([*lines(good), b"\n", line]))
    assert "line 3" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("first", [{}, {"prompt": "x"}, {"timestamp": 1, "input_length": 2}])
def test_an_unknown_format_is_refused(first: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="line 1: neither a conversation"):
        parse_trace(lines(first))


def test_bad_files_are_refused(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(lines(*CHAT * 100)))
    files = {"empty": b"", "blank": b"\n\n", "cut.gz": packed[:-20], "broken.gz": packed[:20] + b"\0" * 20 + packed[40:]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for name in [*files, "absent", "."]:
        with pytest.raises(InvalidRequest):
            list(read_trace(tmp_path / name))


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "endless.gz"
    path.write_bytes(gzip.compress(b" " * (64 << 20), 1))  # would be 64 MiB in memory
    with pytest.raises(InvalidRequest, match="longer than"):
        list(read_trace(path))


# -- the real traces ---------------------------------------------------------------------------------------------------------------


def trace(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not in {TRACES}: set UMBP_TRACES")
    return TRACES / name


class Seen:
    """What an infinite cache would hit, and other sums over a stream. One byte a block id that can occur, twice."""

    BITS = 18

    def __init__(self, requests: Iterable[TraceRequest], sessions: int = 512) -> None:
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.turns: dict[str, int] = {}
        self.blocks = self.hit_blocks = self.hit_tokens = 0
        self.seen, self.again = np.zeros((2, (sessions + 1) << self.BITS), np.bool_)
        last_s = 0.0
        for request in requests:
            assert request.time_s >= last_s
            last_s = request.time_s
            ids = (request.block_ids >> 32 << self.BITS) + (request.block_ids & 0xFFFFFFFF)
            assert ids.max(initial=0) < len(self.seen)
            known = self.seen[ids]
            hits = len(ids) if known.all() else int(np.argmin(known))
            self.again[ids[known]] = True
            self.seen[ids] = True
            self.blocks += len(ids)
            self.hit_blocks += hits
            self.hit_tokens += hits * request.block_tokens
            self.inputs.append(request.input_tokens)
            self.outputs.append(request.output_tokens)
            self.turns[request.session] = self.turns.get(request.session, 0) + 1


def test_the_conversation_trace_is_what_its_readme_says() -> None:
    seen = Seen(read_trace(trace("conversation.jsonl.gz")))
    assert len(seen.inputs) == 12_031
    assert round(statistics.mean(seen.inputs)) == 12_035
    assert round(statistics.mean(seen.outputs)) == 343
    assert round(100 * seen.hit_blocks / seen.blocks, 1) == 36.6
    assert round(100 * (1 - np.count_nonzero(seen.again) / np.count_nonzero(seen.seen)), 1) == 75.8


def test_the_agent_trace_is_what_its_readme_says() -> None:
    seen = Seen(read_trace(trace("agent_sessions.jsonl.gz")))
    assert (len(seen.inputs), len(seen.turns)) == (31_505, 500)
    assert (round(statistics.mean(seen.inputs)), statistics.median(seen.inputs)) == (138_118, 113_133)
    assert (round(statistics.mean(seen.outputs)), statistics.median(seen.outputs)) == (452, 235)
    assert statistics.median(seen.turns.values()) == 35
    assert round(100 * seen.hit_tokens / sum(seen.inputs), 1) == 96.0


def by_session(requests: Iterable[TraceRequest]) -> dict[str, list[tuple[str, bytes]]]:
    found: dict[str, list[tuple[str, bytes]]] = {}
    for request in requests:
        found.setdefault(request.session, []).append((request.agent, request.block_ids.tobytes()))
    return found


@settings(deadline=None, max_examples=20)
@given(st.one_of(st.none(), st.integers(1, 40)), st.sampled_from([None, 0.0, 60.0]))
def test_merging_keeps_every_session_whole(concurrency: int | None, gap_s_max: float | None) -> None:
    profile = AgentProfile(sessions=20, turns=(1.5, 0.5), sub_agent_share=0.5)
    merged = list(generate_agents(7, profile, Limits(concurrency=concurrency, gap_s_max=gap_s_max)))
    assert by_session(merged) == by_session(generate_agents(7, profile))
    assert all(a.time_s <= b.time_s for a, b in pairwise(merged))
    spans = [[r.time_s for r in merged if r.session == name] for name in {r.session for r in merged}]
    if gap_s_max is not None:
        assert all(b - a <= gap_s_max + 1e-6 for times in spans for a, b in pairwise(times))
    places = {name: [i for i, r in enumerate(merged) if r.session == name] for name in {r.session for r in merged}}
    open_at = [sum(1 for places_of in places.values() if places_of[0] <= i <= places_of[-1]) for i in range(len(merged))]
    assert max(open_at) <= (concurrency or 20)


def sessions(starts: Iterable[list[float]], arrivals: Iterable[float]) -> Iterator[Session]:
    for index, (times, arrival_s) in enumerate(zip(starts, arrivals, strict=True)):
        turns = [Turn(time_s, "main", 64, 1, 0, ((index << 32, 1),)) for time_s in times]
        yield Session(f"s{index}", 64, turns, arrival_s)


def test_a_session_starts_when_it_has_arrived_and_another_is_done() -> None:
    starts, arrivals = [[0.0, 10.0], [0.0, 3.0], [0.0, 1.0], []], [0.0, 2.0, 4.0, 0.0]

    def order(limits: Limits) -> list[tuple[float, str]]:
        return [(request.time_s, request.session) for request in merge_sessions(sessions(starts, arrivals), limits)]

    assert order(Limits()) == [(0, "s0"), (2, "s1"), (4, "s2"), (5, "s1"), (5, "s2"), (10, "s0")]
    assert order(Limits(concurrency=2)) == [(0, "s0"), (2, "s1"), (5, "s1"), (5, "s2"), (6, "s2"), (10, "s0")]
    assert order(Limits(concurrency=1)) == [(0, "s0"), (10, "s0"), (10, "s1"), (13, "s1"), (13, "s2"), (14, "s2")]
    assert order(Limits(time_scale=0.5, requests_max=3)) == [(0, "s0"), (1, "s1"), (2, "s2")]
    assert order(Limits(sessions_max=1, gap_s_max=4)) == [(0, "s0"), (4, "s0")]


def test_sessions_are_read_only_when_they_are_due() -> None:
    endless = iter(lambda: Session("s", 64, [Turn(0.0, "main", 64, 1, 0, ((1, 1),))] * 2), None)
    assert len(list(islice(merge_sessions(endless, Limits(concurrency=3)), 100))) == 100


@pytest.mark.parametrize(
    "bad",
    [{"requests_max": 0}, {"sessions_max": -1}, {"concurrency": 1.5}, {"concurrency": True}, {"gap_s_max": -1}, {"time_scale": "2"},
     {"time_scale": float("nan")}, {"gap_s_max": float("inf")}],
)  # fmt: skip
def test_bad_limits_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        Limits(**bad)


# -- the generator -----------------------------------------------------------------------------------------------------------------


def test_generated_sessions_look_like_the_published_ones() -> None:
    seen = Seen(generate_agents(1, AgentProfile(sessions=200), Limits(concurrency=16)))
    assert len(seen.turns) == 200
    assert 30 <= statistics.median(seen.turns.values()) <= 55
    assert 80_000 <= statistics.median(seen.inputs) <= 150_000
    assert max(seen.inputs) <= 400_000
    assert 200 <= statistics.median(seen.outputs) <= 450
    assert 0.955 <= seen.hit_tokens / sum(seen.inputs) <= 0.98


def test_generated_sessions_share_their_first_tokens_only() -> None:
    requests = list(generate_agents(3, AgentProfile(sessions=8, turns=(2, 0.5), sub_agent_share=1.0)))
    first = {r.session: r.block_ids for r in reversed(requests) if r.agent == "main"}
    assert len({ids[:234].tobytes() for ids in first.values()}) == 1  # 15,000 tokens
    assert len({int(ids[234]) for ids in first.values()}) == 8
    subs = {r.session: r.block_ids for r in reversed(requests) if r.agent == "main.1"}
    assert len(subs) == 8
    assert len({ids[:93].tobytes() for ids in subs.values()}) == 1
    assert not set(subs["agent-000000"].tolist()) & set(first["agent-000000"].tolist())
    assert all(len(r.block_ids) == r.full_blocks == r.input_tokens // 64 for r in requests)


def test_block_ids_are_prefix_identities() -> None:
    before: dict[int, int] = {}
    for request in generate_agents(5, AgentProfile(sessions=20, compaction_share=0.2, sub_agent_share=0.5)):
        ids = request.block_ids.tolist()
        for previous, block in pairwise([-1, *ids]):
            assert before.setdefault(block, previous) == previous


def test_a_seed_fixes_the_sessions() -> None:
    def digest(seed: int, **limits: int) -> str:
        parts = hashlib.sha256()
        for request in generate_agents(seed, AgentProfile(sessions=5), Limits(requests_max=100, **limits)):
            parts.update(f"{request.time_s:.6f} {request.session} {request.output_tokens}".encode() + request.block_ids.tobytes())
        return parts.hexdigest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


@pytest.mark.parametrize(
    "bad", [{"block_tokens": 0}, {"sessions": 0}, {"arrival_s": 0}, {"shared_tokens": -1}, {"context_tokens_max": 15_000}]
)
def test_bad_profiles_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        AgentProfile(**bad)


# -- keys and bytes ----------------------------------------------------------------------------------------------------------------


def request_of(ids: list[int]) -> TraceRequest:
    return TraceRequest(0.0, "", "main", np.array(ids, np.int64), 64 * len(ids), 1, 64)


def test_block_keys_tell_blocks_and_seeds_apart() -> None:
    keys = block_keys(request_of([*range(5_000), 1 << 32, 1 << 61]))
    assert keys.shape == (5_002, 32)
    assert keys.flags.c_contiguous
    assert len(np.unique(keys, axis=0)) == 5_002
    for lane in range(4):  # every word on its own, since an index looks at parts of a key
        assert len(np.unique(keys.view(np.uint64)[:, lane])) == 5_002
    assert np.array_equal(keys[:3], block_keys(request_of([0, 1, 2])))
    assert not (keys[:3] == block_keys(request_of([0, 1, 2]), seed=1)).all(axis=1).any()
    assert block_keys(request_of([])).shape == (0, 32)


def test_keys_and_bytes_are_the_same_in_every_process() -> None:
    program = (
        "import hashlib; from umbp.sim.workload import *\n"
        "for r in generate_agents(9, AgentProfile(sessions=2), Limits(requests_max=9)): k = block_keys(r, 3)\n"
        "print(hashlib.sha256(k.tobytes() + page_bytes(k[:9], 4099).tobytes()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "77")
    }
    assert len(found) == 1


KEYS = block_keys(request_of(list(range(40))))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100, 4_096, 32_768, 32_769, 65_536 + 3, 300_000])
def test_page_bytes_do_not_depend_on_the_batch_and_are_found_right(size: int) -> None:
    pages = page_bytes(KEYS, size)
    assert pages.shape == (40, size)
    assert not wrong_pages(KEYS, pages).any()
    for index in (0, 39):
        assert np.array_equal(page_bytes(KEYS[index : index + 1], size)[0], pages[index])
    wide = np.zeros((40, size + 5), np.uint8)
    assert np.array_equal(page_bytes(list(map(bytes, KEYS)), size, wide[:, 3 : size + 3]), pages)
    assert not wrong_pages(KEYS, wide[:, 3 : size + 3]).any()
    assert not wide[:, :3].any()
    assert not wide[:, -2:].any()


@settings(deadline=None)
@given(st.sampled_from([9, 64, 4_097, 70_001]), st.integers(0, 39), st.data())
def test_one_wrong_bit_is_found_in_its_page_only(size: int, row: int, data: st.DataObject) -> None:
    pages = page_bytes(KEYS, size)
    pages[row, data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert np.flatnonzero(wrong_pages(KEYS, pages)).tolist() == [row]


def test_pages_that_are_not_their_own_are_found() -> None:
    size = 131_072
    pages = page_bytes(KEYS, size)
    faults = {
        "another page": np.roll(pages, 1, axis=0),
        "shifted by a byte": np.roll(pages, 1, axis=1),
        "shifted by a tile": np.roll(pages, 32_768, axis=1),
        "first half of another": np.concatenate([np.roll(pages, 1, axis=0)[:, : size // 2], pages[:, size // 2 :]], axis=1),
        "last word of another": np.concatenate([pages[:, :-8], np.roll(pages, 1, axis=0)[:, -8:]], axis=1),
        "halves swapped": np.roll(pages, size // 2, axis=1),
        "zeros": np.zeros_like(pages),
        "cut from a longer page": page_bytes(KEYS, size + 8)[:, :size],
        "of another namespace": page_bytes(KEYS, size, seed=1),
        "xor of three pages": pages ^ np.roll(pages, 1, axis=0) ^ np.roll(pages, 2, axis=0),
    }
    for fault, data in faults.items():
        assert wrong_pages(KEYS, data).all(), fault
    assert not wrong_pages(KEYS, page_bytes(KEYS, size, seed=1), seed=1).any()


def test_every_byte_of_a_key_matters() -> None:
    for position in range(32):
        key = KEYS[:1].copy()
        key[0, position] ^= 1
        assert wrong_pages(key, page_bytes(KEYS[:1], 4_096)).all()


def test_bad_pages_are_refused() -> None:
    whole = np.zeros((40, 64), np.uint8)
    bad: list[Any] = [whole[:39], whole[:, :63], whole.view(np.int8), whole[0], None, b"x"]
    for data in bad[:4]:
        with pytest.raises(InvalidRequest, match="out"):
            page_bytes(KEYS, 64, data)
    for data in (bad[0], *bad[2:]):
        with pytest.raises(InvalidRequest, match="data"):
            wrong_pages(KEYS, data)
    for size in (0, -1, 1 << 32):
        with pytest.raises(InvalidRequest, match="object_bytes"):
            page_bytes(KEYS, size)
    assert wrong_pages([], np.empty((0, 64), np.uint8)).shape == (0,)


def test_bytes_never_change_between_versions() -> None:  # an older engine may have stored them
    assert hashlib.sha256(KEYS.tobytes()).hexdigest()[:16] == "601daf0e72f9b72c"
    assert hashlib.sha256(page_bytes(KEYS, 40_001).tobytes()).hexdigest()[:16] == "c43f1bb8397760e8"


def test_temporary_memory_is_bounded() -> None:
    pages = page_bytes(KEYS, 1 << 20)
    tracemalloc.start()
    try:
        assert not wrong_pages(KEYS, page_bytes(KEYS, 1 << 20, pages)).any()
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_bytes_are_made_and_checked_fast() -> None:
    out = page_bytes(KEYS, 1 << 20)
    for work in (lambda: page_bytes(KEYS, 1 << 20, out), lambda: wrong_pages(KEYS, out)):
        assert out.nbytes / min(timeit.repeat(work, timer=time.process_time, number=1, repeat=5)) > 0.5e9  # 5 to 7 GB/s on a quiet core
