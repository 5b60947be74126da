"""`umbp replay`: a trace or generated agent sessions through the running pool, every byte verified."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from umbp.cli.target import AsJson, Target, cell, checked_size, console, print_json, share, table, target_of
from umbp.client.sync import connect
from umbp.errors import InvalidRequest
from umbp.grammar import format_size
from umbp.layout import OBJECT_BYTES_MAX
from umbp.replay.audit import wait_quiet
from umbp.replay.drive import Driver, Plan
from umbp.replay.engine import open_namespace
from umbp.replay.messages import Setup
from umbp.replay.tally import Tally
from umbp.sim.workload import AGENT_PROFILE, Limits, TraceRequest, generate_agents, read_trace

NAME_CHARS_MAX = 50  # with four bytes a character still short enough for a namespace
GENERATED_SESSIONS = 10  # about 540 requests and 0.6 GiB of pages of 16 KiB: 10 s


@dataclass(frozen=True, slots=True)
class Workload:
    """Where the requests come from. They can be read any number of times."""

    file: Path | None
    seed: int
    limits: Limits

    def __str__(self) -> str:
        return "generated agent sessions" if self.file is None else self.file.name[:NAME_CHARS_MAX]

    def requests(self) -> Iterator[TraceRequest]:
        """From the first one."""
        if self.file is not None:
            return read_trace(self.file, self.limits)
        profile = replace(AGENT_PROFILE, sessions=self.limits.sessions_max or GENERATED_SESSIONS)
        return generate_agents(self.seed, profile, self.limits)


def replay(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Trace, .jsonl or .jsonl.gz; without it agent sessions are generated")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions in flight")] = 8,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Engine processes that share the pool")] = 1,
    time_scale: Annotated[float, typer.Option(min=0.0, help="1 for the trace's own times, 0 for as fast as it goes")] = 0.0,
    page_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a page in the pool")] = "16KiB",
    requests: Annotated[int | None, typer.Option(min=1, help="Requests to make at most")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Sessions to take at most")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of keys, bytes and what is generated")] = 0,
    kill_every: Annotated[int, typer.Option(min=0, help="Kill an engine about every so many requests")] = 0,
    lease: Annotated[bool, typer.Option("--lease", help="Read in place under leases instead of copying")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="First drop what an earlier replay of this seed has stored")] = False,
    as_json: AsJson = False,
) -> None:
    """Drive the pool with a trace: look up, load what hits, store what misses, verify every byte. Ends with 1 if one is wrong."""
    target = target_of(context)
    size = checked_size(page_bytes, "--page-bytes")
    if size > OBJECT_BYTES_MAX:
        raise InvalidRequest(f"{page_bytes} is more than a page can have", field="--page-bytes", example="2MiB")
    limits = Limits(requests_max=requests, sessions_max=sessions, concurrency=concurrency, time_scale=time_scale)
    workload = Workload(file, seed, limits)
    plan = Plan(setup=Setup(target.socket("replay"), size, str(workload), seed, lease), processes=processes, kill_every=kill_every)
    report = _run(target, workload, plan, fresh=fresh, quiet=as_json)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report["interrupted"]:
        raise typer.Exit(130)
    if report["wrong_pages"] or report["leaks"]:
        raise typer.Exit(1)


def _run(target: Target, workload: Workload, plan: Plan, *, fresh: bool, quiet: bool) -> dict[str, Any]:
    """The report; of what was done so far, if somebody presses Ctrl-C."""
    before = target.http.get("/v1/status")
    if fresh:
        _drop(workload, plan.setup)
    # Counting them first makes the progress bar honest, and a bad line ends this before anything is stored: 2 s for 31,505 requests.
    total = sum(1 for _ in workload.requests())
    interrupted = False
    with _progress(str(workload), total, quiet=quiet) as (bar, task):
        driver = Driver(plan, workload.requests(), lambda tally: _show(bar, task, tally))
        started = time.perf_counter()
        try:
            asyncio.run(driver.run())
        except KeyboardInterrupt:
            interrupted = True
        wall_s = time.perf_counter() - started
    after, leaks = wait_quiet(target.http, before["sessions"])
    return {
        "workload": str(workload),
        "page_bytes": plan.setup.object_bytes,
        "processes": plan.processes,
        **driver.tally.summary(wall_s),
        "evicted_pages": _evicted(before, after),
        "pool_restarted": before["boot"] != after["boot"],
        "interrupted": interrupted,
        "leaks": leaks,
    }


def _drop(workload: Workload, setup: Setup) -> None:
    with connect(setup.socket, client="umbp replay") as pool:
        for block_tokens in sorted({request.block_tokens for request in workload.requests()}):
            open_namespace(pool, setup, block_tokens).flush()


def _evicted(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Since the replay began, or since the pool started again in it."""
    earlier = before["counters"]["evicted_keys"] if before["boot"] == after["boot"] else 0
    return int(after["counters"]["evicted_keys"]) - int(earlier)


# -- what it shows -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(name: str, total: int, *, quiet: bool) -> Generator[tuple[Progress, TaskID]]:
    counts = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    columns = (TextColumn(name), *counts, TimeElapsedColumn(), TimeRemainingColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, disable=quiet or not errors.is_terminal, transient=True) as bar:
        yield bar, bar.add_task(name, total=total, said="starting")


def _show(bar: Progress, task: TaskID, tally: Tally) -> None:
    wrong = f"  {tally.wrong_pages} WRONG" if tally.wrong_pages else ""
    bar.update(task, completed=tally.requests, said=f"hit {share(tally.hit_tokens, tally.input_tokens)}{wrong}")


def _print(report: dict[str, Any]) -> None:
    lines = [
        ("workload", f"{report['workload']}, {report['processes']} engine(s), pages of {format_size(report['page_bytes'])}"),
        ("requests", f"{report['requests']:,}; {report['input_tokens']:,} input and {report['output_tokens']:,} output tokens"),
        ("prefix hit", f"{report['hit_share']:.2%} of input tokens; starting empty and never evicting: {report['ideal_hit_share']:.2%}"),
        ("read", _moved(report, "read")),
        ("written", _moved(report, "written")),
        ("wrong pages", str(report["wrong_pages"])),
        ("evicted", f"{report['evicted_pages']:,} pages"),
    ]
    for name, title in (("refused_pages", "refused"), ("unread_pages", "gone before read")):
        if report[name]:
            lines.append((title, ", ".join(f"{code} {count:,}" for code, count in report[name].items()) + " (pages)"))
    if report["kills"]:
        lines.append(("killed", f"{report['kills']:,} engines, and started again"))
    if report["pool_restarted"]:
        lines.append(("pool", "started again meanwhile"))
    if report["interrupted"]:
        lines.append(("ended", "by Ctrl-C, before the last request"))
    lines.append(("left behind", "; ".join(report["leaks"]) or "nothing"))
    lines.append(("wall time", f"{report['wall_s']:.1f} s"))
    out, bad = console(), {"wrong pages": report["wrong_pages"], "left behind": report["leaks"]}
    made = table("replay", "")
    for name, text in lines:
        made.add_row(cell(name), cell(text, "bold red" if bad.get(name) else "green" if name in bad else ""))
    out.print(made)
    out.print()
    times = table("per request", "p50 ms", "p99 ms", right=("p50 ms", "p99 ms"))
    for name in ("lookup", "get", "put"):
        quantiles = [report[f"{name}_{quantile}_ms"] for quantile in ("p50", "p99")]
        times.add_row(cell(name), *(cell("-" if value is None else f"{value:,.3f}") for value in quantiles))
    out.print(times)
    sys.stdout.flush()


def _moved(report: dict[str, Any], what: str) -> str:
    moved = report[f"{what}_bytes"]
    overall = moved / 1e9 / max(report["wall_s"], 1e-9)
    return f"{format_size(moved)}: {overall:.2f} GB/s overall, {report[f'{what}_gb_per_s']:.2f} GB/s while an engine is at it"
