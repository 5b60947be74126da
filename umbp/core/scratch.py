"""Scratch: pieces of the segment that a session uses for itself, such as the staging of a group load.

A piece is an entry that is reserved for its session, without a key, under a limbo account: never visible, never leased or evicted, counted
in the used bytes. It has no time limit. It is given back by its session, or when the session's process is gone or has let go, like memory
that a writer reserved; after a restart of the pool it is an orphan like any other (`Pool.adopt`).

Other processes read it. So whoever needs it to stay what it is *holds* it: a piece that was given back, or whose process died, goes to
nobody else before the last hold ends. Holds are the arbiter's (`umbp.core.groups`), which bounds them in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from umbp.core.objects import RESERVED, Account, Objects
from umbp.core.room import Room
from umbp.errors import InvalidRequest, LimitReached, NotFound
from umbp.store.index import place_word

PIECES_PER_SESSION_MAX = 32
PIECE_BYTES_MIN = 64 << 10
SHARE = 8  # one in this many bytes of the pool may be scratch, half of that for one session


@dataclass(slots=True)
class Piece:
    """One piece. ``holds``: how many rounds read it; ``returned``: its session is through with it."""

    number: int
    session: int
    entry: int
    offset: int
    size_bytes: int
    holds: int = 0
    returned: bool = False


class Scratch:
    """All pieces of one pool. ``limbo`` gives the account for objects of a size that belong to no namespace."""

    def __init__(self, objects: Objects, room: Room, limbo: Callable[[int], Account]) -> None:
        self.objects = objects
        self.room = room
        self.limbo = limbo
        self.bytes_max = objects.allocator.capacity_bytes // SHARE
        self.pieces: dict[int, Piece] = {}
        self.used_bytes = 0
        self._by_session: dict[int, dict[int, Piece]] = {}  # those not returned
        self._next = 1

    def __repr__(self) -> str:
        return f"<Scratch {self.used_bytes} of {self.bytes_max} bytes in {len(self.pieces)} pieces>"

    def take(self, now: float, session: int, size_bytes: int) -> Piece:
        """A piece of this many bytes. LimitReached if there is no room for it."""
        mine = self._by_session.get(session, {})
        if size_bytes < PIECE_BYTES_MIN:
            raise InvalidRequest(f"{size_bytes} bytes of scratch are too few", field="scratch", example=str(PIECE_BYTES_MIN))
        if len(mine) >= PIECES_PER_SESSION_MAX:
            raise LimitReached(f"this session has {len(mine)} pieces of scratch, which is the limit", field="scratch")
        used = sum(piece.size_bytes for piece in mine.values())
        left = min(self.bytes_max - self.used_bytes, self.bytes_max // 2 - used)
        if size_bytes > left:
            raise LimitReached(
                f"{size_bytes} bytes of scratch, {max(0, left)} are left: one in {SHARE} bytes of the pool is for it, half of that for one",
                field="scratch",
                example="a larger pool, or less staging",
            )
        account = self.limbo(size_bytes)
        offsets, reason = self.room.make_room(now, account, 1, session)
        if not len(offsets):
            raise LimitReached(f"no room for {size_bytes} bytes of scratch: {reason.code}", field="scratch")
        words = np.zeros((1, 4), np.uint64)
        ids = self.objects.take(words, place_word(account.number, size_bytes), offsets, session)
        self.objects.reserve(account, ids, offsets)
        piece = Piece(self._next, session, int(ids[0]), int(offsets[0]), size_bytes)
        self._next += 1
        self.pieces[piece.number] = piece
        self._by_session.setdefault(session, {})[piece.number] = piece
        self.used_bytes += size_bytes
        return piece

    def find(self, session: int, number: int) -> Piece:
        """A piece that this session has. NotFound if it has not."""
        piece = self._by_session.get(session, {}).get(number)
        if piece is None:
            raise NotFound(f"this session has no scratch {number}", field="scratch")
        return piece

    def give(self, session: int, number: int) -> None:
        """Give a piece back; its session does not write to it any more."""
        self._return(self.find(session, number))

    def has(self, session: int) -> bool:
        """Whether this session has pieces."""
        return session in self._by_session

    def end_session(self, session: int) -> None:
        """The session's process is gone or has let go."""
        for piece in list(self._by_session.get(session, {}).values()):
            self._return(piece)

    def hold(self, piece: Piece) -> None:
        """Others read it: it stays where it is until `unhold`."""
        piece.holds += 1

    def unhold(self, piece: Piece) -> None:
        """They are through."""
        piece.holds -= 1
        assert piece.holds >= 0, "let go more often than held"
        self._free_if_unused(piece)

    def check(self) -> None:
        """Each piece is a reserved entry, and the bytes sum up."""
        entries = np.array([piece.entry for piece in self.pieces.values()], np.int64)
        assert (self.objects.state[entries] == RESERVED).all(), "a piece is no reserved entry"
        assert len(np.unique(entries)) == len(entries)
        assert self.used_bytes == int(self.objects.size[entries].sum()) <= self.bytes_max
        assert all(piece.holds or not piece.returned for piece in self.pieces.values()), "a piece is kept that nobody needs"
        expected = {piece.number for piece in self.pieces.values() if not piece.returned}
        assert expected == {number for pieces in self._by_session.values() for number in pieces}

    def _return(self, piece: Piece) -> None:
        piece.returned = True
        self.objects.claims.end_piece(piece.session, piece.number)
        mine = self._by_session[piece.session]
        del mine[piece.number]
        if not mine:
            del self._by_session[piece.session]
        self._free_if_unused(piece)

    def _free_if_unused(self, piece: Piece) -> None:
        if piece.returned and not piece.holds:
            del self.pieces[piece.number]
            self.used_bytes -= piece.size_bytes
            self.objects.abandon(np.array([piece.entry], np.int64))
