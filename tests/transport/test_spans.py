"""Parts of pages of a real pool process over HTTP: these bytes and no others, of one version, to where they belong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually, keys_of, open_namespace, values_of
from tests.pools import PoolProcess
from umbp import ReadStatus, WriteStatus, wire
from umbp.core.stages import RANGES_MAX, Ranges
from umbp.errors import ProtocolError
from umbp.grammar import parse_address
from umbp.store.checksums import checksum
from umbp.transport.base import FRAME_TYPE, Granted, Parted, Peer
from umbp.transport.http import HttpTransport

SIZE = 300_000
FIRST: Ranges = ((0, 1000), (4096, 4097), (200_000, 300_000))
REST: Ranges = ((1000, 4096), (4097, 200_000))
HIT, MISS = ReadStatus.HIT, ReadStatus.MISS


@pytest.fixture(scope="module")
def server() -> Iterator[PoolProcess]:
    with PoolProcess(dram="16MiB") as running:
        yield running
        assert "Traceback" not in running.log(), running.log()


@pytest.fixture
def space(server: PoolProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    with umbp.connect(server.socket) as pool:
        yield open_namespace(pool, SIZE, tenant=request.node.name)
        eventually(lambda: pool.status()["leases"] == 0, "every grant was given back")


@pytest.fixture
async def transport() -> AsyncIterator[HttpTransport]:
    made = HttpTransport()
    yield made
    await made.close()


class Reader:
    """Reads parts of pages to rows that lie apart, and side by side where ``gap`` is 0."""

    def __init__(self, transport: HttpTransport, server: PoolProcess, space: Any, keys: np.ndarray, gap: int = 0) -> None:
        self.transport, self.space, self.keys = transport, space, keys
        self.peer = Peer(server.name, int(server.ready["boot"]), parse_address(str(server.ready["http"])))
        self.offsets = np.arange(len(keys))[::-1] * (SIZE + gap)
        self.data = np.full(len(keys) * (SIZE + gap), 0xAA, np.uint8)
        self.came: list[tuple[int, int, int]] = []

    async def read(self, spans: Ranges, *, again: bool = False) -> Parted:
        digest, until = str(self.space.identity.digest().hex()), time.monotonic() + 60
        return await self.transport.read_spans(
            self.peer,
            digest,
            SIZE,
            self.keys,
            self.data,
            self.offsets,
            spans,
            until,
            lambda *part: self.came.append(part),
            again=again,
        )


@pytest.mark.parametrize("gap", [0, 64])
async def test_these_bytes_come_and_no_others_and_the_rest_makes_the_page_whole(
    transport: HttpTransport, server: PoolProcess, space: Any, gap: int
) -> None:
    values = values_of(range(6), SIZE)
    assert space.put(keys_of(*range(6)), values).all(WriteStatus.STORED)
    reader = Reader(transport, server, space, keys_of(3, 404, 1, 4, 2, 0), gap)
    want = np.full_like(reader.data, 0xAA)
    numbers = {0: 3, 2: 1, 3: 4, 4: 2, 5: 0}
    for spans in (FIRST, REST):
        first = await reader.read(FIRST)
        parted = first if spans is FIRST else await reader.read(spans, again=True)
        assert parted.status.tolist() == [HIT, MISS, HIT, HIT, HIT, HIT]
        assert (parted.versions == first.versions).all()
        assert parted.versions[list(numbers)].all()
        assert parted.sums[list(numbers)].tolist() == [checksum(values[number].data) for number in numbers.values()]
        for page, number in numbers.items():
            for start, stop in spans:
                want[reader.offsets[page] + start : reader.offsets[page] + stop] = values[number, start:stop]
        assert (reader.data == want).all()
        assert reader.came[-len(numbers) * len(spans) :] == [(page, *span) for page in numbers for span in spans]
    for page, number in numbers.items():
        assert (reader.data[reader.offsets[page] : reader.offsets[page] + SIZE] == values[number]).all()


async def test_another_page_of_the_same_key_has_another_version(transport: HttpTransport, server: PoolProcess, space: Any) -> None:
    keys, values = keys_of(1, 2), values_of([1, 2], SIZE)
    assert space.put(keys, values).all(WriteStatus.STORED)
    reader = Reader(transport, server, space, keys)
    before = await reader.read(FIRST)
    assert space.remove(keys[:1]).all()
    gone = await reader.read(REST)
    assert gone.status.tolist() == [MISS, HIT]
    assert space.put(keys[:1], values[:1]).all(WriteStatus.STORED)
    after = await reader.read(REST)
    assert after.status.tolist() == [HIT, HIT]
    assert (after.versions == before.versions).tolist() == [False, True]


@pytest.mark.parametrize(
    "spans",
    [((0, SIZE + 1),), ((10, 10),), ((0, 10), (9, 20)), ((20, 30), (0, 10)), tuple((at, at + 1) for at in range(0, 2 * RANGES_MAX + 2, 2))],
)
async def test_an_order_of_what_is_no_part_of_a_page_is_refused(
    transport: HttpTransport, server: PoolProcess, space: Any, spans: Ranges
) -> None:
    space.put(keys_of(1), values_of([1], SIZE))
    reader = Reader(transport, server, space, keys_of(1))
    with pytest.raises(ProtocolError):
        await reader.read(spans)
    assert (await reader.read(FIRST)).status.tolist() == [HIT]


async def test_parts_count_only_if_the_receipts_answer_says_that_the_page_stayed(transport: HttpTransport) -> None:
    """A real one says no to a page when it was stopped for longer than its lease. And whoever sends less than was asked for has failed."""
    body = values_of([1, 2], 1000).tobytes()

    def serve() -> None:
        for said in (b"\x01\x00", b""):
            connection, _ = listener.accept()
            with connection:
                rest = b""
                while b"\r\n\r\n" not in rest:
                    rest += connection.recv(65536)
                head, _, rest = rest.partition(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) - 1
                while len(rest) < size:
                    rest += connection.recv(65536)
                two = np.full(2, 7, np.uint64)
                frame = wire.encode(Granted(2, 2), np.ones(2, np.uint8), two, np.zeros(2, np.int64), two)
                answer = f"HTTP/1.1 200 OK\r\nContent-Type: {FRAME_TYPE}\r\nContent-Length: {len(frame) + 2002}\r\n\r\n"
                connection.sendall(answer.encode() + frame + (body if said else body[:-1]))
                if said:
                    assert connection.recv(1) == b"\x06"
                    connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        peer = Peer("p", 1, parse_address(f"127.0.0.1:{listener.getsockname()[1]}"))
        data, came = np.zeros(2 * SIZE, np.uint8), []

        async def read() -> Parted:
            until = time.monotonic() + 60
            offsets = np.array([0, SIZE])
            return await transport.read_spans(
                peer, "ab" * 32, SIZE, keys_of(1, 2), data, offsets, ((0, 1000),), until, lambda *part: came.append(part), again=False
            )

        assert (await read()).status.tolist() == [HIT, MISS]
        assert came == [(0, 0, 1000), (1, 0, 1000)]
        with pytest.raises(ConnectionError):
            await read()
        thread.join(60)
        assert not thread.is_alive()
