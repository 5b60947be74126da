"""A replayer for policies alone: a trace of block ids against a pool of N blocks, with the semantics of the traces' README."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from umbp.policies.base import EvictionPolicy, Inserted, Request


def traces_folder() -> Path:
    """`UMBP_TRACES`, else `shared/traces` beside the repository."""
    return Path(os.environ.get("UMBP_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")


def conversation(path: Path) -> Iterator[tuple[float, list[int], int]]:
    """(seconds, block ids, input tokens) of each request."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            record: dict[str, Any] = json.loads(line)
            yield record["timestamp"] / 1e3, record["hash_ids"], record["input_length"]


def block_hit_ratio(
    policy: EvictionPolicy, capacity: int, requests: Iterator[tuple[float, list[int], int]], *, full_blocks_only: bool = False
) -> float:
    """Share of blocks that were hit: the leading run that is stored when the request comes. Its misses are then inserted."""
    stored: dict[int, int] = {}
    block_of = np.zeros(capacity, np.int64)
    free = list(range(capacity))
    busy = np.zeros(capacity, np.bool_)
    hit_count = block_count = 0
    for now, blocks, input_tokens in requests:
        block_count += len(blocks)
        if full_blocks_only:
            blocks = blocks[: input_tokens // 512]
        ids = np.array([stored.get(block, -1) for block in blocks], np.int32)
        missing = np.flatnonzero(ids < 0)
        hit_count += int(missing[0]) if len(missing) else len(blocks)
        fingerprints = np.array(blocks, np.uint64)
        policy.on_request(Request(now, ids.copy(), fingerprints))
        busy[ids[ids >= 0]] = True
        if len(missing) > len(free):
            gone = policy.victims(lambda candidates: ~busy[candidates], len(missing) - len(free))
            policy.on_removed(gone, evicted=True)
            for entry in gone.tolist():
                del stored[int(block_of[entry])]
                free.append(entry)
        busy[ids[ids >= 0]] = False
        for index in missing.tolist():
            ids[index] = stored[blocks[index]] = free.pop()
            block_of[ids[index]] = blocks[index]
        if len(missing):
            parents = np.concatenate([[-1], ids[:-1]]).astype(np.int32)[missing]
            policy.on_inserted(Inserted(now, ids[missing], parents, fingerprints[missing]))
    return hit_count / block_count
