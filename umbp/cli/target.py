"""Which pool a command is for, and how commands write: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from umbp.client.http import PoolHttp
from umbp.errors import InvalidRequest
from umbp.grammar import Address, parse_size

PAGE = 1000  # what one answer lists at most
WIDTH_WITHOUT_TERMINAL = 160  # a key has 64 digits, which 80 columns would break

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
NamespaceArgument: TypeAlias = Annotated[str, typer.Argument(help="Its row, or 8 or more digits of its digest: umbp namespaces.")]
NamespaceOption: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Only of this one: row, or 8 or more digits of its digest.")
]


@dataclass(frozen=True, slots=True)
class Target:
    """The pool that the global options name."""

    address: Address
    token: str

    @property
    def http(self) -> PoolHttp:
        """Its REST."""
        return PoolHttp(self.address, self.token)

    def socket(self, command: str) -> str:
        """Path of its Unix socket, for commands that share memory with it."""
        if not self.address.is_unix:
            why = f"{command} shares memory with the pool, so it needs the Unix socket of a pool on this machine, not {self.address}"
            raise InvalidRequest(why, field="--pool", example="--pool /run/umbp/default.sock")
        return self.address.path


def target_of(context: typer.Context) -> Target:
    """What the global options said."""
    target = context.obj
    assert isinstance(target, Target)
    return target


# -- writing -----------------------------------------------------------------------------------------------------------------------


def console() -> Console:
    """Standard output as it is now. Nothing is coloured where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def print_json(document: Any) -> None:
    """One line."""
    print(json.dumps(document, separators=(",", ":")))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns of ``right`` hold numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=name == "key")
    return made


def cell(value: Any, style: str = "") -> Text:
    """A value as text: never as markup, and without characters that would move the cursor."""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return Text("".join(c if c.isprintable() else "?" for c in text), style)


# -- reading -----------------------------------------------------------------------------------------------------------------------


def whole_list(http: PoolHttp, name: str) -> dict[str, Any]:
    """What ``/v1/NAME`` lists, page after page put together; its other fields are of the first page."""
    document: dict[str, Any] = http.get(f"/v1/{name}", limit=PAGE)
    while len(document[name]) < document["total"]:
        more = http.get(f"/v1/{name}", limit=PAGE, offset=len(document[name]))[name]
        if not more:
            break
        document[name] += more
    return document


def checked_key(text: str) -> str:
    """A page key as 64 hex digits."""
    key = text.strip().lower()
    if len(key) != 64 or set(key) - set("0123456789abcdef"):
        example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
        raise InvalidRequest(f"{text[:80]!r} is not a page key of 64 hex digits", field="KEY", example=example)
    return key


def checked_size(text: str, field: str, *, none: bool = False) -> int:
    """Bytes, by the one grammar of sizes. With ``none``, ``0`` and ``none`` are 0."""
    return 0 if none and text.strip().lower() in ("0", "none") else parse_size(text, field)


def duration(seconds: float) -> str:
    """Such as ``3 h 12 min``: the two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{n} {unit}" for n, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")) if n]
    return " ".join(parts[:2]) or "0 s"


def share(part: float, whole: float) -> str:
    """Such as ``98.6 %``; a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
