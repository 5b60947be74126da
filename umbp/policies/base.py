"""What an eviction or admission policy is, and how one of any kind is found by name.

Theory of operation. The pool names every stored object by a dense entry id (int32, below `capacity`); ids are reused after
removal. A policy keeps what it likes in arrays of that size or in queues of ids, and is told in batches: one call for a whole
request or put. It never sees bytes, keys or clocks; `now` is in seconds and only grows. `victims` is a peek: asking twice gives
the same answer. The pool evicts (all, some or none of) what was offered and then says so by `on_removed`, which is where hands
move and ghosts are made.

Chain order: the ids of one call are pages of one sequence, root first, and distinct. A parent is the page before. A key names its
whole prefix, so a page never changes its parent while it is stored.

A policy never loses an id and never refuses an eviction: whatever order of calls came before, ids of a request or a removal that
are not live are ignored, an insert of a live id makes it a new page, and `victims` finally offers every live id that is eligible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from umbp.errors import ConfigError, NotFound
from umbp.types import I32, U64, Mask

EVICTION = "eviction"
ADMISSION = "admission"
ROUTING = "routing"  # these five are the master's: see `umbp.policies.cluster`
PLACEMENT = "placement"
REPLICATION = "replication"
REBALANCING = "rebalancing"
CLUSTER_EVICTION = "cluster_eviction"
CLEANING = "cleaning"  # these two are the SSD tier's: see the files of their names
STRIPING = "striping"
CHOSEN_MAX = 512  # pages that are chosen together to go down a level: a pass over a policy's order is worth that many
CLUSTER_KINDS = (ROUTING, PLACEMENT, REPLICATION, REBALANCING, CLUSTER_EVICTION)
KINDS = (EVICTION, ADMISSION, CLEANING, STRIPING, *CLUSTER_KINDS)
SSD_KINDS = {"ssd_eviction": EVICTION, "ssd_admission": ADMISSION, "ssd_cleaning": CLEANING, "ssd_striping": STRIPING}
CHOICES = (EVICTION, ADMISSION, *SSD_KINDS, *CLUSTER_KINDS)  # what an operator chooses by name; the same kind may be chosen for each tier

Eligible = Callable[[I32], Mask]
"""Given live entry ids, shape (n,): which may be evicted now (not leased, pinned or just acknowledged, in the namespace at stake).

A policy may ask several times in one `victims`, and about more ids than it was asked for."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """Objects that became visible, in chain order.

    ``ids`` (n,) int32; ``parents`` (n,) int32, the entry id of the page before, -1 where unknown or not stored;
    ``fingerprints`` (n,) uint64, a hash of (namespace, key) that survives eviction.
    """

    now: float
    ids: I32
    parents: I32
    fingerprints: U64


@dataclass(frozen=True, slots=True)
class Request:
    """One request's whole key list, in chain order, from the root on. Both arrays have shape (n,).

    ``ids`` has -1 where the key was not stored when it was asked for; ``fingerprints`` has them all. A request is told before the
    insert of what it missed, or else with -1 for it: a page that this very request led to putting was not used a second time.
    ``conversation`` is a number of the session that asked, 0 where it is not known.
    """

    now: float
    ids: I32
    fingerprints: U64
    conversation: int = 0


class EvictionPolicy(Protocol):
    """Chooses what goes when room is needed. Built as ``Policy(capacity)`` with the number of entry ids."""

    def on_inserted(self, event: Inserted) -> None:
        """Objects were committed."""

    def on_request(self, event: Request) -> None:
        """A client asked for these keys: the access history."""

    def victims(self, eligible: Eligible, count: int) -> I32:
        """Up to ``count`` distinct eligible ids, the one to go first in front. Fewer only if no more are eligible. A peek."""

    def on_removed(self, ids: I32, *, evicted: bool) -> None:
        """These are gone: by eviction (``evicted``), or by remove, flush or a bad checksum. Their ids may come back for others."""


class AdmissionPolicy(Protocol):
    """Chooses which new pages are worth storing. Built as ``Policy(capacity)``."""

    def on_request(self, event: Request) -> None:
        """A client asked for these keys."""

    def admit(self, now: float, fingerprints: U64, *, fill: float) -> Mask:
        """Which of these new pages to store; ``fill`` is the used share of the pool, 0 to 1. A peek."""


_T = TypeVar("_T")
_registry: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> Callable[[type[_T]], type[_T]]:
    """Class decorator: makes a policy known under ``name``. Another package uses an entry point, group ``umbp.policies.KIND``."""
    if kind not in _registry:
        raise NotFound(f"no policy kind {kind!r}, only {', '.join(KINDS)}", field="kind")

    def enter(cls: type[_T]) -> type[_T]:
        _registry[kind][name] = cls
        return cls

    return enter


def names(kind: str) -> list[str]:
    """Names that can be chosen, ours and those of installed packages, sorted."""
    return sorted(_registry[kind].keys() | {point.name for point in entry_points(group=f"umbp.policies.{kind}")})


def find(kind: str, name: str, field: str = "") -> Any:
    """The class registered under this name. NotFound names those that exist; ``field``: the option it is of, where that is not the kind."""
    if name in _registry[kind]:
        return _registry[kind][name]
    for point in entry_points(group=f"umbp.policies.{kind}"):
        if point.name == name:
            try:
                return point.load()
            except Exception as error:
                raise ConfigError(f"the {kind} policy {name!r} cannot be loaded from {point.value}: {error!r}", field=kind) from error
    raise NotFound(f"no {kind} policy {name!r}; there are: {', '.join(names(kind))}", field=field or kind, example=names(kind)[0])


def build(kind: str, name: str, *capacity: int) -> Any:
    """A policy by name; one of the pool is for so many entry ids. ConfigError if one of another package does not let itself be made."""
    made = find(kind, name)
    try:
        return made(*capacity)
    except Exception as error:
        raise ConfigError(f"the {kind} policy {name!r} cannot be made: {error!r}", field=kind) from error
