"""The notes of a folder on pages that are no more though their file still holds them: `removed.log`.

Appended to; written anew, without the notes on files that are no more, when it has grown to twice what then was left. What the disk does
not take is kept, and goes with the next note: a page whose death was never written down could come back long after. One thread, the
folder's own.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np

from umbp.store.ssd_format import REMOVAL, decode_removals, encode_removals
from umbp.store.ssd_system import System, read_file, replace_file, write_all
from umbp.types import I64, U64

NAME = "removed.log"
SPARE = 4096  # notes by which it may grow in any case: 128 KiB


class RemovalLog:
    """See above."""

    def __init__(self, folder: str, system: System) -> None:
        self.folder = folder
        self.system = system
        self._fd: int | None = None
        self._bytes = 0
        self._bytes_max = 0
        self._unsaid = b""

    def __repr__(self) -> str:
        return f"<RemovalLog of {self.folder}, {self._bytes // REMOVAL.itemsize} notes>"

    def open(self, known: U64) -> tuple[U64, U64]:
        """The notes on files with these numbers: (number, sequence number) each."""
        self._fd = self.system.open(os.path.join(self.folder, NAME), create=True)
        data = read_file(self.system, self._fd)
        if not data:
            self.system.sync_folder(self.folder)
        numbers, sequences = decode_removals(data)
        here = np.isin(numbers, known)
        self._has(len(data) // REMOVAL.itemsize * REMOVAL.itemsize)
        return numbers[here], sequences[here]

    def note(self, numbers: I64 | U64, sequences: I64 | U64, *, sync: bool) -> None:
        """Append; with ``sync`` all of it survives a power cut from here on."""
        assert self._fd is not None
        self._unsaid += encode_removals(numbers, sequences)
        write_all(self.system, self._fd, [self._unsaid], self._bytes, len(self._unsaid))
        self._bytes += len(self._unsaid)
        self._unsaid = b""
        if sync:
            self.system.sync(self._fd)

    @property
    def behind(self) -> bool:
        """Whether there are notes that the disk has not taken yet."""
        return bool(self._unsaid)

    @property
    def has_grown(self) -> bool:
        """Whether it is time for `write_anew`."""
        return self._bytes > self._bytes_max

    def write_anew(self, known: U64) -> None:
        """Keep the notes on files with these numbers only."""
        assert self._fd is not None
        numbers, sequences = decode_removals(read_file(self.system, self._fd)[: self._bytes])
        here = np.isin(numbers, known)
        text = encode_removals(numbers[here], sequences[here])
        replace_file(self.system, self.folder, NAME, text)
        self.close()
        self._fd = self.system.open(os.path.join(self.folder, NAME))
        self._has(len(text))

    def close(self) -> None:
        """Let the file go."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self.system.close(self._fd)
        self._fd = None

    def _has(self, size_bytes: int) -> None:
        self._bytes, self._bytes_max = size_bytes, 2 * size_bytes + SPARE * REMOVAL.itemsize
