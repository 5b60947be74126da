"""A replay against a real pool: what it counts, that a wrong byte is found, that killed engines leave nothing, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.pools import ROOT, PoolProcess
from umbp.client.http import PoolHttp
from umbp.replay.audit import NOTHING_LEFT, leaks, wait_quiet
from umbp.replay.drive import Driver, Feed, Plan
from umbp.replay.engine import open_namespace
from umbp.replay.messages import Setup, ids_of, job_of, ranges_of
from umbp.replay.tally import Seen, Tally, Times
from umbp.sim.workload import AgentProfile, Limits, TraceRequest, block_keys, generate_agents, page_bytes

PAGE = 4096
PROFILE = AgentProfile(
    block_tokens=16, shared_tokens=640, turns=(2.5, 0.3), first_tokens=(7.5, 0.5), growth_tokens=(4.5, 0.5), sub_agent_share=0.0, sessions=4
)


def workload(sessions: int = 4, seed: int = 0) -> Iterator[TraceRequest]:
    return generate_agents(seed, PROFILE, Limits(sessions_max=sessions, concurrency=4, time_scale=0.0))


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolProcess]:
    with PoolProcess() as running:
        yield running


def run(pool: PoolProcess, seed: int, on_progress: Callable[[Tally], None] = lambda tally: None, **options: Any) -> Tally:
    leased = options.pop("leased", False)
    plan = Plan(setup=Setup(pool.socket, PAGE, "test", seed, leased), **options)
    return asyncio.run(Driver(plan, workload(seed=seed), on_progress).run())


def assert_nothing_left(pool: PoolProcess) -> dict[str, Any]:
    status, found = wait_quiet(PoolHttp(pool.socket), 0)
    assert (status["sessions"], found) == (0, [])
    return status


# -- what a replay does ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leased", [False, True], ids=["copied", "leased"])
def test_every_prefix_that_came_before_hits_and_every_byte_is_right(pool: PoolProcess, leased: bool) -> None:
    tally = run(pool, seed=10 + leased, leased=leased)
    requests = list(workload(seed=10 + leased))
    assert tally.requests == len(requests)
    assert tally.input_tokens == sum(request.input_tokens for request in requests)
    assert tally.hit_tokens == tally.ideal_tokens > 0
    assert (tally.wrong_pages, tally.existing_pages, dict(tally.unread), dict(tally.refused)) == (0, 0, {}, {})
    blocks = {int(block) for request in requests for block in request.block_ids[: request.full_blocks]}
    assert tally.stored_pages == len(blocks)
    assert tally.read_pages * PROFILE.block_tokens == tally.hit_tokens
    assert_nothing_left(pool)


def test_engines_share_what_they_store(pool: PoolProcess) -> None:
    tally = run(pool, seed=20, processes=2)
    # Two engines may meet a shared page at once: then one of them has stored it, and the other learns that it exists.
    assert tally.ideal_tokens - tally.hit_tokens <= PROFILE.shared_tokens
    assert tally.wrong_pages == 0
    assert_nothing_left(pool)


def test_killed_engines_leave_no_wrong_byte_and_no_leak(pool: PoolProcess) -> None:
    tally = run(pool, seed=30, processes=2, kill_every=6)
    assert tally.kills >= 1
    assert tally.requests == len(list(workload(seed=30)))
    assert tally.wrong_pages == 0
    assert_nothing_left(pool)


@pytest.mark.parametrize("leased", [False, True], ids=["copied", "leased"])
def test_a_wrong_byte_is_found(pool: PoolProcess, leased: bool) -> None:
    seed = 40 + leased
    first = next(workload(seed=seed))
    with umbp.connect(pool.socket) as client:
        namespace = open_namespace(client, Setup(pool.socket, PAGE, "test", seed, leased), PROFILE.block_tokens)
        keys = block_keys(first, seed=seed)[:5]
        values = page_bytes(keys, PAGE, seed=seed)
        values[3, -1] ^= 1
        assert namespace.put(keys, values).all(umbp.WriteStatus.STORED)
    tally = run(pool, seed=seed, leased=leased)
    assert tally.wrong_pages == sum(bool((block_keys(request, seed=seed) == keys[3]).all(axis=1).any()) for request in workload(seed=seed))


def test_a_pool_that_dies_under_a_replay_costs_hits_and_nothing_else() -> None:
    with PoolProcess() as own:

        def restart_once(tally: Tally) -> None:
            if tally.requests == 10:
                own.restart()

        tally = run(own, seed=50, on_progress=restart_once)
        assert tally.requests == len(list(workload(seed=50)))
        assert tally.wrong_pages == 0
        assert_nothing_left(own)


# -- how it ends -------------------------------------------------------------------------------------------------------------------


def start_command(pool: PoolProcess, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys; from umbp.cli import main; sys.exit(main())", "--pool", pool.socket, "replay", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def wait_engines(pool: PoolProcess, wanted: int) -> None:
    http = PoolHttp(pool.socket)

    def there() -> int:
        return [session["client"] for session in http.get("/v1/sessions")["sessions"]].count("umbp replay")

    eventually(lambda: there() == wanted, lambda: f"{wanted} engines: {http.get('/v1/sessions')}")


def test_the_command_prints_a_table_and_ends_with_zero(pool: PoolProcess) -> None:
    with start_command(pool, "--sessions", "1", "--requests", "3", "--page-bytes", "1KiB") as command:
        out, err = command.communicate(timeout=120)
    assert (command.returncode, err) == (0, "")
    assert "wrong pages  0" in out
    assert "left behind  nothing" in out


def test_the_command_counts_in_json_and_ends_with_one_after_a_wrong_byte(pool: PoolProcess, tmp_path: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
    trace.write_text("\n".join([json.dumps(request)] * 2))
    options = (str(trace), "--json", "--page-bytes", "1KiB", "--seed", "60")
    with umbp.connect(pool.socket) as client:
        namespace = open_namespace(client, Setup(pool.socket, 1024, "trace.jsonl", 60, False), 512)
        ids = np.array([1, 2, 3])
        keys = block_keys(TraceRequest(0, "", "main", ids, 0, 0, 512), seed=60)
        namespace.put(keys[:1], np.zeros((1, 1024), np.uint8))
    with start_command(pool, *options) as command:
        report = json.loads(command.communicate(timeout=120)[0])
    assert (command.returncode, report["requests"], report["wrong_pages"], report["leaks"]) == (1, 2, 2, [])
    with start_command(pool, *options, "--fresh") as command:
        report = json.loads(command.communicate(timeout=120)[0])
    assert (command.returncode, report["wrong_pages"], report["hit_tokens"]) == (0, 0, 1024)


def test_ctrl_c_ends_with_the_table_of_what_was_done(pool: PoolProcess) -> None:
    with start_command(pool, "--time-scale", "1", "--page-bytes", "256B", "--seed", "70") as command:
        wait_engines(pool, 1)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=120)
    assert (command.returncode, err) == (130, "")
    assert "by Ctrl-C" in out
    assert "wrong pages  0" in out
    wait_engines(pool, 0)


def test_engines_do_not_outlive_a_driver_that_is_killed(pool: PoolProcess) -> None:
    with start_command(pool, "--time-scale", "1", "--page-bytes", "256B", "--processes", "2", "--seed", "80") as command:
        wait_engines(pool, 2)
        command.kill()
        command.communicate(timeout=120)
    wait_engines(pool, 0)


# -- its parts ---------------------------------------------------------------------------------------------------------------------


def test_ids_go_over_the_pipe_as_runs() -> None:
    ids = np.array([7, 8, 9, 3, 5, 6, 1 << 40])
    assert ranges_of(ids) == [(7, 3), (3, 1), (5, 2), (1 << 40, 1)]
    assert ids_of(ranges_of(ids)).tolist() == ids.tolist()
    assert (ranges_of(ids[:0]), ids_of([]).tolist()) == ([], [])


def test_a_partial_last_block_is_not_asked_for() -> None:
    request = TraceRequest(0.0, "s", "main", np.array([1, 2, 3]), 47, 1, 16)
    assert job_of(4, request).ranges == [(1, 2)]


def test_seen_blocks_are_a_leading_run() -> None:
    seen = Seen()
    first, second = np.arange(2000), np.r_[np.arange(1500), 1 << 50]
    assert seen.leading(first) == 0
    seen.add(first)
    assert (seen.leading(first), seen.leading(second), seen.leading(second[:0])) == (2000, 1500, 0)


def test_quantiles_are_right_to_two_percent() -> None:
    times = Times()
    assert times.quantile_ms(0.5) is None
    for milliseconds in range(1, 1001):
        times.add(milliseconds / 1000)
    assert times.quantile_ms(0.5) == pytest.approx(500, rel=0.02)
    assert times.quantile_ms(0.99) == pytest.approx(990, rel=0.02)


async def test_one_request_at_a_time_of_an_agent_in_order() -> None:
    def request(session: str, agent: str = "main") -> TraceRequest:
        return TraceRequest(0.0, session, agent, np.arange(1), 16, 1, 16)

    feed = Feed(iter([request("a"), request("a"), request("b"), request("a", "main.1"), request(""), request("")]))
    taken = [await feed.next_or_none() for _ in range(5)]
    assert [found[0] for found in taken if found] == [0, 2, 3, 4, 5]
    waiting = asyncio.create_task(feed.next_or_none())
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.done(request("a"))
    found = await waiting
    assert found is not None
    assert found[0] == 1
    assert await feed.next_or_none() is None


def quiet_status() -> dict[str, Any]:
    names = (*NOTHING_LEFT, "pins")
    spaces = [{"keys": 3, "object_bytes": 10}, {"keys": 2, "object_bytes": 1}]
    return {**dict.fromkeys(names, 0), "used_bytes": 32, "namespaces": spaces, "namespaces_total": 2}


@pytest.mark.parametrize(
    "name", ["leases", "reservations", "leased_bytes", "being_written", "removed_but_leased", "abandoned", "used_bytes"]
)
def test_the_audit_finds_a_planted_leak(name: str) -> None:
    status = quiet_status()
    assert leaks(status) == []
    status[name] += 1
    assert [line.partition(":")[0] for line in leaks(status)] == [name]
