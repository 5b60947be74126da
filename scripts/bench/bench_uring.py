"""Whether io_uring reads and writes batches of pages faster than our threads do: one JSON line a row.

    pip install liburing; python scripts/bench/bench_uring.py [--folder DIR] [--repeats 7]

Subject: one thread that keeps up to ``DEPTH`` calls in an io_uring (`liburing`, which the pool does not need). Floor: four threads with
`preadv` and `pwritev`, as the SSD tier uses. Both on one file with O_DIRECT, in turns, from and into the same memory, 64 MiB a batch in
blocks of 1 MiB or 64 KiB, each a call of its own, or of 4 MiB, which is how the tier reads and writes neighbours. No checksums.
``cpu_ratio``: CPU seconds of the process, subject over floor.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import numpy as np

from umbp.store.ssd_system import aligned

try:
    import liburing as uring
except ImportError:
    uring = None

THREADS, DEPTH = 4, 64
BATCH_BYTES, BATCHES = 64 << 20, 8


class Threads:
    """As the tier does it."""

    def __init__(self, fd: int, memory: memoryview) -> None:
        self.fd, self.memory = fd, memory
        self.pool = ThreadPoolExecutor(THREADS)

    def move(self, call: Callable[..., int], start: int, order: list[int], block: int) -> None:
        def some(part: list[int]) -> None:
            for at in part:
                assert call(self.fd, [self.memory[at : at + block]], start + at) == block

        list(self.pool.map(some, [order[number::THREADS] for number in range(THREADS)]))


class Ring:
    """One ring, filled and emptied by this thread."""

    def __init__(self, fd: int, memory: memoryview) -> None:
        self.fd, self.memory = fd, memory
        self.ring, self.cqe = uring.Ring(), uring.Cqe()
        self.vectors: dict[tuple[int, int], Any] = {}
        uring.io_uring_queue_init(DEPTH, self.ring)

    def move(self, prepare: Any, start: int, order: list[int], block: int) -> None:
        todo, out = list(reversed(order)), 0
        while todo or out:
            while todo and out < DEPTH:
                at = todo.pop()
                if (vector := self.vectors.get((at, block))) is None:  # made once: the most favourable case
                    vector = self.vectors[at, block] = uring.Iovec([self.memory[at : at + block]])
                prepare(uring.io_uring_get_sqe(self.ring), self.fd, vector, start + at)
                out += 1
            uring.io_uring_submit_and_wait(self.ring, min(out, 8))
            for _ in range(uring.io_uring_cq_ready(self.ring)):
                uring.io_uring_peek_cqe(self.ring, self.cqe)
                assert self.cqe[0].res == block, self.cqe[0].res
                uring.io_uring_cq_advance(self.ring, 1)
                out -= 1

    def close(self) -> None:
        uring.io_uring_queue_exit(self.ring)


def rows(folder: Path, repeats: int) -> None:
    path = folder / "uring"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        size = BATCHES * BATCH_BYTES
        os.posix_fallocate(fd, 0, size)
        memory = aligned(BATCH_BYTES)
        memory[:] = np.random.default_rng(1).bytes(BATCH_BYTES)
        threads, ring = Threads(fd, memory), Ring(fd, memory)
        for start in range(0, size, BATCH_BYTES):
            threads.move(os.pwritev, start, list(range(0, BATCH_BYTES, 4 << 20)), 4 << 20)
        for op, call, prepare in (("read", os.preadv, uring.io_uring_prep_readv), ("write", os.pwritev, uring.io_uring_prep_writev)):
            for block in (1 << 20, 64 << 10, 4 << 20):
                order = np.random.default_rng(2).permutation(np.arange(0, BATCH_BYTES, block)).tolist()
                cpu = [0.0, 0.0]

                def turn(side: int, work: Any, how: Any, order: list[int] = order, block: int = block, op: str = op, cpu: Any = cpu) -> Any:
                    def run() -> list[float]:
                        began, used = time.perf_counter(), time.process_time()
                        for start in range(0, size, BATCH_BYTES):
                            work.move(how, start, order, block)
                            if op == "write":
                                os.fdatasync(fd)
                        cpu[side] += time.process_time() - used
                        return [(time.perf_counter() - began) / BATCHES]

                    return run

                harness.wait_until_quiet()
                machine = harness.Machine()
                ours, theirs = harness.in_turns(repeats, turn(0, ring, prepare), turn(1, threads, call), machine=machine)
                row = harness.compared(ours, theirs, bytes_a_call=BATCH_BYTES)
                row |= {"cpu_ratio": round(cpu[0] / cpu[1], 2), "foreign_cpu": machine.kept}
                harness.emit(bench="uring", op=op, block_bytes=block, **row)
        ring.close()
    finally:
        os.close(fd)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure; half a GiB is used for a while")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each (default 7)")
    arguments = parser.parse_args()
    if uring is None:
        parser.exit(1, "this wants liburing: pip install liburing\n")
    rows(Path(tempfile.mkdtemp(prefix="bench-uring-", dir=arguments.folder)), arguments.repeats)


if __name__ == "__main__":
    main()
