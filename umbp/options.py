"""What an option of a process is, and how flags, ``UMBP_*`` variables and a TOML file become one frozen configuration.

A configuration is a frozen dataclass whose fields are made by `option`: they are the table from which flags, variables, TOML keys and
``--help`` are made; `umbp.grammar` says how values are written. Later sources win: defaults, then the file, then the environment, then
flags. What cannot be understood stops the start, with the name of the field and a good value.
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
from umbp.grammar import SOCKET_PATH_BYTES_MAX, Address, checked_path, format_size, parse_address, parse_number, parse_tags, quoted

CONFIG_FILE_BYTES_MAX = 1 << 20
PATH_BYTES_MAX = 4095
URLS_MAX = 8

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
    several: bool = False  # the flag may be given more than once: as if all were one text with commas


def option(group: str, parse: Parser, default: str, example: str, about: str, unset: Any = "", *, several: bool = False) -> Any:
    """A field of a configuration; ``unset`` is its value where it has no default and nobody sets it."""
    row = Option(group, parse, default, example, about, several)
    value = parse(default, "default") if default else unset
    return dataclasses.field(default=value, metadata={"option": row}, repr=group != "Access")  # secrets stay out of logs


def choice(*names: str) -> Parser:
    def parse(text: str, field: str) -> str:
        if (name := text.strip().lower()) in names:
            return name
        raise ConfigError(f"{quoted(text)} is none of {', '.join(names)}", field=field, example=names[0])

    return parse


def switch(text: str, field: str) -> bool:
    return bool(choice("off", "on")(text, field) == "on")


def count(minimum: int, maximum: int) -> Parser:
    def parse(text: str, field: str) -> int:
        bare = text.strip()
        if re.fullmatch(r"[0-9]{1,18}", bare) and minimum <= int(bare) <= maximum:
            return int(bare)
        raise ConfigError(f"{quoted(text)} is not a whole number from {minimum} to {maximum}", field=field, example=str(minimum))

    return parse


def matching(pattern: str, meaning: str, example: str) -> Parser:
    def parse(text: str, field: str) -> str:
        if re.fullmatch(pattern, text):
            return text
        raise ConfigError(f"{quoted(text)} is not {meaning}", field=field, example=example)

    return parse


def or_auto(parse: Parser) -> Parser:
    return lambda text, field: None if text.strip().lower() == "auto" else parse(text, field)


def share(text: str, field: str) -> float:
    number = parse_number(text)
    if number is not None and number[1] in ("", "%"):
        share = float(number[0] / (100 if number[1] else 1))
        if 0 < share <= 1:
            return share
    raise ConfigError(f"{quoted(text)} is not a share above 0 and up to 1", field=field, example="0.9")


def path(text: str, field: str) -> str:
    checked = checked_path(text.strip(), field, bytes_max=PATH_BYTES_MAX)
    return os.path.abspath(os.path.expanduser(checked))


def socket_path(text: str, field: str) -> str:
    return checked_path(path(text.strip().removeprefix("unix:"), field), field, bytes_max=SOCKET_PATH_BYTES_MAX)


node_name = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a name of 1 to 64 letters, digits, dots, dashes, underscores", "node7-a")
policy_name = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "the name of a policy", "lru")


def token(text: str, field: str) -> str:
    if re.fullmatch(r"[\x21-\x7e]{1,512}", text):
        return text
    # Unlike other values, a secret is not repeated in the message.
    raise ConfigError(
        "a token is 1 to 512 visible ASCII characters without spaces", field=field, example="the output of openssl rand -hex 32"
    )


def urls(text: str, field: str) -> tuple[Address, ...]:
    """Addresses, with commas between them; their ports must be given."""
    found = tuple(parse_address(part, field) for part in text.split(","))
    for address in found:
        if address.is_unix or not address.port:
            raise ConfigError(f"{quoted(text)} is not host:port", field=field, example="http://10.0.0.1:7410,http://10.0.0.2:7410")
    if len(found) > URLS_MAX:
        raise ConfigError(f"{len(found)} addresses, at most {URLS_MAX}", field=field)
    return found


def tags(text: str, field: str) -> tuple[tuple[str, str], ...]:
    """Tags as pairs of key and value, in the order given."""
    return tuple(parse_tags(text, field).items())


@dataclass(frozen=True)
class Program:
    """A process that is configured: how it is called, what it is for, its options, and variables that are others'."""

    command: str
    about: str
    options: Mapping[str, Option]
    other_variables: frozenset[str]
    example: str
    """A flag with a good value."""

    def near(self, name: str, *, cutoff: float) -> str:
        """The option that was probably meant, or nothing."""
        return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), self.options, n=1, cutoff=cutoff)), "")


def options_of(config: type[Any]) -> dict[str, Option]:
    """The table of a configuration."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(config) if "option" in f.metadata}


# -- loading --------------------------------------------------------------------------------------------------------------------------


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, example=str(self.epilog).removeprefix("For example: "))


class _Joined(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def _flags(program: Program) -> argparse.ArgumentParser:
    variable, key = _variable(program.example.split()[0].lstrip("-")), program.example.split()[0].lstrip("-")
    parser = _FlagParser(
        prog=program.command,
        usage=f"{program.command} [options]",
        description=f"{program.about} Each option is also a variable ({variable}) and a TOML key ({key}). Flags win over variables, "
        "variables over the file.",
        epilog=f"For example: {program.command} {program.example}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=120),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(row.group for row in program.options.values())}
    for name, row in program.options.items():
        about = f"{row.about} [{row.default}]" if row.default else row.about
        action = _Joined if row.several else "store"
        groups[row.group].add_argument(_flag(name), metavar=row.example, help=about.replace("%", "%%"), action=action)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "UMBP_" + name.upper()


def load(program: Program, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Values of the fields that are set, and what was odd but no error. ``--help`` prints and exits; anything bad is a `ConfigError`."""
    flags: dict[str, str] = vars(_flags(program).parse_args(list(argv)))
    variables, warnings = _from_environment(program, environ)
    file = flags.get("config", variables.get("config"))
    values: dict[str, Any] = {}
    if file is not None:
        where = _parsed(program, "config", file, "--config" if "config" in flags else "UMBP_CONFIG")
        _merge(program, values, _from_file(program, where), lambda name: f"{name} in {where}")
    _merge(program, values, variables, _variable)
    _merge(program, values, flags, _flag)
    if values.get("token_file"):
        values["token"] = _read_token(values["token_file"])
    return values, warnings


def _merge(program: Program, values: dict[str, Any], texts: Mapping[str, str], source: Callable[[str], str]) -> None:
    """Later sources over earlier ones. ``token`` and ``token_file`` are two ways to say one thing."""
    if "token" in texts and "token_file" in texts:
        raise ConfigError(f"both {source('token')} and {source('token_file')} are given; one is enough", field="token")
    for name, text in texts.items():
        values[name] = _parsed(program, name, text, source(name))
        if name in ("token", "token_file"):
            values.pop("token_file" if name == "token" else "token", None)


def _parsed(program: Program, name: str, text: str, source: str) -> Any:
    try:
        return program.options[name].parse(text, name)
    except ConfigError as error:
        raise ConfigError(f"{name}: {str(error).removeprefix(name + ': ')} [from {source}]", field=name) from None


def _from_environment(program: Program, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Fields set by variables, and a line for each variable that is not ours. A slip in a name is an error: it would be lost."""
    texts: dict[str, str] = {}
    warnings: list[str] = []
    for variable in sorted(v for v in environ if v.startswith("UMBP_") and v not in program.other_variables):
        name = variable.removeprefix("UMBP_").lower()
        if name in program.options and variable == _variable(name):
            texts[name] = environ[variable]
            continue
        meant = name.removeprefix("pool_") if name.removeprefix("pool_") in program.options else program.near(name, cutoff=0.84)
        if meant:
            raise ConfigError(f"unknown variable {variable}; {_variable(meant)} was probably meant", field=meant)
        warnings.append(f"the variable {variable} is not known and not used")
    return texts, warnings


def _from_file(program: Program, path: str) -> dict[str, str]:
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
        if key not in program.options or key == "config":
            near = program.near(key, cutoff=0.6)
            example = f"{near} = {_toml(program.options[near].example)}" if near and near != "config" else 'dram = "64GiB"'
            raise ConfigError(f"unknown key {quoted(key)} in {path}", field=key[:80], example=example)
        if not isinstance(value, str | int | float):
            raise ConfigError(f"a table or list stands where a value is meant in {path}", field=key, example=program.options[key].example)
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
    return str(token(raw.decode("ascii", "replace").strip(), "token_file"))
