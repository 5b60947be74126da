"""Pages by NIXL, for real: two pools that have it (UCX over shared memory or TCP needs no hardware), and one that has not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import umbp
from tests.field.people import eventually, keys_of, open_namespace, read_back, values_of, within
from tests.pools import PoolProcess, together
from tests.signpost import Signpost
from umbp import ReadStatus, WriteStatus
from umbp.transport import nixl

SIZE = 64 << 10
HIT = ReadStatus.HIT
here = pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing())


class Nodes:
    """A source and a reader, both with NIXL."""

    def __init__(self, master: Signpost, a: PoolProcess, b: PoolProcess) -> None:
        self.master, self.a, self.b = master, a, b
        self.clients = [umbp.connect(pool.socket) for pool in (a, b)]

    def spaces(self, tenant: str) -> tuple[Any, Any]:
        first, second = (open_namespace(client, SIZE, tenant=tenant) for client in self.clients)
        return first, second

    def knows(self, space: Any, numbers: range, way: str) -> None:
        self.master.add(self.a, space, keys_of(*numbers), addresses={way: str(self.a.ready["http"])})


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nixl_too = ("--transport", "nixl")
    with pytest.MonkeyPatch.context() as patch, Signpost() as master:
        patch.setenv("UCX_TLS", "tcp")  # the way that needs the peer's process to take part
        with together(a := PoolProcess(*nixl_too), b := PoolProcess(*nixl_too, "--master", master.url)):
            made = Nodes(master, a, b)
            yield made
            for client in made.clients:
                client.close()


def got(space: Any, numbers: range, deadline: float = 30.0) -> Any:
    return read_back(space, numbers, deadline)


@here
def test_pages_are_read_out_of_the_peer_s_memory(nodes: Nodes) -> None:
    there, mine = nodes.spaces("read")
    numbers = range(100)
    assert there.put(keys_of(*numbers), values_of(numbers, SIZE)).all(WriteStatus.STORED)
    there.remove(keys_of(3, 50))
    nodes.knows(there, numbers, "nixl")
    statuses = got(mine, numbers)
    assert statuses.where(HIT).sum() == 98
    assert statuses[3] != HIT
    eventually(lambda: nodes.clients[0].status()["leases"] == 0, "the grants are given back")


@here
def test_where_only_one_end_has_it_streams_are_used(nodes: Nodes) -> None:
    there, mine = nodes.spaces("mixed")
    there.put(keys_of(1), values_of([1], SIZE))
    nodes.knows(there, range(1, 2), "http")
    assert got(mine, range(1, 2)).all(HIT)


@here
def test_a_peer_that_does_not_have_it_after_all_is_a_failure_of_its_pages(nodes: Nodes) -> None:
    with PoolProcess() as c, umbp.connect(c.socket) as client:
        there = open_namespace(client, SIZE, tenant="has it not")
        there.put(keys_of(1), values_of([1], SIZE))
        nodes.master.add(c, there, keys_of(1), addresses={"nixl": str(c.ready["http"])})
        assert not got(nodes.spaces("has it not")[1], range(1, 2), 1.0).where(HIT).any()


@here
def test_a_frozen_peer_is_bounded_and_its_late_bytes_harm_nobody(nodes: Nodes) -> None:
    """A READ that outlives its order keeps its memory until it has ended; what is stored meanwhile is never what it writes."""
    there, mine = nodes.spaces("frozen")
    numbers = range(200, 264)
    there.put(keys_of(*numbers), values_of(numbers, SIZE))
    nodes.knows(there, numbers, "nixl")
    assert got(mine, range(200, 201)).all(HIT)
    nodes.a.signal(signal.SIGSTOP)
    try:
        with within(1.0):
            statuses = got(mine, numbers, 1.0)
        assert statuses[0] == HIT
    finally:
        nodes.a.signal(signal.SIGCONT)
    for start in range(1000, 3000, 200):  # through all of the memory, while late bytes may come
        part = range(start, start + 200)
        mine.put(keys_of(*part), values_of(part, SIZE))
        got(mine, part, 0.0)
    eventually(lambda: nodes.clients[1].status()["reservations"] == 0, "what was kept is given back")
    eventually(lambda: got(mine, numbers).where(HIT).sum() > 0, "it is read again")


def test_a_pool_that_is_told_to_use_what_is_not_there_does_not_start(tmp_path: Any) -> None:
    if not nixl.missing():
        pytest.skip("nixl is installed here")
    with pytest.raises(AssertionError, match="pip install nixl"), PoolProcess("--transport", "nixl"):
        pass


def test_missing_says_what_to_do() -> None:
    assert nixl.missing() in ("", "the package nixl is not installed: pip install nixl")


@here
def test_a_killed_peer_fails_its_pages(nodes: Nodes) -> None:
    """The last one: the source is gone after it."""
    there, mine = nodes.spaces("killed")
    there.put(keys_of(1, 2), values_of([1, 2], SIZE))
    nodes.knows(there, range(1, 3), "nixl")
    assert got(mine, range(1, 2)).all(HIT)
    nodes.a.kill()
    with within(1.0):
        assert not got(mine, range(2, 3), 1.0).where(HIT).any()
