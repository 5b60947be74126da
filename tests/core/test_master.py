"""The master's state machine, by single rules and by a seeded run of everything that can go wrong."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest

from tests.core.cluster import DIGEST, DRAM, PAGE_BYTES, SSD, Cluster, Node, runs, words
from umbp.core.directory import Locations
from umbp.core.engines import SILENT_SECONDS_MAX
from umbp.core.master import Part
from umbp.core.membership import DEAD, SUSPECT
from umbp.core.single import route_one
from umbp.errors import Conflict, LimitReached, NotFound, UnknownNode
from umbp.types import Tier

# -- events ------------------------------------------------------------------------------------------------------------------------


def test_a_bundle_is_seen_at_once_and_a_retry_changes_nothing() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(1, 2)
    assert a.tell() == "apply"
    assert cluster.located([1, 2, 3]) == [1, 1, 0]
    a.evict(2)
    a.number -= 1
    assert a.tell() == "again"
    assert cluster.located([1, 2, 3]) == [1, 1, 0]


def test_a_gap_asks_for_a_resync_and_the_resync_repairs_it() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(1, 2, 3)
    a.tell()
    a.evict(1).put(4)
    a.tell(lose=True)
    a.put(5)
    assert a.tell() == "gap"
    assert a.member.wants_resync
    assert cluster.located(range(1, 6)) == [1, 1, 1, 0, 0]  # as before: routing is not worse meanwhile
    a.resync()
    assert cluster.located(range(1, 6)) == [0, 1, 1, 1, 1]
    assert not a.member.wants_resync
    assert a.put(6).tell() == "apply"


def test_events_between_the_pieces_of_a_resync_are_newer_than_it() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(*range(1, 10), tier=SSD)
    a.tell()
    for number, verdict in enumerate(a.pieces(size=4)):
        assert verdict == "apply"
        if number == 0:
            a.evict(1, tier=SSD).put(1).put(20)
            assert a.tell() == "apply"
            a.evict(9, tier=SSD)
            assert a.tell() == "apply"
    assert cluster.located([1, 2, 8, 9, 20]) == [1, 1, 1, 0, 1]
    assert cluster.master.locate(cluster.now, DIGEST, words([1]))[1].tolist() == [1 << DRAM]


def test_a_sweep_goes_on_at_the_piece_that_is_missing() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(1, 2)
    a.sweep = 5
    assert a.piece(1, [(1, DRAM)], last=True) == "lost"  # of a sweep that nobody has begun
    assert a.piece(0, [(1, DRAM)], last=False) == "apply"
    assert a.piece(0, [(1, DRAM)], last=False) == "again"
    assert a.piece(2, [], last=True) == "gap"
    assert (a.member.sweep.wanted(5), a.member.synced, a.member.wants_resync) == (1, False, False)
    assert a.piece(1, [(2, DRAM)], last=False) == "apply"
    assert a.piece(2, [], last=True) == "apply"
    assert a.piece(2, [], last=True) == "again"  # its answer was lost
    assert a.member.synced
    assert cluster.located([1, 2]) == [1, 1]
    assert a.member.sweep.wanted(5) == -1


def test_a_piece_that_is_not_what_was_sent_is_not_applied_and_is_wanted_again() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(1, 2)
    a.sweep = 1
    assert a.piece(0, [(1, DRAM)], last=False) == "apply"
    assert a.piece(1, [(9, DRAM)], last=False, damage=1) == "torn"
    assert (a.member.sweep.wanted(1), cluster.located([9])) == (1, [0])
    assert a.piece(1, [(2, DRAM)], last=False) == "apply"
    a.totals[1, 1] += 1  # a piece is taken for another one than was applied: found at the next one
    assert a.piece(2, [], last=True) == "torn"
    assert not a.member.synced
    assert cluster.master.counts.torn == 2


def test_a_bundle_that_is_lost_between_two_pieces_is_found_by_the_next_piece() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(*range(9))
    verdicts = []
    for number, verdict in enumerate(a.pieces(size=4)):
        verdicts.append(verdict)
        if number == 0:
            a.evict(1).tell(lose=True)
    assert verdicts == ["apply", "lost", "lost"]
    assert (a.member.wants_resync, a.member.synced, a.member.sweep.wanted(1)) == (True, False, 1)
    a.resync()
    assert cluster.located([1, 2]) == [0, 1]


def test_resyncs_that_never_end_do_not_confuse_old_with_new() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(1, 2)
    a.tell()
    for _ in range(40):
        a.sweep += 1
        assert a.piece(0, [(1, DRAM)], last=False) == "apply"
    a.evict(2)
    a.untold.clear()
    a.resync()
    assert cluster.located([1, 2]) == [1, 0]
    cluster.wait(5.0, a)
    cluster.master.check()


def test_words_under_an_old_registration_are_refused() -> None:
    cluster = Cluster("a")
    old = cluster["a"].registration
    cluster["a"].join()
    with pytest.raises(UnknownNode):
        cluster.master.expects(cluster.now, "a", old, 1)
    with pytest.raises(UnknownNode):
        cluster.master.beat(cluster.now, "a", old, {})


# -- members -----------------------------------------------------------------------------------------------------------------------


def test_the_keys_of_a_dead_node_are_gone_at_once_and_come_back_with_it() -> None:
    cluster = Cluster("a", "b")
    a, b = cluster["a"].put(*range(100)), cluster["b"].put(1)
    a.tell()
    b.tell()
    cluster.wait(12.0, b)
    assert a.member.state == DEAD
    assert cluster.located([1, 2]) == [1, 0]
    with pytest.raises(UnknownNode):
        a.beat()
    a.join().resync()
    assert cluster.located([1, 2]) == [2, 1]
    cluster.wait(3.0, a, b)
    cluster.master.check()


def test_nodes_that_died_and_come_back_do_not_hide_one_another() -> None:
    """Their holders' numbers are free again when they come back, and the first one is given what was the second one's."""
    cluster = Cluster("a", "b", "c")
    for name in "ab":
        cluster[name].put(1).tell()
        cluster.master.leave(cluster.now, name, cluster[name].registration)
    for _ in range(4):  # until both numbers are free
        cluster.now += 0.1
        cluster.master.tick(cluster.now)
    for name in "ab":
        cluster[name].join().resync()
        cluster[name].put(2).tell()
    assert cluster.located([1, 2]) == [2, 2]
    assert cluster.plan([1, 2], "c", exclude=frozenset({"b"})).pages == 2
    assert cluster.plan([1, 2], "c", exclude=frozenset({"a"})).pages == 2
    cluster.master.check()


def test_a_node_that_restarts_faster_than_a_heartbeat_leaves_nothing_of_its_old_life() -> None:
    cluster = Cluster("a")
    cluster["a"].put(1, 2).tell()
    again = Node(cluster, "a", boot=2).join()
    assert cluster.located([1, 2]) == [0, 0]
    again.put(2).tell()
    assert cluster.located([1, 2]) == [0, 1]
    cluster.wait(3.0, again)
    cluster.master.check()


def test_two_nodes_of_one_name_do_not_take_turns() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(1)
    a.tell()
    with pytest.raises(Conflict):
        cluster.master.join(cluster.now, "a", 99, "elsewhere", {}, {})
    assert cluster.located([1]) == [1]
    cluster.wait(5.0, a)
    with pytest.raises(Conflict):
        cluster.master.join(cluster.now, "a", 99, "elsewhere", {}, {})


def test_a_master_that_restarts_knows_again_what_pools_say() -> None:
    cluster = Cluster("a", "b")
    cluster["a"].put(1, 2).tell()
    cluster["b"].put(2).tell()
    cluster.restart_master()
    assert cluster.located([1, 2]) == [0, 0]
    cluster.wait(1.0, cluster["a"], cluster["b"])
    assert cluster.located([1, 2]) == [1, 2]


def test_a_suspect_is_not_routed_to_and_the_other_copy_is() -> None:
    cluster = Cluster("a", "b")
    for name in "ab":
        cluster[name].put(1, 2).tell()
    cluster.master.failed(cluster.now, "a", "c", "connection refused")
    assert cluster["a"].member.state == SUSPECT
    assert runs(cluster.plan([1, 2], "c")) == [(0, 2, "b", "dram")]
    cluster.master.failed(cluster.now, "b", "c", "connection refused")
    assert cluster.plan([1, 2], "c").held == 0
    assert runs(cluster.plan([1, 2], "b")) == [(0, 2, "b", "dram")]  # its own pages need no network
    cluster.wait(1.5, cluster["a"], cluster["b"])
    assert cluster.plan([1, 2], "c").held == 2


def test_a_node_that_cannot_be_reached_by_its_address_is_not_routed_to() -> None:
    cluster = Cluster("a")
    a = cluster["a"].put(1)
    a.tell()
    cluster.master.reached(cluster.now, a.member, "nothing listens there")
    assert cluster.plan([1], "c").held == 0
    cluster.master.reached(cluster.now, a.member, "")
    assert cluster.plan([1], "c").held == 1


def test_a_node_that_leaves_takes_its_engines_along() -> None:
    cluster = Cluster("a")
    cluster["a"].put(1).tell()
    cluster.master.external(cluster.now, "a.0", "a", DIGEST, Tier.HBM, words([1, 2]), present=True)
    assert cluster.located([1, 2]) == [2, 1]
    cluster.master.leave(cluster.now, "a", cluster["a"].registration)
    assert cluster.located([1, 2]) == [0, 0]
    cluster.wait(2.0)
    cluster.master.check()


# -- engines -----------------------------------------------------------------------------------------------------------------------


def test_engine_tiers_add_up_and_are_cleared_one_by_one() -> None:
    cluster = Cluster("a")
    master, now = cluster.master, cluster.now
    assert master.external(now, "e", "a", DIGEST, Tier.HBM, words([1, 2]), present=True) == 2
    assert master.external(now, "e", "a", DIGEST, Tier.HOST, words([1]), present=True) == 1
    assert master.external(now, "e", "a", DIGEST, Tier.HOST, words([1]), present=True) == 0
    assert master.locate(now, DIGEST, words([1, 2]))[1].tolist() == [3, 1]
    assert master.external(now, "e", "a", DIGEST, Tier.HBM, words([1]), present=False) == 1
    assert master.locate(now, DIGEST, words([1, 2]))[1].tolist() == [2, 1]
    assert master.engines.clear("e", Tier.HOST) == 1
    assert master.locate(now, DIGEST, words([1, 2]))[1].tolist() == [0, 1]
    assert master.engines.clear("e") == 1
    assert master.engines.clear("e") == 0


def test_an_engine_belongs_to_one_live_node() -> None:
    cluster = Cluster("a", "b")
    master = cluster.master
    master.external(cluster.now, "e", "a", DIGEST, Tier.HBM, words([1]), present=True)
    with pytest.raises(Conflict, match="is on node"):
        master.external(cluster.now, "e", "b", DIGEST, Tier.HBM, words([1]), present=True)
    with pytest.raises(NotFound, match="no node"):
        master.external(cluster.now, "f", "z", DIGEST, Tier.HBM, words([1]), present=True)


def test_engines_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.core.engines.ENGINES_MAX", 1)
    cluster = Cluster("a")
    cluster.master.external(cluster.now, "e", "a", DIGEST, Tier.HBM, words([1]), present=True)
    with pytest.raises(LimitReached, match="engines"):
        cluster.master.external(cluster.now, "f", "a", DIGEST, Tier.HBM, words([1]), present=True)


def test_a_silent_engine_is_forgotten_and_one_that_says_nothing_new_is_not() -> None:
    cluster = Cluster("a")
    master, now = cluster.master, cluster.now
    for engine in ("dead", "quiet"):
        master.external(now, engine, "a", DIGEST, Tier.HBM, words([1]), present=True)
    assert master.external(now + 150, "quiet", "a", DIGEST, Tier.HBM, words([]), present=True) == 0
    assert master.engines.expire(now + SILENT_SECONDS_MAX) == []
    assert master.engines.expire(now + SILENT_SECONDS_MAX + 1) == ["dead"]
    assert master.locate(now, DIGEST, words([1]))[1].tolist() == [1]
    assert list(master.engines.engines) == ["quiet"]
    assert master.engines.expire(now + 1000) == ["quiet"]
    master.check()


def test_what_only_engines_have_is_not_a_source_for_pools() -> None:
    cluster = Cluster("a")
    cluster.master.external(cluster.now, "e", "a", DIGEST, Tier.HBM, words([1]), present=True)
    assert cluster.plan([1], "b").held == 0


# -- routes ------------------------------------------------------------------------------------------------------------------------


def test_a_plan_covers_the_leading_pages_that_somebody_has() -> None:
    cluster = Cluster("a", "b")
    cluster["a"].put(*range(10)).tell()
    cluster["b"].put(*range(10, 15)).put(16).tell()
    plan = cluster.plan(range(20), "c")
    assert plan.pages == plan.held == 15
    assert runs(plan) == [(0, 10, "a", "dram"), (10, 15, "b", "dram")]
    assert plan.recompute_seconds == inf
    assert plan.runs[0].source.addresses == {"http": "a:7411"}
    assert cluster.plan(range(30, 40), "c").held == 0
    assert cluster.plan([], "c").held == 0


def test_a_directory_cut_by_key_answers_as_a_whole_one() -> None:
    """The seam for several masters by key: places joined by whoever was asked are enough for the plan that one master makes."""
    random_keys = np.random.default_rng(4)
    asked = random_keys.integers(0, 1 << 63, (300, 4), dtype=np.uint64) * np.uint64(2)
    shard_of = (asked[:, 0] >> np.uint64(63)).astype(np.int64)
    whole, shards = Cluster("a", "b", "c"), (Cluster("a", "b", "c"), Cluster("c", "a", "b"))  # with numbers of their own for nodes
    for name, share in (("a", 0.3), ("b", 0.6), ("c", 0.95)):
        has = np.flatnonzero(random_keys.random(len(asked)) < share)
        for cluster, mine in ((whole, has), *((shard, has[shard_of[has] == number]) for number, shard in enumerate(shards))):
            tiers = np.where(mine % 3 == 0, SSD, DRAM).astype(np.uint8)
            spaces = cluster.master.spaces([(DIGEST, PAGE_BYTES, len(mine))])
            cluster.master.apply(cluster.now, Part(cluster[name].member, asked[mine], spaces, tiers, np.ones(len(mine), np.uint8)))
    here = shards[0].master
    items, holders, bits = [], [], []
    for number, shard in enumerate(shards):
        at = np.flatnonzero(shard_of == number)
        places = shard.master.directory.locations(shard.master.directory.find(asked[at], 0))
        names = [shard.master.membership.by_holder[holder].node for holder in places.holder.tolist()]
        items.append(at[places.item])
        holders.append(np.array([here.membership.members[name].holder for name in names]))
        bits.append(places.tiers)
    order = np.argsort(np.concatenate(items), kind="stable")
    joined = Locations(*(np.concatenate(parts)[order] for parts in (items, holders, bits)))
    draws = np.zeros(len(asked))
    columns = here.planner.columns(whole.now, joined, len(asked), "elsewhere")
    view = here.planner.view(whole.now, columns, "elsewhere", PAGE_BYTES, draws)
    plan = here.planner.plan(view, columns, here.choices.route(view))
    assert plan == whole.master.route(whole.now, DIGEST, asked, "elsewhere", draws)
    assert plan.held > 10
    assert len({run.source.node for run in plan.runs}) > 1


def test_a_prefix_is_split_over_sources_by_their_measured_speed() -> None:
    cluster = Cluster("a", "b")
    for name in "ab":
        cluster[name].put(*range(300)).tell()
    for _ in range(30):
        for size in (PAGE_BYTES, 64 * PAGE_BYTES):
            cluster.master.costs.measured("a", DRAM, "c", size, 1e-4 + size / 4e9)
            cluster.master.costs.measured("b", DRAM, "c", size, 1e-4 + size / 1e9)
    plan = cluster.plan(range(300), "c")
    pages = {run.source.node: run.pages for run in plan.runs}
    assert pages["a"] / pages["b"] == pytest.approx(4.0, rel=0.15)
    one = 300 * PAGE_BYTES / 4e9
    assert plan.seconds < 0.9 * one


def test_many_requesters_of_one_moment_are_spread_over_the_sources() -> None:
    cluster = Cluster("a", "b", "c")
    for name in "abc":
        cluster[name].put(*range(4)).tell()  # too few pages to split
    used = [cluster.plan(range(4), f"r{n}").runs[0].source.node for n in range(30)]
    assert {used.count(name) for name in "abc"} == {10}
    used = [cluster.plan(range(4), f"r{n}", count=False).runs[0].source.node for n in range(5)]
    assert len(set(used)) == 1  # a question that no fetch follows makes nobody busy


def test_computing_is_preferred_where_it_is_faster() -> None:
    cluster = Cluster("a")
    cluster["a"].put(*range(100)).tell()
    fetch = cluster.plan(range(100), "b", count=False).seconds
    slow = cluster.plan(range(100), "b", prefill=6400 / (fetch * 10), count=False)
    assert (slow.pages, slow.recompute) == (100, False)
    assert slow.recompute_seconds == pytest.approx(fetch * 10)
    fast = cluster.plan(range(100), "b", prefill=6400 / (fetch / 10), count=False)
    assert (fast.pages, fast.held, fast.recompute, fast.runs) == (0, 100, True, ())


def test_excluded_nodes_are_not_named() -> None:
    cluster = Cluster("a", "b")
    for name in "ab":
        cluster[name].put(1).tell()
    assert runs(cluster.plan([1], "c", exclude=frozenset({"a"}))) == [(0, 1, "b", "dram")]
    assert cluster.plan([1], "c", exclude=frozenset({"a", "b"})).held == 0


def test_only_real_routing_calls_count_as_use() -> None:
    cluster = Cluster("a")
    cluster["a"].put(1, 2).tell()
    cluster.plan([1, 2, 3], "b", count=False)
    cluster.plan([1, 2, 3], "b", policy="random")
    cluster.located([1, 2])
    directory = cluster.master.directory
    rows = directory.find(words([1, 2]), 0)
    assert directory.use(cluster.now, rows).accesses.tolist() == [0, 0]
    cluster.plan([1, 2, 3], "b")
    assert directory.use(cluster.now, rows).accesses.tolist() == [1, 1]
    assert cluster.master.counts.routes == 1
    cluster.plan([1, 2, 3], "b", again=True, exclude=frozenset({"c"}))  # the same load: it goes on elsewhere
    assert directory.use(cluster.now, rows).accesses.tolist() == [1, 1]


def test_the_rest_of_a_prompt_leads_to_its_beginning_still() -> None:
    """A pool asks for what it lacks: the pages behind those that it has."""
    cluster = Cluster("a")
    cluster["a"].put(*range(1, 7)).tell()
    cluster.plan(range(1, 7), "b")
    cluster.plan(range(3, 7), "b")
    cluster.plan([5], "b")
    route_one(cluster.master, cluster.now, DIGEST, words([4]), "b", np.zeros(1))
    directory = cluster.master.directory
    rows = directory.find(words(range(1, 7)), 0)
    assert directory.chain(int(rows[5]), 99) == rows.tolist()
    assert directory.use(cluster.now, rows).accesses.tolist() == [1, 1, 2, 3, 3, 2]


def test_policies_are_swapped_by_name_and_previewed_without_effect() -> None:
    cluster = Cluster("a", "b")
    cluster["a"].put(*range(50), tier=SSD).tell()
    cluster["b"].put(*range(50)).tell()
    for _ in range(30):
        cluster.master.costs.measured("a", SSD, "a", 50 * PAGE_BYTES, 9.0)
    assert {run.source.node for run in cluster.plan(range(50), "a", count=False).runs} == {"b"}
    assert runs(cluster.plan(range(50), "a", policy="local_first")) == [(0, 50, "a", "ssd")]
    cluster.master.choices.swap("routing", "local_first")
    assert runs(cluster.plan(range(50), "a", count=False)) == [(0, 50, "a", "ssd")]
    with pytest.raises(NotFound, match="fastest"):
        cluster.master.choices.swap("routing", "nonesuch")
    with pytest.raises(NotFound, match="routing"):
        cluster.master.choices.swap("eviction", "lru")
    with pytest.raises(NotFound, match="fastest"):
        cluster.plan(range(50), "a", policy="nonesuch")


# -- all of it ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_the_master_ends_up_knowing_what_pools_hold(seed: int) -> None:
    draw = random.Random(seed)
    cluster = Cluster("a", "b", "c", keys_max=512)
    for step in range(400):
        node = cluster[draw.choice("abc")]
        key, tier = draw.randrange(60), draw.choice([DRAM, SSD])
        verb = draw.choices(["put", "evict", "tell", "lose", "wait", "restart", "freeze", "master", "fail"], [9, 6, 9, 1, 5, 1, 1, 0.3, 1])[
            0
        ]
        if verb in ("put", "evict"):
            getattr(node, verb)(key, tier=tier)
        elif verb in ("tell", "lose"):
            try:
                if node.tell(lose=verb == "lose") == "gap":
                    node.untold.clear()
                    node.resync()
            except UnknownNode:
                node.untold.clear()
                node.join().resync()
        elif verb == "wait":
            cluster.wait(0.5, *cluster.nodes.values())
        elif verb == "restart":
            again = Node(cluster, node.name, boot=node.boot + 1).join()
            again.holds = dict(node.holds) if draw.random() < 0.5 else {}
            cluster.nodes[node.name] = again.resync()
        elif verb == "freeze":
            cluster.wait(12.0, *(other for other in cluster.nodes.values() if other is not node))
        elif verb == "master":
            cluster.restart_master()
        else:
            try:
                cluster.master.failed(cluster.now, node.name, "a", "")
            except NotFound:
                continue
        plan = cluster.plan(draw.sample(range(60), 10), "a", count=step % 2 == 0)
        assert plan.held <= 10
    for node in cluster.nodes.values():
        try:
            verdict = node.tell()
        except UnknownNode:
            verdict = "gap"
            node.join()
        if verdict == "gap":
            node.resync()
    cluster.wait(40.0, *cluster.nodes.values())
    expected = [sum((key, DRAM) in n.holds or (key, SSD) in n.holds for n in cluster.nodes.values()) for key in range(60)]
    assert cluster.located(range(60)) == expected, f"seed {seed}"
    cluster.master.check()
