"""Pages on SSD that a client would read from the files by itself, of a pool that is stopped: by the deadline, and nothing stays held."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest

import umbp
from tests.client.test_straight import COUNT, KEYS, SIZE, nothing_is_held, read, served, store
from tests.field.people import open_namespace, values_of
from tests.pools import PoolProcess
from umbp.client import straight
from umbp.store.file_refs import FileRefs
from umbp.types import I64, U8, ReadStatus

HIT, BUSY = ReadStatus.HIT, ReadStatus.BUSY


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    with served(tmp_path_factory.mktemp("ssd"), "--fetch", "pass_through") as made:
        store(made)
        made.kill()  # as after a reboot: nothing is in DRAM
        made.segment.unlink()
        made.restart()
        yield made


@pytest.fixture
def client(server: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[umbp.Pool]:
    """One whose connection stays however long this machine takes."""
    monkeypatch.setattr("umbp.client.connection.CALL_SECONDS_MAX", 600.0)
    with umbp.connect(server.socket) as made:
        yield made
        nothing_is_held(made)
        assert made.statistics().connects == 1


@pytest.mark.parametrize("known", [False, True], ids=["the first read", "a later one"])
def test_a_get_ends_by_its_deadline(server: PoolProcess, client: umbp.Pool, known: bool) -> None:
    """Before there is a connection for descriptors, and when there is."""
    space, out = open_namespace(client, SIZE), np.zeros((COUNT, SIZE), np.uint8)
    if known:
        assert space.get(KEYS[:1], out[:1], deadline=30.0).all(HIT)
    server.signal(signal.SIGSTOP)
    try:
        assert space.get(KEYS, out, deadline=0.05).all(BUSY)
    finally:
        server.signal(signal.SIGCONT)
    assert space.get(KEYS, out, deadline=30.0).all(HIT)
    assert (out == values_of(range(COUNT), SIZE)).all()


def test_what_was_read_does_not_count_where_the_pool_cannot_be_asked(server: PoolProcess, client: umbp.Pool) -> None:
    space = open_namespace(client, SIZE)

    def reader(refs: FileRefs, which: I64) -> U8:
        codes = straight.read_refs(refs, [np.zeros(SIZE, np.uint8) for _ in which])
        server.signal(signal.SIGSTOP)
        return codes

    try:
        codes = read(client, space, reader, 0.5)
    finally:
        server.signal(signal.SIGCONT)
    assert not (codes == HIT).any()
    assert client.statistics().read_straight == 0
