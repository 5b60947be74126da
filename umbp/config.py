"""The one frozen configuration of a pool process. How it comes from a file, the environment and flags is `umbp.options`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbp.errors import ConfigError
from umbp.grammar import Address, format_size, parse_address, parse_duration, parse_size, quoted
from umbp.options import Option, Program, load, options_of, urls
from umbp.options import choice as _choice
from umbp.options import count as _count
from umbp.options import node_name as _pool_name
from umbp.options import option as _option
from umbp.options import or_auto as _or_auto
from umbp.options import path as _path
from umbp.options import policy_name as _policy_name
from umbp.options import share as _share
from umbp.options import socket_path as _socket_path
from umbp.options import switch as _switch
from umbp.options import tags as _tags
from umbp.options import token as _token

__all__ = [
    "OPTIONS",
    "OTHER_VARIABLES",
    "POOL_VARIABLE",
    "RUNTIME_DIR_VARIABLE",
    "Address",
    "Numa",
    "NumaPart",
    "Option",
    "PoolConfig",
    "SsdFolder",
    "default_socket",
    "format_size",
    "load_pool_config",
    "parse_address",
    "parse_duration",
    "parse_size",
    "runtime_dir",
]

DRAM_BYTES_MIN = 1 << 20  # a smaller pool is a mistake of units
SSD_BYTES_MIN = 16 << 20
SSD_FOLDERS_MAX = 64
SSD_LEVELS_MAX = 8
NUMA_REGIONS_MAX = 16
NUMA_LEVELS_MAX = 8
NUMA_GRANULE = 2 << 20
FULL_MARKS = (0.98, 0.96)  # of a level, on evict: what a batch may need at once

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


def near_pool(name: str, node: int) -> str:
    """The name of the pool of a NUMA node, where there is one on each (`umbp.per_node`)."""
    return f"{name}-numa{node}"


# -- the table of options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NumaPart:
    """A part of the memory on a NUMA node: its bytes, 0 for as many as each of the others has.

    ``level``: the one it is of, "" where there is but one. ``weight``: its part of what is written to its level, beside its size.
    """

    node: int
    level: str = ""
    size_bytes: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Numa:
    """Where memory is to be: ``mode`` is auto, off, interleave, or "" where ``parts`` say it."""

    mode: str = ""
    parts: tuple[NumaPart, ...] = ()


_NUMA_EXAMPLE = "0,1, or near=0:64GiB,far=2:256GiB"


def _numa(text: str, field: str) -> Numa:
    """auto, off, interleave, or [LEVEL=]NODE[:SIZE][*WEIGHT], several with commas between them."""
    bare = re.sub(r"\s", "", text)
    if bare.lower() in ("auto", "off", "interleave"):
        return Numa(bare.lower())
    found: list[NumaPart] = []
    for part in bare.split(","):
        named = re.fullmatch(r"(?:([A-Za-z][A-Za-z0-9_-]{0,31})=)?([0-9]{1,3})(?::([^*:]+))?(?:\*(.*))?", part)
        if not named:
            raise ConfigError(
                f"{quoted(part)} is none of auto, off, interleave or a node", field=field, example="auto, or " + _NUMA_EXAMPLE
            )
        level, node, size, weight = named.groups()
        found.append(NumaPart(int(node), level or "", parse_size(size, field) if size else 0, _weight(weight, field, "near=0:64GiB*2")))
        if (size and not found[-1].size_bytes) or found[-1].size_bytes % NUMA_GRANULE:
            raise ConfigError(f"{quoted(size)} is not a multiple of {format_size(NUMA_GRANULE)}", field=field, example=_NUMA_EXAMPLE)
    if len({(part.node, part.level) for part in found}) < len(found) or len(found) > NUMA_REGIONS_MAX:
        raise ConfigError(f"{quoted(text)} are not up to {NUMA_REGIONS_MAX} different nodes", field=field, example=_NUMA_EXAMPLE)
    if len({not part.size_bytes for part in found}) > 1:
        raise ConfigError("some nodes say how much, others do not", field=field, example=_NUMA_EXAMPLE)
    if len({not part.level for part in found}) > 1:
        raise ConfigError("some nodes name a level, others do not", field=field, example=_NUMA_EXAMPLE)
    if len({part.level for part in found}) > NUMA_LEVELS_MAX:
        raise ConfigError(f"more than {NUMA_LEVELS_MAX} levels", field=field, example=_NUMA_EXAMPLE)
    return Numa(parts=tuple(found))


def _weight(text: str | None, field: str, example: str) -> float:
    if text is not None and not (re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", text.strip()) and float(text) > 0):
        raise ConfigError(f"{quoted(text)} is not a weight, from 0.001 to 999", field=field, example=example)
    return float(text or 1)


@dataclass(frozen=True, slots=True)
class SsdFolder:
    """A folder for pages, and the most bytes that all its files may take.

    ``level``: the one it is on, "" where there is but one. ``weight``: its part of what is written there, beside its size.
    """

    path: str
    size_bytes: int
    level: str = ""
    weight: float = 1.0


def _ssd_folders(text: str, field: str) -> tuple[SsdFolder, ...]:
    """[LEVEL=]PATH:SIZE[*WEIGHT], several with commas between them."""
    found: list[SsdFolder] = []
    for part in text.split(","):
        named = re.fullmatch(
            r"(?:([A-Za-z][A-Za-z0-9_-]{0,31})=)?((?![A-Za-z][A-Za-z0-9_-]*=).+):([^:*]+)(?:\*(.*))?", part.strip(), re.DOTALL
        )
        if not named:
            raise ConfigError(f"{quoted(part)} is not PATH:SIZE", field=field, example="/nvme0/umbp:2TiB, or fast=/nvme0/umbp:2TiB")
        level, where, size, weight = named.groups()
        share = _weight(weight, field, "fast=/nvme0/umbp:2TiB*2")
        found.append(SsdFolder(_path(where, field), parse_size(size, field), level or "", share))
    if len({not folder.level for folder in found}) > 1:
        raise ConfigError("some folders name a level, others do not", field=field, example="fast=/nvme0/umbp:2TiB,slow=/disk0/umbp:20TiB")
    if len({folder.level for folder in found}) > SSD_LEVELS_MAX:
        raise ConfigError(f"more than {SSD_LEVELS_MAX} levels", field=field, example="fast=/nvme0/umbp:2TiB,slow=/disk0/umbp:20TiB")
    if len({os.path.realpath(folder.path) for folder in found}) < len(found):
        raise ConfigError("a folder is given twice", field=field, example="/nvme0/umbp:2TiB,/nvme1/umbp:2TiB")
    if len(found) > SSD_FOLDERS_MAX:
        raise ConfigError(f"{len(found)} folders, at most {SSD_FOLDERS_MAX}", field=field)
    return tuple(found)


def _address(text: str, field: str) -> Address:
    address = parse_address(text, field)
    if address.is_unix:
        raise ConfigError(f"{quoted(text)} is not host:port", field=field, example="10.0.0.7:7411")
    return address


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Everything a pool process is told. Durations are seconds, sizes bytes; None stands for "auto"."""

    name: str = _option("Pool", _pool_name, "default", "node7-a", "name of the pool; one live pool of a name")
    config: str = _option("Pool", _path, "", "/etc/umbp/pool.toml", "TOML file with any of these options")
    dram: int | None = _option("Memory", _or_auto(parse_size), "auto", "64GiB", "size of the DRAM slice; auto: what fits the machine")
    shm_dir: str = _option("Memory", _path, "/dev/shm", "/dev/shm", "folder (a tmpfs) of the shared segment")
    keys_max: int | None = _option("Memory", _or_auto(_count(1, 1 << 32)), "auto", "1000000", "keys the index holds; auto: by size")
    hugepages: str = _option("Memory", _choice("auto", "off", "on"), "auto", "auto", "2 MiB pages: auto, off, on")
    numa: Numa = _option(  # noqa: RUF009 (frozen)
        "Memory",
        _numa,
        "auto",
        "0,1",
        "auto, off, interleave, or nodes: a region on each, writers use the nearest; near=0:64GiB far=2:256GiB are levels, *2 a weight",
        several=True,
    )
    numa_strict: bool = _option("Memory", _switch, "off", "off", "no start where memory is not on the nodes named by numa")
    numa_offload: str = _option(
        "Memory", _choice("watermark", "on_evict"), "watermark", "on_evict", "when pages go to the level below: ahead of need, or at need"
    )
    numa_offload_high: float = _option("Memory", _share, "0.90", "0.90", "watermark: offload when more than this share of a level is used")
    numa_offload_low: float = _option("Memory", _share, "0.80", "0.80", "and stop at this share")
    numa_promote: bool = _option("Memory", _switch, "on", "off", "pages that are asked for on a lower level are copied to the first one")
    numa_move_rate: int = _option("Memory", parse_size, "1GiB", "1GiB", "bytes a second that may move between levels")
    prefault_threads: int | None = _option("Memory", _or_auto(_count(1, 256)), "auto", "4", "threads that fault memory in at start")
    ssd: tuple[SsdFolder, ...] = _option(
        "SSD",
        _ssd_folders,
        "",
        "/nvme0/umbp:2TiB",
        "folder and most bytes of its files; several; fast=/a:2TiB slow=/b:20TiB are levels, /a:2TiB*2 has twice the weight",
        (),
        several=True,
    )
    ssd_policy: str = _option(
        "SSD", _choice("write_behind", "on_evict", "off"), "write_behind", "on_evict", "copied when committed, when about to go, or not"
    )
    ssd_admission: str = _option("SSD", _policy_name, "second_touch", "always", "the policy that says what is worth writing")
    ssd_eviction: str = _option("SSD", _policy_name, "lru", "lru", "the policy that says what goes")
    ssd_cleaning: str = _option("SSD", _policy_name, "cost_benefit", "greedy", "the policy that says which file is cleaned")
    ssd_striping: str = _option("SSD", _policy_name, "even", "fill", "the policy that says which folder is written to")
    ssd_offload: str = _option(
        "SSD",
        _choice("watermark", "on_evict"),
        "watermark",
        "on_evict",
        "when pages go to the level below: ahead of need, or when it is full",
    )
    ssd_offload_high: float = _option("SSD", _share, "0.90", "0.90", "watermark: offload when more than this share of a level is used")
    ssd_offload_low: float = _option("SSD", _share, "0.80", "0.80", "and stop at this share")
    ssd_promote: bool = _option("SSD", _switch, "on", "off", "pages that are read from a lower level are written to the first one again")
    ssd_write_max: int | None = _option("SSD", parse_size, "", "10TiB", "most bytes written a day, over all folders", None)
    ssd_clean_rate: int = _option("SSD", parse_size, "256MiB", "256MiB", "bytes a second that cleaning may read and write, a folder")
    ssd_files: bool = _option("SSD", _switch, "on", "off", "clients may read pages that DRAM has no room for from the files by themselves")
    ssd_keys_max: int | None = _option("SSD", _or_auto(_count(1, 1 << 24)), "auto", "1000000", "pages on SSD; auto: by size")
    socket: str = _option("Listening", _socket_path, "", "/run/umbp/a.sock", "Unix socket (0600) [NAME.sock in the runtime folder]")
    http: Address = _option("Listening", parse_address, "127.0.0.1:0", "127.0.0.1:7411", "REST and metrics; port 0: any free one")  # noqa: RUF009 (frozen)
    master: tuple[Address, ...] = _option("Cluster", urls, "", "10.0.0.1:7410", "URLs of the masters, with commas [its own, embedded]", ())
    advertise: Address | None = _option("Cluster", _address, "", "10.0.0.7:7411", "how other nodes reach this one [http]", None)  # noqa: RUF009
    tag: tuple[tuple[str, str], ...] = _option(
        "Cluster", _tags, "", "rack=r12", "what this node is, in words of your own; labels of its metrics; several", (), several=True
    )
    neighbours: str = _option(
        "Cluster", _choice("read", "off"), "read", "off", "pages of other pools of this machine: clients read them where they lie, or not"
    )
    transport: str = _option("Cluster", _choice("http", "nixl"), "http", "nixl", "how pages travel: http, or nixl where both ends have it")
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

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """The nodes that memory is to be on, one region each; none where it is left to the kernel, or spread over all."""
        return tuple(part.node for part in self.numa.parts)

    @property
    def numa_levels(self) -> tuple[str, ...]:
        """The levels of the memory, the first one first: in the order in which nodes name them."""
        return tuple(dict.fromkeys(part.level for part in self.numa.parts))

    @property
    def dram_wanted(self) -> int | None:
        """Bytes of the memory: as the nodes say, or ``dram``."""
        return sum(part.size_bytes for part in self.numa.parts) or self.dram

    @property
    def ssd_levels(self) -> tuple[str, ...]:
        """The levels of the SSD tier, the first one first: in the order in which folders name them."""
        return tuple(dict.fromkeys(folder.level for folder in self.ssd))

    @property
    def numa_marks(self) -> tuple[float, float]:
        """The shares of a level of memory from which pages are offloaded, and down to which."""
        return (self.numa_offload_high, self.numa_offload_low) if self.numa_offload == "watermark" else FULL_MARKS

    @property
    def ssd_marks(self) -> tuple[float, float]:
        """The same of a level of the SSD tier."""
        return (self.ssd_offload_high, self.ssd_offload_low) if self.ssd_offload == "watermark" else FULL_MARKS

    def validate(self) -> None:
        """The relations between fields."""
        if self.numa_strict and not self.numa_nodes:
            raise ConfigError("needs the nodes that memory is to be on", field="numa_strict", example="on with numa 0,1")
        if self.dram is not None and self.dram < DRAM_BYTES_MIN:
            raise ConfigError(f"{format_size(self.dram)} is less than {format_size(DRAM_BYTES_MIN)}", field="dram", example="64GiB")
        if self.dram is not None and self.dram_wanted != self.dram:
            why = f"the nodes of numa have {format_size(self.dram_wanted or 0)} together, dram is {format_size(self.dram)}"
            raise ConfigError(why, field="numa", example="no dram beside near=0:64GiB,far=2:256GiB")
        if not self.numa_offload_low < self.numa_offload_high:
            why = f"{self.numa_offload_low} is not below numa_offload_high, {self.numa_offload_high}"
            raise ConfigError(why, field="numa_offload_low", example="0.80 with numa_offload_high 0.90")
        if not self.numa_move_rate:
            raise ConfigError("nothing would ever move", field="numa_move_rate", example="1GiB")
        if not self.watermark_low < self.watermark_high:
            why = f"{self.watermark_low} is not below watermark_high, {self.watermark_high}"
            raise ConfigError(why, field="watermark_low", example="0.90 with watermark_high 0.95")
        if not self.ssd_offload_low < self.ssd_offload_high:
            why = f"{self.ssd_offload_low} is not below ssd_offload_high, {self.ssd_offload_high}"
            raise ConfigError(why, field="ssd_offload_low", example="0.80 with ssd_offload_high 0.90")
        for folder in self.ssd:
            if folder.size_bytes < SSD_BYTES_MIN:
                why = f"{folder.path} with {format_size(folder.size_bytes)} is less than {format_size(SSD_BYTES_MIN)}"
                raise ConfigError(why, field="ssd", example="/nvme0/umbp:2TiB")
        for name in ("lease_seconds", "reservation_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError("must be longer than zero", field=name, example="10s")
        if self.lease_seconds > self.lease_seconds_max:
            why = f"{self.lease_seconds} s is longer than lease_seconds_max, {self.lease_seconds_max} s"
            raise ConfigError(why, field="lease_seconds", example="10s with lease_seconds_max 300s")
        if self.http.is_unix or self.http.scheme == "https":
            raise ConfigError(f"{self.http} is not host:port (the Unix socket is --socket)", field="http", example="127.0.0.1:0")
        if self.master and not self.advertise and self.http.host in ("0.0.0.0", "::"):
            why = f"other nodes cannot reach {self.http}: say by which address they can"
            raise ConfigError(why, field="advertise", example="10.0.0.7:7411")
        if not (self.http.is_loopback or self.token):
            why = f"{self.http} can be reached from other machines: that needs a token (--token-file or UMBP_TOKEN)"
            raise ConfigError(why, field="http", example="127.0.0.1:0, or --token-file /etc/umbp/token")


OPTIONS: dict[str, Option] = options_of(PoolConfig)
PROGRAM = Program("python -m umbp.pool", "The pool of one node.", OPTIONS, OTHER_VARIABLES, "--dram 64GiB")


def load_pool_config(argv: Sequence[str], environ: Mapping[str, str]) -> PoolConfig:
    """The configuration of one pool process, checked. ``--help`` prints and exits; anything bad is a `ConfigError`."""
    values, warnings = load(PROGRAM, argv, environ)
    name = values.get("name", OPTIONS["name"].default)
    if "socket" not in values:
        values["socket"] = _socket_path(default_socket(name, environ), "socket")
    config = PoolConfig(**values, warnings=tuple(warnings))
    config.validate()
    return config
