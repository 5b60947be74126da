"""Looks through the directory, a slice at a time, for pages that should be copied, and for copies that need not be kept.

Four questions of each slice of rows:
    leaving    is it only on a node that is drained?                            -> copy to another one
    hot        has it fewer copies than the replication policy wants?           -> copy to another one
    crowded    does the rebalancing policy have this node give to another one?  -> copy from the one to the other
    spare      does the eviction policy let a copy on a nearly full node go?    -> hold at another one, then drop (`umbp.core.advice`)

Which other one is the placement policy's choice, among those that are not nearly full. Where that policy is another than `LOCAL`, it is
asked about new pages too (`arrived`), and they are copied to the node that it names, which then has the lasting copy. The writer's own,
made in its node's memory before anybody was asked, is a spare one from then on, and the first to go when that node fills up.

Where the replication policy is `NUMA`, new and hot pages are copied to the other pools of the machine that has them, full ones too: their
own policies make the room, as for what their clients put. Both copies are lasting ones.

And one that nodes ask: of the pages that a nearly full node is about to let go, which does the eviction policy want kept (`judge`)?

Cost: a slice of `SLICE_ROWS` a tick, about 1 ms; 10 M keys are seen once a minute at twenty ticks a second.
"""

from __future__ import annotations

from collections import deque
from itertools import permutations
from typing import TypeAlias

import numpy as np

from umbp.core.advice import KEYS_MAX, Ledger
from umbp.core.choices import Choices
from umbp.core.directory import Directory, Locations
from umbp.core.membership import ALIVE, DRAINING, Member, Membership
from umbp.core.placement import Placement
from umbp.policies.base import PLACEMENT, REPLICATION
from umbp.policies.cluster import GO, EvictView, FillView, HotView
from umbp.policies.replication import NUMA
from umbp.types import F64, I64, U64, Mask, Tier

SLICE_ROWS = 4096
NEARLY_FULL = 0.85
HEAT_MIN = 1.0  # what is colder is never worth a copy
LOCAL = "local_first"  # the placement policy that has new pages stay where they were put
LOOKED_MAX = 8 * KEYS_MAX  # pages of a slice that are placed: more than nodes would be told of at a time
ARRIVALS_MAX = 1 << 16  # new pages that wait for their place; the oldest stay where they are
ARRIVALS_SECONDS = 0.2  # so that few advice carry many pages
_Wishes: TypeAlias = dict[tuple[int, int], list[tuple[int, int]]]  # (source, taker) -> (row, bytes), by number of the node


class Advisor:
    """Fills the ledger."""

    def __init__(self, directory: Directory, membership: Membership, choices: Choices, placement: Placement, ledger: Ledger) -> None:
        self.directory, self.membership, self.choices, self.placement = directory, membership, choices, placement
        self.ledger = ledger
        self._at = 0
        self._arrivals: deque[tuple[str, I64]] = deque()  # node, rows
        self._arrived = 0
        self._placed_at = -ARRIVALS_SECONDS

    def __repr__(self) -> str:
        return f"<Advisor at row {self._at}, {self.ledger!r}>"

    def tick(self, now: float) -> None:
        """The next slice."""
        self.ledger.expire(now)
        nodes = self.nodes(now)
        self._place_arrivals(now, nodes)
        if len(nodes) < 2 or not self.directory.rows_end or not self._anything_to_ask(nodes):
            return
        self._at = self._at if self._at < self.directory.rows_end else 0
        rows = np.arange(self._at, min(self._at + SLICE_ROWS, self.directory.rows_end))
        self._at += SLICE_ROWS
        places = self.directory.locations(rows)
        holds = self._holding(places, nodes, len(rows))
        self._spare(now, rows, self._holding(places, nodes, len(rows), tier=Tier.DRAM), nodes)
        use = self.directory.use(now, rows)
        self._leaving(now, rows, holds, use.heat, nodes)
        self._hot(now, rows, holds, use.heat, nodes)
        self._crowded(now, rows, holds, use.heat, nodes)

    def nodes(self, now: float) -> list[Member]:
        """Those that are well and have said all that they hold."""
        return [member for member in self.membership.members.values() if member.usable(now) and member.synced]

    def holding(self, rows: I64, nodes: list[Member]) -> Mask:
        """(rows, nodes): whether the node has it in DRAM."""
        return self._holding(self.directory.locations(rows), nodes, len(rows), tier=Tier.DRAM)

    def hot_view(self, rows: I64, copies: I64, heat: F64, nodes: int) -> HotView:
        """What a replication policy is shown of these rows."""
        depth, _ = self.directory.depth_and_parent(rows)
        return HotView(heat, copies, self._sizes(rows), depth, nodes)

    @staticmethod
    def fill_view(nodes: list[Member]) -> FillView:
        """What a rebalancing policy is shown of these nodes."""
        fill = [member.tiers.get(Tier.DRAM, (0, 0)) if member.state == ALIVE else (0, 0) for member in nodes]
        return FillView(np.array([total for total, _ in fill], np.int64), np.array([used for _, used in fill], np.int64))

    def _anything_to_ask(self, nodes: list[Member]) -> bool:
        names = self.choices.names
        wanted = names["replication"] != "none" or names["rebalancing"] != "none"
        full = names["cluster_eviction"] != "none" and any(self._share(member) >= NEARLY_FULL for member in nodes)
        return wanted or full or any(member.state == DRAINING for member in nodes)

    @property
    def places_arrivals(self) -> bool:
        """Whether new pages may have to go elsewhere too."""
        return self.choices.names[PLACEMENT] != LOCAL or self._numa

    @property
    def _numa(self) -> bool:
        return self.choices.names[REPLICATION] == NUMA

    def arrived(self, node: str, rows: I64) -> None:
        """Pages that were not there before have come to this node's memory; -1 for what the directory had no room for."""
        if len(rows):
            self._arrivals.append((node, rows))
            self._arrived += len(rows)
            while self._arrived > ARRIVALS_MAX:
                self._arrived -= len(self._arrivals.popleft()[1])

    def judge(self, now: float, rows: I64) -> I64:
        """The eviction policy's word on pages that a node is about to let go, (n,): of rows of -1 there is none."""
        if not len(rows) or self.choices.names["cluster_eviction"] == "none":
            return np.zeros(len(rows), np.int64)
        nodes = [member for member in self.membership.members.values() if member.usable(now)]
        holds = self.holding(rows, nodes)
        verdict = self.choices.judge(self.evict_view(now, rows, np.maximum(holds.sum(1), 1), len(nodes)))
        verdict[rows < 0] = 0
        return verdict

    def evict_view(self, now: float, rows: I64, copies: I64, nodes: int) -> EvictView:
        """What an eviction policy is shown of these rows; one of -1 is a page that nobody has asked for."""
        known = rows >= 0
        use, sizes, (depth, _) = self.directory.use(now, rows), self._sizes(rows), self.directory.depth_and_parent(rows)
        heat, idle = np.where(known, use.heat, 0.0), np.where(known, use.idle_seconds, np.inf)
        depth = np.where(known, depth, 0)
        wanted = np.ones(len(rows), np.int64)
        if self.choices.names["replication"] != "none":
            wanted = self.choices.copies(HotView(heat, copies, sizes, depth, max(1, nodes)))
        return EvictView(heat, idle, copies, wanted, sizes, depth)

    # -- the questions -----------------------------------------------------------------------------------------------------------------

    def _holding(self, places: Locations, nodes: list[Member], rows: int, *, tier: Tier | None = None) -> Mask:
        """(rows, nodes): whether the node's pool has it, in this tier or in any."""
        column = {member.holder: at for at, member in enumerate(nodes)}
        holds = np.zeros((rows, len(nodes)), bool)
        good = np.ones(len(places.item), bool) if tier is None else places.tiers >> tier & 1 == 1
        for holder in np.unique(places.holder).tolist():
            if holder in column:
                holds[places.item[good & (places.holder == holder)], column[holder]] = True
        return holds

    def _leaving(self, now: float, rows: I64, holds: Mask, heat: F64, nodes: list[Member]) -> None:
        leaving = np.array([member.state == DRAINING for member in nodes], bool)
        if not leaving.any():
            return
        found = np.flatnonzero(holds.any(1) & ~(holds & ~leaving).any(1))
        self._copy_elsewhere(now, rows, holds, found[np.argsort(-heat[found], kind="stable")], nodes)

    def _hot(self, now: float, rows: I64, holds: Mask, heat: F64, nodes: list[Member]) -> None:
        if self.choices.names["replication"] == "none":
            return
        hot = np.flatnonzero((heat >= HEAT_MIN) & holds.any(1))
        if not len(hot):
            return
        if self._numa:
            wishes: _Wishes = {}
            self._beside(rows, holds, hot[np.argsort(-heat[hot], kind="stable")], nodes, wishes)
            self._copies(now, wishes, nodes)
            return
        copies = holds[hot].sum(1)
        wanted = self.choices.copies(self.hot_view(rows[hot], copies, heat[hot], len(nodes)))
        lacking = hot[wanted > copies]
        self._copy_elsewhere(now, rows, holds, lacking[np.argsort(-heat[lacking], kind="stable")], nodes)

    def _crowded(self, now: float, rows: I64, holds: Mask, heat: F64, nodes: list[Member]) -> None:
        if self.choices.names["rebalancing"] == "none":
            return
        alone = holds.sum(1) == 1
        wishes: _Wishes = {}
        for giver, taker, size_bytes in self.choices.moves(self.fill_view(nodes)):
            found = np.flatnonzero(alone & holds[:, giver])
            found = found[np.argsort(-heat[found], kind="stable")]
            sizes = self._sizes(rows[found])
            fitting = np.flatnonzero(np.cumsum(sizes) <= size_bytes)
            wishes[giver, taker] = list(zip(rows[found[fitting]].tolist(), sizes[fitting].tolist(), strict=True))
        self._copies(now, wishes, nodes)

    def _spare(self, now: float, rows: I64, holds: Mask, nodes: list[Member]) -> None:
        """``holds``: in DRAM. A node that is drained gives no promise, as it may be gone soon."""
        full = np.array([self._share(member) >= NEARLY_FULL for member in nodes], bool)
        holds = holds & np.array([member.state == ALIVE for member in nodes], bool)
        found = np.flatnonzero((holds.sum(1) > 1) & holds[:, full].any(1))
        if not len(found):
            return
        found = found[self.choices.judge(self.evict_view(now, rows[found], holds[found].sum(1), len(nodes))) == GO]
        groups: dict[tuple[int, int, int], list[int]] = {}
        spaces = self.directory.keys(rows[found])[1].tolist() if len(found) else []
        for at, space in zip(found.tolist(), spaces, strict=True):
            having = np.flatnonzero(holds[at]).tolist()
            giver = max((node for node in having if full[node]), key=lambda node: (self._share(nodes[node]), nodes[node].node))
            keeper = min((node for node in having if node != giver), key=lambda node: (self._share(nodes[node]), nodes[node].node))
            if self.ledger.free(int(rows[at])):
                groups.setdefault((giver, keeper, space), []).append(int(rows[at]))
        for (giver, keeper, space), group in groups.items():
            if self.ledger.can_give(nodes[keeper].node) and self.ledger.can_give(nodes[giver].node):
                group = group[:KEYS_MAX]
                keys, _ = self.directory.keys(np.array(group, np.int64))
                self.ledger.hold(now, nodes[keeper].node, nodes[giver].node, self.directory.digests[space], keys, group)

    def _place_arrivals(self, now: float, nodes: list[Member]) -> None:
        """New pages to where the placement policy has them, as far as the bytes that may be copied now."""
        if not self._arrivals or now - self._placed_at < ARRIVALS_SECONDS:
            return
        self._placed_at = now
        if not self.places_arrivals or len(nodes) < 2:
            self._arrivals.clear()
            self._arrived = 0
            return
        names, budget, looked = {member.node: at for at, member in enumerate(nodes)}, self.ledger.bytes_now(now), 0
        wishes: _Wishes = {}
        while self._arrivals and budget > 0 and looked < LOOKED_MAX:
            node, rows = self._arrivals.popleft()
            self._arrived -= len(rows)
            rows, rest = rows[: LOOKED_MAX - looked], rows[LOOKED_MAX - looked :]
            looked += len(rows)
            if len(rest):
                self._arrivals.appendleft((node, rest))
                self._arrived += len(rest)
            holds = self._holding(self.directory.locations(rows), nodes, len(rows))
            if node not in names:
                continue
            if self._numa:
                budget -= self._beside(rows, holds, np.flatnonzero(holds[:, names[node]]), nodes, wishes)
            if self.choices.names[PLACEMENT] == LOCAL:
                continue
            alone = np.flatnonzero(holds[:, names[node]] & (holds.sum(1) == 1))
            takers = self._takers(now, rows[alone], holds[alone] & False, nodes, requester=node)
            sizes = self._sizes(rows[alone])
            for row, taker, size in zip(rows[alone].tolist(), takers, sizes.tolist(), strict=True):
                if taker >= 0 and taker != names[node]:
                    wishes.setdefault((names[node], taker), []).append((row, size))
                    budget -= size
        self._copies(now, wishes, nodes)

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _beside(self, rows: I64, holds: Mask, which: I64, nodes: list[Member], wishes: _Wishes) -> int:
        """Wish for copies of some of these rows at the pools of the same machine that lack them; their bytes."""
        wished, sizes = 0, self._sizes(rows[which])
        for source, taker in permutations(range(len(nodes)), 2):
            if nodes[source].machine != nodes[taker].machine or nodes[taker].state != ALIVE:
                continue
            lacking = holds[which, source] & ~holds[which, taker]
            if lacking.any():
                pages = list(zip(rows[which[lacking]].tolist(), sizes[lacking].tolist(), strict=True))
                wishes.setdefault((source, taker), []).extend(pages)
                wished += int(sizes[lacking].sum())
        return wished

    def _copy_elsewhere(self, now: float, rows: I64, holds: Mask, which: I64, nodes: list[Member]) -> None:
        """Have some of these rows, the dearest first, copied to a node that has them not yet."""
        if self.ledger.bytes_now(now) <= 0:
            return
        which = np.array([at for at in which.tolist() if self.ledger.free(int(rows[at]))][:LOOKED_MAX], np.int64)
        wishes: _Wishes = {}
        takers = self._takers(now, rows[which], holds[which], nodes)
        for at, taker, size in zip(which.tolist(), takers, self._sizes(rows[which]).tolist(), strict=True):
            if taker >= 0:
                wishes.setdefault((int(holds[at].argmax()), taker), []).append((int(rows[at]), size))
        self._copies(now, wishes, nodes)

    def _takers(self, now: float, rows: I64, having: Mask, nodes: list[Member], *, requester: str = "") -> list[int]:
        """The placement policy's node for each page, among those that lack it and are not nearly full; -1 for none.

        ``requester`` may be nearly full: its own policies make the room.
        """
        takers = [-1] * len(rows)
        if not len(rows):
            return takers
        names = {member.node: at for at, member in enumerate(nodes)}
        open_ = np.array([member.node == requester or self._share(member) < NEARLY_FULL for member in nodes], bool)
        keys, spaces = self.directory.keys(rows)
        words: U64 = np.ascontiguousarray(keys).view(np.uint64)
        alike: dict[tuple[int, bytes], list[int]] = {}
        for at, space in enumerate(spaces.tolist()):
            alike.setdefault((space, having[at].tobytes()), []).append(at)
        for (space, _), items in alike.items():
            allowed = {nodes[at].node for at in np.flatnonzero(open_ & ~having[items[0]]).tolist()}
            without = frozenset(self.membership.members.keys() - allowed)
            size = max(1, self.directory.object_bytes[space])
            for at, name in zip(items, self.placement.choose(now, words[items], size, requester, without), strict=True):
                takers[at] = names.get(name, -1)
        return takers

    def _copies(self, now: float, wishes: _Wishes, nodes: list[Member]) -> None:
        """Advise copies, as far as bytes and answers allow: (source, taker) -> rows and their bytes, the dearest first."""
        for (source, taker), pages in wishes.items():
            by_space: dict[int, list[tuple[int, int]]] = {}
            free = [page for page in pages if self.ledger.free(page[0])]
            spaces = self.directory.keys(np.array([row for row, _ in free], np.int64))[1].tolist() if free else []
            for space, page in zip(spaces, free, strict=True):
                by_space.setdefault(space, []).append(page)
            for space, group in by_space.items():
                budget, sizes = self.ledger.bytes_now(now), np.cumsum([size for _, size in group])
                fitting = min(KEYS_MAX, int(np.count_nonzero(sizes <= budget)))
                if not fitting or not self.ledger.can_give(nodes[taker].node):
                    continue
                chosen = [row for row, _ in group[:fitting]]
                keys, _ = self.directory.keys(np.array(chosen, np.int64))
                digest, size_bytes = self.directory.digests[space], int(sizes[fitting - 1])
                self.ledger.copy(now, nodes[taker].node, nodes[source].node, digest, keys, chosen, size_bytes)
                self.placement.sent(now, nodes[taker].node, size_bytes)

    def _sizes(self, rows: I64) -> I64:
        sizes = np.array(self.directory.object_bytes or [0], np.int64)
        return np.maximum(sizes[self.directory.keys(rows)[1]], 1) if len(rows) else np.empty(0, np.int64)

    @staticmethod
    def _share(member: Member) -> float:
        capacity, used = member.tiers.get(Tier.DRAM, (0, 0))
        return used / capacity if capacity else 1.0
