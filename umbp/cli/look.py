"""Commands that look at a pool and change nothing: status, top, namespaces, where, hot."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Generator
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from umbp.cli import views
from umbp.cli.cluster import cluster_grid, cluster_keys_table, nodes_table, prefixes_table
from umbp.cli.target import AsJson, NamespaceOption, Target, cell, checked_key, console, print_json, target_of, whole_list
from umbp.client.http import segment_of_path
from umbp.errors import NotFound, Unavailable

NODES_SHOWN = 100
EverywhereOption: TypeAlias = Annotated[bool, typer.Option("--cluster", help="In the whole cluster, as its master knows it.")]


def status(context: typer.Context, as_json: AsJson = False) -> None:
    """How full the pool is, who uses it, and what was asked of it; of a master: its cluster."""
    http = target_of(context).http
    try:
        document = http.get("/v1/status")
    except NotFound:  # a master has none
        document, found = http.get("/v1/cluster"), http.get("/v1/nodes", limit=NODES_SHOWN)
        if as_json:
            print_json(document)
        else:
            console().print(cluster_grid(document), Text(), nodes_table(found["nodes"]))
        return
    if as_json:
        print_json(document)
    else:
        console().print(views.status_view(document))


def namespaces(context: typer.Context, as_json: AsJson = False) -> None:
    """Every namespace: what it is, what it holds, its quota, and what was refused to it."""
    document = whole_list(target_of(context).http, "namespaces")
    if as_json:
        print_json(document)
    else:
        console().print(views.namespaces_table(document["namespaces"], document["total"]))


def where(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Page key, 64 hex digits")],
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    as_json: AsJson = False,
) -> None:
    """Where the page of a key is stored, in every namespace that has it. Ends with 1 if it is nowhere."""
    http, key = target_of(context).http, checked_key(key)
    if everywhere:
        document = http.get(f"/v1/cluster/keys/{key}")
    elif namespace is None:
        document = http.get(f"/v1/keys/{key}")
    else:
        document = {"keys": [http.get(f"/v1/keys/{segment_of_path(namespace)}/{key}")]}
    if not document["keys"]:
        raise NotFound(f"{key} is not stored")
    if as_json:
        print_json(document)
    else:
        console().print(keys_view(document["keys"]))


def hot(
    context: typer.Context,
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=1000, help="How many")] = 20,
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    as_json: AsJson = False,
) -> None:
    """The keys that were asked for most; of the cluster also the prefixes."""
    document = target_of(context).http.get("/v1/cluster/hot" if everywhere else "/v1/hot", n=count, namespace=namespace)
    if as_json:
        print_json(document)
        return
    console().print(keys_view(document["keys"]))
    if document.get("prefixes"):
        console().print(prefixes_table(document["prefixes"]))


def keys_view(keys: list[dict[str, Any]]) -> RenderableType:
    """A line a key: a pool says what it holds, a master who holds it, whichever was asked."""
    of_master = any("heat" in key for key in keys)
    return cluster_keys_table(keys) if of_master else views.keys_table(keys)


# -- top ---------------------------------------------------------------------------------------------------------------------------


def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1, max=60, help="Seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look with its rates, for scripts")] = False,
) -> None:
    """The same live, with rates; q or Ctrl-C ends it."""
    target = target_of(context)
    before = target.http.get("/v1/status")
    if once:
        time.sleep(interval)
        console().print(_frame(before, target.http.get("/v1/status")))
        return
    live = Live(_frame(before, before), console=console(), screen=sys.stdout.isatty(), auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _keys() as pressed, live:
        while pressed(interval) not in ("q", "Q"):
            now = _status_or_none(target)
            live.update(_frame(before, now) if now else _gone(target), refresh=True)
            before = now or before


def _frame(before: dict[str, Any], now: dict[str, Any]) -> RenderableType:
    rates = views.rates_text(before, now) if now is not before else Text("...", "dim")
    return Group(views.status_grid(now), Text(), rates, Text(), views.namespaces_table(now["namespaces"], now["namespaces_total"]))


def _gone(target: Target) -> RenderableType:
    return cell(f"the pool at {target.address} does not answer; looking again", "red")


def _status_or_none(target: Target) -> dict[str, Any] | None:
    try:
        return target.http.get("/v1/status")
    except Unavailable:
        return None


class _Pressed:
    """Waits for a key, or for the time to be over."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal

    def __call__(self, seconds: float) -> str:
        if not self._terminal:
            time.sleep(seconds)
            return ""
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if readable else ""


@contextlib.contextmanager
def _keys() -> Generator[_Pressed]:
    """The keyboard, a key at a time and unseen, where there is one."""
    if not sys.stdin.isatty():
        yield _Pressed(False)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield _Pressed(True)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
