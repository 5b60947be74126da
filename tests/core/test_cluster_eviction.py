"""Cluster eviction: with the master's word a pool lets go what the cluster does not miss; without it, it works as ever."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.core.cluster import GIB, PAGE_BYTES, Cluster, words
from tests.core.world import World, keys_of, open_namespace, put, stored
from umbp.core.master import Master, Part
from umbp.core.membership import Timing
from umbp.core.sweeps import chained
from umbp.errors import UnknownNode
from umbp.policies.cluster import KEEP
from umbp.pool.heeding import AHEAD_SECONDS, ASKED_MAX, ASKED_MIN
from umbp.store.index import key_words

PAGE = 8192
PAGES = 400  # that fit
HOT, FLOOD, ROUNDS = 60, 40, 25  # FLOOD: pages of other prompts between two heartbeats


class OneNode:
    """A pool and a master that sees what the pool does not: requests that engines answer out of their own caches."""

    def __init__(self, policy: str) -> None:
        self.now = 1000.0
        self.world = World(PAGES * PAGE, 1024, eviction="leaf_lru")
        self.pool = self.world.pool
        self.row = open_namespace(self.pool, "m", PAGE)
        self.digest = self.pool.namespaces[self.row].digest
        self.master = Master(self.now, boot=1, seed=3, keys_max=65_536, timing=Timing(), policies={"cluster_eviction": policy})
        tiers = {2: (PAGES * PAGE, 0)}
        self.member = self.master.join(self.now, "a", 1, "here", {}, tiers)
        total = chained(0, 7)
        member, verdict = self.master.expects_piece(self.now, "a", self.member.registration, 1, 0, 0, total, 7)
        assert verdict == "apply"
        self.master.piece_applied(self.now, member, total, last=True)
        self.pool.objects.outbox.begin()
        self.evicted = 0

    def put(self, *numbers: int) -> None:
        assert set(put(self.pool, self.row, *numbers, now=self.now)) <= {"stored", "exists"}

    def tell(self) -> None:
        """What came and went, as a bundle."""
        changes = self.pool.objects.outbox.take(8192, lambda ids: self.pool.objects.state[ids] == 2)
        spaces = self.master.spaces([(self.digest, PAGE, len(changes))])
        self.master.apply(self.now, Part(self.member, changes.words, spaces, changes.tiers, changes.present))

    def route(self, *numbers: int) -> None:
        """A router asks for this prompt. Its engine has it, so that the pool hears nothing of it."""
        self.master.route(self.now, self.digest, key_words(keys_of(*numbers)), "", np.zeros(1))

    def consult(self) -> int:
        """As `umbp.pool.heeding` does, once a heartbeat; how many pages are spared."""
        objects, room = self.pool.objects, self.pool.room
        gone, self.evicted = objects.evicted_keys - self.evicted, objects.evicted_keys
        ids = room.upcoming(self.now + AHEAD_SECONDS, min(max(2 * gone, ASKED_MIN), ASKED_MAX))
        spaces = np.full(len(ids), self.master.directory.space_or_none(self.digest), np.uint32)
        verdict = self.master.judge("a", self.member.registration, self.now, self.pool.table.entries[ids, :4], spaces)
        room.spare(ids[verdict == KEEP], self.now + 30.0)
        return int(np.count_nonzero(verdict == KEEP))


def kept(policy: str, *, seed: int = 1) -> int:
    """How many of the prompts that the whole cluster asks for are there after a flood of others."""
    node, draw = OneNode(policy), random.Random(seed)
    hot = list(range(HOT))
    for number in hot:
        node.put(number)
    fresh = 1000
    for _ in range(ROUNDS):
        for number in draw.sample(hot, 20):
            node.route(number)
        for _ in range(FLOOD // 2):
            node.now += 0.1
            node.put(fresh, fresh + 1)
            fresh += 2
        node.tell()
        node.consult()
    node.pool.check()
    assert node.pool.objects.counts[2] > 0.8 * PAGES
    return sum(stored(node.pool, node.row, *hot))


def test_what_the_cluster_asks_for_outlives_what_only_one_put() -> None:
    assert kept("none") == 0  # the pool's own policy cannot know
    assert kept("spare_and_cold") >= 0.9 * HOT


def test_where_nothing_was_asked_for_the_pool_s_own_order_stands() -> None:
    node = OneNode("spare_and_cold")
    node.put(*range(PAGES))
    node.tell()
    before = node.pool.room.upcoming(node.now + 5, 50).tolist()
    assert node.consult() == 0
    assert node.pool.room.upcoming(node.now + 5, 50).tolist() == before


def test_what_is_spared_goes_when_nothing_else_can_and_after_its_time() -> None:
    node = OneNode("spare_and_cold")
    node.put(*range(PAGES))
    node.now += 5.0
    every = node.pool.objects.live_ids()
    node.pool.room.spare(every[:160], node.now + 30.0)
    assert not set(node.pool.room.upcoming(node.now, PAGES).tolist()) & set(every[:160].tolist())
    assert len(node.pool.room.upcoming(node.now + 31.0, PAGES)) == PAGES
    node.put(*range(2000, 2000 + PAGES))  # a put is never refused for it
    assert all(stored(node.pool, node.row, *range(2000, 2000 + PAGES)))
    node.pool.check()


def test_no_more_than_half_is_to_be_kept_and_it_is_the_hottest() -> None:
    cluster = Cluster("a")
    cluster["a"].put(*range(20)).tell()
    for number in range(20):
        for _ in range(1 + number):
            cluster.plan([number])
    spaces = np.full(20, 0, np.uint32)
    verdict = cluster.master.judge("a", cluster["a"].registration, cluster.now, words(range(20)), spaces)
    assert verdict.tolist() == [0] * 10 + [KEEP] * 10


def test_pages_and_namespaces_that_the_master_does_not_know_get_no_word() -> None:
    cluster = Cluster("a")
    cluster["a"].put(1).tell()
    cluster.plan([1])
    spaces = np.array([0, 0, 0xFFFF_FFFF], np.uint32)
    assert cluster.master.judge("a", cluster["a"].registration, cluster.now, words([7, 1, 1]), spaces).tolist() == [0, KEEP, 0]


@pytest.mark.parametrize("replication", ["none", "hot_prefixes"])
def test_copies_that_replication_wants_are_not_spare(replication: str) -> None:
    cluster = Cluster("a", "b", policies={"replication": replication}, advice_bytes_per_second=0)
    for node in cluster.nodes.values():
        node.put(1, 2)
        node.untold.clear()
        node.resync()
    for _ in range(10):
        cluster.plan([1], "c")  # hot enough for two
    cluster["a"].used = 9 * GIB
    cluster.wait(1.0, *cluster.nodes.values())
    (hold,) = [advice for advice in cluster["b"].advice if advice.verb == "hold"]
    assert [int(word) for word in hold.keys.view(np.uint64).reshape(-1, 4)[:, 0]] == ([2] if replication == "hot_prefixes" else [1, 2])


def test_no_policy_no_word() -> None:
    cluster = Cluster("a", "b", policies={"cluster_eviction": "none"})
    for node in cluster.nodes.values():
        node.put(1, 2)
        node.untold.clear()
        node.resync()
    cluster["a"].used = 9 * GIB
    cluster.wait(5.0, *cluster.nodes.values())
    assert not [advice for node in cluster.nodes.values() for advice in node.advice]


def test_a_drained_node_and_a_copy_on_disk_are_no_promise() -> None:
    cluster = Cluster("a", "b", "c")
    a = cluster["a"].put(1, 2)
    cluster["b"].put(1)
    cluster["c"].put(2, tier=3)
    for node in cluster.nodes.values():
        node.untold.clear()
        node.resync()
    cluster.master.drain(cluster.now, "b", on=True)
    a.used = 9 * GIB
    cluster.wait(5.0, *cluster.nodes.values())
    assert not [advice for node in cluster.nodes.values() for advice in node.advice if advice.verb != "copy"]


def test_the_last_copy_is_never_dropped_whatever_is_lost_late_or_wrong() -> None:
    """Seeded: nodes that evict, die, answer late or not at all; what a drop names is held by its keeper as long as it lasts."""
    for seed in range(15):
        draw = random.Random(seed)
        cluster = Cluster("a", "b", "c", advice_bytes_per_second=20 * PAGE_BYTES)
        held: dict[str, dict[int, float]] = {name: {} for name in cluster.nodes}  # key -> until, as the node keeps its word
        for node in cluster.nodes.values():
            node.put(*draw.sample(range(40), 25))
            node.untold.clear()
            node.resync()
            node.used = draw.choice([0, 9 * GIB])
        drops = 0
        for _ in range(60):
            cluster.now += draw.choice([0.1, 0.5, 2.0])
            for name, node in cluster.nodes.items():
                if draw.random() < 0.2:
                    continue  # it is slow
                numbers = [number for number, _ in node.holds if held[name].get(number, 0.0) <= cluster.now]
                if numbers and draw.random() < 0.5:
                    node.evict(draw.choice(numbers))
                    node.tell(lose=draw.random() < 0.1)
                    if node.member.wants_resync:
                        node.resync()
                answers = []
                for advice in node.advice:
                    keys = [int(word) for word in advice.keys.view(np.uint64).reshape(-1, 4)[:, 0]]
                    if advice.verb == "hold" and all((key, 2) in node.holds for key in keys) and draw.random() < 0.8:
                        held[name].update(dict.fromkeys(keys, cluster.now + 30.0))
                        answers.append(advice.number)
                    elif advice.verb == "drop" and advice.seconds(cluster.now) > 0:
                        for key in keys:
                            if held[name].get(key, 0.0) > cluster.now:
                                continue  # pinned for somebody else
                            others = [other for other in cluster.nodes.values() if other is not node and (key, 2) in other.holds]
                            assert others, f"the last copy of {key} is dropped, seed {seed}"
                            node.holds.pop((key, 2), None)
                            drops += 1
                node.advice.clear()
                node.beat(held=answers)
            cluster.master.tick(cluster.now)
            cluster.master.check()
        assert drops or seed > 0


def test_a_pool_that_is_no_member_is_told_so() -> None:
    cluster = Cluster("a")
    with pytest.raises(UnknownNode):
        cluster.master.judge("a", 99, cluster.now, words([1]), np.zeros(1, np.uint32))
