"""Answers that come after their caller had gone on, and what they name, which is given back.

Theory of operation. A pool that is stopped answers when it goes on, and one that is only busy soon. A caller in a hurry waits for neither:
a call that says what is to be done about a late answer (`umbp.client.steps.Call.late`) ends by `LeftBehind`, and the connection stays: to
lose it would cost this client all that it holds. The answer is read before any later one, by the next caller or the background, which then
does what is to be done (`Late.steps`). Nothing is read for a call that was not sent; what ends something is then sent by the background
(`Late.ended`). An answer that does not come in `CALL_SECONDS_MAX` costs the connection as ever, and the pool takes back all of the session.

Bounded: one answer is outstanding at a time. Who finds it so waits for it, within its own time, before it sends anything.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

from umbp import wire
from umbp.client.steps import CALL_SECONDS_MAX, Call, LeftBehind, Operation, T
from umbp.errors import UmbpError, Unavailable


class Late:
    """Of one client: what is still to be done. Any thread adds; the background does it. ``calls`` were left behind so far."""

    def __init__(self) -> None:
        self.calls = 0
        self._due: deque[tuple[object, Operation[None]]] = deque()

    def __repr__(self) -> str:
        return f"<Late {len(self._due)} of {self.calls} calls to be seen to>"

    def __bool__(self) -> bool:
        return bool(self._due)

    def came(self, call: Call, reply: Any, blob: wire.Blob) -> None:
        """The answer to a call that nobody waits for any more."""
        if call.late is not None:
            self._due.append((call.bond, call.late(reply, blob)))

    def ended(self, call: Call) -> Operation[tuple[Any, wire.Blob]]:
        """A call that ends something, and is made in any case: later, where there is no time to send it now. Raises all the same."""
        try:
            answer: tuple[Any, wire.Blob] = yield dataclasses.replace(call, late=forgotten)
            return answer
        except LeftBehind as error:
            if not error.sent:
                self._due.append((call.bond, _again(call)))
            raise

    def steps(self, bond: object) -> Operation[None]:
        """Do what is to be done under this bond; what was due under another went with its session."""
        while self._due:
            due, operation = self._due.popleft()
            if due is bond:
                try:
                    yield from operation
                except Unavailable:
                    raise
                except UmbpError:  # it is over already
                    pass


def within(operation: Operation[T], until: float) -> Operation[T]:
    """An operation, with what it calls and may leave behind limited to this time (`time.monotonic`)."""
    result: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = operation.throw(error) if error is not None else operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        if isinstance(step, Call) and step.late is not None:
            step = dataclasses.replace(step, seconds=max(0.001, min(step.seconds, until - time.monotonic())))
        result, error = None, None
        try:
            result = yield step
        except BaseException as raised:  # noqa: BLE001 - all of it is the operation's to handle, as in `umbp.client.steps.run`
            error = raised


def forgotten(reply: Any, blob: wire.Blob) -> Operation[None]:
    """`Call.late` of an answer that names nothing."""
    yield from ()


def _again(call: Call) -> Operation[None]:
    yield dataclasses.replace(call, seconds=CALL_SECONDS_MAX, late=None)
