"""Changes in slices: everything arrives whatever is merged, questions come between, and nobody waits for a node that has gone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from umbp.core.master import Master, Part
from umbp.core.membership import Member
from umbp.errors import UnknownNode
from umbp.master import intake
from umbp.master.intake import Intake
from umbp.types import U64, Tier

DIGEST = b"\7" * 32


def made(*names: str) -> tuple[Master, list[Member]]:
    core = Master(0.0, boot=1, seed=7, keys_max=8192)
    return core, [core.join(0.0, name, 1, name, {}, {int(Tier.DRAM): (1 << 30, 0)}) for name in names]


def words(start: int, count: int) -> U64:
    return np.arange(start * 4, (start + count) * 4, dtype=np.uint64).reshape(-1, 4)


async def tell(intake: Intake, core: Master, member: Member, start: int, count: int, *, present: bool = True, fresh: bool = True) -> None:
    spaces = core.spaces([(DIGEST, 4096, count)])
    flags = np.full(count, present, np.uint8)
    await intake.apply(Part(member, words(start, count), spaces, np.full(count, Tier.DRAM, np.uint8), flags, fresh))


def copies(core: Master, start: int, count: int) -> list[int]:
    copies: list[int] = core.locate(0.0, DIGEST, words(start, count))[0].tolist()
    return copies


async def test_what_many_nodes_tell_at_once_is_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SLICE_KEYS_MAX", 100)  # so that a bundle takes several slices, and a slice has several bundles
    monkeypatch.setattr(intake, "SLICE_KEYS_MIN", 100)
    core, members = made(*(f"n{number}" for number in range(8)))
    queue = Intake(core)
    await asyncio.gather(*(tell(queue, core, member, 0, 30 + 70 * number) for number, member in enumerate(members)))
    assert copies(core, 0, 520)[::70] == [8, 7, 6, 5, 4, 3, 2, 1]
    await asyncio.gather(*(tell(queue, core, member, 0, 600, present=False) for member in members))
    assert not any(copies(core, 0, 600))
    core.check()


async def test_a_question_comes_between_any_two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SLICE_KEYS_MAX", 64)
    monkeypatch.setattr(intake, "SLICE_KEYS_MIN", 64)
    core, members = made("a", "b", "c")
    queue = Intake(core)
    telling = [asyncio.ensure_future(tell(queue, core, member, 0, 640)) for member in members]
    seen = []
    while not all(task.done() for task in telling):
        seen.append(core.counts.events)
        await asyncio.sleep(0)
    steps = np.diff([*seen, core.counts.events])
    assert core.counts.events == 3 * 640
    assert steps.max() == 64


async def test_what_a_node_that_has_gone_tells_is_refused_and_keeps_nobody() -> None:
    core, (a, b) = made("a", "b")
    queue = Intake(core)
    core.leave(0.0, "a", a.registration)
    gone, fine = await asyncio.gather(tell(queue, core, a, 0, 10), tell(queue, core, b, 5, 10), return_exceptions=True)
    assert isinstance(gone, UnknownNode)
    assert fine is None
    assert copies(core, 0, 15) == [0] * 5 + [1] * 10


async def test_what_nobody_waits_for_any_more_is_taken_out() -> None:
    core, (a, b) = made("a", "b")
    queue = Intake(core)
    first, second = (asyncio.ensure_future(tell(queue, core, member, 0, 4)) for member in (a, b))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert copies(core, 0, 4) == [1] * 4
    assert first.cancelled()
    assert repr(queue).startswith("<Intake 0 bundles and 0 pieces waiting")


async def test_what_has_just_happened_goes_before_what_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SLICE_KEYS_MAX", 64)
    monkeypatch.setattr(intake, "SLICE_KEYS_MIN", 64)
    core, members = made(*(f"n{number}" for number in range(9)))
    queue = Intake(core)
    resyncs = [asyncio.ensure_future(tell(queue, core, member, 0, 128, fresh=False)) for member in members[:8]]
    await asyncio.sleep(0)
    await tell(queue, core, members[8], 7000, 64)
    assert core.counts.events <= 3 * 64  # one slice that was under way, and every fourth
    busy = asyncio.ensure_future(tell(queue, core, members[8], 0, 6400))
    await asyncio.gather(*resyncs)  # they go on all the same, and before all of it
    assert not busy.done()
    assert min(copies(core, 0, 128)) >= 8
    await busy
