"""Bad days with real processes: local service goes on, and all is as before by itself in the time that the modules' heads say."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import umbp
from tests.master.test_cluster import IDENTITY, PAGE, put
from tests.masters import DEAD_AFTER, HEARTBEAT, MasterProcess, call, free_port, reported, until
from tests.pools import PoolProcess, together
from umbp.core.sweeps import chained
from umbp.grammar import parse_address
from umbp.layout import Namespace
from umbp.master import protocol as say
from umbp.master.service import Told
from umbp.pool.masters import Remote


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    with MasterProcess("--keys-max", "400000") as process:
        yield process


@pytest.fixture(scope="module")
def both(master: MasterProcess) -> Iterator[tuple[PoolProcess, PoolProcess]]:
    """Two pools for whoever leaves them as they were: running, with whatever they hold."""
    with together(a := master.pool(), b := master.pool()):
        yield a, b


@pytest.fixture
def pools(master: MasterProcess, both: tuple[PoolProcess, PoolProcess]) -> tuple[PoolProcess, PoolProcess]:
    """They, known to the master; a test that failed may have left one dead."""
    gone = [pool for pool in both if not pool.alive]
    for pool in gone:
        pool.launch()
    for pool in gone:
        pool.await_ready()
    master.synced(*both)
    return both


class Load(threading.Thread):
    """An engine at work on one pool: puts and gets that must all go well, whatever happens to the master."""

    def __init__(self, pool: PoolProcess) -> None:
        super().__init__(daemon=True)
        self._client = umbp.connect(pool.socket)
        self._space = self._client.namespace(**IDENTITY)
        self._over = threading.Event()
        self.rounds = 0
        self.faults: list[str] = []

    def run(self) -> None:
        number = 5000
        while not self._over.is_set():
            number += 1
            keys = umbp.page_keys(np.full(16, number, np.uint32), page_tokens=16)
            out = bytearray(PAGE)
            status = self._space.put(keys, [bytes([number % 256]) * PAGE])
            got = self._space.get(keys, [out])
            if status.refused.any() or not got.all(umbp.ReadStatus.HIT) or bytes(out) != bytes([number % 256]) * PAGE:
                self.faults.append(f"{status} {got}")
            self.rounds += 1
            self._over.wait(0.005)

    def stop(self) -> None:
        self._over.set()
        self.join(60.0)
        self._client.close()


def test_a_master_killed_and_restarted_under_load_knows_all_again(master: MasterProcess, pools: tuple[PoolProcess, PoolProcess]) -> None:
    a, b = pools
    load = Load(a)
    load.start()
    keys = put(b, 1, 2, 3)
    for _ in range(2):
        master.kill()
        rounds = load.rounds
        until(lambda rounds=rounds: load.rounds > rounds + 20)  # without a master the pool serves its own
        master.start()
        master.synced(a, b)
        until(lambda: master.locations(bytes(keys[0])) == {(b.name, "dram")})
    load.stop()
    assert not load.faults
    until(lambda: master.nodes()[a.name]["tiers"][0]["keys"] == call(a.http + "/v1/status")["keys"])
    until(lambda: master.states()[a.name] == "alive")


def test_a_frozen_pool_is_expired_and_comes_back_by_itself_with_its_keys(
    master: MasterProcess, pools: tuple[PoolProcess, PoolProcess]
) -> None:
    a, b = pools
    keys = put(a, 5, 6)
    until(lambda: master.locations(bytes(keys[1])))
    a.signal(signal.SIGSTOP)
    try:
        until(lambda: master.states()[a.name] == "dead")
        assert not master.locations(bytes(keys[1]))
        client = umbp.connect(b.socket)
        status = client.namespace(**IDENTITY).get(keys, [bytearray(PAGE) for _ in keys], deadline=60.0)
        assert status.all(umbp.ReadStatus.MISS)  # who has waited to the deadline is BUSY
        client.close()
    finally:
        a.signal(signal.SIGCONT)
    until(lambda: master.locations(bytes(keys[1])) == {(a.name, "dram")})
    until(lambda: master.states()[a.name] == "alive")


AHEAD = [shutil.which("unshare") or "unshare", "--time", "--monotonic", "172800", "--boottime", "172800"]  # two days


def died(master: MasterProcess, *pools: PoolProcess) -> list[int]:
    """How often the master has taken each for dead."""
    return [master.log().count(f"{pool.name} dead") for pool in pools]


@pytest.fixture(scope="module")
def expired(master: MasterProcess, both: tuple[PoolProcess, PoolProcess]) -> dict[str, int]:
    """How often an idle pool, a busy one and one with another clock were taken for dead while more than `DEAD_AFTER` passed: KV-15."""
    idle, busy, ahead = both[0], master.pool("--checksum", "put", dram="64MiB"), master.pool()
    ahead.command = [*AHEAD, *ahead.command]
    may = not subprocess.run([*AHEAD, "true"], capture_output=True, check=False).returncode if shutil.which("unshare") else False
    every = {"idle": idle, "busy": busy} | ({"ahead": ahead} if may else {})
    with together(*(pool for name, pool in every.items() if name != "idle")):
        master.synced(*every.values())
        before = died(master, *every.values())
        keys = put(every.get("ahead", idle), 21)
        until(lambda: master.locations(bytes(keys[0])))
        client = umbp.connect(busy.socket)
        space = client.namespace(**{**IDENTITY, "layout": umbp.Layout.opaque(1 << 20)})
        over = time.monotonic() + 1.3 * DEAD_AFTER
        number = 0
        while time.monotonic() < over:  # evictions and checksums all the time
            number += 1
            space.put(umbp.page_keys(np.full(16 * 8, number, np.uint32), page_tokens=16), [bytes(1 << 20)] * 8)
        client.close()
        until(lambda: {master.states()[pool.name] for pool in every.values()} == {"alive"})
        times = zip(every, before, died(master, *every.values()), strict=True)
        return {name: after - earlier for name, earlier, after in times}


def test_an_idle_pool_and_a_busy_one_are_never_expired(expired: dict[str, int]) -> None:
    assert (expired["idle"], expired["busy"]) == (0, 0)


def test_clocks_that_differ_do_no_harm(expired: dict[str, int]) -> None:
    """The pool runs in a time namespace, two days ahead of the master."""
    if "ahead" not in expired:
        pytest.skip("no time namespaces here: unshare --time is refused")
    assert expired["ahead"] == 0


def test_a_pool_that_restarts_faster_than_a_heartbeat_is_known_with_what_it_has_now(
    master: MasterProcess, pools: tuple[PoolProcess, PoolProcess]
) -> None:
    a, _ = pools
    keys = put(a, 7, 8)
    until(lambda: master.locations(bytes(keys[1])))
    boot = master.nodes()[a.name]["boot"]
    a.restart()
    until(lambda: master.nodes()[a.name]["boot"] != boot)
    until(lambda: master.locations(bytes(keys[1])) == {(a.name, "dram")})  # the segment outlived it
    a.kill()
    for segment in a.shm_dir.glob("*"):
        segment.unlink()
    a.start()
    until(lambda: master.nodes()[a.name]["boot"] == a.ready["boot"])
    master.synced(a)
    assert not master.locations(bytes(keys[1]))


def test_a_pool_that_is_killed_is_gone_in_time_and_one_that_stops_at_once(
    master: MasterProcess, pools: tuple[PoolProcess, PoolProcess]
) -> None:
    a, b = pools
    keys = put(b, 9)
    until(lambda: master.locations(bytes(keys[0])))
    b.kill()
    assert a.stop() == 0
    assert master.states()[a.name] == "dead"  # a clean stop is said, not waited for
    until(lambda: master.states()[b.name] == "dead")
    assert not master.locations(bytes(keys[0]))


def test_a_wrong_address_is_found_out_and_not_used(master: MasterProcess, pools: tuple[PoolProcess, PoolProcess]) -> None:
    right, _ = pools
    with together(
        nowhere := master.pool("--advertise", f"127.0.0.1:{free_port()}"),
        somebody := master.pool("--advertise", right.http.removeprefix("http://")),
    ):
        until(lambda: "cannot be reached" in master.nodes()[nowhere.name]["why"])
        until(lambda: "somebody else" in master.nodes()[somebody.name]["why"])
        keys = put(nowhere, 14)
        until(lambda: master.locations(bytes(keys[0])))
        client = umbp.connect(right.socket)
        status = client.namespace(**IDENTITY).get(keys, [bytearray(PAGE)], deadline=60.0)
        assert status[0] == umbp.ReadStatus.MISS  # as above
        client.close()
        until(lambda: any("not used as a source" in line for line in call(nowhere.http + "/readyz")["warnings"]))


def test_two_nodes_of_one_name_do_not_take_each_other_s_place(master: MasterProcess) -> None:
    with master.pool() as first:
        master.synced(first)
        keys = put(first, 15)
        until(lambda: master.locations(bytes(keys[0])))
        boot = master.nodes()[first.name]["boot"]
        with master.pool("--name", first.name) as second:  # on the same machine: the folder of its segment makes it another place
            second.command[second.command.index("--shm-dir") + 1] = str(second.shm_dir)
            until(lambda: "alive" in " ".join(call(second.http + "/readyz")["warnings"]))
            put(second, 16)  # it serves its own clients all the same
            time.sleep(4 * HEARTBEAT)
            assert master.nodes()[first.name]["boot"] == boot
            assert master.locations(bytes(keys[0])) == {(first.name, "dram")}
            first.kill()
            until(lambda: master.nodes()[first.name]["boot"] == second.ready["boot"])


def expires(master: MasterProcess, a: PoolProcess, count: int) -> tuple[int, float]:
    """Have a node of so many keys go silent; how many answers came while its keys were swept, and the slowest one."""
    keys, few = put(a, 17), 1000
    until(lambda: master.locations(bytes(keys[0])))
    giant = Giant(master, count)
    until(lambda: master.get("/v1/cluster")["keys"] > count)
    namespace = a_namespace()
    slowest, dead, meanwhile, left = 0.0, False, 0, count
    while not dead or left > few:
        began = time.monotonic()
        answer = master.post("/v1/route", {"namespace": namespace, "keys": [bytes(keys[0]).hex()], "requester": a.name, "count": False})
        slowest = max(slowest, time.monotonic() - began)
        assert answer["held"] == 1
        meanwhile += few < left < count
        left = master.get("/v1/cluster")["keys"]
        dead = dead or master.states().get(giant.name) == "dead"
        assert time.monotonic() - giant.began < 120.0
    return meanwhile, slowest


def test_a_node_with_very_many_keys_expires_without_anybody_waiting(master: MasterProcess, pools: tuple[PoolProcess, PoolProcess]) -> None:
    # A tenth of a second on a machine that has nothing else to do: one that has may not let this process ask in that time.
    assert any(expires(master, pools[0], 200_000)[0] >= 2 for _ in range(10))


@pytest.mark.slow
def test_a_node_with_a_million_keys_expires_without_anybody_waiting() -> None:
    with MasterProcess("--keys-max", "2000000") as master, master.pool() as a:
        master.synced(a)
        meanwhile, slowest = expires(master, a, 1_000_000)
        print(f"{meanwhile} answers while it was swept, the slowest route took {slowest * 1e3:.1f} ms")
        assert meanwhile >= 10
        assert slowest < 1.0


def backlog(master: MasterProcess, a: PoolProcess, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Stop a pool's master for so long, with an engine at work: all that happened is known then, and nobody was taken for dead."""
    before, joins = died(master, a), reported(a, "joins")
    load = Load(a)
    load.start()
    master.signal(signal.SIGSTOP)
    rounds, over = load.rounds, time.monotonic() + seconds
    until(lambda: load.rounds > rounds + 20)  # no call waits for the master
    meanwhile()
    while time.monotonic() < over:
        time.sleep(0.1)
        assert a.alive
    keys = put(a, 18, 19)
    master.signal(signal.SIGCONT)
    until(lambda: master.locations(bytes(keys[1])) == {(a.name, "dram")})
    load.stop()
    stored = lambda: call(a.http + "/v1/status")["keys"]  # noqa: E731
    until(lambda: master.nodes()[a.name]["tiers"][0]["keys"] == stored())
    until(lambda: master.get("/v1/cluster")["keys"] >= stored())
    assert not load.faults
    assert died(master, a) == before
    assert reported(a, "joins") == joins


def test_a_frozen_master_delays_nobody_and_when_it_goes_on_the_backlog_is_worked_off_and_nobody_taken_for_dead(
    master: MasterProcess, pools: tuple[PoolProcess, PoolProcess]
) -> None:
    a, b = pools
    stopped, kept = list[int](), list[bytes]()

    def meanwhile() -> None:
        stopped.append(b.stop())
        b.start()
        kept.append(bytes(put(b, 21)[0]))

    backlog(master, a, DEAD_AFTER + 0.6, meanwhile)
    assert stopped == [0]  # in the time that the harness gives: to stop, or start, nobody waits for a master that does not answer
    until(lambda: master.locations(kept[0]) == {(b.name, "dram")})


@pytest.mark.slow
def test_the_backlog_of_a_minute_is_worked_off_and_nobody_is_taken_for_dead() -> None:
    with MasterProcess("--keys-max", "2000000", timing=()) as master, master.pool(dram="256MiB") as a:
        master.synced(a)
        backlog(master, a, 60.0)


def test_another_master_is_found_when_the_first_one_is_gone(master: MasterProcess) -> None:
    with MasterProcess() as one, PoolProcess("--master", f"{one.http},{master.http}", dram="16MiB") as a:
        one.synced(a)
        keys = put(a, 20)
        one.kill()
        until(lambda: master.locations(bytes(keys[0])) == {(a.name, "dram")})


def test_ipv6_from_end_to_end() -> None:
    here = ("--http", "[::1]:0")
    with together(master := MasterProcess("--http", f"[::1]:{free_port('::1')}"), a := master.pool(*here), b := master.pool(*here)):
        assert master.http.startswith("http://[::1]:")
        master.synced(a, b)
        keys = put(a, 1)
        until(lambda: master.locations(bytes(keys[0])))
        client = umbp.connect(b.socket)
        out = bytearray(PAGE)
        assert client.namespace(**IDENTITY).get(keys, [out], deadline=30.0).all(umbp.ReadStatus.HIT)
        assert bytes(out) == bytes([1]) * PAGE
        client.close()


def a_namespace() -> str:
    return Namespace(**IDENTITY).digest().hex()


class Giant:
    """A node with very many keys that says so once and is never heard of again."""

    name = "giant"

    def __init__(self, master: MasterProcess, count: int) -> None:
        async def speak() -> None:
            port = Remote(parse_address(master.http), "")
            try:
                joined = await port.join(say.Join(node=self.name, boot=1, place="p", addresses={}, tiers=[]), 5.0)
                total = 0
                words = np.random.default_rng(1).integers(1, 1 << 63, (count, 4), dtype=np.uint64)
                for index, start in enumerate(range(0, count, say.KEYS_MAX)):
                    part = words[start : start + say.KEYS_MAX]
                    ones = np.ones(len(part), np.uint8)
                    told = Told(part, ones * 2, ones, [(b"\3" * 32, PAGE, len(part))])
                    last = start + say.KEYS_MAX >= count
                    total = chained(total, say.content_sum(told.words, told.tiers, told.spaces))
                    applied = await port.tell_piece(self.name, joined.registration, 1, index, told, 5.0, bundle=0, total=total, last=last)
                    assert not applied.gap
            finally:
                await port.close()

        asyncio.run(speak())
        self.began = time.monotonic()
