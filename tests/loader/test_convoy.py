"""What a load queues on a device: bounded ahead, told in order, drained also when it is late, and given up on only if the GPU hangs."""

from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from umbp.loader import convoy as convoys
from umbp.loader.convoy import QUEUED_BYTES_MAX, Convoy, wait_mark
from umbp.loader.handles import Load
from umbp.loader.runtime import Fault


class Point:
    """A mark in the test's hand."""

    def __init__(self) -> None:
        self.passed = False
        self.held = 0

    def hold(self) -> None:
        self.held += 1

    def done(self) -> bool:
        return self.passed


@pytest.fixture
def load() -> Load:
    made = Load(3, 4, time.monotonic() + 60)
    assert made.claim()
    return made


def test_a_layer_that_is_queued_holds_the_stream_and_not_the_host(load: Load) -> None:
    convoy, first, second = Convoy(load), Point(), Point()
    convoy.add(first, layers=2)
    convoy.add(second, layers=4)
    assert load.wait(1)
    assert load.wait(3)
    assert (first.held, second.held) == (1, 1)
    assert load.layers_ready == 0
    first.passed = second.passed = True
    assert convoy.drain()
    assert load.layers_ready == 4
    assert load.wait(0)
    assert first.held == 1, "what is there needs no wait"


def test_asyncio_is_woken_by_what_is_queued(load: Load) -> None:
    point = Point()

    async def both() -> bool:
        waiting = asyncio.create_task(load.ready(2))
        await asyncio.sleep(0)
        Convoy(load).add(point, layers=4)
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(both())
    assert point.held == 1


def test_no_more_is_queued_than_is_soon_over(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    convoy, first = Convoy(load), Point()
    assert convoy.admit(10 * QUEUED_BYTES_MAX), "the first piece goes whatever its size"
    convoy.add(first, layers=1, nbytes=10 * QUEUED_BYTES_MAX)
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        first.passed = len(waits) == 4

    monkeypatch.setattr(convoys.time, "sleep", wait)
    assert convoy.admit(1)
    assert len(waits) == 4


def test_a_load_that_is_cancelled_or_late_queues_no_more(load: Load) -> None:
    convoy = Convoy(load)
    load.deadline = time.monotonic() - 1
    assert not convoy.admit(1)
    load.deadline = time.monotonic() + 60
    load.cancel()
    assert not convoy.admit(1)
    assert not convoy.drain()


def test_what_is_queued_is_waited_for_also_when_it_is_late(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    convoy, point = Convoy(load), Point()
    convoy.add(point, layers=4)
    load.deadline = time.monotonic() - 1
    monkeypatch.setattr(convoys.time, "sleep", lambda seconds: setattr(point, "passed", True))
    assert convoy.drain(), "it is there"


def test_a_gpu_that_hangs_is_a_fault(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    convoy, now = Convoy(load), [0.0]
    convoy.add(Point(), layers=4)
    monkeypatch.setattr(convoys.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(convoys.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 10))
    with pytest.raises(Fault, match="hangs"):
        convoy.drain()
    with pytest.raises(Fault, match="mark"):
        wait_mark(Point())
