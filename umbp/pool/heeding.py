"""What a pool does on its master's word: advice that comes with heartbeats, and what it asks about before it lets pages go.

Theory of operation
-------------------
A pool evicts for itself, at once. Its master sees what it does not: what engines ask for without asking the pool, and who else has a page.

`hold`: the keys are looked for, and if all are here they are pinned for the time, and only then is it answered. `drop`: copies that another
pool has promised to keep are evicted, if neither leased nor pinned and while the time lasts. `copy`: fetched like a prefetch.

`consult`: a pool that is nearly full says once a heartbeat which pages it would let go next, by its own policy; those that the master wants
kept are spared for `KEEP_SECONDS`: nothing takes them as long as anything else can go. It asks about twice as many pages as it let go since
it asked last, and `AHEAD_SECONDS` before they would go, so that the word is there, or is given again, before a page is gone. Without an
answer its own policy is all there is, as ever.

Cost: a peek at the policy's next victims and 33 bytes a page, once a heartbeat, and nothing as long as the pool has room or no route was
asked of the master.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from hashlib import sha256

import numpy as np

from umbp.core.namespaces import NamespaceState
from umbp.core.objects import LIVE
from umbp.core.pool import Pool
from umbp.errors import UmbpError
from umbp.master import protocol as say
from umbp.policies.cluster import KEEP
from umbp.pool.masters import Port
from umbp.types import U8

log = logging.getLogger("umbp.pool.heeding")
ANSWERS_MAX = 64  # of one heartbeat
HOLD_SECONDS = 30.0
NEARLY_FULL = 0.85
ASKED_MIN, ASKED_MAX = 64, 4096
AHEAD_SECONDS = say.KEEP_SECONDS / 3


class Heeding:
    """For one pool. ``counts`` are the reporter's: keys held, dropped, copied and spared on the master's word."""

    def __init__(self, pool: Pool, counts: dict[str, int]) -> None:
        self.pool, self.counts = pool, counts
        self.copy: Callable[[bytes, U8, float, str], bool] | None = None  # brings pages here: digest, keys, seconds, name of the request
        self._held: list[int] = []  # advice to be answered by the next heartbeat
        self._done: list[int] = []
        self._evicted = 0

    def __repr__(self) -> str:
        return f"<Heeding {len(self._held) + len(self._done)} to answer>"

    # -- answers -----------------------------------------------------------------------------------------------------------------------

    def answers(self) -> tuple[list[int], list[int]]:
        """Numbers of advice that is held, and that is done; `answered` when the master has heard them."""
        return self._held[:ANSWERS_MAX], self._done[:ANSWERS_MAX]

    def answered(self, held: int, done: int) -> None:
        """So many of them were heard."""
        self._held, self._done = self._held[held:], self._done[done:]

    def begin(self) -> None:
        """Another registration: what was advised before it is nobody's."""
        self._held, self._done = [], []

    # -- advice ------------------------------------------------------------------------------------------------------------------------

    def heed(self, advice: say.Advice) -> None:
        """Do it."""
        keys = np.frombuffer(bytes.fromhex("".join(advice.keys)), np.uint8).reshape(-1, 32)
        state = self.pool.by_digest.get(bytes.fromhex(advice.namespace))
        if state is None and advice.verb == "copy":
            state = self._opened(advice)
        if state is None or not len(keys) or len(keys) > say.KEYS_MAX:
            self._done.append(advice.number)
        elif advice.verb == "hold":
            self._hold(state, keys, advice.number)
        else:
            if advice.verb == "drop" and advice.seconds > 0:
                self._drop(state, keys)
            elif advice.verb == "copy" and self.copy is not None:
                copied = self.copy(state.digest, keys, advice.seconds, f"advice {advice.number}")
                self.counts["copied"] += len(keys) if copied else 0
            self._done.append(advice.number)

    def _hold(self, state: NamespaceState, keys: U8, number: int) -> None:
        """Where not all are here there is no answer, and so nobody drops them."""
        if not self.pool.find_keys(state.account, keys).hit.all():
            return
        try:
            self.pool.pin(time.monotonic(), 0, state.account.row, keys, HOLD_SECONDS, "held while another node drops its copies")
        except UmbpError as error:
            log.info("keys are not held for others: %s", error)
            return
        self._held.append(number)
        self.counts["held"] += len(keys)

    def _drop(self, state: NamespaceState, keys: U8) -> None:
        found, objects = self.pool.find_keys(state.account, keys), self.pool.objects
        ids = np.unique(found.ids[found.hit])
        free = ids[(objects.leases[ids] == 0) & (objects.pins[ids] == 0) & (objects.state[ids] == LIVE)]
        self.counts["dropped"] += objects.hide(free, evicted=True)

    def _opened(self, advice: say.Advice) -> NamespaceState | None:
        """A namespace that no client has opened here: made, so that pages of it can be kept; no session holds it open."""
        digest, canonical = bytes.fromhex(advice.namespace), advice.identity.encode()
        if sha256(canonical).digest() != digest or not 0 < advice.page_bytes < 1 << 32:
            return None
        try:
            self.pool.open_namespace(0, digest, canonical, advice.page_bytes)
        except UmbpError as error:
            log.info("a namespace is not opened for pages that the master would have here: %s", error)
            return None
        state = self.pool.by_digest[digest]
        del state.sessions[0]
        return state

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    async def consult(self, port: Port, node: str, registration: int, seconds: float) -> None:
        """Ask about the next victims, if this pool is nearly full."""
        pool, objects = self.pool, self.pool.objects
        gone, self._evicted = objects.evicted_keys - self._evicted, objects.evicted_keys
        if pool.room.used_share() < min(NEARLY_FULL, pool.room.watermarks.low):
            return
        ids = pool.room.upcoming(time.monotonic() + AHEAD_SECONDS, min(max(2 * gone, ASKED_MIN), ASKED_MAX))
        ids = ids[np.argsort(objects.row[ids], kind="stable")]
        ids = ids[objects.row[ids] >= 0]  # the others are of no namespace any more
        rows, counts = np.unique(objects.row[ids], return_counts=True)
        rows, counts = rows[: say.SPACES_MAX], counts[: say.SPACES_MAX]
        ids = ids[: int(counts.sum())]
        if not len(ids):
            return
        keys, versions = np.ascontiguousarray(pool.table.entries[ids, :4]).view(np.uint8), pool.table.versions_of(ids)
        spaces = [(pool.namespaces[row].digest, count) for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        verdict = await port.victims(node, registration, spaces, keys, seconds)
        kept = ids[(verdict == KEEP) & pool.versions(ids, versions)]  # what has changed meanwhile is not what was asked about
        pool.room.spare(kept, time.monotonic() + say.KEEP_SECONDS)
        self.counts["spared"] += len(kept)
