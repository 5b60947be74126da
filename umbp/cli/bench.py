"""`umbp bench`: how fast put, get, lookup and lease are against the running pool, beside what this machine's memory can do."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from umbp.cli.target import AsJson, Target, cell, console, print_json, table, target_of
from umbp.client.sync import Namespace, Pool, connect
from umbp.errors import UmbpError
from umbp.grammar import format_size
from umbp.layout import Layout
from umbp.sim.workload import page_bytes
from umbp.types import KEY_BYTES, U8, ReadStatus, WriteStatus

SHAPES = ((128, 64 << 10), (64, 1 << 20), (16, 4 << 20))  # pages and bytes of a page
LOOKUP_KEYS = (2_200, 10_000)  # a prompt of 142 K tokens, and a long one
SMALL_BYTES = 256
ROOM_SHARE = 2  # bench evicts nothing: so many times its largest batch must be free


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. ``floor_ms``: one thread's copy of the same bytes in the same run; None where nothing is copied."""

    what: str
    items: int
    item_bytes: int
    p50_ms: float
    floor_ms: float | None = None

    def document(self) -> dict[str, Any]:
        """As plain values, with what follows from them."""
        moved = self.items * self.item_bytes
        rate = moved / 1e6 / self.p50_ms if self.floor_ms else None
        of_floor = self.floor_ms / self.p50_ms if self.floor_ms else None
        return {
            "what": self.what,
            "items": self.items,
            "item_bytes": self.item_bytes,
            "p50_ms": round(self.p50_ms, 4),
            "gb_per_s": None if rate is None else round(rate, 2),
            "of_floor": None if of_floor is None else round(of_floor, 2),
        }


def bench(
    context: typer.Context,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Times that each is measured")] = 10,
    as_json: AsJson = False,
) -> None:
    """A short check of the running pool's speed. It evicts nothing, and what it stores is removed again."""
    target = target_of(context)
    rows = _measure(target, rounds)
    if as_json:
        for row in rows:
            print_json(row.document())
        return
    made = table("what", "batch", "p50 ms", "GB/s", "of floor", right=("batch", "p50 ms", "GB/s", "of floor"))
    for row in rows:
        shown = row.document()
        batch = f"{row.items:,} x {format_size(row.item_bytes)}" if row.floor_ms else f"{row.items:,} keys"
        numbers = [f"{row.p50_ms:,.3f}", *("-" if shown[name] is None else f"{shown[name]:.2f}" for name in ("gb_per_s", "of_floor"))]
        made.add_row(cell(row.what), cell(batch), *(cell(number) for number in numbers))
    out = console()
    out.print(made)
    out.print(f"p50 of {rounds} rounds; the floor is one thread's copy of the same bytes, measured in between")


def _measure(target: Target, rounds: int) -> list[Row]:
    with connect(target.socket("bench"), client="umbp bench") as pool:
        status = pool.status()
        _check_room(int(status["capacity_bytes"] * status["limits"]["watermark_low"]), status["allocated_bytes"])
        rows: list[Row] = []
        for count, size in SHAPES:
            rows += _copies(_namespace(pool, size), count, size, rounds)
        small = _namespace(pool, SMALL_BYTES)
        for count in LOOKUP_KEYS:
            rows += _lookups(small, count, rounds)
        return rows


def _check_room(usable_bytes: int, used_bytes: int) -> None:
    """Whether there is room for what is stored here, below the mark down to which a pool evicts ahead of need; else what makes some."""
    needed = ROOM_SHARE * max(count * size for count, size in SHAPES)
    lacking = needed + used_bytes - usable_bytes
    if lacking <= 0:
        return
    why = f"bench evicts nothing and needs {format_size(needed)} of room, the pool has {format_size(max(0, usable_bytes - used_bytes))}"
    if needed > usable_bytes:
        raise UmbpError(f"{why}, and {format_size(max(0, usable_bytes))} were it empty: it is too small for bench")
    raise UmbpError(f"{why}; this makes it: umbp evict {-(-lacking // (1 << 20))}MiB")


def _namespace(pool: Pool, size: int) -> Namespace:
    return pool.namespace(model="umbp-bench", page_tokens=64, layout=Layout.opaque(size), dtype="uint8", replicated=True)


def _keys(count: int) -> U8:
    return np.frombuffer(secrets.token_bytes(count * KEY_BYTES), np.uint8).reshape(count, KEY_BYTES)


def _copies(namespace: Namespace, count: int, size: int, rounds: int) -> list[Row]:
    keys = _keys(count)
    values = page_bytes(keys, size)
    out = np.zeros_like(values)
    puts, gets, floors = [], [], []
    try:
        for number in range(rounds + 1):  # the first is not counted: it faults memory in
            put = _timed(lambda: _check(namespace.put(keys, values).all(WriteStatus.STORED), "put"))
            get = _timed(lambda: _check(namespace.get(keys, out).all(ReadStatus.HIT), "get"))
            _check(bool(np.array_equal(out, values)), "comparison of what get brought")
            floor = _timed(lambda: np.copyto(out, values))
            namespace.remove(keys)
            if number:
                puts.append(put)
                gets.append(get)
                floors.append(floor)
    finally:
        namespace.remove(keys)
    floor_ms = statistics.median(floors)
    return [Row(what, count, size, statistics.median(times), floor_ms) for what, times in (("put", puts), ("get", gets))]


def _lookups(namespace: Namespace, count: int, rounds: int) -> list[Row]:
    keys = _keys(count)
    try:
        _check(namespace.put(keys, np.zeros((count, SMALL_BYTES), np.uint8)).all(WriteStatus.STORED), "put")
        lookups = [_timed(lambda: _check(bool(namespace.lookup(keys).all()), "lookup")) for _ in range(rounds + 1)][1:]
        leases = [_timed(lambda: _lease(namespace, keys)) for _ in range(rounds + 1)][1:]
    finally:
        namespace.remove(keys)
    return [Row(what, count, SMALL_BYTES, statistics.median(times)) for what, times in (("lookup", lookups), ("lease + release", leases))]


def _lease(namespace: Namespace, keys: U8) -> None:
    with namespace.lease(keys) as lease:
        _check(bool(lease.held.all()), "lease")


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def _check(good: bool, what: str) -> None:
    if not good:
        raise UmbpError(f"the {what} did not succeed for every page: another client fills the pool, or a policy declined")
