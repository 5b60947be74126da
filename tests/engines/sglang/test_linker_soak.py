"""Many prompts through a small device cache and a pool too small for them: every restored byte is checked, and nothing is left."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import umbp
from tests.engines.sglang.engine import Engine, configured
from tests.pools import PoolProcess
from umbp.layout import Namespace

TURNS = 120


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with configured():
        yield


class Chats:
    """Conversations that grow turn by turn. A page's bytes follow from its conversation's number and its place."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.choose = random.Random(seed)
        self.pages: dict[int, int] = {}
        self.found = self.asked = 0

    def tokens(self, chat: int, pages: int) -> list[int]:
        return [chat * 1_000_000 + token for token in range(pages * self.engine.page)]

    def turn(self, number: int) -> None:
        """A request of a conversation: what can be restored is, the rest is computed, all of it enters the tree."""
        engine = self.engine
        chat = self.choose.randrange(8)
        before = self.pages.get(chat, 0)
        after = self.pages[chat] = before + self.choose.randint(1, 3) if before < 14 else self.choose.randint(1, 4)
        tokens = self.tokens(chat, after)
        restored = engine.restore(tokens, f"r{number}")
        assert restored.failed == []
        if restored.loaded:
            assert engine.is_whole(restored, chat)
        self.asked += after - restored.on_device
        self.found += restored.loaded
        if restored.loaded:
            engine.model.free(restored.slots)
        if self.choose.random() < 0.7:
            engine.drop()  # the device has room for little
        if engine.cache.evictable_size() + after * engine.page > engine.model.pages * engine.page // 2:
            engine.drop()
        found, _ = engine.match(tokens, f"c{number}")
        if found.device_prefix_len == 0:
            engine.compute(tokens, chat, settle=self.choose.random() < 0.5)


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("kind", ["mla", "mha", "dsa"])
def test_every_byte_under_eviction(kind: str, core: str) -> None:
    with PoolProcess("--eviction", "lru", dram="8MiB") as pool, Engine(kind, pool.socket, core=core, pages=96, staging="256KiB") as engine:
        chats = Chats(engine, seed=5)
        with evicting(pool, engine.linker.shelves[0].namespace.identity):
            for number in range(TURNS):
                chats.turn(number)
        engine.settle()
        status: dict[str, Any] = engine.linker._pool.status()
        assert status["counters"]["evicted_keys"] > 0
        assert chats.found > 0
        assert engine.linker.statistics().failed_batches == 0, "what was leased before it was promised cannot go"
        engine.leases_are_over()


@contextmanager
def evicting(pool: PoolProcess, identity: Namespace) -> Iterator[None]:
    """Another client stores pages all the time, so that the pool evicts while the engine looks, leases and loads."""
    over = threading.Event()

    def store() -> None:
        rng = np.random.default_rng(1)
        with umbp.connect(pool.socket) as client:
            given = {field: getattr(identity, field) for field in ("model", "page_tokens", "layout", "revision", "replicated")}
            namespace = client.namespace(**{**given, "tenant": "another", "replicated": True})
            pages = np.zeros((max(1, (1 << 20) // namespace.object_bytes), namespace.object_bytes), np.uint8)
            while not over.wait(0.005):
                namespace.put(rng.integers(0, 256, (len(pages), 32), dtype=np.uint8), pages)

    thread = threading.Thread(target=store)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
