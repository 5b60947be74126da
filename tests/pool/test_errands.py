"""Clients that receive pages of other nodes by themselves: real pools and clients, and what goes wrong while the bytes come."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.cable import HeldCable
from tests.field.people import IDENTITY, Child, all_leased, bytes_of, eventually, keys_of, open_namespace, read_back, values_of
from tests.masters import metric
from tests.pools import PoolProcess
from tests.signpost import Signpost
from umbp import Layout, ReadStatus, WriteStatus
from umbp.store import segment
from umbp.store.index import W_SUM, key_words, place_word

SIZE = 128 << 10
PAGES = 16
PATIENCE = 60.0
SHORT = 2.0  # of reads that are to fail
HIT, MISS, BUSY, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.BUSY, ReadStatus.FAILED


class Node:
    """A pool and a client of it, with a namespace."""

    def __init__(self, pool: PoolProcess, tenant: str, size: int = SIZE) -> None:
        self.pool, self.size, self.tenant = pool, size, tenant
        self.client = umbp.connect(pool.socket)
        self.space = open_namespace(self.client, size, tenant=tenant)

    def store(self, *numbers: int) -> None:
        assert self.space.put(keys_of(*numbers), values_of(numbers, self.size)).all(WriteStatus.STORED)

    def get(self, *numbers: int, deadline: float = PATIENCE) -> Any:
        return read_back(self.space, numbers, deadline)

    @property
    def errands(self) -> float:
        return metric(self.pool, "umbp_errands_total")

    def is_clean(self) -> bool:
        """Nothing of any write or read is left."""
        status = self.client.status()
        return [status[name] for name in ("reservations", "being_written", "abandoned", "leases")] == [0] * 4


@pytest.fixture(scope="module")
def master() -> Iterator[Signpost]:
    with Signpost() as made:
        yield made


@pytest.fixture(scope="module")
def pools(master: Signpost) -> Iterator[tuple[PoolProcess, PoolProcess]]:
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(PoolProcess("--master", master.url, dram="64MiB")) for _ in range(2))  # type: ignore[misc]


@pytest.fixture
def nodes(pools: tuple[PoolProcess, PoolProcess], request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """One that has pages, and one whose clients want them."""
    made = tuple(Node(pool, request.node.name) for pool in pools)
    yield made  # type: ignore[misc]
    for node in made:
        eventually(node.is_clean, "nothing is left")
        node.space.flush()
        node.client.close()


@pytest.fixture
def held(nodes: tuple[Node, Node], master: Signpost) -> Iterator[HeldCable]:
    """The pages 0 to 15 are on the first node, behind a cable that lets a third of them through and holds the rest."""
    a, _ = nodes
    a.store(*range(PAGES))
    cable = HeldCable(a.pool, PAGES * SIZE // 3)
    master.add(a.pool, a.space, keys_of(*range(PAGES)), addresses={"http": cable.address})
    yield cable
    cable.close()


def reconnect(master: Signpost, a: Node) -> None:
    """From now on the pages are had without the cable."""
    master.table.clear()
    master.add(a.pool, a.space, keys_of(*range(PAGES)))


def read_in_child(child: Child, path: str, tenant: str, deadline: float) -> None:
    """Get the pages; say which came, and that their bytes are right."""
    with umbp.connect(path) as client:
        space = open_namespace(client, SIZE, tenant=tenant)
        child.say("ready")
        child.say(read_back(space, range(PAGES), deadline).codes.tolist())
        child.hear()


# -- good days -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, SIZE, (1 << 20) + 512], ids=["small", "medium", "large"])
def test_a_client_receives_into_its_own_memory_and_the_pool_s(pools: tuple[PoolProcess, PoolProcess], master: Signpost, size: int) -> None:
    a, b = (Node(pool, "good", size) for pool in pools)
    count = max(4, (2 << 20) // size)
    for start in (0, count, 2 * count, 3 * count):  # by plans, then by a guess, on a connection that is kept
        numbers = range(start, start + count)
        a.store(*numbers)
        master.add(a.pool, a.space, keys_of(*numbers))
        before = b.errands
        assert b.get(*numbers).all(HIT)
        assert b.errands == before + 1
        assert b.space.lookup(keys_of(*numbers)).all()  # they are here now,
    out = np.zeros((4 * count, size), np.uint8)
    assert b.space.get(keys_of(*range(4 * count)), out, verify="always", deadline=0).all(HIT)  # whole, with their checksums
    assert (out == values_of(range(4 * count), size)).all()
    for node in (a, b):
        eventually(node.is_clean, "nothing is left")
        node.space.flush()
        node.client.close()


def test_holes_nobody_has_and_pages_that_are_here(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(1, 3, 4, 7)
    b.store(0)
    master.add(a.pool, a.space, keys_of(1, 3, 4, 7))
    before = b.errands
    statuses = b.get(0, 1, 2, 3, 4, 5, 6, 7)
    assert statuses.where(HIT).tolist() == [True, True, False, True, True, False, False, True]
    assert statuses.where(MISS).sum() == 3
    assert b.errands == before + 1


def test_more_than_one_errand_takes_are_several(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    numbers = range(100)  # 12.5 MiB of 64, an eighth of which is 8
    a.store(*numbers)
    master.add(a.pool, a.space, keys_of(*numbers))
    before = b.errands
    assert b.get(*numbers).all(HIT)
    assert b.errands == before + 2


@pytest.mark.parametrize(("checksum", "fetch"), [("off", "copy"), ("lazy", "pass_through")])
def test_a_peer_without_checksums_and_pages_that_are_not_to_stay(master: Signpost, checksum: str, fetch: str) -> None:
    source, here = PoolProcess("--checksum", checksum, dram="16MiB"), PoolProcess("--master", master.url, "--fetch", fetch, dram="16MiB")
    with source, here:
        a, b = Node(source, f"{checksum} {fetch}"), Node(here, f"{checksum} {fetch}")
        a.store(*range(4))
        master.add(a.pool, a.space, keys_of(*range(4)))
        assert b.get(*range(4)).all(HIT)
        assert b.errands == 1
        assert b.space.lookup(keys_of(*range(4))).tolist() == [fetch == "copy"] * 4
        a.client.close()
        b.client.close()


def test_pages_without_room_come_to_the_caller_alone(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(*range(PAGES))
    master.add(a.pool, a.space, keys_of(*range(PAGES)))
    before = b.errands
    with all_leased(b.client, SIZE):
        assert b.get(*range(PAGES)).all(HIT)
        assert b.errands == before + 1
        assert not b.space.lookup(keys_of(*range(PAGES))).any()


def test_a_client_that_is_handed_nothing_fetches_as_ever(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(1, 2)
    master.add(a.pool, a.space, keys_of(1, 2))
    link = b.client._link
    assert link.bond is not None
    link.bond = dataclasses.replace(link.bond, handover="00" * 32)  # nobody's secret
    before = b.errands
    assert b.get(1, 2).all(HIT)
    assert b.errands == before


# -- bad days ------------------------------------------------------------------------------------------------------------------------


def test_others_who_want_the_same_wait_for_it(nodes: tuple[Node, Node], held: HeldCable) -> None:
    a, b = nodes
    granted, before = metric(a.pool, "umbp_granted_pages_total"), b.errands
    with Child(read_in_child, b.pool.socket, b.tenant, PATIENCE) as child:
        assert child.hear() == "ready"
        assert held.held.wait(PATIENCE)
        results: list[Any] = []
        second = threading.Thread(target=lambda: results.append(b.get(*range(PAGES))))
        second.start()
        eventually(lambda: metric(b.pool, "umbp_fetching_pages") == PAGES, "the second waits")
        assert not b.space.lookup(keys_of(*range(PAGES))).any()  # nothing is seen before it is whole
        held.free()
        assert set(child.hear()) == {HIT}
        child.say("enough")
        second.join(PATIENCE)
        assert results[0].all(HIT)
    assert metric(a.pool, "umbp_granted_pages_total") == granted + PAGES
    assert b.errands == before + 1


def test_a_client_that_is_killed_leaves_nothing(nodes: tuple[Node, Node], held: HeldCable, master: Signpost) -> None:
    a, b = nodes
    with Child(read_in_child, b.pool.socket, b.tenant, PATIENCE) as child:
        assert child.hear() == "ready"
        assert held.held.wait(PATIENCE)
        child.kill()
    eventually(b.is_clean, "its memory is given back")
    reconnect(master, a)
    eventually(lambda: b.get(*range(PAGES)).all(HIT), "they are had by others")


def test_a_client_that_is_stopped_keeps_its_memory_and_nothing_else(nodes: tuple[Node, Node], held: HeldCable, master: Signpost) -> None:
    a, b = nodes
    with Child(read_in_child, b.pool.socket, b.tenant, PATIENCE) as child:
        assert child.hear() == "ready"
        assert held.held.wait(PATIENCE)
        child.signal(signal.SIGSTOP)
        reconnect(master, a)
        held.free()  # the rest lies in the kernel, for a client that is stopped
        eventually(lambda: b.client.status()["abandoned"] == PAGES, "it is late: others may write these pages")
        eventually(lambda: b.get(*range(PAGES)).all(HIT), "others have them")
        assert b.client.status()["abandoned"] == PAGES  # where it may still write nobody else does
        child.signal(signal.SIGCONT)
        assert set(child.hear()) <= {HIT, BUSY, FAILED, MISS}
        child.say("enough")
        eventually(b.is_clean, "it has let go")
    assert b.get(*range(PAGES), deadline=0).all(HIT)  # what others had is right


def test_a_peer_that_stops_sending_costs_the_deadline_and_no_more(nodes: tuple[Node, Node], held: HeldCable, master: Signpost) -> None:
    a, b = nodes
    statuses = b.get(*range(PAGES), deadline=SHORT)
    assert held.held.is_set()
    assert statuses.where(HIT).sum() < PAGES
    reconnect(master, a)
    eventually(lambda: b.get(*range(PAGES)).all(HIT), "it is asked again when it is well")


def test_an_errand_of_a_pool_that_is_stopped_is_ended_when_it_goes_on(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(0, 1)
    b.store(2)
    master.add(a.pool, a.space, keys_of(0, 1))
    assert b.get(0).all(HIT)  # the way is known
    b.pool.signal(signal.SIGSTOP)
    try:
        assert b.get(1, 2, deadline=0.05) == [BUSY, HIT]
    finally:
        b.pool.signal(signal.SIGCONT)
    eventually(lambda: b.get(1, 2).all(HIT), "it is asked for again")  # of which the end, `nodes`, sees that nothing is left


def test_a_client_in_a_hurry_is_no_reason_to_avoid_a_node(nodes: tuple[Node, Node], held: HeldCable, master: Signpost) -> None:
    _, b = nodes
    master.failed.clear()
    assert b.get(*range(PAGES), deadline=0.15).where(HIT).sum() < PAGES
    held.free()
    eventually(lambda: b.get(*range(PAGES)).all(HIT), "others have them")
    assert not master.failed  # of which this get would have waited for the end, before it asked who has the pages


def test_a_damaged_page_is_not_shown_to_anybody(nodes: tuple[Node, Node], master: Signpost) -> None:
    a, b = nodes
    a.store(*range(PAGES))
    damage(a, 5)
    master.add(a.pool, a.space, keys_of(*range(PAGES)))
    statuses = b.get(*range(PAGES), deadline=SHORT)
    assert statuses.where(HIT).tolist() == [number != 5 for number in range(PAGES)]
    assert b.space.lookup(keys_of(*range(PAGES))).tolist() == [number != 5 for number in range(PAGES)]


def damage(node: Node, number: int) -> None:
    """A byte of this page is another."""
    link = node.client._link
    assert link.bond is not None
    assert link.segment is not None
    found = segment.attach(link.segment.path, owner=False)
    try:
        number_of = link.number_of(link.bond, node.space._opened)
        hit = found.reader().find(key_words(keys_of(number)), number_of, place_word(number_of, SIZE))
        assert hit.hit.all()
        eventually(lambda: found.entries[hit.ids[0], W_SUM] != 0, "it has a checksum")
        found.data.array[int(hit.rows[0, 5]) + SIZE // 2] ^= 0xFF
        assert (found.data.array[int(hit.rows[0, 5]) : int(hit.rows[0, 5]) + 8] == bytes_of(number, SIZE)[:8]).all()
    finally:
        found.close()


@pytest.mark.parametrize("cancel", [True, False], ids=["cancelled", "pool gone"])
async def test_a_get_that_ends_early_leaves_nothing(nodes: tuple[Node, Node], held: HeldCable, master: Signpost, cancel: bool) -> None:
    a, b = nodes
    pool = await umbp.connect_async(b.pool.socket)
    space = await pool.namespace(**{**IDENTITY, "layout": Layout.opaque(SIZE), "tenant": b.tenant})
    out = np.zeros((PAGES, SIZE), np.uint8)
    task = asyncio.ensure_future(space.get(keys_of(*range(PAGES)), out, deadline=PATIENCE))
    assert await asyncio.to_thread(held.held.wait, PATIENCE)
    if cancel:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        pool._down()  # as when the connection broke
        assert (await task).where(HIT).sum() < PAGES
    await asyncio.to_thread(eventually, b.is_clean, "nothing is left")
    reconnect(master, a)
    assert (await space.get(keys_of(*range(PAGES)), out, deadline=PATIENCE)).all(HIT)
    assert (out == values_of(range(PAGES), SIZE)).all()
    await pool.close()


def test_flushed_pages_are_not_shown(nodes: tuple[Node, Node], held: HeldCable) -> None:
    _, b = nodes
    results: list[Any] = []
    reader = threading.Thread(target=lambda: results.append(b.get(*range(PAGES))))
    reader.start()
    assert held.held.wait(PATIENCE)
    b.space.flush()
    held.free()
    reader.join(PATIENCE)
    assert results[0].all(HIT)  # they are the bytes that were asked for,
    assert not b.space.lookup(keys_of(*range(PAGES))).any()  # and none is here under the new number
