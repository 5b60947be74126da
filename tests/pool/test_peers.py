"""Pages of other nodes: real pools that read from one another, told who has what by a signpost, and what goes wrong between them."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import umbp
from tests.cable import Cable
from tests.field.people import eventually, keys_of, open_namespace, read_back, values_of, within
from tests.masters import call
from tests.pools import PoolProcess, together
from tests.signpost import Signpost
from umbp import ReadStatus, Tier, WriteStatus
from umbp.types import NOWHERE

SIZE = 128 << 10
PATIENCE = 30.0  # of reads that are to succeed, on a machine with much else to do
HIT, MISS, BUSY, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.BUSY, ReadStatus.FAILED


@pytest.fixture(scope="module")
def master() -> Iterator[Signpost]:
    with Signpost() as made:
        yield made


@pytest.fixture(scope="module")
def peered(master: Signpost) -> Iterator[Callable[..., PoolProcess]]:
    """Makes pools that follow the signpost."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, **more: stack.enter_context(PoolProcess("--master", master.url, *options, **more))


@pytest.fixture(scope="module")
def pools(master: Signpost) -> Iterator[tuple[PoolProcess, PoolProcess, PoolProcess]]:
    """Three that are not hurt by the tests."""
    a, b, c = (PoolProcess("--master", master.url, dram=dram) for dram in ("32MiB", "32MiB", "16MiB"))
    with together(a, b, c):
        yield a, b, c


class Node:
    """A pool and a client of it, with a namespace."""

    def __init__(self, pool: PoolProcess, tenant: str, size: int = SIZE) -> None:
        self.pool = pool
        self.client = umbp.connect(pool.socket)
        self.space = open_namespace(self.client, size, tenant=tenant)
        self.size = size

    def store(self, *numbers: int) -> None:
        assert self.space.put(keys_of(*numbers), values_of(numbers, self.size)).all(WriteStatus.STORED, WriteStatus.EXISTS)

    def get(self, *numbers: int, deadline: float = PATIENCE) -> Any:
        """Statuses; the bytes of what is a hit are compared."""
        return read_back(self.space, numbers, deadline)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.pool.http}/metrics") as answer:
            lines = answer.read().decode().split("\n")
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))


@pytest.fixture
def nodes(pools: tuple[PoolProcess, ...], request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    made = tuple(Node(pool, request.node.name) for pool in pools[:2])
    yield made  # type: ignore[misc]
    for node in made:
        eventually(lambda node=node: node.client.status()["leases"] == 0, "nothing is held any more")
        node.client.close()


@pytest.fixture
def third(pools: tuple[PoolProcess, ...], request: pytest.FixtureRequest) -> Iterator[Node]:
    """One more that is not hurt."""
    node = Node(pools[2], request.node.name)
    yield node
    node.client.close()


@pytest.fixture
def node_of(peered: Callable[..., PoolProcess], request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    """One more, to be hurt."""
    made: list[Node] = []

    def make(*options: str, dram: str = "16MiB") -> Node:
        made.append(Node(peered(*options, dram=dram), request.node.name))
        return made[-1]

    yield make
    for node in made:
        node.client.close()


# -- good days -----------------------------------------------------------------------------------------------------------------------


def test_a_prefix_stored_on_one_node_is_found_and_got_on_another(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(*range(20))
    b.store(0, 1)
    master.add(a.pool, a.space, keys_of(*range(20)))
    master.asked.clear()
    expected = [Tier.DRAM] * 2 + [Tier.REMOTE] * 18 + [NOWHERE]
    eventually(
        lambda: b.space.locate(keys_of(*range(20), 404)).tolist() == expected, "it is said where each is"
    )  # a late answer is nowhere
    assert {each[:3] for each in master.asked} == {("plan", 19, False)}  # nothing was counted as a hit
    assert b.get(*range(20)).all(HIT)
    assert master.asked[-1][:3] == ("plan", 18, True)
    asked = len(master.asked)
    assert b.get(*range(20)).all(HIT)
    assert len(master.asked) == asked  # they are here now
    assert b.space.lookup(keys_of(*range(20))).all()
    assert b.metric('umbp_fetched_pages_total{source="peers"}') >= 18


def test_pages_with_holes_between_them(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(1, 3, 4, 7)
    master.add(a.pool, a.space, keys_of(1, 3, 4, 7))
    master.asked.clear()
    statuses = b.get(0, 1, 2, 3, 4, 5, 6, 7)
    assert statuses.where(HIT).tolist() == [False, True, False, True, True, False, False, True]
    assert statuses.where(MISS).sum() == 4
    assert [counts for what, _, counts, _ in master.asked if what == "plan"] == [True, False]  # one use of each


def test_a_plan_may_split_a_prefix_over_nodes(nodes: tuple[Node, Node], third: Node, master: Signpost) -> None:
    a, b = nodes
    c = third
    before = c.metric("umbp_granted_pages_total")
    a.store(*range(10))
    c.store(*range(10, 20))
    master.add(a.pool, a.space, keys_of(*range(10)))
    master.add(c.pool, c.space, keys_of(*range(10, 20)))
    assert b.get(*range(20)).all(HIT)
    assert c.metric("umbp_granted_pages_total") - before == 10


def test_two_requesters_for_one_page_are_one_fetch(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(*range(30))
    master.add(a.pool, a.space, keys_of(*range(30)))
    before = a.metric("umbp_granted_pages_total")
    others = [Node(b.pool, str(b.space.identity.tenant)) for _ in range(3)]
    threads = [threading.Thread(target=lambda node=node: node.get(*range(30))) for node in (b, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for node in others:
        node.client.close()
    assert a.metric("umbp_granted_pages_total") - before == 30
    assert b.get(*range(30), deadline=0).all(HIT)


def test_a_prefetch_brings_pages_of_another_node(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(*range(12))
    master.add(a.pool, a.space, keys_of(*range(12)))
    b.space.prefetch(keys_of(*range(6)), request_id="soon")
    digest, keys = b.space.identity.digest().hex(), [key.tobytes().hex() for key in keys_of(*range(6, 12))]
    made = call(b.pool.http + "/v1/prefetch", {"namespace": digest, "keys": keys, "request_id": "a router's"})
    assert made["pages"] == 6
    eventually(lambda: b.space.prefetch_status("soon").over, "it is over")
    eventually(lambda: b.space.prefetch_status("a router's").over, "so is the one that was asked for by REST")
    assert b.space.prefetch_status("soon").there.all()
    assert call(b.pool.http + f"/v1/prefetch/{digest}/a%20router's") == {
        "request_id": "a router's", "state": "ready", "pages": 6, "there": 6, "left": 0, "status": ["hit"] * 6
    }  # fmt: skip
    assert b.get(*range(12), deadline=0).all(HIT)
    with pytest.raises(urllib.error.HTTPError, match="409"):
        call(b.pool.http + "/v1/prefetch", {"namespace": digest, "keys": keys[:1], "request_id": "a router's"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        call(b.pool.http + f"/v1/prefetch/{digest}/nobody")


def test_pages_that_moved_go_first_where_they_came_from(nodes: tuple[Node, Node], node_of: Callable[..., Node], master: Signpost) -> None:
    _, copier = nodes
    source, mover = node_of("--eviction", "lru", dram="4MiB"), node_of("--fetch", "promote")
    source.store(*range(24))  # of 32 that fit
    master.add(source.pool, source.space, keys_of(*range(20, 24)))
    assert copier.get(20, 21).all(HIT)
    assert mover.get(22, 23).all(HIT)
    time.sleep(1.1)  # what was just put is not taken while anything else can go
    source.store(*range(100, 116))  # the ends of chains go first, and 20 to 23 are one
    assert source.space.lookup(keys_of(*range(20, 24))).tolist() == [True, True, False, False]


def test_pages_that_are_on_the_peer_s_disk_alone_come_from_there(master: Signpost, node_of: Callable[..., Node], tmp_path: Any) -> None:
    source, reader = node_of("--ssd", f"{tmp_path}:64MiB", "--ssd-admission", "always", dram="4MiB"), node_of()
    source.store(*range(10))
    written = 'umbp_used_bytes{tier="ssd"}'
    eventually(lambda: source.metric(written) >= 10 * SIZE, "they are on the disk")
    for start in range(100, 200, 10):
        source.store(*range(start, start + 10))
    assert not source.space.lookup(keys_of(*range(10))).any()  # not in DRAM any more
    master.add(source.pool, source.space, keys_of(*range(10)))
    assert reader.get(*range(10)).all(HIT)


# -- bad days ------------------------------------------------------------------------------------------------------------------------


def test_what_the_master_believes_wrongly_is_asked_for_elsewhere(nodes: tuple[Node, Node], third: Node, master: Signpost) -> None:
    a, b = nodes
    c = third
    a.store(1)
    c.store(2)
    master.add(a.pool, a.space, keys_of(1, 2, 3))  # 2 and 3 were evicted meanwhile
    master.add(c.pool, c.space, keys_of(2))
    assert b.get(1, 2, 3) == [HIT, HIT, MISS]
    assert ([a.pool.name], False) in [(exclude[1:], counts) for _, _, counts, exclude in master.asked]  # it was counted before


def test_a_killed_peer_costs_its_pages_and_little_time(nodes: tuple[Node, Node], node_of: Callable[..., Node], master: Signpost) -> None:
    """R-02: the first failure is found out once, then misses are quick; another replica is taken; all are told."""
    _, b = nodes
    c, d = node_of(), node_of()
    for node in (c, d):
        node.store(*range(100, 110))
    c.store(*range(100))
    b.store(*range(200, 250))
    master.add(c.pool, c.space, keys_of(*range(110)))
    master.add(d.pool, d.space, keys_of(*range(100, 110)))
    c.pool.kill()
    statuses = b.get(*range(200, 250), *range(110))
    assert statuses[:50].all(HIT)
    assert statuses[50:150].all(FAILED, MISS)  # who has waited to the deadline is BUSY
    assert statuses[150:].all(HIT)
    eventually(lambda: any(node == c.pool.name for node, _ in master.failed), "the master is told")
    for number in range(100):
        assert b.get(number).all(MISS, FAILED)


def test_a_peer_that_is_lost_in_the_middle_costs_nothing_where_another_has_its_pages(
    nodes: tuple[Node, Node], node_of: Callable[..., Node], master: Signpost
) -> None:
    _, b = nodes
    c, d = node_of(), node_of()
    for node in (c, d):
        node.store(*range(12))

    def lost() -> bool:
        """Once: false where the signpost was not asked in time, so that it did not come to it."""
        cable = Cable(c.pool, 6 * SIZE)
        master.table.clear()
        master.add(c.pool, c.space, keys_of(*range(12)), addresses={"http": cable.address})
        master.add(d.pool, d.space, keys_of(*range(12)))
        b.space.remove(keys_of(*range(12)))
        try:
            return bool(b.get(*range(12), deadline=20.0).all(HIT)) and cable.torn
        finally:
            cable.tear()

    eventually(lost, "all of them are there though it was lost in the middle")


def test_a_frozen_peer_costs_its_pages_and_the_deadline_holds(
    nodes: tuple[Node, Node], node_of: Callable[..., Node], master: Signpost
) -> None:
    """KV-16: a third of the pages is on a stopped node: the others in time, those within the deadline, nobody queued behind."""
    a, b = nodes
    c = node_of()
    a.store(*range(20))
    c.store(*range(20, 40))
    b.store(*range(40, 60))
    master.add(c.pool, c.space, keys_of(*range(20, 40)))
    master.add(a.pool, a.space, keys_of(*range(20)))
    c.pool.signal(signal.SIGSTOP)
    try:
        served = 0
        stop = threading.Event()

        def others() -> None:
            nonlocal served
            node = Node(b.pool, str(b.space.identity.tenant))
            while not stop.is_set():
                assert node.get(40, 41).all(HIT)
                with node.space.lease(keys_of(40, 41)) as lease:
                    assert lease.held.all()
                served += 1
                time.sleep(0.005)
            node.client.close()

        thread = threading.Thread(target=others)
        thread.start()
        eventually(lambda: served, "they are served")
        before = served

        def in_time() -> bool:
            """Whether the well one was heard in time, on a busy machine; all else is so whatever comes first."""
            b.space.remove(keys_of(*range(20)))
            with within(2.0):
                statuses = b.get(*range(60), deadline=2.0)
            assert statuses[20:40].all(FAILED, BUSY, MISS)
            assert statuses[40:].all(HIT)
            return bool(statuses[:20].all(HIT))

        eventually(in_time, "the pages of the other one come in time")
        meanwhile = served - before
        stop.set()
        thread.join(60)
        assert meanwhile >= 4  # who waits until the deadline of those pages is served once in that time
    finally:
        c.pool.signal(signal.SIGCONT)
    eventually(lambda: b.get(*range(20, 40)).all(HIT), "it is asked again when it is well")


def test_a_wrong_address_is_found_out_by_who_answers_there(nodes: tuple[Node, Node], third: Node, master: Signpost) -> None:
    a, b = nodes
    c = third
    a.store(1, 2, 3, 4)
    c.store(1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        master.add(a.pool, a.space, keys_of(1), addresses={"http": str(c.pool.ready["http"])})  # another pool
        master.add(c.pool, c.space, keys_of(1))
        master.add(a.pool, a.space, keys_of(2), addresses={"http": f"127.0.0.1:{deaf.getsockname()[1]}"}, node="deaf")
        master.add(a.pool, a.space, keys_of(3), addresses={"http": "not an address::"}, node="nonsense")
        master.add(a.pool, a.space, keys_of(4), addresses={"carrier-pigeon": "coop 7"}, node="pigeon")
        with within(8.0):
            statuses = b.get(1, 2, 3, 4, deadline=8.0)  # of which a place has two; then there is time to ask elsewhere
    assert statuses[0] == HIT
    assert statuses[1:].all(FAILED, MISS, BUSY)
    eventually(lambda: {"deaf", "nonsense", "pigeon", a.pool.name} <= {node for node, _ in master.failed}, "the master is told")


def test_a_peer_that_was_restarted_is_another(nodes: tuple[Node, Node], node_of: Callable[..., Node], master: Signpost) -> None:
    _, b = nodes
    c = node_of()
    c.store(1, 2)
    master.add(c.pool, c.space, keys_of(1, 2))
    assert b.get(1).all(HIT)
    c.pool.restart()
    assert b.get(2).all(FAILED, MISS)  # the plan was for its life before
    master.table.clear()
    master.add(c.pool, c.space, keys_of(1, 2))
    eventually(lambda: b.get(2).all(HIT), "it is asked again under its new boot id")


def test_a_peer_that_evicts_while_it_sends_gives_the_right_bytes_or_none(
    nodes: tuple[Node, Node], node_of: Callable[..., Node], master: Signpost
) -> None:
    _, b = nodes
    c = node_of(dram="8MiB")  # room for some 60 of the 400 pages that are put again and again
    stop, newest = threading.Event(), 0

    def churn() -> None:
        nonlocal newest
        node = Node(c.pool, str(c.space.identity.tenant))
        while not stop.is_set():
            newest = (newest + 8) % 400
            node.space.put(keys_of(*range(newest, newest + 8)), values_of(range(newest, newest + 8), SIZE))
        node.client.close()

    master.add(c.pool, c.space, keys_of(*range(408)))
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        came, went, rounds = 0, 0, 0

        def enough() -> bool:
            """One more round, of pages that are there or are just going."""
            nonlocal came, went, rounds
            numbers = [(newest - 8 * (rounds % 8) + each) % 400 for each in range(8)]
            hits = int(b.get(*numbers, deadline=5.0).where(HIT).sum())
            b.space.remove(keys_of(*numbers))
            came, went, rounds = came + hits, went + 8 - hits, rounds + 1
            return rounds >= 10 and came > 0 and went > 0

        eventually(enough, lambda: f"{came} pages came and {went} did not, in {rounds} rounds")
    finally:
        stop.set()
        thread.join(60)


def test_a_full_node_with_a_full_neighbour(node_of: Callable[..., Node], master: Signpost) -> None:
    c, d = node_of(dram="4MiB"), node_of(dram="4MiB")
    for start, node in ((0, c), (100, d)):
        node.store(*range(start, start + 28))
        master.add(node.pool, node.space, keys_of(*range(start, start + 28)))
    with d.space.lease(keys_of(*range(100, 128))) as lease:  # all that is there is leased: hardly anything can stay
        assert lease.held.all()
        assert d.get(*range(28), deadline=30.0).all(HIT), "they pass through"
        assert d.space.lookup(keys_of(*range(28))).sum() < 6
        assert lease.check().all()
    assert d.get(*range(10)).all(HIT)
    assert c.get(*range(100, 110)).all(HIT, MISS, BUSY)
    for node in (c, d):
        eventually(lambda node=node: node.client.status()["leases"] == 0, "nothing is held any more")


def test_a_master_that_is_slow_or_gone_leaves_what_is_here() -> None:
    with Signpost() as other, PoolProcess("--master", other.url, dram="8MiB") as pool:
        node = Node(pool, "lonely")
        node.store(1)
        other.delay = 20.0
        with within(4.0):
            assert node.get(1, 2, deadline=4.0) == [HIT, MISS]
        with within(2.0):  # where each asked the master it would be 5 s and more
            for _ in range(20):
                assert node.get(1, 2, deadline=4.0) == [HIT, MISS]
                assert node.space.locate(keys_of(1, 2)).tolist() == [Tier.DRAM, NOWHERE]
        node.client.close()
