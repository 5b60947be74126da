"""A pool with an SSD tier, as a user has it: what falls out of DRAM comes back, over restarts and reboots, and disks may fail."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbp
from tests.field.people import eventually
from tests.pools import PoolProcess
from umbp.types import NOWHERE, ReadStatus, Tier, WriteStatus

SIZE = 65_536
COUNT = 400  # pages: 26 MiB, where DRAM has 16
HIT, MISS, BUSY = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.BUSY


def keys_of(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def pages_of(*numbers: int) -> np.ndarray:
    return np.stack([np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8) for number in numbers])


clients: list[umbp.Pool] = []


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while clients:
        clients.pop().close()


def namespace(pool: PoolProcess, **fields: Any) -> umbp.Namespace:
    clients.append(umbp.connect(pool.socket))
    return clients[-1].namespace(model="m", page_tokens=64, layout=umbp.Layout.opaque(SIZE), replicated=True, **fields)


def status(pool: PoolProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{pool.http}/v1/status", timeout=60) as answer:
        return json.load(answer)


def rest(pool: PoolProcess, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{pool.http}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def warnings(pool: PoolProcess) -> str:
    with urllib.request.urlopen(f"{pool.http}/readyz", timeout=60) as answer:  # it is ready, whatever the disks do
        return " ".join(json.load(answer)["warnings"])


def settled(pool: PoolProcess) -> bool:
    """Nothing waits to be written."""
    return status(pool)["ssd"]["waiting"] == 0


def on_ssd(ns: umbp.Namespace, *numbers: int) -> list[int]:
    """Which of these the index of the SSD tier shows, whatever else has them."""
    keys = keys_of(*numbers)
    look = ns.operations.look(keys)
    assert look is not None
    return [number for number, there in zip(numbers, ns.operations.on_ssd(look, keys), strict=True) if there]


def fill(pool: PoolProcess, ns: umbp.Namespace, count: int = COUNT) -> None:
    """Store pages, not faster than the disk takes them, and have all of them on SSD."""
    for start in range(0, count, 80):
        numbers = range(start, min(start + 80, count))
        assert ns.put(keys_of(*numbers), pages_of(*numbers)).all(WriteStatus.STORED)
        eventually(lambda: settled(pool), "the queue is empty")
    eventually(lambda: status(pool)["ssd"]["keys"] == count, "all are on SSD")


def check(ns: umbp.Namespace, *numbers: int, deadline: float = 30.0) -> list[int]:
    """Read these back; which were hits, every byte of them compared."""
    out = np.zeros((len(numbers), SIZE), np.uint8)
    codes = ns.get(keys_of(*numbers), out, deadline=deadline).codes.tolist()
    wanted = pages_of(*numbers)
    for at, code in enumerate(codes):
        assert code != HIT or np.array_equal(out[at], wanted[at])
        assert code in (HIT, MISS, ReadStatus.FAILED, BUSY)
    return [number for number, code in zip(numbers, codes, strict=True) if code == HIT]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def pool(folder: Path) -> Iterator[PoolProcess]:
    with PoolProcess("--ssd", f"{folder}:128MiB", "--ssd-admission", "always", dram="16MiB") as made:
        yield made


def test_what_falls_out_of_dram_comes_back_and_a_lookup_tells_the_tier(pool: PoolProcess) -> None:
    ns = namespace(pool)
    fill(pool, ns)
    tiers = ns.locate(keys_of(*range(COUNT), 9999))
    assert tiers[-1] == NOWHERE
    assert set(tiers[:-1].tolist()) == {Tier.DRAM, Tier.SSD}
    assert int(np.count_nonzero(tiers == Tier.SSD)) >= 100
    assert ns.lookup(keys_of(*range(COUNT), 9999)).tolist() == (tiers == Tier.DRAM).tolist()
    assert ns.lookup(keys_of(*range(COUNT), 9999), tier=Tier.SSD).tolist() == (tiers != NOWHERE).tolist()
    assert (ns.prefix(keys_of(*range(COUNT), 9999), tier=Tier.SSD), ns.prefix(keys_of(9999), tier=Tier.SSD)) == (COUNT, 0)
    with pytest.raises(umbp.InvalidRequest, match="tier"):
        ns.lookup(keys_of(1), tier=Tier.REMOTE)
    old = np.flatnonzero(tiers == Tier.SSD)[:100].tolist()
    mixed = [number for pair in zip(old[:50], range(COUNT - 50, COUNT), strict=True) for number in pair]
    assert check(ns, *mixed, 9999) == mixed
    assert (ns.locate(keys_of(*old[:50])) == Tier.DRAM).all()  # promoted
    found = status(pool)["ssd"]
    assert found["hits"] >= 50
    assert found["written_today_bytes"] > COUNT * SIZE


def test_after_a_kill_both_tiers_agree_and_after_a_reboot_the_ssd_alone_serves(pool: PoolProcess) -> None:
    ns = namespace(pool)
    fill(pool, ns)
    pool.kill()
    pool.restart()
    eventually(lambda: bool((ns.locate(keys_of(*range(COUNT))) != NOWHERE).all()), "every page is somewhere")
    assert check(ns, *range(0, COUNT, 3)) == list(range(0, COUNT, 3))
    pool.kill()
    pool.segment.unlink()  # what a reboot does to shared memory
    pool.start()
    states = status(pool)
    assert (states["keys"], states["ssd"]["keys"], states["namespaces_total"]) == (0, COUNT, 1)  # known before any client asks
    eventually(lambda: bool((ns.locate(keys_of(*range(COUNT))) == Tier.SSD).all()), "every page is on SSD")
    assert check(ns, *range(0, COUNT, 3)) == list(range(0, COUNT, 3))


def test_a_folder_has_one_owner(pool: PoolProcess, folder: Path) -> None:
    with pytest.raises(AssertionError, match="in use by another pool"), PoolProcess("--ssd", f"{folder}:128MiB", dram="16MiB"):
        pass
    ns = namespace(pool)
    assert ns.put(keys_of(1), pages_of(1)).all(WriteStatus.STORED)


def test_remove_and_flush_are_for_good(pool: PoolProcess) -> None:
    ns, other = namespace(pool), namespace(pool, tenant="other")
    fill(pool, ns, 100)
    other.put(keys_of(1), pages_of(1))
    eventually(lambda: status(pool)["ssd"]["keys"] == 101, "all are on SSD")
    assert ns.remove(keys_of(*range(10))).all()
    pool.kill()
    pool.segment.unlink()
    pool.start()
    eventually(lambda: bool((ns.locate(keys_of(*range(10, 100))) == Tier.SSD).all()), "the others are there")
    assert (ns.locate(keys_of(*range(10))) == NOWHERE).all()
    assert ns.flush() == 90
    assert (ns.locate(keys_of(*range(100))) == NOWHERE).all()
    pool.kill()
    pool.segment.unlink()
    pool.start()
    eventually(lambda: bool((other.locate(keys_of(1)) == Tier.SSD).all()), "the other namespace is there")
    assert (ns.locate(keys_of(*range(100))) == NOWHERE).all()
    assert check(ns, *range(100)) == []
    assert check(other, 1) == [1]


def test_a_page_that_cannot_be_read_back_is_a_miss_for_that_page_and_can_be_put_again(pool: PoolProcess, folder: Path) -> None:
    """Field report: existence of a file was the index; a flipped block was loaded, a truncated one was asked for for ever."""
    ns = namespace(pool)
    fill(pool, ns, 100)
    pool.kill()
    pool.segment.unlink()
    raw = {path: path.read_bytes() for path in folder.glob("segment-*")}
    for number in (5, 50, 51):
        body = pages_of(number)[0].tobytes()
        (path,) = [path for path, data in raw.items() if body in data]
        with path.open("r+b") as file:
            file.seek(raw[path].index(body) + 1000 * number)
            file.write(b"\xff\x00\xff")
    pool.start()
    eventually(lambda: bool((ns.locate(keys_of(99)) == Tier.SSD).all()), "it serves")
    good = [number for number in range(100) if number not in (5, 50, 51)]
    assert check(ns, *range(100)) == good
    assert [number for number in range(100) if ns.locate(keys_of(number))[0] == NOWHERE] == [5, 50, 51]
    found = status(pool)["ssd"]
    assert found["damaged_keys"] + found["torn"] == 3  # of a file that was unsealed at the kill it is found out at the start
    assert ns.put(keys_of(5, 50, 51), pages_of(5, 50, 51)).all(WriteStatus.STORED)
    assert check(ns, *range(100)) == list(range(100))


def test_on_evict_writes_what_is_about_to_go(folder: Path) -> None:
    options = ("--ssd", f"{folder}:128MiB", "--ssd-admission", "always", "--ssd-policy", "on_evict", "--eviction", "lru")
    with PoolProcess(*options, dram="16MiB") as pool:
        ns = namespace(pool)
        ns.put(keys_of(*range(20)), pages_of(*range(20)))
        time.sleep(0.3)  # three times as long as a copy on commit takes
        assert status(pool)["ssd"]["keys"] == 0

        def next_are_written() -> bool:
            """Whether what would go next is on SSD, where the pool is nearly full."""
            found = status(pool)
            if found["allocated_bytes"] < 0.88 * found["capacity_bytes"]:
                return True
            would = rest(pool, "POST", "/v1/evict", {"bytes": 40 * SIZE, "dry_run": True, "show": 40})["first"]
            keys = keys_of(*(int(each["key"], 16) for each in would))
            look = ns.operations.look(keys)
            return len(keys) == 40 and look is not None and bool(ns.operations.on_ssd(look, keys).all())

        for start in range(100, 420, 10):
            ns.put(keys_of(*range(start, start + 10)), pages_of(*range(start, start + 10)))
            eventually(next_are_written, "what would go next is written before it goes")
        assert status(pool)["counters"]["evicted_keys"] > 60
        tiers = ns.locate(keys_of(*range(20), *range(100, 420)))
        assert np.count_nonzero(tiers == NOWHERE) < 40
        on_ssd = [number for number, tier in zip([*range(20), *range(100, 420)], tiers.tolist(), strict=True) if tier == Tier.SSD]
        assert check(ns, *on_ssd[:50]) == on_ssd[:50]
        assert pool.stop() == 0  # with writes under way, whose end it waits for
        assert "has not ended its writes" not in pool.log()


def test_admission_keeps_pages_that_are_never_asked_for_again_off_the_disk(folder: Path) -> None:
    with PoolProcess("--ssd", f"{folder}:16MiB", dram="64MiB") as pool:  # second_touch is the default
        ns = namespace(pool)
        ns.put(keys_of(*range(400)), pages_of(*range(400)))  # at once: more than there is room for
        decided = lambda ssd: ssd["stored_keys"] + ssd["not_admitted_keys"] == 400  # noqa: E731
        eventually(lambda: decided(status(pool)["ssd"]), "each is written or declined")
        before = status(pool)["ssd"]
        assert before["used_bytes"] < 0.8 * before["capacity_bytes"]  # twice that was stored
        assert on_ssd(ns, *range(400)) == list(
            range(before["stored_keys"])
        )  # a prompt's first pages: without them the others are of no use
        assert 0 < before["stored_keys"] < 379
        for _ in range(2):  # asked for again: from DRAM, and now worth writing
            ns.prefix(keys_of(*range(380, 400)))
            ns.prefix(keys_of(*range(379, 400)))
            ns.put(keys_of(5000), pages_of(5000))  # with a put the notes are sent
        eventually(lambda: set(range(380, 400)) <= set(on_ssd(ns, *range(400))), "what was asked for again is written")


def test_off_leaves_the_folder_alone(folder: Path) -> None:
    with PoolProcess("--ssd", f"{folder}:16MiB", "--ssd-policy", "off", dram="16MiB") as pool:
        assert namespace(pool).put(keys_of(1), pages_of(1)).all(WriteStatus.STORED)
        assert status(pool)["ssd"] is None
        assert not folder.exists()


def test_the_cap_of_a_day_and_the_quota_of_a_namespace_hold(folder: Path) -> None:
    options = ("--ssd", f"{folder}:64MiB", "--ssd-admission", "always", "--ssd-write-max", "10MiB")
    with PoolProcess(*options, dram="32MiB") as pool:
        ns = namespace(pool)
        rest(pool, "PUT", "/v1/namespaces/0/quota", {"quota": "2MiB"})
        for start in range(0, 4000, 20):
            ns.put(keys_of(*range(start, start + 20)), pages_of(*range(start, start + 20)))
            eventually(lambda: settled(pool), "the queue is empty")
            found = status(pool)
            assert found["namespaces"][0]["ssd_bytes"] <= 2 << 20
            assert found["ssd"]["written_today_bytes"] <= 10 << 20
            if found["ssd"]["capped_keys"]:  # how many puts that takes depends on the disk: what left DRAM before its turn was not written
                break
        assert found["ssd"]["capped_keys"] > 0
        pool.kill()
        pool.segment.unlink()
        pool.start()
        again = status(pool)
        assert again["namespaces"][0]["quota_bytes"] == 2 << 20
        assert 0 < again["ssd"]["written_today_bytes"] <= 10 << 20


def test_a_removed_folder_is_said_and_used_again(pool: PoolProcess, folder: Path) -> None:
    ns = namespace(pool)
    fill(pool, ns, 100)
    shutil.rmtree(folder)
    eventually(lambda: "is not there" in warnings(pool), "it says so")
    assert ns.put(keys_of(1000), pages_of(1000)).all(WriteStatus.STORED)  # DRAM goes on
    assert check(ns, 1000) == [1000]
    eventually(lambda: folder.exists() and "is not there" not in warnings(pool), "it is back")
    assert ns.put(keys_of(1001), pages_of(1001)).all(WriteStatus.STORED)
    eventually(lambda: status(pool)["ssd"]["keys"] > 0, "it is written to")


def test_a_full_disk_is_said_and_hurts_nobody(tmp_path: Path) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        filler = mount / "others"
        filler.write_bytes(bytes(22 << 20))
        with PoolProcess("--ssd", f"{mount}/umbp:64MiB", "--ssd-admission", "always", dram="32MiB") as pool:
            ns = namespace(pool)
            assert ns.put(keys_of(*range(60)), pages_of(*range(60))).all(WriteStatus.STORED)
            eventually(lambda: "cannot be written" in warnings(pool) or "is not there" in warnings(pool), "it says so")
            assert check(ns, *range(60)) == list(range(60))
            filler.unlink()
            eventually(lambda: status(pool)["ssd"]["keys"] == 60, "it is written after all", 90.0)
            assert "ssd:" not in warnings(pool).replace("no direct", "") or "cannot" not in warnings(pool)
            assert not [path for path in (mount / "umbp").iterdir() if path.suffix == ".tmp"]
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_readers_removers_and_lost_files_end_in_right_bytes_or_misses(pool: PoolProcess, folder: Path) -> None:
    """Field report: a reader indexed an entry that eviction had removed, and the engine died."""
    ns = namespace(pool)
    fill(pool, ns, 300)
    stop = threading.Event()
    faults: list[BaseException] = []

    def guarded(call: Callable[[np.random.Generator], object], seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                call(draw)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            faults.append(error)

    def some(draw: np.random.Generator) -> list[int]:
        return draw.choice(300, 20, replace=False).tolist()

    def put(draw: np.random.Generator) -> None:
        numbers = some(draw)
        ns.put(keys_of(*numbers), pages_of(*numbers))

    calls: list[Callable[[np.random.Generator], object]] = [lambda draw: check(ns, *some(draw))] * 3
    calls += [lambda draw: ns.remove(keys_of(*some(draw)[:2])), put]
    threads = [threading.Thread(target=guarded, args=(call, seed)) for seed, call in enumerate(calls)]
    descriptors = len(os.listdir(f"/proc/{pool.pid}/fd"))
    for thread in threads:
        thread.start()
    for at, path in enumerate(sorted(folder.glob("segment-*"))[:6]):
        if at % 2:
            path.unlink()
        else:
            os.truncate(path, 1 << 20)
        time.sleep(0.3)
    stop.set()
    for thread in threads:
        thread.join(60.0)
    assert not faults, faults
    assert pool.alive
    assert "Traceback" not in pool.log()
    assert len(os.listdir(f"/proc/{pool.pid}/fd")) <= descriptors + 10
    check(ns, *range(300))


def test_status_metrics_and_where_tell_of_the_tier(pool: PoolProcess, folder: Path) -> None:
    ns = namespace(pool)
    fill(pool, ns, 300)
    old = int(np.flatnonzero(ns.locate(keys_of(*range(300))) == Tier.SSD)[0])

    def umbp_command(*arguments: str) -> str:
        command = [sys.executable, "-c", "from umbp.cli import main; main()", "--pool", pool.socket, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "COLUMNS": "200"}).stdout

    shown = umbp_command("status")
    assert str(folder) in shown
    assert "300 keys" in shown
    places = json.loads(umbp_command("where", keys_of(old)[0].tobytes().hex(), "--json"))["keys"][0]["locations"]
    assert [place["tier"] for place in places] == ["ssd"]
    places = json.loads(umbp_command("where", keys_of(299)[0].tobytes().hex(), "--json"))["keys"][0]["locations"]
    assert [place["tier"] for place in places] == ["dram", "ssd"]
    with urllib.request.urlopen(f"{pool.http}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert "umbp_ssd_keys 300" in text
    assert f'umbp_ssd_state{{path="{folder}",state="up"}} 1' in text
    assert 'umbp_capacity_bytes{tier="ssd"}' in text


def test_policies_are_shown_and_swapped_and_eviction_is_previewed(pool: PoolProcess) -> None:
    ns = namespace(pool)
    fill(pool, ns, 100)
    call = functools.partial(rest, pool)
    with urllib.request.urlopen(f"{pool.http}/v1/policies", timeout=60) as answer:
        shown = {policy["kind"]: policy for policy in json.load(answer)["policies"]}
    assert [shown[f"ssd_{kind}"]["current"] for kind in ("eviction", "admission", "cleaning", "striping")] == [
        *("lru", "always", "cost_benefit", "even"),
    ]
    for kind in ("ssd_eviction", "ssd_admission", "ssd_cleaning", "ssd_striping"):
        for name in shown[kind]["available"]:
            assert call("PUT", f"/v1/policies/{kind}", {"name": name})["current"] == name
        with pytest.raises(urllib.error.HTTPError, match="404"):
            call("PUT", f"/v1/policies/{kind}", {"name": "nope"})
    call("PUT", "/v1/policies/ssd_eviction", {"name": "lru"})
    call("PUT", "/v1/policies/ssd_admission", {"name": "always"})
    assert status(pool)["ssd"]["eviction"] == "lru"
    body = {"bytes": 10 * SIZE, "tier": "ssd", "dry_run": True, "show": 100}
    would = call("POST", "/v1/evict", body)
    assert (would["objects"], would["complete"], status(pool)["ssd"]["keys"]) == (10, True, 100)
    assert len({victim["key"] for victim in would["first"]} & {key.tobytes().hex() for key in keys_of(*range(100))}) == 10
    assert call("POST", "/v1/evict", {**body, "policy": "sieve"})["objects"] == 10
    assert status(pool)["ssd"]["eviction"] == "lru"
    went = call("POST", "/v1/evict", {**body, "dry_run": False})
    assert went["first"] == would["first"]
    assert status(pool)["ssd"]["keys"] == 90
    assert check(ns, *range(100)) == list(range(100))  # DRAM has them still
    fresh = range(1000, 1040)
    assert ns.put(keys_of(*fresh), pages_of(*fresh)).all(WriteStatus.STORED)  # and the new policies work
    eventually(lambda: status(pool)["ssd"]["keys"] >= 130, "the new ones are written")


def test_pages_of_any_size_go_to_ssd_and_back_or_are_refused_by_size_and_nothing_else(tmp_path: Path) -> None:
    """Field report: the write path took what was larger than the read path's limit, and reading it back ended the process."""
    limit = 4 << 20  # of a file of this folder, its header and records' heads included
    sizes = [1, 511, 512, 513, 4095, 4096, 4097, *(power + off for power in (128 << 10, 1 << 20, 2 << 20) for off in (-1, 0, 1))]
    sizes += [limit - 20_000, limit, limit + 1, 5 << 20]
    with PoolProcess("--ssd", f"{tmp_path / 'ssd'}:128MiB", "--ssd-admission", "always", dram="64MiB") as pool:
        clients.append(umbp.connect(pool.socket))
        values, spaces = [np.random.default_rng(size).integers(0, 256, (2, size), dtype=np.uint8) for size in sizes], []
        for size, value in zip(sizes, values, strict=True):
            spaces.append(clients[-1].namespace(model=f"{size}", page_tokens=64, layout=umbp.Layout.opaque(size)))
            assert spaces[-1].put(keys_of(1, 2), value).all(WriteStatus.STORED), size
        eventually(lambda: settled(pool), "the queue is empty")
        eventually(lambda: status(pool)["ssd"]["keys"] >= 2 * (len(sizes) - 3), "what fits is on SSD")
        rest(pool, "POST", "/v1/evict", {"bytes": "1GiB"})
        for size, space, value in zip(sizes, spaces, values, strict=True):
            out = np.zeros_like(value)
            codes = space.get(keys_of(1, 2), out, deadline=30.0)
            assert codes.all(HIT if size < limit else MISS), size
            assert size >= limit or np.array_equal(out, value), size
        assert "Traceback" not in pool.log()


def test_what_is_listed_on_a_tier_is_there_while_both_evict(tmp_path: Path) -> None:
    """Field report: a batch larger than DRAM demoted its own keys and then listed them as DRAM; an eviction left the index of the other."""
    with PoolProcess("--ssd", f"{tmp_path / 'ssd'}:32MiB", "--ssd-admission", "always", "--eviction", "lru", dram="16MiB") as pool:
        ns, count = namespace(pool), 1000  # 62 MiB: four times DRAM, twice the SSD
        for start in range(0, count, 100):
            numbers = range(start, start + 100)
            ns.put(keys_of(*numbers), pages_of(*numbers))
            if start % 200:
                eventually(lambda: settled(pool), "the queue is empty")
        eventually(lambda: settled(pool), "the queue is empty")
        before, out = ns.locate(keys_of(*range(count))), np.empty((count, SIZE), np.uint8)
        in_dram = ns.get(keys_of(*range(count)), out, deadline=0).codes == HIT
        tiers = ns.locate(keys_of(*range(count)))  # some may still have been evicted ahead of need meanwhile
        assert {int(tier) for tier in tiers} == {Tier.DRAM, Tier.SSD, NOWHERE}
        assert in_dram[(before == Tier.DRAM) & (tiers == Tier.DRAM)].all()
        assert not in_dram[(before != Tier.DRAM) & (tiers != Tier.DRAM)].any()

        def shown() -> tuple[int, int]:
            """Pages that clients see in DRAM, and on SSD, those in DRAM as well."""
            look = ns.operations.look(keys_of(*range(count)))
            assert look is not None
            return int(look.found.hit.sum()), int(ns.operations.on_ssd(look, keys_of(*range(count))).sum())

        # When the last writes and evictions have ended the pool counts what its clients see.
        eventually(lambda: shown() == (status(pool)["keys"], status(pool)["ssd"]["keys"]), "the pool counts what clients see")
        listed = np.flatnonzero(tiers != NOWHERE)
        found_again = 0
        for start in range(0, len(listed), 40):  # what is read makes others go, on both tiers: then no index has them any more
            part = listed[start : start + 40].tolist()
            there = check(ns, *part)
            gone = sorted(set(part) - set(there))
            assert not gone or (ns.locate(keys_of(*gone)) == NOWHERE).all()
            found_again += len(there)
        assert found_again > len(listed) // 2
