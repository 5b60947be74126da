"""The short way in: the same answers as aiohttp's, and whatever is not exactly such a question is aiohttp's to judge."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests.masters import CALL_SECONDS_MAX, MasterProcess
from umbp.master.protocol import FRAME, Events, Join, LocateRequest, RouteRequest, decode_plan
from umbp.wire import encode

FRAME_OF_ONE = encode(RouteRequest(namespace="ab" * 32, requester="r", n=1), np.zeros((1, 32), np.uint8))


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    with MasterProcess(timing=("--dead-after", "600s")) as process:  # the nodes of these tests have no heartbeat
        yield process


def say(master: MasterProcess, *parts: bytes, answers: int = 1) -> list[tuple[int, bytes, bytes]]:
    """Send these pieces over one connection; status, head and body of so many answers."""
    port = int(master.http.rpartition(":")[2])
    found, buffer = [], b""
    with socket.create_connection(("127.0.0.1", port), timeout=CALL_SECONDS_MAX) as connection:
        for part in parts:
            connection.sendall(part)
        while len(found) < answers:
            while b"\r\n\r\n" not in buffer:
                more = connection.recv(65536)
                assert more, "closed"
                buffer += more
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(buffer) < length:
                buffer += connection.recv(65536)
            found.append((int(head.split()[1]), head, buffer[:length]))
            buffer = buffer[length:]
    return found


def request(
    path: bytes = b"/v1/plan",
    body: bytes = FRAME_OF_ONE,
    *,
    kind: bytes = FRAME.encode(),
    more: bytes = b"",
    host: bytes = b"localhost",
) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n"
    return head % (path, host, kind, len(body), more) + body


def by_aiohttp(head: bytes) -> bool:
    return b"server:" in head.lower()


def test_questions_are_answered_one_after_the_other_whole_or_in_parts(master: MasterProcess) -> None:
    whole = request()
    found = say(master, whole + whole, whole[:10], whole[10:100], whole[100:], answers=3)
    assert [status for status, _, _ in found] == [200] * 3
    assert not any(by_aiohttp(head) for _, head, _ in found)
    assert all(decode_plan(body).held == 0 for _, _, body in found)


def joined(master: MasterProcess, node: str) -> int:
    body = msgspec.json.encode(Join(node=node, boot=1, place=node, addresses={}, tiers=[]))
    ((status, _, answer),) = say(master, request(b"/v1/members", body, kind=b"application/json"))
    assert status == 200
    number: int = msgspec.json.decode(answer)["registration"]
    return number


def bundle(registration: int, number: int, keys: int) -> bytes:
    header = Events(registration=registration, number=number, n=keys, spaces=[("ab" * 32, 4096, keys)])
    words = np.arange(keys * 4, dtype=np.uint64)
    return encode(header, words, np.full(keys, 2, np.uint8), np.ones(keys, np.uint8))


def test_what_a_node_tells_is_applied_and_answered_in_order(master: MasterProcess) -> None:
    registration = joined(master, "teller")
    path = b"/v1/members/teller/events"
    large = request(path, bundle(registration, 2, 8192))
    asked = request(b"/v1/locate", encode(LocateRequest(namespace="ab" * 32, n=1), np.arange(4, dtype=np.uint64)))
    sent = [request(path, bundle(registration, 1, 3)), large[:5000], large[5000:], asked, request(path, bundle(registration, 2, 8192))]
    found = say(master, sent[0] + sent[1], sent[2] + sent[3], sent[4], answers=4)
    assert [status for status, _, _ in found] == [200] * 4
    assert not any(by_aiohttp(head) for _, head, _ in found)
    acknowledged = [msgspec.json.decode(body) for _, _, body in (found[0], found[1], found[3])]
    assert acknowledged == [{"acknowledged": number, "gap": False, "piece": -1} for number in (1, 2, 2)]
    assert found[2][2][-2] == 1  # one copy


def test_what_is_refused_of_a_node_is_refused_as_ever_and_the_connection_goes_on(master: MasterProcess) -> None:
    registration = joined(master, "refused")
    path = b"/v1/members/refused/events"
    wrong = [
        request(path, bundle(registration + 1, 1, 1)),
        request(path, FRAME_OF_ONE),
        request(b"/v1/members/nobody/events", bundle(registration, 1, 1)),
        request(b"/v1/members/re%66used/events", bundle(registration, 1, 1)),
    ]
    for sent, status in zip(wrong, (404, 400, 404, 200), strict=True):
        first, second = say(master, sent, request(), answers=2)
        assert (first[0], by_aiohttp(first[1]), second[0]) == (status, True, 200), sent[:80]


def test_a_node_that_hangs_up_while_it_tells_leaves_nothing_behind(master: MasterProcess) -> None:
    registration = joined(master, "hasty")
    for number in range(1, 20):
        with socket.create_connection(("127.0.0.1", int(master.http.rpartition(":")[2])), timeout=CALL_SECONDS_MAX) as connection:
            connection.sendall(request(b"/v1/members/hasty/events", bundle(registration, number, 8192)))
    ((status, _, body),) = say(master, request(b"/v1/members/hasty/events", bundle(registration, 1, 8192)))
    assert status == 200
    assert msgspec.json.decode(body)["acknowledged"] >= 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (request(b"/v1/nothing"), 404),
        (request(kind=b"text/plain"), 415),
        (request(host=b"evil.example"), 403),
        (request(more=b"Origin: http://evil.example\r\n"), 403),
        (request(body=b"\x01" * 50), 400),
        (request(body=FRAME_OF_ONE[:-1]), 400),
        (request(more=b"Connection: close\r\n"), 200),
    ],
    ids=["a GET", "no such path", "no frame", "another host", "another origin", "rubbish", "a short frame", "one request only"],
)
def test_anything_else_is_judged_as_ever(master: MasterProcess, sent: bytes, status: int) -> None:
    ((answered, head, _),) = say(master, sent)
    assert answered == status
    assert by_aiohttp(head)


def test_a_connection_goes_on_with_aiohttp_after_something_else(master: MasterProcess) -> None:
    found = say(master, request(), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", request(), answers=3)
    assert [(status, by_aiohttp(head)) for status, head, _ in found] == [(200, False), (200, True), (200, True)]


def test_with_a_token_only_the_right_one_is_let_in() -> None:
    with MasterProcess("--token", "right") as guarded:
        assert [
            say(guarded, request(more=more))[0][0]
            for more in (b"", b"Authorization: Bearer wrong\r\n", b"authorization: Bearer right\r\n", b"Authorization: right\r\n")
        ] == [401, 401, 200, 401]
