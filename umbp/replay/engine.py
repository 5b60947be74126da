"""One engine of a replay: `python -m umbp.replay.engine` answers requests from standard input until it ends.

A request goes the way it goes in a serving engine: which leading pages are stored, load those, recompute and store the rest. "Recompute"
makes a page's bytes from its key, so that whoever loads the page later, in whichever process, can tell each byte.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np

from umbp.client.sync import Namespace, Pool, connect
from umbp.errors import LeaseLost, UmbpError
from umbp.layout import KEYS_PER_CALL_MAX, Layout
from umbp.replay.messages import Answer, Done, Failure, Job, Ready, Setup, ids_of
from umbp.sim.workload import TraceRequest, block_keys, page_bytes, wrong_pages
from umbp.types import U8, Mask, ReadStatus, Statuses, WriteStatus

CHUNK_BYTES = 32 << 20  # pages in this process's own memory at a time; a request may have 2,200 pages of 4.5 MB


@dataclass(slots=True)
class Counts:
    """What one request came to, so far."""

    hit_pages: int = 0
    read_pages: int = 0
    wrong_pages: int = 0
    lookup_s: float = 0.0
    get_s: float = 0.0
    put_s: float = 0.0
    reads: Counter[int] = field(default_factory=Counter)
    writes: Counter[int] = field(default_factory=Counter)


class Engine:
    """A client of the pool that makes one request after the other."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool: Pool = connect(setup.socket, client="umbp replay")
        self._namespaces: dict[int, Namespace] = {}
        self._rows = max(1, min(KEYS_PER_CALL_MAX, CHUNK_BYTES // setup.object_bytes))
        self._buffer = np.zeros((self._rows, setup.object_bytes), np.uint8)  # zeros: faulted in before anything is timed

    def __repr__(self) -> str:
        return f"<Engine of {self.setup.socket}>"

    def serve(self, job: Job) -> Done:
        """Make one request."""
        namespace, counts = self._namespace(job.block_tokens), Counts()
        ids = ids_of(job.ranges)
        request = TraceRequest(0.0, job.session, "main", ids, len(ids) * job.block_tokens, 0, job.block_tokens)
        keys = block_keys(request, self.setup.seed)
        self._load(namespace, keys[: self._prefix(namespace, keys, job.session, counts)], counts)
        self._store(namespace, keys, counts)
        return Done(
            index=job.index,
            pages=len(keys),
            hit_pages=counts.hit_pages,
            read_pages=counts.read_pages,
            wrong_pages=counts.wrong_pages,
            stored_pages=counts.writes.pop(WriteStatus.STORED, 0),
            existing_pages=counts.writes.pop(WriteStatus.EXISTS, 0),
            lookup_s=counts.lookup_s,
            get_s=counts.get_s,
            put_s=counts.put_s,
            unread={ReadStatus(code).name.lower(): count for code, count in counts.reads.items() if code != ReadStatus.HIT},
            refused={WriteStatus(code).code: count for code, count in counts.writes.items()},
        )

    def _namespace(self, block_tokens: int) -> Namespace:
        found = self._namespaces.get(block_tokens)
        if found is None:
            found = self._namespaces[block_tokens] = open_namespace(self.pool, self.setup, block_tokens)
        return found

    def _prefix(self, namespace: Namespace, keys: U8, session: str, counts: Counts) -> int:
        stored, started = 0, time.perf_counter()
        for start in range(0, len(keys), KEYS_PER_CALL_MAX):
            part = keys[start : start + KEYS_PER_CALL_MAX]
            leading = namespace.prefix(part, session=session)
            stored += leading
            if leading < len(part):
                break
        counts.lookup_s = time.perf_counter() - started
        return stored

    def _load(self, namespace: Namespace, keys: U8, counts: Counts) -> None:
        """Read and check pages; those up to the first that is not there any more are the hits."""
        read = self._read_leased if self.setup.leased else self._read
        whole = True
        for start in range(0, len(keys), self._rows):
            part = keys[start : start + self._rows]
            good, wrong = read(namespace, part, counts)
            counts.read_pages += int(np.count_nonzero(good))
            counts.wrong_pages += int(np.count_nonzero(good & wrong))
            if whole:
                counts.hit_pages += len(part) if good.all() else int(good.argmin())
            whole = whole and bool(good.all())

    def _read(self, namespace: Namespace, keys: U8, counts: Counts) -> tuple[Mask, Mask]:
        out = self._buffer[: len(keys)]
        started = time.perf_counter()
        statuses = namespace.get(keys, out)
        counts.get_s += time.perf_counter() - started
        counts.reads.update(statuses.counts())
        return statuses.where(ReadStatus.HIT), wrong_pages(keys, out, seed=self.setup.seed)

    def _read_leased(self, namespace: Namespace, keys: U8, counts: Counts) -> tuple[Mask, Mask]:
        """The same in place. What `Lease.check` does not vouch for afterwards was not read."""
        wrong = np.zeros(len(keys), np.bool_)
        expected = page_bytes(keys, self.setup.object_bytes, self._buffer[: len(keys)], seed=self.setup.seed)
        started = time.perf_counter()
        good = wrong
        with contextlib.suppress(LeaseLost), namespace.lease(keys) as lease:
            counts.get_s += time.perf_counter() - started
            for i in np.flatnonzero(lease.held).tolist():
                wrong[i] = not np.array_equal(lease.view(i), expected[i])
            good = lease.check()
            started = time.perf_counter()
        counts.get_s += time.perf_counter() - started
        counts.reads.update(Statuses(np.where(good, ReadStatus.HIT, ReadStatus.MISS).astype(np.uint8), ReadStatus).counts())
        return good, wrong

    def _store(self, namespace: Namespace, keys: U8, counts: Counts) -> None:
        for start in range(counts.hit_pages, len(keys), self._rows):
            part = keys[start : start + self._rows]
            values = page_bytes(part, self.setup.object_bytes, self._buffer[: len(part)], seed=self.setup.seed)
            parent = keys[start - 1].tobytes() if start else None
            started = time.perf_counter()
            statuses = namespace.put(part, values, parent=parent)
            counts.put_s += time.perf_counter() - started
            counts.writes.update(statuses.counts())


def open_namespace(pool: Pool, setup: Setup, block_tokens: int) -> Namespace:
    """The namespace that all engines of a replay share, and replays of one workload and seed after one another."""
    return pool.namespace(
        model="umbp-replay",
        revision=f"{setup.workload}, seed {setup.seed}",
        page_tokens=block_tokens,
        layout=Layout.opaque(setup.object_bytes),
        dtype="uint8",
        replicated=True,
    )


def main() -> int:
    """Serve until standard input ends; so no engine outlives its driver."""
    lines, out = sys.stdin.buffer, sys.stdout.buffer

    def say(answer: Answer) -> None:
        out.write(msgspec.json.encode(answer) + b"\n")
        out.flush()

    decoder = msgspec.json.Decoder(Job)
    try:
        engine = Engine(msgspec.json.decode(lines.readline(), type=Setup))
        say(Ready())
        for line in lines:
            say(engine.serve(decoder.decode(line)))
        engine.pool.close()
    except UmbpError as error:
        say(Failure(error.code, str(error)))
        return 1
    except BrokenPipeError:  # the driver is gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
