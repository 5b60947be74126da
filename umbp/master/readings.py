"""The master's metrics: what each is called and where it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from umbp.core.master import Master
from umbp.core.membership import ALIVE, DEAD, DRAINING, SUSPECT, Member
from umbp.metrics import Definition, Reading
from umbp.types import Tier


def _gauge(name: str, about: str, *labels: str) -> Definition:
    return Definition("gauge", name, about, labels)


def _counter(name: str, about: str, *labels: str) -> Definition:
    return Definition("counter", name, about, labels)


NODES = _gauge("umbp_master_nodes", "Nodes by state.", "state")
ENGINES = _gauge("umbp_master_engines", "Engines that report their own caches.")
KEYS = _gauge("umbp_master_keys", "Distinct keys that somebody has.")
KEYS_MAX = _gauge("umbp_master_keys_max", "Keys that the directory holds at most.")
NAMESPACES = _gauge("umbp_master_namespaces", "Namespaces that were reported.")
LINKS = _gauge("umbp_master_links", "Links whose cost was measured.")
ADVICE = _gauge("umbp_master_advice", "Advice that is out.")
LEFT_OUT = _counter("umbp_master_left_out_keys_total", "Keys for which the directory had no room.")
EVENTS = _counter("umbp_master_events_total", "Changes of keys that were applied.")
BUNDLES = _counter("umbp_master_bundles_total", "Bundles of changes that were applied.")
GAPS = _counter("umbp_master_gaps_total", "Bundles that were missing, so that a node had to send all again.")
RESYNCS = _counter("umbp_master_resyncs_total", "Resyncs that were completed.")
ROUTES = _counter("umbp_master_routes_total", "Routing calls that counted.")
ASKED = _counter("umbp_master_asked_pages_total", "Pages of those calls.")
ROUTED = _counter("umbp_master_routed_pages_total", "Pages of those calls that were worth fetching from somebody.")
PLACED = _counter("umbp_master_placed_pages_total", "New pages that were given a place.")
JUDGED = _counter("umbp_master_judged_pages_total", "Pages that nearly full nodes asked about before they let them go.")
JOINS = _counter("umbp_master_joins_total", "Registrations.")
DEATHS = _counter("umbp_master_deaths_total", "Nodes that left or expired.")
ADVISED = _counter("umbp_master_advised_total", "Advice given.", "verb")
NODE_SOURCE = _gauge("umbp_node_source", "1 where others read from this node now.", "node")
NODE_CAPACITY = _gauge("umbp_node_capacity_bytes", "Bytes of a node's tier, as it last said.", "node", "tier")
NODE_USED = _gauge("umbp_node_used_bytes", "Of those, used ones.", "node", "tier")
NODE_KEYS = _gauge("umbp_node_keys", "Keys of a node's tier.", "node", "tier")

TAG_LABELS_MAX = 32  # keys over all nodes that become labels; those that most nodes have


def node_info(tags: Mapping[str, Mapping[str, str]]) -> Iterator[Reading]:
    """``umbp_node_info{node=..., tag_KEY=...} 1`` of each of these nodes; a key that a node has not is the empty label, as if absent."""
    counts = Counter(key for of in tags.values() for key in of)
    keys = sorted(sorted(counts, key=lambda key: (-counts[key], key))[:TAG_LABELS_MAX])
    made = _gauge("umbp_node_info", "Always 1; the labels are the node's tags.", "node", *(f"tag_{key}" for key in keys))
    for node, of in tags.items():
        yield Reading(made, 1, (node, *(of.get(key, "") for key in keys)))


def _nodes(members: list[Member], now: float) -> Iterator[Reading]:
    """Of each node that is not dead, as it last said."""
    yield from node_info({member.node: member.tags for member in members})
    for member in members:
        yield Reading(NODE_SOURCE, float(member.usable(now)), (member.node,))
        for tier, (capacity, used) in member.tiers.items():
            labels = (member.node, Tier(tier).name.lower())
            yield Reading(NODE_CAPACITY, capacity, labels)
            yield Reading(NODE_USED, used, labels)
            yield Reading(NODE_KEYS, member.keys.get(tier, 0), labels)


def readings(master: Master, now: float) -> Iterator[Reading]:
    """All of them, now."""
    yield from _nodes([member for member in master.membership.members.values() if member.state != DEAD], now)
    states = [member.state for member in master.membership.members.values()]
    for state in (ALIVE, SUSPECT, DRAINING, DEAD):
        yield Reading(NODES, states.count(state), (state,))
    counts, ledger = master.counts, master.advisor.ledger
    for definition, value in (
        (ENGINES, len(master.engines.engines)),
        (KEYS, len(master.directory)),
        (KEYS_MAX, master.directory.keys_max),
        (NAMESPACES, len(master.directory.digests)),
        (LINKS, len(master.costs)),
        (ADVICE, len(ledger.by_number)),
        (LEFT_OUT, master.directory.left_out),
        (EVENTS, counts.events),
        (BUNDLES, counts.bundles),
        (GAPS, counts.gaps),
        (RESYNCS, counts.resyncs),
        (ROUTES, counts.routes),
        (ASKED, counts.asked_pages),
        (ROUTED, counts.routed_pages),
        (PLACED, counts.placed_pages),
        (JUDGED, counts.judged_pages),
        (JOINS, counts.joins),
        (DEATHS, counts.deaths),
    ):
        yield Reading(definition, value)
    for verb, count in ledger.counts.items():
        yield Reading(ADVISED, count, (verb,))
