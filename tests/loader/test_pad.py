"""Gates and what has gone through them: who is let in, when nobody is inside any more, and what a dead or a hung writer costs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import ctypes

from tests.loader.host_runtime import HostRuntime
from umbp.kernels import reference
from umbp.kernels.tables import LayerGroup, Pads, Window, gate_address, refused_address, signal_address
from umbp.loader import pad as pads
from umbp.loader.pad import Pad, in_flight, tag_of
from umbp.loader.runtime import Fault

WORLD = 3


@pytest.fixture
def pad() -> Iterator[Pad]:
    folder = tempfile.mkdtemp(prefix="umbp-device-", dir="/dev/shm")
    yield Pad(HostRuntime(folder), reference, WORLD)  # type: ignore[arg-type]
    shutil.rmtree(folder)


def word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def push(pad: Pad, rank: int, sequence: int, blocks: int = 2) -> None:
    """A whole launch of a writer that has nothing to write."""
    one = np.zeros(1, np.int64)
    table = LayerGroup.of(one, one + 4, one + 4, np.zeros((WORLD, 1), np.int64))
    addresses = np.array([pad.address, 0, 0], np.int64)
    reference.fused_read_push(
        Window.none(WORLD),
        table,
        Pads.of(addresses, tags=np.full(WORLD, tag_of(sequence))),
        rank=rank,
        signal=rank,
        blocks=blocks,
    )


def never(rank: int) -> bool:
    return False


def test_only_pushes_of_this_load_are_let_in_and_counted(pad: Pad) -> None:
    push(pad, 1, 7)  # before anything was opened
    assert pad.open(tag_of(7)).tolist() == [0] * 6
    push(pad, 1, 7)
    push(pad, 2, 6)  # a load of before
    pad.shut(never)
    push(pad, 1, 7)  # late
    assert pad.open(tag_of(8)).tolist() == [0, 2, 0, 0, 0, 0]
    assert word(refused_address(pad.address, 1)).value == 4
    assert word(refused_address(pad.address, 2)).value == 2


def test_tags_of_loads_in_a_row_differ_and_none_is_that_of_a_closed_gate() -> None:
    tags = [tag_of(sequence) for sequence in range(10**15, 10**15 + 1000)]
    assert len(set(tags)) == 1000
    assert all(0 < tag < pads.TAG_CLOSED for tag in tags)


def test_shut_waits_for_a_block_that_is_inside(pad: Pad, monkeypatch: pytest.MonkeyPatch) -> None:
    pad.open(tag_of(1))
    word(gate_address(pad.address, 1)).value += 1
    looks = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            word(signal_address(pad.address, 1)).value += 1

    monkeypatch.setattr(pads.time, "sleep", look)
    pad.shut(never)
    assert len(looks) == 3


def test_blocks_of_a_process_that_is_gone_are_written_off_once(pad: Pad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pads.time, "sleep", lambda seconds: None)
    pad.open(tag_of(1))
    word(gate_address(pad.address, 1)).value += 5
    word(signal_address(pad.address, 1)).value += 3
    pad.shut(lambda rank: rank == 1)
    pad.open(tag_of(2))
    push(pad, 1, 2)  # by the process that took its place
    pad.shut(never)
    pad.open(tag_of(3))
    word(gate_address(pad.address, 1)).value += 1
    pad.shut(lambda rank: rank == 1)


def test_a_gpu_that_hangs_ends_group_loads_with_a_word(pad: Pad, monkeypatch: pytest.MonkeyPatch) -> None:
    pad.open(tag_of(1))
    word(gate_address(pad.address, 2)).value += 1
    now = [0.0]
    monkeypatch.setattr(pads.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pads.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 5.0))
    with pytest.raises(Fault, match=r"ranks \[2\].*hangs"):
        pad.shut(never)
    with pytest.raises(Fault, match="hangs"):
        pad.open(tag_of(2))


def test_who_is_inside_is_never_hidden_by_who_is_refused() -> None:
    gate = 7 << pads.TAG_SHIFT
    assert in_flight(np.array([[gate + 5, 3, 1], [gate, 0, 0]], np.int64)).tolist() == [1, 0]


def test_the_bound_of_a_wait_is_a_time(pad: Pad) -> None:
    pad.seconds_per_poll = 1e-6
    assert pad.polls(0.02) == 20_000
    assert pad.polls(1e-9) == 1
    assert pad.polls(1e9) == pads.POLLS_MAX


def test_channels_have_addresses_of_their_own(pad: Pad) -> None:
    found: Any = pad.addresses(np.array([0, 3, 5]))
    assert found.tolist() == [signal_address(pad.address, channel) for channel in (0, 3, 5)]
