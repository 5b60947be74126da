"""Several masters behind one Redis: any of them answers, one of them sweeps, and the death of any is nobody's loss."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import umbp
from tests.master.test_cluster import IDENTITY, PAGE, put
from tests.masters import MasterProcess, call, reported, until
from tests.pools import PoolProcess
from tests.redis_process import RedisProcess
from umbp.layout import Namespace
from umbp.master.shared import SharedLog


@pytest.fixture
def store() -> Iterator[RedisProcess]:
    with RedisProcess() as redis:
        yield redis


def of(*masters: MasterProcess) -> PoolProcess:
    """A pool of these masters, the first one first."""
    return PoolProcess("--master", ",".join(master.http for master in masters), dram="16MiB")


def route(master: MasterProcess, keys: Any, requester: str = "") -> list[str]:
    """Nodes of the runs."""
    body = {"namespace": Namespace(**IDENTITY).digest().hex(), "keys": [bytes(key).hex() for key in keys], "requester": requester}
    return [run["node"] for run in master.post("/v1/route", body)["runs"]]


def test_any_master_answers_for_every_pool_and_goes_on_where_another_one_ended(store: RedisProcess) -> None:
    shared = ("--store", store.url)
    with MasterProcess(*shared) as one, MasterProcess(*shared) as two, of(one, two) as a, of(two, one) as b:
        for master in (one, two):
            master.synced(a, b)
        first, second = put(a, 1, 2), put(b, 11)
        for master in (one, two):
            until(lambda master=master: master.locations(bytes(first[1])) == {(a.name, "dram")})
            until(lambda master=master: master.locations(bytes(second[0])) == {(b.name, "dram")})
            assert route(master, first) == [a.name]
        assert set(one.get("/v1/cluster")["masters"]) == {one.http, two.http}
        one.post(f"/v1/nodes/{b.name}/drain")
        one.post("/v1/policies/routing", {"name": "local_first"}, "PUT")
        until(lambda: two.nodes()[b.name]["state"] == "draining" and two.get("/v1/cluster")["policies"]["routing"] == "local_first")
        joins, beats = reported(a, "joins"), reported(a, "unanswered")
        one.kill()
        third = put(a, 21)
        until(lambda: two.locations(bytes(third[0])) == {(a.name, "dram")})
        assert reported(a, "masters") > 0
        assert reported(a, "unanswered") - beats <= 2
        assert reported(a, "joins") == joins  # the registration is the same everywhere
        b.kill()
        until(lambda: two.states()[b.name] == "dead")  # it sweeps now, whoever did before
        one.start()
        one.synced(a)
        until(lambda: one.locations(bytes(third[0])) == {(a.name, "dram")})  # it has asked for all by the log
        client = umbp.connect(a.socket)
        out = [bytearray(PAGE) for _ in first]
        assert client.namespace(**IDENTITY).get(first, out).all(umbp.ReadStatus.HIT)
        client.close()


def test_a_master_that_freezes_is_noticed_by_its_pools_within_two_heartbeats(store: RedisProcess) -> None:
    """Frozen: its connections stay open, so that nothing but the time of an answer tells. Each beat waits for one heartbeat at most."""
    shared = ("--store", store.url)
    with MasterProcess(*shared) as one, MasterProcess(*shared) as two, of(one, two) as a:
        for master in (one, two):
            master.synced(a)
        before = {what: reported(a, what) for what in ("joins", "beats", "unanswered", "masters")}
        one.signal(signal.SIGSTOP)
        until(lambda: reported(a, "masters") > before["masters"])
        unanswered = reported(a, "unanswered") - before["unanswered"]
        assert 1 <= unanswered <= 2
        keys = put(a, 41)
        until(lambda: two.locations(bytes(keys[0])) == {(a.name, "dram")})
        until(lambda: reported(a, "beats") > before["beats"] + 10)
        assert reported(a, "unanswered") - before["unanswered"] == unanswered  # the other one answers
        assert reported(a, "joins") == before["joins"]
        assert f"{a.name} dead" not in two.log()
        one.signal(signal.SIGCONT)
        until(lambda: one.locations(bytes(keys[0])) == {(a.name, "dram")})  # by the log, when it is back


def test_what_the_active_master_advises_reaches_a_pool_that_speaks_to_another_one(store: RedisProcess) -> None:
    shared = ("--store", store.url)
    with MasterProcess(*shared) as one, MasterProcess(*shared) as two, of(two) as a, of(two) as b:
        until(lambda: "this master is the active one" in one.log())
        for master in (one, two):
            master.synced(a, b)
        one.post("/v1/policies/placement", {"name": "rendezvous"}, "PUT")
        until(lambda: two.get("/v1/cluster")["policies"]["placement"] == "rendezvous")
        keys = put(a, *range(51, 81))
        until(lambda: any((b.name, "dram") in one.locations(bytes(key)) for key in keys))
        assert one.get("/v1/cluster")["advice"]["copy"] > 0
        assert two.get("/v1/cluster")["advice"]["copy"] == 0


def test_masters_answer_without_the_store_and_know_all_again_when_it_comes_back_empty(store: RedisProcess) -> None:
    shared = ("--store", store.url)
    with ExitStack() as stack:
        one, two = (stack.enter_context(MasterProcess(*shared)) for _ in range(2))
        a = stack.enter_context(of(one, two))
        for master in (one, two):
            master.synced(a)
        keys = put(a, 1, 2)
        for master in (one, two):
            until(lambda master=master: len(master.locations(bytes(keys[1]))) == 1)
        store.kill()
        until(lambda: any("store" in line for line in call(one.http + "/readyz")["warnings"]))
        assert route(one, keys) == route(two, keys) == [a.name]
        late = put(a, 31)  # the pool serves its own
        store.start()
        for master in (one, two):
            until(lambda master=master: master.locations(bytes(late[0])) == {(a.name, "dram")})
            assert master.states()[a.name] == "alive"
        until(lambda: not any(call(master.http + "/readyz")["warnings"] for master in (one, two)))


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
    with pytest.raises(AssertionError, match="neither embedded nor the URL of a Redis"), MasterProcess("--store", "mysql://x"):
        pass


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
