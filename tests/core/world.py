"""A pool on plain arrays, for tests of the core: no files, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from umbp.core.allocator import Region
from umbp.core.pool import Limits, Pool
from umbp.store.index import BUCKET_SLOTS, ENTRY_WORDS, IndexWriter, buckets_for
from umbp.store.segment import NAMESPACE_WORDS


class World:
    """The arrays that a segment would hold, and a pool over them; `reboot` makes another pool over the same arrays."""

    def __init__(
        self,
        capacity_bytes: int,
        entries: int,
        *,
        namespaces: int = 16,
        eviction: str = "lru",
        admission: str = "always",
        regions: int | Sequence[Region] = 1,
        **limits,
    ):
        self.buckets = np.zeros((buckets_for(entries), BUCKET_SLOTS), np.uint64)
        self.entries = np.zeros((entries, ENTRY_WORDS), np.uint64)
        self.words = np.zeros(4, np.uint64)
        self.rows = np.zeros((namespaces, NAMESPACE_WORDS), np.uint64)
        self.capacity_bytes = capacity_bytes
        parts = (Region(),) * regions if isinstance(regions, int) else regions
        self.options = {"eviction": eviction, "admission": admission, "regions": parts}
        self.limits = Limits(**limits)
        self.pool = self._make()

    def _make(self) -> Pool:
        table = IndexWriter(self.buckets, self.entries, self.words[0:1], 12345, self.words[1:2])
        return Pool(table, self.rows, self.words[2:3], self.capacity_bytes, self.limits, **self.options)

    def reboot(self, now: float) -> dict[int, int]:
        """Forget everything that is not in the arrays."""
        self.pool = self._make()
        return self.pool.adopt(now)


def keys_of(*numbers: int) -> np.ndarray:
    """(n, 32) uint8 keys made from integers."""
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), np.uint8).reshape(-1, 32)


def open_namespace(pool: Pool, name: str, object_bytes: int, session: int = 1) -> int:
    """A namespace by name; its row."""
    return pool.open_namespace(session, name.encode().ljust(32, b"."), name.encode(), object_bytes).row


def put(pool: Pool, row: int, *numbers: int, session: int = 1, now: float = 0.0) -> list[str]:
    """Reserve and commit; status names."""
    made = pool.reserve(now, session, row, keys_of(*numbers), b"", 0.0)
    status = made.status.copy()
    if len(made.ids):
        status[made.mine] = pool.commit(now, session, made.number, np.ones(len(made.ids), bool), None)
    from umbp.types import WriteStatus

    return [WriteStatus(code).code for code in status.tolist()]


def stored(pool: Pool, row: int, *numbers: int) -> list[bool]:
    """Which of these keys are visible."""
    return find(pool, row, *numbers).hit.tolist()


def find(pool: Pool, row: int, *numbers: int):
    """The probe that a client would make."""
    from umbp.store.index import key_words, place_word

    account = pool.find_namespace(row).account
    return pool.table.find(key_words(keys_of(*numbers)), account.number, place_word(account.number, account.object_bytes))
