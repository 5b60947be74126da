"""Steps of the SSD tier in an event loop: up to where they wait, and waking the loop once when all of that is done."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from umbp.store.ssd_system import Steps

_T = TypeVar("_T")


def advance(steps: Steps[_T]) -> list[Future[Any]] | tuple[_T]:
    """Up to where the steps wait next: for what; or their result, as a tuple of one."""
    try:
        return next(steps)
    except StopIteration as stop:
        return (stop.value,)


def when_done(futures: list[Future[Any]]) -> asyncio.Future[None]:
    """Done in this loop when all of these are, which wakes it once: a read of four runs would wake it four times otherwise."""
    loop = asyncio.get_running_loop()
    over, left, lock = loop.create_future(), len(futures), threading.Lock()

    def end() -> None:
        if not over.done():  # else the loop's end has cancelled it
            over.set_result(None)

    def one(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        if last:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end)

    if not futures:
        over.set_result(None)
    for future in futures:
        future.add_done_callback(one)
    return over
