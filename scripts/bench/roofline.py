#!/usr/bin/env python3
"""A model, not a measurement: what it costs to bring replicated KV from host memory into all ranks of a group, four ways.

The model is `umbp.core.roofline`, which says what each way costs; the loader takes its break-even from there too.

Every figure has a flag. The defaults say where they come from. `--plot FILE.svg` draws it, `--json` prints rows for programs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from umbp.core.roofline import MACHINES, MODES, Load, Machine, break_even, seconds

TITLES = {
    "solo": "solo: every rank reads all",
    "broadcast": "broadcast: rank 0 reads, pushes",
    "staged": "staged: 1/N each, by buffers",
    "fused": "fused: 1/N each, into the slots",
}


def pages_up_to(last: int) -> list[int]:
    """1, 2, 4, ... and the last."""
    return [2**power for power in range(last.bit_length()) if 2**power < last] + [last]


def rows(machine: Machine, last: int, load: Load, page_tokens: int) -> list[dict[str, float | str]]:
    made: list[dict[str, float | str]] = []
    for pages in pages_up_to(last):
        one = replace(load, pages=pages)
        times = {f"{mode}_ms": round(seconds(mode, machine, one, meet=True) * 1e3, 4) for mode in MODES}
        made.append({"machine": machine.name, "pages": pages, "tokens": pages * page_tokens, "bytes": pages * load.page_bytes, **times})
    return made


def summary(machine: Machine, load: Load) -> dict[str, float | str | None]:
    """Break-evens are None where fused never pays, as in a group of one."""
    launch, whole = break_even(machine, load, meet=False), break_even(machine, load, meet=True)
    return {
        "machine": machine.name,
        "break_even_bytes_when_met": round(launch) if launch < math.inf else None,
        "break_even_bytes": round(whole) if whole < math.inf else None,
        "break_even_pages": math.ceil(whole / load.page_bytes) if whole < math.inf else None,
        "solo_over_fused_at_most": round(
            seconds("solo", machine, replace(load, pages=10**9)) / seconds("fused", machine, replace(load, pages=10**9)), 2
        ),
    }


def table(machine: Machine, load: Load, made: list[dict[str, float | str]]) -> str:
    lines = [
        f"{machine.name}, {load.ranks} ranks, {load.groups} layer groups -- a model, not a measurement",
        "  host link {host_link:g} GB/s, all {host_total:g}; peer {link:g}, out {egress:g}; memory {memory:g} GB/s; "
        "launch {launch_us:g}, signal {signal_us:g}, layer group {group_us:g}, meeting {meet_us:g} us".format(**asdict(machine)),
        f"  {'pages':>6} {'tokens':>8} {'MB':>9}" + "".join(f" {mode + ' ms':>13}" for mode in MODES) + "  solo/fused",
    ]
    for row in made:
        times = [float(row[f"{mode}_ms"]) for mode in MODES]
        lines.append(
            f"  {row['pages']:>6} {row['tokens']:>8} {float(row['bytes']) / 1e6:>9.1f}"
            + "".join(f" {value:>13.3f}" for value in times)
            + f"  {times[0] / times[-1]:>10.2f}"
        )
    whole, met = break_even(machine, load, meet=True), break_even(machine, load, meet=False)
    most = summary(machine, load)["solo_over_fused_at_most"]
    if whole < math.inf:
        lines.append(f"  fused pays from {whole / 1e6:.1f} MB a load ({whole / load.page_bytes:.1f} pages), the meeting counted;")
        lines.append(f"  from {met / 1e6:.1f} MB a launch for ranks that have met. At most {most} times as fast as solo.")
    else:
        lines.append("  fused never pays here.")
    return "\n".join(lines)


# -- the plot ----------------------------------------------------------------------------------------------------------------------

COLOURS = {"solo": "#64748b", "broadcast": "#d97706", "staged": "#0d9488", "fused": "#2563eb"}
WIDTH, HEIGHT, LEFT, TOP, PANEL, DEEP, GAP = 1200, 480, 70, 92, 400, 310, 190


def plot(machines: list[Machine], last: int, load: Load, page_tokens: int) -> str:
    """Time over tokens, both logarithmic, one panel a machine."""
    low, high = -5, 0  # powers of ten of seconds
    sizes = f"{load.page_bytes / 1e6:.2f} MB a page of {page_tokens} tokens, replicated KV, {load.groups} layer groups"
    title = f"Bringing a prompt's KV from host memory into {load.ranks} GPUs: a model, not a measurement"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="30" font-size="17" font-weight="bold" fill="#0f172a">{title}</text>',
        f'<text x="{LEFT}" y="51" fill="#475569">{sizes}; published or assumed rates (scripts/bench/roofline.py)</text>',
    ]

    def across(tokens: float, panel: int) -> float:
        share = math.log(tokens / page_tokens) / math.log(max(2, last))
        return LEFT + panel * (PANEL + GAP) + share * PANEL

    def down(value: float) -> float:
        return TOP + DEEP * (high - math.log10(value)) / (high - low)

    for panel, machine in enumerate(machines):
        left, right, bottom = LEFT + panel * (PANEL + GAP), LEFT + panel * (PANEL + GAP) + PANEL, TOP + DEEP
        parts.append(f'<text x="{left}" y="{TOP - 12}" font-weight="bold" fill="#0f172a">{machine.name}</text>')
        for power in range(low, high + 1):
            y, name = down(10.0**power), {-5: "10 µs", -4: "100 µs", -3: "1 ms", -2: "10 ms", -1: "100 ms", 0: "1 s"}[power]
            parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e2e8f0"/>')
            parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#475569">{name}</text>')
        ticks = [page_tokens] + [10**power for power in range(3, 7) if page_tokens * 2 < 10**power <= last * page_tokens]
        for tokens in ticks:
            x, name = across(tokens, panel), f"{tokens // 1000} K" if tokens >= 1000 else f"{tokens}"
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e2e8f0"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle" fill="#475569">{name}</text>')
        parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 40}" text-anchor="middle" fill="#475569">tokens restored</text>')
        tokens = break_even(machine, load, meet=True) / load.page_bytes * page_tokens
        if page_tokens < tokens < last * page_tokens:
            x = across(tokens, panel)
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#0f172a" stroke-dasharray="3 4"/>')
            parts.append(f'<text x="{x + 6:.1f}" y="{TOP + 14}" fill="#0f172a">fused from {tokens:.0f} tokens on</text>')
        ends: list[float] = []
        for mode in sorted(MODES, key=lambda m: seconds(m, machine, replace(load, pages=last))):
            points = [
                (across(pages * page_tokens, panel), down(seconds(mode, machine, replace(load, pages=pages), meet=True)))
                for pages in sorted({*pages_up_to(last), *(max(1, round(last ** (step / 60))) for step in range(61))})
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[mode]}" stroke-width="2.2"/>')
            y = points[-1][1] + 4
            while any(abs(y - other) < 14 for other in ends):
                y -= 2
            ends.append(y)
            value = seconds(mode, machine, replace(load, pages=last), meet=True) * 1e3
            parts.append(f'<text x="{right + 6}" y="{y:.1f}" fill="{COLOURS[mode]}">{mode} {value:.0f} ms</text>')
    x = float(LEFT)
    for mode in MODES:
        parts.append(f'<line x1="{x}" y1="{HEIGHT - 14}" x2="{x + 22}" y2="{HEIGHT - 14}" stroke="{COLOURS[mode]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{HEIGHT - 10}" fill="#334155">{TITLES[mode]}</text>')
        x += 275
    return "\n".join([*parts, "</svg>", ""])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=[*MACHINES, "all"], default="all")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="layer groups of a load")
    parser.add_argument("--page-bytes", type=int, default=64 * 656 * 61, help="fp8 latent of 61 layers: 656 bytes a token and layer")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=142_000, help="the largest load")
    parser.add_argument("--json", action="store_true", help="one JSON line a row, instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    for field in fields(Machine)[1:]:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, help="us" if field.name.endswith("_us") else "GB/s")
    options = parser.parse_args(arguments)
    for name in ("ranks", "groups", "page_bytes", "page_tokens", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    changed = {f.name: getattr(options, f.name) for f in fields(Machine)[1:] if getattr(options, f.name) is not None}
    machines = [replace(m, **changed) for name, m in MACHINES.items() if options.machine in (name, "all")]
    load = Load(1, options.page_bytes, options.ranks, options.groups)
    last = -(-options.tokens // options.page_tokens)
    for machine in machines:
        made = rows(machine, last, load, options.page_tokens)
        if options.json:
            for row in made:
                print(json.dumps({"model": True, **row}))
            print(json.dumps({"model": True, **summary(machine, load)}))
        else:
            print(table(machine, load, made), end="\n\n")
    if options.plot:
        options.plot.write_text(plot(machines, last, load, options.page_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
