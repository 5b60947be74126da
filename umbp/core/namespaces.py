"""A namespace that a pool has in use, and the digests of numbers that were in use a while ago."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from umbp.core.objects import Account

NUMBERS_MAX = 1 << 18  # 30 MB


@dataclass(slots=True)
class NamespaceState:
    """A namespace in use: its text identity, its account, and which sessions have it open."""

    digest: bytes
    canonical: bytes
    account: Account
    sessions: dict[int, None] = field(default_factory=dict)


def remember(digests: dict[int, bytes], namespaces: Mapping[int, NamespaceState], number: int, digest: bytes) -> None:
    """Enter a number: what happened under it may be told to a master when it is no one's any more. The oldest unused ones go."""
    digests[number] = digest
    if len(digests) > NUMBERS_MAX:
        used = {state.account.number for state in namespaces.values()}
        for old in [old for old in list(digests)[: NUMBERS_MAX // 2] if old not in used]:
            del digests[old]
