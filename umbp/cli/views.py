"""What the commands show of a pool's state: the status, its namespaces, keys, pins and policies, as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from umbp.cli.target import cell, duration, share, table
from umbp.grammar import format_size

BAR_CELLS = 30
WARN_SHARE, FULL_SHARE = 0.90, 0.98


def status_view(status: dict[str, Any]) -> RenderableType:
    """The document of ``/v1/status``."""
    return Group(status_grid(status), Text(), namespaces_table(status["namespaces"], status["namespaces_total"]))


def status_grid(status: dict[str, Any]) -> Table:
    """A line a subject."""
    counters, limits = status["counters"], status["limits"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    style = "green" if status["state"] == "ready" and not status["unhealthy"] else "red"
    up = duration(status["uptime_seconds"])
    head = cell(f"{status['name']}  {status['state']} for {up}  (umbp {status['version']}, boot {status['boot']})", style)
    rows: list[tuple[str, Text]] = [
        ("pool", head),
        ("listens", cell(f"{status['socket']}   http://{status['http'].removeprefix('http://')}")),
        ("memory", _memory(status)),
        ("keys", cell(f"{status['keys']:,} of {limits['keys']:,}; {status['evictable_keys']:,} can go, {_hidden(status)}")),
        ("clients", _clients(status)),
        (
            "asked",
            cell(
                f"{counters['noted_requests']:,} requests of {counters['lookups']:,} pages, "
                f"{share(counters['hits'], counters['lookups'])} of them stored"
            ),
        ),
        (
            "gone",
            cell(
                f"{counters['evicted_keys']:,} evicted ({format_size(counters['evicted_bytes'])}), {counters['removed_keys']:,} removed, "
                f"{counters['corrupt_keys']:,} corrupt, {counters['flushes']:,} flushes"
            ),
        ),
        ("policies", cell(f"eviction {status['eviction']}, admission {status['admission']}, checksums {limits['checksum']}")),
    ]
    rows += [
        (" ".join(["numa node", str(region["numa_node"]), region.get("level", "")]), _region(region))
        for region in status.get("regions", [])
    ]
    rows += [(f"level {level['name']}", _level(level)) for level in status.get("levels", [])]
    rows += [
        (
            "neighbour",
            cell(f"{each['name']}{'' if each['there'] else ' (gone)'}  {each['pages']:,} pages read there ({format_size(each['bytes'])})"),
        )
        for each in status.get("neighbours", [])
    ]
    rows += [("ssd" if not at else "", line) for at, line in enumerate(_ssd(status["ssd"]))] if status.get("ssd") else []
    rows += [("unhealthy", cell(line, "red")) for line in status["unhealthy"]]
    rows += [("note", cell(line, "yellow")) for line in status["warnings"]]
    for name, text in rows:
        grid.add_row(name, text)
    return grid


def _memory(status: dict[str, Any]) -> Text:
    used, capacity = status["allocated_bytes"], status["capacity_bytes"]
    part = used / capacity if capacity else 0.0
    filled = min(BAR_CELLS, round(part * BAR_CELLS))
    colour = "red" if part > FULL_SHARE else "yellow" if part > WARN_SHARE else "green"
    bar = Text("█" * filled, colour) + Text("░" * (BAR_CELLS - filled), "dim")
    largest = format_size(status["largest_free_run_bytes"])
    return bar + cell(f"  {format_size(used)} of {format_size(capacity)} ({share(used, capacity)}), largest free run {largest}")


def _region(region: dict[str, Any]) -> Text:
    """A part of the memory on one NUMA node."""
    capacity, written = region["capacity_bytes"], region["near_pages"] + region["far_pages"]
    used = capacity - region["free_bytes"]
    return cell(
        f"{format_size(used)} of {format_size(capacity)} ({share(used, capacity)}), {region['sessions']:,} sessions near it, "
        f"{region['near_pages']:,} of {written:,} pages that those wrote are here"
    )


def _level(level: dict[str, Any], keys: str = "", below: str = "were put below") -> Text:
    """A level of the memory, or of the SSD tier, which says ``keys`` too."""
    used, capacity = level["used_bytes"], level["capacity_bytes"]
    return cell(
        f"{format_size(used)} of {format_size(capacity)} ({share(used, capacity)}){keys}; "
        f"{level['offloaded_keys']:,} went down{', still at it' if level['offloading'] else ''}, "
        f"{level['promoted_keys']:,} came up, {level['spilled_keys']:,} {below}"
    )


def _ssd(ssd: dict[str, Any]) -> list[Text]:
    """The SSD tier: a line about all of it, and one a disk."""
    cap = f" of {format_size(ssd['write_max_bytes'])}" if ssd["write_max_bytes"] else ""
    used, capacity = ssd["used_bytes"], ssd["capacity_bytes"]
    overtaken = f", {ssd['overtaken_keys']:,} were gone from DRAM before they were written" if ssd.get("overtaken_keys") else ""
    lines = [
        cell(
            f"{format_size(used)} of {format_size(capacity)} ({share(used, capacity)}), {ssd['keys']:,} keys, "
            f"{format_size(ssd['written_today_bytes'])}{cap} written today, {ssd['waiting']:,} pages wait{overtaken} ({ssd['policy']})"
        )
    ]
    for level in ssd.get("levels", []):
        lines.append(cell(f"level {level['name']}: ") + _level(level, f", {level['keys']:,} keys", "were written below"))
    for disk in ssd["disks"]:
        state = "does not answer" if disk["stalled"] else "full" if disk["full"] and disk["state"] == "up" else disk["state"]
        fault = f": {disk['fault']}" if disk["fault"] else ""
        sizes = f"{format_size(disk['used_bytes'])} in {format_size(disk['file_bytes'])} of files of {format_size(disk['limit_bytes'])}"
        where = f"{disk['level']}={disk['path']}" if disk.get("level") else disk["path"]
        lines.append(cell(f"{where}  {state}{fault}  {sizes}", "" if state == "up" else "red"))
    return lines


def _hidden(status: dict[str, Any]) -> str:
    parts = [f"{status['being_written']:,} being written"]
    parts += [f"{status[name]:,} {name.replace('_', ' ')}" for name in ("removed_but_leased", "abandoned") if status[name]]
    return ", ".join(parts)


def _clients(status: dict[str, Any]) -> Text:
    leased = f" ({format_size(status['leased_bytes'])})" if status["leased_bytes"] else ""
    return cell(
        f"{status['sessions']:,} sessions, {status['leases']:,} leases{leased}, {status['reservations']:,} reservations, "
        f"{status['pins']:,} pins"
    )


def rates_text(before: dict[str, Any], now: dict[str, Any]) -> Text:
    """What went on between two statuses. Nothing where the pool started again in between."""
    seconds = float(now["uptime_seconds"]) - float(before["uptime_seconds"])
    if now["boot"] != before["boot"] or seconds <= 0:
        return Text("the pool has just started", "yellow")

    def rate(name: str) -> float:
        return (int(now["counters"][name]) - int(before["counters"][name])) / seconds

    stored, lookups, hits, evicted = (rate(name) for name in ("stored_keys", "lookups", "hits", "evicted_keys"))
    evicted_bytes = rate("evicted_bytes")
    text = f"{rate('noted_requests'):,.0f} requests/s  {lookups:,.0f} pages asked/s ({share(hits, lookups)} stored)  "
    return cell(text + f"{stored:,.0f} stored/s  {evicted:,.0f} evicted/s ({format_size(int(evicted_bytes))}/s)")


def namespaces_table(namespaces: list[dict[str, Any]], total: int) -> Table:
    """A line a namespace."""
    numbers = ("row", "page", "object", "keys", "held", "quota", "stored", "evicted", "refused", "sessions")
    made = table("row", "id", "namespace", *numbers[1:], right=numbers)
    for space in namespaces:
        made.add_row(
            cell(space["row"]),
            cell(space["id"]),
            cell(identity_text(space["identity"])),
            cell(f"{space['identity'].get('page_tokens', '?')} tok"),
            cell(format_size(space["object_bytes"])),
            cell(space["keys"]),
            cell(format_size(space["held_bytes"])),
            cell(format_size(space["quota_bytes"]) if space["quota_bytes"] else "-"),
            cell(space["stored_keys"]),
            cell(space["evicted_keys"]),
            cell(", ".join(f"{code} {count:,}" for code, count in sorted(space["refused"].items())) or "-"),
            cell(space["sessions"]),
        )
    if total > len(namespaces):
        made.caption = f"{len(namespaces)} of {total} namespaces"
    return made


def identity_text(identity: dict[str, Any]) -> str:
    """What tells a namespace from others, as far as a line holds it."""
    parts = [str(identity.get(name)) for name in ("model", "revision", "dtype") if identity.get(name)]
    parts += [f"{name}={identity[name]}" for name in ("adapter", "tenant", "salt") if identity.get(name) is not None]
    for kind in ("tp", "pp", "cp"):
        if identity.get(f"{kind}_size", 1) != 1:
            parts.append(f"{kind}={identity.get(f'{kind}_rank')}/{identity[f'{kind}_size']}")
    return " ".join(parts)


def keys_table(keys: list[dict[str, Any]]) -> Table:
    """A line a copy of a key."""
    numbers = ("namespace", "bytes", "hits", "idle", "age", "leases", "pins")
    made = table("key", "namespace", "tier", "node", *numbers[1:], "checksum", right=numbers)
    for document in keys:
        for place in document["locations"]:
            made.add_row(
                cell(document["key"]),
                cell(document["namespace"]),
                cell(place["tier"]),
                cell(place["node"]),
                cell(format_size(place["bytes"])),
                cell(place["hits"]),
                cell(duration(place["idle_seconds"])),
                cell(duration(place["age_seconds"])),
                cell(place["leases"]),
                cell(place["pins"]),
                cell("yes" if place["checksum"] else "not yet"),
            )
    return made


def victims_table(victims: list[dict[str, Any]]) -> Table:
    """Objects that went or would go, the first one first."""
    made = table("key", "namespace", "bytes", right=("namespace", "bytes"))
    for victim in victims:
        made.add_row(cell(victim["key"]), cell(victim["namespace"]), cell(format_size(victim["bytes"])))
    return made


def pins_table(pins: list[dict[str, Any]]) -> Table:
    """A line a pin."""
    made = table("pin", "keys", "by", "until", "note", right=("pin", "keys"))
    for pin in pins:
        left = "taken back" if pin["seconds_left"] is None else f"{duration(pin['seconds_left'])} from now"
        by = f"session {pin['session']}" if pin["session"] else "operator"
        made.add_row(cell(pin["id"]), cell(pin["keys"]), cell(by), cell(left), cell(pin["note"]))
    return made


def policies_table(policies: list[dict[str, Any]]) -> Table:
    """A line a kind of policy."""
    made = table("kind", "current", "available")
    for policy in policies:
        made.add_row(cell(policy["kind"]), cell(policy["current"], "bold"), cell(", ".join(policy["available"])))
    return made


def choices_table(choices: list[dict[str, Any]]) -> Table:
    """A line a choice of a dry run."""
    made = table("what", "node", "to", "pages", "bytes", "key", right=("pages", "bytes"))
    for one in choices:
        texts = [one["verb"], one["node"] or "-", one["to"] or "-", one["pages"] or "-", format_size(one["bytes"]), one["key"] or "-"]
        made.add_row(*map(cell, texts))
    return made
