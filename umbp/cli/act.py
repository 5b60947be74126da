"""Commands that change what a pool holds or how it decides: evict, flush, quota, pins, policies."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from umbp.cli import views
from umbp.cli.target import (
    AsJson,
    NamespaceArgument,
    NamespaceOption,
    checked_key,
    checked_size,
    console,
    print_json,
    target_of,
)
from umbp.client.http import PoolHttp, segment_of_path
from umbp.errors import InvalidRequest
from umbp.grammar import format_size, parse_duration
from umbp.policies.base import CHOICES, CLUSTER_KINDS

EVICT_SECONDS_MAX = 60.0  # the pool gives up after 30
EVICTIONS = {"eviction": "", "ssd_eviction": "--tier ssd "}  # kinds of policy whose dry run is one of `evict`, and how that is asked for


def evict(
    context: typer.Context,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Bytes to free, such as 1GiB")],
    namespace: NamespaceOption = None,
    tier: Annotated[str, typer.Option("--tier", metavar="TIER", help="dram or ssd")] = "dram",
    preview: Annotated[bool, typer.Option("--preview", help="Only show what would go first")] = False,
    policy: Annotated[str, typer.Option("--policy", help="With --preview: what another eviction policy would let go")] = "",
    as_json: AsJson = False,
) -> None:
    """Free bytes, by the pool's policy. Ends with 1 if not so many could be freed."""
    body: dict[str, Any] = {"bytes": checked_size(size, "SIZE"), "tier": tier, "dry_run": preview, "policy": policy}
    if namespace is not None:
        body["namespace"] = namespace
    answer = target_of(context).http.post("/v1/evict", body, seconds_max=EVICT_SECONDS_MAX)
    if as_json:
        print_json(answer)
    else:
        out = console()
        if answer["first"]:
            out.print(views.victims_table(answer["first"]))
        rest = answer["objects"] - len(answer["first"])
        verb = "would go" if preview else "went"
        more = f", {rest:,} of them not shown" if rest else ""
        out.print(f"{answer['objects']:,} objects ({format_size(answer['bytes'])}) {verb}{more}")
        if not answer["complete"]:
            out.print("a preview shows the first ones only" if preview else "the rest is leased, pinned, being written, or not there")
    if not answer["complete"] and not preview:
        raise typer.Exit(1)


def flush(
    context: typer.Context,
    namespace: NamespaceArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Everything of a namespace goes, what is being written included: its weights have changed."""
    http, path = target_of(context).http, f"/v1/namespaces/{segment_of_path(namespace)}"
    space = http.get(path)
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest("a flush cannot be taken back, and nobody can be asked here", field="--yes", example="umbp flush 0 --yes")
        console().print(views.namespaces_table([space], 1))
        typer.confirm(f"{space['keys']:,} pages ({format_size(space['held_bytes'])}) go. Flush?", abort=True)
    # By its digest: the row might have been given to another while we asked.
    answer = http.post(f"/v1/namespaces/{space['digest']}/flush")
    if as_json:
        print_json(answer)
    else:
        console().print(f"{answer['keys']:,} pages of namespace {answer['row']} are gone")


def quota(
    context: typer.Context,
    namespace: NamespaceArgument,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Bytes it may hold, such as 10GiB; none for no limit")],
    as_json: AsJson = False,
) -> None:
    """Limit the bytes of a namespace. What is above goes by and by."""
    body = {"quota": checked_size(size, "SIZE", none=True)}
    space = target_of(context).http.put(f"/v1/namespaces/{segment_of_path(namespace)}/quota", body)
    if as_json:
        print_json(space)
    else:
        console().print(views.namespaces_table([space], 1))


# -- pins --------------------------------------------------------------------------------------------------------------------------


def pin(
    context: typer.Context,
    namespace: NamespaceArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Page keys, 64 hex digits each")],
    lasting: Annotated[str, typer.Option("--for", metavar="DURATION", help="Such as 1h; without it until it is taken back")] = "",
    note: Annotated[str, typer.Option("--note", help="Why")] = "",
    as_json: AsJson = False,
) -> None:
    """Protect pages from eviction."""
    seconds = parse_duration(lasting, "--for") if lasting else 0.0
    if lasting and not seconds:
        raise InvalidRequest("a pin lasts longer than nothing", field="--for", example="--for 1h")
    body = {"namespace": namespace, "keys": [checked_key(key) for key in keys], "seconds": seconds, "note": note}
    answer = target_of(context).http.post("/v1/pins", body)
    if as_json:
        print_json(answer)
        return
    out = console()
    out.print(views.pins_table([answer["pin"]]))
    for key in answer["missing"]:
        out.print(f"not stored, so not pinned: {key}")


def unpin(
    context: typer.Context,
    number: Annotated[int, typer.Argument(metavar="PIN", min=1, help="Its number: umbp pins")],
    as_json: AsJson = False,
) -> None:
    """Take a pin back."""
    answer = target_of(context).http.delete(f"/v1/pins/{number}")
    if as_json:
        print_json(answer)
    else:
        console().print(f"pin {answer['id']} of {answer['keys']:,} pages is taken back")


def pins(context: typer.Context, as_json: AsJson = False) -> None:
    """The pins, the oldest first."""
    document = target_of(context).http.get("/v1/pins", limit=1000)
    if as_json:
        print_json(document)
        return
    console().print(views.pins_table(document["pins"]) if document["pins"] else "no pins")
    if document["total"] > len(document["pins"]):
        console().print(f"{document['total'] - len(document['pins']):,} more are not shown")


# -- policies ----------------------------------------------------------------------------------------------------------------------


def policies(
    context: typer.Context,
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="Such as eviction or routing: umbp policies")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The policy to use from now on")] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Only show what it would choose now: a master's kinds")] = False,
    node: Annotated[str, typer.Option("--for", metavar="NODE", help="With --preview: who asks, of routing and placement")] = "",
    as_json: AsJson = False,
) -> None:
    """The policies, current and available; with KIND and NAME, choose one. What is stored stays."""
    http = target_of(context).http
    if preview:
        _preview(http, kind, name, node, as_json=as_json)
        return
    if kind is None:
        document = http.get("/v1/policies")
    elif name is None:
        raise InvalidRequest("KIND and NAME go together", field="NAME", example="umbp policies eviction leaf_lru")
    elif kind not in CHOICES:
        why = f"{kind[:40]!r} is none of {', '.join(CHOICES)}"
        raise InvalidRequest(why, field="KIND", example="umbp policies eviction lru")
    else:
        document = {"policies": [http.put(f"/v1/policies/{kind}", {"name": name})]}
    if as_json:
        print_json(document)
    else:
        console().print(views.policies_table(document["policies"]))


def _preview(http: PoolHttp, kind: str | None, name: str | None, node: str, *, as_json: bool) -> None:
    if kind in EVICTIONS:
        example = f"umbp evict 1GiB {EVICTIONS[kind]}--preview{f' --policy {name}' if name else ''}"
        raise InvalidRequest("what a policy of this kind would let go depends on how much is to be freed", field="KIND", example=example)
    if kind not in CLUSTER_KINDS:
        why = f"a dry run is of {', '.join(CLUSTER_KINDS)}; of eviction by umbp evict SIZE --preview"
        raise InvalidRequest(why, field="KIND", example="umbp policies replication hot_prefixes --preview")
    answer = http.post(f"/v1/policies/{kind}/preview", {"name": name or "", "node": node})
    if as_json:
        print_json(answer)
        return
    out = console()
    if answer["choices"]:
        out.print(views.choices_table(answer["choices"]))
    more = f", {answer['left_out']:,} choices more are not shown" if answer["left_out"] else ""
    out.print(f"{answer['kind']} {answer['name']} would choose {'this' if answer['choices'] else 'nothing'} now{more}; nothing is done")
