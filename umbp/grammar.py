"""How sizes, durations and addresses are written: one grammar each, for flags, environment, files and the wire alike.

* A size is digits, perhaps with a decimal part, and a unit: ``B``, ``K KB KiB``, ``M MB MiB``, ``G GB GiB``, ``T TB TiB``,
  ``P PB PiB``, in any case, with or without a space. Every unit is a power of 1024: memory is sold and mapped that way, so ``64MB``
  and ``64MiB`` are the same 67108864 bytes. Bytes have no decimal part. Zero is no size.
* A duration is digits, perhaps with a decimal part, and ``us ms s min h d``; without a unit it is seconds.
* A tag is ``key=value``: a key of letters, digits and underscores, so that it can be the name of a label, and any printable text without
  commas. What it means is the operator's.
* An address is ``host``, ``host:port``, ``[ipv6]:port``, a bare IPv6 address (then without a port: ``::1:80`` is eight groups), any
  of these after ``http://`` or ``https://``, or the path of a Unix socket, ``/run/x.sock`` or ``unix:/run/x.sock``.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import NoReturn

from umbp.errors import ConfigError

SIZE_BYTES_MAX = (1 << 63) - 1
DURATION_SECONDS_MAX = 10 * 366 * 86400.0
SOCKET_PATH_BYTES_MAX = 107  # sun_path is 108 bytes with its NUL

# -- sizes and durations -----------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z%]*)")
_SIZE_UNITS: Mapping[str, int] = {"": 1, "b": 1} | {
    prefix + suffix: 1024**power for power, prefix in enumerate("kmgtp", start=1) for suffix in ("", "b", "ib")
}
_DURATION_UNITS = {
    unit: Decimal(seconds)
    for unit, seconds in {"": "1", "us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600", "d": "86400"}.items()
}


def parse_number(text: str) -> tuple[Decimal, str] | None:
    """The number and the unit after it (perhaps empty, or ``%``), or None."""
    match = _NUMBER.fullmatch(text.strip().lower()) if len(text) <= 64 else None
    return (Decimal(match[1]), match[2]) if match else None


def parse_size(text: str, field: str = "size") -> int:
    """Bytes, at least 1, rounded down. `ConfigError` names ``field``."""
    number = parse_number(text)
    if number is not None and number[1] in _SIZE_UNITS:
        value, unit = number
        size = int(value * _SIZE_UNITS[unit])
        whole = value == int(value) or _SIZE_UNITS[unit] > 1
        if whole and 1 <= size <= SIZE_BYTES_MAX:
            return size
    reason = "is not a size of at least one byte: digits and a unit of B, KiB, MiB, GiB, TiB"
    raise ConfigError(f"{quoted(text)} {reason}", field=field, example="64GiB")


def format_size(size_bytes: int) -> str:
    """The shortest text in the size grammar: exact where a unit divides it, else rounded to two decimals."""
    size, sign = abs(size_bytes), "-" if size_bytes < 0 else ""
    for power, unit in reversed(list(enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB")))):
        if size >= 1024**power:
            return f"{sign}{size / 1024**power:.2f}".rstrip("0").rstrip(".") + unit
    return "0B"


def parse_duration(text: str, field: str = "duration") -> float:
    """Seconds, zero or more. `ConfigError` names ``field``."""
    number = parse_number(text)
    if number is not None and number[1] in _DURATION_UNITS:
        seconds = float(number[0] * _DURATION_UNITS[number[1]])
        if seconds <= DURATION_SECONDS_MAX:
            return seconds
    raise ConfigError(f"{quoted(text)} is not a duration: digits and a unit of us, ms, s, min, h, d", field=field, example="10s")


# -- tags --------------------------------------------------------------------------------------------------------------------------

TAGS_MAX = 16
TAG_KEY = "^[A-Za-z][A-Za-z0-9_]{0,31}$"
TAG_VALUE_CHARS_MAX = 64
_TAG_EXAMPLE = "rack=r12,zone=eu1"


def parse_tags(text: str, field: str = "tag") -> dict[str, str]:
    """``key=value``, several with commas between them. `ConfigError` names ``field``."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"{quoted(part)} is not key=value", field=field, example=_TAG_EXAMPLE)
        if key in found:
            raise ConfigError(f"the key {quoted(key)} is given twice", field=field, example=_TAG_EXAMPLE)
        found[key] = value
    if fault := tags_fault(found):
        raise ConfigError(fault, field=field, example=_TAG_EXAMPLE)
    return found


def tags_fault(tags: Mapping[str, str]) -> str:
    """Why these are no tags of a node; "" where they are."""
    if len(tags) > TAGS_MAX:
        return f"{len(tags)} tags, a node has at most {TAGS_MAX}"
    for key, value in tags.items():
        if not re.fullmatch(TAG_KEY, key):
            return f"the key {quoted(key)} is not a letter and up to 31 letters, digits and underscores"
        if not value.isprintable() or "," in value or not 1 <= len(value) <= TAG_VALUE_CHARS_MAX:
            return f"the value of {key}, {quoted(value)}, is not 1 to {TAG_VALUE_CHARS_MAX} printable characters without a comma"
    return ""


def quoted(text: str) -> str:
    """Someone's text as a message repeats it: quoted and cut."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


# -- addresses ---------------------------------------------------------------------------------------------------------------------

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\.?\Z)(?:{_LABEL}\.)*{_LABEL}\.?", re.IGNORECASE)
_ADDRESS_EXAMPLE = "127.0.0.1:8080, [::1]:8080, node7:8080, http://node7:8080 or /run/umbp/default.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and port, or the path of a Unix socket (then ``host`` is empty). ``str`` writes what `parse_address` reads."""

    host: str = ""  # IPv6 without brackets
    port: int = 0  # 0: any free one for a listener
    path: str = ""
    scheme: str = ""  # "http" or "https" where the text was a URL

    @property
    def is_unix(self) -> bool:
        """True for the path of a socket."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """True where only this machine can connect. A host name other than localhost is not trusted to be local."""
        if self.is_unix or self.host.rstrip(".").lower() == "localhost":
            return True
        ip = _ip_or_none(self.host)
        mapped = getattr(ip, "ipv4_mapped", None)
        return ip is not None and (mapped or ip).is_loopback

    @property
    def netloc(self) -> str:
        """``host:port`` with IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL of HTTP calls. Over a Unix socket the host is a name that is never looked up."""
        return "http://localhost" if self.is_unix else f"{self.scheme or 'http'}://{self.netloc}"

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        return f"{self.scheme}://{self.netloc}" if self.scheme else self.netloc


def parse_address(text: str, field: str = "address", *, default_port: int = 0) -> Address:
    """The one reader of addresses. A port that is not in the text is ``default_port``. `ConfigError` names ``field``."""
    bare = text.strip()
    if bare.startswith(("/", "unix:")):
        path = "/" + bare.removeprefix("unix:").lstrip("/") if bare.startswith(("/", "unix:/")) else ""
        if path in ("", "/"):
            _refuse_address(text, field, "a Unix socket is named by its absolute path")
        return Address(path=checked_path(path, field, bytes_max=SOCKET_PATH_BYTES_MAX))
    scheme, rest = "", bare
    if "://" in bare:
        scheme, rest = bare.split("://", 1)
        scheme, rest = scheme.lower(), rest.removesuffix("/")
        if scheme not in ("http", "https"):
            _refuse_address(text, field, "the scheme is neither http nor https")
    host, port_text = _split_host(rest, text, field)
    if port_text is None:
        return Address(host=host, port=default_port, scheme=scheme)
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or int(port_text) > 65535:
        _refuse_address(text, field, "the port is not a number from 0 to 65535")
    return Address(host=host, port=int(port_text), scheme=scheme)


def _split_host(rest: str, text: str, field: str) -> tuple[str, str | None]:
    """The host, normalised, and the text of the port where there is one."""
    if rest.startswith("["):
        inner, bracket, tail = rest[1:].partition("]")
        ip = _ip_or_none(inner)
        if not bracket or not isinstance(ip, ipaddress.IPv6Address) or (tail and not tail.startswith(":")):
            _refuse_address(text, field, "brackets hold an IPv6 address and are followed by nothing or by :port")
        return str(ip), tail[1:] if tail else None
    if rest.count(":") >= 2:
        ip = _ip_or_none(rest)
        if ip is None:
            _refuse_address(text, field, "it has several colons and is no IPv6 address")
        return str(ip), None
    host, colon, port_text = rest.partition(":")
    last_label = host.rstrip(".").rpartition(".")[2]
    if not _HOST_NAME.fullmatch(host) or (last_label.isdigit() and _ip_or_none(host) is None):
        _refuse_address(text, field, "the host is neither a name nor an IP address")
    return host, port_text if colon else None


def _ip_or_none(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?", host):
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _refuse_address(text: str, field: str, reason: str) -> NoReturn:
    raise ConfigError(f"{quoted(text)} is not an address: {reason}", field=field, example=_ADDRESS_EXAMPLE)


def checked_path(path: str, field: str, *, bytes_max: int) -> str:
    """``path`` itself if the kernel can take it."""
    if not path or "\0" in path or len(os.fsencode(path)) > bytes_max:
        raise ConfigError(f"{quoted(path)} is not a path of 1 to {bytes_max} bytes", field=field, example="/run/umbp/default.sock")
    return path
