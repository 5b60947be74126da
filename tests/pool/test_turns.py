"""Turns of slices that nobody waits for."""

from __future__ import annotations

import asyncio

from umbp.pool.turns import Turns


async def test_one_turn_a_round_of_the_loop_in_the_order_of_asking() -> None:
    """What a client has sent is looked for between any two of them."""
    turns, told, round_now = Turns(), list[tuple[int, int]](), 0

    async def slices(number: int) -> None:
        for _ in range(3):
            await turns.wait()
            told.append((round_now, number))

    tasks = [asyncio.create_task(slices(number)) for number in range(4)]
    while not all(task.done() for task in tasks):
        round_now += 1
        await asyncio.sleep(0)
    rounds = [at for at, _ in told]
    assert len(set(rounds)) == len(rounds) == 12
    assert [number for _, number in told] == [0, 1, 2, 3] * 3


async def test_who_is_cancelled_while_it_waits_costs_the_others_nothing() -> None:
    turns, told = Turns(), list[int]()

    async def slices(number: int) -> None:
        await turns.wait()
        told.append(number)

    tasks = [asyncio.create_task(slices(number)) for number in range(4)]
    await asyncio.sleep(0)
    for number in (0, 2, 3):
        tasks[number].cancel()
    await asyncio.wait(tasks)
    assert told == [1]
    await slices(5)
    assert told == [1, 5]
