"""Operators' pins over a restart of the pool: what holds on, what does not, and what becomes of a file that is of no use."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core.world import World, keys_of, open_namespace, put

import umbp
from tests.field import people
from tests.pools import PoolProcess
from umbp.pool import pins
from umbp.pool.pins import KeptPins

SIZE = 16 << 10


def kept_of(world: World, folder: Path, seed: int = 7) -> KeptPins:
    return KeptPins(world.pool.leases, str(folder / "umbp.x.segment"), seed)


def pages_of(world: World, number: int) -> int:
    return len(world.pool.leases.pins[number].ids)


@pytest.fixture
def world() -> World:
    return World(1 << 20, 512)


async def test_pins_hold_on_as_far_as_their_pages_are_there(world: World, tmp_path: Path) -> None:
    row = open_namespace(world.pool, "a", 256)
    assert set(put(world.pool, row, *range(10))) == {"stored"}
    kept = kept_of(world, tmp_path)
    lasting = world.pool.pin(100.0, 0, row, keys_of(1, 2, 3), 0.0, "prompt")
    timed = world.pool.pin(100.0, 0, row, keys_of(4), 50.0, "")
    over = world.pool.pin(100.0, 0, row, keys_of(5), 10.0, "")
    gone = world.pool.pin(100.0, 0, row, keys_of(6), 0.0, "")
    clients = world.pool.pin(100.0, 1, row, keys_of(7), 0.0, "")
    await kept.keep()
    world.pool.remove(row, keys_of(2, 6))
    assert put(world.pool, row, 2) == ["stored"]  # again, and so not what was pinned
    world.reboot(120.0)
    assert kept_of(world, tmp_path).restore(120.0) == 2
    assert set(world.pool.leases.pins) == {lasting.number, timed.number}
    assert {over.number, gone.number, clients.number}.isdisjoint(world.pool.leases.pins)
    assert pages_of(world, lasting.number) == 2
    assert (world.pool.leases.pins[lasting.number].note, world.pool.leases.pins[timed.number].expires) == ("prompt", 150.0)
    world.pool.check()
    assert world.pool.pin(120.0, 0, row, keys_of(8), 0.0, "").number > max(lasting.number, timed.number)
    world.pool.tick(151.0)
    assert timed.number not in world.pool.leases.pins
    world.pool.leases.unpin(lasting.number)
    world.pool.check()


async def test_a_file_of_another_segment_or_a_damaged_one_is_of_no_use(world: World, tmp_path: Path) -> None:
    row = open_namespace(world.pool, "a", 256)
    put(world.pool, row, 1)
    world.pool.pin(0.0, 0, row, keys_of(1), 0.0, "")
    kept = kept_of(world, tmp_path)
    assert kept.restore(0.0) == 0, "there is no file"
    await kept.keep()
    world.reboot(0.0)
    assert kept_of(world, tmp_path, seed=8).restore(0.0) == 0
    whole = kept.path.read_bytes()
    for damaged in (b"", whole[:6], whole[:-1], whole + b"x", b"\xff" * len(whole)):
        kept.path.write_bytes(damaged)
        assert kept_of(world, tmp_path).restore(0.0) == 0
    assert not world.pool.leases.pins
    kept.path.write_bytes(whole)
    assert kept_of(world, tmp_path).restore(0.0) == 1
    kept.forget()
    kept.forget()
    assert not kept.path.exists()


async def test_what_cannot_be_kept_is_said(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PAGES_MAX", 3)
    row = open_namespace(world.pool, "a", 256)
    put(world.pool, row, *range(10))
    kept = kept_of(world, tmp_path)
    world.pool.pin(0.0, 0, row, keys_of(1, 2), 0.0, "")
    await kept.keep()
    assert kept.warnings == []
    world.pool.pin(0.0, 0, row, keys_of(3, 4), 0.0, "")
    await kept.keep()
    assert kept.warnings == ["1 pins are not kept over a restart: 3 pinned pages are"]
    elsewhere = kept_of(world, tmp_path / "no such folder")
    await elsewhere.keep()
    assert "cannot be written" in elsewhere.warnings[0]
    assert len(world.pool.leases.pins) == 2


def rest(server: PoolProcess, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(server.http + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_what_an_operator_has_pinned_outlives_a_killed_pool() -> None:
    with PoolProcess(dram="1MiB") as server:
        keys = people.keys_of(1, 2)
        with umbp.connect(server.socket) as pool:
            space = people.open_namespace(pool, SIZE)
            assert {each.code for each in space.put(keys, people.values_of([1, 2], SIZE))} == {"stored"}
            row = space.operations.opened.row
            body = {"namespace": str(row), "keys": [key.tobytes().hex() for key in keys], "note": "system prompt"}
            made = rest(server, "POST", "/v1/pins", body)["pin"]
        server.kill()
        server.start()
        (pin,) = rest(server, "GET", "/v1/pins")["pins"]
        assert (pin["id"], pin["note"], pin["keys"]) == (made["id"], "system prompt", 2)
        with umbp.connect(server.socket) as pool:
            space = people.open_namespace(pool, SIZE)
            for number in range(100, 300):
                space.put(people.keys_of(number), people.values_of([number], SIZE))
            out = np.zeros((2, SIZE), np.uint8)
            assert space.get(keys, out).all(umbp.ReadStatus.HIT), "they were evicted"
            assert (out == people.values_of([1, 2], SIZE)).all()
        rest(server, "DELETE", f"/v1/pins/{pin['id']}")
        server.kill()
        server.start()
        assert rest(server, "GET", "/v1/pins")["total"] == 0
