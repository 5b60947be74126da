"""Operations written once, for callers with and without asyncio.

An operation is a generator. It yields what takes time (`Call` a pool, do `Work`, `Pause`) and is sent the result; what it returns is its
result. `run` drives one for a plain caller, `drive` for an asyncio caller.

A task that is cancelled must leak nothing. So a call that was sent is answered and the operation gets the answer, as it may name what
must be given back; the cancellation is raised where the operation would go on (its next step), and it may still yield steps to clean up.
Work on memory is never abandoned half way; the operation sees the cancellation when it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from umbp import wire
from umbp.errors import DeadlineExceeded
from umbp.store.bell import Bell
from umbp.waiting import ended

T = TypeVar("T")

CALL_SECONDS_MAX = 5.0
LOOK_SECONDS = (0.0003, 0.003)  # an event loop cannot sleep at a bell: between two looks whether it rang; first, longest
INLINE_BYTES_MAX = 256 << 10  # copies below it (30 us) are done in the event loop


class LeftBehind(DeadlineExceeded):
    """A call with `Call.late` got no answer in its time, and the connection stays. ``sent``: it will be answered."""

    def __init__(self, call: Call, *, sent: bool) -> None:
        super().__init__(f"the pool did not answer within {call.seconds:.3g} s")
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the pool; the result is (reply, blob). Raises what the pool refused with, or Unavailable.

    ``bond``: the only `umbp.client.link.Bond` under which the numbers in it mean something; None: any. ``seconds``: an answer that comes
    later is of no use, and is not waited for: it costs the connection, unless ``late`` says what to do about it (`umbp.client.late`).
    """

    message: wire.Message
    arrays: tuple[Any, ...] = ()
    bond: object = None
    seconds: float = CALL_SECONDS_MAX
    late: Callable[[Any, wire.Blob], Operation[None]] | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """One message that has no reply. ``bond`` as in `Call`."""

    message: wire.Message
    arrays: tuple[Any, ...] = ()
    bond: object = None


@dataclass(frozen=True, slots=True)
class Work:
    """A function that keeps a core busy for about as long as copying ``size_bytes``; it must not be abandoned half way."""

    function: Callable[[], Any]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Listen:
    """Wait until the bell rang more often than so many times, for this session, or the time is over."""

    bell: Bell
    rings: int
    session: int
    seconds: float


Step: TypeAlias = Call | Send | Work | Pause | Listen
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
            elif isinstance(step, Listen):
                step.bell.wait(step.rings, step.session, step.seconds)
            else:
                time.sleep(step.seconds)
        except BaseException as raised:  # noqa: BLE001 - all of it is the operation's to handle, cancellation too
            error = raised


async def drive(operation: Operation[T], caller: AsyncCaller, undo: Callable[[T], Operation[None]] | None = None) -> T:
    """Drive an operation to its end in this event loop. ``undo`` gives its result back if the task is cancelled too late to stop it."""
    result: Any = None
    error: BaseException | None = None
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            step = operation.throw(error) if error is not None else operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            if cancelled is None:
                return value
            if undo is not None:
                await drive(undo(value), caller)
            raise cancelled from None
        if cancelled is not None:
            result, error, cancelled = None, cancelled, None
            continue
        result, error = None, None
        try:
            if isinstance(step, Call):
                answer = asyncio.ensure_future(caller.call(step))
                cancelled = await ended(answer)
                result = answer.result()
            else:
                result = await _step(step, caller)
        except BaseException as raised:  # noqa: BLE001 - as in `run`
            error = raised


async def _step(step: Send | Work | Pause | Listen, caller: AsyncCaller) -> Any:
    if isinstance(step, Send):
        return await caller.send(step)
    if isinstance(step, Pause):
        return await asyncio.sleep(step.seconds)
    if isinstance(step, Listen):
        return await _listen(step)
    if step.size_bytes <= INLINE_BYTES_MAX:
        return step.function()
    work = asyncio.get_running_loop().run_in_executor(None, step.function)
    if (cancelled := await ended(work)) is not None:  # the thread was using the caller's memory until now
        raise cancelled
    return work.result()


async def _listen(step: Listen) -> None:
    until, pause = time.monotonic() + step.seconds, LOOK_SECONDS[0]
    while step.bell.rings == step.rings and (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(pause, left))
        pause = min(1.5 * pause, LOOK_SECONDS[1])
