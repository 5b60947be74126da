"""What a rank of a group on GPUs posts for the others, in its piece of the segment: its card, its table, and what it is about to push.

    words (4 KiB) | table: entry ids | table: slots | card

Only its rank writes to it. The *card* says where the rank's memory is and which process it is; it is there before the rank first joins.
The *table* is posted under a sequence number before each join, and the roster names that number: a reader copies the table and then looks
at the number again. The *announcement* is made when the rank has dealt the pages, before its first push of a round: what it takes the
deal to be, and whom it pushes to. Bytes never pass through here: kernels read them from the pool's pages.

Memory order is that of x86, as in `umbp.loader.area`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from umbp.loader.area import TABLE_PAGES_MAX
from umbp.loader.runtime import Fault
from umbp.types import I64, U8, U64

WORDS_BYTES = 4096
TABLE_BYTES = TABLE_PAGES_MAX * 8
CARD_AT = WORDS_BYTES + 2 * TABLE_BYTES
CARD_BYTES_MAX = 128 << 10
BOARD_BYTES = CARD_AT + CARD_BYTES_MAX

W_SEQUENCE, W_PAGES, W_HELPS, W_STAGED, W_DIGEST, W_SERVES, W_CARD_BYTES, W_CARD_SUM = range(8)


class Card(msgspec.Struct, frozen=True, array_like=True):
    """A rank's process and memory. Memory is (index into ``handles``, offset); ``addresses`` are the same in its own process.

    ``token``: of this loader and no other. ``started``: of the process, with the pid its name for good; ``holder``: of its mapping of the
    segment. ``blocks``: of each of its launches. ``planes`` and ``strides``: one a tensor in the loader's order, how far apart its slots
    lie; no planes if ``unmapped`` says why not.
    """

    token: int
    runtime: str
    pid: int
    started: int
    holder: int
    blocks: int
    handles: list[bytes]
    addresses: list[int]
    pad: tuple[int, int]
    staging: tuple[int, int]
    staging_bytes: int
    planes: list[tuple[int, int]]
    strides: list[int]
    unmapped: str


@dataclass(frozen=True, slots=True)
class Table:
    """What a rank wants: ids and slots (n,) int64 each; whether it reads for others; whether it must be reached through staging."""

    ids: I64
    slots: I64
    helps: bool
    staged: bool


class Board:
    """A view of one rank's piece, its own or another's."""

    def __init__(self, memory: U8) -> None:
        assert len(memory) >= BOARD_BYTES, f"a board of {len(memory)} bytes"
        self.words: U64 = memory[:WORDS_BYTES].view(np.uint64)
        self._ids: I64 = memory[WORDS_BYTES : WORDS_BYTES + TABLE_BYTES].view(np.int64)
        self._slots: I64 = memory[WORDS_BYTES + TABLE_BYTES : CARD_AT].view(np.int64)
        self._card = memory[CARD_AT:BOARD_BYTES]

    def __repr__(self) -> str:
        return f"<Board with table {int(self.words[W_SEQUENCE])}>"

    def put_card(self, card: Card) -> None:
        """Before the rank joins for the first time. Fault if it has too many tensors for it."""
        text = np.frombuffer(msgspec.msgpack.encode(card), np.uint8)
        if len(text) > CARD_BYTES_MAX:
            raise Fault(f"{len(card.planes)} tensors in {len(card.handles)} allocations are too many to be named to other ranks")
        self._card[: len(text)] = text
        self.words[W_CARD_SUM] = xxhash.xxh3_64_intdigest(text.tobytes())
        self.words[W_CARD_BYTES] = len(text)

    def card_or_none(self) -> Card | None:
        """The card, if it is whole."""
        size = int(self.words[W_CARD_BYTES])
        if not 0 < size <= CARD_BYTES_MAX:
            return None
        text = self._card[:size].tobytes()
        if xxhash.xxh3_64_intdigest(text) != int(self.words[W_CARD_SUM]):
            return None
        try:
            return msgspec.msgpack.decode(text, type=Card)
        except msgspec.DecodeError:
            return None

    def post(self, sequence: int, ids: I64, slots: I64, *, helps: bool, staged: bool) -> None:
        """Say what this rank wants from now on."""
        self.words[W_SEQUENCE] = 0
        self._ids[: len(ids)], self._slots[: len(slots)] = ids, slots
        self.words[W_PAGES], self.words[W_HELPS], self.words[W_STAGED] = len(ids), helps, staged
        self.words[W_SEQUENCE] = sequence

    def table_or_none(self, sequence: int, pages: int) -> Table | None:
        """This table; None if the rank has moved on to another."""
        if int(self.words[W_SEQUENCE]) != sequence or int(self.words[W_PAGES]) != pages:
            return None
        table = Table(self._ids[:pages].copy(), self._slots[:pages].copy(), bool(self.words[W_HELPS]), bool(self.words[W_STAGED]))
        return table if int(self.words[W_SEQUENCE]) == sequence else None

    def announce(self, digest: int, serves: int) -> None:
        """What this rank takes the deal to be, and one bit for each rank that it pushes to."""
        self.words[W_SERVES] = serves
        self.words[W_DIGEST] = digest

    def announced(self, digest: int) -> int | None:
        """Whom it pushes to, once it has announced this deal."""
        return int(self.words[W_SERVES]) if int(self.words[W_DIGEST]) == digest else None
