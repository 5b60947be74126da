"""Operations written once, for callers with and without asyncio.

An operation is a generator. It yields what takes time (`Call` a pool, do `Work`, `Pause`) and is sent the result; what it returns is its
result. `run` drives one for a plain caller, `drive` for an asyncio caller. An operation that is cancelled sees the cancellation only when
its work on memory has ended, and may still yield steps to clean up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from umbp import wire

T = TypeVar("T")

INLINE_BYTES_MAX = 256 << 10  # copies below it (30 us) are done in the event loop


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the pool; the result is (reply, blob). Raises what the pool refused with, or Unavailable."""

    message: wire.Message
    arrays: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """One message that has no reply."""

    message: wire.Message
    arrays: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """A function that keeps a core busy for about as long as copying ``size_bytes``; it must not be abandoned half way."""

    function: Callable[[], Any]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


Step: TypeAlias = Call | Send | Work | Pause
Operation: TypeAlias = Generator[Step, Any, T]


class Caller(Protocol):
    """A connection for plain callers."""

    def call(self, call: Call) -> tuple[Any, wire.Blob]: ...
    def send(self, call: Send) -> None: ...


class AsyncCaller(Protocol):
    """A connection for asyncio callers."""

    async def call(self, call: Call) -> tuple[Any, wire.Blob]: ...
    async def send(self, call: Send) -> None: ...


def run(operation: Operation[T], caller: Caller) -> T:
    """Drive an operation to its end in this thread."""
    result: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = operation.throw(error) if error is not None else operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        result, error = None, None
        try:
            if isinstance(step, Call):
                result = caller.call(step)
            elif isinstance(step, Work):
                result = step.function()
            elif isinstance(step, Send):
                caller.send(step)
            else:
                time.sleep(step.seconds)
        except BaseException as raised:  # noqa: BLE001 - all of it is the operation's to handle, cancellation too
            error = raised


async def drive(operation: Operation[T], caller: AsyncCaller) -> T:
    """Drive an operation to its end in this event loop."""
    result: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = operation.throw(error) if error is not None else operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        result, error = None, None
        try:
            result = await _step(step, caller)
        except BaseException as raised:  # noqa: BLE001 - as in `run`
            error = raised


async def _step(step: Step, caller: AsyncCaller) -> Any:
    if isinstance(step, Call):
        return await caller.call(step)
    if isinstance(step, Send):
        return await caller.send(step)
    if isinstance(step, Pause):
        return await asyncio.sleep(step.seconds)
    if step.size_bytes <= INLINE_BYTES_MAX:
        return step.function()
    work = asyncio.get_running_loop().run_in_executor(None, step.function)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():  # the thread is using the caller's memory: wait for it, whatever else comes
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        raise
