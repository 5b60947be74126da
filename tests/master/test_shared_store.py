"""Several masters behind one Redis: any of them answers, one of them sweeps, and the death of any is nobody's loss."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import umbp
from tests.master.test_cluster import IDENTITY, PAGE, put
from tests.masters import DEAD_AFTER, MasterProcess, call, metrics, reported, until
from tests.pools import PoolProcess, together
from tests.redis_process import RedisProcess
from umbp.core.master import Master
from umbp.errors import ConfigError, Unavailable
from umbp.layout import Namespace
from umbp.master import protocol as say
from umbp.master.config import load_master_config
from umbp.master.following import Follower
from umbp.master.service import MasterService
from umbp.master.shared import READ_ENTRIES, SharedLog


@dataclass
class World:
    """Two masters behind one store; a pool that begins with the first one, and one that knows the second alone."""

    store: RedisProcess
    masters: tuple[MasterProcess, MasterProcess]
    a: PoolProcess
    b: PoolProcess

    def of_a(self) -> tuple[MasterProcess, MasterProcess]:
        """The master that the pool a speaks to, and the other one."""
        boot = call(self.a.http + "/v1/cluster")["master"]
        one, two = self.masters
        return (one, two) if one.ready["boot"] == boot else (two, one)

    def synced(self) -> None:
        for master in self.masters:
            master.synced(self.a, self.b)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ExitStack() as stack:
        store = stack.enter_context(RedisProcess())
        one, two = (MasterProcess("--store", store.url) for _ in range(2))
        made = World(store, (one, two), of(one, two), of(two))
        stack.enter_context(together(one, two, made.a, made.b))
        made.synced()
        yield made


def of(*masters: MasterProcess) -> PoolProcess:
    """A pool of these masters, the first one first."""
    return PoolProcess("--master", ",".join(master.http for master in masters), dram="16MiB")


def since(pool: PoolProcess) -> dict[str, int]:
    """How often it has joined, had no answer, and gone on to the next master: at one moment."""
    found = metrics(pool)
    return {what: int(found[f'umbp_reported_total{{what="{what}"}}']) for what in ("joins", "unanswered", "masters")}


def route(master: MasterProcess, keys: Any, requester: str = "") -> list[str]:
    """Nodes of the runs."""
    body = {"namespace": Namespace(**IDENTITY).digest().hex(), "keys": [bytes(key).hex() for key in keys], "requester": requester}
    return [run["node"] for run in master.post("/v1/route", body)["runs"]]


def swap(master: MasterProcess, kind: str, name: str) -> None:
    """Have it: a store that is late for a moment refuses that."""
    until(lambda: master.post(f"/v1/policies/{kind}", {"name": name}, "PUT"))


def drain(master: MasterProcess, pool: PoolProcess, method: str = "POST") -> None:
    until(lambda: master.post(f"/v1/nodes/{pool.name}/drain", method=method))


def test_any_master_answers_for_every_pool(world: World) -> None:
    (one, two), a, b = world.masters, world.a, world.b
    first, second = put(a, 1, 2), put(b, 11)
    for master in world.masters:
        until(lambda master=master: master.locations(bytes(first[1])) == {(a.name, "dram")})
        until(lambda master=master: master.locations(bytes(second[0])) == {(b.name, "dram")})
        assert route(master, first) == [a.name]
    until(lambda: set(one.get("/v1/cluster")["masters"]) == {one.http, two.http})
    drain(one, b)
    swap(one, "routing", "local_first")
    until(lambda: two.nodes()[b.name]["state"] == "draining" and two.get("/v1/cluster")["policies"]["routing"] == "local_first")
    drain(two, b, "DELETE")
    until(lambda: one.nodes()[b.name]["state"] == "alive")


def test_what_the_active_master_advises_reaches_pools_that_speak_to_another_one(world: World) -> None:
    one, two = world.masters
    with ExitStack() as more:
        a = world.a if world.of_a()[0] is one else more.enter_context(of(one))  # it may have gone on to the second one by now
        one.synced(a)
        two.synced(a)
        _advised_to_both(one, two, a, world.b)


def _advised_to_both(one: MasterProcess, two: MasterProcess, a: PoolProcess, b: PoolProcess) -> None:
    swap(one, "placement", "rendezvous")
    until(lambda: two.get("/v1/cluster")["policies"]["placement"] == "rendezvous")
    fresh = itertools.count(51)

    def both_copied() -> bool:
        """New pages have a place each, about a half of them not where they were put; those of a node that is late are left there."""
        for pool in (a, b):  # one of them speaks to a master that does not advise
            put(pool, next(fresh))
        return reported(a, "copied") > 0 < reported(b, "copied")

    until(both_copied)
    assert any(master.get("/v1/cluster")["advice"]["copy"] for master in (one, two))
    swap(two, "placement", "local_first")


def test_a_master_that_freezes_is_noticed_by_its_pools_within_two_heartbeats(world: World) -> None:
    """Frozen: its connections stay open, so that nothing but the time of an answer tells. Each beat waits for one heartbeat at most."""
    a, (frozen, other) = world.a, world.of_a()
    before, beats = since(a), reported(a, "beats")
    frozen.signal(signal.SIGSTOP)
    try:
        until(lambda: since(a)["masters"] > before["masters"])
        keys = put(a, 41)
        until(lambda: other.locations(bytes(keys[0])) == {(a.name, "dram")})
        until(lambda: reported(a, "beats") > beats + 10)
        now = since(a)
        # Each that is not answered is the last one there for now; on a machine with much else to do the other one may be late as well.
        assert now["unanswered"] - before["unanswered"] == now["masters"] - before["masters"] <= 6
        assert now["joins"] == before["joins"]
        assert f"{a.name} dead" not in other.log()
    finally:
        frozen.signal(signal.SIGCONT)
    until(lambda: frozen.locations(bytes(keys[0])) == {(a.name, "dram")})  # by the log, when it is back


def test_pools_go_on_with_the_next_master_where_the_one_before_ended(world: World) -> None:
    a, b, (killed, other) = world.a, world.b, world.of_a()
    first = put(a, 1, 2)
    before = since(a)
    killed.kill()
    swap(other, "routing", "random")
    drain(other, a)
    third = put(a, 21)
    until(lambda: other.locations(bytes(third[0])) == {(a.name, "dram")})
    now = since(a)
    assert now["unanswered"] - before["unanswered"] == now["masters"] - before["masters"] > 0
    assert now["joins"] == before["joins"]  # the registration is the same everywhere
    b.kill()
    until(lambda: other.states()[b.name] == "dead")  # it sweeps now, whoever did before
    killed.start()
    killed.synced(a)
    until(lambda: killed.locations(bytes(third[0])) == {(a.name, "dram")})  # it has asked for all by the log
    until(lambda: killed.get("/v1/cluster")["policies"]["routing"] == "random")  # and knows what was decided without it
    until(lambda: killed.states()[a.name] == "draining")
    drain(killed, a, "DELETE")
    swap(killed, "routing", "fastest")
    client = umbp.connect(a.socket)
    out = [bytearray(PAGE) for _ in first]
    assert client.namespace(**IDENTITY).get(first, out).all(umbp.ReadStatus.HIT)
    client.close()


def test_masters_answer_without_the_store_and_know_all_again_when_it_comes_back_empty(world: World) -> None:
    (one, two), a = world.masters, world.a
    keys = put(a, 3, 4)
    for master in world.masters:
        until(lambda master=master: len(master.locations(bytes(keys[1]))) == 1)
    swap(one, "routing", "random")
    until(lambda: two.get("/v1/cluster")["policies"]["routing"] == "random")
    world.store.kill()
    until(lambda: any("store" in line for line in call(one.http + "/readyz")["warnings"]))
    assert route(one, keys) == route(two, keys) == [a.name]
    late = put(a, 31)  # the pool serves its own
    joins = reported(a, "joins")
    world.store.start()
    until(lambda: reported(a, "joins") > joins)  # it is not in the table of members any more
    for master in world.masters:
        until(lambda master=master: master.locations(bytes(late[0])) == {(a.name, "dram")} and master.nodes()[a.name]["source"])
    until(lambda: not any(call(master.http + "/readyz")["warnings"] for master in world.masters))
    until(lambda: world.store("HGET", "umbp:decisions", "swap:routing") == b"random")  # for masters that start from now on
    swap(two, "routing", "fastest")
    until(lambda: one.get("/v1/cluster")["policies"]["routing"] == "fastest")


def warned(master: MasterProcess) -> bool:
    """It says that its store does not answer, and why."""
    return any("store" in line and not line.endswith(": ") for line in call(master.http + "/readyz")["warnings"])


def test_a_frozen_store_costs_no_heartbeat_and_nobody_is_taken_for_dead(world: World) -> None:
    a, masters = world.a, world.masters
    keys = put(a, 6, 7)
    for master in masters:
        until(lambda master=master: len(master.locations(bytes(keys[1]))) == 1)
    world.store.signal(signal.SIGSTOP)
    try:
        until(lambda: all(map(warned, masters)))
        died, beats, frozen = [master.log().count(" dead: ") for master in masters], reported(a, "beats"), time.monotonic()
        until(lambda: time.monotonic() > frozen + DEAD_AFTER + 0.3)
        until(lambda: reported(a, "beats") > beats + 5)
        for master in masters:
            until(lambda master=master: route(master, keys) == [a.name])
        late = put(a, 32)  # the pool serves its own
        assert [master.log().count(" dead: ") for master in masters] == died
    finally:
        world.store.signal(signal.SIGCONT)
    for master in masters:
        until(lambda master=master: master.locations(bytes(late[0])) == {(a.name, "dram")})
    until(lambda: not any(map(warned, masters)))


def test_a_full_store_is_said_and_waited_for(world: World) -> None:
    a, masters = world.a, world.masters
    world.store("CONFIG", "SET", "maxmemory", "1")
    until(lambda: all(map(warned, masters)))
    late = put(a, 33)
    with pytest.raises(urllib.error.HTTPError):  # what cannot be told to the others is not done here alone
        masters[0].post("/v1/policies/routing", {"name": "random"}, "PUT")
    assert masters[0].get("/v1/cluster")["policies"]["routing"] != "random"
    world.store("CONFIG", "SET", "maxmemory", "0")
    for master in masters:
        until(lambda master=master: master.locations(bytes(late[0])) == {(a.name, "dram")})
    until(lambda: not any(map(warned, masters)))


def test_a_store_that_the_log_fills_is_made_room_in(world: World) -> None:
    a, (one, two) = world.a, world.masters
    for _ in range(40):
        world.store("XADD", "umbp:log", "*", "k", "resync", "n", "nobody", "p", bytes(100_000), "m", "x")
    world.store("CONFIG", "SET", "maxmemory", int(world.store("INFO", "memory")["used_memory"]) - 1_500_000)
    keys = put(a, 34)
    until(lambda: one.locations(bytes(keys[0])) == two.locations(bytes(keys[0])) == {(a.name, "dram")})
    world.store("CONFIG", "SET", "maxmemory", "0")


def test_a_master_that_has_missed_a_part_of_the_log_finds_that_out(world: World) -> None:
    a, (here, stopped) = world.a, world.of_a()
    until(lambda: stopped.nodes()[a.name]["source"])
    stopped.signal(signal.SIGSTOP)
    try:
        swap(here, "routing", "tier_priority")
        keys = put(a, 8)
        until(lambda: here.locations(bytes(keys[0])))
        world.store("XTRIM", "umbp:log", "MAXLEN", 0)
        for _ in range(2 * READ_ENTRIES):  # as much as a busy cluster says in a moment
            world.store("XADD", "umbp:log", "*", "k", "resync", "n", "nobody", "p", b"", "m", "x")
    finally:
        stopped.signal(signal.SIGCONT)
    until(lambda: stopped.get("/v1/cluster")["policies"]["routing"] == "tier_priority")
    until(lambda: stopped.locations(bytes(keys[0])) == {(a.name, "dram")})
    swap(here, "routing", "fastest")


def test_what_one_master_was_asked_is_hot_at_the_other(world: World) -> None:
    a, (one, two) = world.a, world.masters
    keys = put(a, 9, 10)
    until(lambda: len(one.locations(bytes(keys[1]))) == len(two.locations(bytes(keys[1]))) == 1)
    for _ in range(3):
        until(lambda: route(one, keys) == [a.name])

    def accesses(master: MasterProcess) -> list[int]:
        return [document["accesses"] for key in keys for document in master.get(f"/v1/keys/{bytes(key).hex()}")["keys"]]

    asked = accesses(one)
    assert min(asked) >= 3
    until(lambda: accesses(two) == asked)
    assert accesses(one) == asked  # not told back
    until(lambda: bytes(keys[0]).hex() in {key["key"] for key in two.get("/v1/hot")["keys"]})


async def test_a_resync_that_could_not_be_asked_for_is_asked_for_at_once_when_it_can_be(world: World) -> None:
    """As where a master starts: it follows the others a moment before it is one of them. Asked again in seconds, it would know nothing."""
    store = SharedLog(world.store.url, lambda: "http://127.0.0.1:1", prefix="alone")
    service = MasterService(Master(time.monotonic(), boot=1, seed=1, keys_max=100), store=store)
    service.joined(say.Join(node="a", boot=1, place="p", addresses={}, tiers=[]), 1)
    follower = Follower(service, store)
    entered = lambda: [fields[b"k"] for _, fields in world.store("XRANGE", "alone:log", "-", "+")]  # noqa: E731
    try:
        with pytest.raises(Unavailable):
            await follower._ask_if_wanted("a")
        assert entered() == []
        await store.attend()
        await follower._ask_if_wanted("a")
        await follower._ask_if_wanted("a")
        assert entered() == [b"resync"]  # and not each time that something is heard
    finally:
        await store.close()


def test_a_store_that_nobody_listens_at_is_said_and_waited_for() -> None:
    with RedisProcess() as redis:
        redis.kill()
        with MasterProcess("--store", redis.url) as master:
            until(lambda: any("cannot be reached" in line for line in call(master.http + "/readyz")["warnings"]))
            redis.start()
            until(lambda: not call(master.http + "/readyz")["warnings"])
            with of(master) as a:
                master.synced(a)


def test_a_bad_url_of_a_store_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="neither embedded nor the URL of a Redis"):
        load_master_config(["--store", "mysql://x"], {})


@pytest.mark.parametrize("error", [None, ConnectionError("lost meanwhile")])
async def test_a_stop_that_the_client_of_redis_swallows_is_a_stop(error: Exception | None) -> None:
    async def swallows() -> bytes:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
        return b"an answer"

    store = SharedLog("redis://127.0.0.1:1/0", lambda: "")
    calling = asyncio.ensure_future(store._call(swallows()))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
