"""Calls that are left behind, over a socket whose other end is the test's: what is read, what is sent, and what becomes of the answer."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.field.people import eventually
from umbp import wire
from umbp.client.connection import Connection
from umbp.client.late import Late, forgotten, within
from umbp.client.steps import Call, LeftBehind, Operation, Send, run
from umbp.errors import DeadlineExceeded, NotFound, Unavailable

PATIENCE = 60.0
SHORT = 0.02
BOND = object()
LARGE = np.zeros(2 << 20, np.uint8)  # more than a socket takes


class Server:
    """A pool that reads and answers when it is told to."""

    def __init__(self, path: str) -> None:
        self._listener = socket.create_server(path, family=socket.AF_UNIX)
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(PATIENCE)
        self._exactly(len(wire.UPGRADE_REQUEST))
        self.socket.sendall(wire.UPGRADE_REPLY)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.socket.recv(min(count - len(data), 1 << 20))
        return data

    def hear(self) -> Any:
        """The next message."""
        self._thread.join(PATIENCE)
        prefix = self._exactly(wire.PREFIX.size)
        message, _ = wire.decode_request(prefix + self._exactly(wire.frame_bytes(prefix) - len(prefix)))
        return message

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def close(self) -> None:
        self._thread.join(PATIENCE)
        self.socket.close()
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(str(tmp_path / "s"))
    yield made
    made.close()


@pytest.fixture
def late() -> Late:
    return Late()


@pytest.fixture
def connection(server: Server, late: Late, tmp_path: Path) -> Iterator[Connection]:
    made = Connection(str(tmp_path / "s"), late)
    yield made
    made.close()


def hurried(number: int, *arrays: np.ndarray, seconds: float = SHORT) -> Call:
    """What it asks for is to be ended by a message of the answer's number."""

    def end(reply: Any, blob: wire.Blob) -> Operation[None]:
        yield Send(wire.EndFetch(reply.numbers[0]), (), BOND)

    return Call(wire.GetFetched(number), arrays, BOND, seconds, end)


def answer(*numbers: int) -> bytes:
    return wire.encode(wire.Numbers(list(numbers)))


def test_an_answer_that_comes_late_is_nobody_else_s(server: Server, connection: Connection, late: Late) -> None:
    with pytest.raises(LeftBehind) as left:
        connection.call(hurried(1))
    assert left.value.sent
    with pytest.raises(LeftBehind) as again:  # the answer is still to come: nothing is sent
        connection.call(hurried(2))
    assert not again.value.sent
    assert server.hear() == wire.GetFetched(1)
    server.say(answer(11))
    threading.Thread(target=lambda: (server.hear(), server.say(answer(13)))).start()
    reply, _ = connection.call(hurried(3, seconds=PATIENCE))
    assert reply == wire.Numbers([13])
    run(late.steps(BOND), connection)
    assert server.hear() == wire.EndFetch(11)
    assert (late.calls, bool(late)) == (2, False)


def test_a_message_that_was_sent_in_part_is_sent_to_its_end(server: Server, connection: Connection, late: Late) -> None:
    with pytest.raises(LeftBehind) as left:
        connection.call(hurried(1, LARGE))
    assert left.value.sent
    heard: list[Any] = []

    def serve() -> None:
        for number in (11, 12):
            heard.append(server.hear())
            data = answer(number)
            server.say(data[:5])  # an answer that comes in pieces is read in pieces
            server.say(data[5:])

    thread = threading.Thread(target=serve)
    thread.start()
    assert connection.call(hurried(2, LARGE, seconds=PATIENCE))[0] == wire.Numbers([12])
    thread.join(PATIENCE)
    assert heard == [wire.GetFetched(1), wire.GetFetched(2)]
    assert late


def test_an_answer_that_stops_in_its_middle_is_gone_on_with(server: Server, connection: Connection, late: Late) -> None:
    large = wire.encode(wire.Numbers([11]), LARGE)
    for cut in (3, 1000, 100_000):
        thread = threading.Thread(target=lambda cut=cut: (server.hear(), server.say(large[:cut])))
        thread.start()
        with pytest.raises(LeftBehind):
            connection.call(hurried(1, seconds=0.2))
        thread.join(PATIENCE)
        thread = threading.Thread(target=lambda cut=cut: server.say(large[cut:]))
        thread.start()
        while connection.left_behind:
            connection.take_late()
        thread.join(PATIENCE)
    assert late
    run(late.steps(BOND), connection)
    assert [server.hear() for _ in range(3)] == [wire.EndFetch(11)] * 3


def test_an_answer_that_never_comes_costs_the_connection(server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.client.connection.CALL_SECONDS_MAX", SHORT)
    with pytest.raises(LeftBehind):
        connection.call(hurried(1, seconds=SHORT / 2))

    def is_lost() -> bool:
        try:
            connection.take_late()
        except DeadlineExceeded as error:
            return not isinstance(error, LeftBehind)
        return False

    eventually(is_lost, "it is given up")
    with pytest.raises(DeadlineExceeded) as lost:
        connection.call(hurried(1))
    assert not isinstance(lost.value, LeftBehind)


def test_a_call_without_late_costs_the_connection_as_ever(server: Server, connection: Connection) -> None:
    with pytest.raises(DeadlineExceeded) as lost:
        connection.call(dataclasses.replace(hurried(1), late=None))
    assert not isinstance(lost.value, LeftBehind)


class Caller:
    """Answers calls as it is told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), list[Call]()

    def call(self, call: Call) -> Any:
        self.calls.append(call)
        found = self.answers.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    def send(self, call: Send) -> None:
        raise AssertionError(call)


def test_what_ends_something_is_said_in_any_case(late: Late) -> None:
    call = Call(wire.EndFiles(1, 0), (), BOND, SHORT)
    caller = Caller(LeftBehind(call, sent=False), LeftBehind(call, sent=True), ("said", None))
    for _ in range(2):
        with pytest.raises(LeftBehind):
            run(late.ended(call), caller)
    run(late.steps(BOND), caller)
    assert [made.message for made in caller.calls] == [call.message] * 3  # the one that was sent is not said again
    assert caller.calls[-1].late is None


def test_what_was_due_under_another_bond_went_with_it(late: Late) -> None:
    late.came(hurried(1), wire.Numbers([11]), wire.Blob(memoryview(b"")))
    run(late.steps(object()), Caller())
    assert not late


def test_what_is_over_already_is_no_matter_and_a_lost_connection_is(late: Late) -> None:
    call = Call(wire.EndFiles(1, 0), (), BOND, SHORT)
    for error in (NotFound("it is over"), Unavailable("gone")):
        with pytest.raises(LeftBehind):
            run(late.ended(call), Caller(LeftBehind(call, sent=False)))
        if isinstance(error, Unavailable):
            with pytest.raises(Unavailable):
                run(late.steps(BOND), Caller(error))
        else:
            run(late.steps(BOND), Caller(error))


def test_within_limits_what_may_be_left_behind_and_nothing_else() -> None:
    def operation() -> Operation[str]:
        first = yield Call(wire.GetStatus(), late=forgotten, seconds=5.0)
        second = yield Call(wire.GetStatus(), seconds=5.0)
        try:
            yield Call(wire.GetStatus(), late=forgotten, seconds=5.0)
        except Unavailable:
            return f"{first} {second}"
        return ""

    caller = Caller("a", "b", Unavailable("c"))
    assert run(within(operation(), time.monotonic() + 1.0), caller) == "a b"
    assert [call.seconds == 5.0 for call in caller.calls] == [False, True, False]
    assert all(0 < call.seconds <= 1.0 for call in caller.calls[::2])
