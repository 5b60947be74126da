"""Who moves the bytes of one disk: the pool's own threads, or the process beside it (`umbp.store.ssd_hands`) where there is one.

Without hands, and for what they cannot do (memory that is not the segment's, files that they do not know, a socket that is full), it is the
threads. Whoever asks does not see who did it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from umbp.store.ssd_hands import Hands
from umbp.store.ssd_reads import Run
from umbp.store.ssd_records import Record
from umbp.store.ssd_system import READERS, WRITERS, System, Workers
from umbp.types import U8

_T = TypeVar("_T")


class Crew:
    """Of one disk."""

    def __init__(self, system: System, name: str, hands: Hands | None = None) -> None:
        self.system, self.hands = system, hands
        self._readers = Workers(READERS, f"ssd-read-{name}")
        self._writers = Workers(WRITERS, f"ssd-write-{name}")
        self._forgetting: list[Future[None]] = []

    def __repr__(self) -> str:
        return f"<Crew of threads{f' and {self.hands!r}' if self.hands else ''}>"

    def submit(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Have one of the pool's reading threads do this."""
        return self._readers.submit(call, *arguments)

    def read(self, runs: Sequence[Run]) -> list[Future[U8]]:
        """Read these; the codes of each (`ssd_reads`)."""
        hands = self.hands
        if hands and all(run.offsets is not None and hands.can(run.fd) for run in runs):
            return hands.read(runs, self._read, self._readers)
        return [self._readers.submit(self._read, run) for run in runs]

    def write(self, records: Sequence[Record]) -> list[Future[Any]]:
        """Write these; (n,) of `PAGE` each, or OSError as the disk says."""
        hands = self.hands
        if hands and all(record.draft.offsets is not None and hands.can(record.file.fd) for record in records):
            return hands.write(records, self._write, self._writers)
        return [self._writers.submit(self._write, record) for record in records]

    def opened(self, fd: int) -> None:
        """A file of pages, or the lock of the folder."""
        if self.hands:
            self.hands.know(fd)

    def closing(self, fds: Sequence[int]) -> None:
        """Before these are closed. Nothing may be under way in them."""
        if self.hands:
            self._forgetting.append(self.hands.forget(fds, self._readers))

    def forgotten(self) -> list[Future[None]]:
        """Done when nobody has any more what was closed."""
        done, self._forgetting = self._forgetting, []
        return done

    def close(self) -> None:
        """End the threads when they have done what they have; nobody waits for that."""
        self._readers.close()
        self._writers.close()

    def _read(self, run: Run) -> U8:
        return run.read(self.system)

    def _write(self, record: Record) -> Any:
        return record.write(self.system)
