"""What lies on the disk: segment files of records, their summaries, the notes of removals, and the folder's own description.

The format
----------
A folder holds one `folder.meta` (`Meta`), one `removed.log` (`removal`), and segment files `segment-SLOT.umbp`, all of one size. Everything
is little-endian, aligned to blocks of 4 KiB, and carries an xxh3-64 of itself.

    segment file   header | record | record | ... | (free) | summary | trailer
    record         head (whole blocks) | body | body | ...          bodies of one namespace and one size, each padded to whole blocks
    head           fixed part: file number, its own place, first sequence number, namespace digest, page size, day and bytes of that day
                   then an item a body: key, check, whole;  then the sums of each body's pieces of 128 KiB
    summary        where each page of a sealed file lies, so that a start reads 80 bytes a page and no page
    trailer        the last block of the file: where the summary is, and its checksum

A segment file gets a *number* that is never used again in its folder each time it is begun; every record carries it, so what a reused file
still holds of its former life is not taken for a record of this one. Each page gets a *sequence number*, which grows over the life of the
folder: of two copies of a page the later one counts, and a flush is "nothing of this namespace below that number".

Checks: ``pieces`` are the sums of a body's pieces (a ranged read is widened to pieces and verified by them); ``check`` is the sum of those
sums, kept in memory (a whole read is verified without the head); ``whole`` is the sum that the page has in DRAM, 0 if it had none.

`FORMAT` is in every header and in `folder.meta`. What is of another format is refused, never guessed at and never overwritten.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from umbp.errors import SegmentError
from umbp.types import I64, U8, U64

FORMAT = 1
BLOCK = 4096
PIECE_BYTES = 128 << 10  # a range of layers (36 to 74 KB each) is widened by at most two; xxhash lets the interpreter lock go above 64 KiB
HEADER_MAGIC, FREE_MAGIC, RECORD_MAGIC = b"UMBPSSD1", b"UMBPFREE", b"UMBPREC1"
SUMMARY_MAGIC, TRAILER_MAGIC, META_MAGIC = b"UMBPSUM1", b"UMBPEND1", b"UMBPDIR1"
META_BYTES_MAX = 16 << 20

_HEADER = struct.Struct("<8sIIQQ16sQ")  # magic, format, block, number, segment bytes, folder, sum
_HEAD = struct.Struct("<8sIIQIIQIIQ32sIQQ")  # see `RecordHead`; the sum is last
_TRAILER = struct.Struct("<8sQQQQQQ")  # magic, number, summary block, summary bytes, summary sum, record end block, sum
_SUMMARY = struct.Struct("<8sQQIQI")  # magic, number, pages, day, bytes of the day, namespaces
_META = struct.Struct("<8sIIQ")  # magic, format, bytes of text, sum
ITEM = np.dtype([("key", "V32"), ("check", "<u8"), ("whole", "<u8")])
PAGE = np.dtype(
    [
        ("key", "V32"),
        ("check", "<u8"),
        ("whole", "<u8"),
        ("sequence", "<u8"),
        ("block", "<u4"),  # of the body
        ("back", "<u4"),  # blocks from the head to the body
        ("size", "<u8"),
        ("namespace", "<u4"),
        ("spare", "<u4"),
    ]
)
REMOVAL = np.dtype([("number", "<u8"), ("sequence", "<u8"), ("spare", "<u8"), ("sum", "<u8")])


def digest64(data: Any) -> int:
    """The checksum of all structures."""
    return xxhash.xxh3_64_intdigest(data)


def blocks(size_bytes: int) -> int:
    """Blocks that this many bytes take."""
    return -(-size_bytes // BLOCK)


def padded(size_bytes: int) -> int:
    """Bytes on disk of a body of this size."""
    return blocks(size_bytes) * BLOCK


def pieces(size_bytes: int) -> int:
    """Pieces of a body of this size."""
    return -(-size_bytes // PIECE_BYTES)


def piece_sums(body: memoryview) -> U64:
    """One sum a piece of 128 KiB, the last one may be shorter."""
    digest = xxhash.xxh3_64_intdigest
    if len(body) <= PIECE_BYTES:
        return np.array([digest(body)], np.uint64)
    return np.fromiter((digest(body[at : at + PIECE_BYTES]) for at in range(0, len(body), PIECE_BYTES)), np.uint64, pieces(len(body)))


def check_of(sums: U64) -> int:
    """The check of a body whose pieces have these sums; never 0."""
    return digest64(sums.data) or 1


def body_sums(bodies: Sequence[memoryview]) -> U64:
    """`piece_sums` of bodies of one size: (n, pieces). For many small ones a third of the time, for which the interpreter lock is held."""
    if len(bodies[0]) > PIECE_BYTES:
        return np.stack([piece_sums(body) for body in bodies])
    return np.fromiter(map(xxhash.xxh3_64_intdigest, bodies), np.uint64, len(bodies)).reshape(-1, 1)


def checks_of(sums: U64) -> list[int]:
    """`check_of` of each row."""
    digest, data, step = xxhash.xxh3_64_intdigest, sums.tobytes(), 8 * sums.shape[1]
    return [digest(data[at : at + step]) or 1 for at in range(0, len(data), step)]


# -- headers -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """The first block of a segment file. ``free``: whatever else it holds does not count; ``number`` is that of its last life."""

    number: int
    segment_bytes: int
    folder: bytes
    free: bool = False


def encode_header(header: Header) -> bytes:
    """One block."""
    magic = FREE_MAGIC if header.free else HEADER_MAGIC
    part = _HEADER.pack(magic, FORMAT, BLOCK, header.number, header.segment_bytes, header.folder, 0)[:-8]
    return (part + digest64(part).to_bytes(8, "little")).ljust(BLOCK, b"\0")


def decode_header(data: bytes | memoryview) -> Header | None:
    """None if this is no header. SegmentError if it is one of another format."""
    if len(data) < _HEADER.size:
        return None
    magic, version, block, number, size, folder, total = _HEADER.unpack_from(data)
    if magic not in (HEADER_MAGIC, FREE_MAGIC) or total != digest64(bytes(data[: _HEADER.size - 8])):
        return None
    if version != FORMAT or block != BLOCK:
        raise SegmentError(f"a segment file is of format {version}, this version reads {FORMAT}", field="ssd")
    return Header(number, size, folder, magic == FREE_MAGIC)


# -- records -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordHead:
    """A record's head: ``items`` is (n,) of `ITEM`, ``sums`` (n, pieces) uint64. ``at`` and ``blocks`` in blocks, the head included."""

    number: int
    at: int
    sequence: int
    day: int
    day_bytes: int
    namespace: bytes
    size: int
    items: Any
    sums: U64

    @property
    def head_blocks(self) -> int:
        """Blocks of the head."""
        return head_blocks(len(self.items), self.size)

    @property
    def blocks(self) -> int:
        """Blocks of head and bodies."""
        return self.head_blocks + len(self.items) * blocks(self.size)

    def body_at(self, item: int) -> int:
        """Block of a body."""
        return self.at + self.head_blocks + item * blocks(self.size)

    def pages(self, namespace: int) -> Any:
        """What the summary says of its bodies: (n,) of `PAGE`."""
        n, size = len(self.items), blocks(self.size)
        made = np.zeros(n, PAGE)
        made["key"], made["check"], made["whole"] = self.items["key"], self.items["check"], self.items["whole"]
        made["sequence"] = self.sequence + np.arange(n)
        made["back"] = self.head_blocks + np.arange(n) * size
        made["block"] = self.at + made["back"]
        made["size"], made["namespace"] = self.size, namespace
        return made


def head_blocks(items: int, size_bytes: int) -> int:
    """Blocks of the head of a record of this many bodies of this size."""
    return blocks(_HEAD.size + items * (ITEM.itemsize + 8 * pieces(size_bytes)))


def encode_head(head: RecordHead) -> bytes:
    """Whole blocks."""
    n, length = len(head.items), head.head_blocks
    fixed = _HEAD.pack(
        *(RECORD_MAGIC, length, n, head.number, head.at, head.blocks, head.sequence, head.day, PIECE_BYTES, head.day_bytes),
        *(head.namespace, FORMAT, head.size, 0),
    )[:-8]
    rest = head.items.tobytes() + np.ascontiguousarray(head.sums).tobytes()
    text: bytes = fixed + digest64(fixed + rest).to_bytes(8, "little") + rest
    return text.ljust(length * BLOCK, b"\0")


def head_length(data: memoryview, number: int, at: int) -> int:
    """Blocks of the head that seems to begin here; 0 if none of this file and place does. ``data``: at least its first block."""
    if len(data) < _HEAD.size or data[:8] != RECORD_MAGIC:
        return 0
    found = _HEAD.unpack_from(data)
    length, n, size = found[1], found[2], found[12]
    if found[3] != number or found[4] != at or n == 0 or length != head_blocks(n, size):
        return 0
    return int(length)


def decode_head(data: memoryview, number: int, at: int) -> RecordHead | None:
    """The head that begins ``data``, or None if there is none of this file and place, or it is damaged."""
    length = head_length(data, number, at)
    if not length or length * BLOCK > len(data):
        return None
    _, _, n, _, _, total, sequence, day, piece, day_bytes, namespace, version, size, summed = _HEAD.unpack_from(data)
    end = _HEAD.size + n * (ITEM.itemsize + 8 * pieces(size))
    if summed != digest64(bytes(data[: _HEAD.size - 8]) + bytes(data[_HEAD.size : end])) or version != FORMAT or piece != PIECE_BYTES:
        return None
    items = np.frombuffer(bytes(data[_HEAD.size : _HEAD.size + n * ITEM.itemsize]), ITEM)
    sums = np.frombuffer(bytes(data[_HEAD.size + n * ITEM.itemsize : end]), np.uint64).reshape(n, -1)
    head = RecordHead(number, at, sequence, day, day_bytes, namespace, size, items, sums)
    return head if head.blocks == total else None


# -- summaries ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """All pages of one segment file: ``pages`` (n,) of `PAGE`, whose ``namespace`` indexes ``namespaces`` (digests)."""

    number: int
    day: int
    day_bytes: int
    namespaces: list[bytes]
    pages: Any


def summary_bytes(pages_count: int, namespaces_count: int) -> int:
    """Size of a summary, padded."""
    return padded(_SUMMARY.size + 32 * namespaces_count + PAGE.itemsize * pages_count)


def encode_summary(summary: Summary, at: int) -> tuple[bytes, bytes]:
    """The summary, padded to whole blocks, and the trailer block that leads to it at block ``at``."""
    count = len(summary.namespaces)
    fixed = _SUMMARY.pack(SUMMARY_MAGIC, summary.number, len(summary.pages), summary.day, summary.day_bytes, count)
    text = fixed + b"".join(summary.namespaces) + summary.pages.tobytes()
    part = _TRAILER.pack(TRAILER_MAGIC, summary.number, at, len(text), digest64(text), at, 0)[:-8]
    trailer = (part + digest64(part).to_bytes(8, "little")).ljust(BLOCK, b"\0")
    return text.ljust(padded(len(text)), b"\0"), trailer


def decode_trailer(data: bytes | memoryview, number: int) -> tuple[int, int, int] | None:
    """(block, bytes, sum) of the summary of the file of this number; None if it is not sealed."""
    magic, owner, at, length, total, _, own = _TRAILER.unpack_from(data)
    if magic != TRAILER_MAGIC or owner != number or own != digest64(bytes(data[: _TRAILER.size - 8])):
        return None
    return at, length, total


def decode_summary(data: bytes | memoryview, number: int, total: int) -> Summary | None:
    """None if it is damaged. ``data`` is just the summary, without padding."""
    if digest64(data) != total:
        return None
    _, owner, n, day, day_bytes, count = _SUMMARY.unpack_from(data)
    start = _SUMMARY.size + 32 * count
    if owner != number or len(data) != start + n * PAGE.itemsize:
        return None
    names = [bytes(data[at : at + 32]) for at in range(_SUMMARY.size, start, 32)]
    return Summary(number, day, day_bytes, names, np.frombuffer(data, PAGE, n, start))


# -- removals ----------------------------------------------------------------------------------------------------------------------


def encode_removals(numbers: I64 | U64, sequences: I64 | U64) -> bytes:
    """Notes that these pages, by the number of their file and their sequence number, are no more: 32 bytes each."""
    made = np.zeros(len(numbers), REMOVAL)
    made["number"], made["sequence"] = numbers, sequences
    made["sum"] = [digest64(each[:24]) for each in _rows(made)]
    return made.tobytes()


def decode_removals(data: bytes) -> tuple[U64, U64]:
    """(numbers, sequences) of all notes that are whole; each stands for itself, so a damaged one costs no other."""
    made = np.frombuffer(data[: len(data) // REMOVAL.itemsize * REMOVAL.itemsize], REMOVAL)
    good = np.fromiter((digest64(each[:24]) for each in _rows(made)), np.uint64, len(made)) == made["sum"]
    return made["number"][good], made["sequence"][good]


def _rows(made: Any) -> list[bytes]:
    raw = made.tobytes()
    return [raw[at : at + REMOVAL.itemsize] for at in range(0, len(raw), REMOVAL.itemsize)]


# -- the folder --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NamespaceNote:
    """What a folder knows of a namespace: its identity as text, its page size, its quota, and that nothing below ``flushed`` counts."""

    canonical: str = ""
    object_bytes: int = 0
    quota_bytes: int = 0
    flushed: int = 0


@dataclass(slots=True)
class Meta:
    """`folder.meta`. ``namespaces`` by digest."""

    folder: bytes
    segment_bytes: int
    namespaces: dict[bytes, NamespaceNote] = field(default_factory=dict)


def encode_meta(meta: Meta) -> bytes:
    """The file."""
    names = {
        digest.hex(): {"canonical": n.canonical, "object_bytes": n.object_bytes, "quota_bytes": n.quota_bytes, "flushed": n.flushed}
        for digest, n in meta.namespaces.items()
    }
    text = json.dumps({"folder": meta.folder.hex(), "segment_bytes": meta.segment_bytes, "namespaces": names}).encode()
    return _META.pack(META_MAGIC, FORMAT, len(text), digest64(FORMAT.to_bytes(4, "little") + text)) + text


def decode_meta(data: bytes) -> Meta | None:
    """None if it is damaged. SegmentError if it is of another format."""
    if len(data) < _META.size or data[:8] != META_MAGIC:
        return None
    _, version, length, total = _META.unpack_from(data)
    text = data[_META.size : _META.size + length]
    if len(text) != length or digest64(version.to_bytes(4, "little") + text) != total:
        return None
    if version != FORMAT:
        raise SegmentError(f"it is of format {version}, this version reads {FORMAT}", field="ssd", example="--ssd ANOTHER_FOLDER:SIZE")
    found = json.loads(text)
    names = {bytes.fromhex(digest): NamespaceNote(**note) for digest, note in found["namespaces"].items()}
    return Meta(bytes.fromhex(found["folder"]), int(found["segment_bytes"]), names)


def words_of(keys: U8) -> Any:
    """(n, 32) uint8 keys as (n,) of 32-byte items."""
    return np.ascontiguousarray(keys).reshape(-1).view("V32")
