"""Where an SGLang worker stands: what the user configured, whose KV it holds, and with which other ranks it shares a pool.

Ranks that hold the same KV and run on one node form a group for loads and offloads. Which ranks these are follows from SGLang's placement:
the ranks of an engine are dealt to its nodes in order, the same number to each. The group's name must be this launch's alone, as another
engine with the same model may use the same pool: it is a random number under a key of this group, node and pool in the store by which
torch's process groups have found each other. The first rank to ask sets it. That is no collective: nobody waits for another rank, and none
of the engine's communication is entered. A rank that is mistaken about others (another placement, another pool) is in a group that some
never join, which costs exchange and no page. A pool that restarts keeps its groups' names.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import select_kv_publisher_dp_rank
from sglang.srt.runtime_context import get_parallel

from umbp.client import Namespace, Pool
from umbp.errors import InvalidRequest
from umbp.grammar import parse_size
from umbp.integrations.sglang_identity import revision_of
from umbp.integrations.sglang_pools import Bundle
from umbp.loader import Group

log = logging.getLogger("umbp.integrations.sglang")
SETTINGS_EXAMPLE = '{"pool": "/tmp/umbp-0/default.sock", "tenant": "team-a"}'
RANGES = {
    "deadline_seconds": (0.01, 3600.0),
    "protect_seconds": (0.001, 60.0),
    "hold_seconds": (0.0, 60.0),
    "copy_threads": (1, 64),
    "meet_seconds": (0.0, 1.0),
    "patience_seconds": (0.001, 60.0),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """``linker_extra_config``, all of it optional.

    ``pool``: the pool's socket. ``model``, ``revision``, ``tenant``, ``salt``: parts of the identity; model and revision come from SGLang's
    arguments. ``group``: whether ranks with the same KV load together. ``staging``: segment memory a rank for that. ``deadline_seconds``:
    a load that takes longer has failed. ``protect``: ``load`` or ``lookup``, when pages are leased (`umbp.integrations.sglang_leases`), and
    ``protect_seconds``: how long the scheduler waits for it.
    ``copy_threads``: cores of a rank that copy. ``prefetch``: whether pages on the SSD or on other nodes are sent for when a request first
    asks, and ``hold_seconds``: how long they are kept for it. ``meet_seconds``, ``patience_seconds``: how long a rank waits for the others
    at the start of a load, and for a sign of them later, before it does without. ``events``: where rank 0 publishes what the pool holds,
    as ``tcp://*:5560``, with ``events_replay`` and ``events_topic``; a data parallel rank takes the port that much higher.
    ``flush_on_reset``: whether SGLang's reset (a flush of its cache, as with every live update of weights) empties the namespaces.
    """

    pool: str | None = None
    model: str | None = None
    revision: str | None = None
    tenant: str | None = None
    salt: str | None = None
    group: bool = True
    staging: str = "64MiB"
    deadline_seconds: float = 10.0
    protect: str = "load"
    protect_seconds: float = 0.1
    copy_threads: int | None = None
    prefetch: bool = True
    hold_seconds: float = 2.0
    meet_seconds: float = 0.005
    patience_seconds: float = 0.02
    events: str | None = None
    events_replay: str | None = None
    events_topic: str = ""
    flush_on_reset: bool = False

    @classmethod
    def of(cls, extra_config: Any) -> Settings:
        """Check it. InvalidRequest names the key."""
        values = dict(extra_config or {})
        known = {field.name: field for field in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise InvalidRequest(
                    f"unknown key {name!r}; there are {', '.join(known)}", field="linker_extra_config", example=SETTINGS_EXAMPLE
                )
            default = known[name].default
            if value is None and default is None:
                continue
            kinds = (bool,) if isinstance(default, bool) else (int, float) if name in RANGES else (str,)
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
                raise InvalidRequest(f"{value!r} is of the wrong kind", field=f"linker_extra_config.{name}", example=SETTINGS_EXAMPLE)
        settings = cls(**values)
        if settings.protect not in ("load", "lookup"):
            raise InvalidRequest(f"{settings.protect!r} is neither load nor lookup", field="linker_extra_config.protect", example="load")
        for name, (low, high) in RANGES.items():
            number = getattr(settings, name)
            if number is not None and not low <= number <= high:
                raise InvalidRequest(f"{number} is outside {low} .. {high}", field=f"linker_extra_config.{name}", example=str(low))
        return settings

    @property
    def staging_bytes(self) -> int:
        """``staging`` as a number."""
        return parse_size(self.staging, "linker_extra_config.staging")


@dataclass(frozen=True, slots=True)
class Place:
    """One worker among the ranks of its attention group, context-parallel group and pipeline."""

    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    pp_rank: int
    pp_size: int
    peers: int
    cpu_group: Any

    @classmethod
    def of(cls, params: Any) -> Place:
        """From SGLang's parameters of the cache."""
        group = params.attn_tp_cache_group or params.tp_cache_group
        there = group is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank(group) if there else 0
        world = torch.distributed.get_world_size(group) if there else 1
        groups = (params.tp_cache_group, params.attn_tp_cache_group, params.attn_cp_cache_group, params.pp_cache_group)
        peers = max([torch.distributed.get_world_size(each) for each in groups if there and each is not None], default=1)
        return cls(rank, world, params.attn_cp_rank, params.attn_cp_size, params.pp_rank, params.pp_size, peers, group if there else None)

    @property
    def alone(self) -> bool:
        """Whether no other rank has to take the same decisions as this one."""
        return self.tp_size == self.cp_size == self.pp_size == self.peers == 1

    @property
    def first(self) -> bool:
        """Whether this is the one rank of an independent cache that speaks for it."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0

    def neighbours(self, boot: int, nodes: int) -> tuple[str, list[int]]:
        """A name that the ranks of this attention group on this node share, and these ranks, ascending. ``nodes``: the engine's."""
        alone = f"sglang-{secrets.token_hex(8)}", [self.tp_rank]
        if self.cpu_group is None or self.tp_size == 1:
            return alone
        try:
            ranks = torch.distributed.get_process_group_ranks(self.cpu_group)
            a_node = max(1, torch.distributed.get_world_size() // max(1, nodes))
            node = ranks[self.tp_rank] // a_node
            machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
            pool = hashlib.sha256(machine + boot.to_bytes(8, "little")).hexdigest()[:16]
            store = torch.distributed.distributed_c10d._get_default_store()
            found = store.compare_set(f"umbp/{pool}/{node}/{'.'.join(map(str, ranks))}", "", secrets.token_hex(8))
        except Exception as error:  # noqa: BLE001 - whatever torch's store says: it is no reason not to start
            log.warning("ranks cannot meet, and load alone: %s", error)
            return alone
        return f"sglang-{bytes(found).decode()}", [rank for rank, each in enumerate(ranks) if each // a_node == node]

    def group(self, name: str, near: list[int], settings: Settings, staging_bytes: int) -> Group | None:
        """This rank's place in the group of those that share its pool; None if it is the only one."""
        if len(near) == 1:
            return None
        return Group(
            name,
            near.index(self.tp_rank),
            len(near),
            staging_bytes=staging_bytes,
            meet_seconds=settings.meet_seconds,
            patience_seconds=settings.patience_seconds,
        )


def data_parallel_rank() -> int:
    """Which of SGLang's independent caches this one is, as its own events count them."""
    parallel = get_parallel()
    try:
        return int(select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank))
    except (AttributeError, AssertionError, RuntimeError, ValueError):  # not set, as where there is one cache only
        return 0


def open_namespace(pool: Pool, bundle: Bundle, settings: Settings, place: Place, server_args: Any, page_tokens: int) -> Namespace:
    """The namespace of a bundle: the model, what its weights and arguments are, and the rank where its KV differs from others'."""
    model = settings.model or getattr(server_args, "model_path", None)
    if not isinstance(model, str) or not model:
        raise InvalidRequest("SGLang's arguments name no model", field="linker_extra_config.model", example="deepseek-v4-pro")
    revision = revision_of(server_args) if settings.revision is None else settings.revision
    ranks: dict[str, Any] = {} if bundle.replicated else {"tp_rank": place.tp_rank, "tp_size": place.tp_size}
    return pool.namespace(
        model=model[-256:],
        revision=revision,
        page_tokens=page_tokens,
        layout=bundle.layout,
        replicated=bundle.replicated,
        tenant=settings.tenant,
        salt=settings.salt,
        pp_rank=place.pp_rank,
        pp_size=place.pp_size,
        cp_rank=place.cp_rank,
        cp_size=place.cp_size,
        **ranks,
    )
