"""Offloads: from KV tensors into the pool, without a copy in between, and in a group each page by one rank.

Theory of operation
-------------------
The index is asked first: what is stored already costs no read of the tensors. The rest is reserved in one call a batch, moved after the
caller's event, and committed in one call; a page is visible when all of it is.

One that is cancelled between two batches, or while the pool is asked, ends there; one that is being moved ends after that batch. What was
reserved for it is committed as not filled, and so given back.

In a group the ranks hold the same bytes. The page's key says whose it is (`share`), so each rank stores its own without asking anyone,
also where lists differ. Then it looks for the others' pages in the index. As long as they keep coming it waits. When none came for the
group's patience it stores what is still missing itself: the pool gives each such page to the first who asks and lets the others wait for
it, so a dead or slow rank's pages are stored by whoever notices, each once. All this decides is who reads which tensor; that no page is
stored twice is the pool's doing.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from umbp.client import Namespace
from umbp.errors import UmbpError
from umbp.layout import KEYS_PER_CALL_MAX
from umbp.loader.group import Group
from umbp.loader.handles import Offload, OffloadOver
from umbp.loader.mover import Mover
from umbp.store.index import key_words
from umbp.types import I64, U8, Mask, Statuses, WriteStatus

log = logging.getLogger("umbp.loader.offloads")
OFFLOAD_BYTES = 64 << 20  # reserved, filled and committed at a time
LOOK_SECONDS = (0.0005, 0.005)  # between two looks at the index: first, longest


def share(keys: U8, rank: int, world: int) -> Mask:
    """Which of these pages this rank stores, (n,) bool. Keys are digests, so shares are even."""
    mine: Mask = key_words(keys)[:, 0] % np.uint64(world) == np.uint64(rank)
    return mine


class Offloads:
    """The offloads of one loader. Used by one thread."""

    def __init__(self, namespace: Namespace, group: Group | None, mover: Mover) -> None:
        self.namespace = namespace
        self.group = group
        self.mover = mover
        self.read_bytes = 0

    def __repr__(self) -> str:
        return f"<Offloads of {self.read_bytes} bytes>"

    def run(self, offload: Offload, keys: U8, slots: I64, after: object, parent: bytes | None) -> None:
        """One offload, to its end."""
        try:
            if after is not None:
                after.synchronize()  # type: ignore[attr-defined]
            codes = offload.codes
            every = np.arange(len(keys))
            group = self.group
            if group is None or group.world == 1:
                self._store(offload, keys, slots, every, parent, codes)
            else:
                mine = share(keys, group.rank, group.world)
                self._store(offload, keys, slots, every[mine], parent, codes)
                rest = every[~mine]
                waiting = self._wait(offload, keys[rest], group.patience_seconds)
                codes[rest[~waiting]] = WriteStatus.EXISTS
                self._store(offload, keys, slots, rest[waiting], parent, codes)
            offload.end(Statuses(codes, WriteStatus))
        except OffloadOver:
            log.debug("an offload was cancelled")
        except BaseException as error:
            log.warning("an offload failed: %s", error, exc_info=not isinstance(error, UmbpError))
            offload.end(None, error)

    def _store(self, offload: Offload, keys: U8, slots: I64, which: I64, parent: bytes | None, codes: U8) -> None:
        """Store these pages. Each one's parent is the one before it in ``which``: an ancestor, where a group shares the pages."""
        step = max(1, min(KEYS_PER_CALL_MAX, OFFLOAD_BYTES // self.namespace.object_bytes))
        for start in range(0, len(which), step):
            if offload.done:
                raise OffloadOver
            part = which[start : start + step]
            before = keys[part[0] - 1].tobytes() if part[0] else parent

            def fill(items: I64, data: U8, offsets: I64, part: I64 = part) -> None:
                offload.claim()
                try:
                    self.mover.save(data, offsets, slots[part[items]])
                finally:
                    offload.let_go()
                offload.read_bytes += len(items) * self.namespace.object_bytes
                self.read_bytes += len(items) * self.namespace.object_bytes

            codes[part] = self.namespace.fill(keys[part], fill, parent=before).codes

    def _wait(self, offload: Offload, keys: U8, patience: float) -> Mask:
        """Wait for others to store these; which did not come."""
        waiting = np.ones(len(keys), bool)
        progress, pause = time.monotonic(), LOOK_SECONDS[0]
        while waiting.any() and not offload.done:
            look = self.namespace.operations.look(keys[waiting])
            if look is None:
                break
            if look.found.hit.any():
                waiting[np.flatnonzero(waiting)[look.found.hit]] = False
                progress, pause = time.monotonic(), LOOK_SECONDS[0]
            elif time.monotonic() - progress > patience:
                break
            else:
                time.sleep(pause)
                pause = min(pause * 2, LOOK_SECONDS[1])
        return waiting
