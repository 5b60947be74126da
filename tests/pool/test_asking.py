"""Questions on kept connections: whole answers or an error, whatever the other end is, and no connection used that may be gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from umbp.errors import ProtocolError
from umbp.grammar import Address
from umbp.pool import asking
from umbp.pool.asking import Asker

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """A real server that reads whole requests and answers each by ``answer``."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self.answer: Answer = echo

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(size)
                self.requests.append(head)
                await self.answer(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def echo(body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def saying(data: bytes) -> Answer:
    async def say(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return say


@pytest.fixture
async def listener() -> AsyncIterator[tuple[Listener, Asker]]:
    made = Listener()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asker = Asker(Address("127.0.0.1", port), {"Authorization": "Bearer t"}, connections_max=2, answer_bytes_max=1000)
    yield made, asker
    await asker.close()
    server.close()
    await server.wait_closed()


async def test_one_connection_serves_one_question_after_the_other(listener: tuple[Listener, Asker]) -> None:
    there, asker = listener
    for number in range(5):
        assert await asker.post("/v1/plan", b"%d" % number, "text/plain") == (200, b"%d" % number)
    assert there.connections == 1
    assert b"POST /v1/plan HTTP/1.1\r\n" in there.requests[0]
    assert b"Authorization: Bearer t\r\n" in there.requests[0]


async def test_questions_at_a_time_have_connections_of_their_own_up_to_a_number(listener: tuple[Listener, Asker]) -> None:
    there, asker = listener
    answers = await asyncio.gather(*(asker.post("/", b"%d" % number, "text/plain") for number in range(20)))
    assert answers == [(200, b"%d" % number) for number in range(20)]
    assert there.connections == 2


async def test_an_answer_in_many_parts_is_whole(listener: tuple[Listener, Asker]) -> None:
    there, asker = listener

    async def slowly(body: bytes, writer: asyncio.StreamWriter) -> None:
        for at in b"HTTP/1.1 409 Conflict\r\ncontent-length: 4\r\nX: y\r\n\r\nbusy":
            writer.write(bytes([at]))
            await writer.drain()
            await asyncio.sleep(0)

    there.answer = slowly
    assert await asker.post("/", b"", "text/plain") == (409, b"busy")
    assert await asker.post("/", b"", "text/plain") == (409, b"busy")
    assert there.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (17 << 10),
    ],
)
async def test_what_is_no_answer_ends_the_connection(listener: tuple[Listener, Asker], answer: bytes) -> None:
    there, asker = listener
    there.answer = saying(answer)
    with pytest.raises(ProtocolError):
        await asker.post("/", b"", "text/plain")
    there.answer = echo
    assert await asker.post("/", b"again", "text/plain") == (200, b"again")
    assert there.connections == 2


@pytest.mark.parametrize("rest", [b"more", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
async def test_more_than_was_asked_for_is_nobody_s_answer(listener: tuple[Listener, Asker], rest: bytes) -> None:
    there, asker = listener
    there.answer = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + rest)
    assert await asker.post("/", b"", "text/plain") == (200, b"ok")
    there.answer = echo
    assert await asker.post("/", b"mine", "text/plain") == (200, b"mine")


async def test_a_connection_that_is_closed_in_the_middle_is_an_error_and_the_next_question_has_another(
    listener: tuple[Listener, Asker],
) -> None:
    there, asker = listener

    async def half(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        writer.close()

    there.answer = half
    with pytest.raises(ConnectionResetError):
        await asker.post("/", b"", "text/plain")
    there.answer = echo
    assert await asker.post("/", b"again", "text/plain") == (200, b"again")


async def test_a_connection_that_says_it_closes_is_not_used_again(listener: tuple[Listener, Asker]) -> None:
    there, asker = listener
    there.answer = saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
    for _ in range(2):
        assert await asker.post("/", b"", "text/plain") == (200, b"ok")
    assert there.connections == 2


async def test_the_answer_to_who_was_cancelled_is_nobody_else_s(listener: tuple[Listener, Asker]) -> None:
    there, asker = listener
    asked = asyncio.Event()

    async def never(body: bytes, writer: asyncio.StreamWriter) -> None:
        asked.set()

    there.answer = never
    task = asyncio.ensure_future(asker.post("/", b"", "text/plain"))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    there.answer = echo
    assert await asker.post("/", b"mine", "text/plain") == (200, b"mine")
    assert there.connections == 2


async def test_what_has_rested_for_long_is_not_used_again(listener: tuple[Listener, Asker], monkeypatch: pytest.MonkeyPatch) -> None:
    there, asker = listener
    await asker.post("/", b"", "text/plain")
    monkeypatch.setattr(asking, "REST_SECONDS_MAX", -1.0)
    assert await asker.post("/", b"", "text/plain") == (200, b"")
    assert there.connections == 2


async def test_nobody_there_is_an_error(listener: tuple[Listener, Asker]) -> None:
    nobody = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = nobody.sockets[0].getsockname()[1]
    nobody.close()
    await nobody.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await Asker(Address("127.0.0.1", port), {}, connections_max=1, answer_bytes_max=1).post("/", b"", "text/plain")
