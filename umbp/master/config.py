"""The one frozen configuration of a master process. How it comes from a file, the environment and flags is `umbp.options`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbp.config import OPTIONS as POOL_OPTIONS
from umbp.config import OTHER_VARIABLES
from umbp.errors import ConfigError
from umbp.grammar import Address, parse_address, parse_duration, parse_size, quoted
from umbp.options import Program, choice, count, load, node_name, option, options_of, path, policy_name, token


def _store(text: str, field: str) -> str:
    bare = text.strip()
    if bare == "embedded" or bare.startswith(("redis://", "rediss://", "unix://")):
        return bare
    raise ConfigError(f"{quoted(text)} is neither embedded nor the URL of a Redis", field=field, example="redis://10.0.0.1:6379/0")


def _rate(text: str, field: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text.strip().removesuffix("/s"), field)


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """Everything a master process is told. Durations are seconds, sizes bytes."""

    name: str = option("Master", node_name, "master", "master-a", "name of this master, for logs and for the other masters")
    config: str = option("Master", path, "", "/etc/umbp/master.toml", "TOML file with any of these options")
    keys_max: int = option("Master", count(1024, 1 << 31), "16777216", "16777216", "keys the directory holds; 95 bytes each as they come")
    http: Address = option("Listening", parse_address, "127.0.0.1:7410", "0.0.0.0:7410", "REST, pools and metrics; port 0: any free one")  # noqa: RUF009
    advertise: Address | None = option("Listening", parse_address, "", "10.0.0.1:7410", "how pools reach this master [http]", None)  # noqa: RUF009
    token: str = option("Access", token, "", "TOKEN", "token of all HTTP calls, the pools' too; better by UMBP_TOKEN")
    token_file: str = option("Access", path, "", "/etc/umbp/token", "file whose only line is the token")
    store: str = option("Store", _store, "embedded", "redis://10.0.0.1:6379/0", "embedded, or the Redis that several masters share")
    heartbeat: float = option("Members", parse_duration, "1s", "1s", "how often a pool says that it lives")
    suspect_after: float = option("Members", parse_duration, "3s", "3s", "silence after which a pool is not used as a source")
    dead_after: float = option("Members", parse_duration, "10s", "10s", "silence after which its keys are forgotten")
    routing: str = option("Policies", policy_name, "fastest", "fastest", "who serves which page")
    placement: str = option("Policies", policy_name, "local_first", "most_available", "where new pages go")
    replication: str = option("Policies", policy_name, "none", "hot_prefixes", "which pages get further copies")
    rebalancing: str = option("Policies", policy_name, "none", "even_fill", "which nodes give pages to others")
    cluster_eviction: str = option("Policies", policy_name, "spare_and_cold", "spare", "what nearly full nodes keep, and let go first")
    advice_bandwidth: int = option("Policies", _rate, "256MiB", "1GiB", "bytes a second that may be copied by advice; 0: none")
    log_level: str = option("Logging", choice("debug", "info", "warning", "error"), "info", "info", "debug, info, warning, error")
    log_format: str = option("Logging", choice("text", "json"), "text", "json", "text or json lines")
    warnings: tuple[str, ...] = ()  # what was odd but no error; for the log and /readyz

    def validate(self) -> None:
        """The relations between fields."""
        if not 0 < self.heartbeat < self.suspect_after < self.dead_after:
            why = f"{self.heartbeat} s, {self.suspect_after} s and {self.dead_after} s are not heartbeat < suspect_after < dead_after"
            raise ConfigError(why, field="suspect_after", example="3s with heartbeat 1s and dead_after 10s")
        if self.http.is_unix or self.http.scheme == "https":
            raise ConfigError(f"{self.http} is not host:port", field="http", example="127.0.0.1:7410")
        if not (self.http.is_loopback or self.token):
            why = f"{self.http} can be reached from other machines: that needs a token (--token-file or UMBP_TOKEN)"
            raise ConfigError(why, field="http", example="127.0.0.1:7410, or --token-file /etc/umbp/token")


OPTIONS = options_of(MasterConfig)
_OF_POOLS = frozenset("UMBP_" + name.upper() for name in POOL_OPTIONS if name not in OPTIONS)  # one environment for both
PROGRAM = Program("python -m umbp.master", "The master of a cluster.", OPTIONS, OTHER_VARIABLES | _OF_POOLS, "--http 127.0.0.1:7410")


def load_master_config(argv: Sequence[str], environ: Mapping[str, str]) -> MasterConfig:
    """The configuration of one master process, checked. ``--help`` prints and exits; anything bad is a `ConfigError`."""
    values, warnings = load(PROGRAM, argv, environ)
    config = MasterConfig(**values, warnings=tuple(warnings))
    config.validate()
    return config
