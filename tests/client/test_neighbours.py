"""Pages of another pool of this machine, read where they lie: real pools, and all that becomes of one that is read from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import Child, becomes, eventually, keys_of, open_namespace, read_back, values_of
from tests.masters import MasterProcess, metric, metrics
from tests.pools import PoolProcess, together
from umbp import ReadStatus, Tier, WriteStatus, wire
from umbp.client.link import Link
from umbp.client.neighbours import Neighbours
from umbp.store import segment
from umbp.store.index import W_OFFSET, key_words, place_word

SIZE = 16 << 10
HIT, MISS = ReadStatus.HIT, ReadStatus.MISS
ON = ("--neighbours", "read")
AT_ONCE = 0.0  # the deadline of a get that waits for nothing


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    with MasterProcess() as made:
        yield made


@pytest.fixture(scope="module")
def pools(master: MasterProcess) -> Iterator[tuple[PoolProcess, PoolProcess]]:
    """One that has the pages, and one whose clients read them."""
    with together(there := master.pool(*ON, dram="4MiB"), here := master.pool(*ON)):
        master.synced(there, here)
        yield there, here


class Reader:
    """A client of one pool that reads from another, and one of this other that writes."""

    def __init__(self, there: PoolProcess, here: PoolProcess, tenant: str, **identity: Any) -> None:
        self.there, self.here = there, here
        self.writer, self.client = umbp.connect(there.socket), umbp.connect(here.socket)
        self.source, self.space = (open_namespace(each, SIZE, tenant=tenant, **identity) for each in (self.writer, self.client))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.writer.close()
        self.client.close()

    def store(self, *numbers: int, writer: int = 0) -> None:
        assert self.source.put(keys_of(*numbers), values_of(numbers, SIZE, writer=writer)).all(WriteStatus.STORED)

    def await_writer(self) -> None:
        """Until the other pool's client is with its latest life."""
        boot = int(self.there.ready["boot"])
        eventually(lambda: self.writer.connected and self.writer.boot == boot, "the writer is back")

    def meet(self, number: int = 999_999) -> None:
        """Until the client can read from its neighbour: who misses something asks its pool who they are."""

        def open_there() -> bool:
            self.space.get(keys_of(number), np.empty((1, SIZE), np.uint8), deadline=AT_ONCE)
            near = self.client._link.neighbours
            assert near is not None
            return any(each.told.name == self.there.name and each.link.ready() for each in near._all)

        eventually(open_there, lambda: f"it has a neighbour: {self.client._link.neighbours!r}, {self.here.log()[-2000:]}")

    def get(self, *numbers: int, deadline: float = AT_ONCE) -> Any:
        return read_back(self.space, numbers, deadline)


@pytest.fixture
def reader(pools: tuple[PoolProcess, PoolProcess], request: pytest.FixtureRequest) -> Iterator[Reader]:
    """With a namespace of its own."""
    with Reader(*pools, request.node.name[:64]) as made:
        made.meet()
        yield made


# -- good days -----------------------------------------------------------------------------------------------------------------------


def test_what_a_neighbour_has_is_read_there_without_a_call_and_stays_there(
    reader: Reader, master: MasterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f'umbp_neighbour_pages_total{{neighbour="{reader.there.name}"}}'
    before, hits = metrics(reader.here).get(name, 0.0), metric(reader.there, "umbp_hits_total")
    reader.store(*range(1, 41))
    reader.client.flush_notes()
    asked = metric(master, "umbp_master_asked_pages_total")
    calls: list[wire.Message] = []
    call = reader.client.call
    monkeypatch.setattr(reader.client, "call", lambda step: (calls.append(step.message), call(step))[1])
    assert reader.get(*range(1, 41)).all(HIT)
    assert calls == []
    assert reader.client.statistics().read_near == 40
    assert not reader.space.lookup(keys_of(*range(1, 41))).any(), "and are not copied"
    assert reader.space.lookup(keys_of(*range(1, 42)), tier=Tier.NEIGHBOUR).tolist() == [True] * 40 + [False]
    assert reader.space.prefix(keys_of(*range(1, 42)), tier=Tier.NEIGHBOUR) == 40
    assert reader.space.locate(keys_of(1, 40, 41)).tolist() == [Tier.NEIGHBOUR, Tier.NEIGHBOUR, 255]
    eventually(lambda: metrics(reader.here).get(name, 0.0) == before + 40, "the pool knows of it")
    eventually(lambda: metric(master, "umbp_master_asked_pages_total") == asked + 40, "and their master, whose policies go by it")
    (said,) = (each for each in reader.client.status()["neighbours"] if each["name"] == reader.there.name)
    assert said == {"name": reader.there.name, "there": True, "pages": before + 40, "bytes": (before + 40) * SIZE}
    eventually(lambda: metric(reader.there, "umbp_hits_total") == hits + 40, "so does the neighbour, as with its own clients")
    assert metrics(reader.here).get('umbp_fetched_pages_total{source="peers"}', 0.0) == 0


def test_pages_of_both_pools_come_in_one_get_whole_and_in_order(reader: Reader) -> None:
    reader.store(*range(1, 200, 2))
    assert reader.space.put(keys_of(*range(2, 200, 2)), values_of(range(2, 200, 2), SIZE)).all(WriteStatus.STORED)
    statuses = reader.get(*range(1, 220))
    assert statuses[:199].all(HIT)
    assert statuses[199:].all(MISS)
    assert reader.client.statistics().read_near == 100


def test_rows_of_any_kind_are_filled(reader: Reader) -> None:
    reader.store(1, 2, 3)
    rows: list[Any] = [bytearray(SIZE), bytearray(SIZE), np.zeros(SIZE, np.uint8), bytearray(SIZE)]
    assert list(reader.space.get(keys_of(3, 404, 1, 2), rows, deadline=AT_ONCE)) == [HIT, MISS, HIT, HIT]
    for row, number in ((rows[0], 3), (rows[2], 1), (rows[3], 2)):
        assert bytes(row) == values_of([number], SIZE)[0].tobytes()


async def test_clients_for_asyncio_read_there_too(pools: tuple[PoolProcess, PoolProcess]) -> None:
    with umbp.connect(pools[0].socket) as writer:
        source = open_namespace(writer, SIZE, tenant="aio")
        assert source.put(keys_of(*range(20)), values_of(range(20), SIZE)).all(WriteStatus.STORED)
    async with await umbp.connect_async(pools[1].socket) as client:
        space = await client.namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE), tenant="aio")
        out = np.zeros((20, SIZE), np.uint8)

        async def come() -> bool:
            return bool((await space.get(keys_of(*range(20)), out, deadline=AT_ONCE, verify="always")).all(HIT))

        await becomes(come, "all pages have come")
        assert (out == values_of(range(20), SIZE)).all()
        assert client.statistics().read_near == 20


def test_in_the_child_of_a_fork_they_are_read_too(reader: Reader) -> None:
    reader.store(1, 2)

    def read(child: Child) -> None:
        reader.meet()
        child.say(reader.get(1, 2).codes.tolist())
        child.say(reader.client.statistics().read_near)

    with Child(read) as child:
        assert child.hear() == [HIT, HIT]
        assert child.hear() == 2
    assert reader.get(1, 2).all(HIT), "and by the parent, as before"


# -- what counts ---------------------------------------------------------------------------------------------------------------------


def test_what_the_neighbour_has_let_go_is_a_miss(reader: Reader) -> None:
    reader.store(1, 2, 3)
    assert reader.get(1, 2, 3).all(HIT)
    reader.source.remove(keys_of(2))
    assert list(reader.get(1, 2, 3)) == [HIT, MISS, HIT]
    reader.source.flush()
    assert reader.get(1, 2, 3).all(MISS)
    reader.store(1)
    assert list(reader.get(1, 2)) == [HIT, MISS], "and found again under the namespace's next number"


def test_a_namespace_that_differs_is_another_one_there(reader: Reader) -> None:
    reader.store(1)
    other = open_namespace(reader.client, SIZE, tenant="another")
    assert read_back(other, [1], AT_ONCE).all(MISS)
    names = reader.writer.status()["namespaces_total"]
    assert read_back(open_namespace(reader.client, SIZE, tenant="nobody's"), [1], AT_ONCE).all(MISS)
    assert reader.writer.status()["namespaces_total"] == names, "nothing is opened there"


@pytest.mark.parametrize("verify", ["always", "sampled"])
def test_damaged_pages_are_found_and_dropped_where_they_are(reader: Reader, verify: str) -> None:
    numbers = [*range(1, 65)]
    reader.store(*numbers)
    out = np.zeros((64, SIZE), np.uint8)
    eventually(lambda: reader.space.get(keys_of(*numbers), out, verify="always", deadline=AT_ONCE).all(HIT), "all have checksums")
    _damage(reader, 5)
    eventually(lambda: reader.space.get(keys_of(*numbers), out, verify=verify, deadline=AT_ONCE)[4] == MISS, "the damaged one is not taken")
    eventually(lambda: not reader.source.lookup(keys_of(5)).any(), "it is there no more")
    assert reader.source.lookup(keys_of(4, 6)).all()


def _damage(reader: Reader, number: int) -> None:
    """One byte of a page in the other pool's memory is another."""
    bond = reader.writer._link.bond_now()
    opened = reader.source._opened
    found = bond.index.find(key_words(keys_of(number)), (at := reader.writer._link.number_of(bond, opened)), place_word(at, SIZE))
    assert found.hit.all()
    bond.data[int(found.rows[0, W_OFFSET]) + 77] ^= 1


def test_pages_that_change_while_they_are_read_are_right_or_not_there(reader: Reader) -> None:
    done = [0]

    def write() -> None:  # some two hundred pages are there at a time
        for start in range(0, 800, 8):
            reader.source.put(keys_of(*range(start, start + 8)), values_of(range(start, start + 8), SIZE))
            done[0] = start + 8

    thread = threading.Thread(target=write)
    thread.start()
    hits = 0
    while thread.is_alive():
        hits += int(reader.get(*range(max(0, done[0] - 240), done[0] + 1)).where(HIT).sum())
    thread.join()
    assert done == [800]
    last = reader.get(*range(792, 800))
    assert last.all(HIT)
    assert reader.client.statistics().read_near == hits + 8


# -- bad days ------------------------------------------------------------------------------------------------------------------------


def test_a_frozen_neighbour_is_read_on_and_a_dead_one_comes_back(master: MasterProcess) -> None:
    with together(there := master.pool(*ON), here := master.pool(*ON)), Reader(there, here, "freeze") as reader:
        reader.store(*range(8))
        reader.meet()
        there.signal(signal.SIGSTOP)
        try:
            for _ in range(20):
                assert reader.get(*range(8)).all(HIT)
        finally:
            there.signal(signal.SIGCONT)
        there.restart()  # with its memory, under another boot

        def back() -> bool:
            return bool(reader.get(*range(8)).all(HIT))

        before = reader.client.statistics().read_near
        eventually(back, "what it has kept is read again")
        assert reader.client.statistics().read_near > before
        reader.await_writer()
        reader.store(*range(8, 12))
        there.restart("--dram", "8MiB")  # all is gone
        reader.await_writer()
        reader.get(*range(12))  # asserts that what is a hit has the bytes that were put
        numbers = keys_of(*range(12))
        new = values_of(range(12), SIZE, writer=7)
        assert reader.source.put(numbers, new).all(WriteStatus.STORED), "others are put under these keys"
        out = np.zeros_like(new)

        def come() -> bool:
            return bool(reader.space.get(numbers, out, deadline=AT_ONCE).all(HIT))

        eventually(come, "and are read")
        assert (out == new).all()


def test_who_was_told_of_another_than_it_finds_reads_nothing_there(
    pools: tuple[PoolProcess, PoolProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = pools[0]
    boot = int(there.ready["boot"])
    caplog.set_level("INFO", "umbp.client.neighbours")
    near = Neighbours(Link(pools[1].socket, "test"))
    try:
        near.told(
            [
                wire.Neighbour("another", boot, there.socket),
                wire.Neighbour(there.name, boot + 1, there.socket),
                wire.Neighbour("nobody", boot, str(tmp_path / "none.sock")),
            ]
        )
        eventually(lambda: len(caplog.records) >= 3, "all three were tried")
        said = "\n".join(record.getMessage() for record in caplog.records)
        assert said.count(f"{there.name} of boot {boot} answers") == 2
        assert "no pool answers on" in said
        assert not any(each.link.ready() for each in near._all)
        near.told([wire.Neighbour(there.name, boot, there.socket)])
        eventually(lambda: near._all[0].link.ready(), "the right one is open")
        assert len(near._all) == 1
    finally:
        near.close()


def test_memory_that_is_not_the_pool_s_is_not_mapped(
    pools: tuple[PoolProcess, PoolProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that has the pool's socket and a shared memory of its own, where another pool of this name has been."""
    there = pools[0]
    folder = tmp_path / "shm"
    folder.mkdir()
    geometry = segment.Geometry(data_bytes=1 << 20, entries=16, namespaces=4, sessions=4)
    segment.create(str(folder), there.name, geometry, boot=int(there.ready["boot"]) - 1, seed=1).close()
    assert (folder / there.segment.name).exists()
    monkeypatch.setenv("UMBP_SHM_DIR", str(folder))
    with pytest.raises(umbp.Unavailable, match="another pool's memory"):
        umbp.connect(there.socket)


def test_a_pool_that_has_it_off_neither_reads_nor_is_read(pools: tuple[PoolProcess, PoolProcess], master: MasterProcess) -> None:
    with master.pool("--neighbours", "off") as off:
        master.synced(off)
        for own, other in ((off, pools[0]), (pools[1], off)):
            with Reader(other, own, f"off {own.name}") as reader:
                reader.store(1)
                eventually(partial(_comes, reader), "it comes as from any node")
                assert reader.client.statistics().read_near == 0
                assert reader.space.lookup(keys_of(1)).all()


def _comes(reader: Reader) -> bool:
    return bool(reader.get(1, deadline=60.0).all(HIT))


def test_a_client_that_ends_leaves_no_session_there(pools: tuple[PoolProcess, PoolProcess]) -> None:
    with umbp.connect(pools[0].socket) as watcher:
        sessions = watcher.status()["sessions"]
        with Reader(*pools, "ends") as reader:
            reader.meet()
        eventually(lambda: watcher.status()["sessions"] == sessions, "its sessions are over")
