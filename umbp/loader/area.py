"""A rank's area: the piece of the segment that it writes and all ranks of its group read.

    words (4 KiB): header | one word a ring slot | one word an owner     table: entry ids     ring: RING_SLOTS slots of equal size

Only its rank writes to it. The *table* says what the rank wants; it is posted under a sequence number before the rank joins, and its
roster names that number. A reader copies the table and then looks at the number again: if it changed, the rank has moved on.

A *ring slot* holds one unit (one layer of some pages) and its word says which. The word is even while the slot is being written and odd
when it is whole, and it only grows: ``(round << 24 | unit + 1) << 1 | whole``. A reader that finds the word it waits for, copies, and
finds it unchanged, has copied that unit and nothing else. The *owners' words* say which unit of each owner this rank has copied last.

Memory order is that of x86 (as in `umbp.store.index`): the word that announces comes after the bytes, the word that warns before them. A
copy that stores past the caches is fenced at its end, and none of it begins before the warning has left: between the two lies the
interpreter's lock, whose hand-over is a full fence.
"""

from __future__ import annotations

import numpy as np

from umbp.errors import InvalidRequest
from umbp.types import I64, U8, U64

WORDS_BYTES = 4096
TABLE_PAGES_MAX = 8192
RING_AT = WORDS_BYTES + TABLE_PAGES_MAX * 8
RING_SLOTS = 4  # one is written while two are read by ranks at different points; the fourth takes up jitter
AREA_BYTES_MIN = RING_AT + RING_SLOTS * 4096

W_SEQUENCE, W_PAGES, W_HELPS, W_DIGEST, W_STOPPED = range(5)
W_RING, RING_STRIDE = 64, 8  # a cache line each, since their readers poll
W_OWNERS = 128
UNIT_BITS = 24


def tag(round_number: int, unit: int) -> int:
    """Names one unit of one round; grows with both."""
    assert 0 <= unit < (1 << UNIT_BITS) - 1
    return round_number << UNIT_BITS | unit + 1


class Area:
    """A view of one rank's area, its own or another's."""

    def __init__(self, memory: U8) -> None:
        if len(memory) < AREA_BYTES_MIN:
            raise InvalidRequest(f"an area of {len(memory)} bytes", field="staging_bytes", example=str(AREA_BYTES_MIN))
        self.words: U64 = memory[:WORDS_BYTES].view(np.uint64)
        self._ids: I64 = memory[WORDS_BYTES:RING_AT].view(np.int64)
        self.slot_bytes = (len(memory) - RING_AT) // RING_SLOTS // 4096 * 4096
        self._ring = memory[RING_AT : RING_AT + RING_SLOTS * self.slot_bytes].reshape(RING_SLOTS, self.slot_bytes)

    def __repr__(self) -> str:
        return f"<Area with table {int(self.words[W_SEQUENCE])}, slots of {self.slot_bytes} bytes>"

    # -- the table ---------------------------------------------------------------------------------------------------------------------

    def post(self, sequence: int, ids: I64, *, helps: bool) -> None:
        """Say what this rank wants from now on."""
        self.words[W_SEQUENCE] = 0
        self._ids[: len(ids)] = ids
        self.words[W_PAGES], self.words[W_HELPS] = len(ids), helps
        self.words[W_SEQUENCE] = sequence

    def table_or_none(self, sequence: int, pages: int) -> tuple[I64, bool] | None:
        """The ids of this table and whether its rank helps; None if the rank has moved on to another."""
        if int(self.words[W_SEQUENCE]) != sequence or int(self.words[W_PAGES]) != pages:
            return None
        ids, helps = self._ids[:pages].copy(), bool(self.words[W_HELPS])
        return (ids, helps) if int(self.words[W_SEQUENCE]) == sequence else None

    # -- the ring ----------------------------------------------------------------------------------------------------------------------

    def slot(self, unit: int) -> U8:
        """The slot that this unit passes through."""
        slot: U8 = self._ring[unit % RING_SLOTS]
        return slot

    def begin(self, round_number: int, unit: int) -> None:
        """Before the unit's slot is overwritten."""
        self.words[W_RING + unit % RING_SLOTS * RING_STRIDE] = tag(round_number, unit) << 1

    def publish(self, round_number: int, unit: int) -> None:
        """The unit is whole."""
        self.words[W_RING + unit % RING_SLOTS * RING_STRIDE] = tag(round_number, unit) << 1 | 1

    def state(self, round_number: int, unit: int) -> int:
        """-1: it is not there yet. 0: it is whole. 1: it was overwritten."""
        word, whole = int(self.words[W_RING + unit % RING_SLOTS * RING_STRIDE]), tag(round_number, unit) << 1 | 1
        return (word > whole) - (word < whole)

    def newest(self) -> int:
        """Grows whenever the rank begins or publishes a unit."""
        return int(self.words[W_RING : W_RING + RING_SLOTS * RING_STRIDE : RING_STRIDE].max())

    def announce(self, digest: int) -> None:
        """Before the first unit of a round: what this rank takes the windows to be."""
        self.words[W_DIGEST] = digest

    @property
    def digest(self) -> int:
        """See `announce`."""
        return int(self.words[W_DIGEST])

    def stop(self, round_number: int) -> None:
        """This rank publishes nothing more of a round."""
        self.words[W_STOPPED] = round_number

    def stopped(self, round_number: int) -> bool:
        """Whether it does not."""
        return int(self.words[W_STOPPED]) >= round_number

    # -- what was copied ---------------------------------------------------------------------------------------------------------------

    def consume(self, owner: int, round_number: int, unit: int) -> None:
        """This rank has copied a unit of an owner, or does not need it any more."""
        self.words[W_OWNERS + owner] = tag(round_number, unit)

    def consumed(self, owner: int, round_number: int, unit: int) -> bool:
        """Whether this rank has copied that unit of that owner, or a later one."""
        return int(self.words[W_OWNERS + owner]) >= tag(round_number, unit)
