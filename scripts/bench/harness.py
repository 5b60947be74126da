"""What the benchmarks share: a pool to measure, a quiet machine, subject and floor in turns, and rows.

A row is one JSON line. ``p50_us``, ``p99_us`` are of single calls over all repetitions; ``floor_*`` the same work by the floor in the same
run; ``ratio`` is subject over floor, the median over the repetitions (each repetition runs both, in turns, and says one ratio), with its
quartiles beside it; ``target`` is what is wanted and ``met`` whether the median does it. ``foreign_cpu`` is how many cores other processes
used meanwhile, at most in any repetition that was kept: above 0.2 the row is of a noisy machine. Before each group of rows a benchmark
waits for a quiet machine, for at most a minute or BENCH_QUIET_SECONDS, and then makes up to BENCH_ATTEMPTS (4) times the repetitions that
were asked for, to keep the quietest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import umbp  # noqa: E402
from tests.pools import PoolProcess  # noqa: E402

QUIET_SECONDS_MAX = float(os.environ.get("BENCH_QUIET_SECONDS", "60"))
TICKS = os.sysconf("SC_CLK_TCK")
FOREIGN_CPU_MAX = 0.2  # cores that others may use in a repetition that counts as quiet
ATTEMPTS = int(os.environ.get("BENCH_ATTEMPTS", "4"))
Pass = Callable[[], list[float]]
"""One repetition of some work: seconds of each of its calls."""


def emit(**row: Any) -> None:
    """Print one row."""
    print(json.dumps(row), flush=True)


# -- the machine -------------------------------------------------------------------------------------------------------------------


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / TICKS


def cpu_seconds(pid: int) -> float:
    """CPU seconds that one process has used; 0 if it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / TICKS


def wait_until_quiet(seconds_max: float = QUIET_SECONDS_MAX) -> bool:
    """Wait until others leave the processors alone for two looks in a row; False if they did not within the time."""
    give_up, looks = time.monotonic() + seconds_max, 0
    while looks < 2 and time.monotonic() < give_up:
        before = busy_seconds()
        time.sleep(0.5)
        looks = looks + 1 if (busy_seconds() - before) / 0.5 < 0.2 else 0
    return looks == 2


def children(pid: int) -> list[int]:
    """Processes that the first thread of this one has started and that live: of a pool those that serve its disks."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Machine:
    """Foreign CPU between two looks, given the processes that are ours, and their children.

    ``kept``: the most in any repetition of the last row.
    """

    def __init__(self, *pids: int) -> None:
        self.pids = (os.getpid(), *pids, *(child for pid in pids for child in children(pid)))
        self.kept = 0.0
        self._mark = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), busy_seconds(), sum(map(cpu_seconds, self.pids))

    def foreign_cpu(self) -> float:
        """Cores that others used since the last call."""
        before, self._mark = self._mark, self._now()
        wall, busy, ours = (now - then for now, then in zip(self._mark, before, strict=True))
        return round(max(0.0, busy - ours) / max(wall, 1e-3), 2)


# -- the pool ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def pool(*options: str, dram: str) -> Iterator[tuple[PoolProcess, umbp.Pool]]:
    """A pool process of its own and a client of it, with all of its memory in the client's page tables. SIGTERM cleans up too."""
    signal.signal(signal.SIGTERM, _end)
    with PoolProcess(*options, dram=dram) as process, umbp.connect(process.socket, client="bench") as client:
        for thread in threading.enumerate():
            if thread.name == "umbp-populate":
                thread.join(60.0)
        yield process, client


def pin(pid: int, processor: int) -> None:
    """All threads of a process that there are now, on this processor; those that they start stay there too."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {processor})


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def namespace(client: umbp.Pool, size: int, name: str = "bench") -> umbp.Namespace:
    """A namespace of objects of one size."""
    return client.namespace(model=name, page_tokens=64, layout=umbp.Layout.opaque(size), dtype="uint8", replicated=True)


def settle(client: umbp.Pool, seconds_max: float = 30.0) -> None:
    """Wait until the pool has made the checksums that it owes, so that they are in nobody's way."""
    give_up, before = time.monotonic() + seconds_max, -1
    while time.monotonic() < give_up:
        status = client.status()
        made = status["counters"]["checksums"]
        if status["unsummed_batches"] == 0 and made == before:
            return
        before = made
        time.sleep(0.05)


def random_keys(count: int, seed: int) -> np.ndarray:
    """(count, 32) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def fill(space: umbp.Namespace, keys: np.ndarray, batch: int = 8192) -> None:
    """Store small objects under all of these keys."""
    values = np.zeros((batch, space.object_bytes), np.uint8)
    for start in range(0, len(keys), batch):
        part = keys[start : start + batch]
        statuses = space.put(part, values[: len(part)])
        assert not (statuses.codes >= 16).any(), statuses


# -- timings -----------------------------------------------------------------------------------------------------------------------


def at_least(low: int) -> Callable[[str], int]:
    """An option's type: a whole number from ``low`` on."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return value

    return number


def timed(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[float]:
    """Call with each of these arguments; seconds of each call."""
    seconds, clock = [], time.perf_counter
    for arguments in calls:
        began = clock()
        function(*arguments)
        seconds.append(clock() - began)
    return seconds


@dataclass
class Side:
    """Repetitions of one side's work."""

    passes: list[list[float]] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        return [statistics.median(calls) for calls in self.passes]

    def percentile(self, share: float) -> float:
        calls = sorted(second for calls in self.passes for second in calls)
        return calls[min(len(calls) - 1, int(len(calls) * share))]

    def row(self, prefix: str, bytes_a_call: int) -> dict[str, Any]:
        middle = self.percentile(0.5)
        row: dict[str, Any] = {f"{prefix}p50_us": round(middle * 1e6, 1), f"{prefix}p99_us": round(self.percentile(0.99) * 1e6, 1)}
        if bytes_a_call:
            row[f"{prefix}gbps"] = round(bytes_a_call / middle / 1e9, 2)
        return row


def in_turns(repeats: int, *works: Pass, machine: Machine | None = None) -> list[Side]:
    """Run each of these works once a repetition, the order turned round each time; the first repetition is not counted.

    With a machine, repetitions beside others' work are made up for, within `ATTEMPTS` times as many; the quietest are kept.
    """
    made: list[tuple[float, list[list[float]]]] = []
    quiet = 0
    for attempt in range(repeats * (ATTEMPTS if machine else 1) + 1):
        calls: list[list[float]] = [[] for _ in works]
        if machine:
            machine.foreign_cpu()
        for at in range(len(works)) if attempt % 2 else reversed(range(len(works))):
            calls[at] = works[at]()
        foreign = machine.foreign_cpu() if machine else 0.0
        if attempt:
            made.append((foreign, calls))
            quiet += foreign <= FOREIGN_CPU_MAX
        if quiet >= repeats:
            break
    kept = sorted(made, key=lambda one: one[0])[:repeats]
    if machine:
        machine.kept = kept[-1][0]
    return [Side([calls[at] for _, calls in kept]) for at in range(len(works))]


def compared(subject: Side, floor: Side, *, bytes_a_call: int = 0, at_least: float = 0.0, at_most: float = 0.0) -> dict[str, Any]:
    """The fields of a row. With bytes the ratio is of throughputs (more is better), without it is of times (less is better)."""
    pairs = zip(subject.medians, floor.medians, strict=True)
    ratios = sorted(theirs / ours if bytes_a_call else ours / theirs for ours, theirs in pairs)
    middle, last = statistics.median(ratios), len(ratios) - 1
    row = subject.row("", bytes_a_call) | floor.row("floor_", bytes_a_call)
    row |= {"ratio": round(middle, 3), "ratio_quartiles": [round(ratios[last // 4], 3), round(ratios[last - last // 4], 3)]}
    if at_least or at_most:
        row |= {"target": f"ratio >= {at_least}" if at_least else f"ratio <= {at_most}"}
        row |= {"met": middle >= at_least if at_least else middle <= at_most}
    return row


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: RssAnon, so without mapped files and shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"no RssAnon of process {pid}")


def child(*command: str) -> subprocess.Popen[str]:
    """A helper process of this folder's code, its standard output piped."""
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT)
