"""Commands about the cluster, at a master or at any pool of it: nodes, drain, route; and what the whole cluster has and asks for."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from umbp.cli.target import AsJson, cell, checked_key, console, duration, print_json, share, table, target_of, whole_list
from umbp.client.http import segment_of_path
from umbp.errors import InvalidRequest
from umbp.grammar import format_size

KEYS_MAX = 16_384  # of one question


def nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """Every node of the cluster: its state, how full it is, and whether others read from it."""
    document = whole_list(target_of(context).http, "nodes")
    if as_json:
        print_json(document)
    else:
        console().print(nodes_table(document["nodes"]))


def drain(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name: umbp nodes")],
    undo: Annotated[bool, typer.Option("--undo", help="New pages go there again")] = False,
    as_json: AsJson = False,
) -> None:
    """Put nothing new on a node, and have others copy what only it has. It keeps serving; this outlasts its restarts."""
    path = f"/v1/nodes/{segment_of_path(node)}/drain"
    http = target_of(context).http
    document = http.delete(path) if undo else http.post(path)
    if as_json:
        print_json(document)
    else:
        console().print(nodes_table([document]))


def route(
    context: typer.Context,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Page keys of a prompt, root first; - reads them, a line each")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="8 or more digits of its digest: umbp namespaces")],
    requester: Annotated[str, typer.Option("--for", metavar="NODE", help="The node that would read them")] = "",
    prefill: Annotated[float, typer.Option("--prefill", min=0, help="Tokens a second that are computed, to compare with")] = 0.0,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, help="Tokens of a page")] = 64,
    policy: Annotated[str, typer.Option("--policy", help="What another routing policy would choose")] = "",
    as_json: AsJson = False,
) -> None:
    """Who serves a prompt's pages, and which engine should take it. Only asks: nothing counts as used."""
    texts = sys.stdin.read().split() if keys == ["-"] else keys
    if not 0 < len(texts) <= KEYS_MAX:
        raise InvalidRequest(f"{len(texts)} keys, 1 to {KEYS_MAX} can be asked about", field="KEY")
    if not re.fullmatch("[0-9a-f]{8,64}", digest := namespace.lower()):
        why = f"{namespace[:80]!r} is not 8 to 64 hex digits of a namespace's digest, which umbp namespaces shows"
        raise InvalidRequest(why, field="--namespace", example="-n 9f86d081884c")
    body = {
        "namespace": digest,
        "keys": [checked_key(text) for text in texts],
        "requester": requester,
        "prefill_tokens_per_second": prefill,
        "page_tokens": page_tokens,
        "count": False,
        "policy": policy,
    }
    answer = target_of(context).http.post("/v1/route", body)
    if as_json:
        print_json(answer)
        return
    out = console()
    if requester:
        for line in runs_lines(answer):
            out.print(line)
    out.print(targets_table(answer["targets"]))


def cluster_grid(cluster: dict[str, Any]) -> Table:
    """The sums of a cluster, a line each."""
    grid = Table.grid(padding=(0, 2))
    states = ", ".join(f"{cluster[state]:,} {state}" for state in ("alive", "suspect", "draining", "dead") if cluster[state])
    full = ", ".join(
        f"{tier['tier']} {format_size(tier['used_bytes'])} of {format_size(tier['capacity_bytes'])}"
        f" ({share(tier['used_bytes'], tier['capacity_bytes'])})"
        for tier in cluster["tiers"]
    )
    left_out = f", {cluster['left_out']:,} had no room" if cluster["left_out"] else ""
    advice = ", ".join(f"{count:,} {verb}" for verb, count in cluster["advice"].items() if count)
    for name, text in (
        ("master", f"{', '.join(cluster['masters'])}, up for {duration(cluster['uptime_seconds'])}"),
        ("nodes", states or "none has joined yet"),
        ("memory", full or "-"),
        ("keys", f"{cluster['keys']:,} of {cluster['keys_max']:,}{left_out}, in {cluster['namespaces']:,} namespaces"),
        ("engines", f"{cluster['engines']:,} report their caches"),
        ("routes", f"{cluster['counters']['routes']:,}, {cluster['counters']['routed_pages']:,} pages"),
        ("advice", advice or "none given"),
        ("policies", ", ".join(f"{kind} {name}" for kind, name in cluster["policies"].items())),
    ):
        grid.add_row(cell(name, "dim"), cell(text))
    return grid


def nodes_table(found: list[dict[str, Any]]) -> Table:
    """A line a node."""
    tagged = any(node["tags"] for node in found)
    columns = ("node", "state", "tiers", "keys", "member for", "silent", "address", "read from", *(("tags",) if tagged else ()))
    made = table(*columns, right=("keys",))
    for node in found:
        full = ", ".join(
            f"{tier['tier']} {format_size(tier['used_bytes'])} of {format_size(tier['capacity_bytes'])} "
            f"({share(tier['used_bytes'], tier['capacity_bytes'])})"
            for tier in node["tiers"]
        )
        dead = node["state"] == "dead"  # nothing that it said counts any more
        style = {"alive": "green", "draining": "yellow", "suspect": "yellow"}.get(node["state"], "red")
        made.add_row(
            cell(node["id"]),
            cell(node["state"], style),
            cell("-" if dead else full or "-"),
            cell("-" if dead else sum(tier["keys"] for tier in node["tiers"])),
            cell(duration(node["joined_seconds"])),
            cell(f"{node['silent_seconds']:.1f} s"),
            cell(", ".join(f"{kind} {address}" for kind, address in node["addresses"].items()) or "-"),
            cell("yes" if node["source"] else f"no: {node['why']}"),
            *([cell(", ".join(f"{key}={value}" for key, value in node["tags"].items()) or "-")] if tagged else []),
        )
    return made


def runs_lines(answer: dict[str, Any]) -> list[str]:
    """A line a run of the plan, and what it comes to."""
    lines = [
        f"pages {run['start']:,} to {run['stop']:,} from {run['node']} {run['tier']}, {milliseconds(run['seconds'])}"
        for run in answer["runs"]
    ]
    end = f"{answer['pages']:,} of {answer['asked']:,} pages in {milliseconds(answer['seconds'])}"
    if answer["recompute"]:
        end += f"; {answer['held'] - answer['pages']:,} more are held, and faster computed"
    return [*lines, end if answer["held"] else "no page is anywhere"]


def targets_table(found: list[dict[str, Any]]) -> Table:
    """A line an engine, the best first."""
    numbers = ("hbm", "host", "pool", "remote", "missing", "fetch", "compute", "in all")
    made = table("engine", "node", *numbers, right=numbers)
    for target in found:
        made.add_row(
            cell(target["engine"] or "-"),
            cell(target["node"]),
            *(cell(target[f"{name}_pages"]) for name in ("hbm", "host", "pool", "remote", "missing")),
            *(cell(milliseconds(target[f"{name}seconds"])) for name in ("fetch_", "compute_", "")),
        )
    return made


def milliseconds(seconds: float | None) -> str:
    """Such as ``12.3 ms``; a dash where it is not known."""
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def prefixes_table(found: list[dict[str, Any]]) -> Table:
    """A line a hot prefix."""
    made = table("key", "namespace", "pages", "bytes", "heat", right=("pages", "bytes", "heat"))
    for prefix in found:
        made.add_row(
            cell(prefix["key"]),
            cell(prefix["namespace"][:12]),
            cell(prefix["pages"]),
            cell(format_size(prefix["bytes"])),
            cell(f"{prefix['heat']:.1f}"),
        )
    return made


def cluster_keys_table(found: list[dict[str, Any]]) -> Table:
    """A line a key, with everybody who has it."""
    numbers = ("bytes", "accesses", "heat")
    made = table("key", "namespace", *numbers, "idle", "where", right=numbers)
    for key in found:
        places = [f"{place['engine'] or place['node']} {place['tier']}" for place in key["locations"]]
        made.add_row(
            cell(key["key"]),
            cell(key["namespace"][:12]),
            cell(format_size(key["bytes"])),
            cell(key["accesses"]),
            cell(f"{key['heat']:.1f}"),
            cell("-" if key["idle_seconds"] is None else duration(key["idle_seconds"])),
            cell(", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")),
        )
    return made
