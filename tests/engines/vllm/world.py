"""vLLM without a model: its scheduler, its connector in both roles and its worker's order of calls, over small KV tensors on the CPU.

`World.step` is one engine step: `Scheduler.schedule`, then vLLM's own `ActiveKVConnector` around a forward pass, then
`KVOutputAggregator` and `Scheduler.update_from_output`; what goes between processes is copied. The forward pass here writes into each block
bytes that follow from the block's prefix, its layer and who holds it; and before a layer is "computed" it looks whether every block of the
prefix is what it must be. What is not must be among the blocks that the step reports as failed: else the step fails.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

BLOCK = 16
VOCABULARY = 1000
CONNECTOR = {"kv_connector": "UMBPStoreConnector", "kv_connector_module_path": "umbp.integrations.vllm"}
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=2 * BLOCK)
GROUPS = {"full": (FULL,), "mla": (MLA,), "hybrid": (FULL, WINDOW)}
LAYERS = 12  # so that the order of their names is not that of the model


@dataclass(frozen=True)
class Options:
    """One engine."""

    pool: str
    kind: str = "full"
    load_async: bool = True
    tp: int = 1
    pp: int = 1
    copies: int = 1  # consecutive ranks that hold the same; of MLA all do
    blocks: int = 32
    policy: str = "recompute"
    events: str = ""  # endpoint of the publisher
    budget: int = 256  # tokens a step
    connector: dict[str, Any] = field(default_factory=lambda: dict(CONNECTOR))
    extra: dict[str, Any] = field(default_factory=dict)
    interleaved: bool = False  # all layers of a block side by side in one tensor


@cache
def model_folder() -> str:
    """A model's configuration, for all engines of this process; gone with it."""
    folder = tempfile.TemporaryDirectory(prefix="umbp-vllm-")
    atexit.register(folder.cleanup)
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    model |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (Path(folder.name) / "config.json").write_text(json.dumps(model))
    return folder.name


def config(options: Options, rank: int) -> VllmConfig:
    events = KVEventsConfig(enable_kv_cache_events=bool(options.events), publisher="zmq", endpoint=options.events or "tcp://*:5557")
    extra = {"umbp_pool": options.pool, "load_async": options.load_async, **options.extra}
    if options.connector == CONNECTOR:
        extra.setdefault("umbp_deadline_seconds", 60.0)  # a busy machine takes its time
    transfer = KVTransferConfig(
        kv_role="kv_both", engine_id="tests", kv_connector_extra_config=extra, kv_load_failure_policy=options.policy, **options.connector
    )
    made = VllmConfig(
        model_config=ModelConfig(model=model_folder(), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, seed=0),
        device_config=DeviceConfig(device="cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=options.tp, pipeline_parallel_size=options.pp, rank=rank, distributed_executor_backend="mp"
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=options.budget, max_model_len=4096, is_encoder_decoder=False
        ),
        kv_transfer_config=transfer,
        kv_events_config=events if options.events else None,
    )
    made.model_config.model = "tests/tiny"  # the folder is another in each process
    made.cache_config.num_gpu_blocks = options.blocks
    return made


def cache_config(options: Options, stage: int = 0) -> KVCacheConfig:
    """Layers are dealt to the groups in turn; layer i of each group shares its memory with layer i of the others, as in vLLM."""
    specs = GROUPS[options.kind]
    held = range(stage * LAYERS // options.pp, (stage + 1) * LAYERS // options.pp)
    groups = [[f"model.layers.{i}.attn" for i in held if i % len(specs) == g] for g in range(len(specs))]
    page, rows = specs[0].page_size_bytes, len(groups[0])
    tensors = []
    for row in range(rows):
        shared = [names[row] for names in groups]
        stride = page * rows if options.interleaved else page
        tensors.append(KVCacheTensor(size=page * options.blocks * rows, layers=shared, layer_stride=page, block_stride=stride))
    made = [KVCacheGroupSpec(names, spec) for names, spec in zip(groups, specs, strict=True)]
    replicas = options.tp if options.kind == "mla" else options.copies
    return KVCacheConfig(num_blocks=options.blocks, kv_cache_tensors=tensors, kv_cache_groups=made, kv_tp_replicas=replicas)


class Worker:
    """One rank: tensors, vLLM's connector in its worker role, and the forward pass."""

    def __init__(self, options: Options, rank: int) -> None:
        self.options, self.rank = options, rank
        self.cache = cache_config(options, rank // options.tp)
        self.groups = [list(group.layer_names) for group in self.cache.kv_cache_groups]
        page, rows = GROUPS[options.kind][0].page_size_bytes, len(self.groups[0])
        self.memory = torch.full((options.blocks * rows * page,), 0xA5, dtype=torch.uint8)
        if options.interleaved:
            planes = list(self.memory.view(options.blocks, rows, page).unbind(1))
        else:
            planes = list(self.memory.view(rows, options.blocks, page).unbind(0))
        self.caches = {name: planes[row] for names in self.groups for row, name in enumerate(names)}
        vllm_config = config(options, rank)
        self.connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, self.cache)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.active = ActiveKVConnector(vllm_config, self.caches)
        self.wrong: set[int] = set()

    def bytes_of(self, layer: str, prefix: bytes) -> torch.Tensor:
        """What a block of this layer holds at the end of this prefix. MLA ranks hold the same."""
        holder = 0 if self.options.kind == "mla" else self.rank % self.options.tp // self.options.copies
        return made_of(layer, holder, prefix, self.caches[layer].shape[1])

    def forward(self, batch: list[tuple[tuple[list[int], ...], list[int], int, int]]) -> None:
        """``batch``: block table of each group, tokens, from, to."""
        self.wrong.clear()
        prefixes = [prefixes_of(tokens, end) for _, tokens, _, end in batch]
        for layer in sorted(self.caches, key=lambda name: int(name.split(".")[2])):
            self.connector.wait_for_layer_load(layer)
            group = next(number for number, names in enumerate(self.groups) if layer in names)
            for (tables, _, start, _), ends in zip(batch, prefixes, strict=True):
                for block, (last, prefix) in zip(tables[group], ends, strict=False):
                    if not block:  # the null block: out of the window
                        continue
                    made = self.bytes_of(layer, prefix)
                    if last > start:
                        self.caches[layer][block] = made
                    elif not torch.equal(self.caches[layer][block], made):
                        self.wrong.add(block)
            self.connector.save_kv_layer(layer, self.caches[layer], None)


def prefixes_of(tokens: list[int], end: int) -> list[tuple[int, bytes]]:
    """For each block up to ``end`` tokens: where it ends, and a digest of all up to there."""
    data, ends = np.array(tokens[:end], np.uint32).tobytes(), [min(at + BLOCK, end) for at in range(0, end, BLOCK)]
    return [(last, hashlib.sha256(data[: 4 * last]).digest()) for last in ends]


@lru_cache(1 << 16)
def made_of(layer: str, holder: int, prefix: bytes, width: int) -> torch.Tensor:
    """Bytes that differ for each layer, holder and prefix."""
    seed = int.from_bytes(hashlib.sha256(prefix + f"{layer} {holder}".encode()).digest()[:8], "little")
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, width, dtype=np.uint8))


@dataclass
class Seen:
    """What the tests look at: by request, how its first steps were scheduled (computed before, scheduled), and what failed."""

    first: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    failed_blocks: set[int] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)


class World:
    """One engine, all ranks in this process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        init_none_hash(sha256)
        vllm_config = config(options, 0)
        self.scheduler = Scheduler(vllm_config, cache_config(options), StructuredOutputManager(vllm_config), block_size=BLOCK)
        self.workers = [Worker(options, rank) for rank in range(options.tp * options.pp)]
        told = {
            divmod(rank, options.tp): copy.deepcopy(worker.connector.get_handshake_metadata()) for rank, worker in enumerate(self.workers)
        }
        if any(told.values()):
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)
        self.aggregator = KVOutputAggregator(options.tp * options.pp)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests: dict[str, Request] = {}
        self.seen = Seen()

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, name: str, tokens: list[int], answers: int = 2) -> None:
        sampling = SamplingParams(max_tokens=answers, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        self.requests[name] = Request(name, tokens, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(self.requests[name])

    def step(self) -> Any:
        """One engine step. Fails if a rank computed on wrong bytes without saying so."""
        out = self.scheduler.schedule()
        batch, spans = [], []
        for name, count in out.num_scheduled_tokens.items():
            request = self.requests[name]
            computed = request.num_computed_tokens - count  # the scheduler has advanced it already
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            batch.append((tables, list(request.all_token_ids), computed, computed + count))
            spans.append((name, tables, computed, count))
            self.seen.first.setdefault(name, []).append((computed, count))
        self.seen.preempted |= set(out.preempted_req_ids or ())
        names = list(out.num_scheduled_tokens)
        ends = [computed + count >= self.requests[name].num_tokens for name, (_, _, computed, count) in zip(names, spans, strict=True)]
        sampled, index = [[7] if end else [] for end in ends], {name: at for at, name in enumerate(names)}
        outputs = []
        if not out.total_num_scheduled_tokens:
            for worker in self._each():
                outputs.append(copy.deepcopy(worker.active.no_forward(copy.deepcopy(out))))
        else:
            for worker in self._each():  # each rank is a process of its own, elsewhere: all of them begin before one is through
                worker.active.pre_forward(copy.deepcopy(out))
            for worker in self._each():
                worker.forward(batch)
                worker.active.finish_forward()
                told = copy.deepcopy(worker.active.post_forward(out.finished_req_ids))
                outputs.append(ModelRunnerOutput(names, index, sampled_token_ids=sampled, kv_connector_output=told))
        for worker, output in zip(self.workers, outputs, strict=True):
            told = output.kv_connector_output
            failed = set(told.invalid_block_ids) if told else set()
            self.seen.failed_blocks |= failed
            self.seen.failed_requests |= set(told.failed_recving or ()) if told else set()
            assert worker.wrong <= failed, f"rank {worker.rank} computed on blocks {sorted(worker.wrong - failed)} that hold something else"
        self.scheduler.update_from_output(out, self.aggregator.aggregate(outputs))
        return out

    def _each(self) -> Iterator[Worker]:
        """The ranks in turn, each as vLLM's current worker."""
        for worker in self.workers:
            kv_transfer_state._KV_CONNECTOR_AGENT = worker.connector
            yield worker

    def run(self, *, seconds: float = 60.0, steps: int = 400) -> None:
        """Until nothing is left to do."""
        deadline = time.monotonic() + seconds
        for _ in range(steps * 50):
            out = self.step()
            if not self.scheduler.has_requests() and not self.scheduler.connector.has_pending_push_work():
                return
            assert time.monotonic() < deadline, f"not done within {seconds} s: {self.scheduler.get_request_counts()}"
            if not out.total_num_scheduled_tokens:
                time.sleep(0.002)  # a transfer is on its way: the engine would poll as well
        raise AssertionError("too many steps")

    def drop(self) -> None:
        """The device's cache is gone, as after a restart."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        for worker in self.workers:
            worker.memory.fill_(0xA5)

    def serve(self, name: str, tokens: list[int], answers: int = 2) -> tuple[int, int]:
        """One request to its end: tokens that it had at its first step, and tokens scheduled in it."""
        self.add(name, tokens, answers)
        self.run()
        return self.seen.first[name][0]


def prompt(seed: int, blocks: int, rest: int = 3) -> list[int]:
    """Tokens of so many full blocks and some more."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, blocks * BLOCK + rest).tolist()
