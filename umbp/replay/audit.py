"""Whether a pool holds exactly what it should when its clients are gone: live objects, and nothing for anybody else."""

from __future__ import annotations

import time
from typing import Any

from umbp.client.http import PoolHttp

QUIET_SECONDS_MAX = 5.0
POLL_SECONDS = 0.05
NOTHING_LEFT = ("leases", "reservations", "leased_bytes", "being_written", "removed_but_leased", "abandoned")


def leaks(status: dict[str, Any]) -> list[str]:
    """What a pool without clients still holds for some, one sentence each. ``status`` is the document of ``/v1/status``."""
    pinned = status["pins"] > 0  # pins count as leased
    found = [f"{name}: {status[name]}" for name in NOTHING_LEFT if status[name] and not (pinned and name == "leased_bytes")]
    listed = sum(space["keys"] * space["object_bytes"] for space in status["namespaces"])
    if status["namespaces_total"] == len(status["namespaces"]) and status["used_bytes"] != listed:
        found.append(f"used_bytes: {status['used_bytes']}, but the live objects have {listed}")
    return found


def wait_quiet(pool: PoolHttp, sessions_before: int) -> tuple[dict[str, Any], list[str]]:
    """The status when our clients are gone and nothing leaks, or after `QUIET_SECONDS_MAX`; and what leaks then.

    Where other clients are connected what they hold cannot be told apart: nothing is said of leaks then.
    """
    deadline = time.monotonic() + QUIET_SECONDS_MAX
    while True:
        status = pool.get("/v1/status")
        ours = status["sessions"] - sessions_before
        found = [f"sessions: {ours} of ours are still there"] if ours > 0 else []
        if status["sessions"] == 0:
            found = leaks(status)
        if not found or time.monotonic() > deadline:
            return status, found
        time.sleep(POLL_SECONDS)
