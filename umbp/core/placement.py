"""Where new pages go: the placement policy's choice among what nodes have room for, what is on its way there, and what is fair.

Theory of operation. A node's room is its free bytes and a little of what it would evict anyway (`TURNOVER_SHARE`: a full pool takes new
pages by letting cold ones go), less its *debits*: what was placed there and cannot be in its own numbers yet, since it has not sent two
heartbeats after. So two batches of one millisecond do not both see the same free node.

A node, unless it is the requester's own, is left out for as long as it has got more than `FAIR_SHARE` of what was placed within the last
second, where three or more could take it and the others have the room; a batch is one prompt's, and may go to one node as a whole. A node
that came later than the others (`RAMP_SECONDS`) starts with a tenth of its usual part. So a restarted, empty node is filled and not
flooded: every page placed there is later read from there.

Who asks: routers and writers (``/v1/place``), whose pages are on their way when they are answered (`place`); and the master itself, for the
copies that it advises (`choose`), which are on their way when the advice is given (`sent`).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from umbp.core.choices import Choices
from umbp.core.membership import ALIVE, Member, Membership
from umbp.policies.base import PLACEMENT
from umbp.policies.cluster import PlaceView
from umbp.types import F64, I64, U64, Mask, Tier

TURNOVER_SHARE = 0.05
FAIR_SHARE, FAIR_NODES_MIN, FAIR_SECONDS = 0.5, 3, 1.0
RAMP_SECONDS, RAMP_MIN = 60.0, 0.1
DEBITS_MAX = 4096  # a node; beyond that the oldest are taken as arrived
_U = np.uint64


def name_hash(name: str) -> int:
    """FNV-1a of a node's name: the same on every machine."""
    value = 0xCBF2_9CE4_8422_2325
    for byte in name.encode():
        value = (value ^ byte) * 0x100_0000_01B3 & 0xFFFF_FFFF_FFFF_FFFF
    return value


class Placement:
    """Debits and fairness around the policy."""

    def __init__(self, membership: Membership, choices: Choices, now: float) -> None:
        self.membership, self.choices = membership, choices
        self._started = now
        self._debits: dict[str, deque[tuple[float, int]]] = {}  # node -> (placed at, bytes)
        self._beats: dict[str, float] = {}  # node -> its last heartbeat but one
        self._recent: deque[tuple[float, str, int]] = deque()

    def __repr__(self) -> str:
        return f"<Placement {sum(map(self.debited, self._debits))} bytes on their way>"

    def debited(self, node: str) -> int:
        """Bytes on their way to a node."""
        return sum(size for _, size in self._debits.get(node, ()))

    def beat(self, member: Member) -> None:
        """A node is about to say how full it is: what was placed before its last heartbeat but one is in that."""
        node = member.node
        debits = self._debits.get(node)
        while debits and debits[0][0] < self._beats.get(node, 0.0):
            debits.popleft()
        if not debits:
            self._debits.pop(node, None)
        self._beats[node] = member.last_seen

    def forget(self, node: str) -> None:
        """The node is gone."""
        self._debits.pop(node, None)
        self._beats.pop(node, None)

    def view(
        self, now: float, words: U64, page_bytes: int, requester: str, draws: F64, without: frozenset[str] = frozenset()
    ) -> tuple[PlaceView, list[Member]]:
        """What a placement policy is shown for pages with these key words."""
        nodes = [member for member in self.membership.members.values() if member.state == ALIVE and member.usable(now)]
        nodes = [member for member in nodes if Tier.DRAM in member.tiers and member.node not in without]
        capacity = np.array([member.tiers[Tier.DRAM][0] for member in nodes], np.int64)
        used = np.array([member.tiers[Tier.DRAM][1] for member in nodes], np.int64)
        debits = np.array([self.debited(member.node) for member in nodes], np.int64)
        local = np.array([member.node == requester for member in nodes], bool)
        free = capacity - used + (TURNOVER_SHARE * capacity).astype(np.int64) - debits
        if len(nodes) >= FAIR_NODES_MIN:
            fair = np.where(local | ~self._over(now, nodes), free, 0)
            free = fair if int(np.maximum(fair, 0).sum()) >= len(words) * page_bytes else free
        age = np.array([now - member.joined_at for member in nodes], np.float64)
        late = np.array([member.joined_at - self._started > RAMP_SECONDS for member in nodes], bool)
        ramp = np.where(late, np.clip(age / RAMP_SECONDS, RAMP_MIN, 1.0), 1.0)
        names = np.array([name_hash(member.node) for member in nodes], np.uint64).view(np.int64)
        return PlaceView(max(1, page_bytes), capacity, free, ramp, local, names, (words[:, 0] ^ words[:, 3]).view(np.int64), draws), nodes

    def place(self, now: float, words: U64, page_bytes: int, requester: str, draws: F64) -> list[str]:
        """The node for each page, "" where none has room. What is placed is on its way from now on."""
        view, nodes = self.view(now, words, page_bytes, requester, draws)
        return self._taken(now, self.choices.place(view), page_bytes, nodes)

    def preview(self, name: str, now: float, words: U64, page_bytes: int, requester: str, draws: F64) -> list[str]:
        """What the policy of this name would choose; nothing is on its way."""
        view, nodes = self.view(now, words, page_bytes, requester, draws)
        return [nodes[at].node if at >= 0 else "" for at in self.choices.preview(PLACEMENT, name, view).tolist()]

    def choose(self, now: float, words: U64, page_bytes: int, requester: str, without: frozenset[str]) -> list[str]:
        """The node for each page, "" where none has room, among all but those ``without``; the same for the same keys, nodes and time."""
        draws = (words[:, 1] >> _U(11)).astype(np.float64) * 2.0**-53  # keys are digests, so these are uniform
        view, nodes = self.view(now, words, page_bytes, requester, draws, without)
        return [nodes[at].node if at >= 0 else "" for at in self.choices.place(view).tolist()]

    def sent(self, now: float, node: str, size_bytes: int) -> None:
        """So many bytes are on their way to a node."""
        self._debits.setdefault(node, deque(maxlen=DEBITS_MAX)).append((now, size_bytes))
        self._recent.append((now, node, size_bytes))

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _taken(self, now: float, chosen: I64, page_bytes: int, nodes: list[Member]) -> list[str]:
        counts = np.bincount(chosen[chosen >= 0], minlength=len(nodes)).tolist()
        for member, count in zip(nodes, counts, strict=True):
            if count:
                self.sent(now, member.node, count * page_bytes)
        return [nodes[at].node if at >= 0 else "" for at in chosen.tolist()]

    def _over(self, now: float, nodes: list[Member]) -> Mask:
        """Which nodes have got more than a fair share of this second's bytes."""
        while self._recent and (self._recent[0][0] <= now - FAIR_SECONDS or len(self._recent) > DEBITS_MAX):
            self._recent.popleft()
        by_node: dict[str, int] = {}
        for _, node, size in self._recent:
            by_node[node] = by_node.get(node, 0) + size
        limit = FAIR_SHARE * sum(by_node.values())
        return np.array([by_node.get(member.node, 0) > limit for member in nodes], bool)
