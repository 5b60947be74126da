"""A pool that is cut off one way from its master and from the other pools: it hears and is not heard, or is heard and does not hear.

It is in a network of its own (`tests.partition`). Whichever way is lost: whoever is on one side is served there as ever, nobody gets wrong
bytes or waits for longer than he said, and when nothing is lost any more all is as before by itself, within the times that the heads of
`umbp.pool.reporting` (seconds), `umbp.pool.places` (one) and `umbp.core.membership` (thirty) state; `until` here waits for a minute.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import umbp
from tests.field.people import keys_of, open_namespace, read_back, values_of, within
from tests.masters import CALL_SECONDS_MAX, MasterProcess, free_port, until
from tests.partition import FROM, TO, Island
from tests.pools import PoolProcess, together
from tests.signpost import Signpost
from umbp.types import ReadStatus, WriteStatus

SIZE = 128 << 10
TOKEN = ("--token", "t")
HIT, MISS, BUSY, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.BUSY, ReadStatus.FAILED


@pytest.fixture(scope="module")
def island() -> Iterator[Island]:
    with Island() as made:
        yield made


def there(island: Island, *options: str) -> PoolProcess:
    """A pool on the island, not started yet."""
    pool = PoolProcess("--http", f"{island.there}:0", *TOKEN, *options, dram="32MiB")
    pool.command = [*island.enter, *pool.command]
    return pool


class Engine(threading.Thread):
    """Reads pages all the time, and stores one of its own each round. What comes has the right bytes, however much of it comes."""

    def __init__(self, pool: PoolProcess, asked: range, own: int, *, patient: bool) -> None:
        """``patient``: the pages may be elsewhere, and are given up and dropped here after each round."""
        super().__init__(daemon=True)
        self._client = umbp.connect(pool.socket)
        self.space = open_namespace(self._client, SIZE, tenant="one way")
        self._asked, self._own, self._patient = asked, own, patient
        self._over = threading.Event()
        self.hits: list[int] = []  # of each round, of what was asked for
        self.faults: list[Exception] = []

    def run(self) -> None:
        try:
            while not self._over.wait(0.005):
                own = [self._own + len(self.hits) % 50]
                assert self.space.put(keys_of(*own), values_of(own, SIZE)).all(WriteStatus.STORED, WriteStatus.EXISTS)
                assert read_back(self.space, own, 0.0).all(HIT)
                statuses = read_back(self.space, [*self._asked], 0.5 if self._patient else 0.0)
                self.hits.append(int(statuses.where(HIT).sum()))
                if self._patient:
                    self.space.remove(keys_of(*self._asked))
        except (AssertionError, umbp.UmbpError, OSError) as error:
            self.faults.append(error)

    def rounds(self, count: int) -> bool:
        """Whether it was served so often since this was asked first of it."""
        began = len(self.hits)
        until(lambda: self.faults or len(self.hits) >= began + count, lambda: f"no rounds of an engine: {len(self.hits)}")
        return not self.faults

    def stop(self) -> None:
        self._over.set()
        self.join(60.0)
        self._client.close()


@contextlib.contextmanager
def engines(*some: Engine) -> Iterator[None]:
    """At work meanwhile; none of them has had a fault."""
    for engine in some:
        engine.start()
    try:
        yield
    finally:
        for engine in some:
            engine.stop()
    assert [engine.faults for engine in some] == [[] for _ in some]


def asked(url: str) -> Any:
    """The JSON of a GET, with the token."""
    request = urllib.request.Request(url, headers={"Authorization": "Bearer t"})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS_MAX) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def cluster(island: Island) -> Iterator[tuple[MasterProcess, PoolProcess, PoolProcess]]:
    """A master, a pool of it on the island, and one that is here."""
    with together(
        master := MasterProcess("--http", f"{island.here}:{free_port()}", *TOKEN),
        a := there(island, "--master", master.http),
        b := PoolProcess("--master", master.http, "--http", f"{island.here}:0", *TOKEN, dram="32MiB"),
    ):
        yield master, a, b


@pytest.mark.parametrize(("lost", "first"), [(TO, 0), (FROM, 10)])
def test_a_pool_that_is_cut_off_from_its_master_is_expired_and_comes_back_with_all_that_it_has(
    island: Island, cluster: tuple[MasterProcess, PoolProcess, PoolProcess], lost: str, first: int
) -> None:
    master, a, b = cluster
    node = lambda: {each["id"]: each for each in asked(master.http + "/v1/nodes")["nodes"]}[a.name]  # noqa: E731
    until(lambda: (node()["state"], node()["synced"], node()["source"]) == ("alive", True, True), node)
    at_a, at_b = (Engine(pool, range(0), own, patient=False) for pool, own in ((a, 1000), (b, 2000)))
    numbers = [*range(first, first + 8)]
    assert at_a.space.put(keys_of(*numbers), values_of(numbers, SIZE)).all(WriteStatus.STORED)
    held = lambda: read_back(at_b.space, numbers, 20.0).all(HIT)  # noqa: E731
    until(held)
    at_b.space.remove(keys_of(*numbers))
    with engines(at_a, at_b):
        island.cut(lost)
        until(lambda: node()["state"] == "dead")
        assert at_a.rounds(20), "its own engines are served as ever"
        assert at_b.rounds(20), "and so are others'"
        with within(0.5):  # and not as long as a connection takes to break
            assert read_back(at_b.space, numbers, 0.5).all(MISS, FAILED, BUSY)
        assert at_a.space.put(keys_of(first + 8), values_of([first + 8], SIZE)).all(WriteStatus.STORED)
        island.mend()
        until(lambda: (node()["state"], node()["synced"], node()["source"]) == ("alive", True, True), node)
        until(held)
        until(lambda: read_back(at_b.space, [first + 8], 20.0).all(HIT))  # stored while nobody heard of it


@pytest.fixture(scope="module")
def apart(island: Island) -> Iterator[tuple[Signpost, PoolProcess, PoolProcess]]:
    """A pool that has what a pool here reads, whatever becomes of the network: the master that says so is here."""
    with Signpost() as master, together(far := there(island), near := PoolProcess("--master", master.url, *TOKEN, dram="32MiB")):
        yield master, far, near


@pytest.mark.parametrize("lost", [TO, FROM])
def test_a_peer_that_is_cut_off_costs_its_pages_alone_and_is_read_from_again(
    island: Island, apart: tuple[Signpost, PoolProcess, PoolProcess], lost: str
) -> None:
    """The master goes on to name it. The connection is lost in the middle of whatever is on its way."""
    master, far, near = apart
    reader, local = Engine(near, range(40), 2000, patient=True), Engine(near, range(100, 110), 3000, patient=False)
    at_far = Engine(far, range(40), 1000, patient=False)
    for engine, numbers in ((at_far, range(40)), (local, range(100, 110))):
        assert engine.space.put(keys_of(*numbers), values_of(numbers, SIZE)).all(WriteStatus.STORED, WriteStatus.EXISTS)
    master.failed.clear()
    master.table.clear()
    master.add(far, at_far.space, keys_of(*range(40)))
    with engines(reader, local, at_far):
        until(lambda: reader.hits and reader.hits[-1] == 40, lambda: reader.hits)
        island.cut(lost)
        until(lambda: reader.hits[-1] == 0, lambda: reader.hits)
        until(lambda: any(node == far.name for node, _ in master.failed))
        for engine, whole in ((reader, 0), (local, 10), (at_far, 40)):
            assert engine.rounds(3)
            assert engine.hits[-1] == whole
        island.mend()
        until(lambda: reader.hits[-1] == 40, lambda: reader.hits[-5:])
