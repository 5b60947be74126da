"""What callers pass, checked: InvalidRequest names the field and shows a good value."""

from __future__ import annotations

from umbp import wire
from umbp.client.buffers import Rows
from umbp.errors import InvalidRequest
from umbp.types import U8

VERIFY = ("never", "sampled", "always")


def check_lengths(keys: U8, rows: Rows, field: str) -> None:
    """As many items as keys."""
    if len(keys) != len(rows):
        raise InvalidRequest(f"{len(rows)} items for {len(keys)} keys", field=field, example=f"{len(keys)} items")


def check_seconds(seconds: float, *, zero: bool) -> None:
    """A time up to a day; ``zero``: or none at all."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds <= wire.SECONDS_MAX or (not seconds and not zero):
        above = "of 0 or more" if zero else "above 0"
        raise InvalidRequest(f"{seconds!r} is not a number of seconds {above} and up to a day", field="seconds", example="10")


def check_verify(verify: str) -> None:
    """One of `VERIFY`."""
    if verify not in VERIFY:
        raise InvalidRequest(f"{verify!r} is none of {', '.join(VERIFY)}", field="verify", example="sampled")
