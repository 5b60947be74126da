"""The worker's half of `umbp.integrations.vllm_offloading`: jobs of blocks between vLLM's tensors and the pool, which do not fail.

A load that misses blocks is started again for those, until they are there or `RETRY_SECONDS` are over. Then `LoadFailed` is raised into
vLLM, whose worker stops: it has no other way to keep a request from computing on what is not there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker, TransferResult, get_offload_block_hash, get_offload_group_idx

from umbp.client import Namespace, Pool
from umbp.errors import InvalidRequest, UmbpError
from umbp.integrations.vllm_blocks import BlockGroup, Engine, page_keys_of
from umbp.loader import Group, Load, Loader, Offload
from umbp.types import I64, U8

RETRY_SECONDS = 30.0  # a pool that is killed is started again by whoever runs it, and takes its memory over within seconds
PAUSE_SECONDS = 0.05
STORE_SECONDS = 0.05  # a store whose blocks are wanted back is waited for so long: a pool that is well needs less


class LoadFailed(UmbpError):
    """Blocks that were promised cannot be had, and vLLM's offloading connector has no word for that."""

    code = "load_failed"


@dataclass
class Blocks(LoadStoreSpec):  # type: ignore[misc] # vLLM has no types here
    """Blocks of the pool, by vLLM's keys; of those to be stored the hash before the first one of each group."""

    keys: list[bytes]
    parents: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """What one loader does for a job."""

    loader: Loader
    keys: U8
    slots: I64
    handle: Load | Offload


@dataclass(slots=True)
class Job:
    """One of vLLM's jobs."""

    started: float
    size_bytes: int
    parts: list[Part]
    again_at: float = 0.0

    def over(self, now: float, *, wait: bool, stores_until: float = 0.0) -> bool:
        """Whether all of it is done; loads that missed something are started again. LoadFailed when that has gone on for too long.

        ``wait``: for loads until they are over, for stores until that time; what the pool has not taken by then is not stored.
        """
        done = True
        for part in self.parts:
            if isinstance(part.handle, Offload):
                if wait and not part.handle.wait(max(0.0, stores_until - time.monotonic())):
                    part.handle.cancel()
                done &= part.handle.done
            elif not (wait or part.handle.over):
                done = False
            elif len(missing := part.handle.finish().missing):
                done = False
                self._again(part, missing, now)
        return done

    def _again(self, part: Part, missing: I64, now: float) -> None:
        if now < self.again_at:
            return
        assert isinstance(part.handle, Load)
        if now > self.started + RETRY_SECONDS:
            raise LoadFailed(
                f"{len(missing)} blocks that were held for a load cannot be had since {RETRY_SECONDS:g} s "
                f"({part.handle.finish().reason}): the engine stops, as it could only compute on wrong bytes"
            )
        self.again_at = now + PAUSE_SECONDS
        part.keys, part.slots = part.keys[missing], part.slots[missing]
        part.handle = part.loader.load(part.keys, part.slots, noted=True)


class Mover(OffloadingWorker):  # type: ignore[misc]
    """One rank. Used by one thread of vLLM's."""

    def __init__(self, pool: Pool, kv_caches: Any, groups: Iterable[Any]) -> None:
        self._pool = pool
        self._planes: dict[int, list[torch.Tensor]] = {}
        self.groups: list[BlockGroup] = []
        for config, refs in zip(groups, kv_caches.group_data_refs, strict=True):
            planes = [kv_caches.tensors[ref.tensor_idx].tensor.view(torch.uint8)[:, : ref.page_size_bytes] for ref in refs]
            sizes = tuple(int(ref.page_size_bytes) for ref in refs)
            self._planes[config.group_id] = planes
            self.groups.append(BlockGroup(config.group_id, (), sizes, config.tokens_per_block))
        self._loaders: dict[int, Loader] = {}
        self._jobs: dict[int, Job] = {}
        self._device = next(iter(self._planes.values()))[0].device

    def open(self, namespaces: Mapping[int, Namespace], engine: Engine, engine_id: str, rank: int) -> None:
        """Before the first job."""
        for number, namespace in namespaces.items():
            ranks = Group(f"vllm {engine_id} {number}", rank, engine.tp_size) if engine.replicated else None
            self._loaders[number] = Loader(namespace, {"kv": self._planes[number]}, ranks)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Blocks) -> bool:
        """Start to store blocks, after all that was given to the device so far."""
        parts = []
        for number, keys, slots in _by_group(dst_spec.keys, src_spec.block_ids):
            loader, parent = self._loaders[number], dst_spec.parents.get(number)
            before = page_keys_of([parent]).tobytes() if parent is not None else None
            parts.append(Part(loader, keys, slots, loader.offload(keys, slots, after=self._ready(), parent=before)))
        self._jobs[job_id] = self._job(parts)
        return True

    def submit_load(self, job_id: int, src_spec: Blocks, dst_spec: Any, expedited: bool = False) -> bool:
        """Start to load blocks."""
        parts = []
        for number, keys, slots in _by_group(src_spec.keys, dst_spec.block_ids):
            loader = self._loaders[number]
            parts.append(Part(loader, keys, slots, loader.load(keys, slots, after=self._ready(), noted=True)))
        self._jobs[job_id] = self._job(parts)
        return True

    def get_finished(self) -> list[Any]:
        """Jobs that are over since the last call. LoadFailed: see above."""
        now, results = time.monotonic(), []
        for job_id, job in list(self._jobs.items()):
            if job.over(now, wait=False):
                del self._jobs[job_id]
                results.append(TransferResult(job_id, True, job.size_bytes, max(1e-9, now - job.started)))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Until these are over, stores that the pool does not answer within a moment cut short; `get_finished` names them."""
        until = time.monotonic() + STORE_SECONDS
        for job_id in job_ids:
            while job_id in self._jobs and not self._jobs[job_id].over(time.monotonic(), wait=True, stores_until=until):
                time.sleep(PAUSE_SECONDS)

    def shutdown(self) -> None:
        """Wait for what is on its way, and let go of the pool."""
        for loader in self._loaders.values():
            loader.close()
        self._pool.close()

    def _job(self, parts: list[Part]) -> Job:
        return Job(time.monotonic(), sum(len(part.keys) * part.loader.namespace.object_bytes for part in parts), parts)

    def _ready(self) -> Any:
        """Something to wait for before blocks are touched: the device may be using them still. None on a CPU."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


def _by_group(keys: list[bytes], block_ids: Any) -> list[tuple[int, U8, I64]]:
    """(group, hashes, block ids); vLLM names keys and blocks in the same order."""
    if len(keys) != len(block_ids):
        raise InvalidRequest(f"{len(keys)} keys for {len(block_ids)} blocks", field="block_ids", example="one block a key")
    numbers = np.fromiter(map(get_offload_group_idx, keys), np.int64, len(keys))
    parts = []
    for number in dict.fromkeys(numbers.tolist()):
        which = np.flatnonzero(numbers == number)
        hashes = page_keys_of([get_offload_block_hash(keys[index]) for index in which.tolist()])
        parts.append((int(number), hashes, np.asarray(block_ids)[which].astype(np.int64)))
    return parts
