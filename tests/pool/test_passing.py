"""Pages from elsewhere where DRAM has no room for them: they pass through, for whoever waits, and nothing that is leased goes for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import umbp
from tests.field.people import Child, all_leased, eventually, keys_of, open_namespace, read_back, values_of
from tests.pools import PoolProcess
from umbp.core.passage import passage_bytes
from umbp.types import ReadStatus, Tier, WriteStatus

SIZE = 64 << 10
DRAM = 16 << 20
COUNT = 120  # pages on SSD
PASSAGE = passage_bytes(DRAM) // SIZE
HIT, BUSY = ReadStatus.HIT, ReadStatus.BUSY


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    """Pages 0 to COUNT are on its SSD."""
    folder = tmp_path_factory.mktemp("ssd")
    options = ("--ssd", f"{folder}:64MiB", "--ssd-admission", "always", "--watermark-high", "1", "--ssd-files", "off")
    with PoolProcess(*options, dram="16MiB") as made:
        with umbp.connect(made.socket) as client:
            space = open_namespace(client, SIZE)
            assert space.put(keys_of(*range(COUNT)), values_of(range(COUNT), SIZE)).all(WriteStatus.STORED)
            eventually(lambda: client.status()["ssd"]["keys"] == COUNT, "they are on SSD")
        yield made
        assert "Traceback" not in made.log(), made.log()


def got(space: Any, numbers: range, deadline: float = 30.0) -> Any:
    return read_back(space, numbers, deadline)


def nothing_is_held(client: umbp.Pool, leases: int) -> None:
    eventually(lambda: client.status()["leases"] == leases, "nothing that passed through is held any more")


def test_a_get_of_more_than_passes_at_once(server: PoolProcess) -> None:
    assert COUNT > 4 * PASSAGE
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as client, all_leased(holder, SIZE) as leased:
        space, held = open_namespace(client, SIZE), holder.status()["leases"]
        assert (space.locate(keys_of(*range(COUNT))) == Tier.SSD).all()
        assert got(space, range(COUNT)).all(HIT)
        nothing_is_held(client, held)
        eventually(lambda: (space.locate(keys_of(*range(COUNT))) == Tier.SSD).all(), "they did not stay")
        other = open_namespace(holder, SIZE, tenant="leased")
        assert got(other, range(leased[0], leased[-1] + 1)).all(HIT), "what was leased is there"
    with umbp.connect(server.socket) as client:
        space = open_namespace(client, SIZE)
        assert got(space, range(COUNT)).all(HIT)
        assert (space.locate(keys_of(*range(COUNT))) == Tier.DRAM).all(), "where there is room they stay"


def test_who_comes_at_the_same_time_takes_turns(server: PoolProcess) -> None:
    """More clients than can pass at once, for the same pages and for different ones."""
    found: list[Any] = []

    def read(client: umbp.Pool, numbers: range) -> None:
        found.append(got(open_namespace(client, SIZE), numbers))

    with contextlib.ExitStack() as stack:
        holder, *clients = (stack.enter_context(umbp.connect(server.socket)) for _ in range(5))
        with all_leased(holder, SIZE):
            held = holder.status()["leases"]
            parts = (range(60), range(60), range(60, COUNT), range(30, 90))
            threads = [threading.Thread(target=read, args=each) for each in zip(clients, parts, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 4
            assert all(statuses.all(HIT) for statuses in found)
            nothing_is_held(holder, held)


def stopped(child: Child, socket: str) -> None:
    with umbp.connect(socket) as client:
        space = open_namespace(client, SIZE)
        child.say("ready")
        while True:
            child.say(got(space, range(COUNT)).all(HIT))


def test_a_client_that_is_stopped_keeps_the_others_waiting_for_a_moment_only(server: PoolProcess) -> None:
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as client, all_leased(holder, SIZE):
        held = holder.status()["leases"]
        with Child(stopped, server.socket) as child:
            assert child.hear() == "ready"
            child.signal(signal.SIGSTOP)
            assert got(open_namespace(client, SIZE), range(COUNT)).all(HIT)
            child.signal(signal.SIGCONT)
            while not child.hear():  # what was taken from it meanwhile is missing, and not wrong
                pass
        nothing_is_held(holder, held)


def test_who_does_not_take_pages_so_is_told_that_there_is_no_room(server: PoolProcess) -> None:
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as client, all_leased(holder, SIZE):
        space = open_namespace(client, SIZE)
        eventually(lambda: (space.locate(keys_of(*range(4))) == Tier.SSD).all(), "nothing of before is passing through any more")
        space.prefetch(keys_of(*range(4)), request_id="full")
        done = eventually(lambda: (now := space.prefetch_status("full")).over and now, "it is over")
        assert not done.there.any()
        with space.lease(keys_of(*range(4))) as lease:
            assert not lease.held.any()
