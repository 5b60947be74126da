"""What engines say of their own caches: keys in HBM and in host memory, additive per tier, gone with the node they run on.

An engine belongs to a member node and is known by its first report. Each of its tiers is a holder of the directory, so a tier is cleared by
dropping its holder, whatever it holds. Nothing of an engine counts while its node is dead, and all of it is dropped with the node.

An engine can die where its node lives on. So who reports for it says something again and again, if only that nothing has changed (a report
without keys); an engine of which nothing was heard for `SILENT_SECONDS_MAX` has nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from umbp.core.directory import Directory
from umbp.errors import Conflict, LimitReached, NotFound
from umbp.types import U32, U64, Tier

ENGINES_MAX = 4096
SILENT_SECONDS_MAX = 200.0  # three times what a feed takes to tell all anew
TIERS = (Tier.HBM, Tier.HOST)


@dataclass(slots=True)
class Engine:
    """One engine process or rank. ``holders``: tier -> holder."""

    name: str
    node: str
    reported_at: float
    holders: dict[Tier, int] = field(default_factory=dict)
    keys: dict[Tier, int] = field(default_factory=dict)


class Engines:
    """All engines by name."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.engines: dict[str, Engine] = {}
        self.by_holder: dict[int, tuple[Engine, Tier]] = {}

    def __repr__(self) -> str:
        return f"<Engines {len(self.engines)}>"

    def find(self, name: str) -> Engine:
        """By name."""
        engine = self.engines.get(name)
        if engine is None:
            raise NotFound(f"no engine {name!r} has reported", field="engine", example=next(iter(self.engines), "node7-a.0"))
        return engine

    def report(self, now: float, name: str, node: str, tier: Tier, words: U64, spaces: U32, *, present: bool) -> int:
        """The engine has these keys in this tier, or not any more; how many were news. The node must be a member: the caller has looked."""
        engine = self.engines.get(name)
        if engine is None:
            if len(self.engines) >= ENGINES_MAX:
                raise LimitReached(f"{ENGINES_MAX} engines are the limit", field="engine")
            engine = self.engines[name] = Engine(name, node, now)
        if engine.node != node:
            raise Conflict(f"the engine {name!r} is on node {engine.node!r}, not {node!r}", field="engine", example=f"{node}.0")
        engine.reported_at = now
        holder = engine.holders.get(tier)
        if holder is None:
            if not present:
                return 0
            holder = engine.holders[tier] = self.directory.holders.take()
            self.by_holder[holder] = (engine, tier)
        if present:
            news = self.directory.add(now, words, spaces, holder, tier)
        else:
            news = self.directory.remove(words, spaces, holder, tier)
        engine.keys[tier] = engine.keys.get(tier, 0) + (news if present else -news)
        return news

    def clear(self, name: str, tier: Tier | None = None) -> int:
        """The engine has nothing in this tier, or anywhere, any more; how many keys that were. Clearing nothing is no error."""
        engine = self.engines.get(name)
        if engine is None:
            return 0
        gone = 0
        for one in TIERS if tier is None else (tier,):
            holder = engine.holders.pop(one, None)
            if holder is not None:
                del self.by_holder[holder]
                self.directory.drop(holder)
            gone += engine.keys.pop(one, 0)
        if tier is None:
            del self.engines[name]
        return gone

    def expire(self, now: float) -> list[str]:
        """Clear the engines that have been silent too long; their names."""
        silent = [engine.name for engine in self.engines.values() if now > engine.reported_at + SILENT_SECONDS_MAX]
        for name in silent:
            self.clear(name)
        return silent

    def clear_node(self, node: str) -> None:
        """All engines of a node are gone."""
        for engine in [engine for engine in self.engines.values() if engine.node == node]:
            self.clear(engine.name)
