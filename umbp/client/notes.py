"""Notes: what this client's requests asked for, kept for the pool's access history until they are sent.

Theory of operation. Lookups and gets are answered out of shared memory, without a call; their key lists go to the pool by and by. Two ways:

    kept --the next call of this client, `RIDE_SECONDS` later--> behind its request, in one send: no thread wakes for them
         \\--no call for `NOTE_SECONDS`, or too many kept--> sent by the client's background

The first is for those who call again and again. The background holds the connection while it sends, and the pool it wakes by that has the
processor at once: on a busy machine the call of another thread waited milliseconds for a thread that had nothing left to do but to let go.

A write sends all of them before it: what a request missed was not there when it asked. Bounded: notes and bytes that are kept; the oldest
go first, and are counted. What is lost with a connection is lost: it is history, and no answer depends on it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from umbp import wire
from umbp.client.statistics import ClientStatistics
from umbp.client.steps import Send
from umbp.errors import InvalidRequest
from umbp.types import U8

NOTES_MAX = 128  # kept at a time
NOTE_BYTES_MAX = 4 << 20
NOTE_MESSAGE_BYTES = 256 << 10  # of keys in one message, or one note's: the pool takes a message in whole before it looks at others
NOTE_SECONDS = 0.05  # a note waits this long for others
RIDE_SECONDS = NOTE_SECONDS / 2
RIDE_BYTES_MAX = 64 << 10  # behind a call's request: a socket's buffer takes that without waiting for the pool


class Notes:
    """Of one client. Any thread may call."""

    def __init__(self, statistics: ClientStatistics) -> None:
        self.statistics = statistics
        self._kept: deque[tuple[int, U8, int]] = deque()
        self._bytes = 0
        self._since = 0.0  # when the oldest was made
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Notes: {len(self._kept)} kept, {self.statistics.notes_sent} sent>"

    def add(self, row: int, keys: U8, conversation: int) -> None:
        """Keep a request's key list. The same one again, before it was sent, is the same request: who polls floods nobody."""
        with self._lock:
            if self._kept:
                last_row, last, last_conversation = self._kept[-1]
                if (row, conversation) == (last_row, last_conversation) and np.array_equal(keys, last):
                    return
            else:
                self._since = time.monotonic()
            self._kept.append((row, keys.copy(), conversation))  # the caller may put the next request's keys into the same array
            self._bytes += keys.nbytes
            while len(self._kept) > NOTES_MAX or (self._bytes > NOTE_BYTES_MAX and len(self._kept) > 1):
                self._bytes -= self._kept.popleft()[1].nbytes
                self.statistics.notes_dropped += 1

    def forget(self) -> None:
        """They are of no use any more."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    @property
    def kept(self) -> int:
        """How many wait."""
        return len(self._kept)

    @property
    def made(self) -> int:
        """How many wait or were sent, whatever a thread that sends them does meanwhile."""
        with self._lock:
            return self.statistics.notes_sent + len(self._kept)

    @property
    def many(self) -> bool:
        """Whether there are enough to send them now."""
        return self._bytes > NOTE_BYTES_MAX // 8

    def seconds_left(self, now: float) -> float:
        """Until the background is to send them; infinite where there are none."""
        if not self._kept:
            return float("inf")
        return 0.0 if self.many else max(0.0, self._since + NOTE_SECONDS - now)

    def covered(self, row: int, keys: U8) -> bool:
        """Whether the last one says this already: a `get` of what a `prefix` has just asked for is the same request."""
        with self._lock:
            if not self._kept:
                return False
            last_row, last, _ = self._kept[-1]
        n = len(keys)
        return row == last_row and n <= len(last) and bool((keys[0] == last[0]).all() and (keys[-1] == last[n - 1]).all())

    def may_ride(self, now: float) -> bool:
        """Whether it is time to send them behind a request, and they are few enough for it."""
        return bool(self._kept) and self._bytes <= RIDE_BYTES_MAX and now >= self._since + RIDE_SECONDS

    def take(self) -> Iterator[Send]:
        """All of them, as few messages; what is not sent is lost."""
        with self._lock:
            notes, self._kept, self._bytes = self._kept, deque(), 0
            self.statistics.notes_sent += len(notes)
        while notes:
            part = [notes.popleft()]
            size = part[0][1].nbytes
            while notes and size + notes[0][1].nbytes <= NOTE_MESSAGE_BYTES:
                part.append(notes.popleft())
                size += part[-1][1].nbytes
            heads = [(row, len(keys), conversation) for row, keys, conversation in part]
            yield Send(wire.Note(heads), (np.concatenate([keys for _, keys, _ in part]),))


def conversation_number(session: str) -> int:
    """A conversation's name as it travels, 63 bits of its digest; 0 where it has none. InvalidRequest if it is no name."""
    if not isinstance(session, str):
        raise InvalidRequest(f"{type(session).__name__}, not the name of a conversation", field="session", example="chat-17")
    return int.from_bytes(hashlib.sha256(session.encode(errors="surrogatepass")).digest()[:8], "little") >> 1 if session else 0
