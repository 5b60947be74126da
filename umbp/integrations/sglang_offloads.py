"""Offloads of an SGLang worker: accepted at once, stored in a thread, answered in the order in which they came.

SGLang locks a tree node for each accepted offload and takes the results in order, the same number on every rank. So whatever happens, each
accepted offload has exactly one result: also when the queue is full, when slots make no sense, or when the pool is gone (then it is False,
and SGLang offers the node again at its next hit).

Nodes are taken from the queue together, up to `BATCH_PAGES`, and handed to the loaders one by one, as the pages of one node follow each
other: that is what the pool's eviction goes by. What is stored already costs the loader one probe of the index and no read of a tensor; in
a group each page is read by one rank. A node is stored when all bundles have all of it. Pages of one that failed half way stay: each is
whole, and without its others it is no restorable length.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbp.layout import KEYS_PER_CALL_MAX
from umbp.loader import Loader, Offload
from umbp.types import I64, U8, WriteStatus

log = logging.getLogger("umbp.integrations.sglang")
BATCH_PAGES = 1024
QUEUE_NODES_MAX = 4096  # each locks its slots: an engine that gets here computes faster than memory is written


@dataclass(slots=True)
class Part:
    """What a node has for one bundle: keys (n, 32), and where its slots come from once its events have passed."""

    keys: U8
    slots: Callable[[], I64]


@dataclass(slots=True)
class Node:
    """One accepted offload; ``stored`` is its result once there is one. ``parts``: bundle number -> what it has of it."""

    parts: dict[int, Part]
    events: Sequence[Any]
    stored: bool | None = None
    session: str | None = None
    placed: dict[int, I64] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """The most that any bundle has of it."""
        return max((len(part.keys) for part in self.parts.values()), default=0)


class OffloadQueue:
    """Accepted offloads of one worker and their results.

    ``loaders``: one a bundle. ``stored``: told of each node that was. ``before``: the key before a key, where it is known.
    """

    def __init__(self, loaders: Sequence[Loader], stored: Callable[[Node], None], before: Callable[[U8], bytes | None], name: str) -> None:
        self._loaders = loaders
        self._told = stored
        self._before = before
        self._waiting: deque[Node] = deque()
        self._accepted: deque[Node] = deque()  # without a result taken yet, in order
        self._busy = False
        self._stop = False
        self._change = threading.Condition()
        self.pages = 0
        self.failed_nodes = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<OffloadQueue of {len(self._waiting)} nodes, {len(self._accepted)} results not taken>"

    def put(self, node: Node) -> None:
        """Accept it."""
        with self._change:
            if self._stop or len(self._waiting) >= QUEUE_NODES_MAX or not node.parts:
                node.stored = False
                self.failed_nodes += 1
            else:
                self._waiting.append(node)
            self._accepted.append(node)
            self._change.notify_all()

    def completed(self) -> int:
        """Results that can be taken now, in order."""
        count = 0
        for node in self._accepted:
            if node.stored is None:
                break
            count += 1
        return count

    def take(self) -> bool:
        """The oldest result."""
        with self._change:
            assert self._accepted, "no offload has a result"
            assert self._accepted[0].stored is not None, "the oldest offload has no result yet"
            return bool(self._accepted.popleft().stored)

    def reset(self) -> None:
        """Forget what was not begun, wait for what was, drop all results. No slot is read after this."""
        with self._change:
            self._waiting.clear()
            self._change.wait_for(lambda: not self._busy)
            self._accepted.clear()

    def close(self) -> None:
        """`reset`, and end the thread."""
        self.reset()
        with self._change:
            self._stop = True
            self._change.notify_all()
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._store(batch)
            except Exception:
                log.exception("an offload of %d nodes failed", len(batch))
            finally:
                with self._change:
                    for node in batch:
                        node.stored = bool(node.stored)
                        self.failed_nodes += not node.stored
                    self._busy = False
                    self._change.notify_all()

    def _next(self) -> list[Node] | None:
        """As many nodes as make a batch; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._stop)
            if self._stop:
                return None
            batch = [self._waiting.popleft()]
            pages = batch[0].pages
            while self._waiting and pages + self._waiting[0].pages <= BATCH_PAGES:
                batch.append(self._waiting.popleft())
                pages += batch[-1].pages
            self._busy = True
            return batch

    def _store(self, batch: list[Node]) -> None:
        """Store all nodes; each one's ``stored`` says whether all of it is there now."""
        for node in batch:
            for event in node.events:
                event.synchronize()
            try:
                node.placed = {number: part.slots() for number, part in node.parts.items()}
            except Exception:
                log.exception("an offload was refused")
                node.parts = {}
                node.stored = False
        asked: list[tuple[Node, Offload]] = []
        try:
            for node in batch:
                for number, part in node.parts.items():
                    before = self._before(part.keys[0])
                    for start in range(0, len(part.keys), KEYS_PER_CALL_MAX):
                        which = slice(start, start + KEYS_PER_CALL_MAX)
                        keys = part.keys[which]
                        asked.append((node, self._loaders[number].offload(keys, node.placed[number][which], parent=before)))
                        before = bytes(keys[-1])
        except Exception:
            log.exception("an offload was refused")
            node.stored = False
        for node, offload in asked:  # each of them, whatever became of the others: slots are read until its result is there
            try:
                codes = offload.result().codes
                self.pages += len(codes)
                whole = bool((codes <= WriteStatus.EXISTS).all())
            except Exception as error:  # noqa: BLE001 - the loader has logged it
                log.warning("an offload failed: %s", error)
                whole = False
            if not whole:
                node.stored = False
        taken = {id(node) for node, _ in asked}
        for node in batch:
            if node.stored is None and id(node) in taken:
                node.stored = True
                self._told(node)
