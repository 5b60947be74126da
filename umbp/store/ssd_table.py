"""The index of the SSD tier in shared memory: a file beside the DRAM segment, written by the pool, read by its clients.

    header (4 KiB) | buckets | entries

It is made anew at each start, since the tier is read from its disks then; clients map it when they connect. Like the DRAM index it says
what is there and protects nothing: a page that is listed may be gone, or turn out unreadable, when it is asked for.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np

from umbp.errors import OutOfMemory, SegmentError
from umbp.store.index import BUCKET_SLOTS, ENTRY_WORDS, IndexReader, IndexWriter, buckets_for
from umbp.store.memory import Mapping
from umbp.store.segment import file_stem
from umbp.types import U64

MAGIC = int.from_bytes(b"UMBPSSDX", "little")
FORMAT = 1
HEADER_BYTES = 4096
SUFFIX = ".ssd"
H_MAGIC, H_FORMAT, H_ENTRIES, H_SEED, H_MOVES, H_VERSIONS = range(6)


def path_of(directory: str, name: str) -> str:
    """The file of a pool."""
    return os.path.join(directory, file_stem(name) + SUFFIX)


class SsdTable:
    """The file, mapped by its pool."""

    def __init__(self, directory: str, name: str, entries: int, seed: int) -> None:
        self.path = path_of(directory, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        size = HEADER_BYTES + (buckets_for(entries) * BUCKET_SLOTS + entries * ENTRY_WORDS) * 8
        room = os.statvfs(directory)
        if size > room.f_bavail * room.f_frsize:
            why = f"the index of {entries} pages takes {size} bytes in {directory}, which has {room.f_bavail * room.f_frsize} free"
            raise OutOfMemory(why, field="ssd_keys_max", example="--ssd-keys-max 100000")
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a store into a page that there is no room for would end the process
            self._mapping = Mapping(fd, size, writable=True)
        except OSError as error:
            os.unlink(self.path)
            raise OutOfMemory(
                f"{directory} has no {size} bytes for the index of the SSD tier ({error.strerror})", field="shm_dir"
            ) from error
        finally:
            os.close(fd)
        words = self._mapping.array[:HEADER_BYTES].view(np.uint64)
        words[H_FORMAT], words[H_ENTRIES], words[H_SEED], words[H_MAGIC] = FORMAT, entries, seed, MAGIC
        buckets, rows = _parts(self._mapping, entries)
        self.writer = IndexWriter(buckets, rows, words[H_MOVES : H_MOVES + 1], seed, words[H_VERSIONS : H_VERSIONS + 1])

    def close(self) -> None:
        """Remove the file; who has it mapped keeps it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def reader(path: str) -> IndexReader:
    """The index, as a client reads it. SegmentError if the file is none of this format; OSError as the system says."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise SegmentError(f"{path}: {size} bytes is too short for an index")
        mapping = Mapping(fd, size, writable=False)
    finally:
        os.close(fd)
    words = mapping.array[:HEADER_BYTES].view(np.uint64)
    entries = int(words[H_ENTRIES])
    expected = HEADER_BYTES + (buckets_for(entries) * BUCKET_SLOTS + entries * ENTRY_WORDS) * 8
    if int(words[H_MAGIC]) != MAGIC or int(words[H_FORMAT]) != FORMAT or size != expected:
        raise SegmentError(f"{path}: not an index of format {FORMAT}")
    buckets, rows = _parts(mapping, entries)
    return IndexReader(buckets, rows, words[H_MOVES : H_MOVES + 1], int(words[H_SEED]))


def _parts(mapping: Mapping, entries: int) -> tuple[U64, U64]:
    words = mapping.array[HEADER_BYTES:].view(np.uint64)
    cut = buckets_for(entries) * BUCKET_SLOTS
    return words[:cut].reshape(-1, BUCKET_SLOTS), words[cut : cut + entries * ENTRY_WORDS].reshape(-1, ENTRY_WORDS)
