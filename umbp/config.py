"""The one frozen configuration of a pool process, from defaults, a TOML file, ``UMBP_*`` variables and flags.

The fields of `PoolConfig` are the table from which flags, variables, TOML keys and ``--help`` are made; `umbp.grammar` says how
values are written. Later sources win: defaults, then the file, then the environment, then flags. What cannot be understood stops
the start, with the name of the field and a good value.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from umbp.errors import ConfigError
from umbp.grammar import (
    SOCKET_PATH_BYTES_MAX,
    Address,
    checked_path,
    format_size,
    parse_address,
    parse_duration,
    parse_number,
    parse_size,
    quoted,
)

__all__ = [
    "OPTIONS",
    "OTHER_VARIABLES",
    "POOL_VARIABLE",
    "RUNTIME_DIR_VARIABLE",
    "Address",
    "Option",
    "PoolConfig",
    "default_socket",
    "format_size",
    "load_pool_config",
    "parse_address",
    "parse_duration",
    "parse_size",
    "runtime_dir",
]

DRAM_BYTES_MIN = 1 << 20  # a smaller pool is a mistake of units
CONFIG_FILE_BYTES_MAX = 1 << 20
PATH_BYTES_MAX = 4095

# Variables that begin with UMBP_ and are no field of the pool: those of clients, the folder of sockets, the scripts' switches.
POOL_VARIABLE, RUNTIME_DIR_VARIABLE = "UMBP_POOL", "UMBP_RUNTIME_DIR"
OTHER_VARIABLES = frozenset({POOL_VARIABLE, RUNTIME_DIR_VARIABLE, "UMBP_LOAD", "UMBP_WITH_TORCH"})

# -- where things lie by default ---------------------------------------------------------------------------------------------------


def runtime_dir(environ: Mapping[str, str]) -> str:
    """The folder of a user's sockets, the same for pool and client. The pool makes it, 0700, when it starts."""
    if folder := environ.get(RUNTIME_DIR_VARIABLE):
        return os.path.abspath(folder)
    if folder := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(folder, "umbp")
    return f"/tmp/umbp-{os.getuid()}"


def default_socket(name: str, environ: Mapping[str, str]) -> str:
    """Where the pool of this name listens unless told otherwise."""
    return os.path.join(runtime_dir(environ), f"{name}.sock")


# -- the table of options ----------------------------------------------------------------------------------------------------------

Parser = Callable[[str, str], Any]  # text and the field's name in, the value out; ConfigError where the text is bad


@dataclass(frozen=True, slots=True)
class Option:
    """One row: what flags, environment, file and ``--help`` know of a field."""

    group: str
    parse: Parser
    default: str
    example: str
    about: str


def _option(group: str, parse: Parser, default: str, example: str, about: str) -> Any:
    row = Option(group, parse, default, example, about)
    value = parse(default, "default") if default else ""
    return dataclasses.field(default=value, metadata={"option": row}, repr=group != "Access")  # secrets stay out of logs


def _choice(*names: str) -> Parser:
    def parse(text: str, field: str) -> str:
        if (name := text.strip().lower()) in names:
            return name
        raise ConfigError(f"{quoted(text)} is none of {', '.join(names)}", field=field, example=names[0])

    return parse


def _count(minimum: int, maximum: int) -> Parser:
    def parse(text: str, field: str) -> int:
        bare = text.strip()
        if re.fullmatch(r"[0-9]{1,18}", bare) and minimum <= int(bare) <= maximum:
            return int(bare)
        raise ConfigError(f"{quoted(text)} is not a whole number from {minimum} to {maximum}", field=field, example=str(minimum))

    return parse


def _matching(pattern: str, meaning: str, example: str) -> Parser:
    def parse(text: str, field: str) -> str:
        if re.fullmatch(pattern, text):
            return text
        raise ConfigError(f"{quoted(text)} is not {meaning}", field=field, example=example)

    return parse


def _or_auto(parse: Parser) -> Parser:
    return lambda text, field: None if text.strip().lower() == "auto" else parse(text, field)


def _share(text: str, field: str) -> float:
    number = parse_number(text)
    if number is not None and number[1] in ("", "%"):
        share = float(number[0] / (100 if number[1] else 1))
        if 0 < share <= 1:
            return share
    raise ConfigError(f"{quoted(text)} is not a share above 0 and up to 1", field=field, example="0.9")


def _path(text: str, field: str) -> str:
    checked = checked_path(text.strip(), field, bytes_max=PATH_BYTES_MAX)
    return os.path.abspath(os.path.expanduser(checked))


def _socket_path(text: str, field: str) -> str:
    path = _path(text.strip().removeprefix("unix:"), field)
    return checked_path(path, field, bytes_max=SOCKET_PATH_BYTES_MAX)


def _numa(text: str, field: str) -> str:
    bare = text.strip().lower()
    if bare in ("auto", "off", "interleave") or re.fullmatch(r"[0-9]{1,4}", bare):
        return bare
    raise ConfigError(f"{quoted(text)} is none of auto, off, interleave or the number of a node", field=field, example="auto")


_pool_name = _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a name of 1 to 64 letters, digits, dots, dashes, underscores", "node7-a")
_policy_name = _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "the name of a policy", "lru")


def _token(text: str, field: str) -> str:
    if re.fullmatch(r"[\x21-\x7e]{1,512}", text):
        return text
    # Unlike other values, a secret is not repeated in the message.
    raise ConfigError(
        "a token is 1 to 512 visible ASCII characters without spaces", field=field, example="the output of openssl rand -hex 32"
    )


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Everything a pool process is told. Durations are seconds, sizes bytes; None stands for "auto"."""

    name: str = _option("Pool", _pool_name, "default", "node7-a", "name of the pool; one live pool of a name")
    config: str = _option("Pool", _path, "", "/etc/umbp/pool.toml", "TOML file with any of these options")
    dram: int | None = _option("Memory", _or_auto(parse_size), "auto", "64GiB", "size of the DRAM slice; auto: what fits the machine")
    shm_dir: str = _option("Memory", _path, "/dev/shm", "/dev/shm", "folder (a tmpfs) of the shared segment")
    keys_max: int | None = _option("Memory", _or_auto(_count(1, 1 << 32)), "auto", "1000000", "keys the index holds; auto: by size")
    hugepages: str = _option("Memory", _choice("auto", "off", "on"), "auto", "auto", "2 MiB pages: auto, off, on")
    numa: str = _option("Memory", _numa, "auto", "interleave", "auto, off, interleave, or the number of a node")
    prefault_threads: int | None = _option("Memory", _or_auto(_count(1, 256)), "auto", "4", "threads that fault memory in at start")
    socket: str = _option("Listening", _socket_path, "", "/run/umbp/a.sock", "Unix socket (0600) [NAME.sock in the runtime folder]")
    http: Address = _option("Listening", parse_address, "127.0.0.1:0", "127.0.0.1:7411", "REST and metrics; port 0: any free one")  # noqa: RUF009 (frozen)
    token: str = _option("Access", _token, "", "TOKEN", "token of HTTP calls; better by UMBP_TOKEN, since ps shows flags")
    token_file: str = _option("Access", _path, "", "/etc/umbp/token", "file whose only line is the token")
    eviction: str = _option("Policies", _policy_name, "leaf_lru", "leaf_lru", "the policy that says what goes")
    admission: str = _option("Policies", _policy_name, "always", "always", "the policy that says what is kept at all")
    watermark_high: float = _option("Policies", _share, "0.95", "0.95", "evict when more than this share is used")
    watermark_low: float = _option("Policies", _share, "0.90", "0.90", "and stop at this share")
    checksum: str = _option("Policies", _choice("lazy", "put", "off"), "lazy", "lazy", "checksums: after commit, at put, or none")
    fetch: str = _option(
        "Policies",
        _choice("copy", "promote", "pass_through"),
        "copy",
        "promote",
        "what becomes of pages that were fetched",
    )
    lease_seconds: float = _option("Limits", parse_duration, "10s", "10s", "how long a lease lasts unless renewed")
    lease_seconds_max: float = _option("Limits", parse_duration, "300s", "5min", "the longest lease that a client can ask for")
    lease_share: float = _option("Limits", _share, "1.0", "0.8", "share of the pool that may be leased at a time")
    reservation_seconds: float = _option("Limits", parse_duration, "30s", "30s", "a write not committed by then is void")
    sessions_max: int = _option("Limits", _count(1, 65535), "1024", "1024", "clients at a time")
    namespaces_max: int = _option("Limits", _count(1, 65535), "1024", "1024", "namespaces")
    on_exit: str = _option("Lifetime", _choice("keep", "release"), "keep", "keep", "the segment after a clean stop: keep, release")
    reclaim_after: float = _option("Lifetime", parse_duration, "0s", "1h", "age at which segments of dead pools are removed at start")
    log_level: str = _option("Logging", _choice("debug", "info", "warning", "error"), "info", "info", "debug, info, warning, error")
    log_format: str = _option("Logging", _choice("text", "json"), "text", "json", "text or json lines")
    warnings: tuple[str, ...] = ()  # what was odd but no error; for the log and /readyz

    def validate(self) -> None:
        """The relations between fields."""
        if self.dram is not None and self.dram < DRAM_BYTES_MIN:
            raise ConfigError(f"{format_size(self.dram)} is less than {format_size(DRAM_BYTES_MIN)}", field="dram", example="64GiB")
        if not self.watermark_low < self.watermark_high:
            why = f"{self.watermark_low} is not below watermark_high, {self.watermark_high}"
            raise ConfigError(why, field="watermark_low", example="0.90 with watermark_high 0.95")
        for name in ("lease_seconds", "reservation_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError("must be longer than zero", field=name, example="10s")
        if self.lease_seconds > self.lease_seconds_max:
            why = f"{self.lease_seconds} s is longer than lease_seconds_max, {self.lease_seconds_max} s"
            raise ConfigError(why, field="lease_seconds", example="10s with lease_seconds_max 300s")
        if self.http.is_unix or self.http.scheme == "https":
            raise ConfigError(f"{self.http} is not host:port (the Unix socket is --socket)", field="http", example="127.0.0.1:0")
        if not (self.http.is_loopback or self.token):
            why = f"{self.http} can be reached from other machines: that needs a token (--token-file or UMBP_TOKEN)"
            raise ConfigError(why, field="http", example="127.0.0.1:0, or --token-file /etc/umbp/token")


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in dataclasses.fields(PoolConfig) if "option" in f.metadata}

# -- loading -----------------------------------------------------------------------------------------------------------------------


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, example="python -m umbp.pool --dram 64GiB")


def _flags() -> argparse.ArgumentParser:
    parser = _FlagParser(
        prog="python -m umbp.pool",
        usage="python -m umbp.pool [options]",
        description="The pool of one node. Each option is also a variable (UMBP_DRAM) and a TOML key (dram). Flags win over "
        "variables, variables over the file.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=120),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(option.group for option in OPTIONS.values())}
    for name, option in OPTIONS.items():
        about = f"{option.about} [{option.default}]" if option.default else option.about
        groups[option.group].add_argument(_flag(name), metavar=option.example, help=about.replace("%", "%%"))
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "UMBP_" + name.upper()


def load_pool_config(argv: Sequence[str], environ: Mapping[str, str]) -> PoolConfig:
    """The configuration of one pool process, checked. ``--help`` prints and exits; anything bad is a `ConfigError`."""
    flags: dict[str, str] = vars(_flags().parse_args(list(argv)))
    variables, warnings = _from_environment(environ)
    file = flags.get("config", variables.get("config"))
    values: dict[str, Any] = {}
    if file is not None:
        path = _parsed("config", file, "--config" if "config" in flags else "UMBP_CONFIG")
        _merge(values, _from_file(path), lambda name: f"{name} in {path}")
    _merge(values, variables, _variable)
    _merge(values, flags, _flag)
    if values.get("token_file"):
        values["token"] = _read_token(values["token_file"])
    name = values.get("name", OPTIONS["name"].default)
    if "socket" not in values:
        values["socket"] = _socket_path(default_socket(name, environ), "socket")
    config = PoolConfig(**values, warnings=tuple(warnings))
    config.validate()
    return config


def _merge(values: dict[str, Any], texts: Mapping[str, str], source: Callable[[str], str]) -> None:
    """Later sources over earlier ones. ``token`` and ``token_file`` are two ways to say one thing."""
    if "token" in texts and "token_file" in texts:
        raise ConfigError(f"both {source('token')} and {source('token_file')} are given; one is enough", field="token")
    for name, text in texts.items():
        values[name] = _parsed(name, text, source(name))
        if name in ("token", "token_file"):
            values.pop("token_file" if name == "token" else "token", None)


def _parsed(name: str, text: str, source: str) -> Any:
    try:
        return OPTIONS[name].parse(text, name)
    except ConfigError as error:
        raise ConfigError(f"{name}: {str(error).removeprefix(name + ': ')} [from {source}]", field=name) from None


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Fields set by variables, and a line for each variable that is not ours. A slip in a name is an error: it would be lost."""
    texts: dict[str, str] = {}
    warnings: list[str] = []
    for variable in sorted(v for v in environ if v.startswith("UMBP_") and v not in OTHER_VARIABLES):
        name = variable.removeprefix("UMBP_").lower()
        if name in OPTIONS and variable == _variable(name):
            texts[name] = environ[variable]
            continue
        meant = name.removeprefix("pool_") if name.removeprefix("pool_") in OPTIONS else _near(name, cutoff=0.84)
        if meant:
            raise ConfigError(f"unknown variable {variable}; {_variable(meant)} was probably meant", field=meant)
        warnings.append(f"the variable {variable} is not known and not used")
    return texts, warnings


def _near(name: str, *, cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), OPTIONS, n=1, cutoff=cutoff)), "")


def _from_file(path: str) -> dict[str, str]:
    """The keys of a TOML file as texts of the one grammar; numbers and booleans may stand there as such."""
    try:
        with open(path, "rb") as file:
            raw = file.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(raw) > CONFIG_FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {format_size(CONFIG_FILE_BYTES_MAX)}", field="config")
        table = tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="config", example="/etc/umbp/pool.toml") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", field="config", example='dram = "64GiB"') from error
    texts: dict[str, str] = {}
    for key, value in table.items():
        if key not in OPTIONS or key == "config":
            near = _near(key, cutoff=0.6)
            example = f"{near} = {_toml(OPTIONS[near].example)}" if near and near != "config" else 'dram = "64GiB"'
            raise ConfigError(f"unknown key {quoted(key)} in {path}", field=key[:80], example=example)
        if not isinstance(value, str | int | float):
            raise ConfigError(f"a table or list stands where a value is meant in {path}", field=key, example=OPTIONS[key].example)
        texts[key] = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return texts


def _toml(text: str) -> str:
    return text if re.fullmatch(r"[0-9.]+", text) else f'"{text}"'


def _read_token(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(1024)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="token_file", example="/etc/umbp/token") from error
    return str(_token(raw.decode("ascii", "replace").strip(), "token_file"))
